// How the numbers of a summary are kept: in the key's type, in float32 or in int8.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "codes.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

/// The nearest number of the type, ties to the even one; beyond its range an infinity.
inline double rounded_to(double x, element_kind element) {
  if (!std::isfinite(x) || x == 0.0) return x;
  const bool half = element == element_kind::f16;
  const int precision = half ? 11 : element == element_kind::bf16 ? 8 : 24;
  const int largest_exponent = half ? 15 : 127;
  // Below the smallest normal number the distance between neighbours stays what it is there.
  const int exponent = std::max(std::ilogb(x), 1 - largest_exponent);
  const double quantum = std::ldexp(1.0, exponent - (precision - 1));
  const double rounded = std::nearbyint(x / quantum) * quantum;
  return std::fabs(rounded) >= std::ldexp(1.0, largest_exponent + 1) ? std::copysign(infinity, x) : rounded;
}

/// How far `rounded_to` may move when x may move by `error`; infinite where it may leave the range.
inline double rounding_doubt(double x, double error, element_kind element) {
  const double rounded = rounded_to(x, element);
  double doubt = 0.0;
  for (double other : {rounded_to(x - error, element), rounded_to(x + error, element)})
    if (other != rounded) doubt = max_or_nan(doubt, std::fabs(other - rounded));
  return std::isnan(doubt) ? 0.0 : doubt;
}

/// A summary before it is stored: its numbers, and what the absolute terms of each add up to (0 for a number
/// that no sum made).
struct summary_numbers {
  std::vector<double> values;
  std::vector<double> sizes;

  void add(double value, double size) {
    values.push_back(value);
    sizes.push_back(size);
  }
};

/// A code of key_codes that another implementation may choose instead: of the page's mean (row 0) or of its
/// token row - 1. Of key_clusters a cluster, with row and group 0.
struct other_code {
  int row;
  int group;
  int code;

  bool operator==(const other_code&) const = default;
};

/// `values` is what the policy stores, read back (of key_codes the codes themselves); `doubt` how far a value
/// may legitimately differ (empty: none may, except as `others` says).
struct page_summary {
  std::vector<double> values;
  std::vector<double> doubt;
  std::vector<other_code> others = {};    // of key_codes and key_clusters
  std::vector<page_summary> stages = {};  // of coarse_to_fine, which has nothing else: coarse, then fine
};

/// Float32 keeps a double as it is: its rounding is that of any float32 sum, which margins allow for.
inline page_summary stored(const settings& s, const summary_numbers& numbers) {
  stored_format format = s.format;
  if (format == stored_format::standard)
    format = s.summary == summary_kind::min_max ? stored_format::key : stored_format::float32;
  if (format == stored_format::float32) return {numbers.values, {}};

  page_summary summary;
  const std::size_t count = numbers.values.size();
  if (format == stored_format::key) {
    if (s.element == element_kind::f32) return {numbers.values, {}};
    for (std::size_t i = 0; i < count; ++i) {
      summary.values.push_back(rounded_to(numbers.values[i], s.element));
      summary.doubt.push_back(
          rounding_doubt(numbers.values[i], float_sum_error * numbers.sizes[i], s.element));
    }
    return summary;
  }
  const auto group = static_cast<std::size_t>(s.head_dim);
  for (std::size_t first = 0; first < count; first += group) {
    const auto from = static_cast<std::ptrdiff_t>(first);
    const auto to = static_cast<std::ptrdiff_t>(std::min(first + group, count));
    const std::vector<double> values(numbers.values.begin() + from, numbers.values.begin() + to);
    const std::vector<double> sizes(numbers.sizes.begin() + from, numbers.sizes.begin() + to);
    for (double value : quantised(values, 8)) summary.values.push_back(value);
    for (double doubt : code_doubt(values, sizes, 8)) summary.doubt.push_back(doubt);
  }
  return summary;
}

}  // namespace oracle
