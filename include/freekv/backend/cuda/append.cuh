// Append, summarise, offload and drift on the device, in one launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step.cuh>
#include <freekv/functors/summarise_page.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/box_summaries.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/mean_summaries.hpp>
#include <freekv/policies/pinning.hpp>

namespace freekv::device {

struct append_tuning {
  int threads = 128;   ///< of a block
  int registers = 88;  ///< of a thread at most, where units are pinned
  int most_teams =
      512;  ///< that run at a time, each with scratch of a page of float keys; more units take turns
  constexpr bool valid() const {
    return valid_block(threads, registers) && most_teams % threads == 0 && most_teams > 0;
  }
};
inline constexpr append_tuning append_default{};
static_assert(append_default.valid());

/// The team on which a summary's functors run: whole rows where their numbers are head_dim apart, else the narrowest that
/// every count of numbers is a multiple of.
template <class Summary, int HeadDim>
struct summary_team {
  using type = lane_team<8, 1>;
};
template <int HeadDim>
struct summary_team<min_max, HeadDim> {
  using type = row_team<HeadDim>;
};
template <int HeadDim>
struct summary_team<centroid_box, HeadDim> {
  using type = row_team<HeadDim>;
};
template <int HeadDim>
struct summary_team<mean, HeadDim> {
  using type = row_team<HeadDim>;
};
template <class Summary, int HeadDim>
using summary_team_t = typename summary_team<Summary, HeadDim>::type;

/// The rows of a step in device memory, as `new_rows` has them.
template <class In>
struct device_rows {
  const In* keys = nullptr;
  const In* values = nullptr;
  const float* queries = nullptr;
};

/// Floats of scratch of one team: a page's keys, and a summary's numbers, or where units are pinned a key.
struct append_scratch {
  float* data = nullptr;
  std::int64_t keys = 0, numbers = 0;
  FREEKV_HD std::int64_t each() const { return keys + numbers; }
};

/// One row of head_dim elements, rounded where it is of floats.
template <class Team, class Element, class In>
__device__ void put_row(Team team, int head_dim, const In* from, Element* to) {
  for (int i = team.lane(); i < head_dim; i += team.lanes()) {
    if constexpr (std::is_same_v<In, Element>)
      to[i] = from[i];
    else
      to[i] = from_float<Element>(from[i]);
  }
}

/// Appends the rows of an entry that fall into one page to one head's slice of it in the store and, where the page stays
/// in the fast tier, in its slot; summarises it if it becomes complete, and finds what it is worth to be pinned.
template <class Team, class State, class Summary, class Pinning, class In>
__device__ void append_page(Team team, const State& s, const Summary& summary, const Pinning& pinning,
                            const step_entry& entry, int page, int head, const device_rows<In>& rows,
                            const summary_scratch& scratch) {
  using element = typename State::element;
  constexpr int d = State::head_dim;
  const int page_begin = page * s.page.tokens, page_end = page_begin + s.page.tokens;
  const int first = entry.before > page_begin ? entry.before : page_begin;
  const int last = entry.after() < page_end ? entry.after() : page_end;
  if (first >= last) return;
  const std::int32_t store_page = s.store_page(entry.sequence, page);
  const auto kept = slice_of(s.store, store_page, head);
  const bool in_slots =
      s.keeps_slots && (page < s.slots.sink || page >= s.slots.ring_begin(entry.after(), s.page.tokens));
  head_slice<element> slot;
  if (in_slots)
    slot = s.frame_slice(entry.sequence,
                         page < s.slots.sink ? s.slots.sink_slot(page) : s.slots.ring_slot(page), head);
  for (int token = first; token < last; ++token) {
    const std::int64_t row = (std::int64_t{entry.first_row + token - entry.before} * s.heads.kv + head) * d;
    const int t = token - page_begin;
    put_row(team, d, rows.keys + row, kept.key + t * kept.stride);
    put_row(team, d, rows.values + row, kept.value + t * kept.stride);
    if (!in_slots) continue;
    put_row(team, d, rows.keys + row, slot.key + t * slot.stride);
    put_row(team, d, rows.values + row, slot.value + t * slot.stride);
  }
  if (last < page_end || s.kind_of(head) != layer_kind::retrieval) return;
  team.sync();
  for (int nth = 0; nth < s.units_per_page; ++nth) {
    summarise_page<element>(team, summary_at(summary, s.layer, head),
                            as_const(rows_behind(in_slots ? slot : kept, s.row_of(nth))), s.unit, scratch,
                            s.summary_of(store_page, head, nth));
    team.sync();  // the numbers are free again
    if constexpr (!std::is_same_v<Pinning, no_pins>) {
      if (s.pins == 0) continue;
      const float worth = pinning.worth(team, page_keys{scratch.keys, s.unit}, scratch.numbers);
      if (team.lane() == 0) s.pin_worth_of(store_page, head, nth) = worth == worth ? worth : -infinity;
      team.sync();  // and the keys
    }
  }
}

/// Forgets what one head of a sequence has selected, and what its selected slots hold.
template <class Team, class State>
__device__ void drop_selection(Team team, const State& s, int sequence, int head) {
  const slot_contents slots = s.slots_of(sequence, head);
  for (int i = team.lane(); i < slots.count; i += team.lanes()) {
    slots.page[i] = -1;
    slots.last_selected[i] = 0;
  }
  if (team.lane() != 0) return;
  const std::size_t row = s.row(sequence, head);
  s.selected_count[row] = 0;
  s.pinned_count[row] = 0;
  s.upcoming_count[row] = -1;
  s.selections[row] = 0;
  s.unrecalled[row] = 0;
}

/// Flags one head of a decode entry that has no selection, or that the correction does not accept a row's queries from;
/// then keeps the entry's queries, which make the next selection. A prompt's head forgets its selection.
template <class Team, class State, class Correction>
__device__ void detect_drift(Team team, const State& s, const Correction& correction, const step_entry& entry,
                             int head, const float* queries) {
  constexpr int d = State::head_dim;
  if (entry.kind == row_kind::prompt) return drop_selection(team, s, entry.sequence, head);
  const int group = s.heads.group();
  const auto query = [&](int row) {
    return queries + (std::int64_t{entry.first_row + row} * s.heads.query + head * group) * d;
  };
  bool flagged = entry.kept_row < 0;
  if constexpr (requires { correction.flags(team, query_change{}); })
    for (int row = 0; row < entry.tokens && !flagged; ++row)
      flagged =
          correction.flags(team, query_change{{query(row), group, d},
                                              {s.kept_query(entry.sequence, head, entry.kept_row), group, d},
                                              entry.decode_step});
  if (team.lane() == 0) {
    const std::size_t at = s.row(entry.sequence, head);
    s.corrected[at] = flagged && s.kind_of(head) == layer_kind::retrieval;
    s.recalled[at] = s.recalled_before_attention[at] = s.promoted[at] = 0;
  }
  team.sync();  // all lanes have read the previous queries
  for (int row = 0; row < entry.tokens; ++row) {
    float* const kept = s.kept_query(entry.sequence, head, row);
    for (int i = team.lane(); i < group * d; i += team.lanes()) kept[i] = query(row)[i];
  }
}

/// Copies the rows of open pages that sequences share to pages of the entries' own: before anything is appended, since
/// the last of those that shared a page writes to it.
template <class State>
__global__ void copy_shared_rows(State s, step_view step) {
  constexpr int d = State::head_dim;
  const int head = static_cast<int>(blockIdx.x), nth = static_cast<int>(blockIdx.y);
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  if (entry.shared_page < 0) return;
  const auto from = slice_of(s.store, entry.shared_page, head);
  const auto to = slice_of(s.store, s.store_page(entry.sequence, entry.before / s.page.tokens), head);
  const int numbers = entry.before % s.page.tokens * d;
  for (int i = static_cast<int>(threadIdx.x); i < numbers; i += static_cast<int>(blockDim.x)) {
    to.key[i / d * to.stride + i % d] = from.key[i / d * from.stride + i % d];
    to.value[i / d * to.stride + i % d] = from.value[i / d * from.stride + i % d];
  }
}

/// A unit of work is a page and head of an entry, or behind these, in retrieval layers, an entry's head that may drift.
template <class State, class Summary, class Pinning, class Correction, class In>
__global__ void append_and_detect(State s, Summary summary, Pinning pinning, Correction correction,
                                  step_view step, device_rows<In> rows, append_scratch scratch) {
  using team_type = summary_team_t<Summary, State::head_dim>;
  const team_type team;
  const int heads = s.heads.kv, entries = step.size(), pages = step.most.pages;
  const int nth = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / team.lanes());
  const int teams = static_cast<int>(gridDim.x * blockDim.x) / team.lanes();
  float* const mine = scratch.data + nth * scratch.each();
  const std::int64_t appended = std::int64_t{entries} * pages * heads;
  const std::int64_t units = appended + (s.kind == layer_kind::retrieval ? entries * heads : 0);
  for (std::int64_t unit = nth; unit < units; unit += teams) {
    if (unit < appended) {
      const step_entry& entry = step.entries[unit / heads / pages];
      append_page(team, s, summary, pinning, entry,
                  entry.before / s.page.tokens + static_cast<int>(unit / heads % pages),
                  static_cast<int>(unit % heads), rows, {mine, mine + scratch.keys});
    } else {
      const int at = static_cast<int>(unit - appended);
      detect_drift(team, s, correction, step.entries[at / heads], at % heads, rows.queries);
    }
  }
}

