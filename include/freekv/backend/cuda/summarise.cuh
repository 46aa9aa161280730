// Summaries of the pages that a step completes, in a launch of their own where they are much work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/block_summary.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv::device {

struct summarise_tuning {
  int threads = 256;    ///< of a block, which summarises a unit
  int registers = 255;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr summarise_tuning summarise_default{};
static_assert(summarise_default.valid());

/// Summarises the units of the pages of a run that become complete, where appending leaves it to a block.
template <class State, class Summary>
__launch_bounds__(summarise_default.threads, 1) __global__
    void summarise_units(State s, Summary summaries, step_view step, page_run run, append_scratch scratch,
                         page_staging<typename State::element> staged) {
  using element = typename State::element;
  constexpr int d = State::head_dim;
  const team_of_block mine{};
  const int p = s.page.tokens;
  float* const keys = scratch.data + 2 * block_x() * scratch.each();
  float* const numbers = keys + scratch.keys;
  const std::int64_t units = std::int64_t{run.count} * s.heads.kv * s.units_per_page;
  for (std::int64_t i = block_x(); i < units; i += blocks_x()) {
    const auto nth = static_cast<int>(i % s.units_per_page);
    const std::int64_t of_page = i / s.units_per_page;
    const auto head = static_cast<int>(of_page % s.heads.kv);
    const auto nth_of_run = static_cast<int>(of_page / s.heads.kv);
    const int at = run.first + nth_of_run;
    if (at / step.bounds.pages >= step.size()) return;
    const step_entry& entry = step.entries[at / step.bounds.pages];
    const int page = entry.before / p + at % step.bounds.pages;
    if (!completes(s, entry, page) || s.kind_of(head) != layer_kind::retrieval ||
        !leaves_to_block(s, entry, page))
      continue;
    const slot_id fixed_slot = s.fixed_slot(page, entry.after());
    const store_page_id store_page = s.store_page(entry.sequence, page);
    const auto rows =
        rows_behind(as_const(fixed_slot != slot_id::none ? s.block_slice(entry.sequence, fixed_slot, head)
                             : s.encoded                 ? staged.slice(s, nth_of_run, head)
                                                         : slice_of(s.store, store_page, head)),
                    s.first_row_of(nth));
    __syncthreads();  // the scratch is free again
    for (int t = mine.nth; t < s.unit.tokens; t += mine.count)
      mine.team.widen(rows.key + t * rows.stride, keys + t * d, d);
    __syncthreads();
    std::byte* const to = s.summary_of(store_page, head, nth);  // here it takes a register less
    const auto summary = summary_at(summaries, s.layer, head);
    summarise_by_block<d>(summary, unit_keys{keys, s.unit}, numbers, keys + scratch.each());
    __syncthreads();
    encode_summary<element>(block_team{}, summary, s.unit, numbers, to);
  }
}

template <class State, class Summary>
void launch_summarise(const State& s, const Summary& summary, const step_view& step, const page_run& run,
                      const append_memory<typename State::element>& memory, cudaStream_t stream) {
  const std::int64_t units = std::int64_t{run.count} * s.heads.kv * s.units_per_page;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(units, memory.of_teams.teams / 2));
  launch("summaries", {blocks, summarise_default.threads, stream}, summarise_units<State, Summary>, s,
         summary, step, run, memory.of_teams, memory.encoding.staged);
}

}  // namespace freekv::device
