// Version, supported compilers, FREEKV_HD and what backends see of freekv::detail, which every header needs
// first.
#pragma once

#define FREEKV_VERSION_MAJOR 0
#define FREEKV_VERSION_MINOR 1
#define FREEKV_VERSION_PATCH 0

#if __cplusplus < 202002L
#error "FreeKV needs C++20: compile with -std=c++20 (in CMake the target freekv::freekv asks for it)."
#endif
#if defined(__clang__) && __clang_major__ < 14
#error "FreeKV needs Clang 14 or newer: this Clang is older."
#elif defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error "FreeKV needs GCC 12 or newer: this GCC is older."
#elif !defined(__GNUC__) && !defined(__clang__)
#error "FreeKV needs GCC 12 or Clang 14 or newer: its host backend uses their vector types."
#endif
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13
#error "FreeKV needs nvcc 13.0 or newer: this CUDA toolkit is older."
#endif

#if !__has_include(<cuda/std/mdspan>) || !__has_include(<cuda_bf16.h>)
#error "FreeKV needs the headers of CUDA 13: -isystem CUDA/include/cccl -isystem CUDA/include, by its folder."
#endif

#if defined(__FAST_MATH__)
#error "FreeKV treats NaN and infinity as data: compile without -ffast-math (or -Ofast)."
#endif

// Marks what runs on the host and on the device alike: policies and algorithms, never memory management or
// launches. The only macro FreeKV defines besides its version and FREEKV_UNROLL (core/unroll.hpp).
#if defined(__CUDACC__)
#define FREEKV_HD __host__ __device__
#else
#define FREEKV_HD
#endif

// `freekv` has the names of users; `freekv::detail` has those of the library alone, which its backends share.
namespace freekv {
namespace detail {}
namespace host {
using namespace detail;
}
namespace device {
using namespace detail;
}
}  // namespace freekv
