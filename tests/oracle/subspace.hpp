// key_subspace: per token the coefficients of its key in a given basis, quantised symmetrically.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

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

/// The distance between two neighbouring codes of one token: max|c| / (2^(bits-1) - 1), NaN if any c is NaN.
inline double code_step(const std::vector<double>& c, int bits) {
  double largest = 0.0;
  for (double value : c) largest = max_or_nan(largest, std::fabs(value));
  return largest / static_cast<double>((1 << (bits - 1)) - 1);
}

/// The coefficients as they read back from their codes. A token with a NaN or infinite coefficient has no
/// codes: it reads back as NaN, so that its page is not chosen on invented numbers.
inline std::vector<double> quantised(const std::vector<double>& c, int bits) {
  if (bits == 32) return c;
  const double step = code_step(c, bits);
  if (!std::isfinite(step)) return std::vector<double>(c.size(), not_a_number);
  std::vector<double> back;
  for (double value : c) back.push_back(step == 0.0 ? 0.0 : std::nearbyint(value / step) * step);
  return back;
}

/// How far each coefficient of `quantised` may move in an implementation that rounds its float32 sums
/// elsewhere: one step where c / step lies at the edge between two codes, else 0.
inline std::vector<double> code_doubt(std::span<const float> key, const basis& b, int bits) {
  const std::vector<double> c = coefficients(key, b);
  std::vector<double> doubt(c.size(), 0.0);
  if (bits == 32) return doubt;
  const double step = code_step(c, bits);
  if (!std::isfinite(step) || step == 0.0) return doubt;
  for (std::size_t r = 0; r < c.size(); ++r) {
    double terms = 0.0;
    for (std::size_t i = 0; i < key.size(); ++i)
      terms += std::fabs(b.rows[r * key.size() + i] * (static_cast<double>(key[i]) - b.mean[i]));
    const double position = std::fabs(c[r]) / step;
    const double from_edge = std::fabs(position - std::floor(position) - 0.5);
    const double float_error = 1e-6 * (terms / step + position);
    if (from_edge <= float_error) doubt[r] = step;
  }
  return doubt;
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
  std::vector<double> low, middle, high;
  for (int t = 0; t < tokens; ++t) {
    const double exponent = scale * dot(projection, row_of(summary, t, rank_of(b)));
    double move = 0.0;
    for (int r = 0; r < rank_of(b); ++r)
      move += scale * std::fabs(projection[static_cast<std::size_t>(r)]) * row_of(doubt, t, rank_of(b))[r];
    low.push_back(exponent - move);
    middle.push_back(exponent);
    high.push_back(exponent + move);
  }
  const double score = log_sum_exp(middle);
  // What scores NaN or infinite does so whatever the codes are.
  if (!std::isfinite(score)) return 0.0;
  return std::fmax(log_sum_exp(high) - score, score - log_sum_exp(low));
}

}  // namespace oracle
