// The best of a row, by a radix selection of one block: deterministic, ties to the smaller index.
#pragma once

#include <cstdint>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/config.hpp>
#include <freekv/core/unroll.hpp>

namespace freekv::device {

/// A block of `Threads` threads that selects: four passes over keys of 32 bits find the least that is
/// selected, 8 bits at a time, and a fifth writes what is at least that, in order. O(keys / Threads), and any
/// number selected. Keys are looked up once where shared memory holds a row's, and else in each pass.
///
/// A selection runs once a launch, and its code is then read from memory: loops stay loops, with as little
/// in them as keeps a few loads on their way.
template <int Threads>
class radix_select {
  static_assert(Threads >= 256 && Threads <= 1024 && Threads % 32 == 0, "a thread for each of 256 digits");
  static constexpr int digits = 256, warps = Threads / 32;
  static constexpr int at_once = 4;  // keys that a thread looks up at a time
  static constexpr int tile = 4096 / (at_once * Threads) * (at_once * Threads);  // keys
  static constexpr unsigned all_lanes = 0xffffffffu;

 public:
  struct storage {
    uint4 keys[tile / 4];
    int histogram[digits];
    int of_warp[warps];
    std::uint32_t bits;  // of the least selected key, as far as they are known
    int rest;            // how many of those that share these bits are selected
  };

  __device__ explicit radix_select(storage& shared) : shared_(shared), thread_(thread_x()) {}

  /// The least key that is selected, and how many of those that equal it.
  struct least_key {
    std::uint32_t bits = 0;
    int equal = 0;
  };

  /// The keys `key_of(0)` to `key_of(size - 1)`, a tile of them in shared memory at a time, with keys of 0
  /// behind the last: they are no larger than others, and behind those that they equal. A `key_of` with
  /// `amend(keys, begin, count)` changes some of a tile's by all threads of the block.
  template <class KeyOf>
  class row {
   public:
    __device__ row(const KeyOf& key_of, int size) : key_of_(key_of), size_(size) {}

   private:
    friend class radix_select;
    const KeyOf& key_of_;
    int size_, loaded_ = -1;
    int here_ = 0;   // keys of the tile
    int turns_ = 0;  // a thread's part of them and of those behind
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
    const int lane = thread_ % 32, warp = thread_ / 32, digit = digits - 1 - thread_;  // the largest first
    std::uint32_t bits = 0;
    int rest = count;
    if (digit >= 0) shared_.histogram[digit] = 0;
#pragma unroll 1
    for (int shift = 24; shift >= 0; shift -= 8) {
#pragma unroll 1
      for (int begin = 0; begin < keys.size_; begin += tile) {
        load(keys, begin);
#pragma unroll 1
        for (int i = thread_; 4 * i < keys.here_; i += Threads) {
          const uint4 four = shared_.keys[i];
          // Keys that share the bits above, and no others, leave one digit.
          const auto add = [&](std::uint32_t key) {
            if (const std::uint32_t at = (key - bits) >> shift; at < digits)
              atomicAdd(&shared_.histogram[at], 1);
          };
          add(four.x), add(four.y), add(four.z), add(four.w);
        }
      }
      __syncthreads();
      int of_digit = 0;
      if (digit >= 0) {
        of_digit = shared_.histogram[digit];
        shared_.histogram[digit] = 0;
      }
      int larger = of_digit;  // and it
#pragma unroll 1
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(all_lanes, larger, distance);
        if (lane >= distance) larger += before;
      }
      if (lane == 31) shared_.of_warp[warp] = larger;
      __syncthreads();
      larger += sum_of_warps(warp) - of_digit;
      if (larger < rest && rest <= larger + of_digit) {
        shared_.bits = bits | static_cast<std::uint32_t>(digit) << shift;
        shared_.rest = rest - larger;
      }
      __syncthreads();
      bits = shared_.bits;
      rest = shared_.rest;
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
    constexpr int both = 1 << 16;  // a tile has less of each
    const int lane = thread_ % 32, warp = thread_ / 32;
    const unsigned before_me = (1u << lane) - 1u;
    int larger_before = 0, equal_before = 0;
#pragma unroll 1
    for (int begin = 0; begin < keys.size_; begin += tile) {
      load(keys, begin);
      const int first = warp * 32 * keys.turns_;  // a warp has neighbouring keys
      int counted = 0;
#pragma unroll 1
      for (int i = lane; i < 8 * keys.turns_; i += 32) {
        const uint4 four = shared_.keys[first / 4 + i];
        const auto count = [&](std::uint32_t key) {
          if (key > least.bits) ++counted;
          if (key == least.bits) counted += both;
        };
        count(four.x), count(four.y), count(four.z), count(four.w);
      }
      counted = __reduce_add_sync(all_lanes, counted);
      if (lane == 0) shared_.of_warp[warp] = counted;
      __syncthreads();
      const int before = sum_of_warps(warp), all = sum_of_warps(warps);
      int larger_here = larger_before + before % both, equal_here = equal_before + before / both;
#pragma unroll 1
      for (int i = first + lane; i < first + 32 * keys.turns_; i += 32) {  // 32 of them in turn
        const std::uint32_t key = reinterpret_cast<const std::uint32_t*>(shared_.keys)[i];
        const bool larger = key > least.bits, equal = key == least.bits;
        const unsigned of_larger = __ballot_sync(all_lanes, larger),
                       of_equal = __ballot_sync(all_lanes, equal);
        const int nth_equal = equal_here + __popc(of_equal & before_me);
        if (larger || (equal && nth_equal < least.equal))
          write(larger_here + __popc(of_larger & before_me) + min(nth_equal, least.equal), begin + i);
        larger_here += __popc(of_larger);
        equal_here += __popc(of_equal);
      }
      larger_before += all % both;
      equal_before += all / both;
    }
    __syncthreads();  // the memory is free again
  }

 private:
  /// Looks up a tile's keys, if they are not there.
  template <class KeyOf>
  __device__ void load(row<KeyOf>& keys, int begin) const {
    if (begin == keys.loaded_) return;
    auto* const staged = reinterpret_cast<std::uint32_t*>(shared_.keys);
    const int here = min(keys.size_ - begin, tile);
    keys.loaded_ = begin;
    keys.here_ = here;
    keys.turns_ = (here + at_once * Threads - 1) / (at_once * Threads) * at_once;
    __syncthreads();  // all have read those before
#pragma unroll 1
    for (int first = thread_; first < keys.turns_ * Threads; first += at_once * Threads) {
      std::uint32_t looked_up[at_once];  // behind the last it again, without a branch
      unroll<at_once>(
          [&](auto nth) { looked_up[nth] = keys.key_of_(begin + min(first + nth * Threads, here - 1)); });
      unroll<at_once>([&](auto nth) {
        const int i = first + nth * Threads;
        staged[i] = i < here ? looked_up[nth] : 0;
      });
    }
    __syncthreads();
    if constexpr (requires { keys.key_of_.amend(staged, begin, here); }) {
      keys.key_of_.amend(staged, begin, here);
      __syncthreads();
    }
  }
  /// Sum of what the first `count` warps have written, on all lanes.
  __device__ int sum_of_warps(int count) const {
    const int lane = thread_ % 32;
    return __reduce_add_sync(all_lanes, lane < count ? shared_.of_warp[lane] : 0);
  }

  storage& shared_;
  int thread_;
};

}  // namespace freekv::device
