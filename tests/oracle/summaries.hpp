// Page summaries and the scores of query heads against them. Scores are raw: pooling.hpp settles NaN and
// infinity.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "numbers.hpp"
#include "settings.hpp"
#include "subspace.hpp"

namespace oracle {

/// (2, d): elementwise minimum, then maximum, of a page's keys.
inline std::vector<double> min_max_summary(const std::vector<std::span<const float>>& keys) {
  const std::size_t d = keys[0].size();
  std::vector<double> summary(2 * d);
  for (std::size_t i = 0; i < d; ++i) {
    double low = static_cast<double>(keys[0][i]);
    double high = low;
    for (std::span<const float> key : keys) {
      low = min_or_nan(low, static_cast<double>(key[i]));
      high = max_or_nan(high, static_cast<double>(key[i]));
    }
    summary[i] = low;
    summary[d + i] = high;
  }
  return summary;
}

/// scale * sum_d max(q_d * min_d, q_d * max_d).
inline double min_max_score(std::span<const float> q, const std::vector<double>& summary, double scale) {
  double sum = 0.0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const double element = static_cast<double>(q[i]);
    sum += max_or_nan(element * summary[i], element * summary[q.size() + i]);
  }
  return scale * sum;
}

/// (p / chunk, d): the mean key of every `chunk` consecutive tokens of a page.
inline std::vector<double> chunk_means_summary(const std::vector<std::span<const float>>& keys, int chunk) {
  const std::size_t d = keys[0].size();
  const auto u = static_cast<std::size_t>(chunk);
  std::vector<double> summary;
  for (std::size_t first = 0; first < keys.size(); first += u)
    for (std::size_t i = 0; i < d; ++i) {
      double sum = 0.0;
      for (std::size_t t = first; t < first + u; ++t) sum += static_cast<double>(keys[t][i]);
      summary.push_back(sum / static_cast<double>(chunk));
    }
  return summary;
}

/// ln sum_b exp(scale * <q, m_b>).
inline double chunk_means_score(std::span<const float> q, const std::vector<double>& summary, double scale) {
  const int d = static_cast<int>(q.size());
  const int chunks = static_cast<int>(summary.size() / q.size());
  std::vector<double> exponents;
  for (int b = 0; b < chunks; ++b) exponents.push_back(scale * dot(q, row_of(summary, b, d)));
  return log_sum_exp(exponents);
}

/// `values` is what the policy stores, read back; `doubt` how far a value may legitimately differ (only
/// key_subspace has such, for the others it is empty).
struct page_summary {
  std::vector<double> values;
  std::vector<double> doubt;
};

/// The summary of one KV head's complete page, `keys` being its p rows.
inline page_summary summarise(const settings& s, int kv_head,
                              const std::vector<std::span<const float>>& keys) {
  if (s.summary == summary_kind::min_max) return {min_max_summary(keys), {}};
  if (s.summary == summary_kind::chunk_means) return {chunk_means_summary(keys, s.chunk), {}};
  const basis& b = s.bases[static_cast<std::size_t>(kv_head)];
  return {subspace_summary(keys, b, s.bits), subspace_doubt(keys, b, s.bits)};
}

inline double score_page(const settings& s, int kv_head, std::span<const float> q,
                         const page_summary& summary) {
  if (s.summary == summary_kind::min_max) return min_max_score(q, summary.values, s.scale);
  if (s.summary == summary_kind::chunk_means) return chunk_means_score(q, summary.values, s.scale);
  return subspace_score(q, summary.values, s.bases[static_cast<std::size_t>(kv_head)], s.scale);
}

inline double score_doubt(const settings& s, int kv_head, std::span<const float> q,
                          const page_summary& summary) {
  if (s.summary != summary_kind::key_subspace) return 0.0;
  return subspace_score_doubt(q, summary.values, summary.doubt, s.bases[static_cast<std::size_t>(kv_head)],
                              s.scale);
}

}  // namespace oracle
