// Units of a device that multiply in attention, and the rows that they are given.
#pragma once

#include <cstdint>
#include <freekv/storage/layout.hpp>

namespace freekv::device {

/// The units that multiply queries by keys and weights by values.
enum class multiplies : std::uint8_t {
  fma,           ///< `attend_default.heads` query heads at a time, of any element and head_dim
  tensor_cores,  ///< eight at a time; F16, BF16 and fp8, head_dim a multiple of 16, best with pages that are,
                 ///< too
  by_element,    ///< tensor cores where they can, else FMA
};

/// True of rows that tensor cores multiply.
template <int HeadDim, class Element>
inline constexpr bool tensor_cores_multiply = sizeof(Element) <= 2 && HeadDim % 16 == 0;

/// `Wanted`, with `by_element` decided for rows of `Element` and `HeadDim`.
template <multiplies Wanted, int HeadDim, class Element>
inline constexpr multiplies multiplies_for =
    Wanted != multiplies::by_element          ? Wanted
    : tensor_cores_multiply<HeadDim, Element> ? multiplies::tensor_cores
                                              : multiplies::fma;

/// Rows of an entry that is attended to, and by which query heads, as bits.
template <class Element>
struct entry_rows {
  head_slice<const Element> rows;
  int tokens = 0;
  unsigned attending = 0;
};

}  // namespace freekv::device
