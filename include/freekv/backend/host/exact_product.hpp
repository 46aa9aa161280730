// The product of two rows in double, by the instructions there are.
#pragma once

#include <freekv/backend/host/isa.hpp>
#include <freekv/policies/eviction.hpp>

namespace freekv::host {

#if defined(__x86_64__)
/// exact_product by AVX2: the same number, since a product of floats is exact in double and so fused or not.
[[gnu::flatten, gnu::target("avx2,fma")]] inline double exact_product_avx2(const float* a, const float* b,
                                                                           int count) {
  return exact_product(a, b, count);
}
#endif

/// exact_product by the instructions of a set.
inline auto exact_product_of([[maybe_unused]] isa set) {
#if defined(__x86_64__)
  if (set >= isa::avx2) return exact_product_avx2;
#endif
  return exact_product;
}

}  // namespace freekv::host
