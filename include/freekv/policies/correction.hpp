// Correction: which KV heads select anew with the current query before they attend. A policy judges either by
// how the queries have changed, which costs next to nothing, or by the masses of the selected units under the
// current query, for which every head's units are scored before it attends, or by a sample of the others,
// whose keys are read as well. A head without a selection is always flagged; the pipeline sees to that.
#pragma once

#include <algorithm>
#include <cmath>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/team.hpp>
#include <freekv/policies/detail/query_drift.hpp>
#include <freekv/policies/detail/student_t.hpp>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace freekv {

/// A KV head's queries now and when its selection was made, and how many decode steps there have been since
/// the last prompt.
struct query_change {
  group_query now, before;
  int decode_step = 0;
};

/// Mass (softmax of the pooled scores over the candidates, or with `hook::of_attention` the share of all
/// attention) of the selected units, and of those that would be selected now.
struct selection_masses {
  float selected = 0.0f;
  float best = 0.0f;
};

/// Estimates of what a KV head's selection misses, by a sample of the other candidates; NaN where there was
/// none.
struct missed_attention {
  /// Mass of the candidates that are not selected, in masses of what is attended to, the mean over the query
  /// heads: unbiased.
  float mass = std::numeric_limits<float>::quiet_NaN();
  /// Upper bound of the share of all attention that they have, the mean over the query heads.
  float share_bound = std::numeric_limits<float>::quiet_NaN();
};

/// Flags a head whose queries' pooled cosine with the previous ones is below tau, or undefined. One tau for
/// all layers, or one for each. (FreeKV section 3.3)
struct cosine_drift {
  using policy_kind = correction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "cosine_drift";
  float tau = 0.9f;
  std::vector<float> tau_of_layer{};
  drift_pool pool = drift_pool::mean;

  /// The policy of one layer, trivially copyable, as a device takes it.
  struct layer_policy {
    float tau;
    drift_pool pool;
    template <team T>
    FREEKV_HD bool flags(T team, const query_change& change) const {
      const detail::query_drift drift = detail::drift_of(team, change.now, change.before, pool);
      return !drift.defined || !(drift.cosine >= tau);
    }
  };
  layer_policy at(int layer) const {
    return {tau_of_layer.empty() ? tau : tau_of_layer[to_size(layer)], pool};
  }
  std::string values() const {
    const char* pools[] = {"", ", min", ", max"};
    return (tau_of_layer.empty() ? detail::decimal(tau) : "by layer") + pools[static_cast<int>(pool)];
  }
  void validate(int layers) const {
    if (!tau_of_layer.empty() && tau_of_layer.size() != to_size(layers))
      throw settings_error("cosine_drift has tau for " + std::to_string(tau_of_layer.size()) + " layers of " +
                           std::to_string(layers) + "; give one for each, or none");
    if (std::isnan(tau) ||
        std::any_of(tau_of_layer.begin(), tau_of_layer.end(), [](float t) { return t != t; }))
      throw settings_error("cosine_drift: tau is NaN; choose a number, 0.8 to 0.9 as published");
  }
};

/// Flags a head whose selected units have less than `1 - delta` of the mass that a selection with the current
/// query would have. `partial`: a flagged head does not select anew but takes, until the deficit is at most
/// delta, the best units that it misses, each for the selected unit of least mass that is not among the best.
/// One delta for all layers, or one for each. Ours.
struct mass_deficit {
  using policy_kind = correction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "mass_deficit";
  float delta = 0.2f;
  bool partial = false;
  std::vector<float> delta_of_layer{};

  /// The policy of one layer, trivially copyable, as a device takes it.
  struct layer_policy {
    float delta;
    bool partial;
    FREEKV_HD bool flags(const selection_masses& masses) const {
      return masses.selected < (1.0f - delta) * masses.best;
    }
    FREEKV_HD bool exchanges_units() const { return partial; }
  };
  layer_policy at(int layer) const {
    return {delta_of_layer.empty() ? delta : delta_of_layer[to_size(layer)], partial};
  }

  std::string values() const {
    return (delta_of_layer.empty() ? detail::decimal(delta) : "by layer") + (partial ? ", partial" : "");
  }
  void validate(int layers) const {
    if (!delta_of_layer.empty() && delta_of_layer.size() != to_size(layers))
      throw settings_error("mass_deficit has delta for " + std::to_string(delta_of_layer.size()) +
                           " layers of " + std::to_string(layers) + "; give one for each, or none");
    const auto check = [](float share) {
      if (!(share >= 0.0f && share <= 1.0f))
        throw settings_error("mass_deficit: delta of " + detail::decimal(share) +
                             " is not a share from 0 to 1; choose one such as 0.2");
    };
    check(delta);
    for (const float share : delta_of_layer) check(share);
  }
};

