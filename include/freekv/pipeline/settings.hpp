// Settings of a retrieval pipeline, checked before anything is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/model.hpp>
#include <freekv/pipeline/policy_pack.hpp>
#include <freekv/storage/file_store.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace freekv {

/// Room of a retrieval pipeline, and where its complete pages are.
struct capacity_settings {
  int max_tokens = 0;  ///< of one sequence
  int max_sequences = 1;
  int max_resident = 0;     ///< sequences that have slots at a time, the others being preempted; 0: all
  int max_decode_rows = 1;  ///< that a sequence brings to a step: more than 1 for speculative decoding
  /// tokens of all sequences together; 0: the whole pages of max_tokens for each of max_sequences
  std::int64_t store_tokens = 0;
  /// Tokens that resident sequences' selected slots have room for together, in each layer, at least as many
  /// as one sequence may select; 0: what all may. With less, those that sit a step out keep room for what
  /// they have selected (`top_p`) alone.
  std::int64_t selected_tokens = 0;
  /// Complete pages are kept in a file; none: in slow memory.
  std::optional<file_store_options> store_file{};

  /// Fills in defaults, but that of `store_tokens`, which needs the size of a page. Throws settings_error.
  [[gnu::cold]] void fill_in() {
    const auto text = [](int n) { return std::to_string(n); };
    if (max_tokens < 1)
      throw settings_error("max_tokens is " + text(max_tokens) + "; say how long a sequence may become");
    if (constexpr int most = (1 << 30); max_tokens > most)
      throw settings_error("max_tokens is " + text(max_tokens) + "; a sequence holds at most " + text(most));
    if (max_sequences < 1) throw settings_error("max_sequences is " + text(max_sequences) + "; at least 1");
    if (max_resident == 0) max_resident = max_sequences;
    if (max_resident < 1 || max_resident > max_sequences)
      throw settings_error("max_resident is " + text(max_resident) +
                           "; choose from 1 to max_sequences, which is " + text(max_sequences));
    if (constexpr int most = 1024; max_decode_rows < 1 || max_decode_rows > most)
      throw settings_error("max_decode_rows is " + text(max_decode_rows) + "; choose from 1 to " +
                           text(most));
  }
};

/// Settings of a pipeline with the policies of `Pack`. Policies that hold values (tau, a basis, a run-time
/// page size) are set here.
template <class Pack>
struct pipeline_settings {
  model_settings model{};
  freekv::budget budget{};
  std::vector<freekv::budget> budget_of_layer{};  ///< one for each layer; none: `budget` for all
  capacity_settings capacity{};
  attention_settings attention{};
  typename Pack::page page{};
  typename Pack::unit unit{};
  typename Pack::layouts layouts{};
  typename Pack::summary summary{};
  typename Pack::pooling pooling{};
  typename Pack::selection selection{};
  typename Pack::pinning pinning{};
  typename Pack::scope scope{};
  typename Pack::correction correction{};
  typename Pack::completion completion{};
  typename Pack::residency residency{};
  typename Pack::plan plan{};
  typename Pack::route route{};
  typename Pack::codec codec{};

