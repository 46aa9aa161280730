// A store file's system calls: one at a time, and many at a time through io_uring where that was compiled in.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#if defined(FREEKV_WITH_LIBURING) && \
    __has_include(<liburing.h>)  // said by CMake, which links the library too
#include <liburing.h>
#endif

namespace freekv::detail {

/// `bytes` of a file from `offset` on, into `data`.
struct file_read {
  std::uint64_t offset = 0;
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// `bytes` of `data` into a file, from `offset` on.
struct file_write {
  std::uint64_t offset = 0;
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// A file of slices, as pipelines use it; `basic_file_store` says more.
struct slice_file {
  virtual ~slice_file() = default;
  virtual void read(std::span<const file_read> reads) const = 0;
  virtual void write(std::span<const file_write> writes) = 0;
};

/// The end of a transfer that a ring was given: bytes, or a negative errno.
struct ring_completion {
  std::uint32_t tag = 0;
  int result = 0;
};

struct posix_system;

#if defined(FREEKV_WITH_LIBURING) && __has_include(<liburing.h>)
/// Reads and writes that the kernel works on many at a time (io_uring). One thread at a time.
class kernel_ring {
 public:
  kernel_ring() = default;
  kernel_ring(const kernel_ring&) = delete;
  kernel_ring& operator=(const kernel_ring&) = delete;
  ~kernel_ring() { stop(); }

  /// Room for `depth` transfers that are queued or under way; false where the kernel has or allows none.
  bool start(posix_system&, unsigned depth) {
    stop();
    if (io_uring_queue_init(depth, &ring_, 0) != 0) return false;
    started_ = true;
    io_uring_probe* const probe = io_uring_get_probe_ring(&ring_);
    const bool able = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                      io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
    io_uring_free_probe(probe);
    if (!able) stop();
    return able;
  }
  /// Forgets what was queued and not submitted. Nothing may be under way.
  void stop() {
    if (started_) io_uring_queue_exit(&ring_);
    started_ = false;
  }

  void queue(int file, const file_read& r, std::uint32_t tag) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    io_uring_prep_read(entry, file, r.data, most(r.bytes), r.offset);
    entry->user_data = tag;
  }
  void queue(int file, const file_write& w, std::uint32_t tag) {
    io_uring_sqe* const entry = io_uring_get_sqe(&ring_);
    io_uring_prep_write(entry, file, w.data, most(w.bytes), w.offset);
    entry->user_data = tag;
  }
  /// Hands over what is queued and waits for `ends` ends. Below 0: a negative errno, and the kernel may have
  /// taken a part.
  int submit_and_wait(unsigned ends) { return io_uring_submit_and_wait(&ring_, ends); }
  /// Waits for an end of what is under way.
  int wait() {
    io_uring_cqe* entry = nullptr;
    return io_uring_wait_cqe(&ring_, &entry);
  }
  /// Transfers that are queued and that the kernel has not taken.
  unsigned unsubmitted() const { return io_uring_sq_ready(&ring_); }
  /// Takes the next end, if there is one.
  bool next(ring_completion& end) {
    io_uring_cqe* entry = nullptr;
    if (io_uring_peek_cqe(&ring_, &entry) != 0 || entry == nullptr) return false;
    end = {static_cast<std::uint32_t>(entry->user_data), entry->res};
    io_uring_cqe_seen(&ring_, entry);
    return true;
  }

 private:
  static unsigned most(std::size_t bytes) {
    return static_cast<unsigned>(std::min<std::size_t>(bytes, 1u << 30));
  }
  io_uring ring_{};
  bool started_ = false;
};
#else
/// Stand-in for a ring, without liburing.
class kernel_ring {
 public:
  bool start(posix_system&, unsigned) { return false; }
  void stop() {}
  void queue(int, const file_read&, std::uint32_t) {}
  void queue(int, const file_write&, std::uint32_t) {}
  int submit_and_wait(unsigned) { return -ENOSYS; }
  int wait() { return -ENOSYS; }
  unsigned unsubmitted() const { return 0; }
  bool next(ring_completion&) { return false; }
};
#endif

/// The system's files. Everything gives what Linux gives: at least 0, or a negative errno. Tests put another
/// in its place, with faults.
struct posix_system {
  using ring = kernel_ring;

  bool is_folder(const std::string& path) {
    struct stat about {};
    return ::stat(path.c_str(), &about) == 0 && S_ISDIR(about.st_mode);
  }
  /// The path from the root, whatever folder the process is in later; as it is where that is not to be had.
  std::string absolute(const std::string& path) {
    if (path.front() == '/') return path;
    char folder[PATH_MAX];
    return ::getcwd(folder, sizeof folder) == nullptr ? path : folder + ("/" + path);
  }
  /// A new file; an existing one is left alone (EEXIST).
  int create(const std::string& path) {
    return result(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  }
  /// A file without a name in a folder, on file systems that know such files.
  int create_unnamed(const std::string& folder) {
    return result(::open(folder.c_str(), O_RDWR | O_TMPFILE | O_CLOEXEC, 0600));
  }
  /// A new file whose name ends in six characters in place of the X of `path`.
  int create_temporary(std::string& path) { return result(::mkostemp(path.data(), O_CLOEXEC)); }
  int open_to_read(const std::string& path) { return result(::open(path.c_str(), O_RDONLY | O_CLOEXEC)); }
  /// A file's new name; one that had it is gone.
  int rename(const std::string& from, const std::string& to) {
    return result(::rename(from.c_str(), to.c_str()));
  }
  /// Bytes of an open file.
  std::int64_t size(int file) {
    struct stat about {};
    return ::fstat(file, &about) == 0 ? std::int64_t{about.st_size} : -errno;
  }
  int unlink(const std::string& path) { return result(::unlink(path.c_str())); }
  /// True where `path` still leads to the open file.
  bool leads_to(const std::string& path, int file) {
    struct stat named {
    }, open{};
    return ::lstat(path.c_str(), &named) == 0 && ::fstat(file, &open) == 0 && named.st_dev == open.st_dev &&
           named.st_ino == open.st_ino;
  }
  int close(int file) { return result(::close(file)); }

  /// Reads and writes go past the page cache from now on.
  int set_direct(int file) {
    const int flags = ::fcntl(file, F_GETFL);
    return flags < 0 ? -errno : result(::fcntl(file, F_SETFL, flags | O_DIRECT));
  }
  /// Makes the file that long, with all of it on the disk.
  int reserve(int file, std::uint64_t bytes) {
    return -::posix_fallocate(file, 0, static_cast<off_t>(bytes));
  }
  std::uint64_t free_bytes(int file) {
    struct statvfs about {};
    return ::fstatvfs(file, &about) == 0 ? static_cast<std::uint64_t>(about.f_bavail) * about.f_frsize : 0;
  }
  /// Beyond it a write would end the process (SIGXFSZ).
  std::uint64_t longest_file() {
    rlimit limit{};
    constexpr auto longest = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
    if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return longest;
    return std::min<std::uint64_t>(limit.rlim_cur, longest);
  }

  long transfer(int file, const file_read& r) {
    const ssize_t n = ::pread(file, r.data, r.bytes, static_cast<off_t>(r.offset));
    return n < 0 ? -errno : n;
  }
  long transfer(int file, const file_write& w) {
    const ssize_t n = ::pwrite(file, w.data, w.bytes, static_cast<off_t>(w.offset));
    return n < 0 ? -errno : n;
  }

 private:
  static int result(int value) { return value < 0 ? -errno : value; }
};

}  // namespace freekv::detail
