// Arithmetic with a stated answer for NaN and infinity.
#pragma once

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

namespace oracle {

inline constexpr double infinity = std::numeric_limits<double>::infinity();
inline constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();
inline constexpr double largest_float = std::numeric_limits<float>::max();
inline constexpr double cosine_error = 1e-5;  // what a pooled cosine in float32 may be off by

/// Row `index` of a matrix with `width` columns.
template <class T>
std::span<const T> row_of(std::span<const T> matrix, int index, int width) {
  return matrix.subspan(static_cast<std::size_t>(index) * static_cast<std::size_t>(width),
                        static_cast<std::size_t>(width));
}

template <class T>
std::span<const T> row_of(const std::vector<T>& matrix, int index, int width) {
  return row_of(std::span<const T>(matrix), index, width);
}

template <class A, class B>
double dot(const A& a, const B& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

// std::max and std::min drop a NaN in one of their places; a NaN key has to reach the page's score.
inline double max_or_nan(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return not_a_number;
  return a > b ? a : b;
}

inline double min_or_nan(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return not_a_number;
  return a < b ? a : b;
}

/// ln sum_i exp(x_i): NaN if any x is NaN, +inf if any is +inf, -inf for none or only -inf.
inline double log_sum_exp(const std::vector<double>& x) {
  double top = -infinity;
  for (double value : x) top = max_or_nan(top, value);
  // At an infinite top the shifted form would compute inf - inf.
  if (std::isnan(top) || std::isinf(top)) return top;
  double sum = 0.0;
  for (double value : x) sum += std::exp(value - top);
  return top + std::log(sum);
}

}  // namespace oracle
