// Selection and slots of a sequence between steps, on the device: forgetting, restoring, truncation, fork.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <span>

namespace freekv::device {

struct slots_tuning {
  int threads = 128;    ///< of a block, of which each warp copies one head's slice of a slot
  int registers = 112;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr slots_tuning slots_default{};
static_assert(slots_default.valid());

/// All layers of a pipeline; the device reads its own copy of them.
template <class State>
struct all_layers {
  std::span<const State> host;
  State* device = nullptr;

  unsigned count() const { return static_cast<unsigned>(host.size()); }
  unsigned heads() const { return static_cast<unsigned>(host.front().heads.kv); }
  template <class Is>
  bool any(const Is& is) const {
    return std::any_of(host.begin(), host.end(), is);
  }
  /// Blocks of `slots_default` for a warp for each of a layer's `tasks(layer)`, the most there are.
  template <class Tasks>
  dim3 warps(const Tasks& tasks) const {
    std::int64_t most = 1;
    for (const State& s : host) most = std::max(most, std::int64_t{tasks(s)});
    return {static_cast<unsigned>(blocks_for(most * 32, slots_default.threads)), count()};
  }
};

/// Forgets the selection of a sequence in all layers, and its report.
template <class State>
__global__ void forget_selection(const State* layers, int sequence, bool report_too) {
  constexpr lane_team<32, 1> warp{};
  const int head = block_x();
  const State& s = layers[blockIdx.y];
  drop_selection(warp, s, sequence, head);
  if (report_too && warp.lane() == 0) clear_report(s, sequence, head);
}
template <class State>
void launch_forget(const all_layers<State>& layers, int sequence, bool report_too, cudaStream_t stream) {
  launch("forgetting a selection", {dim3(layers.heads(), layers.count()), 32, stream},
         forget_selection<State>, layers.device, sequence, report_too);
}

/// The slots of a sequence that are filled from the store, in all layers: sink pages from `first_sink` on,
/// the window ring, and what the selected slots are to hold.
struct filled_slots {
  int sequence = 0;
  int tokens = 0;  // of the sequence
  int first_sink = 0;
  bool selected = false;
  truncation lost{};  // what it has lost, where it has been truncated: `before` is 0 where it is restored

