// The order of a pipeline's two streams: steps that are queued one behind the other give what they give where
// each is waited for. With FREEKV_CARELESS=1 to 7: that they do not where one of the streams' waits for
// another is left out.
//
// Two waits are left out nowhere, as others always come before: begin_step's for recall, before it copies
// shared rows, to pages that have come free behind a change, for which the compute stream has waited; and a
// recall stream's for the copy of a report, as all that it is given later waits for the compute stream.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <cuda_runtime.h>

#include <cstdlib>

namespace order_test {

/// Stands in for the runtime's call: leaves out the wait of `stream` that is its `nth`, counted from 0, while
/// there is one of these.
struct left_out {
  cudaStream_t stream;
  int nth;
  static inline left_out* now = nullptr;

  explicit left_out(cudaStream_t of, int wait = 0) : stream(of), nth(wait) { now = this; }
  left_out(const left_out&) = delete;
  left_out& operator=(const left_out&) = delete;
  ~left_out() { now = nullptr; }
};
inline cudaError_t wait(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0) {
  left_out* const now = left_out::now;
  if (now != nullptr && now->stream == stream && now->nth-- == 0) return cudaSuccess;
  return cudaStreamWaitEvent(stream, event, flags);
}

}  // namespace order_test

#define cudaStreamWaitEvent order_test::wait
#include <freekv/freekv.cuh>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using order_test::left_out;

struct recall_by_async_copies {
  static constexpr device::recall_tuning tuning{
      .read = device::recall_read::async_copies, .threads = 64, .depth = 3};
};
struct two_dimensional_copies {
  static constexpr device::copies_tuning tuning{.call = device::copy_call::two_dimensional};
};
/// Recalls in other ways than cuda_backend does.
using other_backend =
    basic_cuda_backend<device::multiplies::by_element, recall_by_async_copies, two_dimensional_copies>;
/// A CUDA backend whose launches are sized for more sequences, rows and pages than there are, and for all
/// kinds of them.
struct roomy_backend : cuda_backend {
  roomy_backend(cudaStream_t compute, cudaStream_t recall) : cuda_backend(compute, recall) {
    size_launches_for(
        {.entries = 5, .rows = spare_rows, .pages = 90, .decodes = true, .prompts = true, .copies = true});
  }
  static constexpr int spare_rows = 9;
};

// By default no head is corrected after the first step: what recall has brought is what is attended to. Units
// of a token, so that a recall by copy engines takes more batches than there are buffers.
template <class Backend, class Correction = never>
using pipeline_with = retrieval_pipeline<kv_shape<half, 64>, Backend, page_size<8>, unit<1>, mean, Correction,
                                         complete_first<0>, any_of<resident, in_place>>;

constexpr int head_dim = 64, query_heads = 4, kv_heads = 2, prompt = 300, steps = 16;
constexpr std::size_t key_row = kv_heads * head_dim, query_row = query_heads * head_dim;

struct text {
  explicit text(random_numbers random)
      : keys(random.normals<half>((prompt + steps) * key_row)),
        values(random.normals<half>((prompt + steps) * key_row)),
        queries(random.normals<float>((prompt + steps) * query_row)) {}
  pinned<half> keys, values;
  pinned<float> queries;

  kv_rows<half> rows(int first, int count) const {
    const auto part = [&](const auto& all, std::size_t row) {
      return std::span(all).subspan(to_size(first) * row, to_size(count) * row);
    };
    return {part(keys, key_row), part(values, key_row), part(queries, query_row)};
  }
};

template <class Pipeline>
typename Pipeline::settings settings_with(bool in_place_route) {
  typename Pipeline::settings s;
  s.model = {.layers = 1, .query_heads = query_heads, .kv_heads = kv_heads};
  s.budget = {.sink = 8, .window = 16, .selected_units = 200};
  s.capacity.max_tokens = prompt + steps;
  s.capacity.max_sequences = 2;
  if (in_place_route)
    s.route = in_place{};
  else
    s.route = resident{};
  return s;
}

