// HARD-KV's calibrated budgets on random scores: what its temperature, its sets and its theorem say.

#include <algorithm>
#include <cmath>
#include <freekv/policies/hard_kv.hpp>
#include <functional>
#include <numeric>
#include <vector>

#include "../catch.hpp"
#include "../unit/rows.hpp"

namespace {

using namespace tests;

/// Scores (rows, units) that a policy observes, and what it makes of them.
struct observed_case {
  int units, rows;
  std::vector<float> scores, scratch, worths;
  std::vector<std::int32_t> tokens, counts;

  observed_case(dice& d, int n, int r, float spread) : units(n), rows(r) {
    scores = normals(d, count(n * r));
    for (float& score : scores) score *= spread;
    scratch.resize(scores.size()), worths.resize(count(n)), counts.resize(count(2 * r));
    tokens.resize(count(n));
    std::iota(tokens.begin(), tokens.end(), 0);
  }
  const float* row(int r) const { return scores.data() + r * units; }
  /// Which stay, by worth or because they are protected; `scores` are left as they are.
  std::vector<bool> selected(const freekv::hard_kv& policy, const freekv::eviction_moment& at) {
    std::vector<float> numbers = scores;
    const int stay = policy.observe(
        {units, tokens.data(), rows, 1, numbers.data(), scratch.data(), counts.data(), nullptr, 0, units}, at,
        worths.data());
    std::vector<bool> kept;
    for (int i = 0; i < units; ++i) kept.push_back(worths[count(i)] >= 0 || policy.protects(i, at));
    CHECK(std::count(kept.begin(), kept.end(), true) == stay);
    return kept;
  }
};

double log_sum_exp_of(const float* row, int units, const std::vector<bool>& kept) {
  double sum = 0;
  for (int i = 0; i < units; ++i)
    if (kept[count(i)]) sum += std::exp(static_cast<double>(row[i]));
  return std::log(sum);
}

}  // namespace

TEST_CASE("a window's rows lose at most -ln p of their log-sum-exp, and a smaller set would lose more",
          "[hard_kv]") {
  dice d(11);
  long smaller = 0;
  for (int repeat = 0; repeat < 200; ++repeat) {
    const int units = d.between(64, 1024), rows = d.between(1, 8);
    const float spread = d.one_of({0.5f, 2.0f, 5.0f});
    observed_case c(d, units, rows, spread);
    const freekv::hard_kv policy{.p = d.one_of({0.6f, 0.9f, 0.99f}), .window = 1, .kernel = 1, .sink = 0};
    const auto kept = c.selected(policy, {.budget = units, .prompt = units, .tokens = units, .held = units});
    const std::vector<bool> all(count(units), true);
    for (int r = 0; r < rows; ++r) {
      const double lost = log_sum_exp_of(c.row(r), units, all) - log_sum_exp_of(c.row(r), units, kept);
      CHECK(lost <= -std::log(static_cast<double>(policy.p)) + 1e-6);
    }
    if (rows > 1) continue;
    // One row's set is the fewest: without its last one it has less than p, but for the protected last token.
    auto fewer = kept;
    int worst = -1;
    for (int i = 0; i + 1 < units; ++i)
      if (kept[count(i)] && (worst < 0 || c.row(0)[i] < c.row(0)[worst])) worst = i;
    REQUIRE(worst >= 0);
    fewer[count(worst)] = false;
    fewer[count(units - 1)] = c.row(0)[units - 1] > c.row(0)[worst];
    CHECK(log_sum_exp_of(c.row(0), units, all) - log_sum_exp_of(c.row(0), units, fewer) >
          -std::log(static_cast<double>(policy.p)) - 1e-6);
    ++smaller;
  }
  CHECK(smaller > 10);
}

TEST_CASE("at the calibrated temperature the wanted best have p, and it leaves a method's ranking as it is",
          "[hard_kv]") {
  dice d(12);
  int reached = 0;
  for (int repeat = 0; repeat < 60; ++repeat) {
    const int units = d.between(64, 4096);
    const double p = static_cast<double>(d.one_of({0.6f, 0.9f}));
    observed_case c(d, units, 1, d.one_of({1.0f, 3.0f}));
    std::vector<float> best(c.row(0), c.row(0) + units), pooled(count(units));
    std::sort(best.begin(), best.end(), std::greater<float>());
    const int wanted = freekv::detail::descending_masses(best.data(), units, 1.0).fewest(p);
    CHECK(freekv::detail::descending_masses(best.data(), units, 1.0).of_first(wanted) >= p);
    if (wanted > 1)
      CHECK(freekv::detail::descending_masses(best.data(), units, 1.0).of_first(wanted - 1) < p);
    const auto temperature_of = [&](const std::vector<float>& row) {
      return freekv::detail::calibrated_temperature(
          1, p, [&](int) { return row.data(); }, [&](int) { return units; }, [&](int) { return wanted; });
    };
    CHECK(temperature_of(best) >= 1 - 1e-9);  // of scores as they are
    freekv::detail::pool_largest(c.row(0), units, 7, pooled.data());
    std::sort(pooled.begin(), pooled.end(), std::greater<float>());
    const double temperature = temperature_of(pooled);
    CHECK(temperature < 1);  // neighbours of large scores are large
    const freekv::detail::descending_masses calibrated(pooled.data(), units, temperature);
    const auto peak = std::count(pooled.begin(), pooled.end(), pooled[0]);
    if (peak <= wanted) {
      CHECK(calibrated.of_first(wanted) == Approx(p).margin(1e-3));
      CHECK(std::abs(calibrated.fewest(p) - wanted) <= 1);  // the mass is p to rounding
      ++reached;
    } else {  // the best share a peak, of which any wanted number has the same mass at any temperature
      CHECK(calibrated.fewest(p) <= peak);
    }
  }
  CHECK(reached > 40);
}

TEST_CASE("p of 1 keeps everything, and of more than the budget the best shares come first", "[hard_kv]") {
  dice d(13);
  observed_case c(d, 300, 4, 1.0f);
  const freekv::eviction_moment at{.budget = 100, .prompt = 300, .tokens = 300, .held = 300};
  const auto all = c.selected({.p = 1.0f, .kernel = 1}, at);
  CHECK(std::count(all.begin(), all.end(), true) == 300);
  const freekv::hard_kv policy{.p = 0.9f, .window = 8, .kernel = 1};
  c.selected(policy, at);
  for (int i = 0; i < c.units; ++i) {
    if (c.worths[count(i)] < 0) continue;
    double share = 0;
    const std::vector<bool> everything(count(c.units), true);
    for (int r = 0; r < c.rows; ++r)
      share = std::max(
          share, std::exp(static_cast<double>(c.row(r)[i]) - log_sum_exp_of(c.row(r), c.units, everything)));
    CHECK(static_cast<double>(c.worths[count(i)]) <= share * (1 + 1e-5));
  }
}
