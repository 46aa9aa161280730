// A decode step of one layer of Llama-3.1-8B's shape on a device: BF16, head_dim 128, 32 query heads of 8 KV
// heads, pages of 32 tokens, 512 sink and 512 window tokens and 32 selected pages.
//
//   step CONTEXT [STEPS 4] [SIMILARITY 0.95] [BATCH 1] [SUMMARY min_max]
//
// SUMMARY: min_max, key_subspace or key_codes; the data of the last two are random. The last step fills a
// page.
//
// SIMILARITY is the cosine of a head's query with that of the step before: above 0.9 no head is flagged,
// below all are. On a GPU it prints what a step takes, from its begin to its end; an interpreter's times mean
// nothing. What lies before the steps, the prompt and two steps, is outside of the profiler's range.
//
// Exit status: 0 all right, 2 wrong arguments, 77 no device.
#include <cuda_profiler_api.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <freekv/core/size.hpp>
#include <freekv/freekv.cuh>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace freekv;

constexpr int head_dim = 128, query_heads = 32, kv_heads = 8, page_tokens = 32, chunk = 1024, warm_up = 2;
constexpr std::size_t kv_row = kv_heads * head_dim, query_row = query_heads * head_dim;
template <class Summary>
using pipeline_of = retrieval_pipeline<kv_shape<bfloat16, head_dim>, cuda_backend, page_size<page_tokens>,
                                       Summary, cosine_drift, every_layer<layer_kind::retrieval>>;

/// Memory of the device, or page-locked.
template <class T, class Resource>
struct array {
  Resource from;
  std::size_t bytes;
  T* data;
  explicit array(std::size_t n) : bytes(n * sizeof(T)), data(static_cast<T*>(from.allocate(bytes))) {}
  array(const array&) = delete;
  array& operator=(const array&) = delete;
  ~array() { from.deallocate(data, bytes); }
};
template <class T>
using in_device = array<T, device::device_memory>;
template <class T>
using pinned = array<T, device::pinned_memory>;

void upload(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  device::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
}

/// A summary, and random numbers for it in the device's memory.
template <class Summary>
struct summary_with_data {
  std::vector<float> numbers;
  in_device<float> data;
  explicit summary_with_data(std::size_t n) : data(std::max<std::size_t>(n, 1)) {
    std::mt19937 engine(7);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    for (std::size_t i = 0; i < n; ++i) numbers.push_back(normal(engine));
    upload(data.data, numbers.data(), n * sizeof(float), nullptr);
    device::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  }
  Summary get() const;
};
using subspace = key_subspace<24, 3>;
using codes = key_codes<6, 8>;
constexpr key_codebooks books{nullptr, 1, kv_heads, head_dim, 8, 4, 6, 5};
template <>
min_max summary_with_data<min_max>::get() const {
  return {};
}
template <>
subspace summary_with_data<subspace>::get() const {
  return {.basis = {data.data, 1, kv_heads, 24, head_dim}};
}
template <>
codes summary_with_data<codes>::get() const {
  key_codebooks mine = books;
  mine.data = data.data;
  return {.books = mine};
}

