// Which tokens of a prompt each KV head keeps, where it is thinned before a pipeline has it.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "codes.hpp"
#include "numbers.hpp"

namespace oracle {

struct thinning_settings {
  int query_heads = 1, kv_heads = 1, head_dim = 1;
  int kept = 0, sink = 0, window = 0, kernel = 1;  // tokens
  double scale = 1.0, soft_cap = 0.0;
};

/// Votes for each token of a prompt, and what float32 may be off by.
struct thinning_votes {
  std::vector<double> votes, doubts;
};

/// A KV head's, `queries` (rows, n_qo, d) of the prompt's last rows, `keys` (tokens, n_kv, d).
inline thinning_votes votes_of(const thinning_settings& s, std::span<const float> queries,
                               std::span<const float> keys, int head) {
  const int d = s.head_dim, tokens = static_cast<int>(keys.size()) / (s.kv_heads * d),
            rows = static_cast<int>(queries.size()) / (s.query_heads * d), group = s.query_heads / s.kv_heads;
  thinning_votes all{std::vector<double>(static_cast<std::size_t>(tokens), 0.0),
                     std::vector<double>(static_cast<std::size_t>(tokens), 0.0)};
  for (int row = 0; row < rows; ++row)
    for (int g = 0; g < group; ++g) {
      const auto query = row_of(queries, row * s.query_heads + head * group + g, d);
      std::vector<double> scores, errors;
      for (int token = 0; token <= tokens - rows + row; ++token) {
        const auto key = row_of(keys, token * s.kv_heads + head, d);
        double size = 0.0;
        for (std::size_t i = 0; i < key.size(); ++i)
          size += std::fabs(static_cast<double>(query[i]) * static_cast<double>(key[i]));
        const double score = s.scale * dot(query, key);
        scores.push_back(s.soft_cap > 0.0 ? s.soft_cap * std::tanh(score / s.soft_cap) : score);
        errors.push_back(2.0 * float_sum_error * s.scale * size + 2e-6);
      }
      const double sum = log_sum_exp(scores);
      double of_sum = 0.0;
      for (std::size_t t = 0; t < scores.size(); ++t)
        if (const double share = std::exp(scores[t] - sum); share > 0.0) of_sum += share * errors[t];
      for (std::size_t t = 0; t < scores.size(); ++t)
        if (const double share = std::exp(scores[t] - sum); share > 0.0) {  // no NaN
          all.votes[t] += share / group;
          all.doubts[t] += share * (errors[t] + of_sum) / group;
        }
    }
  for (std::size_t t = 0; t < all.votes.size(); ++t) all.doubts[t] += 1e-6 * rows * all.votes[t];
  // The largest of the neighbours before the window, whichever it is.
  thinning_votes pooled = all;
  for (int t = 0; t < tokens - s.window; ++t)
    for (int n = std::max(0, t - s.kernel / 2); n < std::min(tokens - s.window, t + s.kernel / 2 + 1); ++n) {
      const auto at = static_cast<std::size_t>(t), near = static_cast<std::size_t>(n);
      pooled.votes[at] = std::max(pooled.votes[at], all.votes[near]);
      pooled.doubts[at] = std::max(pooled.doubts[at], all.doubts[near]);
    }
  return pooled;
}

/// Tokens that a KV head keeps, ascending: sink, window, and of the others those of the most votes, the
/// first of equal ones.
inline std::vector<int> kept_tokens(const thinning_settings& s, const std::vector<double>& votes) {
  const int tokens = static_cast<int>(votes.size());
  std::vector<int> others, kept;
  for (int t = 0; t < tokens; ++t)
    if (s.kept == tokens || t < s.sink || t >= tokens - s.window)
      kept.push_back(t);
    else
      others.push_back(t);
  std::stable_sort(others.begin(), others.end(), [&](int a, int b) {
    return votes[static_cast<std::size_t>(a)] > votes[static_cast<std::size_t>(b)];
  });
  others.resize(static_cast<std::size_t>(s.kept) - kept.size());
  kept.insert(kept.end(), others.begin(), others.end());
  std::sort(kept.begin(), kept.end());
  return kept;
}

/// True where `kept` are as many as are to be kept, ascending, with sink and window, and none that was left
/// out has more votes than one that was kept, as far as float32 can tell.
inline bool may_keep(const thinning_settings& s, const thinning_votes& of, const std::vector<int>& kept) {
  const std::vector<int> exact = kept_tokens(s, of.votes);
  if (kept == exact) return true;
  if (kept.size() != exact.size() || !std::is_sorted(kept.begin(), kept.end()) ||
      std::adjacent_find(kept.begin(), kept.end()) != kept.end())
    return false;
  const int tokens = static_cast<int>(of.votes.size());
  double least = infinity;
  std::vector<bool> stays(of.votes.size(), false);
  for (const int t : kept) {
    if (t < 0 || t >= tokens) return false;
    stays[static_cast<std::size_t>(t)] = true;
    if (t >= s.sink && t < tokens - s.window)
      least = std::min(least, of.votes[static_cast<std::size_t>(t)] + of.doubts[static_cast<std::size_t>(t)]);
  }
  for (int t = 0; t < tokens; ++t) {
    if (stays[static_cast<std::size_t>(t)]) continue;
    if (t < s.sink || t >= tokens - s.window) return false;
    if (of.votes[static_cast<std::size_t>(t)] - of.doubts[static_cast<std::size_t>(t)] > least) return false;
  }
  return true;
}

}  // namespace oracle
