// key_codes: a page's mean key, and what each of its keys adds to it, as the nearest centroids of given
// codebooks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "codes.hpp"
#include "formats.hpp"
#include "numbers.hpp"
#include "settings.hpp"
#include "sketch.hpp"

namespace oracle {

/// In the mean's group 0: a page with a NaN or infinite key.
inline constexpr int lost_page_code = 255;

inline int rank_of(const codebook& b) { return b.groups * b.dims; }

/// Coefficient `i` of a group's centroid.
inline double centroid(const codebook& b, int group, int i, int code) {
  return b.centroids[(group * b.dims + i) * codes_per_group + code];
}

/// How many centroids of group 0 the mean may choose from.
inline int used_by_mean(const codebooks& books) { return std::min(books.mean.used_in_first, lost_page_code); }

/// rows (v - offset): (groups * dims).
inline summary_numbers coefficients(const summary_numbers& v, const codebook& b) {
  const int d = static_cast<int>(b.offset.size());
  summary_numbers x;
  for (int r = 0; r < rank_of(b); ++r) {
    const std::span<const double> row = row_of(b.rows, r, d);
    double sum = 0.0, size = 0.0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      sum += row[i] * (v.values[i] - b.offset[i]);
      size += std::fabs(row[i]) * (v.sizes[i] + std::fabs(b.offset[i]));
    }
    x.add(sum, size);
  }
  return x;
}

/// From x's part of the group to each of its first `used` centroids.
inline std::vector<double> squared_distances(const summary_numbers& x, const codebook& b, int group,
                                             int used) {
  std::vector<double> distances;
  for (int code = 0; code < used; ++code) {
    double sum = 0.0;
    for (int i = 0; i < b.dims; ++i) {
      const double difference = x.values[group * b.dims + i] - centroid(b, group, i, code);
      sum += difference * difference;
    }
    distances.push_back(sum);
  }
  return distances;
}

/// How much the difference of two centroids' squared distances from x may be off in float32: by the rounding
/// of x, of the squares and products that add up to a distance, and by squares too small for float32. 0 for
/// equal centroids.
inline double distance_doubt(const summary_numbers& x, const codebook& b, int group, int one, int other) {
  double terms = 0.0, moved = 0.0;
  bool differ = false;
  for (int i = 0; i < b.dims; ++i) {
    const auto at = static_cast<std::size_t>(group * b.dims + i);
    const double size = std::fabs(x.values[at]);
    const double c = centroid(b, group, i, one), e = centroid(b, group, i, other);
    const double most = size + std::max(std::fabs(c), std::fabs(e));
    terms += 2.0 * most * most;
    moved += 2.0 * std::fabs(c - e) * x.sizes[at];
    differ = differ || c != e;
  }
  const double smallest = static_cast<double>(std::numeric_limits<float>::min());
  return differ ? float_sum_error * (terms + moved) + smallest * b.dims : 0.0;
}

/// Appends the codes of one row of a page, see other_code: of each group the nearest centroid, ties to the
/// smaller code, in group 0 among the first `used_in_first`.
inline void add_codes(page_summary& summary, int row, const summary_numbers& x, const codebook& b,
                      int used_in_first) {
  for (int group = 0; group < b.groups; ++group) {
    const int used = group == 0 ? used_in_first : codes_per_group;
    const std::vector<double> distances = squared_distances(x, b, group, used);
    const auto least = std::min_element(distances.begin(), distances.end());  // the first of equal ones
    const int nearest = static_cast<int>(least - distances.begin());
    summary.values.push_back(static_cast<double>(nearest));
    for (int code = 0; code < used; ++code) {
      const double doubt = distance_doubt(x, b, group, nearest, code);
      const double farther = distances[code] - *least;
      if (doubt > 0.0 && farther <= 1e-5 * *least + doubt) summary.others.push_back({row, group, code});
    }
  }
}

/// offset + rows^T of the centroids that `codes` name: (d).
inline summary_numbers decoded(const codebook& b, std::span<const double> codes) {
  summary_numbers v;
  for (std::size_t e = 0; e < b.offset.size(); ++e) {
    double sum = b.offset[e], size = std::fabs(b.offset[e]);
    for (int r = 0; r < rank_of(b); ++r) {
      const int group = r / b.dims;
      const int code = static_cast<int>(codes[group]);
      const double term =
          b.rows[static_cast<std::size_t>(r) * b.offset.size() + e] * centroid(b, group, r % b.dims, code);
      sum += term;
      size += std::fabs(term);
    }
    v.add(sum, size);
  }
  return v;
}

