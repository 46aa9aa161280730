// Threads that share the tasks of a parallel loop with the thread that calls it.
#pragma once

#include <atomic>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <system_error>
#include <thread>
#include <vector>

namespace freekv::host {

/// Runs loops over `size()` threads, the calling one included. One loop at a time; nothing is allocated or
/// locked.
class thread_pool {
 public:
  /// Throws thread_error.
  explicit thread_pool(int threads) {
    try {
      for (int worker = 1; worker < threads; ++worker)
        threads_.emplace_back([this, worker] { serve(worker); });
    } catch (const std::system_error& e) {
      const int started = size();
      end();
      throw thread_error("host backend", threads, started, e.code(), "choose fewer threads");
    } catch (...) {  // no memory for their objects
      end();
      throw;
    }
  }
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;
  ~thread_pool() { end(); }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  /// Calls `body(task, worker)` for each task in [0, tasks), worker in [0, size()); returns when all are
  /// done. At most `helpers` further threads are woken. `body` must not throw.
  template <class Body>
  void run(int tasks, int helpers, const Body& body) {
    if (tasks <= 1 || tasks >= most_tasks || helpers <= 0 || threads_.empty()) {
      for (int task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    call_.store([](const void* b, int task, int worker) { (*static_cast<const Body*>(b))(task, worker); },
                std::memory_order_relaxed);
    body_.store(&body, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    const std::uint64_t loop = (ticket_.load(std::memory_order_relaxed) / one_loop + 1) % loops;
    ticket_.store(loop * one_loop + static_cast<std::uint64_t>(tasks) * one_task, std::memory_order_release);
    if (helpers + 1 >= size())
      ticket_.notify_all();
    else
      for (int i = 0; i < helpers; ++i) ticket_.notify_one();
    work(loop, 0);
    for (int done; (done = done_.load(std::memory_order_acquire)) < tasks;)
      done_.wait(done, std::memory_order_acquire);
  }

 private:
  // The ticket: the loop's number in 16 bits, its tasks in 24, its next task in 24. An old loop's ticket has
  // no task left, so nothing is taken of a loop that is being set up; and no loop ends before a task that is
  // taken. Numbers come again, but that of the end, which so is new to a worker however long it has slept.
  static constexpr int most_tasks = 1 << 24;
  static constexpr std::uint64_t one_task = most_tasks, one_loop = one_task * most_tasks,
                                 loops = (1 << 16) - 1;
  using body_call = void (*)(const void*, int, int);

  void end() {
    ticket_.store(loops * one_loop, std::memory_order_release);
    ticket_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void serve(int worker) {
    std::uint64_t seen = 0;
    for (;;) {
      std::uint64_t now = ticket_.load(std::memory_order_acquire);
      while (now / one_loop == seen) {
        ticket_.wait(now, std::memory_order_acquire);
        now = ticket_.load(std::memory_order_acquire);
      }
      seen = now / one_loop;
      if (seen == loops) return;
      work(seen, worker);
    }
  }

  void work(std::uint64_t loop, int worker) {
    for (;;) {
      std::uint64_t now = ticket_.load(std::memory_order_acquire);
      if (now / one_loop != loop) return;
      const int task = static_cast<int>(now % one_task), tasks = static_cast<int>(now / one_task % one_task);
      if (task >= tasks) return;
      if (!ticket_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
      call_.load(std::memory_order_relaxed)(body_.load(std::memory_order_relaxed), task, worker);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<int> done_{0};
  std::atomic<body_call> call_{nullptr};
  std::atomic<const void*> body_{nullptr};
};

}  // namespace freekv::host
