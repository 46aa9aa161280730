// Quantiles of Student's t.
#pragma once

#include <cmath>

namespace freekv::detail {

/// The probability that Student's t of so many degrees of freedom, 1 or more, is at most
/// `sqrt(degrees) * tan(angle)`, the angle at least 0: a finite sum.
inline double student_t_probability(double angle, int degrees) {
  const double square = std::cos(angle) * std::cos(angle);
  const bool odd = degrees % 2 != 0;
  double term = odd ? std::cos(angle) : 1.0, sum = 0.0;
  for (int i = odd ? 3 : 2; i <= degrees; i += 2) {
    sum += term;
    term *= square * (i - 1) / i;
  }
  const double within =
      odd ? (angle + std::sin(angle) * sum) * 0.63661977236758134 : std::sin(angle) * sum;  // 2 / pi
  return 0.5 + 0.5 * within;
}

/// The quantile of a probability from 0.5 to below 1: of double accuracy, by halving.
inline double student_t_quantile(double probability, int degrees) {
  double low = 0.0, high = 1.5707963267948966;
  for (int i = 0; i < 50; ++i) {
    const double middle = 0.5 * (low + high);
    (student_t_probability(middle, degrees) < probability ? low : high) = middle;
  }
  return std::sqrt(static_cast<double>(degrees)) * std::tan(low);
}

}  // namespace freekv::detail
