// Frames of selected slots that sequences share: those that sit a step out keep what they have selected.

#include <memory>
#include <vector>

#include "../catch.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::pool_exhausted;
using freekv::step_phase;

constexpr int k = 6, page = 8;

template <class Pipeline>
typename Pipeline::settings settings_of(int sequences, int selected_units) {
  typename Pipeline::settings s;
  s.model = {.layers = 3, .query_heads = 6, .kv_heads = 2};
  s.budget = {.sink = page, .window = 2 * page, .selected_units = k};
  s.capacity.max_tokens = 400;
  s.capacity.max_sequences = sequences;
  s.capacity.selected_tokens = std::int64_t{selected_units} * page;
  s.plan = freekv::complete_first<freekv::dynamic>{1};
  return s;
}

using few = tiny_pipeline::with<freekv::top_p>;

/// Selects one page for each head.
few::settings few_settings(int sequences, int selected_units) {
  auto s = settings_of<few>(sequences, selected_units);
  s.selection = {.p = 1e-6f};
  return s;
}

}  // namespace

TEST_CASE("sequences that select few pages take turns in room for one that selects all it may", "[blocks]") {
  constexpr int sequences = 5, steps = 30;
  freekv::host_backend backend({.overlap = true});
  // One has k blocks while it steps, and each of the others that of its page.
  few pipeline(few_settings(sequences, k + sequences - 1), backend);
  std::vector<std::unique_ptr<text>> sources;
  std::vector<freekv::sequence_id> ids;
  std::vector<std::vector<sequence_result>> expected;
  for (int i = 0; i < sequences; ++i) {
    sources.push_back(std::make_unique<text>(pipeline.configuration(), head_dim, 400, count(i)));
    freekv::host_backend one;
    few alone(few_settings(1, 0), one);
    const auto id = alone.open();
    prompt_only(alone, id, *sources.back(), 200);
    expected.push_back(decode(alone, id, *sources.back(), steps));
    ids.push_back(pipeline.open());
    prompt_only(pipeline, ids.back(), *sources.back(), 200);
  }
  int wrong = 0;
  for (int step = 0; step < steps; ++step)
    for (std::size_t i = 0; i < ids.size(); ++i)
      wrong += !(run_step(pipeline, ids[i], *sources[i], 1, step_phase::decode) == expected[i][count(step)]);
  CHECK(wrong == 0);
  // Two in one step may select 2 k.
  CHECK_THROWS_AS(pipeline.begin_step({{ids[0]}, {ids[1]}}), pool_exhausted);
  for (const std::size_t i : {0, 1}) CHECK_NOTHROW(pipeline.begin_step({{ids[i]}}));  // and it is abandoned
}

TEST_CASE("a sequence that waits holds no more blocks than it has selected pages", "[blocks]") {
  using pipeline_type = few::with<freekv::never>;
  constexpr int pages = k + 3;
  auto s = settings_of<pipeline_type>(2, pages);
  s.selection = {.p = 0.17f};
  freekv::host_backend backend({.overlap = true});
  pipeline_type pipeline(s, backend);
  const text one(s, head_dim, 400, 3), other(s, head_dim, 400, 4);
  const auto a = pipeline.open(), b = pipeline.open();
  prompt_only(pipeline, a, one, 250);
  prompt_only(pipeline, b, other, 250);
  // Without correction it attends next to what it has selected now.
  const auto most_attended = [&] {
    int most = 0;
    for (int layer = 1; layer < s.model.layers; ++layer)
      for (const std::int32_t attended : pipeline.report(layer)[a].attended_count)
        most = std::max(most, attended);
    return most;
  };
  run_step(pipeline, a, one, 1, step_phase::decode);
  int fitted = 0, refused = 0, wrong = 0;
  for (int step = 0; step < 60; ++step) {
    bool fits = true;
    try {
      run_step(pipeline, b, other, 1, step_phase::decode);
    } catch (const pool_exhausted&) {
      fits = false;
    }
    if (pipeline.tokens(b) > 300) pipeline.truncate(b, 250);
    pipeline.preempt(b);  // so that a can go on
    run_step(pipeline, a, one, 1, step_phase::decode);
    pipeline.preempt(a);
    pipeline.restore(b);
    pipeline.truncate(b, pipeline.tokens(b) - (fits ? 1 : 0));
    pipeline.restore(a);
    wrong += fits != (most_attended() + k <= pages);
    ++(fits ? fitted : refused);
  }
  INFO(fitted << " fitted, " << refused << " were refused");
  CHECK(wrong == 0);
  CHECK(fitted > 5);
  CHECK(refused > 5);
}

