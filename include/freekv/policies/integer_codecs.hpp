// Codecs of 8 and 4 bits a number, with what a group of numbers shares beside them.
//
// A group is a token's row of keys or of values or, where a codec says so, a channel's numbers in all of the page's
// keys. A NaN or infinity makes all of its group NaN and changes no other group. -0 comes back as 0.
//
// Stored of keys, then of values: the codes, (tokens, head_dim), two a byte where they have 4 bits, the first in the
// lower; then what each group shares.
#pragma once

#include <freekv/policies/codec.hpp>

namespace freekv {

namespace detail {

/// Floats as integers in the same order, NaN outermost, and back: it is its own inverse. An integer maximum over a row
/// vectorises and loses no NaN.
FREEKV_HD constexpr std::int32_t in_order(std::int32_t x) { return x ^ (x >> 31 & 0x7fffffff); }

/// Lowest and highest number of `N` channels, or with N = 1 of a whole row.
template <int N>
struct extremes {
  std::int32_t lowest[N], highest[N];

  FREEKV_HD extremes() {
    for (int i = 0; i < N; ++i) lowest[i] = 0x7fffffff;
    for (int i = 0; i < N; ++i) highest[i] = -0x7fffffff;
  }
  template <int HeadDim>
  FREEKV_HD void add(const float* row) {
    static_assert(N == HeadDim || N == 1);
    if constexpr (N == 1) {
      std::int32_t low = lowest[0], high = highest[0];
      for (int i = 0; i < HeadDim; ++i) {
        const std::int32_t x = in_order(cuda::std::bit_cast<std::int32_t>(row[i]));
        low = x < low ? x : low;
        high = x > high ? x : high;
      }
      lowest[0] = low;
      highest[0] = high;
    } else {
      for (int i = 0; i < N; ++i) {
        const std::int32_t x = in_order(cuda::std::bit_cast<std::int32_t>(row[i]));
        lowest[i] = x < lowest[i] ? x : lowest[i];
        highest[i] = x > highest[i] ? x : highest[i];
      }
    }
  }
  /// NaN in place of both if a number of the group is NaN or infinite.
  FREEKV_HD float low(int i) const { return finite(i, lowest[i]); }
  FREEKV_HD float high(int i) const { return finite(i, highest[i]); }

 private:
  FREEKV_HD float finite(int i, std::int32_t x) const {
    constexpr std::int32_t infinite = 0x7f800000;
    const bool all = highest[i] < infinite && lowest[i] > -infinite - 1;
    return cuda::std::bit_cast<float>(all ? in_order(x) : 0x7fc00000);
  }
};

/// round(x), ties to even, within low .. high; 0 for NaN.
FREEKV_HD inline int nearest_code(float x, float low, float high) {
  x = x == x ? x : 0.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  // Floats near 1.5 * 2^23 are integers: adding it rounds, and leaves the integer in the lowest bits.
  return static_cast<int>(cuda::std::bit_cast<std::uint32_t>(x + 0x1.8p23f) - 0x4b400000u);
}

/// Codes -L .. L in units of a float32 scale `max|x| / L`, L = 2^(Bits-1) - 1, stored with L added. A number comes back
/// within half a scale and its element's rounding. Where the scale would be subnormal it is rounded coarsely: numbers
/// below 1e-38 may come back as 0.
template <int Bits>
struct symmetric {
  static constexpr int bits = Bits;
  static constexpr int largest = (1 << (Bits - 1)) - 1;
  FREEKV_HD static constexpr std::size_t group_bytes(std::size_t) { return sizeof(float); }

  template <class Element, int N>
  struct groups {
    float scale[N];

    FREEKV_HD void fit(const extremes<N>& seen) {
      constexpr float most = largest;
      for (int i = 0; i < N; ++i) {
        const float low = -seen.low(i), high = seen.high(i);
        const float quotient = (low > high ? low : high) / most;
        // The largest float's scale is rounded up, so that its code would stand for more than a float.
        const std::uint32_t less = quotient * most > 0x1.fffffep127f ? 1u : 0u;
        scale[i] = cuda::std::bit_cast<float>(cuda::std::bit_cast<std::uint32_t>(quotient) - less);
      }
    }
    FREEKV_HD int code(int i, float x) const {
      constexpr float most = largest;
      return nearest_code(x / scale[i], -most, most) + largest;
    }
    FREEKV_HD float number(int i, int code) const { return static_cast<float>(code - largest) * scale[i]; }
    FREEKV_HD void save(std::byte* to) const { narrow_row<N>(scale, reinterpret_cast<float*>(to)); }
    FREEKV_HD void load(const std::byte* from) { widen_row<N>(reinterpret_cast<const float*>(from), scale); }
  };
};

/// Codes 0 .. M, M = 2^Bits - 1, from the lowest number of the group to the highest, in steps of `(high - low) / M`;
/// both are kept as elements, so they come back as they were, and all others within half a step and their rounding.
/// Between elements that differ by less than 16 times the smallest float a step is rounded coarsely.
template <int Bits>
struct ranged {
  static constexpr int bits = Bits;
  static constexpr int most = (1 << Bits) - 1;
  FREEKV_HD static constexpr std::size_t group_bytes(std::size_t element_bytes) { return 2 * element_bytes; }

