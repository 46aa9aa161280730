// Scores of units for a group's queries, and their pooling, on the device: split over units as well as over
// sequences and heads, so that one sequence fills it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/block_summary.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/last_block.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score_rows.cuh>
#include <freekv/backend/cuda/score_tokens.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/pooling.hpp>
#include <string>
#include <type_traits>

namespace freekv::device {

struct score_tuning {
  int threads = 256;    ///< of a block, which scores a tile
  int registers = 216;  ///< of a thread at most: rows on their way, and the queries that multiply them
  int shared_bytes = 48 * 1024;  ///< of a block: a decoded summary for each team
  int query_floats = 4096;       ///< of a row that each block of it prepares itself
  int tiles_of_block = 8;  ///< of a row, at most: a long one has more blocks than there are multiprocessors
  /// Multiprocessors of which one scores for the next step: the others are the engine's. All do to correct.
  int one_in = 2;
  constexpr bool valid() const {
    return valid_block(threads, registers) && shared_bytes <= 48 * 1024 && one_in >= 1;
  }
};
inline constexpr score_tuning score_default{};
static_assert(score_default.valid());
/// Threads of a block that prepares a query by itself.
inline constexpr int prepare_threads = 512;
/// Rows that a warp scores.
inline constexpr int rows_of_warp = tile_units * 32 / score_default.threads;

/// Room of a team in a block's memory: a decoded summary's numbers, and a stored one where it is staged and
/// there is room.
struct scoring_room {
  int numbers = 0, staged = 0;  // floats, multiples of 16 bytes
  FREEKV_HD constexpr int all() const { return numbers + staged; }
};
template <class Key, class Summary>
FREEKV_HD scoring_room scoring_room_of(const Summary& summary, kv_extent unit) {
  const auto staged = [&](const auto& one) { return staged_bytes<Key>(one, unit); };
  scoring_room room{(summary.width(unit) + 3) / 4 * 4, 0};
  int bytes = 0;
  if constexpr (requires { summary.coarse; })
    bytes = max(staged(summary.coarse), staged(summary.fine));
  else
    bytes = staged(summary);
  if (bytes > 0) room.staged = (bytes + 31) / 16 * 4;
  if (room.all() * static_cast<int>(sizeof(float)) > score_default.shared_bytes) room.staged = 0;
  return room;
}

/// A block's shared memory while it scores: the row's queries, if it prepares them itself, and a room for
/// each of its teams.
struct scoring_memory {
  int queries = 0;         // floats; 0: another kernel has prepared them
  int teams = 0;           // that score at a time
  int floats = 0;          // of all
  bool by_tokens = false;  // it scores so, by a summary that can be; else there is no room for its tables

