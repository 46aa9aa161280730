// Selection of a layer: what each KV head of each sequence has selected, where it is, and what the last step
// did for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/config.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/attention_list.hpp>
#include <freekv/pipeline/layer_geometry.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/plan.hpp>
#include <span>

namespace freekv::detail {

/// One layer's selection. Arrays are indexed by (sequence, ...) as their comments say.
struct selection_state : layer_geometry {
  layer_kind* head_kinds = nullptr;  // (kv head)
  /// (sequence, kv head, decode row, group, head_dim): the last decode step's queries, until `append` has
  /// judged drift; then this one's.
  float* kept_queries = nullptr;
  std::uint8_t* corrected = nullptr;  // (sequence, kv head): flagged in the last step
  /// (1), on a device alone: how many heads are flagged in the step begun last, over all its entries
  std::int32_t* flagged_count = nullptr;
  std::uint8_t* recall_failed = nullptr;  // (sequence, kv head): selected units could not be read
  std::uint8_t* lacking = nullptr;        // (sequence): what could not be read
  /// (sequence, kv head, K): units that heads attend to, ascending. `correct` selects those of flagged heads
  /// anew, and `speculate` puts the next step's in their place
  std::int32_t* selected = nullptr;
  std::int32_t* selected_count = nullptr;  // (sequence, kv head)
  /// (sequence, kv head, K): what `correct` has selected for the next step too, where one scoring serves both
  std::int32_t* next_selected = nullptr;
  std::int32_t* next_selected_count = nullptr;  // (sequence, kv head): -1 where it is not known yet
  std::int32_t* attended = nullptr;             // (sequence, kv head, K): what the last step attended to
  std::int32_t* attended_count = nullptr;       // (sequence, kv head)
  /// (sequence, kv head, K, mask_words): query heads that selected the unit
  std::uint32_t* selected_by = nullptr;
  std::uint32_t* next_selected_by = nullptr;  // the same, of `next_selected`
  std::uint32_t* attended_by = nullptr;       // the same, of `attended`
  std::int32_t* pinned = nullptr;             // (sequence, kv head, pins): ascending units
  std::int32_t* pinned_count = nullptr;       // (sequence, kv head)
  std::int32_t* slot_unit = nullptr;          // (sequence, kv head, selected slot): unit in it, or -1
  std::int32_t* slot_stamp = nullptr;  // (sequence, kv head, selected slot): last selection with that unit
  std::int32_t* slot_of = nullptr;     // (sequence, kv head, K): slot of each selected unit
  std::int32_t* selections = nullptr;  // (sequence, kv head): how many there have been
  std::int32_t* recalled = nullptr;    // (sequence, kv head): slices from the store, last step
  /// (sequence, kv head): those of `recalled` that attention waited for
  std::int32_t* recalled_before_attention = nullptr;
  std::int32_t* promoted = nullptr;  // (sequence, kv head): slices from the ring, last step

  FREEKV_HD layer_kind kind_of(int head) const { return head_kinds[head]; }
  FREEKV_HD unit_union selected_union(int sequence, int head) const {
    return {selected + selected_index(sequence, head), selected_by + mask_index(sequence, head), mask_words};
  }
  FREEKV_HD unit_union next_selected_union(int sequence, int head) const {
    return {next_selected + selected_index(sequence, head), next_selected_by + mask_index(sequence, head),
            mask_words};
  }
  FREEKV_HD unit_union attended_union(int sequence, int head) const {
    return {attended + selected_index(sequence, head), attended_by + mask_index(sequence, head), mask_words};
  }
  FREEKV_HD slot_contents slots_of(int sequence, int head) const {
    const std::size_t first = head_index(sequence, head) * to_size(slots.selected);
    return {slot_unit + first, slot_stamp + first, slots.selected};
  }
  std::span<const std::int32_t> pinned_of(int sequence, int head) const {
    return {pinned + head_index(sequence, head) * to_size(pins),
            to_size(pinned_count[head_index(sequence, head)])};
  }

