// Policies of a list of methods, by kind: those that the methods have in common are compiled once, whatever
// their number.
#pragma once

#include <freekv/freekv.hpp>
#include <type_traits>

namespace freekv::c_library {

/// Whether a method has an evicting_pipeline; others have a retrieval_pipeline.
template <class Method>
inline constexpr bool forgets = requires {
  typename Method::eviction;
};

namespace detail {

template <class... Policies>
struct list {};

/// `List` and `Policy`, once.
template <class List, class Policy>
struct joined;
template <class... P, class Policy>
struct joined<list<P...>, Policy> {
  using type = std::conditional_t<(std::is_same_v<P, Policy> || ...), list<P...>, list<P..., Policy>>;
};

/// The policy of a method that is of kind `Kind`, or void.
template <class Kind, class Method>
struct policy_in {
  using type = void;
};
template <class Kind, class Method>
requires(!forgets<Method>) struct policy_in<Kind, Method> {
  using type = typename Method::pack::template of<Kind>;
};
template <class Method>
requires(forgets<Method>) struct policy_in<eviction_kind, Method> {
  using type = typename Method::eviction;
};

template <class Kind, class Found, class... Methods>
struct policies_in {
  using type = Found;
};
template <class Kind, class Found, class First, class... Rest>
struct policies_in<Kind, Found, First, Rest...> {
  using policy = typename policy_in<Kind, First>::type;
  using type =
      typename policies_in<Kind,
                           typename std::conditional_t<std::is_void_v<policy>, std::type_identity<Found>,
                                                       joined<Found, policy>>::type,
                           Rest...>::type;
};

template <class List>
struct choice_of;
template <class Policy>
struct choice_of<list<Policy>> {
  using type = Policy;
};
template <class... Policies>
struct choice_of<list<Policies...>> {
  using type = any_of<Policies...>;
};

}  // namespace detail

/// The one policy of kind `Kind` that the methods have, or a choice among theirs and `More`.
template <class Kind, class Methods, class... More>
struct choice;
template <class Kind, class... Methods, class... More>
struct choice<Kind, methods::method_list<Methods...>, More...>
    : detail::choice_of<typename detail::policies_in<Kind, detail::list<More...>, Methods...>::type> {};

/// The pipeline of all methods of a list that retrieve: one type, so that it is compiled once.
template <class Shape, class Methods, class Backend>
using pipeline_of_methods = retrieval_pipeline<
    Shape, Backend, page_size<dynamic>, unit<dynamic>, typename choice<summary_kind, Methods>::type,
    typename choice<pooling_kind, Methods>::type, typename choice<selection_kind, Methods>::type,
    typename choice<pinning_kind, Methods>::type, typename choice<scope_kind, Methods>::type,
    typename choice<correction_kind, Methods>::type, typename choice<completion_kind, Methods>::type,
    typename choice<residency_kind, Methods>::type, typename choice<plan_kind, Methods, by_layer>::type,
    any_of<resident, in_place>, typename choice<codec_kind, Methods>::type>;

/// The pipeline of all methods of a list that forget.
template <class Shape, class Methods>
using evicting_pipeline_of_methods = evicting_pipeline<Shape, typename choice<eviction_kind, Methods>::type>;

template <class Methods>
struct kinds_of_methods;
template <class... Methods>
struct kinds_of_methods<methods::method_list<Methods...>> {
  static constexpr bool any_retrieves = (!forgets<Methods> || ...);
  static constexpr bool any_forgets = (forgets<Methods> || ...);
};

}  // namespace freekv::c_library