/// A pipeline on streams and memory of its own, with a prompt.
template <class Backend, class Correction = never>
struct prompted {
  using pipeline_type = pipeline_with<Backend, Correction>;
  template <class... Options>
  prompted(const text& of, bool in_place_route, Options... options)
      : source(of),
        backend(compute.get(), recall.get(), options...),
        pipeline(settings_with<pipeline_type>(in_place_route), backend, {&slow, &fast}),
        id(pipeline.open()) {
    add_prompt(id);
  }
  struct no_prompt {};
  prompted(const text& of, bool in_place_route, no_prompt)
      : source(of),
        backend(compute.get(), recall.get()),
        pipeline(settings_with<pipeline_type>(in_place_route), backend, {&slow, &fast}),
        id(pipeline.open()) {}
  void add_prompt(sequence_id to) {
    step = pipeline.begin_step({{to, prompt, step_phase::prefill}});
    step.append(0, source.rows(0, prompt));
    step.end();
  }
  void append(int nth) {
    step = pipeline.begin_step({{id}});
    step.append(0, source.rows(prompt + nth, 1));
  }
  void attend(int nth, pinned<float>& out) {
    step.attend(0, std::span(out).subspan(to_size(nth) * query_row, query_row));
    step.end();
  }

  const text& source;
  device::owned_stream compute, recall;
  Backend backend;
  device::device_memory fast;
  device::pinned_memory slow;
  pipeline_type pipeline;
  sequence_id id;
  typename pipeline_type::step step;
};

/// The outputs of all steps; the host waits behind each of them, or behind the last alone. Where it waits,
/// nothing behind a step's row may have been written yet; else there are none.
template <class Backend, class... Options>
pinned<float> decode(const text& source, bool in_place_route, bool waits, Options... options) {
  constexpr float untouched = 12345.0f;
  pinned<float> out((steps + roomy_backend::spare_rows) * query_row, untouched);
  prompted<Backend> run(source, in_place_route, options...);
  for (int step = 0; step < steps; ++step) {
    run.append(step);
    run.attend(step, out);
    if (!waits) continue;
    run.pipeline.synchronize();
    if (std::any_of(out.begin() + (step + 1) * static_cast<int>(query_row), out.end(),
                    [](float x) { return x != untouched; }))
      return pinned<float>(out.size());
  }
  run.pipeline.synchronize();
  return out;
}

/// The outputs of all steps, before which every head selects anew. Attention may begin before that has ended;
/// not with a launch in between that lets nothing begin, as that of masses, which `apart` asks for.
pinned<float> decode_corrected(const text& source, bool apart) {
  pinned<float> out(steps * query_row);
  prompted<cuda_backend, always> run(source, false);
  for (int step = 0; step < steps; ++step) {
    run.append(step);
    pinned<float> masses(query_heads * to_size(run.step.most_attended(0)));
    if (apart) run.step.log_masses(0, masses);
    run.attend(step, out);
    run.pipeline.synchronize();
  }
  return out;
}

/// When a report is read: behind a step, by a wait for it or on a stream of its own while the next step is
/// queued; or on that stream when a step has appended.
enum class reading { behind_each, beside_the_next, within };
/// What a layer's reports say of each step. A wait that is left out: the `nth` of the stream that reads, or
/// of the compute stream for it.
template <class Correction = never>
pinned<std::int32_t> reports_of(const text& source, reading when, int of_side = -1, int of_compute = -1) {
  pinned<float> out(steps * query_row);
  prompted<cuda_backend, Correction> run(source, false);
  device::owned_stream own;
  device::stream side(own.get());
  pinned<std::int32_t> all;
  const auto add = [&](const auto& reports) {
    all.push_back(reports.flagged_heads());
    const step_report report = reports[run.id];
    for (const auto& numbers : {report.recalled, report.promoted, report.attended_count, report.attended})
      if (when != reading::within) all.insert(all.end(), numbers.begin(), numbers.end());
  };
  const auto queue = [&] {
    const left_out wait(of_side >= 0 ? own.get() : run.compute.get(), of_side >= 0 ? of_side : of_compute);
    run.pipeline.queue_report(0, side);
  };
  run.append(0);
  for (int step = 0; step < steps; ++step) {
    if (when == reading::within) queue();
    run.attend(step, out);
    if (when == reading::behind_each)
      add(run.pipeline.report(0));
    else if (when == reading::beside_the_next)
      queue();
    if (step + 1 < steps) run.append(step + 1);
    if (when == reading::behind_each) continue;
    side.synchronize();
    add(run.pipeline.queued_report(0));
  }
  run.pipeline.synchronize();
  return all;
}

