// The last block of several that work on one thing, which goes on with what the others have left.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace freekv::device {

/// True, on all its threads, for the block that is the last of `blocks` to ask with this counter; it sees
/// what the others have written before they asked, and the counter is 0 again. None waits for another, so
/// blocks may run one after the other. `shared` is any of the block's shared memory that is free.
__device__ inline bool is_last_block(std::uint32_t* counter, int blocks, std::uint32_t& shared) {
  if (blocks == 1) {
    __syncthreads();
    return true;
  }
  __syncthreads();
  if (threadIdx.x ==
      0) {  // whose fences are the block's: barriers order the others' reads and writes before and after
    cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
    shared = atomicInc(counter, static_cast<unsigned>(blocks - 1));
    cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
  }
  __syncthreads();
  return shared == static_cast<unsigned>(blocks - 1);
}

}  // namespace freekv::device
