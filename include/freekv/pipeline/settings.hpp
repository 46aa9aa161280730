// Settings of a pipeline, checked before anything is allocated.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/pipeline/policy_pack.hpp>
#include <freekv/storage/file_store.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace freekv {

/// Base of the log-sum-exp that attention returns.
enum class log_base : std::uint8_t {
  e,
  two,  ///< as FlashInfer has it
};
constexpr float nat_in(log_base base) { return base == log_base::two ? 1.44269504088896341f : 1.0f; }

/// Settings of a pipeline with the policies of `Pack`. Policies that hold values (tau, a basis, a run-time
/// page size) are set here.
template <class Pack>
struct pipeline_settings {
  int layers = 1;
  int query_heads = 0;
  int kv_heads = 0;
  freekv::budget budget{};
  std::vector<freekv::budget> budget_of_layer{};  ///< one for each layer; none: `budget` for all
  int max_tokens = 0;                             ///< of one sequence
  int max_sequences = 1;
  int max_resident = 0;           ///< sequences that have slots at a time, the others being preempted; 0: all
  int max_decode_rows = 1;        ///< that a sequence brings to a step: more than 1 for speculative decoding
  std::int64_t store_tokens = 0;  ///< of all sequences together; 0: max_tokens for each of max_sequences
  std::int64_t selected_tokens =
      0;  ///< that resident sequences' selected slots have room for together, in each layer,
          ///< at least as many as one sequence may select; 0: what all may. With less, those
          ///< that sit a step out keep room for what they have selected (`top_p`) alone
  std::optional<file_store_options>
      store_file{};        ///< complete pages are kept in a file; none: in slow memory
  float scale = 0.0f;      ///< of scores and attention; 0: 1 / sqrt(head_dim)
  int sliding_window = 0;  ///< tokens, a row's own included, that it attends to in layers of kind `sliding`
  float soft_cap = 0.0f;   ///< attention's scores become soft_cap * tanh(score / soft_cap); 0: none
  std::vector<float> sink_logits{};  ///< (layers, query_heads): of a further token without a value, whose
                                     ///< weight the log-sum-exp counts; none: no such token
  log_base lse_base = log_base::e;
  typename Pack::page page{};
  typename Pack::unit unit{};
  typename Pack::layouts layouts{};
  typename Pack::summary summary{};
  typename Pack::pooling pooling{};
  typename Pack::selection selection{};
  typename Pack::pinning pinning{};
  typename Pack::scope scope{};
  typename Pack::correction correction{};
  typename Pack::residency residency{};
  typename Pack::plan plan{};
  typename Pack::route route{};
  typename Pack::codec codec{};

  const freekv::budget& budget_at(int layer) const {
    return budget_of_layer.empty() ? budget : budget_of_layer[static_cast<std::size_t>(layer)];
  }
  int pages_for(std::int64_t tokens) const {
    return static_cast<int>((tokens + page.tokens - 1) / page.tokens);
  }
  int max_pages() const { return pages_for(max_tokens); }
  /// Tokens that are selected together.
  int unit_tokens() const { return unit.tokens == 0 ? int{page.tokens} : int{unit.tokens}; }
  int units_per_page() const { return page.tokens / unit_tokens(); }
  int max_units() const { return max_pages() * units_per_page(); }
  /// Whether any head of a layer attends to everything.
  bool any_complete(int layer) const {
    bool any = false;
    for (int head = 0; head < kv_heads; ++head)
      any = any || head_kind(plan, layer, head) == layer_kind::complete;
    return any;
  }
  selection_scope selects_by() const {
    return resolve(scope, []<class Scope>(const Scope&) { return Scope::scope; });
  }
  /// Units of a KV head that are selected whatever their scores.
  int pinned_units() const {
    return std::min(max_units(), resolve(pinning, [](const auto& chosen) -> int { return chosen.units; }));
  }
  /// Units that one KV head has selected at most.
  int max_selected(int layer) const {
    const int selecting = selects_by() == selection_scope::query_head ? query_heads / kv_heads : 1;
    const std::int64_t all = std::int64_t{budget_at(layer).selected_units} * selecting + pinned_units();
    return static_cast<int>(std::min(std::int64_t{max_units()}, all));
  }
  /// Entries that the list of a head has at most which attends to what it keeps.
  int entries_within(int layer) const {
    const slot_roles slots = slots_for(budget_at(layer), page.tokens, 0, max_decode_rows);
    const int sliding = plan.kind(layer) == layer_kind::sliding ? pages_for(sliding_window) + 1 : 0;
    return std::min(std::max(slots.sink + slots.ring, sliding), max_pages()) + max_selected(layer);
  }
  int spare_slots() const {
    return resolve(residency, [](const auto& chosen) -> int { return chosen.spare; });
  }
  /// Whether layers that are not complete keep their complete pages encoded, and open ones beside them.
  bool encodes() const {
    return store_file.has_value() ||
           !resolve(codec, []<class Codec>(const Codec&) { return std::is_same_v<Codec, identity>; });
  }
  /// Pages of a sequence that are kept as they are, where others are encoded: all that decode rows of a step touch.
  int open_pages() const { return 1 + (max_decode_rows - 1 + page.tokens - 1) / page.tokens; }
  int store_pages() const { return pages_for(store_tokens); }
};

