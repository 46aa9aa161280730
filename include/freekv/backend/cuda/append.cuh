// Appending, summaries, writes to the store and drift on the device, in one launch; summaries by a block each
// are of summarise.cuh, pages that a codec encodes of encoded_pages.cuh.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/backend/cuda/block_summary.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/summary_team.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/storage/paged_tensor.hpp>

namespace freekv::device {

struct append_tuning {
  int threads = 128;    ///< of a block
  int registers = 152;  ///< of a thread at most: three blocks a multiprocessor
  /// Teams that run at a time, each with scratch of a page of float keys; more tasks take turns
  int most_teams = 512;
  int teams_behind = 128;  ///< teams beside the engine's kernels, which keep the machine
  constexpr bool valid() const {
    return valid_block(threads, registers) && most_teams % threads == 0 && most_teams > 0 &&
           teams_behind % threads == 0 && teams_behind > 0;
  }
};
inline constexpr append_tuning append_default{};
static_assert(append_default.valid());

/// Keys and values in device memory: of a step's rows, or of a prompt in an engine's paged tensor, if
/// `blocks` has ids, which are the prompt's block table.
template <class In>
struct device_rows {
  freekv::detail::listed_blocks<const In> blocks;
  std::int64_t value_stride = 0;  // of a step's rows, whose keys' is the block's
  step_queries queries{};

