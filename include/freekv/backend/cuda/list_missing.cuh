// Units that the selected slots of a head lack, listed for recall: the end of a selection.
#pragma once

#include <cstdint>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/backend/cuda/match_by_warp.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

/// Brings the slots of a head up to date with what it has selected, and lists what is to be copied there:
/// where `room(missing)` says that so many items go, which one thread asks. By one block: its first warp, or
/// one thread where that has no room for so many units. Returns the items on all threads.
template <class State, class Residency, class Room, class Storage>
__device__ listed_items list_missing(const State& s, const Residency& residency, const step_entry& entry,
                                     int head, bool before_attention, const Room& room, Storage& shared) {
  constexpr unsigned all_lanes = 0xffffffffu;
  const std::size_t at_head = s.head_index(entry.sequence, head),
                    first = s.selected_index(entry.sequence, head);
  const std::int32_t* const units = s.selected + first;
  std::int32_t* const slot_of = s.slot_of + first;
  const int count = s.selected_count[at_head];
  const slot_contents slots = s.slots_of(entry.sequence, head);
  const std::int32_t nth = s.selections[at_head] + 1;
  // The order of a head's items does not matter: each has a slot of its own.
  const auto list = [&](int at, std::int32_t unit, int slot) {
    const bool in_ring = s.in_ring(unit, entry.after());
    shared.listed.items[at] = {entry.sequence, head, unit, slot, in_ring};
    return in_ring ? 1 : 0;
  };
  const auto count_recalled = [&](int missing, int promoted) {
    s.promoted[at_head] += promoted;
    s.recalled[at_head] += missing - promoted;
    if (before_attention) s.recalled_before_attention[at_head] = s.recalled[at_head];
  };
  __syncthreads();  // all have read how many selections there have been
  const int thread = thread_x();
  if (thread == 0) s.selections[at_head] = nth;
  if (match_storage::has_room(count, slots.count)) {
    if (thread < 32) {
      int missing = 0, promoted = 0;
      match_by_warp(
          residency, units, count, slots, nth, shared.matching,
          [&](int misses) {
            missing = misses;
            if (thread == 0) shared.listed = {missing > 0 ? room(missing) : nullptr, missing};
            __syncwarp();
          },
          [&](int i, int slot, int miss) {
            slot_of[i] = slot;
            if (miss >= 0) promoted += list(miss, units[i], slot);
          });
      promoted = __reduce_add_sync(all_lanes, promoted);
      if (thread == 0) count_recalled(missing, promoted);
    }
  } else if (thread == 0) {
    const int missing = match_slots(residency, units, count, slots, nth, slot_of);
    shared.listed = {missing > 0 ? room(missing) : nullptr, missing};
    int at = 0, promoted = 0;
    for (int i = 0; i < count; ++i) {
      if (slot_of[i] >= 0) continue;
      slot_of[i] = ~slot_of[i];
      promoted += list(at++, units[i], slot_of[i]);
    }
    count_recalled(missing, promoted);
  }
  __syncthreads();
  return shared.listed;
}

}  // namespace freekv::device
