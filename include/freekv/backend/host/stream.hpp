// Ordered streams and events of the host: the order rules of CUDA, with threads.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/core/error.hpp>
#include <system_error>
#include <thread>
#include <type_traits>

namespace freekv::host {

class stream;

/// A point in a stream's order: everything queued there before it was recorded.
class event {
 public:
  event() = default;
  bool complete() const;
  /// Blocks the calling thread until the point is reached.
  void wait() const;

 private:
  friend class stream;
  event(const stream* of, std::uint64_t ticket) : of_(of), ticket_(ticket) {}
  const stream* of_ = nullptr;
  std::uint64_t ticket_ = 0;
};

/// Runs what is queued in order: on a thread of its own, or (inline) at once on the thread that queues it.
/// One thread queues. Nothing is allocated after construction; a full queue waits.
class stream {
 public:
  enum class kind : std::uint8_t { inline_, threaded };

  /// Throws thread_error.
  explicit stream(kind of) {
    if (of == kind::inline_) return;
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error& e) {
      throw thread_error("host backend's recall stream", 1, 0, e.code(), "set overlap = false");
    }
  }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  ~stream() {
    if (!thread_.joinable()) return;
    enqueue([this] { stopping_ = true; });
    thread_.join();
  }

  /// `task()` is run after everything queued before it. Trivially copyable, at most `task_bytes`, must not
  /// throw.
  template <class Task>
  void enqueue(const Task& task) {
    static_assert(std::is_trivially_copyable_v<Task> && sizeof(Task) <= task_bytes,
                  "a queued task is copied as bytes: capture values and pointers, 256 bytes at most");
    if (!thread_.joinable()) return task();
    const std::uint64_t number = queued_.load(std::memory_order_relaxed);
    for (std::uint64_t done; number - (done = done_.load(std::memory_order_acquire)) >= slots;)
      done_.wait(done, std::memory_order_acquire);
    slot& s = ring_[number % slots];
    std::memcpy(s.task.data(), &task, sizeof(Task));
    s.call = [](const std::byte* bytes) { (*reinterpret_cast<const Task*>(bytes))(); };
    queued_.store(number + 1, std::memory_order_release);
    queued_.notify_one();
  }

  event record() const { return {this, queued_.load(std::memory_order_relaxed)}; }

  /// Makes all that is queued from now on run after `e`.
  void wait(const event& e) {
    if (e.complete()) return;
    enqueue([e] { e.wait(); });
  }

  /// Nothing of the host is captured.
  static constexpr bool is_capturing() { return false; }

  /// Blocks the calling thread until everything queued has run.
  void synchronize() const { record().wait(); }

 private:
  friend class event;
  static constexpr std::uint64_t slots = 256;
  static constexpr std::size_t task_bytes = 256;
  struct slot {
    void (*call)(const std::byte*) = nullptr;
    alignas(std::max_align_t) std::array<std::byte, task_bytes> task;
  };

  void serve() {
    for (std::uint64_t number = 0; !stopping_; ++number) {
      for (std::uint64_t queued; (queued = queued_.load(std::memory_order_acquire)) == number;)
        queued_.wait(queued, std::memory_order_acquire);
      const slot& s = ring_[number % slots];
      s.call(s.task.data());
      done_.store(number + 1, std::memory_order_release);
      done_.notify_all();
    }
  }

  std::array<slot, slots> ring_;
  std::atomic<std::uint64_t> queued_{0}, done_{0};
  bool stopping_ = false;  // the stream's own thread's
  std::thread thread_;
};

inline bool event::complete() const {
  return of_ == nullptr || of_->done_.load(std::memory_order_acquire) >= ticket_;
}
inline void event::wait() const {
  if (of_ == nullptr) return;
  for (std::uint64_t done; (done = of_->done_.load(std::memory_order_acquire)) < ticket_;)
    of_->done_.wait(done, std::memory_order_acquire);
}

}  // namespace freekv::host
