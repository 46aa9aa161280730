// Shares of a KV head's attention that tokens have: the state that eviction policies count.
#pragma once

#include <cstdint>
#include <freekv/core/team.hpp>

namespace freekv::detail {

/// Scores (group, stride) as `attend_slice` leaves them, of the group's query heads, and what they sum to.
struct attended_scores {
  const float* scores = nullptr;
  std::int64_t stride = 0;     // a multiple of the team's width, with room for whole packs of tokens
  const float* lse = nullptr;  // (group), natural
  int group = 1;
};

/// Softmax weights of `tokens` tokens, averaged over the group, which is how KV heads pool here: to `shares`
/// (tokens, rounded up to whole packs). A weight that is NaN counts as 0.
template <team T>
FREEKV_HD void mean_shares(T team, const attended_scores& of, int tokens, float* shares) {
  using pack = typename T::pack;
  const pack part(1.0f / static_cast<float>(of.group)), none(0.0f);
  for (int t = 0; t < tokens; t += T::width) {
    pack sum(0.0f);
    for (int g = 0; g < of.group; ++g) {
      const pack weight = team.exp(team.load(of.scores + g * of.stride + t) - pack(of.lse[g]));
      sum = sum + team.select_greater(weight, none, weight, none);
    }
    team.store(shares + t, sum * part);
  }
}

}  // namespace freekv::detail
