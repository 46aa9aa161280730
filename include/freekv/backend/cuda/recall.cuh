// Recall on the device: a few persistent blocks copy what the selected slots lack from the store, which they
// read in page-locked memory, or from the window ring. (FreeKV section 4)
#pragma once

#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstdint>
#include <cuda/ptx>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/last_block.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

/// Ways that a slice travels.
enum class recall_read : std::uint8_t {
  loads,         ///< pieces of 16 bytes through registers
  async_copies,  ///< such pieces by cp.async, through each thread's own ring in shared memory
  bulk_copies,   ///< rows by cp.async.bulk, through each warp's ring; loads on what is older than sm_90
};

struct recall_tuning {
  recall_read read = recall_read::loads;
  int blocks = 4;           ///< at most; few, so that the engine's kernels keep the machine
  int threads = 256;        ///< of a block; each warp copies a slice, or by loads parts of slices
  int registers = 128;      ///< of a thread at most
  int depth = 8;            ///< on their way at a time: pieces of 16 bytes of a thread, or buffers of a warp
  int buffer_bytes = 1024;  ///< of bulk copies; a row fits
  constexpr int shared_bytes() const {
    if (read == recall_read::async_copies) return 16 * depth * threads;
    constexpr int barrier_bytes = 16;  // aligned like the buffers
    return read == recall_read::bulk_copies ? (buffer_bytes + barrier_bytes) * depth * (threads / 32) : 0;
  }
  /// Bytes that are on their way at a time at most, whatever is missing, of pages that are kept as they are:
  /// each warp has `depth` parts, a piece for each lane or a buffer.
  constexpr int bytes_in_flight() const {
    constexpr int pieces_bytes = 32 * 16;  // also of bulk copies, where the device has none
    const int part = read == recall_read::bulk_copies ? std::max(pieces_bytes, buffer_bytes) : pieces_bytes;
    return blocks * (threads / 32) * depth * part;
  }
  constexpr bool valid() const {
    return blocks >= 1 && valid_block(threads, registers) && depth >= 1 && buffer_bytes >= 16 &&
           buffer_bytes % 16 == 0 && shared_bytes() <= 48 * 1024 - 16;  // and a counter
  }
};
/// Tuning as a type: nvcc 13.0 does not take values of a class as a kernel's template arguments.
struct recall_default {
  static constexpr recall_tuning tuning{};
};
static_assert(recall_default::tuning.bytes_in_flight() == 128 << 10);

/// Way of reading on the architecture that is compiled for, where `wanted` is asked for.
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

/// Copies 32 * `Depth` pieces of a slice from the `begin`th on by a warp, through registers, all on their way
/// at a time.
template <int Depth, int HeadDim, class Element>
__device__ void copy_pieces_by_warp(const slice_pieces<HeadDim, Element>& from,
                                    const slice_pieces<HeadDim, Element>& to, int begin) {
  const int first = begin + thread_x() % 32, size = from.size();
  uint4 pieces[Depth];
  unroll<Depth>([&](auto i) {
    if (first + 32 * i < size) pieces[i] = *from.at(first + 32 * i);
  });
  unroll<Depth>([&](auto i) {
    if (first + 32 * i < size) *to.at(first + 32 * i) = pieces[i];
  });
}
/// Copies a whole slice by a warp.
template <int Depth = recall_default::tuning.depth, int HeadDim, class Element>
__device__ void copy_slice_by_warp(const slice_pieces<HeadDim, Element>& from,
                                   const slice_pieces<HeadDim, Element>& to) {
  for (int begin = 0; begin < from.size(); begin += 32 * Depth) copy_pieces_by_warp<Depth>(from, to, begin);
}

/// The list items, or parts of them, that one warp recalls: `first`, `first + step` and so on, before `end`.
template <class State, class Codec>
struct recalled_slices {
  const State& s;
  const Codec& codec;
  const recall_item* items;
  int first, step, end;
  using pieces = slice_pieces<State::head_dim, typename State::element>;

  __device__ static bool encoded(const recall_item& item) {
    return encodes_pages<Codec> && item.from_ring == 0;
  }
  /// Parts of `pieces_of_part` pieces that a slice has.
  __device__ int parts(int pieces_of_part) const {
    return (pieces{{}, s.unit.tokens}.size() + pieces_of_part - 1) / pieces_of_part;
  }
  /// Pieces that item `nth` is copied from; none where it is encoded.
  __device__ pieces from(int nth) const {
    const recall_item item = items[nth];
    if (encoded(item)) return {{}, 0};
    const int page = s.page_of(item.unit);
    const auto slice = item.from_ring != 0 ? s.block_slice(item.sequence, s.slots.ring_slot(page), item.head)
                                           : s.store_slice(item.sequence, page, item.head);
    return {rows_behind(slice, s.first_row_of(item.unit)), s.unit.tokens};
  }
  /// Pieces that item `nth` is copied to; none where it is encoded, as decoding has put it there.
  __device__ pieces to(int nth) const {
    const recall_item item = items[nth];
    const auto slice = s.selected_slice(item.sequence, item.slot, item.head);
    if (!encoded(item)) return {slice, s.unit.tokens};
    decode_by_lanes<32>(s, codec, {item.sequence, item.head},
                        {s.page_of(item.unit), s.first_row_of(item.unit), s.unit.tokens}, slice);
    return {{}, 0};
  }
};

