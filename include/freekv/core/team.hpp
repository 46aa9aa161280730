// Teams: the lanes that work together on one piece, so that one body of code serves SIMD lanes and GPU
// threads.
//
// A body is written for `width` neighbouring elements at a time. On the host a team is one thread with SIMD
// lanes and a pack is a vector register or two; on CUDA the lanes are threads and a pack is each thread's
// share. The order in which a team adds is fixed by its width alone, so strict float still vectorises and
// results are reproducible.
//
// A team offers
//   width                          elements in a pack; pages and head dims it is used for are multiples of it
//   pack                           +, -, * elementwise; pack(float) fills all lanes
//   load(p), store(p, x)           p[0 .. width) as a pack and back
//   maximum, minimum               elementwise; NaN if either is NaN
//   exp, log                       elementwise, to about 2 ulp; log of x >= 0
//   select_greater(a, b, x, y)     elementwise a > b ? x : y
//   sum, max                       over the lanes of a pack, to a float all lanes see; max is NaN if any lane
//   is sum_each(packs)                lane i = sum(packs[i]), for `width` packs load_codes<bits>(p, i) codes
//   i .. i+width of a stream of unsigned `bits`-bit codes (2, 3, 4, 8), in
//                                  blocks of 8 codes, `bits` bytes each, the first code in the lowest bits; may
//                                  read (and ignore) up to 2 bytes behind them
//   widen(in, out, n)              n stored elements to float, n a multiple of 8
//   lane(), lanes()                this thread's number and how many threads share the team: scalar work is
//   dealt out
//                                  as `for (i = lane(); i < n; i += lanes())`
//   sync()                         what one lane wrote is visible to the others after it
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>
#include <freekv/core/element.hpp>

namespace freekv {

template <class T>
concept team = requires(const T t, const float* in, float* out, typename T::pack x) {
  { T::width } -> std::convertible_to<int>;
  { t.load(in) } -> std::same_as<typename T::pack>;
  t.store(out, x);
  { t.maximum(x, x) } -> std::same_as<typename T::pack>;
  { t.exp(x) } -> std::same_as<typename T::pack>;
  { t.sum(x) } -> std::same_as<float>;
  t.widen(in, out, 8);
  { t.lane() } -> std::same_as<int>;
  { t.lanes() } -> std::same_as<int>;
  t.sync();
};

/// One lane: the plainest team, for a single device thread and for checking the others against.
struct scalar_team {
  static constexpr int width = 1;
  using pack = float;

  FREEKV_HD float load(const float* p) const { return *p; }
  FREEKV_HD void store(float* p, float x) const { *p = x; }
  FREEKV_HD float maximum(float a, float b) const { return a > b || a != a ? a : b; }
  FREEKV_HD float minimum(float a, float b) const { return a < b || a != a ? a : b; }
  FREEKV_HD float exp(float x) const { return ::expf(x); }
  FREEKV_HD float log(float x) const { return ::logf(x); }
  FREEKV_HD float select_greater(float a, float b, float x, float y) const { return a > b ? x : y; }
  FREEKV_HD float sum(float x) const { return x; }
  FREEKV_HD float max(float x) const { return x; }
  FREEKV_HD float sum_each(const float (&x)[1]) const { return x[0]; }

  template <int Bits>
  FREEKV_HD float load_codes(const std::uint8_t* codes, int first) const {
    const int bit = (first % 8) * Bits;
    const std::uint8_t* block = codes + first / 8 * Bits + bit / 8;
    unsigned window = block[0];
    if (bit % 8 + Bits > 8) window |= unsigned{block[1]} << 8;
    return static_cast<float>((window >> bit % 8) & ((1u << Bits) - 1));
  }
  template <element E>
  FREEKV_HD void widen(const E* in, float* out, int n) const {
    for (int i = 0; i < n; ++i) out[i] = to_float(in[i]);
  }
  FREEKV_HD int lane() const { return 0; }
  FREEKV_HD int lanes() const { return 1; }
  FREEKV_HD void sync() const {}
};

static_assert(team<scalar_team>);

}  // namespace freekv
