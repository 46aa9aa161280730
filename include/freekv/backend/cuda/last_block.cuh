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
  // One thread's fences are the block's: barriers order what the others have written before, and read after.
  if (threadIdx.x == 0) {
    const auto fence = [] {
      cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
    };
    fence();
    shared = atomicInc(counter, static_cast<unsigned>(blocks - 1));
    if (shared == static_cast<unsigned>(blocks - 1)) fence();
  }
  __syncthreads();
  return shared == static_cast<unsigned>(blocks - 1);
}

}  // namespace freekv::device
