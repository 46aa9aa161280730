// The slow tier's file: slices are read and written at offsets, many at a time.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/storage/file_engines.hpp>
#include <freekv/storage/file_io.hpp>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace freekv {

template <class System>
class basic_file_store;

/// Options of a file store on `System`. A template, so that how files are opened is compiled only where
/// options are made, and not with every pipeline.
template <class System>
struct basic_file_store_options {
  /// A file to create, which goes with its store; or a folder, for a file without a name in it, which goes
  /// with its process whatever happens to that.
  std::string path;
  /// Past the page cache (O_DIRECT): offsets, sizes and memory are multiples of `alignment()`.
  bool direct = false;
  /// Reads or writes under way at a time, 1 to 1024; without io_uring on as many threads, the caller's among
  /// them.
  int in_flight = usual_in_flight;
  static constexpr int usual_in_flight = 32;
  /// Through io_uring where it was compiled in and the kernel allows it, else with threads.
  bool uring = true;

  /// Makes the store's file, with room for `bytes`.
  std::unique_ptr<detail::slice_file> (*open)(const basic_file_store_options&, std::uint64_t bytes) =
      [](const basic_file_store_options& options,
         std::uint64_t bytes) -> std::unique_ptr<detail::slice_file> {
    return std::make_unique<basic_file_store<System>>(options, bytes);
  };

  static constexpr std::size_t direct_alignment = 4096;
  /// Bytes of which offsets and sizes of reads and writes, and their memory's addresses, are multiples.
  constexpr std::size_t alignment() const { return direct ? direct_alignment : 1; }
  /// `bytes`, rounded up to the alignment.
  constexpr std::uint64_t aligned(std::uint64_t bytes) const {
    return (bytes + alignment() - 1) / alignment() * alignment();
  }
};

using file_store_options = basic_file_store_options<detail::posix_system>;

/// A file of fixed size that keeps what memory has no room for. Its space is taken when it is built, its
/// content is unspecified until written. Nothing is mapped: damage done to the file from outside is an
/// exception, never a signal. Any threads may read and write at the same time; where ranges overlap a write,
/// order is the callers' matter.
template <class System>
class basic_file_store final : public detail::slice_file {
 public:
  /// Creates the file with room for `bytes`. Throws settings_error for options without a meaning, and
  /// store_error where the file cannot be created or the disk is too full; nothing is left behind then.
  basic_file_store(const file_store_options& options, std::uint64_t bytes, System system = {})
      : options_(checked(options)), system_(std::move(system)), file_(system_, options_, bytes) {
    if (options_.uring) {
      rings_.emplace(system_, options_.in_flight);
      if (!rings_->usable()) rings_.reset();
    }
    if (!rings_) threads_.emplace(system_, options_.in_flight);
  }
  basic_file_store(const basic_file_store&) = delete;
  basic_file_store& operator=(const basic_file_store&) = delete;

  /// Returns when all of it is there. Nothing is allocated, unless it throws: usage_error, before anything is
  /// read, for what lies outside the file or is not aligned; store_error for what the system could not read.
  void read(std::span<const detail::file_read> reads) const override {
    check(reads, "read");
    raise(run(reads), reads, store_operation::read);
  }
  /// Returns when all of it is with the system: later reads see it. (A crash of the machine may lose it; so
  /// it does the process.) Throws as `read` does.
  void write(std::span<const detail::file_write> writes) override {
    check(writes, "write");
    const std::uint64_t longest = system_.longest_file();
    for (std::size_t i = 0; i < writes.size(); ++i)
      if (writes[i].offset + writes[i].bytes > longest)
        raise({true, i, 0, EFBIG}, writes, store_operation::write);
    raise(run(writes), writes, store_operation::write);
  }

  const file_store_options& options() const { return options_; }
  /// The file's path, or its folder's with "(unnamed)".
  const std::string& path() const { return file_.path; }
  /// Bytes of the file: as asked for, rounded up to the alignment.
  std::uint64_t size() const { return file_.bytes; }
  std::size_t alignment() const { return options_.alignment(); }
  std::uint64_t aligned(std::uint64_t bytes) const { return options_.aligned(bytes); }
  /// "io_uring" or "threads".
  std::string_view engine() const { return rings_ ? "io_uring" : "threads"; }

 private:
  /// The descriptor and, where the file has one, its name; both go with it.
  struct open_file {
    static constexpr std::uint64_t most_bytes = std::numeric_limits<std::uint64_t>::max() / 2;
    System& system;
    std::string path;
    std::string name{};  ///< absolute, as the process may go to another folder; empty: the file has none
    std::uint64_t bytes;
    int descriptor = -1;

    open_file(System& of, const file_store_options& options, std::uint64_t wanted)
        : system(of), path(options.path), bytes(wanted > most_bytes ? wanted : options.aligned(wanted)) {
      create(options);
      try {
        reserve();  // where the system writes to reserve, it is not yet past the page cache
        if (options.direct) go_direct();
        if (options.direct && bytes > 0) try_direct();
      } catch (...) {
        release();
        throw;
      }
    }
    open_file(const open_file&) = delete;
    open_file& operator=(const open_file&) = delete;
    ~open_file() { release(); }

