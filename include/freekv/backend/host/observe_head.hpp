// One KV head of an evicting pipeline: its attention, and what rows that are observed see of its units.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/attended_shares.hpp>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/eviction_scratch.hpp>
#include <freekv/backend/host/exact_product.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/codec.hpp>
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
    attend_rows(s, {queries, s.heads.group(), d}, slice, tokens, part, w, log_weights);
  }
  /// Some of its query heads, which lie one behind the other, do.
  void attend_rows(const state& s, const group_query& of, const head_slice<const element>& slice, int tokens,
                   const attention_part& part, const scratch& w, const float* log_weights = nullptr) const {
    begin_attention<d>(instructions_, of.data, s.scale, of.group, w.query, part);
    attend_slice<d, element>(instructions_, {w.query, of.group, d}, slice, tokens, part, w.rows, 0.0f,
                             nullptr, log_weights);
  }

  /// A KV head's group attends to its coded tokens, decoded a block at a time, behind the `whole` ones that
  /// it has attended to already.
  template <class Eviction>
  void attend_coded(const Eviction& eviction, const state& s, int sequence, int head, int whole, int coded,
                    const attention_part& part, const scratch& w) const {
    constexpr int block = attention_block<d>;
    auto* const rows = reinterpret_cast<element*>(w.decoded);
    const auto codec = eviction.codec();
    for (int first = 0; first < coded; first += block) {
      const int count = std::min(block, coded - first);
      for (int t = 0; t < count; ++t) {
        element* const key = rows + 2 * t * d;
        codec.template decode<d>(scalar_team{},
                                 static_cast<const std::byte*>(s.code(sequence, head, first + t)), 1,
                                 row_range{0, 1}, head_slice<element>{key, key + d, d});
      }
      attention_part behind = part;
      if (behind.scores != nullptr) behind.scores += whole + first;
      attend_slice<d, element>(instructions_, {w.query, s.heads.group(), d},
                               head_slice<const element>{rows, rows + d, 2 * d}, count, behind, w.rows);
    }
  }

  /// Leaves the scores, where they are wanted, and the natural log-sum-exp in the scratch.
  void attend_head(const state& s, const row_of_head& at, const float* queries, const attention_output& to,
                   const scratch& w) const {
    attend_head(s, at, queries, to, w, [](const attention_part&) {});
  }
  /// Attention likewise of a decode row, to the head's tokens, of which some are coded.
  template <class Eviction>
  void attend_held(const Eviction& eviction, const state& s, int sequence, const row_of_head& at, int coded,
                   const float* queries, const attention_output& to, const scratch& w) const {
    attend_head(s, at, queries, to, w, [&](const attention_part& part) {
      attend_coded(eviction, s, sequence, at.head, at.tokens, coded, part, w);
    });
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

  /// Rows that are observed, by their numbers in the sequence.
  struct observed_range {
    int first = 0, end = 0;
    int count() const { return end - first; }
  };
  /// Rows that a policy sees at a moment: probes are among them when their prompt ends alone, and later not
  /// what they took the place of; of a prompt that is cut behind each block those of its last.
  static observed_range observed_rows(const state& s, const eviction_entry& entry,
                                      const eviction_moment& at) {
    const int observed = s.observed_end(entry), end = at.prompt_ends ? observed : at.tokens;
    return {std::max(entry.block, std::max(end, observed) - s.kept_queries), end};
  }

  /// Numbers that the last rows have of the units of `slice`, the last `coded` of which are the head's coded
  /// tokens; `w.order` has their places, `w.tokens` their tokens.
  template <class Eviction>
  observed_units see(const Eviction& eviction, const state& s, const eviction_entry& entry,
                     const head_slice<element>& slice, const float* log_weights, int units,
                     const eviction_moment& at, const scratch& w, [[maybe_unused]] int coded = 0) const {
    const int group = s.heads.group(), heads = numbers_of_row(eviction, at, s.heads);
    const observed_range rows = observed_rows(s, entry, at);
    const observed_units seen{.units = units,
                              .tokens = w.tokens,
                              .rows = rows.count() * heads,
                              .heads = heads,
                              .numbers = w.numbers,
                              .scratch = w.transformed,
                              .counts = w.counts,
                              .keys = w.unit_keys,
                              .head_dim = d,
                              .stride = score_stride_,
                              .product = exact_product_of(instructions_)};
    if (sees_keys_) load_keys(slice, w.order, units, w.unit_keys);
    for (int row = rows.first; row < rows.end; ++row) {
      const attention_part part{w.log_sum, nullptr, w.scores, score_stride_};
      if constexpr (freekv::detail::votes_for_layer<Eviction>) {
        float* to = seen.row((row - rows.first) * heads);
        for (int head = 0; head < s.heads.query; ++head) {
          if (!eviction.votes(at, head)) continue;
          const float* const query = s.kept_query(entry, row, head / group) + head % group * d;
          attend_rows(s, {query, 1, d}, as_const(s.prompt_slice(entry, head / group)), units, part, w);
          put_in_order(w, w.scores, units, row, to);
          make_shares(to, units);
          to += score_stride_;
        }
        continue;
      }
      attend_rows(s, s.kept_query(entry, row, at.head), as_const(slice), units - coded, part, w, log_weights);
      if constexpr (demotes<Eviction>)
        attend_coded(eviction, s, entry.sequence, at.head, units - coded, coded, part, w);
      float* const to = seen.row((row - rows.first) * heads);
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
          team.store(keys + std::ptrdiff_t{i} * d + x, team.load(slice.key + places[i] * slice.stride + x));
    });
  }

  isa instructions_;
  std::int64_t score_stride_;

 private:
  template <class More>
  void attend_head(const state& s, const row_of_head& at, const float* queries, const attention_output& to,
                   const scratch& w, const More& more) const {
    const int group = s.heads.group();
    const std::ptrdiff_t first = (std::ptrdiff_t{at.row} * s.heads.kv + at.head) * group;
    const attention_part part{w.log_sum, w.weighted, at.counts ? w.scores : nullptr, score_stride_};
    attend_rows(s, queries + first * d, as_const(at.slice), at.tokens, part, w, at.log_weights);
    more(part);
    finish_attention<d>(instructions_, nullptr, part, group, to.floats() + first * d, w.lse);
    for (int g = 0; to.lse != nullptr && g < group; ++g) to.lse[first + g] = w.lse[g] * to.lse_per_nat;
  }
  /// Scores of a row of token `row`, by place, in the order of the text; -infinity behind the row and for
  /// NaN.
  static void put_in_order(const scratch& w, const float* scores, int units, int row, float* to) {
    for (int i = 0; i < units; ++i) {
      const float score = scores[w.order[i]];
      to[i] = w.tokens[i] <= row && score == score ? clamp_score(score) : -infinity;
    }
  }
  /// Makes scores their shares; all 0 where all are -infinity.
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
