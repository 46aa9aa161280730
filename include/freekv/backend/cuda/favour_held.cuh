// Favour for held units in a selection on the device, by one block.
#pragma once

#include <cstdint>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/config.hpp>

namespace freekv::device {

/// The most units that a selection which favours held ones may choose: they are put in order in a block's
/// memory.
inline constexpr int most_favoured = 512;

/// Units of a head, ascending, that a selection may favour; where masks are given, those that query head `by`
/// selected.
struct held_units {
  unit_list all;
  const std::uint32_t* masks = nullptr;  ///< (units, words)
  int words = 1, by = 0;

  FREEKV_HD bool selected(int i) const {
    return masks == nullptr || has_head(masks + std::int64_t{i} * words, by);
  }
  FREEKV_HD bool has(std::int32_t unit) const {
    const int i = all.find(unit);
    return i < all.count && selected(i);
  }
};

/// Shared memory of a block that favours held units.
struct favour_storage {
  std::uint64_t keys[2 * most_favoured];  // of those that may leave, and of those that may come
  std::int32_t units[most_favoured];      // those that are selected
  int compared, taken;
};

/// Makes of `units`, the `count` best of the first `candidates` candidates that are not pinned, ascending,
/// the best of them when `held` ones have `bonus` more. One without it is among these only if it was among
/// those, and a held one that was stays. `held` and `units` lie apart. By a block.
__device__ inline void favour_held(float bonus, const held_units& held, const float* pooled,
                                   const row_candidates& of, int candidates, std::int32_t* units, int count,
                                   favour_storage& shared) {
  const int thread = thread_x(), threads = threads_x();
  const unit_list chosen{units, count};
  if (thread == 0) shared.compared = shared.taken = 0;
  __syncthreads();
  for (int i = thread; i < count; i += threads) {
    const std::int32_t unit = units[i];
    if (held.has(unit))
      shared.units[atomicAdd(&shared.taken, 1)] = unit;
    else
      shared.keys[atomicAdd(&shared.compared, 1)] = ordered_key(pooled[unit - of.first], unit);
  }
  __syncthreads();
  const int leaving = shared.compared;  // as many as have to be left
  __syncthreads();                      // before that grows
  for (int i = thread; i < held.all.count; i += threads) {
    const std::int32_t unit = held.all.units[i];
    const int j = unit - of.first;
    if (j < 0 || j >= candidates || !held.selected(i) || of.is_pinned(j) || chosen.has(unit)) continue;
    shared.keys[atomicAdd(&shared.compared, 1)] = ordered_key(pooled[j] + bonus, unit);
  }
  __syncthreads();
  for (int i = thread; i < shared.compared; i += threads) {
    const std::uint64_t key = shared.keys[i];
    int better = 0;
    for (int other = 0; other < shared.compared; ++other) better += shared.keys[other] > key;
    if (better < leaving) shared.units[atomicAdd(&shared.taken, 1)] = unit_of_key(key);
  }
  __syncthreads();
  for (int i = thread; i < count; i += threads) {
    const std::int32_t unit = shared.units[i];
    int before = 0;
    for (int other = 0; other < count; ++other) before += shared.units[other] < unit;
    units[before] = unit;
  }
  __syncthreads();
}

}  // namespace freekv::device
