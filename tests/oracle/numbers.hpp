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

// What tests spend most of their time in: four sums side by side and no sanitizer's calls
// between them, whose reports are to be about the library.
#if defined(__GNUC__) && !defined(__clang__)
#define FREEKV_ORACLE_LOOP __attribute__((no_sanitize("address", "thread", "undefined")))
#else
#define FREEKV_ORACLE_LOOP
#endif

/// The sum of products, and that of their absolute values.
struct product_sums {
  double product, size;
};

template <class A, class B>
FREEKV_ORACLE_LOOP product_sums products_of(const A* a, const B* b, std::size_t n) {
  constexpr std::size_t lanes = 4;
  double product[lanes] = {}, size[lanes] = {};
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const double term = static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
      product[lane] += term;
      size[lane] += std::fabs(term);
    }
  for (; i < n; ++i) {
    const double term = static_cast<double>(a[i]) * static_cast<double>(b[i]);
    product[0] += term;
    size[0] += std::fabs(term);
  }
  for (std::size_t lane = 1; lane < lanes; ++lane) {
    product[0] += product[lane];
    size[0] += size[lane];
  }
  return {product[0], size[0]};
}

template <class A, class B>
product_sums products_of(const A& a, const B& b) {
  return products_of(std::data(a), std::data(b), std::size(a));
}

template <class A, class B>
double dot(const A& a, const B& b) {
  return products_of(a, b).product;
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
