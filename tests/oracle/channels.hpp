// Channels of keys that are kept, and keys of which these alone are.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "numbers.hpp"

namespace oracle {

/// Which `kept` channels a KV head keeps: those whose part of `Q K^T`, the product of column i of Q and row i
/// of K^T, has the largest Frobenius norm; of those alike the lower. `queries` are rows of all query heads of
/// the group, `keys` of all tokens; rows that are not finite do not count.
inline std::vector<bool> kept_channels(const std::vector<std::vector<double>>& queries,
                                       const std::vector<std::vector<double>>& keys, int head_dim, int kept) {
  const auto finite = [](const std::vector<double>& row) {
    for (double x : row)
      if (!std::isfinite(x)) return false;
    return true;
  };
  std::vector<double> norms;
  for (std::size_t i = 0; i < static_cast<std::size_t>(head_dim); ++i) {
    double sum = 0.0;
    for (const auto& q : queries)
      for (const auto& k : keys)
        if (finite(q) && finite(k)) sum += (q[i] * k[i]) * (q[i] * k[i]);
    norms.push_back(std::sqrt(sum));
  }
  std::vector<bool> chosen(norms.size(), false);
  for (int nth = 0; nth < kept; ++nth) {
    std::size_t best = norms.size();
    for (std::size_t i = 0; i < norms.size(); ++i)
      if (!chosen[i] && (best == norms.size() || norms[i] > norms[best])) best = i;
    chosen[best] = true;
  }
  return chosen;
}

/// (tokens, head_dim) keys as they come back.
inline std::vector<double> thinned(const std::vector<double>& keys, const std::vector<bool>& kept) {
  std::vector<double> back;
  for (double x : keys) back.push_back(kept[back.size() % kept.size()] ? x : 0.0);
  return back;
}

}  // namespace oracle