template <class Summary>
void run(int context, int steps, float similarity, int batch, std::size_t floats) {
  using pipeline_type = pipeline_of<Summary>;
  const summary_with_data<Summary> summary(floats);
  typename pipeline_type::settings s;
  s.summary = summary.get();
  s.model = {.layers = 1, .query_heads = query_heads, .kv_heads = kv_heads};
  s.budget = {.sink = 512, .window = 512, .selected_units = 1024 / page_tokens};
  s.capacity.max_tokens = context + steps + warm_up;
  s.capacity.max_sequences = batch;
  device::owned_stream compute, recall;
  cuda_backend backend(compute.get(), recall.get());
  device::device_memory fast;
  device::pinned_memory slow;
  pipeline_type pipeline(s, backend, {&slow, &fast});

  std::mt19937 engine(42);
  std::normal_distribution<float> normal;
  const std::size_t most = std::max<std::size_t>(chunk, to_size(batch));
  pinned<bfloat16> rows(2 * most * kv_row);
  in_device<bfloat16> rows_there(2 * most * kv_row);
  pinned<float> queries(to_size(batch) * query_row);
  in_device<float> queries_there(to_size(batch) * query_row), out(to_size(batch) * query_row);
  const auto new_keys = [&](int count) {
    const std::size_t n = to_size(count) * kv_row;
    for (std::size_t i = 0; i < 2 * n; ++i) rows.data[i] = from_float<bfloat16>(normal(engine));
    upload(rows_there.data, rows.data, 2 * n * sizeof(bfloat16), compute.get());
    return kv_rows<bfloat16>{.keys = {rows_there.data, n}, .values = {rows_there.data + n, n}, .queries = {}};
  };

  std::vector<sequence_id> ids;
  for (int i = 0; i < batch; ++i) ids.push_back(pipeline.open());
  const int prompt = context - (context + warm_up + steps) % page_tokens;
  for (const sequence_id id : ids)
    for (int done = 0; done < prompt; done += chunk) {
      const int count = std::min(chunk, prompt - done);
      auto prefill = pipeline.begin_step({{id, count, step_phase::prefill}});
      prefill.append(0, new_keys(count));
      prefill.end();
      pipeline.synchronize();
    }
  for (std::size_t i = 0; i < to_size(batch) * query_row; ++i) queries.data[i] = normal(engine);

  double seconds = 0.0;
  int flagged = 0, recalled = 0;
  for (int step = 0; step < warm_up + steps; ++step) {
    const float rest = std::sqrt(1.0f - similarity * similarity);
    for (std::size_t i = 0; i < to_size(batch) * query_row; ++i)
      queries.data[i] = similarity * queries.data[i] + rest * normal(engine);
    kv_rows<bfloat16> now = new_keys(batch);
    upload(queries_there.data, queries.data, queries.bytes, compute.get());
    now.queries = {queries_there.data, to_size(batch) * query_row};
    pipeline.synchronize();
    if (step >= warm_up) device::check(cudaProfilerStart(), "cudaProfilerStart");
    const auto begun = std::chrono::steady_clock::now();
    std::vector<step_input> stepping;
    for (const sequence_id id : ids) stepping.push_back({id});
    auto decoding = pipeline.begin_step(stepping);
    decoding.append(0, now);
    decoding.attend(0, {out.data, to_size(batch) * query_row});
    decoding.end();
    pipeline.synchronize();
    if (step < warm_up) continue;
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    device::check(cudaProfilerStop(), "cudaProfilerStop");
    const auto reports = pipeline.report(0);
    flagged += reports.flagged_heads();
    for (const sequence_id id : ids)
      for (const int n : reports[id].recalled) recalled += n;
  }
  std::printf(
      "context %d, batch %d, similarity %.2f: %.1f us a step and layer, %.1f of %d heads flagged, %.1f "
      "slices of "
      "%zu bytes recalled\n",
      context, batch, similarity, 1e6 * seconds / steps, static_cast<double>(flagged) / steps,
      kv_heads * batch, static_cast<double>(recalled) / steps, pipeline.slice_bytes());
}

}  // namespace

int main(int argc, char** argv) {
  const int context = argc > 1 ? std::atoi(argv[1]) : 0, steps = argc > 2 ? std::atoi(argv[2]) : 4;
  const float similarity = argc > 3 ? static_cast<float>(std::atof(argv[3])) : 0.95f;
  const int batch = argc > 4 ? std::atoi(argv[4]) : 1;
  if (context < 2 * chunk || steps < 1 || batch < 1 || !(similarity >= 0.0f && similarity <= 1.0f)) {
    std::fprintf(stderr,
                 "usage: %s CONTEXT [STEPS 4] [SIMILARITY 0.95] [BATCH 1] [SUMMARY], CONTEXT at least %d\n",
                 argv[0], 2 * chunk);
    return 2;
  }
  const std::string summary = argc > 5 ? argv[5] : "min_max";
  if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
  try {
    if (summary == "key_subspace")
      run<subspace>(context, steps, similarity, batch, kv_heads * 25 * head_dim);
    else if (summary == "key_codes")
      run<codes>(context, steps, similarity, batch, kv_heads * books.floats_per_head());
    else
      run<min_max>(context, steps, similarity, batch, 0);
  } catch (const freekv::error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
