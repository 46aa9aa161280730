// Layer plans: which layers retrieve, which keep everything, which see the sink and the window alone.
#pragma once

#include <concepts>
#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <string>
#include <string_view>

namespace freekv {

enum class layer_kind : std::uint8_t {
  retrieval,  ///< sink, window and selected pages
  complete,   ///< everything, kept in the fast tier
  window,     ///< sink and window alone
};

/// The first `Layers` layers are complete, the others of kind `Rest`; `complete_first<dynamic>{2}` at run time.
template <int Layers = 1, layer_kind Rest = layer_kind::retrieval>
struct complete_first {
  using policy_kind = plan_kind;
  static constexpr std::string_view name =
      Rest == layer_kind::window ? "complete_first_then_window" : "complete_first";
  count_of<Layers> layers{};
  std::string values() const { return std::to_string(int{layers}); }
  constexpr layer_kind kind(int layer) const { return layer < layers ? layer_kind::complete : Rest; }
};

/// All layers of one kind: `full` attention, or StreamingLLM's sink and window.
template <layer_kind Kind>
struct every_layer {
  using policy_kind = plan_kind;
  static constexpr std::string_view name =
      Kind == layer_kind::complete ? "all_complete"
                                   : (Kind == layer_kind::window ? "all_window" : "all_retrieval");
  constexpr layer_kind kind(int) const { return Kind; }
};

/// Says of each layer what it keeps.
template <class P>
concept plan_policy = policy<P> && std::same_as<typename P::policy_kind, plan_kind> && requires(const P p) {
  { P::name } -> std::convertible_to<std::string_view>;
  { p.kind(0) } -> std::same_as<layer_kind>;
};

static_assert(plan_policy<complete_first<>> && plan_policy<every_layer<layer_kind::window>>);

}  // namespace freekv
