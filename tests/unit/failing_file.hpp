// A store's file that fails when a test says so.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstring>
#include <freekv/freekv.hpp>
#include <memory>
#include <span>
#include <vector>

namespace tests {

/// A store's file, in memory. One read or write of all files fails: the one that finds `reads_left` or
/// `writes_left` at 0; none, where it is below.
class failing_file final : public freekv::detail::slice_file {
 public:
  static inline std::atomic<int> reads_left{-1}, writes_left{-1};

  explicit failing_file(std::uint64_t bytes) : data_(bytes) {}
  static freekv::file_store_options options() {
    freekv::file_store_options made{.path = "memory"};
    made.open = [](const freekv::file_store_options&,
                   std::uint64_t bytes) -> std::unique_ptr<freekv::detail::slice_file> {
      return std::make_unique<failing_file>(bytes);
    };
    return made;
  }

  void read(std::span<const freekv::detail::file_read> reads) const override {
    if (reads_left-- == 0) fail(freekv::store_operation::read, EIO);
    for (const auto& one : reads) std::memcpy(one.data, data_.data() + one.offset, one.bytes);
  }
  void write(std::span<const freekv::detail::file_write> writes) override {
    if (writes_left-- == 0) fail(freekv::store_operation::write, ENOSPC);
    for (const auto& one : writes) std::memcpy(data_.data() + one.offset, one.data, one.bytes);
  }

 private:
  [[noreturn]] static void fail(freekv::store_operation operation, int system_error) {
    freekv::store_fault fault;
    fault.file = "memory";
    fault.operation = operation;
    fault.system_error = system_error;
    throw freekv::store_error(fault);
  }

  std::vector<std::byte> data_;
};

}  // namespace tests
