// Selection: how many of a row's candidates, best first, are selected. How they are put in order is the backend's.
#pragma once

#include <concepts>
#include <freekv/config.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <string>
#include <string_view>

namespace freekv {

/// The k best; ties go to the smaller page; all candidates if there are no more than k.
struct top_k {
  using policy_kind = selection_kind;
  static constexpr std::string_view name = "top_k";
  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
};

/// The fewest of the k best, best first, whose masses sum to `p` or more; at least one. A candidate's mass is
/// its share of the softmax of the pooled scores, so with softmax poolings of the pooled softmax itself.
struct top_p {
  using policy_kind = selection_kind;
  using hooks = hook_list<hook::enough, hook::validate, hook::values>;
  static constexpr std::string_view name = "top_p";
  float p = 0.95f;

  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
  /// Whether pages that together have `mass` are enough.
  FREEKV_HD constexpr bool enough(float mass) const { return mass >= p; }

  std::string values() const { return detail::decimal(p); }
  void validate() const {
    if (!(p > 0.0f && p <= 1.0f))
      throw settings_error("top_p: p of " + values() +
                           " is not a share above 0, at most 1; choose one such as 0.95");
  }
};

/// Says how many of the candidates may be selected; optionally, `enough(mass)` ends the selection earlier.
template <class S>
concept selection_policy = policy<S> && std::same_as<typename S::policy_kind, selection_kind> &&
    requires(const S s) {
  { S::name } -> std::convertible_to<std::string_view>;
  { s.count(1, 1) } -> std::same_as<int>;
};

/// Whether it looks at masses, so that pages are scored even where all candidates could be selected.
template <class S>
concept selection_by_mass = selection_policy<S> && requires(const S s) {
  { s.enough(0.5f) } -> std::same_as<bool>;
};

static_assert(selection_policy<top_k> && selection_by_mass<top_p>);

/// Optional: `enough(mass) -> bool`, `validate()`, `values()`.
struct selection_kind : kind_of_self_contained {
  using default_policy = top_k;
  template <class P>
  struct check {
    static_assert(
        selection_policy<P>,
        "a selection policy has a name and count(candidates, k) -> int, how many of the best are selected");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    if (h != hook::enough) return kind_of_self_contained::offers<P>(h);
    return requires(const P p) {
      { p.enough(0.5f) } -> std::same_as<bool>;
    };
  }
};

}  // namespace freekv
