// One KV head's candidates, scored, pooled and selected from.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "numbers.hpp"
#include "pooling.hpp"
#include "selection.hpp"
#include "settings.hpp"
#include "summaries.hpp"

namespace oracle {

/// A group's queries are those of its heads in every row of a step, (m * G, d).
inline int query_count(const settings& s, std::span<const float> queries) {
  return static_cast<int>(queries.size()) / s.head_dim;
}

/// What pages are scored with, of a group's queries: each of them, or the one pooled query.
inline std::vector<std::vector<float>> scoring_queries(const settings& s, std::span<const float> queries) {
  if (is_of_queries(s.pooling)) return {pooled_query(s.pooling, queries, query_count(s, queries))};
  std::vector<std::vector<float>> each;
  for (int g = 0; g < query_count(s, queries); ++g) {
    const std::span<const float> query = row_of(queries, g, s.head_dim);
    each.emplace_back(query.begin(), query.end());
  }
  return each;
}

/// Scores of candidates, (queries, candidates), and how far each may differ.
struct candidate_scores {
  std::vector<std::vector<double>> scores, doubts;
  bool any_score_possible = false;  // of some candidate
};

inline candidate_scores score_candidates(const settings& s, int kv_head, std::span<const float> queries,
                                         const std::vector<page_summary>& of_candidates) {
  candidate_scores result;
  for (const std::vector<float>& query : scoring_queries(s, queries)) {
    std::vector<double> of_query, doubts_of_query;
    for (const page_summary& summary : of_candidates) {
      of_query.push_back(score_unit(s, kv_head, query, summary));
      doubts_of_query.push_back(score_doubt(s, kv_head, query, summary));
      result.any_score_possible = result.any_score_possible || doubts_of_query.back() == infinity;
    }
    result.scores.push_back(of_query);
    result.doubts.push_back(doubts_of_query);
  }
  return result;
}

/// A KV head's selection by scores among `candidates`, ascending.
inline selection select_by(const settings& s, int kv_head, const std::vector<int>& candidates,
                           const candidate_scores& scored) {
  const std::vector<double> pooled = pool(s.pooling, scored.scores);
  const bool by_mass = s.selection == selection_kind::top_p;
  const double temperature = temperature_of(s, kv_head);
  const bool sampled = s.selection == selection_kind::colliding;
  selection chosen = by_mass   ? top_p(candidates, pooled, s.selected_units, s.top_p, temperature)
                     : sampled ? colliding(candidates, pooled, s.selected_units)
                               : top_k(candidates, pooled, s.selected_units);
  const pooled_range range = pool_range(s.pooling, scored.scores, scored.doubts);
  chosen.low = range.low;
  chosen.high = range.high;
  chosen.slack = slack_of(chosen, range.low, range.high);
  chosen.counts =
      s.summary == summary_kind::key_signatures &&
      (s.pooling == pooling_kind::max_score || (scored.scores.size() == 1 && !is_softmax(s.pooling)));
  for (std::size_t j = 0; sampled && j < candidates.size(); ++j)
    if ((range.low[j] >= 2.0) != (range.high[j] >= 2.0)) chosen.admitted_firm = false;
  // Also a page at -inf may then come to lead.
  if (scored.any_score_possible && chosen.pages.size() < candidates.size()) chosen.slack = infinity;
  if (by_mass) chosen.mass_margin = mass_margin_of(chosen, s.selected_units, s.top_p, temperature);
  if (s.pooling == pooling_kind::mean_score && mean_score_may_overflow(scored.scores))
    chosen.may_overflow = true;
  return chosen;
}

/// coarse_to_fine: the `times * k` best candidates by the coarse summary, then the selection by the fine one,
/// for which the other candidates score -inf. `of_candidates` are theirs.
inline selection select_in_two_stages(const settings& s, int kv_head, std::span<const float> queries,
                                      const std::vector<int>& candidates,
                                      const std::vector<page_summary>& of_candidates) {
  const auto stage = [&](std::size_t nth) {
    std::vector<page_summary> summaries;
    for (const page_summary& both : of_candidates) summaries.push_back(both.stages[nth]);
    return score_candidates(with_summary(s, nth == 0 ? s.coarse : s.fine), kv_head, queries, summaries);
  };
  settings keeping = s;
  keeping.selection = selection_kind::top_k;
  keeping.selected_units = s.times * s.selected_units;
  const selection kept = select_by(keeping, kv_head, candidates, stage(0));

  candidate_scores fine = stage(1);
  fine.any_score_possible = false;
  for (std::size_t g = 0; g < fine.scores.size(); ++g)
    for (std::size_t j = 0; j < candidates.size(); ++j) {
      if (std::find(kept.pages.begin(), kept.pages.end(), candidates[j]) == kept.pages.end()) {
        fine.scores[g][j] = -infinity;
        fine.doubts[g][j] = 0.0;
      }
      fine.any_score_possible = fine.any_score_possible || fine.doubts[g][j] == infinity;
    }
  selection chosen = select_by(s, kv_head, candidates, fine);
  chosen.kept_firm = is_firm(kept);
  chosen.may_overflow = chosen.may_overflow || kept.may_overflow;
  return chosen;
}

/// A selection with a group's queries among `candidates`, ascending; `summaries` holds every complete page's.
inline selection select_pages(const settings& s, int kv_head, std::span<const float> queries,
                              const std::vector<int>& candidates,
                              const std::vector<page_summary>& summaries) {
  std::vector<page_summary> of_candidates;
  for (int page : candidates) of_candidates.push_back(summaries[page]);
  if (s.summary == summary_kind::coarse_to_fine)
    return select_in_two_stages(s, kv_head, queries, candidates, of_candidates);
  return select_by(s, kv_head, candidates, score_candidates(s, kv_head, queries, of_candidates));
}

/// Bounds every score's terms by |q_d| times the largest |k_d| of `keys`, all candidates' keys; those of
/// key_codes by its largest centroids, those of coarse_to_fine by both stages'. What is not finite is data
/// with an exact meaning and does not count.
inline void measure_scores(selection& chosen, const settings& s, int kv_head, std::span<const float> queries,
                           const std::vector<std::span<const float>>& keys) {
  if (s.summary == summary_kind::coarse_to_fine) {
    for (summary_kind stage : {s.coarse, s.fine})
      measure_scores(chosen, with_summary(s, stage), kv_head, queries, keys);
    return;
  }
  const auto d = static_cast<std::size_t>(s.head_dim);
  std::vector<double> largest(d, 0.0);
  for (std::span<const float> key : keys)
    for (std::size_t i = 0; i < d; ++i) {
      double size = std::fabs(static_cast<double>(key[i]));
      if (s.summary == summary_kind::key_subspace || s.summary == summary_kind::key_signatures)
        size += std::fabs(s.bases[kv_head].mean[i]);
      if (std::isfinite(size)) largest[i] = std::max(largest[i], size);
    }
  // The difference of two keys: what these sum up before any query is involved.
  const bool of_differences = s.summary == summary_kind::centroid_box || s.summary == summary_kind::ball ||
                              s.summary == summary_kind::key_sketch || s.summary == summary_kind::key_codes;
  for (double key : largest)
    if (key * (of_differences ? 2.0 : 1.0) * std::max(s.page, s.head_dim) > largest_float)
      chosen.may_overflow = true;
  const double radius = 2.0 * std::sqrt(dot(largest, largest));
  const bool has_norms = s.summary == summary_kind::ball;
  if (has_norms && radius * radius > largest_float) chosen.may_overflow = true;
  const bool of_codes = s.summary == summary_kind::key_codes,
             of_clusters = s.summary == summary_kind::key_clusters,
             of_signatures = s.summary == summary_kind::key_signatures;
  if (of_signatures) {
    chosen.score_size = std::max(chosen.score_size, static_cast<double>(s.tables));
    if (signature_product_size(largest, s, s.bases[kv_head]) > largest_float) chosen.may_overflow = true;
  }
  if (of_clusters &&
      cluster_product_size(largest, s.bases[kv_head]) * std::max(s.page, s.head_dim) > largest_float)
    chosen.may_overflow = true;
  if (of_codes && codes_square_size(largest, s.key_codebooks[kv_head]) > largest_float)
    chosen.may_overflow = true;
  // A code's step is that of its group's largest number, whichever element that is.
  const double most = d == 0 ? 0.0 : *std::max_element(largest.begin(), largest.end());
  if (s.summary == summary_kind::key_sketch)
    for (double& key : largest) key += 2.0 * most;

  for (const std::vector<float>& query : scoring_queries(s, queries)) {
    double terms = 0.0, squares = 0.0;
    for (std::size_t i = 0; i < d; ++i) {
      const double size = std::fabs(static_cast<double>(query[i]));
      if (!std::isfinite(size)) continue;
      terms += size * largest[i];
      squares += size * size;
    }
    if (has_norms) terms += std::sqrt(squares) * radius;
    if (of_codes) {
      const codebooks& books = s.key_codebooks[kv_head];
      terms = codes_score_size(query, books);
      if (codes_projection_size(query, books) > largest_float) chosen.may_overflow = true;
    }
    if (of_clusters) terms = cluster_score_size(query, s.bases[kv_head]);
    if (of_signatures) {
      terms = 0.0;
      if (signature_product_size(query, s, s.bases[kv_head]) > largest_float) chosen.may_overflow = true;
    }
    if (has_norms && squares > largest_float) chosen.may_overflow = true;
    chosen.score_size = std::max(chosen.score_size, selection_scale(s, kv_head) * terms);
    if (terms * std::max(1.0, selection_scale(s, kv_head)) > largest_float) chosen.may_overflow = true;
  }
  if (s.pooling != pooling_kind::mean_query) return;
  for (std::size_t i = 0; i < d; ++i) {
    double sum = 0.0;
    for (int g = 0; g < query_count(s, queries); ++g) {
      const double size = std::fabs(static_cast<double>(row_of(queries, g, s.head_dim)[i]));
      if (std::isfinite(size)) sum += size;
    }
    if (sum > largest_float) chosen.may_overflow = true;
  }
}

}  // namespace oracle
