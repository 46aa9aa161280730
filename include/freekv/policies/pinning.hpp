// Pinning: units that a KV head has selected whatever their scores, because no summary stands for them well.
#pragma once

#include <cmath>
#include <concepts>
#include <freekv/config.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/policies/mean_summaries.hpp>
#include <string>
#include <string_view>

namespace freekv {

namespace detail {

/// Worth of a unit, where NaN is worth least.
FREEKV_HD inline float pin_worth(float worth) { return worth == worth ? worth : -infinity; }

}  // namespace detail

/// Nothing is pinned.
struct no_pins {
  using policy_kind = pinning_kind;
  static constexpr std::string_view name = "no_pins";
  count_of<0> units{};
};

/// The `Units` units whose keys are least alike: a unit has the least cosine of one of its keys with their
/// mean, and those with the smallest are pinned. `pin_outliers<dynamic>{48}` takes the number at run time.
/// (ShadowKV, arXiv 2410.21465, section 4.1: outlier chunks)
template <int Units = 48>
struct pin_outliers {
  using policy_kind = pinning_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "pin_outliers";
  count_of<Units> units{};

  std::string values() const { return std::to_string(int{units}); }
  void validate() const {
    if (units < 0)
      throw settings_error("pin_outliers: " + std::to_string(int{units}) + " units; give 0 or more");
  }

  /// `mean` (head_dim) is scratch.
  template <team T>
  FREEKV_HD float worth(T team, const unit_keys& keys, float* mean) const {
    const int d = keys.unit.head_dim;
    detail::mean_of_keys(team, keys, 0, keys.unit.tokens, mean);
    team.sync();
    const float of_mean = detail::inner_product(team, mean, mean, d);
    float most = -infinity;
    for (int t = 0; t < keys.unit.tokens; ++t) {
      const float of_key = detail::inner_product(team, keys.row(t), keys.row(t), d);
      const float cosine = detail::inner_product(team, keys.row(t), mean, d) / ::sqrtf(of_key * of_mean);
      most = scalar_team{}.maximum(most, -cosine);
    }
    return most;
  }
};

/// Says how many units of a KV head are pinned, and what a unit's keys (tokens, head_dim) are worth: those
/// worth most are, ties to the smaller unit, and NaN is worth least. They are pinned in a step that selects
/// anew after a prompt, or after a truncation that dropped the selection, among that step's candidates. From
/// then on they are no candidates, have no part in pooling, and are selected besides the k best of the
/// others, until the selection is dropped.
template <class P>
concept pinning_policy = policy<P> && std::same_as<typename P::policy_kind, pinning_kind> &&
    requires(const P p) {
  { P::name } -> std::convertible_to<std::string_view>;
  { p.units } -> std::convertible_to<int>;
} &&(std::same_as<P, no_pins> || requires(const P p, unit_keys keys, float* scratch) {
  { p.worth(scalar_team{}, keys, scratch) } -> std::same_as<float>;
});

static_assert(pinning_policy<no_pins> && pinning_policy<pin_outliers<>>);

/// Optional: `validate()`, `values()`.
struct pinning_kind : kind_of_self_contained {
  using default_policy = no_pins;
  template <class P>
  struct check {
    static_assert(pinning_policy<P>,
                  "a pinning policy has a name, units -> int and worth(team, keys, scratch) -> float");
  };
};

}  // namespace freekv
