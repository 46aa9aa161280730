// key_subspace: per token the coefficients of its key in a given basis, quantised symmetrically.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "codes.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

inline int rank_of(const basis& b) { return static_cast<int>(b.rows.size() / b.mean.size()); }

/// E (k - mu): (r).
inline std::vector<double> coefficients(std::span<const float> key, const basis& b) {
  const int d = static_cast<int>(b.mean.size());
  std::vector<double> centred;
  for (std::size_t i = 0; i < key.size(); ++i) centred.push_back(static_cast<double>(key[i]) - b.mean[i]);
  std::vector<double> c;
  for (int r = 0; r < rank_of(b); ++r) c.push_back(dot(row_of(b.rows, r, d), centred));
  return c;
}

/// E q: (r). The mean does not enter: its term is the same for every page.
inline std::vector<double> projected_query(std::span<const float> q, const basis& b) {
  const int d = static_cast<int>(b.mean.size());
  std::vector<double> projection;
  for (int r = 0; r < rank_of(b); ++r) projection.push_back(dot(row_of(b.rows, r, d), q));
  return projection;
}

/// How far each coefficient of one key may move, see codes.hpp.
inline std::vector<double> code_doubt(std::span<const float> key, const basis& b, int bits) {
  const std::vector<double> c = coefficients(key, b);
  std::vector<double> sizes;
  for (std::size_t r = 0; r < c.size(); ++r) {
    double terms = 0.0;
    for (std::size_t i = 0; i < key.size(); ++i)
      terms += std::fabs(b.rows[r * key.size() + i] * (static_cast<double>(key[i]) - b.mean[i]));
    sizes.push_back(terms);
  }
  return code_doubt(c, sizes, bits);
}

/// (p, r) from a page's keys (p, d).
inline std::vector<double> subspace_summary(const std::vector<std::span<const float>>& keys, const basis& b,
                                            int bits) {
  std::vector<double> summary;
  for (std::span<const float> key : keys)
    for (double value : quantised(coefficients(key, b), bits)) summary.push_back(value);
  return summary;
}

/// (p, r): code_doubt of every token of a page.
inline std::vector<double> subspace_doubt(const std::vector<std::span<const float>>& keys, const basis& b,
                                          int bits) {
  std::vector<double> doubt;
  for (std::span<const float> key : keys)
    for (double value : code_doubt(key, b, bits)) doubt.push_back(value);
  return doubt;
}

/// ln sum_t exp(scale * <E q, c_t>).
inline double subspace_score(std::span<const float> q, const std::vector<double>& summary, const basis& b,
                             double scale) {
  const std::vector<double> projection = projected_query(q, b);
  const int tokens = static_cast<int>(summary.size() / projection.size());
  std::vector<double> exponents;
  for (int t = 0; t < tokens; ++t)
    exponents.push_back(scale * dot(projection, row_of(summary, t, rank_of(b))));
  return log_sum_exp(exponents);
}

/// How far subspace_score may move when every coefficient moves by its doubt, in the worst direction.
inline double subspace_score_doubt(std::span<const float> q, const std::vector<double>& summary,
                                   const std::vector<double>& doubt, const basis& b, double scale) {
  const std::vector<double> projection = projected_query(q, b);
  const int tokens = static_cast<int>(summary.size() / projection.size());
  std::vector<double> exponents, moves;
  for (int t = 0; t < tokens; ++t) {
    exponents.push_back(scale * dot(projection, row_of(summary, t, rank_of(b))));
    moves.push_back(scale * product_doubt(projection, row_of(doubt, t, rank_of(b))));
  }
  return log_sum_exp_doubt(exponents, moves);
}

}  // namespace oracle
