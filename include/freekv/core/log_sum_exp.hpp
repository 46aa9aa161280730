// A running ln(sum of exponentials), and the merge that every split of attention or scoring uses.
#pragma once

#include <cmath>
#include <freekv/config.hpp>
#include <freekv/core/team.hpp>
#include <limits>

namespace freekv {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

/// `ln sum exp(x)` of what was added, as a maximum and a sum relative to it. Empty: -infinity. An x of NaN
/// makes it NaN, one of +infinity makes it +infinity.
struct log_sum_exp {
  float max = -infinity;
  float sum = 0.0f;

  FREEKV_HD void add(float x) {
    if (x <= max) {
      if (max < infinity && x > -infinity) sum = rounded_sum(sum, ::expf(x - max));
    } else {  // larger, or NaN
      raise(x);
      sum = rounded_sum(sum, 1.0f);
    }
  }

  /// Adds all lanes of `count` packs, in an order fixed by the team's width.
  template <team T>
  FREEKV_HD void add(T team, const typename T::pack* x, int count) {
    auto largest = x[0];
    for (int i = 1; i < count; ++i) largest = team.maximum(largest, x[i]);
    const float m = team.max(largest);
    if (!(m <= max)) raise(m);
    if (!(max > -infinity && max < infinity)) return;
    const typename T::pack base(max);
    auto total = team.bounded_exp(x[0] - base);
    for (int i = 1; i < count; ++i) total = total + team.bounded_exp(x[i] - base);
    sum = rounded_sum(sum, team.sum(total));
  }

  /// Adds what another has added, of parts that lie behind: parts are always merged in page order.
  FREEKV_HD void add(const log_sum_exp& behind) {
    if (behind.max == -infinity) return;
    if (!(behind.max <= max)) raise(behind.max);
    sum = rounded_sum(sum, behind.sum * ::expf(behind.max - max));
  }

  /// Makes the larger (or NaN) `m` the maximum; returns what sums relative to the old one are multiplied by.
  FREEKV_HD float raise(float m) {
    if (max != max) return max;  // NaN stays
    const float factor = max > -infinity ? ::expf(max - m) : 0.0f;
    sum *= factor;
    max = m;
    return factor;
  }

  /// exp(x) as a share of the sum: not from `value()`, in which a maximum of 1e7 or more leaves no room for
  /// the logarithm of the sum.
  FREEKV_HD float share(float x) const { return x > -infinity ? ::expf(x - max) / sum : 0.0f; }

  FREEKV_HD float value() const {
    return max > -infinity && max < infinity ? rounded_sum(max, ::logf(sum)) : max;
  }
};

}  // namespace freekv
