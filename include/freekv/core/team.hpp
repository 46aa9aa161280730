// Teams: the lanes that work together on one piece, so that one body of code serves SIMD lanes and GPU
// threads.
//
// A body is written for `width` neighbouring elements at a time. On the host a team is one thread with SIMD
// lanes and a pack is a vector register or two; on CUDA the lanes are threads and a pack is each thread's
// share. The order in which a team adds is fixed by its width alone, so strict float still vectorises and
// results are reproducible.
//
// A team offers
//   width                 elements in a pack; it divides the pages, head dims and rows it is used for
//   pack                  default-constructible and copyable; from a float: all lanes; + - * elementwise
//   load(p), store(p, x)  p[0 .. width), of any alignment, as a pack and back; load of any stored type
//   maximum(a, b), minimum(a, b)
//                         elementwise; NaN if either is NaN
//   select_greater(a, b, x, y)
//                         elementwise a > b ? x : y; y where either is NaN
//   exp(x), log(x), tanh(x)
//                         elementwise, to about 2 ulp; exp may be 0 below -87.3; log of x >= 0 or NaN
//   bounded_exp(x)        exp(x) of x that is at most 88, or NaN: the same bits by fewer instructions
//   sum(x), max(x)        over the lanes, to a float that all lanes see; max is NaN if any lane is
//   sum_each(x)           of an array of `width` packs: lane i is sum(x[i])
//   load_codes<bits>(p, i)
//                         codes i .. i + width, i a multiple of width, as floats, of a stream of unsigned
//                         codes of 1, 2, 3, 4 or 8 bits: blocks of 8 codes, `bits` bytes each, the first
//                         code in the lowest bits. May read (and ignore) up to 3 bytes behind a block
//   lookup(table, codes)  lane i is table[codes[i]]
//   widen(in, out, n)     n elements of any stored type to float; n a multiple of 8
//   prefetch(p)           what p points to will be loaded soon
//   lane(), lanes()       this thread's number and how many share the team; scalar work is dealt out as
//                         for (i = lane(); i < n; i += lanes())
//   sync()                what one lane wrote is visible to the others after it
// and may offer
//   widen_rows(in, s, r, out, n)
//                         r rows of n, s elements apart, to floats without gaps
//   stage(p, n, to)       copies n bytes, a multiple of 4 of that alignment, to memory that is faster to
//                         read again, n + 16 bytes of an alignment of 16, and returns where they are
//   load_halves(p, q)     of 8 lanes: p[0 .. 4), then q[0 .. 4); with it come the next three
//   store_by_four(p, x)   of an array of 4 packs: p[4 * i + g] is lane i of x[g]
//   load_by_four(p, x)    to an array of 4 packs, the reverse
//   repeat(x), fold(x)    of it and its `wide`: a pack whose lanes are x's over and over; of such a pack the
//                         sum of what would be in one lane of 8
//   apart(body)           body() as a function of its own, shared by all who call it with a body of the
//                         same type
//   wide                  a type with more lanes, for exponentials and products of rows whose length it
//                         divides: load, store, + - *, sum_each, bounded_exp, prefetch, lane, lanes and sync
//   one_head_at_once      rows are multiplied by one query head at a time, which is less to compile
//   narrow                with `wide`: the base without it, so that what multiplies no rows is compiled once
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <freekv/core/element.hpp>
#include <freekv/core/rounded_sum.hpp>

namespace freekv {

/// Requirements that the algorithms and policies here have of a team.
template <class T>
concept team = std::semiregular<typename T::pack> && std::constructible_from<typename T::pack, float> &&
    requires(const T t, typename T::pack x, const typename T::pack (&packs)[T::width], const float* in,
             float* out, const half* half_in, const bfloat16* bfloat16_in, const fp8_e4m3* fp8_in,
             const std::uint8_t* codes) {
  { T::width } -> std::convertible_to<int>;
  { (x + x) } -> std::same_as<typename T::pack>;
  { (x - x) } -> std::same_as<typename T::pack>;
  { (x * x) } -> std::same_as<typename T::pack>;
  { t.load(in) } -> std::same_as<typename T::pack>;
  { t.load(half_in) } -> std::same_as<typename T::pack>;
  { t.load(bfloat16_in) } -> std::same_as<typename T::pack>;
  { t.load(fp8_in) } -> std::same_as<typename T::pack>;
  t.store(out, x);
  { t.maximum(x, x) } -> std::same_as<typename T::pack>;
  { t.minimum(x, x) } -> std::same_as<typename T::pack>;
  { t.select_greater(x, x, x, x) } -> std::same_as<typename T::pack>;
  { t.exp(x) } -> std::same_as<typename T::pack>;
  { t.bounded_exp(x) } -> std::same_as<typename T::pack>;
  { t.log(x) } -> std::same_as<typename T::pack>;
  { t.tanh(x) } -> std::same_as<typename T::pack>;
  { t.sum(x) } -> std::same_as<float>;
  { t.max(x) } -> std::same_as<float>;
  { t.sum_each(packs) } -> std::same_as<typename T::pack>;
  { t.template load_codes<1>(codes, 0) } -> std::same_as<typename T::pack>;
  { t.template load_codes<2>(codes, 0) } -> std::same_as<typename T::pack>;
  { t.template load_codes<3>(codes, 0) } -> std::same_as<typename T::pack>;
  { t.template load_codes<4>(codes, 0) } -> std::same_as<typename T::pack>;
  { t.template load_codes<8>(codes, 0) } -> std::same_as<typename T::pack>;
  { t.lookup(in, codes) } -> std::same_as<typename T::pack>;
  t.widen(in, out, 8);
  t.widen(half_in, out, 8);
  t.widen(bfloat16_in, out, 8);
  t.widen(fp8_in, out, 8);
  t.prefetch(in);
  { t.lane() } -> std::same_as<int>;
  { t.lanes() } -> std::same_as<int>;
  t.sync();
};

/// A team with lanes for four query heads at a time, twice.
template <class T>
concept team_of_halves = team<T> && T::width == 8 &&
                         requires(const T t, typename T::pack x, const float* in) {
  { t.load_halves(in, in) } -> std::same_as<typename T::pack>;
};

namespace detail {

/// A team for all that multiplies no rows: its `narrow`, a base that differs from it by `wide` alone, or
/// itself.
template <class T>
struct narrow_team {
  using type = T;
};
template <class T>
requires requires { typename T::narrow; }
struct narrow_team<T> {
  using type = typename T::narrow;
};

/// Lanes of a thread that works alone, for what is dealt out to lanes and computes nothing.
struct one_lane {
  FREEKV_HD static constexpr int lane() { return 0; }
  FREEKV_HD static constexpr int lanes() { return 1; }
};

/// Team that multiplies long rows: its `wide`, or itself.
template <class T>
struct wide_team {
  using type = T;
};
template <class T>
requires requires { typename T::wide; }
struct wide_team<T> {
  using type = typename T::wide;
};

}  // namespace detail

/// A pack of one number.
struct scalar_pack {
  float x;