  /// Pages that one head attends to with row `row` of an entry. `everything`: all that the model attends to,
  /// in the store, and not what the head keeps; of a layer with a sliding window that is the same.
  FREEKV_HD attention_list pages_attended(const step_entry& entry, int row, int head,
                                          bool everything = false) const {
    const int tokens = entry.before + row + 1;
    if (sliding_window > 0) {
      const int first = tokens > sliding_window ? tokens - sliding_window : 0;
      return {.roles = {0, first / page.tokens, pages_of(tokens)},
              .tokens = tokens,
              .first_token = first,
              .page_tokens = page.tokens,
              .unit_tokens = unit.tokens};
    }
    const bool selects = !everything && kind_of(head) == layer_kind::retrieval;
    page_roles roles = roles_at(tokens, budget, page.tokens);
    if (selects) {
      const int begin = window_begin(entry);
      roles.window_begin = begin > roles.sink_end ? begin : roles.sink_end;
    }
    return {roles,
            selected + selected_index(entry.sequence, head),
            selects ? selected_count[head_index(entry.sequence, head)] : 0,
            everything || kind_of(head) == layer_kind::complete,
            tokens,
            0,
            page.tokens,
            unit.tokens};
  }
  /// Number, among the selected slots, of the one that has entry i of a head's list, a selected unit.
  FREEKV_HD int selected_slot_of(int sequence, int head, const attention_list& pages, int i) const {
    return slot_of[selected_index(sequence, head) + to_size(pages.nth_selected(i))];
  }
  /// Slot of entry i of a head's list, which is not selected.
  FREEKV_HD slot_id slot_of_page(const attention_list& pages, int i) const {
    const int page_index = pages.page(i);
    return pages.nth_selected(i) < 0 ? slots.sink_slot(page_index) : slots.ring_slot(page_index);
  }
  /// True where a head attends to a list in its slots, else in the store. `everything`: as `pages_attended`
  /// was asked.
  FREEKV_HD bool attends_to_slots(const attention_list& pages, bool everything) const {
    return keeps_slots && !everything && !pages.complete;
  }
  /// Mask of the query heads that attend to entry i of a head's list; null: all of the group.
  FREEKV_HD const std::uint32_t* attended_by_heads(int sequence, int head, const attention_list& pages,
                                                   int i) const {
    if (mask_words == 0 || !pages.is_selected(i)) return nullptr;
    return selected_by + mask_index(sequence, head) + std::int64_t{pages.nth_selected(i)} * mask_words;
  }
};

/// Calls `use(pointer, numbers of one sequence)` for each array of a layer's selection but `kept_queries`.
template <class Use>
void for_each_array(selection_state& s, const Use& use) {
  const std::size_t heads = s.head_index(1, 0), units = s.selected_index(1, 0), masks = s.mask_index(1, 0);
  for (std::uint8_t** flags : {&s.corrected, &s.recall_failed}) use(*flags, heads);
  use(s.lacking, std::size_t{1});
  for (std::int32_t** counts : {&s.selected_count, &s.next_selected_count, &s.attended_count, &s.pinned_count,
                                &s.selections, &s.recalled, &s.recalled_before_attention, &s.promoted})
    use(*counts, heads);
  for (std::int32_t** lists : {&s.selected, &s.next_selected, &s.attended, &s.slot_of}) use(*lists, units);
  for (std::uint32_t** lists : {&s.selected_by, &s.next_selected_by, &s.attended_by}) use(*lists, masks);
  use(s.pinned, heads * to_size(s.pins));
  for (std::int32_t** lists : {&s.slot_unit, &s.slot_stamp}) use(*lists, heads * to_size(s.slots.selected));
}

/// True where all units selected by the heads of a sequence are in its first `pages` pages.
inline bool selects_within(const selection_state& s, int sequence, int pages) {
  for (int head = 0; head < s.heads.kv; ++head) {
    const std::int32_t* selected = s.selected + s.selected_index(sequence, head);
    const int count = s.selected_count[s.head_index(sequence, head)];
    if (count > 0 && s.page_of(selected[count - 1]) >= pages) return false;
  }
  return true;
}

/// Blocks in which a sequence's selected slots hold anything; all, where a recall has failed and is to be
/// repeated.
inline int selected_blocks_in_use(const selection_state& s, int sequence) {
  int slots = 0;
  for (int head = 0; head < s.heads.kv; ++head) {
    const slot_contents held = s.slots_of(sequence, head);
    int used = held.count;
    if (s.recall_failed[s.head_index(sequence, head)] == 0)
      while (used > slots && held.unit[used - 1] < 0) --used;
    slots = std::max(slots, used);
  }
  return s.slots.selected_blocks_for(slots);
}

}  // namespace freekv::detail
