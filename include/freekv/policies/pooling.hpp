// Pooling: how the query heads of one group come to one score a page. Either the heads' scores are pooled, or
// their queries before anything is scored.
#pragma once

#include <cmath>
#include <freekv/core/hooks.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/team.hpp>
#include <string_view>
#include <type_traits>

namespace freekv {

/// The scores of one row: head g's score of candidate j at `scores[g * stride + j]`, and for softmax poolings
/// `log_sums[g] = ln sum_j exp(score)` over the candidates.
struct row_scores {
  const float* scores = nullptr;
  std::int64_t stride = 0;
  const float* log_sums = nullptr;
  int group = 1;

  /// Scores of head g, candidates j .. j + width.
  template <team T>
  FREEKV_HD typename T::pack load(T team, int g, int j) const {
    return team.load(scores + g * stride + j);
  }
  /// The logarithm of the head's softmax. A head whose scores are all -infinity has a share of 0 everywhere.
  template <team T>
  FREEKV_HD typename T::pack log_share(T team, int g, int j) const {
    const float sum = log_sums[g];
    return load(team, g, j) - typename T::pack(sum > -infinity ? sum : 0.0f);
  }
};

/// The mean over the group of each head's softmax over the candidates, kept as its logarithm, since float32
/// underflows otherwise: `ln sum_g exp(s_g(j) - L_g) - ln G`. (FreeKV section 3.2, group-consistent
/// selection)
struct mean_softmax {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "mean_softmax";
  static constexpr bool uses_log_sums = true;

  /// Pooled scores of candidates j .. j + width.
  template <team T>
  FREEKV_HD typename T::pack pool(T team, const row_scores& row, int j) const {
    using pack = typename T::pack;
    pack largest = row.log_share(team, 0, j);
    for (int g = 1; g < row.group; ++g) largest = team.maximum(largest, row.log_share(team, g, j));
    largest = team.select_greater(largest, pack(-infinity), largest, pack(0.0f));
    pack sum(0.0f);
    for (int g = 0; g < row.group; ++g) sum = sum + team.bounded_exp(row.log_share(team, g, j) - largest);
    return largest + team.log(sum) - pack(::logf(static_cast<float>(row.group)));
  }
};

/// The largest of the heads' softmaxes, kept as its logarithm: `max_g (s_g(j) - L_g)`.
struct max_softmax {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "max_softmax";
  static constexpr bool uses_log_sums = true;

  template <team T>
  FREEKV_HD typename T::pack pool(T team, const row_scores& row, int j) const {
    auto largest = row.log_share(team, 0, j);
    for (int g = 1; g < row.group; ++g) largest = team.maximum(largest, row.log_share(team, g, j));
    return largest;
  }
};

/// The mean of the heads' scores.
struct mean_score {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "mean_score";
  static constexpr bool uses_log_sums = false;

  template <team T>
  FREEKV_HD typename T::pack pool(T team, const row_scores& row, int j) const {
    const typename T::pack share(1.0f / static_cast<float>(row.group));
    auto sum = row.load(team, 0, j) * share;  // shares, since the sum of the largest floats is infinite
    for (int g = 1; g < row.group; ++g) sum = sum + row.load(team, g, j) * share;
    return sum;
  }
};

/// The largest of the heads' scores.
struct max_score {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "max_score";
  static constexpr bool uses_log_sums = false;

  template <team T>
  FREEKV_HD typename T::pack pool(T team, const row_scores& row, int j) const {
    auto largest = row.load(team, 0, j);
    for (int g = 1; g < row.group; ++g) largest = team.maximum(largest, row.load(team, g, j));
    return largest;
  }
};

/// The score of the mean of the heads' queries: pages are scored once for the whole group. (ArkVale)
struct mean_query {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "mean_query";

  /// Queries (group, head_dim) to the one (head_dim) that scores.
  template <team T>
  FREEKV_HD void pool_query(T team, const group_query& query, float* pooled) const {
    const typename T::pack share(1.0f / static_cast<float>(query.group));
    for (int i = 0; i < query.head_dim; i += T::width) {
      auto sum = team.load(query.head(0) + i);
      for (int g = 1; g < query.group; ++g) sum = sum + team.load(query.head(g) + i);
      team.store(pooled + i, sum * share);
    }
  }
};

/// The score of the elementwise maximum, with its sign, of the heads' queries.
struct max_query {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "max_query";

  template <team T>
  FREEKV_HD void pool_query(T team, const group_query& query, float* pooled) const {
    for (int i = 0; i < query.head_dim; i += T::width) {
      auto largest = team.load(query.head(0) + i);
      for (int g = 1; g < query.group; ++g) largest = team.maximum(largest, team.load(query.head(g) + i));
      team.store(pooled + i, largest);
    }
  }
};

/// Turns the queries of a group into one, before pages are scored.
template <class P>
concept query_pooling = requires(const P p, group_query query, float* pooled) {
  p.pool_query(scalar_team{}, query, pooled);
};

/// Turns the scores of a group into one a page.
template <class P>
concept score_pooling = requires(const P p, row_scores row) {
  { P::uses_log_sums } -> std::convertible_to<bool>;
  { p.pool(scalar_team{}, row, 0) } -> std::same_as<scalar_team::pack>;
};

/// Turns softmaxes of scores into one.
template <class P>
concept softmax_pooling = score_pooling<P> && P::uses_log_sums;

namespace detail {

/// Pooling of what the heads of a layer that select together have pooled: of softmaxes where theirs is.
template <class P>
using pooling_of_heads = std::conditional_t<softmax_pooling<P>, mean_softmax, mean_score>;

}  // namespace detail

template <class P>
concept pooling_policy = policy<P> && std::same_as<typename P::policy_kind, pooling_kind> &&
    (query_pooling<P> || score_pooling<P>)&&requires {
  { P::name } -> std::convertible_to<std::string_view>;
};

static_assert(pooling_policy<mean_softmax> && pooling_policy<max_softmax> && pooling_policy<mean_score> &&
              pooling_policy<max_score> && pooling_policy<mean_query> && pooling_policy<max_query>);

struct pooling_kind : kind_defaults {
  using default_policy = mean_softmax;
  template <class P>
  struct check {
    static_assert(pooling_policy<P>,
                  "a pooling policy has a name and either uses_log_sums and pool(team, row, j) -> pack of "
                  "pooled scores, or pool_query(team, query, pooled) for a group_query");
  };
};

}  // namespace freekv
