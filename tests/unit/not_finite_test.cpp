// Numbers that are not finite, in methods that forget: they are lost with what they are of, and decide
// nothing else.

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

#include <freekv/freekv.hpp>

namespace {

using namespace tests;
using freekv::step_phase;

constexpr int d = 16, prompt = 100;
using any_eviction =
    freekv::any_of<freekv::defensive_kv, freekv::arkv_origin, freekv::cake, freekv::compress_kv,
                   freekv::epi_cache, freekv::kv_merger, freekv::hard_kv, freekv::r_kv, freekv::d2o,
                   freekv::razor_attention_compensated>;
using forgetful = freekv::evicting_pipeline<freekv::kv_shape<float, d>, any_eviction>;

/// One head's rows. Of a prompt of 100 tokens 5 to 14 have nearly all the attention of the last rows.
struct rows_of_text {
  std::vector<float> queries, keys, values;

  explicit rows_of_text(unsigned seed) {
    dice dice(seed);
    for (auto* rows : {&queries, &keys, &values}) *rows = normals(dice, 200 * d);
    for (int t = 80; t < 200; ++t)
      for (int i = 0; i < d; ++i) queries[count(t * d + i)] = i < 4 ? 2.0f : 0.0f;
    for (int t = 5; t < 15; ++t) std::fill_n(keys.begin() + t * d, 4, 2.0f);
  }
};

class decoder {
 public:
  decoder(const any_eviction& eviction, int budget)
      : pipeline_({.model = {.layers = 1, .query_heads = 1, .kv_heads = 1},
                   .budget = budget,
                   .capacity = {.max_prompt = 200, .max_generated = 100},
                   .plan = {{0}},
                   .eviction = eviction},
                  backend_),
        id_(pipeline_.open()) {}

  std::vector<float> step(const rows_of_text& text, int tokens, step_phase phase = step_phase::decode) {
    const auto part = [&](const std::vector<float>& of) {
      return std::span(of).subspan(count(done_ * d), count(tokens * d));
    };
    std::vector<float> out(count(tokens * d));
    auto step = pipeline_.begin_step({{id_, tokens, phase}});
    step.append<float>(0,
                       {.keys = part(text.keys), .values = part(text.values), .queries = part(text.queries)});
    step.attend(0, out);
    step.end();
    done_ += tokens;
    return out;
  }
  std::vector<int> attended() const {
    const auto report = pipeline_.report(0)[id_];
    const auto tokens = report.attended.first(count(report.attended_count[0]));
    return {tokens.begin(), tokens.end()};
  }

 private:
  freekv::host_backend backend_;
  forgetful pipeline_;
  freekv::sequence_id id_;
  int done_ = 0;
};

/// What the first row behind the prompt attends to.
std::vector<int> kept_of(const any_eviction& eviction, int budget, const rows_of_text& text) {
  decoder decoder(eviction, budget);
  decoder.step(text, prompt, step_phase::prefill);
  decoder.step(text, 1);
  return decoder.attended();
}

}  // namespace

TEST_CASE("a key without scores takes them from no other token", "[eviction][not_finite]") {
  freekv::arkv_origin heavy;
  heavy.window = 8, heavy.kernel = 1;
  const std::vector<any_eviction> observing{freekv::defensive_kv{8, 1},
                                            freekv::cake{.window = 8, .kernel = 1},
                                            freekv::epi_cache{8, 200},
                                            freekv::compress_kv{.window = 8, .kernel = 1},
                                            heavy,
                                            freekv::r_kv{.window = 8}};
  rows_of_text text(5), spoilt = text;
  std::fill_n(text.keys.begin() + 40 * d, d, -30.0f);  // which scores least
  spoilt.keys[40 * d] = quiet_nan;
  for (const auto& eviction : observing) {
    INFO(freekv::detail::printed(eviction));
    CHECK(kept_of(eviction, 20, spoilt) == kept_of(eviction, 20, text));
  }
}

TEST_CASE("a score beyond float32 is its largest number to a policy that observes",
          "[eviction][not_finite]") {
  rows_of_text text(5), large = text;
  for (rows_of_text* rows : {&text, &large}) rows->keys[40 * d + 10] = 1e30f;
  text.queries[95 * d + 10] = 1e8f;    // a score of 1e37
  large.queries[95 * d + 10] = 1e30f;  // in that row alone
  const auto kept = kept_of(freekv::hard_kv{.window = 8}, 40, text);
  CHECK(kept.size() > 20);
  CHECK(kept_of(freekv::hard_kv{.window = 8}, 40, large) == kept);
}

