// Recall on the device: a few persistent blocks copy what the selected slots lack from the store, which they read in
// page-locked memory, or from the window ring. (FreeKV section 4)
#pragma once

#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step.cuh>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

/// How pieces of 16 bytes travel.
enum class recall_read : std::uint8_t {
  loads,         ///< through registers
  async_copies,  ///< cp.async through each thread's own ring in shared memory
};

struct recall_tuning {
  recall_read read = recall_read::loads;
  int blocks = 16;      ///< at most; few, so that the engine's kernels keep the machine
  int threads = 256;    ///< of a block; each warp copies a slice
  int registers = 104;  ///< of a thread at most
  int depth = 8;        ///< pieces of 16 bytes that a thread has on their way
  constexpr bool valid() const {
    return blocks >= 1 && valid_block(threads, registers) && depth >= 1 && 16 * depth * threads <= 48 * 1024;
  }
};
/// As kernels are told it: nvcc 13.0 does not take values of a class as a kernel's template arguments.
struct recall_default {
  static constexpr recall_tuning tuning{};
};

/// The pieces of a slice: keys, then values, row by row.
template <int HeadDim, class Element>
struct slice_pieces {
  head_slice<Element> slice;
  int tokens;
  static constexpr int in_row = HeadDim * static_cast<int>(sizeof(Element)) / 16;

  __device__ int size() const { return 2 * tokens * in_row; }
  __device__ uint4* at(int i) const {
    const int row = i / in_row, t = row < tokens ? row : row - tokens;
    Element* const start = (row < tokens ? slice.key : slice.value) + t * slice.stride;
    return reinterpret_cast<uint4*>(start) + i % in_row;
  }
};

/// Copies a slice by a warp, `Tuned::tuning.depth` pieces a thread on their way at a time.
template <class Tuned, int HeadDim, class Element>
__device__ void copy_slice_by_warp(const slice_pieces<HeadDim, Element>& from,
                                   const slice_pieces<HeadDim, Element>& to, uint4* ring) {
  constexpr recall_tuning tuning = Tuned::tuning;
  constexpr int depth = tuning.depth;
  const int lane = static_cast<int>(threadIdx.x) % 32, size = from.size();
  if constexpr (tuning.read == recall_read::loads) {
    for (int first = lane; first < size; first += 32 * depth) {
      uint4 pieces[depth];
      unroll<depth>([&](auto i) {
        if (first + 32 * i < size) pieces[i] = *from.at(first + 32 * i);
      });
      unroll<depth>([&](auto i) {
        if (first + 32 * i < size) *to.at(first + 32 * i) = pieces[i];
      });
    }
  } else {
    // A thread waits for its own copies and reads its own part of the ring: no barrier is needed.
    uint4* const mine = ring + threadIdx.x;
    const auto begin = [&](int nth) {
      if (lane + 32 * nth < size)
        __pipeline_memcpy_async(mine + nth % depth * tuning.threads, from.at(lane + 32 * nth), 16);
      __pipeline_commit();
    };
    for (int nth = 0; nth < depth - 1; ++nth) begin(nth);
    for (int nth = 0; lane + 32 * nth < size; ++nth) {
      begin(nth + depth - 1);
      __pipeline_wait_prior(depth - 1);
      *to.at(lane + 32 * nth) = mine[nth % depth * tuning.threads];
    }
    __pipeline_wait_prior(0);
  }
}

template <class Tuned, class State, class Codec>
__global__ void recall_items(State s, Codec codec, selection_scratch scratch) {
  constexpr recall_tuning tuning = Tuned::tuning;
  constexpr bool rings = tuning.read == recall_read::async_copies;
  __shared__ uint4 ring[rings ? tuning.depth * tuning.threads : 1];
  const int count = *scratch.item_count;
  const int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  for (int nth = first; nth < count; nth += warps) {
    const recall_item item = scratch.items[nth];
    const int page = s.page_of(item.unit), row = s.row_of(item.unit);
    const auto to = s.selected_slice(item.sequence, item.slot, item.head);
    if (encodes_pages<Codec> && item.from_ring == 0) {
      decode_by_warp(s, codec, {item.sequence, item.head}, {page, row, s.unit.tokens}, to);
      continue;
    }
    const auto from = item.from_ring != 0 ? s.frame_slice(item.sequence, s.slots.ring_slot(page), item.head)
                                          : s.store_slice(item.sequence, page, item.head);
    copy_slice_by_warp<Tuned>(pieces{rows_behind(from, row), s.unit.tokens}, pieces{to, s.unit.tokens}, ring);
  }
}

/// Copies what the selection before it in the stream has listed.
template <class Tuned = recall_default, class State, class Codec>
void launch_recall(const State& s, const Codec& codec, const step_view& step,
                   const selection_scratch& scratch, cudaStream_t stream) {
  constexpr recall_tuning tuning = Tuned::tuning;
  static_assert(tuning.valid());
  const std::int64_t most = std::int64_t{step.most.entries} * s.heads.kv * s.list_units;
  const int blocks = std::min(tuning.blocks, blocks_for(most, tuning.threads / 32));
  recall_items<Tuned><<<blocks, tuning.threads, 0, stream>>>(s, codec, scratch);
  check(cudaGetLastError(), "recall");
}

}  // namespace freekv::device
