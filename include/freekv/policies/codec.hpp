// Codecs: how a complete page's keys and values are stored in the slow tier.
//
// A codec turns one KV head's keys and values of a page into bytes when the page is complete and goes to the
// store, and back when it is recalled, so the slow tier may hold more and a recall move less than the fast
// tier's elements take. Attention reads what comes back. It is two functions and a size:
//
//   struct my_codec {
//     using policy_kind = codec_kind;
//     static constexpr std::string_view name = "my_codec";
//     FREEKV_HD constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) const;
//     template <int HeadDim, class Team, class Element>
//     FREEKV_HD void encode(Team team, const head_slice<const Element>& from, int tokens,
//                           std::byte* to) const;
//     template <int HeadDim, class Team, class Element>
//     FREEKV_HD void decode(Team team, const std::byte* from, int tokens, row_range rows,
//                           const head_slice<Element>& to) const;
//   };
//
// `bytes`: of one KV head's keys and values of a page, a multiple of 4. Stored bytes are contiguous, keys
// before values, and aligned as floats are. `tokens` is at most the page's, and `decode` is given what
// `encode` was; it writes those `rows` of the page, the first to row 0 of `to`. Rows of the element side lie
// at any stride. A token's row, or where a codec says so a channel's numbers of the page, come back the same
// whatever the others are: NaN and infinity are data, but they stay there.
//
// `team`: `lane_count` lanes that share each row, `row_share` of its numbers each; on the host one. What one
// lane writes no other reads before the caller has the team `sync()`.
//
// Optional, and then listed in `hooks`: `at(slice_place)`, the codec for one slice, where it depends on the
// layer, head or position; `data(visit)` then, which calls `visit(array, bytes)` for each array that it was
// given; `shared_bytes(page, element_bytes)`, a multiple of 4, what all heads of a page share and keep in
// fast memory, and `shared_floats(page)`, scratch while it is made; `values()`, what it was given, for names;
// `validate(codec_setting)`, which throws settings_error. Slices of a page are encoded one head after the
// other from head 0 on, and decoded when all have been.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/core/element_rows.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/team.hpp>
#include <freekv/storage/layout.hpp>
#include <string_view>

namespace freekv {

/// Model that a codec is used for, for `validate`.
struct codec_setting {
  int layers = 0, kv_heads = 0, head_dim = 0;
};

/// Rows of a page.
struct row_range {
  int first = 0, count = 0;
};

/// Place of the slice that a codec is for: its head and page, and what the page's heads share.
struct slice_place {
  int layer = 0, head = 0, kv_heads = 1;
  int first_token = 0;          // the page's, as the sequence counts them
  std::byte* shared = nullptr;  // (shared_bytes)
  float* floats = nullptr;  // (shared_floats), the same from a page's first head to its last; to encode alone
};

/// The codec for one slice.
template <class C>
FREEKV_HD constexpr auto codec_at(const C& codec, const slice_place& place) {
  if constexpr (requires { codec.at(place); })
    return codec.at(place);
  else
    return codec;
}
/// Bytes that a page's heads share, and floats of scratch that they are made with.
template <class C>
FREEKV_HD constexpr std::size_t shared_bytes(const C& codec, kv_extent page, std::size_t element_bytes) {
  if constexpr (requires { codec.shared_bytes(page, element_bytes); })
    return codec.shared_bytes(page, element_bytes);
  else
    return 0;
}
template <class C>
FREEKV_HD constexpr int shared_floats(const C& codec, kv_extent page) {
  if constexpr (requires { codec.shared_floats(page); })
    return codec.shared_floats(page);
  else
    return 0;
}

namespace detail {

/// Numbers of a row that a lane of a team has: those from `lane() * row_share` on.
template <int HeadDim, class Team>
inline constexpr int row_share = HeadDim / Team::lane_count;

/// A lane's part of a row of stored numbers; its bytes lie at a multiple of 4 if they are one.
template <int Count, class Stored>
struct stored_numbers {
  Stored x[Count];

