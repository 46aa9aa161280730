// Decode steps on a device, of layers of Llama-3.1-8B's shape unless other heads are asked for: BF16,
// head_dim 128, 32 query heads of 8 KV heads, pages of 32 tokens, 512 sink and 512 window tokens and 32
// selected pages. Queries and outputs are BF16, too.
//
//   step CONTEXT [STEPS 4] [SIMILARITY 0.95] [BATCH 1] [SUMMARY min_max] [LAYERS 1] [REPLAYS 0]
//        [QUERY_HEADS 32] [KV_HEADS 8]
//
// SUMMARY: min_max, key_subspace or key_codes; the data of the last two are random. Without retrieval:
// window, which attends to as many tokens, all of them there, or full. The last of STEPS fills a page.
//
// SIMILARITY is the cosine of a head's query with that of the step before: above 0.9 no head is flagged,
// below all are. On a GPU it prints what a step and layer takes, from its begin to its end; an interpreter's
// times mean nothing. What lies before the steps, the prompt and two steps, is outside of the profiler's
// range. With REPLAYS the step is captured as well and that many replays are timed, as a line of JSON, one
// behind the other: layers without a model between them.
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
#include <iterator>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "../../examples/support/fatal_signals.hpp"

namespace {

using namespace freekv;
using examples::note_stage;

constexpr int head_dim = 128, page_tokens = 32, chunk = 1024, warm_up = 2;
int query_heads = 32, kv_heads = 8;
std::size_t kv_row() { return to_size(kv_heads) * head_dim; }
std::size_t query_row() { return to_size(query_heads) * head_dim; }
template <class Summary, layer_kind Kind>
using pipeline_of = retrieval_pipeline<kv_shape<bfloat16, head_dim>, cuda_backend, page_size<page_tokens>,
                                       Summary, cosine_drift, every_layer<Kind>>;

struct arguments {
  int context = 0, steps = 4;
  float similarity = 0.95f;
  int batch = 1;
  std::string summary = "min_max";
  int layers = 1, replays = 0;
};

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
key_codebooks books() { return {nullptr, 1, kv_heads, head_dim, 8, 4, 6, 5}; }
template <>
min_max summary_with_data<min_max>::get() const {
  return {};
}
template <>
subspace summary_with_data<subspace>::get() const {
  return {.basis = {data.data, static_cast<int>(numbers.size()) / (kv_heads * 25 * head_dim), kv_heads, 24,
                    head_dim}};
}
template <>
codes summary_with_data<codes>::get() const {
  key_codebooks mine = books();
  mine.data = data.data;
  mine.layers = static_cast<int>(numbers.size() / to_size(kv_heads * books().floats_per_head()));
  return {.books = mine};
}

/// Page-locked rows of a step, and the same on the device.
struct step_rows_of_bench {
  pinned<bfloat16> kv;
  in_device<bfloat16> kv_there;
  pinned<bfloat16> queries;
  in_device<bfloat16> queries_there, out;
  step_rows_of_bench(int rows, int query_rows)
      : kv(2 * to_size(rows) * kv_row()),
        kv_there(2 * to_size(rows) * kv_row()),
        queries(to_size(query_rows) * query_row()),
        queries_there(to_size(query_rows) * query_row()),
        out(to_size(query_rows) * query_row()) {}
};

template <class Summary, layer_kind Kind = layer_kind::retrieval>
void run(const arguments& of, std::size_t floats) {
  using pipeline_type = pipeline_of<Summary, Kind>;
  const summary_with_data<Summary> summary(floats);
  const auto [context, steps, similarity, batch, name, layers, replays] = of;
  const std::string of_case = " with " + name + ": " + std::to_string(context) + " tokens, batch " +
                              std::to_string(batch) + ", layers " + std::to_string(layers);
  note_stage("computing a prompt" + of_case);
  typename pipeline_type::settings s;
  s.summary = summary.get();
  s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
  s.budget = {.sink = 512, .window = 512, .selected_units = 1024 / page_tokens};
  if (Kind == layer_kind::window) s.budget.window += 1024;  // it selects nothing
  s.capacity.max_tokens = context + steps + warm_up + (replays > 0 ? replays + warm_up : 0);
  s.capacity.max_sequences = batch;
  device::owned_stream compute(true), recall;
  cuda_backend backend(compute.get(), recall.get());
  device::device_memory fast;
  device::pinned_memory slow;
  pipeline_type pipeline(s, backend, {&slow, &fast});

  std::mt19937 engine(42);
  std::normal_distribution<float> normal;
  step_rows_of_bench rows(std::max(chunk, batch), batch);
  std::vector<bfloat16> drawn(1 << 16);  // which is faster than to draw each
  for (bfloat16& x : drawn) x = from_float<bfloat16>(normal(engine));
  const auto new_keys = [&](int count) {
    const std::size_t n = to_size(count) * kv_row();
    for (std::size_t i = 0; i < 2 * n; ++i) rows.kv.data[i] = drawn[engine() % drawn.size()];
    upload(rows.kv_there.data, rows.kv.data, 2 * n * sizeof(bfloat16), compute.get());
    return kv_rows<bfloat16, bfloat16>{
        .keys = {rows.kv_there.data, n}, .values = {rows.kv_there.data + n, n}, .queries = {}};
  };
  const std::size_t query_numbers = to_size(batch) * query_row();
  std::vector<float> query(query_numbers);  // as it was before it was rounded
  for (float& x : query) x = normal(engine);
  const auto next_queries = [&](bfloat16* to) {
    const float rest = std::sqrt(1.0f - similarity * similarity);
    for (std::size_t i = 0; i < query_numbers; ++i) {
      query[i] = similarity * query[i] + rest * normal(engine);
      to[i] = from_float<bfloat16>(query[i]);
    }
  };

  std::vector<sequence_id> ids;
  for (int i = 0; i < batch; ++i) ids.push_back(pipeline.open());
  const int prompt = context - (context + warm_up + steps) % page_tokens;
  for (const sequence_id id : ids)
    for (int done = 0; done < prompt; done += chunk) {
      const int count = std::min(chunk, prompt - done);
      auto prefill = pipeline.begin_step({{id, count, step_phase::prefill}});
      const kv_rows<bfloat16, bfloat16> keys = new_keys(count);  // in all layers
      for (int layer = 0; layer < layers; ++layer) prefill.append(layer, keys);
      prefill.end();
      pipeline.synchronize();
    }

  std::vector<step_input> stepping;
  for (const sequence_id id : ids) stepping.push_back({id});
  const auto queue = [&](auto step, const kv_rows<bfloat16, bfloat16>& now) {
    for (int layer = 0; layer < layers; ++layer) {
      step.append(layer, now);
      step.template attend<bfloat16>(layer, {rows.out.data, query_numbers});
    }
    step.end();
  };
  note_stage("timing steps" + of_case);
  double seconds = 0.0;
  int flagged = 0, recalled = 0;
  kv_rows<bfloat16, bfloat16> now;
  for (int step = 0; step < warm_up + steps; ++step) {
    next_queries(rows.queries.data);
    now = new_keys(batch);
    upload(rows.queries_there.data, rows.queries.data, rows.queries.bytes, compute.get());
    now.queries = {rows.queries_there.data, query_numbers};
    pipeline.synchronize();
    if (step >= warm_up) device::check(cudaProfilerStart(), "cudaProfilerStart");
    const auto begun = std::chrono::steady_clock::now();
    queue(pipeline.begin_step(stepping), now);
    pipeline.synchronize();
    if (step < warm_up) continue;
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    device::check(cudaProfilerStop(), "cudaProfilerStop");
    if constexpr (Kind == layer_kind::retrieval)
      for (int layer = 0; layer < layers; ++layer) {
        const auto reports = pipeline.report(layer);
        flagged += reports.flagged_heads();
        for (const sequence_id id : ids)
          for (const int n : reports[id].recalled) recalled += n;
      }
  }
  const double each = static_cast<double>(steps) * layers;
  std::printf(
      "context %d, batch %d, similarity %.2f: %.1f us a step and layer, %.1f of %d heads flagged, %.1f "
      "slices of %zu bytes recalled\n",
      context, batch, similarity, 1e6 * seconds / each, flagged / each, kv_heads * batch, recalled / each,
      pipeline.slice_bytes());
  if (replays == 0) return;

  note_stage("replaying a captured step" + of_case);
  // Queries of the replays, and of those that warm up, one step behind the other.
  const int all = replays + warm_up;
  pinned<bfloat16> in_turn(to_size(all) * query_numbers);
  for (int step = 0; step < all; ++step) next_queries(in_turn.data + to_size(step) * query_numbers);
  in_device<bfloat16> in_turn_there(to_size(all) * query_numbers);
  upload(in_turn_there.data, in_turn.data, in_turn.bytes, compute.get());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  device::check(cudaStreamBeginCapture(compute.get(), cudaStreamCaptureModeThreadLocal),
                "cudaStreamBeginCapture");
  queue(pipeline.begin_captured_step({.entries = batch}), now);
  device::check(cudaStreamEndCapture(compute.get(), &graph), "cudaStreamEndCapture");
  device::check(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
  std::vector<cudaEvent_t> points(to_size(all) + 1);
  for (cudaEvent_t& point : points) device::check(cudaEventCreate(&point), "cudaEventCreate");
  for (int step = 0; step < all; ++step) {
    while (!pipeline.plan(stepping)) pipeline.wait();
    device::check(cudaMemcpyAsync(rows.queries_there.data, in_turn_there.data + to_size(step) * query_numbers,
                                  query_numbers * sizeof(bfloat16), cudaMemcpyDeviceToDevice, compute.get()),
                  "cudaMemcpyAsync");
    if (step == 0) device::check(cudaEventRecord(points[0], compute.get()), "cudaEventRecord");
    device::check(cudaGraphLaunch(replay, compute.get()), "cudaGraphLaunch");
    device::check(cudaEventRecord(points[to_size(step) + 1], compute.get()), "cudaEventRecord");
  }
  pipeline.synchronize();
  std::vector<float> took(to_size(replays));
  for (int step = 0; step < replays; ++step)
    device::check(cudaEventElapsedTime(&took[to_size(step)], points[to_size(step + warm_up)],
                                       points[to_size(step + warm_up) + 1]),
                  "cudaEventElapsedTime");
  std::sort(took.begin(), took.end());
  double recalled_last = 0.0;
  if constexpr (Kind == layer_kind::retrieval)
    for (int layer = 0; layer < layers; ++layer)
      for (const sequence_id id : ids)
        for (const int n : pipeline.report(layer)[id].recalled) recalled_last += n;
  cudaDeviceProp device{};
  device::check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  std::printf(
      "{\"bench\": \"captured step\", \"case\": \"%s, %d tokens, batch %d, similarity %.2f, %d layers\", "
      "\"metric\": \"time of a layer\", \"value\": %.3f, \"unit\": \"us\", \"slices_recalled_by_layer\": "
      "%.2f, "
      "\"device\": \"%s\"}\n",
      name.c_str(), context, batch, static_cast<double>(similarity), layers,
      1e3 * static_cast<double>(took[took.size() / 2]) / layers, recalled_last / layers, device.name);
  for (const cudaEvent_t point : points) cudaEventDestroy(point);
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

}  // namespace

struct measured_summary {
  std::string_view name;
  void (*run)(const arguments& of);
};

constexpr measured_summary summaries[] = {
    {"min_max", [](const arguments& of) { run<min_max>(of, 0); }},
    {"key_subspace",
     [](const arguments& of) { run<subspace>(of, to_size(of.layers) * kv_heads * 25 * head_dim); }},
    {"key_codes",
     [](const arguments& of) { run<codes>(of, to_size(of.layers) * kv_heads * books().floats_per_head()); }},
    {"window", [](const arguments& of) { run<min_max, layer_kind::window>(of, 0); }},
    {"full", [](const arguments& of) { run<min_max, layer_kind::complete>(of, 0); }},
};

int main(int argc, char** argv) {
  freekv::examples::report_fatal_signals("freekv-bench-cuda-step");
  arguments of;
  const auto number = [&](int i, int& to) {
    if (argc > i) to = std::atoi(argv[i]);
  };
  number(1, of.context);
  number(2, of.steps);
  if (argc > 3) of.similarity = static_cast<float>(std::atof(argv[3]));
  number(4, of.batch);
  if (argc > 5) of.summary = argv[5];
  number(6, of.layers);
  number(7, of.replays);
  number(8, query_heads);
  number(9, kv_heads);
  const auto* const measured = std::find_if(std::begin(summaries), std::end(summaries),
                                            [&](const auto& s) { return s.name == of.summary; });
  if (of.context < 2 * chunk || of.steps < 1 || of.batch < 1 || of.layers < 1 || of.replays < 0 ||
      kv_heads < 1 || query_heads < kv_heads || query_heads % kv_heads != 0 ||
      !(of.similarity >= 0.0f && of.similarity <= 1.0f) || measured == std::end(summaries)) {
    std::fprintf(stderr,
                 "usage: %s CONTEXT [STEPS 4] [SIMILARITY 0.95] [BATCH 1] "
                 "[SUMMARY min_max, key_subspace, key_codes, window or full] [LAYERS 1] [REPLAYS 0] "
                 "[QUERY_HEADS 32] [KV_HEADS 8], CONTEXT at least %d, query heads a multiple of KV heads\n",
                 argv[0], 2 * chunk);
    return 2;
  }
  if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
  try {
    measured->run(of);
  } catch (const freekv::error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