/// The mean's codes (groups), then the tokens' (p, groups). With a NaN or infinite key all are 0 but the
/// first.
inline page_summary codes_summary(const std::vector<std::span<const float>>& keys, const codebooks& books) {
  page_summary summary;
  bool lost = false;
  for (std::span<const float> key : keys)
    for (float element : key) lost = lost || !std::isfinite(element);
  if (lost) {
    const std::size_t codes = static_cast<std::size_t>(books.mean.groups) +
                              keys.size() * static_cast<std::size_t>(books.token.groups);
    summary.values.assign(codes, 0.0);
    summary.values[0] = lost_page_code;
    return summary;
  }
  add_codes(summary, 0, coefficients(mean_key(keys), books.mean), books.mean, used_by_mean(books));
  const summary_numbers mean = decoded(books.mean, summary.values);
  int row = 0;
  for (std::span<const float> key : keys) {
    summary_numbers residual;
    for (std::size_t i = 0; i < key.size(); ++i) {
      const double element = static_cast<double>(key[i]);
      residual.add(element - mean.values[i], std::fabs(element) + mean.sizes[i]);
    }
    add_codes(summary, ++row, coefficients(residual, books.token), books.token, books.token.used_in_first);
  }
  return summary;
}

/// rows q: (groups * dims). The offsets do not enter: their terms are the same for every page.
inline std::vector<double> projected_query(std::span<const float> q, const codebook& b) {
  std::vector<double> projection;
  for (int r = 0; r < rank_of(b); ++r)
    projection.push_back(dot(row_of(b.rows, r, static_cast<int>(q.size())), q));
  return projection;
}

/// <(rows q)_g, centroid>.
inline double code_product(const std::vector<double>& projection, const codebook& b, int group, int code) {
  double sum = 0.0;
  for (int i = 0; i < b.dims; ++i) sum += projection[group * b.dims + i] * centroid(b, group, i, code);
  return sum;
}

/// The sum of code_product over the groups, `codes` having one for each.
inline double code_estimate(const std::vector<double>& projection, const codebook& b,
                            std::span<const double> codes) {
  double sum = 0.0;
  for (int group = 0; group < b.groups; ++group)
    sum += code_product(projection, b, group, static_cast<int>(codes[group]));
  return sum;
}

/// scale * (A + B_t) of every token; NaN for all of a lost page.
inline std::vector<double> codes_exponents(std::span<const float> q, const std::vector<double>& codes,
                                           const codebooks& books, double scale) {
  const auto of_mean = static_cast<std::size_t>(books.mean.groups);
  const int tokens = static_cast<int>(codes.size() - of_mean) / books.token.groups;
  if (codes[0] == lost_page_code) return std::vector<double>(static_cast<std::size_t>(tokens), not_a_number);
  const std::span<const double> all(codes);
  const double a = code_estimate(projected_query(q, books.mean), books.mean, all.first(of_mean));
  const std::vector<double> projection = projected_query(q, books.token);
  std::vector<double> exponents;
  for (int t = 0; t < tokens; ++t) {
    const double b =
        code_estimate(projection, books.token, row_of(all.subspan(of_mean), t, books.token.groups));
    exponents.push_back(scale * (a + b));
  }
  return exponents;
}

/// ln sum_t exp(scale * (A + B_t)).
inline double codes_score(std::span<const float> q, const page_summary& summary, const codebooks& books,
                          double scale) {
  return log_sum_exp(codes_exponents(q, summary.values, books, scale));
}