  /// Rows of a step.
  static device_rows of(const step_rows<In>& rows, int head_dim) {
    return {{{rows.keys, rows.values, rows.key_stride, rows.key_stride, head_dim, 1}},
            rows.value_stride,
            rows.selecting};
  }
  static device_rows of(const paged_blocks<const In>& rows) { return {{rows.tensor, rows.ids.data()}}; }
  /// Key and value of one token of an entry.
  __device__ head_slice<const In> row(const step_entry& entry, int token, int head) const {
    const paged_tensor<const In>& rows = blocks.tensor;
    if (const std::int64_t nth = entry.first_row + token - entry.before; blocks.ids == nullptr)
      return {rows.keys + nth * rows.block_stride + head * rows.head_stride,
              rows.values + nth * value_stride + head * rows.head_stride, 0};
    return rows_behind(blocks.slice(block_id{token / rows.block_tokens}, head), token % rows.block_tokens);
  }
  /// Keys of an entry's tokens from `token` on, as `Element`: null where they are not elements, or are not
  /// stored as they are, `scaled`; one row a stride behind the other.
  template <class Element>
  __device__ head_slice<const Element> elements(const step_entry& entry, int token, int head,
                                                bool scaled) const {
    if constexpr (std::is_same_v<In, Element>)
      if (blocks.ids == nullptr && (!scaled || std::is_same_v<In, fp8_e4m3>))
        return {row(entry, token, head).key, nullptr, blocks.tensor.block_stride};
    return {};
  }
};

/// Floats of scratch of one of `teams` teams: a unit's keys, and a summary's numbers, or where units are
/// pinned a key.
struct append_scratch {
  float* data = nullptr;
  std::int64_t keys = 0, numbers = 0;
  int teams = 0;
  FREEKV_HD std::int64_t each() const { return keys + numbers; }
};

/// One row of head_dim elements, divided by `scale`, unless it is 1, and rounded where it is of others: 16
/// bytes written at a time where addresses allow it.
template <class Team, class Element, class In>
__device__ void put_row(Team team, int head_dim, const In* from, Element* to, float scale = 1.0f) {
  constexpr int each = 16 / static_cast<int>(sizeof(Element));
  struct alignas(16) elements {
    Element x[each];
  };
  struct alignas(16) numbers {
    In x[each];
  };
  const auto element_of = [scale](In x) {
    if (scale != 1.0f) return stored_number<Element>(x, scale);
    if constexpr (std::is_same_v<In, Element>)
      return x;
    else
      return from_float<Element>(to_float(x));
  };
  const bool aligned =
      reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && reinterpret_cast<std::uintptr_t>(to) % 16 == 0;
  const int whole = aligned ? head_dim / each * each : 0;
  for (int i = team.lane() * each; i < whole; i += team.lanes() * each) {
    const numbers read = *reinterpret_cast<const numbers*>(from + i);
    elements write;
    unroll<each>([&](auto n) { write.x[n] = element_of(read.x[n]); });
    *reinterpret_cast<elements*>(to + i) = write;
  }
  for (int i = whole + team.lane(); i < head_dim; i += team.lanes()) to[i] = element_of(from[i]);
}

/// The rows of a page before they are encoded: a complete one's where `staged` is, if a prompt completes it,
/// with what there is of it already; else its open page's.
template <class Team, class State>
__device__ auto unencoded_rows(Team team, const State& s, const step_entry& entry, int page, int head,
                               const head_slice<typename State::element>& staged) {
  constexpr int d = State::head_dim;
  const auto open = s.open_slice(entry.sequence, page, head);
  const int page_begin = page * s.page.tokens;
  if (entry.phase == step_phase::decode || entry.after() < page_begin + s.page.tokens) return open;
  for (int t = 0; t < entry.before - page_begin; ++t) {
    put_row(team, d, open.key + t * open.stride, staged.key + t * staged.stride);
    put_row(team, d, open.value + t * open.stride, staged.value + t * staged.stride);
  }
  return staged;
}

/// True where a step completes page `page` of an entry, of those that it writes to.
template <class State>
__device__ bool completes(const State& s, const step_entry& entry, int page) {
  return entry.after() >= (page + 1) * s.page.tokens;
}
/// True where the rows of a page that a step completes stay in place until a block summarises them; not where
/// the next open page takes their room.
template <class State>
__device__ bool leaves_to_block(const State& s, const step_entry& entry, int page) {
  return s.pins == 0 && (!s.encoded || entry.phase == step_phase::prefill ||
                         s.fixed_slot(page, entry.after()) != slot_id::none);
}

/// Appends the rows of an entry that fall into one page to one head's slice of it in the store, or to where
/// they are before they are encoded, and, where the page stays in the fast tier, in its slot; summarises it
/// if it becomes complete, and finds what it is worth to be pinned.
template <class Team, class State, class Summary, class Pinning, class In>
__device__ void append_page(Team team, const State& s, const Summary& summary, const Pinning& pinning,
                            const step_entry& entry, int page, int head, const device_rows<In>& rows,
                            const head_slice<typename State::element>& staged,
                            const summary_scratch& scratch) {
  using element = typename State::element;
  constexpr int d = State::head_dim;
  const int page_begin = page * s.page.tokens, page_end = page_begin + s.page.tokens;
  const int first = entry.before > page_begin ? entry.before : page_begin;
  const int last = entry.after() < page_end ? entry.after() : page_end;
  if (first >= last) return;
  const store_page_id store_page = s.store_page(entry.sequence, page);
  const auto kept =
      s.encoded ? unencoded_rows(team, s, entry, page, head, staged) : slice_of(s.store, store_page, head);
  const slot_id fixed_slot = s.fixed_slot(page, entry.after());
  const bool in_slots = fixed_slot != slot_id::none;
  head_slice<element> slot;
  if (in_slots) slot = s.block_slice(entry.sequence, fixed_slot, head);
  const float key_scale = s.scaled_by(s.key_scales, head, 1.0f), value_scale = s.value_scale_of(head);
  for (int token = first; token < last; ++token) {
    const head_slice<const In> row = rows.row(entry, token, head);
    const int t = token - page_begin;
    put_row(team, d, row.key, kept.key + t * kept.stride, key_scale);
    put_row(team, d, row.value, kept.value + t * kept.stride, value_scale);
    if (!in_slots) continue;
    put_row(team, d, row.key, slot.key + t * slot.stride, key_scale);
    put_row(team, d, row.value, slot.value + t * slot.stride, value_scale);
  }
  if (last < page_end || s.kind_of(head) != layer_kind::retrieval) return;
  if constexpr (block_summary<Summary>::there)
    if (leaves_to_block(s, entry, page)) return;
  team.sync();
  head_slice<const element> summarised = as_const(in_slots ? slot : kept);
  // What has come as a whole need not come back from the slow tier.
  if (const auto given = rows.template elements<element>(entry, page_begin, head, s.key_scales != nullptr);
      !in_slots && first == page_begin && given.key != nullptr)
    summarised = given;
  for (int nth = 0; nth < s.units_per_page; ++nth) {
    summarise_unit<element>(team, summary_at(summary, s.layer, head),
                            rows_behind(summarised, s.first_row_of(nth)), s.unit, scratch,
                            s.summary_of(store_page, head, nth));
    team.sync();  // the numbers are free again
    if constexpr (!std::is_same_v<Pinning, no_pins>) {
      if (s.pins == 0) continue;
      const float worth = pinning.worth(team, unit_keys{scratch.keys, s.unit}, scratch.numbers);
      if (team.lane() == 0) s.pin_worth_of(store_page, head, nth) = freekv::detail::pin_worth(worth);
      team.sync();  // and the keys
    }
  }
}

/// Copies the first `count` units of a list, and who has selected them. By a block.
__device__ inline void copy_units(const unit_union& from, int count, const unit_union& to) {
  const int thread = thread_x(), threads = threads_x();
#pragma unroll 1
  for (int i = thread; i < count; i += threads) to.units[i] = from.units[i];
#pragma unroll 1
  for (int i = thread; i < count * from.words; i += threads) to.masks[i] = from.masks[i];
}

/// Floats of a block's memory in which it judges one head's drift: its group's queries, and those before. All
/// devices have room for `most_drift_floats`.
FREEKV_HD constexpr int drift_floats(int group, int head_dim) { return 2 * group * head_dim; }
inline constexpr int most_drift_floats = (96 << 10) / static_cast<int>(sizeof(float));

/// Flags one head of a decode entry that is to select anew, counts the flag, and keeps the entry's queries,
/// which make the next selection. What the head has selected is what it attends to, until a correction says
/// otherwise. A prompt's head forgets its selection. By a block, whose teams all judge alike; loads that do
/// not depend on each other are on their way together. `shared`: `drift_floats`.
template <class State, class Correction>
__device__ void detect_drift(const State& s, const Correction& correction, const step_entry& entry, int head,
                             const step_queries& queries, float* shared) {
  constexpr int d = State::head_dim;
  if (entry.phase == step_phase::prefill)
    return freekv::detail::drop_selection(block_team{}, s, entry.sequence, head);
  constexpr lane_team<16, 1> copying{};
  const int thread = thread_x(), threads = threads_x(), group = s.heads.group(), numbers = group * d;
  const std::size_t at_head = s.head_index(entry.sequence, head);
  float *const now = shared, *const before = shared + numbers;
  const int selected_count = s.selected_count[at_head];
  // Query heads of row 0, and of the step before, before they are overwritten: by a team each.
  const auto query_of = [&](int row) {
    return queries.row(entry.first_row + row, std::int64_t{head} * group * d);
  };
  const auto stage_now = [&](int row, int g) {
    visit_numbers(query_of(row), [&](const auto* from) { copying.widen(from + g * d, now + g * d, d); });
  };
  const int teams = threads / copying.lanes(), nth_team = thread / copying.lanes();
  for (int i = nth_team; i < (entry.kept_row < 0 ? group : 2 * group); i += teams)
    if (i < group)
      stage_now(0, i);
    else
      copying.widen(s.kept_query(entry.sequence, head, entry.kept_row) + (i - group) * d,
                    before + (i - group) * d, d);
  copy_units(s.selected_union(entry.sequence, head), s.max_selected, s.attended_union(entry.sequence, head));
  __syncthreads();
  int staged = 0;
  const auto query = [&](int row) -> const float* {
    if (row != staged) {
      __syncthreads();  // all have read the row before
      for (int g = nth_team; g < group; g += teams) stage_now(row, g);
      __syncthreads();
      staged = row;
    }
    return now;
  };
  const bool anew = selects_anew(row_team<d>{}, correction, entry, {before, group, d}, query);
  if (thread == 0) {
    if (begin_report(s, entry.sequence, head, anew)) atomicAdd(s.flagged_count, 1);
    // until a correction selects for the next step, too
    s.next_selected_count[at_head] = -1;
    s.attended_count[at_head] = selected_count;
  }
#pragma unroll 1
  for (int row = 0; row < entry.tokens; ++row) {
    const float* const from = query(row);
    float* const kept = s.kept_query(entry.sequence, head, row);
    for (int i = thread; i < numbers; i += threads) kept[i] = from[i];
  }
}

/// Appends a run of pages by the first `appending` blocks, whose teams take a page and head of an entry each;
/// with the first of a retrieval layer's pages the others each find whether an entry's head has drifted.
template <class State, class Summary, class Pinning, class Correction, class In>
__global__ void append_and_detect(State s, Summary summary, Pinning pinning, Correction correction,
                                  step_view step, device_rows<In> rows, page_run run, int appending,
                                  append_scratch scratch,
                                  encoding_scratch<typename State::element> encoding) {
  using team_type = summary_team_t<Summary, State::head_dim>;
  extern __shared__ float drift_memory[];
  wait_for_kernel_before();
  let_kernel_behind_begin();  // which may read at once what has been there before this kernel
  const int heads = s.heads.kv, entries = step.size(), pages = step.bounds.pages;
  if (block_x() >= appending) {
    const int at = block_x() - appending;
    if (at / heads < entries)
      detect_drift(s, correction, step.entries[at / heads], at % heads, rows.queries, drift_memory);
    return;
  }
  const team_type team;
  const int nth = (block_x() * threads_x() + thread_x()) / team.lanes();
  const int teams = appending * threads_x() / team.lanes();
  float* const mine = scratch.data + nth * scratch.each();
  const std::int64_t tasks = std::int64_t{max(0, min(run.count, entries * pages - run.first))} * heads;
  for (std::int64_t task = nth; task < tasks; task += teams) {
    const int nth_of_run = static_cast<int>(task / heads), head = static_cast<int>(task % heads);
    const step_entry& entry = step.entries[(run.first + nth_of_run) / pages];
    const int first = entry.before / s.page.tokens, open = entry.after() / s.page.tokens;
    const int page = first + (run.first + nth_of_run) % pages;
    const bool in_order = s.appends_last_page_behind(entry);
    if (in_order && page == open) continue;
    const int last = in_order && page == first ? open : page;
    for (int one = page;; one = last) {
      append_page(team, s, summary, pinning, entry, one, head, rows,
                  encoding.staged.slice(s, nth_of_run, head), {mine, mine + scratch.keys});
      if (one == last) break;
      team.sync();
    }
  }
}

/// Memory of a pipeline that appending on one stream needs.
template <class Element>
struct append_memory {
  append_scratch of_teams;
  encoding_scratch<Element> encoding;  // if pages are encoded
};

/// Appends the rows of some pages of a step to a layer and summarises those they complete; with the first
/// pages, finds the heads that have drifted.
template <class State, class Summary, class Pinning, class Correction, class In>
void launch_append(const State& s, const Summary& summary, const Pinning& pinning,
                   const Correction& correction, const step_view& step, const device_rows<In>& rows,
                   const page_run& pages, const append_memory<typename State::element>& memory,
                   cudaStream_t stream) {
  constexpr append_tuning tuning = append_default;
  constexpr int lanes = summary_team_t<Summary, State::head_dim>::lane_count;
  const std::int64_t tasks = std::int64_t{pages.count} * s.heads.kv;
  const int most_blocks = memory.of_teams.teams * lanes / tuning.threads;
  const int appending = std::min(most_blocks, blocks_for(tasks * lanes, tuning.threads));
  const bool detects = s.kind == layer_kind::retrieval && pages.first == 0;
  const int detecting = detects ? step.bounds.entries * s.heads.kv : 0;
  const auto bytes = to_size(detects ? drift_floats(s.heads.group(), State::head_dim) : 0) * sizeof(float);
  launch("append", {appending + detecting, tuning.threads, stream, bytes, true},
         append_and_detect<State, Summary, Pinning, Correction, In>, s, summary, pinning, correction, step,
         rows, pages, appending, memory.of_teams, memory.encoding);
}

}  // namespace freekv::device