  FREEKV_HD explicit stored_numbers(const void* from) {
    constexpr std::size_t alignment = sizeof x % 4 == 0 ? 4 : 1;
    std::memcpy(x, __builtin_assume_aligned(from, alignment), sizeof x);
  }
};

/// Stored elements as a slice: `tokens` rows of keys, then of values.
template <int HeadDim, class Element>
FREEKV_HD head_slice<Element> stored_slice(std::byte* bytes, int tokens) {
  auto* key = reinterpret_cast<Element*>(bytes);
  return {key, key + tokens * HeadDim, HeadDim};
}
template <int HeadDim, class Element>
FREEKV_HD head_slice<const Element> stored_slice(const std::byte* bytes, int tokens) {
  const auto* key = reinterpret_cast<const Element*>(bytes);
  return {key, key + tokens * HeadDim, HeadDim};
}

template <int Count, class To, class From>
FREEKV_HD void convert_numbers(const From* from, To* to) {
  if constexpr (std::same_as<From, To>) {
    for (int i = 0; i < Count; ++i) to[i] = from[i];
  } else {
    float row[Count];
    widen_row<Count>(from, row);
    narrow_row<Count>(row, to);
  }
}

/// Keys and values, each number as a `Stored`.
template <int HeadDim, class Stored, class Team, class Element>
FREEKV_HD void store_numbers(Team team, const head_slice<const Element>& from, int tokens, std::byte* to) {
  constexpr int share = row_share<HeadDim, Team>;
  const auto stored = stored_slice<HeadDim, Stored>(to, tokens);
  if constexpr (std::same_as<Element, Stored> && share == HeadDim) {
    copy_slice<HeadDim>(from, stored, tokens);
  } else {
    const int mine = team.lane() * share;
    for (int t = 0; t < tokens; ++t) {
      convert_numbers<share>(from.key + t * from.stride + mine, stored.key + t * HeadDim + mine);
      convert_numbers<share>(from.value + t * from.stride + mine, stored.value + t * HeadDim + mine);
    }
  }
}
/// Loads `rows` of a slice whose numbers are stored as `Stored`.
template <int HeadDim, class Stored, class Team, class Element>
FREEKV_HD void load_numbers(Team team, const std::byte* from, int tokens, row_range rows,
                            const head_slice<Element>& to) {
  constexpr int share = row_share<HeadDim, Team>;
  const auto stored = rows_behind(stored_slice<HeadDim, Stored>(from, tokens), rows.first);
  if constexpr (std::same_as<Element, Stored> && share == HeadDim) {
    copy_slice<HeadDim>(stored, to, rows.count);
  } else {
    const int mine = team.lane() * share;
    for (int t = 0; t < rows.count; ++t) {
      const stored_numbers<share, Stored> key(stored.key + t * HeadDim + mine);
      const stored_numbers<share, Stored> value(stored.value + t * HeadDim + mine);
      convert_numbers<share>(key.x, to.key + t * to.stride + mine);
      convert_numbers<share>(value.x, to.value + t * to.stride + mine);
    }
  }
}

}  // namespace detail

/// The elements themselves, bit for bit.
struct identity {
  using policy_kind = codec_kind;
  static constexpr std::string_view name = "identity";

  FREEKV_HD constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) const {
    return std::size_t{2} * to_size(page.tokens * page.head_dim) * element_bytes;
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void encode(Team team, const head_slice<const Element>& from, int tokens, std::byte* to) const {
    detail::store_numbers<HeadDim, Element>(team, from, tokens, to);
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void decode(Team team, const std::byte* from, int tokens, row_range rows,
                        const head_slice<Element>& to) const {
    detail::load_numbers<HeadDim, Element>(team, from, tokens, rows, to);
  }
};

/// Each number as a `Stored`, rounded to the nearest: bfloat16, half or fp8_e4m3. An infinity or what is
/// beyond the range becomes what `from_float` makes of it: infinite in bfloat16 and half, 448 in fp8_e4m3,
/// which has no scale: keys and values that exceed 448 belong elsewhere. NaN stays NaN and -0 stays -0.
template <storage_element Stored>
struct cast {
  using policy_kind = codec_kind;
  static constexpr std::string_view name = element_name<Stored>;

  FREEKV_HD constexpr std::size_t bytes(kv_extent page, std::size_t) const {
    return identity{}.bytes(page, sizeof(Stored));
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void encode(Team team, const head_slice<const Element>& from, int tokens, std::byte* to) const {
    detail::store_numbers<HeadDim, Stored>(team, from, tokens, to);
  }
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void decode(Team team, const std::byte* from, int tokens, row_range rows,
                        const head_slice<Element>& to) const {
    detail::load_numbers<HeadDim, Stored>(team, from, tokens, rows, to);
  }
};

/// A policy of kind `codec_kind` that, or whose `at(slice_place)`, has the three functions above (tried with
/// rows of 64 floats).
template <class C>
concept codec_policy = policy<C> && std::same_as<typename C::policy_kind, codec_kind> &&
    requires(const C c, kv_extent page, head_slice<const float> from, head_slice<float> to,
             const std::byte* stored, std::byte* out) {
  { C::name } -> std::convertible_to<std::string_view>;
  { c.bytes(page, sizeof(float)) } -> std::same_as<std::size_t>;
  codec_at(c, {}).template encode<64>(scalar_team{}, from, 32, out);
  codec_at(c, {}).template decode<64>(scalar_team{}, stored, 32, row_range{0, 32}, to);
};

static_assert(codec_policy<identity> && codec_policy<cast<bfloat16>> && codec_policy<cast<fp8_e4m3>>);

struct codec_kind : kind_defaults {
  using default_policy = identity;
  template <class P>
  struct check {
    static_assert(codec_policy<P>,
                  "a codec has a name, bytes(page, element_bytes) -> std::size_t, encode<head_dim>(team, "
                  "slice, tokens, bytes) and decode<head_dim>(team, bytes, tokens, rows, slice)");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    switch (h) {
      case hook::at:
        return requires(const P p) { p.at(slice_place{}); };
      case hook::shared_bytes:
        return requires(const P p) {
          { p.shared_bytes(kv_extent{}, sizeof(float)) } -> std::same_as<std::size_t>;
        };
      case hook::shared_floats:
        return requires(const P p) {
          { p.shared_floats(kv_extent{}) } -> std::same_as<int>;
        };
      case hook::validate:
        return requires(const P p) { p.validate(codec_setting{}); };
      default:
        return kind_defaults::offers<P>(h);
    }
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const policy_setting& setting) {
    policy.validate(codec_setting{setting.layers, setting.kv_heads, setting.head_dim});
  }
};

/// True where `Codec` stores `Element`s as they are, (2, tokens, head_dim), bit for bit: then they may be
/// read where they are stored.
template <class Codec, element Element>
inline constexpr bool stores_elements = false;
template <element Element>
inline constexpr bool stores_elements<identity, Element> = true;
template <element Element>
inline constexpr bool stores_elements<cast<Element>, Element> = true;

}  // namespace freekv
