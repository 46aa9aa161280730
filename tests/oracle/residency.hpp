// The selected slots of one KV head: which pages they hold, and who has to go.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "pages.hpp"
#include "results.hpp"
#include "settings.hpp"

namespace oracle {

/// k + c slots, or G * k + c where query heads select each for itself, and one for each pinned unit. Of the
/// pages that are no longer wanted c stay; the others' slots are free, lowest first.
class slot_cache {
 public:
  explicit slot_cache(const settings& s)
      : policy_(s.residency),
        spare_(s.spare),
        slots_(static_cast<std::size_t>(s.selected_units) *
                   static_cast<std::size_t>(s.rows == scope_kind::query_head ? group_size(s) : 1) +
               static_cast<std::size_t>(s.spare) + static_cast<std::size_t>(s.pinned)) {}

  void clear() {
    for (slot& each : slots_) each = {};
  }

  /// -1 for an empty slot.
  std::vector<int> pages() const {
    std::vector<int> held;
    for (const slot& each : slots_) held.push_back(each.page);
    return held;
  }

  bool holds(int page) const {
    return std::any_of(slots_.begin(), slots_.end(), [&](const slot& each) { return each.page == page; });
  }

  /// Brings the pages of a selection (ascending) into slots. What the window ring still holds at
  /// `length` is copied from there.
  movement hold(const settings& s, const std::vector<int>& wanted, int length) {
    ++tick_;
    movement moved;
    std::vector<int> missing;
    for (int page : wanted)
      if (!holds(page)) missing.push_back(page);
    for (slot& each : slots_)
      if (is_wanted(each, wanted)) each.last_use = tick_;
    while (unwanted(wanted) > spare_) *victim(wanted) = {};
    for (int page : missing) {
      *first_empty() = {page, tick_};
      ++(is_in_ring(s, page_of(s, page), length) ? moved.promoted : moved.recalled);
    }
    return moved;
  }

 private:
  struct slot {
    int page = -1;
    long last_use = 0;
  };

  static bool is_wanted(const slot& each, const std::vector<int>& wanted) {
    return std::find(wanted.begin(), wanted.end(), each.page) != wanted.end();
  }

  static bool is_unwanted(const slot& each, const std::vector<int>& wanted) {
    return each.page >= 0 && !is_wanted(each, wanted);
  }

  int unwanted(const std::vector<int>& wanted) const {
    return static_cast<int>(std::count_if(slots_.begin(), slots_.end(),
                                          [&](const slot& each) { return is_unwanted(each, wanted); }));
  }

  slot* first_empty() {
    for (slot& each : slots_)
      if (each.page < 0) return &each;
    return nullptr;
  }

  /// The unwanted slot that goes first; ties in last_use to the lowest index.
  slot* victim(const std::vector<int>& wanted) {
    slot* first = nullptr;
    for (slot& each : slots_) {
      if (!is_unwanted(each, wanted)) continue;
      if (first == nullptr ||
          (policy_ == residency_kind::least_recently_used && each.last_use < first->last_use))
        first = &each;
    }
    return first;
  }

  residency_kind policy_;
  int spare_;
  std::vector<slot> slots_;
  long tick_ = 0;
};

}  // namespace oracle
