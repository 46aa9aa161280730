// The order of steps and recall, with a recall stream that is slow on purpose: whoever should have waited and
// did not is found out.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "../catch.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

/// How long a selection on a thread other than the caller's takes at least, and how many there were.
struct {
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> milliseconds{0};
  std::atomic<int> begun{0}, ended{0};
} recall;

/// Page means whose scoring loiters on the recall thread.
struct slow_mean : freekv::chunk_means<8> {
  using hooks = freekv::hook_list<freekv::hook::prepare, freekv::hook::validate, freekv::hook::values>;
  static constexpr std::string_view name = "slow_mean";
  template <freekv::team T>
  void prepare(T team, const freekv::group_query& query, float* prepared) const {
    if (std::this_thread::get_id() != recall.caller) {
      ++recall.begun;
      std::this_thread::sleep_for(std::chrono::milliseconds(recall.milliseconds));
      ++recall.ended;
    }
    for (int i = 0; i < query.head_dim; i += T::width) team.store(prepared + i, team.load(query.data + i));
  }
};

using slow_pipeline = freekv::retrieval_pipeline<freekv::kv_shape<float, 24>, freekv::page_size<8>, slow_mean,
                                                 freekv::complete_first<0>>;

/// A host backend that forgets to wait, on the compute stream, for the recall of the step before.
struct forgetful_backend {
  using policy_kind = freekv::backend_kind;
  using event = freekv::host::event;
  template <class State, class Policies>
  using stages = freekv::host::stages<State, Policies>;
  struct careless_stream {
    freekv::host::stream& stream;
    void wait(const event&) {}
    event record() { return stream.record(); }
    void synchronize() const { stream.synchronize(); }
    static constexpr bool is_capturing() { return false; }
  };
  freekv::host_backend host;
  careless_stream compute() { return {host.compute()}; }
  freekv::host::stream& recall() { return host.recall(); }
  operator freekv::host_backend&() { return host; }
};
// In place, where a torn selection still names pages that exist.
using careless_pipeline = slow_pipeline::with<forgetful_backend>::with<freekv::in_place>;

slow_pipeline::settings settings() {
  slow_pipeline::settings s;
  s.model = {.layers = 2, .query_heads = 2, .kv_heads = 1};
  s.budget = {.sink = 8, .window = 16, .selected_units = 2};
  s.capacity.max_tokens = 150;
  s.correction = {
      .tau = -2.0f};  // flags no head after a prompt's first step: a flagged one scores before it attends
  return s;
}

struct run {
  explicit run(bool overlap)
      : backend({.overlap = overlap}), pipeline(settings(), backend), id(pipeline.open()) {}
  freekv::host_backend backend;
  slow_pipeline pipeline;
  freekv::sequence_id id;
};

/// One decode step without asking for a report, which would wait.
template <class Pipeline>
void quiet_step(Pipeline& pipeline, freekv::sequence_id id, const text& source, sequence_result& result) {
  const int at = pipeline.tokens(id);
  auto step = pipeline.begin_step({{id}});
  for (int layer = 0; layer < 2; ++layer) {
    const auto rows = source.at(layer, at, 1);
    std::vector<float> out(2 * 24), lse(2);
    step.template append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
    step.attend(layer, out, lse);
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.lse.insert(result.lse.end(), lse.begin(), lse.end());
  }
  step.end();
}

sequence_result quiet_steps(run& r, const text& source, int steps) {
  sequence_result result;
  for (int i = 0; i < steps; ++i) quiet_step(r.pipeline, r.id, source, result);
  return result;
}

}  // namespace

TEST_CASE("recall goes on behind the caller, and the layer's next append waits for it", "[order]") {
  const text source(settings(), 24, 150, 1);
  run at_once(false), behind(true);
  recall.milliseconds = 3;
  for (run* r : {&at_once, &behind}) prompt_only(r->pipeline, r->id, source, 100);
  CHECK(quiet_steps(behind, source, 42) == quiet_steps(at_once, source, 42));

  // A step ends while both layers' recall has not; reports wait for their layer's.
  sequence_result result;
  behind.pipeline.synchronize();
  recall.milliseconds = 100;
  recall.begun = recall.ended = 0;
  const auto before = std::chrono::steady_clock::now();
  quiet_step(behind.pipeline, behind.id, source, result);
  const bool ended_early = std::chrono::steady_clock::now() - before < std::chrono::milliseconds(200);
  CHECK((recall.ended < 4 || !ended_early));  // 2 query heads in each of 2 layers
  behind.pipeline.report(1);
  CHECK(recall.ended == 4);
  recall.milliseconds = 0;
}

TEST_CASE("a report is complete: it waits for its layer's recall", "[order]") {
  const text source(settings(), 24, 150, 2);
  run at_once(false), behind(true);
  recall.milliseconds = 2;
  for (run* r : {&at_once, &behind}) prompt_only(r->pipeline, r->id, source, 100);
  CHECK(decode(behind.pipeline, behind.id, source, 30) == decode(at_once.pipeline, at_once.id, source, 30));
  recall.milliseconds = 0;
}

