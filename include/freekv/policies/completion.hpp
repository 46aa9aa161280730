// Completion: what stands in attention for the units that are not selected.
#pragma once

#include <concepts>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/policies/selection.hpp>
#include <freekv/policies/summary.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace freekv {

/// Nothing: attention is over what is selected alone, as all published methods have it.
struct no_completion {
  using policy_kind = completion_kind;
  static constexpr std::string_view name = "no_completion";
  static constexpr bool completes = false;
};

/// Each candidate that is not selected is attended to as one entry, whose score is its log-mass as the
/// summary estimates it, and whose value stands for its page's: as the last rows of a prompt weigh the page's
/// values, and from then on as the rows weigh them that attend to the page. `head_dim + 4` bytes of fast
/// memory for each page and KV head of a sequence. A page that no row has weighed, one of a prompt without
/// queries or of a loaded prefix, has no such value, and is not attended to. Ours.
struct page_values {
  using policy_kind = completion_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "page_values";
  static constexpr bool completes = true;
  int prompt_rows = 64;    ///< at the end of a prompt that weigh its pages, each by its share of them
  float refreshed = 0.3f;  ///< share of a page's value that comes from a step that attends to the page

  std::string values() const { return std::to_string(prompt_rows) + ", " + detail::decimal(refreshed); }
  void validate() const {
    if (prompt_rows < 0 || prompt_rows > 1024)
      throw settings_error("page_values: " + std::to_string(prompt_rows) +
                           " rows of a prompt; choose from 0 to 1024");
    if (!(refreshed >= 0.0f && refreshed <= 1.0f))
      throw settings_error("page_values: a refreshed share of " + detail::decimal(refreshed) +
                           "; choose from 0 to 1");
  }
};

template <class P>
concept completion_policy = policy<P> && std::same_as<typename P::policy_kind, completion_kind> && requires {
  { P::name } -> std::convertible_to<std::string_view>;
  { P::completes } -> std::convertible_to<bool>;
} &&(!P::completes || requires(const P p) {
  { p.prompt_rows } -> std::convertible_to<int>;
  { p.refreshed } -> std::convertible_to<float>;
});

static_assert(completion_policy<no_completion> && completion_policy<page_values>);

/// Optional: `validate()`, `values()`.
struct completion_kind : kind_of_self_contained {
  using default_policy = no_completion;
  template <class P>
  struct check {
    static_assert(completion_policy<P>,
                  "a completion policy has a name and completes -> bool, and where that is true prompt_rows "
                  "-> int and refreshed -> float");
  };
};

namespace detail {

/// False of settings whose pipeline never completes attention: nothing is compiled for it there.
template <class Settings>
inline constexpr bool may_complete =
    !std::is_same_v<std::remove_cvref_t<decltype(std::declval<const Settings&>().completion)>, no_completion>;

}  // namespace detail

/// A summary whose scores, with what `mass_term` gives added, are estimates of units' log-masses.
template <class S>
concept mass_estimating_summary = hooks_of<S>::has(hook::mass_term);

}  // namespace freekv
