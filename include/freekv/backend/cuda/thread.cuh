// Places of a thread in its block and of a block in its grid, signed as sizes are here.
#pragma once

namespace freekv::device {

__device__ __forceinline__ int thread_x() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int threads_x() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int block_x() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int block_y() { return static_cast<int>(blockIdx.y); }
__device__ __forceinline__ int block_z() { return static_cast<int>(blockIdx.z); }
__device__ __forceinline__ int blocks_x() { return static_cast<int>(gridDim.x); }

}  // namespace freekv::device
