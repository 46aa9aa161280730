// Summaries made of mean keys.
#pragma once

#include <cmath>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv {

namespace detail {

/// Mean of `count` keys from `first` on, to `out` (head_dim).
template <team T>
FREEKV_HD void mean_of_keys(T team, const unit_keys& keys, int first, int count, float* out) {
  const typename T::pack share(1.0f / static_cast<float>(count));
  for (int i = 0; i < keys.unit.head_dim; i += T::width) {
    auto sum = team.load(keys.row(first) + i);
    for (int t = 1; t < count; ++t) sum = sum + team.load(keys.row(first + t) + i);
    team.store(out + i, sum * share);
  }
}

template <team T>
FREEKV_HD float inner_product(T team, const float* a, const float* b, int count) {
  typename T::pack product(0.0f);
  for (int i = 0; i < count; i += T::width) product = product + team.load(a + i) * team.load(b + i);
  return team.sum(product);
}

}  // namespace detail

/// The unit's mean key; the score is its scaled product with the query. Kept in float32. (ShadowKV)
struct mean {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::linear, hook::summarised_by_whole_rows>;
  static constexpr std::string_view name = "mean";
  static constexpr bool linear = true;
  static constexpr bool summarised_by_whole_rows = true;

  FREEKV_HD constexpr int width(kv_extent unit) const { return unit.head_dim; }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    detail::mean_of_keys(team, keys, 0, keys.unit.tokens, numbers);
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    return query.scale * detail::inner_product(team, query.data, numbers, query.unit.head_dim);
  }
};

/// The unit's mean key and the distance of the key farthest from it: a ball around all keys. The score is an
/// upper bound of the largest scaled product of the query with a key of the unit. Kept in float32.
/// (docs/contract.md, 5.2)
struct ball {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::prepare, hook::query_width>;
  static constexpr std::string_view name = "ball";

  FREEKV_HD constexpr int width(kv_extent unit) const { return unit.head_dim + 1; }
  FREEKV_HD constexpr int query_width(int head_dim) const { return head_dim + 1; }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    const int d = keys.unit.head_dim;
    detail::mean_of_keys(team, keys, 0, keys.unit.tokens, numbers);
    team.sync();
    float radius = 0.0f;
    for (int t = 0; t < keys.unit.tokens; ++t) {
      typename T::pack squares(0.0f);
      for (int i = 0; i < d; i += T::width) {
        const auto difference = team.load(keys.row(t) + i) - team.load(numbers + i);
        squares = squares + difference * difference;
      }
      radius = scalar_team{}.maximum(radius, ::sqrtf(team.sum(squares)));
    }
    numbers[d] = radius;
  }
  /// The query, then its length.
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    for (int i = 0; i < query.head_dim; i += T::width) team.store(prepared + i, team.load(query.data + i));
    const float length = ::sqrtf(detail::inner_product(team, query.data, query.data, query.head_dim));
    if (team.lane() == 0) prepared[query.head_dim] = length;
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    const int d = query.unit.head_dim;
    return query.scale *
           rounded_sum(detail::inner_product(team, query.data, numbers, d), query.data[d] * numbers[d]);
  }
};

/// Mean keys of the unit's chunks of `Tokens` tokens; the score is `ln sum_b exp(scale * <q, mean_b>)`, an
/// estimate of the unit's log-mass up to `ln Tokens`. `Tokens` divides the page size;
/// `chunk_means<dynamic>{8}` takes it at run time. Kept in float32. Ours.
template <int Tokens = 8>
struct chunk_means {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "chunk_means";
  count_of<Tokens> tokens{};

  FREEKV_HD constexpr int width(kv_extent unit) const { return unit.tokens / tokens * unit.head_dim; }

  std::string values() const { return std::to_string(int{tokens}); }
  void validate(const summary_setting& s) const {
    if (tokens >= 1 && s.unit.tokens % tokens == 0) return;
    int divisor = 8;
    while (s.unit.tokens % divisor != 0) --divisor;
    throw settings_error("chunk_means: a chunk of " + std::to_string(int{tokens}) +
                         " tokens does not divide a " + s.text() + "; choose a divisor such as " +
                         std::to_string(divisor));
  }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    for (int chunk = 0; chunk < keys.unit.tokens / tokens; ++chunk)
      detail::mean_of_keys(team, keys, chunk * tokens, tokens, numbers + chunk * keys.unit.head_dim);
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    const int d = query.unit.head_dim;
    log_sum_exp log_sum;
    for (int chunk = 0; chunk < query.unit.tokens / tokens; ++chunk)
      log_sum.add(query.scale * detail::inner_product(team, query.data, numbers + chunk * d, d));
    return log_sum.value();
  }
};

static_assert(summary_policy<mean> && summary_policy<ball> && summary_policy<chunk_means<>>);

}  // namespace freekv
