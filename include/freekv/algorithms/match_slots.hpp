// Selected units that are in slots already, and the slots that the others go to.
#pragma once

#include <cstdint>
#include <freekv/algorithms/unit_list.hpp>
#include <freekv/policies/residency.hpp>

namespace freekv::detail {

/// The selected slots of one KV head: (count) each.
struct slot_contents {
  std::int32_t* unit = nullptr;           ///< the unit a slot holds, -1 for none
  std::int32_t* last_selected = nullptr;  ///< number of the last selection that had the unit
  int count = 0;
};

/// Matches a new selection, the head's `nth`, with its slots, which are brought up to date.
///
/// `wanted`: `count` units, ascending. `slot_of[i]` becomes the slot of wanted[i] where it is held, or the
/// complement `~slot` of the free slot, lowest first, that it is to be copied to. Of the units no longer
/// wanted as many stay as there are spare slots, those that `residency` frees last. Returns the number of
/// misses.
template <residency_policy Residency>
FREEKV_HD int match_slots(const Residency& residency, const std::int32_t* wanted, int count,
                          const slot_contents& slots, std::int32_t nth, std::int32_t* slot_of) {
  for (int i = 0; i < count; ++i) slot_of[i] = -1;
  const int spare = residency.spare;
  int unselected = 0;
  for (int slot = 0; slot < slots.count; ++slot) {
    if (slots.unit[slot] < 0) continue;
    if (const int at = unit_list{wanted, count}.find(slots.unit[slot]); at < count) {
      slot_of[at] = slot;
      slots.last_selected[slot] = nth;
    } else if (spare == 0) {
      slots.unit[slot] = -1;
    } else {
      ++unselected;
    }
  }
  for (; unselected > spare; --unselected) {
    unselected_slot freed{-1};
    for (int slot = 0; slot < slots.count; ++slot) {
      const unselected_slot other{slot, slots.last_selected[slot]};
      if (slots.unit[slot] < 0 || other.last_selected == nth) continue;
      if (freed.slot < 0 || residency.frees_before(other, freed)) freed = other;
    }
    slots.unit[freed.slot] = -1;
  }
  int misses = 0, free = 0;
  for (int i = 0; i < count; ++i) {
    if (slot_of[i] >= 0) continue;
    while (slots.unit[free] >= 0) ++free;
    slots.unit[free] = wanted[i];
    slots.last_selected[free] = nth;
    slot_of[i] = ~free;
    ++misses;
  }
  return misses;
}

}  // namespace freekv::detail
