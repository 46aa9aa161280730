// In a file of its own: where the compiler sees these and their callers together it warns of malloc beside
// delete.
#include "allocations.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace tests {
std::size_t largest_allocation = 0;
}

// All that come with a single object: AddressSanitizer has its own of those that are left out, and theirs do
// not mix.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  tests::largest_allocation = std::max(tests::largest_allocation, bytes);
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* operator new(std::size_t bytes) {
  if (void* memory = operator new(bytes, std::nothrow)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