/// Copies slices by a warp, as `Tuned::tuning` says and the architecture can.
template <class Tuned, recall_read Read>
struct slice_copier {
  struct storage {};
  __device__ explicit slice_copier(storage&) {}
  /// Copies slices. A task is what a warp's lanes have on their way at a time, so that a few slices take one
  /// round trip.
  template <class Slices>
  __device__ void copy(const Slices& slices) const {
    constexpr int depth = Tuned::tuning.depth;
    const int parts = slices.parts(32 * depth);
    for (int nth = slices.first; nth < slices.end * parts; nth += slices.step) {
      const int item = nth / parts, part = nth % parts;
      const auto from = slices.from(item);
      if (from.tokens > 0 || part == 0)  // what is encoded is decoded whole
        copy_pieces_by_warp<depth>(from, slices.to(item), part * 32 * depth);
    }
  }
};

/// Copies slices part by part through `Depth` places of a warp's ring, which it has in turn: while one part
/// is written, the next ones are on their way, those of the slices behind it too.
template <int Depth, class Ring, class Slices>
__device__ void copy_through(Ring& ring, const Slices& slices) {
  // The slice before `ahead` has `begun` parts that are on their way or written.
  int ahead = slices.first, begun = 0;
  typename Slices::pieces from{{}, 0};
  const auto fill_next = [&] {
    for (; begun == ring.parts(from) && ahead < slices.end; ahead += slices.step) {
      from = slices.from(ahead);
      begun = 0;
    }
    if (begun < ring.parts(from))
      ring.fill(from, begun++);
    else
      ring.fill_with_nothing();
  };
#pragma unroll 1
  for (int i = 0; i < Depth; ++i) fill_next();
  for (int nth = slices.first; nth < slices.end; nth += slices.step) {
    const typename Slices::pieces to = slices.to(nth);
    for (int part = 0; part < ring.parts(to); ++part) {
      ring.write(to, part);
      fill_next();
    }
  }
}

/// A part is a piece for each lane. A thread waits for its own copies and reads its own places: no barrier is
/// needed.
template <class Tuned>
struct slice_copier<Tuned, recall_read::async_copies> {
  static constexpr int depth = Tuned::tuning.depth, threads = Tuned::tuning.threads;
  struct storage {
    uint4 ring[depth * threads];
  };
  __device__ explicit slice_copier(storage& shared)
      : mine_(shared.ring + threadIdx.x), lane_(thread_x() % 32) {}
  template <class Slices>
  __device__ void copy(const Slices& slices) {
    copy_through<depth>(*this, slices);
  }

  template <class Pieces>
  __device__ static int parts(const Pieces& slice) {
    return (slice.size() + 31) / 32;
  }
  template <class Pieces>
  __device__ void fill(const Pieces& from, int part) {
    if (lane_ + 32 * part < from.size())
      __pipeline_memcpy_async(mine_ + filled_ % depth * threads, from.at(lane_ + 32 * part), 16);
    fill_with_nothing();
  }
  __device__ void fill_with_nothing() {
    __pipeline_commit();
    ++filled_;
  }
  template <class Pieces>
  __device__ void write(const Pieces& to, int part) {
    __pipeline_wait_prior(depth - 1);  // `depth` parts are filled and not written
    if (lane_ + 32 * part < to.size()) *to.at(lane_ + 32 * part) = mine_[filled_ % depth * threads];
  }

 private:
  uint4* mine_;
  int lane_;
  unsigned filled_ = 0;  // parts; the oldest that is not written has the place of the next
};

