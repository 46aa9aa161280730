// A codec that stores values alone: keys are rebuilt from a factorisation of what they were before they were rotated.
#pragma once

#include <cmath>
#include <cstring>
#include <freekv/core/rotary.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/storage/layout.hpp>
#include <type_traits>

namespace freekv {

/// The keys of all KV heads of a token before rotation, one vector of `kv_heads * head_dim` numbers, by their `Rank`
/// coefficients in a basis of the layer, which stay in fast memory; values as they are. A recall copies a unit's values
/// and rebuilds its keys: `basis^T c`, rotated at their positions. (ShadowKV, arXiv 2410.21465, section 4.1; the basis is
/// given as data, so that a sequence's own, as published, or a text's may be taken)
///
/// `basis` has for each (layer, head) a mean (head_dim), which may be 0, and rows (rank, head_dim), which side by side for
/// all heads of a layer are orthonormal. Coefficients are kept as elements: `Rank * p * e` bytes a page of all heads, and
/// `p * d * e` bytes a slice, with a bit for each token. A key with a NaN or infinity, or so large that a
/// coefficient would leave the element's range, comes back as NaN, and other heads' keys of the token without its part.
template <int Rank = 160>
struct low_rank_keys {
  using policy_kind = codec_kind;
  static constexpr std::string_view name = "low_rank_keys";
  count_of<Rank> rank{};
  subspace_basis basis{};
  rotary_embedding rotary{};

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

  FREEKV_HD constexpr std::size_t bytes(page_geometry page, std::size_t element_bytes) const {
    return values_bytes(page, element_bytes) + static_cast<std::size_t>((page.tokens + 31) / 32) * 4;
  }
  FREEKV_HD constexpr std::size_t shared_bytes(page_geometry page, std::size_t element_bytes) const {
    return static_cast<std::size_t>(page.tokens * rank) * element_bytes;
  }
  FREEKV_HD constexpr int shared_floats(page_geometry page) const { return (page.tokens + 1) * rank; }

  /// The codec for one slice.
  struct slice_codec;
  FREEKV_HD constexpr slice_codec at(const slice_place& place) const { return {*this, place}; }

 private:
  FREEKV_HD static constexpr std::size_t values_bytes(page_geometry page, std::size_t element_bytes) {
    return static_cast<std::size_t>(page.tokens * page.head_dim) * element_bytes;
  }
};

template <int Rank>
struct low_rank_keys<Rank>::slice_codec {
  low_rank_keys policy;
  slice_place place;

  template <int HeadDim, class Team, class Element>
  FREEKV_HD void encode(Team, const head_slice<const Element>& from, int tokens, std::byte* to) const {
    static_assert(Team::lane_count == 1, "low_rank_keys has one lane; choose another codec on a device");
    auto* const values = reinterpret_cast<Element*>(to);
    auto* const lost =
        reinterpret_cast<std::uint32_t*>(to + values_bytes({tokens, HeadDim}, sizeof(Element)));
    for (int word = 0; word < (tokens + 31) / 32; ++word) lost[word] = 0;
    const int directions = policy.rank;
    float* const parts = place.floats + tokens * directions;  // of one token
    for (int t = 0; t < tokens; ++t) {
      std::memcpy(values + t * HeadDim, from.value + t * from.stride, HeadDim * sizeof(Element));
      float key[HeadDim];
      widen_row<HeadDim>(from.key + t * from.stride, key);
      float* const sums = place.floats + t * directions;
      if (place.head == 0)
        for (int r = 0; r < directions; ++r) sums[r] = 0.0f;
      rotate(policy.rotary, place.first_token + t, -1.0f, key);
      for (int i = 0; i < HeadDim; ++i) key[i] -= mean()[i];
      // What the coefficients of all heads cannot hold is lost for this head alone.
      bool fits = true;
      for (int r = 0; r < directions; ++r) {
        const float sum = sums[r] + product<HeadDim>(row(r, HeadDim), key);
        fits = fits && ::fabsf(sum) <= largest<Element>();
        parts[r] = sum;
      }
      if (fits)
        for (int r = 0; r < directions; ++r) sums[r] = parts[r];
      else
        lost[t / 32] |= 1u << t % 32;
      if (place.head == place.kv_heads - 1)
        for (int r = 0; r < directions; ++r)
          reinterpret_cast<Element*>(place.shared)[t * directions + r] = from_float<Element>(sums[r]);
    }
  }

  template <int HeadDim, class Team, class Element>
  FREEKV_HD void decode(Team, const std::byte* from, int tokens, row_range rows,
                        const head_slice<Element>& to) const {
    static_assert(Team::lane_count == 1, "low_rank_keys has one lane; choose another codec on a device");
    const auto* const values = reinterpret_cast<const Element*>(from);
    const auto* const lost =
        reinterpret_cast<const std::uint32_t*>(from + values_bytes({tokens, HeadDim}, sizeof(Element)));
    const int directions = policy.rank;
    for (int nth = 0; nth < rows.count; ++nth) {
      const int t = rows.first + nth;
      std::memcpy(to.value + nth * to.stride, values + t * HeadDim, HeadDim * sizeof(Element));
      float key[HeadDim];
      for (int i = 0; i < HeadDim; ++i) key[i] = mean()[i];
      const auto* const coefficients = reinterpret_cast<const Element*>(place.shared) + t * directions;
      for (int r = 0; r < directions; ++r) {
        const float coefficient = to_float(coefficients[r]);
        const float* const direction = row(r, HeadDim);
        for (int i = 0; i < HeadDim; ++i) key[i] += coefficient * direction[i];
      }
      rotate(policy.rotary, place.first_token + t, 1.0f, key);
      if ((lost[t / 32] >> t % 32 & 1u) != 0)
        for (int i = 0; i < HeadDim; ++i) key[i] = NAN;
      narrow_row<HeadDim>(key, to.key + nth * to.stride);
    }
  }

 private:
  template <class Element>
  FREEKV_HD static constexpr float largest() {
    return std::is_same_v<Element, half>       ? 65504.0f
           : std::is_same_v<Element, bfloat16> ? 0x1.fep127f
                                               : 0x1.fffffep127f;
  }
  FREEKV_HD const float* mean() const { return policy.basis.mean(place.layer, place.head); }
  FREEKV_HD const float* row(int r, int head_dim) const {
    return policy.basis.rows(place.layer, place.head) + r * head_dim;
  }
  /// In eight sums, which vectorise.
  template <int HeadDim>
  FREEKV_HD static float product(const float* a, const float* b) {
    float sums[8] = {};
    for (int i = 0; i < HeadDim; i += 8)
      for (int lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
  }
};

static_assert(codec_policy<low_rank_keys<>>);

}  // namespace freekv
