// Rows of elements to floats and back, in integer arithmetic without branches, which compilers vectorise for
// any target.
#pragma once

#include <freekv/core/element.hpp>

namespace freekv {

namespace detail {

FREEKV_HD inline float float_of_f16(std::uint16_t x) {
  const std::uint32_t magnitude = (x & 0x7fffu) << 13;
  // The exponents differ by 112. A subnormal number is made with an exponent of one more and its leading 1
  // taken away.
  const std::uint32_t subnormal = bits_of(float_of(magnitude + (113u << 23)) - 0x1p-14f);
  const std::uint32_t number = select_bits(magnitude < (1u << 23), subnormal, magnitude + (112u << 23));
  const std::uint32_t bits = select_bits(magnitude >= (0x7c00u << 13), magnitude | 0x7f800000u, number);
  return float_of(bits | (x & 0x8000u) << 16);
}
FREEKV_HD inline std::uint16_t f16_of_float(float x) {
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  constexpr std::uint32_t most = 0x47800000u;  // 65536, which becomes infinity
  const std::uint32_t kept = magnitude < most ? magnitude : most;
  const std::uint32_t normal = (kept + 0xfffu + ((kept >> 13) & 1u) - (112u << 23)) >> 13;
  // Subnormal numbers are multiples of 2^-24, as floats from 1/2 on are.
  const std::uint32_t subnormal = bits_of(float_of(kept) + 0.5f) - 0x3f000000u;
  const std::uint32_t code =
      select_bits(kept < 0x38800000u, subnormal, normal) | (bits_of(x) >> 16 & 0x8000u);
  return static_cast<std::uint16_t>(select_bits(magnitude > 0x7f800000u, 0x7fffu, code));
}
FREEKV_HD inline std::uint16_t bf16_of_float(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t code = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>(select_bits((bits & 0x7fffffffu) > 0x7f800000u, 0x7fffu, code));
}

}  // namespace detail

/// `N` elements as floats.
template <int N, storage_element E>
FREEKV_HD void widen_row(const E* __restrict in, float* __restrict out) {
  if constexpr (std::same_as<E, half>) {
    const auto* bits = reinterpret_cast<const std::uint16_t*>(in);
    for (int i = 0; i < N; ++i) out[i] = detail::float_of_f16(bits[i]);
  } else if constexpr (std::same_as<E, bfloat16>) {
    const auto* bits = reinterpret_cast<const std::uint16_t*>(in);
    for (int i = 0; i < N; ++i) out[i] = detail::float_of(std::uint32_t{bits[i]} << 16);
  } else {
    for (int i = 0; i < N; ++i) out[i] = to_float(in[i]);
  }
}

/// Floats to elements, rounded as from_float rounds.
template <int N, storage_element E>
FREEKV_HD void narrow_row(const float* __restrict in, E* __restrict out) {
  if constexpr (std::same_as<E, half>) {
    auto* bits = reinterpret_cast<std::uint16_t*>(out);
    for (int i = 0; i < N; ++i) bits[i] = detail::f16_of_float(in[i]);
  } else if constexpr (std::same_as<E, bfloat16>) {
    auto* bits = reinterpret_cast<std::uint16_t*>(out);
    for (int i = 0; i < N; ++i) bits[i] = detail::bf16_of_float(in[i]);
  } else {
    for (int i = 0; i < N; ++i) out[i] = from_float<E>(in[i]);
  }
}

}  // namespace freekv
