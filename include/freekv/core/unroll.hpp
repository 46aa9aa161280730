// Loops that are unrolled whatever the optimisation level, so that arrays of packs stay in registers.
#pragma once

#include <cuda/std/utility>
#include <freekv/config.hpp>

namespace freekv {

/// Calls `body(i)` for i = 0 .. N - 1, each a compile-time constant.
template <int N, class Body>
FREEKV_HD constexpr void unroll(const Body& body) {
  [&]<int... I>(cuda::std::integer_sequence<int, I...>) {
    (body(cuda::std::integral_constant<int, I>{}), ...);
  }
  (cuda::std::make_integer_sequence<int, N>{});
}

}  // namespace freekv
