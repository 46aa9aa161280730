// The runtime, as the CUDA backend takes it: errors, memory, ordered streams and events.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <memory_resource>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace freekv {

/// A call of the CUDA runtime, or a launch, that failed.
struct device_error : error {
  device_error(const std::string& call, cudaError_t failed)
      : error(call + " failed: " + cudaGetErrorString(failed)), status(failed) {}
  cudaError_t status;
};

/// Captured steps that were replayed in an order that has no meaning: the device has found it, and has done
/// nothing since.
struct replay_error : error {
  using error::error;
};

namespace device {

/// Takes the error that a call of ours has left behind from the runtime, so that whoever asks it next, as an
/// engine does behind launches of its own, does not take it for theirs. Errors that last stay.
inline void forget_error() { (void)cudaGetLastError(); }

inline void check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  forget_error();
  throw device_error(call, status);
}

/// Shape of a launch, and its stream.
struct launch_shape {
  dim3 grid;
  int threads = 32;  // of a block
  cudaStream_t stream = nullptr;
  std::size_t shared_bytes = 0;  // of a block, dynamic
  bool overlaps = false;         // it may begin before the kernel before it ends, and waits for that itself
};

/// True of a kernel that has been compiled for devices where one can wait for the kernel before it.
template <class... Parameters>
bool can_wait(void (*kernel)(Parameters...)) {
  cudaFuncAttributes of{};
  check(cudaFuncGetAttributes(&of, kernel), "cudaFuncGetAttributes");
  return of.ptxVersion >= 90;
}

/// Allows a kernel as much dynamic shared memory, which up to 48 KiB it need not be.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), std::size_t bytes, const char* what) {
  if (bytes > 48 << 10)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
          what);
}

/// Launches `kernel`. What is checked is what the launch itself returns: an error that others have left
/// behind stays theirs.
template <class... Parameters, class... Arguments>
void launch(const char* what, const launch_shape& shape, void (*kernel)(Parameters...),
            Arguments&&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = shape.stream;
  allow_shared(kernel, shape.shared_bytes, what);
  cudaLaunchAttribute overlap{};
  if (shape.overlaps && can_wait(kernel)) {
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &overlap;
    config.numAttrs = 1;
  }
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), what);
}

/// True where a block is whole warps whose registers there are: a multiprocessor has 64K of them, so that
/// blocks of up to 256 threads launch whatever a compiler allots.
constexpr bool valid_block(int threads, int registers) {
  return threads >= 32 && threads <= 1024 && threads % 32 == 0 && registers <= 255 &&
         threads * registers <= 64 << 10;
}

constexpr int blocks_for(std::int64_t tasks, int each) { return static_cast<int>((tasks + each - 1) / each); }

/// An attribute of the device in use.
inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}
inline int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }
/// Bytes of shared memory that a block may have.
inline int most_shared_bytes() { return attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

/// Blocks of a kernel that the device in use runs at a time, at least 1.
template <class... Parameters>
int blocks_at_once(const char* what, void (*kernel)(Parameters...), int threads, std::size_t shared_bytes) {
  allow_shared(kernel, shared_bytes, what);
  int of_each = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_each, kernel, threads, shared_bytes), what);
  return multiprocessors() * (of_each > 1 ? of_each : 1);
}

/// Memory of the device in use. For `memory_resources::fast`; the host does not touch it.
class device_memory final : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t) override {
    void* data = nullptr;
    if (cudaMalloc(&data, bytes) == cudaSuccess) return data;
    forget_error();
    throw std::bad_alloc();
  }
  void do_deallocate(void* data, std::size_t, std::size_t) override { cudaFree(data); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

/// Page-locked memory of the host, which kernels read and write at the same address. For
/// `memory_resources::slow`. Taken in one piece, as page-locking is slow.
class pinned_memory final : public std::pmr::memory_resource {
  void* do_allocate(std::size_t bytes, std::size_t) override {
    void* data = nullptr;
    if (cudaHostAlloc(&data, bytes, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess) return data;
    forget_error();
    throw std::bad_alloc();
  }
  void do_deallocate(void* data, std::size_t, std::size_t) override { cudaFreeHost(data); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

class stream;

/// A point in a stream's order: everything queued there before it was recorded. Waiting on one that was
/// recorded long ago, more than `stream::events` points, may wait for a later point of the same stream.
class event {
 public:
  event() = default;
  /// Blocks the calling thread until the point is reached.
  void wait() const {
    if (recorded_ != nullptr) check(cudaEventSynchronize(recorded_), "cudaEventSynchronize");
  }

 private:
  friend class stream;
  explicit event(cudaEvent_t recorded) : recorded_(recorded) {}
  cudaEvent_t recorded_ = nullptr;
};

/// An event of its own, which measures no time.
class owned_event {
 public:
  owned_event() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  owned_event(const owned_event&) = delete;
  owned_event& operator=(const owned_event&) = delete;
  ~owned_event() { cudaEventDestroy(event_); }
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// A stream of the caller's and events for it, all made at construction.
class stream {
 public:
  static constexpr std::size_t events = 1024;

  explicit stream(cudaStream_t of) : of_(of), ring_(events) {}
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;

  cudaStream_t get() const { return of_; }
  bool is_capturing() const {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(of_, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }
  /// True where all that is queued has happened.
  bool idle() const {
    const cudaError_t status = cudaStreamQuery(of_);
    if (status != cudaErrorNotReady) check(status, "cudaStreamQuery");
    return status == cudaSuccess;
  }
  /// Records the point behind all that is queued. In a capture it is to be waited for before the next point
  /// is recorded.
  event record() {
    const cudaEvent_t next = (is_capturing() ? captured_ : ring_[next_++ % events]).get();
    check(cudaEventRecord(next, of_), "cudaEventRecord");
    return event(next);
  }
  /// Makes what is queued from now on run after `e`.
  void wait(const event& e) {
    if (e.recorded_ != nullptr) check(cudaStreamWaitEvent(of_, e.recorded_), "cudaStreamWaitEvent");
  }
  void synchronize() const { check(cudaStreamSynchronize(of_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t of_;
  std::vector<owned_event> ring_;
  owned_event captured_;  // of all points in captures
  std::size_t next_ = 0;
};

/// A stream of its own, which waits for no other.
class owned_stream {
 public:
  /// `goes_first`: blocks of its kernels come before those of other streams, where both wait for room. An
  /// engine's compute stream does, so that recall takes what it leaves.
  explicit owned_stream(bool goes_first = false) {
    int last = 0, first = 0;
    check(cudaDeviceGetStreamPriorityRange(&last, &first), "cudaDeviceGetStreamPriorityRange");
    check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, goes_first ? first : last),
          "cudaStreamCreateWithPriority");
  }
  owned_stream(const owned_stream&) = delete;
  owned_stream& operator=(const owned_stream&) = delete;
  ~owned_stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace device
}  // namespace freekv
