// Definitions of policies in float64, which `conforms` compares them with: written from a paper, not from the
// code.
#pragma once

#include <cstdint>
#include <freekv/core/shape.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/policies/residency.hpp>
#include <functional>
#include <vector>

namespace freekv::testing {

using doubles = std::vector<double>;

/// A summary in float64.
struct summary_definition {
  /// Numbers of a unit's keys (tokens, head_dim), as `summarise` leaves them: `width(page)`.
  std::function<doubles(const doubles& keys, kv_extent unit)> numbers;
  /// Score of a query (head_dim) with them, times `scale`.
  std::function<double(const doubles& query, const doubles& numbers, kv_extent unit, double scale)> score;
  double tolerance = 2e-5;  ///< of a number or score, relative to the size of what it is a sum of
};

/// A pooling in float64, by one of the two.
struct pooling_definition {
  /// Pooled scores (candidates) of the query heads' scores, a head's (candidates) each.
  std::function<doubles(const std::vector<doubles>& scores)> scores{};
  /// The query (head_dim) that scores for all, of the heads' queries.
  std::function<doubles(const std::vector<doubles>& queries)> query{};
  double tolerance = 2e-5;  ///< of a pooled score or a number of the query
};

/// A selection in float64.
struct selection_definition {
  /// Candidates that are selected, ascending numbers, by the pooled scores of all, in the order of the text.
  /// `held`: those that the step attends to, while the next step's are selected; none where a correction
  /// selects.
  std::function<std::vector<int>(const doubles& scores, const std::vector<bool>& held, int k)> selected;
};

/// The queries of a KV head's group, (head_dim) each, now and when its selection was made.
struct changed_queries {
  std::vector<doubles> now, before;
  int decode_step = 0;  ///< since the last prompt, which is followed by step 0
};

/// A correction in float64, by one of the two: whether a head that has a selection is flagged.
struct correction_definition {
  std::function<bool(const changed_queries& queries)> by_queries{};
  /// Judgement by the mass of what is selected and of what would be selected now.
  std::function<bool(double selected, double best)> by_masses{};
};

/// Rows of one KV head so far, and what they have attended to.
struct attended_rows {
  /// Row r's share on token t, (rows, tokens up to the row), mean over the group's query heads; 0 for what
  /// the row did not attend to. A prompt's rows attend to all of it up to themselves.
  std::vector<doubles> shares;
  int prompt = 0;  ///< tokens, the first of the rows
  /// Worths that were given for each token so far, where the policy takes them; NaN comes as -infinity.
  doubles worths{};
  /// Keys and values of each token so far, (head_dim), where the policy lists `hook::rows`.
  std::vector<doubles> keys{}, values{};
  /// True where some of the prompt left when it ended. Where none did, a policy that does not observe every
  /// row is not told of what prompt rows attended to.
  bool prompt_is_cut = false;
};

/// Tokens that a KV head holds when some are to leave, and what the last rows have of them: `observed_rows()`
/// of the sequence's last, or all where it has fewer.
struct observed_tokens {
  std::vector<int> tokens{};  ///< numbers in the sequence, ascending
  /// Numbers that rows have of the tokens, (rows, query heads of the group, tokens): shares, 0 of tokens
  /// behind the row. With group_rule::largest_score (rows, 1, tokens): the largest of the heads' scores,
  /// -infinity of tokens behind the row. The last row is the sequence's last.
  std::vector<std::vector<doubles>> rows{};
  std::vector<doubles> keys{};  ///< of each token, (head_dim), where the policy `sees_keys()`
  eviction_moment at{};
};

/// Tokens of a KV head of which some leave: first those that stay, then those that leave, both in the order
/// of the text.
struct parted_tokens {
  int staying = 0;
  std::vector<int> tokens{};    ///< numbers in the sequence
  std::vector<doubles> keys{};  ///< of each token, (head_dim), as earlier merges have left it
  eviction_moment at{};
  doubles shares{};  ///< of each token, with merge_rule::by_shares: `merging_tokens::shares`
};

/// An eviction in float64. A policy that counts for each unit is defined by `worth`; one that observes by
/// `worths`, and by `staying` if it says how many stay; one that merges by `fates` and `merge_by` beside
/// these.
struct eviction_definition {
  /// Worth of a unit, by its first token: of those that are not protected the least leaves, and of those
  /// alike the one that was there first.
  std::function<double(const attended_rows& seen, int token)> worth{};
  /// Worth of each of the tokens that a head holds, of which the least leave in the same way.
  std::function<doubles(const observed_tokens& held)> worths{};
  /// Number of tokens that stay, at most, the protected ones among them; without it the policy's `kept`.
  std::function<int(const observed_tokens& held, const doubles& worths)> staying{};
  /// Fates of each token, as a policy's `merge` gives them, by all partings of the head's tokens so far, of
  /// which the last is the one that is asked for.
  std::function<std::vector<merge_fate>(const std::vector<parted_tokens>& so_far)> fates{};
  merge_rule merge_by = merge_rule::by_weights;  ///< what tokens become by their fates
};

/// A codec in float64.
struct codec_definition {
  /// Keys of a page, and values, as they come back: (tokens, head_dim), as they went in.
  std::function<doubles(const doubles& keys, kv_extent page)> keys;
  std::function<doubles(const doubles& values, kv_extent page)> values;
  /// Tolerance of a number, relative to the largest of the page's keys, or values, beside its element's
  /// rounding.
  double tolerance = 1e-6;
};

/// A pinning in float64.
struct pinning_definition {
  /// Worth of a unit's keys (tokens, head_dim): the units worth most are pinned.
  std::function<double(const doubles& keys, kv_extent unit)> worth;
  double tolerance = 2e-5;  ///< of a worth, relative to its size and 1
};

/// A residency, of which nothing is rounded.
struct residency_definition {
  /// Place in `slots`, which are in ascending order, of the one that is freed first.
  std::function<int(const std::vector<unselected_slot>& slots)> freed;
};

struct conformance_options {
  std::uint64_t seed = 1;
  /// random units, rows, groups or merges that are judged alone; of a summary, of each element type; of a
  /// codec a third as many pages of each head_dim and element type
  int units = 120;
  int runs = 6;  ///< random pipelines; of a summary, of each element type
};

}  // namespace freekv::testing
