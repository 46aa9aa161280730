// A codec that stores values alone: keys are rebuilt from a factorisation of what they were before they were
// rotated.
#pragma once

#include <cmath>
#include <cstring>
#include <freekv/core/rotary.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/storage/layout.hpp>
#include <type_traits>

namespace freekv {

/// The keys of all KV heads of a token before rotation, one vector of `kv_heads * head_dim` numbers, by their
/// `Rank` coefficients in a basis of the layer, which stay in fast memory; values as they are. A recall
/// copies a unit's values and rebuilds its keys: `basis^T c`, rotated at their positions. (ShadowKV, arXiv
/// 2410.21465, section 4.1; the basis is given as data, so that a sequence's own, as published, or a text's
/// may be taken)
///
/// `basis` has for each (layer, head) a mean (head_dim), which may be 0, and rows (rank, head_dim), which
/// side by side for all heads of a layer are orthonormal. Coefficients are kept as elements: `Rank * p * e`
/// bytes a page of all heads, and `p * d * e` bytes a slice, with a bit for each token. A key with a NaN or
/// infinity, or so large that a coefficient would leave the element's range, comes back as NaN, and other
/// heads' keys of the token without its part.
template <int Rank = 160>
struct low_rank_keys {
  using policy_kind = codec_kind;
  using hooks =
      hook_list<hook::at, hook::data, hook::shared_bytes, hook::shared_floats, hook::validate, hook::values>;
  static constexpr std::string_view name = "low_rank_keys";
  count_of<Rank> rank{};
  subspace_basis basis{};
  rotary_embedding rotary{};

  template <class Visit>
  void data(const Visit& visit) const {
    visit(basis.data, basis.bytes());
    visit(rotary.frequencies, to_size(rotary.pairs) * sizeof(float));
    visit(&rotary.of, sizeof rotary.of);
  }
  std::string values() const { return std::to_string(int{rank}); }
  void validate(const codec_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (rank < 1 || rank > s.kv_heads * s.head_dim)
      throw settings_error("low_rank_keys: rank " + text(rank) + " is not between 1 and the " +
                           text(s.kv_heads * s.head_dim) + " numbers of a token's keys");
    if (basis.data == nullptr)
      throw settings_error(
          "low_rank_keys needs its basis as data: compute it from a prompt's keys or a text's");
    if (basis.rank < rank || basis.head_dim != s.head_dim || basis.layers < s.layers ||
        basis.kv_heads != s.kv_heads)
      throw settings_error("low_rank_keys: the basis has " + text(basis.layers) + " layers of " +
                           text(basis.kv_heads) + " heads, rank " + text(basis.rank) + ", head_dim " +
                           text(basis.head_dim) + "; needed are " + text(s.layers) + " layers of " +
                           text(s.kv_heads) + " heads, rank " + text(rank) + " or more, head_dim " +
                           text(s.head_dim));
    if (rotary.pairs < 0 || 2 * rotary.pairs > s.head_dim ||
        (rotary.pairs > 0 && rotary.frequencies == nullptr))
      throw settings_error("low_rank_keys: " + text(rotary.pairs) +
                           " rotated pairs; give a frequency for each of at most " + text(s.head_dim / 2));
  }

  FREEKV_HD constexpr std::size_t bytes(kv_extent page, std::size_t element_bytes) const {
    return values_bytes(page, element_bytes) + to_size((page.tokens + 31) / 32) * 4;
  }
  FREEKV_HD constexpr std::size_t shared_bytes(kv_extent page, std::size_t element_bytes) const {
    return to_size(page.tokens * rank) * element_bytes;
  }
  FREEKV_HD constexpr int shared_floats(kv_extent page) const {
    return (page.tokens + 1) * rank + page.head_dim;
  }

  /// The codec for one slice.
  struct slice_codec;
  FREEKV_HD constexpr slice_codec at(const slice_place& place) const { return {*this, place}; }

 private:
  FREEKV_HD static constexpr std::size_t values_bytes(kv_extent page, std::size_t element_bytes) {
    return to_size(page.tokens * page.head_dim) * element_bytes;
  }
};

template <int Rank>
struct low_rank_keys<Rank>::slice_codec {
  low_rank_keys policy;
  slice_place place;

  /// A lane turns its numbers of a key; then the lanes share the directions out.
  template <int HeadDim, class Team, class Element>
  FREEKV_HD void encode(Team team, const head_slice<const Element>& from, int tokens, std::byte* to) const {
    const lane_numbers<HeadDim, Team> mine{policy.rotary, team.lane()};
    auto* const values = reinterpret_cast<Element*>(to);
    auto* const lost =
        reinterpret_cast<std::uint32_t*>(to + values_bytes({tokens, HeadDim}, sizeof(Element)));
    const int directions = policy.rank;
    float* const parts = place.floats + tokens * directions;  // of one token, as is its key before rotation
    float* const key_of_all = parts + directions;
    std::uint32_t lost_of_word = 0;
    for (int t = 0; t < tokens; ++t) {
      mine.copy(from.value + t * from.stride, values + t * HeadDim);
      float key[mine.count];
      mine.widen(from.key + t * from.stride, key);
      mine.rotate(place.first_token + t, -1.0f, key);
      for (int i = 0; i < mine.count; ++i) key_of_all[mine(i)] = key[i] - mean()[mine(i)];
      team.sync();
      float* const sums = place.floats + t * directions;
      // A sum that the coefficients of all heads cannot hold is lost for this head alone.
      bool fits = true;
      for (int r = team.lane(); r < directions; r += team.lanes()) {
        const float before = place.head == 0 ? 0.0f : sums[r];
        const float sum = before + product<HeadDim>(row(r, HeadDim), key_of_all);
        fits = fits && ::fabsf(sum) <= largest<Element>();
        sums[r] = before;
        parts[r] = sum;
      }
      if (team.max_of_lanes(fits ? 0 : 1) != 0) {
        lost_of_word |= 1u << t % 32;
      } else {
        for (int r = team.lane(); r < directions; r += team.lanes()) sums[r] = parts[r];
      }
      if (place.head == place.kv_heads - 1)
        for (int r = team.lane(); r < directions; r += team.lanes())
          reinterpret_cast<Element*>(place.shared)[t * directions + r] = from_float<Element>(sums[r]);
      if (t % 32 == 31 || t == tokens - 1) {
        if (team.lane() == 0) lost[t / 32] = lost_of_word;
        lost_of_word = 0;
      }
      team.sync();  // all have read the key
    }
  }

