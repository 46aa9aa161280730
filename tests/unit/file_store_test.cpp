// The slow tier's file: what is written is read, by every engine; and whatever the system does, an error says
// so.

#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <freekv/storage/file_store.hpp>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../catch.hpp"

namespace {

std::atomic<long> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Every allocation of this program is counted. Not inlined: GCC would take free for a mismatch of new.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace {

namespace fs = std::filesystem;
using Catch::Contains;
using freekv::file_store;
using freekv::file_store_options;
using freekv::store_error;
using freekv::store_operation;
using freekv::detail::file_read;
using freekv::detail::file_write;
using freekv::detail::ring_completion;

/// A folder that goes with its test.
struct folder {
  folder() {
    std::string name = (fs::temp_directory_path() / "freekv-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder: " + name);
    path = name;
  }
  folder(const folder&) = delete;
  folder& operator=(const folder&) = delete;
  ~folder() {
    std::error_code ignored;
    fs::permissions(path, fs::perms::owner_all, ignored);
    fs::remove_all(path, ignored);
  }
  std::string file(const std::string& name) const { return path + "/" + name; }
  long entries() const { return std::distance(fs::directory_iterator(path), fs::directory_iterator()); }
  std::string path;
};

/// Memory that direct I/O can use.
struct buffer {
  explicit buffer(std::size_t size, int fill = 0)
      : bytes(size), data(static_cast<std::byte*>(::operator new (size, std::align_val_t{4096}))) {
    std::memset(data, fill, size);
  }
  buffer(const buffer&) = delete;
  buffer& operator=(const buffer&) = delete;
  ~buffer() { ::operator delete (data, std::align_val_t{4096}); }
  bool holds(int value) const {
    return std::all_of(data, data + bytes,
                       [value](std::byte b) { return b == static_cast<std::byte>(value); });
  }
  std::size_t bytes;
  std::byte* data;
};

template <class Store>
void read_one(const Store& store, std::uint64_t offset, buffer& into) {
  const file_read one{offset, into.data, into.bytes};
  store.read({&one, 1});
}
template <class Store>
void write_one(Store& store, std::uint64_t offset, const buffer& from) {
  const file_write one{offset, from.data, from.bytes};
  store.write({&one, 1});
}

/// What `call` throws.
template <class Error, class Call>
Error thrown_by(const Call& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  throw std::runtime_error("nothing was thrown");
}

/// Faults to come. Shared by a store and its test.
struct faults {
  std::mutex mutex;
  // Of reads and writes, from the next one on: a negative errno, or 0 for none, or bytes that are moved at
  // most.
  std::map<long, long> at;
  long each = 0;  ///< of all others
  std::atomic<long> transfers{0}, active{0}, most_active{0};
  std::function<void()> during;  ///< each transfer
  int unnamed = 0, direct = 0, create = 0;
  std::deque<int> reserve;  ///< of each call
  bool writes_to_reserve = false;  ///< a byte at a time, as where the system cannot reserve
  bool is_direct = false, keeps_a_part = false;
  std::uint64_t longest = ~std::uint64_t{0} >> 1;
  // Of the ring.
  int rings = 2;            ///< how many there are to start
  std::deque<int> submits;  ///< of each call; empty: all well
  int each_submit = 0;
  unsigned taken_before_refusal = 0;  ///< that a refusing call takes all the same
  std::atomic<long> under_way{0}, most_under_way{0}, started{0};

  long next_transfer() {
    const long number = transfers++;
    const std::lock_guard lock(mutex);
    const auto found = at.find(number);
    return found == at.end() ? each : found->second;
  }
  static void raise(std::atomic<long>& most, long value) {
    for (long seen = most; seen < value && !most.compare_exchange_weak(seen, value);) {
    }
  }
};

/// A ring without a kernel: what is queued last ends first, one at a time, while the others are under way.
template <class System>
class slow_ring {
 public:
  slow_ring() = default;
  ~slow_ring() { stop(); }
  bool start(System& system, unsigned depth) {
    stop();
    system_ = &system;
    depth_ = depth;
    faults_ = system.state.get();
    if (faults_->rings <= 0) return false;
    --faults_->rings;
    ++faults_->started;
    return true;
  }
  void stop() {
    if (!taken_.empty()) std::abort();  // the kernel would go on in the caller's memory
    queued_.clear();
  }
  template <class Request>
  void queue(int file, const Request& request, std::uint32_t tag) {
    queued_.push_back(
        {tag, [this, file, request] { return static_cast<int>(system_->transfer(file, request)); }});
    if (queued_.size() + taken_.size() > depth_) std::abort();
  }
  int submit_and_wait(unsigned ends) {
    int result = faults_->each_submit;
    if (!faults_->submits.empty()) {
      result = faults_->submits.front();
      faults_->submits.pop_front();
    }
    take(result < 0 ? faults_->taken_before_refusal : queued_.size());
    if (result >= 0 && ends > taken_.size() + ended_.size()) std::abort();  // it would wait for ever
    while (result >= 0 && ended_.size() < ends) wait();
    return result;
  }
  int wait() {
    if (taken_.empty()) return 0;
    ended_.push_back({taken_.back().tag, taken_.back().run()});
    taken_.pop_back();
    --faults_->under_way;
    return 0;
  }
  unsigned unsubmitted() const { return static_cast<unsigned>(queued_.size()); }
  bool next(ring_completion& end) {
    if (ended_.empty()) return false;
    end = ended_.front();
    ended_.pop_front();
    return true;
  }

 private:
  struct entry {
    std::uint32_t tag;
    std::function<int()> run;
  };
  void take(std::size_t count) {
    for (; count > 0 && !queued_.empty(); --count) {
      taken_.push_back(queued_.front());
      queued_.pop_front();
      faults::raise(faults_->most_under_way, ++faults_->under_way);
    }
  }
  System* system_ = nullptr;
  faults* faults_ = nullptr;
  std::size_t depth_ = 0;
  std::deque<entry> queued_;
  std::vector<entry> taken_;
  std::deque<ring_completion> ended_;
};

/// The system's files, with faults.
struct faulty_system : freekv::detail::posix_system {
  using ring = slow_ring<faulty_system>;
  using base = freekv::detail::posix_system;
  explicit faulty_system(std::shared_ptr<faults> of = std::make_shared<faults>()) : state(std::move(of)) {}

  int create(const std::string& path) { return state->create < 0 ? state->create : base::create(path); }
  int create_unnamed(const std::string& path) {
    return state->unnamed < 0 ? state->unnamed : base::create_unnamed(path);
  }
  int set_direct(int file) {
    if (state->direct < 0) return state->direct;
    state->is_direct = true;
    return base::set_direct(file);
  }
  int reserve(int file, std::uint64_t bytes) {
    if (state->writes_to_reserve && state->is_direct) return -EINVAL;
    if (!state->reserve.empty()) {
      const int result = state->reserve.front();
      state->reserve.pop_front();
      if (result < 0) return state->keeps_a_part = true, result;
    }
    return base::reserve(file, bytes);
  }
  std::uint64_t free_bytes(int) { return state->keeps_a_part ? 0 : 4711; }
  std::uint64_t longest_file() { return state->longest; }
  template <class Request>
  long transfer(int file, Request request) {
    faults::raise(state->most_active, ++state->active);
    const long fault = state->next_transfer();
    if (state->during) state->during();
    if (fault > 0) request.bytes = std::min(request.bytes, static_cast<std::size_t>(fault));
    const long result = fault < 0 ? fault : base::transfer(file, request);
    --state->active;
    return result;
  }
  std::shared_ptr<faults> state;
};

/// A zero of a transfer: what a write that gets nowhere gives.
struct stuck_system : faulty_system {
  using ring = slow_ring<stuck_system>;
  using faulty_system::faulty_system;
  template <class Request>
  long transfer(int, Request) {
    return 0;
  }
};

using faulty_store = freekv::basic_file_store<faulty_system>;

/// One byte value for each of `count` slices of `bytes`.
template <class Store>
void fill(Store& store, int count, std::size_t bytes) {
  for (int i = 0; i < count; ++i)
    write_one(store, static_cast<std::uint64_t>(i) * bytes, buffer(bytes, i + 1));
}

struct way {
  bool uring, direct;
  int in_flight;
};

const std::vector<way>& ways() {
  static const std::vector<way> all = [] {
    std::vector<way> list;
    for (const bool uring : {false, true})
      for (const bool direct : {false, true})
        for (const int in_flight : {1, 3, 16}) list.push_back({uring, direct, in_flight});
    return list;
  }();
  return all;
}

std::string words(const way& w) {
  return std::string(w.uring ? "io_uring" : "threads") + (w.direct ? ", direct, " : ", ") +
         std::to_string(w.in_flight) + " in flight";
}

file_store_options options_of(const std::string& path, const way& w) {
  return {.path = path, .direct = w.direct, .in_flight = w.in_flight, .uring = w.uring};
}

/// A part of a file, `first` to `first + size`, that one thread writes and reads in random batches.
template <class Store>
int wrong_bytes(Store& store, std::uint64_t first, std::size_t size, unsigned seed, int rounds) {
  std::mt19937 random(seed);
  const std::size_t unit = std::max<std::size_t>(store.alignment(), 1), units = size / unit;
  buffer mirror(size), work(size);
  write_one(store, first, mirror);
  int wrong = 0;
  for (int round = 0; round < rounds; ++round) {
    // Cut into ranges of random length, so that nothing overlaps; a part of them is written, then a part
    // read.
    std::vector<std::pair<std::size_t, std::size_t>> ranges;
    for (std::size_t at = 0; at < units;) {
      const std::size_t n = std::min<std::size_t>(units - at, random() % (units / 8 + 1));
      ranges.emplace_back(at * unit, n * unit);
      at += std::max<std::size_t>(n, 1);
    }
    std::shuffle(ranges.begin(), ranges.end(), random);
    std::vector<file_write> writes;
    std::vector<file_read> reads;
    for (const auto& [at, bytes] : ranges) {
      if (random() % 2 == 0) continue;
      for (std::size_t i = 0; i < bytes; ++i) mirror.data[at + i] = static_cast<std::byte>(random());
      writes.push_back({first + at, mirror.data + at, bytes});
    }
    store.write(writes);
    std::shuffle(ranges.begin(), ranges.end(), random);
    std::memset(work.data, 0xee, size);
    for (const auto& [at, bytes] : ranges)
      if (random() % 4 != 0) reads.push_back({first + at, work.data + at, bytes});
    store.read(reads);
    std::vector<bool> is_read(size);
    for (const file_read& r : reads)
      std::fill_n(is_read.begin() + static_cast<std::ptrdiff_t>(r.offset - first), r.bytes, true);
    for (std::size_t i = 0; i < size; ++i)
      wrong += work.data[i] != (is_read[i] ? mirror.data[i] : static_cast<std::byte>(0xee));
  }
  return wrong;
}

/// Open descriptors, without the one that lists them.
std::set<int> descriptors() {
  std::set<int> all;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd"))
    all.insert(std::stoi(entry.path().filename()));
  std::set<int> open;
  for (const int d : all)
    if (::fcntl(d, F_GETFD) >= 0) open.insert(d);
  return open;
}

/// A file-size limit while it lives.
struct size_limit {
  explicit size_limit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before);
    const rlimit now{bytes, before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  size_limit(const size_limit&) = delete;
  size_limit& operator=(const size_limit&) = delete;
  ~size_limit() { ::setrlimit(RLIMIT_FSIZE, &before); }
  rlimit before{};
};

/// A file system of a megabyte, where mounting is permitted.
struct small_disk {
  small_disk() : mounted(::mount("tmpfs", place.path.c_str(), "tmpfs", 0, "size=1m") == 0) {}
  small_disk(const small_disk&) = delete;
  small_disk& operator=(const small_disk&) = delete;
  ~small_disk() {
    if (mounted) ::umount2(place.path.c_str(), MNT_DETACH);
  }
  folder place;
  bool mounted;
};

}  // namespace

TEST_CASE("random batches are read as they were written, by each engine, direct and not", "[file_store]") {
  const folder f;
  for (const way& w : ways()) {
    INFO(words(w));
    file_store store(options_of(f.path, w), 200000);
    CHECK(store.size() == (w.direct ? 200704 : 200000));
    CHECK(store.alignment() == (w.direct ? 4096 : 1));
    CHECK(store.aligned(1) == store.alignment());
    CHECK(store.aligned(8192) == 8192);
    CHECK(store.aligned(8193) == (w.direct ? 12288 : 8193));
    CHECK(wrong_bytes(store, 0, store.size(), 1, w.direct ? 5 : 20) == 0);
  }
}

TEST_CASE("several threads read and write at the same time", "[file_store]") {
  const folder f;
  constexpr std::size_t part = 128 << 10;
  for (const way& w : ways()) {
    INFO(words(w));
    file_store store(options_of(f.path, w), 5 * part);
    const buffer common(part, 77);
    write_one(store, 4 * part, common);
    std::array<int, 4> wrong{};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        wrong[t] = wrong_bytes(store, t * part, part, t, w.direct ? 2 : 8);
        for (int i = 0; i < 8; ++i) {  // and one part for all
          buffer seen(part);
          read_one(store, 4 * part, seen);
          wrong[t] += !seen.holds(77);
        }
      });
    for (auto& t : threads) t.join();
    CHECK(wrong == std::array{0, 0, 0, 0});
  }
}

