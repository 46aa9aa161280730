// Has a KV head's query turned too far since it made the selection in use?
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

struct drift_result {
  bool flagged = false;
  bool forced = false;           // flagged without a comparison
  double pooled = not_a_number;  // cosines of the group, pooled; NaN where forced
  bool norm_borderline = false;  // float32 may legitimately see other norms, hence another flag
};

/// The norm as float32 sees it: the flag depends on when this over- or underflows.
inline float float_norm(std::span<const float> x) {
  float sum = 0.0F;
  for (float element : x) sum += element * element;
  return std::sqrt(sum);
}

inline bool usable(float norm) { return norm != 0.0F && std::isfinite(norm); }

/// The sum of squares is so large that the order of summation decides whether it overflows, or so small
/// that subnormal rounding has eaten the cosine's precision.
inline bool is_norm_borderline(std::span<const float> x) {
  const double squares = dot(x, x);
  const double smallest = static_cast<double>(std::numeric_limits<float>::min());
  if (std::fabs(squares / largest_float - 1.0) < 1e-4) return true;
  return float_norm(x) != 0.0F && squares < smallest * static_cast<double>(x.size());
}

/// `q` and `previous` are (G, d): one KV head's group now, and when it made the selection in use.
inline drift_result drift(std::span<const float> q, std::span<const float> previous, int group, double tau,
                          drift_pool_kind pool = drift_pool_kind::mean) {
  const int d = static_cast<int>(q.size()) / group;
  drift_result result;
  double sum = 0.0, least = infinity, largest = -infinity;
  for (int g = 0; g < group; ++g) {
    const std::span<const float> now = row_of(q, g, d);
    const std::span<const float> then = row_of(previous, g, d);
    const float norm_now = float_norm(now);
    const float norm_then = float_norm(then);
    if (is_norm_borderline(now) || is_norm_borderline(then)) result.norm_borderline = true;
    if (!usable(norm_now) || !usable(norm_then) || !usable(norm_now * norm_then)) {
      result.forced = true;
      continue;
    }
    const double cosine = dot(now, then) / (std::sqrt(dot(now, now)) * std::sqrt(dot(then, then)));
    sum += cosine;
    least = std::min(least, cosine);
    largest = std::max(largest, cosine);
  }
  if (!result.forced)
    result.pooled = pool == drift_pool_kind::mean  ? sum / static_cast<double>(group)
                    : pool == drift_pool_kind::min ? least
                                                   : largest;
  result.flagged = result.forced || result.pooled < tau;
  return result;
}

/// One flag for all rows of a step: that of any of them. `pooled` is the smallest, NaN where a row is forced.
/// A row that is flagged beyond doubt decides, whatever is doubtful about the others.
inline drift_result drift_of_rows(const std::vector<drift_result>& rows, double tau) {
  drift_result all;
  double least = infinity;
  bool decided = false;
  for (const drift_result& row : rows) {
    all.flagged = all.flagged || row.flagged;
    all.forced = all.forced || row.forced;
    all.norm_borderline = all.norm_borderline || row.norm_borderline;
    if (!row.forced) least = std::min(least, row.pooled);
    if (!row.norm_borderline && (row.forced || row.pooled < tau - cosine_error)) decided = true;
  }
  if (!all.forced) all.pooled = least;
  if (decided) all.norm_borderline = false;
  return all;
}

}  // namespace oracle
