// Codecs of 8 and 4 bits a number, with what a group of numbers shares beside them.
//
// A group is a token's row of keys or of values or, where a codec says so, a channel's numbers in all of the
// page's keys. A NaN or infinity makes all of its group NaN and changes no other group. -0 comes back as 0.
//
// Stored of keys, then of values: the codes, (tokens, head_dim), two a byte where they have 4 bits, the first
// in the lower; then what each group shares.
#pragma once

#include <cstring>
#include <freekv/core/size.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/detail/group_codes.hpp>

namespace freekv {

namespace detail {

/// A lane's part of a row of floats as codes of the groups, of which there is one, or one a channel.
template <int Count, class Codes, class Element, int N>
FREEKV_HD void encode_row(const typename Codes::template groups<Element, N>& groups, const float* row,
                          std::byte* to) {
  static_assert(Count * Codes::bits % 8 == 0, "a lane has whole bytes");
  std::uint8_t codes[Count];
  for (int i = 0; i < Count; ++i) codes[i] = static_cast<std::uint8_t>(groups.code(N == 1 ? 0 : i, row[i]));
  auto* out = reinterpret_cast<std::uint8_t*>(to);
  if constexpr (Codes::bits == 8)
    std::memcpy(out, codes, Count);
  else
    for (int i = 0; i < Count / 2; ++i)
      out[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}
template <int Count, class Codes, class Element, int N>
FREEKV_HD void decode_row(const typename Codes::template groups<Element, N>& groups, const std::byte* from,
                          Element* to) {
  const stored_numbers<Count * Codes::bits / 8, std::uint8_t> in(from);
  float row[Count];
  if constexpr (Codes::bits == 8)
    for (int i = 0; i < Count; ++i) row[i] = groups.number(N == 1 ? 0 : i, in.x[i]);
  else
    for (int i = 0; i < Count / 2; ++i) {
      row[2 * i] = groups.number(N == 1 ? 0 : 2 * i, in.x[i] & 15);
      row[2 * i + 1] = groups.number(N == 1 ? 0 : 2 * i + 1, in.x[i] >> 4);
    }
  narrow_row<Count>(row, to);
}

template <class Codes>
FREEKV_HD constexpr std::size_t code_bytes(kv_extent page) {
  return to_size(page.tokens * page.head_dim) * Codes::bits / 8;
}

/// Offset of a row's codes from number `first` on.
template <class Codes, int HeadDim>
FREEKV_HD constexpr std::size_t code_offset(int row, int first) {
  return (to_size(row) * HeadDim + to_size(first)) * Codes::bits / 8;
}

/// Keys or values with a group for each token.
template <class Codes>
struct by_token {
  FREEKV_HD static constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) {
    return code_bytes<Codes>(page) + to_size(page.tokens) * Codes::group_bytes(element_bytes);
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD static void encode(Team team, const Element* rows, std::int64_t stride, int tokens,
                               std::byte* to) {
    constexpr int share = row_share<HeadDim, Team>;
    const int mine = team.lane() * share;
    std::byte* shared = to + code_bytes<Codes>({tokens, HeadDim});
    for (int t = 0; t < tokens; ++t) {
      float row[share];
      widen_row<share>(rows + t * stride + mine, row);
      extremes<1> seen;
      seen.add<share>(row);
      seen.unite(team);
      typename Codes::template groups<Element, 1> group;
      group.fit(seen);
      if (team.lane() == 0) group.save(shared + to_size(t) * Codes::group_bytes(sizeof(Element)));
      encode_row<share, Codes, Element, 1>(group, row, to + code_offset<Codes, HeadDim>(t, mine));
    }
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD static void decode(Team team, const std::byte* from, int tokens, row_range wanted, Element* rows,
                               std::int64_t stride) {
    constexpr int share = row_share<HeadDim, Team>;
    const int mine = team.lane() * share;
    const std::byte* shared = from + code_bytes<Codes>({tokens, HeadDim});
    for (int nth = 0; nth < wanted.count; ++nth) {
      const int t = wanted.first + nth;
      typename Codes::template groups<Element, 1> group;
      group.load(shared + to_size(t) * Codes::group_bytes(sizeof(Element)));
      decode_row<share, Codes, Element, 1>(group, from + code_offset<Codes, HeadDim>(t, mine),
                                           rows + nth * stride + mine);
    }
  }
};

/// Keys or values with a group for each channel.
template <class Codes>
struct by_channel {
  FREEKV_HD static constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) {
    return code_bytes<Codes>(page) + to_size(page.head_dim) * Codes::group_bytes(element_bytes);
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD static void encode(Team team, const Element* rows, std::int64_t stride, int tokens,
                               std::byte* to) {
    constexpr int share = row_share<HeadDim, Team>;
    const int mine = team.lane() * share;
    float row[share];
    extremes<share> seen;
    for (int t = 0; t < tokens; ++t) {
      widen_row<share>(rows + t * stride + mine, row);
      seen.template add<share>(row);
    }
    typename Codes::template groups<Element, share> groups;
    groups.fit(seen);
    groups.template save<HeadDim>(to + code_bytes<Codes>({tokens, HeadDim}), mine);
    for (int t = 0; t < tokens; ++t) {
      widen_row<share>(rows + t * stride + mine, row);
      encode_row<share, Codes, Element, share>(groups, row, to + code_offset<Codes, HeadDim>(t, mine));
    }
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD static void decode(Team team, const std::byte* from, int tokens, row_range wanted, Element* rows,
                               std::int64_t stride) {
    constexpr int share = row_share<HeadDim, Team>;
    const int mine = team.lane() * share;
    typename Codes::template groups<Element, share> groups;
    groups.template load<HeadDim>(from + code_bytes<Codes>({tokens, HeadDim}), mine);
    for (int nth = 0; nth < wanted.count; ++nth)
      decode_row<share, Codes, Element, share>(
          groups, from + code_offset<Codes, HeadDim>(wanted.first + nth, mine), rows + nth * stride + mine);
  }
};

/// Keys coded as `Keys` does, values as `Values` does.
template <class Keys, class Values>
struct coded_planes {
  using policy_kind = codec_kind;

  FREEKV_HD constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) const {
    return Keys::bytes(page, element_bytes) + Values::bytes(page, element_bytes);
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void encode(Team team, const head_slice<const Element>& from, int tokens, std::byte* to) const {
    Keys::template encode<HeadDim>(team, from.key, from.stride, tokens, to);
    Values::template encode<HeadDim>(team, from.value, from.stride, tokens,
                                     to + Keys::bytes({tokens, HeadDim}, sizeof(Element)));
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void decode(Team team, const std::byte* from, int tokens, row_range rows,
                        const head_slice<Element>& to) const {
    Keys::template decode<HeadDim>(team, from, tokens, rows, to.key, to.stride);
    Values::template decode<HeadDim>(team, from + Keys::bytes({tokens, HeadDim}, sizeof(Element)), tokens,
                                     rows, to.value, to.stride);
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

/// 8 bits; keys with a float32 scale for each channel over the page, since a few channels of keys are much
/// larger than the others, values for each token: `p * (2 * d + 4) + 4 * d` bytes. (Which axis: KIVI, arXiv
/// 2402.02750)
struct int8_channel
    : detail::coded_planes<detail::by_channel<detail::symmetric<8>>, detail::by_token<detail::symmetric<8>>> {
  static constexpr std::string_view name = "int8_channel";
};

/// 4 bits, asymmetric: 15 steps from the lowest to the highest number of a channel of the page's keys and of
/// a token's values, these two kept as elements of e bytes: `p * (d + 2 * e) + 2 * d * e` bytes. (KIVI, arXiv
/// 2402.02750, with its groups: of keys the page, of values the whole row; and two ends in place of its zero
/// point and scale.)
struct int4_channel
    : detail::coded_planes<detail::by_channel<detail::ranged<4>>, detail::by_token<detail::ranged<4>>> {
  static constexpr std::string_view name = "int4_channel";
};

static_assert(codec_policy<int8_token> && codec_policy<int4_token> && codec_policy<int8_channel> &&
              codec_policy<int4_channel>);

}  // namespace freekv
