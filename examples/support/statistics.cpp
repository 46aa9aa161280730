#include "statistics.hpp"

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>

namespace freekv::examples {

namespace {

constexpr int resamples = 4000;

double mean_of_all(std::span<const std::vector<double>> series) {
  double sum = 0;
  std::size_t count = 0;
  for (const auto& one : series) {
    if (one.empty()) throw std::invalid_argument("a series of no values has no mean; leave it out");
    sum = std::accumulate(one.begin(), one.end(), sum);
    count += one.size();
  }
  if (count == 0) throw std::invalid_argument("no values have no mean; give at least one");
  return sum / static_cast<double>(count);
}

/// Below `count`. Not std::uniform_int_distribution, which differs between standard libraries.
std::size_t below(std::mt19937_64& random, std::size_t count) {
  return to_size(static_cast<double>(random() >> 11) * 0x1p-53 * static_cast<double>(count));
}

/// Of the mean `value`, by the means that `resample` draws.
template <class Resample>
estimate by_percentiles(double value, const Resample& resample) {
  std::vector<double> means(resamples);
  for (double& mean : means) mean = resample();
  return {value, percentile(means, 0.025), percentile(means, 0.975)};
}

/// Of exactly `heads` in `n` tosses.
double chance_of_heads(int heads, int n) {
  return std::exp(std::lgamma(n + 1.0) - std::lgamma(heads + 1.0) - std::lgamma(n - heads + 1.0) -
                  n * std::log(2.0));
}

estimate unknown(double value) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  return {value, nan, nan};
}

}  // namespace

estimate block_bootstrap(std::span<const std::vector<double>> series, int block, std::uint64_t seed) {
  const double value = mean_of_all(series);
  std::size_t values = 0, shortest = std::numeric_limits<std::size_t>::max();
  for (const auto& one : series) values += one.size(), shortest = std::min(shortest, one.size());
  if (values < 2) return unknown(value);
  const std::size_t length = std::clamp<std::size_t>(shortest / 8, 1, to_size(block));
  // A place is where a block may begin: the sum of the block from there, by differences of running sums.
  std::vector<double> sums;
  for (const auto& one : series) {
    std::vector<double> running(one.size() + 1, 0.0);
    std::partial_sum(one.begin(), one.end(), running.begin() + 1);
    for (std::size_t first = 0; first + length <= one.size(); ++first)
      sums.push_back(running[first + length] - running[first]);
  }
  const std::size_t blocks = (values + length - 1) / length;
  std::mt19937_64 random(seed);
  return by_percentiles(value, [&] {
    double sum = 0;
    for (std::size_t i = 0; i < blocks; ++i) sum += sums[below(random, sums.size())];
    return sum / static_cast<double>(blocks * length);
  });
}

estimate group_bootstrap(std::span<const std::vector<double>> groups, std::uint64_t seed) {
  const double value = mean_of_all(groups);
  if (groups.size() < 2) return unknown(value);
  std::vector<double> sums;
  for (const auto& group : groups) sums.push_back(std::accumulate(group.begin(), group.end(), 0.0));
  std::mt19937_64 random(seed);
  return by_percentiles(value, [&] {
    double sum = 0;
    std::size_t count = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const std::size_t drawn = below(random, groups.size());
      sum += sums[drawn];
      count += groups[drawn].size();
    }
    return sum / static_cast<double>(count);
  });
}

estimate share_of(int hits, int all) {
  if (hits < 0 || hits > all || all < 1)
    throw std::invalid_argument(std::to_string(hits) + " of " + std::to_string(all) + " is no share");
  constexpr double z = 1.959963984540054;
  const double n = all, p = hits / n;
  const double centre = (p + z * z / (2 * n)) / (1 + z * z / n);
  const double half = z / (1 + z * z / n) * std::sqrt(p * (1 - p) / n + z * z / (4 * n * n));
  return {p, std::max(0.0, centre - half), std::min(1.0, centre + half)};
}

double mcnemar(int only_first, int only_second) {
  const int n = only_first + only_second, fewer = std::min(only_first, only_second);
  double probability = 0;
  for (int k = 0; k <= fewer; ++k) probability += chance_of_heads(k, n);
  return std::min(1.0, 2 * probability);
}

double median(std::vector<double> values) {
  if (values.empty()) throw std::invalid_argument("a median of no value");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 != 0) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

estimate median_interval(std::vector<double> values) {
  const double value = median(values);
  const int n = static_cast<int>(values.size());
  int outside = 0;  // of the sorted values on either side
  double below = 0;
  for (; outside < n; ++outside) {
    below += chance_of_heads(outside, n);
    if (2 * below > 0.05) break;
  }
  if (outside == 0) return unknown(value);
  std::sort(values.begin(), values.end());
  return {value, values[to_size(outside - 1)], values[to_size(n - outside)]};
}

double percentile(std::vector<double> values, double share) {
  if (values.empty()) throw std::invalid_argument("a percentile of no value");
  const auto n = static_cast<double>(values.size());
  const auto at = to_size(std::clamp(std::ceil(share * n) - 1, 0.0, n - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

}  // namespace freekv::examples