TEST_CASE("the engine is the one that was asked for, or threads where the kernel has no ring",
          "[file_store]") {
  const folder f;
  CHECK(file_store({.path = f.path, .uring = false}, 1).engine() == "threads");
  const auto state = std::make_shared<faults>();
  CHECK(faulty_store({.path = f.path}, 1, faulty_system(state)).engine() == "io_uring");
  state->rings = 0;
  faulty_store none({.path = f.path}, 8192, faulty_system(state));
  CHECK(none.engine() == "threads");
  CHECK(wrong_bytes(none, 0, 8192, 1, 3) == 0);
  if (file_store({.path = f.path}, 1).engine() == "threads")
    WARN("io_uring was not tested: it is not compiled in, or the kernel forbids it");
}

TEST_CASE("batches of one, of none, of nothing, and of one large piece", "[file_store]") {
  const folder f;
  for (const way& w : ways()) {
    INFO(words(w));
    constexpr std::size_t large = 6 << 20;
    file_store store(options_of(f.path, w), large);
    store.read({});
    store.write({});
    const buffer all(large, 5);
    write_one(store, 0, all);
    const std::vector<file_read> nothing(100, {large, nullptr, 0});
    store.read(nothing);
    store.write(std::vector<file_write>(100, {0, nullptr, 0}));
    buffer seen(large);
    std::vector<file_read> mixed(10, {0, nullptr, 0});
    mixed.push_back({0, seen.data, large});
    mixed.resize(20, {4096, nullptr, 0});
    store.read(mixed);
    CHECK(seen.holds(5));
  }
}