/// The outputs of all steps behind a prompt that comes four tokens at a time out of an engine's cache. A wait
/// that is left out: append_from's, of the compute stream for the recall before or of the recall stream for
/// the compute stream.
pinned<float> decode_prompt_of_pages(const text& source, bool waits, bool without_first = false,
                                     bool without_second = false) {
  pinned<float> out(steps * query_row);
  prompted<cuda_backend> run(source, true, prompted<cuda_backend>::no_prompt{});
  pinned<std::int32_t> blocks;
  for (int block = 0; block < prompt / 4; ++block) blocks.push_back(block);
  for (int first = 0; first < prompt; first += 4) {
    const paged_blocks<const half> rows{.tensor = {.keys = source.keys.data(),
                                                   .values = source.values.data(),
                                                   .block_stride = 4 * key_row,
                                                   .token_stride = key_row,
                                                   .head_stride = head_dim,
                                                   .block_tokens = 4},
                                        .ids = blocks};
    run.step = run.pipeline.begin_step({{run.id, 4, step_phase::prefill}});
    {
      const left_out wait(without_second ? run.recall.get() : without_first ? run.compute.get() : nullptr);
      run.step.append_from<half>(0, std::span(&rows, 1));
    }
    run.step.end();
    if (waits) run.pipeline.synchronize();
  }
  for (int step = 0; step < steps; ++step) {
    run.append(step);
    run.attend(step, out);
    run.pipeline.synchronize();
  }
  return out;
}

/// The outputs of all steps, in place, where a torn selection still names pages that exist. A wait that is
/// left out: an append's for recall, or the recall's for attention.
pinned<float> decode_without(const text& source, bool of_append) {
  pinned<float> out(steps * query_row);
  prompted<cuda_backend> run(source, true);
  for (int step = 0; step < steps; ++step) {
    {
      const left_out wait(of_append ? run.compute.get() : nullptr);
      run.append(step);
    }
    const left_out wait(of_append ? nullptr : run.recall.get());
    run.attend(step, out);
  }
  run.pipeline.synchronize();
  return out;
}

/// Whether some run without one of the waits gives other numbers than with all of them, or fails; under an
/// interpreter that draws orders.
bool careless(const text& source, int order) {
  std::string seen;
  const auto search = [&](const char* name, const auto& expected, const auto& all, const auto& without) {
    if (all() != expected) {
      std::printf("FAILED: other numbers with all waits\n");
      return false;
    }
    for (int run = 1; run <= 40 && seen.empty(); ++run) try {
        if (without() != expected) seen = "other numbers in run " + std::to_string(run);
      } catch (const device_error& e) {
        seen = e.what();
      }
    std::printf("%s without %s: %s\n", seen.empty() ? "FAILED" : "ok    ", name,
                seen.empty() ? "the same numbers in 40 runs" : seen.c_str());
    return !seen.empty();
  };
  const auto decoded = [&](bool waits) { return decode<cuda_backend>(source, true, waits); };
  const auto of_pages = [&](bool waits) { return decode_prompt_of_pages(source, waits); };
  using enum reading;
  switch (order) {
    case 1:
      return search(
          "append's wait for recall", decoded(true), [&] { return decoded(false); },
          [&] { return decode_without(source, true); });
    case 2:
      return search(
          "recall's wait for attention", decoded(true), [&] { return decoded(false); },
          [&] { return decode_without(source, false); });
    case 3:
      return search(
          "append_from's wait for what was copied before", of_pages(true), [&] { return of_pages(false); },
          [&] { return decode_prompt_of_pages(source, false, true); });
    case 4:
      return search(
          "append_from's wait for the compute stream", of_pages(true), [&] { return of_pages(false); },
          [&] { return decode_prompt_of_pages(source, false, false, true); });
    case 5:
      return search(
          "a report's wait for what is appended", pinned<std::int32_t>(steps, kv_heads),
          [&] { return reports_of<always>(source, within); },
          [&] { return reports_of<always>(source, within, 0); });
    case 6:
      return search(
          "a report's wait for recall", reports_of(source, behind_each),
          [&] { return reports_of(source, beside_the_next); },
          [&] { return reports_of(source, beside_the_next, 1); });
    default:
      return search(
          "the compute stream's wait for a report", reports_of(source, behind_each),
          [&] { return reports_of(source, beside_the_next); },
          [&] { return reports_of(source, beside_the_next, -1, 0); });
  }
}