TEST_CASE("a prompt's append waits for the recall of the decode step before it", "[order]") {
  const text source(settings(), 24, 150, 3);
  run at_once(false), behind(true);
  recall.milliseconds = 10;
  std::vector<sequence_result> results;
  for (run* r : {&at_once, &behind}) {
    prompt_only(r->pipeline, r->id, source, 90);
    sequence_result result;
    quiet_step(r->pipeline, r->id, source, result);
    prompt_only(r->pipeline, r->id, source, 20);
    results.push_back(quiet_steps(*r, source, 10));
    for (int layer = 0; layer < 2; ++layer) add_report(r->pipeline, layer, r->id, results.back());
  }
  CHECK(results[0] == results[1]);
  recall.milliseconds = 0;
}

TEST_CASE("a release waits for the recall that can still touch its sequence", "[order]") {
  const text first(settings(), 24, 150, 4), second(settings(), 24, 150, 5);
  run used(true), clean(true);
  prompt_only(used.pipeline, used.id, first, 102);
  sequence_result result;
  quiet_step(used.pipeline, used.id, first, result);
  used.pipeline.synchronize();
  recall.milliseconds = 20;
  recall.begun = recall.ended = 0;
  quiet_step(used.pipeline, used.id, first, result);
  used.pipeline.release(used.id);
  CHECK(recall.ended == 4);
  recall.milliseconds = 0;
  used.id = used.pipeline.open();
  for (run* r : {&used, &clean}) prompt_only(r->pipeline, r->id, second, 100);
  CHECK(decode(used.pipeline, used.id, second, 20) == decode(clean.pipeline, clean.id, second, 20));
}

TEST_CASE("what happens to a sequence between steps waits for its recall", "[order]") {
  auto s = settings();
  s.capacity.max_sequences = 2;
  const text source(s, 24, 150, 8);
  using change = std::function<void(slow_pipeline&, freekv::sequence_id)>;
  const auto ignore = [](std::span<const std::byte>) {};
  for (const change& makes_wait :
       {change([&](auto&p, auto id) { p.fork(id); }),
        change([&](auto&p, auto id) { p.truncate(id, p.tokens(id) - 1); }),
        change([&](auto&p, auto id) { p.preempt(id); }),
        change([&](auto&p, auto id) { p.open(p.keep_prefix(id, p.tokens(id))); }),
        change([&](auto&p, auto id) { p.save_prefix(p.keep_prefix(id, 8), ignore, 0); }),
        change([&](auto&p, auto) {
          CHECK_THROWS_AS(
              p.load_prefix([](std::span<std::byte> to) { std::fill(to.begin(), to.end(), std::byte{}); }, 0),
              freekv::prefix_error);
        })}) {
    freekv::host_backend backend({.overlap = true});
    slow_pipeline pipeline(s, backend);
    const auto id = pipeline.open();
    prompt_only(pipeline, id, source, 102);
    sequence_result result;
    quiet_step(pipeline, id, source, result);
    pipeline.synchronize();
    recall.milliseconds = 20;
    recall.begun = recall.ended = 0;
    quiet_step(pipeline, id, source, result);
    makes_wait(pipeline, id);
    CHECK(recall.ended == 4);
    recall.milliseconds = 0;
  }
}

TEST_CASE("a pipeline goes only when its recall has ended", "[order]") {
  const text source(settings(), 24, 150, 6);
  freekv::host_backend backend;
  auto pipeline = std::make_unique<slow_pipeline>(settings(), backend);
  const auto id = pipeline->open();
  prompt_only(*pipeline, id, source, 102);
  sequence_result result;
  quiet_step(*pipeline, id, source, result);
  pipeline->synchronize();
  recall.milliseconds = 20;
  recall.begun = recall.ended = 0;
  quiet_step(*pipeline, id, source, result);
  pipeline.reset();
  CHECK(recall.ended == 4);
  recall.milliseconds = 0;
}

TEST_CASE("without the wait for recall, attention reads what is still being selected", "[.careless]") {
  const text source(settings(), 24, 150, 7);
  run careful(true);
  forgetful_backend backend{freekv::host_backend({.overlap = true})};
  careless_pipeline::settings s;
  s.model = {.layers = settings().model.layers,
             .query_heads = settings().model.query_heads,
             .kv_heads = settings().model.kv_heads};
  s.budget = settings().budget;
  s.capacity.max_tokens = settings().capacity.max_tokens;
  s.correction = settings().correction;
  careless_pipeline careless(s, backend);
  const auto id = careless.open();
  recall.milliseconds = 5;
  prompt_only(careful.pipeline, careful.id, source, 100);
  prompt_only(careless, id, source, 100);
  const auto expected = quiet_steps(careful, source, 30);
  sequence_result got;
  for (int i = 0; i < 30; ++i) quiet_step(careless, id, source, got);
  careless.synchronize();
  recall.milliseconds = 0;
  CHECK_FALSE(got == expected);
}
