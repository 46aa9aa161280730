// Instructions that feed tensor cores with elements: copies to shared memory, loads of blocks from there,
// numbers of 1 byte as numbers of 2, and products.
#pragma once

#include <concepts>
#include <cstdint>
#include <cuda/std/type_traits>
#include <freekv/core/element.hpp>

namespace freekv::device {

/// Two pairs of neighbouring 2-byte elements.
struct element_pairs {
  std::uint32_t pair[2];
};

/// The type of 2 bytes that tensor cores multiply elements as.
template <element Element>
using multiplied_as = cuda::std::conditional_t<std::same_as<Element, fp8_e4m3>, half, Element>;

/// Neighbouring elements of 16 bytes, which are copied together.
template <class Element>
struct alignas(16) element_piece {
  static constexpr int count = 16 / static_cast<int>(sizeof(Element));
  Element x[count];

  /// Copies those at `row`, which is aligned to 16 bytes, to `here`, in shared memory, by cp.async; zeros if
  /// not `there`, where `row` may be any readable row.
  __device__ static void copy_async(element_piece* here, const Element* row, bool there) {
    const auto to = static_cast<unsigned>(__cvta_generic_to_shared(here));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(row), "r"(there ? 16 : 0)
                 : "memory");
  }
  /// Elements of any alignment are copied with plain loads.
  __device__ static void copy_elements(element_piece* here, const Element* row, bool there) {
#pragma unroll 1
    for (int i = 0; i < count; ++i) here->x[i] = there ? row[i] : from_float<Element>(0.0f);
  }
};

/// Four blocks of 8 rows by 8 elements of 2 bytes in shared memory, row by row: lane i has the address of row
/// i % 8 of block i / 8, aligned to 16 bytes. With g = lane / 4 and i = lane % 4 a thread gets elements 2i
/// and 2i + 1 of row g of each block; transposed, element g of rows 2i and 2i + 1.
template <bool Transposed>
__device__ void load_blocks(std::uint32_t (&to)[4], unsigned address) {
  if constexpr (Transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

/// Numbers of fp8_e4m3 as F16, which has all of them, 2^-8 as large: bytes 0 and 2, and 1 and 3.
__device__ inline void widen(std::uint32_t bytes, std::uint32_t& even, std::uint32_t& odd) {
  const auto upper = [](std::uint32_t x) {
    // The exponent is in four of the five bits, so that only NaN's overflows into the fifth.
    const std::uint32_t magnitude = x >> 1 & 0x3f803f80u;
    return magnitude | ((magnitude + 0x00800080u) & 0x40004000u) | (x & 0x80008000u);
  };
  even = upper(bytes << 8);
  odd = upper(bytes);
}

__device__ inline std::uint32_t pair_of(half a, half b) {
  return __half_as_ushort(a) | std::uint32_t{__half_as_ushort(b)} << 16;
}
__device__ inline std::uint32_t pair_of(bfloat16 a, bfloat16 b) {
  return __bfloat16_as_ushort(a) | std::uint32_t{__bfloat16_as_ushort(b)} << 16;
}

/// A warp's product of 16 rows with 8 columns of 16 elements each, which is added to `sums`. With g = lane /
/// 4 and i = lane % 4 a thread has of rows g and g + 8 elements 2i, 2i + 1 in `rows[0]` and `rows[1]` and 2i
/// + 8, 2i + 9 in `rows[2]` and `rows[3]`, of column g the same elements, and sums of row g, columns 2i and
/// 2i + 1, then of row g + 8.
template <class Number>
__device__ void add_product(float (&sums)[4], const std::uint32_t (&rows)[4],
                            const std::uint32_t (&column)[2]) {
  if constexpr (std::same_as<Number, half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(column[0]), "r"(column[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(column[0]), "r"(column[1]));
}

}  // namespace freekv::device
