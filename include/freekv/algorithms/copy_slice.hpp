// One KV head's keys and values of a page from one layout to another.
#pragma once

#include <cstring>
#include <freekv/core/size.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::detail {

/// Copies `tokens` rows of keys and of values. Rows of head_dim elements stay whole; between two layouts that
/// keep a head's rows together (HND) keys and values are one copy each. (FreeKV section 4.2)
template <int HeadDim, class Element>
FREEKV_HD void copy_slice(const head_slice<const Element>& from, const head_slice<Element>& to, int tokens) {
  const auto row = to_size(HeadDim) * sizeof(Element);
  const auto run = to_size(tokens) * row;
  if (from.stride == HeadDim && to.stride == HeadDim) {
    std::memcpy(to.key, from.key, run);
    std::memcpy(to.value, from.value, run);
    return;
  }
  for (int t = 0; t < tokens; ++t) {
    std::memcpy(to.key + t * to.stride, from.key + t * from.stride, row);
    std::memcpy(to.value + t * to.stride, from.value + t * from.stride, row);
  }
}

}  // namespace freekv::detail
