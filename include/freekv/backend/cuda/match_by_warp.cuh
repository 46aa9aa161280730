// Matching by a warp: which selected units are in slots already, and where the others go; what `match_slots`
// does by one thread.
#pragma once

#include <cstdint>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/policies/residency.hpp>

namespace freekv::device {

/// A warp's shared memory for it, and for how many units and slots that has room.
struct match_storage {
  static constexpr int most = 1024;
  std::int32_t wanted[most];
  std::int16_t slot[most];  // of each wanted unit; -1: it is not held
  std::int16_t free[most];  // ascending

  __device__ static bool has_room(int count, int slots) { return count <= most && slots <= most; }
};

/// Matches a new selection, the head's `nth`, with its slots, which are brought up to date, as `match_slots`
/// does; a lane has a slot, or a unit. `found(i, slot, miss)` is called, on one of the lanes, for each wanted
/// unit i with its slot and which of the misses it is, -1 if it is held, behind `counted(misses)` on all
/// lanes. By a whole warp.
template <residency_policy Residency, class Counted, class Found>
__device__ void match_by_warp(const Residency& residency, const std::int32_t* wanted, int count,
                              const slot_contents& slots, std::int32_t nth, match_storage& shared,
                              const Counted& counted, const Found& found) {
  constexpr unsigned all = 0xffffffffu;
  const int lane = thread_x() % 32;
  const auto before_me = [&](unsigned lanes) { return __popc(lanes & ((1u << lane) - 1u)); };
  for (int i = lane; i < count; i += 32) {
    shared.wanted[i] = wanted[i];
    shared.slot[i] = -1;
  }
  __syncwarp();
  int unselected = 0, free = 0;
  const auto add_free = [&](int slot, bool is_free) {
    const unsigned lanes = __ballot_sync(all, is_free);
    if (is_free) shared.free[free + before_me(lanes)] = static_cast<std::int16_t>(slot);
    free += __popc(lanes);
  };
#pragma unroll 1
  for (int first = 0; first < slots.count; first += 32) {
    const int slot = first + lane;
    const std::int32_t unit = slot < slots.count ? slots.unit[slot] : -1;
    bool held = false;
    if (unit >= 0) {
      int at = 0, last = count;
      while (at < last) {
        const int middle = (at + last) / 2;
        if (shared.wanted[middle] < unit)
          at = middle + 1;
        else
          last = middle;
      }
      held = at < count && shared.wanted[at] == unit;
      if (held) {
        shared.slot[at] = static_cast<std::int16_t>(slot);
        slots.last_selected[slot] = nth;
      }
    }
    unselected += __popc(__ballot_sync(all, unit >= 0 && !held));
    if (residency.spare == 0) add_free(slot, slot < slots.count && !held);
  }
  __syncwarp();
  if (const int surplus = unselected - residency.spare; residency.spare > 0) {
    const auto unselected_at = [&](int slot) {
      return slots.unit[slot] >= 0 && slots.last_selected[slot] != nth;
    };
#pragma unroll 1
    for (int first = 0; first < slots.count; first += 32) {
      const int slot = first + lane;
      bool is_free = slot < slots.count && slots.unit[slot] < 0;
      if (surplus > 0 && slot < slots.count && unselected_at(slot)) {
        const unselected_slot mine{slot, slots.last_selected[slot]};
        int sooner = 0;  // others that are freed before it; of those alike the lower
        for (int other = 0; other < slots.count; ++other) {
          if (other == slot || !unselected_at(other)) continue;
          const unselected_slot theirs{other, slots.last_selected[other]};
          sooner +=
              residency.frees_before(theirs, mine) || (other < slot && !residency.frees_before(mine, theirs));
        }
        is_free = sooner < surplus;
      }
      add_free(slot, is_free);
    }
    __syncwarp();  // all have looked at the slots
  }
  int misses = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    misses += __popc(__ballot_sync(all, i < count && shared.slot[i] < 0));
  }
  counted(misses);
#pragma unroll 1
  for (int i = misses + lane; i < free; i += 32) slots.unit[shared.free[i]] = -1;
  int filled = 0;
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane;
    const bool there = i < count, missed = there && shared.slot[i] < 0;
    const unsigned lanes = __ballot_sync(all, missed);
    int slot = there ? shared.slot[i] : 0, miss = -1;
    if (missed) {
      miss = filled + before_me(lanes);
      slot = shared.free[miss];
      slots.unit[slot] = shared.wanted[i];
      slots.last_selected[slot] = nth;
    }
    filled += __popc(lanes);
    if (there) found(i, slot, miss);
  }
}

}  // namespace freekv::device
