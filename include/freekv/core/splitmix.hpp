// Bits that look random, as a function of a number.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>

namespace freekv::detail {

/// A step of splitmix64: other bits for other numbers.
FREEKV_HD constexpr std::uint64_t splitmix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The upper bits of `x` as a number from 0 to below 1.
FREEKV_HD constexpr double unit_interval(std::uint64_t x) { return static_cast<double>(x >> 11) * 0x1p-53; }

}  // namespace freekv::detail
