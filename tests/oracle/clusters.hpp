// key_clusters: the cluster whose centroid has the largest cosine with a page's mean key.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "formats.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

inline int clusters_of(const basis& b, int head_dim) { return static_cast<int>(b.rows.size()) / head_dim; }

/// The cluster's number; NaN with a NaN or infinite key.
inline page_summary cluster_summary(const std::vector<std::span<const float>>& keys, const basis& b) {
  const std::size_t d = keys.front().size();
  std::vector<double> sum(d, 0.0), sizes(d, 0.0);
  for (const auto& key : keys)
    for (std::size_t i = 0; i < d; ++i) {
      sum[i] += static_cast<double>(key[i]);
      sizes[i] += std::fabs(static_cast<double>(key[i]));
    }
  if (!std::all_of(sum.begin(), sum.end(), [](double x) { return std::isfinite(x); }))
    return {{not_a_number}, {}};
  std::vector<double> cosines, doubts;
  for (int c = 0; c < clusters_of(b, static_cast<int>(d)); ++c) {
    const auto centroid = row_of(b.rows, c, static_cast<int>(d));
    const double length = std::sqrt(dot(centroid, centroid));
    double size = 0.0;
    for (std::size_t i = 0; i < d; ++i) size += sizes[i] * std::fabs(centroid[i]);
    cosines.push_back(length > 0.0 ? dot(centroid, sum) / length : -infinity);
    doubts.push_back(length > 0.0 ? float_sum_error * size / length + 1e-6 * std::fabs(cosines.back()) : 0.0);
  }
  const auto most = std::max_element(cosines.begin(), cosines.end());  // the first of equal ones
  const auto nearest = static_cast<std::size_t>(most - cosines.begin());
  page_summary summary{{static_cast<double>(nearest)}, {}};
  for (std::size_t c = 0; c < cosines.size(); ++c)
    if (c != nearest && *most - cosines[c] <= doubts[nearest] + doubts[c])
      summary.others.push_back({0, 0, static_cast<int>(c)});
  return summary;
}

/// scale * <q, centroid>.
inline double cluster_score(std::span<const float> q, double cluster, const basis& b, double scale) {
  if (std::isnan(cluster)) return not_a_number;
  return scale * dot(row_of(b.rows, static_cast<int>(cluster), static_cast<int>(q.size())), q);
}

inline double cluster_score_doubt(std::span<const float> q, const page_summary& summary, const basis& b,
                                  double scale) {
  double most = 0.0;
  const double score = cluster_score(q, summary.values[0], b, scale);
  for (const other_code& other : summary.others) {
    const double move = std::fabs(cluster_score(q, other.code, b, scale) - score);
    most = std::max(most, std::isfinite(move) ? move : infinity);
  }
  return most;
}

/// The largest sum of terms' sizes that a product of a vector with a centroid has.
template <class Number>
double cluster_product_size(const std::vector<Number>& vector, const basis& b) {
  double most = 0.0;
  for (int c = 0; c < clusters_of(b, static_cast<int>(vector.size())); ++c) {
    double size = 0.0;
    for (std::size_t i = 0; i < vector.size(); ++i)
      if (std::isfinite(vector[i]))
        size += std::fabs(static_cast<double>(vector[i]) *
                          b.rows[static_cast<std::size_t>(c) * vector.size() + i]);
    most = std::max(most, size);
  }
  return most;
}

/// The same of a query, by which a score's terms are bounded.
inline double cluster_score_size(const std::vector<float>& query, const basis& b) {
  return cluster_product_size(query, b);
}

}  // namespace oracle