/// Flags a head whose selected units lack more than `delta` of the head's attention, beside those that a
/// selection with the current query would have: a mass is the share that the summary estimates for a unit
/// beside sink, window and all candidates, as the mean over the query heads. So a head that looks at its
/// window hardly ever waits. `partial` as mass_deficit has it. For summaries that estimate log-masses
/// (key_codes, key_subspace), on the host. Ours.
struct missing_share {
  using policy_kind = correction_kind;
  using hooks = hook_list<hook::of_attention, hook::validate, hook::values>;
  static constexpr std::string_view name = "missing_share";
  static constexpr bool of_attention = true;
  float delta = 0.05f;
  bool partial = false;

  missing_share at(int) const { return *this; }
  FREEKV_HD bool flags(const selection_masses& shares) const {
    return !(shares.best - shares.selected <= delta);  // NaN, too
  }
  FREEKV_HD bool exchanges_units() const { return partial; }

  std::string values() const { return detail::decimal(delta) + (partial ? ", partial" : ""); }
  void validate(int) const {
    if (!(delta >= 0.0f && delta <= 1.0f))
      throw settings_error("missing_share: delta of " + detail::decimal(delta) +
                           " is not a share from 0 to 1; choose one such as 0.05");
  }
};

/// Flags a head unless its selection is verified to miss at most `epsilon` of the head's attention, which is
/// wrong with a probability of at most `delta`: of the candidates that are not selected, `samples` are drawn
/// with probabilities that follow the summary's estimates, their keys are read from the store, and the bound
/// is Student's, one-sided, of the draws' mean. So it is as good as means of so few draws are normal. For
/// summaries that estimate log-masses (key_codes, key_subspace), on the host, with a store in memory. Ours,
/// after the (epsilon, delta) of vAttention (arXiv 2510.05688) and the importance sampling of MagicPIG.
struct verified_share {
  using policy_kind = correction_kind;
  using hooks = hook_list<hook::of_attention, hook::validate, hook::values>;
  static constexpr std::string_view name = "verified_share";
  static constexpr bool of_attention = true;
  static constexpr int most_samples = 64;
  float epsilon = 0.1f;
  float delta = 0.05f;
  int samples = 4;
  std::uint64_t seed = 1;

  /// The policy of one layer.
  struct layer_policy {
    float epsilon;
    int samples;
    std::uint64_t seed;
    double quantile;  ///< of Student's t
    /// Estimates what is missed by the masses of drawn candidates, each over its probability.
    missed_attention judge(std::span<const double> drawn) const {
      const auto n = static_cast<double>(drawn.size());
      double sum = 0.0, squares = 0.0;
      for (const double one : drawn) sum += one;
      const double mean = sum / n;
      for (const double one : drawn) squares += (one - mean) * (one - mean);
      const double bound = mean + quantile * std::sqrt(squares / (n - 1.0) / n);
      // The mean of shares is at most the share of the mean, as mass / (1 + mass) is concave.
      return {static_cast<float>(mean), static_cast<float>(bound / (1.0 + bound))};
    }
    bool flags(const missed_attention& missed) const {
      return !(missed.share_bound <= epsilon);  // NaN, too
    }
  };
  layer_policy at(int) const {
    return {epsilon, samples, seed, detail::student_t_quantile(1.0 - double{delta}, samples - 1)};
  }

  std::string values() const {
    return detail::decimal(epsilon) + ", " + detail::decimal(delta) + ", " + std::to_string(samples);
  }
  void validate(int) const {
    if (!(epsilon >= 0.0f && epsilon <= 1.0f))
      throw settings_error("verified_share: epsilon of " + detail::decimal(epsilon) +
                           " is not a share from 0 to 1; choose one such as 0.1");
    if (!(delta >= 1e-6f && delta <= 0.5f))
      throw settings_error("verified_share: delta of " + detail::decimal(delta) +
                           " is not a probability from 0.000001 to 0.5; choose one such as 0.05");
    if (samples < 2 || samples > most_samples)
      throw settings_error("verified_share: " + std::to_string(samples) +
                           " samples; choose from 2, which have a variance, to " +
                           std::to_string(most_samples));
  }
};

/// Flags every head in every step: selection on the critical path, as Quest has it.
struct always {
  using policy_kind = correction_kind;
  static constexpr std::string_view name = "always";
  always at(int) const { return *this; }
  template <team T>
  FREEKV_HD bool flags(T, const query_change&) const {
    return true;
  }
};

