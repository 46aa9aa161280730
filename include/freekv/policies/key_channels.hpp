// A codec that keeps of keys the channels that tell most for queries, and which channels these are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cuda/std/bit>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/codec.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace freekv {

/// Which channels of its keys each KV head of all layers keeps: data of the caller's, who keeps its memory;
/// of a device it is memory that the device reads.
struct channel_lists {
  /// (layers, kv_heads, head_dim / 8): bit `i % 8`, from the lowest on, of byte `i / 8` is set where channel
  /// i is kept.
  const std::uint8_t* data = nullptr;
  int layers = 0, kv_heads = 0, head_dim = 0;

  constexpr std::size_t bytes() const { return to_size(layers * kv_heads) * to_size(head_dim / 8); }
  FREEKV_HD constexpr const std::uint8_t* list(int layer, int head) const {
    return data + to_size(layer * kv_heads + head) * to_size(head_dim / 8);
  }
};

/// Channels of each key that its KV head's list has, one behind the other in the element type, the others
/// being 0 when it comes back; values as they are: `p * (kept + d) * e` bytes. (ThinK, arXiv 2407.21018: its
/// pruned keys, by the share of channels that it prunes)
///
/// `kept(head_dim)` channels of every head, the nearest multiple of 8. The lists are data, learnt from a
/// prompt by `choose_key_channels` or from a text, and serve all sequences. A pipeline does not look into
/// them, as they may be a device's or be learnt later: `check` does. Of a list with more channels the first
/// `kept` are. Unlike in the paper, where the last 32 keys of a prompt and those decoded later stay whole,
/// here those of the open page do, of fewer tokens than a page.
struct key_channels {
  using policy_kind = codec_kind;
  using hooks = hook_list<hook::at, hook::data, hook::validate, hook::values>;
  static constexpr std::string_view name = "key_channels";
  float pruned = 0.4f;  ///< share of a key's channels that is not kept, below 1
  channel_lists lists{};

  FREEKV_HD constexpr int kept(int head_dim) const {
    const int eights = static_cast<int>((1.0f - pruned) * static_cast<float>(head_dim) / 8.0f + 0.5f);
    return eights < 1 ? 8 : 8 * eights;
  }

  template <class Visit>
  void data(const Visit& visit) const {
    visit(lists.data, lists.bytes());
  }
  std::string values() const { return detail::decimal(pruned); }
  void validate(const codec_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (!(pruned >= 0.0f && pruned < 1.0f))
      throw settings_error("key_channels: pruned of " + values() +
                           " is not a share from 0 to below 1; choose one such as 0.4");
    if (lists.data == nullptr)
      throw settings_error(
          "key_channels needs its lists of channels as data: choose_key_channels makes them from a prompt's "
          "keys and last queries or a text's");
    if (lists.head_dim != s.head_dim || lists.layers < s.layers || lists.kv_heads != s.kv_heads)
      throw settings_error("key_channels: the lists are of " + text(lists.layers) + " layers of " +
                           text(lists.kv_heads) + " heads, head_dim " + text(lists.head_dim) +
                           "; needed are " + text(s.layers) + " layers of " + text(s.kv_heads) +
                           " heads, head_dim " + text(s.head_dim));
  }
  /// Throws settings_error unless each list, which is in memory that the host reads, has `kept` channels.
  void check() const {
    for (int layer = 0; layer < lists.layers; ++layer)
      for (int head = 0; head < lists.kv_heads; ++head) {
        int listed = 0;
        for (int i = 0; i < lists.head_dim / 8; ++i)
          listed += cuda::std::popcount(lists.list(layer, head)[i]);
        if (listed != kept(lists.head_dim))
          throw settings_error("key_channels: the list of layer " + std::to_string(layer) + ", KV head " +
                               std::to_string(head) + " has " + std::to_string(listed) + " channels, and " +
                               std::to_string(kept(lists.head_dim)) + " of " +
                               std::to_string(lists.head_dim) + " are kept where a share of " + values() +
                               " is pruned; choose as many, as choose_key_channels does");
      }
  }

  FREEKV_HD constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) const {
    return to_size(page.tokens * (kept(page.head_dim) + page.head_dim)) * element_bytes;
  }

  /// The codec for one slice.
  struct slice_codec;
  FREEKV_HD constexpr slice_codec at(const slice_place& place) const;
};

struct key_channels::slice_codec {
  key_channels policy;
  const std::uint8_t* list;

  template <int HeadDim, class Team, class Element>
  FREEKV_HD void encode(Team team, const head_slice<const Element>& from, int tokens, std::byte* to) const {
    constexpr int share = detail::row_share<HeadDim, Team>;
    const int first = team.lane() * share, kept = policy.kept(HeadDim);
    const places<share> mine(list, first, kept);
    auto* key = reinterpret_cast<Element*>(to);
    Element* value = key + tokens * kept + first;
    for (int t = 0; t < tokens; ++t, key += kept, value += HeadDim) {
      const Element* const row = from.key + t * from.stride + first;
      for (int i = 0; i < share; ++i)
        if (mine.of[i] >= 0) key[mine.of[i]] = row[i];
      std::memcpy(value, from.value + t * from.stride + first, share * sizeof(Element));
    }
  }

