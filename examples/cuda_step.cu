// An engine on a device: prompts in steps that are begun, decode steps of a graph captured once, for
// sequences that come and go. Rows, queries and outputs are in memory that the device reads and writes.
#include <cstdio>
#include <freekv/freekv.cuh>
#include <vector>

namespace fk = freekv;
using pipeline = fk::retrieval_pipeline<fk::kv_shape<fk::half, 64>, fk::page_size<16>, fk::cuda_backend>;
constexpr int layers = 2, query_heads = 4, kv_heads = 2, batch = 4;

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;  // skipped
  // An engine has streams of its own.
  fk::device::owned_stream compute, recall;
  fk::device::pinned_memory slow;
  fk::device::device_memory fast;
  fk::cuda_backend backend(compute.get(), recall.get());
  pipeline retrieval({.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads},
                      .budget = {.sink = 16, .window = 32, .selected_units = 2},
                      .capacity = {.max_tokens = 256, .max_sequences = batch}},
                     backend, {&slow, &fast});
  // Rows of a step, as many as the graph takes, or a prompt's.
  std::pmr::vector<float> k(100 * kv_heads * 64, 0.1f, &slow), v(k, &slow);
  std::pmr::vector<float> q(batch * query_heads * 64, 0.1f, &slow), out(q.size(), 0.0f, &slow);
  const auto join = [&] {  // a sequence, with a prompt
    const fk::sequence_id sequence = retrieval.open();
    auto prompt = retrieval.begin_step({{sequence, 100, fk::step_phase::prefill}});
    for (int layer = 0; layer < layers; ++layer) prompt.append<float>(layer, {.keys = k, .values = v});
    prompt.end();
    return sequence;
  };

  // A decode step that is begun.
  const fk::sequence_id sequence = join();
  auto step = retrieval.begin_step({{sequence}});
  for (int layer = 0; layer < layers; ++layer) {
    step.append<float>(layer, {.keys = k, .values = v, .queries = q});  // queued on compute
    step.attend(layer, out);  // the next selection and its recall go on behind it, on recall
  }
  step.end();

  // Once: the graph of a step.
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cudaStreamBeginCapture(compute.get(), cudaStreamCaptureModeThreadLocal);
  auto captured = retrieval.begin_captured_step({.entries = batch});  // sequences at most
  for (int layer = 0; layer < layers; ++layer) {
    // here the model's kernels make the layer's k, v and q
    captured.append<float>(layer, {.keys = k, .values = v, .queries = q});
    captured.attend(layer, out);
  }
  captured.end();
  cudaStreamEndCapture(compute.get(), &graph);
  fk::device::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");

  std::vector<fk::step_input> running{{sequence}};  // a row each
  for (int token = 1; token < 24; ++token) {
    if (token % 4 == 0) {  // one joins, and the oldest leaves where there are as many as the graph takes
      if (running.size() == batch)
        retrieval.release(running.front().sequence), running.erase(running.begin());
      running.push_back({join()});
    }
    // Each step: its sequences, which may be fewer than the graph takes, and a launch.
    while (!retrieval.plan(running)) retrieval.wait();
    fk::device::check(cudaGraphLaunch(replay, compute.get()), "cudaGraphLaunch");
  }
  retrieval.synchronize();
  std::printf("%s: %g\n", retrieval.name().c_str(), out.back());
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  return out.back() > 0.0999f && out.back() < 0.1001f ? 0 : 1;  // all values are 0.1
}