  template <class State>
  FREEKV_HD bool fills(const State& s) const {
    return lost.before == 0 ? s.keeps_slots : lost.window_lacks_pages(s);
  }
  template <class State>
  bool fills_any(const all_layers<State>& layers) const {
    return layers.any([&](const State& s) { return fills(s); });
  }
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

/// Page that sink or ring slot `slot` of a sequence of `tokens` tokens has, or has next.
template <class State>
FREEKV_HD int page_of_slot(const State& s, int slot, int tokens) {
  if (slot < s.slots.sink) return slot;
  int page = s.slots.ring_begin(tokens, s.page.tokens);
  while (s.slots.ring_slot(page) != slot_id{slot}) ++page;
  return page;
}

template <class State, class Codec>
__global__ void fill_slots(const State* layers, Codec codec, filled_slots fill) {
  const State& s = layers[blockIdx.y];
  if (!fill.fills(s)) return;
  const int task = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int slot = task / s.heads.kv, head = task % s.heads.kv, fixed = s.slots.fixed(), p = s.page.tokens;
  if (slot < fixed) {
    const int page = page_of_slot(s, slot, fill.tokens);
    if (page < fill.first_sink && slot < s.slots.sink) return;
    const int rows = min(p, fill.tokens - page * p);
    if (rows > 0)
      fill_slot(s, codec, {fill.sequence, head}, fill.tokens, {page, 0, rows},
                s.block_slice(fill.sequence, slot_id{slot}, head));
  } else if (const int i = slot - fixed; fill.selected && i < s.slots.selected) {
    const std::int32_t held = s.slots_of(fill.sequence, head).unit[i];
    if (held >= 0)
      fill_slot(s, codec, {fill.sequence, head}, fill.tokens,
                {s.page_of(held), s.first_row_of(held), s.unit.tokens},
                s.selected_slice(fill.sequence, i, head));
  }
}
template <class State, class Codec>
void launch_fill(const all_layers<State>& layers, const Codec& codec, const filled_slots& fill,
                 cudaStream_t stream) {
  if (!fill.fills_any(layers)) return;
  const dim3 grid = layers.warps([&](const State& s) {
    return (s.slots.fixed() + (fill.selected ? s.slots.selected : 0)) * s.heads.kv;
  });
  launch("filling slots", {grid, slots_default.threads, stream}, fill_slots<State, Codec>, layers.device,
         codec, fill);
}

/// Reads a complete page of a sequence to where its rows are while it is open, as it is to be again.
template <class State, class Codec>
__global__ void reopen_page(const State* layers, Codec codec, int sequence, truncation to) {
  const int head = block_x();
  const State& s = layers[blockIdx.y];
  if (!to.reopens_page(s)) return;
  const int page = to.tokens / s.page.tokens;
  decode_by_lanes<32>(s, codec, {sequence, head}, {page, 0, s.page.tokens},
                      s.open_slice(sequence, page, head));
}
template <class State, class Codec>
void launch_reopen(const all_layers<State>& layers, const Codec& codec, int sequence, const truncation& to,
                   cudaStream_t stream) {
  launch("reopening a page", {dim3(layers.heads(), layers.count()), 32, stream}, reopen_page<State, Codec>,
         layers.device, codec, sequence, to);
}

/// Array that a layer keeps by sequence.
struct sequence_array {
  std::byte* data = nullptr;
  std::size_t of_sequence = 0;  // bytes
};
/// Calls `use(array)` for all that a layer's selection keeps by sequence, previous queries too.
template <class State, class Use>
void for_each_sequence_array(State s, const Use& use) {
  for_each_array_and_queries(s, [&]<class T>(T* array, std::size_t of_sequence) {
    use(sequence_array{reinterpret_cast<std::byte*>(array), of_sequence * sizeof(T)});
  });
}

/// Gives sequence `to` what `from` has in these arrays.
template <class Array>  // a template, as a header's kernels are: each program has one of it
__global__ void copy_arrays(const Array* arrays, int from, int to) {
  const Array array = arrays[blockIdx.x];
  const std::byte* const source = array.data + to_size(from) * array.of_sequence;
  std::byte* const copied = array.data + to_size(to) * array.of_sequence;
  for (std::size_t i = threadIdx.x; i < array.of_sequence; i += blockDim.x) copied[i] = source[i];
}
/// Gives sequence `to` what the slots of `from`, which has `tokens` tokens, hold, where both have them, and
/// the open pages where others are encoded.
template <class State>
__global__ void copy_slots(const State* layers, int from, int to, int tokens) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  const State& s = layers[blockIdx.y];
  const int task = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32), p = s.page.tokens;
  const int head = task % s.heads.kv, slots = s.keeps_slots ? s.slots.total() : 0, slot = task / s.heads.kv;
  if (slot >= slots + (s.encoded ? s.open_pages : 0)) return;
  const auto copy = [&](const auto& slice, int first, int rows) {
    copy_slice_by_warp(pieces{rows_behind(slice(from), first), rows},
                       pieces{rows_behind(slice(to), first), rows});
  };
  if (slot >= slots)
    return copy([&](int sequence) { return s.open_slice(sequence, slot - slots, head); }, 0, p);
  const auto is_there = [&](int sequence) { return number_of(s.block(sequence, slot_id{slot})) >= 0; };
  if (!(is_there(from) && is_there(to))) return;
  const auto in_slot = [&](int sequence) { return s.block_slice(sequence, slot_id{slot}, head); };
  if (slot < s.slots.fixed()) {
    if (const int rows = min(p, tokens - page_of_slot(s, slot, tokens) * p); rows > 0) copy(in_slot, 0, rows);
    return;
  }
  const int first = (slot - s.slots.fixed()) * s.units_per_page;
  for (int i = first; i < min(first + s.units_per_page, s.slots.selected); ++i)
    if (s.slots_of(from, head).unit[i] >= 0) copy(in_slot, s.first_row_of(i), s.unit.tokens);
}
template <class State>
void launch_fork(const all_layers<State>& layers, std::span<const sequence_array> arrays, int from, int to,
                 int tokens, cudaStream_t stream) {
  launch("copying a selection", {static_cast<unsigned>(arrays.size()), slots_default.threads, stream},
         copy_arrays<sequence_array>, arrays.data(), from, to);
  const dim3 grid = layers.warps([](const State& s) {
    return ((s.keeps_slots ? s.slots.total() : 0) + (s.encoded ? s.open_pages : 0)) * s.heads.kv;
  });
  launch("copying slots", {grid, slots_default.threads, stream}, copy_slots<State>, layers.device, from, to,
         tokens);
}

/// Moves what a sequence's selected slots hold to the lowest ones. By one warp a KV head.
template <class State>
__global__ void compact_slots(State s, int sequence) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  const int head = block_x();
  const auto slice = [&](int slot) { return pieces{s.selected_slice(sequence, slot, head), s.unit.tokens}; };
  freekv::detail::compact_slots(s.slots_of(sequence, head), [&](int from, int to) {
    copy_slice_by_warp(slice(from), slice(to));
    __syncwarp();
    if (threadIdx.x == 0) note_move(s, sequence, head, from, to);
    __syncwarp();
  });
}
template <class State>
void launch_compact_slots(const State& s, int sequence, cudaStream_t stream) {
  launch("compacting slots", {s.heads.kv, 32, stream}, compact_slots<State>, s, sequence);
}

}  // namespace freekv::device
