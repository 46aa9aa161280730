// Exact attention of one query over a list of tokens.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "codes.hpp"
#include "numbers.hpp"

namespace oracle {

/// Of one query head, `out` is (d) and `lse` one number; of a layer, (n_qo, d) and (n_qo).
struct attention {
  std::vector<double> out;
  std::vector<double> lse;
  // As `out`: what float32 may be off by, where each score is by its part of what the score's absolute terms
  // add up to.
  std::vector<double> doubt = {};
  std::vector<double> lse_doubt = {};  // as `lse`: what doubts of log-weights make of it
};

/// What a model's attention adds to the plain one's.
struct attention_extras {
  double soft_cap = 0.0;                    // scores become soft_cap * tanh(score / soft_cap); 0: none
  double sink_logit = -infinity;            // the score of a further token, whose value is 0
  std::span<const float> log_weights = {};  // of tokens, added to their scores after the cap; none: all 0
  std::span<const double> sampled = {};     // the same in float64
  std::span<const double> doubts = {};      // of `sampled`
};

/// `keys` and `values` hold one row of d elements per attended token. A NaN or +inf score makes output and
/// lse NaN; with no token, or scores of -inf alone, the output is 0 and the lse -inf.
inline attention attend(std::span<const float> q, const std::vector<std::span<const float>>& keys,
                        const std::vector<std::span<const float>>& values, double scale,
                        const attention_extras& extras = {}) {
  attention result{
      std::vector<double>(q.size(), 0.0), {-infinity}, std::vector<double>(q.size(), 0.0), {0.0}};
  std::vector<double> scores, terms;
  double top = extras.sink_logit;
  for (std::span<const float> key : keys) {
    const double score = scale * dot(q, key);
    double size = 0.0;
    for (std::size_t i = 0; i < q.size(); ++i)
      size += std::fabs(static_cast<double>(q[i]) * static_cast<double>(key[i]));
    terms.push_back(scale * size);
    scores.push_back(extras.soft_cap > 0.0 ? extras.soft_cap * std::tanh(score / extras.soft_cap) : score);
    if (!extras.log_weights.empty())
      scores.back() += static_cast<double>(extras.log_weights[scores.size() - 1]);
    if (!extras.sampled.empty()) scores.back() += extras.sampled[scores.size() - 1];
    top = max_or_nan(top, scores.back());
  }
  if (top == -infinity) return result;

  double sum = std::exp(extras.sink_logit - top);
  for (std::size_t t = 0; t < scores.size(); ++t) {
    const double weight = std::exp(scores[t] - top);
    sum += weight;
    for (std::size_t i = 0; i < q.size(); ++i) result.out[i] += weight * static_cast<double>(values[t][i]);
  }
  for (double& element : result.out) element /= sum;
  for (std::size_t t = 0; t < scores.size(); ++t) {
    const double share = std::exp(scores[t] - top) / sum;
    const double of_weight = extras.doubts.empty() ? 0.0 : extras.doubts[t] * share;
    const double error = float_sum_error * terms[t] * share + of_weight;
    result.lse_doubt[0] += of_weight;
    for (std::size_t i = 0; i < q.size(); ++i)
      result.doubt[i] += error * std::fabs(static_cast<double>(values[t][i]) - result.out[i]);
  }
  result.lse[0] = top + std::log(sum);
  return result;
}

}  // namespace oracle
