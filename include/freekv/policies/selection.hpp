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

/// The fewest of the k best, best first, whose masses sum to `p` or more; at least one. A candidate's mass is
/// its share of the softmax of the pooled scores, so with softmax poolings of the pooled softmax itself.
struct top_p {
  using policy_kind = selection_kind;
  using hooks = hook_list<hook::enough, hook::validate, hook::values>;
  static constexpr std::string_view name = "top_p";
  float p = 0.95f;

  FREEKV_HD constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
  /// True where units that together have `mass` are enough.
  FREEKV_HD constexpr bool enough(float mass) const { return mass >= p; }

  std::string values() const { return detail::decimal(p); }
  void validate() const {
    if (!(p > 0.0f && p <= 1.0f))
      throw settings_error("top_p: p of " + values() +
                           " is not a share above 0, at most 1; choose one such as 0.95");
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

/// Says how many of the candidates may be selected; optionally, `enough(mass)` ends the selection earlier, or
/// `favour()` is added to the scores of units that are held, or only those are selected whose pooled score
/// `admits(score)`, as it does any greater one.
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

/// A selection that favours, for the next step, units that the step attends to.
template <class S>
concept favours_held = selection_policy<S> && hooks_of<S>::has(hook::favour);

static_assert(selection_policy<top_k> && selection_by_mass<top_p> && favours_held<sticky_top_k> &&
              sampling_selection<colliding>);

/// Optional: `enough(mass) -> bool`, `favour() -> float` or `admits(score) -> bool`, `validate()`,
/// `values()`.
struct selection_kind : kind_of_self_contained {
  using default_policy = top_k;
  template <class P>
  struct check {
    static_assert(
        selection_policy<P>,
        "a selection policy has a name and count(candidates, k) -> int, how many of the best are selected");
    static_assert(selection_by_mass<P> + favours_held<P> + sampling_selection<P> <= 1,
                  "a selection policy has enough(mass) or favour() or admits(score), one of them at most");
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
      default:
        return kind_of_self_contained::offers<P>(h);
    }
  }
};

}  // namespace freekv