/// A part is a buffer with rows of keys or of values. An mbarrier counts a buffer's bytes. Bulk copies read
/// page-locked memory of the host at half the rate of loads on an H100.
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
      : ring_(shared.of_warp[threadIdx.x / 32]), lane_(thread_x() % 32) {
    if (lane_ == 0) {
      for (std::uint64_t& barrier : ring_.filled) cuda::ptx::mbarrier_init(&barrier, 1);
      cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    }
    __syncwarp();
  }
  template <class Slices>
  __device__ void copy(const Slices& slices) {
    copy_through<depth>(*this, slices);
  }

  template <class Pieces>
  __device__ static int parts(const Pieces& slice) {
    static_assert(in_buffer<Pieces> >= 1,
                  "a buffer of bulk copies holds at least one row of head_dim elements");
    return 2 * buffers_of_plane(slice);
  }
  template <class Pieces>
  __device__ void fill(const Pieces& from, int part) {
    constexpr int row_bytes = 16 * Pieces::in_row;
    const row_run rows = rows_of(from, part);
    const bool whole = from.slice.stride * static_cast<int>(sizeof(*from.slice.key)) == row_bytes;
    const int copies = whole ? 1 : rows.count, bytes = whole ? rows.count * row_bytes : row_bytes;
    const unsigned at = filled_++ % depth;
    if (lane_ == 0)
      cuda::ptx::mbarrier_arrive_expect_tx(cuda::ptx::sem_release, cuda::ptx::scope_cta,
                                           cuda::ptx::space_shared, &ring_.filled[at],
                                           static_cast<std::uint32_t>(rows.count * row_bytes));
    for (int i = lane_; i < copies; i += 32)
      cuda::ptx::cp_async_bulk(
          cuda::ptx::space_cluster, cuda::ptx::space_global, ring_.buffers[at] + i * Pieces::in_row,
          from.at((rows.first + i) * Pieces::in_row), static_cast<std::uint32_t>(bytes), &ring_.filled[at]);
  }
  __device__ void fill_with_nothing() {}
  template <class Pieces>
  __device__ void write(const Pieces& to, int part) {
    const row_run rows = rows_of(to, part);
    const unsigned at = written_ % depth, round = written_ / depth;
    while (!cuda::ptx::mbarrier_try_wait_parity(&ring_.filled[at], round % 2)) {
    }
    for (int i = lane_; i < rows.count * Pieces::in_row; i += 32)
      *to.at(rows.first * Pieces::in_row + i) = ring_.buffers[at][i];
    ++written_;
    __syncwarp();  // all lanes have read the buffer
  }

 private:
  struct row_run {
    int first, count;
  };
  template <class Pieces>
  __device__ static int buffers_of_plane(const Pieces& slice) {
    return (slice.tokens + in_buffer<Pieces> - 1) / in_buffer<Pieces>;
  }
  template <class Pieces>
  __device__ static row_run rows_of(const Pieces& slice, int part) {
    const int of_plane = buffers_of_plane(slice), first = part % of_plane * in_buffer<Pieces>;
    return {part / of_plane * slice.tokens + first, min(in_buffer<Pieces>, slice.tokens - first)};
  }
  template <class Pieces>
  static constexpr int in_buffer = buffer_bytes / (16 * Pieces::in_row);  // rows

  ring& ring_;
  int lane_;
  unsigned filled_ = 0, written_ = 0;  // buffers
};

template <class Tuned, class State, class Codec>
__global__ void recall_items(State s, Codec codec, selection_scratch scratch) {
  using copier = slice_copier<Tuned, recall_read_here(Tuned::tuning.read)>;
  __shared__ typename copier::storage shared;
  const int warp = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int warps = static_cast<int>(gridDim.x * blockDim.x / 32);
  copier(shared).copy(
      recalled_slices<State, Codec>{s, codec, scratch.items, warp, warps, *scratch.item_count});
  __shared__ std::uint32_t recalled_before;
  if (is_last_block(scratch.blocks_recalling, blocks_x(), recalled_before) && threadIdx.x == 0)
    *scratch.item_count = 0;  // which all have read
}

/// A block that has listed what a head misses recalls it itself, by loads. What is on its way is bounded by
/// the flagged heads alone, a block each, since attention waits for it.
template <class Codec>
struct recall_now {
  Codec codec;
  template <class State>
  __device__ recall_item* room(const State& s, const selection_scratch& scratch, int entry, int head,
                               int) const {
    return scratch.items + (std::int64_t{entry} * s.heads.kv + head) * scratch.sizes.max_selected;
  }
  template <class State>
  __device__ void operator()(const State& s, const listed_items& listed) const {
    using copier = slice_copier<recall_default, recall_read::loads>;
    typename copier::storage none;
    const int warp = thread_x() / 32, warps = threads_x() / 32;
    copier(none).copy(recalled_slices<State, Codec>{s, codec, listed.items, warp, warps, listed.count});
  }
};

/// Copies what the selection before it in the stream has listed.
template <class Tuned = recall_default, class State, class Codec>
void launch_recall(const State& s, const Codec& codec, const step_view& step,
                   const selection_scratch& scratch, cudaStream_t stream) {
  constexpr recall_tuning tuning = Tuned::tuning;
  static_assert(tuning.valid());
  const std::int64_t most = std::int64_t{step.bounds.entries} * s.heads.kv * s.max_selected;
  const int blocks = std::min(tuning.blocks, blocks_for(most, tuning.threads / 32));
  launch("recall", {blocks, tuning.threads, stream}, recall_items<Tuned, State, Codec>, s, codec, scratch);
}

}  // namespace freekv::device
