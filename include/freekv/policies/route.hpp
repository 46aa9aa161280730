// Routes: how attention reaches selected pages.
#pragma once

#include <concepts>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <string_view>

namespace freekv {

/// Selected pages are recalled into slots of the fast tier; attention reads the fast tier alone.
struct resident {
  using policy_kind = route_kind;
  static constexpr std::string_view name = "resident";
  constexpr bool keeps_slots() const { return true; }
};

/// Attention reads selected pages straight from the store, by page list; nothing is recalled. For memory that
/// the attending processor reads at full speed: a CPU engine's.
struct in_place {
  using policy_kind = route_kind;
  static constexpr std::string_view name = "in_place";
  constexpr bool keeps_slots() const { return false; }
};

/// Says whether selected pages are brought into slots.
template <class R>
concept route_policy = policy<R> && std::same_as<typename R::policy_kind, route_kind> && requires(const R r) {
  { R::name } -> std::convertible_to<std::string_view>;
  { r.keeps_slots() } -> std::same_as<bool>;
};

static_assert(route_policy<resident> && route_policy<in_place>);

struct route_kind : kind_defaults {
  using default_policy = resident;
  template <class P>
  struct check {
    static_assert(route_policy<P>, "a route has a name and keeps_slots() -> bool");
  };
};

}  // namespace freekv
