// Element types of keys and values, and their scalar conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <concepts>
#include <cstdint>
#include <cuda/std/bit>
#include <freekv/config.hpp>
#include <string_view>

namespace freekv {

using half = __half;
using bfloat16 = __nv_bfloat16;

/// 8 bits: a sign, 4 of exponent with bias 7, 3 of mantissa, by the convention of OCP's E4M3 ("E4M3FN"): no
/// infinity, NaN where all 7 bits are set, 448 the largest number. Keys and values may be kept in it, and
/// codecs store it; nothing computes with it.
struct fp8_e4m3 {
  std::uint8_t bits = 0;
};

/// Types of queries and outputs.
template <class T>
concept query_element = std::same_as<T, float> || std::same_as<T, half> || std::same_as<T, bfloat16>;

/// Types of keys and values in the fast tier.
template <class T>
concept element = query_element<T> || std::same_as<T, fp8_e4m3>;

/// Types that a number may be stored as: all of `element`.
template <class T>
concept storage_element = element<T>;

/// The type of queries or outputs, known at run time alone.
enum class element_type : std::uint8_t { f32, f16, bf16 };
template <query_element T>
inline constexpr element_type type_of_element = std::same_as<T, half>       ? element_type::f16
                                                : std::same_as<T, bfloat16> ? element_type::bf16
                                                                            : element_type::f32;

template <storage_element T>
inline constexpr std::string_view element_name = "f32";
template <>
inline constexpr std::string_view element_name<half> = "f16";
template <>
inline constexpr std::string_view element_name<bfloat16> = "bf16";
template <>
inline constexpr std::string_view element_name<fp8_e4m3> = "fp8";

FREEKV_HD inline float to_float(float x) { return x; }
FREEKV_HD inline float to_float(half x) { return __half2float(x); }
FREEKV_HD inline float to_float(bfloat16 x) { return __bfloat162float(x); }

namespace detail {

/// `first ? a : b` in arithmetic. Of a conditional, compilers move what only one side needs behind a branch,
/// and then do not vectorise the loop around it.
FREEKV_HD constexpr std::uint32_t select_bits(bool first, std::uint32_t a, std::uint32_t b) {
  return b ^ ((a ^ b) & (0u - static_cast<std::uint32_t>(first)));
}
FREEKV_HD inline std::uint32_t bits_of(float x) { return cuda::std::bit_cast<std::uint32_t>(x); }
FREEKV_HD inline float float_of(std::uint32_t bits) { return cuda::std::bit_cast<float>(bits); }

FREEKV_HD inline fp8_e4m3 fp8_from_float(float x) {
  const std::uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  constexpr std::uint32_t most = 0x43e00000u;  // 448
  const std::uint32_t kept = magnitude < most ? magnitude : most;
  const std::uint32_t normal = (kept + 0x7ffffu + ((kept >> 20) & 1u) - (120u << 23)) >> 20;
  // Subnormal numbers are multiples of 2^-9, as floats from 2^14 on are.
  const std::uint32_t subnormal = bits_of(float_of(kept) + 0x1p14f) - 0x46800000u;
  const std::uint32_t code = select_bits(kept < 0x3c800000u, subnormal, normal) | (bits_of(x) >> 24 & 0x80u);
  return {static_cast<std::uint8_t>(select_bits(magnitude > 0x7f800000u, 0x7fu, code))};
}

}  // namespace detail

FREEKV_HD inline float to_float(fp8_e4m3 x) {
  using namespace detail;
  const std::uint32_t magnitude = (x.bits & 0x7fu) << 20;
  // The exponents differ by 120. A subnormal number is made with an exponent of one more and its leading 1
  // taken away.
  const std::uint32_t subnormal = bits_of(float_of(magnitude + (121u << 23)) - 0x1p-6f);
  const std::uint32_t number = select_bits(magnitude < (1u << 23), subnormal, magnitude + (120u << 23));
  const std::uint32_t bits = select_bits(magnitude == (0x7fu << 20), 0x7fc00000u, number);
  return float_of(bits | (x.bits & 0x80u) << 24);
}

/// Rounds to the nearest representable value, ties to even. Beyond the range of f16 and bf16 that is an
/// infinity; fp8_e4m3 has none and saturates: 448 stands for all that is larger, infinity included. NaN stays
/// NaN.
template <storage_element T>
FREEKV_HD inline T from_float(float x) {
  if constexpr (std::same_as<T, half>)
    return __float2half_rn(x);
  else if constexpr (std::same_as<T, bfloat16>)
    return __float2bfloat16_rn(x);
  else if constexpr (std::same_as<T, fp8_e4m3>)
    return detail::fp8_from_float(x);
  else
    return x;
}

namespace detail {

/// A key's or value's number as it is stored where keys or values have a scale: divided by it, and rounded.
/// A number of fp8_e4m3 is of a cache that has divided it already. (vLLM's k_scale and v_scale)
template <element Stored, element In>
FREEKV_HD inline Stored stored_number(In x, float scale) {
  if constexpr (std::same_as<In, fp8_e4m3> && std::same_as<Stored, fp8_e4m3>)
    return x;
  else
    return from_float<Stored>(to_float(x) / scale);
}

/// Types of rows that are appended to a cache of `Stored`: that, or floats; to fp8_e4m3 any.
template <class In, class Stored>
concept row_of = element<In> &&
    (std::same_as<In, Stored> || std::same_as<In, float> || std::same_as<Stored, fp8_e4m3>);

}  // namespace detail

/// Numbers in the caller's memory.
struct typed_numbers {
  const void* data = nullptr;
  element_type type = element_type::f32;
};

/// Calls `body(numbers)` with a pointer to elements of their type.
template <class Body>
FREEKV_HD inline void visit_numbers(const typed_numbers& numbers, const Body& body) {
  switch (numbers.type) {
    case element_type::f16:
      return body(static_cast<const half*>(numbers.data));
    case element_type::bf16:
      return body(static_cast<const bfloat16*>(numbers.data));
    default:
      return body(static_cast<const float*>(numbers.data));
  }
}
template <class Body>
FREEKV_HD inline void visit_numbers(const float* numbers, const Body& body) {
  body(numbers);
}

constexpr FREEKV_HD int bytes_of(element_type type) { return type == element_type::f32 ? 4 : 2; }

}  // namespace freekv