/// Appends the rows of a step to a layer, summarises the pages they complete, and finds the heads that have drifted.
/// `scratch` is of `append_default.most_teams` teams, and used on the compute stream alone.
template <class State, class Summary, class Pinning, class Correction, class In>
void launch_append(const State& s, const Summary& summary, const Pinning& pinning,
                   const Correction& correction, const step_view& step, const device_rows<In>& rows,
                   const append_scratch& scratch, cudaStream_t stream) {
  constexpr append_tuning tuning = append_default;
  constexpr int lanes = summary_team_t<Summary, State::head_dim>::lane_count;
  const std::int64_t units = std::int64_t{step.most.entries} * (step.most.pages + 1) * s.heads.kv;
  if (units == 0) return;
  if (step.most.copies) {
    const dim3 grid(static_cast<unsigned>(s.heads.kv), static_cast<unsigned>(step.most.entries));
    copy_shared_rows<<<grid, tuning.threads, 0, stream>>>(s, step);
    check(cudaGetLastError(), "copy of shared rows");
  }
  const int most_blocks = tuning.most_teams * lanes / tuning.threads;
  append_and_detect<<<std::min(most_blocks, blocks_for(units * lanes, tuning.threads)), tuning.threads, 0,
                      stream>>>(s, summary, pinning, correction, step, rows, scratch);
  check(cudaGetLastError(), "append");
}

}  // namespace freekv::device