/// The settings with defaults filled in. Throws settings_error.
template <int HeadDim, class Pack>
[[gnu::cold]] pipeline_settings<Pack> checked_settings(pipeline_settings<Pack> s) {
  const auto fail = [](const std::string& sentence) { throw settings_error(sentence); };
  const auto text = [](auto n) { return std::to_string(n); };
  const int p = s.page.tokens;
  if (p < 8 || p > 256 || p % 8 != 0) fail("page size " + text(p) + " is not a multiple of 8 from 8 to 256");
  if (const int u = s.unit.tokens; u < 0 || p % std::max(u, 1) != 0)
    fail("a unit of " + text(u) + " tokens does not divide a page of " + text(p) +
         "; choose a divisor such as 1 or 8, or 0 for whole pages");
  if (s.layers < 1) fail("layers is " + text(s.layers) + "; a pipeline has at least 1");
  if (s.kv_heads < 1) fail("kv_heads is " + text(s.kv_heads) + "; a layer has at least 1");
  if (s.query_heads < s.kv_heads || s.query_heads % s.kv_heads != 0)
    fail("query_heads " + text(s.query_heads) + " is not a multiple of kv_heads " + text(s.kv_heads));
  if (s.max_tokens < 1) fail("max_tokens is " + text(s.max_tokens) + "; say how long a sequence may become");
  if (constexpr int most = (1 << 30); s.max_tokens > most)
    fail("max_tokens is " + text(s.max_tokens) + "; a sequence holds at most " + text(most));
  if (s.max_sequences < 1) fail("max_sequences is " + text(s.max_sequences) + "; at least 1");
  if (s.max_resident == 0) s.max_resident = s.max_sequences;
  if (s.max_resident < 1 || s.max_resident > s.max_sequences)
    fail("max_resident is " + text(s.max_resident) + "; choose from 1 to max_sequences, which is " +
         text(s.max_sequences));
  if (constexpr int most = 1024; s.max_decode_rows < 1 || s.max_decode_rows > most)
    fail("max_decode_rows is " + text(s.max_decode_rows) + "; choose from 1 to " + text(most));
  const auto check_budget = [&](budget& b) {
    if (b.sink < 0 || b.sink % p != 0)
      fail("sink of " + text(b.sink) + " tokens is not a multiple of the page size " + text(p));
    if (b.window < p || b.window % p != 0)
      fail("window of " + text(b.window) + " tokens is not a positive multiple of the page size " + text(p));
    if (b.selected_units < 1) fail("selected_units is " + text(b.selected_units) + "; select at least 1");
    // A budget beyond what a sequence can hold needs no more slots than that.
    b.sink = std::min(b.sink, s.max_pages() * p);
    b.window = std::min(b.window, s.max_pages() * p);
    b.selected_units = std::min(b.selected_units, s.max_units());
  };
  check_budget(s.budget);
  if (!s.budget_of_layer.empty() && s.budget_of_layer.size() != static_cast<std::size_t>(s.layers))
    fail("budget_of_layer has " + text(s.budget_of_layer.size()) + " budgets for " + text(s.layers) +
         " layers; give one for each, or none");
  for (budget& b : s.budget_of_layer) check_budget(b);
  if (s.store_tokens == 0) s.store_tokens = std::int64_t{s.max_pages()} * p * s.max_sequences;
  if (s.store_tokens < 1) fail("store_tokens is " + text(s.store_tokens) + "; at least 1");
  if (s.store_tokens / p >= (std::int64_t{1} << 31) - 1)
    fail("store_tokens of " + text(s.store_tokens) + " are more than 2^31 pages of " + text(p) + " tokens");
  if (s.scale == 0.0f) s.scale = 1.0f / std::sqrt(static_cast<float>(HeadDim));
  if (!std::isfinite(s.scale)) fail("scale is not finite");
  if (!(s.soft_cap >= 0.0f && std::isfinite(s.soft_cap)))
    fail("soft_cap is " + text(s.soft_cap) + "; choose a positive number, or 0 for none");
  if (const std::size_t heads = static_cast<std::size_t>(s.layers) * static_cast<std::size_t>(s.query_heads);
      !s.sink_logits.empty() && s.sink_logits.size() != heads)
    fail("sink_logits has " + text(s.sink_logits.size()) + " numbers; needed are " + text(heads) +
         ", one for each query head of each layer, or none");
  if (std::any_of(s.sink_logits.begin(), s.sink_logits.end(),
                  [](float logit) { return !(logit < HUGE_VALF); }))
    fail("a sink logit is NaN or infinity; -infinity is a token of no weight");
  const policy_setting setting{s.layers, s.kv_heads, HeadDim, p, s.unit_tokens()};
  [[maybe_unused]] const auto validate = [&]<class P>(const P& policy) {
    if constexpr (hooks_of<P>::has(hook::validate)) P::policy_kind::validate(policy, setting);
  };
  if constexpr (detail::validates<typename Pack::summary>) resolve(s.summary, validate);
  if constexpr (detail::validates<typename Pack::selection>) resolve(s.selection, validate);
  if constexpr (detail::validates<typename Pack::pinning>) resolve(s.pinning, validate);
  if constexpr (detail::validates<typename Pack::correction>) resolve(s.correction, validate);
  if constexpr (detail::validates<typename Pack::residency>) resolve(s.residency, validate);
  if constexpr (detail::validates<typename Pack::plan>) resolve(s.plan, validate);
  if constexpr (detail::validates<typename Pack::codec>) resolve(s.codec, validate);
  if (s.selects_by() == selection_scope::layer && s.pinned_units() > 0)
    fail(
        "per_layer gives all KV heads one list, and each pins units of its own; choose no_pins, or "
        "per_kv_head or per_query_head");
  if (s.selects_by() == selection_scope::query_head &&
      resolve(s.correction, []<class C>(const C&) { return correction_by_mass<C>; }))
    fail(
        "per_query_head has no selection of a KV head's own for mass_deficit to judge; choose cosine_drift, "
        "or per_kv_head or per_layer");
  for (int layer = 0; layer < s.layers && s.sliding_window < 1; ++layer)
    if (s.plan.kind(layer) == layer_kind::sliding)
      fail("layer " + text(layer) + " has a sliding window and sliding_window is " + text(s.sliding_window) +
           "; say how many tokens it has");
  if (s.selected_tokens < 0) fail("selected_tokens is " + text(s.selected_tokens) + "; give 0 or more");
  for (int layer = 0; layer < s.layers && s.selected_tokens > 0; ++layer)
    if (const int slots = s.route.keeps_slots() && s.plan.kind(layer) == layer_kind::retrieval
                              ? s.max_selected(layer) + s.spare_slots()
                              : 0;
        s.selected_tokens < std::int64_t{slots} * s.unit_tokens())
      fail("selected_tokens is " + text(s.selected_tokens) + ", and a sequence has " + text(slots) +
           " selected slots of " + text(s.unit_tokens()) + " tokens in layer " + text(layer) + "; give " +
           text(std::int64_t{slots} * s.unit_tokens()) + " or more, or 0");
  return s;
}

/// Bytes in which a store keeps one KV head's keys and values of a page: as the codec leaves them, in a file aligned.
template <class Element, int head_dim, class Settings>
std::size_t stored_slice_bytes(const Settings& s) {
  const std::size_t bytes = resolve(s.codec, [&](const auto& codec) {
    return codec.bytes(page_geometry{s.page.tokens, head_dim}, sizeof(Element));
  });
  return s.store_file ? s.store_file->aligned(bytes) : bytes;
}

}  // namespace freekv
