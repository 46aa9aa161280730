// Scores of units as integers that sort like them, unique by unit.
#pragma once

#include <cstdint>
#include <cuda/std/bit>
#include <freekv/config.hpp>

namespace freekv {

/// 32 bits that order like the float: a < b exactly if order_bits(a) < order_bits(b), and -0 equals +0. Not
/// for NaN.
FREEKV_HD inline std::uint32_t order_bits(float score) {
  const auto bits = cuda::std::bit_cast<std::uint32_t>(score + 0.0f);  // -0 + 0 is +0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

namespace detail {

/// A key that is larger for the better unit: by score, and among equal scores the smaller unit. Unique, so
/// that any selection of the largest keys is deterministic.
FREEKV_HD inline std::uint64_t ordered_key(float score, std::int32_t unit) {
  return std::uint64_t{order_bits(score)} << 32 | (0xffffffffu - static_cast<std::uint32_t>(unit));
}

FREEKV_HD inline std::int32_t unit_of_key(std::uint64_t key) {
  return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key));
}

/// True where the fine one of two summaries scores a unit that the coarse one has scored `pooled`. `least`:
/// the least key of those that are kept; 0 if all are.
FREEKV_HD inline bool is_kept(std::uint64_t least, float pooled, std::int32_t unit) {
  return least == 0 || ordered_key(pooled, unit) >= least;
}

}  // namespace detail

}  // namespace freekv
