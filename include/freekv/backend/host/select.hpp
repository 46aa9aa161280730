// Score, pool, select, diff and recall on the host: one KV head of one sequence at a time.
#pragma once

#include <algorithm>
#include <cstring>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/functors/copy_slice.hpp>
#include <freekv/functors/diff_pages.hpp>
#include <freekv/functors/ordered_key.hpp>
#include <freekv/functors/score_page.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/pooling.hpp>
#include <functional>

namespace freekv::host {

/// Scores the candidates `roles` of one KV head with its kept query, one page after the other, into
/// `w.scores`: query head g's score of candidate j at `g * stride + j`, the rest of each row -infinity.
/// Returns the stride.
template <class State, class Summary>
std::int64_t score_candidates(isa set, const State& s, const Summary& summary, const head_of& at,
                              page_roles roles, const workspace& w) {
  constexpr int d = State::head_dim;
  const int group = s.heads.group(), count = roles.candidates();
  const std::int64_t stride = workspace_sizes::padded(count);
  with_team(set, [&](auto team) {
    const auto policy = summary_at(summary, s.layer, at.head);
    const prepared_queries queries{w.query, summary_query_width(policy, d), group, s.scale};
    const group_query query = s.query_of(at.sequence, at.head);
    for (int g = 0; g < group; ++g)
      prepare_query(team, policy, group_query{query.head(g), 1, d}, w.query + g * queries.width);
    for (int j = 0; j < count; ++j)
      score_page<typename State::element>(
          team, policy, s.page, s.summary_of(s.store_page(at.sequence, roles.sink_end + j), at.head), queries,
          w.numbers, {w.scores + j, stride});
    for (int g = 0; g < group; ++g)
      std::fill(w.scores + g * stride + count, w.scores + (g + 1) * stride, -infinity);
  });
  return stride;
}

/// Pools the scores of a group into `w.pooled` (stride).
template <class Pooling>
void pool_candidates(isa set, const Pooling& pooling, int group, std::int64_t stride, const workspace& w) {
  with_team(set, [&](auto team) {
    constexpr int width = decltype(team)::width;
    const row_scores row{w.scores, stride, w.log_sums, group};
    if constexpr (Pooling::uses_log_sums)
      for (int g = 0; g < group; ++g) {
        log_sum_exp mass;
        for (std::int64_t j = 0; j < stride; j += width) {
          const auto scores = team.load(w.scores + g * stride + j);
          mass.add(team, &scores, 1);
        }
        w.log_sums[g] = mass.value();
      }
    for (std::int64_t j = 0; j < stride; j += width)
      team.store(w.pooled + j, pooling.pool(team, row, static_cast<int>(j)));
  });
}

/// The `count` best of the candidates `roles` by `w.pooled`, ties to the smaller page, as ascending page ids.
inline void best_pages(page_roles roles, int count, const workspace& w, std::int32_t* pages) {
  const int candidates = roles.candidates();
  for (int j = 0; j < candidates; ++j) w.keys[j] = ordered_key(clamp_score(w.pooled[j]), roles.sink_end + j);
  std::nth_element(w.keys, w.keys + count, w.keys + candidates, std::greater<>());
  for (int i = 0; i < count; ++i) pages[i] = page_of_key(w.keys[i]);
  std::sort(pages, pages + count);
}

/// Brings the selected pages of one KV head into its selected slots: what is held stays, what is missing is
/// copied from the ring (promotion) where it is still there at length `tokens`, else from the store (recall).
template <class State>
void recall_pages(const State& s, const head_of& at, int tokens) {
  const std::size_t row = s.row(at.sequence, at.head), first = s.selection(at.sequence, at.head);
  const std::int32_t* pages = s.selected + first;
  const int count = s.selected_count[row];
  std::int32_t* slot_of = s.slot_of + first;
  diff_pages(pages, count, s.slot_page + first, s.budget.selected_pages, slot_of);
  for (int i = 0; i < count; ++i) {
    if (slot_of[i] >= 0) continue;
    slot_of[i] = ~slot_of[i];
    const bool in_ring = pages[i] >= s.slots.ring_begin(tokens, s.page.tokens);
    const auto from = in_ring ? s.frame_slice(at.sequence, s.slots.ring_slot(pages[i]), at.head)
                              : s.store_slice(at.sequence, pages[i], at.head);
    const auto to = s.frame_slice(at.sequence, s.slots.selected_slot(slot_of[i]), at.head);
    copy_slice<State::head_dim>(as_const(from), to, s.page.tokens);
    ++(in_ring ? s.promoted : s.recalled)[row];
  }
}

}  // namespace freekv::host
