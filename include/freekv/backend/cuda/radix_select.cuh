// The best of a row, by a radix selection of one block: deterministic, ties to the smaller index.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/config.hpp>
#include <freekv/core/unroll.hpp>

namespace freekv::device {

/// A block of `Threads` threads that selects: four passes over keys of 32 bits find the least that is
/// selected, 8 bits at a time, and a fifth writes what is at least that, in order. O(keys / Threads), and any
/// number selected. Keys are looked up once where registers hold a row's, and else in each pass.
template <int Threads>
class radix_select {
  static_assert(Threads >= 256 && Threads <= 1024 && Threads % 32 == 0, "a thread for each of 256 digits");
  using scan = cub::BlockScan<int, Threads>;
  static constexpr int digits = 256;
  static constexpr int of_thread = 16, tile = Threads * of_thread;  // keys

 public:
  struct storage {
    typename scan::TempStorage scan_storage;
    int histogram[digits];
    std::uint32_t bits;  // of the least selected key, as far as they are known
    int rest;            // how many of those that share these bits are selected
  };

  __device__ explicit radix_select(storage& shared) : shared_(shared), thread_(thread_x()) {}

  /// The least key that is selected, and how many of those that equal it.
  struct least_key {
    std::uint32_t bits = 0;
    int equal = 0;
  };

  /// The keys `key_of(0)` to `key_of(size - 1)`, a tile at a time: a warp has neighbouring ones, 32 in turn.
  template <class KeyOf>
  class row {
   public:
    __device__ row(const KeyOf& key_of, int size) : key_of_(key_of), size_(size) {}
    /// Calls `use()` for each tile.
    template <class Use>
    __device__ void for_tiles(const Use& use) {
#pragma unroll 1
      for (int begin = 0; begin < size_; begin += tile) {
        if (begin != loaded_) load(begin);
        use();
      }
    }
    /// Calls `use(i, key, there)` for the thread's keys of the tile in turn, with whole warps.
    template <class Use>
    __device__ void for_keys(const Use& use) const {
      unroll<of_thread>([&](auto nth) {
        if (nth < turns_) use(first_ + 32 * nth, keys_[nth], first_ + 32 * nth < size_);
      });
    }

   private:
    __device__ void load(int begin) {
      const int thread = thread_x();
      loaded_ = begin;
      turns_ = (min(size_ - begin, tile) + Threads - 1) / Threads;
      first_ = begin + thread / 32 * 32 * turns_ + thread % 32;
      unroll<of_thread>([&](auto nth) {
        const int i = first_ + 32 * nth;
        if (nth < turns_) keys_[nth] = i < size_ ? key_of_(i) : 0;
      });
    }
    const KeyOf& key_of_;
    int size_, loaded_ = -1, turns_ = 0, first_ = 0;
    std::uint32_t keys_[of_thread];
  };

  /// Calls `write(nth, i)` for the `count` largest of a row of `size`, i ascending and nth from 0. `count` is
  /// at most `size`. By all threads of the block, as the others.
  template <class KeyOf, class Write>
  __device__ void largest(const KeyOf& key_of, int size, int count, const Write& write) const {
    if (count <= 0) return;
    row<KeyOf> keys(key_of, size);
    write_from(least_of_largest(keys, count), keys, write);
  }

  /// The least of the `count` largest keys; `count` is at least 1.
  template <class KeyOf>
  __device__ least_key least_of_largest(row<KeyOf>& keys, int count) const {
    std::uint32_t bits = 0, known = 0;
    int rest = count;
#pragma unroll 1  // its body is long, and the same each time
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = thread_; i < digits; i += Threads) shared_.histogram[i] = 0;
      __syncthreads();
      keys.for_tiles([&] {
        keys.for_keys([&](int, std::uint32_t key, bool there) {
          if (there && (key & known) == bits) atomicAdd(&shared_.histogram[key >> shift & (digits - 1)], 1);
        });
      });
      __syncthreads();
      // From the largest digit down.
      const int digit = digits - 1 - thread_, of_digit = digit >= 0 ? shared_.histogram[digit] : 0;
      int larger;
      scan(shared_.scan_storage).ExclusiveSum(of_digit, larger);
      if (larger < rest && rest <= larger + of_digit) {
        shared_.bits = bits | static_cast<std::uint32_t>(digit) << shift;
        shared_.rest = rest - larger;
      }
      __syncthreads();
      bits = shared_.bits;
      rest = shared_.rest;
      known |= 0xffu << shift;
    }
    return {bits, rest};
  }

  /// The least of `count` keys that are the largest, in any order.
  template <class KeyOf>
  __device__ least_key least_of(const KeyOf& key_of, int count) const {
    if (thread_ == 0) {
      shared_.bits = ~0u;
      shared_.rest = 0;
    }
    __syncthreads();
    for (int i = thread_; i < count; i += Threads) atomicMin(&shared_.bits, key_of(i));
    __syncthreads();
    const std::uint32_t bits = shared_.bits;
    for (int i = thread_; i < count; i += Threads)
      if (key_of(i) == bits) atomicAdd(&shared_.rest, 1);
    __syncthreads();
    return {bits, shared_.rest};
  }

  /// Calls `write(nth, i)` for the keys above `least` and the first that equal it.
  template <class KeyOf, class Write>
  __device__ void write_from(const least_key& least, row<KeyOf>& keys, const Write& write) const {
    constexpr unsigned all_lanes = 0xffffffffu;
    constexpr int both = 1 << 16;  // a tile has less of each
    const unsigned before_me = (1u << thread_ % 32) - 1u;
    int larger_before = 0, equal_before = 0;
    keys.for_tiles([&] {
      int counted = 0, before, all;  // of the warp
      keys.for_keys([&](int, std::uint32_t key, bool there) {
        counted += __popc(__ballot_sync(all_lanes, there && key > least.bits)) +
                   __popc(__ballot_sync(all_lanes, there && key == least.bits)) * both;
      });
      scan(shared_.scan_storage).ExclusiveSum(thread_ % 32 == 0 ? counted : 0, before, all);
      before = __shfl_sync(all_lanes, before, 0);
      int larger_here = larger_before + before % both, equal_here = equal_before + before / both;
      keys.for_keys([&](int i, std::uint32_t key, bool there) {
        const bool larger = there && key > least.bits, equal = there && key == least.bits;
        const unsigned of_larger = __ballot_sync(all_lanes, larger),
                       of_equal = __ballot_sync(all_lanes, equal);
        const int nth_equal = equal_here + __popc(of_equal & before_me);
        if (larger || (equal && nth_equal < least.equal))
          write(larger_here + __popc(of_larger & before_me) + min(nth_equal, least.equal), i);
        larger_here += __popc(of_larger);
        equal_here += __popc(of_equal);
      });
      larger_before += all % both;
      equal_before += all / both;
      __syncthreads();  // the scan's memory is free again
    });
  }

 private:
  storage& shared_;
  int thread_;
};

}  // namespace freekv::device
