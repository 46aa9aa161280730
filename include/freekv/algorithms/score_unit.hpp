// One unit's scores for all query heads of a group, its summary read once.
#pragma once

#include <cuda/std/limits>
#include <freekv/algorithms/row_products.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv::detail {

/// Scores and pooled scores as they count: +infinity is the largest finite float.
FREEKV_HD inline float clamp_score(float score) {
  constexpr float largest = cuda::std::numeric_limits<float>::max();
  return score > largest ? largest : score;
}

/// A pooled score over its KV head's temperature, `factor` being one over that.
FREEKV_HD inline float tempered_score(float pooled, float factor) { return clamp_score(pooled * factor); }

/// Bytes of a stored summary that a team with `stage` stages: of one that is scored as it is stored, by each
/// head of the group, or that has a format of less than 2 bytes a number. Of two summaries each is staged for
/// itself.
template <class Key, class S>
FREEKV_HD constexpr int staged_bytes(const S& summary, kv_extent unit) {
  if constexpr (requires { summary.coarse; }) {
    return 0;
  } else if constexpr (requires { summary.template bytes<Key>(unit); }) {
    const auto bytes = static_cast<int>(summary_bytes<Key>(summary, unit));
    return scores_stored_bytes<S> || bytes < 2 * summary.width(unit) ? bytes : 0;
  } else {
    return 0;
  }
}

/// `score_unit`, each head by a product of its own.
template <class Key, team T, class S>
FREEKV_HD void score_unit_by_head(T team, const S& summary, kv_extent unit, const std::byte* stored,
                                  const prepared_queries& queries, float* numbers, const score_column& out,
                                  std::byte* staging = nullptr) {
  if constexpr (requires { team.stage(stored, 0, staging); })
    if (const int bytes = staged_bytes<Key>(summary, unit); staging != nullptr && bytes > 0) {
      stored = team.stage(stored, bytes, staging);
      team.sync();
    }
  if constexpr (!scores_stored_bytes<S>) {
    decode_summary<Key>(team, summary, unit, stored, numbers);
    team.sync();
  }
  bool nan = false;
  for (int g = 0; g < queries.group; ++g) {
    const unit_query query{queries.data + g * queries.width, unit, queries.scale};
    float score;
    if constexpr (scores_stored_bytes<S>)
      score = summary.score(team, query, stored);
    else
      score = summary.score(team, query, numbers);
    nan = nan || score != score;
    out.first[g * out.stride] = clamp_score(score);
  }
  for (int g = 0; nan && g < queries.group; ++g) out.first[g * out.stride] = -infinity;
}

/// `score_unit` of up to `units_by_four` units with queries prepared so: those of unit j go to
/// `out.first[j + g * out.stride]`.
template <team T, class S>
void score_units_by_four(T team, const S& summary, kv_extent unit, const stored_summaries& units,
                         const prepared_queries& queries, const score_column& out) {
  using pack = typename T::pack;
  float scores[4 * units_by_four];
  const pack largest(cuda::std::numeric_limits<float>::max());
  pack zero_if_finite(0.0f);
  for (int first = 0; first < queries.group; first += 4) {
    summary.score_four(team, {queries.data + first * queries.width, unit, queries.scale}, units, scores);
    const int heads = queries.group - first < 4 ? queries.group - first : 4;
    float* const to = out.first + first * out.stride;
    const int packed = units.count / T::width * T::width;
    for (int j = 0; j < packed; j += T::width) {
      pack of_head[4];
      team.load_by_four(scores + 4 * j, of_head);
      FREEKV_UNROLL
      for (int g = 0; g < 4; ++g) {
        if (g >= heads) break;
        zero_if_finite = zero_if_finite + of_head[g] * pack(0.0f);
        team.store(to + j + g * out.stride, team.select_greater(of_head[g], largest, largest, of_head[g]));
      }
    }
    for (int j = packed; j < units.count; ++j)
      for (int g = 0; g < heads; ++g) {
        zero_if_finite = zero_if_finite + pack(scores[4 * j + g] * 0.0f);
        to[j + g * out.stride] = clamp_score(scores[4 * j + g]);
      }
  }
  if (team.sum(zero_if_finite) == 0.0f) return;
  for (int j = 0; j < units.count; ++j) {
    bool nan = false;
    for (int g = 0; g < queries.group; ++g) {
      const float score = out.first[j + g * out.stride];
      nan |= score != score;
    }
    for (int g = 0; nan && g < queries.group; ++g) out.first[j + g * out.stride] = -infinity;
  }
}

