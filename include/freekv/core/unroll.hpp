// Loops that are unrolled whatever the optimisation level, so that arrays of packs stay in registers.
#pragma once

#include <cuda/std/utility>
#include <freekv/config.hpp>

// Stands before a loop of at most 64 turns whose count is a compile-time constant: it is unrolled. A loop
// costs a compiler less than `unroll`, which instantiates functions for each turn.
#if defined(__CUDA_ARCH__) || defined(__clang__)
#define FREEKV_UNROLL _Pragma("unroll")
#elif defined(__CUDACC__)  // the host's side, where nvcc hands on what it does not know
#define FREEKV_UNROLL                                                                     \
  _Pragma("nv_diagnostic push") _Pragma("nv_diag_suppress 1675") _Pragma("GCC unroll 64") \
      _Pragma("nv_diagnostic pop")
#else
#define FREEKV_UNROLL _Pragma("GCC unroll 64")
#endif

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
