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
#include "drift.hpp"
#include "numbers.hpp"
#include "pages.hpp"
#include "pooling.hpp"
#include "results.hpp"
#include "selection.hpp"
#include "settings.hpp"
#include "summaries.hpp"

namespace oracle {

/// A copy of a decoder is a fork. Throws std::invalid_argument for wrong shapes.
class decoder {
 public:
  explicit decoder(settings s)
      : s_((check(s), std::move(s))),
        summaries_(static_cast<std::size_t>(s_.kv_heads)),
        selected_(static_cast<std::size_t>(s_.kv_heads)) {}

  const settings& config() const { return s_; }
  int length() const { return length_; }

  /// Appends `tokens` rows of keys and values, each (n_kv, d). Selection and q' are dropped.
  void prompt(std::span<const float> keys, std::span<const float> values, int tokens) {
    require(tokens >= 0, "a prompt has no negative length");
    if (tokens == 0) return;
    append(keys, values, tokens);
    previous_query_.reset();
    for (std::vector<int>& pages : selected_) pages.clear();
  }

  /// `q` is (n_qo, d); `k` and `v` are (n_kv, d) and belong to the token that attends.
  step_result step(std::span<const float> q, std::span<const float> k, std::span<const float> v) {
    require_query(q);
    append(k, v, 1);

    step_result result;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      row_result row;
      std::vector<int>& selected = selected_[static_cast<std::size_t>(kv_head)];
      row.selected_before = selected;

      if (s_.kind == layer_kind::retrieval) {
        flag(row, q, kv_head);
        if (row.corrected) {
          const selection chosen = choose(q, kv_head, length_);
          row.by_correct = movement_of(chosen.pages, selected);
          row.correct_margin = chosen.margin;
          row.correct_firm = is_firm(chosen);
          row.score_size = chosen.score_size;
          selected = chosen.pages;
        }
      }
      row.selected = selected;

      const std::vector<int> pages = attended_pages(s_, length_, selected);
      attend_group(q, kv_head, tokens_of(s_, length_, pages), result.out, result.lse);

      if (s_.kind == layer_kind::retrieval) {
        // Skipping this for a corrected head whose candidates stay the same would change nothing: the same
        // query over the same pages selects the same, and all of it is held.
        const selection chosen = choose(q, kv_head, length_ + 1);
        row.by_speculate = movement_of(chosen.pages, selected);
        row.speculate_margin = chosen.margin;
        row.speculate_firm = is_firm(chosen);
        row.score_size = std::max(row.score_size, chosen.score_size);
        selected = chosen.pages;
      }
      row.selected_next = selected;
      row.recalled = row.by_correct.recalled + row.by_speculate.recalled;
      row.promoted = row.by_correct.promoted + row.by_speculate.promoted;
      result.rows.push_back(row);
    }
    previous_query_ = std::vector<float>(q.begin(), q.end());
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
    require(s_.kind == layer_kind::retrieval, "only a retrieval layer selects");
    require(length >= 0 && length <= length_ + 1, "candidates at this length are not complete yet");
    const std::vector<int> candidates = candidate_pages(s_, length);
    std::vector<std::vector<double>> scores;
    std::vector<std::vector<double>> doubts;
    for (int g = 0; g < group_size(s_); ++g) {
      const std::span<const float> query = query_of(q, kv_head, g);
      std::vector<double> of_head, doubts_of_head;
      for (int page : candidates) {
        const page_summary& summary = summary_of(kv_head, page);
        of_head.push_back(score_page(s_, kv_head, query, summary));
        doubts_of_head.push_back(score_doubt(s_, kv_head, query, summary));
      }
      scores.push_back(of_head);
      doubts.push_back(doubts_of_head);
    }
    selection chosen = top_k(candidates, pool_mean_softmax(scores), s_.selected_pages);
    const pooled_range range = pool_mean_softmax_range(scores, doubts);
    chosen.slack = slack_of(chosen, range.low, range.high);
    measure_scores(chosen, q, kv_head);
    return chosen;
  }

  /// The pages of `choose`, ascending.
  std::vector<int> select(std::span<const float> q, int kv_head, int length) const {
    return choose(q, kv_head, length).pages;
  }

