// Pinning: the units of a head that are selected whatever their scores.
#pragma once

#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/block_selection.cuh>
#include <freekv/backend/cuda/radix_select.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>

namespace freekv::device {

struct pin_tuning {
  int threads = 256;   ///< of a block
  int registers = 64;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr pin_tuning pin_default{};
static_assert(pin_default.valid());

/// Pins the units of a KV head that are worth most, where an entry selects anew after a prompt or a
/// truncation.
template <class State>
__global__ void pin_units(State s, step_view step, selection_job job) {
  __shared__ typename radix_select<pin_default.threads>::storage shared;
  const int head = block_x(), nth = block_y();
  if (nth >= step.size() || !s.pins_anew(step.entries[nth])) return;
  const step_entry& entry = step.entries[nth];
  const row_candidates candidates = candidates_of(s, entry, head, job);
  if (!candidates.selects) return;
  const std::size_t at_head = s.head_index(entry.sequence, head);
  const int count = min(s.pins, candidates.now);
  const auto worth = [&](int i) { return s.pin_worth_of_unit(entry.sequence, head, candidates.first + i); };
  const radix_select<pin_default.threads> select(shared);
  select.largest(
      [&](int i) { return order_bits(worth(i)); }, candidates.now, count,
      [&](int i, int j) { s.pinned[at_head * to_size(s.pins) + to_size(i)] = candidates.first + j; });
  __syncthreads();  // all have read how many there were
  if (threadIdx.x == 0) s.pinned_count[at_head] = count;
}
template <class State>
void launch_pin_units(const State& s, const step_view& step, const selection_job& job, cudaStream_t stream) {
  const dim3 heads(static_cast<unsigned>(s.heads.kv), static_cast<unsigned>(step.bounds.entries));
  launch("pinning", {heads, pin_default.threads, stream}, pin_units<State>, s, step, job);
}

}  // namespace freekv::device
