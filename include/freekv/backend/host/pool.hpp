// Pools the scores of a KV head's candidates by query head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/policies/pooling.hpp>
#include <limits>

namespace freekv::host {

/// Log-sum-exp of `padded` scores, or where they are `Tempered` of `tempered_score` of each.
template <bool Tempered = false, class Team>
log_sum_exp log_sum_exp_of(Team team, const float* scores, std::int64_t padded,
                           [[maybe_unused]] float factor = 1.0f) {
  constexpr int width = Team::width, at_once = 8;
  using pack = typename Team::pack;
  log_sum_exp log_sum;
  pack packs[at_once];
  for (std::int64_t j = 0; j < padded;) {
    int count = 0;
    for (; count < at_once && j < padded; j += width) {
      packs[count] = team.load(scores + j);
      if constexpr (Tempered) {
        const pack largest(std::numeric_limits<float>::max()), score = packs[count] * pack(factor);
        packs[count] = team.select_greater(score, largest, largest, score);  // clamp_score
      }
      ++count;
    }
    log_sum.add(team, packs, count);
  }
  return log_sum;
}

/// Pools `w.scores`, query head g's score of candidate j at `g * stride + j`, into `w.pooled`. Candidates are
/// `padded` to whole packs by scores of -infinity, and so are the pooled scores.
template <class Pooling>
void pool_candidates(isa set, const Pooling& pooling, int group, std::int64_t stride, std::int64_t padded,
                     const workspace& w) {
  if constexpr (query_pooling<Pooling>) {
    std::copy_n(w.scores, padded, w.pooled);
  } else {
    with_team(set, [&](auto team) {
      const row_scores row{w.scores, stride, w.log_sums, group};
      if constexpr (Pooling::uses_log_sums)
        for (int g = 0; g < group; ++g)
          w.log_sums[g] = log_sum_exp_of(team, w.scores + g * stride, padded).value();
      using pack = typename decltype(team)::pack;
      const pack largest(std::numeric_limits<float>::max());
      for (std::int64_t j = 0; j < padded; j += decltype(team)::width) {
        const pack pooled = pooling.pool(team, row, static_cast<int>(j));
        team.store(w.pooled + j, team.select_greater(pooled, largest, largest, pooled));  // clamp_score
      }
    });
  }
}

}  // namespace freekv::host
