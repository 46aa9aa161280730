// Page summaries and the scores of query heads against them. Scores are raw: pooling.hpp settles NaN and
// infinity.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include "clusters.hpp"
#include "codes.hpp"
#include "formats.hpp"
#include "key_codes.hpp"
#include "numbers.hpp"
#include "settings.hpp"
#include "signatures.hpp"
#include "sketch.hpp"
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

/// scale * sum_d max(q_d * low_d, q_d * high_d): of min_max and centroid_box.
inline double min_max_score(std::span<const float> q, const std::vector<double>& summary, double scale) {
  double sum = 0.0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const double element = static_cast<double>(q[i]);
    sum += max_or_nan(element * summary[i], element * summary[q.size() + i]);
  }
  return scale * sum;
}

/// (2, d): centre - h, then centre + h, centre being (min + max) / 2 and h the mean of |k_t - centre|.
inline summary_numbers centroid_box_numbers(const std::vector<std::span<const float>>& keys) {
  const std::size_t d = keys[0].size();
  const std::vector<double> range = min_max_summary(keys);
  summary_numbers box{std::vector<double>(2 * d), std::vector<double>(2 * d)};
  for (std::size_t i = 0; i < d; ++i) {
    const double centre = (range[i] + range[d + i]) / 2.0;
    const double centre_size = (std::fabs(range[i]) + std::fabs(range[d + i])) / 2.0;
    double sum = 0.0, size = 0.0;
    for (std::span<const float> key : keys) {
      sum += std::fabs(static_cast<double>(key[i]) - centre);
      size += std::fabs(static_cast<double>(key[i])) + centre_size;
    }
    const double h = sum / static_cast<double>(keys.size());
    box.values[i] = centre - h;
    box.values[d + i] = centre + h;
    box.sizes[i] = box.sizes[d + i] = centre_size + size / static_cast<double>(keys.size());
  }
  return box;
}

/// (d + 1): the mean key c, then r = max_t |k_t - c|.
inline summary_numbers ball_numbers(const std::vector<std::span<const float>>& keys) {
  summary_numbers ball = mean_key(keys);
  double radius = 0.0, size = 0.0;
  for (std::span<const float> key : keys) {
    double squares = 0.0, square_sizes = 0.0;
    for (std::size_t i = 0; i < key.size(); ++i) {
      const double element = static_cast<double>(key[i]);
      squares += (element - ball.values[i]) * (element - ball.values[i]);
      square_sizes += std::pow(std::fabs(element) + ball.sizes[i], 2.0);
    }
    radius = max_or_nan(radius, std::sqrt(squares));
    size = max_or_nan(size, std::sqrt(square_sizes));
  }
  ball.add(radius, size);
  return ball;
}

/// scale * (<q, c> + |q| * r).
inline double ball_score(std::span<const float> q, const std::vector<double>& summary, double scale) {
  const double radius = summary[q.size()];
  return scale * (dot(q, row_of(summary, 0, static_cast<int>(q.size()))) + std::sqrt(dot(q, q)) * radius);
}

inline double ball_score_doubt(std::span<const float> q, const page_summary& summary, double scale) {
  const double norm = std::sqrt(dot(q, q));
  const double radius = summary.values[q.size()];
  double doubt = 0.0;
  if (!summary.doubt.empty()) {
    const std::vector<double> norm_only{norm};
    doubt = product_doubt(q, row_of(summary.doubt, 0, static_cast<int>(q.size()))) +
            product_doubt(norm_only, row_of(summary.doubt, static_cast<int>(q.size()), 1));
  }
  // Squares that float32 holds as subnormal numbers, or not at all, say little of a norm.
  const double smallest = static_cast<double>(std::numeric_limits<float>::min());
  const double terms = smallest * static_cast<double>(q.size());
  if ((norm * norm < terms || radius * radius < terms) && std::isfinite(norm * radius))
    doubt += std::sqrt(terms) * std::max(norm, radius);
  return scale * doubt;
}

/// (p / chunk, d): the mean key of every `chunk` consecutive tokens of a page.
inline summary_numbers chunk_means_numbers(const std::vector<std::span<const float>>& keys, int chunk) {
  const auto u = static_cast<std::ptrdiff_t>(chunk);
  summary_numbers summary;
  for (auto first = keys.begin(); first != keys.end(); first += u) {
    const summary_numbers mean = mean_key({first, first + u});
    for (std::size_t i = 0; i < mean.values.size(); ++i) summary.add(mean.values[i], mean.sizes[i]);
  }
  return summary;
}

inline std::vector<double> chunk_means_summary(const std::vector<std::span<const float>>& keys, int chunk) {
  return chunk_means_numbers(keys, chunk).values;
}

/// scale * <q, m_b> of every chunk; of the page's mean, where that is the only one.
inline std::vector<double> chunk_exponents(std::span<const float> q, const std::vector<double>& summary,
                                           double scale) {
  const int d = static_cast<int>(q.size());
  const int chunks = static_cast<int>(summary.size() / q.size());
  std::vector<double> exponents;
  for (int b = 0; b < chunks; ++b) exponents.push_back(scale * dot(q, row_of(summary, b, d)));
  return exponents;
}

/// ln sum_b exp(scale * <q, m_b>).
inline double chunk_means_score(std::span<const float> q, const std::vector<double>& summary, double scale) {
  return log_sum_exp(chunk_exponents(q, summary, scale));
}

