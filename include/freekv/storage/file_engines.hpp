// Many reads or writes of a file at a time: with threads, or with rings that the kernel works on.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#include <freekv/core/size.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <freekv/storage/file_io.hpp>
#include <mutex>
#include <span>
#include <thread>
#include <type_traits>
#include <vector>

namespace freekv::detail {

/// Progress of a read or write.
struct transfer_progress {
  /// tries in a row without a byte, where the system says "try again": 0.1 s
  static constexpr int most_tries = 100;
  enum class state : std::uint8_t { more, complete, failed };

  std::size_t done = 0;
  int tries = 0;
  int system_error = 0;  ///< of `failed`; 0: a read came to the file's end, a write got nowhere

  /// State after `result`: bytes that were moved, or a negative errno.
  template <class Request>
  state after(long result, const Request& request) {
    if (result > 0) {
      done += to_size(result);
      tries = 0;
      return done >= request.bytes ? state::complete : state::more;
    }
    if (result == -EINTR) return state::more;
    const bool at_end = result == 0 && std::is_same_v<Request, file_read>;
    if ((result == 0 || result == -EAGAIN) && !at_end && ++tries < most_tries) {
      ::usleep(1000);
      return state::more;
    }
    system_error = static_cast<int>(-result);
    return state::failed;
  }
  /// The rest of `request`, which is to be read or written still.
  template <class Request>
  Request rest(const Request& request) const {
    return {request.offset + done, request.data + done, request.bytes - done};
  }
};

/// The first request of a batch that failed, if one did.
struct transfer_failure {
  bool failed = false;
  std::size_t request = 0, done = 0;
  int system_error = 0;
};

/// Moves one request, or what is left of it, on the calling thread. False: it failed.
template <class System, class Request>
bool transfer(System& system, int file, const Request& request, transfer_progress& progress) {
  if (progress.done >= request.bytes) return true;
  for (;;) {
    const auto state = progress.after(system.transfer(file, progress.rest(request)), request);
    if (state != transfer_progress::state::more) return state == transfer_progress::state::complete;
  }
}

/// A batch's requests on the calling thread and on threads of its own. Batches of several threads share
/// these.
template <class System>
class thread_engine {
 public:
  /// `in_flight - 1` threads, or as many as the system grants.
  thread_engine(System& system, int in_flight) : system_(system) {
    sigset_t all, before;  // a signal is for the engine's threads
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      threads_.reserve(to_size(in_flight));
      for (int i = 1; i < in_flight; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {  // no thread, or no memory for its object: fewer in flight
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  thread_engine(const thread_engine&) = delete;
  thread_engine& operator=(const thread_engine&) = delete;
  ~thread_engine() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  /// Returns when nothing of `requests` is under way any more. Any thread may call.
  template <class Request>
  transfer_failure run(int file, std::span<const Request> requests) {
    batch b{.file = file, .count = requests.size(), .requests = requests.data(), .move = &move<Request>};
    const bool shared = requests.size() > 1 && !threads_.empty();
    if (shared) {
      {
        const std::lock_guard lock(mutex_);
        (last_ == nullptr ? first_ : last_->following) = &b;
        last_ = &b;
      }
      if (requests.size() > threads_.size())
        work_.notify_all();
      else
        for (std::size_t i = 1; i < requests.size(); ++i) work_.notify_one();
    }
    work(b);
    if (shared) {
      std::unique_lock lock(mutex_);
      leave(b);
      b.left.wait(lock, [&b] { return b.helpers == 0; });
    }
    return b.failure;
  }

 private:
  /// Requests of a call, on the stack of the thread that waits; threads that know of them are `helpers`.
  struct batch {
    int file;
    std::size_t count;
    const void* requests;
    void (*move)(thread_engine&, batch&, std::size_t);
    std::atomic<std::size_t> next{0};
    // Under the engine's mutex:
    int helpers = 0;
    transfer_failure failure{};
    batch* following = nullptr;
    bool queued = true;
    std::condition_variable left{};
  };

  template <class Request>
  static void move(thread_engine& self, batch& b, std::size_t i) {
    transfer_progress progress;
    if (transfer(self.system_, b.file, static_cast<const Request*>(b.requests)[i], progress)) return;
    b.next.store(b.count, std::memory_order_relaxed);  // the rest is not begun
    const std::lock_guard lock(self.mutex_);
    if (!b.failure.failed) b.failure = {true, i, progress.done, progress.system_error};
  }

  void work(batch& b) {
    while (b.next.load(std::memory_order_relaxed) < b.count) {
      const std::size_t i = b.next.fetch_add(1, std::memory_order_relaxed);
      if (i < b.count) b.move(*this, b, i);
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stopping_ || first_ != nullptr; });
      if (stopping_) return;
      batch& b = *first_;
      ++b.helpers;
      lock.unlock();
      work(b);
      lock.lock();
      leave(b);
      if (--b.helpers == 0) b.left.notify_one();
    }
  }

  /// Takes a batch whose requests are all begun out of the queue.
  void leave(batch& b) {
    if (!b.queued) return;
    b.queued = false;
    batch** at = &first_;
    batch* before = nullptr;
    for (; *at != &b; at = &(*at)->following) before = *at;
    *at = b.following;
    if (last_ == &b) last_ = before;
  }

  System& system_;
  std::mutex mutex_;
  std::condition_variable work_;
  batch* first_ = nullptr;
  batch* last_ = nullptr;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

/// A batch's requests through a ring. Two batches at a time have one each, further ones wait.
template <class System>
class ring_engine {
 public:
  static constexpr int most_refusals = 100;  ///< of a queue in a row, a millisecond apart

  ring_engine(System& system, int in_flight) : system_(system) {
    for (lane& l : lanes_) {
      l.usable = l.ring.start(system_, static_cast<unsigned>(in_flight));
      l.slots.resize(to_size(in_flight));
      l.free.reserve(l.slots.size());
    }
  }
  ring_engine(const ring_engine&) = delete;
  ring_engine& operator=(const ring_engine&) = delete;

  /// True where the kernel gave a ring.
  bool usable() const { return lanes_[0].usable; }

  /// Returns when nothing of `requests` is under way any more. Any thread may call.
  template <class Request>
  transfer_failure run(int file, std::span<const Request> requests) {
    lane& l = take();
    const transfer_failure failure = work(l, file, requests);
    {
      const std::lock_guard lock(mutex_);
      l.taken = false;
    }
    given_back_.notify_one();
    return failure;
  }

 private:
  struct slot {
    bool busy = false;
    std::size_t request = 0;
    transfer_progress progress;
  };
  struct lane {
    typename System::ring ring;
    std::vector<slot> slots;
    std::vector<std::uint32_t> free;
    bool usable = false, taken = false;
  };

  lane& take() {
    std::unique_lock lock(mutex_);
    for (;;) {
      // The second may have got no ring: where the first has one, batches wait for that.
      for (std::size_t i = 0; i < lanes_.size(); ++i)
        if (!lanes_[i].taken && (i == 0 || lanes_[i].usable)) {
          lanes_[i].taken = true;
          return lanes_[i];
        }
      given_back_.wait(lock);
    }
  }

  template <class Request>
  transfer_failure work(lane& l, int file, std::span<const Request> requests) {
    transfer_failure failure;
    const auto fail = [&failure](const slot& s) {
      if (!failure.failed) failure = {true, s.request, s.progress.done, s.progress.system_error};
    };
    std::size_t next = 0;
    int refusals = 0;
    l.free.clear();
    for (std::size_t i = l.slots.size(); i-- > 0;) {
      l.slots[i].busy = false;
      l.free.push_back(static_cast<std::uint32_t>(i));
    }
    while (l.usable) {
      while (next < requests.size() && !l.free.empty() && !failure.failed) {
        const std::size_t request = next++;
        if (requests[request].bytes == 0) continue;
        l.slots[l.free.back()] = {true, request, {}};
        l.ring.queue(file, requests[request], l.free.back());
        l.free.pop_back();
      }
      const std::size_t in_flight = l.slots.size() - l.free.size();
      if (in_flight == 0) return failure;
      // A quarter of the room at a time where more is to be begun: fewer calls, and the disk has the rest
      // meanwhile.
      const std::size_t ends = next < requests.size() ? (in_flight + 3) / 4 : in_flight;
      const int submitted = l.ring.submit_and_wait(static_cast<unsigned>(ends));
      for (ring_completion end; l.ring.next(end);) {
        refusals = 0;
        slot& s = l.slots[end.tag];
        const auto state = s.progress.after(end.result, requests[s.request]);
        if (state == transfer_progress::state::failed) fail(s);
        if (state == transfer_progress::state::more && !failure.failed) {
          l.ring.queue(file, s.progress.rest(requests[s.request]), end.tag);
        } else {
          s.busy = false;
          l.free.push_back(end.tag);
        }
      }
      if (submitted >= 0 || submitted == -EINTR) continue;
      if (++refusals >= most_refusals)
        abandon(l, requests);
      else
        ::usleep(1000);
    }
    // Without a ring the rest is done here.
    for (slot& s : l.slots)
      if (s.busy && !failure.failed && !transfer(system_, file, requests[s.request], s.progress)) fail(s);
    for (; next < requests.size() && !failure.failed; ++next) {
      slot s{true, next, {}};
      if (!transfer(system_, file, requests[next], s.progress)) fail(s);
    }
    l.usable = l.ring.start(system_, static_cast<unsigned>(l.slots.size()));
    return failure;
  }

  /// The kernel takes nothing more: what it has is awaited, as it moves the caller's memory; the ring goes.
  template <class Request>
  void abandon(lane& l, std::span<const Request> requests) {
    std::size_t under_way = l.slots.size() - l.free.size() - l.ring.unsubmitted();
    while (under_way > 0) {
      ring_completion end;
      if (!l.ring.next(end)) {
        if (l.ring.wait() < 0) ::usleep(1000);
        continue;
      }
      --under_way;
      slot& s = l.slots[end.tag];
      if (end.result > 0) s.progress.after(end.result, requests[s.request]);  // what failed is tried again
      s.busy = s.progress.done < requests[s.request].bytes;
    }
    l.ring.stop();
    l.usable = false;
  }

  System& system_;
  std::mutex mutex_;
  std::condition_variable given_back_;
  std::array<lane, 2> lanes_;
};

}  // namespace freekv::detail
