// Keys of all KV heads of a token, rebuilt from coefficients of what they were before they were rotated.
#pragma once

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "codes.hpp"
#include "formats.hpp"
#include "numbers.hpp"

namespace oracle {

/// Numbers `first` and `second` of each head's key are turned by `radians` a token.
struct turned_pair {
  std::size_t first = 0, second = 0;
  double radians = 0.0;
};

/// A layer's: `mean` and `rows` are over the keys of all heads, one behind the other.
struct key_factors {
  std::vector<double> mean;               // (kv_heads * d)
  std::vector<std::vector<double>> rows;  // (rank, kv_heads * d)
  std::vector<turned_pair> pairs;
};

inline void turn(std::vector<double>& key, const std::vector<turned_pair>& pairs, double position) {
  for (const turned_pair& pair : pairs) {
    const double a = key[pair.first], b = key[pair.second], angle = position * pair.radians;
    key[pair.first] = a * std::cos(angle) - b * std::sin(angle);
    key[pair.second] = a * std::sin(angle) + b * std::cos(angle);
  }
}

/// What comes back of a token's keys, (kv_heads, d) each, before it is rounded to the element, and what it
/// may be off by.
struct rebuilt_keys {
  std::vector<std::vector<double>> keys, doubt;
};

inline rebuilt_keys rebuilt(const key_factors& f, const std::vector<std::vector<double>>& keys, int position,
                            element_kind element) {
  const std::size_t d = keys[0].size();
  std::vector<double> before = f.mean, size(f.mean.size(), 0.0);  // what is lost counts as the mean
  for (std::size_t h = 0; h < keys.size(); ++h) {
    std::vector<double> key = keys[h];
    bool lost = false;
    for (double x : key) lost = lost || !std::isfinite(x);
    if (lost) continue;
    const double length = std::sqrt(dot(key, key));  // a rotation mixes its numbers, and their errors
    turn(key, f.pairs, -position);
    for (std::size_t i = 0; i < d; ++i) {
      before[h * d + i] = key[i];
      size[h * d + i] = length + std::fabs(f.mean[h * d + i]);
    }
  }
  std::vector<double> back = f.mean, doubt(f.mean.size(), 0.0);
  for (const std::vector<double>& row : f.rows) {
    double c = 0.0, terms = 0.0;
    for (std::size_t i = 0; i < row.size(); ++i) {
      c += row[i] * (before[i] - f.mean[i]);
      terms += std::fabs(row[i]) * size[i];
    }
    const double error = float_sum_error * terms, kept = rounded_to(c, element);
    const double off = error + rounding_doubt(c, error, element);
    for (std::size_t i = 0; i < row.size(); ++i) {
      back[i] += kept * row[i];
      doubt[i] +=
          std::fabs(row[i]) * off + float_sum_error * (std::fabs(kept * row[i]) + std::fabs(f.mean[i]));
    }
  }
  rebuilt_keys result;
  for (std::size_t h = 0; h < keys.size(); ++h) {
    const auto first = static_cast<std::ptrdiff_t>(h * d), last = first + static_cast<std::ptrdiff_t>(d);
    std::vector<double> key(back.begin() + first, back.begin() + last);
    std::vector<double> off(doubt.begin() + first, doubt.begin() + last);
    const double length = std::sqrt(dot(key, key)), lengths = std::sqrt(dot(off, off));
    turn(key, f.pairs, position);
    for (double& x : off) x = lengths + float_sum_error * length;
    for (double x : keys[h])
      if (!std::isfinite(x)) key.assign(d, not_a_number);
    result.keys.push_back(key);
    result.doubt.push_back(off);
  }
  return result;
}

}  // namespace oracle
