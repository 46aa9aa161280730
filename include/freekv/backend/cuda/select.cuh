// Selection on the device, and as its epilogue what the selected slots lack: one block a KV head of a
// sequence, in a launch of its own or as the last block that scores.
#pragma once

#include <cstdint>
#include <freekv/algorithms/correct_selection.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/block_selection.cuh>
#include <freekv/backend/cuda/list_missing.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/selection.hpp>
#include <type_traits>

namespace freekv::device {

struct select_tuning {
  int registers = 128;  ///< of a thread at most, of the blocks of block_selection.cuh
  constexpr bool valid() const { return valid_block(block_selection_default.threads, registers); }
};
inline constexpr select_tuning select_default{};
static_assert(select_default.valid());

/// Stands in for corrections that judge by queries: `append` has set the flags.
struct already_flagged {};

/// Flags a head whose selection has too little of the mass, and corrects it; returns how many are selected
/// then, and in `corrected` whether it is, on all threads of the block. `pooled` are scores of `candidates`
/// units from `first` on.
template <class Correction, class Storage>
__device__ int correct_by_mass(const Correction& correction, const float* pooled, int first, int candidates,
                               const selected_and_best& units, bool& corrected, Storage& shared) {
  const log_sum_exp all = log_sum_of_all(pooled, candidates, shared);
  if (threadIdx.x == 0) {
    const auto mass_of = [&](const std::int32_t* of, int count) {
      float sum = 0.0f;
      for (int i = 0; i < count; ++i) sum += all.share(pooled[of[i] - first]);
      return sum;
    };
    shared.kept = correct_selection(correction, units, corrected, mass_of, [&](std::int32_t unit) {
      return ordered_key(pooled[unit - first], unit);
    });
    shared.items = corrected;
  }
  __syncthreads();
  corrected = shared.items != 0;
  const int count = shared.kept;
  __syncthreads();  // both are free again
  return count;
}

/// Stands in for the selection where each query head has selected for itself: the KV head takes the union.
struct union_of_query_heads {};

/// Selects for one query head of a step by itself: to correct for this step and for the next, to speculate
/// for the next.
template <class State, class Selection>
__global__ void select_by_query_head(State s, Selection selection, step_view step, selection_scratch scratch,
                                     selection_job job) {
  __shared__ select_storage_of<Selection, false> shared;
  const int row = block_x(), nth = block_y();
  if (nth >= step.size()) return;
  const row_candidates candidates = candidates_of(s, step.entries[nth], scratch.head_of(row), job);
  if (!candidates.selects) return;
  const int head = scratch.head_of(row);
  const std::size_t at_head = s.head_index(step.entries[nth].sequence, head);
  const unit_union before = s.selected_union(step.entries[nth].sequence, head);
  held_units held{
      {before.units, s.selected_count[at_head]}, before.masks, before.words, row % scratch.sizes.selecting};
  for (int time = job.time == selection_time::correct ? 0 : 1; time < 2; ++time) {
    const bool for_next = time == 1;
    const int count = select_best(
        selection,
        {scratch.pooled_of(for_next, nth, row), freekv::detail::per_temperature(selection, s.layer, head)},
        candidates, candidates.count(for_next), s.budget.selected_units, job.select_all_up_to,
        for_next ? held : held_units{}, scratch.list_of(for_next, nth, row), shared);
    if (!for_next) held = {{scratch.list_of(false, nth, row), count}};
    if (threadIdx.x == 0) scratch.list_count_of(for_next, nth, row) = count;
    __syncthreads();  // the shared memory is free again
  }
}

/// Merges what the query heads of a KV head have selected; returns how many units that is, on all threads of
/// the block.
template <class Storage>
__device__ int merge_query_heads(const selection_scratch& scratch, bool for_next, int nth, int head,
                                 const unit_union& all, Storage& shared) {
  if (threadIdx.x == 0) {
    int count = 0;
    for (int g = 0; g < scratch.sizes.selecting; ++g) {
      const int row = head * scratch.sizes.selecting + g;
      count = merge_selections(all, count, scratch.list_of(for_next, nth, row),
                               scratch.list_count_of(for_next, nth, row), g);
    }
    shared.items = count;
  }
  __syncthreads();
  const int count = shared.items;
  __syncthreads();  // it is free again
  return count;
}

/// Leaves what a block has listed to a kernel behind it.
struct recall_later {
  template <class State>
  __device__ recall_item* room(const State&, const selection_scratch& scratch, int, int, int missing) const {
    return scratch.items + atomicAdd(scratch.item_count, missing);
  }
  template <class State>
  __device__ void operator()(const State&, const listed_items&) const {}
};

/// Shared memory of a block that selects by `Selection` and corrects by `Correction`.
template <class Selection, class Correction>
using select_storage_for = select_storage_of<Selection, !std::is_same_v<Correction, already_flagged>>;

/// Selection of one KV head of a step. To correct: for this step and, by the same scores, for the next; then
/// what it has selected is what it attends to. To speculate: for the next step, unless a
/// correction has done so. With `union_of_query_heads` for a selection its query heads have selected.
template <class Selection, class Residency, class Correction, class Recall>
struct select_and_recall {
  Selection selection;
  Residency residency;
  Correction correction;
  Recall recall;
  using storage = select_storage_for<Selection, Correction>;
  static constexpr int shared_bytes = static_cast<int>(sizeof(storage));
  static constexpr bool judges = !std::is_same_v<Correction, already_flagged>;
  static constexpr bool merges = std::is_same_v<Selection, union_of_query_heads>;

