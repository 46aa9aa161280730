// Which wanted pages are already in slots, and where the others go.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>

namespace freekv {

/// Matches a new selection with the slots of one KV head.
///
/// `wanted`: `count` page ids, ascending. `slot_page` (slots): the page each slot holds, -1 for none; brought
/// up to date. `slot_of[i]` becomes the slot of wanted[i] where it is held, or the complement `~slot` of the
/// free slot, lowest first, that it is to be copied to. Slots of pages no longer wanted are free. Returns the
/// number of misses.
FREEKV_HD inline int diff_pages(const std::int32_t* wanted, int count, std::int32_t* slot_page, int slots,
                                std::int32_t* slot_of) {
  for (int i = 0; i < count; ++i) slot_of[i] = -1;
  for (int slot = 0; slot < slots; ++slot) {
    int first = 0, last = count;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (wanted[middle] < slot_page[slot])
        first = middle + 1;
      else
        last = middle;
    }
    if (first < count && wanted[first] == slot_page[slot])
      slot_of[first] = slot;
    else
      slot_page[slot] = -1;
  }
  int misses = 0, free = 0;
  for (int i = 0; i < count; ++i) {
    if (slot_of[i] >= 0) continue;
    while (slot_page[free] >= 0) ++free;
    slot_page[free] = wanted[i];
    slot_of[i] = ~free;
    ++misses;
  }
  return misses;
}

}  // namespace freekv
