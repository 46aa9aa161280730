// The heads of a layer that select as one, on a device: flagged together, and pooled once more.
#pragma once

#include <cstdint>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/policies/pooling.hpp>

namespace freekv::device {

struct select_by_layer_tuning {
  int flag_threads = 32;  ///< of a block that flags a layer: a warp, which votes
  int registers = 64;     ///< of a thread at most
  constexpr bool valid() const { return flag_threads == 32 && valid_block(tile_units, registers); }
};
inline constexpr select_by_layer_tuning select_by_layer_default{};
static_assert(select_by_layer_default.valid());

/// Flags all retrieving heads of an entry if one of them is, as they select together.
template <class State>
__global__ void flag_layer(State s, step_view step) {
  const int nth = block_x(), thread = thread_x();
  if (nth >= step.size() || step.entries[nth].phase != step_phase::decode) return;
  const std::uint8_t* const corrected = s.corrected + s.head_index(step.entries[nth].sequence, 0);
  int flagged = 0;
  for (int head = thread; head < s.heads.kv; head += select_by_layer_default.flag_threads)
    flagged |= corrected[head];
  if (!__any_sync(0xffffffffu, flagged)) return;
  for (int head = thread; head < s.heads.kv; head += select_by_layer_default.flag_threads)
    if (flag_with_layer(s, step.entries[nth].sequence, head)) atomicAdd(s.flagged_count, 1);
}

/// Pools once more a tile of what the retrieving heads of a layer have pooled, each head's as one row.
template <class State, class Pooling>
__global__ void pool_heads(State s, Pooling pooling, step_view step, selection_scratch scratch,
                           selection_job job) {
  extern __shared__ float head_log_sums[];  // (kv heads)
  const int tile = block_x(), thread = thread_x();
  const bool for_next = blockIdx.z != 0;
  const int nth = block_y(), heads = retrieving_before(s, s.heads.kv);
  if (nth >= step.size()) return;
  const row_candidates candidates = candidates_of(s, step.entries[nth], first_retrieving(s), job);
  const int count = candidates.count(for_next), j = tile * tile_units + thread;
  if (tile * tile_units >= count || count <= job.select_all_up_to) return;
  const float* const rows = scratch.pooled_of(for_next, nth, 0);
  if constexpr (softmax_pooling<Pooling>) {
    for (int g = thread / 32; g < heads; g += threads_x() / 32) {
      const float sum =
          log_sum_of(scratch.pooled_log_sums_of(for_next, nth, g), rows + g * scratch.stride, count, count);
      if (thread % 32 == 0) head_log_sums[g] = sum;
    }
    __syncthreads();
  }
  if (j < count)
    scratch.layer_scores_of(for_next, nth)[j] =
        clamp_score(pooling.pool(scalar_team{}, row_scores{rows, scratch.stride, head_log_sums, heads}, j));
}

/// Flags the layer's heads before they are scored to correct.
template <class State>
void launch_flag_layer(const State& s, const step_view& step, cudaStream_t stream) {
  launch("flagging a layer", {step.bounds.entries, select_by_layer_default.flag_threads, stream},
         flag_layer<State>, s, step);
}
/// Pools what the layer's heads have pooled by `Pooling`.
template <class Pooling, class State>
void launch_pool_heads(const State& s, const step_view& step, const selection_scratch& scratch,
                       const selection_job& job, cudaStream_t stream) {
  using of_heads = pooling_of_heads<Pooling>;
  const dim3 tiles(static_cast<unsigned>(scratch.tiles), static_cast<unsigned>(step.bounds.entries), 2);
  launch("pool of heads", {tiles, tile_units, stream, to_size(s.heads.kv) * sizeof(float)},
         pool_heads<State, of_heads>, s, of_heads{}, step, scratch, job);
}

}  // namespace freekv::device
