// Places of a thread in its block and of a block in its grid, signed as sizes are here.
#pragma once

namespace freekv::device {

__device__ __forceinline__ int thread_x() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int threads_x() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int block_x() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int block_y() { return static_cast<int>(blockIdx.y); }
__device__ __forceinline__ int block_z() { return static_cast<int>(blockIdx.z); }
__device__ __forceinline__ int blocks_x() { return static_cast<int>(gridDim.x); }

/// True of code for a device where a kernel may begin before the one before it ends.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kernels_overlap = true;
#else
inline constexpr bool kernels_overlap = false;
#endif

/// Waits for the kernel before in the stream, and so for all before it, in a launch that overlaps: before a
/// thread looks at what that has written, or ends.
__device__ inline void wait_for_kernel_before() {
  if constexpr (kernels_overlap) cudaGridDependencySynchronize();
}
/// Lets the kernel behind begin, as soon as all blocks have called it, if its launch overlaps.
__device__ inline void let_kernel_behind_begin() {
  if constexpr (kernels_overlap) cudaTriggerProgrammaticLaunchCompletion();
}

}  // namespace freekv::device
