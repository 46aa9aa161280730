// Selection: how many of a row's candidates, best first, are selected. How they are put in order is the
// backend's.
#pragma once

#include <concepts>
#include <freekv/config.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace freekv {

/// The k best; ties go to the smaller unit; all candidates if there are no more than k.
struct top_k {
  using policy_kind = selection_kind;
  static constexpr std::string_view name = "top_k";
  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
};

/// Temperatures, above 0, of the KV heads of all layers: data of the caller's, who keeps its memory; of a
/// device it is memory that the device reads. None: 1 everywhere.
struct head_temperatures {
  const float* data = nullptr;  ///< (layers, kv_heads)
  int layers = 0, kv_heads = 0;

  FREEKV_HD float of(int layer, int head) const {
    return data == nullptr ? 1.0f : data[layer * kv_heads + head];
  }
};

/// The fewest of the k best, best first, whose masses sum to `p` or more; at least one. A candidate's mass is
/// its share of the softmax of the pooled scores, so with softmax poolings of the pooled softmax itself.
///
/// Scores are estimates, and the same p of different heads' estimates is not the same p of their attention.
/// With `temperatures` scores are divided by their head's first, so that as many candidates have p as of the
/// attention itself: `calibrate_top_p` finds them. (Calibrated top-p: HARD-KV, arXiv 2606.28831, section 3,
/// for tokens; here for what is selected)
struct top_p {
  using policy_kind = selection_kind;
  using hooks = hook_list<hook::enough, hook::temperature, hook::validate, hook::values>;
  static constexpr std::string_view name = "top_p";
  float p = 0.95f;
  head_temperatures temperatures{};

  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
  /// True where units that together have `mass` are enough.
  FREEKV_HD constexpr bool enough(float mass) const { return mass >= p; }
  FREEKV_HD float temperature(int layer, int head) const { return temperatures.of(layer, head); }

  std::string values() const {
    return detail::decimal(p) + (temperatures.data == nullptr ? "" : ", calibrated");
  }
  void validate(const policy_setting& s) const {
    if (!(p > 0.0f && p <= 1.0f))
      throw settings_error("top_p: p of " + detail::decimal(p) +
                           " is not a share above 0, at most 1; choose one such as 0.95");
    if (temperatures.data != nullptr &&
        (temperatures.layers < s.layers || temperatures.kv_heads != s.kv_heads))
      throw settings_error("top_p: temperatures are of " + std::to_string(temperatures.layers) +
                           " layers of " + std::to_string(temperatures.kv_heads) +
                           " KV heads; needed is one for each of " + std::to_string(s.layers) +
                           " layers of " + std::to_string(s.kv_heads));
  }
};

/// The k best, where those that the step attends to have `bonus` added to their pooled score when the next
/// step's are selected: a unit has to be better by that much to take the place of one that is held already.
/// A correction selects without the bonus. (Ours: half the recalls at ln 2, docs/frontiers.md)
struct sticky_top_k {
  using policy_kind = selection_kind;
  using hooks = hook_list<hook::favour, hook::validate, hook::values>;
  static constexpr std::string_view name = "sticky_top_k";
  float bonus = 0.69314718f;  ///< ln 2 is twice the mass, of a softmax pooling

  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
  FREEKV_HD constexpr float favour() const { return bonus; }

  std::string values() const { return detail::decimal(bonus); }
  void validate() const {
    if (!(bonus >= 0.0f && bonus <= 1e6f))
      throw settings_error("sticky_top_k: bonus of " + values() +
                           " is not a number from 0 to 1000000; choose one such as 0.693");
  }
};

/// A sample: the candidates that collide with the query in 2 hash tables or more, by scores that count
/// collisions (`key_signatures`); of more than k the k with most, ties to the smaller unit. Attention weighs
/// what is selected by the inverse of the probability that it is, so that with a k that bounds nothing the
/// sums of exponentials, and of values that these weigh, are those of all candidates on average over the
/// hyperplanes; where k bounds, what is left out is missing. (MagicPIG, arXiv 2410.16179, section 4, without
/// a bound)
struct colliding {
  using policy_kind = selection_kind;
  using hooks = hook_list<hook::admits>;
  static constexpr std::string_view name = "colliding";
  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
  FREEKV_HD constexpr bool admits(float score) const { return score >= 2.0f; }
};

