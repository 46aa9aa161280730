// The caller's memory, and one block of it carved into arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <memory_resource>
#include <utility>

namespace freekv {

/// Resources that a pipeline takes its memory from, once, when it is built: any std::pmr::memory_resource.
struct memory_resources {
  std::pmr::memory_resource* slow = std::pmr::new_delete_resource();  ///< the store
  std::pmr::memory_resource* fast = std::pmr::new_delete_resource();  ///< slots, summaries, state
};

namespace detail {

/// Carves arrays out of one block. Run once without memory it counts the bytes; run again over a block of
/// that size it hands out the arrays, so that what is announced and what is used cannot differ. Throws
/// settings_error for more than addresses can say.
class carver {
 public:
  static constexpr std::size_t alignment = 128;

  explicit carver(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* take(std::size_t count) {
    T* array = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    if (count > (most - used_) / sizeof(T)) refuse();
    used_ += (count * sizeof(T) + alignment - 1) / alignment * alignment;
    return array;
  }
  /// Bytes at a multiple of `alignment` in memory.
  std::byte* take_aligned(std::size_t count, std::size_t at) {
    if (count == 0 || at <= alignment) return take<std::byte>(count);
    auto* const bytes = take<std::byte>(count + at);
    return bytes == nullptr ? nullptr : bytes + (at - reinterpret_cast<std::uintptr_t>(bytes) % at);
  }
  std::size_t used() const { return used_; }
  std::byte* base() const { return base_; }

  /// Bytes that settings may take, in memory and in a file.
  static constexpr std::size_t most = std::size_t{1} << 62;
  [[noreturn]] [[gnu::cold]] static void refuse() {
    throw settings_error("these settings take more than 2^62 bytes of memory; lower tokens, layers or heads");
  }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// A block of a memory resource, returned when it goes.
class memory_block {
 public:
  memory_block() = default;
  memory_block(std::pmr::memory_resource& resource, std::size_t bytes)
      : resource_(&resource),
        bytes_(bytes),
        data_(bytes == 0 ? nullptr : static_cast<std::byte*>(resource.allocate(bytes, carver::alignment))) {}
  memory_block(memory_block&& other) noexcept
      : resource_(other.resource_), bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}
  memory_block& operator=(memory_block&& other) noexcept {
    std::swap(resource_, other.resource_);
    std::swap(bytes_, other.bytes_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~memory_block() {
    if (data_ != nullptr) resource_->deallocate(data_, bytes_, carver::alignment);
  }
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::pmr::memory_resource* resource_ = nullptr;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;
};

}  // namespace detail

}  // namespace freekv
