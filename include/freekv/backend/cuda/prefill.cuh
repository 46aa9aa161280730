// Attention of prompts: the pages of their sequences come to the staging area, as many as it holds, and all
// rows attend to them there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/attend.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/page_staging.cuh>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

struct prefill_tuning {
  int threads = 256;           ///< of a block that stages; each warp copies a slice
  int registers = 200;         ///< of a thread at most
  int tensor_registers = 255;  ///< the same by tensor cores
  int staged_tokens = 2048;    ///< of all sequences at a time: whole parts
  int rows = 256;              ///< that attend to what is staged; for more it is staged again
  constexpr bool valid() const {
    return valid_block(threads, registers) && valid_block(threads, tensor_registers) &&
           staged_tokens >= attend_default.part_tokens_of_all &&
           staged_tokens % attend_default.part_tokens_of_all == 0 && rows >= 1;
  }
};
inline constexpr prefill_tuning prefill_default{};
static_assert(prefill_default.valid());

/// A part of a row that attends to everything, in pages: as long as the longest sequence, if that is shorter.
FREEKV_HD constexpr int pages_of_part(int page_tokens, int max_pages) {
  const int each = entries_of_part(true, page_tokens, page_tokens);
  return each < max_pages ? each : max_pages;
}
/// Pages of the staging area of `sequences` sequences.
constexpr int staged_pages(int page_tokens, int max_pages, int sequences) {
  const std::int64_t each = pages_of_part(page_tokens, max_pages);
  const std::int64_t all = (max_pages + each - 1) / each * sequences;
  const std::int64_t tokens = entries_of_part(true, page_tokens, page_tokens) * std::int64_t{page_tokens};
  return static_cast<int>(each * std::clamp<std::int64_t>(prefill_default.staged_tokens / tokens, 1, all));
}

/// Parts of some entries' sequences that are staged together.
struct staged_parts {
  int first_entry = 0, entries = 0;
  int first_part = 0, parts = 0;  // of each
  int pages = 0;                  // of a part

  /// Number, among the staged pages, of page `page` of the step's entry `entry`.
  FREEKV_HD constexpr int nth(int entry, int page) const {
    return (entry - first_entry) * parts * pages + page - first_part * pages;
  }
};

/// The first page that any row of a prompt attends to.
template <class State>
FREEKV_HD int first_page_attended(const State& s, const step_entry& entry) {
  return s.pages_attended(entry, 0, 0, true).page(0);
}

/// A warp copies one head's slice of a page to the staging area, decoded, where any of `rows` attends to it.
template <class State, class Codec>
__global__ void stage_pages(State s, Codec codec, step_view step, attending_rows rows, staged_parts which,
                            page_staging<typename State::element> staging) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int head = block_y(), nth = which.first_entry + block_z();
  if (warp >= which.parts * which.pages || nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  if (!rows.overlap(entry)) return;
  const int p = s.page.tokens, page = which.first_part * which.pages + warp;
  if (entry.phase != step_phase::prefill || page < first_page_attended(s, entry) || page * p >= entry.after())
    return;
  const int tokens = min(p, entry.after() - page * p);
  const auto to = staging.slice(s, which.nth(nth, page), head);
  if constexpr (encodes_pages<Codec>) {
    if (tokens == p) return decode_by_lanes<32>(s, codec, {entry.sequence, head}, {page, 0, p}, to);
    copy_slice_by_warp(pieces{s.open_slice(entry.sequence, page, head), tokens}, pieces{to, tokens});
  } else {
    copy_slice_by_warp(pieces{s.store_slice(entry.sequence, page, head), tokens}, pieces{to, tokens});
  }
}

