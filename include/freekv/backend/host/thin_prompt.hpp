// Prompts of fewer tokens: what is evicted for good when a prompt ends, before a pipeline that retrieves has
// it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/attended_shares.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/core/element.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/model.hpp>
#include <freekv/policies/detail/neighbours.hpp>
#include <freekv/storage/layout.hpp>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace freekv {

/// Tokens that `thin_prompt` keeps of a prompt, and how attention votes for them.
struct prompt_thinning {
  model_settings model{};
  int kept = 0;              ///< of each KV head, sink and window among them
  int sink = 0, window = 0;  ///< the first and the last tokens, which stay whatever their votes
  int kernel = 1;         ///< odd: a token has the largest votes of so many neighbours, itself in the middle
  float scale = 0.0f;     ///< of scores; 0: 1 / sqrt(head_dim)
  float soft_cap = 0.0f;  ///< of scores; 0: none

  /// Throws settings_error for what a prompt of so many tokens cannot keep.
  [[gnu::cold]] void validate(int tokens) const {
    const auto text = [](auto n) { return std::to_string(n); };
    model.validate();
    if (sink < 0 || window < 0)
      throw settings_error("thin_prompt: a sink of " + text(sink) + " and a window of " + text(window) +
                           " tokens are not 0 or more");
    if (kept < 0 || kept > tokens)
      throw settings_error("thin_prompt: " + text(kept) + " tokens cannot be kept of a prompt of " +
                           text(tokens) + "; keep from 0 to all of them");
    if (kept < tokens && kept - sink < window)
      throw settings_error("thin_prompt: " + text(kept) + " kept tokens have no room for a sink of " +
                           text(sink) + " and a window of " + text(window) +
                           "; keep at least these, or all " + text(tokens) + " of the prompt");
    if (kernel < 1 || kernel % 2 == 0)
      throw settings_error("thin_prompt: a kernel of " + text(kernel) +
                           " tokens is not odd; 1 pools none, 7 is SnapKV's");
    if (!std::isfinite(scale)) throw settings_error("thin_prompt: scale is not finite");
    if (!(soft_cap >= 0.0f && std::isfinite(soft_cap)))
      throw settings_error("thin_prompt: soft_cap is " + text(soft_cap) +
                           "; choose a positive number, or 0 for none");
  }
};

/// A layer's prompt, as `thin_prompt` takes it.
template <query_element In>
struct prompt_rows {
  std::span<const In> keys{};        ///< (tokens, kv_heads, head_dim)
  std::span<const In> values{};      ///< (tokens, kv_heads, head_dim)
  std::span<const float> queries{};  ///< (rows, query_heads, head_dim): of the prompt's last rows, which vote
};

/// Room for a layer's thinned prompt: row j of a KV head is the j-th token that it keeps, in the order of the
/// text.
template <query_element In>
struct thinned_rows {
  std::span<In> keys{};              ///< (kept, kv_heads, head_dim)
  std::span<In> values{};            ///< (kept, kv_heads, head_dim)
  std::span<std::int32_t> tokens{};  ///< (kept, kv_heads): numbers in the prompt, where they are wanted
};

namespace detail {

/// The votes of one layer's KV heads, one at a time, and what they keep by them. By one lane's team, which
/// takes as long as the attention of the voting rows.
template <class Shape, element In>
class prompt_thinner {
  static constexpr int d = Shape::head_dim;

 public:
  prompt_thinner(const prompt_thinning& by, const prompt_rows<In>& prompt, int tokens, int rows,
                 host::isa set)
      : by_(by),
        prompt_(prompt),
        tokens_(tokens),
        rows_(rows),
        set_(set),
        scale_(by.scale != 0.0f ? by.scale : 1.0f / std::sqrt(static_cast<float>(d))),
        stride_((std::int64_t{tokens} + 15) / 16 * 16) {
    const std::size_t group = to_size(by.model.group());
    if (by.kept == tokens) return;
    rows_scratch_.resize(to_size(attention_scratch<d>));
    query_.resize(group * d);
    log_sums_.resize(group);
    lse_.resize(group);
    scores_.resize(group * to_size(stride_));
    shares_.resize(to_size(stride_));
    votes_.resize(to_size(tokens));
  }

  /// Numbers of the tokens that a KV head keeps, ascending.
  const std::vector<std::int32_t>& tokens_of(int head) {
    kept_.clear();
    if (by_.kept == tokens_) {
      for (int token = 0; token < tokens_; ++token) kept_.push_back(token);
      return kept_;
    }
    std::fill(votes_.begin(), votes_.end(), 0.0f);
    for (int row = 0; row < rows_; ++row) vote(head, row);
    choose();
    return kept_;
  }

 private:
  /// Adds what the group's query heads have of each token up to the row's own, on average.
  void vote(int head, int row) {
    const int heads = by_.model.query_heads, group = by_.model.group(), count = tokens_ - rows_ + row + 1;
    const attention_part part{log_sums_.data(), nullptr, scores_.data(), stride_};
    host::begin_attention<d>(set_, prompt_.queries.data() + (std::ptrdiff_t{row} * heads + head * group) * d,
                             scale_, group, query_.data(), part);
    const head_slice<const In> keys{prompt_.keys.data() + head * d, prompt_.values.data() + head * d,
                                    std::int64_t{by_.model.kv_heads} * d};
    host::attend_slice<d, In>(set_, {query_.data(), group, d}, keys, count, part, rows_scratch_.data(),
                              by_.soft_cap);
    for (int g = 0; g < group; ++g) lse_[to_size(g)] = log_sums_[to_size(g)].value();
    host::with_team(set_, [&](auto team) {
      mean_shares(team, {scores_.data(), stride_, lse_.data(), group}, count, shares_.data());
    });
    for (int token = 0; token < count; ++token) votes_[to_size(token)] += shares_[to_size(token)];
  }

