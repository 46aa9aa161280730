// Numbers as small integers times one scale, and which of these integers another implementation may see
// otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "numbers.hpp"

namespace oracle {

/// A float32 sum may be off by this part of what its absolute terms add up to.
inline constexpr double float_sum_error = 1e-6;

/// The distance between two neighbouring codes: max|c| / (2^(bits-1) - 1), NaN if any c is NaN.
inline double code_step(const std::vector<double>& c, int bits) {
  double largest = 0.0;
  for (double value : c) largest = max_or_nan(largest, std::fabs(value));
  return largest / static_cast<double>((1 << (bits - 1)) - 1);
}

/// Numbers as they read back from their codes, all with one scale. With a NaN or infinity among them there
/// are no codes: all read back as NaN, so that a page is not chosen on invented numbers.
inline std::vector<double> quantised(const std::vector<double>& c, int bits) {
  if (bits == 32) return c;
  const double step = code_step(c, bits);
  if (!std::isfinite(step)) return std::vector<double>(c.size(), not_a_number);
  std::vector<double> back;
  for (double value : c) back.push_back(step == 0.0 ? 0.0 : std::nearbyint(value / step) * step);
  return back;
}

/// How far each number of `quantised` may move in an implementation that rounds its float32 sums elsewhere:
/// whole steps where c / step lies at the edge between two codes, else 0. `sizes[i]` is what the absolute
/// terms of c_i add up to, 0 for a number that no sum made.
inline std::vector<double> code_doubt(const std::vector<double>& c, const std::vector<double>& sizes,
                                      int bits) {
  std::vector<double> doubt(c.size(), 0.0);
  if (bits == 32) return doubt;
  const double step = code_step(c, bits);
  if (!std::isfinite(step) || step == 0.0) return doubt;
  // The step is a float32 sum's too, and the sum that made the largest number may have cancelled.
  double largest = 0.0, largest_size = 0.0;
  for (std::size_t i = 0; i < c.size(); ++i) {
    largest = std::max(largest, std::fabs(c[i]));
    largest_size = std::max(largest_size, sizes[i]);
  }
  for (std::size_t i = 0; i < c.size(); ++i) {
    const double position = std::fabs(c[i]) / step;
    const double error = float_sum_error * (sizes[i] / step + position * (1.0 + largest_size / largest));
    const double code = std::nearbyint(position);
    // Both ends belong to the doubt: at the very edge a code may go either way.
    const double highest = std::floor(position + error + 0.5);
    const double lowest = std::ceil(position - error - 0.5);
    doubt[i] = step * std::max(highest - code, code - lowest);
  }
  return doubt;
}

/// One bit: the mean of |c|, with the sign of each c, 0 and -0 being positive.
inline std::vector<double> signed_means(const std::vector<double>& c) {
  double sum = 0.0;
  for (double value : c) sum += std::fabs(value);
  const double step = sum / static_cast<double>(c.size());
  if (!std::isfinite(step)) return std::vector<double>(c.size(), not_a_number);
  std::vector<double> back;
  for (double value : c) back.push_back(value >= 0.0 ? step : -step);
  return back;
}

/// As code_doubt, for `signed_means`: both signs are possible where c is within its rounding of 0.
inline std::vector<double> sign_doubt(const std::vector<double>& c, const std::vector<double>& sizes) {
  std::vector<double> doubt(c.size(), 0.0);
  const double step = std::fabs(signed_means(c)[0]);
  if (std::isnan(step)) return doubt;
  for (std::size_t i = 0; i < c.size(); ++i)
    if (sizes[i] > 0.0 && std::fabs(c[i]) <= float_sum_error * sizes[i]) doubt[i] = 2.0 * step;
  return doubt;
}

/// ln sum_t exp(exponent_t) may move by this when exponent t may move by `moves[t]`; infinite if one may move
/// without bound.
inline double log_sum_exp_doubt(const std::vector<double>& exponents, const std::vector<double>& moves) {
  std::vector<double> low, high;
  for (std::size_t t = 0; t < exponents.size(); ++t) {
    if (moves[t] == infinity) return infinity;
    low.push_back(exponents[t] - moves[t]);
    high.push_back(exponents[t] + moves[t]);
  }
  const double score = log_sum_exp(exponents);
  // What scores NaN or infinite does so whatever the codes are.
  if (!std::isfinite(score)) return 0.0;
  return std::fmax(log_sum_exp(high) - score, score - log_sum_exp(low));
}

/// <|q|, doubt>: how far <q, x> may move. A number that may become infinite makes any product possible,
/// also with a 0 in q.
template <class Q, class D>
double product_doubt(const Q& q, const D& doubt) {
  double sum = 0.0;
  for (std::size_t i = 0; i < doubt.size(); ++i) {
    if (doubt[i] == infinity) return infinity;
    if (doubt[i] > 0.0) sum += std::fabs(static_cast<double>(q[i])) * doubt[i];
  }
  return sum;
}

}  // namespace oracle
