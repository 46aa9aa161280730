// From the queries of a group, or their scores, to one score per page.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

/// Scores are float32 (docs/contract.md, 1.2): what lies beyond its range is infinite, and +inf counts as the
/// largest finite float. NaN stays: what it means depends on the other heads of the group.
inline double clamped(double score) {
  if (score > largest_float) return largest_float;
  if (score < -largest_float) return -infinity;
  return score;
}

/// scores[g][j] of query head g and candidate j, raw. A page that is NaN for one head is -inf for all.
inline std::vector<std::vector<double>> settled(std::vector<std::vector<double>> scores) {
  const std::size_t pages = scores[0].size();
  for (std::size_t j = 0; j < pages; ++j) {
    bool any_nan = false;
    for (const auto& head : scores) any_nan = any_nan || std::isnan(head[j]);
    for (auto& head : scores) head[j] = any_nan ? -infinity : clamped(head[j]);
  }
  return scores;
}

inline bool is_softmax(pooling_kind kind) {
  return kind == pooling_kind::mean_softmax || kind == pooling_kind::max_softmax;
}

inline bool is_of_queries(pooling_kind kind) {
  return kind == pooling_kind::mean_query || kind == pooling_kind::max_query;
}

/// The one query that stands for a group's queries (G, d): their elementwise mean or maximum, NaN where any
/// of them is.
inline std::vector<float> pooled_query(pooling_kind kind, std::span<const float> queries, int group) {
  const std::size_t d = queries.size() / static_cast<std::size_t>(group);
  std::vector<float> pooled;
  for (std::size_t i = 0; i < d; ++i) {
    double sum = 0.0, largest = -infinity;
    for (std::size_t g = 0; g < static_cast<std::size_t>(group); ++g) {
      const double element = static_cast<double>(queries[g * d + i]);
      sum += element;
      largest = max_or_nan(largest, element);
    }
    pooled.push_back(
        static_cast<float>(kind == pooling_kind::max_query ? largest : sum / static_cast<double>(group)));
  }
  return pooled;
}

/// L_g = ln sum_j exp s_g(j) of every head, over the candidates given.
inline std::vector<double> log_masses(const std::vector<std::vector<double>>& scores) {
  std::vector<double> masses;
  for (const auto& head : scores) masses.push_back(log_sum_exp(head));
  return masses;
}

/// One score per candidate from settled scores. `masses` are log_masses, which softmax poolings alone read:
/// ln sum_g exp(s_g(j) - L_g) - ln G, or max_g (s_g(j) - L_g). The others take the scores as they are; for
/// mean_query and max_query there is one row of them, that of the pooled query.
inline std::vector<double> pool_settled(pooling_kind kind, const std::vector<std::vector<double>>& scores,
                                        const std::vector<double>& masses) {
  const double group = static_cast<double>(scores.size());
  std::vector<double> pooled;
  for (std::size_t j = 0; j < scores[0].size(); ++j) {
    std::vector<double> shares;
    double largest_share = -infinity, sum = 0.0, largest = -infinity;
    for (std::size_t g = 0; g < scores.size(); ++g) {
      sum += scores[g][j] / group;
      largest = std::max(largest, scores[g][j]);
      // A head at -inf has no share here; its L may be -inf too, which would make the share NaN.
      if (!is_softmax(kind) || scores[g][j] == -infinity) continue;
      shares.push_back(scores[g][j] - masses[g]);
      largest_share = std::max(largest_share, shares.back());
    }
    switch (kind) {
      case pooling_kind::mean_softmax:
        pooled.push_back(clamped(log_sum_exp(shares) - std::log(group)));
        break;
      case pooling_kind::max_softmax:
        pooled.push_back(clamped(largest_share));
        break;
      case pooling_kind::max_score:
        pooled.push_back(clamped(largest));
        break;
      default:
        pooled.push_back(clamped(sum));
    }
  }
  return pooled;
}

/// `raw_scores` is (G, candidates), or (1, candidates) for mean_query and max_query.
inline std::vector<double> pool(pooling_kind kind, const std::vector<std::vector<double>>& raw_scores) {
  const std::vector<std::vector<double>> scores = settled(raw_scores);
  return pool_settled(kind, scores, log_masses(scores));
}

inline std::vector<double> pool_mean_softmax(const std::vector<std::vector<double>>& raw_scores) {
  return pool(pooling_kind::mean_softmax, raw_scores);
}

/// The least or the most that the pooled scores can be when raw score s_g(j) may move by doubt[g][j].
struct pooled_range {
  std::vector<double> low;
  std::vector<double> high;
};

inline pooled_range pool_range(pooling_kind kind, const std::vector<std::vector<double>>& raw_scores,
                               const std::vector<std::vector<double>>& doubt) {
  std::vector<std::vector<double>> lower = raw_scores;
  std::vector<std::vector<double>> higher = raw_scores;
  for (std::size_t g = 0; g < doubt.size(); ++g)
    for (std::size_t j = 0; j < doubt[g].size(); ++j) {
      // Where any score is possible a sum with an infinite or NaN score would not say so.
      const bool any = doubt[g][j] == infinity;
      lower[g][j] = any ? -infinity : lower[g][j] - doubt[g][j];
      higher[g][j] = any ? infinity : higher[g][j] + doubt[g][j];
    }
  lower = settled(lower);
  higher = settled(higher);
  // A share is least where its own score is low and the mass it is part of is high.
  return {pool_settled(kind, lower, log_masses(higher)), pool_settled(kind, higher, log_masses(lower))};
}

inline pooled_range pool_mean_softmax_range(const std::vector<std::vector<double>>& raw_scores,
                                            const std::vector<std::vector<double>>& doubt) {
  return pool_range(pooling_kind::mean_softmax, raw_scores, doubt);
}

/// Float32 sums of one page's scores may leave float32's range, and then the page's mean score is not its
/// own.
inline bool mean_score_may_overflow(const std::vector<std::vector<double>>& raw_scores) {
  const std::vector<std::vector<double>> scores = settled(raw_scores);
  for (std::size_t j = 0; j < scores[0].size(); ++j) {
    double sum = 0.0;
    for (const auto& head : scores)
      if (head[j] != -infinity) sum += std::fabs(head[j]);
    if (sum > largest_float * (1.0 + 1e-8)) return true;
  }
  return false;
}

}  // namespace oracle
