// Codes of 8 and 4 bits for groups of numbers, and what a group shares: the parts that codecs with a scale
// are made of.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <freekv/core/element_rows.hpp>
#include <freekv/core/rounded_sum.hpp>

namespace freekv::detail {

/// Floats as integers in the same order, NaN outermost, and back: it is its own inverse. An integer maximum
/// over a row vectorises and loses no NaN.
FREEKV_HD constexpr std::int32_t in_order(std::int32_t x) { return x ^ (x >> 31 & 0x7fffffff); }

/// Lowest and highest number of `N` channels, or with N = 1 of a whole row.
template <int N>
struct extremes {
  std::int32_t lowest[N], highest[N];

  FREEKV_HD extremes() {
    for (int i = 0; i < N; ++i) lowest[i] = 0x7fffffff;
    for (int i = 0; i < N; ++i) highest[i] = -0x7fffffff;
  }
  template <int Count>
  FREEKV_HD void add(const float* row) {
    static_assert(N == Count || N == 1);
    if constexpr (N == 1) {
      std::int32_t low = lowest[0], high = highest[0];
      for (int i = 0; i < Count; ++i) {
        const std::int32_t x = in_order(static_cast<std::int32_t>(bits_of(row[i])));
        low = x < low ? x : low;
        high = x > high ? x : high;
      }
      lowest[0] = low;
      highest[0] = high;
    } else {
      for (int i = 0; i < N; ++i) {
        const std::int32_t x = in_order(static_cast<std::int32_t>(bits_of(row[i])));
        lowest[i] = x < lowest[i] ? x : lowest[i];
        highest[i] = x > highest[i] ? x : highest[i];
      }
    }
  }
  /// Unites what a team's lanes have seen of their parts of a row.
  template <class Team>
  FREEKV_HD void unite(Team team) {
    static_assert(N == 1);
    lowest[0] = ~team.max_of_lanes(~lowest[0]);
    highest[0] = team.max_of_lanes(highest[0]);
  }
  /// NaN in place of both if a number of the group is NaN or infinite.
  FREEKV_HD float low(int i) const { return finite(i, lowest[i]); }
  FREEKV_HD float high(int i) const { return finite(i, highest[i]); }

 private:
  FREEKV_HD float finite(int i, std::int32_t x) const {
    constexpr std::int32_t infinite = 0x7f800000;
    const bool all = highest[i] < infinite && lowest[i] > -infinite - 1;
    return float_of(all ? static_cast<std::uint32_t>(in_order(x)) : 0x7fc00000u);
  }
};

/// round(x), ties to even, within low .. high; 0 for NaN.
FREEKV_HD inline int nearest_code(float x, int low, int high) {
  // Floats near 1.5 * 2^23 are integers: adding it rounds and leaves the integer in the lowest bits. What is
  // far away stays on its side.
  constexpr int zero = 0x4b400000;
  const std::uint32_t bits = bits_of(x + 0x1.8p23f);
  int code = static_cast<int>(bits);
  code = code < zero + low ? zero + low : code;
  code = code > zero + high ? zero + high : code;
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0 : code - zero;
}

/// A float32 scale for each of N groups, `max|x| / most`.
template <int N>
struct group_scales {
  float scale[N];

  FREEKV_HD void fit_scales(const extremes<N>& seen, float most) {
    for (int i = 0; i < N; ++i) {
      const float low = ::fabsf(seen.low(i)), high = ::fabsf(seen.high(i));
      const float quotient = (low > high ? low : high) / most;
      // The largest float's scale is rounded up, so that its code would stand for more than a float.
      const std::uint32_t less = quotient * most > 0x1.fffffep127f ? 1u : 0u;
      scale[i] = float_of(bits_of(quotient) - less);
    }
  }
  /// Saves the groups as `first` to `first + N` of `All`.
  template <int All = N>
  FREEKV_HD void save(std::byte* to, int first = 0) const {
    narrow_row<N>(scale, reinterpret_cast<float*>(to) + first);
  }
  template <int All = N>
  FREEKV_HD void load(const std::byte* from, int first = 0) {
    widen_row<N>(reinterpret_cast<const float*>(from) + first, scale);
  }
};

/// Codes -L .. L in units of a float32 scale `max|x| / L`, L = 2^(Bits-1) - 1, stored with L added. A number
/// comes back within half a scale and its element's rounding. A subnormal scale, of max|x| below 2e-36, is
/// itself rounded to a multiple of the smallest float, and may be 0.
template <int Bits>
struct symmetric {
  static constexpr int bits = Bits;
  static constexpr int largest = (1 << (Bits - 1)) - 1;
  FREEKV_HD static constexpr std::size_t group_bytes(std::size_t) { return sizeof(float); }

