// Intervals: against numbers worked out by hand or printed in textbooks, and how often they hold what they
// should.

#include "statistics.hpp"

#include <cmath>
#include <random>
#include <stdexcept>

#include "../catch.hpp"
#include "../sanitized.hpp"

namespace {

using namespace freekv::examples;
using series = std::vector<std::vector<double>>;

/// Values that each keep `kept` of the one before: their mean is 0.
series dependent_values(std::uint64_t seed, int texts, int steps, double kept) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  series all;
  for (int t = 0; t < texts; ++t) {
    auto& values = all.emplace_back();
    double value = normal(random) / std::sqrt(1 - kept * kept);
    for (int i = 0; i < steps; ++i) values.push_back(value = kept * value + normal(random));
  }
  return all;
}

/// Of 200 series of that kind, the share that have 0 in their interval; under a sanitizer of 10, which say
/// little of it.
template <class Interval>
double covering(double kept, const Interval& interval) {
  const std::uint64_t trials = tests::sanitized ? 10 : 200;
  int covering = 0;
  for (std::uint64_t seed = 1; seed <= trials; ++seed)
    covering += interval(dependent_values(seed, 3, 1024, kept)).contains(0);
  return static_cast<double>(covering) / static_cast<double>(trials);
}

}  // namespace

TEST_CASE("blocks keep the dependence of neighbours, which single values lose", "[statistics]") {
  const auto blocks = [](const series& s) { return block_bootstrap(s); };
  const auto single = [](const series& s) { return block_bootstrap(s, 1); };
  const double slack = tests::sanitized ? 0.3 : 0;
  CHECK(covering(0, blocks) >= 0.9 - slack);
  CHECK(covering(0, single) >= 0.9 - slack);
  // A little short of 0.95, as blocks cut some of the dependence.
  CHECK(covering(0.9, blocks) >= 0.85 - slack);
  CHECK(covering(0.9, single) < 0.55 + slack);
}

TEST_CASE("a median's interval is between the values that a binomial table names", "[statistics]") {
  std::vector<double> values;
  for (int i = 1; i <= 20; ++i) values.push_back(21 - i);
  const estimate of_20 = median_interval(values);  // with 20 values the 6th and the 15th
  CHECK(of_20.value == 10.5);
  CHECK(of_20.low == 6);
  CHECK(of_20.high == 15);
  values.resize(16);  // 20 .. 5, of which the 4th and the 13th
  CHECK(median_interval(values).low == 8);
  CHECK(median_interval(values).high == 17);
  // 0.0625 of all medians are outside of 5 values, 0.03125 of 6.
  CHECK(std::isnan(median_interval({1, 2, 3, 4, 5}).low));
  CHECK(median_interval({3, 1, 2}).value == 2);
  CHECK(median_interval({6, 2, 3, 4, 5, 1}).low == 1);
  CHECK(median_interval({6, 2, 3, 4, 5, 1}).high == 6);
  // One value far off moves neither the median nor its interval.
  values.back() = 1e9;
  CHECK(median_interval(values).high <= 18);
}

TEST_CASE("a median's interval holds it in 95 of 100 series", "[statistics]") {
  std::mt19937_64 random(5);
  std::lognormal_distribution<double> skewed;  // of median 1
  const int trials = 2000;
  for (const int n : {12, 25, 60}) {
    int covering = 0;
    for (int trial = 0; trial < trials; ++trial) {
      std::vector<double> values;
      for (int i = 0; i < n; ++i) values.push_back(skewed(random));
      covering += median_interval(values).contains(1);
    }
    CHECK(covering >= 0.94 * trials);
    CHECK(covering < 0.99 * trials);
  }
}

TEST_CASE("a mean's interval is that of the values, and repeats", "[statistics]") {
  const series values = dependent_values(3, 2, 256, 0.0);
  const estimate e = block_bootstrap(values);
  double sum = 0;
  for (const auto& one : values)
    for (const double v : one) sum += v;
  CHECK(e.value == Approx(sum / 512));
  CHECK(e.low < e.value);
  CHECK(e.value < e.high);
  const estimate same = block_bootstrap(values), other = block_bootstrap(values, 64, 2);
  CHECK((same.low == e.low && same.high == e.high));
  CHECK((other.low != e.low || other.high != e.high));
  const estimate constant = block_bootstrap(series{{2, 2, 2}, {2, 2}});
  CHECK((constant.value == 2 && constant.low == 2 && constant.high == 2));
  CHECK(std::isnan(block_bootstrap(series{{1}}).low));
  CHECK_THROWS_AS(block_bootstrap(series{}), std::invalid_argument);
  CHECK_THROWS_AS(block_bootstrap(series{{1, 2}, {}}), std::invalid_argument);
}

TEST_CASE("groups are resampled whole", "[statistics]") {
  // Values alike within a group: 20 of them say no more than the group's one.
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  series many, once;
  for (int g = 0; g < 12; ++g) {
    once.push_back({normal(random)});
    many.push_back(std::vector<double>(20, once.back()[0]));
  }
  const estimate of_many = group_bootstrap(many), of_once = group_bootstrap(once);
  CHECK(of_many.value == Approx(of_once.value));
  CHECK(of_many.low == Approx(of_once.low));
  CHECK(of_many.high == Approx(of_once.high));
  CHECK(of_once.high - of_once.low > 0.5);
  CHECK(std::isnan(group_bootstrap(series{{1, 2, 3}}).high));
}

TEST_CASE("Wilson's interval and McNemar's test are those of the books", "[statistics]") {
  const estimate none = share_of(0, 10), some = share_of(7, 10), all = share_of(96, 96);
  CHECK(none.low == 0);
  CHECK(none.high == Approx(0.2775).margin(1e-4));
  CHECK(some.value == Approx(0.7));
  CHECK(some.low == Approx(0.3968).margin(1e-4));
  CHECK(some.high == Approx(0.8922).margin(1e-4));
  CHECK(all.high == 1);
  CHECK(all.low == Approx(0.9615).margin(1e-4));
  CHECK_THROWS_AS(share_of(3, 2), std::invalid_argument);
  CHECK_THROWS_AS(share_of(0, 0), std::invalid_argument);

  CHECK(mcnemar(0, 0) == 1);
  CHECK(mcnemar(3, 3) == 1);
  CHECK(mcnemar(0, 5) == Approx(2.0 / 32));
  CHECK(mcnemar(5, 0) == Approx(2.0 / 32));
  CHECK(mcnemar(1, 7) == Approx(2 * 9.0 / 256));
  CHECK(mcnemar(2, 11) == Approx(2 * (1 + 13 + 78) / 8192.0));
}

TEST_CASE("a percentile is one of the values", "[statistics]") {
  CHECK_THROWS_AS(percentile({}, 0.5), std::invalid_argument);
  CHECK_THROWS_AS(median({}), std::invalid_argument);
  std::vector<double> values;
  for (int i = 100; i > 0; --i) values.push_back(i);
  CHECK(percentile(values, 0.99) == 99);
  CHECK(percentile(values, 1) == 100);
  CHECK(percentile(values, 0) == 1);
  CHECK(percentile({4}, 0.99) == 4);
}