  template <int HeadDim, class Team, class Element>
  FREEKV_HD void decode(Team team, const std::byte* from, int tokens, row_range rows,
                        const head_slice<Element>& to) const {
    constexpr int share = detail::row_share<HeadDim, Team>;
    const int first = team.lane() * share, kept = policy.kept(HeadDim);
    const places<share> mine(list, first, kept);
    const auto* const stored = reinterpret_cast<const Element*>(from);
    const Element* key = stored + rows.first * kept;
    const Element* value = stored + tokens * kept + rows.first * HeadDim + first;
    const Element zero = from_float<Element>(0.0f);
    for (int t = 0; t < rows.count; ++t, key += kept, value += HeadDim) {
      Element* const row = to.key + t * to.stride + first;
      for (int i = 0; i < share; ++i) row[i] = mine.of[i] >= 0 ? key[mine.of[i]] : zero;
      std::memcpy(to.value + t * to.stride + first, value, share * sizeof(Element));
    }
  }

 private:
  /// Places of a lane's channels in a stored key; -1 of those that are not kept.
  template <int Count>
  struct places {
    int of[Count];

    FREEKV_HD places(const std::uint8_t* list, int first, int kept) {
      int next = 0;
      for (int byte = 0; byte < first / 8; ++byte) next += cuda::std::popcount(list[byte]);
      for (int i = first / 8 * 8; i < first; ++i) next += list[i / 8] >> i % 8 & 1;
      for (int i = 0; i < Count; ++i) {
        const int at = first + i;
        const bool there = (list[at / 8] >> at % 8 & 1) != 0 && next < kept;
        of[i] = there ? next : -1;
        next += there ? 1 : 0;
      }
    }
  };
};

FREEKV_HD constexpr key_channels::slice_codec key_channels::at(const slice_place& place) const {
  return {*this, lists.list(place.layer, place.head)};
}

/// Lists the channels of a layer's keys that are kept, to `lists`, (kv_heads, head_dim / 8) as
/// `channel_lists` has them: of each KV head the `kept` of largest `norm(Q_i) * norm(K_i)`, the Frobenius
/// norm of channel i's part of `Q K^T`; of those alike the lower. `keys` are a prompt's, (tokens, kv_heads,
/// head_dim), `queries` those of its last rows, (rows, query_heads, head_dim), 32 are enough, both after
/// rotation. The norm of queries is over all rows of the KV head's group. Keys and query heads' rows with a
/// NaN or an infinity are left out. Allocates. Throws usage_error. (ThinK, arXiv 2407.21018, with its window
/// of 32 rows; there query heads have lists, and with them keys, of their own, and keys are those that an
/// eviction before has left)
inline void choose_key_channels(head_counts heads, int head_dim, int kept, std::span<const float> keys,
                                std::span<const float> queries, std::span<std::uint8_t> lists) {
  const auto text = [](auto n) { return std::to_string(n); };
  const std::size_t d = to_size(head_dim), key_row = to_size(heads.kv) * d,
                    query_row = to_size(heads.query) * d;
  if (heads.kv < 1 || heads.query < heads.kv || heads.query % heads.kv != 0 || head_dim < 8 ||
      head_dim % 8 != 0 || keys.size() % key_row != 0 || queries.size() % query_row != 0 ||
      lists.size() != key_row / 8)
    throw usage_error(
        "choose_key_channels: " + text(heads.query) + " query heads of " + text(heads.kv) +
        " KV heads, head_dim " + text(head_dim) + ", " + text(keys.size()) + " numbers of keys, " +
        text(queries.size()) + " of queries and room for " + text(lists.size()) +
        " bytes of lists; give whole rows, head_dim a multiple of 8, and a bit for each channel "
        "of each KV head");
  if (kept < 0 || kept > head_dim)
    throw usage_error("choose_key_channels: " + text(kept) + " channels are not among the " + text(head_dim) +
                      " of a key; take what kept(head_dim) of key_channels is");
  // Adds the squares of the channels of rows, `step` numbers apart.
  const auto add_squares = [d](std::span<const float> from, std::size_t first, std::size_t step,
                               std::vector<double>& sums) {
    for (std::size_t row = first; row < from.size(); row += step) {
      const auto numbers = from.subspan(row, d);
      if (!std::all_of(numbers.begin(), numbers.end(), [](float x) { return std::isfinite(x); })) continue;
      for (std::size_t i = 0; i < d; ++i)
        sums[i] += static_cast<double>(numbers[i]) * static_cast<double>(numbers[i]);
    }
  };
  std::fill(lists.begin(), lists.end(), std::uint8_t{0});
  std::vector<double> of_keys(d), of_queries(d), scores(d);
  std::vector<int> order(d);
  for (int head = 0; head < heads.kv; ++head) {
    std::fill(of_keys.begin(), of_keys.end(), 0.0);
    std::fill(of_queries.begin(), of_queries.end(), 0.0);
    add_squares(keys, to_size(head) * d, key_row, of_keys);
    for (int g = head * heads.group(); g < (head + 1) * heads.group(); ++g)
      add_squares(queries, to_size(g) * d, query_row, of_queries);
    for (std::size_t i = 0; i < d; ++i) {
      scores[i] = of_queries[i] * of_keys[i];
      order[i] = static_cast<int>(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return scores[to_size(a)] > scores[to_size(b)]; });
    for (int nth = 0; nth < kept; ++nth) {
      const int channel = order[to_size(nth)];
      std::uint8_t& byte = lists[(to_size(head) * d + to_size(channel)) / 8];
      byte = static_cast<std::uint8_t>(byte | 1 << channel % 8);
    }
  }
}

static_assert(codec_policy<key_channels>);

}  // namespace freekv
