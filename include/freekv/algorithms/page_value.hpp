// The value that stands for a page: head_dim numbers of 8 bits and their scale.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/config.hpp>

namespace freekv::detail {

/// Bytes of a page's value.
FREEKV_HD constexpr std::size_t page_value_bytes(int head_dim) {
  return sizeof(float) + static_cast<std::size_t>(head_dim);
}

/// Writes `numbers` (head_dim); if one of them is not finite the page has no value then.
FREEKV_HD inline void write_page_value(const float* numbers, int head_dim, std::byte* stored) {
  constexpr float largest_code = 127.0f;
  float largest = 0.0f, zero_if_finite = 0.0f;
  for (int i = 0; i < head_dim; ++i) {
    const float size = ::fabsf(numbers[i]);
    largest = size > largest ? size : largest;
    zero_if_finite += 0.0f * numbers[i];
  }
  const bool finite = zero_if_finite == 0.0f;
  const bool zeros = !(largest > 1e-30f);  // else their scale could be denormal
  const float scale = !finite ? 0.0f : zeros ? 1.0f : largest / largest_code;
  const float inverse = !finite || zeros ? 0.0f : largest_code / largest;
  std::memcpy(stored, &scale, sizeof scale);
  auto* const codes = reinterpret_cast<std::int8_t*>(stored + sizeof scale);
  for (int i = 0; i < head_dim; ++i)
    codes[i] = finite ? static_cast<std::int8_t>(::rintf(numbers[i] * inverse)) : std::int8_t{0};
}

/// The scale of a page's value; 0 where it has none, which is so where all bytes are 0.
FREEKV_HD inline float scale_of_page_value(const std::byte* stored) {
  float scale = 0.0f;
  std::memcpy(&scale, stored, sizeof scale);
  return scale;
}

/// Reads a page's value to `numbers` (head_dim); false, and nothing is written, where it has none.
FREEKV_HD inline bool read_page_value(const std::byte* stored, int head_dim, float* numbers) {
  const float scale = scale_of_page_value(stored);
  if (scale == 0.0f) return false;
  const auto* const codes = reinterpret_cast<const std::int8_t*>(stored + sizeof scale);
  for (int i = 0; i < head_dim; ++i) numbers[i] = scale * static_cast<float>(codes[i]);
  return true;
}

}  // namespace freekv::detail
