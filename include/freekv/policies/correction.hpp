// Correction: which KV heads select anew with the current query before they attend. A head without a previous
// query is always flagged; the pipeline sees to that.
#pragma once

#include <algorithm>
#include <cmath>
#include <freekv/core/error.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/team.hpp>
#include <freekv/functors/query_drift.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace freekv {

/// Flags a head whose queries' mean cosine with the previous ones is below tau, or undefined. One tau for all
/// layers, or one for each. (FreeKV section 3.3)
struct cosine_drift {
  using policy_kind = correction_kind;
  static constexpr std::string_view name = "cosine_drift";
  float tau = 0.9f;
  std::vector<float> tau_of_layer{};

  /// What the device needs for one layer.
  struct layer_policy {
    float tau;
    template <team T>
    FREEKV_HD bool flags(T team, const group_query& now, const group_query& before) const {
      const query_drift drift = drift_of(team, now, before);
      return !drift.defined || !(drift.cosine >= tau);
    }
  };
  layer_policy at(int layer) const {
    return {tau_of_layer.empty() ? tau : tau_of_layer[static_cast<std::size_t>(layer)]};
  }
  std::string values() const {
    std::ostringstream text;
    text << tau;
    return tau_of_layer.empty() ? text.str() : "by layer";
  }
  void validate(int layers) const {
    if (!tau_of_layer.empty() && tau_of_layer.size() != static_cast<std::size_t>(layers))
      throw settings_error("cosine_drift has tau for " + std::to_string(tau_of_layer.size()) + " layers of " +
                           std::to_string(layers) + "; give one for each, or none");
    if (std::isnan(tau) ||
        std::any_of(tau_of_layer.begin(), tau_of_layer.end(), [](float t) { return t != t; }))
      throw settings_error("cosine_drift: tau is NaN; choose a number, 0.8 to 0.9 as published");
  }
};

/// Every head, every step: selection on the critical path, as Quest has it.
struct always {
  using policy_kind = correction_kind;
  static constexpr std::string_view name = "always";
  always at(int) const { return *this; }
  template <team T>
  FREEKV_HD bool flags(T, const group_query&, const group_query&) const {
    return true;
  }
};

/// No head after the first step: the previous step's selection, whatever the query.
struct never {
  using policy_kind = correction_kind;
  static constexpr std::string_view name = "never";
  never at(int) const { return *this; }
  template <team T>
  FREEKV_HD bool flags(T, const group_query&, const group_query&) const {
    return false;
  }
};

/// Decides from a KV head's queries now and those that made its selection.
template <class C>
concept correction_policy = policy<C> && std::same_as<typename C::policy_kind, correction_kind> &&
    requires(const C c, group_query query) {
  { C::name } -> std::convertible_to<std::string_view>;
  { c.at(0).flags(scalar_team{}, query, query) } -> std::same_as<bool>;
};

static_assert(correction_policy<cosine_drift> && correction_policy<always> && correction_policy<never>);

}  // namespace freekv
