// Scope of a selection: who shares it.
#pragma once

#include <concepts>
#include <cstdint>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <string_view>

namespace freekv {

enum class selection_scope : std::uint8_t { query_head, kv_head, layer };

/// The query heads of a KV head select together, with their pooled scores. (FreeKV section 3.2)
struct per_kv_head {
  using policy_kind = scope_kind;
  static constexpr std::string_view name = "per_kv_head";
  static constexpr selection_scope scope = selection_scope::kv_head;
};

/// Each query head selects k pages by its own scores and attends to no others. A KV head holds those of all
/// its query heads: at most group * k slots. The pooling pools the rows of a step alone. (Quest as published)
struct per_query_head {
  using policy_kind = scope_kind;
  static constexpr std::string_view name = "per_query_head";
  static constexpr selection_scope scope = selection_scope::query_head;
};

/// All retrieving KV heads of a layer select together: their pooled scores are pooled once more, each head's
/// as one row, by mean_softmax where the pooling is of softmaxes and by mean_score otherwise. A layer is
/// corrected as a whole as soon as one of its heads is flagged.
struct per_layer {
  using policy_kind = scope_kind;
  static constexpr std::string_view name = "per_layer";
  static constexpr selection_scope scope = selection_scope::layer;
};

/// A scope: says who shares one selection.
template <class R>
concept scope_policy = policy<R> && std::same_as<typename R::policy_kind, scope_kind> && requires {
  { R::name } -> std::convertible_to<std::string_view>;
  { R::scope } -> std::same_as<const selection_scope&>;
};

static_assert(scope_policy<per_kv_head> && scope_policy<per_query_head> && scope_policy<per_layer>);

struct scope_kind : kind_defaults {
  using default_policy = per_kv_head;
  template <class P>
  struct check {
    static_assert(scope_policy<P>, "a selection scope has a name and scope -> selection_scope");
  };
};

}  // namespace freekv
