// Optional members of policies. A policy lists those that it has, so one that is misspelt or has another
// signature does not compile.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <freekv/core/policy.hpp>
#include <string>

namespace freekv {

/// An optional member of a policy; which of them a kind has, and as what, its header says.
enum class hook : std::uint8_t {
  admits,  ///< of a selection that samples, `admits(score)`
  allocate,
  at,
  blocks,  ///< of an eviction, `block`: a prompt is cut behind each of its blocks
  bytes,
  data,  ///< arrays that a policy was given, each to `visit(pointer, bytes)`
  decode,
  demote,  ///< of an eviction, `originals`: how many tokens stay as they are, the rest in a codec's bytes
  encode,
  enough,
  favour,
  four_heads,  ///< a summary's `prepare_four` and `score_four`
  kept,
  kind_of_head,  ///< a plan's `kind(layer, head)`
  linear,
  mass_term,  ///< of a summary, what its scores lack to be estimates of log-masses
  merge,
  observe,
  of_attention,  ///< of a correction by mass, `of_attention`: masses are shares of all that a head attends
                 ///< to; of every one by sample
  prepare,
  query_width,
  rank,  ///< of an eviction that counts units, the worths of all of them together
  rate,  ///< of an eviction, ratios that it gives layers when a prompt ends
  rows,  ///< of an eviction, `on_row`: a token's key and value
  sees_keys,
  shared_bytes,
  shared_floats,
  stored,
  summarised_by_whole_rows,
  temperature,  ///< of a selection by mass, `temperature(layer, head)`
  validate,
  values,
  votes,   ///< of an eviction, which query heads of a layer choose for all of its KV heads
  weighs,  ///< of a summary, `log_weight`: what is added to the scores of sampled tokens
  with_elements,
  worths,  ///< of an eviction, `on_given`: what the engine says rows are worth
};

inline constexpr hook last_hook = hook::worths;

/// Optional members that a policy has: `using hooks = hook_list<hook::prepare, hook::query_width>;`.
template <hook... Listed>
struct hook_list {
  static constexpr bool has(hook h) { return ((h == Listed) || ...); }
  template <hook... More>
  using with = hook_list<Listed..., More...>;
};

namespace detail {

struct takes_array {
  void operator()(const void* array, std::size_t bytes) const;
};

template <class P>
struct listed_hooks {
  using type = hook_list<>;
};
template <class P>
requires requires { typename P::hooks; }
struct listed_hooks<P> {
  using type = typename P::hooks;
};

}  // namespace detail

/// Optional members that `P` lists; none where it has no `hooks`.
template <class P>
using hooks_of = typename detail::listed_hooks<P>::type;

/// Model and pages that a pipeline's policies are used with.
struct policy_setting {
  int layers = 0, kv_heads = 0, head_dim = 0;
  int page_tokens = 0, unit_tokens = 0;
};

/// Base of a kind of policies, which has in its header:
/// - `default_policy`, the one of a pipeline that names none;
/// - `check<P>`, with a static assertion whose sentence says what a policy of this kind has;
/// - `offers<P>(hook)`, whether `P` has that optional member;
/// - `validate(policy, setting)`, if it offers `validate`: calls it with what it takes of the
///   setting (inlined: no function of its own for each policy).
struct kind_defaults {
  template <class P>
  static constexpr bool offers(hook h) {
    if (h == hook::data) return requires(const P p) {
        p.data(detail::takes_array{});
      };
    return h == hook::values && requires(const P p) {
      { p.values() } -> std::convertible_to<std::string>;
    };
  }
};

/// Base of a kind whose policies may have `validate()`, which needs nothing of the setting.
struct kind_of_self_contained : kind_defaults {
  template <class P>
  static constexpr bool offers(hook h) {
    return h == hook::validate ? requires(const P p) { p.validate(); } : kind_defaults::offers<P>(h);
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const policy_setting&) {
    policy.validate();
  }
};

/// Calls `visit(array, bytes)` for each array that a policy was given and that what it stores of a page
/// depends on.
template <class P, class Visit>
void visit_data(const P& policy, const Visit& visit) {
  using hooks = hooks_of<P>;
  static_assert(
      !hooks::has(hook::at) || hooks::has(hook::data),
      "a policy with at(...) says by data(visit) which arrays it was given, and lists hook::data: what "
      "is saved of its pages fits these alone");
  if constexpr (hooks::has(hook::data)) policy.data(visit);
}

namespace detail {

template <class P, hook Hook>
struct checked_hook {
  static constexpr bool listed = hooks_of<P>::has(Hook);
  static constexpr bool there = P::policy_kind::template offers<P>(Hook);
  static_assert(
      there || !listed,
      "a policy's `hooks` lists a hook that it does not have as its kind's header gives it: is it spelt "
      "so, with these arguments?");
  static_assert(listed || !there, "a policy has a hook that its `hooks` does not list");
};

/// The first optional member that `P` has and does not list, or lists and does not have; -1 where there is
/// none. One function in place of a class for each member, which nvcc's front end would search for each
/// other.
template <class P>
consteval int first_wrong_hook() {
  for (int h = 0; h <= static_cast<int>(last_hook); ++h) {
    const auto member = static_cast<hook>(h);
    if (hooks_of<P>::has(member) != P::policy_kind::template offers<P>(member)) return h;
  }
  return -1;
}

/// Compiles if the optional members of `P` are those that it lists.
template <class P, int Wrong = first_wrong_hook<P>()>
struct checked_hooks : checked_hook<P, static_cast<hook>(Wrong)> {};
template <class P>
struct checked_hooks<P, -1> {};

/// Compiles if `P` is a policy of its kind.
template <class P>
struct checked_policy : P::policy_kind::template check<P>, checked_hooks<P> {};

}  // namespace detail

}  // namespace freekv