  template <int HeadDim, class Team, class Element>
  FREEKV_HD void decode(Team team, const std::byte* from, int tokens, row_range rows,
                        const head_slice<Element>& to) const {
    const lane_numbers<HeadDim, Team> mine{policy.rotary, team.lane()};
    const auto* const values = reinterpret_cast<const Element*>(from);
    const auto* const lost =
        reinterpret_cast<const std::uint32_t*>(from + values_bytes({tokens, HeadDim}, sizeof(Element)));
    const int directions = policy.rank;
    for (int nth = 0; nth < rows.count; ++nth) {
      const int t = rows.first + nth;
      mine.copy(values + t * HeadDim, to.value + nth * to.stride);
      float key[mine.count];
      for (int i = 0; i < mine.count; ++i) key[i] = mean()[mine(i)];
      const auto* const coefficients = reinterpret_cast<const Element*>(place.shared) + t * directions;
      for (int r = 0; r < directions; ++r) {
        const float coefficient = to_float(coefficients[r]);
        const float* const direction = row(r, HeadDim);
        for (int i = 0; i < mine.count; ++i) key[i] = rounded_sum(key[i], coefficient * direction[mine(i)]);
      }
      mine.rotate(place.first_token + t, 1.0f, key);
      if ((lost[t / 32] >> t % 32 & 1u) != 0)
        for (int i = 0; i < mine.count; ++i) key[i] = NAN;
      mine.narrow(key, to.key + nth * to.stride);
    }
  }

 private:
  /// A lane's numbers of a row: all of them in order, or of as many in `by_pairs`' order, so that no pair is
  /// two lanes'.
  template <int HeadDim, class Team>
  struct lane_numbers {
    static constexpr int count = detail::row_share<HeadDim, Team>;
    static constexpr bool all = Team::lane_count == 1;
    static_assert(all || count % 2 == 0);
    rotary_embedding rotary;
    int first;

    FREEKV_HD lane_numbers(const rotary_embedding& of, int lane) : rotary(of), first(lane * count) {}
    FREEKV_HD int operator()(int i) const { return all ? i : rotary.by_pairs(first + i); }

    template <class Element>
    FREEKV_HD void copy(const Element* from, Element* to) const {
      std::memcpy(to + first, from + first, count * sizeof(Element));
    }
    template <class Element>
    FREEKV_HD void widen(const Element* row, float* key) const {
      if constexpr (all)
        widen_row<HeadDim>(row, key);
      else
        for (int i = 0; i < count; ++i) key[i] = to_float(row[(*this)(i)]);
    }
    template <class Element>
    FREEKV_HD void narrow(const float* key, Element* row) const {
      if constexpr (all)
        narrow_row<HeadDim>(key, row);
      else
        for (int i = 0; i < count; ++i) row[(*this)(i)] = from_float<Element>(key[i]);
    }
    FREEKV_HD void rotate(int position, float sign, float* key) const {
      if constexpr (all) {
        freekv::rotate(rotary, position, sign, key);
      } else {
        for (int i = 0; i < count; i += 2)
          if (first + i < 2 * rotary.pairs)
            rotate_pair(rotary, (first + i) / 2, position, sign, key[i], key[i + 1]);
      }
    }
  };

  template <class Element>
  FREEKV_HD static constexpr float largest() {
    return std::is_same_v<Element, half>       ? 65504.0f
           : std::is_same_v<Element, bfloat16> ? 0x1.fep127f
           : std::is_same_v<Element, fp8_e4m3> ? 448.0f
                                               : 0x1.fffffep127f;
  }
  FREEKV_HD const float* mean() const { return policy.basis.mean(place.layer, place.head); }
  FREEKV_HD const float* row(int r, int head_dim) const {
    return policy.basis.rows(place.layer, place.head) + r * head_dim;
  }
  /// Inner product, in eight sums, which vectorise.
  template <int HeadDim>
  FREEKV_HD static float product(const float* a, const float* b) {
    float sums[8] = {};
    for (int i = 0; i < HeadDim; i += 8)
      for (int lane = 0; lane < 8; ++lane) sums[lane] = rounded_sum(sums[lane], a[i + lane] * b[i + lane]);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  }
};

static_assert(codec_policy<low_rank_keys<>>);

}  // namespace freekv
