// The staging area: room in device memory for pages of prompts, on their way into the store and out of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/storage/layout.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

/// Staging area on the compute stream: what is appended waits here until a codec has encoded it; what is
/// attended to is read from slow memory, and decoded, once for all rows of a chunk. The two take turns.
template <class Element>
struct page_staging {
  Element* rows = nullptr;  // (page, kv head, 2, page tokens, head_dim)
  int pages = 0;            // that there is room for

  static page_staging carve(carver& memory, int pages, int kv_heads, int page_tokens, int head_dim) {
    const auto numbers = std::int64_t{pages} * kv_heads * 2 * page_tokens * head_dim;
    return {memory.take<Element>(to_size(numbers)), pages};
  }
  /// One head's slice of page `nth` of those that are here.
  template <class State>
  FREEKV_HD head_slice<Element> slice(const State& s, int nth, int head) const {
    const int plane = s.page.tokens * State::head_dim;
    Element* const key = rows + (std::int64_t{nth} * s.heads.kv + head) * 2 * plane;
    return {key, key + plane, State::head_dim};
  }
};

}  // namespace freekv::device
