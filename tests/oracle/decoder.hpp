// One layer of one sequence, one token per decode step: append, drift, correct, attend, speculate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "correction.hpp"
#include "drift.hpp"
#include "numbers.hpp"
#include "pages.hpp"
#include "residency.hpp"
#include "results.hpp"
#include "scoring.hpp"
#include "selection.hpp"
#include "settings.hpp"
#include "summaries.hpp"

namespace oracle {

/// A copy of a decoder is a fork. Throws std::invalid_argument for wrong shapes.
class decoder {
 public:
  explicit decoder(settings s)
      : s_((check(s), std::move(s))),
        heads_(static_cast<std::size_t>(s_.kv_heads), head_state{{}, {}, slot_cache(s_), true, true}) {}

  const settings& config() const { return s_; }
  int length() const { return length_; }

  /// Appends `tokens` rows of keys and values, each (n_kv, d). Selection, q' and what the selected slots hold
  /// are dropped.
  void prompt(std::span<const float> keys, std::span<const float> values, int tokens) {
    require(tokens >= 0, "a prompt has no negative length");
    if (tokens == 0) return;
    append(keys, values, tokens);
    previous_query_.reset();
    decode_index_ = 0;
    for (head_state& head : heads_) {
      head.selected.clear();
      head.slots.clear();
      head.carried_firm = head.history_firm = true;
    }
  }

  /// `q` is (n_qo, d); `k` and `v` are (n_kv, d) and belong to the token that attends.
  step_result step(std::span<const float> q, std::span<const float> k, std::span<const float> v) {
    require_query(q);
    append(k, v, 1);

    step_result result;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      row_result row;
      head_state& head = heads_[static_cast<std::size_t>(kv_head)];
      row.selected_before = head.selected;
      if (retrieves(s_, kv_head)) correct(row, q, kv_head, head);
      row.selected = head.selected;

      const std::vector<int> pages = attended_pages(s_, kind_of(s_, kv_head), length_, head.selected);
      attend_group(q, kv_head, tokens_of(s_, length_, pages), result.out, result.lse);

      if (retrieves(s_, kv_head)) speculate(row, q, kv_head, head);
      row.selected_next = head.selected;
      row.recalled = row.by_correct.recalled + row.by_speculate.recalled;
      row.promoted = row.by_correct.promoted + row.by_speculate.promoted;
      row.recalled_before_attention = row.by_correct.recalled;
      result.rows.push_back(row);
    }
    previous_query_ = std::vector<float>(q.begin(), q.end());
    ++decode_index_;
    return result;
  }

