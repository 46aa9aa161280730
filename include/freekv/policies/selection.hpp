// Selection: how many of a row's candidates, best first, are selected. How they are put in order is the
// backend's.
#pragma once

#include <concepts>
#include <freekv/config.hpp>
#include <freekv/core/policy.hpp>
#include <string_view>

namespace freekv {

/// The k best; ties go to the smaller page; all candidates if there are no more than k.
struct top_k {
  using policy_kind = selection_kind;
  static constexpr std::string_view name = "top_k";
  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
};

/// Says how many of the candidates are selected.
template <class S>
concept selection_policy = policy<S> && std::same_as<typename S::policy_kind, selection_kind> &&
    requires(const S s) {
  { S::name } -> std::convertible_to<std::string_view>;
  { s.count(1, 1) } -> std::same_as<int>;
};

static_assert(selection_policy<top_k>);

}  // namespace freekv
