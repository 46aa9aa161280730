// Settings of an evicting pipeline, checked before anything is allocated.
#pragma once

#include <algorithm>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/pipeline/model.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/policies/plan.hpp>
#include <string>

namespace freekv {

/// Room of an evicting pipeline.
struct eviction_capacity_settings {
  int max_prompt = 0;     ///< tokens
  int max_generated = 0;  ///< decode rows of a sequence
  int max_sequences = 1;
  int max_prefills = 1;  ///< sequences whose prompts are staged at a time

  /// Throws settings_error.
  [[gnu::cold]] void validate() const {
    const auto text = [](int n) { return std::to_string(n); };
    constexpr int most = eviction_limits::most_tokens;
    if (max_prompt < 0 || max_generated < 0 || max_prompt > most || max_generated > most ||
        max_prompt + max_generated < 1)
      throw settings_error("max_prompt is " + text(max_prompt) + " and max_generated " + text(max_generated) +
                           "; say how long a sequence may become, at most " + text(most) + " tokens each");
    if (max_sequences < 1) throw settings_error("max_sequences is " + text(max_sequences) + "; at least 1");
    if (max_prefills < 1 || max_prefills > max_sequences)
      throw settings_error("max_prefills is " + text(max_prefills) +
                           "; choose from 1 to max_sequences, which is " + text(max_sequences));
  }
};

/// Settings of an evicting_pipeline.
template <class Eviction>
struct eviction_settings {
  model_settings model{};
  int budget = 512;  ///< tokens that a KV head keeps
  eviction_capacity_settings capacity{};
  attention_settings attention{};     ///< of which `scale` and `lse_base` alone may be set
  complete_first<dynamic> plan{{1}};  ///< so many leading layers forget nothing
  Eviction eviction{};

