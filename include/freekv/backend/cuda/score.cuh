// Scores of pages for a group's queries, and their pooling, on the device: split over units as well as over sequences and
// heads, so that one sequence fills it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score_rows.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/core/error.hpp>
#include <freekv/policies/pooling.hpp>
#include <string>
#include <type_traits>

namespace freekv::device {

struct score_tuning {
  int threads = 256;    ///< of a block, which scores a chunk
  int registers = 168;  ///< of a thread at most: rows on their way, and the queries that multiply them
  int shared_bytes = 48 * 1024;  ///< of a block: a decoded summary for each team
  constexpr bool valid() const { return valid_block(threads, registers) && shared_bytes <= 48 * 1024; }
};
inline constexpr score_tuning score_default{};
static_assert(score_default.valid());
/// Rows that a warp scores.
inline constexpr int rows_of_warp = chunk_units * 32 / score_default.threads;

/// What a team has in a block's memory: a decoded summary's numbers, and a stored one where it is staged and there is room.
struct scoring_room {
  int numbers = 0, staged = 0;  // floats, multiples of 16 bytes
  FREEKV_HD constexpr int all() const { return numbers + staged; }
};
template <class Key, class Summary>
FREEKV_HD scoring_room scoring_room_of(const Summary& summary, page_geometry unit) {
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

/// Teams of a block that score at a time. Throws settings_error where there is no room for one.
template <int HeadDim, class Key, class Summary>
int scoring_teams(const Summary& summary, page_geometry unit) {
  constexpr score_tuning tuning = score_default;
  constexpr int lanes = summary_team_t<Summary, HeadDim>::lane_count;
  const int bytes = scoring_room_of<Key>(summary, unit).all() * static_cast<int>(sizeof(float));
  if (bytes > tuning.shared_bytes)
    throw settings_error("a decoded summary by " + std::string(Summary::name) + " takes " +
                         std::to_string(bytes) + " bytes of a block's memory, and there are " +
                         std::to_string(tuning.shared_bytes) + "; choose a smaller page or unit");
  return std::min(tuning.threads / lanes, tuning.shared_bytes / std::max(1, bytes));
}

/// The mass of up to `chunk_units` scores, on all lanes of a warp.
__device__ inline log_sum_exp mass_of_chunk(const float* scores, int count) {
  constexpr lane_team<32, 1> warp{};
  log_sum_exp mass;
  lane_pack<1> of_lane[chunk_units / 32];
#pragma unroll
  for (int nth = 0; nth < chunk_units / 32; ++nth) {
    const int i = nth * 32 + warp.lane();
    of_lane[nth] = lane_pack<1>(i < count ? scores[i] : -infinity);
  }
#pragma unroll
  for (const lane_pack<1>& score : of_lane) mass.add(warp, &score, 1);
  return mass;
}

/// Prepares the queries of each row that selects; before that pools them, where one query scores for all.
template <class State, class Summary, class Pooling>
__global__ void prepare_queries(State s, Summary summaries, Pooling pooling, step_view step,
                                selection_scratch scratch, selection_job job) {
  using team_type = summary_team_t<Summary, State::head_dim>;
  const team_type team;
  const int row = static_cast<int>(blockIdx.x), nth = static_cast<int>(blockIdx.y);
  if (row + nth + static_cast<int>(threadIdx.x) == 0) *scratch.item_count = 0;  // of the recall behind this
  if (nothing_to_select(s, job)) return;
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const int head = scratch.head_of(row);
  const row_candidates candidates = candidates_of(s, entry, head, job);
  if (candidates.unpinned(candidates.most()) <= job.select_all_up_to) return;
  const int me = static_cast<int>(threadIdx.x) / team.lanes();
  group_query query = scratch.selecting_query(s, entry, row);
  if constexpr (query_pooling<Pooling>) {
    if (me > 0) return;
    float* const pooled = scratch.query_of(nth, row);
    pooling.pool_query(team, query, pooled);
    team.sync();
    query = {pooled, 1, State::head_dim};
  }
  const auto summary = summary_at(summaries, s.layer, head);
  const int width = summary_query_width(summary, State::head_dim);
  for (int g = me; g < query.group; g += static_cast<int>(blockDim.x) / team.lanes())
    prepare_query(team, summary, group_query{query.head(g), 1, State::head_dim},
                  scratch.prepared_of(nth, row) + g * width);
}

/// By which summary candidates are scored: their one, or of two the coarse one, or the fine one those that are kept.
enum class scoring : std::uint8_t { alone, coarse, fine };

/// Whether a candidate that a coarse summary has scored so is scored by the fine one.
FREEKV_HD inline bool is_kept(unsigned long long least, float pooled, int unit) {
  return least == 0 || ordered_key(pooled, unit) >= least;
}

/// Scores one chunk of one row's candidates, by one query alone where queries are pooled. For softmaxes it is summed up
/// as well.
template <scoring By, class State, class Summary>
__global__ void score_chunks(State s, Summary summaries, step_view step, selection_scratch scratch,
                             selection_job job, int teams, bool one_query, bool softmax) {
  using element = typename State::element;
  using team_type = summary_team_t<Summary, State::head_dim>;
  constexpr int d = State::head_dim;
  alignas(16) extern __shared__ float shared[];
  if (nothing_to_select(s, job)) return;
  const team_type team;
  const int chunk = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const bool for_next = job.separate_next_scores && blockIdx.z % 2 != 0;
  const int nth = static_cast<int>(job.separate_next_scores ? blockIdx.z / 2 : blockIdx.z);
  const int thread = static_cast<int>(threadIdx.x);
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const int head = scratch.head_of(row);
  const row_candidates candidates = candidates_of(s, entry, head, job);
  const int count = job.separate_next_scores ? candidates.count(for_next) : candidates.most();
  const int first = chunk * chunk_units, last = min(first + chunk_units, count);
  if (first >= last || candidates.unpinned(count) <= job.select_all_up_to) return;

  const auto summary = summary_at(summaries, s.layer, head);
  const int me = thread / team.lanes(), width = summary_query_width(summary, d);
  const int group = one_query ? 1 : scratch.selecting_query(s, entry, row).group;
  const prepared_queries queries{scratch.prepared_of(nth, row), width, group, s.scale};
  const scoring_room room = scoring_room_of<element>(summaries, s.unit);
  float* const numbers = shared + me * room.all();
  auto* const staging = room.staged > 0 ? reinterpret_cast<std::byte*>(numbers + room.numbers) : nullptr;
  float* const scores = scratch.scores_of(for_next, nth, row);
  // Rows are multiplied as they are, if they can be, and those whose products are not finite are looked at again.
  using rows_scored = row_scoring_t<Summary, d, element>;
  bool again = true;
  if constexpr (By == scoring::alone && rows_scored::there) {
    const auto row_of = [&](int j) {
      const int unit = candidates.first + j, page = s.page_of(unit);
      return s.store_page(entry.sequence, page) * s.units_per_page + unit - page * s.units_per_page;
    };
    again = __syncthreads_or(score_summary_rows<rows_scored, rows_of_warp>(
                s.summary_of(0, head), row_of, first, last, queries, scores, scratch.stride, shared)) != 0;
  }
  if (again && me < teams)
    for (int j = first + me; j < last; j += teams) {
      const score_column column{scores + j, scratch.stride};
      if constexpr (By == scoring::alone && rows_scored::there) {
        bool finite = true;
        for (int g = 0; g < group; ++g) finite = finite && column.first[g * column.stride] * 0.0f == 0.0f;
        if (finite) continue;
        team.sync();  // all lanes have looked
      }
      if constexpr (By == scoring::fine)
        if (!is_kept(scratch.least_of(for_next, nth, row),
                     scratch.pooled_of(for_next, nth, pooled_row(s, job, row))[j], candidates.first + j)) {
          for (int g = team.lane(); g < group; g += team.lanes()) column.first[g * column.stride] = -infinity;
          continue;
        }
      const int unit = candidates.first + j, page = s.page_of(unit);
      const std::byte* const stored =
          s.summary_of(s.store_page(entry.sequence, page), head, unit - page * s.units_per_page);
      if constexpr (By == scoring::alone)
        score_unit<element>(team, summary, s.unit, stored, queries, numbers, column, staging);
      else if constexpr (By == scoring::coarse)
        score_unit_coarsely<element>(team, summary, s.unit, stored, queries, numbers, column, staging);
      else
        score_unit_finely<element>(team, summary, s.unit, stored, queries, numbers, column, staging);
      team.sync();  // the numbers are free again
    }
  if (s.pins > 0) {  // they have no part in what is pooled
    __syncthreads();
    const unit_list pinned = pinned_units(s, entry.sequence, head);
    for (int i = thread; i < pinned.count * group; i += static_cast<int>(blockDim.x)) {
      const int j = pinned.units[i / group] - candidates.first;
      if (j >= first && j < last) scores[i % group * scratch.stride + j] = -infinity;
    }
  }
  if (!softmax) return;
  __syncthreads();
  for (int g = thread / 32; g < group; g += static_cast<int>(blockDim.x) / 32) {
    const log_sum_exp mass = mass_of_chunk(scores + g * scratch.stride + first, last - first);
    if (thread % 32 == 0) scratch.masses_of(for_next, nth, row)[g * scratch.chunks + chunk] = mass;
  }
}

/// The logarithm of what the first `count` scores' exponentials sum to: of whole chunks as they were summed up, and the
/// rest. On all lanes of a warp.
__device__ inline float log_sum_of(const log_sum_exp* chunk_mass, const float* scores, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32, whole = count / chunk_units;
  const int each = (whole + 31) / 32;
  log_sum_exp mass;
  for (int i = lane * each; i < min((lane + 1) * each, whole); ++i) mass.add(chunk_mass[i]);
  for (int distance = 1; distance < 32; distance *= 2) {
    const log_sum_exp behind{__shfl_down_sync(0xffffffffu, mass.max, distance),
                             __shfl_down_sync(0xffffffffu, mass.sum, distance)};
    if (lane % (2 * distance) == 0) mass.add(behind);
  }
  mass = {__shfl_sync(0xffffffffu, mass.max, 0), __shfl_sync(0xffffffffu, mass.sum, 0)};
  if (count % chunk_units != 0) mass.add(mass_of_chunk(scores + whole * chunk_units, count % chunk_units));
  return mass.value();
}

/// Pools one chunk of one row's scores among this step's candidates, or the next step's.
template <class State, class Pooling>
__global__ void pool_chunks(State s, Pooling pooling, step_view step, selection_scratch scratch,
                            selection_job job) {
  extern __shared__ float log_sums[];  // (queries)
  if (nothing_to_select(s, job)) return;
  const int chunk = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
  const bool for_next = blockIdx.z % 2 != 0;
  const int nth = static_cast<int>(blockIdx.z / 2), thread = static_cast<int>(threadIdx.x);
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  const row_candidates candidates = candidates_of(s, entry, scratch.head_of(row), job);
  const int count = candidates.count(for_next), j = chunk * chunk_units + thread;
  if (chunk * chunk_units >= count || candidates.unpinned(count) <= job.select_all_up_to) return;
  const bool apart = for_next && job.separate_next_scores;
  const float* const scores = scratch.scores_of(apart, nth, row);
  const int at = pooled_row(s, job, row);
  float* const pooled = scratch.pooled_of(for_next, nth, at);
  if constexpr (query_pooling<Pooling>) {
    if (j < count) pooled[j] = clamp_score(scores[j]);
  } else {
    const int group = scratch.selecting_query(s, entry, row).group;
    if constexpr (softmax_pooling<Pooling>) {
      for (int g = thread / 32; g < group; g += static_cast<int>(blockDim.x) / 32) {
        const float sum = log_sum_of(scratch.masses_of(apart, nth, row) + g * scratch.chunks,
                                     scores + g * scratch.stride, count);
        if (thread % 32 == 0) log_sums[g] = sum;
      }
      __syncthreads();
    }
    if (j < count)
      pooled[j] =
          clamp_score(pooling.pool(scalar_team{}, row_scores{scores, scratch.stride, log_sums, group}, j));
  }
  if (!job.one_selection_per_layer) return;
  __syncthreads();
  if (thread >= 32) return;
  const int first = chunk * chunk_units;
  const log_sum_exp mass = mass_of_chunk(pooled + first, min(chunk_units, count - first));
  if (thread == 0) scratch.pooled_masses_of(for_next, nth, at)[chunk] = mass;
}

/// Flags all retrieving heads of an entry if one of them is, as they select together.
template <class State>
__global__ void flag_layer(State s, step_view step) {
  const int nth = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  if (nth >= step.size() || step.entries[nth].phase != step_phase::decode) return;
  std::uint8_t* const corrected = s.corrected + s.head_index(step.entries[nth].sequence, 0);
  int flagged = 0;
  for (int head = thread; head < s.heads.kv; head += 32) flagged |= corrected[head];
  if (!__any_sync(0xffffffffu, flagged)) return;
  for (int head = thread; head < s.heads.kv; head += 32) {
    if (s.kind_of(head) != layer_kind::retrieval || corrected[head] != 0) continue;
    corrected[head] = 1;
    atomicAdd(s.flagged_count, 1);
  }
}

/// Pools one chunk of what the retrieving heads of a layer have pooled once more, each head's as one row.
template <class State, class Pooling>
__global__ void pool_heads(State s, Pooling pooling, step_view step, selection_scratch scratch,
                           selection_job job) {
  extern __shared__ float log_sums[];  // (kv heads)
  const int chunk = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const bool for_next = blockIdx.z != 0;
  const int nth = static_cast<int>(blockIdx.y), heads = retrieving_before(s, s.heads.kv);
  if (nth >= step.size()) return;
  int head = 0;  // the first that retrieves
  while (s.kind_of(head) != layer_kind::retrieval) ++head;
  const row_candidates candidates = candidates_of(s, step.entries[nth], head, job);
  const int count = candidates.count(for_next), j = chunk * chunk_units + thread;
  if (chunk * chunk_units >= count || count <= job.select_all_up_to) return;
  const float* const rows = scratch.pooled_of(for_next, nth, 0);
  if constexpr (softmax_pooling<Pooling>) {
    for (int g = thread / 32; g < heads; g += static_cast<int>(blockDim.x) / 32) {
      const float sum =
          log_sum_of(scratch.pooled_masses_of(for_next, nth, g), rows + g * scratch.stride, count);
      if (thread % 32 == 0) log_sums[g] = sum;
    }
    __syncthreads();
  }
  if (j < count)
    scratch.layer_scores_of(for_next, nth)[j] =
        clamp_score(pooling.pool(scalar_team{}, row_scores{rows, scratch.stride, log_sums, heads}, j));
}

/// Prepares the queries of the rows of a step that select.
template <class State, class Summary, class Pooling>
void launch_prepare(const State& s, const Summary& summary, const Pooling& pooling, const step_view& step,
                    const selection_scratch& scratch, const selection_job& job, cudaStream_t stream) {
  const dim3 rows(static_cast<unsigned>(scratch.rows()), static_cast<unsigned>(step.bounds.entries));
  launch("preparing queries", {rows, score_default.threads, stream}, prepare_queries<State, Summary, Pooling>,
         s, summary, pooling, step, scratch, job);
}

/// Behind it scores and pools their candidates.
template <scoring By, class State, class Summary, class Pooling>
void launch_score(const State& s, const Summary& summary, const Pooling& pooling, const step_view& step,
                  const selection_scratch& scratch, const selection_job& job, cudaStream_t stream) {
  const auto count = [](int n) { return static_cast<unsigned>(n); };
  const dim3 rows(count(scratch.chunks), count(scratch.rows()), count(step.bounds.entries));
  using element = typename State::element;
  const int teams = scoring_teams<State::head_dim, element>(summary, s.unit);
  const int floats = std::max(teams * scoring_room_of<element>(summary, s.unit).all(),
                              row_scoring_t<Summary, State::head_dim, element>::floats);
  const auto numbers = static_cast<std::size_t>(floats) * sizeof(float);
  const dim3 scored_rows(rows.x, rows.y, job.separate_next_scores ? 2 * rows.z : rows.z);
  launch("score", {scored_rows, score_default.threads, stream, numbers}, score_chunks<By, State, Summary>, s,
         summary, step, scratch, job, teams, query_pooling<Pooling>, softmax_pooling<Pooling>);
  const dim3 pooled_rows(rows.x, rows.y, 2 * rows.z);
  launch("pool",
         {pooled_rows, chunk_units, stream, static_cast<std::size_t>(scratch.sizes.queries) * sizeof(float)},
         pool_chunks<State, Pooling>, s, pooling, step, scratch, job);
}

// Where the heads of a layer select together:

/// Before they are scored to correct.
template <class State>
void launch_flag_layer(const State& s, const step_view& step, cudaStream_t stream) {
  launch("flagging a layer", {step.bounds.entries, 32, stream}, flag_layer<State>, s, step);
}
/// Behind their scores, which are pooled by `Pooling`.
template <class Pooling, class State>
void launch_pool_heads(const State& s, const step_view& step, const selection_scratch& scratch,
                       const selection_job& job, cudaStream_t stream) {
  using pooling_of_heads = std::conditional_t<softmax_pooling<Pooling>, mean_softmax, mean_score>;
  const dim3 chunks(static_cast<unsigned>(scratch.chunks), static_cast<unsigned>(step.bounds.entries), 2);
  launch("pool of heads", {chunks, chunk_units, stream, static_cast<std::size_t>(s.heads.kv) * sizeof(float)},
         pool_heads<State, pooling_of_heads>, s, pooling_of_heads{}, step, scratch, job);
}

}  // namespace freekv::device
