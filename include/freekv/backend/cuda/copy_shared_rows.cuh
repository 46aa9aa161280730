// Rows of open pages that sequences share, copied to pages of their own before a step writes to these.
#pragma once

#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/sequence_slots.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

struct copy_rows_tuning {
  int threads = 256;   ///< of a block, which copies a layer's rows of an entry
  int registers = 64;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr copy_rows_tuning copy_rows_default{};
static_assert(copy_rows_default.valid());

/// Copies the rows of the open page that an entry shares with others to its own, in all layers that keep
/// pages as they are. Before anything is appended, since the last of those that shared a page writes to it.
template <class State>
__global__ void copy_shared_rows(const State* layers, step_view step) {
  constexpr int d = State::head_dim;
  const int nth = block_x();
  if (nth >= step.size()) return;
  const step_entry& entry = step.entries[nth];
  if (entry.shared_page == store_page_id::none) return;
  const State& s = layers[blockIdx.y];
  if (s.encoded) return;
  const store_page_id own = s.store_page(entry.sequence, entry.before / s.page.tokens);
  const int numbers = entry.before % s.page.tokens * d;
  for (int i = thread_x(); i < s.heads.kv * numbers; i += threads_x()) {
    const int head = i / numbers, row = i % numbers / d, column = i % d;
    const auto from = slice_of(s.store, entry.shared_page, head), to = slice_of(s.store, own, head);
    to.key[row * to.stride + column] = from.key[row * from.stride + column];
    to.value[row * to.stride + column] = from.value[row * from.stride + column];
  }
}

template <class State>
void launch_copy_shared_rows(const all_layers<State>& layers, const step_view& step, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(step.bounds.entries), layers.count());
  launch("copy of shared rows", {grid, copy_rows_default.threads, stream}, copy_shared_rows<State>,
         layers.device, step);
}

}  // namespace freekv::device
