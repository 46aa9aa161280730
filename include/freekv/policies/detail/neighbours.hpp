// Numbers of tokens made alike to their neighbours'.
#pragma once

#include <algorithm>
#include <freekv/core/log_sum_exp.hpp>

namespace freekv::detail {

/// The largest of each `kernel` neighbours, the number in the middle one of them; -infinity stays where it
/// is. `pooled` is other memory.
inline void pool_largest(const float* numbers, int count, int kernel, float* pooled) {
  for (int i = 0; i < count; ++i) {
    const int first = std::max(0, i - kernel / 2), end = std::min(count, i + kernel / 2 + 1);
    pooled[i] = numbers[i] == -infinity ? -infinity : *std::max_element(numbers + first, numbers + end);
  }
}

/// The mean of each `kernel` neighbours, the number in the middle one of them, with nothing beyond the ends.
/// `means` is other memory.
inline void average_near(const float* numbers, int count, int kernel, float* means) {
  for (int i = 0; i < count; ++i) {
    double sum = 0.0;
    for (int j = std::max(0, i - kernel / 2); j < std::min(count, i + kernel / 2 + 1); ++j)
      sum += static_cast<double>(numbers[j]);
    means[i] = static_cast<float>(sum / kernel);
  }
}

}  // namespace freekv::detail
