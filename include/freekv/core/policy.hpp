// Kinds of policies, and how one of a kind is chosen, asked and printed.
#pragma once

#include <charconv>
#include <cstddef>
#include <string>
#include <type_traits>

namespace freekv {

// The kinds. A policy names its own: `using policy_kind = summary_kind;`. Its header defines it: default,
// check, optional members.
struct page_size_kind;
struct unit_kind;
struct layout_kind;
struct summary_kind;
struct pooling_kind;
struct selection_kind;
struct scope_kind;
struct correction_kind;
struct residency_kind;
struct plan_kind;
struct route_kind;
struct codec_kind;
struct pinning_kind;
struct completion_kind;
struct eviction_kind;  // of an evicting_pipeline
struct backend_kind;

/// A type that may stand in a pipeline's pack: it names its kind.
template <class P>
concept policy = requires {
  typename P::policy_kind;
};

namespace detail {

template <class Kind, class Policy>
inline constexpr bool is_of_kind = std::is_same_v<typename Policy::policy_kind, Kind>;

template <class Kind, class Default, class... Policies>
struct first_of_kind {
  using type = Default;
};
template <class Kind, class Default, class First, class... Rest>
struct first_of_kind<Kind, Default, First, Rest...> {
  using type = typename std::conditional_t<is_of_kind<Kind, First>, std::type_identity<First>,
                                           first_of_kind<Kind, Default, Rest...>>::type;
};

}  // namespace detail

/// Number of `Policies` that are of kind `Kind`.
template <class Kind, policy... Policies>
inline constexpr std::size_t count_of_kind = (std::size_t{0} + ... +
                                              (detail::is_of_kind<Kind, Policies> ? 1 : 0));

/// The policy of kind `Kind` in the pack, or `Default`.
template <class Kind, class Default, policy... Policies>
using policy_of_kind = typename detail::first_of_kind<Kind, Default, Policies...>::type;

/// Calls `use` with the policy itself. Run-time choices (`any_of`) overload this to call `use` with the
/// policy chosen, so a stage is dispatched once, outside its loops.
template <class Policy, class Use>
constexpr decltype(auto) resolve(const Policy& chosen, Use&& use) {
  return use(chosen);
}

namespace detail {

/// "0.95": a float in six digits, or, where these are another float's, in the nine that tell all of them
/// apart; whatever the locale says, as saved prefixes have it.
inline std::string decimal(float value) {
  char text[32];
  const auto in_digits = [&](int count) {
    return std::to_chars(text, text + sizeof text, value, std::chars_format::general, count).ptr;
  };
  float read = 0.0f;
  char* end = in_digits(6);
  std::from_chars(text, end, read);
  if (read != value) end = in_digits(9);
  return {text, end};
}

/// "key_subspace(24, 3)": a policy's name, and in brackets what its `values()` says it was given.
template <class P>
std::string printed(const P& policy) {
  return resolve(policy, [](const auto& chosen) {
    std::string text(chosen.name);
    if constexpr (requires { chosen.values(); }) text.append("(").append(chosen.values()).append(")");
    return text;
  });
}

}  // namespace detail

}  // namespace freekv