  void choose() {
    const int voted = tokens_ - by_.sink - by_.window, best = by_.kept - by_.sink - by_.window;
    pool_largest(votes_.data(), tokens_ - by_.window, by_.kernel, shares_.data());
    keys_.clear();
    for (int token = by_.sink; token < by_.sink + voted; ++token)
      keys_.push_back(ordered_key(shares_[to_size(token)], token));
    std::nth_element(keys_.begin(), keys_.begin() + best, keys_.end(), std::greater<>());
    for (int token = 0; token < by_.sink; ++token) kept_.push_back(token);
    for (int i = 0; i < best; ++i) kept_.push_back(unit_of_key(keys_[to_size(i)]));
    std::sort(kept_.begin() + by_.sink, kept_.end());
    for (int token = tokens_ - by_.window; token < tokens_; ++token) kept_.push_back(token);
  }

  const prompt_thinning& by_;
  const prompt_rows<In>& prompt_;
  int tokens_, rows_;
  host::isa set_;
  float scale_;
  std::int64_t stride_;
  std::vector<float> rows_scratch_, query_, lse_, scores_, shares_, votes_;
  std::vector<log_sum_exp> log_sums_;
  std::vector<std::uint64_t> keys_;
  std::vector<std::int32_t> kept_;
};

}  // namespace detail

/// Thins a layer's prompt: each KV head keeps as many tokens as `by` says, for good, those that the prompt's
/// last rows attend to most. What comes out is the layer's prompt, for an append in place of the whole: keys
/// are rotated already, so attention needs no positions, and `tokens` and every number of a pipeline then
/// counts kept rows. All layers of a sequence keep the same number. Votes are SnapKV's (arXiv 2404.14469):
/// the shares of each row's softmax over the tokens up to itself, averaged over the group's query heads and
/// summed over the rows, without a model's sink logits; NaN counts as 0, and of equal votes the first tokens
/// stay. 32 rows vote in SnapKV; where all is kept none need to. Not with `low_rank_keys`, which
/// rotates keys by their rows' numbers. Allocates, and takes as long as attention of the rows that vote: not
/// for a step. Throws settings_error and usage_error. (MPCache, arXiv 2501.06807: its look-once static
/// eviction, which as its code is published keeps what any of the last fifth of the rows gives more than a
/// threshold, on average over all heads of a layer; here as many as are asked for, by KV head. RocketKV has
/// such a first stage too.)
template <class Shape, element In>
[[gnu::cold]] void thin_prompt(const prompt_thinning& by, const prompt_rows<In>& prompt,
                               const thinned_rows<In>& to, host::isa instructions = host::best_isa()) {
  constexpr int d = Shape::head_dim;
  by.model.validate();
  const std::size_t key_row = to_size(by.model.kv_heads * d), query_row = to_size(by.model.query_heads * d);
  const auto text = [](auto n) { return std::to_string(n); };
  if (prompt.keys.size() % key_row != 0 || prompt.values.size() != prompt.keys.size() ||
      prompt.queries.size() % query_row != 0 ||
      prompt.queries.size() / query_row > prompt.keys.size() / key_row)
    throw usage_error("thin_prompt: " + text(prompt.keys.size()) + " numbers of keys and " +
                      text(prompt.values.size()) + " of values in rows of " + text(key_row) + ", " +
                      text(prompt.queries.size()) + " of queries in rows of " + text(query_row) +
                      "; give whole rows, as many values as keys, and queries of at most as many tokens");
  const int tokens = static_cast<int>(prompt.keys.size() / key_row),
            rows = static_cast<int>(prompt.queries.size() / query_row), heads = by.model.kv_heads;
  by.validate(tokens);
  if (rows == 0 && by.kept < tokens)
    throw usage_error("thin_prompt: no rows vote for which " + text(by.kept) + " of " + text(tokens) +
                      " tokens are kept; give the queries of the prompt's last rows");
  const std::size_t room = to_size(by.kept) * key_row;
  if (to.keys.size() != room || to.values.size() != room ||
      (!to.tokens.empty() && to.tokens.size() != to_size(by.kept) * to_size(heads)))
    throw usage_error("thin_prompt: room for " + text(to.keys.size()) + " numbers of keys, " +
                      text(to.values.size()) + " of values and " + text(to.tokens.size()) +
                      " tokens' numbers; " + text(by.kept) + " kept tokens take " + text(room) +
                      ", as many and " + text(to_size(by.kept) * to_size(heads)) + " or none");
  detail::prompt_thinner<Shape, In> thinner(by, prompt, tokens, rows, instructions);
  for (int head = 0; head < heads; ++head) {
    const std::vector<std::int32_t>& kept = thinner.tokens_of(head);
    for (std::size_t row = 0; row < kept.size(); ++row) {
      const std::size_t from = to_size(kept[row]) * key_row + to_size(head * d),
                        into = row * key_row + to_size(head * d);
      std::memcpy(to.keys.data() + into, prompt.keys.data() + from, d * sizeof(In));
      std::memcpy(to.values.data() + into, prompt.values.data() + from, d * sizeof(In));
      if (!to.tokens.empty()) to.tokens[row * to_size(heads) + to_size(head)] = kept[row];
    }
  }
}

}  // namespace freekv
