// key_signatures: signs of products with hyperplanes, the tables in which all of a token's agree with the
// query's, and what a token that was sampled for two such tables weighs.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "codes.hpp"
#include "formats.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

/// Signs of a vector less `centre`, (tables * bits): 1 or 0, NaN where the product is not finite; and 1 where
/// float32 may see another. An empty centre is 0.
struct signature {
  std::vector<double> signs, doubt;
};

inline signature signature_of(std::span<const float> vector, std::span<const double> centre,
                              const settings& s, const basis& b) {
  std::vector<double> from_centre, sizes;
  for (std::size_t j = 0; j < vector.size(); ++j) {
    const double taken = centre.empty() ? 0.0 : centre[j], x = static_cast<double>(vector[j]);
    from_centre.push_back(x - taken);
    sizes.push_back(std::fabs(x) + std::fabs(taken));
  }
  signature of;
  for (int i = 0; i < s.bits * s.tables; ++i) {
    const auto plane = row_of(b.rows, i, s.head_dim);
    const double product = dot(plane, from_centre), size = products_of(plane, sizes).size;
    of.signs.push_back(std::isfinite(product) ? static_cast<double>(product > 0.0) : not_a_number);
    of.doubt.push_back(size > 0.0 && std::fabs(product) <= float_sum_error * size ? 1.0 : 0.0);
  }
  return of;
}

/// The signatures of a unit's keys, one behind the other.
inline page_summary signature_summary(const std::vector<std::span<const float>>& keys, const settings& s,
                                      const basis& b) {
  page_summary summary;
  for (const auto& key : keys) {
    const signature of = signature_of(key, b.mean, s, b);
    summary.values.insert(summary.values.end(), of.signs.begin(), of.signs.end());
    summary.doubt.insert(summary.doubt.end(), of.doubt.begin(), of.doubt.end());
  }
  return summary;
}

/// Tables in which a token's signs are the query's, and the least and most that float32 may see.
struct collision_count {
  double counted, least, most;
};

inline collision_count collisions_of(std::span<const double> signs, std::span<const double> doubt,
                                     const signature& query, const settings& s) {
  collision_count count{0.0, 0.0, 0.0};
  for (int table = 0; table < s.tables; ++table) {
    bool equal = true, may_be = true, doubtful = false;
    for (int bit = 0; bit < s.bits; ++bit) {
      const auto i = static_cast<std::size_t>(table * s.bits + bit);
      if (std::isnan(signs[i]) || std::isnan(query.signs[i]))
        return {not_a_number, not_a_number, not_a_number};
      const bool in_doubt = doubt[i] != 0.0 || query.doubt[i] != 0.0, same = signs[i] == query.signs[i];
      equal = equal && same;
      may_be = may_be && (same || in_doubt);
      doubtful = doubtful || in_doubt;
    }
    count.counted += equal;
    count.most += may_be;
    count.least += equal && !doubtful;
  }
  return count;
}

/// Of a query for which units are scored one after another, so that it is made once.
inline const signature& signature_of_query(std::span<const float> q, const settings& s, const basis& b) {
  struct made_of {
    std::vector<float> query;
    const double* rows;
    std::size_t numbers;
    double first, last;
    int bits, tables;
    bool operator==(const made_of&) const = default;
  };
  thread_local made_of last{};
  thread_local signature of;
  const made_of now{{q.begin(), q.end()}, b.rows.data(), b.rows.size(), b.rows.front(),
                    b.rows.back(),        s.bits,        s.tables};
  if (!(now == last)) {
    of = signature_of(q, {}, s, b);
    last = now;
  }
  return of;
}