inline double chunk_means_score_doubt(std::span<const float> q, const page_summary& summary, double scale) {
  const int d = static_cast<int>(q.size());
  const std::vector<double> exponents = chunk_exponents(q, summary.values, scale);
  std::vector<double> moves;
  for (std::size_t b = 0; b < exponents.size(); ++b)
    moves.push_back(scale * product_doubt(q, row_of(summary.doubt, static_cast<int>(b), d)));
  return log_sum_exp_doubt(exponents, moves);
}

/// max(q * low, q * high) moves by no more than the larger of the two doubts times |q|.
inline double min_max_score_doubt(std::span<const float> q, const page_summary& summary, double scale) {
  std::vector<double> larger;
  for (std::size_t i = 0; i < q.size(); ++i)
    larger.push_back(std::max(summary.doubt[i], summary.doubt[q.size() + i]));
  return scale * product_doubt(q, larger);
}

/// The summary of one KV head's complete page, `keys` being its p rows.
inline page_summary summarise(const settings& s, int kv_head,
                              const std::vector<std::span<const float>>& keys) {
  switch (s.summary) {
    case summary_kind::min_max: {
      const std::vector<double> range = min_max_summary(keys);
      return stored(s, {range, std::vector<double>(range.size(), 0.0)});
    }
    case summary_kind::mean:
      return stored(s, mean_key(keys));
    case summary_kind::centroid_box:
      return stored(s, centroid_box_numbers(keys));
    case summary_kind::ball:
      return stored(s, ball_numbers(keys));
    case summary_kind::chunk_means:
      return stored(s, chunk_means_numbers(keys, s.chunk));
    case summary_kind::key_sketch:
      return sketch_summary(keys, s.bits);
    case summary_kind::key_codes:
      return codes_summary(keys, s.key_codebooks[kv_head]);
    case summary_kind::key_clusters:
      return cluster_summary(keys, s.bases[kv_head]);
    case summary_kind::key_signatures:
      return signature_summary(keys, s, s.bases[kv_head]);
    case summary_kind::coarse_to_fine: {
      page_summary both;
      both.stages.push_back(summarise(with_summary(s, s.coarse), kv_head, keys));
      both.stages.push_back(summarise(with_summary(s, s.fine), kv_head, keys));
      return both;
    }
    case summary_kind::key_subspace:
      break;
  }
  const basis& b = s.bases[kv_head];
  return {subspace_summary(keys, b, s.bits), subspace_doubt(keys, b, s.bits)};
}

/// Not of coarse_to_fine, whose stages are scored one by one.
inline double score_unit(const settings& s, int kv_head, std::span<const float> q,
                         const page_summary& summary) {
  switch (s.summary) {
    case summary_kind::min_max:
    case summary_kind::centroid_box:
      return min_max_score(q, summary.values, selection_scale(s, kv_head));
    case summary_kind::ball:
      return ball_score(q, summary.values, selection_scale(s, kv_head));
    case summary_kind::mean:
    case summary_kind::chunk_means:
      return chunk_means_score(q, summary.values, selection_scale(s, kv_head));
    case summary_kind::key_sketch:
      return sketch_score(q, summary.values, selection_scale(s, kv_head));
    case summary_kind::key_codes:
      return codes_score(q, summary, s.key_codebooks[kv_head], selection_scale(s, kv_head));
    case summary_kind::key_clusters:
      return cluster_score(q, summary.values[0], s.bases[kv_head], selection_scale(s, kv_head));
    case summary_kind::key_signatures:
      return unit_collisions(q, summary, s, s.bases[kv_head]).counted;
    case summary_kind::coarse_to_fine:
      throw std::logic_error("oracle: coarse_to_fine is scored in two stages");
    case summary_kind::key_subspace:
      break;
  }
  return subspace_score(q, summary.values, s.bases[kv_head], selection_scale(s, kv_head));
}

/// How far `score_unit` may legitimately differ because numbers of the summary do; infinite where one of
/// them may be infinite or not.
inline double score_doubt(const settings& s, int kv_head, std::span<const float> q,
                          const page_summary& summary) {
  if (s.summary == summary_kind::ball) return ball_score_doubt(q, summary, selection_scale(s, kv_head));
  if (s.summary == summary_kind::key_codes)
    return codes_score_doubt(q, summary, s.key_codebooks[kv_head], selection_scale(s, kv_head));
  if (s.summary == summary_kind::key_clusters)
    return cluster_score_doubt(q, summary, s.bases[kv_head], selection_scale(s, kv_head));
  if (s.summary == summary_kind::key_signatures)
    return signature_score_doubt(q, summary, s, s.bases[kv_head]);
  if (summary.doubt.empty()) return 0.0;
  switch (s.summary) {
    case summary_kind::min_max:
    case summary_kind::centroid_box:
      return min_max_score_doubt(q, summary, selection_scale(s, kv_head));
    case summary_kind::key_sketch:
      return sketch_score_doubt(q, summary, selection_scale(s, kv_head));
    case summary_kind::key_subspace:
      return subspace_score_doubt(q, summary.values, summary.doubt, s.bases[kv_head],
                                  selection_scale(s, kv_head));
    default:
      return chunk_means_score_doubt(q, summary, selection_scale(s, kv_head));
  }
}

}  // namespace oracle