TEST_CASE("reading and writing allocate nothing", "[file_store]") {
  const folder f;
  for (const bool uring : {false, true}) {
    file_store store({.path = f.path, .uring = uring}, 1 << 20);
    const buffer from(1 << 20, 3);
    buffer into(1 << 20);
    std::vector<file_read> reads;
    std::vector<file_write> writes;
    for (std::size_t i = 0; i < 256; ++i) {
      reads.push_back({i * 4096, into.data + i * 4096, 4096});
      writes.push_back({i * 4096, from.data + i * 4096, 4096});
    }
    store.write(writes);
    const long before = allocations;
    for (int i = 0; i < 20; ++i) {
      store.write(writes);
      store.read(reads);
    }
    CHECK(allocations == before);
    CHECK(into.holds(3));
  }
}

TEST_CASE("as many are in flight as were asked for, and no more", "[file_store]") {
  const folder f;
  for (const int in_flight : {1, 2, 5}) {
    const auto state = std::make_shared<faults>();
    buffer into(40 * 512);
    std::vector<file_read> reads;
    for (std::size_t i = 0; i < 40; ++i) reads.push_back({i * 512, into.data + i * 512, 512});
    {
      state->rings = 0;
      faulty_store store({.path = f.path, .in_flight = in_flight}, into.bytes, faulty_system(state));
      // The first ones only end together, so that many threads must be at work.
      std::atomic<int> arrived{0};
      state->during = [&] {
        ++arrived;
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(5);
        while (arrived < in_flight && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      };
      store.read(reads);
      CHECK(state->transfers == 40);
      CHECK(state->most_active == in_flight);
      state->during = nullptr;
    }
    {
      state->rings = 2;
      faulty_store store({.path = f.path, .in_flight = in_flight}, into.bytes, faulty_system(state));
      store.read(reads);
      CHECK(state->most_under_way == in_flight);
      CHECK(state->under_way == 0);
    }
  }
}

TEST_CASE("options without a meaning are refused", "[file_store]") {
  const folder f;
  CHECK_THROWS_AS(file_store({.path = ""}, 1), freekv::settings_error);
  CHECK_THROWS_WITH(file_store({.path = ""}, 1), Contains("path is empty") && Contains("folder"));
  for (const int in_flight : {0, -4, 1025}) {
    const auto build = [&] { file_store({.path = f.path, .in_flight = in_flight}, 1); };
    CHECK_THROWS_AS(build(), freekv::settings_error);
    CHECK_THROWS_WITH(build(),
                      Contains(std::to_string(in_flight) + " reads in flight") && Contains("1 to 1024"));
  }
  CHECK(file_store_options{.path = "x", .direct = true}.aligned(1) == 4096);
  CHECK(file_store_options{.path = "x"}.aligned(1) == 1);
}

TEST_CASE("a store of no bytes has nothing to read", "[file_store]") {
  const folder f;
  for (const way& w : ways()) {
    file_store store(options_of(f.path, w), 0);
    CHECK(store.size() == 0);
    store.read({});
    buffer one(4096);
    CHECK_THROWS_AS(read_one(store, 0, one), freekv::usage_error);
    CHECK_THROWS_AS(write_one(store, 0, one), freekv::usage_error);
  }
}

TEST_CASE("what lies outside the file is refused before anything is moved", "[file_store]") {
  const folder f;
  const auto state = std::make_shared<faults>();
  faulty_store store({.path = f.path}, 10000, faulty_system(state));
  buffer b(1000), fine(10);
  for (const std::uint64_t offset :
       {std::uint64_t{9001}, std::uint64_t{10000}, std::uint64_t{1} << 40, ~std::uint64_t{0}}) {
    const std::vector<file_read> reads{{0, fine.data, 10}, {offset, b.data, 1000}};
    const std::vector<file_write> writes{{0, fine.data, 10}, {offset, b.data, 1000}};
    CHECK_THROWS_AS(store.read(reads), freekv::usage_error);
    CHECK_THROWS_AS(store.write(writes), freekv::usage_error);
    CHECK_THROWS_WITH(store.read(reads), Contains("1000 bytes at offset " + std::to_string(offset)) &&
                                             Contains("its 10000 bytes") && Contains("a read of"));
    CHECK_THROWS_WITH(store.write(writes), Contains("a write of"));
  }
  const file_read endless{1, b.data, ~std::size_t{0}};
  CHECK_THROWS_AS(store.read({&endless, 1}), freekv::usage_error);
  CHECK(state->transfers == 0);
  read_one(store, 9000, b);
  CHECK(state->transfers == 1);
}

TEST_CASE("direct I/O refuses what is not aligned, with the unit", "[file_store]") {
  const folder f;
  file_store store({.path = f.path, .direct = true}, 1 << 20);
  buffer b(16384);
  for (const file_read& r :
       std::vector<file_read>{{512, b.data, 4096}, {0, b.data, 512}, {0, b.data + 512, 4096}}) {
    const file_write w{r.offset, r.data, r.bytes};
    CHECK_THROWS_AS(store.read({&r, 1}), freekv::usage_error);
    CHECK_THROWS_AS(store.write({&w, 1}), freekv::usage_error);
    CHECK_THROWS_WITH(store.read({&r, 1}), Contains("multiples of 4096") && Contains("direct = false"));
  }
  read_one(store, 4096, b);
}

TEST_CASE("a named file is private, has its room, and goes with its store", "[file_store]") {
  const folder f;
  const std::string path = f.file("kv");
  {
    const file_store store({.path = path}, 300000);
    CHECK(store.path() == path);
    struct stat about {};
    REQUIRE(::stat(path.c_str(), &about) == 0);
    CHECK(about.st_size == 300000);
    CHECK(about.st_blocks * 512 >= 300000);  // taken, not only named
    CHECK((about.st_mode & 0777) == 0600);
  }
  CHECK(f.entries() == 0);
}

TEST_CASE("a file that exists is left alone", "[file_store]") {
  const folder f;
  const std::string path = f.file("model.gguf");
  std::ofstream(path) << "weights";
  const auto e = thrown_by<store_error>([&] { file_store({.path = path}, 1000); });
  CHECK(e.file == path);
  CHECK(e.operation == store_operation::create);
  CHECK(e.system_error == EEXIST);
  CHECK_THAT(e.what(), Contains("store file " + path + ": creating it failed: File exists; remove it"));
  std::string content;
  std::ifstream(path) >> content;
  CHECK(content == "weights");
}

TEST_CASE("a file removed while it is open goes on working", "[file_store]") {
  const folder f;
  for (const bool uring : {false, true}) {
    const std::string path = f.file("kv");
    {
      file_store store({.path = path, .uring = uring}, 100000);
      write_one(store, 0, buffer(1000, 1));
      REQUIRE(fs::remove(path));
      write_one(store, 50000, buffer(1000, 2));
      buffer b(1000);
      read_one(store, 0, b);
      CHECK(b.holds(1));
      read_one(store, 50000, b);
      CHECK(b.holds(2));
      std::ofstream(path) << "another's";  // takes the name
    }
    CHECK(fs::file_size(path) == 9);
    fs::remove(path);
  }
}

TEST_CASE("a folder gives a file without a name", "[file_store]") {
  const folder f;
  for (const int unnamed : {0, -EOPNOTSUPP, -EISDIR})  // the latter where the file system has none
    for (const std::string& path : {f.path, f.path + "/"}) {
      const auto state = std::make_shared<faults>();
      state->unnamed = unnamed;
      faulty_store store({.path = path}, 8192, faulty_system(state));
      CHECK(store.path() == f.path + "/(unnamed)");
      CHECK(f.entries() == 0);
      CHECK(wrong_bytes(store, 0, 8192, 1, 3) == 0);
    }
  CHECK(f.entries() == 0);
}

TEST_CASE("descriptors are closed, and not handed to other programs", "[file_store]") {
  const folder f;
  const std::set<int> before = descriptors();
  for (const way& w : ways())
    for (const std::string& path : {f.path, f.file("kv")}) {
      const file_store store(options_of(path, w), 4096);
      for (const int d : descriptors())
        if (before.count(d) == 0) CHECK((::fcntl(d, F_GETFD) & FD_CLOEXEC) != 0);
    }
  const auto state = std::make_shared<faults>();
  {
    state->unnamed = -EOPNOTSUPP;
    const faulty_store store({.path = f.path}, 4096, faulty_system(state));
    for (const int d : descriptors())
      if (before.count(d) == 0) CHECK((::fcntl(d, F_GETFD) & FD_CLOEXEC) != 0);
  }
  CHECK_THROWS_AS(file_store({.path = f.file("none/kv")}, 1), store_error);
  state->reserve = {-ENOSPC, -ENOSPC};
  CHECK_THROWS_AS(faulty_store({.path = f.file("kv")}, 4096, faulty_system(state)), store_error);
  CHECK_THROWS_AS(faulty_store({.path = f.path}, 4096, faulty_system(state)), store_error);
  CHECK(descriptors() == before);
  CHECK(f.entries() == 0);
}

TEST_CASE("a path that cannot be written says so", "[file_store]") {
  const folder f;
  auto e = thrown_by<store_error>([&] { file_store({.path = f.file("none/kv")}, 1); });
  CHECK(e.system_error == ENOENT);
  CHECK_THAT(e.what(),
             Contains("creating it failed: No such file or directory; name a file in a folder that exists"));
  std::ofstream(f.file("plain")) << "x";
  CHECK(thrown_by<store_error>([&] { file_store({.path = f.file("plain/kv")}, 1); }).system_error == ENOTDIR);
  CHECK(thrown_by<store_error>([&] { file_store({.path = f.file("none/")}, 1); }).system_error == EISDIR);
  CHECK(thrown_by<store_error>([&] {
          file_store({.path = f.file(std::string(5000, 'x'))}, 1);
        }).system_error == ENAMETOOLONG);

  fs::permissions(f.path, fs::perms::owner_read | fs::perms::owner_exec);
  const int self = ::setfsuid(static_cast<uid_t>(-1));
  ::setfsuid(65534);  // root may write anywhere; nobody may not
  const bool is_nobody = ::setfsuid(static_cast<uid_t>(-1)) == 65534 || self != 0;
  for (const std::string& path : {f.file("kv"), f.path}) {
    if (!is_nobody) continue;
    e = thrown_by<store_error>([&] { file_store({.path = path}, 1); });
    CHECK(e.system_error == EACCES);
    CHECK(e.operation == store_operation::create);
    CHECK_THAT(e.what(), Contains("Permission denied") && Contains("can be written"));
  }
  ::setfsuid(static_cast<uid_t>(self));
}

TEST_CASE("a file system without direct I/O says what to set", "[file_store]") {
  const folder f;
  for (const bool late : {false, true})  // refused when it is asked for, or when something is read
    for (const std::string& path : {f.path, f.file("kv")}) {
      const auto state = std::make_shared<faults>();
      if (late)
        state->each = -EINVAL;
      else
        state->direct = -EINVAL;
      const auto e = thrown_by<store_error>(
          [&] { faulty_store({.path = path, .direct = true}, 4096, faulty_system(state)); });
      CHECK(e.system_error == EINVAL);
      CHECK(e.operation == store_operation::create);
      CHECK_THAT(e.what(), Contains("no direct I/O") && Contains("4096") && Contains("direct = false"));
      CHECK(f.entries() == 0);
      faulty_store({.path = path}, 4096, faulty_system(state));  // which it is here
    }
  const auto state = std::make_shared<faults>();
  state->each = -EIO;
  const auto e = thrown_by<store_error>(
      [&] { faulty_store({.path = f.path, .direct = true}, 4096, faulty_system(state)); });
  CHECK(e.system_error == EIO);
  CHECK(e.operation == store_operation::read);
}

TEST_CASE("direct files are reserved where the system writes to do it", "[file_store]") {
  const folder f;
  for (const std::string& path : {f.path, f.file("kv")}) {
    const auto state = std::make_shared<faults>();
    state->writes_to_reserve = true;
    const faulty_store store({.path = path, .direct = true}, 8192, faulty_system(state));
    CHECK(state->is_direct);
  }
}

TEST_CASE("what is free is asked for before a part of it is taken", "[file_store]") {
  const folder f;
  const auto state = std::make_shared<faults>();
  state->reserve = {-ENOSPC};
  const auto e =
      thrown_by<store_error>([&] { faulty_store({.path = f.path}, 100000, faulty_system(state)); });
  CHECK_THAT(e.what(), Contains("4711 bytes are free"));
}

TEST_CASE("a file goes with its store wherever the process is then", "[file_store]") {
  const folder f;
  const fs::path here = fs::current_path();
  fs::current_path(f.path);
  {
    const file_store store({.path = "kv"}, 4096);
    CHECK(f.entries() == 1);
    fs::current_path(here);
  }
  CHECK(f.entries() == 0);
}

TEST_CASE("reserving goes on after a signal", "[file_store]") {
  const folder f;
  const auto state = std::make_shared<faults>();
  state->reserve = {-EINTR, -EINTR, -EINTR, 0};
  const faulty_store store({.path = f.file("kv")}, 100000, faulty_system(state));
  CHECK(state->reserve.empty());
  CHECK(fs::file_size(f.file("kv")) == 100000);
}

TEST_CASE("a full disk is an error with what is wanted and what is free", "[file_store]") {
  small_disk disk;
  if (!disk.mounted) {
    WARN("skipped: mounting a small file system is not permitted");
    return;
  }
  const std::string path = disk.place.file("kv");
  for (const std::string& p : {path, disk.place.path}) {
    const auto e = thrown_by<store_error>([&] { file_store({.path = p}, 5000000); });
    CHECK(e.operation == store_operation::reserve);
    CHECK(e.system_error == ENOSPC);
    CHECK(e.bytes == 5000000);
    CHECK_THAT(e.what(), Contains("reserving 5000000 bytes failed: No space left on device, ") &&
                             Contains(" bytes are free; free some"));
    CHECK(disk.place.entries() == 0);
  }
  // Someone takes the file's space away, and it is gone when it is written again.
  for (const bool uring : {false, true}) {
    file_store store({.path = path, .uring = uring}, 512 << 10);
    const buffer slice(64 << 10, 4);
    write_one(store, 65536, slice);
    fs::resize_file(path, 0);
    {
      std::ofstream filler(disk.place.file("filler"), std::ios::binary);
      const std::vector<char> bytes(1 << 20);
      filler.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    }
    const auto e = thrown_by<store_error>([&] { write_one(store, 65536, slice); });
    CHECK(e.operation == store_operation::write);
    CHECK(e.system_error == ENOSPC);
    CHECK(e.offset == 65536);
    CHECK(e.bytes == 65536);
    CHECK_THAT(e.what(), Contains("writing 65536 bytes at offset 65536 failed: No space left on device, ") &&
                             Contains("bytes are free; free some, then the call may be repeated"));
    fs::remove(disk.place.file("filler"));
    write_one(store, 65536, slice);
    buffer seen(64 << 10);
    read_one(store, 65536, seen);
    CHECK(seen.holds(4));
  }
}

TEST_CASE("a limit on file sizes is an error, not a signal", "[file_store]") {
  const folder f;
  for (const std::string& path : {f.file("kv"), f.path}) {
    const size_limit limit(1 << 20);
    const auto e = thrown_by<store_error>([&] { file_store({.path = path}, (1 << 20) + 1); });
    CHECK(e.operation == store_operation::reserve);
    CHECK(e.system_error == EFBIG);
    CHECK_THAT(e.what(),
               Contains("File too large") && Contains("1048576 bytes here") && Contains("ulimit -f"));
    CHECK(f.entries() == 0);
    const file_store fits({.path = path}, 1 << 20);
  }
  for (const bool uring : {false, true}) {
    file_store store({.path = f.path, .uring = uring}, 1 << 20);
    const buffer slice(8192, 9);
    {
      const size_limit limit(1 << 19);
      write_one(store, (1 << 19) - 8192, slice);
      const auto e = thrown_by<store_error>([&] { write_one(store, (1 << 19) - 4096, slice); });
      CHECK(e.operation == store_operation::write);
      CHECK(e.system_error == EFBIG);
      CHECK(e.offset == (1 << 19) - 4096);
      CHECK_THAT(e.what(), Contains("ulimit -f") && Contains("may be repeated"));
    }
    write_one(store, (1 << 19) - 4096, slice);
  }
}

TEST_CASE("more bytes than a file can have are an error", "[file_store]") {
  const folder f;
  for (const bool direct : {false, true})
    for (const std::uint64_t bytes : {~std::uint64_t{0}, ~std::uint64_t{0} / 2 + 1}) {
      const auto e = thrown_by<store_error>([&] { file_store({.path = f.path, .direct = direct}, bytes); });
      CHECK(e.system_error == EFBIG);
      CHECK(e.bytes == bytes);
    }
  // No disk is that large either, and the file system says so first.
  CHECK_THROWS_AS(file_store({.path = f.path}, std::uint64_t{1} << 62), store_error);
}

TEST_CASE(
    "a file truncated by another process is an error of the reads behind its end, and heals when written",
    "[file_store]") {
  const folder f;
  for (const way& w : ways()) {
    INFO(words(w));
    const std::string path = f.file("kv");
    file_store store(options_of(path, w), 64 * 8192);
    fill(store, 64, 8192);
    fs::resize_file(path, 32 * 8192 + 4096);
    buffer into(64 * 8192);
    std::vector<file_read> reads;
    for (std::size_t i = 0; i < 64; ++i) reads.push_back({i * 8192, into.data + i * 8192, 8192});
    store.read(std::span(reads).first(32));
    buffer slice(8192);
    auto e = thrown_by<store_error>([&] { read_one(store, 32 * 8192, slice); });
    CHECK(e.operation == store_operation::read);
    CHECK(e.system_error == 0);
    CHECK(e.offset == 32 * 8192);
    CHECK(e.bytes == 8192);
    CHECK(e.file == path);
    CHECK_THAT(e.what(),
               Contains("reading 8192 bytes at offset 262144 failed: the file ends after 4096 of them") &&
                   Contains("may be repeated, or abandon the sequence"));
    e = thrown_by<store_error>([&] { store.read(reads); });
    CHECK(e.system_error == 0);
    CHECK(e.offset >= 32 * 8192);
    for (int i = 32; i < 64; ++i) write_one(store, static_cast<std::uint64_t>(i) * 8192, buffer(8192, i + 1));
    store.read(reads);
    for (std::size_t i = 0; i < 64; ++i) CHECK(into.data[i * 8192 + 8191] == static_cast<std::byte>(i + 1));
    fs::resize_file(path, 0);
    CHECK_THROWS_AS(read_one(store, 0, slice), store_error);
  }
}

TEST_CASE("an error of the disk names the slice, nothing is under way then, and the next call works",
          "[file_store]") {
  const folder f;
  for (const int rings : {0, 2})
    for (const int at : {0, 1, 17, 39}) {
      const auto state = std::make_shared<faults>();
      state->rings = rings;
      faulty_store store({.path = f.file("kv"), .in_flight = 4}, 40 * 512, faulty_system(state));
      CHECK(store.engine() == (rings == 0 ? "threads" : "io_uring"));
      fill(store, 40, 512);
      state->during = [] { std::this_thread::sleep_for(std::chrono::microseconds(50)); };
      state->at[state->transfers + at] = -EIO;
      buffer into(40 * 512);
      std::vector<file_read> reads;
      std::vector<file_write> writes;
      for (std::size_t i = 0; i < 40; ++i) {
        reads.push_back({i * 512, into.data + i * 512, 512});
        writes.push_back({i * 512, into.data + i * 512, 512});
      }
      const long before = state->transfers;
      auto e = thrown_by<store_error>([&] { store.read(reads); });
      CHECK(state->active == 0);
      CHECK(state->under_way == 0);
      CHECK(state->transfers - before >= at);
      CHECK(e.system_error == EIO);
      CHECK(e.bytes == 512);
      CHECK(e.offset % 512 == 0);
      CHECK(e.what() == "store file " + f.file("kv") + ": reading 512 bytes at offset " +
                            std::to_string(e.offset) +
                            " failed: Input/output error; the call may be repeated, or abandon the sequence");
      store.read(reads);
      for (std::size_t i = 0; i < 40; ++i) CHECK(into.data[i * 512] == static_cast<std::byte>(i + 1));
      state->at[state->transfers + at] = -EIO;
      e = thrown_by<store_error>([&] { store.write(writes); });
      CHECK(e.operation == store_operation::write);
      CHECK_THAT(e.what(), Contains("writing 512 bytes at offset "));
      CHECK(state->active == 0);
      store.write(writes);
    }
}

TEST_CASE("after an error the rest of a batch is not begun", "[file_store]") {
  const folder f;
  for (const int rings : {0, 2}) {
    const auto state = std::make_shared<faults>();
    state->rings = rings;
    faulty_store store({.path = f.path, .in_flight = 1}, 40 * 512, faulty_system(state));
    buffer into(40 * 512);
    std::vector<file_read> reads;
    for (std::size_t i = 0; i < 40; ++i) reads.push_back({i * 512, into.data + i * 512, 512});
    state->at[17] = -EIO;
    const auto e = thrown_by<store_error>([&] { store.read(reads); });
    CHECK(e.offset == 17 * 512);
    CHECK(state->transfers == 18);
  }
}

TEST_CASE("of one request the error's place is exact", "[file_store]") {
  const folder f;
  for (const int rings : {0, 2}) {
    const auto state = std::make_shared<faults>();
    state->rings = rings;
    faulty_store store({.path = f.path}, 100000, faulty_system(state));
    buffer into(8192);
    state->at[state->transfers] = 1000;  // a part of it comes
    state->at[state->transfers + 1] = -EIO;
    const auto e = thrown_by<store_error>([&] { read_one(store, 65536, into); });
    CHECK(e.offset == 65536);
    CHECK(e.bytes == 8192);
  }
}

TEST_CASE("an error can name its sequence", "[file_store]") {
  const store_error e({.file = "/x/kv",
                       .operation = store_operation::read,
                       .offset = 65536,
                       .bytes = 8192,
                       .system_error = EIO,
                       .detail = "",
                       .remedy = "abandon it",
                       .sequence = ""});
  CHECK(std::string(e.what()) ==
        "store file /x/kv: reading 8192 bytes at offset 65536 failed: Input/output error; abandon it");
  const store_error named = e.with_sequence("sequence 3");
  CHECK(std::string(named.what()) == "sequence 3: " + std::string(e.what()));
  CHECK(named.sequence == "sequence 3");
  CHECK(named.offset == 65536);
  CHECK(named.system_error == EIO);
  CHECK_THROWS_AS(throw named, freekv::error);
}

TEST_CASE("signals and parts of reads and writes are gone on from", "[file_store]") {
  const folder f;
  for (const int rings : {0, 2})
    for (const int in_flight : {1, 4}) {
      const auto state = std::make_shared<faults>();
      state->rings = rings;
      faulty_store store({.path = f.path, .in_flight = in_flight}, 20000, faulty_system(state));
      std::mt19937 random(5);
      state->each = 777;  // bytes at a time
      for (long i = 0; i < 20000; ++i) {
        const auto dice = random() % 4;
        if (dice == 0) state->at[i] = -EINTR;
        if (dice == 1) state->at[i] = static_cast<long>(random() % 100 + 1);
      }
      CHECK(wrong_bytes(store, 0, 20000, 3, 10) == 0);
      state->each = 0;
      state->at.clear();
      for (long i = 0; i < 1000; ++i) state->at[state->transfers + i] = -EINTR;  // however many
      CHECK(wrong_bytes(store, 0, 20000, 3, 1) == 0);
    }
}

TEST_CASE("a busy system is asked again, for a while", "[file_store]") {
  const folder f;
  for (const int rings : {0, 2}) {
    const auto state = std::make_shared<faults>();
    state->rings = rings;
    faulty_store store({.path = f.path, .in_flight = 2}, 20000, faulty_system(state));
    for (long i = 0; i < 20; ++i) state->at[state->transfers + i] = -EAGAIN;
    CHECK(wrong_bytes(store, 0, 20000, 3, 2) == 0);
    CHECK(state->transfers > 20);
    state->each = -EAGAIN;
    buffer b(100);
    const auto e = thrown_by<store_error>([&] { read_one(store, 0, b); });
    CHECK(e.system_error == EAGAIN);
    CHECK_THAT(e.what(), Contains("Resource temporarily unavailable"));
    state->each = 0;
    read_one(store, 0, b);
  }
}

TEST_CASE("a write that gets nowhere ends as an error", "[file_store]") {
  const folder f;
  for (const int rings : {0, 2}) {
    const auto state = std::make_shared<faults>();
    state->rings = rings;
    freekv::basic_file_store<stuck_system> store({.path = f.path}, 20000, stuck_system(state));
    const auto e = thrown_by<store_error>([&] { write_one(store, 0, buffer(100)); });
    CHECK(e.system_error == 0);
    CHECK_THAT(e.what(), Contains("no more than 0 of them"));
  }
}

TEST_CASE("a ring that refuses for a moment is asked again", "[file_store]") {
  const folder f;
  for (const int result : {-EINTR, -EAGAIN, -EBUSY})
    for (const unsigned taken : {0u, 1u, 3u}) {
      const auto state = std::make_shared<faults>();
      state->rings = 10;
      faulty_store store({.path = f.path, .in_flight = 4}, 20000, faulty_system(state));
      state->taken_before_refusal = taken;
      for (int i = 0; i < 10; ++i)
        for (const int each : {0, result, 0, result, result}) state->submits.push_back(each);
      CHECK(wrong_bytes(store, 0, 20000, 3, 3) == 0);
      CHECK(state->started == 2);  // and no new one
      CHECK(state->under_way == 0);
    }
}

TEST_CASE("a ring that refuses for good is left, with what it had awaited and the rest done without it",
          "[file_store]") {
  const folder f;
  for (const unsigned taken : {0u, 1u, 2u, 100u})
    for (const int rings : {2, 3}) {  // one more: a new ring can be had afterwards
      INFO(taken << " taken, " << rings << " rings");
      const auto state = std::make_shared<faults>();
      state->rings = rings;
      faulty_store store({.path = f.path, .in_flight = 4}, 40 * 512, faulty_system(state));
      fill(store, 40, 512);
      state->each_submit = -EBUSY;
      state->taken_before_refusal = taken;
      state->at[state->transfers] = 100;         // some of what was taken ends in part,
      state->at[state->transfers + 1] = -EINTR;  // or is to be tried again
      buffer into(40 * 512);
      std::vector<file_read> reads;
      for (std::size_t i = 0; i < 40; ++i) reads.push_back({i * 512, into.data + i * 512, 512});
      store.read(reads);
      for (std::size_t i = 0; i < 40 * 512; ++i) REQUIRE(into.data[i] == static_cast<std::byte>(i / 512 + 1));
      CHECK(state->under_way == 0);
      CHECK(state->started == rings);
      state->each_submit = 0;
      CHECK(wrong_bytes(store, 0, 40 * 512, 3, 3) == 0);  // on a new ring, the other, or none
      if (rings == 3) continue;
      state->at[state->transfers] = -EIO;
      CHECK_THROWS_AS(store.read(reads), store_error);
      store.read(reads);
    }
}

TEST_CASE("without any ring left a store still serves, and takes one when it can", "[file_store]") {
  const folder f;
  const auto state = std::make_shared<faults>();
  state->rings = 1;
  faulty_store store({.path = f.path, .in_flight = 4}, 20000, faulty_system(state));
  state->each_submit = -EBUSY;
  CHECK(wrong_bytes(store, 0, 20000, 3, 2) == 0);
  state->at[state->transfers] = -EIO;
  buffer b(100);
  CHECK_THROWS_AS(read_one(store, 0, b), store_error);
  state->rings = 1;
  state->each_submit = 0;
  CHECK(wrong_bytes(store, 0, 20000, 3, 2) == 0);
  CHECK(state->started == 2);
  CHECK(state->most_under_way > 0);
}

TEST_CASE("more threads than rings wait for each other", "[file_store]") {
  const folder f;
  for (const int rings : {1, 2}) {
    const auto state = std::make_shared<faults>();
    state->rings = rings;
    faulty_store store({.path = f.path, .in_flight = 4}, 4 * 20000, faulty_system(state));
    std::array<int, 4> wrong{};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t)
      threads.emplace_back([&, t] { wrong[t] = wrong_bytes(store, t * 20000, 20000, t, 5); });
    for (auto& t : threads) t.join();
    CHECK(wrong == std::array{0, 0, 0, 0});
  }
}