TEST_CASE("blocks that are full stay, and what lacks them is refused with nothing changed", "[blocks]") {
  using pipeline_type = tiny_pipeline;
  freekv::host_backend backend;
  auto s = settings_of<pipeline_type>(3, 2 * k - 1);
  pipeline_type pipeline(s, backend);
  const text source(s, head_dim, 400, 1);
  fresh alone([&] {
    auto one = settings_of<pipeline_type>(1, 0);
    return one;
  }());
  prompt_only(alone.pipeline, alone.id, source, 200);
  const auto a = pipeline.open(), b = pipeline.open();
  prompt_only(pipeline, a, source, 200);
  prompt_only(pipeline, b, source, 200);
  const auto expected = decode(alone.pipeline, alone.id, source, 6);
  CHECK(run_step(pipeline, a, source, 1, step_phase::decode) == expected[0]);
  const std::int32_t free = pipeline.free_pages();
  try {
    const auto step = pipeline.begin_step({{b}});
    FAIL("b has no room");
  } catch (const pool_exhausted& e) {
    INFO(e.what());
    CHECK(e.capacity == 2 * k - 1);
    CHECK(e.used == k);
    CHECK(e.needed == k);
    CHECK_THAT(std::string(e.what()),
               Catch::Contains("blocks of selected slots in layer 1") && Catch::Contains("selected_tokens"));
  }
  CHECK(pipeline.tokens(b) == 200);
  CHECK(pipeline.free_pages() == free);
  CHECK_THROWS_AS(pipeline.fork(a), pool_exhausted);
  CHECK(run_step(pipeline, a, source, 1, step_phase::decode) == expected[1]);

  // What waits without slots has no blocks, and does not come back to less than it had.
  pipeline.preempt(a);
  CHECK(run_step(pipeline, b, source, 1, step_phase::decode) == expected[0]);
  CHECK_THROWS_AS(pipeline.restore(a), pool_exhausted);
  CHECK(pipeline.is_preempted(a));
  // A truncation that drops the selection, or a prompt, leaves nothing in them.
  pipeline.truncate(b, 100);
  CHECK_NOTHROW(pipeline.restore(a));
  CHECK(run_step(pipeline, a, source, 1, step_phase::decode) == expected[2]);
  pipeline.release(a);
  prompt_only(pipeline, b, source, 100);
  for (int step = 0; step < 3; ++step)
    CHECK(run_step(pipeline, b, source, 1, step_phase::decode).out == expected[count(step)].out);
}

TEST_CASE("shared blocks take the bytes that are announced", "[blocks]") {
  freekv::host_backend backend;
  const auto slots = [&](int selected_units) {
    return tiny_pipeline::footprint(settings_of<tiny_pipeline>(4, selected_units), backend).bytes().slots;
  };
  constexpr std::size_t block = 2 * page * 2 * head_dim * sizeof(freekv::half);
  const auto of_layer = [](int selected) { return count(4 * (1 + 3) + selected) * block; };
  CHECK(slots(0) == 2 * of_layer(4 * k));
  CHECK(slots(4 * k) == 2 * of_layer(4 * k));
  CHECK(slots(100 * k) == 2 * of_layer(4 * k));
  CHECK(slots(k + 3) == 2 * of_layer(k + 3));
  CHECK(tiny_pipeline::footprint(settings_of<tiny_pipeline>(4, k + 3), backend).slots(1) ==
        4 * (1 + 3) + k + 3);
  CHECK(tiny_pipeline::footprint(settings_of<tiny_pipeline>(4, k + 3), backend).slots(0) == 0);
  CHECK_THROWS_WITH(slots(k - 1),
                    Catch::Contains("selected_tokens is 40") && Catch::Contains("give 48 or more"));
  auto negative = settings_of<tiny_pipeline>(1, 0);
  negative.capacity.selected_tokens = -1;
  CHECK_THROWS_AS(tiny_pipeline::footprint(negative, backend), freekv::settings_error);
}
