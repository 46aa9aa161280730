// The host's team: eight float lanes on the compiler's vector types, lowered to whatever the target has.
// Where the target has AVX-512, sixteen multiply rows and raise e to scores.
#pragma once

#include <cstdint>
#include <cstring>
#include <freekv/backend/host/simd_vectors.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/team.hpp>

namespace freekv::host {

template <class Instructions>
struct simd_team {
  static constexpr int width = 8;
  using pack = pack8;

  [[gnu::always_inline]] pack load(const float* p) const {
    pack x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
  }
  [[gnu::always_inline]] pack load(const half* p) const {
    pack x;
    Instructions::widen_f16(reinterpret_cast<const std::uint16_t*>(p), x.v);
    return x;
  }
  [[gnu::always_inline]] pack load(const bfloat16* p) const {
    pack x;
    Instructions::widen_bf16(reinterpret_cast<const std::uint16_t*>(p), x.v);
    return x;
  }
  [[gnu::always_inline]] pack load(const fp8_e4m3* p) const {
    pack x;
    Instructions::widen_fp8(reinterpret_cast<const std::uint8_t*>(p), x.v);
    return x;
  }
  [[gnu::always_inline]] void store(float* p, const pack& x) const { std::memcpy(p, &x.v, sizeof x.v); }

  [[gnu::always_inline]] pack maximum(const pack& a, const pack& b) const {
    const float8 greater = Instructions::where_greater(a.v, b.v, a.v, b.v).v;  // b where either is NaN
    return Instructions::where_equal(a.v, a.v, greater, a.v);
  }
  [[gnu::always_inline]] pack minimum(const pack& a, const pack& b) const {
    const float8 smaller = Instructions::where_greater(b.v, a.v, a.v, b.v).v;
    return Instructions::where_equal(a.v, a.v, smaller, a.v);
  }
  [[gnu::always_inline]] pack select_greater(const pack& a, const pack& b, const pack& x,
                                             const pack& y) const {
    return Instructions::where_greater(a.v, b.v, x.v, y.v);
  }

  /// e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2)/2, e^r by its Taylor polynomial of degree 7; 0
  /// below -87.3 (no subnormal results), infinity above 88.7.
  [[gnu::always_inline]] pack exp(const pack& x) const {
    const float8 high = float8{} + 88.722839f;
    const pack power = power_of_e<Instructions>(
        Instructions::where_greater(x.v, high, high, x.v).v, [](const float8& n, float8& e) {
          const int8x32 whole = __builtin_convertvector(n, int8x32), first = whole >> 1;
          e = e * power_of_two(first).v * power_of_two(whole - first).v;  // since 2^128 alone is no float
        });
    const float8 e = Instructions::where_greater(x.v, high, float8{} + __builtin_inff(), power.v).v;
    return Instructions::where_equal(x.v, x.v, e, x.v);
  }
  [[gnu::always_inline]] pack bounded_exp(const pack& x) const {
    return power_of_e<Instructions>(
        x.v, [](const float8& n, float8& e) { e = e * power_of_two(__builtin_convertvector(n, int8x32)).v; });
  }

  /// ln x = k * ln 2 + ln m with m in [sqrt(1/2), sqrt(2)), ln m = 2 * atanh((m - 1) / (m + 1)) by its
  /// series. -infinity at 0; infinity and NaN stay; undefined below 0.
  [[gnu::always_inline]] pack log(const pack& x) const {
    const float8 zero{};
    const float8 smallest = zero + 1.17549435e-38f;
    const float8 normal = Instructions::where_greater(smallest, x.v, x.v * 8388608.0f, x.v).v;
    uint8x32 bits;
    std::memcpy(&bits, &normal, sizeof bits);
    // 0x3f3504f3 is sqrt(1/2): the exponent of x / sqrt(1/2), rounded down.
    const uint8x32 above = bits - 0x3f3504f3u;
    const int8x32 exponent = reinterpret_cast<int8x32>(above) >> 23;
    const uint8x32 mantissa = bits - (reinterpret_cast<uint8x32>(exponent) << 23);
    float8 m;
    std::memcpy(&m, &mantissa, sizeof m);
    float8 k = __builtin_convertvector(exponent, float8);
    k = Instructions::where_greater(smallest, x.v, k - 23.0f, k).v;
    const float8 s = (m - 1.0f) / (m + 1.0f), s2 = s * s;
    float8 series = zero + 2.0f / 9.0f;
    series = series * s2 + 2.0f / 7.0f;
    series = series * s2 + 2.0f / 5.0f;
    series = series * s2 + 2.0f / 3.0f;
    float8 result = k * 0.693359375f + (k * -2.12194440e-4f + (s * 2.0f + s * s2 * series));
    result = Instructions::where_equal(x.v, zero, zero - __builtin_inff(), result).v;
    return Instructions::where_greater(zero + __builtin_inff(), x.v, result, x.v);
  }

