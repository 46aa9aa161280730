// The union of what the query heads of one group have selected, and who of them has selected what.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>

namespace freekv {

/// Words of a mask of `group` query heads: bit g % 32 of word g / 32 is query head g of the group.
FREEKV_HD constexpr int head_mask_words(int group) { return (group + 31) / 32; }

namespace detail {

/// Units that query heads of a group have selected, ascending, and for each the mask of those heads.
struct unit_union {
  std::int32_t* units = nullptr;   ///< (capacity)
  std::uint32_t* masks = nullptr;  ///< (capacity, words)
  int words = 1;
};

/// True where a mask has query head g.
FREEKV_HD inline bool has_head(const std::uint32_t* mask, int g) {
  return (mask[g / 32] >> g % 32 & 1u) != 0;
}

/// Adds to the `size` units of a union the `count` units, ascending, that query head g has selected; returns
/// how many it then has. O(size + count).
FREEKV_HD inline int merge_selections(const unit_union& all, int size, const std::int32_t* units, int count,
                                      int g) {
  int fresh = 0;
  for (int i = 0, j = 0; j < count; ++j) {
    while (i < size && all.units[i] < units[j]) ++i;
    fresh += i == size || all.units[i] != units[j];
  }
  // From behind, so that nothing is overwritten before it has moved.
  for (int at = size + fresh - 1, i = size - 1, j = count - 1; j >= 0; --at) {
    const bool held = i >= 0 && all.units[i] >= units[j], selected = !held || all.units[i] == units[j];
    all.units[at] = held ? all.units[i] : units[j];
    std::uint32_t* const mask = all.masks + std::int64_t{at} * all.words;
    for (int word = 0; word < all.words; ++word)
      mask[word] = held ? all.masks[std::int64_t{i} * all.words + word] : 0u;
    if (selected) mask[g / 32] |= std::uint32_t{1} << g % 32;
    i -= held;
    j -= selected;
  }
  return size + fresh;
}

/// Neighbouring query heads of a group: `count` from `first` on.
struct head_run {
  int first = 0;
  int count = 0;
  FREEKV_HD constexpr int end() const { return first + count; }
};

/// The next heads of a mask, from head `from` on; of a null mask all. None: count is 0.
FREEKV_HD inline head_run next_run(const std::uint32_t* mask, int from, int group) {
  if (mask == nullptr) return {from, group - from};
  head_run run{from, 0};
  while (run.first < group && !has_head(mask, run.first)) ++run.first;
  while (run.end() < group && has_head(mask, run.end())) ++run.count;
  return run;
}

/// Puts those of the `size` units of a union that query head g has selected into `units`, ascending; returns
/// how many.
FREEKV_HD inline int selection_of(const unit_union& all, int size, int g, std::int32_t* units) {
  int count = 0;
  for (int i = 0; i < size; ++i)
    if (has_head(all.masks + std::int64_t{i} * all.words, g)) units[count++] = all.units[i];
  return count;
}

}  // namespace detail

}  // namespace freekv
