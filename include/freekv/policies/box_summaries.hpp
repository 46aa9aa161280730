// Summaries that bound a page's keys by a box.
#pragma once

#include <freekv/core/unroll.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv {

namespace detail {

/// The largest scaled product of the query with a point of the box `low` (head_dim), `high` (head_dim).
template <team T>
FREEKV_HD float box_score(T team, const page_query& query, const float* low) {
  const int d = query.page.head_dim;
  typename T::pack bound(0.0f);
  for (int i = 0; i < d; i += T::width) {
    const auto q = team.load(query.data + i);
    bound = bound + team.maximum(q * team.load(low + i), q * team.load(low + d + i));
  }
  return query.scale * team.sum(bound);
}

/// The scores of all queries of a group for the box `low` (head_dim), `high` (head_dim), where low <= high: each is
/// multiplied by the end that its sign picks. False where that is not the larger product, or might not be: where the box
/// or a score is not finite.
template <class Stored, team T>
FREEKV_HD bool box_scores(T team, int d, const Stored* low, const prepared_queries& queries,
                          const score_column& out) {
  using pack = typename T::pack;
  constexpr int at_once = 4;
  float faults = 0.0f;  // NaN where there is one
  for (int first = 0; first < queries.group; first += at_once) {
    const float* query[at_once];
    for (int g = 0; g < at_once; ++g) {
      const int nth = first + g < queries.group ? first + g : queries.group - 1;
      query[g] = queries.data + nth * queries.width;
    }
    pack bounds[at_once], fault(0.0f);
    unroll<at_once>([&](auto g) { bounds[g] = pack(0.0f); });
    for (int i = 0; i < d; i += T::width) {
      const pack from = team.load(low + i), to = team.load(low + d + i);
      fault = fault + (to - from) * pack(0.0f);
      unroll<at_once>([&](auto g) {
        const pack q = team.load(query[g] + i);
        bounds[g] = bounds[g] + q * team.by_sign(q, from, to);
      });
    }
    faults = faults + team.sum(fault);
    unroll<at_once>([&](auto g) {
      if (first + g >= queries.group) return;
      const float score = queries.scale * team.sum(bounds[g]);
      faults = faults + score * 0.0f;
      out.first[(first + g) * out.stride] = score;
    });
  }
  return faults == 0.0f;
}

/// Minimum and maximum of the page's keys, elements i .. i + width.
template <team T>
struct key_range {
  typename T::pack low, high;
  FREEKV_HD key_range(T team, const page_keys& keys, int i) : low(team.load(keys.row(0) + i)), high(low) {
    for (int t = 1; t < keys.page.tokens; ++t) {
      const auto key = team.load(keys.row(t) + i);
      low = team.minimum(low, key);
      high = team.maximum(high, key);
    }
  }
};

}  // namespace detail

/// Elementwise minimum and maximum of a page's keys; the score is an upper bound of the largest scaled product of the
/// query with a key of the page. Kept in the key's type, which is exact. (Quest; FreeKV section 3.2)
struct min_max {
  using policy_kind = summary_kind;
  static constexpr std::string_view name = "min_max";
  template <class Key>
  using stored = Key;

  FREEKV_HD constexpr int width(page_geometry page) const { return 2 * page.head_dim; }

  template <team T>
  FREEKV_HD void summarise(T team, const page_keys& keys, float* numbers) const {
    for (int i = 0; i < keys.page.head_dim; i += T::width) {
      const detail::key_range<T> range(team, keys, i);
      team.store(numbers + i, range.low);
      team.store(numbers + keys.page.head_dim + i, range.high);
    }
  }
  template <team T>
  FREEKV_HD float score(T team, const page_query& query, const float* numbers) const {
    return detail::box_score(team, query, numbers);
  }
  template <team T, element Stored>
  FREEKV_HD bool score_group(T team, page_geometry page, const Stored* ends, const prepared_queries& queries,
                             const score_column& out) const {
    return detail::box_scores(team, page.head_dim, ends, queries, out);
  }
};

/// The box around the centre of `min_max`'s that reaches as far as the keys do in the mean, `centre +- mean_t |k_t -
/// centre|`; scored like `min_max`. Kept in float32. (ArkVale)
struct centroid_box {
  using policy_kind = summary_kind;
  static constexpr std::string_view name = "centroid_box";

  FREEKV_HD constexpr int width(page_geometry page) const { return 2 * page.head_dim; }

  template <team T>
  FREEKV_HD void summarise(T team, const page_keys& keys, float* numbers) const {
    using pack = typename T::pack;
    const pack one_half(0.5f), share(1.0f / static_cast<float>(keys.page.tokens));
    for (int i = 0; i < keys.page.head_dim; i += T::width) {
      const detail::key_range<T> range(team, keys, i);
      const pack centre = range.low * one_half + range.high * one_half;
      pack reach(0.0f);
      for (int t = 0; t < keys.page.tokens; ++t) {
        const pack key = team.load(keys.row(t) + i);
        reach = reach + team.maximum(key - centre, centre - key);
      }
      reach = reach * share;
      team.store(numbers + i, centre - reach);
      team.store(numbers + keys.page.head_dim + i, centre + reach);
    }
  }
  template <team T>
  FREEKV_HD float score(T team, const page_query& query, const float* numbers) const {
    return detail::box_score(team, query, numbers);
  }
  template <team T, element Stored>
  FREEKV_HD bool score_group(T team, page_geometry page, const Stored* ends, const prepared_queries& queries,
                             const score_column& out) const {
    return detail::box_scores(team, page.head_dim, ends, queries, out);
  }
};

static_assert(summary_policy<min_max> && summary_policy<centroid_box>);

}  // namespace freekv
