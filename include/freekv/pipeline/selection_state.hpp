// A sequence's selection in a layer, as the host reads it between steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::detail {

/// True where all units selected by the heads of a sequence are in its first `pages` pages.
template <class State>
bool selects_within(const State& s, int sequence, int pages) {
  for (int head = 0; head < s.heads.kv; ++head) {
    const std::int32_t* selected = s.selected + s.selection(sequence, head);
    const int count = s.selected_count[s.head_index(sequence, head)];
    if (count > 0 && s.page_of(selected[count - 1]) >= pages) return false;
  }
  return true;
}

/// Blocks in which a sequence's selected slots hold anything, or will where a recall is to be made up for.
template <class State>
int selected_blocks_in_use(const State& s, int sequence) {
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