TEST_CASE("a row of NaN says nothing of hard_kv's temperature", "[eviction][not_finite]") {
  rows_of_text text(6), spoilt = text;
  std::fill_n(spoilt.queries.begin() + 95 * d, d, quiet_nan);
  const auto kept = kept_of(freekv::hard_kv{.window = 8}, 80, text),
             without_a_row = kept_of(freekv::hard_kv{.window = 8}, 80, spoilt);
  REQUIRE(kept.size() > 20);  // 25 where the temperature is the least
  CHECK(without_a_row.size() + 5 > kept.size());
}

TEST_CASE("a token that leaves with a NaN key or value merges into none", "[eviction][merging][not_finite]") {
  constexpr freekv::layer_kind window[] = {freekv::layer_kind::window};
  freekv::razor_attention_compensated razor{.kinds = window, .kv_heads = 1};
  for (const any_eviction& eviction : {any_eviction(freekv::d2o{}), any_eviction(razor)})
    for (const auto rows : {&rows_of_text::keys, &rows_of_text::values}) {
      INFO(freekv::detail::printed(eviction) << (rows == &rows_of_text::values ? ", value" : ", key"));
      rows_of_text text(7);
      (text.*rows)[count((rows == &rows_of_text::values ? 20 : 10) * d)] = quiet_nan;
      decoder decoder(eviction, 16);
      std::vector<float> out;
      for (int row = 0; row < 60; ++row) out = decoder.step(text, 1);
      CHECK(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x); }));
    }
}

TEST_CASE("cake shares out what there is, whatever its taus", "[eviction][not_finite]") {
  const freekv::cake::statistic measured[] = {{1300, 2}, {900, 1}, {1200, 0.5}};
  for (const float tau : {1e-3f, 3e-3f, 1e-2f, 0.1f, 1.6f, 1e3f})
    for (const bool first : {false, true}) {
      freekv::cake policy{.window = 8};
      (first ? policy.tau1 : policy.tau2) = tau;
      int budgets[] = {64, 64, 64};
      policy.allocate(measured, {.layers = 3, .kv_heads = 1, .budget = 64, .prompt = 1000}, budgets);
      INFO("tau " << tau << ": " << budgets[0] << ", " << budgets[1] << ", " << budgets[2]);
      CHECK(budgets[0] + budgets[1] + budgets[2] <= 3 * 64);
      CHECK(std::min({budgets[0], budgets[1], budgets[2]}) >= 8);
    }
}

TEST_CASE("layers whose attention varies nowhere have equal budgets of cake", "[eviction][not_finite]") {
  int budgets[] = {64, 64};
  const freekv::cake::statistic of_one_row[] = {{3, 0}, {2, 0}};
  freekv::cake{.window = 1}.allocate(of_one_row, {.layers = 2, .kv_heads = 1, .budget = 64, .prompt = 1000},
                                     budgets);
  CHECK(budgets[0] == 64);
  CHECK(budgets[1] == 64);
}

TEST_CASE("an exchange of units whose masses are NaN ends where all of the best are there", "[not_finite]") {
  std::int32_t selected[4] = {1, 2, 5, -9};
  const std::int32_t best[] = {3, 4, 6};
  struct flags_always {
    bool flags(const freekv::selection_masses&) const { return true; }
  };
  CHECK(freekv::detail::exchange_units(
            flags_always{}, {selected, best, 3, 3}, quiet_nan,
            [](const std::int32_t*, int) { return quiet_nan; }, [](int) { return 0.0f; }) == 3);
  CHECK(std::equal(best, best + 3, selected));
  CHECK(selected[3] == -9);
}

TEST_CASE("budgets of blocks are refused where there are none", "[eviction][not_finite]") {
  const float similarities[] = {0.2f, 0.9f};
  std::int32_t budgets[2];
  for (const float alpha : {-1.0f, quiet_nan})
    CHECK_THROWS_WITH(freekv::epi_cache_budgets(similarities, 2, 100, alpha, budgets),
                      Catch::Contains("give 1 or more layers, and an alpha of 0 or more"));
  CHECK_THROWS_AS(freekv::epi_cache_budgets(similarities, 0, 100, 1.0f, budgets), freekv::settings_error);
}
