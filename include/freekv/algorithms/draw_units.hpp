// Candidates drawn by estimates of their masses, with replacement.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/core/splitmix.hpp>
#include <span>

namespace freekv::detail {

/// A number from 0 to below 1 that is a function of `numbers` alone: splitmix64 of one after the other.
inline double uniform_of(std::span<const std::uint64_t> numbers) {
  std::uint64_t bits = 0;
  for (const std::uint64_t number : numbers) bits = splitmix64(bits + number);
  return unit_interval(bits);
}

struct drawn_unit {
  int nth = 0;  // among the candidates
  double probability = 0.0;
};

/// Share of a probability that all candidates have alike, lest one whose estimate is far too low is never
/// drawn.
inline constexpr double drawn_alike = 0.0625;

/// Draws as many candidates as there are numbers `at`, of 0 to below 1, ascending: candidate j with a
/// probability in proportion to `weights[j]` but for what all have alike. Those below 0 are not drawn; others
/// are at least one. Where all weights are 0, all are alike. Returns false, and draws nothing, where the
/// weights' sum is not a finite number.
inline bool draw_units(std::span<const float> weights, std::span<const double> at,
                       std::span<drawn_unit> drawn) {
  double sum = 0.0;
  int count = 0;
  for (const float weight : weights)
    if (!(weight < 0.0f)) sum += weight, ++count;
  if (!std::isfinite(sum)) return false;
  const double alike = (sum > 0.0 ? drawn_alike : 1.0) / count,
               in_proportion = sum > 0.0 ? (1.0 - drawn_alike) / sum : 0.0;
  double below = 0.0;
  drawn_unit last;
  std::size_t i = 0;
  for (std::size_t j = 0; j < weights.size() && i < at.size(); ++j) {
    if (weights[j] < 0.0f) continue;
    last = {static_cast<int>(j), in_proportion * double{weights[j]} + alike};
    below += last.probability;
    for (; i < at.size() && at[i] < below; ++i) drawn[i] = last;
  }
  for (; i < at.size(); ++i) drawn[i] = last;  // behind a sum that rounding has left below 1
  return true;
}

}  // namespace freekv::detail
