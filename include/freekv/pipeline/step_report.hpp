// The report of a layer's last step for one sequence.
#pragma once

#include <cstdint>
#include <span>

namespace freekv {

/// Report of a layer's last step for one sequence.
struct step_report {
  std::span<const std::uint8_t> corrected;  ///< (kv_heads): selected anew before it attended
  std::span<const std::int32_t>
      recalled;  ///< (kv_heads): slices copied from the store, for this step or the next
  std::span<const std::int32_t>
      recalled_before_attention;  ///< (kv_heads): those of them that attention waited for, by correction
  std::span<const std::int32_t> promoted;  ///< (kv_heads): slices copied from the window ring
  std::span<const std::int32_t>
      attended;  ///< (kv_heads, K): units attended as selected, ascending, pages unless they are less; K is
  ///< selected_units, or what all query heads of a group select together at most, where each selects
  ///< its own, and those pinned
  std::span<const std::int32_t> attended_count;  ///< (kv_heads): how many of them
  /// (kv_heads, K, head_mask_words(group)): the mask of the query heads of the group that selected the unit and
  /// attend to it; empty where all of them do
  std::span<const std::uint32_t> attended_by{};
};

}  // namespace freekv
