// A memory resource that counts what is taken and what is given back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory_resource>
#include <new>
#include <numeric>
#include <vector>

namespace tests {

/// Can be told to run out.
class counting_resource : public std::pmr::memory_resource {
 public:
  std::vector<std::size_t> taken;
  std::size_t alignment = 0, returned = 0;
  bool is_empty = false;

  std::size_t sum() const { return std::accumulate(taken.begin(), taken.end(), std::size_t{0}); }

 private:
  void* do_allocate(std::size_t bytes, std::size_t align) override {
    if (is_empty) throw std::bad_alloc();
    taken.push_back(bytes);
    alignment = std::max(alignment, align);
    return std::pmr::new_delete_resource()->allocate(bytes, align);
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t align) override {
    returned += bytes;
    std::pmr::new_delete_resource()->deallocate(memory, bytes, align);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
};

}  // namespace tests
