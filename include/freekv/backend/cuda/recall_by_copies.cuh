// Recall by the device's copy engines, as published: slices go as they are, in batches, to one of two
// buffers, and a kernel writes their rows to the slots while the next batch is on its way. The host reads the
// list of what is missing, and so waits for each selection: kept to compare with. (FreeKV section 4)
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>
#include <vector>

namespace freekv::device {

/// Calls that queue a batch.
enum class copy_call : std::uint8_t {
  batched,          ///< in one call, from CUDA 13 on
  two_dimensional,  ///< a call for the keys of each slice, and one for its values
};

struct copies_tuning {
  copy_call call = CUDART_VERSION >= 13000 ? copy_call::batched : copy_call::two_dimensional;
  int slices = 64;      ///< of a batch
  int threads = 256;    ///< of a block; each warp writes a slice's rows
  int registers = 104;  ///< of a thread at most
  constexpr bool valid() const {
    return slices >= 1 && valid_block(threads, registers) &&
           (call != copy_call::batched || CUDART_VERSION >= 13000);
  }
};
struct copies_default {
  static constexpr copies_tuning tuning{};
};

/// Throws usage_error where the stream is captured.
inline void expect_no_capture(const stream& on) {
  if (on.is_capturing())
    throw usage_error(
        "recall by copy engines reads its list on the host and cannot be captured; "
        "give the backend recall_by::kernel");
}

/// Slice i of a batch in its buffer: keys (tokens, head_dim), then values.
template <int HeadDim, class Element>
FREEKV_HD head_slice<Element> staged_slice(Element* buffer, int i, int tokens) {
  Element* const key = buffer + std::int64_t{i} * 2 * tokens * HeadDim;
  return {key, key + tokens * HeadDim, HeadDim};
}

/// Writes `count` items to their slots: what was in the store from the buffer, and what is in the ring from
/// there.
template <class State>
__global__ void write_copied(State s, const recall_item* items, int count, typename State::element* buffer) {
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  const int nth = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  if (nth >= count) return;
  const recall_item item = items[nth];
  const int page = s.page_of(item.unit), tokens = s.unit.tokens;
  const auto from = item.from_ring != 0
                        ? rows_behind(s.block_slice(item.sequence, s.slots.ring_slot(page), item.head),
                                      s.first_row_of(item.unit))
                        : staged_slice<State::head_dim>(buffer, nth, tokens);
  copy_slice_by_warp(pieces{from, tokens},
                     pieces{s.selected_slice(item.sequence, item.slot, item.head), tokens});
}

/// Lists and buffers of recalls by copy engines.
template <class State, class Tuned = copies_default>
class copied_recall {
  using element = typename State::element;
  static constexpr copies_tuning tuning = Tuned::tuning;
  static_assert(tuning.valid());

 public:
  copied_recall() = default;
  /// Takes room for at most `most_items` items of units of `tokens` tokens.
  copied_recall(std::int64_t most_items, int tokens, carver& page_locked, carver& fast)
      : count_(page_locked.take<std::int32_t>(1)),
        items_(page_locked.take<recall_item>(to_size(most_items))) {
    for (lane& l : lanes_)
      l.buffer = fast.take<element>(to_size(tuning.slices) * 2 * to_size(tokens * State::head_dim));
    const auto most_rows = to_size(tuning.slices * 2 * tokens);
    to_.reserve(most_rows);
    from_.reserve(most_rows);
    bytes_.reserve(most_rows);
  }

  /// Copies what the selection before it in stream `on` has listed, which the host waits for: it is not
  /// captured. `on_host` is the layer as the host sees it.
  void recall(const State& s, const State& on_host, const selection_scratch& scratch, stream& on,
              stream& transfers) {
    check(cudaMemcpyAsync(count_, scratch.item_count, sizeof *count_, cudaMemcpyDeviceToHost, on.get()),
          "cudaMemcpyAsync");
    check(cudaMemsetAsync(scratch.item_count, 0, sizeof *count_, on.get()), "cudaMemsetAsync");
    on.synchronize();
    const int count = *count_;
    if (count == 0) return;
    check(cudaMemcpyAsync(items_, scratch.items, to_size(count) * sizeof *items_, cudaMemcpyDeviceToHost,
                          on.get()),
          "cudaMemcpyAsync");
    on.synchronize();
    for (int first = 0; first < count; first += tuning.slices) {
      lane& l = lanes_[next_++ % lanes_.size()];
      const int slices = std::min(tuning.slices, count - first);
      transfers.wait(l.written);
      transfer(on_host, items_ + first, slices, l.buffer, transfers);
      on.wait(transfers.record());
      launch("recall", {blocks_for(slices, tuning.threads / 32), tuning.threads, on.get()},
             write_copied<State>, s, scratch.items + first, slices, l.buffer);
      l.written = on.record();
    }
  }

 private:
  struct lane {
    element* buffer = nullptr;
    event written;  // to the slots: the buffer is free again
  };

  /// Queues the copies of those items that are in the store.
  void transfer(const State& s, const recall_item* items, int count, element* buffer, stream& transfers) {
    constexpr int d = State::head_dim;
    const int tokens = s.unit.tokens;
    to_.clear();
    from_.clear();
    bytes_.clear();
    for (int i = 0; i < count; ++i) {
      const recall_item& item = items[i];
      if (item.from_ring != 0) continue;
      const auto to = staged_slice<d>(buffer, i, tokens);
      const auto from = rows_behind(s.store_slice(item.sequence, s.page_of(item.unit), item.head),
                                    s.first_row_of(item.unit));
      add_rows(to.key, from.key, from.stride, tokens, transfers);
      add_rows(to.value, from.value, from.stride, tokens, transfers);
    }
#if CUDART_VERSION >= 13000
    if (to_.empty()) return;
    cudaMemcpyAttributes in_stream_order{};
    in_stream_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t of_all = 0;
    check(cudaMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), to_.size(), &in_stream_order, &of_all,
                               1, transfers.get()),
          "cudaMemcpyBatchAsync");
#endif
  }
  /// Queues a copy of a slice's rows, where copies are of two dimensions; else adds it to the batch: one copy
  /// where rows are side by side, else one for each.
  void add_rows(element* to, const element* from, std::int64_t stride, int tokens, stream& transfers) {
    constexpr int d = State::head_dim;
    if constexpr (tuning.call == copy_call::two_dimensional) {
      constexpr std::size_t row = d * sizeof(element);
      check(cudaMemcpy2DAsync(to, row, from, to_size(stride) * sizeof(element), row, to_size(tokens),
                              cudaMemcpyDefault, transfers.get()),
            "cudaMemcpy2DAsync");
      return;
    }
    const int rows = stride == d ? tokens : 1;
    for (int t = 0; t < tokens; t += rows) {
      to_.push_back(to + t * d);
      from_.push_back(from + t * stride);
      bytes_.push_back(to_size(rows * d) * sizeof(element));
    }
  }

  std::int32_t* count_ = nullptr;  // page-locked, as are the items
  recall_item* items_ = nullptr;
  std::array<lane, 2> lanes_;
  std::size_t next_ = 0;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<std::size_t> bytes_;
};

}  // namespace freekv::device