  int max_tokens() const { return capacity.max_prompt + capacity.max_generated; }
  /// Leading layers that forget nothing.
  int complete_layers() const { return std::min(int{plan.layers}, model.layers); }
  /// Limits that the policy of a layer and KV head is told; `layer` is the model's number.
  eviction_limits limits(int layer, int head = 0) const {
    return {budget,
            capacity.max_prompt,
            capacity.max_generated,
            layer - complete_layers(),
            model.layers - complete_layers(),
            head,
            model.kv_heads,
            model.query_heads};
  }
  /// A moment of a layer, of which nothing else is known.
  eviction_moment moment(int layer) const {
    return {.budget = budget, .layer = layer - complete_layers(), .layers = model.layers - complete_layers()};
  }
  /// Rows that a KV head of a layer ever holds, in whole units.
  template <class E>
  int rows_of_head(const E& policy, int layer, int head) const {
    const int unit = policy.unit_tokens(),
              most = std::min(policy.capacity(limits(layer, head)), max_tokens());
    return (most + unit - 1) / unit * unit;
  }
};

/// The settings with defaults filled in. Throws settings_error.
template <int HeadDim, class Eviction>
eviction_settings<Eviction> checked_settings(eviction_settings<Eviction> s) {
  const auto fail = [](const std::string& sentence) { throw settings_error(sentence); };
  const auto text = [](auto n) { return std::to_string(n); };
  s.model.validate();
  s.capacity.validate();
  if (s.budget < 1 || s.budget > eviction_limits::most_tokens)
    fail("budget is " + text(s.budget) + " tokens; keep 1 to " + text(eviction_limits::most_tokens));
  s.plan.validate(s.model.layers, s.model.kv_heads);
  resolve(s.eviction, [&]<class E>(const E& eviction) {
    if constexpr (observes<E>)
      if (eviction.unit_tokens() != 1 || eviction.observed_rows() < 1 ||
          eviction.observed_rows() == every_prompt_row)
        fail(std::string(E::name) + " observes " + text(eviction.observed_rows()) +
             " rows' attention to units of " + text(eviction.unit_tokens()) +
             " tokens; observe some of the rows, and units of 1");
    if constexpr (cuts_blocks<E>) {
      if (eviction.stages_prompt())
        fail(std::string(E::name) + " cuts prompts block by block and stages them; stage none");
      for (int layer = s.complete_layers(); layer < s.model.layers; ++layer)
        if (const int block = eviction.block(s.limits(layer));
            block < 1 || block > eviction_limits::most_tokens)
          fail(std::string(E::name)  // by append: GCC 12 takes + of these for a fault
                   .append(" cuts prompts by blocks of ")
                   .append(text(block))
                   .append(" tokens; give blocks of 1 to ")
                   .append(text(eviction_limits::most_tokens)));
    }
    if constexpr (demotes<E>)
      if (eviction.unit_tokens() != 1 || !eviction.stages_prompt())
        fail(std::string(E::name) + " codes units of " + text(eviction.unit_tokens()) +
             " tokens of a prompt that is " + (eviction.stages_prompt() ? "" : "not ") +
             "staged; code units of 1, and stage prompts");
    if constexpr (detail::votes_for_layer<E>)
      if (eviction.group() != group_rule::each || !eviction.stages_prompt() || eviction.observes_decoding())
        fail(std::string(E::name) +
             " lets query heads choose for their layer, from prompts that are staged; observe each query "
             "head, stage prompts, and observe no decode rows");
    if constexpr (rates<E>)
      if (eviction.group() != group_rule::each)
        fail(std::string(E::name) +
             " rates layers by shares and observes the largest scores of the group; observe each query head");
    if constexpr (merges<E>) {
      if (eviction.unit_tokens() != 1)
        fail(std::string(E::name) + " merges units of " + text(eviction.unit_tokens()) +
             " tokens; merge units of 1");
      if (eviction.merge_by() == merge_rule::by_shares && !observes<E>)
        fail(std::string(E::name) +
             " merges by the shares of rows that it observes and observes none; list hook::observe");
      const bool keeps_last = eviction.observed_rows() > 0 && eviction.observed_rows() != every_prompt_row;
      if (eviction.merge_by() == merge_rule::as_last_row && !keeps_last)
        fail(std::string(E::name) +
             " merges by the last row's attention and observes no row or all of a prompt; observe some of "
             "the rows, whose queries are then kept");
    }
    bool queries_of_sequence = cuts_blocks<E>;  // else a staging has those of a prompt's rows
    if constexpr (observes<E>) queries_of_sequence = queries_of_sequence || eviction.observes_decoding();
    if (!eviction.stages_prompt() && eviction.observed_rows() != 0 && !queries_of_sequence)
      fail(std::string(E::name) +
           " observes rows of prompts and does not stage them; stage prompts, or observe no row");
    if constexpr (hooks_of<E>::has(hook::validate))
      eviction_kind::validate(eviction, s.limits(s.complete_layers()));
    if constexpr (detail::votes_for_layer<E>)
      for (int layer = s.complete_layers(); layer < s.model.layers; ++layer)
        if (detail::voters_of(eviction, s.moment(layer), s.model.query_heads) == 0)
          fail(std::string(E::name) + ": none of the " + text(s.model.query_heads) +
               " query heads of layer " + text(layer) +
               " votes; list one or more of each layer that forgets");
  });
  const attention_settings& asked = s.attention;
  const bool selects_otherwise = asked.selection_scale != 0.0f && asked.selection_scale != asked.scale;
  if (asked.sliding_window != 0 || asked.soft_cap != 0.0f || selects_otherwise || !asked.sink_logits.empty())
    fail(
        "an evicting pipeline selects nothing and attends without a sliding window, a soft cap and sink "
        "logits; leave out selection_scale and these, or take a retrieval_pipeline");
  s.attention.fill_in(s.model, HeadDim);
  if (!s.attention.key_scales.empty() || !s.attention.value_scales.empty())
    fail(
        "an evicting pipeline keeps keys and values as they are; leave out key_scales and value_scales, or "
        "take a retrieval_pipeline");
  return s;
}

}  // namespace freekv
