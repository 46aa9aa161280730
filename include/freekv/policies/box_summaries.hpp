// Summaries that bound a unit's keys by a box.
#pragma once

#include <freekv/core/unroll.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv {

namespace detail {

/// The query's negative part, then its positive part, head_dim each: multiplied with the box `low`, `high`
/// they give the largest product of the query with a point of it, where it is finite.
template <team T>
FREEKV_HD void prepare_for_box(T team, const group_query& query, float* prepared) {
  const typename T::pack zero(0.0f);
  for (int i = 0; i < query.head_dim; i += T::width) {
    const auto q = team.load(query.data + i);
    team.store(prepared + i, team.minimum(q, zero));
    team.store(prepared + query.head_dim + i, team.maximum(q, zero));
  }
}

/// The largest scaled product of a query with a point of the box `low` (head_dim), `high` (head_dim).
template <team T>
FREEKV_HD float box_score(T team, const unit_query& query, const float* low) {
  const int d = query.unit.head_dim;
  typename T::pack bound(0.0f);
  for (int i = 0; i < d; i += T::width) {
    const auto q = team.load(query.data + i) + team.load(query.data + d + i);  // one of the two is 0
    bound = bound + team.maximum(q * team.load(low + i), q * team.load(low + d + i));
  }
  return query.scale * team.sum(bound);
}

/// Minimum and maximum of the unit's keys, elements i .. i + width.
template <team T>
struct key_range {
  typename T::pack low, high;
  FREEKV_HD key_range(T team, const unit_keys& keys, int i) : low(team.load(keys.row(0) + i)), high(low) {
    for (int t = 1; t < keys.unit.tokens; ++t) {
      const auto key = team.load(keys.row(t) + i);
      low = team.minimum(low, key);
      high = team.maximum(high, key);
    }
  }
};

}  // namespace detail

/// Elementwise minimum and maximum of a unit's keys; the score is an upper bound of the largest scaled
/// product of the query with a key of the unit. Kept in the key's type, which is exact. (Quest; FreeKV
/// section 3.2)
struct min_max {
  using policy_kind = summary_kind;
  using hooks =
      hook_list<hook::linear, hook::prepare, hook::query_width, hook::stored, hook::summarised_by_whole_rows>;
  static constexpr std::string_view name = "min_max";
  static constexpr bool linear = true;
  static constexpr bool summarised_by_whole_rows = true;
  template <class Key>
  using stored = Key;

  FREEKV_HD constexpr int width(kv_extent unit) const { return 2 * unit.head_dim; }
  FREEKV_HD constexpr int query_width(int head_dim) const { return 2 * head_dim; }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    for (int i = 0; i < keys.unit.head_dim; i += T::width) {
      const detail::key_range<T> range(team, keys, i);
      team.store(numbers + i, range.low);
      team.store(numbers + keys.unit.head_dim + i, range.high);
    }
  }
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    detail::prepare_for_box(team, query, prepared);
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    return detail::box_score(team, query, numbers);
  }
};

/// The box around the centre of `min_max`'s that reaches as far as the keys do in the mean,
/// `centre +- mean_t |k_t - centre|`; scored like `min_max`. Kept in float32. (ArkVale)
struct centroid_box {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::linear, hook::prepare, hook::query_width, hook::summarised_by_whole_rows>;
  static constexpr std::string_view name = "centroid_box";
  static constexpr bool linear = true;
  static constexpr bool summarised_by_whole_rows = true;

  FREEKV_HD constexpr int width(kv_extent unit) const { return 2 * unit.head_dim; }
  FREEKV_HD constexpr int query_width(int head_dim) const { return 2 * head_dim; }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    using pack = typename T::pack;
    const pack one_half(0.5f), share(1.0f / static_cast<float>(keys.unit.tokens));
    for (int i = 0; i < keys.unit.head_dim; i += T::width) {
      const detail::key_range<T> range(team, keys, i);
      const pack centre = range.low * one_half + range.high * one_half;
      pack reach(0.0f);
      for (int t = 0; t < keys.unit.tokens; ++t) {
        const pack key = team.load(keys.row(t) + i);
        reach = reach + team.maximum(key - centre, centre - key);
      }
      reach = reach * share;
      team.store(numbers + i, centre - reach);
      team.store(numbers + keys.unit.head_dim + i, centre + reach);
    }
  }
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    detail::prepare_for_box(team, query, prepared);
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    return detail::box_score(team, query, numbers);
  }
};

static_assert(summary_policy<min_max> && summary_policy<centroid_box>);

}  // namespace freekv