  const freekv::budget& budget_at(int layer) const {
    return budget_of_layer.empty() ? budget : budget_of_layer[to_size(layer)];
  }
  int pages_for(std::int64_t tokens) const {
    return static_cast<int>((tokens + page.tokens - 1) / page.tokens);
  }
  int max_pages() const { return pages_for(capacity.max_tokens); }
  /// Tokens that are selected together.
  int unit_tokens() const { return unit.tokens == 0 ? int{page.tokens} : int{unit.tokens}; }
  int units_per_page() const { return page.tokens / unit_tokens(); }
  int max_units() const { return max_pages() * units_per_page(); }
  /// True where any head of a layer attends to everything.
  bool any_complete(int layer) const {
    bool any = false;
    for (int head = 0; head < model.kv_heads; ++head)
      any = any || head_kind(plan, layer, head) == layer_kind::complete;
    return any;
  }
  selection_scope selects_by() const {
    return resolve(scope, []<class Scope>(const Scope&) { return Scope::scope; });
  }
  bool completes() const {
    if constexpr (detail::may_complete<pipeline_settings>)
      return resolve(completion, []<class Completion>(const Completion&) { return Completion::completes; });
    else
      return false;
  }
  /// Units of a KV head that are selected whatever their scores.
  int pinned_units() const {
    return std::min(max_units(), resolve(pinning, [](const auto& chosen) -> int { return chosen.units; }));
  }
  /// Units that one KV head has selected at most.
  int max_selected(int layer) const {
    const int selecting = selects_by() == selection_scope::query_head ? model.group() : 1;
    const std::int64_t all = std::int64_t{budget_at(layer).selected_units} * selecting + pinned_units();
    return static_cast<int>(std::min(std::int64_t{max_units()}, all));
  }
  /// Most entries of the list of a head that attends to what it keeps, not to everything.
  int entries_within(int layer) const {
    const slot_roles slots = slots_for(budget_at(layer), page.tokens, 0, capacity.max_decode_rows);
    const int sliding = plan.kind(layer) == layer_kind::sliding ? pages_for(attention.sliding_window) + 1 : 0;
    return std::min(std::max(slots.sink + slots.ring, sliding), max_pages()) +
           (plan.kind(layer) == layer_kind::retrieval ? max_selected(layer) : 0);
  }
  int spare_slots() const {
    return resolve(residency, [](const auto& chosen) -> int { return chosen.spare; });
  }
  /// True where layers that are not complete keep their complete pages encoded, and open ones beside them.
  bool encodes() const {
    return capacity.store_file.has_value() ||
           !resolve(codec, []<class Codec>(const Codec&) { return std::is_same_v<Codec, identity>; });
  }
  /// Pages of a sequence that are kept as they are, where others are encoded: all that decode rows of a step
  /// touch.
  int open_pages() const { return 1 + (capacity.max_decode_rows - 1 + page.tokens - 1) / page.tokens; }
  int store_pages() const { return pages_for(capacity.store_tokens); }
};

