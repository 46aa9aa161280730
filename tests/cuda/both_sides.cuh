// One body of code run on the host and on the device over the same memory, and its results compared.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <freekv/core/element.hpp>
#include <limits>
#include <string>
#include <type_traits>

#include "random_numbers.hpp"

namespace both_sides {

/// Ends the program with status 77, which ctest takes for skipped, if there is no device.
inline void skip_without_device() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status == cudaSuccess && devices > 0) return;
  std::printf("SKIPPED: no NVIDIA device is usable: %s\n", cudaGetErrorString(status));
  std::exit(77);
}

template <class Body>
__global__ void for_each(Body body, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) body(i);
}

/// What a body writes: one array for each side, equal before they run.
template <class T>
struct results {
  pinned<T> host, device;
  explicit results(std::size_t n, T before = T{}) : host(n, before), device(n, before) {}
  explicit results(pinned<T> before) : host(before), device(std::move(before)) {}
};

/// Counts and prints checks.
class report {
 public:
  /// Runs body(0 .. n) on both sides. `body` is made for a side by `make(side)`, side a member pointer-like
  /// function that picks an array of a `results`. `scratch` is spoiled before each side runs.
  template <class Make>
  void run(int n, pinned<float>& scratch, const Make& make) {
    constexpr float spoiled = -1.0e30f;
    std::fill(scratch.begin(), scratch.end(), spoiled);
    const auto on_host = make([](auto& r) { return r.host.data(); });
    for (int i = 0; i < n; ++i) on_host(i);
    std::fill(scratch.begin(), scratch.end(), spoiled);
    constexpr int threads = 64;
    for_each<<<(n + threads - 1) / threads, threads>>>(make([](auto& r) { return r.device.data(); }), n);
    require(cudaGetLastError(), "kernel launch");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  template <class Make>
  void run(int n, const Make& make) {
    pinned<float> none;
    run(n, none, make);
  }

  /// Equal bit by bit; of floating point numbers, any NaN equals any other. `compared(i)` says which elements
  /// count.
  template <class T, class Compared>
  void equal(const std::string& what, const results<T>& r, const Compared& compared) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < r.host.size(); ++i) {
      if (!compared(i)) continue;
      ++count;
      if (same(r.host[i], r.device[i])) continue;
      return failed(what, i, r.host.size(), r.host[i], r.device[i], "must be equal");
    }
    passed(what, count, "equal");
  }
  template <class T>
  void equal(const std::string& what, const results<T>& r) {
    equal(what, r, [](std::size_t) { return true; });
  }

  /// Within `ulp` units in the last place of the larger number, or of 1 where both are smaller: what was
  /// computed with exponentials and logarithms, which two math libraries round differently. NaN equals NaN
  /// and an infinity itself.
  void close(const std::string& what, const results<float>& r, double ulp) {
    double most = 0.0;
    for (std::size_t i = 0; i < r.host.size(); ++i) {
      const double a = r.host[i], b = r.device[i];
      if (same(r.host[i], r.device[i])) continue;
      const double unit = std::numeric_limits<float>::epsilon() * std::max({std::fabs(a), std::fabs(b), 1.0});
      const double difference = std::isfinite(a) && std::isfinite(b)
                                    ? std::fabs(a - b) / unit
                                    : std::numeric_limits<double>::infinity();
      if (!(difference <= ulp))
        return failed(what, i, r.host.size(), r.host[i], r.device[i],
                      "differ by " + std::to_string(difference) + " ulp of at most " + std::to_string(ulp));
      most = std::max(most, difference);
    }
    char text[64];
    std::snprintf(text, sizeof text, "within %.2f ulp (%g allowed)", most, ulp);
    passed(what, r.host.size(), text);
  }

  /// Prints the summary; the program's exit status.
  int finish() const {
    std::printf("%d checks, %d failed\n", checks_, failures_);
    return failures_ == 0 && checks_ > 0 ? 0 : 1;
  }

 private:
  template <class T>
  static bool same(T a, T b) {
    if constexpr (freekv::element<T>) {
      const float x = freekv::to_float(a), y = freekv::to_float(b);
      if (std::isnan(x) && std::isnan(y)) return true;
    }
    return std::memcmp(&a, &b, sizeof a) == 0;
  }
  template <class T>
  static double printable(T x) {
    if constexpr (freekv::element<T>)
      return freekv::to_float(x);
    else if constexpr (std::is_same_v<T, std::byte>)
      return std::to_integer<int>(x);
    else
      return static_cast<double>(x);
  }
  void passed(const std::string& what, std::size_t count, const char* how) {
    ++checks_;
    if (count == 0) {
      ++failures_;
      std::printf("FAILED %s: nothing was compared\n", what.c_str());
    } else {
      std::printf("ok     %s: %zu %s\n", what.c_str(), count, how);
    }
  }
  template <class T>
  void failed(const std::string& what, std::size_t i, std::size_t n, T host, T device,
              const std::string& why) {
    ++checks_;
    ++failures_;
    std::printf("FAILED %s: element %zu of %zu is %.9g on the host and %.9g on the device: %s\n",
                what.c_str(), i, n, printable(host), printable(device), why.c_str());
  }

  int checks_ = 0, failures_ = 0;
};

}  // namespace both_sides
