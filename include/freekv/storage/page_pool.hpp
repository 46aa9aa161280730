// Pages of the store that are in use, and the number of users of each.
#pragma once

#include <cstdint>
#include <freekv/core/ids.hpp>
#include <freekv/core/size.hpp>
#include <vector>

namespace freekv::detail {

/// A fixed number of store pages, given out one at a time and shared by counting. A page id is valid in every
/// layer's store.
class page_pool {
 public:
  explicit page_pool(std::int32_t capacity) : uses_(to_size(capacity)) {
    free_.reserve(uses_.size());
    for (std::int32_t page = capacity; page-- > 0;) free_.push_back(store_page_id{page});
  }

  std::int32_t capacity() const { return static_cast<std::int32_t>(uses_.size()); }
  std::int32_t available() const { return static_cast<std::int32_t>(free_.size()); }

  /// A page that is not in use. The caller has made sure that one is available.
  store_page_id take() {
    const store_page_id page = free_.back();
    free_.pop_back();
    uses_of(page) = 1;
    return page;
  }
  /// One more user of a page in use.
  void share(store_page_id page) { ++uses_of(page); }
  std::int32_t uses(store_page_id page) const { return uses_[to_size(page)]; }
  /// One user less; after the last the page is free.
  void give_back(store_page_id page) {
    if (--uses_of(page) == 0) free_.push_back(page);
  }

 private:
  std::int32_t& uses_of(store_page_id page) { return uses_[to_size(page)]; }

  std::vector<std::int32_t> uses_;  // by page
  std::vector<store_page_id> free_;
};

}  // namespace freekv::detail
