// How far a measurement is: intervals of means whose values depend on their neighbours, of shares, and of
// answers paired by question. Random numbers come from a seed alone, so the same values give the same
// interval everywhere.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace freekv::examples {

/// A number and where 95 % of its resamples, or of the numbers that would give it, lie.
struct estimate {
  double value = 0, low = 0, high = 0;
  bool contains(double x) const { return low <= x && x <= high; }
};

/// The mean of all values of several series. Neighbours in a series depend on each other, so resamples are
/// made of blocks of `block` consecutive values, of an eighth of the shortest series where that is less:
/// overlapping ones, of whichever series (moving block bootstrap, percentiles of 4,000 resamples). NaN bounds
/// for fewer than 2 values. Throws std::invalid_argument where there is no value, or an empty series.
estimate block_bootstrap(std::span<const std::vector<double>> series, int block = 64, std::uint64_t seed = 1);

/// The mean of all values, where those of a group, such as the questions on one text, depend on each other:
/// whole groups are resampled. NaN bounds for one group.
estimate group_bootstrap(std::span<const std::vector<double>> groups, std::uint64_t seed = 1);

/// A share of `all` by Wilson's interval, which holds for few and for shares near 0 and 1. Throws
/// std::invalid_argument unless 0 <= hits <= all and all > 0.
estimate share_of(int hits, int all);

/// The probability, if two methods were alike, of a split at least as uneven of the questions that exactly
/// one of them has right: McNemar's test, exact and two-sided. 1 without such questions.
double mcnemar(int only_first, int only_second);

/// Of an even number of values the mean of the two in the middle. Throws std::invalid_argument for none.
double median(std::vector<double> values);

/// The median of what the values were drawn from: between two of the sorted values, by the binomial
/// distribution of how many are below it. NaN bounds for fewer than 6 values, of which even the smallest and
/// the largest are too close.
estimate median_interval(std::vector<double> values);

/// The value that a share of `values`, from 0 to 1, is not above: of the sorted values the one at ceil(share
/// * n). Throws std::invalid_argument for none.
double percentile(std::vector<double> values, double share);

}  // namespace freekv::examples