  /// Exact attention of `q` (n_qo, d) over everything appended so far.
  attention full(std::span<const float> q) const {
    require_query(q);
    std::vector<int> tokens;
    for (int token = 0; token < length_; ++token) tokens.push_back(token);
    attention result;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head)
      attend_group(q, kv_head, tokens, result.out, result.lse);
    return result;
  }

  /// A from-scratch selection with `q` (n_qo, d) among the candidates at `length`, at most one more than
  /// was appended.
  selection choose(std::span<const float> q, int kv_head, int length) const {
    require_query(q);
    require(retrieves(s_, kv_head), "only a retrieval head selects");
    require(length >= 0 && length <= length_ + 1, "candidates at this length are not complete yet");
    const std::vector<int> candidates = candidate_pages(s_, length);
    const std::span<const float> queries = group_of(q, kv_head);
    selection chosen =
        select_pages(s_, kv_head, queries, candidates, heads_[static_cast<std::size_t>(kv_head)].summaries);
    measure_scores(chosen, s_, kv_head, queries,
                   rows(keys_, kv_head, tokens_of(s_, length_, chosen.candidates)));
    return chosen;
  }

  /// The pages of `choose`, ascending.
  std::vector<int> select(std::span<const float> q, int kv_head, int length) const {
    return choose(q, kv_head, length).pages;
  }

 private:
  struct head_state {
    std::vector<page_summary> summaries;  // per complete page
    std::vector<int> selected;            // ascending
    slot_cache slots;
    bool carried_firm;  // `selected` must agree
    bool history_firm;  // all flags and selections since the slots were empty must
  };

  void require_query(std::span<const float> q) const {
    require(q.size() == static_cast<std::size_t>(s_.query_heads * s_.head_dim),
            "q is (query_heads, head_dim)");
  }

  void append(std::span<const float> keys, std::span<const float> values, int tokens) {
    const std::size_t elements = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(s_.kv_heads) *
                                 static_cast<std::size_t>(s_.head_dim);
    require(keys.size() == elements && values.size() == elements,
            "keys and values are (tokens, kv_heads, head_dim)");
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    values_.insert(values_.end(), values.begin(), values.end());
    length_ += tokens;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      if (!retrieves(s_, kv_head)) continue;
      std::vector<page_summary>& of_head = heads_[static_cast<std::size_t>(kv_head)].summaries;
      while (is_complete(s_, static_cast<int>(of_head.size()), length_)) {
        const int page = static_cast<int>(of_head.size());
        of_head.push_back(summarise(s_, kv_head, rows(keys_, kv_head, tokens_of(s_, length_, {page}))));
      }
    }
  }

  void correct(row_result& row, std::span<const float> q, int kv_head, head_state& head) const {
    const bool by_mass = s_.correction == correction_kind::mass_deficit && previous_query_.has_value();
    if (!by_mass) flag(row, q, kv_head);
    if (!by_mass && !row.corrected) return;

    const selection best = choose(q, kv_head, length_);
    row.score_size = best.score_size;
    if (by_mass) flag_by_mass(row, best, head);
    if (!row.corrected) return;
    row.correct_margin = best.margin;
    row.correct_firm = is_firm(best);
    std::vector<int> pages = best.pages;
    if (by_mass && s_.partial) {
      const replacement replaced = replace_missing(best, head.selected, s_.delta);
      pages = replaced.pages;
      row.correct_firm = row.correct_firm && replaced.firm && head.carried_firm;
    }
    row.by_correct = hold(head, pages);
    head.selected = pages;
  }

  /// Skipping this for a corrected head whose candidates stay the same would change nothing: the same query
  /// over the same pages selects the same, and all of it is held. (Unless the correction was partial.)
  void speculate(row_result& row, std::span<const float> q, int kv_head, head_state& head) const {
    const selection chosen = choose(q, kv_head, length_ + 1);
    row.by_speculate = hold(head, chosen.pages);
    row.speculate_margin = chosen.margin;
    row.speculate_firm = is_firm(chosen);
    row.score_size = std::max(row.score_size, chosen.score_size);
    head.selected = chosen.pages;

    const bool step_firm = flag_is_firm(row, s_.tau) && row.correct_firm && row.speculate_firm;
    const bool before_firm = s_.spare == 0 ? head.carried_firm : head.history_firm;
    row.movement_firm = s_.route == route_kind::in_place || (step_firm && before_firm);
    head.history_firm = head.history_firm && step_firm;
    head.carried_firm = row.speculate_firm;
    if (s_.route == route_kind::resident) row.slots = head.slots.pages();
  }

  void flag(row_result& row, std::span<const float> q, int kv_head) const {
    const bool due = s_.correction == correction_kind::always ||
                     (s_.correction == correction_kind::every_n_steps && decode_index_ % s_.every == 0);
    if (due || !previous_query_) {
      row.corrected = true;
      row.flag_forced = true;
      return;
    }
    if (s_.correction != correction_kind::cosine_drift) return;
    const drift_result turn = drift(group_of(q, kv_head), group_of(*previous_query_, kv_head), group_size(s_),
                                    s_.tau, s_.drift_pool);
    row.corrected = turn.flagged;
    row.flag_forced = turn.forced;
    row.pooled_cosine = turn.pooled;
    row.norm_borderline = turn.norm_borderline;
  }

  void flag_by_mass(row_result& row, const selection& best, const head_state& head) const {
    const mass_comparison missed = compare_masses(best, head.selected, s_.delta);
    row.corrected = missed.missing_mass;
    row.flag_margin = missed.margin;
    row.flag_slack = missed.slack;
    // Another selection in use, or another number of best pages, compares other sums.
    const bool same_sums = head.carried_firm && best.mass_margin > mass_error(best.score_size);
    if (!same_sums) row.flag_slack = infinity;
  }

  movement hold(head_state& head, const std::vector<int>& wanted) const {
    if (s_.route == route_kind::in_place) return {};
    return head.slots.hold(s_, wanted, length_);
  }

  void attend_group(std::span<const float> q, int kv_head, const std::vector<int>& tokens,
                    std::vector<double>& out, std::vector<double>& lse) const {
    for (int g = 0; g < group_size(s_); ++g) {
      const attention head = attend(row_of(group_of(q, kv_head), g, s_.head_dim),
                                    rows(keys_, kv_head, tokens), rows(values_, kv_head, tokens), s_.scale);
      out.insert(out.end(), head.out.begin(), head.out.end());
      lse.push_back(head.lse[0]);
    }
  }

  /// (G, d): the queries of one KV head's group, out of (n_qo, d).
  std::span<const float> group_of(std::span<const float> q, int kv_head) const {
    return row_of(q, kv_head, group_size(s_) * s_.head_dim);
  }

  /// One KV head's rows of the tokens named, out of (tokens, n_kv, d).
  std::vector<std::span<const float>> rows(const std::vector<float>& data, int kv_head,
                                           const std::vector<int>& tokens) const {
    std::vector<std::span<const float>> result;
    for (int token : tokens) result.push_back(row_of(data, token * s_.kv_heads + kv_head, s_.head_dim));
    return result;
  }

  settings s_;
  int length_ = 0;
  std::vector<float> keys_;                           // (tokens, n_kv, d)
  std::vector<float> values_;                         // (tokens, n_kv, d)
  std::vector<head_state> heads_;                     // per KV head
  std::optional<std::vector<float>> previous_query_;  // q'
  int decode_index_ = 0;                              // of the next step, from 0 after a prompt
};

}  // namespace oracle
