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
  std::vector<double> lse_doubt = {};     // as `lse`: what doubts of log-weights make of it
  std::vector<double> lse_rounding = {};  // as `lse`: what float32 may be off by, as `doubt`
};

/// What a model's attention adds to the plain one's.
struct attention_extras {
  double soft_cap = 0.0;                    // scores become soft_cap * tanh(score / soft_cap); 0: none
  double sink_logit = -infinity;            // the score of a further token, whose value is 0
  std::span<const float> log_weights = {};  // of tokens, added to their scores after the cap; none: all 0
  std::span<const double> sampled = {};     // the same in float64
  std::span<const double> doubts = {};      // of `sampled`
};

/// Adds `weight` times `value` to `sum`.
FREEKV_ORACLE_LOOP inline void add_scaled(std::vector<double>& sum, double weight,
                                          std::span<const float> value) {
  double* const to = sum.data();
  const float* const from = value.data();
  for (std::size_t i = 0, n = sum.size(); i < n; ++i) to[i] += weight * static_cast<double>(from[i]);
}

/// Adds `weight` times what `value` is from `centre`.
FREEKV_ORACLE_LOOP inline void add_distance(std::vector<double>& sum, double weight,
                                            std::span<const float> value, const std::vector<double>& centre) {
  double* const to = sum.data();
  const float* const from = value.data();
  const double* const middle = centre.data();
  for (std::size_t i = 0, n = sum.size(); i < n; ++i)
    to[i] += weight * std::fabs(static_cast<double>(from[i]) - middle[i]);
}

/// `keys` and `values` hold one row of d elements per attended token. A NaN or +inf score makes output and
/// lse NaN; with no token, or scores of -inf alone, the output is 0 and the lse -inf.
inline attention attend(std::span<const float> q, const std::vector<std::span<const float>>& keys,
                        const std::vector<std::span<const float>>& values, double scale,
                        const attention_extras& extras = {}) {
  attention result{
      std::vector<double>(q.size(), 0.0), {-infinity}, std::vector<double>(q.size(), 0.0), {0.0}, {0.0}};
  std::vector<double> scores, terms, weights;
  double top = extras.sink_logit;
  for (std::span<const float> key : keys) {
    const product_sums sums = products_of(q, key);
    const double score = scale * sums.product;
    terms.push_back(scale * sums.size);
    scores.push_back(extras.soft_cap > 0.0 ? extras.soft_cap * std::tanh(score / extras.soft_cap) : score);
    if (!extras.log_weights.empty())
      scores.back() += static_cast<double>(extras.log_weights[scores.size() - 1]);
    if (!extras.sampled.empty()) scores.back() += extras.sampled[scores.size() - 1];
    top = max_or_nan(top, scores.back());
  }
  if (top == -infinity) return result;

  double sum = std::exp(extras.sink_logit - top);
  for (std::size_t t = 0; t < scores.size(); ++t) {
    weights.push_back(std::exp(scores[t] - top));
    sum += weights[t];
    add_scaled(result.out, weights[t], values[t]);
  }
  for (double& element : result.out) element /= sum;
  for (std::size_t t = 0; t < scores.size(); ++t) {
    const double share = weights[t] / sum;
    const double of_weight = extras.doubts.empty() ? 0.0 : extras.doubts[t] * share;
    const double error = float_sum_error * terms[t] * share + of_weight;
    result.lse_doubt[0] += of_weight;
    result.lse_rounding[0] += error;
    add_distance(result.doubt, error, values[t], result.out);
  }
  result.lse[0] = top + std::log(sum);
  return result;
}

}  // namespace oracle
