// Recall on the device: a few persistent blocks copy what the selected slots lack from the store, which they read in
// page-locked memory, or from the window ring. (FreeKV section 4)
#pragma once

#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstdint>
#include <cuda/ptx>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step.cuh>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

/// How a slice travels.
enum class recall_read : std::uint8_t {
  loads,         ///< pieces of 16 bytes through registers
  async_copies,  ///< such pieces by cp.async, through each thread's own ring in shared memory
  bulk_copies,   ///< rows by cp.async.bulk, through each warp's ring; loads on what is older than sm_90
};

struct recall_tuning {
  recall_read read = recall_read::loads;
  int blocks = 16;          ///< at most; few, so that the engine's kernels keep the machine
  int threads = 256;        ///< of a block; each warp copies a slice
  int registers = 128;      ///< of a thread at most
  int depth = 8;            ///< on their way at a time: pieces of 16 bytes of a thread, or buffers of a warp
  int buffer_bytes = 1024;  ///< of bulk copies; a row fits
  constexpr int shared_bytes() const {
    if (read == recall_read::async_copies) return 16 * depth * threads;
    constexpr int barrier_bytes = 16;  // aligned like the buffers
    return read == recall_read::bulk_copies ? (buffer_bytes + barrier_bytes) * depth * (threads / 32) : 0;
  }
  constexpr bool valid() const {
    return blocks >= 1 && valid_block(threads, registers) && depth >= 1 && buffer_bytes >= 16 &&
           buffer_bytes % 16 == 0 && shared_bytes() <= 48 * 1024;
  }
};
/// As kernels are told it: nvcc 13.0 does not take values of a class as a kernel's template arguments.
struct recall_default {
  static constexpr recall_tuning tuning{};
};

/// What the architecture that is compiled for reads by, where `wanted` is asked for.
__device__ constexpr recall_read recall_read_here(recall_read wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return wanted == recall_read::bulk_copies ? recall_read::loads : wanted;
#else
  return wanted;
#endif
}

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

/// Copies a slice by a warp through registers, `Depth` pieces a thread on their way at a time.
template <int Depth = recall_default::tuning.depth, int HeadDim, class Element>
__device__ void copy_slice_by_warp(const slice_pieces<HeadDim, Element>& from,
                                   const slice_pieces<HeadDim, Element>& to) {
  const int lane = static_cast<int>(threadIdx.x) % 32, size = from.size();
  for (int first = lane; first < size; first += 32 * Depth) {
    uint4 pieces[Depth];
    unroll<Depth>([&](auto i) {
      if (first + 32 * i < size) pieces[i] = *from.at(first + 32 * i);
    });
    unroll<Depth>([&](auto i) {
      if (first + 32 * i < size) *to.at(first + 32 * i) = pieces[i];
    });
  }
}

/// Copies slices by a warp, as `Tuned::tuning` says and the architecture can.
template <class Tuned, recall_read Read>
struct slice_copier {
  struct storage {};
  __device__ explicit slice_copier(storage&) {}
  template <int HeadDim, class Element>
  __device__ void copy(const slice_pieces<HeadDim, Element>& from,
                       const slice_pieces<HeadDim, Element>& to) const {
    copy_slice_by_warp<Tuned::tuning.depth>(from, to);
  }
};

/// A thread waits for its own copies and reads its own part of the ring: no barrier is needed.
template <class Tuned>
struct slice_copier<Tuned, recall_read::async_copies> {
  static constexpr int depth = Tuned::tuning.depth, threads = Tuned::tuning.threads;
  struct storage {
    uint4 ring[depth * threads];
  };
  __device__ explicit slice_copier(storage& shared) : mine_(shared.ring + threadIdx.x) {}
  template <int HeadDim, class Element>
  __device__ void copy(const slice_pieces<HeadDim, Element>& from, const slice_pieces<HeadDim, Element>& to) {
    const int lane = static_cast<int>(threadIdx.x) % 32, size = from.size();
    const auto begin = [&](int nth) {
      if (lane + 32 * nth < size)
        __pipeline_memcpy_async(mine_ + nth % depth * threads, from.at(lane + 32 * nth), 16);
      __pipeline_commit();
    };
    for (int nth = 0; nth < depth - 1; ++nth) begin(nth);
    for (int nth = 0; lane + 32 * nth < size; ++nth) {
      begin(nth + depth - 1);
      __pipeline_wait_prior(depth - 1);
      *to.at(lane + 32 * nth) = mine_[nth % depth * threads];
    }
    __pipeline_wait_prior(0);
  }

 private:
  uint4* mine_;
};

