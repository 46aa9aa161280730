// Element types of keys and values, and their scalar conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <concepts>
#include <freekv/config.hpp>
#include <string_view>

namespace freekv {

using half = __half;
using bfloat16 = __nv_bfloat16;

/// What keys and values may be stored as.
template <class T>
concept element = std::same_as<T, float> || std::same_as<T, half> || std::same_as<T, bfloat16>;

template <element T>
inline constexpr std::string_view element_name = "f32";
template <>
inline constexpr std::string_view element_name<half> = "f16";
template <>
inline constexpr std::string_view element_name<bfloat16> = "bf16";

FREEKV_HD inline float to_float(float x) { return x; }
FREEKV_HD inline float to_float(half x) { return __half2float(x); }
FREEKV_HD inline float to_float(bfloat16 x) { return __bfloat162float(x); }

/// Rounds to the nearest representable value, ties to even.
template <element T>
FREEKV_HD inline T from_float(float x) {
  if constexpr (std::same_as<T, half>)
    return __float2half_rn(x);
  else if constexpr (std::same_as<T, bfloat16>)
    return __float2bfloat16_rn(x);
  else
    return x;
}

}  // namespace freekv
