// Sums that a device rounds by themselves.
#pragma once

#include <freekv/config.hpp>

namespace freekv {

/// `a + b`, with which a device fuses no product that a or b is: nvcc would in one kernel and not in another.
/// Code that wants them fused says `fmaf`.
FREEKV_HD inline float rounded_sum(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

}  // namespace freekv
