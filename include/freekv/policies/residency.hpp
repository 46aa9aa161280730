// Residency: which units that are no longer selected stay in a KV head's slots, for the case that they are
// selected again.
#pragma once

#include <concepts>
#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <string>
#include <string_view>

namespace freekv {

/// A slot whose unit is no longer selected. Selections of a KV head are counted; `last_selected` is the
/// number of the last one that had the unit.
struct unselected_slot {
  int slot = 0;
  std::int32_t last_selected = 0;
};

namespace detail {

template <int Spare>
struct spare_slots {
  static_assert(Spare == dynamic || Spare >= 0, "spare slots are 0 or more, or dynamic");
  using policy_kind = residency_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  /// Slots of a KV head beyond the selected pages; without any, nothing stays and all residencies are alike.
  count_of<Spare> spare{};
  std::string values() const { return std::to_string(int{spare}); }
  void validate() const {
    constexpr int most = 1 << 29;  // so that sums with what is selected are counted right
    if (spare < 0 || spare > most)
      throw settings_error("residency: " + std::to_string(int{spare}) + " spare slots; give 0 to " +
                           std::to_string(most));
  }
};

}  // namespace detail

/// The lowest slot is freed first.
template <int Spare = 0>
struct first_unselected : detail::spare_slots<Spare> {
  static constexpr std::string_view name = "first_unselected";
  FREEKV_HD constexpr bool frees_before(unselected_slot a, unselected_slot b) const {
    return a.slot < b.slot;
  }
};

/// The slot whose page has not been selected for longest is freed first; of those alike the lowest.
template <int Spare = 0>
struct least_recently_used : detail::spare_slots<Spare> {
  static constexpr std::string_view name = "least_recently_used";
  FREEKV_HD constexpr bool frees_before(unselected_slot a, unselected_slot b) const {
    return a.last_selected != b.last_selected ? a.last_selected < b.last_selected : a.slot < b.slot;
  }
};

/// Says how many spare slots there are and which unselected slot is freed before which.
template <class R>
concept residency_policy = policy<R> && std::same_as<typename R::policy_kind, residency_kind> &&
    requires(const R r, unselected_slot slot) {
  { R::name } -> std::convertible_to<std::string_view>;
  { r.spare } -> std::convertible_to<int>;
  { r.frees_before(slot, slot) } -> std::same_as<bool>;
};

static_assert(residency_policy<first_unselected<>> && residency_policy<least_recently_used<4>>);

/// Optional: `validate()`, `values()`.
struct residency_kind : kind_of_self_contained {
  using default_policy = first_unselected<>;
  template <class P>
  struct check {
    static_assert(residency_policy<P>,
                  "a residency policy has a name, spare -> int and frees_before(unselected_slot, "
                  "unselected_slot) -> bool");
  };
};

}  // namespace freekv
