// Sequences that wait without slots go on as if nothing had been.

#include <memory>
#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

}  // namespace

TEST_CASE("preempted and restored, a sequence gives the same, bit for bit", "[preempt]") {
  for (std::uint64_t seed = 1; seed <= some_of(20u); ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_decode_rows = d.one_of({1, 4});
    constexpr int sequences = 5, steps = 25;
    std::vector<std::unique_ptr<text>> sources;
    std::vector<std::vector<sequence_result>> expected;
    std::vector<int> prompts;
    for (int i = 0; i < sequences; ++i) {
      sources.push_back(std::make_unique<text>(s, head_dim, 200, seed * 10 + count(i)));
      prompts.push_back(d.between(0, 100));
      fresh alone(s);
      if (prompts.back() > 0) prompt_only(alone.pipeline, alone.id, *sources.back(), prompts.back());
      expected.push_back(decode(alone.pipeline, alone.id, *sources.back(), steps));
    }

    s.capacity.max_sequences = sequences;
    s.capacity.max_resident = 2;
    freekv::host_backend backend({.overlap = seed % 2 == 0});
    tiny_pipeline pipeline(s, backend);
    std::vector<freekv::sequence_id> ids, resident;
    const auto make_room = [&] {
      if (resident.size() < 2) return;
      const auto one = resident.begin() + d.below(2);
      pipeline.preempt(*one);
      CHECK(pipeline.is_preempted(*one));
      resident.erase(one);
    };
    for (int i = 0; i < sequences; ++i) {
      make_room();
      ids.push_back(pipeline.open());
      resident.push_back(ids.back());
      if (prompts[count(i)] > 0) prompt_only(pipeline, ids.back(), *sources[count(i)], prompts[count(i)]);
    }
    std::vector<std::size_t> done(sequences);
    int wrong = 0;
    for (int turns = 0; turns < sequences * steps; ++turns) {
      const std::size_t i = count(d.below(sequences));
      if (done[i] == steps) continue;
      if (pipeline.is_preempted(ids[i])) {
        make_room();
        pipeline.restore(ids[i]);
        resident.push_back(ids[i]);
      }
      wrong += !(run_step(pipeline, ids[i], *sources[i], 1, step_phase::decode) == expected[i][done[i]++]);
    }
    INFO("seed " << seed);
    CHECK(wrong == 0);
  }
}

TEST_CASE("preemption is refused in sentences, and frees what it says", "[preempt]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 3;
  s.capacity.max_resident = 2;
  const text source(s, head_dim, 100, 1);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto a = pipeline.open(), b = pipeline.open();
  prompt_only(pipeline, a, source, 40);
  CHECK_THROWS_WITH(pipeline.open(),
                    "resident sequences exhausted: 2 of 2 in use, a new sequence needs 1 more; preempt or "
                    "release another sequence");
  CHECK_THROWS_WITH(pipeline.fork(a), Catch::Contains("resident sequences exhausted"));
  CHECK_THROWS_WITH(pipeline.restore(a), "restore: sequence 0 was not preempted");
  pipeline.preempt(a);
  CHECK_THROWS_WITH(pipeline.preempt(a), "preempt: sequence 0 is preempted; restore it first");
  CHECK_THROWS_WITH(pipeline.begin_step({{b}, {a}}), "begin_step: sequence 0 is preempted; restore it first");
  CHECK_THROWS_WITH(pipeline.fork(a), "fork: sequence 0 is preempted; restore it first");
  CHECK_THROWS_WITH(pipeline.truncate(a, 10), "truncate: sequence 0 is preempted; restore it first");
  const auto c = pipeline.open();
  CHECK_THROWS_WITH(
      pipeline.restore(a),
      Catch::Contains("resident sequences exhausted: 2 of 2 in use, a restored sequence needs"));
  pipeline.release(c);
  pipeline.restore(a);
  auto step = pipeline.begin_step({{a}});
  for (const bool restores : {false, true})
    CHECK_THROWS_WITH(restores ? pipeline.restore(b) : pipeline.preempt(b),
                      Catch::Contains("the step in progress"));
  step.abandon();

  // Slots are for those resident alone.
  auto all = s;
  all.capacity.max_resident = 0;
  const auto few = tiny_pipeline::footprint(s, backend).bytes().slots,
             many = tiny_pipeline::footprint(all, backend).bytes().slots;
  CHECK(few * 3 == many * 2);
  s.capacity.max_resident = 4;
  CHECK_THROWS_WITH(fresh(s), "max_resident is 4; choose from 1 to max_sequences, which is 3");
}
