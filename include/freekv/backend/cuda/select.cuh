// Selection on the device, and as its epilogue what the selected slots lack: one block a KV head of a sequence,
// in a launch of its own or as the last block that scores.
#pragma once

#include <cstdint>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/diff_by_warp.cuh>
#include <freekv/backend/cuda/favour_held.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/radix_select.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/selection.hpp>
#include <type_traits>

namespace freekv::device {

struct select_tuning {
  int threads = 256;    ///< of a block
  int registers = 128;  ///< of a thread at most
  int most_by_mass =
      1024;  ///< units that a selection by mass has the choice of: their order is kept in a block's memory
  constexpr bool valid() const {
    return valid_block(threads, registers) && threads >= 256 && most_by_mass <= 4096;
  }
};
inline constexpr select_tuning select_default{};
static_assert(select_default.valid());

/// What a block that selects has in shared memory.
template <bool Masses>
struct select_storage {
  typename radix_select<select_default.threads>::storage radix;
  diff_storage diff;
  listed_items listed;
  int items;
};
template <>
struct select_storage<true> : select_storage<false> {
  float warp_most[select_default.threads / 32], warp_sum[select_default.threads / 32];
  float mass[select_default.most_by_mass];          // by falling score
  std::int16_t place[select_default.most_by_mass];  // of each unit of the list, ascending
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

/// The log-sum-exp of `count` pooled scores, the same on all threads of the block.
template <class Storage>
__device__ log_sum_exp mass_of_all(const float* pooled, int count, Storage& shared) {
  constexpr int warps = select_default.threads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, chunks = (count + chunk_units - 1) / chunk_units;
  const int each = (chunks + warps - 1) / warps;
  log_sum_exp mass;
  for (int i = warp * each; i < min((warp + 1) * each, chunks); ++i)
    mass.add(mass_of_chunk(pooled + i * chunk_units, min(chunk_units, count - i * chunk_units)));
  if (threadIdx.x % 32 == 0) {
    shared.warp_most[warp] = mass.max;
    shared.warp_sum[warp] = mass.sum;
  }
  __syncthreads();
  mass = {};
  for (int i = 0; i < warps; ++i) mass.add(log_sum_exp{shared.warp_most[i], shared.warp_sum[i]});
  return mass;
}

/// Keys of candidates, a float each, of which the larger are better; a pinned one's is less than all others.
FREEKV_HD inline std::uint32_t candidate_key(const row_candidates& candidates, int j, float score) {
  return score == -infinity && candidates.is_pinned(j) ? 0u : order_bits(score);
}

/// Selects among the first `count` candidates that are not pinned, to `units`, ascending; returns how many, on all
/// threads.
template <class Selection, class Storage>
__device__ int select_unpinned(const Selection& selection, const float* pooled,
                               const row_candidates& candidates, int count, int k, std::int32_t* units,
                               Storage& shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int first = candidates.first, most = selection.count(candidates.unpinned(count), k);
  const radix_select<select_default.threads> select(shared.radix);
  select.largest([&](int i) { return candidate_key(candidates, i, pooled[i]); }, count, most,
                 [&](int nth, int i) { units[nth] = first + i; });
  __syncthreads();
  if constexpr (selection_by_mass<Selection>) {
    if (most == 0) return 0;
    const log_sum_exp all = mass_of_all(pooled, count, shared);
    const auto key = [&](int i) { return ordered_key(pooled[units[i] - first], units[i]); };
    for (int i = thread; i < most; i += threads) {
      int better = 0;
      for (int other = 0; other < most; ++other) better += key(other) > key(i);
      shared.place[i] = static_cast<std::int16_t>(better);
      shared.mass[better] = all.share(pooled[units[i] - first]);
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

/// Selects among the first `count` candidates, and the pinned ones besides, to `units`, ascending; returns how many, on
/// all threads. `held`: units elsewhere that a selection may favour.
template <class Selection, class Storage>
__device__ int select_best(const Selection& selection, const float* pooled, const row_candidates& candidates,
                           int count, int k, int select_all_up_to, const held_units& held,
                           std::int32_t* units, Storage& shared) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const unit_list& pinned = candidates.pinned;
  if (candidates.unpinned(count) <= select_all_up_to) {
    for (int i = thread; i < count; i += threads) units[i] = candidates.first + i;
    __syncthreads();
    return count;
  }
  const int chosen = select_unpinned(selection, pooled, candidates, count, k, units, shared);
  if constexpr (favours_held<Selection>)
    favour_held(selection.favour(), held, pooled, candidates, count, units, chosen, shared.favour);
  if (thread == 0)  // from behind, so that nothing is overwritten before it has moved
    for (int at = chosen + pinned.count - 1, i = chosen - 1, j = pinned.count - 1; j >= 0; --at)
      units[at] = i >= 0 && units[i] > pinned.units[j] ? units[i--] : pinned.units[j--];
  __syncthreads();
  return chosen + pinned.count;
}

/// Stands in for corrections that judge by queries: `append` has set the flags.
struct already_flagged {};

/// What a head of a step has selected, and what it would now.
struct selected_and_best {
  std::int32_t* selected = nullptr;
  const std::int32_t* best = nullptr;
  int count = 0, best_count = 0;
};

/// Exchanges units of `pages.selected` for those of `pages.best` that it misses until `correction` is content; returns how
/// many are selected then. By one thread. (docs/contract.md, 8.3)
template <class Correction, class Mass, class Value>
__device__ int exchange_units(const Correction& correction, const selected_and_best& pages, float of_best,
                              const Mass& mass_of, const Value& value) {
  int count = pages.count;
  while (correction.flags(selection_masses{mass_of(pages.selected, count), of_best})) {
    std::int32_t gain = -1;
    for (int i = 0; i < pages.best_count; ++i)
      if (!unit_list{pages.selected, count}.has(pages.best[i]) &&
          (gain < 0 || value(pages.best[i]) > value(gain)))
        gain = pages.best[i];
    if (gain < 0) break;
    int loss = -1;
    for (int i = 0; i < count; ++i)
      if (!unit_list{pages.best, pages.best_count}.has(pages.selected[i]) &&
          (loss < 0 || value(pages.selected[i]) < value(pages.selected[loss])))
        loss = i;
    // In its place among those that stay.
    int at = loss < 0 ? count++ : loss;
    for (; at > 0 && pages.selected[at - 1] > gain; --at) pages.selected[at] = pages.selected[at - 1];
    for (; at + 1 < count && pages.selected[at + 1] < gain; ++at) pages.selected[at] = pages.selected[at + 1];
    pages.selected[at] = gain;
  }
  return count;
}

/// Flags a head whose selection has too little of the mass, and corrects it; returns how many are selected then, and in
/// `corrected` whether it is, on all threads of the block. `pooled` are scores of `candidates` units from `first` on.
template <class Correction, class Storage>
__device__ int correct_by_mass(const Correction& correction, const float* pooled, int first, int candidates,
                               const selected_and_best& pages, bool& corrected, Storage& shared) {
  const log_sum_exp all = mass_of_all(pooled, candidates, shared);
  if (threadIdx.x == 0) {
    const auto mass_of = [&](const std::int32_t* units, int count) {
      float sum = 0.0f;
      for (int i = 0; i < count; ++i) sum += all.share(pooled[units[i] - first]);
      return sum;
    };
    bool same = pages.count == pages.best_count;
    for (int i = 0; same && i < pages.count; ++i) same = pages.selected[i] == pages.best[i];
    const float of_best = mass_of(pages.best, pages.best_count);
    shared.kept = pages.count;
    shared.items =
        corrected ||
        (!same && correction.flags(selection_masses{mass_of(pages.selected, pages.count), of_best}));
    if (shared.items != 0 && !corrected && correction.exchanges_pages()) {
      shared.kept = exchange_units(correction, pages, of_best, mass_of, [&](std::int32_t unit) {
        return ordered_key(pooled[unit - first], unit);
      });
    } else if (shared.items != 0) {
      for (int i = 0; i < pages.best_count; ++i) pages.selected[i] = pages.best[i];
      shared.kept = pages.best_count;
    }
  }
  __syncthreads();
  corrected = shared.items != 0;
  const int count = shared.kept;
  __syncthreads();  // both are free again
  return count;
}

/// Brings the slots of a head up to date with what it has selected, and lists what is to be copied there: where `room(missing)`
/// says that so many items go, which one thread asks. By one block: its first warp, or one thread where that has no room for
/// so many units. Returns the items on all threads.
template <class State, class Residency, class Room, class Storage>
__device__ listed_items list_missing(const State& s, const Residency& residency, const step_entry& entry,
                                     int head, bool before_attention, const Room& room, Storage& shared) {
  constexpr unsigned all_lanes = 0xffffffffu;
  const std::size_t row = s.head_index(entry.sequence, head), first = s.selection(entry.sequence, head);
  const std::int32_t* const units = s.selected + first;
  std::int32_t* const slot_of = s.slot_of + first;
  const int count = s.selected_count[row], ring_begin = s.slots.ring_begin(entry.after(), s.page.tokens);
  const slot_contents slots = s.slots_of(entry.sequence, head);
  const std::int32_t nth = s.selections[row] + 1;
  // Where each item goes among the row's does not matter: each has a slot of its own.
  const auto list = [&](int at, std::int32_t unit, int slot) {
    const bool in_ring = s.page_of(unit) >= ring_begin;
    shared.listed.items[at] = {entry.sequence, head, unit, slot, in_ring};
    return in_ring ? 1 : 0;
  };
  const auto count_recalled = [&](int missing, int promoted) {
    s.promoted[row] += promoted;
    s.recalled[row] += missing - promoted;
    if (before_attention) s.recalled_before_attention[row] = s.recalled[row];
  };
  __syncthreads();  // all have read how many selections there have been
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) s.selections[row] = nth;
  if (diff_storage::has_room(count, slots.count)) {
    if (thread < 32) {
      int missing = 0, promoted = 0;
      diff_by_warp(
          residency, units, count, slots, nth, shared.diff,
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

/// Finds the least candidate of a row that a coarse summary keeps, by what is pooled of its scores. As many candidates as
/// `job` says, or fewer, are all kept.
template <class State, class Summary>
__global__ void keep_best(State s, Summary summary, step_view step, selection_scratch scratch,
                          selection_job job) {
  __shared__ typename radix_select<select_default.threads>::storage shared;
  __shared__ unsigned long long least;
  const int row = static_cast<int>(blockIdx.x), nth = static_cast<int>(blockIdx.y);
  const bool for_next = blockIdx.z != 0;
  if (nth >= step.size()) return;
  const row_candidates candidates = candidates_of(s, step.entries[nth], scratch.head_of(row), job);
  const int count = candidates.count(for_next), unpinned = candidates.unpinned(count);
  const bool all = unpinned <= job.select_all_up_to;
  if (threadIdx.x == 0) least = all ? 0 : ~0ull;
  __syncthreads();
  if (!all) {
    const float* const pooled = scratch.pooled_of(for_next, nth, pooled_row(s, job, row));
    const radix_select<select_default.threads> select(shared);
    select.largest([&](int i) { return candidate_key(candidates, i, pooled[i]); }, count,
                   summary.kept(unpinned, s.budget.selected_units),
                   [&](int, int i) { atomicMin(&least, ordered_key(pooled[i], candidates.first + i)); });
    __syncthreads();
  }
  if (threadIdx.x == 0) scratch.least_of(for_next, nth, row) = least;
}
template <class State, class Summary>
void launch_keep(const State& s, const Summary& summary, const step_view& step,
                 const selection_scratch& scratch, const selection_job& job, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(scratch.rows()), static_cast<unsigned>(step.bounds.entries), 2);
  launch("choice of what is kept", {rows, select_default.threads, stream}, keep_best<State, Summary>, s,
         summary, step, scratch, job);
}

/// Pins the units of a KV head that are worth most, where an entry selects anew after a prompt or a truncation.
template <class State>
__global__ void pin_units(State s, step_view step, selection_job job) {
  __shared__ typename radix_select<select_default.threads>::storage shared;
  const int head = static_cast<int>(blockIdx.x), nth = static_cast<int>(blockIdx.y);
  if (nth >= step.size() || step.entries[nth].kept_row >= 0) return;
  const step_entry& entry = step.entries[nth];
  const row_candidates candidates = candidates_of(s, entry, head, job);
  if (!candidates.selects) return;
  const std::size_t row = s.head_index(entry.sequence, head);
  const int count = min(s.pins, candidates.now);
  const auto worth = [&](int i) {
    const int unit = candidates.first + i, page = s.page_of(unit);
    return s.pin_worth_of(s.store_page(entry.sequence, page), head, unit - page * s.units_per_page);
  };
  const radix_select<select_default.threads> select(shared);
  select.largest([&](int i) { return order_bits(worth(i)); }, candidates.now, count,
                 [&](int i, int j) {
                   s.pinned[row * static_cast<std::size_t>(s.pins) + static_cast<std::size_t>(i)] =
                       candidates.first + j;
                 });
  __syncthreads();  // all have read how many there were
  if (threadIdx.x == 0) s.pinned_count[row] = count;
}
template <class State>
void launch_pin_units(const State& s, const step_view& step, const selection_job& job, cudaStream_t stream) {
  const dim3 heads(static_cast<unsigned>(s.heads.kv), static_cast<unsigned>(step.bounds.entries));
  launch("pinning", {heads, select_default.threads, stream}, pin_units<State>, s, step, job);
}

/// Stands in for the selection where each query head has selected for itself: the KV head takes the union.
struct union_of_query_heads {};

/// One query head of a step selects for itself: to correct for this step and for the next, to speculate for the next.
template <class State, class Selection>
__global__ void select_by_query_head(State s, Selection selection, step_view step, selection_scratch scratch,
                                     selection_job job) {
  __shared__ select_storage_of<Selection, false> shared;
  const int row = static_cast<int>(blockIdx.x), nth = static_cast<int>(blockIdx.y);
  if (nth >= step.size()) return;
  const row_candidates candidates = candidates_of(s, step.entries[nth], scratch.head_of(row), job);
  if (!candidates.selects) return;
  const int head = scratch.head_of(row);
  const std::size_t of_head = s.head_index(step.entries[nth].sequence, head);
  const unit_union before = s.selected_union(step.entries[nth].sequence, head);
  held_units held{
      {before.units, s.selected_count[of_head]}, before.masks, before.words, row % scratch.sizes.selecting};
  for (int time = job.time == selection_time::correct ? 0 : 1; time < 2; ++time) {
    const bool for_next = time == 1;
    const int count =
        select_best(selection, scratch.pooled_of(for_next, nth, row), candidates, candidates.count(for_next),
                    s.budget.selected_units, job.select_all_up_to, for_next ? held : held_units{},
                    scratch.list_of(for_next, nth, row), shared);
    if (!for_next) held = {{scratch.list_of(false, nth, row), count}};
    if (threadIdx.x == 0) scratch.list_count_of(for_next, nth, row) = count;
    __syncthreads();  // the shared memory is free again
  }
}

/// Unites what the query heads of a KV head have selected; returns how many units that is, on all threads of the block.
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

/// Copies the first `count` units of a list, and who has selected them. By a block.
__device__ inline void copy_units(const unit_union& from, int count, const unit_union& to) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int i = thread; i < count; i += threads) to.units[i] = from.units[i];
  for (int i = thread; i < count * from.words; i += threads) to.masks[i] = from.masks[i];
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

/// One KV head of a step selects. To correct: for this step and, by the same scores, for the next; then, corrected or not,
/// what it has selected is what it attends to. To speculate: for the next step, unless a correction has done so. With
/// `union_of_query_heads` for a selection its query heads have selected.
template <class Selection, class Residency, class Correction, class Recall>
struct head_selection {
  Selection selection;
  Residency residency;
  Correction correction;
  Recall recall;
  using storage = select_storage_for<Selection, Correction>;
  static constexpr int shared_bytes = static_cast<int>(sizeof(storage));
  static constexpr bool judges = !std::is_same_v<Correction, already_flagged>;
  static constexpr bool unites = std::is_same_v<Selection, union_of_query_heads>;

  /// By a block, with its shared memory; `nth` is the entry's number. The candidates' scores are pooled.
  template <class State>
  __device__ void operator()(const State& s, const step_entry& entry, int nth, int head,
                             const row_candidates& candidates, const selection_scratch& scratch,
                             const selection_job& job, storage& shared) const {
    if (entry.phase != step_phase::decode) return;
    const int thread = static_cast<int>(threadIdx.x);
    const std::size_t row = s.head_index(entry.sequence, head);
    const unit_union selected = s.selected_union(entry.sequence, head);
    const unit_union next_selected = s.next_selected_union(entry.sequence, head);
    const auto pooled = [&](bool for_next) {
      return job.one_selection_per_layer ? scratch.layer_scores_of(for_next, nth)
                                         : scratch.pooled_of(for_next, nth, head);
    };
    // `to` is not where the `held` units are, of which there are none for this step.
    const auto select = [&](bool for_next, int held, const unit_union& to) {
      if constexpr (unites)
        return merge_query_heads(scratch, for_next, nth, head, to, shared);
      else
        return select_best(selection, pooled(for_next), candidates, candidates.count(for_next),
                           s.budget.selected_units, job.select_all_up_to, {{selected.units, held}}, to.units,
                           shared);
    };
    const auto recall_missing = [&](bool before_attention) {
      if (!s.keeps_slots) return;
      recall(s, list_missing(
                    s, residency, entry, head, before_attention,
                    [&](int missing) { return recall.room(s, scratch, nth, head, missing); }, shared));
    };
    if (job.time == selection_time::correct) {
      if (candidates.selects) {
        int now;
        bool corrected = s.corrected[row] != 0;
        if constexpr (judges) {
          std::int32_t* const best = scratch.best_of(nth, head);
          const int count = s.selected_count[row], best_count = select(false, 0, {best});
          now = correct_by_mass(correction, pooled(false), candidates.first, candidates.now,
                                {selected.units, best, count, best_count}, corrected, shared);
        } else {
          now = select(false, 0, selected);
        }
        const int next = select(true, now, next_selected);
        if (thread == 0) {
          if constexpr (judges)
            if (corrected && s.corrected[row] == 0) {
              s.corrected[row] = 1;
              atomicAdd(s.flagged_count, 1);
            }
          s.selected_count[row] = now;
          s.next_selected_count[row] = next;
        }
        __syncthreads();
        if (corrected) recall_missing(true);
      }
      const int count = s.selected_count[row];
      copy_units(selected, count,
                 {s.attended + s.selection(entry.sequence, head),
                  s.attended_by + s.masks(entry.sequence, head), s.mask_words});
      if (thread == 0) s.attended_count[row] = count;
      return;
    }
    if (s.kind_of(head) != layer_kind::retrieval) return;
    const int count =
        candidates.selects ? select(true, s.selected_count[row], next_selected) : s.next_selected_count[row];
    copy_units(next_selected, count, selected);
    __syncthreads();
    if (thread == 0) s.selected_count[row] = count;
    __syncthreads();
    recall_missing(false);
  }
};

/// The same in a launch of its own, behind that which has scored and pooled.
template <class State, class Select>
__global__ void select_units(State s, Select select, step_view step, selection_scratch scratch,
                             selection_job job) {
  __shared__ typename Select::storage shared;
  const int head = static_cast<int>(blockIdx.x), nth = static_cast<int>(blockIdx.y);
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  row_candidates candidates;
  if (!nothing_to_select(s, job)) candidates = candidates_of(s, entry, head, job);
  select(s, entry, nth, head, candidates, scratch, job, shared);
}

/// Before `launch_select` of `union_of_query_heads`.
template <class State, class Selection>
void launch_select_by_query_head(const State& s, const Selection& selection, const step_view& step,
                                 const selection_scratch& scratch, const selection_job& job,
                                 cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(scratch.rows()), static_cast<unsigned>(step.bounds.entries));
  launch("selection of query heads", {rows, select_default.threads, stream},
         select_by_query_head<State, Selection>, s, selection, step, scratch, job);
}
/// `correction` judges by masses, or is `already_flagged`.
template <class State, class Selection, class Residency, class Correction>
void launch_select(const State& s, const Selection& selection, const Residency& residency,
                   const Correction& correction, const step_view& step, const selection_scratch& scratch,
                   const selection_job& job, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(s.heads.kv), static_cast<unsigned>(step.bounds.entries));
  using select = head_selection<Selection, Residency, Correction, recall_later>;
  launch("select", {rows, select_default.threads, stream}, select_units<State, select>, s,
         select{selection, residency, correction, {}}, step, scratch, job);
}

}  // namespace freekv::device
