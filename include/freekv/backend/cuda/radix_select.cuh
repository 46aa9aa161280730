// The best of a row, by a radix selection of one block: deterministic, ties to the smaller index.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <freekv/config.hpp>

namespace freekv::device {

/// A block of `Threads` threads that selects: four passes over keys of 32 bits find the least that is selected, 8 bits at a
/// time, and a fifth writes what is at least that, in order. O(keys / Threads), and any number selected.
template <int Threads>
class radix_select {
  static_assert(Threads >= 256 && Threads <= 1024 && Threads % 32 == 0, "a thread for each of 256 digits");
  using scan = cub::BlockScan<int, Threads>;
  static constexpr int digits = 256;

 public:
  struct storage {
    typename scan::TempStorage scan_storage;
    int histogram[digits];
    std::uint32_t bits;  // of the least selected key, as far as they are known
    int rest;            // how many of those that share these bits are selected
  };

  __device__ explicit radix_select(storage& shared)
      : shared_(shared), thread_(static_cast<int>(threadIdx.x)) {}

  /// The least key that is selected, and how many of those that equal it.
  struct least_key {
    std::uint32_t bits = 0;
    int equal = 0;
  };

  /// Calls `write(nth, i)` for the `count` largest of `key_of(0)` to `key_of(size - 1)`, i ascending and nth from 0.
  /// `count` is at most `size`. By all threads of the block, as the others.
  template <class KeyOf, class Write>
  __device__ void largest(const KeyOf& key_of, int size, int count, const Write& write) const {
    if (count <= 0) return;
    write_from(least_of_largest(key_of, size, count), key_of, size, write);
  }

  /// The least of the `count` largest keys; `count` is at least 1.
  template <class KeyOf>
  __device__ least_key least_of_largest(const KeyOf& key_of, int size, int count) const {
    std::uint32_t bits = 0, known = 0;
    int rest = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = thread_; i < digits; i += Threads) shared_.histogram[i] = 0;
      __syncthreads();
      for (int i = thread_; i < size; i += Threads) {
        const std::uint32_t key = key_of(i);
        if ((key & known) == bits) atomicAdd(&shared_.histogram[key >> shift & (digits - 1)], 1);
      }
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
  __device__ void write_from(const least_key& least, const KeyOf& key_of, int size,
                             const Write& write) const {
    int larger_before = 0, equal_before = 0;
    for (int first = 0; first < size; first += Threads) {
      const int i = first + thread_;
      const std::uint32_t key = i < size ? key_of(i) : 0;
      const bool larger = i < size && key > least.bits, equal = i < size && key == least.bits;
      constexpr int both = 1 << 16;  // a pass counts at most Threads of each
      int counted, all;
      scan(shared_.scan_storage).ExclusiveSum(int{larger} + int{equal} * both, counted, all);
      const int nth_equal = equal_before + counted / both;
      if (larger || (equal && nth_equal < least.equal))
        write(larger_before + counted % both + (nth_equal < least.equal ? nth_equal : least.equal), i);
      larger_before += all % both;
      equal_before += all / both;
      __syncthreads();  // the scan's memory is free again
    }
  }

 private:
  storage& shared_;
  int thread_;
};

}  // namespace freekv::device
