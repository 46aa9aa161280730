// Selection of one head from step to step: who selects anew and when, forgetting what is selected, and slots
// moved together.
#pragma once

#include <cstdint>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/config.hpp>
#include <freekv/core/team.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/plan.hpp>

namespace freekv::detail {

/// Time of a selection: a correction, for the step itself and by the same scores for the next one, or ahead
/// of the next.
enum class selection_time : std::uint8_t { correct, speculate };

/// Number of heads of a layer before `head` that retrieve: where its pooled scores are, if they select
/// together.
template <class State>
FREEKV_HD int retrieving_before(const State& s, int head) {
  int count = 0;
  for (int i = 0; i < head; ++i) count += s.kind_of(i) == layer_kind::retrieval;
  return count;
}
/// The first head of a layer that retrieves, of which there is one.
template <class State>
FREEKV_HD int first_retrieving(const State& s) {
  int head = 0;
  while (s.kind_of(head) != layer_kind::retrieval) ++head;
  return head;
}

/// Heads that select at such a time: those that a correction has flagged, or all where it judges `every_head`
/// by masses; ahead of a step, those that no correction has selected for yet.
template <class State>
FREEKV_HD bool is_to_select(const State& s, int sequence, int head, selection_time time, bool every_head) {
  const auto at_head = s.head_index(sequence, head);
  return time == selection_time::correct ? every_head || s.corrected[at_head] != 0
                                         : s.next_selected_count[at_head] < 0;
}

/// True where a head of a decode entry selects anew: it has no selection, or the correction does not accept
/// the queries of one of the entry's rows. `query(row)`: its group's (group, head_dim); `before`: those that
/// made its selection, if it has one. A correction by mass judges later, when it has scores. `correction` is
/// of the layer.
template <class Team, class Entry, class Correction, class Query>
FREEKV_HD bool selects_anew(Team team, const Correction& correction, const Entry& entry,
                            const group_query& before, const Query& query) {
  bool anew = entry.kept_row < 0;
  if constexpr (requires { correction.flags(team, query_change{}); })
    for (int row = 0; row < entry.tokens && !anew; ++row)
      anew = correction.flags(
          team, query_change{{query(row), before.group, before.head_dim}, before, entry.decode_step});
  return anew;
}

/// Forgets what one head of a sequence has selected, and what its selected slots hold. By a team's lanes.
template <class Team, class State>
FREEKV_HD void drop_selection(Team team, const State& s, int sequence, int head) {
  const slot_contents slots = s.slots_of(sequence, head);
  for (int i = team.lane(); i < slots.count; i += team.lanes()) {
    slots.unit[i] = -1;
    slots.last_selected[i] = 0;
  }
  if (team.lane() != 0) return;
  const auto at_head = s.head_index(sequence, head);
  s.selected_count[at_head] = 0;
  s.pinned_count[at_head] = 0;
  s.next_selected_count[at_head] = -1;
  s.selections[at_head] = 0;
  s.recall_failed[at_head] = 0;
}

/// Begins the report of one head of a decode entry; returns whether it is flagged.
template <class State>
FREEKV_HD bool begin_report(const State& s, int sequence, int head, bool anew) {
  const auto at_head = s.head_index(sequence, head);
  const bool flagged = anew && s.kind_of(head) == layer_kind::retrieval;
  s.corrected[at_head] = flagged;
  s.recalled[at_head] = s.recalled_before_attention[at_head] = s.promoted[at_head] = 0;
  return flagged;
}
/// Flags one head of a layer whose heads select together, where one of them is flagged; returns whether it
/// has not been flagged before.
template <class State>
FREEKV_HD bool flag_with_layer(const State& s, int sequence, int head) {
  std::uint8_t& corrected = s.corrected[s.head_index(sequence, head)];
  const bool fresh = corrected == 0 && s.kind_of(head) == layer_kind::retrieval;
  if (fresh) corrected = 1;
  return fresh;
}
/// Clears the report of one head of a sequence.
template <class State>
FREEKV_HD void clear_report(const State& s, int sequence, int head) {
  begin_report(s, sequence, head, false);
  s.attended_count[s.head_index(sequence, head)] = 0;
}

/// Moves what a head's slots hold to the lowest ones: `move(from, to)` for each that moves, which copies it,
/// notes where it is, and has happened for all lanes when it returns.
template <class Move>
FREEKV_HD void compact_slots(const slot_contents& held, const Move& move) {
  for (int to = 0, from = held.count - 1;;) {
    while (from > 0 && held.unit[from] < 0) --from;
    while (to < from && held.unit[to] >= 0) ++to;
    if (to >= from) return;
    move(from, to);
  }
}
/// Notes that slot `to` of a head now holds what slot `from` held.
template <class State>
FREEKV_HD void note_move(const State& s, int sequence, int head, int from, int to) {
  const slot_contents held = s.slots_of(sequence, head);
  held.unit[to] = held.unit[from];
  held.last_selected[to] = held.last_selected[from];
  held.unit[from] = -1;
  std::int32_t* const slot_of = s.slot_of + s.selected_index(sequence, head);
  for (int i = 0; i < s.selected_count[s.head_index(sequence, head)]; ++i)
    if (slot_of[i] == from) slot_of[i] = to;
}

}  // namespace freekv::detail
