// The policies of a pipeline: one of each kind, defaulted, named in any order.
#pragma once

#include <freekv/backend/host/host_backend.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/box_summaries.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/policies/integer_codecs.hpp>
#include <freekv/policies/key_codes.hpp>
#include <freekv/policies/key_sketch.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/policies/low_rank_keys.hpp>
#include <freekv/policies/mean_summaries.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/policies/pooling.hpp>
#include <freekv/policies/residency.hpp>
#include <freekv/policies/route.hpp>
#include <freekv/policies/scope.hpp>
#include <freekv/policies/selection.hpp>
#include <freekv/policies/stored_as.hpp>
#include <freekv/storage/layout.hpp>
#include <string>
#include <type_traits>

namespace freekv {

namespace detail {

// Whether a policy, or each alternative of an any_of, meets the concept of its kind.
template <class P>
inline constexpr bool is_layouts = layout_policy<P>;
template <class... P>
inline constexpr bool is_layouts<any_of<P...>> = (layout_policy<P> && ...);
template <class P>
inline constexpr bool is_summary = summary_policy<P>;
template <class... P>
inline constexpr bool is_summary<any_of<P...>> = (summary_policy<P> && ...);
template <class P>
inline constexpr bool is_pooling = pooling_policy<P>;
template <class... P>
inline constexpr bool is_pooling<any_of<P...>> = (pooling_policy<P> && ...);
template <class P>
inline constexpr bool is_selection = selection_policy<P>;
template <class... P>
inline constexpr bool is_selection<any_of<P...>> = (selection_policy<P> && ...);
template <class P>
inline constexpr bool is_pinning = pinning_policy<P>;
template <class... P>
inline constexpr bool is_pinning<any_of<P...>> = (pinning_policy<P> && ...);
template <class P>
inline constexpr bool is_scope = scope_policy<P>;
template <class... P>
inline constexpr bool is_scope<any_of<P...>> = (scope_policy<P> && ...);
template <class P>
inline constexpr bool is_correction = correction_policy<P>;
template <class... P>
inline constexpr bool is_correction<any_of<P...>> = (correction_policy<P> && ...);
template <class P>
inline constexpr bool is_residency = residency_policy<P>;
template <class... P>
inline constexpr bool is_residency<any_of<P...>> = (residency_policy<P> && ...);
template <class P>
inline constexpr bool is_plan = plan_policy<P>;
template <class... P>
inline constexpr bool is_plan<any_of<P...>> = (plan_policy<P> && ...);
template <class P>
inline constexpr bool is_route = route_policy<P>;
template <class... P>
inline constexpr bool is_route<any_of<P...>> = (route_policy<P> && ...);
template <class P>
inline constexpr bool is_codec = codec_policy<P>;
template <class... P>
inline constexpr bool is_codec<any_of<P...>> = (codec_policy<P> && ...);

}  // namespace detail

/// One policy of each kind. `policy_pack_of` makes it from any list.
template <class Page, class Unit, class Layouts, class Summary, class Pooling, class Selection, class Pinning,
          class Scope, class Correction, class Residency, class Plan, class Route, class Codec, class Backend>
struct policy_pack {
  using page = Page;
  using unit = Unit;
  using layouts = Layouts;
  using summary = Summary;
  using pooling = Pooling;
  using selection = Selection;
  using pinning = Pinning;
  using scope = Scope;
  using correction = Correction;
  using residency = Residency;
  using plan = Plan;
  using route = Route;
  using codec = Codec;
  using backend = Backend;

  static_assert(page_size_policy<Page>,
                "a page size has tokens -> int; for a choice at run time take page_size<dynamic>");
  static_assert(unit_policy<Unit>, "a unit has tokens -> int; for a choice at run time take unit<dynamic>");
  static_assert(
      detail::is_layouts<Layouts>,
      "a layout pair has types fast and slow, each an mdspan layout of (page, plane, token, head, dim) "
      "with a name, without gaps and with dim innermost");
  static_assert(detail::is_summary<Summary>,
                "a summary policy has a name, width(page), summarise(team, keys, numbers) and "
                "score(team, query, numbers) -> float, itself or what its at(layer, head) returns");
  static_assert(
      detail::is_pooling<Pooling>,
      "a pooling policy has a name and either uses_log_sums and pool(team, row, j) -> pack of pooled "
      "scores, or pool_query(team, query, pooled) for a group_query");
  static_assert(
      detail::is_selection<Selection>,
      "a selection policy has a name and count(candidates, k) -> int, how many of the best are selected");
  static_assert(detail::is_pinning<Pinning>,
                "a pinning policy has a name, units -> int and worth(team, keys, scratch) -> float");
  static_assert(detail::is_scope<Scope>, "a selection scope has a name and scope -> selection_scope");
  static_assert(detail::is_correction<Correction>,
                "a correction policy has a name and either at(layer).flags(team, query_change) -> bool, or "
                "at(layer).flags(selection_masses) -> bool and at(layer).exchanges_pages() -> bool");
  static_assert(detail::is_residency<Residency>,
                "a residency policy has a name, spare -> int and frees_before(unselected_slot, "
                "unselected_slot) -> bool");
  static_assert(detail::is_plan<Plan>, "a layer plan has a name and kind(layer) -> layer_kind");
  static_assert(detail::is_route<Route>, "a route has a name and keeps_slots() -> bool");
  static_assert(detail::is_codec<Codec>,
                "a codec has a name, bytes(page, element_bytes) -> std::size_t, encode<head_dim>(team, "
                "slice, tokens, bytes) and decode<head_dim>(team, bytes, tokens, rows, slice)");