TEST_CASE("errors of several threads reach the thread whose call it was", "[file_store]") {
  const folder f;
  for (const bool uring : {false, true}) {
    const std::string path = f.file("kv");
    file_store store({.path = path, .in_flight = 4, .uring = uring}, 64 * 4096);
    fill(store, 64, 4096);
    fs::resize_file(path, 32 * 4096);
    std::array<int, 4> wrong{};
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (int round = 0; round < 50; ++round) {
          buffer into(16 * 4096);
          std::vector<file_read> reads;
          for (std::size_t i = 0; i < 16; ++i)
            reads.push_back({(t * 16 + i) * 4096, into.data + i * 4096, 4096});
          bool threw = false;
          try {
            store.read(reads);
          } catch (const store_error& e) {
            threw = true;
            wrong[t] += e.offset < 32 * 4096;
          }
          wrong[t] += threw != (t >= 2);
          for (std::size_t i = 0; i < 16 && !threw; ++i)
            wrong[t] += into.data[i * 4096] != static_cast<std::byte>(t * 16 + i + 1);
        }
      });
    for (auto& t : threads) t.join();
    CHECK(wrong == std::array{0, 0, 0, 0});
  }
}

TEST_CASE("a transfer is given up after tries in a row without a byte", "[file_store]") {
  freekv::detail::transfer_progress progress;
  const freekv::detail::file_read request{0, nullptr, 1000};
  using state = freekv::detail::transfer_progress::state;
  for (long byte = 1; byte < 5; ++byte) {
    for (int i = 0; i < 60; ++i) REQUIRE(progress.after(-EAGAIN, request) == state::more);
    REQUIRE(progress.after(1, request) == state::more);
  }
}
