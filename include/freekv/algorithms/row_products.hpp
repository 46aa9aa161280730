// Products of queries with rows: of attention with keys, of scoring with summaries.
#pragma once

#include <cstdint>
#include <cuda/std/type_traits>
#include <freekv/core/team.hpp>
#include <freekv/core/unroll.hpp>

namespace freekv::detail {

/// Query heads in one pass over the rows; each row is converted to float once for all of them.
inline constexpr int heads_at_once = 4;

/// Floats of scratch for `row_products`.
inline constexpr int row_products_scratch = 64;

/// `count` rows of `width` elements, row t at `first + t * stride`. `ahead`: rows laid out alike, of
/// `ahead_width` elements, that are asked for meanwhile; null: none.
template <class Element>
struct row_block {
  const Element* first = nullptr;
  std::int64_t stride = 0;
  int width = 0;
  int count = 0;
  const Element* ahead = nullptr;
  int ahead_width = 0;
};

/// Query g of several at `first + g * stride`.
struct query_rows {
  const float* first = nullptr;
  std::int64_t stride = 0;
};

/// Asks for `count` elements.
template <class T, class Element>
FREEKV_HD void prefetch_row(T team, const Element* row, int count) {
  constexpr int line = 64 / static_cast<int>(sizeof(Element));
  for (int i = 0; i < count; i += line) team.prefetch(row + i);
}

/// Calls `body(first, integral_constant<int, Heads>)` for the heads of a group, `Heads` of them from `first`
/// on: one, where the team has `one_head_at_once`.
template <class T, class Body>
FREEKV_HD void for_heads_at_once(int group, const Body& body) {
  using cuda::std::integral_constant;
  static_assert(heads_at_once == 4);
  constexpr int most = requires { T::one_head_at_once; }
  ? 1 : heads_at_once;
  for (int first = 0; first < group; first += most) {
    const int heads = group - first;
    if constexpr (most > 1) {
      if (heads >= 4) {
        body(first, integral_constant<int, 4>{});
        continue;
      }
      if (heads == 3) {
        body(first, integral_constant<int, 3>{});
        continue;
      }
      if (heads == 2) {
        body(first, integral_constant<int, 2>{});
        continue;
      }
    }
    body(first, integral_constant<int, 1>{});
  }
}

/// The products of `Heads` queries with each row, times `scale`: of query g and row t to
/// `out[g * out_stride + t]`. The rows' width is a multiple of the team's, which may be a `wide` one. A tile
/// of as many products as the team is wide is summed at a time.
template <int Heads, class T, class Element>
FREEKV_HD void row_products(T team, const query_rows& queries, const row_block<Element>& rows, float scale,
                            float* out, std::int64_t out_stride, float* scratch) {
  using pack = typename T::pack;
  constexpr int width = T::width, tile = width >= Heads ? width / Heads : 1;
  constexpr int packs = (Heads * tile + width - 1) / width;
  static_assert(packs * width <= row_products_scratch);
  for (int first = 0; first < rows.count; first += tile) {
    const Element* row[tile];
    FREEKV_UNROLL
    for (int t = 0; t < tile; ++t) {
      const int nth = first + t < rows.count ? first + t : rows.count - 1;
      row[t] = rows.first + nth * rows.stride;
      if (rows.ahead != nullptr) prefetch_row(team, rows.ahead + nth * rows.stride, rows.ahead_width);
    }
    pack partial[packs][width];
    FREEKV_UNROLL
    for (int i = 0; i < packs * width; ++i) partial[i / width][i % width] = pack(0.0f);
    for (int d = 0; d < rows.width; d += width) {
      pack part[tile];
      FREEKV_UNROLL
      for (int t = 0; t < tile; ++t) part[t] = team.load(row[t] + d);
      FREEKV_UNROLL
      for (int g = 0; g < Heads; ++g) {
        const pack query = team.load(queries.first + g * queries.stride + d);
        FREEKV_UNROLL
        for (int t = 0; t < tile; ++t) {
          const int i = g * tile + t;
          partial[i / width][i % width] = partial[i / width][i % width] + query * part[t];
        }
      }
    }
    FREEKV_UNROLL
    for (int i = 0; i < packs; ++i) team.store(scratch + i * width, team.sum_each(partial[i]) * pack(scale));
    team.sync();
    for (int i = team.lane(); i < Heads * tile; i += team.lanes())
      if (first + i % tile < rows.count) out[i / tile * out_stride + first + i % tile] = scratch[i];
    team.sync();
  }
}

/// A call of `row_products`, for `apart`: who multiplies rows of the same elements shares one function of it.
template <int Heads, class T, class Element>
struct row_products_call {
  query_rows queries;
  row_block<Element> rows;
  float scale = 1.0f;
  float* out = nullptr;
  std::int64_t out_stride = 0;
  float* scratch = nullptr;

  FREEKV_HD void operator()() const {
    const row_products_call call = *this;  // which no store to memory changes, as far as a compiler knows
    row_products<Heads>(T{}, call.queries, call.rows, call.scale, call.out, call.out_stride, call.scratch);
  }
};

}  // namespace freekv::detail