  scalar_pack() = default;
  FREEKV_HD explicit constexpr scalar_pack(float number) : x(number) {}
  FREEKV_HD constexpr operator float() const { return x; }
  FREEKV_HD friend scalar_pack operator+(scalar_pack a, scalar_pack b) {
    return scalar_pack(rounded_sum(a.x, b.x));
  }
  FREEKV_HD friend scalar_pack operator-(scalar_pack a, scalar_pack b) {
    return scalar_pack(rounded_sum(a.x, -b.x));
  }
  FREEKV_HD friend scalar_pack operator*(scalar_pack a, scalar_pack b) { return scalar_pack(a.x * b.x); }
  FREEKV_HD friend scalar_pack fused(scalar_pack a, scalar_pack b, scalar_pack c) {
    return scalar_pack(::fmaf(a.x, b.x, c.x));
  }
};

/// One lane: the plainest team, for a single device thread and for checking the others against.
struct scalar_team {
  static constexpr int width = 1;
  static constexpr int lane_count = 1;
  using pack = scalar_pack;

  template <element E>
  FREEKV_HD pack load(const E* p) const {
    return pack(to_float(*p));
  }
  FREEKV_HD void store(float* p, pack x) const { *p = x.x; }
  FREEKV_HD float maximum(float a, float b) const { return a > b || a != a ? a : b; }
  FREEKV_HD float minimum(float a, float b) const { return a < b || a != a ? a : b; }
  FREEKV_HD pack maximum(pack a, pack b) const { return pack(maximum(a.x, b.x)); }
  FREEKV_HD pack minimum(pack a, pack b) const { return pack(minimum(a.x, b.x)); }
  FREEKV_HD pack exp(pack x) const { return pack(::expf(x.x)); }
  FREEKV_HD pack bounded_exp(pack x) const { return exp(x); }
  FREEKV_HD pack log(pack x) const { return pack(::logf(x.x)); }
  FREEKV_HD pack tanh(pack x) const { return pack(::tanhf(x.x)); }
  FREEKV_HD pack select_greater(pack a, pack b, pack x, pack y) const { return a.x > b.x ? x : y; }
  FREEKV_HD float sum(pack x) const { return x.x; }
  FREEKV_HD float max(pack x) const { return x.x; }
  FREEKV_HD std::int32_t max_of_lanes(std::int32_t x) const { return x; }
  FREEKV_HD pack sum_each(const pack (&x)[1]) const { return x[0]; }

  template <int Bits>
  FREEKV_HD pack load_codes(const std::uint8_t* codes, int first) const {
    const int bit = (first % 8) * Bits;
    const std::uint8_t* block = codes + first / 8 * Bits + bit / 8;
    unsigned window = block[0];
    if (bit % 8 + Bits > 8) window |= unsigned{block[1]} << 8;
    return pack(static_cast<float>((window >> bit % 8) & ((1u << Bits) - 1)));
  }
  FREEKV_HD pack lookup(const float* table, const std::uint8_t* codes) const { return pack(table[*codes]); }
  template <element E>
  FREEKV_HD void widen(const E* in, float* out, int n) const {
    for (int i = 0; i < n; ++i) out[i] = to_float(in[i]);
  }
  FREEKV_HD void prefetch(const void*) const {}
  FREEKV_HD int lane() const { return 0; }
  FREEKV_HD int lanes() const { return 1; }
  FREEKV_HD void sync() const {}
};

static_assert(team<scalar_team>);

}  // namespace freekv