    void create(const file_store_options& options) {
      if (system.is_folder(options.path)) {
        path = options.path + (options.path.back() == '/' ? "(unnamed)" : "/(unnamed)");
        descriptor = system.create_unnamed(options.path);
        // Not every file system has unnamed files; old kernels take the flag for a folder to be opened.
        if (descriptor == -EOPNOTSUPP || descriptor == -EISDIR || descriptor == -EINVAL ||
            descriptor == -ENOENT) {
          std::string temporary = options.path + "/freekv-XXXXXX";
          descriptor = system.create_temporary(temporary);
          if (descriptor >= 0) system.unlink(temporary);
        }
      } else {
        descriptor = system.create(options.path);
        if (descriptor >= 0) name = system.absolute(options.path);
      }
      if (descriptor >= 0) return;
      fail(store_operation::create, -descriptor, "",
           descriptor == -EEXIST
               ? "remove it if no other store uses it, name another, or name a folder, where the file needs "
                 "no name"
               : "name a file in a folder that exists and can be written, or such a folder");
    }
    void go_direct() {
      if (const int result = system.set_direct(descriptor); result < 0) no_direct(-result);
    }
    /// Some file systems refuse direct reads only when they are made.
    void try_direct() {
      constexpr std::size_t size = file_store_options::direct_alignment;
      struct alignas(size) block {
        std::byte bytes[size];
      };
      const auto one = std::make_unique<block>();
      detail::transfer_progress progress;
      if (detail::transfer(system, descriptor, detail::file_read{0, one->bytes, size}, progress)) return;
      if (progress.system_error == EINVAL) no_direct(EINVAL);
      throw store_error(
          {path, store_operation::read, 0, size, progress.system_error, "", "name another file system", ""});
    }
    [[noreturn]] void no_direct(int system_error) const {
      fail(store_operation::create, system_error,
           "this file system has no direct I/O in blocks of " +
               std::to_string(file_store_options::direct_alignment) + " bytes",
           "set direct = false, or name another file system");
    }
    void reserve() {
      if (bytes == 0) return;
      const std::uint64_t longest = system.longest_file();
      if (bytes > longest)
        fail(store_operation::reserve, EFBIG, "files may have " + std::to_string(longest) + " bytes here",
             "raise the limit (ulimit -f), or lower the store's tokens in the settings");
      const std::uint64_t free = system.free_bytes(descriptor);  // some file systems keep a part that failed
      int result;
      do result = system.reserve(descriptor, bytes);
      while (result == -EINTR);
      if (result < 0)
        fail(store_operation::reserve, -result, std::to_string(free) + " bytes are free",
             "free some, name another file system, or lower the store's tokens in the settings");
    }
    [[noreturn]] void fail(store_operation operation, int system_error, std::string detail,
                           std::string remedy) const {
      throw store_error({path, operation, 0, operation == store_operation::reserve ? bytes : 0, system_error,
                         std::move(detail), std::move(remedy), ""});
    }
    void release() {
      if (descriptor < 0) return;
      if (!name.empty() && system.leads_to(name, descriptor)) system.unlink(name);
      system.close(std::exchange(descriptor, -1));
    }
  };

  static const file_store_options& checked(const file_store_options& options) {
    if (options.path.empty())
      throw settings_error(
          "file store: the path is empty; name a file to create, or a folder for one without a name");
    if (options.in_flight < 1 || options.in_flight > 1024)
      throw settings_error("file store: " + std::to_string(options.in_flight) +
                           " reads in flight; choose from 1 to 1024, such as " +
                           std::to_string(file_store_options::usual_in_flight));
    return options;
  }

  template <class Request>
  void check(std::span<const Request> requests, const char* what) const {
    const std::size_t unit = alignment();
    for (const Request& r : requests) {
      if (r.bytes > file_.bytes || r.offset > file_.bytes - r.bytes)
        throw usage_error("store file " + file_.path + ": a " + what + " of " + std::to_string(r.bytes) +
                          " bytes at offset " + std::to_string(r.offset) + " ends beyond its " +
                          std::to_string(file_.bytes) + " bytes; build it with more");
      if (unit > 1 &&
          (r.offset % unit | r.bytes % unit | reinterpret_cast<std::uintptr_t>(r.data) % unit) != 0)
        throw usage_error(
            "store file " + file_.path + ": a " + what + " of " + std::to_string(r.bytes) +
            " bytes at offset " + std::to_string(r.offset) +
            " is not aligned: with direct I/O both, and the memory's address, are multiples of " +
            std::to_string(unit) + "; use aligned(), or set direct = false");
    }
  }

  template <class Request>
  detail::transfer_failure run(std::span<const Request> requests) const {
    return rings_ ? rings_->run(file_.descriptor, requests) : threads_->run(file_.descriptor, requests);
  }

  template <class Request>
  void raise(const detail::transfer_failure& failure, std::span<const Request> requests,
             store_operation operation) const {
    if (!failure.failed) return;
    const Request& r = requests[failure.request];
    std::string detail, remedy = "the call may be repeated, or abandon the sequence";
    if (failure.system_error == 0)
      detail =
          operation == store_operation::read
              ? "the file ends after " + std::to_string(failure.done) + " of them, something has truncated it"
              : "the system takes no more than " + std::to_string(failure.done) + " of them";
    if (failure.system_error == ENOSPC) {
      detail = std::to_string(system_.free_bytes(file_.descriptor)) + " bytes are free";
      remedy = "free some, then " + remedy;
    }
    if (failure.system_error == EFBIG) remedy = "raise the limit (ulimit -f), then " + remedy;
    throw store_error({file_.path, operation, r.offset, r.bytes, failure.system_error, std::move(detail),
                       std::move(remedy), ""});
  }

  file_store_options options_;
  mutable System system_;
  open_file file_;
  mutable std::optional<detail::ring_engine<System>> rings_;
  mutable std::optional<detail::thread_engine<System>> threads_;
};

using file_store = basic_file_store<detail::posix_system>;

}  // namespace freekv