  template <class Element, int N>
  struct groups {
    float low[N], high[N];
    float sixteenth[N];  // of a step: differences of sixteenths are finite

    FREEKV_HD void fit(const extremes<N>& seen) {
      for (int i = 0; i < N; ++i) low[i] = seen.low(i);
      for (int i = 0; i < N; ++i) high[i] = seen.high(i);
      set_steps();
    }
    FREEKV_HD int code(int i, float x) const {
      return nearest_code((x * 0.0625f - low[i] * 0.0625f) / sixteenth[i], 0.0f, static_cast<float>(most));
    }
    /// From the nearer end, which makes both ends exact.
    FREEKV_HD float number(int i, int code) const {
      const bool lower = code <= most / 2;
      const float steps = static_cast<float>(lower ? code : code - most);
      return (lower ? low[i] : high[i]) + steps * (sixteenth[i] * 16.0f);
    }
    FREEKV_HD void save(std::byte* to) const {
      narrow_row<N>(low, reinterpret_cast<Element*>(to));
      narrow_row<N>(high, reinterpret_cast<Element*>(to) + N);
    }
    FREEKV_HD void load(const std::byte* from) {
      widen_row<N>(reinterpret_cast<const Element*>(from), low);
      widen_row<N>(reinterpret_cast<const Element*>(from) + N, high);
      set_steps();
    }

