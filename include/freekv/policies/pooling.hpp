// Pooling: how the page scores of the query heads of one group become one score a page.
#pragma once

#include <cmath>
#include <freekv/core/policy.hpp>
#include <freekv/core/team.hpp>
#include <freekv/functors/log_sum_exp.hpp>
#include <string_view>

namespace freekv {

/// The scores of one row: head g's score of candidate j at `scores[g * stride + j]`, and for softmax poolings
/// `log_sums[g] = ln sum_j exp(score)` over the candidates.
struct row_scores {
  const float* scores = nullptr;
  std::int64_t stride = 0;
  const float* log_sums = nullptr;
  int group = 1;
};

/// The mean over the group of each head's softmax over the candidates, kept as its logarithm, since float32
/// underflows otherwise: `ln sum_g exp(s_g(j) - L_g) - ln G`. (FreeKV section 3.2, group-consistent
/// selection)
struct mean_softmax {
  using policy_kind = pooling_kind;
  static constexpr std::string_view name = "mean_softmax";
  static constexpr bool uses_log_sums = true;

  /// Pooled scores of candidates j .. j + width. A head whose scores are all -infinity contributes nothing.
  template <team T>
  FREEKV_HD typename T::pack pool(T team, const row_scores& row, int j) const {
    using pack = typename T::pack;
    const auto share = [&](int g) {
      const float sum = row.log_sums[g];
      return team.load(row.scores + g * row.stride + j) - pack(sum > -infinity ? sum : 0.0f);
    };
    pack largest = share(0);
    for (int g = 1; g < row.group; ++g) largest = team.maximum(largest, share(g));
    largest = team.select_greater(largest, pack(-infinity), largest, pack(0.0f));
    pack sum(0.0f);
    for (int g = 0; g < row.group; ++g) sum = sum + team.exp(share(g) - largest);
    return largest + team.log(sum) - pack(::logf(static_cast<float>(row.group)));
  }
};

/// Turns a row's scores into one value a candidate.
template <class P>
concept pooling_policy = policy<P> && std::same_as<typename P::policy_kind, pooling_kind> &&
    requires(const P p, row_scores row) {
  { P::name } -> std::convertible_to<std::string_view>;
  { P::uses_log_sums } -> std::convertible_to<bool>;
  { p.pool(scalar_team{}, row, 0) } -> std::same_as<float>;
};

static_assert(pooling_policy<mean_softmax>);

}  // namespace freekv
