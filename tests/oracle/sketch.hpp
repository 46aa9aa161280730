// key_sketch: a page's mean key, and per token what its key adds to it, in 1, 2 or 4 bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "codes.hpp"
#include "formats.hpp"
#include "numbers.hpp"

namespace oracle {

/// The page's mean key (d), as sums of `keys`.
inline summary_numbers mean_key(const std::vector<std::span<const float>>& keys) {
  summary_numbers mean;
  for (std::size_t i = 0; i < keys[0].size(); ++i) {
    double sum = 0.0, size = 0.0;
    for (std::span<const float> key : keys) {
      sum += static_cast<double>(key[i]);
      size += std::fabs(static_cast<double>(key[i]));
    }
    mean.add(sum / static_cast<double>(keys.size()), size / static_cast<double>(keys.size()));
  }
  return mean;
}

/// (1 + p, d): the mean, then the residuals as they read back from their codes.
inline page_summary sketch_summary(const std::vector<std::span<const float>>& keys, int bits) {
  const summary_numbers mean = mean_key(keys);
  page_summary summary{mean.values, std::vector<double>(mean.values.size(), 0.0)};
  for (std::span<const float> key : keys) {
    summary_numbers residual;
    for (std::size_t i = 0; i < key.size(); ++i) {
      const double element = static_cast<double>(key[i]);
      residual.add(element - mean.values[i], std::fabs(element) + mean.sizes[i]);
    }
    const bool sign = bits == 1;
    for (double value : sign ? signed_means(residual.values) : quantised(residual.values, bits))
      summary.values.push_back(value);
    for (double doubt : sign ? sign_doubt(residual.values, residual.sizes)
                             : code_doubt(residual.values, residual.sizes, bits))
      summary.doubt.push_back(doubt);
  }
  return summary;
}

/// scale * (<q, m> + <q, r_t>) of every token.
inline std::vector<double> sketch_exponents(std::span<const float> q, const std::vector<double>& summary,
                                            double scale) {
  const int d = static_cast<int>(q.size());
  const int tokens = static_cast<int>(summary.size() / q.size()) - 1;
  std::vector<double> exponents;
  for (int t = 0; t < tokens; ++t)
    exponents.push_back(scale * (dot(q, row_of(summary, 0, d)) + dot(q, row_of(summary, 1 + t, d))));
  return exponents;
}

inline double sketch_score(std::span<const float> q, const std::vector<double>& summary, double scale) {
  return log_sum_exp(sketch_exponents(q, summary, scale));
}

inline double sketch_score_doubt(std::span<const float> q, const page_summary& summary, double scale) {
  const int d = static_cast<int>(q.size());
  const int tokens = static_cast<int>(summary.values.size() / q.size()) - 1;
  std::vector<double> moves;
  for (int t = 0; t < tokens; ++t) moves.push_back(scale * product_doubt(q, row_of(summary.doubt, 1 + t, d)));
  return log_sum_exp_doubt(sketch_exponents(q, summary.values, scale), moves);
}

}  // namespace oracle
