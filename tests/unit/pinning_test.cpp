// Units that are selected whatever their scores.

#include "../oracle/pinning.hpp"
#include "../property/compare_step.hpp"
#include "rows.hpp"
#include "steps.hpp"

namespace {

using namespace tests;

}  // namespace

TEST_CASE("a unit is worth as much to be pinned as its least alike key is unlike their mean", "[pinning]") {
  dice d(1);
  for (const executor on : executors())
    for (int trial = 0; trial < 60; ++trial) {
      const int dim = d.one_of({64, 80, 128}), tokens = d.one_of({1, 2, 8, 32});
      std::vector<float> keys = normals(d, count(tokens * dim), d.one_of({1.0f, 100.0f, 1e-3f}));
      if (trial % 10 == 0) keys[count(d.below(tokens * dim))] = d.one_of({quiet_nan, inf});
      if (trial % 10 == 1) std::fill(keys.begin(), keys.begin() + dim, 0.0f);
      std::vector<float> mean(count(dim));
      float worth = 0.0f;
      run_on(on, [&](auto team) {
        worth =
            freekv::pin_outliers<>{}.worth(team, freekv::unit_keys{keys.data(), {tokens, dim}}, mean.data());
      });
      INFO(on << ", " << tokens << " keys of " << dim);
      CHECK(is_near(static_cast<double>(worth), oracle::unlikeness(rows_of(keys, dim)), 1e-5));
    }
}

TEST_CASE("the unit whose keys point apart is selected whatever the queries, besides the k best",
          "[pinning]") {
  using shape = freekv::kv_shape<float, 64>;
  using pinned = freekv::retrieval_pipeline<shape, freekv::page_size<8>, freekv::unit<4>, freekv::mean,
                                            freekv::pin_outliers<2>, freekv::always,
                                            freekv::every_layer<freekv::layer_kind::retrieval>>;
  freekv::host_backend backend;
  pinned pipeline({.model = {.query_heads = 1, .kv_heads = 1},
                   .budget = {.sink = 8, .window = 8, .selected_units = 3},
                   .capacity = {.max_tokens = 240}},
                  backend);
  CHECK_THAT(pipeline.name(), Catch::Contains("pin_outliers(2)"));
  const auto id = pipeline.open();
  dice d(2);
  std::vector<float> keys(std::size_t{100} * 64), values = normals(d, keys.size());
  for (int token = 0; token < 100; ++token) {
    // All keys near one direction, but in units 7 and 11, and in 20, which is in the window.
    const bool apart = token / 4 == 7 || token / 4 == 11 || token / 4 == 24;
    for (int i = 0; i < 64; ++i)
      keys[count(token * 64 + i)] = (i == 0 ? (apart && token % 2 != 0 ? -5.0f : 5.0f) : 0.1f * d.normal());
  }
  const auto append_prompt = [&](int tokens) {
    auto step = pipeline.begin_step({{id, tokens, freekv::step_phase::prefill}});
    const auto first = [&](const std::vector<float>& rows) {
      return std::span(rows).first(count(tokens * 64));
    };
    step.append<float>(0, {.keys = first(keys), .values = first(values), .queries = {}});
    step.end();
  };
  append_prompt(100);
  std::vector<float> out(64), lse(1);
  const auto attended = [&] {
    auto step = pipeline.begin_step({{id}});
    const auto query = normals(d, 64, 5.0f), value = normals(d, 64);
    auto key = normals(d, 64, 0.1f);
    key[0] = 5.0f;
    step.append<float>(0, {.keys = key, .values = value, .queries = query});
    step.attend(0, out, lse);
    step.end();
    const auto report = pipeline.report(0)[id];
    REQUIRE(report.attended.size() == 5);
    return std::vector<int>(report.attended.begin(), report.attended.begin() + report.attended_count[0]);
  };
  const auto has = [](const std::vector<int>& units, int unit) {
    return std::count(units.begin(), units.end(), unit) == 1;
  };
  std::vector<int> seen;
  for (int step = 0; step < 40; ++step) {
    const auto units = attended();
    INFO("step " << step << ":" << listed(units));
    CHECK(units.size() == 5);
    CHECK(std::is_sorted(units.begin(), units.end()));
    // Unit 24 becomes a candidate later, and stays one like any other.
    CHECK((has(units, 7) && has(units, 11)));
    seen.insert(seen.end(), units.begin(), units.end());
  }
  std::sort(seen.begin(), seen.end());
  seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
  CHECK(seen.size() > 10);  // the others change

  // A prompt begins anew, and so does a truncation that drops the selection. Unit 24 is a candidate now.
  append_prompt(60);
  const auto anew = attended();
  CHECK((has(anew, 7) + has(anew, 11) + has(anew, 24) + has(anew, 35 + 7) + has(anew, 35 + 11)) >= 2);
  CHECK(pipeline.tokens(id) == 201);
  pipeline.truncate(id, 60);
  const auto shorter = attended();
  CHECK((has(shorter, 7) && has(shorter, 11)));
}

TEST_CASE("what cannot be pinned is refused", "[pinning]") {
  using freekv::dynamic;
  using pack = freekv::policy_pack_of<freekv::pin_outliers<dynamic>, freekv::per_layer>;
  freekv::pipeline_settings<pack> s{.model = {.query_heads = 2, .kv_heads = 2},
                                    .capacity = {.max_tokens = 512}};
  s.pinning = {{-1}};
  CHECK_THROWS_AS(freekv::checked_settings<64>(s), freekv::settings_error);
  s.pinning = {{1}};
  CHECK_THROWS_WITH(freekv::checked_settings<64>(s),
                    Catch::Contains("per_layer") && Catch::Contains("no_pins"));
  s.pinning = {{0}};
  CHECK_NOTHROW(freekv::checked_settings<64>(s));
}