/// A warp fills its buffers in turn, each with rows of keys or of values, and writes one to the slot while the others
/// fill. An mbarrier counts a buffer's bytes. That bulk copies read page-locked memory of the host at its unified
/// address is an assumption that no GPU has confirmed.
template <class Tuned>
struct slice_copier<Tuned, recall_read::bulk_copies> {
  static constexpr int depth = Tuned::tuning.depth, buffer_bytes = Tuned::tuning.buffer_bytes;
  struct ring {
    uint4 buffers[depth][buffer_bytes / 16];
    std::uint64_t filled[depth];
  };
  struct storage {
    ring of_warp[Tuned::tuning.threads / 32];
  };
  static_assert(sizeof(storage) <= Tuned::tuning.shared_bytes());
  __device__ explicit slice_copier(storage& shared)
      : ring_(shared.of_warp[threadIdx.x / 32]), lane_(static_cast<int>(threadIdx.x) % 32) {
    if (lane_ == 0) {
      for (std::uint64_t& barrier : ring_.filled) cuda::ptx::mbarrier_init(&barrier, 1);
      cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    }
    __syncwarp();
  }
  template <int HeadDim, class Element>
  __device__ void copy(const slice_pieces<HeadDim, Element>& from, const slice_pieces<HeadDim, Element>& to) {
    constexpr int row_bytes = 16 * from.in_row, in_buffer = buffer_bytes / row_bytes;
    static_assert(in_buffer >= 1, "a buffer of bulk copies holds at least one row of head_dim elements");
    const int of_plane = (from.tokens + in_buffer - 1) / in_buffer;
    struct row_run {
      int first, count;
    };
    const auto rows_of = [&](int nth) {
      const int first = nth % of_plane * in_buffer;
      return row_run{nth / of_plane * from.tokens + first, min(in_buffer, from.tokens - first)};
    };
    const auto begin = [&](int nth) {
      if (nth >= 2 * of_plane) return;
      const row_run rows = rows_of(nth);
      const bool whole = from.slice.stride == HeadDim;
      const int copies = whole ? 1 : rows.count, bytes = whole ? rows.count * row_bytes : row_bytes;
      const int at = buffer_of(nth);
      if (lane_ == 0)
        cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                             cuda::ptx::space_shared, &ring_.filled[at],
                                             static_cast<std::uint32_t>(rows.count * row_bytes));
      for (int i = lane_; i < copies; i += 32)
        cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global,
                                 ring_.buffers[at] + i * from.in_row, from.at((rows.first + i) * from.in_row),
                                 static_cast<std::uint32_t>(bytes), &ring_.filled[at]);
    };
    for (int nth = 0; nth < depth; ++nth) begin(nth);
    for (int nth = 0; nth < 2 * of_plane; ++nth) {
      const row_run rows = rows_of(nth);
      wait(nth);
      for (int i = lane_; i < rows.count * from.in_row; i += 32)
        *to.at(rows.first * from.in_row + i) = ring_.buffers[buffer_of(nth)][i];
      __syncwarp();  // all lanes have read the buffer
      begin(nth + depth);
    }
    begun_ += static_cast<unsigned>(2 * of_plane);
  }

 private:
  __device__ unsigned buffer_of(int nth) const { return (begun_ + static_cast<unsigned>(nth)) % depth; }
  __device__ void wait(int nth) {
    const unsigned round = (begun_ + static_cast<unsigned>(nth)) / depth;
    while (!cuda::ptx::mbarrier_try_wait_parity(&ring_.filled[buffer_of(nth)], round % 2)) {
    }
  }
  ring& ring_;
  int lane_;
  unsigned begun_ = 0;  // buffers filled for slices before this one
};

template <class Tuned, class State, class Codec>
__global__ void recall_items(State s, Codec codec, selection_scratch scratch) {
  using copier = slice_copier<Tuned, recall_read_here(Tuned::tuning.read)>;
  __shared__ typename copier::storage shared;
  copier slices(shared);
  const int count = *scratch.item_count;
  const int first = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  using pieces = slice_pieces<State::head_dim, typename State::element>;
  for (int nth = first; nth < count; nth += warps) {
    const recall_item item = scratch.items[nth];
    const int page = s.page_of(item.unit), row = s.row_of(item.unit);
    const auto to = s.selected_slice(item.sequence, item.slot, item.head);
    if (encodes_pages<Codec> && item.from_ring == 0) {
      decode_by_lanes<32>(s, codec, {item.sequence, item.head}, {page, row, s.unit.tokens}, to);
      continue;
    }
    const auto from = item.from_ring != 0 ? s.frame_slice(item.sequence, s.slots.ring_slot(page), item.head)
                                          : s.store_slice(item.sequence, page, item.head);
    slices.copy(pieces{rows_behind(from, row), s.unit.tokens}, pieces{to, s.unit.tokens});
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
