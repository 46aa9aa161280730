// Who shares one selection: a KV head's query heads, nobody, or all KV heads of the layer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "numbers.hpp"
#include "pooling.hpp"
#include "results.hpp"
#include "selection.hpp"
#include "settings.hpp"

namespace oracle {

/// What a KV head holds, and where each of its query heads selects for itself, what each attends to.
struct row_choice {
  selection all;
  std::vector<std::vector<int>> own = {};  // per query head of the group; empty: all attend to `all`
};

/// Of `queries`, (m * G, d), those of query head g: (m, d).
inline std::vector<float> queries_of_head(const settings& s, std::span<const float> queries, int g) {
  std::vector<float> own;
  for (std::size_t row = 0; row < queries.size() / static_cast<std::size_t>(s.head_dim); ++row) {
    if (static_cast<int>(row) % group_size(s) != g) continue;
    const std::span<const float> query = row_of(queries, static_cast<int>(row), s.head_dim);
    own.insert(own.end(), query.begin(), query.end());
  }
  return own;
}

/// Each query head's selection, and the pages that any of them has. Firm where all of them are.
inline row_choice max_with(const std::vector<selection>& of_heads) {
  row_choice choice;
  std::vector<int>& pages = choice.all.pages;
  for (const selection& one : of_heads) {
    choice.own.push_back(one.pages);
    pages.insert(pages.end(), one.pages.begin(), one.pages.end());
    choice.all.candidates = one.candidates;
    if (one.counts)  // margins say nothing of equal counts
      choice.all.admitted_firm = choice.all.admitted_firm && one.admitted_firm && counted_firmly(one);
    else
      choice.all.margin = std::min(choice.all.margin, one.margin - one.slack);
    choice.all.mass_margin = std::min(choice.all.mass_margin, one.mass_margin);
    choice.all.score_size = std::max(choice.all.score_size, one.score_size);
    choice.all.may_overflow = choice.all.may_overflow || one.may_overflow;
    choice.all.kept_firm = choice.all.kept_firm && one.kept_firm;
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  return choice;
}

/// One selection with the pooled scores of several KV heads, each of which is a row of scores here.
inline selection select_together(const settings& s, const std::vector<selection>& of_heads) {
  std::vector<std::vector<double>> pooled, low, high;
  for (const selection& one : of_heads) {
    pooled.push_back(one.pooled);
    low.push_back(one.low);
    high.push_back(one.high);
  }
  const pooling_kind kind = is_softmax(s.pooling) ? pooling_kind::mean_softmax : pooling_kind::mean_score;
  const std::vector<int>& candidates = of_heads[0].candidates;
  const std::vector<double> scores = pool(kind, pooled);
  const bool by_mass = s.selection == selection_kind::top_p;
  selection chosen = by_mass ? top_p(candidates, scores, s.selected_units, s.top_p)
                             : top_k(candidates, scores, s.selected_units);
  // A share is least where its own score is low and the mass it is part of is high.
  chosen.low = pool_settled(kind, low, log_masses(high));
  chosen.high = pool_settled(kind, high, log_masses(low));
  chosen.slack = slack_of(chosen, chosen.low, chosen.high);
  if (by_mass) chosen.mass_margin = mass_margin_of(chosen, s.selected_units, s.top_p);
  for (const selection& one : of_heads) {
    if (one.slack == infinity) chosen.slack = infinity;
    chosen.score_size = std::max(chosen.score_size, one.score_size);
    chosen.may_overflow = chosen.may_overflow || one.may_overflow;
  }
  if (kind == pooling_kind::mean_score && mean_score_may_overflow(pooled)) chosen.may_overflow = true;
  return chosen;
}

/// One flagged head flags all that select together. Their flags are then those of one that decides: a head
/// that is flagged beyond doubt, or else one that may be.
inline void share_flags(std::vector<row_result*> rows, double tau) {
  const row_result* decider = nullptr;
  bool any = false;
  for (const row_result* row : rows) {
    any = any || row->corrected;
    if (decider == nullptr && row->corrected && flag_is_firm(*row, tau)) decider = row;
  }
  for (const row_result* row : rows)
    if (decider == nullptr && !flag_is_firm(*row, tau)) decider = row;
  if (decider == nullptr) return;
  const row_result flags = *decider;
  for (row_result* row : rows) {
    row->corrected = any;
    row->pooled_cosine = flags.pooled_cosine;
    row->flag_forced = flags.flag_forced;
    row->norm_borderline = flags.norm_borderline;
  }
}

}  // namespace oracle
