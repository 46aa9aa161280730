// The host backend's threads and streams: every unit once, every task in order, nothing lost.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <freekv/freekv.hpp>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include <malloc.h>
#include <pthread.h>
#include <sys/resource.h>

#include <fstream>

#include "../catch.hpp"
#include "../mentions.hpp"
#include "../sanitized.hpp"

namespace {

using freekv::host::event;
using freekv::host::stream;
using freekv::host::thread_pool;
using tests::check_mentions;
using tests::sanitized;

/// Holds the tasks that wait for it until it is opened.
class gate {
 public:
  void open() {
    open_.store(true, std::memory_order_release);
    open_.notify_all();
  }
  void wait() const { open_.wait(false, std::memory_order_acquire); }

 private:
  std::atomic<bool> open_{false};
};

/// What a loop did: how often each unit ran, and whether a worker's number was out of range.
struct tally {
  explicit tally(int units) : runs(static_cast<std::size_t>(units)) {}
  std::vector<std::atomic<int>> runs;
  std::atomic<int> strays{0};

  bool each_once() const {
    return strays == 0 && std::all_of(runs.begin(), runs.end(), [](const auto& n) { return n == 1; });
  }
};

/// While it lives threads' stacks have 1 GB, and the process's memory has room for `most` of them: what
/// malloc reserves for a thread that frees (64 MB, when it likes) does not count beside them.
class few_threads {
 public:
  explicit few_threads(std::size_t most) {
    constexpr std::size_t stack = std::size_t{1} << 30, page = 4096;
    ::mallopt(M_ARENA_MAX, 1);
    ::pthread_attr_init(&before_);
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t large;
    ::pthread_attr_init(&large);
    ::pthread_attr_setstacksize(&large, stack);
    ::pthread_setattr_default_np(&large);
    ::pthread_attr_destroy(&large);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    ::getrlimit(RLIMIT_AS, &limit_);
    rlimit low = limit_;
    low.rlim_cur = pages * page + (most + 1) * stack - stack / 2;
    ::setrlimit(RLIMIT_AS, &low);
  }
  few_threads(const few_threads&) = delete;
  few_threads& operator=(const few_threads&) = delete;
  ~few_threads() {
    ::setrlimit(RLIMIT_AS, &limit_);
    ::pthread_setattr_default_np(&before_);
    ::pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_;
  rlimit limit_{};
};

}  // namespace

TEST_CASE("a pool whose threads do not all come ends those that did, and says how many", "[thread_pool]") {
  if (sanitized) return;  // address space has no limit there
  for (const std::size_t most : {0, 1, 5}) {
    const few_threads limit(most);
    const auto caught = [&](const auto& make) {
      try {
        make();
      } catch (const freekv::thread_error& e) {
        check_mentions(e.what(), {std::to_string(e.wanted) + " thread", "gives " + std::to_string(e.started),
                                  "temporarily unavailable", "ulimit -u", "pids limit", "ulimit -v"});
        return std::pair(e.wanted, e.started);
      }
      return std::pair(0, 0);
    };
    const auto [wanted, started] = caught([] { thread_pool pool(64); });
    CHECK(wanted == 64);
    CHECK(started == static_cast<int>(most) + 1);
    CHECK(caught([] { freekv::host_backend backend({.threads = 64}); }) == std::pair(64, started));
    // None is left of them: as many come again.
    CHECK_NOTHROW(thread_pool(static_cast<int>(most) + 1));
    if (most == 0) CHECK(caught([] { stream s(stream::kind::threaded); }) == std::pair(1, 0));
    if (most == 1) {
      CHECK_NOTHROW(freekv::host_backend({.threads = 1}));
      CHECK(caught([] { freekv::host_backend backend({.threads = 2}); }) == std::pair(1, 0));
    }
  }
  CHECK_NOTHROW(thread_pool(4));
}

TEST_CASE("a loop runs every task exactly once, on workers within range", "[thread_pool]") {
  for (const int threads : {1, 2, 3, 4, 8}) {
    thread_pool pool(threads);
    CHECK(pool.size() == threads);
    for (const int tasks : {0, 1, 2, 3, 7, 64, 1000})
      for (const int helpers : {-1, 0, 1, 2, threads - 1, 100}) {
        tally seen(tasks);
        pool.run(tasks, helpers, [&](int task, int worker) {
          if (task < 0 || task >= tasks || worker < 0 || worker >= threads)
            ++seen.strays;
          else
            ++seen.runs[task];
        });
        INFO(threads << " threads, " << tasks << " tasks, " << helpers << " helpers");
        CHECK(seen.each_once());
      }
  }
}

TEST_CASE("what a loop wrote is there when it returns, without atomics", "[thread_pool]") {
  thread_pool pool(4);
  std::vector<int> written(500);
  int wrong = 0;
  for (int loop = 0; loop < 300; ++loop) {
    pool.run(500, 3, [&](int task, int) { written[task] = loop + task; });
    for (int task = 0; task < 500; ++task) wrong += written[task] != loop + task;
  }
  CHECK(wrong == 0);
}

TEST_CASE("a loop of more tasks than a ticket counts runs each once", "[thread_pool]") {
  thread_pool pool(2);
  for (const int tasks : {(1 << 24) - 1, 1 << 24}) {
    std::vector<std::uint8_t> times(static_cast<std::size_t>(tasks));
    pool.run(tasks, 1, [&](int task, int) { ++times[static_cast<std::size_t>(task)]; });
    CHECK(std::count(times.begin(), times.end(), 1) == tasks);
  }
}

TEST_CASE("without helpers, and for one task, the caller works alone", "[thread_pool]") {
  thread_pool pool(4);
  const auto caller = std::this_thread::get_id();
  int others = 0;
  const auto body = [&](int, int worker) { others += std::this_thread::get_id() != caller || worker != 0; };
  for (int loop = 0; loop < 200; ++loop) {
    pool.run(100, 0, body);
    pool.run(1, 3, body);
  }
  CHECK(others == 0);
}

TEST_CASE("workers do help, each on a thread of its own", "[thread_pool]") {
  thread_pool pool(3);
  std::array<std::atomic<std::size_t>, 3> thread_of{};
  std::atomic<int> arrived{0};
  // Three tasks that only end together: three threads must have taken one each.
  pool.run(3, 2, [&](int, int worker) {
    thread_of[worker] = std::hash<std::thread::id>{}(std::this_thread::get_id());
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  CHECK(thread_of[0] == std::hash<std::thread::id>{}(std::this_thread::get_id()));
  CHECK(thread_of[0] != thread_of[1]);
  CHECK(thread_of[1] != thread_of[2]);
  CHECK(thread_of[0] != thread_of[2]);
}

TEST_CASE("loop after loop of changing length, no task runs twice or late", "[thread_pool]") {
  // A worker that comes late out of a short loop must not take a task of the longer one that is being set up.
  for (const int threads : {2, 4, 8}) {
    thread_pool pool(threads);
    constexpr int most = 24;
    std::array<std::atomic<int>, most> runs{};
    std::atomic<int> total{0};
    int wrong = 0;
    long loops = 0;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
    for (; std::chrono::steady_clock::now() < end; ++loops) {
      const int tasks = 2 + static_cast<int>(loops * 7 % (most - 1));
      for (auto& n : runs) n.store(0, std::memory_order_relaxed);
      total.store(0, std::memory_order_relaxed);
      pool.run(tasks, threads - 1, [&](int task, int) {
        runs[task].fetch_add(1, std::memory_order_relaxed);
        total.fetch_add(1, std::memory_order_relaxed);
      });
      if (total.load(std::memory_order_relaxed) != tasks) ++wrong;
      for (int task = 0; task < tasks; ++task) wrong += runs[task] != 1;
    }
    INFO(threads << " threads, " << loops << " loops");
    CHECK(wrong == 0);
  }
}

TEST_CASE("a pool may go without having worked", "[thread_pool]") {
  for (int i = 0; i < 50; ++i) thread_pool pool(4);
  SUCCEED();
}

TEST_CASE("an inline stream runs its tasks at once, on the thread that queues them", "[stream]") {
  stream s(stream::kind::inline_);
  std::vector<int> order;
  std::thread::id ran_on;
  for (int i = 0; i < 1000; ++i) {
    s.enqueue([&order, &ran_on, i] {
      order.push_back(i);
      ran_on = std::this_thread::get_id();
    });
    CHECK(order.size() == static_cast<std::size_t>(i) + 1);
  }
  CHECK(ran_on == std::this_thread::get_id());
  CHECK(s.record().complete());
  s.synchronize();
}

TEST_CASE("a threaded stream runs its tasks in order on one thread of its own", "[stream]") {
  stream s(stream::kind::threaded);
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  for (int i = 0; i < 3000; ++i)
    s.enqueue([&order, &threads, i] {
      order.push_back(i);
      threads.push_back(std::this_thread::get_id());
    });
  s.synchronize();
  REQUIRE(order.size() == 3000);
  for (int i = 0; i < 3000; ++i) REQUIRE(order[i] == i);
  CHECK(std::all_of(threads.begin(), threads.end(), [&](auto id) { return id == threads.front(); }));
  CHECK(threads.front() != std::this_thread::get_id());
}

TEST_CASE("a full queue holds its caller back, and loses nothing", "[stream]") {
  gate g;
  stream s(stream::kind::threaded);
  std::atomic<int> queued{0};
  std::vector<int> order;
  s.enqueue([&g] { g.wait(); });
  int queued_when_opened = -1;
  std::thread opener([&] {
    while (queued < 200) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    queued_when_opened = queued;
    g.open();
  });
  for (int i = 0; i < 1000; ++i) {
    s.enqueue([&order, i] { order.push_back(i); });
    ++queued;
  }
  opener.join();
  s.synchronize();
  CHECK(queued_when_opened >= 200);
  CHECK(queued_when_opened < 256);  // the task at the gate has a place too
  REQUIRE(order.size() == 1000);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("an event is complete once everything queued before it has run", "[stream]") {
  CHECK(event{}.complete());
  event{}.wait();
  gate g;
  stream s(stream::kind::threaded);
  const event before = s.record();
  CHECK(before.complete());
  std::atomic<bool> ran{false};
  s.enqueue([&g, &ran] {
    g.wait();
    ran = true;
  });
  const event after = s.record();
  CHECK(before.complete());
  CHECK_FALSE(after.complete());
  g.open();
  after.wait();
  CHECK(ran);
  CHECK(after.complete());
  // What comes later does not undo it.
  gate later;
  s.enqueue([&later] { later.wait(); });
  CHECK(after.complete());
  later.open();
}

TEST_CASE("a stream that waits for another's event goes on only behind it", "[stream]") {
  for (int round = 0; round < 50; ++round) {
    gate g;
    stream first(stream::kind::threaded), second(stream::kind::threaded);
    std::atomic<int> step{0};
    std::array<int, 3> seen{-1, -1, -1};
    second.enqueue([&] { seen[0] = step; });
    second.synchronize();
    first.enqueue([&] {
      g.wait();
      step = 1;
    });
    second.wait(first.record());
    second.enqueue([&] {
      seen[1] = step;
      step = 2;
    });
    const event end = second.record();
    CHECK_FALSE(end.complete());
    first.wait(end);  // and back again
    first.enqueue([&] { seen[2] = step; });
    g.open();
    first.synchronize();
    CHECK(seen == std::array{0, 1, 2});
  }
}

TEST_CASE("an inline stream that waits blocks its caller", "[stream]") {
  gate g;
  stream caller(stream::kind::inline_), other(stream::kind::threaded);
  std::atomic<bool> ran{false};
  other.enqueue([&] {
    g.wait();
    ran = true;
  });
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    g.open();
  });
  caller.wait(other.record());
  CHECK(ran);
  opener.join();
}

TEST_CASE("a stream that goes has run everything", "[stream]") {
  for (int round = 0; round < 100; ++round) {
    int ran = 0;
    {
      stream s(stream::kind::threaded);
      for (int i = 0; i < round; ++i) s.enqueue([&ran] { ++ran; });
    }
    REQUIRE(ran == round);
  }
}

TEST_CASE("a task may carry 256 bytes", "[stream]") {
  struct payload {
    std::array<std::uint64_t, 31> numbers;
    std::uint64_t* sum;
    void operator()() const {
      for (const auto n : numbers) *sum += n;
    }
  };
  static_assert(sizeof(payload) == 256);
  std::uint64_t sum = 0;
  {
    stream s(stream::kind::threaded);
    payload p{{}, &sum};
    for (std::size_t i = 0; i < 31; ++i) p.numbers[i] = i;
    s.enqueue(p);
    p.numbers.fill(1000);  // the task has its own copy
  }
  CHECK(sum == 30 * 31 / 2);
}

TEST_CASE("a backend refuses settings that make no sense, with the numbers", "[host_backend]") {
  using Catch::Contains;
  CHECK_THROWS_AS(freekv::host_backend({.threads = 0}), freekv::settings_error);
  CHECK_THROWS_WITH(freekv::host_backend({.threads = 0}), Contains("0 threads") && Contains("1 to 1024"));
  CHECK_THROWS_WITH(freekv::host_backend({.threads = -3}), Contains("-3 threads"));
  CHECK_THROWS_WITH(freekv::host_backend({.threads = 1025}), Contains("1025 threads"));
  CHECK_THROWS_AS(freekv::host_backend({.bytes_per_thread = 0}), freekv::settings_error);
}

TEST_CASE("a backend has a workspace for each thread and one for recall", "[host_backend]") {
  for (const int threads : {1, 3}) {
    freekv::host_backend backend({.threads = threads});
    CHECK(backend.threads() == threads);
    CHECK(backend.workspaces() == threads + 1);
    CHECK(backend.recall_workspace() == threads);
    CHECK(backend.options().threads == threads);
  }
}

TEST_CASE("little work stays on the caller, much is shared", "[host_backend]") {
  freekv::host_backend backend({.threads = 3, .bytes_per_thread = 1000});
  int others = 0;
  for (int i = 0; i < 100; ++i) backend.parallel(50, 999, [&](int, int worker) { others += worker != 0; });
  CHECK(others == 0);
  std::atomic<int> arrived{0};
  backend.parallel(3, 1u << 20, [&](int, int) {
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  CHECK(arrived == 3);
}

TEST_CASE("overlap decides whether recall has a thread", "[host_backend]") {
  for (const bool overlap : {false, true}) {
    freekv::host_backend backend({.overlap = overlap});
    std::thread::id compute, recall;
    backend.compute().enqueue([&] { compute = std::this_thread::get_id(); });
    backend.recall().enqueue([&] { recall = std::this_thread::get_id(); });
    backend.recall().synchronize();
    CHECK(compute == std::this_thread::get_id());
    CHECK((recall == std::this_thread::get_id()) == !overlap);
  }
}