/// Scores a unit by its stored summary. One that scores NaN for one head of the group scores -infinity for
/// all of them. `numbers` (the summary's width) is the team's scratch, and so is `staging`, if it is not
/// null, for what is staged.
template <class Key, team T, class S>
FREEKV_HD void score_unit(T team, const S& summary, kv_extent unit, const std::byte* stored,
                          const prepared_queries& queries, float* numbers, const score_column& out,
                          std::byte* staging = nullptr) {
  if constexpr (scores_four_heads<S, T>)
    if (queries.by_four) return score_units_by_four(team, summary, unit, {stored, 0, 1}, queries, out);
  score_unit_by_head<Key>(team, summary, unit, stored, queries, numbers, out, staging);
}

/// Scores `units` units as `score_unit` does, whose summaries lie `bytes` apart: those of unit j go to
/// `out.first[j + g * out.stride]`. `numbers` holds a whole pack at least. `Shares`: rows are multiplied in
/// functions that other summaries share, where the team has such: less to compile where there are many, and
/// slower, boxes of 16 bits by a fifth.
template <class Key, bool Shares = false, team T, class S>
FREEKV_HD void score_units(T team, const S& summary, kv_extent unit, const std::byte* stored,
                           std::size_t bytes, int units, const prepared_queries& queries, float* numbers,
                           const score_column& out) {
  const auto from = [&](int first) { return stored + to_size(first) * bytes; };
  if constexpr (scores_four_heads<S, T>)
    if (queries.by_four) {
      for (int first = 0; first < units; first += units_by_four) {
        const int count = units - first < units_by_four ? units - first : units_by_four;
        score_units_by_four(team, summary, unit, {from(first), bytes, count}, queries,
                            {out.first + first, out.stride});
      }
      return;
    }
  constexpr int at_once = units_at_once;
  for (int first = 0; first < units; first += at_once) {
    const int count = units - first < at_once ? units - first : at_once;
    const score_column to{out.first + first, out.stride};
    bool multiplied = false;
    using wide = typename wide_team<T>::type;
    if constexpr (linear_summary<S>)
      multiplied =
          queries.width % wide::width == 0 &&
          with_elements<Key>(summary, from(first), [&]<class Element>(const Element* elements) {
            const auto stride = static_cast<std::int64_t>(bytes / sizeof(Element));
            const Element* const ahead = first + at_once < units ? elements + at_once * stride : nullptr;
            const row_block<Element> rows{elements, stride, queries.width, count, ahead, queries.width};
            for_heads_at_once<wide>(
                queries.group, [&]<int Heads>(int g, cuda::std::integral_constant<int, Heads>) {
                  const query_rows of_heads{queries.data + g * queries.width, queries.width};
                  float* const scores = to.first + g * to.stride;
                  using call = row_products_call<Heads, wide, Element>;
                  if constexpr (Shares && requires(const call& c) { wide{}.apart(c); })
                    wide{}.apart(call{of_heads, rows, queries.scale, scores, to.stride, numbers});
                  else
                    row_products<Heads>(wide{}, of_heads, rows, queries.scale, scores, to.stride, numbers);
                });
          });
    for (int j = 0; j < count; ++j) {
      bool finite = multiplied;
      for (int g = 0; multiplied && g < queries.group; ++g)
        finite = finite && to.first[g * to.stride + j] * 0.0f == 0.0f;
      if (!finite)
        score_unit_by_head<Key>(static_cast<typename narrow_team<T>::type>(team), summary, unit,
                                from(first + j), queries, numbers, {to.first + j, to.stride});
    }
  }
}

/// Scores a unit by the coarse one of two summaries stored side by side (coarse_to_fine's `at`): `stored` and
/// `queries` are those of both.
template <class Key, team T, class Pair>
FREEKV_HD void score_unit_coarsely(T team, const Pair& summaries, kv_extent unit, const std::byte* stored,
                                   const prepared_queries& queries, float* numbers, const score_column& out,
                                   std::byte* staging = nullptr) {
  prepared_queries of_coarse = queries;
  of_coarse.data += summary_query_width(summaries.fine, unit.head_dim);
  score_unit<Key>(team, summaries.coarse, unit, stored + summary_bytes<Key>(summaries.fine, unit), of_coarse,
                  numbers, out, staging);
}

/// Scores a unit by the fine summary of a pair.
template <class Key, team T, class Pair>
FREEKV_HD void score_unit_finely(T team, const Pair& summaries, kv_extent unit, const std::byte* stored,
                                 const prepared_queries& queries, float* numbers, const score_column& out,
                                 std::byte* staging = nullptr) {
  score_unit<Key>(team, summaries.fine, unit, stored, queries, numbers, out, staging);
}

}  // namespace freekv::detail
