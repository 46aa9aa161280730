// Conformance of a policy to its definition in float64, for tests of policies of one's own. It needs no test
// library:
//
//     for (const std::string& wrong : freekv::testing::conforms<half_means>(definition))
//       std::puts(wrong.c_str());
#pragma once

#include <concepts>
#include <freekv/testing/definitions.hpp>
#include <freekv/testing/detail/judge_codec.hpp>
#include <freekv/testing/detail/judge_correction.hpp>
#include <freekv/testing/detail/judge_eviction.hpp>
#include <freekv/testing/detail/judge_merging.hpp>
#include <freekv/testing/detail/judge_pooling.hpp>
#include <freekv/testing/detail/judge_slots.hpp>
#include <freekv/testing/detail/judge_steps.hpp>
#include <freekv/testing/detail/judge_summary.hpp>
#include <string>
#include <type_traits>
#include <vector>

namespace freekv::testing {

/// Sentences of where `policy` differs from its definition, at most ten; none if it conforms. Random units of
/// random shapes are scored on one lane and on every instruction set of this machine, with NaN in one number
/// of a key and in all too, and random sequences are decoded, with keys and values of F32, F16 and BF16: the
/// units attended to are the best by the definition.
template <summary_policy Policy>
std::vector<std::string> conforms(const summary_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  static_assert(!hooks_of<Policy>::has(hook::at), "conforms takes a summary that is the same for all heads");
  static_assert(!scores_stored_bytes<Policy>, "conforms takes a summary that scores its numbers");
  detail::differences wrong;
  const auto judge = [&]<class Element>(Element) {
    detail::judge_units<Element>(policy, definition, options, wrong);
    detail::judge_steps<Element>(policy, {.summary = definition}, options, wrong);
  };
  judge(float{}), judge(half{}), judge(bfloat16{});
  return wrong.take();
}

/// Sentences of where a pooling differs from its definition, at most ten, by random rows of scores or groups
/// of queries, and by random sequences whose pages have their mean's score.
template <pooling_policy Policy>
std::vector<std::string> conforms(const pooling_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  detail::differences wrong;
  if (bool{definition.query} != query_pooling<Policy> || bool{definition.scores} == query_pooling<Policy>) {
    wrong.add("a pooling of ", query_pooling<Policy> ? "queries" : "scores", " is defined by `",
              query_pooling<Policy> ? "query" : "scores", "` alone");
    return wrong.take();
  }
  detail::judge_pools(policy, definition, options, wrong);
  detail::judge_steps<half>(policy, {.pooling = definition}, options, wrong);
  return wrong.take();
}

/// Sentences of where a selection differs from its definition, at most ten, by random sequences in which
/// every other step's pages were selected ahead of it.
template <selection_policy Policy>
std::vector<std::string> conforms(const selection_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  detail::differences wrong;
  detail::judge_steps<half>(policy, {.selection = definition}, options, wrong);
  return wrong.take();
}

/// Sentences of where a correction (the same for all layers) differs from its definition, at most ten, by
/// random changes of queries or random masses, and by random sequences; one that judges shares of all
/// attention, which the sequences' summary does not estimate, by random shares alone.
template <correction_policy Policy>
std::vector<std::string> conforms(const correction_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  detail::differences wrong;
  if (bool{definition.by_masses} != correction_by_mass<Policy> ||
      bool{definition.by_queries} == correction_by_mass<Policy>) {
    wrong.add("a correction by ", correction_by_mass<Policy> ? "masses" : "queries", " is defined by `",
              correction_by_mass<Policy> ? "by_masses" : "by_queries", "` alone");
    return wrong.take();
  }
  detail::judge_flags(policy, definition, options, wrong);
  if constexpr (!hooks_of<Policy>::has(hook::of_attention))
    detail::judge_steps<half>(policy, {.correction = definition}, options, wrong);
  return wrong.take();
}

/// Sentences of where an eviction differs from its definition, at most ten, by random sequences, and of one
/// that merges by random partings of tokens. How much the policy keeps at most, what it protects and which
/// rows it observes is its own word; who leaves, and what becomes of it, is the definition's.
template <eviction_policy Policy>
std::vector<std::string> conforms(const eviction_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  static_assert(!allocates<Policy>,
                "conforms takes an eviction whose heads have the same budgets: its sequences have one layer, "
                "and one that allocates gives budgets over all");
  static_assert(!cuts_blocks<Policy>,
                "conforms takes an eviction whose prompts are exact: its definition has no blocks");
  static_assert(!freekv::detail::votes_for_layer<Policy>,
                "conforms takes an eviction whose KV heads observe their own group: what others of the layer "
                "see is not in its definition");
  static_assert(
      !demotes<Policy>,
      "conforms takes an eviction whose tokens stay as they are: what becomes of one that is coded is "
      "its codec's definition");
  detail::differences wrong;
  const bool as_defined = observes<Policy> ? definition.worths && !definition.worth
                                           : definition.worth && !definition.worths && !definition.staying;
  if (!as_defined || bool{definition.fates} != merges<Policy>) {
    wrong.add("an eviction that ", observes<Policy> ? "observes" : "counts",
              merges<Policy> ? " and merges" : "", " is defined by `", observes<Policy> ? "worths" : "worth",
              merges<Policy> ? "` and `fates`" : "`", " alone",
              observes<Policy> ? ", and `staying` where it says how many stay" : "");
    return wrong.take();
  }
  // Float where tokens merge: a mean that rounds to the other of two halfs would be told of.
  using element = std::conditional_t<merges<Policy>, float, half>;
  if constexpr (merges<Policy>) detail::judge_fates(policy, definition, options, wrong);
  detail::judge_evictions<element>(policy, definition, options, wrong);
  return wrong.take();
}

/// Sentences of where a codec (the same for all slices) differs from its definition, at most ten: random
/// pages of F32, F16 and BF16 come back as the definition has it, as a whole and in parts alike, and what is
/// not finite spoils no number of another token and channel; in random sequences attention is to what comes
/// back.
template <codec_policy Policy>
std::vector<std::string> conforms(const codec_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  static_assert(!hooks_of<Policy>::has(hook::at), "conforms takes a codec that is the same for all slices");
  detail::differences wrong;
  const auto judge = [&]<class Element>(Element) {
    detail::judge_pages<64, Element>(policy, definition, options, wrong);
    detail::judge_pages<80, Element>(policy, definition, options, wrong);
    detail::judge_pages<128, Element>(policy, definition, options, wrong);
  };
  judge(float{}), judge(half{}), judge(bfloat16{});
  detail::judge_reads<half>(policy, options, wrong);
  return wrong.take();
}

/// Sentences of where a pinning differs from its definition, at most ten, by random units, and by random
/// sequences, in whose steps the units that it pins are attended to.
template <pinning_policy Policy>
std::vector<std::string> conforms(const pinning_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  static_assert(!std::same_as<Policy, no_pins>, "no_pins has no worth to be defined");
  detail::differences wrong;
  detail::judge_worths<float>(policy, definition, options, wrong);
  detail::judge_worths<bfloat16>(policy, definition, options, wrong);
  detail::judge_pins<half>(policy, definition, options, wrong);
  return wrong.take();
}

/// Sentences of where a residency differs from its definition, at most ten, by random slots, and by random
/// sequences, whose outputs do not depend on it.
template <residency_policy Policy>
std::vector<std::string> conforms(const residency_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  detail::differences wrong;
  detail::judge_freed(policy, definition, options, wrong);
  detail::judge_steps<half>(policy, {}, options, wrong);
  return wrong.take();
}

}  // namespace freekv::testing
