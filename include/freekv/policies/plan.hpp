// Plans: which layers, and which of their KV heads, retrieve, which keep everything, which see the sink and
// the window alone, and which layers the model itself restricts to a sliding window.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace freekv {

enum class layer_kind : std::uint8_t {
  retrieval,  ///< sink, window and selected pages
  complete,   ///< everything, kept in the fast tier
  window,     ///< sink and window alone
  sliding,  ///< the last `sliding_window` tokens, as the model was trained (Gemma, gpt-oss); of whole layers
            ///< only
};

/// The first `Layers` layers are complete, the others of kind `Rest`; `complete_first<dynamic>{2}` at run
/// time.
template <int Layers = 1, layer_kind Rest = layer_kind::retrieval>
struct complete_first {
  using policy_kind = plan_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = Rest == layer_kind::window    ? "complete_first_then_window"
                                           : Rest == layer_kind::sliding ? "complete_first_then_sliding"
                                                                         : "complete_first";
  count_of<Layers> layers{};
  std::string values() const { return std::to_string(int{layers}); }
  void validate(int, int) const {
    if (layers < 0)
      throw settings_error("complete_first has " + std::to_string(int{layers}) + " layers; 0 or more");
  }
  constexpr layer_kind kind(int layer) const { return layer < layers ? layer_kind::complete : Rest; }
};

/// All layers of one kind, such as `full` attention, or StreamingLLM's sink and window.
template <layer_kind Kind>
struct every_layer {
  using policy_kind = plan_kind;
  static constexpr std::string_view name = Kind == layer_kind::complete  ? "all_complete"
                                           : Kind == layer_kind::window  ? "all_window"
                                           : Kind == layer_kind::sliding ? "all_sliding"
                                                                         : "all_retrieval";
  constexpr layer_kind kind(int) const { return Kind; }
};

/// A kind for each layer, as a model's configuration lists them.
struct by_layer {
  using policy_kind = plan_kind;
  using hooks = hook_list<hook::validate>;
  static constexpr std::string_view name = "by_layer";
  std::vector<layer_kind> kinds{};  ///< (layers)

  layer_kind kind(int layer) const { return kinds[to_size(layer)]; }
  void validate(int layers, int) const {
    if (kinds.size() != to_size(layers))
      throw settings_error("by_layer has kinds for " + std::to_string(kinds.size()) + " layers of " +
                           std::to_string(layers));
  }
};

/// A kind for each KV head of each layer: (layers, kv_heads). RazorAttention and DuoAttention keep everything
/// for some heads and give the others sink and window.
struct by_head {
  using policy_kind = plan_kind;
  using hooks = hook_list<hook::kind_of_head, hook::validate>;
  static constexpr std::string_view name = "by_head";
  std::vector<layer_kind> kinds{};
  int kv_heads = 1;

  layer_kind kind(int layer, int head) const {
    return kinds[to_size(layer) * to_size(kv_heads) + to_size(head)];
  }
  /// Kind of all heads of a layer if they are alike; else retrieval if any of them retrieves, and window if
  /// none does.
  layer_kind kind(int layer) const {
    const auto first = kinds.begin() + static_cast<std::ptrdiff_t>(layer) * kv_heads, last = first + kv_heads;
    if (std::all_of(first, last, [&](layer_kind k) { return k == *first; })) return *first;
    return std::find(first, last, layer_kind::retrieval) != last ? layer_kind::retrieval : layer_kind::window;
  }
  void validate(int layers, int heads) const {
    if (heads != kv_heads || kinds.size() != to_size(layers) * to_size(heads))
      throw settings_error("by_head has kinds for " + std::to_string(kinds.size()) + " heads, " +
                           std::to_string(kv_heads) + " a layer; needed are " + std::to_string(layers) +
                           " layers of " + std::to_string(heads));
    if (std::find(kinds.begin(), kinds.end(), layer_kind::sliding) != kinds.end())
      throw settings_error("by_head has a sliding head; a sliding window is a whole layer's: see by_layer");
  }
};

/// Kind of a KV head: what `plan` has it keep.
template <class Plan>
layer_kind head_kind(const Plan& plan, int layer, int head) {
  if constexpr (requires { plan.kind(layer, head); })
    return plan.kind(layer, head);
  else
    return plan.kind(layer);
}

/// Says of each layer what it keeps; optionally, `kind(layer, head)` of each KV head.
template <class P>
concept plan_policy = policy<P> && std::same_as<typename P::policy_kind, plan_kind> && requires(const P p) {
  { P::name } -> std::convertible_to<std::string_view>;
  { p.kind(0) } -> std::same_as<layer_kind>;
};

static_assert(plan_policy<complete_first<>> && plan_policy<every_layer<layer_kind::window>> &&
              plan_policy<by_layer> && plan_policy<by_head>);

/// Optional: `kind(layer, head)`, `validate(layers, kv_heads)`, `values()`.
struct plan_kind : kind_defaults {
  using default_policy = complete_first<>;
  template <class P>
  struct check {
    static_assert(plan_policy<P>, "a layer plan has a name and kind(layer) -> layer_kind");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    switch (h) {
      case hook::kind_of_head:
        return requires(const P p) {
          { p.kind(0, 0) } -> std::same_as<layer_kind>;
        };
      case hook::validate:
        return requires(const P p) { p.validate(1, 1); };
      default:
        return kind_defaults::offers<P>(h);
    }
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const policy_setting& setting) {
    policy.validate(setting.layers, setting.kv_heads);
  }
};

}  // namespace freekv
