// Loops that are unrolled whatever the optimisation level, so that arrays of packs stay in registers.
#pragma once

#include <freekv/config.hpp>
#include <type_traits>
#include <utility>

namespace freekv {

/// Calls `body(i)` for i = 0 .. N - 1, each a compile-time constant.
template <int N, class Body>
FREEKV_HD constexpr void unroll(const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) { (body(std::integral_constant<int, I>{}), ...); }
  (std::make_integer_sequence<int, N>{});
}

}  // namespace freekv
