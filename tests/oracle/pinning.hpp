// Units that are selected whatever their scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "numbers.hpp"
#include "selection.hpp"
#include "settings.hpp"

namespace oracle {

/// How unlike a unit's keys are: the least cosine of one of them with their mean, negated; NaN where one has
/// none.
inline double unlikeness(const std::vector<std::span<const float>>& keys) {
  std::vector<double> mean(keys[0].size(), 0.0);
  for (std::span<const float> key : keys)
    for (std::size_t i = 0; i < mean.size(); ++i)
      mean[i] += static_cast<double>(key[i]) / static_cast<double>(keys.size());
  double most = -infinity;
  for (std::span<const float> key : keys) {
    const std::vector<double> of_key(key.begin(), key.end());
    const double cosine = dot(of_key, mean) / (std::sqrt(dot(of_key, of_key)) * std::sqrt(dot(mean, mean)));
    most = max_or_nan(most, -cosine);
  }
  return most;
}

/// The units pinned, and whether another implementation must pin the same.
struct pins {
  std::vector<int> units;
  bool firm = true;
};

/// The `count` of `units` that are most unlike; `unlikeness_of` is by unit, and NaN is least.
inline pins pin(const std::vector<int>& units, const std::vector<double>& unlikeness_of, int count) {
  std::vector<double> worth;
  for (int unit : units) {
    const double of_unit = unlikeness_of[unit];
    worth.push_back(std::isnan(of_unit) ? -infinity : of_unit);
  }
  const selection chosen = top_k(units, worth, count);
  // Float32's squares of keys overflow and underflow long before float64's.
  bool in_range = true;
  for (int unit : units) in_range = in_range && std::isfinite(unlikeness_of[unit]);
  return {chosen.pages, chosen.margin > 1e-4 && (in_range || chosen.margin == infinity)};
}

/// `units` without those.
inline std::vector<int> without(const std::vector<int>& units, const std::vector<int>& pinned) {
  std::vector<int> others;
  std::set_difference(units.begin(), units.end(), pinned.begin(), pinned.end(), std::back_inserter(others));
  return others;
}

/// The selection with them.
inline selection with_pinned(selection chosen, const pins& pinned) {
  std::vector<int> all;
  std::merge(chosen.pages.begin(), chosen.pages.end(), pinned.units.begin(), pinned.units.end(),
             std::back_inserter(all));
  chosen.pages = all;
  chosen.kept_firm = chosen.kept_firm && pinned.firm;
  return chosen;
}

}  // namespace oracle
