// One KV head of an evicting pipeline: its attention, and what rows that are observed see of its units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/attended_shares.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/eviction_scratch.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <limits>

namespace freekv::host {

/// Attention of one KV head, and what a policy observes of it. By one thread, with its scratch.
template <class Shape>
class head_observer {
 public:
  using state = eviction_state<Shape>;
  using element = typename state::element;
  using scratch = eviction_scratch;
  static constexpr int d = state::head_dim;

  head_observer(isa instructions, const eviction_sizes& sizes)
      : instructions_(instructions), score_stride_(sizes.score_stride()), sees_keys_(sizes.sees_keys) {}

  /// One KV head of one row of a step, and what it attends to.
  struct row_of_head {
    head_slice<element> slice;
    int tokens = 0;
    int row = 0;
    int head = 0;
    bool counts = false;                 // its scores are wanted
    const float* log_weights = nullptr;  // (tokens), or null
  };

  /// A KV head's group attends to the first `tokens` rows of a slice.
  void attend_rows(const state& s, const float* queries, const head_slice<const element>& slice, int tokens,
                   const attention_part& part, const scratch& w, const float* log_weights = nullptr) const {
    const int group = s.heads.group();
    begin_attention<d>(instructions_, queries, s.scale, group, w.query, part);
    attend_slice<d, element>(instructions_, {w.query, group, d}, slice, tokens, part, w.rows, 0.0f, nullptr,
                             log_weights);
  }

  /// Leaves the scores, where they are wanted, and the natural log-sum-exp in the scratch.
  void attend_head(const state& s, const row_of_head& at, const float* queries, const attention_output& to,
                   const scratch& w) const {
    const int group = s.heads.group();
    const std::ptrdiff_t first = (std::ptrdiff_t{at.row} * s.heads.kv + at.head) * group;
    const attention_part part{w.log_sum, w.weighted, at.counts ? w.scores : nullptr, score_stride_};
    attend_rows(s, queries + first * d, as_const(at.slice), at.tokens, part, w, at.log_weights);
    finish_attention<d>(instructions_, nullptr, part, group, to.floats() + first * d, w.lse);
    for (int g = 0; to.lse != nullptr && g < group; ++g) to.lse[first + g] = w.lse[g] * to.lse_per_nat;
  }

  /// Adds to `votes` what a prompt row's attention has on each token up to itself; a probe's behind it has
  /// all.
  void vote(const state& s, const eviction_entry& entry, int head, int token, const float* queries,
            float* votes, const scratch& w) const {
    const int group = s.heads.group(), tokens = std::min(token + 1, entry.prompt);
    attend_rows(s, queries, as_const(s.prompt_slice(entry, head)), tokens,
                {w.log_sum, nullptr, w.scores, score_stride_}, w);
    for (int g = 0; g < group; ++g) w.lse[g] = w.log_sum[g].value();
    with_team(instructions_, [&](auto team) {
      mean_shares(team, {w.scores, score_stride_, w.lse, group}, tokens, w.shares);
    });
    for (int t = 0; t < tokens; ++t) votes[t] += w.shares[t];
  }

  /// Numbers that the last rows have of the units of `slice`; `w.order` has their places, `w.tokens` their
  /// tokens. Probes are among the rows when their prompt ends alone, and later not what they took the place
  /// of.
  template <class Eviction>
  observed_units see(const Eviction& eviction, const state& s, const eviction_entry& entry,
                     const head_slice<element>& slice, const float* log_weights, int units,
                     const eviction_moment& at, const scratch& w) const {
    const int group = s.heads.group(), heads = numbers_of_row(eviction, group);
    const int observed = s.observed_end(entry), end = at.prompt_ends ? observed : at.tokens;
    const int first = std::max(0, std::max(end, observed) - s.kept_queries), rows = (end - first) * heads;
    const observed_units seen{units,         w.tokens, rows,        heads, w.numbers,
                              w.transformed, w.counts, w.unit_keys, d,     score_stride_};
    if (sees_keys_) load_keys(slice, w.order, units, w.unit_keys);
    for (int row = first; row < end; ++row) {
      attend_rows(s, s.kept_query(entry, row, at.head), as_const(slice), units,
                  {w.log_sum, nullptr, w.scores, score_stride_}, w, log_weights);
      float* const to = seen.row((row - first) * heads);
      if (eviction.group() == group_rule::largest_score) {
        std::fill_n(to, units, -infinity);
        for (int g = 0; g < group; ++g) {
          put_in_order(w, w.scores + g * score_stride_, units, row, w.shares);
          for (int i = 0; i < units; ++i) to[i] = std::max(to[i], w.shares[i]);  // no NaN
        }
        continue;
      }
      for (int g = 0; g < group; ++g) {
        put_in_order(w, w.scores + g * score_stride_, units, row, to + g * score_stride_);
        make_shares(to + g * score_stride_, units);
      }
    }
    return seen;
  }
  /// Numbers that the last rows of a prompt that ends have of its tokens.
  template <class Eviction>
  observed_units see_prompt(const Eviction& eviction, const state& s, const eviction_entry& entry,
                            const eviction_moment& at, const scratch& w) const {
    for (int token = 0; token < entry.prompt; ++token) w.order[token] = w.tokens[token] = token;
    return see(eviction, s, entry, s.prompt_slice(entry, at.head), nullptr, entry.prompt, at, w);
  }

 protected:
  /// Keys of the rows at `places`, one behind the other.
  void load_keys(const head_slice<element>& slice, const std::int32_t* places, int count, float* keys) const {
    with_team(instructions_, [&](auto team) {
      for (int i = 0; i < count; ++i)
        for (int x = 0; x < d; x += decltype(team)::width)
          team.store(keys + i * d + x, team.load(slice.key + places[i] * slice.stride + x));
    });
  }

  isa instructions_;
  std::int64_t score_stride_;

 private:
  /// Scores of a row of token `row`, by place, in the order of the text; -infinity behind the row.
  static void put_in_order(const scratch& w, const float* scores, int units, int row, float* to) {
    for (int i = 0; i < units; ++i) to[i] = w.tokens[i] <= row ? scores[w.order[i]] : -infinity;
  }
  /// Makes scores their shares; all 0 where any is NaN.
  void make_shares(float* scores, int units) const {
    log_sum_exp log_sum;
    for (int i = 0; i < units; ++i) log_sum.add(scores[i]);
    const float lse = log_sum.value();
    with_team(instructions_, [&](auto team) {
      mean_shares(team, {scores, score_stride_, &lse, 1}, units, scores);
    });
  }

  bool sees_keys_;
};

}  // namespace freekv::host
