// The policies of a pipeline: one of each kind, defaulted, named in any order.
#pragma once

#include <freekv/core/policy.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/box_summaries.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/completion.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/policies/integer_codecs.hpp>
#include <freekv/policies/key_channels.hpp>
#include <freekv/policies/key_clusters.hpp>
#include <freekv/policies/key_codes.hpp>
#include <freekv/policies/key_signatures.hpp>
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

struct backend_kind : kind_defaults {
  using default_policy = host_backend;
  template <class P>
  struct check {};
};

namespace detail {

template <class... P>
struct checked_policy<any_of<P...>> : checked_policy<P>... {};

/// True of a policy, or an any_of with an alternative, that has `validate`: where none has, nothing is
/// compiled to call it.
template <class P>
inline constexpr bool validates = hooks_of<P>::has(hook::validate);
template <class... P>
inline constexpr bool validates<any_of<P...>> = (validates<P> || ...);

}  // namespace detail

/// One policy of each kind, in the order of `pipeline_kinds`. `policy_pack_of` makes it from any list.
template <policy... Policies>
struct policy_pack : detail::checked_policy<Policies>... {
  template <class Kind>
  using of = policy_of_kind<Kind, void, Policies...>;
  using page = of<page_size_kind>;
  using unit = of<unit_kind>;
  using layouts = of<layout_kind>;
  using summary = of<summary_kind>;
  using pooling = of<pooling_kind>;
  using selection = of<selection_kind>;
  using pinning = of<pinning_kind>;
  using scope = of<scope_kind>;
  using correction = of<correction_kind>;
  using completion = of<completion_kind>;
  using residency = of<residency_kind>;
  using plan = of<plan_kind>;
  using route = of<route_kind>;
  using codec = of<codec_kind>;
  using backend = of<backend_kind>;

  template <policy P>
  using with =
      policy_pack<std::conditional_t<detail::is_of_kind<typename P::policy_kind, Policies>, P, Policies>...>;
};

/// A list of kinds.
template <class... Kinds>
struct kind_list {
  template <policy P>
  static constexpr bool has = (detail::is_of_kind<Kinds, P> || ...);
  template <policy... P>
  static constexpr bool one_each = ((count_of_kind<Kinds, P...> <= 1) && ...);
  template <policy... P>
  using pack = policy_pack<policy_of_kind<Kinds, typename Kinds::default_policy, P...>...>;
};
/// The kinds of policies that a retrieval pipeline has. A kind's header says what a policy of it has.
using pipeline_kinds = kind_list<page_size_kind, unit_kind, layout_kind, summary_kind, pooling_kind,
                                 selection_kind, pinning_kind, scope_kind, correction_kind, completion_kind,
                                 residency_kind, plan_kind, route_kind, codec_kind, backend_kind>;

namespace detail {

template <policy... P>
struct make_policy_pack {
  static_assert((pipeline_kinds::has<P> && ...),
                "a policy's policy_kind is one of the kinds in freekv/core/policy.hpp");
  static_assert(pipeline_kinds::one_each<P...>, "a pipeline takes at most one policy of each kind");
  using type = pipeline_kinds::pack<P...>;
};

}  // namespace detail

/// The pack of a list of policies in any order. Kinds left out have their `default_policy`: FreeKV as
/// published.
template <policy... Policies>
using policy_pack_of = typename detail::make_policy_pack<Policies...>::type;

}  // namespace freekv