  /// tanh |x| = 1 - 2 / (e^2|x| + 1), and below 0.625, where that would cancel, |x| + |x|^3 * P(x^2) with P
  /// of degree 4 fitted for the smallest relative error (0.07 ulp); with the sign of x.
  [[gnu::always_inline]] pack tanh(const pack& x) const {
    uint8x32 bits;
    std::memcpy(&bits, &x.v, sizeof bits);
    const uint8x32 sign = bits & 0x80000000u, rest = bits ^ sign;
    float8 size;
    std::memcpy(&size, &rest, sizeof size);
    const float8 square = size * size;
    float8 series = float8{} - 5.7170055e-3f;
    series = series * square + 2.0650549e-2f;
    series = series * square - 5.3743485e-2f;
    series = series * square + 1.3331491e-1f;
    series = series * square - 3.3333284e-1f;
    const float8 far = 1.0f - 2.0f / (exp(pack(size + size)).v + 1.0f);
    const float8 result =
        Instructions::where_greater(float8{} + 0.625f, size, size + size * square * series, far).v;
    std::memcpy(&bits, &result, sizeof bits);
    bits |= sign;
    float8 with_sign;
    std::memcpy(&with_sign, &bits, sizeof bits);
    return pack(with_sign);
  }

  [[gnu::always_inline]] float sum(const pack& x) const {
    const float8 a = x.v + __builtin_shufflevector(x.v, x.v, 4, 5, 6, 7, 0, 1, 2, 3);
    const float8 b = a + __builtin_shufflevector(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    return b[0] + b[1];
  }
  [[gnu::always_inline]] float max(const pack& x) const {
    const pack a = maximum(x, pack(__builtin_shufflevector(x.v, x.v, 4, 5, 6, 7, 0, 1, 2, 3)));
    const pack b = maximum(a, pack(__builtin_shufflevector(a.v, a.v, 2, 3, 0, 1, 6, 7, 4, 5)));
    return b.v[0] > b.v[1] || b.v[0] != b.v[0] ? b.v[0] : b.v[1];
  }
  [[gnu::always_inline]] pack sum_each(const pack (&x)[8]) const { return Instructions::sum_each(x); }

  template <int Bits>
  [[gnu::always_inline]] pack load_codes(const std::uint8_t* codes, int first) const {
    static_assert(Bits == 1 || Bits == 2 || Bits == 3 || Bits == 4 || Bits == 8,
                  "codes have 1, 2, 3, 4 or 8 bits");
    const std::uint8_t* block = codes + first / 8 * Bits;
    if constexpr (Bits == 8) {
      uint8x8 bytes;
      std::memcpy(&bytes, block, sizeof bytes);
      return pack(__builtin_convertvector(bytes, float8));
    } else {
      std::uint32_t word;  // with less than 4 bits its last bytes are not ours
      std::memcpy(&word, block, sizeof word);
      const uint8x32 shift{0, Bits, 2 * Bits, 3 * Bits, 4 * Bits, 5 * Bits, 6 * Bits, 7 * Bits};
      const uint8x32 code = ((uint8x32{} + word) >> shift) & ((1u << Bits) - 1);
      int8x32 value;  // signed, since unsigned to float is many instructions
      std::memcpy(&value, &code, sizeof value);
      return pack(__builtin_convertvector(value, float8));
    }
  }

  [[gnu::always_inline]] pack lookup(const float* table, const std::uint8_t* codes) const {
    return pack(float8{table[codes[0]], table[codes[1]], table[codes[2]], table[codes[3]], table[codes[4]],
                       table[codes[5]], table[codes[6]], table[codes[7]]});
  }

  [[gnu::always_inline]] pack load_halves(const float* p, const float* q) const {
    float4 low, high;
    std::memcpy(&low, p, sizeof low);
    std::memcpy(&high, q, sizeof high);
    return pack(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7));
  }
  [[gnu::always_inline]] pack repeat(const pack8& x) const { return x; }
  [[gnu::always_inline]] pack8 fold(const pack& x) const { return x; }
  [[gnu::always_inline]] void load_by_four(const float* p, pack (&x)[4]) const {
    const float8 a = load_halves(p, p + 16).v, b = load_halves(p + 4, p + 20).v,
                 c = load_halves(p + 8, p + 24).v, d = load_halves(p + 12, p + 28).v;
    const float8 of_two[4] = {__builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13),
                              __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15),
                              __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13),
                              __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15)};
    for (int i = 0; i < 2; ++i) {
      x[2 * i].v = __builtin_shufflevector(of_two[i], of_two[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      x[2 * i + 1].v = __builtin_shufflevector(of_two[i], of_two[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  [[gnu::always_inline]] void store_by_four(float* p, const pack (&x)[4]) const {
    const float8 a = __builtin_shufflevector(x[0].v, x[1].v, 0, 8, 1, 9, 4, 12, 5, 13),
                 b = __builtin_shufflevector(x[0].v, x[1].v, 2, 10, 3, 11, 6, 14, 7, 15),
                 c = __builtin_shufflevector(x[2].v, x[3].v, 0, 8, 1, 9, 4, 12, 5, 13),
                 d = __builtin_shufflevector(x[2].v, x[3].v, 2, 10, 3, 11, 6, 14, 7, 15);
    // Lanes 0 and 4, 1 and 5, 2 and 6, 3 and 7 of all four.
    const float8 all[4] = {__builtin_shufflevector(a, c, 0, 1, 8, 9, 4, 5, 12, 13),
                           __builtin_shufflevector(a, c, 2, 3, 10, 11, 6, 7, 14, 15),
                           __builtin_shufflevector(b, d, 0, 1, 8, 9, 4, 5, 12, 13),
                           __builtin_shufflevector(b, d, 2, 3, 10, 11, 6, 7, 14, 15)};
    for (int i = 0; i < 4; ++i) {
      const float4 low = __builtin_shufflevector(all[i], all[i], 0, 1, 2, 3),
                   high = __builtin_shufflevector(all[i], all[i], 4, 5, 6, 7);
      std::memcpy(p + 4 * i, &low, sizeof low);
      std::memcpy(p + 4 * (i + 4), &high, sizeof high);
    }
  }

  [[gnu::always_inline]] void widen(const float* in, float* out, int n) const {
    std::memcpy(out, in, to_size(n) * sizeof(float));
  }
  template <class Element>
  [[gnu::always_inline]] void widen(const Element* in, float* out, int n) const {
    for (int i = 0; i < n; i += 8) store(out + i, load(in + i));
  }
  [[gnu::always_inline]] void prefetch(const void* p) const { __builtin_prefetch(p); }
  template <class Body>
  [[gnu::always_inline]] void apart(const Body& body) const {
    Instructions::apart(body);
  }
  int lane() const { return 0; }
  int lanes() const { return 1; }
  void sync() const {}

 private:
  [[gnu::always_inline]] static pack power_of_two(const int8x32& exponent) {
    const int8x32 bits = (exponent + 127) << 23;
    float8 power;
    std::memcpy(&power, &bits, sizeof power);
    return pack(power);
  }
};

static_assert(team<simd_team<portable>> && team_of_halves<simd_team<portable>>);

#if defined(__x86_64__)
/// Team of an x86-64 without AVX2: these are old, and code for them is to compile fast rather than to run
/// fast.
struct sse2_team : simd_team<portable> {
  using narrow = simd_team<portable>;
  static constexpr bool one_head_at_once = true;
};

/// The `wide` of AVX-512 (core/team.hpp). AVX-512 BF16 would multiply by queries rounded to
/// bfloat16; by queries in two parts it takes as many instructions as this.
struct avx512_rows {
  static constexpr int width = 16;
  using pack = pack16;

  [[gnu::always_inline]] pack load(const float* p) const {
    pack x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
  }
  [[gnu::always_inline]] pack load(const half* p) const {
    pack x;
    widen_f16(p, x.v);
    return x;
  }
  [[gnu::always_inline]] pack load(const bfloat16* p) const {
    pack x;
    widen_bf16(p, x.v);
    return x;
  }
  [[gnu::always_inline]] pack load(const fp8_e4m3* p) const {
    pack x;
    widen_fp8(p, x.v);
    return x;
  }
  [[gnu::always_inline]] void store(float* p, const pack& x) const { std::memcpy(p, &x.v, sizeof x.v); }

  /// Sums of the packs, as simd_team's, within the quarters of registers first.
  [[gnu::always_inline]] pack sum_each(const pack (&x)[16]) const {
    float16 pairs[8], quads[4], halves[2];
    for (int i = 0; i < 8; ++i) {
      const float16 &a = x[2 * i].v, &b = x[2 * i + 1].v;
      pairs[i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                 __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < 4; ++i) {
      const float16 &a = pairs[2 * i], &b = pairs[2 * i + 1];
      quads[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                 __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < 2; ++i) {
      const float16 &a = quads[2 * i], &b = quads[2 * i + 1];
      halves[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                  __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    const float16 &a = halves[0], &b = halves[1];
    return pack(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  }

  [[gnu::always_inline]] pack bounded_exp(const pack& x) const {
    return power_of_e<avx512_rows>(x.v, [](const float16& n, float16& e) {
      const int16x32 bits = (__builtin_convertvector(n, int16x32) + 127) << 23;
      float16 power;
      std::memcpy(&power, &bits, sizeof power);
      e = e * power;
    });
  }
  [[gnu::always_inline]] static pack where_greater(const float16& a, const float16& b, const float16& x,
                                                   const float16& y) {
    return pack(a > b ? x : y);
  }
  [[gnu::always_inline]] pack repeat(const pack8& x) const {
    return pack(__builtin_shufflevector(x.v, x.v, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  [[gnu::always_inline]] pack8 fold(const pack& x) const {
    return pack8(__builtin_shufflevector(x.v, x.v, 0, 1, 2, 3, 4, 5, 6, 7) +
                 __builtin_shufflevector(x.v, x.v, 8, 9, 10, 11, 12, 13, 14, 15));
  }

  [[gnu::always_inline]] void prefetch(const void* p) const { __builtin_prefetch(p); }
  template <class Body>
  [[gnu::noinline, gnu::flatten, gnu::target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")]] void apart(
      const Body& body) const {
    body();
  }
  int lane() const { return 0; }
  int lanes() const { return 1; }
  void sync() const {}

 private:
  [[gnu::target("avx512f")]] static void widen_f16(const half* in, float16& out) {
    constexpr int current_rounding = 4;
    std::uint16_t all = 0xffff;  // lanes; as a constant, of another sign for nvcc than for GCC
    int16x16 bits;
    std::memcpy(&bits, in, sizeof bits);
    out = __builtin_ia32_vcvtph2ps512_mask(bits, float16{}, all, current_rounding);
  }
  [[gnu::target("avx512f")]] static void widen_bf16(const bfloat16* in, float16& out) {
    int16x16 bits;
    std::memcpy(&bits, in, sizeof bits);
#if defined(__clang__)
    const auto wide = __builtin_convertvector(bits, int16x32);
#else
    std::uint16_t all = 0xffff;  // as above
    const auto wide = __builtin_ia32_pmovzxwd512_mask(bits, int16x32{}, all);
#endif
    out = reinterpret_cast<float16>(wide << 16);
  }
  [[gnu::target("avx512f,avx2")]] static void widen_fp8(const fp8_e4m3* in, float16& out) {
    constexpr int current_rounding = 4;
    std::uint16_t all = 0xffff;  // as above
    char16 bits;
    std::memcpy(&bits, in, sizeof bits);
#if defined(__clang__)
    int16x16 halves = __builtin_convertvector(reinterpret_cast<int16x8>(bits), int16x16);
#else
    int16x16 halves = __builtin_ia32_pmovsxbw256(bits);
#endif
    make_f16_of_fp8(halves);
    out = __builtin_ia32_vcvtph2ps512_mask(halves, float16{}, all, current_rounding) * 256.0f;
  }
};

/// AVX2's lanes, and those of AVX-512 for rows.
struct avx512_team : simd_team<avx2> {
  using wide = avx512_rows;
  using narrow = simd_team<avx2>;
};
static_assert(team<avx512_team>);
#endif

}  // namespace freekv::host
