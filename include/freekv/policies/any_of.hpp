// A policy chosen at run time among a list: for programs that take variants by name.
#pragma once

#include <freekv/policies/correction.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/policies/selection.hpp>
#include <freekv/policies/summary.hpp>
#include <variant>

namespace freekv {

/// One of `Policies`, which are all of one kind. Stages resolve it once, outside their loops, so a program
/// compiles each stage for each policy and never the product of all choices.
template <policy First, policy... Rest>
struct any_of {
  static_assert((std::is_same_v<typename First::policy_kind, typename Rest::policy_kind> && ...),
                "any_of: all policies must be of one kind");
  using policy_kind = typename First::policy_kind;
  std::variant<First, Rest...> chosen{};

  any_of() = default;
  template <class Policy>
  requires(std::is_same_v<Policy, First> || (std::is_same_v<Policy, Rest> || ...)) any_of(Policy policy)
      : chosen(std::move(policy)) {}

  // Members that are asked at set-up or once a layer; stages resolve.
  constexpr layer_kind kind(int layer) const {
    return std::visit([&](const auto& plan) { return plan.kind(layer); }, chosen);
  }
  layer_kind kind(int layer, int head) const {
    return std::visit([&](const auto& plan) { return head_kind(plan, layer, head); }, chosen);
  }
  constexpr bool keeps_slots() const {
    return std::visit([](const auto& route) { return route.keeps_slots(); }, chosen);
  }
};

namespace detail {

template <class... S>
inline constexpr bool may_sample_by<any_of<S...>> = (sampling_selection<S> || ...);
template <class... C>
inline constexpr bool may_judge_shares<any_of<C...>> = (may_judge_shares<C> || ...);
template <class... C>
inline constexpr bool may_verify_by<any_of<C...>> = (correction_by_sample<C> || ...);

}  // namespace detail

template <class... Policies, class Use>
constexpr decltype(auto) resolve(const any_of<Policies...>& policy, Use&& use) {
  return std::visit(std::forward<Use>(use), policy.chosen);
}

}  // namespace freekv
