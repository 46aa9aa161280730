// Files that are there whole or not at all.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/storage/file_engines.hpp>
#include <freekv/storage/file_io.hpp>
#include <span>
#include <string>
#include <utility>

namespace freekv::detail {

/// An open file, of a kind that errors name.
class open_file {
 public:
  open_file(std::string path, const char* kind) : path_(std::move(path)), kind_(kind) {}
  open_file(const open_file&) = delete;
  open_file& operator=(const open_file&) = delete;
  ~open_file() {
    if (descriptor_ >= 0) system_.close(descriptor_);
  }

 protected:
  template <class Request>
  void move(store_operation operation, const Request& request) {
    transfer_progress progress;
    if (!transfer(system_, descriptor_, request, progress))
      fail(operation, progress.system_error, request.bytes);
    at_ += request.bytes;
  }
  [[noreturn]] [[gnu::cold]] void fail(store_operation operation, int system_error,
                                       std::size_t bytes = 0) const {
    const bool reads = operation == store_operation::read, opens = operation == store_operation::open;
    throw store_error({path_, operation, bytes == 0 ? 0 : at_, bytes, system_error,
                       system_error != 0 ? ""
                       : reads           ? "the file ends there"
                                         : "the system takes no more",
                       opens                    ? "name a file that can be read"
                       : reads                  ? "the call may be repeated"
                       : system_error == EFBIG  ? "raise the limit (ulimit -f)"
                       : system_error == ENOSPC ? "free some space, or name another file system"
                                                : "name a file in a folder that exists and can be written",
                       "", kind_});
  }

  std::string path_;
  const char* kind_;
  posix_system system_;
  int descriptor_ = -1;
  std::uint64_t at_ = 0;
};

/// A file that is written from its beginning on, beside the path and called like it with a dot and six
/// characters more, and takes the path's place when it is whole. Where that does not happen it goes; a
/// process that is killed leaves it.
class new_file : public open_file {
 public:
  /// Throws store_error, as the others do.
  new_file(const std::string& path, const char* kind) : open_file(path, kind), beside_(path + ".XXXXXX") {
    descriptor_ = system_.create_temporary(beside_);
    if (descriptor_ < 0) fail(store_operation::create, -descriptor_);
  }
  ~new_file() {
    if (!whole_) system_.unlink(beside_);
  }
  void write(std::span<const std::byte> bytes) {
    if (at_ + bytes.size() > system_.longest_file()) fail(store_operation::write, EFBIG, bytes.size());
    move(store_operation::write, file_write{at_, bytes.data(), bytes.size()});
  }
  void put_in_place() {
    // Some file systems say only now that there was no room.
    if (const int result = system_.close(std::exchange(descriptor_, -1)); result < 0)
      fail(store_operation::write, -result);
    if (const int result = system_.rename(beside_, path_); result < 0) fail(store_operation::create, -result);
    whole_ = true;
  }

 private:
  std::string beside_;
  bool whole_ = false;
};

/// A file that is read from its beginning on.
class whole_file : public open_file {
 public:
  /// Throws store_error, as the others do.
  whole_file(const std::string& path, const char* kind) : open_file(path, kind) {
    descriptor_ = system_.open_to_read(path);
    if (descriptor_ < 0) fail(store_operation::open, -descriptor_);
    const std::int64_t size = system_.size(descriptor_);
    if (size < 0) fail(store_operation::open, static_cast<int>(-size));
    size_ = static_cast<std::uint64_t>(size);
  }
  std::uint64_t size() const { return size_; }
  void read(std::span<std::byte> bytes) {
    move(store_operation::read, file_read{at_, bytes.data(), bytes.size()});
  }

 private:
  std::uint64_t size_ = 0;
};

}  // namespace freekv::detail
