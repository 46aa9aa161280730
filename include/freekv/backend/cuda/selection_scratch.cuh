// Scratch of selection: what scoring, pooling, selecting and recall hand on to one another. Each stream has
// its own.
#pragma once

#include <cstdint>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/algorithms/unit_list.hpp>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/selection.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

/// A unit that a KV head of a sequence lacks, and where it goes.
struct recall_item {
  std::int32_t sequence = 0, head = 0;
  std::int32_t unit = 0;
  std::int32_t slot = 0;       // selected slot
  std::int32_t from_ring = 0;  // else from the store
};

/// Items that are listed, and how many.
struct listed_items {
  recall_item* items = nullptr;
  int count = 0;
};

/// Units that a block scores and pools at a time. Softmaxes are summed tile by tile, in order: what comes
/// out depends on the units alone.
inline constexpr int tile_units = 128;
static_assert(tile_units % 32 == 0);

/// Sizes that a scratch has room for.
struct selection_sizes {
  int entries = 0, kv_heads = 0;
  bool by_query_head = false;  ///< each query head selects for itself
  int selecting = 1;           ///< rows of a KV head that do so
  int queries = 0;             ///< of such a row
  int max_units = 0;           ///< of a sequence
  int row_units = 0;           ///< that such a row selects at most
  int max_selected = 0;        ///< that a KV head has selected at most
  int head_dim = 0, query_width = 0;
  bool one_selection_per_layer = false;  ///< the heads of a layer select as one
  bool two_stages = false;               ///< a coarse summary says what a fine one scores
  int multiprocessors = 1;               ///< of the device
  int shared_bytes = 48 << 10;           ///< that a block may have there
};

/// The scratch of one stream. A row is what selects for itself: a KV head of an entry, or each query head of
/// its group. It has a row of scores for each of its queries, or one alone where queries are pooled.
struct selection_scratch {
  float* scores = nullptr;              // (1, or 2 in two stages, entry, row, queries, stride)
  log_sum_exp* tile_log_sum = nullptr;  // (the same, tiles)
  float* pooled = nullptr;       // (2, entry, row, stride): among this step's candidates and the next step's
  float* queries = nullptr;      // (entry, row, head_dim): pooled ones
  float* prepared = nullptr;     // (entry, row, queries, query_width)
  recall_item* items = nullptr;  // (entries * kv heads * K)
  std::int32_t* item_count = nullptr;         // 0 where nothing is listed that has not been recalled
  std::uint32_t* blocks_recalling = nullptr;  // that have recalled
  std::uint32_t* blocks_scoring = nullptr;    // (2, entry, row): that have scored
  std::int32_t* best = nullptr;               // (entry, kv head, K): of a correction by mass
  // Layers whose heads select together:
  float* layer_scores = nullptr;          // (2, entry, stride): as `pooled`, of all of them
  log_sum_exp* pooled_log_sum = nullptr;  // (2, entry, row, tiles): of `pooled`
  // Query heads that select each for itself:
  std::int32_t* lists = nullptr;        // (2, entry, row, units of a row): what each has selected, ascending
  std::int32_t* list_counts = nullptr;  // (2, entry, row)
  // Two stages:
  unsigned long long* least = nullptr;  // (2, entry, row): the least key of those that are kept; 0: all are
  selection_sizes sizes;
  int tiles = 0;
  std::int64_t stride = 0;

  static selection_scratch carve(carver& memory, const selection_sizes& sizes) {
    selection_scratch s;
    s.sizes = sizes;
    s.tiles = (sizes.max_units + tile_units - 1) / tile_units;
    s.stride = std::int64_t{s.tiles} * tile_units;
    const std::int64_t heads = std::int64_t{sizes.entries} * sizes.kv_heads, rows = heads * sizes.selecting;
    const std::int64_t score_rows = (sizes.two_stages ? 2 : 1) * rows * sizes.queries;
    s.scores = memory.take<float>(to_size(score_rows * s.stride));
    s.tile_log_sum = memory.take<log_sum_exp>(to_size(score_rows * s.tiles));
    s.pooled = memory.take<float>(to_size(2 * rows * s.stride));
    s.queries = memory.take<float>(to_size(rows * sizes.head_dim));
    s.prepared = memory.take<float>(to_size(rows * sizes.queries * sizes.query_width));
    s.items = memory.take<recall_item>(to_size(heads * sizes.max_selected));
    s.item_count = memory.take<std::int32_t>(1);
    s.blocks_recalling = memory.take<std::uint32_t>(1);
    s.blocks_scoring = memory.take<std::uint32_t>(to_size(2 * rows));
    s.best = memory.take<std::int32_t>(to_size(heads * sizes.max_selected));
    if (sizes.one_selection_per_layer) {
      s.layer_scores = memory.take<float>(to_size(2 * std::int64_t{sizes.entries} * s.stride));
      s.pooled_log_sum = memory.take<log_sum_exp>(to_size(2 * rows * s.tiles));
    }
    if (sizes.by_query_head) {
      s.lists = memory.take<std::int32_t>(to_size(2 * rows * sizes.row_units));
      s.list_counts = memory.take<std::int32_t>(to_size(2 * rows));
    }
    if (sizes.two_stages) s.least = memory.take<unsigned long long>(to_size(2 * rows));
    return s;
  }

  /// Sets the counters to 0, before the scratch is used; kernels leave them at 0. And the scores: packs that
  /// are pooled reach behind a row's last.
  void clear(cudaStream_t stream) const {
    const auto zero = [&](auto* counters, std::size_t count) {
      check(cudaMemsetAsync(counters, 0, count * sizeof *counters, stream), "cudaMemsetAsync");
    };
    zero(item_count, 1);
    zero(blocks_recalling, 1);
    zero(blocks_scoring, to_size(2 * std::int64_t{sizes.entries} * rows()));
    zero(scores, to_size((sizes.two_stages ? 2 : 1) * at(sizes.entries, 0) * sizes.queries * stride));
  }