/// Flags no head after the first step: the previous step's selection, whatever the query.
struct never {
  using policy_kind = correction_kind;
  static constexpr std::string_view name = "never";
  never at(int) const { return *this; }
  template <team T>
  FREEKV_HD bool flags(T, const query_change&) const {
    return false;
  }
};

/// Flags every head in every `Steps`-th decode step after the last prompt; `every_n_steps<dynamic>{8}` at run
/// time.
template <int Steps = 8>
struct every_n_steps {
  static_assert(Steps == dynamic || Steps >= 1, "every_n_steps takes 1 or more steps, or dynamic");
  using policy_kind = correction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "every_n_steps";
  count_of<Steps> steps{};
  every_n_steps at(int) const { return *this; }
  template <team T>
  FREEKV_HD bool flags(T, const query_change& change) const {
    return change.decode_step % steps == 0;
  }
  std::string values() const { return std::to_string(int{steps}); }
  void validate(int) const {
    if (steps < 1)
      throw settings_error("every_n_steps: every " + std::to_string(int{steps}) + " steps; give 1 or more");
  }
};

/// Decides from a KV head's queries now and those that made its selection.
template <class C>
concept correction_by_query = requires(const C c, query_change change) {
  { c.at(0).flags(scalar_team{}, change) } -> std::same_as<bool>;
};

/// Decides from the masses of what is selected and of what would be, and whether units are then exchanged one
/// by one.
template <class C>
concept correction_by_mass = requires(const C c, selection_masses masses) {
  { c.at(0).flags(masses) } -> std::same_as<bool>;
  { c.at(0).exchanges_units() } -> std::same_as<bool>;
};

/// Decides from the masses of candidates that are not selected, `samples` of them drawn by `seed`.
template <class C>
concept correction_by_sample = requires(const C c, const missed_attention missed,
                                        std::span<const double> drawn) {
  { c.at(0).samples } -> std::convertible_to<int>;
  { c.at(0).seed } -> std::convertible_to<std::uint64_t>;
  { c.at(0).judge(drawn) } -> std::same_as<missed_attention>;
  { c.at(0).flags(missed) } -> std::same_as<bool>;
};

namespace detail {

/// True of a correction, or an any_of with an alternative, that draws samples.
template <class C>
inline constexpr bool may_verify_by = correction_by_sample<C>;

/// False of settings whose pipeline's correction never draws: nothing is compiled for it there.
template <class Settings>
inline constexpr bool may_verify =
    may_verify_by<std::remove_cvref_t<decltype(std::declval<const Settings&>().correction)>>;

/// True where a pipeline of these settings draws samples to correct.
template <class Settings>
constexpr bool verifies(const Settings& s) {
  if constexpr (may_verify<Settings>)
    return resolve(s.correction, []<class C>(const C&) { return correction_by_sample<C>; });
  else
    return false;
}

/// True of a correction, or an any_of with an alternative, that judges shares of all attention.
template <class C>
inline constexpr bool may_judge_shares = hooks_of<C>::has(hook::of_attention);

}  // namespace detail

template <class C>
concept correction_policy = policy<C> && std::same_as<typename C::policy_kind, correction_kind> &&
    (correction_by_query<C> || correction_by_mass<C> || correction_by_sample<C>)&&requires {
  { C::name } -> std::convertible_to<std::string_view>;
};

static_assert(correction_policy<cosine_drift> && correction_policy<mass_deficit> &&
              correction_policy<missing_share> && correction_policy<verified_share> &&
              correction_policy<always> && correction_policy<never> && correction_policy<every_n_steps<>>);

/// Optional: `validate(layers)`, `values()`, and of one by mass `of_attention`, which is true, as it is of
/// one by sample.
struct correction_kind : kind_defaults {
  using default_policy = cosine_drift;
  template <class P>
  struct check {
    static_assert(correction_policy<P>,
                  "a correction policy has a name and at(layer).flags(team, query_change) -> bool, or "
                  "at(layer).flags(selection_masses) -> bool and at(layer).exchanges_units() -> bool, or "
                  "at(layer).samples, seed, judge(drawn) -> missed_attention and flags(missed_attention) -> "
                  "bool");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    switch (h) {
      case hook::validate:
        return requires(const P p) { p.validate(1); };
      case hook::of_attention:
        return requires { P::of_attention; };
      default:
        return kind_defaults::offers<P>(h);
    }
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const policy_setting& setting) {
    policy.validate(setting.layers);
  }
};

}  // namespace freekv
