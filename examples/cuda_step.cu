// The smallest step on a device: rows, queries and outputs are in memory that it reads and writes.
#include <cstdio>
#include <freekv/freekv.cuh>
#include <vector>

namespace fk = freekv;
using pipeline = fk::retrieval_pipeline<fk::kv_shape<fk::half, 64>, fk::page_size<16>, fk::cuda_backend>;

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;  // skipped
  // An engine has streams of its own.
  fk::device::owned_stream compute, recall;
  fk::device::pinned_memory slow;
  fk::device::device_memory fast;
  fk::cuda_backend backend(compute.get(), recall.get());
  pipeline retrieval({.model = {.layers = 2, .query_heads = 4, .kv_heads = 2},
                      .budget = {.sink = 16, .window = 32, .selected_units = 2},
                      .capacity = {.max_tokens = 256}},
                     backend, {&slow, &fast});
  const fk::sequence_id sequence = retrieval.open();

  std::pmr::vector<float> k(200 * 2 * 64, 0.1f, &slow), v(k, &slow), q(4 * 64, 0.1f, &slow), out(q, &slow);
  auto prompt = retrieval.begin_step({{sequence, 200, fk::step_phase::prefill}});
  for (int layer = 0; layer < 2; ++layer) prompt.append<float>(layer, {.keys = k, .values = v});
  prompt.end();
  retrieval.synchronize();

  k.resize(2 * 64), v.resize(2 * 64);
  for (int token = 0; token < 4; ++token) {
    auto step = retrieval.begin_step({{sequence}});
    for (int layer = 0; layer < 2; ++layer) {
      step.append<float>(layer, {.keys = k, .values = v, .queries = q});  // queued on compute
      step.attend(layer, out);  // the next selection and its recall go on behind it, on recall
    }
    step.end();
  }
  retrieval.synchronize();
  std::printf("%s: %g\n", retrieval.name().c_str(), out[0]);
  return out[0] > 0.0999f && out[0] < 0.1001f ? 0 : 1;  // all values are 0.1
}