/// How far codes_score may move by other codes: any for the mean changes what all tokens' codes are made of.
inline double codes_score_doubt(std::span<const float> q, const page_summary& summary, const codebooks& books,
                                double scale) {
  if (summary.others.empty()) return 0.0;
  const std::vector<double> exponents = codes_exponents(q, summary.values, books, scale);
  const std::vector<double> projection = projected_query(q, books.token);
  const std::size_t groups = static_cast<std::size_t>(books.token.groups);
  std::vector<double> group_moves(exponents.size() * groups, 0.0);  // (p, groups)
  for (const other_code& other : summary.others) {
    if (other.row == 0) return infinity;
    const std::size_t at =
        static_cast<std::size_t>(other.row - 1) * groups + static_cast<std::size_t>(other.group);
    const int chosen = static_cast<int>(summary.values[static_cast<std::size_t>(books.mean.groups) + at]);
    const double from = code_product(projection, books.token, other.group, chosen);
    const double to = code_product(projection, books.token, other.group, other.code);
    if (from == to || (std::isnan(from) && std::isnan(to))) continue;
    const double move = std::fabs(to - from);
    group_moves[at] = std::isfinite(move) ? std::max(group_moves[at], move) : infinity;
  }
  std::vector<double> moves;
  for (std::size_t t = 0; t < exponents.size(); ++t) {
    double move = 0.0;
    for (std::size_t g = 0; g < groups; ++g) move += group_moves[t * groups + g];
    moves.push_back(scale * move);
  }
  return log_sum_exp_doubt(exponents, moves);
}

/// Per coefficient the largest of the centroids that may be chosen, without its sign.
inline std::vector<double> largest_centroids(const codebook& b, int used_in_first) {
  std::vector<double> largest;
  for (int r = 0; r < rank_of(b); ++r) {
    const int group = r / b.dims;
    double most = 0.0;
    for (int code = 0; code < (group == 0 ? used_in_first : codes_per_group); ++code)
      most = std::max(most, std::fabs(centroid(b, group, r % b.dims, code)));
    largest.push_back(most);
  }
  return largest;
}

/// The most that the absolute terms of A + B_t add up to for any page; what is not finite does not count.
inline double codes_score_size(std::span<const float> q, const codebooks& books) {
  const auto size_of = [&](const codebook& b, int used_in_first) {
    const std::vector<double> largest = largest_centroids(b, used_in_first);
    double size = 0.0;
    for (std::size_t r = 0; r < largest.size(); ++r)
      for (std::size_t i = 0; i < q.size(); ++i) {
        const double term = std::fabs(b.rows[r * q.size() + i] * static_cast<double>(q[i])) * largest[r];
        if (std::isfinite(term)) size += term;
      }
    return size;
  };
  return size_of(books.mean, used_by_mean(books)) + size_of(books.token, books.token.used_in_first);
}

/// The most that the terms of one element of `rows q` add up to.
inline double codes_projection_size(std::span<const float> q, const codebooks& books) {
  double most = 0.0;
  for (const codebook* b : {&books.mean, &books.token})
    for (int r = 0; r < rank_of(*b); ++r) {
      const std::span<const double> row = row_of(b->rows, r, static_cast<int>(q.size()));
      double size = 0.0;
      for (std::size_t i = 0; i < q.size(); ++i)
        if (std::isfinite(q[i])) size += std::fabs(row[i] * static_cast<double>(q[i]));
      most = std::max(most, size);
    }
  return most;
}

/// The most that a squared distance's terms add up to, the elements of all keys being at most `keys` (d).
inline double codes_square_size(const std::vector<double>& keys, const codebooks& books) {
  const auto squares = [](const std::vector<double>& sizes, const codebook& b,
                          const std::vector<double>& centroids) {
    const summary_numbers x = coefficients({std::vector<double>(sizes.size(), 0.0), sizes}, b);
    double sum = 0.0;
    for (std::size_t r = 0; r < centroids.size(); ++r) sum += std::pow(x.sizes[r] + centroids[r], 2.0);
    return sum;
  };
  const std::vector<double> of_mean = largest_centroids(books.mean, used_by_mean(books));
  std::vector<double> residuals;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    double size = keys[i] + std::fabs(books.mean.offset[i]);
    for (std::size_t r = 0; r < of_mean.size(); ++r)
      size += std::fabs(books.mean.rows[r * keys.size() + i]) * of_mean[r];
    residuals.push_back(size);
  }
  return std::max(squares(keys, books.mean, of_mean),
                  squares(residuals, books.token, largest_centroids(books.token, books.token.used_in_first)));
}

}  // namespace oracle