 private:
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
    if (s_.kind != layer_kind::retrieval) return;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      std::vector<page_summary>& of_head = summaries_[static_cast<std::size_t>(kv_head)];
      while (is_complete(s_, static_cast<int>(of_head.size()), length_)) {
        const int page = static_cast<int>(of_head.size());
        of_head.push_back(summarise(s_, kv_head, rows(keys_, kv_head, tokens_of(s_, length_, {page}))));
      }
    }
  }

  void flag(row_result& row, std::span<const float> q, int kv_head) const {
    if (s_.correction == correction_kind::always || !previous_query_) {
      row.corrected = true;
      row.flag_forced = true;
      return;
    }
    if (s_.correction == correction_kind::never) return;
    const int group = group_size(s_);
    const drift_result turn = drift(row_of(q, kv_head, group * s_.head_dim),
                                    row_of(*previous_query_, kv_head, group * s_.head_dim), group, s_.tau);
    row.corrected = turn.flagged;
    row.flag_forced = turn.forced;
    row.pooled_cosine = turn.pooled;
    row.norm_borderline = turn.norm_borderline;
  }

  movement movement_of(const std::vector<int>& wanted, const std::vector<int>& previously_selected) const {
    movement moved;
    if (s_.route == route_kind::in_place) return moved;
    for (int page : wanted) {
      const bool in_slots = std::find(previously_selected.begin(), previously_selected.end(), page) !=
                            previously_selected.end();
      if (in_slots) continue;
      if (is_in_ring(s_, page, length_))
        ++moved.promoted;
      else
        ++moved.recalled;
    }
    return moved;
  }

  void attend_group(std::span<const float> q, int kv_head, const std::vector<int>& tokens,
                    std::vector<double>& out, std::vector<double>& lse) const {
    for (int g = 0; g < group_size(s_); ++g) {
      const attention head = attend(query_of(q, kv_head, g), rows(keys_, kv_head, tokens),
                                    rows(values_, kv_head, tokens), s_.scale);
      out.insert(out.end(), head.out.begin(), head.out.end());
      lse.push_back(head.lse[0]);
    }
  }

  /// Bounds every score's terms by |q_d| times the largest |k_d| of any candidate's key. What is not finite
  /// is data with an exact meaning and does not count.
  void measure_scores(selection& chosen, std::span<const float> q, int kv_head) const {
    const auto d = static_cast<std::size_t>(s_.head_dim);
    std::vector<double> largest(d, 0.0);
    for (std::span<const float> key : rows(keys_, kv_head, tokens_of(s_, length_, chosen.candidates)))
      for (std::size_t i = 0; i < d; ++i) {
        double size = std::fabs(static_cast<double>(key[i]));
        if (s_.summary == summary_kind::key_subspace)
          size += std::fabs(s_.bases[static_cast<std::size_t>(kv_head)].mean[i]);
        if (std::isfinite(size)) largest[i] = std::max(largest[i], size);
      }
    for (int g = 0; g < group_size(s_); ++g) {
      double terms = 0.0;
      for (std::size_t i = 0; i < d; ++i) {
        const double size = std::fabs(static_cast<double>(query_of(q, kv_head, g)[i]));
        if (std::isfinite(size)) terms += size * largest[i];
      }
      chosen.score_size = std::max(chosen.score_size, s_.scale * terms);
      if (terms * std::max(1.0, s_.scale) > largest_float) chosen.may_overflow = true;
    }
    // A summary sums up to p keys, or the d terms of a projection, before any query is involved.
    for (double key : largest)
      if (key * std::max(s_.page, s_.head_dim) > largest_float) chosen.may_overflow = true;
  }

  std::span<const float> query_of(std::span<const float> q, int kv_head, int g) const {
    return row_of(q, kv_head * group_size(s_) + g, s_.head_dim);
  }

  const page_summary& summary_of(int kv_head, int page) const {
    return summaries_[static_cast<std::size_t>(kv_head)][static_cast<std::size_t>(page)];
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
  std::vector<std::vector<page_summary>> summaries_;  // per KV head, per complete page
  std::vector<std::vector<int>> selected_;            // per KV head, ascending
  std::optional<std::vector<float>> previous_query_;  // q'
};

}  // namespace oracle
