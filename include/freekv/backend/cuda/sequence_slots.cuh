// What happens to a sequence's selection and slots between steps, on the device: forgetting, restoring, truncation, fork.
#pragma once

#include <cstdint>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

struct slots_tuning {
  int threads = 128;   ///< of a block, of which each warp copies one head's slice of a slot
  int registers = 96;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr slots_tuning slots_default{};
static_assert(slots_default.valid());

/// Forgets the selection of a sequence, and its report.
template <class State>
__global__ void forget_selection(State s, int sequence, bool report_too) {
  constexpr lane_team<32, 1> warp{};
  const int head = static_cast<int>(blockIdx.x);
  drop_selection(warp, s, sequence, head);
  if (!report_too || warp.lane() != 0) return;
  const std::size_t row = s.head_index(sequence, head);
  s.corrected[row] = 0;
  s.attended_count[row] = s.recalled[row] = s.recalled_before_attention[row] = s.promoted[row] = 0;
}
template <class State>
void launch_forget(const State& s, int sequence, bool report_too, cudaStream_t stream) {
  launch("forgetting a selection", {s.heads.kv, 32, stream}, forget_selection<State>, s, sequence,
         report_too);
}

/// The slots of a sequence that are filled from the store: sink pages from `first_sink` on, the window ring, and what the
/// selected slots are to hold.
struct filled_slots {
  int sequence = 0;
  int tokens = 0;  // of the sequence
  int first_sink = 0;
  bool selected = false;
};

/// Fills a slot with some rows of a page of a sequence of `tokens` tokens.
template <class State, class Codec>
__device__ void fill_slot(const State& s, const Codec& codec, const sequence_head& at, int tokens,
                          const page_range& part, const head_slice<typename State::element>& to) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  if (encodes_pages<Codec> && part.page < tokens / s.page.tokens)
    return decode_by_lanes<32>(s, codec, at, part, to);
  const auto from = encodes_pages<Codec> ? s.open_slice(at.sequence, part.page, at.head)
                                         : s.store_slice(at.sequence, part.page, at.head);
  copy_slice_by_warp(pieces{rows_behind(from, part.first), part.tokens}, pieces{to, part.tokens});
}

template <class State, class Codec>
__global__ void fill_slots(State s, Codec codec, filled_slots fill) {
  const int unit = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int slot = unit / s.heads.kv, head = unit % s.heads.kv, fixed = s.slots.fixed(), p = s.page.tokens;
  if (slot < fixed) {
    int page = slot;
    if (slot >= s.slots.sink) {
      page = s.slots.ring_begin(fill.tokens, p);
      while (s.slots.ring_slot(page) != slot) ++page;
    } else if (page < fill.first_sink) {
      return;
    }
    const int rows = min(p, fill.tokens - page * p);
    if (rows > 0)
      fill_slot(s, codec, {fill.sequence, head}, fill.tokens, {page, 0, rows},
                s.block_slice(fill.sequence, slot, head));
  } else if (const int i = slot - fixed; fill.selected && i < s.slots.selected) {
    const std::int32_t held = s.slots_of(fill.sequence, head).unit[i];
    if (held >= 0)
      fill_slot(s, codec, {fill.sequence, head}, fill.tokens,
                {s.page_of(held), s.first_token_of(held), s.unit.tokens},
                s.selected_slice(fill.sequence, i, head));
  }
}
template <class State, class Codec>
void launch_fill(const State& s, const Codec& codec, const filled_slots& fill, cudaStream_t stream) {
  const std::int64_t slots = s.slots.fixed() + (fill.selected ? s.slots.selected : 0);
  launch("filling slots",
         {blocks_for(slots * s.heads.kv * 32, slots_default.threads), slots_default.threads, stream},
         fill_slots<State, Codec>, s, codec, fill);
}

/// Reads a complete page of a sequence to where its rows are while it is open, as it is to be again.
template <class State, class Codec>
__global__ void reopen_page(State s, Codec codec, int sequence, int page) {
  const int head = static_cast<int>(blockIdx.x);
  decode_by_lanes<32>(s, codec, {sequence, head}, {page, 0, s.page.tokens},
                      s.open_slice(sequence, page, head));
}
template <class State, class Codec>
void launch_reopen(const State& s, const Codec& codec, int sequence, int page, cudaStream_t stream) {
  launch("reopening a page", {s.heads.kv, 32, stream}, reopen_page<State, Codec>, s, codec, sequence, page);
}

/// Gives sequence `to` what the first `slots` slots of `from` hold, and its open pages where others are encoded.
template <class State>
__global__ void copy_slots(State s, int from, int to, int slots) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  const int unit = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int slot = unit / s.heads.kv, head = unit % s.heads.kv;
  const auto slice = [&](int sequence) {
    return pieces{
        slot < slots ? s.block_slice(sequence, slot, head) : s.open_slice(sequence, slot - slots, head),
        s.page.tokens};
  };
  if (slot < slots + (s.encoded ? s.open_pages : 0)) copy_slice_by_warp(slice(from), slice(to));
}
template <class State>
void launch_copy_slots(const State& s, int from, int to, int slots, cudaStream_t stream) {
  const std::int64_t slices = std::int64_t{slots + (s.encoded ? s.open_pages : 0)} * s.heads.kv;
  if (slices == 0) return;
  launch("copying slots", {blocks_for(slices * 32, slots_default.threads), slots_default.threads, stream},
         copy_slots<State>, s, from, to, slots);
}

/// Moves what a sequence's selected slots hold to the lowest ones, as host::compact_slots. By one warp a KV head.
template <class State>
__global__ void compact_slots(State s, int sequence) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  const int head = static_cast<int>(blockIdx.x);
  const slot_contents held = s.slots_of(sequence, head);
  const auto slice = [&](int slot) { return pieces{s.selected_slice(sequence, slot, head), s.unit.tokens}; };
  std::int32_t* const slot_of = s.slot_of + s.selection(sequence, head);
  for (int to = 0, from = held.count - 1;;) {
    while (from > 0 && held.unit[from] < 0) --from;
    while (to < from && held.unit[to] >= 0) ++to;
    if (to >= from) return;
    copy_slice_by_warp(slice(from), slice(to));
    __syncwarp();
    if (threadIdx.x == 0) {
      held.unit[to] = held.unit[from];
      held.last_selected[to] = held.last_selected[from];
      held.unit[from] = -1;
      for (int i = 0; i < s.selected_count[s.head_index(sequence, head)]; ++i)
        if (slot_of[i] == from) slot_of[i] = to;
    }
    __syncwarp();
  }
}
template <class State>
void launch_compact_slots(const State& s, int sequence, cudaStream_t stream) {
  launch("compacting slots", {s.heads.kv, 32, stream}, compact_slots<State>, s, sequence);
}

}  // namespace freekv::device
