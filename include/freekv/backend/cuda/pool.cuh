// Pooling of rows of scores by many blocks, and behind it, in the last of a row's, what goes on with the row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/last_block.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>
#include <freekv/policies/pooling.hpp>

namespace freekv::device {

struct pool_tuning {
  int threads = 256;     ///< of a block
  int registers = 128;   ///< of a thread at most
  int candidates = 512;  ///< of a block: whole tiles
  constexpr bool valid() const {
    return valid_block(threads, registers) && candidates >= tile_units && candidates % tile_units == 0;
  }
};
inline constexpr pool_tuning pool_default{};
static_assert(pool_default.valid());

/// Pools a part of a row's scores, which lie together for this step's candidates and the next step's; the
/// last block of a row to do so calls `then`; where all candidates are selected, or none, without scores.
/// Other blocks of the row may still look at whether the row selects: `then` does not change that.
template <class State, class Pooling, class Then>
__launch_bounds__(pool_default.threads, 1) __global__
    void pool_parts(State s, Pooling pooling, Then then, step_view step, selection_scratch scratch,
                    selection_job job) {
  alignas(16) extern __shared__ float shared[];
  const int part = block_x(), row = block_y(), nth = block_z();
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const int head = scratch.head_of(row);
  const row_candidates candidates = candidates_of(s, entry, head, job);
  const int count = candidates.most(), first = part * pool_default.candidates;
  const bool chooses = candidates.unpinned(count) > job.select_all_up_to;
  const int parts = chooses ? (count + pool_default.candidates - 1) / pool_default.candidates : 1;
  if (part >= parts) return;
  if (chooses) {
    const int group = query_pooling<Pooling> ? 1 : scratch.selecting_query(s, entry, row).group;
#pragma unroll 1
    for (int time = 0; time < 2; ++time) {
      const bool next = time != 0;
      const int of = candidates.count(next);
      if (of > 0 && candidates.unpinned(of) > job.select_all_up_to)
        pool_row<1>(s, pooling, scratch, job, nth, row, group, first,
                    min(first + pool_default.candidates, of), of, count, next, shared);
    }
    if (!is_last_block(scratch.blocks_scoring_of(false, nth, row), parts,
                       *reinterpret_cast<std::uint32_t*>(shared)))
      return;
  }
  __syncthreads();  // the shared memory is free again
  then(s, entry, nth, head, candidates, scratch, job, *reinterpret_cast<typename Then::storage*>(shared));
}

/// Pools what has been scored by a launch that leaves that to this one, then does what `then` does with each
/// row.
template <class State, class Pooling, class Then>
void launch_pool(const State& s, const Pooling& pooling, const step_view& step,
                 const selection_scratch& scratch, const selection_job& job, cudaStream_t stream,
                 const Then& then) {
  const auto count = [](int n) { return static_cast<unsigned>(n); };
  const int parts = blocks_for(scratch.stride, pool_default.candidates);
  const auto bytes =
      std::max(to_size(scratch.sizes.queries) * sizeof(float), std::size_t{Then::shared_bytes});
  launch("pool",
         {dim3(count(parts), count(scratch.rows()), count(step.bounds.entries)), pool_default.threads, stream,
          bytes},
         pool_parts<State, Pooling, Then>, s, pooling, then, step, scratch, job);
}

}  // namespace freekv::device