  /// Selects and recalls by a block, with its shared memory; `nth` is the entry's number. The candidates'
  /// scores are pooled.
  template <class State>
  __device__ void operator()(const State& s, const step_entry& entry, int nth, int head,
                             const row_candidates& candidates, const selection_scratch& scratch,
                             const selection_job& job, storage& shared) const {
    if (entry.phase != step_phase::decode) return;
    const bool corrects = job.time == selection_time::correct;
    if (corrects ? !candidates.selects : s.kind_of(head) != layer_kind::retrieval) return;
    const int thread = thread_x();
    const std::size_t at_head = s.head_index(entry.sequence, head);
    const unit_union selected = s.selected_union(entry.sequence, head);
    const unit_union next_selected = s.next_selected_union(entry.sequence, head);
    const auto pooled = [&](bool for_next) {
      return job.one_selection_per_layer ? scratch.layer_scores_of(for_next, nth)
                                         : scratch.pooled_of(for_next, nth, head);
    };
    // `to` is not where the `held` units are, of which there are none for this step.
    const auto select = [&](bool for_next, int held, const unit_union& to) {
      if constexpr (merges)
        return merge_query_heads(scratch, for_next, nth, head, to, shared);
      else
        return select_best(selection,
                           {pooled(for_next), freekv::detail::per_temperature(selection, s.layer, head)},
                           candidates, candidates.count(for_next), s.budget.selected_units,
                           job.select_all_up_to, {{selected.units, held}}, to.units, shared);
    };
    const auto recall_missing = [&](bool before_attention) {
      if (!s.keeps_slots) return;
      recall(s, list_missing(
                    s, residency, entry, head, before_attention,
                    [&](int missing) { return recall.room(s, scratch, nth, head, missing); }, shared));
    };
    bool corrected = s.corrected[at_head] != 0;
    int now = s.selected_count[at_head], next = s.next_selected_count[at_head];
    if (candidates.selects) {
#pragma unroll 1  // a selection is long, and the same for this step and for the next
      for (int time = corrects ? 0 : 1; time < 2; ++time) {
        const bool for_next = time == 1;
        unit_union to = for_next ? next_selected : selected;
        if constexpr (judges)
          if (!for_next) to = {scratch.best_of(nth, head)};
        const int count = select(for_next, for_next ? now : 0, to);
        if (for_next) {
          next = count;
        } else if constexpr (judges) {
          now = correct_by_mass(correction, pooled(false), candidates.first, candidates.now,
                                {selected.units, to.units, now, count}, corrected, shared);
        } else {
          now = count;
        }
      }
    }
    if (!corrects) {
      copy_units(next_selected, next, selected);
      now = next;
    }
    __syncthreads();
    if (thread == 0) {
      if constexpr (judges)
        if (corrects && corrected && s.corrected[at_head] == 0) {
          s.corrected[at_head] = 1;
          atomicAdd(s.flagged_count, 1);
        }
      s.selected_count[at_head] = now;
      if (corrects) s.next_selected_count[at_head] = next;
    }
    __syncthreads();
    if (!corrects || corrected) recall_missing(corrects);
    if (!corrects) return;
    copy_units(selected, now, s.attended_union(entry.sequence, head));
    if (thread == 0) s.attended_count[at_head] = now;
  }
};

/// Selects in a launch of its own, behind that which has scored and pooled.
template <class State, class Select>
__global__ void select_units(State s, Select select, step_view step, selection_scratch scratch,
                             selection_job job) {
  __shared__ typename Select::storage shared;
  const int head = block_x(), nth = block_y();
  if (nothing_to_select(s, job) || nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const row_candidates candidates = candidates_of(s, entry, head, job);
  select(s, entry, nth, head, candidates, scratch, job, shared);
}

/// Launches the query heads' own selections, before `launch_select` of `union_of_query_heads`.
template <class State, class Selection>
void launch_select_by_query_head(const State& s, const Selection& selection, const step_view& step,
                                 const selection_scratch& scratch, const selection_job& job,
                                 cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(scratch.rows()), static_cast<unsigned>(step.bounds.entries));
  launch("selection of query heads", {rows, block_selection_default.threads, stream},
         select_by_query_head<State, Selection>, s, selection, step, scratch, job);
}
/// Launches the selection of a step's KV heads; `correction` judges by masses, or is `already_flagged`.
template <class State, class Selection, class Residency, class Correction>
void launch_select(const State& s, const Selection& selection, const Residency& residency,
                   const Correction& correction, const step_view& step, const selection_scratch& scratch,
                   const selection_job& job, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(s.heads.kv), static_cast<unsigned>(step.bounds.entries));
  using select = select_and_recall<Selection, Residency, Correction, recall_later>;
  launch("select", {rows, block_selection_default.threads, stream}, select_units<State, select>, s,
         select{selection, residency, correction, {}}, step, scratch, job);
}

}  // namespace freekv::device