/// The masses that each step's units have, and what they are in double precision of the units that reports
/// name; `out`: of all steps.
results<float> masses_of(const text& source, pinned<float>& out) {
  pinned<float> expected, given;
  prompted<cuda_backend> run(source, false);
  const auto& s = run.pipeline.configuration();
  const int page = s.page.tokens, group = query_heads / kv_heads;
  for (int step = 0; step < steps; ++step) {
    run.append(step);
    const int entries = run.step.most_attended(0), now = prompt + step;
    pinned<float> masses(to_size(query_heads * entries), 0.0f);
    run.step.log_masses(0, masses);
    run.attend(step, out);
    const step_report report = run.pipeline.report(0)[run.id];  // waits
    given.insert(given.end(), masses.begin(), masses.end());
    for (int head = 0; head < query_heads; ++head) {
      const std::size_t before = expected.size();
      const auto add = [&](int first, int end) {
        double sum = 0.0;
        for (int t = first; t < end; ++t) {
          double score = 0.0;
          for (int i = 0; i < head_dim; ++i)
            score += double{source.queries[(now * query_heads + head) * head_dim + i]} *
                     double{to_float(source.keys[(t * kv_heads + head / group) * head_dim + i])};
          sum += std::exp(score * double{s.attention.scale});
        }
        expected.push_back(static_cast<float>(std::log(sum)));
      };
      add(0, s.budget.sink);
      const auto selected =
          report.attended.subspan(report.attended.size() / kv_heads * to_size(head / group));
      for (int i = 0; i < report.attended_count[head / group]; ++i) add(selected[i], selected[i] + 1);
      for (int first = (now + 1 - s.budget.window) / page * page; first <= now; first += page)
        add(first, std::min(first + page, now + 1));
      expected.resize(before + to_size(entries), -infinity);
    }
  }
  results<float> both(std::move(expected));
  both.device = std::move(given);
  return both;
}

/// Heads that a step counts as flagged when one of its two sequences is abandoned behind the append.
int flagged_beside_an_abandoned(const text& source) {
  prompted<cuda_backend> run(source, false);
  const sequence_id other = run.pipeline.open();
  run.add_prompt(other);
  auto step = run.pipeline.begin_step({{run.id}, {other}});
  step.append(0, source.rows(prompt, 2));
  step.abandon(other);
  return run.pipeline.report(0).flagged_heads();
}

/// Whether copy engines refuse to recall into a graph, with nothing of the selection queued there.
bool copies_refuse_capture(const text& source) {
  pinned<float> out(steps * query_row);
  prompted<cuda_backend> run(source, false, recall_by::copy_engines);
  run.append(0);
  run.pipeline.synchronize();
  require(cudaStreamBeginCapture(run.compute.get(), cudaStreamCaptureModeThreadLocal),
          "cudaStreamBeginCapture");
  bool refused = false;
  try {
    run.attend(0, out);
  } catch (const usage_error& e) {
    refused = std::string(e.what()).find("cannot be captured") != std::string::npos;
  }
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(run.compute.get(), &graph), "cudaStreamEndCapture");
  std::size_t queued = 0;
  require(cudaGraphGetNodes(graph, nullptr, &queued), "cudaGraphGetNodes");
  cudaGraphDestroy(graph);
  return refused && queued == 0;
}

}  // namespace

int main() {
  skip_without_device();
  const text source(random_numbers(1));
  if (const char* const order = std::getenv("FREEKV_CARELESS"))
    return careless(source, std::atoi(order)) ? 0 : 1;
  report checks;
  for (const bool in_place_route : {false, true}) {
    results<float> out(decode<cuda_backend>(source, in_place_route, true));
    out.device = decode<cuda_backend>(source, in_place_route, false);
    checks.equal(in_place_route ? "steps in place" : "steps with recall", out);
    out.device = decode<roomy_backend>(source, in_place_route, true);
    checks.equal(in_place_route ? "roomy launches in place" : "roomy launches with recall", out);
    if (in_place_route) continue;
    out.device = decode<cuda_backend>(source, false, false, recall_by::copy_engines);
    checks.equal("steps with recall by copy engines", out);
    out.device = decode<other_backend>(source, false, false);
    checks.equal("steps with recall by asynchronous copies", out);
    out.device = decode<other_backend>(source, false, false, recall_by::copy_engines);
    checks.equal("steps with recall by copies in two dimensions", out);
  }
  results<std::int32_t> reports(reports_of(source, reading::behind_each));
  reports.device = reports_of(source, reading::beside_the_next);
  checks.equal("reports on a stream of their own", reports);
  results<float> beside_masses(decode<cuda_backend>(source, false, true));
  checks.close("masses of units", masses_of(source, beside_masses.device), 10);
  checks.equal("steps that are asked for masses", beside_masses);
  results<float> corrected(decode_corrected(source, true));
  corrected.device = decode_corrected(source, false);
  checks.equal("attention behind a correction", corrected);
  results<std::int32_t> flagged(1, 2 * kv_heads);
  flagged.device[0] = flagged_beside_an_abandoned(source);
  checks.equal("flagged heads beside an abandoned sequence", flagged);
  const bool refused = copies_refuse_capture(source);
  std::printf("%s copy engines refuse a stream that is captured\n", refused ? "ok    " : "FAILED:");
  if (!refused) return 1;
  return checks.finish();
}
