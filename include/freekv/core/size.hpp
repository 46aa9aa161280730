// Sizes, indices and ids are signed, and become the standard library's unsigned sizes here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/config.hpp>
#include <type_traits>

namespace freekv {

/// A size or an index that is not negative, as the standard library takes it.
[[gnu::always_inline]] FREEKV_HD constexpr std::size_t to_size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}
/// The number of an enumerator: an id as an index.
template <class Id>
requires std::is_enum_v<Id>
[[gnu::always_inline]] FREEKV_HD constexpr std::size_t to_size(Id id) { return static_cast<std::size_t>(id); }

}  // namespace freekv
