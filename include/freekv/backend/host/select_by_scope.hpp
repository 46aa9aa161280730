// Selection where a KV head does not select for itself: its query heads do, each for itself, or all KV heads
// of a layer together.
#pragma once

#include <algorithm>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/plan.hpp>

namespace freekv::host {

/// Selects for each query head of a KV head by itself: what comes next, and with `now_too` what the entry
/// attends to.
template <class State, class Policies>
void select_by_query_head(isa set, const State& s, const Policies& policies, const step_entry& entry,
                          int head, bool now_too, const workspace& w) {
  const step_candidates c = s.candidates_of(entry);
  const std::size_t at_head = s.head_index(entry.sequence, head);
  std::int32_t &selected = s.selected_count[at_head], &next_selected = s.next_selected_count[at_head];
  if (now_too) selected = 0;
  next_selected = 0;
  const unit_union all = s.selected_union(entry.sequence, head);
  for (int g = 0; g < s.heads.group(); ++g) {
    head_selection selection(set, s, policies, entry, head, {c.first, c.most()}, w, g);
    int held = 0;
    if (now_too)
      selected = merge_selections(all, selected, w.units, held = selection.best(c.now, w.units), g);
    else
      held = selection_of(all, selected, g, w.units);
    next_selected = merge_selections(s.next_selected_union(entry.sequence, head), next_selected, w.units,
                                     selection.best(c.next, w.units, {w.units, to_size(held)}), g);
  }
}

// KV heads of a layer that select together:

template <class State>
bool any_flagged(const State& s, int sequence) {
  const std::uint8_t* const corrected = s.corrected + s.head_index(sequence, 0);
  return std::any_of(corrected, corrected + s.heads.kv, [](std::uint8_t flag) { return flag != 0; });
}
template <class State>
void flag_all(const State& s, int sequence) {
  for (int head = 0; head < s.heads.kv; ++head) flag_with_layer(s, sequence, head);
}
/// Gives the first head's list to all.
template <class State>
void share_list(const State& s, int sequence, std::int32_t* units, std::int32_t* counts) {
  const int from = first_retrieving(s);
  for (int head = from + 1; head < s.heads.kv; ++head) {
    if (s.kind_of(head) != layer_kind::retrieval) continue;
    const std::int32_t count = counts[s.head_index(sequence, head)] = counts[s.head_index(sequence, from)];
    std::copy_n(units + s.selected_index(sequence, from), count, units + s.selected_index(sequence, head));
  }
}

}  // namespace freekv::host
