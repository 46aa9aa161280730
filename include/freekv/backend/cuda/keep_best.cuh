// The first of two stages of scoring: the least candidate that a coarse summary keeps.
#pragma once

#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/block_selection.cuh>
#include <freekv/backend/cuda/radix_select.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>

namespace freekv::device {

struct keep_tuning {
  int threads = 256;   ///< of a block
  int registers = 64;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr keep_tuning keep_default{};
static_assert(keep_default.valid());

/// Finds the least candidate of a row that a coarse summary keeps, by what is pooled of its scores. As many
/// candidates as `job` says, or fewer, are all kept.
template <class State, class Summary>
__global__ void keep_best(State s, Summary summary, step_view step, selection_scratch scratch,
                          selection_job job) {
  __shared__ typename radix_select<keep_default.threads>::storage shared;
  __shared__ unsigned long long least;
  const int row = block_x(), nth = block_y();
  const bool for_next = blockIdx.z != 0;
  if (nth >= step.size()) return;
  const row_candidates candidates = candidates_of(s, step.entries[nth], scratch.head_of(row), job);
  const int count = candidates.count(for_next), unpinned = candidates.unpinned(count);
  const bool all = unpinned <= job.select_all_up_to;
  if (threadIdx.x == 0) least = all ? 0 : ~0ull;
  __syncthreads();
  if (!all) {
    const float* const pooled = scratch.pooled_of(for_next, nth, pooled_row(s, job, row));
    const radix_select<keep_default.threads> select(shared);
    select.largest(candidate_keys{pooled, candidates}, count, summary.kept(unpinned, s.budget.selected_units),
                   [&](int, int i) { atomicMin(&least, ordered_key(pooled[i], candidates.first + i)); });
    __syncthreads();
  }
  if (threadIdx.x == 0) scratch.least_of(for_next, nth, row) = least;
}
template <class State, class Summary>
void launch_keep(const State& s, const Summary& summary, const step_view& step,
                 const selection_scratch& scratch, const selection_job& job, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(scratch.rows()), static_cast<unsigned>(step.bounds.entries), 2);
  launch("choice of what is kept", {rows, keep_default.threads, stream}, keep_best<State, Summary>, s,
         summary, step, scratch, job);
}

}  // namespace freekv::device