  template <class Element, int N>
  struct groups : group_scales<N> {
    using group_scales<N>::scale;

    FREEKV_HD void fit(const extremes<N>& seen) { this->fit_scales(seen, static_cast<float>(largest)); }
    FREEKV_HD int code(int i, float x) const {
      return nearest_code(x / scale[i], -largest, largest) + largest;
    }
    FREEKV_HD float number(int i, int code) const { return static_cast<float>(code - largest) * scale[i]; }
  };
};

/// Numbers of fp8_e4m3 in units of a float32 scale `max|x| / 448`. A number comes back within `max|x| / 16`,
/// or a sixteenth of itself and 2^-10 of a scale, and its element's rounding; -0 stays -0. A subnormal scale
/// is as of `symmetric`.
struct scaled_fp8 {
  static constexpr int bits = 8;
  FREEKV_HD static constexpr std::size_t group_bytes(std::size_t) { return sizeof(float); }

  template <class Element, int N>
  struct groups : group_scales<N> {
    using group_scales<N>::scale;

    FREEKV_HD void fit(const extremes<N>& seen) { this->fit_scales(seen, 448.0f); }
    /// Code of a number; 0 where the scale is 0, whose numbers are 0 or too small for one.
    FREEKV_HD int code(int i, float x) const {
      return fp8_from_float(scale[i] == 0.0f ? x : x / scale[i]).bits;
    }
    FREEKV_HD float number(int i, int code) const {
      return to_float(fp8_e4m3{static_cast<std::uint8_t>(code)}) * scale[i];
    }
  };
};

/// Codes 0 .. M, M = 2^Bits - 1, from the lowest number of the group to the highest, in steps of
/// `(high - low) / M`; both are kept as elements, so they come back as they were, and all others within half
/// a step and their rounding. Differences of the order of the smallest float, 1e-45, are coarse.
template <int Bits>
struct ranged {
  static constexpr int bits = Bits;
  static constexpr int most = (1 << Bits) - 1;
  FREEKV_HD static constexpr std::size_t group_bytes(std::size_t element_bytes) { return 2 * element_bytes; }

  template <class Element, int N>
  struct groups {
    float low[N], high[N];
    float half_step[N];  // differences of halves are finite

    FREEKV_HD void fit(const extremes<N>& seen) {
      for (int i = 0; i < N; ++i) low[i] = seen.low(i);
      for (int i = 0; i < N; ++i) high[i] = seen.high(i);
      set_steps();
    }
    FREEKV_HD int code(int i, float x) const {
      return nearest_code((x * 0.5f - low[i] * 0.5f) / half_step[i], 0, most);
    }
    /// Number of a code, counted from the nearer end, which makes both ends exact.
    FREEKV_HD float number(int i, int code) const {
      const bool lower = code <= most / 2;
      const int steps = lower ? code : code - most;
      const float end = float_of(select_bits(lower, bits_of(low[i]), bits_of(high[i])));
      return rounded_sum(end, static_cast<float>(steps) * (half_step[i] * 2.0f));
    }
    /// Saves the groups as `first` to `first + N` of `All`.
    template <int All = N>
    FREEKV_HD void save(std::byte* to, int first = 0) const {
      narrow_row<N>(low, reinterpret_cast<Element*>(to) + first);
      narrow_row<N>(high, reinterpret_cast<Element*>(to) + All + first);
    }
    template <int All = N>
    FREEKV_HD void load(const std::byte* from, int first = 0) {
      widen_row<N>(reinterpret_cast<const Element*>(from) + first, low);
      widen_row<N>(reinterpret_cast<const Element*>(from) + All + first, high);
      set_steps();
    }

   private:
    FREEKV_HD void set_steps() {
      for (int i = 0; i < N; ++i) half_step[i] = (high[i] * 0.5f - low[i] * 0.5f) / static_cast<float>(most);
    }
  };
};

}  // namespace freekv::detail
