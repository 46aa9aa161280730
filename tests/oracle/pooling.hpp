// From the scores of a group's query heads to one score per page.
#pragma once

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "numbers.hpp"

namespace oracle {

/// Scores are float32 by specification: what lies beyond its range is infinite, and +inf counts as the
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

/// L_g = ln sum_j exp s_g(j) of every head, over the candidates given.
inline std::vector<double> log_masses(const std::vector<std::vector<double>>& scores) {
  std::vector<double> masses;
  for (const auto& head : scores) masses.push_back(log_sum_exp(head));
  return masses;
}

/// ln sum_g exp(s_g(j) - L_g) - ln G for every candidate j, from settled scores.
inline std::vector<double> pool_shares(const std::vector<std::vector<double>>& scores,
                                       const std::vector<double>& masses) {
  std::vector<double> pooled;
  for (std::size_t j = 0; j < scores[0].size(); ++j) {
    std::vector<double> shares;
    for (std::size_t g = 0; g < scores.size(); ++g)
      // A head at -inf has no share here; its L may be -inf too, which would make the share NaN.
      if (scores[g][j] != -infinity) shares.push_back(scores[g][j] - masses[g]);
    pooled.push_back(clamped(log_sum_exp(shares) - std::log(static_cast<double>(scores.size()))));
  }
  return pooled;
}

/// mean_softmax as a logarithm. `raw_scores` is (G, candidates).
inline std::vector<double> pool_mean_softmax(const std::vector<std::vector<double>>& raw_scores) {
  const std::vector<std::vector<double>> scores = settled(raw_scores);
  return pool_shares(scores, log_masses(scores));
}

/// The least or the most that the pooled scores can be when raw score s_g(j) may move by doubt[g][j].
struct pooled_range {
  std::vector<double> low;
  std::vector<double> high;
};

inline pooled_range pool_mean_softmax_range(std::vector<std::vector<double>> raw_scores,
                                            const std::vector<std::vector<double>>& doubt) {
  std::vector<std::vector<double>> lower = raw_scores;
  std::vector<std::vector<double>> higher = std::move(raw_scores);
  for (std::size_t g = 0; g < doubt.size(); ++g)
    for (std::size_t j = 0; j < doubt[g].size(); ++j) {
      lower[g][j] -= doubt[g][j];
      higher[g][j] += doubt[g][j];
    }
  lower = settled(lower);
  higher = settled(higher);
  // A share is least where its own score is low and the mass it is part of is high.
  return {pool_shares(lower, log_masses(higher)), pool_shares(higher, log_masses(lower))};
}

}  // namespace oracle
