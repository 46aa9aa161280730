// A list of units, ascending.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>

namespace freekv::detail {

/// Units, ascending; a view.
struct unit_list {
  const std::int32_t* units = nullptr;
  int count = 0;
  /// The place of a unit; `count` where it is not.
  FREEKV_HD int find(std::int32_t unit) const {
    int first = 0, last = count;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (units[middle] < unit)
        first = middle + 1;
      else
        last = middle;
    }
    return first < count && units[first] == unit ? first : count;
  }
  FREEKV_HD bool has(std::int32_t unit) const { return find(unit) < count; }
};

}  // namespace freekv::detail
