// Vectors of the host's teams: eight or sixteen floats on the compiler's vector types, and what instructions
// compilers do not find for them.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <freekv/core/size.hpp>
#include <freekv/core/unroll.hpp>

namespace freekv::host {

using float4 = float __attribute__((vector_size(16)));
using int2x64 = std::int64_t __attribute__((vector_size(16)));
using int4x32 = std::int32_t __attribute__((vector_size(16)));
using float8 = float __attribute__((vector_size(32)));
using int8x32 = std::int32_t __attribute__((vector_size(32)));
using uint8x32 = std::uint32_t __attribute__((vector_size(32)));
using uint8x16 = std::uint16_t __attribute__((vector_size(16)));
using uint8x8 = std::uint8_t __attribute__((vector_size(8)));
using int8x8 = std::int8_t __attribute__((vector_size(8)));
using float16 = float __attribute__((vector_size(64)));
using char16 = char __attribute__((vector_size(16)));
using uint16x8 = std::uint8_t __attribute__((vector_size(16)));
using int16x8 = std::int8_t __attribute__((vector_size(16)));
using int16x16 = std::int16_t __attribute__((vector_size(32)));
using int16x32 = std::int32_t __attribute__((vector_size(64)));
using int8x16 = std::int16_t __attribute__((vector_size(16)));

/// Eight floats. A struct, and passed by reference, because a bare vector in a signature has an ABI that
/// depends on the target flags, as the alignment of a bare vector does.
struct alignas(32) pack8 {
  float8 v;
  pack8() = default;
  [[gnu::always_inline]] explicit pack8(const float8& x) : v(x) {}
  // By halves: of eight equal lanes GCC makes eight insertions, and of these one broadcast.
  [[gnu::always_inline]] pack8(float x) {
    const float4 half{x, x, x, x};
    v = __builtin_shufflevector(half, half, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  [[gnu::always_inline]] friend pack8 operator+(const pack8& a, const pack8& b) { return pack8(a.v + b.v); }
  [[gnu::always_inline]] friend pack8 operator-(const pack8& a, const pack8& b) { return pack8(a.v - b.v); }
  [[gnu::always_inline]] friend pack8 operator*(const pack8& a, const pack8& b) { return pack8(a.v * b.v); }
};

/// Sixteen floats, as pack8.
struct alignas(64) pack16 {
  float16 v;
  pack16() = default;
  [[gnu::always_inline]] explicit pack16(const float16& x) : v(x) {}
  [[gnu::always_inline]] pack16(float x) : v(float16{} + x) {}
  [[gnu::always_inline]] friend pack16 operator+(const pack16& a, const pack16& b) {
    return pack16(a.v + b.v);
  }
  [[gnu::always_inline]] friend pack16 operator-(const pack16& a, const pack16& b) {
    return pack16(a.v - b.v);
  }
  [[gnu::always_inline]] friend pack16 operator*(const pack16& a, const pack16& b) {
    return pack16(a.v * b.v);
  }
};

/// e^x of x that is at most 88.7, or NaN; `scale(n, e)` multiplies e by 2^n.
template <class Instructions, class Vector, class Scale>
[[gnu::always_inline]] inline auto power_of_e(const Vector& x, const Scale& scale) {
  const Vector zero{}, low = zero - 87.336544f;
  const Vector clamped = Instructions::where_greater(low, x, low, x).v;
  const Vector round = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vector n = (clamped * 1.44269504f + round) - round;
  const Vector r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Vector e = zero + 1.9841270e-4f;
  e = e * r + 1.3888889e-3f;
  e = e * r + 8.3333333e-3f;
  e = e * r + 4.1666667e-2f;
  e = e * r + 1.6666667e-1f;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  scale(n, e);
  return Instructions::where_greater(low, x, zero, e);
}

/// Eight bytes and zeros, as a register gets them. (A copy into a vector goes through memory.)
struct eight_bytes {
  int2x64 v;
  [[gnu::always_inline]] explicit eight_bytes(const std::uint8_t* p) {
    std::int64_t word;
    std::memcpy(&word, p, sizeof word);
    v = int2x64{word, 0};
  }
};

/// fp8_e4m3 in the lower halves of 16 bits, extended by its sign, as f16 divided by 2^8; NaN stays NaN.
template <class Vector>
[[gnu::always_inline]] inline void make_f16_of_fp8(Vector& bits) {
  bits = (bits << 7) & static_cast<std::int16_t>(0xbfff);
  bits |= (bits | static_cast<std::int16_t>(0x8000)) == static_cast<std::int16_t>(0xbf80);  // of NaN alone
}

// Eight 8-bit or 16-bit elements to floats, for which compilers do not find the instructions. In arithmetic
// that any target vectorises, or by these instructions: as built-ins, since <immintrin.h> is a quarter of a
// second to compile.
struct portable {
  template <class Body>
  [[gnu::noinline, gnu::flatten]] static void apart(const Body& body) {
    body();
  }
  [[gnu::always_inline]] static void widen_f16(const std::uint16_t* in, float8& out) {
    uint8x16 bits;
    std::memcpy(&bits, in, sizeof bits);
    const uint8x32 wide = __builtin_convertvector(bits, uint8x32);
    const uint8x32 magnitude = (wide & 0x7fffu) << 13;
    // The exponents differ by 112; multiplying by 2^112 also turns subnormals into normal numbers. Infinity
    // and NaN have all exponent bits set in both formats.
    const float8 rebias = float8{} + std::bit_cast<float>(0x77800000u);
    float8 value;
    std::memcpy(&value, &magnitude, sizeof value);
    value *= rebias;
    const uint8x32 odd = magnitude | 0x7f800000u;
    int8x32 result;
    by_halves(result, [&](int i) {
      const int4x32 least_odd = int4x32{} + (0x7c00 << 13);
      return half_of<int4x32>(magnitude, i) >= least_odd ? half_of<int4x32>(odd, i)
                                                         : half_of<int4x32>(value, i);
    });
    result |= reinterpret_cast<int8x32>((wide & 0x8000u) << 16);
    std::memcpy(&out, &result, sizeof result);
  }
  [[gnu::always_inline]] static void widen_bf16(const std::uint16_t* in, float8& out) {
    uint8x16 bits;
    std::memcpy(&bits, in, sizeof bits);
    const uint8x32 wide = __builtin_convertvector(bits, uint8x32) << 16;
    std::memcpy(&out, &wide, sizeof wide);
  }
  [[gnu::always_inline]] static void widen_fp8(const std::uint8_t* in, float8& out) {
    const auto bytes = __builtin_shufflevector(reinterpret_cast<uint16x8>(eight_bytes(in).v), uint16x8{}, 0,
                                               16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    uint8x16 bits;
    std::memcpy(&bits, &bytes, sizeof bits);
    const uint8x32 wide = __builtin_convertvector(bits, uint8x32);
    const uint8x32 magnitude = (wide & 0x7fu) << 20, raised = magnitude + (121u << 23);
    // The exponents differ by 120. A subnormal number is made with an exponent of one more and its leading 1
    // taken away: as a float it would be subnormal too, and slow.
    float8 subnormal;
    std::memcpy(&subnormal, &raised, sizeof subnormal);
    subnormal -= 0x1p-6f;
    int8x32 result;
    by_halves(result, [&](int i) {
      const int4x32 size = half_of<int4x32>(magnitude, i), normal = size + (120 << 23);
      const int4x32 number = size < int4x32{} + (1 << 23) ? half_of<int4x32>(subnormal, i) : normal;
      return size == int4x32{} + (0x7f << 20) ? int4x32{} + 0x7fc00000 : number;
    });
    result |= reinterpret_cast<int8x32>((wide & 0x80u) << 24);
    std::memcpy(&out, &result, sizeof result);
  }

  /// Lanes of x where a > b, or a == b, and of y elsewhere.
  [[gnu::always_inline]] static pack8 where_greater(const float8& a, const float8& b, const float8& x,
                                                    const float8& y) {
    float8 out;
    by_halves(out, [&](int i) {
      return half_of<float4>(a, i) > half_of<float4>(b, i) ? half_of<float4>(x, i) : half_of<float4>(y, i);
    });
    return pack8(out);
  }
  [[gnu::always_inline]] static pack8 where_equal(const float8& a, const float8& b, const float8& x,
                                                  const float8& y) {
    float8 out;
    by_halves(out, [&](int i) {
      return half_of<float4>(a, i) == half_of<float4>(b, i) ? half_of<float4>(x, i) : half_of<float4>(y, i);
    });
    return pack8(out);
  }
  [[gnu::always_inline]] static pack8 sum_each(const pack8 (&x)[8]) {
    float4 quads[4];  // (half, first or last four packs)
    for (int i = 0; i < 4; ++i) {
      const auto pairs = [&](int nth) {
        const float4 a = half_of<float4>(x[i % 2 * 4 + nth].v, i / 2),
                     b = half_of<float4>(x[i % 2 * 4 + nth + 1].v, i / 2);
        return __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
      };
      const float4 a = pairs(0), b = pairs(2);
      quads[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
    }
    float8 out;
    by_halves(out, [&](int i) { return quads[i] + quads[2 + i]; });
    return pack8(out);
  }

 private:
  template <class Half, class Vector>
  [[gnu::always_inline]] static Half half_of(const Vector& x, int nth) {
    Half half;
    std::memcpy(&half, reinterpret_cast<const char*>(&x) + nth * 16, sizeof half);
    return half;
  }
  template <class Vector, class Half>
  [[gnu::always_inline]] static void by_halves(Vector& out, const Half& half) {
    const auto low = half(0), high = half(1);
    std::memcpy(&out, &low, sizeof low);
    std::memcpy(reinterpret_cast<char*>(&out) + 16, &high, sizeof high);
  }
};
#if defined(__x86_64__)
struct avx2 {
  template <class Body>
  [[gnu::noinline, gnu::flatten, gnu::target("avx2,fma,f16c")]] static void apart(const Body& body) {
    body();
  }
  [[gnu::target("avx2,f16c")]] static void widen_f16(const std::uint16_t* in, float8& out) {
    int8x16 bits;
    std::memcpy(&bits, in, sizeof bits);
    out = __builtin_ia32_vcvtph2ps256(bits);
  }
  [[gnu::target("avx2,f16c")]] static void widen_bf16(const std::uint16_t* in, float8& out) {
    int8x16 bits;
    std::memcpy(&bits, in, sizeof bits);
#if defined(__clang__)
    const auto wide = __builtin_convertvector(bits, int8x32);
#else
    const auto wide = __builtin_ia32_pmovzxwd256(bits);
#endif
    out = reinterpret_cast<float8>(wide << 16);
  }
  /// Numbers by way of f16, whose exponents are 8 more and which has their subnormals too.
  [[gnu::target("avx2,f16c")]] static void widen_fp8(const std::uint8_t* in, float8& out) {
#if defined(__clang__)
    int8x8 bits;
    std::memcpy(&bits, in, sizeof bits);
    int8x16 halves = __builtin_convertvector(bits, int8x16);
#else
    int8x16 halves = __builtin_ia32_pmovsxbw128(reinterpret_cast<char16>(eight_bytes(in).v));
#endif
    make_f16_of_fp8(halves);
    out = __builtin_ia32_vcvtph2ps256(halves) * 256.0f;
  }
  // Without `target`, as what the team inlines into bodies of all instruction sets.
  [[gnu::always_inline]] static pack8 where_greater(const float8& a, const float8& b, const float8& x,
                                                    const float8& y) {
    return pack8(a > b ? x : y);
  }
  [[gnu::always_inline]] static pack8 where_equal(const float8& a, const float8& b, const float8& x,
                                                  const float8& y) {
    return pack8(a == b ? x : y);
  }
  /// Pairwise: after each of three rounds half as many packs hold sums over twice as many lanes.
  [[gnu::always_inline]] static pack8 sum_each(const pack8 (&x)[8]) {
    float8 pairs[4], quads[2];
    FREEKV_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float8 &a = x[2 * i].v, &b = x[2 * i + 1].v;
      pairs[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
                 __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
    FREEKV_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float8 &a = pairs[2 * i], &b = pairs[2 * i + 1];
      quads[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
                 __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    return pack8(__builtin_shufflevector(quads[0], quads[1], 0, 1, 2, 3, 8, 9, 10, 11) +
                 __builtin_shufflevector(quads[0], quads[1], 4, 5, 6, 7, 12, 13, 14, 15));
  }
};
#endif

}  // namespace freekv::host