  template <class P>
  struct exchange {
    template <class Kind, class Old>
    using either = std::conditional_t<std::is_same_v<typename P::policy_kind, Kind>, P, Old>;
    using type =
        policy_pack<either<page_size_kind, Page>, either<unit_kind, Unit>, either<layout_kind, Layouts>,
                    either<summary_kind, Summary>, either<pooling_kind, Pooling>,
                    either<selection_kind, Selection>, either<pinning_kind, Pinning>,
                    either<scope_kind, Scope>, either<correction_kind, Correction>,
                    either<residency_kind, Residency>, either<plan_kind, Plan>, either<route_kind, Route>,
                    either<codec_kind, Codec>, either<backend_kind, Backend>>;
  };
  template <policy P>
  using with = typename exchange<P>::type;
};

namespace detail {

template <class P>
inline constexpr bool known_kind =
    is_of_kind<page_size_kind, P> || is_of_kind<unit_kind, P> || is_of_kind<layout_kind, P> ||
    is_of_kind<summary_kind, P> || is_of_kind<pooling_kind, P> || is_of_kind<selection_kind, P> ||
    is_of_kind<pinning_kind, P> || is_of_kind<scope_kind, P> || is_of_kind<correction_kind, P> ||
    is_of_kind<residency_kind, P> || is_of_kind<plan_kind, P> || is_of_kind<route_kind, P> ||
    is_of_kind<codec_kind, P> || is_of_kind<backend_kind, P>;

template <policy... P>
struct make_policy_pack {
  static_assert((known_kind<P> && ...),
                "a policy's policy_kind is one of the kinds in freekv/core/policy.hpp");
  static_assert(count_of_kind<page_size_kind, P...> <= 1 && count_of_kind<unit_kind, P...> <= 1 &&
                    count_of_kind<layout_kind, P...> <= 1 && count_of_kind<summary_kind, P...> <= 1 &&
                    count_of_kind<pooling_kind, P...> <= 1 && count_of_kind<selection_kind, P...> <= 1 &&
                    count_of_kind<pinning_kind, P...> <= 1 && count_of_kind<scope_kind, P...> <= 1 &&
                    count_of_kind<correction_kind, P...> <= 1 && count_of_kind<residency_kind, P...> <= 1 &&
                    count_of_kind<plan_kind, P...> <= 1 && count_of_kind<route_kind, P...> <= 1 &&
                    count_of_kind<codec_kind, P...> <= 1 && count_of_kind<backend_kind, P...> <= 1,
                "a pipeline takes at most one policy of each kind");
  using type = policy_pack<
      policy_of_kind<page_size_kind, page_size<32>, P...>, policy_of_kind<unit_kind, unit<>, P...>,
      policy_of_kind<layout_kind, layout_pair<>, P...>, policy_of_kind<summary_kind, min_max, P...>,
      policy_of_kind<pooling_kind, mean_softmax, P...>, policy_of_kind<selection_kind, top_k, P...>,
      policy_of_kind<pinning_kind, no_pins, P...>, policy_of_kind<scope_kind, per_kv_head, P...>,
      policy_of_kind<correction_kind, cosine_drift, P...>,
      policy_of_kind<residency_kind, first_unselected<>, P...>,
      policy_of_kind<plan_kind, complete_first<1>, P...>, policy_of_kind<route_kind, resident, P...>,
      policy_of_kind<codec_kind, identity, P...>, policy_of_kind<backend_kind, host_backend, P...>>;
};

}  // namespace detail

/// The pack of a list of policies in any order. Kinds left out: page_size<32>, unit<>, layout_pair<nhd, hnd>,
/// min_max, mean_softmax, top_k, no_pins, per_kv_head, cosine_drift, first_unselected<>, complete_first<1>,
/// resident, identity, host_backend: FreeKV as published.
template <policy... Policies>
using policy_pack_of = typename detail::make_policy_pack<Policies...>::type;

}  // namespace freekv
