// Selection among pooled scores by one block, with the order of the best and their masses in shared memory.
#pragma once

#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/favour_held.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/match_by_warp.cuh>
#include <freekv/backend/cuda/radix_select.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/policies/selection.hpp>
#include <type_traits>

namespace freekv::device {

struct block_selection_tuning {
  int threads = 256;  ///< of a block
  /// units that a selection by mass has the choice of: their order is kept in a block's memory
  int most_by_mass = 1024;
  constexpr bool valid() const { return threads >= 256 && most_by_mass <= 4096; }
};
inline constexpr block_selection_tuning block_selection_default{};
static_assert(block_selection_default.valid());

/// Shared memory of a block that selects.
template <bool Masses>
struct select_storage {
  typename radix_select<block_selection_default.threads>::storage radix;
  match_storage matching;
  listed_items listed;
  int items;
};
template <>
struct select_storage<true> : select_storage<false> {
  // Aligned, so that what is read of them at a time is of nothing else.
  alignas(16) float warp_most[block_selection_default.threads / 32];
  alignas(16) float warp_sum[block_selection_default.threads / 32];
  float mass[block_selection_default.most_by_mass];          // by falling score
  std::int16_t place[block_selection_default.most_by_mass];  // of each unit of the list, ascending
  int kept;
};
/// Shared memory of a block that selects and favours held units.
template <bool Masses>
struct favouring_storage : select_storage<Masses> {
  favour_storage favour;
};
template <class Selection, bool Masses>
using select_storage_of = std::conditional_t<favours_held<Selection>, favouring_storage<Masses>,
                                             select_storage<Masses || selection_by_mass<Selection>>>;

/// A head's pooled scores, and over its temperature.
struct tempered_scores {
  const float* pooled;
  float factor = 1.0f;
  __device__ float operator[](int i) const { return freekv::detail::tempered_score(pooled[i], factor); }
  __device__ tempered_scores operator+(int i) const { return {pooled + i, factor}; }
};

/// The log-sum-exp of `count` scores, the same on all threads of the block.
template <class Scores, class Storage>
__device__ log_sum_exp log_sum_of_all(const Scores& scores, int count, Storage& shared) {
  constexpr int warps = block_selection_default.threads / 32;
  const int warp = thread_x() / 32, tiles = (count + tile_units - 1) / tile_units;
  const int each = (tiles + warps - 1) / warps;
  log_sum_exp log_sum;
  for (int i = warp * each; i < min((warp + 1) * each, tiles); ++i)
    log_sum.add(log_sum_of_tile(scores + i * tile_units, min(tile_units, count - i * tile_units)));
  if (threadIdx.x % 32 == 0) {
    shared.warp_most[warp] = log_sum.max;
    shared.warp_sum[warp] = log_sum.sum;
  }
  __syncthreads();
  log_sum = {};
  for (int i = 0; i < warps; ++i) log_sum.add(log_sum_exp{shared.warp_most[i], shared.warp_sum[i]});
  return log_sum;
}

/// Keys of candidates, of which the larger are better; a pinned one's is less than all others.
struct candidate_keys {
  const float* pooled;
  const row_candidates& candidates;

  __device__ std::uint32_t operator()(int i) const { return order_bits(pooled[i]); }
  /// Pinned candidates among the `count` from `begin` on, which have no part in what is pooled: sets their
  /// keys to 0.
  __device__ void amend(std::uint32_t* keys, int begin, int count) const {
#pragma unroll 1
    for (int i = thread_x(); i < candidates.pinned.count; i += threads_x()) {
      const int j = candidates.pinned.units[i] - candidates.first - begin;
      if (j >= 0 && j < count && keys[j] == order_bits(-infinity)) keys[j] = 0;
    }
  }
};

/// Selects among the first `count` candidates that are not pinned, to `units`, ascending; returns how many,
/// on all threads.
template <class Selection, class Storage>
__device__ int select_unpinned(const Selection& selection, const tempered_scores& tempered,
                               const row_candidates& candidates, int count, int k, std::int32_t* units,
                               Storage& shared) {
  const int thread = thread_x(), threads = threads_x();
  const float* const pooled = tempered.pooled;
  const int first = candidates.first, most = selection.count(candidates.unpinned(count), k);
  const radix_select<block_selection_default.threads> select(shared.radix);
  select.largest(candidate_keys{pooled, candidates}, count, most,
                 [&](int nth, int i) { units[nth] = first + i; });
  __syncthreads();
  if constexpr (selection_by_mass<Selection>) {
    if (most == 0) return 0;
    const log_sum_exp all = log_sum_of_all(tempered, count, shared);
    const auto key = [&](int i) { return ordered_key(pooled[units[i] - first], units[i]); };
    for (int i = thread; i < most; i += threads) {
      int better = 0;
      for (int other = 0; other < most; ++other) better += key(other) > key(i);
      shared.place[i] = static_cast<std::int16_t>(better);
      shared.mass[better] = all.share(tempered[units[i] - first]);
    }
    __syncthreads();
    if (thread == 0) {
      float taken = 0.0f;
      int kept = 0;
      while (kept < most) {
        taken += shared.mass[kept++];
        if (selection.enough(taken)) break;
      }
      shared.kept = kept;
      int written = 0;
      for (int i = 0; i < most; ++i)
        if (shared.place[i] < kept) units[written++] = units[i];
    }
    __syncthreads();
    return shared.kept;
  }
  return most;
}

/// Selects among the first `count` candidates, and the pinned ones besides, to `units`, ascending; returns
/// how many, on all threads. `held`: units elsewhere that a selection may favour.
template <class Selection, class Storage>
__device__ int select_best(const Selection& selection, const tempered_scores& scores,
                           const row_candidates& candidates, int count, int k, int select_all_up_to,
                           const held_units& held, std::int32_t* units, Storage& shared) {
  const int thread = thread_x(), threads = threads_x();
  const unit_list& pinned = candidates.pinned;
  if (candidates.unpinned(count) <= select_all_up_to) {
#pragma unroll 1
    for (int i = thread; i < count; i += threads) units[i] = candidates.first + i;
    __syncthreads();
    return count;
  }
  const int chosen = select_unpinned(selection, scores, candidates, count, k, units, shared);
  if constexpr (favours_held<Selection>)
    favour_held(selection.favour(), held, scores.pooled, candidates, count, units, chosen, shared.favour);
  if (thread == 0)  // from behind, so that nothing is overwritten before it has moved
    for (int at = chosen + pinned.count - 1, i = chosen - 1, j = pinned.count - 1; j >= 0; --at)
      units[at] = i >= 0 && units[i] > pinned.units[j] ? units[i--] : pinned.units[j--];
  __syncthreads();
  return chosen + pinned.count;
}

}  // namespace freekv::device