/// Says how many of the candidates may be selected; optionally, `enough(mass)` ends the selection earlier, of
/// scores divided by a `temperature(layer, head)`; or `favour()` is added to the scores of units that are
/// held; or only those are selected whose pooled score `admits(score)`, as it does any greater one.
template <class S>
concept selection_policy = policy<S> && std::same_as<typename S::policy_kind, selection_kind> &&
    requires(const S s) {
  { S::name } -> std::convertible_to<std::string_view>;
  { s.count(1, 1) } -> std::same_as<int>;
};

/// A selection that looks at masses, so that units are scored even where all candidates could be selected.
template <class S>
concept selection_by_mass = selection_policy<S> && requires(const S s) {
  { s.enough(0.5f) } -> std::same_as<bool>;
};

/// A selection that samples: of single tokens, each query head's own of every step, which attention weighs as
/// the summary says (`hook::weighs`).
template <class S>
concept sampling_selection = selection_policy<S> && hooks_of<S>::has(hook::admits);

namespace detail {

/// True of a selection, or an any_of with an alternative, that samples.
template <class S>
inline constexpr bool may_sample_by = sampling_selection<S>;

/// False of settings whose pipeline never samples: nothing is compiled for it there.
template <class Settings>
inline constexpr bool may_sample =
    may_sample_by<std::remove_cvref_t<decltype(std::declval<const Settings&>().selection)>>;

/// True where a pipeline of these settings samples.
template <class Settings>
constexpr bool samples(const Settings& s) {
  if constexpr (may_sample<Settings>)
    return resolve(s.selection, []<class S>(const S&) { return sampling_selection<S>; });
  else
    return false;
}

}  // namespace detail

/// True where all of `candidates` are selected whatever their scores.
template <selection_policy S>
FREEKV_HD constexpr bool selects_all(const S& selection, int candidates, int k) {
  return !selection_by_mass<S> && !sampling_selection<S> && selection.count(candidates, k) == candidates;
}

namespace detail {

/// Factor of a KV head's pooled scores before their masses are taken.
template <selection_policy S>
FREEKV_HD float per_temperature(const S& selection, int layer, int head) {
  if constexpr (requires { selection.temperature(layer, head); })
    return 1.0f / selection.temperature(layer, head);
  else
    return 1.0f;
}

}  // namespace detail

/// A selection that favours, for the next step, units that the step attends to.
template <class S>
concept favours_held = selection_policy<S> && hooks_of<S>::has(hook::favour);

static_assert(selection_policy<top_k> && selection_by_mass<top_p> && favours_held<sticky_top_k> &&
              sampling_selection<colliding>);

/// Optional: `enough(mass) -> bool`, and with it `temperature(layer, head) -> float`; `favour() -> float`;
/// or `admits(score) -> bool`. `validate()` or `validate(policy_setting)`, `values()`.
struct selection_kind : kind_of_self_contained {
  using default_policy = top_k;
  template <class P>
  struct check {
    static_assert(
        selection_policy<P>,
        "a selection policy has a name and count(candidates, k) -> int, how many of the best are selected");
    static_assert(selection_by_mass<P> + favours_held<P> + sampling_selection<P> <= 1,
                  "a selection policy has enough(mass) or favour() or admits(score), one of them at most");
    static_assert(
        selection_by_mass<P> || !hooks_of<P>::has(hook::temperature),
        "a selection policy with a temperature(layer, head), which masses are by, has enough(mass)");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    switch (h) {
      case hook::admits:
        return requires(const P p) {
          { p.admits(2.0f) } -> std::same_as<bool>;
        };
      case hook::enough:
        return requires(const P p) {
          { p.enough(0.5f) } -> std::same_as<bool>;
        };
      case hook::favour:
        return requires(const P p) {
          { p.favour() } -> std::same_as<float>;
        };
      case hook::temperature:
        return requires(const P p) {
          { p.temperature(0, 0) } -> std::same_as<float>;
        };
      case hook::validate:
        return requires(const P p) { p.validate(policy_setting{}); }
        || kind_of_self_contained::offers<P>(h);
      default:
        return kind_of_self_contained::offers<P>(h);
    }
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const policy_setting& setting) {
    if constexpr (requires { policy.validate(setting); })
      policy.validate(setting);
    else
      policy.validate();
  }
};

}  // namespace freekv