/// A team attends with a tile's query heads of one row to what is staged, part by part, each merged to what
/// came before.
template <multiplies By, class State>
__global__ void attend_staged(State s, step_view step, step_queries queries, attending_rows rows,
                              staged_parts which, page_staging<typename State::element> staging,
                              attention_scratch_memory scratch) {
  constexpr int d = State::head_dim;
  using element = typename State::element;
  using attention_type = tile_attention<By, d, element>;
  using block_type = attend_block<attention_type, d, element, identity>;
  alignas(16) extern __shared__ std::byte attend_memory[];
  auto& shared =
      reinterpret_cast<typename block_type::storage*>(attend_memory)[thread_x() / block_type::lanes];
  constexpr row_team<d> merging;
  const typename attention_type::team_type team;
  const auto tile = head_tile<attention_type::heads>::nth(block_y(), s.heads.group());
  const int nth = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / team.lanes());
  const step_entry* const entry = nth < rows.count ? step.entry_of(rows.first + nth) : nullptr;
  if (entry == nullptr || !rows.has(step, entry)) return;
  const auto list = attended_list::of(s, *entry, rows.first + nth, tile.kv_head, rows).entries;
  const int first_page = list.page(0), end_page = first_page + list.size();
  const parts_of_row of{std::int64_t{nth} * s.heads.query, rows.parts};
  for (int part = which.first_part; part < which.first_part + which.parts; ++part) {
    const int begin = max(part * which.pages, first_page), end = min((part + 1) * which.pages, end_page);
    if (begin >= end) continue;
    attention_type attention(shared);
    begin_tile<d>(team, attention, tile, queries, rows.first + nth, s.scale_of(tile.kv_head));
    const auto pages = [&](int page) {
      const page_range of_page = list.range(page - first_page);
      const auto slice =
          staging.slice(s, which.nth(static_cast<int>(entry - step.entries), page), tile.kv_head);
      return entry_rows<element>{as_const(rows_behind(slice, of_page.first)), of_page.tokens, ~0u};
    };
    attention.attend_entries(team, begin, end, pages, s.soft_cap);
    const bool behind = part > first_page / which.pages;  // what came before
    store_tile<d>(team, attention, tile, scratch, of, behind ? 1 : 0);
    team.sync();
    for (int h = team.lane() / merging.lanes(); behind && h < attention_type::heads && tile.has(h);
         h += team.lanes() / merging.lanes()) {
      const std::int64_t before = of.at(tile.query_head(h), 0);
      log_sum_exp log_sum = scratch.log_sum[before], of_part = scratch.log_sum[before + 1];
      merge_parts<d>(merging, attention_part{&of_part, scratch.weighted + (before + 1) * d},
                     attention_part{&log_sum, scratch.weighted + before * d}, 1);
      merging.sync();  // all lanes have read the log-sum-exp
      if (merging.lane() == 0) scratch.log_sum[before] = log_sum;
    }
    team.sync();  // the part's place is free again
  }
}

/// Attends the prompt rows of a step, whose sequences are at most `step.most.tokens` long, to all of their
/// past.
template <multiplies Wanted = multiplies::fma, class State, class Codec>
void launch_prefill(const State& s, const Codec& codec, const step_view& step, const step_queries& queries,
                    const attention_output& to, const page_staging<typename State::element>& staging,
                    const attention_scratch_memory& scratch, cudaStream_t stream) {
  constexpr int d = State::head_dim, of_row = 2;  // parts: what came before, and the next
  constexpr multiplies by = multiplies_for<Wanted, d, typename State::element>;
  using attention_type = tile_attention<by, d, typename State::element>;
  using block_type = attend_block<attention_type, d, typename State::element, identity>;
  constexpr int lanes = block_type::lanes, threads = block_type::size.threads;
  const auto count = [](int n) { return static_cast<unsigned>(n); };
  const int pages = pages_of_part(s.page.tokens, s.max_pages);
  const int parts = blocks_for(s.pages_of(step.bounds.tokens), pages);
  const int room = staging.pages / pages;
  const int tiles = head_tile<attention_type::heads>::tiles_of(s.heads.group());
  const int rows_at_once = freekv::device::rows_at_once(scratch, of_row, s.heads.query);
  staged_parts which{.entries = std::min(step.bounds.entries, room), .pages = pages};
  which.parts = std::min(parts, room / which.entries);
  for (; which.first_entry < step.bounds.entries; which.first_entry += which.entries)
    for (int first = 0; first < step.bounds.rows; first += rows_at_once) {
      const attending_rows rows{.first = first,
                                .count = std::min(rows_at_once, step.bounds.rows - first),
                                .parts = of_row,
                                .kind = rows_attending::prompts,
                                .first_entry = which.first_entry,
                                .entries = which.entries};
      for (which.first_part = 0; which.first_part < parts; which.first_part += which.parts) {
        constexpr int warps = prefill_default.threads / 32;
        const dim3 slices(count(blocks_for(which.parts * pages, warps)), count(s.heads.kv),
                          count(which.entries));
        launch("staging of pages", {slices, prefill_default.threads, stream}, stage_pages<State, Codec>, s,
               codec, step, rows, which, staging);
        const dim3 grid(count(blocks_for(std::int64_t{rows.count} * lanes, threads)),
                        count(s.heads.kv * tiles));
        launch("attention of prompts", {grid, threads, stream, attend_block_bytes<block_type>},
               attend_staged<by, State>, s, step, queries, rows, which, staging, scratch);
      }
      launch("output of prompts", {dim3(count(rows.count * s.heads.query)), warp_merge<d>::threads, stream},
             finish_prompts<State>, s, step, rows, scratch, to);
    }
}

}  // namespace freekv::device