/// The best of a unit's tokens.
inline collision_count unit_collisions(std::span<const float> q, const page_summary& summary,
                                       const settings& s, const basis& b) {
  const signature& query = signature_of_query(q, s, b);
  const auto length = static_cast<std::size_t>(s.bits * s.tables);
  collision_count best{-infinity, -infinity, -infinity};
  for (std::size_t first = 0; first < summary.values.size(); first += length) {
    const collision_count one = collisions_of(std::span(summary.values).subspan(first, length),
                                              std::span(summary.doubt).subspan(first, length), query, s);
    best = {max_or_nan(best.counted, one.counted), max_or_nan(best.least, one.least),
            max_or_nan(best.most, one.most)};
  }
  return best;
}

inline double signature_score_doubt(std::span<const float> q, const page_summary& summary, const settings& s,
                                    const basis& b) {
  const collision_count count = unit_collisions(q, summary, s, b);
  return std::isnan(count.counted) ? 0.0 : std::max(count.most - count.counted, count.counted - count.least);
}

/// The largest sum of terms' sizes that a product of a vector with a hyperplane has.
template <class Number>
double signature_product_size(const std::vector<Number>& vector, const settings& s, const basis& b) {
  double most = 0.0;
  for (int i = 0; i < s.bits * s.tables; ++i) {
    const auto plane = row_of(b.rows, i, s.head_dim);
    double size = 0.0;
    for (std::size_t j = 0; j < vector.size(); ++j)
      if (std::isfinite(vector[j]))
        size += std::fabs(plane[j]) * (std::fabs(static_cast<double>(vector[j])) + std::fabs(b.mean[j]));
    most = std::max(most, size);
  }
  return most;
}

/// ln P(2 or more of `tables` tables collide), summed over how many do, where each does with probability
/// `(1 - acos(cosine) / pi)^bits`, of which the base is at least 2^-10.
inline double log_sampling_probability(double cosine, int bits, int tables) {
  const double agree =
      std::max(1.0 - std::acos(std::clamp(cosine, -1.0, 1.0)) / std::acos(-1.0), std::ldexp(1.0, -10));
  const double log_one = bits * std::log(agree);
  if (log_one == 0.0) return 0.0;
  const double log_other = std::log1p(-std::exp(log_one));
  std::vector<double> terms;
  for (int j = 2; j <= tables; ++j)
    terms.push_back(std::lgamma(tables + 1.0) - std::lgamma(j + 1.0) - std::lgamma(tables - j + 1.0) +
                    j * log_one + (tables - j) * log_other);
  return log_sum_exp(terms);
}

/// What a sampled token weighs in attention, as a logarithm, and how far that of float32 may be from it.
struct token_weight {
  double log_weight, doubt;
};

inline token_weight sampled_weight(std::span<const float> q, std::span<const float> key, const settings& s,
                                   const basis& b) {
  double product = 0.0, size = 0.0, of_query = 0.0, of_key = 0.0, of_terms = 0.0;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const double x = static_cast<double>(q[i]), y = static_cast<double>(key[i]) - b.mean[i],
                 terms = std::fabs(static_cast<double>(key[i])) + std::fabs(b.mean[i]);
    product += x * y;
    size += std::fabs(x) * terms;
    of_query += x * x;
    of_key += y * y;
    of_terms += terms * terms;
  }
  if (of_query == 0.0 || of_key == 0.0) return {-log_sampling_probability(0.0, s.bits, s.tables), 1e-5};
  const double lengths = std::sqrt(of_query) * std::sqrt(of_key), cosine = product / lengths;
  // Of the product, and of the key's length, of which the centre may leave little.
  const double error =
      float_sum_error * (1.0 + size / lengths + std::fabs(cosine) * std::sqrt(of_terms / of_key));
  const double at = log_sampling_probability(cosine, s.bits, s.tables);
  double doubt = 0.0;
  for (const double other : {cosine - error, cosine + error})
    doubt = std::max(doubt, std::fabs(log_sampling_probability(other, s.bits, s.tables) - at));
  return {-at, doubt + 1e-5 + 1e-6 * std::fabs(at)};
}

}  // namespace oracle
