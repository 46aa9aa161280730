// Which pages of the store are in use.
#pragma once

#include <cstdint>
#include <freekv/core/error.hpp>
#include <vector>

namespace freekv {

/// A fixed number of store pages, given out one at a time. A page id is valid in every layer's store.
class page_pool {
 public:
  explicit page_pool(std::int32_t capacity) : capacity_(capacity) {
    free_.reserve(static_cast<std::size_t>(capacity));
    for (std::int32_t page = capacity; page-- > 0;) free_.push_back(page);
  }

  std::int32_t capacity() const { return capacity_; }
  std::int32_t available() const { return static_cast<std::int32_t>(free_.size()); }

  /// A page that is not in use. The caller has made sure that one is available.
  std::int32_t take() {
    const std::int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_back(std::int32_t page) { free_.push_back(page); }

 private:
  std::int32_t capacity_;
  std::vector<std::int32_t> free_;
};

}  // namespace freekv
