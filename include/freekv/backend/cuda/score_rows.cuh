// Scores of linear summaries whose numbers are stored as elements: rows times the group's queries. What comes
// out is what `score_unit` gives, to rounding; it decides where a product is not finite.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cuda/std/bit>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/summary_team.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv::device {

/// A warp's work on rows of `Width` elements: teams of lanes take a row each, 16 bytes a lane at a time, side
/// by side. A lane keeps its numbers of `heads` queries in registers, and has `at_once` rows on their way
/// before it multiplies.
template <int Width, class Element>
struct row_scoring {
  using element = Element;
  static constexpr int width = Width, heads = 4;
  static constexpr int each = 16 / static_cast<int>(sizeof(Element));  // elements of a piece
  static constexpr int pieces = Width / each;
  static constexpr int lanes = largest_share(pieces, 32);
  static constexpr int of_lane = pieces / lanes;  // pieces
  static constexpr int teams = 32 / lanes;
  static constexpr int at_once = lanes / heads;
  /// True where registers hold the queries; else `score_unit` scores.
  static constexpr bool there = Width % each == 0 && lanes >= 8 && heads * of_lane * each <= 64;

  /// Queries in shared memory: fours of neighbouring numbers, such that lanes which read a piece's nth fours
  /// read neighbours.
  static constexpr int fours = each / 4;     // of a piece
  static constexpr int of_nth = pieces + 4;  // fours, and some that keep the nth ones in other banks
  static constexpr int floats = heads * fours * of_nth * 4;
};
struct no_row_scoring {
  static constexpr bool there = false;
  static constexpr int floats = 0;
};

/// The device form of a summary's scoring by rows, for keys of type `Key`; `no_row_scoring` where it has
/// none.
template <class Summary, int HeadDim, class Key>
struct row_scoring_of {
  using type = no_row_scoring;
};
template <summary_of_rows Summary, int HeadDim, class Key>
requires linear_summary<Summary>
struct row_scoring_of<Summary, HeadDim, Key> {
  using type = row_scoring<Summary{}.width({1, HeadDim}), summary_element<Summary, Key>>;
};
template <class Summary, int HeadDim, class Key>
using row_scoring_t = typename row_scoring_of<Summary, HeadDim, Key>::type;

namespace detail {

/// A piece's elements as floats.
template <class Element>
__device__ void widen_piece(const uint4& piece, float (&numbers)[16 / sizeof(Element)]) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  unroll<4>([&](auto i) {
    if constexpr (std::same_as<Element, bfloat16>) {  // a float's upper half
      numbers[2 * i] = cuda::std::bit_cast<float>(words[i] << 16);
      numbers[2 * i + 1] = cuda::std::bit_cast<float>(words[i] & 0xffff0000u);
    } else if constexpr (std::same_as<Element, half>) {
      numbers[2 * i] = to_float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
      numbers[2 * i + 1] = to_float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    } else if constexpr (std::same_as<Element, fp8_e4m3>) {
      unroll<4>([&](auto byte) {
        numbers[4 * i + byte] = to_float(fp8_e4m3{static_cast<std::uint8_t>(words[i] >> 8 * byte & 0xffu)});
      });
    } else {
      numbers[i] = cuda::std::bit_cast<float>(words[i]);
    }
  });
}

}  // namespace detail

/// Scores units `first` .. `last`, at most `OfWarp` for each warp of the block, by all its threads: that of
/// unit j and query g to `scores[g * stride + j]`. Unit j's row is number `row_of(j)` from `rows` on; rows
/// and queries are aligned to 16 bytes. Returns whether a score of this thread's is not finite. `shared`:
/// `Scoring::floats`.
template <class Scoring, int OfWarp, class RowOf>
__device__ bool score_summary_rows(const std::byte* rows, const RowOf& row_of, int first, int last,
                                   const prepared_queries& queries, float* scores, std::int64_t stride,
                                   float* shared) {
  using element = typename Scoring::element;
  constexpr int heads = Scoring::heads, each = Scoring::each, of_lane = Scoring::of_lane,
                fours = Scoring::fours;
  constexpr int at_once = Scoring::at_once, lanes = Scoring::lanes, in_query = Scoring::pieces * fours;
  static_assert(OfWarp <= 32 && OfWarp % (Scoring::teams * at_once) == 0);
  constexpr lane_team<lanes, 1> team{};
  const int thread = thread_x(), lane = team.lane(), nth_team = thread % 32 / lanes;
  const int begin = first + thread / 32 * OfWarp;  // of the warp's units
  // Lanes behind the last unit have its row.
  const int mine = begin < last ? row_of(min(begin + thread % OfWarp, last - 1)) : 0;
  auto* const staged = reinterpret_cast<float4*>(shared);
  bool all_finite = true;
#pragma unroll 1
  for (int g = 0; g < queries.group; g += heads) {
    if (g > 0) __syncthreads();  // all have read the heads before
    for (int i = thread; i < heads * in_query; i += threads_x()) {
      const int head = i / in_query, four = i % in_query;  // heads that there are not are the last
      staged[(head * fours + four % fours) * Scoring::of_nth + four / fours] =
          reinterpret_cast<const float4*>(queries.data +
                                          min(g + head, queries.group - 1) * queries.width)[four];
    }
    __syncthreads();
    if (begin >= last) continue;
    float query[heads][of_lane * each];
    unroll<heads * of_lane * fours>([&](auto i) {
      constexpr int head = i / (of_lane * fours), piece = i / fours % of_lane, nth = i % fours;
      const float4 four = staged[(head * fours + nth) * Scoring::of_nth + piece * lanes + lane];
      float* const to = query[head] + piece * each + nth * 4;
      to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    });
#pragma unroll 1
    for (int batch = 0; batch < OfWarp && begin + batch < last; batch += Scoring::teams * at_once) {
      const int behind = batch + nth_team * at_once;
      uint4 loaded[at_once][of_lane];
      unroll<at_once>([&](auto r) {
        const std::int64_t row = __shfl_sync(~0u, mine, behind + r);
        const auto* const pieces = reinterpret_cast<const uint4*>(rows) + row * Scoring::pieces + lane;
        unroll<of_lane>([&](auto piece) { loaded[r][piece] = __ldg(pieces + piece * lanes); });
      });
      lane_pack<1> products[lanes];  // of head h and row r at h * at_once + r
      unroll<at_once>([&](auto r) {
        float sums[heads];
        unroll<of_lane>([&](auto piece) {
          float numbers[each];
          detail::widen_piece<element>(loaded[r][piece], numbers);
          unroll<heads>([&](auto h) {
            unroll<each>([&](auto i) {
              const float q = query[h][piece * each + i];
              sums[h] = piece + i == 0 ? q * numbers[i] : ::fmaf(q, numbers[i], sums[h]);
            });
          });
        });
        unroll<heads>([&](auto h) { products[h * at_once + r].x[0] = sums[h]; });
      });
      const float score = queries.scale * team.sum_each(products).x[0];
      const int head = g + lane / at_once, j = begin + behind + lane % at_once;
      if (head < queries.group && j < last) {
        scores[head * stride + j] = score;
        all_finite = all_finite && score * 0.0f == 0.0f;
      }
    }
  }
  return !all_finite;
}

}  // namespace freekv::device
