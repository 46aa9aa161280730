// Random numbers in memory that host and device read and write.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <freekv/core/element.hpp>
#include <random>
#include <vector>

namespace both_sides {

/// Ends the program with a sentence unless the call succeeded.
inline void require(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  std::printf("FAILED %s: %s\n", call, cudaGetErrorString(status));
  std::exit(1);
}

/// Page-locked memory, which both sides read and write at the same address.
template <class T>
struct pinned_allocator {
  using value_type = T;
  pinned_allocator() = default;
  template <class U>
  pinned_allocator(const pinned_allocator<U>&) {}
  T* allocate(std::size_t n) {
    void* p = nullptr;
    require(cudaMallocHost(&p, n * sizeof(T)), "cudaMallocHost");
    return static_cast<T*>(p);
  }
  void deallocate(T* p, std::size_t) { cudaFreeHost(p); }
  template <class U>
  bool operator==(const pinned_allocator<U>&) const {
    return true;
  }
};
template <class T>
using pinned = std::vector<T, pinned_allocator<T>>;

/// Numbers that every run draws alike.
class random_numbers {
 public:
  explicit random_numbers(unsigned seed) : engine_(seed) {}
  /// 0 .. n - 1.
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  std::uint32_t bits() { return static_cast<std::uint32_t>(engine_()); }
  float normal() {
    // Sum of twelve uniform numbers: the same on every standard library, which std::normal_distribution is
    // not.
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(engine_() >> 8) * 0x1p-24f;
    return sum;
  }
  template <freekv::element E>
  pinned<E> normals(std::size_t n, float deviation = 1.0f) {
    pinned<E> x(n);
    for (E& value : x) value = freekv::from_float<E>(deviation * normal());
    return x;
  }

 private:
  std::mt19937 engine_;
};

}  // namespace both_sides
