// The host backend: threads, instruction set and the two streams of a pipeline.
#pragma once

#include <atomic>
#include <exception>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/stream.hpp>
#include <freekv/backend/host/thread_pool.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
#include <string>
#include <string_view>

namespace freekv {

namespace host {
template <class State, class Policies>
class stages;
template <class Backend, class Shape, class Settings>
class eviction_stages;
}  // namespace host

struct host_options {
  int threads = 1;      ///< that attend and append, the calling one included
  bool overlap = true;  ///< speculate on a thread of its own, or at once on the calling one
  std::size_t bytes_per_thread = 256 << 10;  ///< KV bytes below which waking one more thread does not pay
  host::isa instructions = host::best_isa();
};

/// Threads of the host. The compute stream is the calling thread: append and attend have happened when they
/// return. The recall stream is a thread of its own (`overlap`), on which selection and recall for the next
/// step go on while the caller computes. One pipeline at a time uses a backend; it outlives its pipelines.
class host_backend {
 public:
  using policy_kind = backend_kind;
  static constexpr std::string_view name = "host";
  // Members that a pipeline takes from its backend.
  using event = host::event;
  template <class State, class Policies>
  using stages = host::stages<State, Policies>;
  template <class Shape, class Settings>
  using eviction_stages = host::eviction_stages<host_backend, Shape, Settings>;

  explicit host_backend(const host_options& options = {})
      : options_(checked(options)),
        pool_(options.threads),
        recall_(options.overlap ? host::stream::kind::threaded : host::stream::kind::inline_) {}

  const host_options& options() const { return options_; }
  int threads() const { return pool_.size(); }
  /// Workspaces a pipeline needs: one a thread, and one for the recall stream.
  int workspaces() const { return pool_.size() + 1; }
  int recall_workspace() const { return pool_.size(); }

  host::stream& compute() { return compute_; }
  host::stream& recall() { return recall_; }

  /// Threads that `bytes` of memory traffic are worth.
  int threads_worth(std::size_t bytes) const {
    const std::size_t helpers = bytes / options_.bytes_per_thread;
    return helpers < to_size(threads()) ? 1 + static_cast<int>(helpers) : threads();
  }
  /// Runs `body(task, worker)` for all tasks on as many threads as `bytes` of memory traffic are worth. If it
  /// throws, tasks that have not begun are left out, and the first exception is thrown when the others are
  /// done.
  template <class Body>
  void parallel(int tasks, std::size_t bytes, const Body& body) {
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    pool_.run(tasks, threads_worth(bytes) - 1, [&](int task, int worker) {
      if (failed.load(std::memory_order_relaxed)) return;
      try {
        body(task, worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
  }

 private:
  static const host_options& checked(const host_options& options) {
    if (options.threads < 1 || options.threads > 1024)
      throw settings_error("host backend: " + std::to_string(options.threads) +
                           " threads; choose from 1 to 1024, at most the number of cores");
    if (options.bytes_per_thread < 1)
      throw settings_error("host backend: bytes_per_thread must be at least 1");
    return options;
  }

  host_options options_;
  host::thread_pool pool_;
  host::stream compute_{host::stream::kind::inline_};
  host::stream recall_;
};

}  // namespace freekv
