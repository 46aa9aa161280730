// One page's scores for all query heads of a group, its summary read once.
#pragma once

#include <freekv/policies/summary.hpp>
#include <limits>

namespace freekv {

/// The prepared queries of one group and what scoring them needs.
struct group_queries {
  const float* prepared = nullptr;  // (group, width)
  int width = 0;
  int group = 1;
  float scale = 1.0f;
};

/// Scores and pooled scores as they may be: +infinity counts as the largest finite float.
FREEKV_HD inline float clamp_score(float score) {
  constexpr float largest = std::numeric_limits<float>::max();
  return score > largest ? largest : score;
}

/// Writes the score of query head g to `out[g * stride]`. A page that scores NaN for one head of the group
/// scores -infinity for all of them. `numbers` (width of the summary) is the team's scratch.
template <class Key, team T, class S>
FREEKV_HD void score_page(T team, const S& summary, page_geometry page, const std::byte* stored,
                          const group_queries& queries, float* numbers, float* out, std::int64_t stride) {
  decode_summary<Key>(team, summary, page, stored, numbers);
  team.sync();
  bool nan = false;
  for (int g = 0; g < queries.group; ++g) {
    const float score =
        summary.score(team, queries.prepared + g * queries.width, numbers, page, queries.scale);
    nan = nan || score != score;
    out[g * stride] = clamp_score(score);
  }
  for (int g = 0; nan && g < queries.group; ++g) out[g * stride] = -std::numeric_limits<float>::infinity();
}

}  // namespace freekv