   private:
    FREEKV_HD void set_steps() {
      for (int i = 0; i < N; ++i)
        sixteenth[i] = (high[i] * 0.0625f - low[i] * 0.0625f) / static_cast<float>(most);
    }
  };
};

/// A row of floats as codes of the groups, of which there is one, or one a channel.
template <int HeadDim, class Codes, class Element, int N>
FREEKV_HD void encode_row(const typename Codes::template groups<Element, N>& groups, const float* row,
                          std::byte* to) {
  std::uint8_t codes[HeadDim];
  for (int i = 0; i < HeadDim; ++i) codes[i] = static_cast<std::uint8_t>(groups.code(N == 1 ? 0 : i, row[i]));
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  if constexpr (Codes::bits == 8)
    std::memcpy(out, codes, HeadDim);
  else
    for (int i = 0; i < HeadDim / 2; ++i)
      out[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}
template <int HeadDim, class Codes, class Element, int N>
FREEKV_HD void decode_row(const typename Codes::template groups<Element, N>& groups, const std::byte* from,
                          Element* to) {
  const auto* in = reinterpret_cast<const std::uint8_t*>(from);
  float row[HeadDim];
  if constexpr (Codes::bits == 8)
    for (int i = 0; i < HeadDim; ++i) row[i] = groups.number(N == 1 ? 0 : i, in[i]);
  else
    for (int i = 0; i < HeadDim / 2; ++i) {
      row[2 * i] = groups.number(N == 1 ? 0 : 2 * i, in[i] & 15);
      row[2 * i + 1] = groups.number(N == 1 ? 0 : 2 * i + 1, in[i] >> 4);
    }
  narrow_row<HeadDim>(row, to);
}

template <class Codes>
FREEKV_HD constexpr std::size_t code_bytes(page_geometry page) {
  return static_cast<std::size_t>(page.tokens * page.head_dim) * Codes::bits / 8;
}

/// Keys or values with a group for each token.
template <class Codes>
struct by_token {
  FREEKV_HD static constexpr std::size_t bytes(page_geometry page, std::size_t element_bytes) {
    return code_bytes<Codes>(page) +
           static_cast<std::size_t>(page.tokens) * Codes::group_bytes(element_bytes);
  }
  template <int HeadDim, class Element>
  FREEKV_HD static void encode(const Element* rows, std::int64_t stride, int tokens, std::byte* to) {
    std::byte* shared = to + code_bytes<Codes>({tokens, HeadDim});
    for (int t = 0; t < tokens; ++t) {
      float row[HeadDim];
      widen_row<HeadDim>(rows + t * stride, row);
      extremes<1> seen;
      seen.add<HeadDim>(row);
      typename Codes::template groups<Element, 1> group;
      group.fit(seen);
      group.save(shared + static_cast<std::size_t>(t) * Codes::group_bytes(sizeof(Element)));
      encode_row<HeadDim, Codes, Element, 1>(group, row, to + code_bytes<Codes>({t, HeadDim}));
    }
  }
  template <int HeadDim, class Element>
  FREEKV_HD static void decode(const std::byte* from, int tokens, Element* rows, std::int64_t stride) {
    const std::byte* shared = from + code_bytes<Codes>({tokens, HeadDim});
    for (int t = 0; t < tokens; ++t) {
      typename Codes::template groups<Element, 1> group;
      group.load(shared + static_cast<std::size_t>(t) * Codes::group_bytes(sizeof(Element)));
      decode_row<HeadDim, Codes, Element, 1>(group, from + code_bytes<Codes>({t, HeadDim}),
                                             rows + t * stride);
    }
  }
};

/// Keys or values with a group for each channel.
template <class Codes>
struct by_channel {
  FREEKV_HD static constexpr std::size_t bytes(page_geometry page, std::size_t element_bytes) {
    return code_bytes<Codes>(page) +
           static_cast<std::size_t>(page.head_dim) * Codes::group_bytes(element_bytes);
  }
  template <int HeadDim, class Element>
  FREEKV_HD static void encode(const Element* rows, std::int64_t stride, int tokens, std::byte* to) {
    float row[HeadDim];
    extremes<HeadDim> seen;
    for (int t = 0; t < tokens; ++t) {
      widen_row<HeadDim>(rows + t * stride, row);
      seen.template add<HeadDim>(row);
    }
    typename Codes::template groups<Element, HeadDim> groups;
    groups.fit(seen);
    groups.save(to + code_bytes<Codes>({tokens, HeadDim}));
    for (int t = 0; t < tokens; ++t) {
      widen_row<HeadDim>(rows + t * stride, row);
      encode_row<HeadDim, Codes, Element, HeadDim>(groups, row, to + code_bytes<Codes>({t, HeadDim}));
    }
  }
  template <int HeadDim, class Element>
  FREEKV_HD static void decode(const std::byte* from, int tokens, Element* rows, std::int64_t stride) {
    typename Codes::template groups<Element, HeadDim> groups;
    groups.load(from + code_bytes<Codes>({tokens, HeadDim}));
    for (int t = 0; t < tokens; ++t)
      decode_row<HeadDim, Codes, Element, HeadDim>(groups, from + code_bytes<Codes>({t, HeadDim}),
                                                   rows + t * stride);
  }
};

/// Keys coded as `Keys` does, values as `Values` does.
template <class Keys, class Values>
struct coded_planes {
  using policy_kind = codec_kind;

  FREEKV_HD constexpr std::size_t bytes(page_geometry page, std::size_t element_bytes) const {
    return Keys::bytes(page, element_bytes) + Values::bytes(page, element_bytes);
  }
  template <int HeadDim, class Element>
  FREEKV_HD void encode(const head_slice<const Element>& from, int tokens, std::byte* to) const {
    Keys::template encode<HeadDim>(from.key, from.stride, tokens, to);
    Values::template encode<HeadDim>(from.value, from.stride, tokens,
                                     to + Keys::bytes({tokens, HeadDim}, sizeof(Element)));
  }
  template <int HeadDim, class Element>
  FREEKV_HD void decode(const std::byte* from, int tokens, const head_slice<Element>& to) const {
    Keys::template decode<HeadDim>(from, tokens, to.key, to.stride);
    Values::template decode<HeadDim>(from + Keys::bytes({tokens, HeadDim}, sizeof(Element)), tokens, to.value,
                                     to.stride);
  }
};

}  // namespace detail

/// 8 bits with a float32 scale `max|x| / 127` for each token's keys and values: `2 * p * (d + 4)` bytes.
struct int8_token
    : detail::coded_planes<detail::by_token<detail::symmetric<8>>, detail::by_token<detail::symmetric<8>>> {
  static constexpr std::string_view name = "int8_token";
};

/// 4 bits with a float32 scale `max|x| / 7` for each token's keys and values: `2 * p * (d / 2 + 4)` bytes.
struct int4_token
    : detail::coded_planes<detail::by_token<detail::symmetric<4>>, detail::by_token<detail::symmetric<4>>> {
  static constexpr std::string_view name = "int4_token";
};

/// 8 bits; keys with a float32 scale for each channel over the page, since a few channels of keys are much larger than
/// the others, values for each token: `p * (2 * d + 4) + 4 * d` bytes. (Which axis: KIVI, arXiv 2402.02750)
struct int8_channel
    : detail::coded_planes<detail::by_channel<detail::symmetric<8>>, detail::by_token<detail::symmetric<8>>> {
  static constexpr std::string_view name = "int8_channel";
};

/// 4 bits, asymmetric: 15 steps from the lowest to the highest number of a channel of the page's keys and of a token's
/// values, these two kept as elements of e bytes: `p * (d + 2 * e) + 2 * d * e` bytes. (KIVI, arXiv 2402.02750, with
/// its groups: of keys the page, of values the whole row; and two ends in place of its zero point and scale.)
struct int4_channel
    : detail::coded_planes<detail::by_channel<detail::ranged<4>>, detail::by_token<detail::ranged<4>>> {
  static constexpr std::string_view name = "int4_channel";
};

static_assert(codec_policy<int8_token> && codec_policy<int4_token> && codec_policy<int8_channel> &&
              codec_policy<int4_channel>);

}  // namespace freekv