namespace detail {

/// Throws settings_error where `policy`, in whose place is `other`, takes scores for estimates of log-masses
/// and they are none.
template <class Pack>
[[gnu::cold]] void check_estimates(const pipeline_settings<Pack>& s, const std::string& policy,
                                   const char* other) {
  const auto fail = [&](const std::string& sentence) { throw settings_error(policy + sentence); };
  resolve(s.summary, [&]<class Summary>(const Summary&) {
    if constexpr (!mass_estimating_summary<Summary>)
      fail(" needs estimates of what is not selected, and the scores of " + std::string(Summary::name) +
           " are none; choose key_codes or key_subspace");
  });
  if (s.attention.selection_scale != s.attention.scale)
    fail(" takes the scores of a selection for log-masses, and selection_scale is not scale; leave it out");
  if (s.attention.soft_cap != 0.0f)
    fail(std::string(" does not know what a soft cap makes of estimates; choose ") + other);
}

/// Throws settings_error where attention is to be completed and cannot be.
template <class Pack>
[[gnu::cold]] void check_completion(const pipeline_settings<Pack>& s) {
  if (!s.completes()) return;
  const std::string completion = resolve(s.completion, [](const auto& one) { return std::string(one.name); });
  check_estimates(s, completion, "no_completion");
  if (s.selects_by() == selection_scope::query_head)
    throw settings_error(completion +
                         " needs one selection of a KV head's query heads; choose per_kv_head or per_layer");
}

/// Throws settings_error where a correction is to judge shares of a KV head's attention, and these are not
/// known.
template <class Pack>
[[gnu::cold]] void check_shares(const pipeline_settings<Pack>& s, const std::string& correction) {
  const auto fail = [&](const char* sentence) { throw settings_error(correction + sentence); };
  check_estimates(s, correction, "mass_deficit");
  resolve(s.pooling, [&]<class Pooling>(const Pooling&) {
    if constexpr (query_pooling<Pooling>)
      fail(" needs scores of each query head, and a pooling of queries has none; choose mean_softmax");
  });
  if (s.selects_by() != selection_scope::kv_head)
    fail(" judges a KV head by its own attention; choose per_kv_head");
  if (s.pinned_units() > 0)
    fail(" has no share for units that are selected whatever their scores; choose no_pins");
  if (s.encodes() && !s.route.keeps_slots())
    fail(
        " reads sink and window before attention does, which in place decodes them twice; choose resident, "
        "or identity without a store file");
}

/// Throws settings_error where what is selected is to be a sample, each query head's own of each step, and
/// its probabilities would not be known.
template <class Pack>
[[gnu::cold]] void check_sampling(const pipeline_settings<Pack>& s) {
  resolve(s.selection, [&]<class Selection>(const Selection&) {
    if constexpr (sampling_selection<Selection>) {
      const auto fail = [&](const std::string& sentence) {
        throw settings_error(std::string(Selection::name) + sentence);
      };
      resolve(s.summary, [&]<class Summary>(const Summary&) {
        if constexpr (!hooks_of<Summary>::has(hook::weighs))
          fail(" needs to know how probable what it samples was, and " + std::string(Summary::name) +
               " does not; choose key_signatures");
      });
      if (s.unit_tokens() != 1)
        fail(" samples single tokens, and a unit has " + std::to_string(s.unit_tokens()) +
             "; choose units of 1");
      if (s.selects_by() != selection_scope::query_head)
        fail(" weighs a token by each query head's own probability; choose per_query_head");
      resolve(s.pooling, [&]<class Pooling>(const Pooling&) {
        if constexpr (softmax_pooling<Pooling>)
          fail(" counts collisions, of which " + std::string(Pooling::name) +
               " makes shares; choose max_score");
      });
      resolve(s.correction, [&]<class Correction>(const Correction&) {
        if constexpr (!std::is_same_v<Correction, always>)
          fail(" weighs by the query that has sampled, and with " + std::string(Correction::name) +
               " another one attends; choose always");
      });
      if (s.capacity.max_decode_rows != 1)
        fail(" samples for one decode row a step, and max_decode_rows is " +
             std::to_string(s.capacity.max_decode_rows) + "; leave it at 1");
      if (s.pinned_units() > 0)
        fail(" has no weight for units that are selected whatever their scores; choose no_pins");
    }
  });
}

}  // namespace detail

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
  s.model.validate();
  s.capacity.fill_in();
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
  if (!s.budget_of_layer.empty() && s.budget_of_layer.size() != to_size(s.model.layers))
    fail("budget_of_layer has " + text(s.budget_of_layer.size()) + " budgets for " + text(s.model.layers) +
         " layers; give one for each, or none");
  for (budget& b : s.budget_of_layer) check_budget(b);
  if (s.capacity.store_tokens == 0)
    s.capacity.store_tokens = std::int64_t{s.max_pages()} * p * s.capacity.max_sequences;
  if (s.capacity.store_tokens < 1) fail("store_tokens is " + text(s.capacity.store_tokens) + "; at least 1");
  if (s.capacity.store_tokens / p >= (std::int64_t{1} << 31) - 1)
    fail("store_tokens of " + text(s.capacity.store_tokens) + " are more than 2^31 pages of " + text(p) +
         " tokens");
  s.attention.fill_in(s.model, HeadDim);
  const policy_setting setting{s.model.layers, s.model.kv_heads, HeadDim, p, s.unit_tokens()};
  [[maybe_unused]] const auto validate = [&]<class P>(const P& policy) {
    if constexpr (hooks_of<P>::has(hook::validate)) P::policy_kind::validate(policy, setting);
  };
  if constexpr (detail::validates<typename Pack::summary>) resolve(s.summary, validate);
  if constexpr (detail::validates<typename Pack::selection>) resolve(s.selection, validate);
  if constexpr (detail::validates<typename Pack::pinning>) resolve(s.pinning, validate);
  if constexpr (detail::validates<typename Pack::correction>) resolve(s.correction, validate);
  if constexpr (detail::validates<typename Pack::completion>) resolve(s.completion, validate);
  if constexpr (detail::validates<typename Pack::residency>) resolve(s.residency, validate);
  if constexpr (detail::validates<typename Pack::plan>) resolve(s.plan, validate);
  if constexpr (detail::validates<typename Pack::codec>) resolve(s.codec, validate);
  if (s.selects_by() == selection_scope::layer && s.pinned_units() > 0)
    fail(
        "per_layer gives all KV heads one list, and each pins units of its own; choose no_pins, or "
        "per_kv_head or per_query_head");
  resolve(s.selection, [&]<class Selection>(const Selection& selection) {
    if constexpr (requires { selection.temperatures; })
      if (selection.temperatures.data != nullptr && s.selects_by() == selection_scope::layer)
        fail(
            "per_layer gives all KV heads one selection, and temperatures are of each; choose per_kv_head or "
            "per_query_head, or no temperatures");
  });
  resolve(s.correction, [&]<class Correction>(const Correction&) {
    if constexpr (correction_by_mass<Correction>)
      if (s.selects_by() == selection_scope::query_head)
        fail("per_query_head has no selection of a KV head's own for " + std::string(Correction::name) +
             " to judge; choose cosine_drift, or per_kv_head or per_layer");
    if constexpr (hooks_of<Correction>::has(hook::of_attention))
      detail::check_shares(s, std::string(Correction::name));
    if constexpr (correction_by_sample<Correction>)
      if (s.capacity.store_file)
        fail(std::string(Correction::name) +
             " reads keys of the store in every step before it attends, and would wait for the file each "
             "time; "
             "leave store_file out, or choose missing_share");
  });
  if constexpr (detail::may_complete<pipeline_settings<Pack>>) detail::check_completion(s);
  if constexpr (detail::may_sample<pipeline_settings<Pack>>) detail::check_sampling(s);
  for (int layer = 0; layer < s.model.layers && s.attention.sliding_window < 1; ++layer)
    if (s.plan.kind(layer) == layer_kind::sliding)
      fail("layer " + text(layer) + " has a sliding window and sliding_window is " +
           text(s.attention.sliding_window) + "; say how many tokens it has");
  if (s.capacity.selected_tokens < 0)
    fail("selected_tokens is " + text(s.capacity.selected_tokens) + "; give 0 or more");
  for (int layer = 0; layer < s.model.layers && s.capacity.selected_tokens > 0; ++layer)
    if (const int slots = s.route.keeps_slots() && s.plan.kind(layer) == layer_kind::retrieval
                              ? s.max_selected(layer) + s.spare_slots()
                              : 0;
        s.capacity.selected_tokens < std::int64_t{slots} * s.unit_tokens())
      fail("selected_tokens is " + text(s.capacity.selected_tokens) + ", and a sequence has " + text(slots) +
           " selected slots of " + text(s.unit_tokens()) + " tokens in layer " + text(layer) + "; give " +
           text(std::int64_t{slots} * s.unit_tokens()) + " or more, or 0");
  return s;
}

/// Bytes in which a store keeps one KV head's keys and values of a page: as the codec leaves them, in a file
/// aligned.
template <class Element, int head_dim, class Settings>
std::size_t stored_slice_bytes(const Settings& s) {
  const std::size_t bytes = resolve(s.codec, [&](const auto& codec) {
    return codec.bytes(kv_extent{s.page.tokens, head_dim}, sizeof(Element));
  });
  return s.capacity.store_file ? s.capacity.store_file->aligned(bytes) : bytes;
}

}  // namespace freekv
