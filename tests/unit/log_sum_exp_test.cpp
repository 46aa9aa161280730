// The running ln(sum of exponentials) that every split of attention and scoring goes through.

#include <algorithm>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using freekv::log_sum_exp;

double exact(const std::vector<float>& x) { return oracle::log_sum_exp({x.begin(), x.end()}); }

float one_by_one(const std::vector<float>& x) {
  log_sum_exp mass;
  for (const float value : x) mass.add(value);
  return mass.value();
}

/// `x` in packs, `at_once` of them a call, the last one filled up with -infinity.
float in_packs(executor on, std::vector<float> x, int at_once) {
  log_sum_exp mass;
  run_on(on, [&](auto team) {
    constexpr std::size_t width = decltype(team)::width;
    const std::size_t step = width * count(at_once);
    while (x.size() % step != 0) x.push_back(-inf);
    typename decltype(team)::pack packs[4];
    for (std::size_t i = 0; i < x.size(); i += step) {
      for (std::size_t p = 0; p < count(at_once); ++p) packs[p] = team.load(&x[i + p * width]);
      mass.add(team, packs, at_once);
    }
  });
  return mass.value();
}

/// The value by every way of adding.
std::vector<float> all_ways(const std::vector<float>& x) {
  std::vector<float> values{one_by_one(x)};
  for (const executor on : executors())
    for (const int at_once : {1, 2, 4}) values.push_back(in_packs(on, x, at_once));
  return values;
}

}  // namespace

TEST_CASE("nothing, and nothing but -infinity, sum to -infinity", "[log_sum_exp]") {
  CHECK(log_sum_exp{}.value() == -inf);
  for (const float value : all_ways({})) CHECK(value == -inf);
  for (const float value : all_ways({-inf, -inf, -inf})) CHECK(value == -inf);
}

TEST_CASE("a log-sum-exp is float64's to rounding, whatever the order and the size of its terms",
          "[log_sum_exp]") {
  dice d(1);
  for (int trial = 0; trial < 200; ++trial) {
    auto x = normals(d, count(d.between(1, 60)), d.one_of({0.01f, 1.0f, 30.0f, 1e4f}));
    const float shift = d.one_of({0.0f, 100.0f, -1000.0f, 1e6f});
    for (float& value : x) value = d.below(10) == 0 ? -inf : value + shift;
    for (const bool ascending : {true, false}) {
      std::sort(x.begin(), x.end());
      if (!ascending) std::reverse(x.begin(), x.end());
      const double expected = exact(x);
      for (const float value : all_ways(x))
        CHECK(is_near(value, expected, 2e-6 * std::max(1.0, std::fabs(expected))));
    }
  }
}

TEST_CASE("NaN stays, wherever it comes and whatever comes with it", "[log_sum_exp]") {
  for (const std::size_t length : {1u, 7u, 40u})
    for (std::size_t at = 0; at < length; ++at)
      for (const float other : {0.0f, -inf, inf, largest, -largest}) {
        std::vector<float> x(length, other);
        x[at] = quiet_nan;
        for (const float value : all_ways(x)) CHECK(std::isnan(value));
      }
}

TEST_CASE("+infinity stays, unless NaN comes", "[log_sum_exp]") {
  for (std::size_t at = 0; at < 20; ++at)
    for (const float other : {0.0f, -inf, inf, largest, -largest}) {
      std::vector<float> x(20, other);
      x[at] = inf;
      for (const float value : all_ways(x)) CHECK(value == inf);
    }
}

TEST_CASE("the largest floats are summed without leaving the range", "[log_sum_exp]") {
  for (const float value : all_ways({largest, largest, 0.0f, -largest})) CHECK(value == largest);
  for (const float value : all_ways({-largest, -largest})) CHECK(value == -largest);
  for (const float value : all_ways({-largest, -inf, 3.0f})) CHECK(value == 3.0f);
}

TEST_CASE("raise returns what sums relative to the old maximum are multiplied by", "[log_sum_exp]") {
  log_sum_exp mass;
  CHECK(mass.raise(2.0f) == 0.0f);  // there were none
  mass.sum = 3.0f;
  CHECK(mass.raise(4.0f) == Approx(std::exp(-2.0)));
  CHECK(mass.max == 4.0f);
  CHECK(mass.sum == Approx(3.0 * std::exp(-2.0)));
  CHECK(std::isnan(mass.raise(quiet_nan)));
  CHECK(std::isnan(mass.raise(100.0f)));
  CHECK(std::isnan(mass.max));
}