  /// `shared_bytes`: that a block may have. Throws settings_error where there is no room for one team.
  template <int HeadDim, class Key, class Summary>
  static scoring_memory of(const Summary& summary, kv_extent unit, int queries, bool pools_queries,
                           int shared_bytes) {
    constexpr score_tuning tuning = score_default;
    constexpr int lanes = summary_team_t<Summary, HeadDim>::lane_count, most = tuning.shared_bytes / 4;
    const int room = scoring_room_of<Key>(summary, unit).all();
    if (room > most)
      throw settings_error("a decoded summary by " + std::string(Summary::name) + " takes " +
                           std::to_string(4 * room) + " bytes of a block's memory, and there are " +
                           std::to_string(tuning.shared_bytes) + "; choose a smaller page or unit");
    scoring_memory m;
    const std::int64_t prepared =
        std::int64_t{queries} * summary_query_width(summary, HeadDim) + (pools_queries ? HeadDim : 0);
    const int by_tokens = floats_by_tokens(summary, unit, summary_bytes<Key>(summary, unit), tuning.threads);
    m.by_tokens = by_tokens > 0 && by_tokens * static_cast<int>(sizeof(float)) <= shared_bytes;
    const int rows = std::max(row_scoring_t<Summary, HeadDim, Key>::floats, m.by_tokens ? by_tokens : 0);
    if (prepared <= tuning.query_floats && (prepared + 3) / 4 * 4 + std::max(room, rows) <= most)
      m.queries = static_cast<int>(prepared + 3) / 4 * 4;
    m.teams = std::min(tuning.threads / lanes, (most - m.queries) / std::max(1, room));
    m.floats = m.queries + std::max({m.teams * room, rows, queries});
    return m;
  }
};

/// The log-sum-exp of up to `tile_units` scores, on all lanes of a warp.
template <class Scores>
__device__ log_sum_exp log_sum_of_tile(const Scores& scores, int count) {
  constexpr lane_team<32, 1> warp{};
  log_sum_exp log_sum;
  lane_pack<1> of_lane[tile_units / 32];
#pragma unroll
  for (int nth = 0; nth < tile_units / 32; ++nth) {
    const int i = nth * 32 + warp.lane();
    of_lane[nth] = lane_pack<1>(i < count ? scores[i] : -infinity);
  }
#pragma unroll
  for (const lane_pack<1>& score : of_lane) log_sum.add(warp, &score, 1);
  return log_sum;
}

/// Prepares a row's queries for scoring, by all teams of a block: to `prepared`; before that pools them to
/// `pooled`, where one query scores for all. Returns how many there are.
template <class Team, class Summary, class Pooling>
__device__ int prepare_row(Team team, const Summary& summary, const Pooling& pooling, group_query query,
                           float* pooled, float* prepared) {
  const int me = thread_x() / team.lanes(), width = summary_query_width(summary, query.head_dim);
  if constexpr (query_pooling<Pooling>) {
    if (me == 0) pooling.pool_query(team, query, pooled);
    __syncthreads();
    query = {pooled, 1, query.head_dim};
  }
  for (int g = me; g < query.group; g += threads_x() / team.lanes())
    prepare_query(team, summary, group_query{query.head(g), 1, query.head_dim}, prepared + g * width);
  __syncthreads();
  return query.group;
}

/// Prepares the queries of each row that selects, where blocks that score do not; by a block each, where that
/// helps.
template <class State, class Summary, class Pooling>
__launch_bounds__(block_summary<Summary>::prepares ? prepare_threads : score_default.threads) __global__
    void prepare_queries(State s, Summary summaries, Pooling pooling, step_view step,
                         selection_scratch scratch, selection_job job) {
  constexpr int d = State::head_dim;
  const summary_team_t<Summary, d> team;
  const int row = block_x(), nth = block_y();
  if (nothing_to_select(s, job) || nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const int head = scratch.head_of(row);
  const row_candidates candidates = candidates_of(s, entry, head, job);
  if (candidates.unpinned(candidates.most()) <= job.select_all_up_to) return;
  const auto summary = summary_at(summaries, s.layer, head);
  group_query query = scratch.selecting_query(s, entry, row);
  if constexpr (block_summary<Summary>::prepares) {
    __shared__ float coefficients[d];
    const int g = block_z();
    if (g >= (query_pooling<Pooling> ? 1 : query.group)) return;
    const float* one = query.head(g);
    if constexpr (query_pooling<Pooling>) {
      if (threadIdx.x < team.lanes()) pooling.pool_query(team, query, scratch.query_of(nth, row));
      __syncthreads();
      one = scratch.query_of(nth, row);
    }
    block_summary<Summary>::template prepare<d>(
        summary, one, coefficients, scratch.prepared_of(nth, row) + g * summary_query_width(summary, d));
  } else {
    prepare_row(team, summary, pooling, query, scratch.query_of(nth, row), scratch.prepared_of(nth, row));
  }
}

/// Summary that candidates are scored by: their only one, or of two the coarse one, or the fine one for those
/// that are kept.
enum class scoring : std::uint8_t { alone, coarse, fine };

/// Scores candidates `first` .. `last` of a row by a block. `shared`: `scoring_memory` behind the queries.
template <scoring By, class State, class Summary>
__device__ void score_tile(const State& s, const Summary& summaries, const step_entry& entry, int head,
                           const row_candidates& candidates, int first, int last,
                           const prepared_queries& queries, float* scores, const selection_scratch& scratch,
                           unsigned long long least, const float* pooled, const scoring_memory& memory,
                           float* shared) {
  using element = typename State::element;
  constexpr int d = State::head_dim;
  const summary_team_t<Summary, d> team;
  const auto summary = summary_at(summaries, s.layer, head);
  const int me = thread_x() / team.lanes();
  const scoring_room room = scoring_room_of<element>(summaries, s.unit);
  float* const numbers = shared + me * room.all();
  auto* const staging = room.staged > 0 ? reinterpret_cast<std::byte*>(numbers + room.numbers) : nullptr;
  // Rows are multiplied as they are, if they can be, and those whose products are not finite are looked at
  // again.
  using rows_scored = row_scoring_t<Summary, d, element>;
  const auto row_of = [&](int j) { return s.stored_unit(entry.sequence, candidates.first + j); };
  bool scored = false, again = true;
  if constexpr (By == scoring::alone && rows_scored::there) {
    scored = true;
    again = __syncthreads_or(score_summary_rows<rows_scored, rows_of_warp>(
                s.summary_of(store_page_id{}, head), row_of, first, last, queries, scores, scratch.stride,
                shared)) != 0;
  } else if constexpr (By == scoring::alone && token_estimates<Summary>::there) {
    scored = memory.by_tokens;
    if (scored)
      again = __syncthreads_or(score_units_by_tokens<rows_of_warp>(
                  summaries, s.unit, s.summary_of(store_page_id{}, head), static_cast<int>(s.summary_bytes),
                  row_of, first, last, queries, scores, scratch.stride, shared)) != 0;
  }
  if (!again || me >= memory.teams) return;
  for (int j = first + me; j < last; j += memory.teams) {
    const score_column column{scores + j, scratch.stride};
    if (scored) {
      bool finite = true;
      for (int g = 0; g < queries.group; ++g)
        finite = finite && column.first[g * column.stride] * 0.0f == 0.0f;
      if (finite) continue;
      team.sync();  // all lanes have looked
    }
    if constexpr (By == scoring::fine)
      if (!is_kept(least, pooled[j], candidates.first + j)) {
        for (int g = team.lane(); g < queries.group; g += team.lanes())
          column.first[g * column.stride] = -infinity;
        continue;
      }
    const std::byte* const stored = s.summary_of_unit(entry.sequence, head, candidates.first + j);
    if constexpr (By == scoring::alone)
      score_unit<element>(team, summary, s.unit, stored, queries, numbers, column, staging);
    else if constexpr (By == scoring::coarse)
      score_unit_coarsely<element>(team, summary, s.unit, stored, queries, numbers, column, staging);
    else
      score_unit_finely<element>(team, summary, s.unit, stored, queries, numbers, column, staging);
    team.sync();  // the numbers are free again
  }
}

/// The logarithm of what the first `count` of `summed` scores' exponentials sum to: of tiles as they were
/// summed up, and of one that is cut once more. On all lanes of a warp.
__device__ inline float log_sum_of(const log_sum_exp* tile_log_sum, const float* scores, int count,
                                   int summed) {
  const int lane = thread_x() % 32, whole = count / tile_units;
  const int each = (whole + 31) / 32;
  log_sum_exp log_sum;
#pragma unroll 1
  for (int i = lane * each; i < min((lane + 1) * each, whole); ++i) log_sum.add(tile_log_sum[i]);
#pragma unroll 1
  for (int distance = 1; distance < 32; distance *= 2) {
    const log_sum_exp behind{__shfl_down_sync(0xffffffffu, log_sum.max, distance),
                             __shfl_down_sync(0xffffffffu, log_sum.sum, distance)};
    if (lane % (2 * distance) == 0) log_sum.add(behind);
  }
  log_sum = {__shfl_sync(0xffffffffu, log_sum.max, 0), __shfl_sync(0xffffffffu, log_sum.sum, 0)};
  if (const int rest = count % tile_units; rest != 0)
    log_sum.add(count == summed ? tile_log_sum[whole] : log_sum_of_tile(scores + whole * tile_units, rest));
  return log_sum.value();
}

/// Pools candidates `first` .. `last` of the `count` of a row in this step, or in the next, by a block, whose
/// threads take `Share` at a time; parts of a row are whole tiles. `summed` are scored. `log_sums` is shared
/// memory for as many as `group`, which is how many heads' scores there are.
template <int Share, class State, class Pooling>
__device__ void pool_row(const State& s, const Pooling& pooling, const selection_scratch& scratch,
                         const selection_job& job, int nth, int row, int group, int first, int last,
                         int count, int summed, bool for_next, float* log_sums) {
  constexpr lane_team<1, Share> team{};
  const int thread = thread_x(), threads = threads_x();
  const bool apart = for_next && job.separate_next_scores;
  const float* const scores = scratch.scores_of(apart, nth, row);
  const int at = pooled_row(s, job, row);
  float* const pooled = scratch.pooled_of(for_next, nth, at);
  __syncthreads();  // the memory is free, and scores are there
  if constexpr (softmax_pooling<Pooling>) {
    for (int g = thread / 32; g < group; g += threads / 32) {
      const float sum = log_sum_of(scratch.log_sums_of(apart, nth, row) + g * scratch.tiles,
                                   scores + g * scratch.stride, count, summed);
      if (thread % 32 == 0) log_sums[g] = sum;
    }
    __syncthreads();
  }
  // Rows are whole tiles: behind the last there is room.
#pragma unroll 1
  for (int j = first + Share * thread; j < last; j += Share * threads) {
    lane_pack<Share> of_candidates;
    if constexpr (query_pooling<Pooling>)
      of_candidates = team.load(scores + j);
    else
      of_candidates = pooling.pool(team, row_scores{scores, scratch.stride, log_sums, group}, j);
    team.store(pooled + j, lane_pack<Share>::of([&](auto i) { return clamp_score(of_candidates.x[i]); }));
  }
  __syncthreads();
  if (!job.one_selection_per_layer) return;
  for (int tile = first / tile_units + thread / 32; tile * tile_units < last; tile += threads / 32) {
    const int begin = tile * tile_units;
    const log_sum_exp log_sum = log_sum_of_tile(pooled + begin, min(tile_units, last - begin));
    if (thread % 32 == 0) scratch.pooled_log_sums_of(for_next, nth, at)[tile] = log_sum;
  }
}

/// A `Then` that does nothing behind a row's pooled scores.
struct then_nothing {
  static constexpr int shared_bytes = 0;
};
/// Stands in for it where a launch of its own pools: what scores has nothing behind it.
struct pools_apart {
  static constexpr int shared_bytes = 0;
};

/// Scores tiles of one row's candidates, by one query alone where queries are pooled, and sums up what
/// softmaxes need of each. Unless that is done apart, the last block of a row to do so pools the row's scores
/// and calls `then`; where all candidates are selected, or none, without scores. Other blocks of the row may
/// still look at whether the row selects: `then` does not change that. `memory.queries`: of the row, which
/// the block prepares.
template <scoring By, class State, class Summary, class Pooling, class Then>
__global__ void score_tiles(State s, Summary summaries, Pooling pooling, Then then, step_view step,
                            selection_scratch scratch, selection_job job, scoring_memory memory) {
  constexpr int d = State::head_dim;
  alignas(16) extern __shared__ float shared[];
  let_kernel_behind_begin();
  wait_for_kernel_before();
  if (nothing_to_select(s, job)) return;
  const int row = block_y();
  constexpr bool pools = !std::is_same_v<Then, pools_apart>;
  constexpr bool goes_on = pools && !std::is_same_v<Then, then_nothing>;
  const bool for_next = job.separate_next_scores && blockIdx.z % 2 != 0;
  const int nth = static_cast<int>(job.separate_next_scores ? blockIdx.z / 2 : blockIdx.z);
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const int head = scratch.head_of(row);
  const row_candidates candidates = candidates_of(s, entry, head, job);
  const int count = job.separate_next_scores ? candidates.count(for_next) : candidates.most();
  const bool chooses = candidates.unpinned(count) > job.select_all_up_to;
  const int tiles = chooses ? (count + tile_units - 1) / tile_units : goes_on ? 1 : 0;
  const int sharing = min(tiles, blocks_x());
  if (block_x() >= sharing) return;
  if (chooses) {
    const group_query query = scratch.selecting_query(s, entry, row);
    const int width = summary_query_width(summaries, d);
    prepared_queries queries{scratch.prepared_of(nth, row), width, query_pooling<Pooling> ? 1 : query.group,
                             s.selection_scale_of(head)};
    if (memory.queries > 0) {
      queries.data = shared;
      prepare_row(summary_team_t<Summary, d>{}, summary_at(summaries, s.layer, head), pooling, query,
                  shared + queries.group * width, shared);
    }
    float* const scores = scratch.scores_of(for_next, nth, row);
    const bool kept = By == scoring::fine;
    const int thread = thread_x(), threads = threads_x();
#pragma unroll 1
    for (int tile = block_x(); tile < tiles; tile += sharing) {
      const int first = tile * tile_units, last = min(first + tile_units, count);
      score_tile<By>(s, summaries, entry, head, candidates, first, last, queries, scores, scratch,
                     kept ? scratch.least_of(for_next, nth, row) : 0,
                     kept ? scratch.pooled_of(for_next, nth, pooled_row(s, job, row)) : nullptr, memory,
                     shared + memory.queries);
      if (s.pins > 0) {  // pinned ones have no part in what is pooled
        __syncthreads();
        const unit_list pinned = pinned_units(s, entry.sequence, head);
        for (int i = thread; i < pinned.count * queries.group; i += threads) {
          const int j = pinned.units[i / queries.group] - candidates.first;
          if (j >= first && j < last) scores[i % queries.group * scratch.stride + j] = -infinity;
        }
      }
      __syncthreads();  // the scores are there, and the shared memory is free
      if constexpr (softmax_pooling<Pooling>)
        for (int g = thread / 32; g < queries.group; g += threads / 32) {
          const log_sum_exp log_sum = log_sum_of_tile(scores + g * scratch.stride + first, last - first);
          if (thread % 32 == 0) scratch.log_sums_of(for_next, nth, row)[g * scratch.tiles + tile] = log_sum;
        }
    }
    if constexpr (!pools) return;
    if (!is_last_block(scratch.blocks_scoring_of(for_next, nth, row), sharing,
                       *reinterpret_cast<std::uint32_t*>(shared)))
      return;
#pragma unroll 1
    for (int time = 0; time < 2; ++time) {
      const bool next = time != 0;
      const int of = candidates.count(next);
      if ((next == for_next || !job.separate_next_scores) && of > 0 &&
          candidates.unpinned(of) > job.select_all_up_to)
        pool_row<4>(s, pooling, scratch, job, nth, row, queries.group, 0, of, of, count, next, shared);
    }
  }
  if constexpr (goes_on) {
    __syncthreads();  // the shared memory is free again
    then(s, entry, nth, head, candidates, scratch, job, *reinterpret_cast<typename Then::storage*>(shared));
  }
}

/// Scores and pools the candidates of the rows of a step that select, then does what `then` does with each.
template <scoring By, class State, class Summary, class Pooling, class Then = then_nothing>
void launch_score(const State& s, const Summary& summary, const Pooling& pooling, const step_view& step,
                  const selection_scratch& scratch, const selection_job& job, cudaStream_t stream,
                  const Then& then = {}) {
  const auto count = [](int n) { return static_cast<unsigned>(n); };
  const dim3 rows(count(scratch.rows()), count(step.bounds.entries));
  const auto memory = scoring_memory::of<State::head_dim, typename State::element>(
      summary, s.unit, scratch.sizes.queries, query_pooling<Pooling>, scratch.sizes.shared_bytes);
  if (memory.queries == 0) {
    constexpr bool by_block = block_summary<Summary>::prepares;
    const dim3 queries(rows.x, rows.y, by_block ? count(scratch.sizes.queries) : 1);
    launch("preparing queries", {queries, by_block ? prepare_threads : score_default.threads, stream},
           prepare_queries<State, Summary, Pooling>, s, summary, pooling, step, scratch, job);
  }
  // A block for each multiprocessor that scores: more would keep the engine's kernels waiting, fewer wait for
  // memory longer.
  const bool before_attention = job.time == selection_time::correct;
  const int all_rows = static_cast<int>(rows.x * rows.y) * (job.separate_next_scores ? 2 : 1);
  const int scoring = scratch.sizes.multiprocessors / (before_attention ? 1 : score_default.one_in);
  const int blocks =
      std::min(scratch.tiles,
               std::max({1, scoring / all_rows, blocks_for(scratch.tiles, score_default.tiles_of_block)}));
  const dim3 grid(count(blocks), rows.x, count(all_rows) / rows.x);
  const auto bytes = std::max(to_size(memory.floats) * sizeof(float), std::size_t{Then::shared_bytes});
  launch("score", {grid, score_default.threads, stream, bytes, before_attention},
         score_tiles<By, State, Summary, Pooling, Then>, s, summary, pooling, then, step, scratch, job,
         memory);
}

}  // namespace freekv::device