  FREEKV_HD int rows() const { return sizes.kv_heads * sizes.selecting; }
  FREEKV_HD int head_of(int row) const { return row / sizes.selecting; }
  /// The queries that row `row` of an entry selects with.
  template <class State>
  FREEKV_HD group_query selecting_query(const State& s, const step_entry& entry, int row) const {
    return sizes.by_query_head ? s.query_of(entry, head_of(row), row % sizes.selecting)
                               : s.query_of(entry, head_of(row));
  }

  FREEKV_HD std::int64_t at(int entry, int row) const { return std::int64_t{entry} * rows() + row; }
  FREEKV_HD std::int64_t at(bool next, int entry, int row) const {
    return at(next ? sizes.entries + entry : entry, row);
  }
  /// Scores of a row; with `next` those of the next step's candidates, where they are apart.
  FREEKV_HD float* scores_of(bool next, int entry, int row) const {
    return scores + at(next, entry, row) * sizes.queries * stride;
  }
  FREEKV_HD float* query_of(int entry, int row) const { return queries + at(entry, row) * sizes.head_dim; }
  FREEKV_HD float* prepared_of(int entry, int row) const {
    return prepared + at(entry, row) * sizes.queries * sizes.query_width;
  }
  FREEKV_HD log_sum_exp* log_sums_of(bool next, int entry, int row) const {
    return tile_log_sum + at(next, entry, row) * sizes.queries * tiles;
  }
  FREEKV_HD float* pooled_of(bool next, int entry, int row) const {
    return pooled + at(next, entry, row) * stride;
  }
  FREEKV_HD float* layer_scores_of(bool next, int entry) const {
    return layer_scores + (next ? sizes.entries + entry : entry) * stride;
  }
  FREEKV_HD log_sum_exp* pooled_log_sums_of(bool next, int entry, int row) const {
    return pooled_log_sum + at(next, entry, row) * tiles;
  }
  FREEKV_HD std::uint32_t* blocks_scoring_of(bool next, int entry, int row) const {
    return blocks_scoring + at(next, entry, row);
  }
  FREEKV_HD std::int32_t* best_of(int entry, int head) const {
    return best + (std::int64_t{entry} * sizes.kv_heads + head) * sizes.max_selected;
  }
  FREEKV_HD std::int32_t* list_of(bool next, int entry, int row) const {
    return lists + at(next, entry, row) * sizes.row_units;
  }
  FREEKV_HD unsigned long long& least_of(bool next, int entry, int row) const {
    return least[at(next, entry, row)];
  }
  FREEKV_HD std::int32_t& list_count_of(bool next, int entry, int row) const {
    return list_counts[at(next, entry, row)];
  }
};

/// Job of a launch: which heads select, and for when.
struct selection_job {
  selection_time time = selection_time::correct;
  bool every_head = false;  ///< corrects whether flagged or not, as masses tell which are
  /// Number of candidates that are not pinned up to which all are selected, and none is scored.
  int select_all_up_to = 0;
  bool one_selection_per_layer = false;  ///< the heads of a layer select as one
  bool separate_next_scores = false;  ///< scores of this step's and of the next step's candidates are apart
};

template <class State>
FREEKV_HD unit_list pinned_units(const State& s, int sequence, int head) {
  const std::size_t at_head = s.head_index(sequence, head);
  return {s.pinned + at_head * to_size(s.pins), s.pinned_count[at_head]};
}

/// Row of pooled scores that belongs to row `row` of an entry.
template <class State>
FREEKV_HD int pooled_row(const State& s, const selection_job& job, int row) {
  return job.one_selection_per_layer ? retrieving_before(s, row) : row;
}

/// The candidates of one head: how many of the units from `first` on in this step (of a head that is
/// corrected), and in the next, and which of them, in both, are pinned. None for a head that does not select
/// now.
struct row_candidates : step_candidates {
  unit_list pinned;
  bool selects = false;
  FREEKV_HD int count(bool for_next) const { return for_next ? next : now; }
  /// Number of those of the first `count` candidates that are chosen among.
  FREEKV_HD int unpinned(int count) const { return count - pinned.count; }
  FREEKV_HD bool is_pinned(int j) const { return pinned.count > 0 && pinned.has(first + j); }
};
template <class State>
FREEKV_HD row_candidates candidates_of(const State& s, const step_entry& entry, int head,
                                       const selection_job& job) {
  row_candidates c;
  if (entry.phase != step_phase::decode || s.kind_of(head) != layer_kind::retrieval) return c;
  if (!is_to_select(s, entry.sequence, head, job.time, job.every_head)) return c;
  row_candidates selecting{s.candidates_of(entry), pinned_units(s, entry.sequence, head), true};
  if (job.time == selection_time::speculate) selecting.now = 0;
  return selecting;
}

/// True where this launch selects nothing: no head of the step is flagged. One load, which comes before all
/// others.
template <class State>
__device__ bool nothing_to_select(const State& s, const selection_job& job) {
  return job.time == selection_time::correct && !job.every_head && *s.flagged_count == 0;
}

/// Largest number of candidates that are all selected with a budget of k, whatever their scores; 0 of a
/// selection by mass, which needs scores.
template <class Selection>
int all_selected_up_to(const Selection& selection, int k) {
  int taken = 0;
  while (taken < k && selects_all(selection, taken + 1, k)) ++taken;
  return taken;
}

}  // namespace freekv::device
