// The list of pages and units that one KV head attends to, and how attention is cut into parts of it.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/policies/geometry.hpp>

namespace freekv::detail {

/// Rows of a page, one behind the other.
struct page_range {
  int page = 0;
  int first = 0;
  int tokens = 0;
};

/// Pages that one KV head attends to, in ascending order: all pages, or sink, selected units and window.
/// Where a window slides, the first page is attended to from `first_token` on.
struct attention_list {
  page_roles roles;
  const std::int32_t* selected = nullptr;
  int selected_count = 0;
  bool complete = false;
  int tokens = 0;       // of the sequence
  int first_token = 0;  // tokens before it are not attended
  int page_tokens = 1, unit_tokens = 1;

  FREEKV_HD constexpr int size() const {
    return complete ? roles.page_end : roles.sink_end + selected_count + roles.page_end - roles.window_begin;
  }
  /// Number of entry i among the selected units; below 0, or `selected_count` or more, of other entries.
  FREEKV_HD constexpr int nth_selected(int i) const { return complete ? -1 : i - roles.sink_end; }
  FREEKV_HD constexpr bool is_selected(int i) const {
    return nth_selected(i) >= 0 && nth_selected(i) < selected_count;
  }
  /// Rows that entry i has: of its page, or of its unit's.
  FREEKV_HD constexpr page_range range(int i) const {
    if (is_selected(i)) {
      const int unit = selected[nth_selected(i)], units_per_page = page_tokens / unit_tokens;
      if (units_per_page == 1) return {unit, 0, page_tokens};
      return {unit / units_per_page, unit % units_per_page * unit_tokens, unit_tokens};
    }
    const int page =
        complete || i < roles.sink_end ? i : roles.window_begin + nth_selected(i) - selected_count;
    const int before = page * page_tokens, first = first_token > before ? first_token - before : 0;
    const int last = tokens - before < page_tokens ? tokens - before : page_tokens;
    return {page, first, last - first};
  }
  FREEKV_HD constexpr int page(int i) const { return range(i).page; }
};

/// List entries, of `entry_tokens` tokens each, in one part of attention. Parts begin at entries that are
/// multiples of it and are merged in order, so that results depend neither on threads nor on the batch.
FREEKV_HD constexpr int entries_per_part(int entry_tokens) {
  constexpr int part_tokens = 512;
  return entry_tokens < part_tokens ? part_tokens / entry_tokens : 1;
}

}  // namespace freekv::detail
