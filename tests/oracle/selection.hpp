// top_k, and how firmly it stands.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "numbers.hpp"

namespace oracle {

struct selection {
  std::vector<int> pages;       // ascending
  double margin = infinity;     // see margin_between; infinite where every candidate fitted
  double slack = 0.0;           // the part of the margin that codes at a rounding edge could use up
  double score_size = 0.0;      // the most that the absolute terms of one score add up to
  bool may_overflow = false;    // finite input, but float32 sums could leave float32's range
  std::vector<int> candidates;  // ascending
  std::vector<double> pooled;   // one per candidate
};

/// Two float32 implementations must select the same pages.
inline bool is_firm(const selection& chosen) {
  return chosen.margin > 1e-4 + chosen.slack && !chosen.may_overflow;
}

/// The gap between the last score taken and the first left out, relative to max(|a|, |b|, 1). Where the one
/// left out is -inf no rounding can exchange the two: infinite.
inline double margin_between(double taken, double left_out) {
  if (left_out == -infinity) return infinity;
  return (taken - left_out) / std::max({std::fabs(taken), std::fabs(left_out), 1.0});
}

/// The part of a selection's margin that is gone when every page taken has its lowest score and every page
/// left out its highest.
inline double slack_of(const selection& chosen, const std::vector<double>& low,
                       const std::vector<double>& high) {
  if (chosen.margin == infinity) return 0.0;
  double taken = infinity, lowest_taken = infinity;
  double left_out = -infinity, highest_left_out = -infinity;
  for (std::size_t j = 0; j < chosen.candidates.size(); ++j)
    if (std::find(chosen.pages.begin(), chosen.pages.end(), chosen.candidates[j]) != chosen.pages.end()) {
      taken = std::min(taken, chosen.pooled[j]);
      lowest_taken = std::min(lowest_taken, low[j]);
    } else {
      left_out = std::max(left_out, chosen.pooled[j]);
      highest_left_out = std::max(highest_left_out, high[j]);
    }
  const double lost = (taken - left_out) - (lowest_taken - highest_left_out);
  return lost / std::max({std::fabs(taken), std::fabs(left_out), 1.0});
}

/// The `k` pages of highest score, ties to the smaller page. `pages` ascending, no score NaN.
inline selection top_k(const std::vector<int>& pages, const std::vector<double>& scores, int k) {
  selection chosen;
  chosen.candidates = pages;
  chosen.pooled = scores;
  const auto wanted = static_cast<std::size_t>(k);
  std::vector<std::size_t> order;
  for (std::size_t j = 0; j < pages.size(); ++j) order.push_back(j);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    return pages[a] < pages[b];
  });
  for (std::size_t i = 0; i < order.size() && i < wanted; ++i) chosen.pages.push_back(pages[order[i]]);
  std::sort(chosen.pages.begin(), chosen.pages.end());
  if (order.size() > wanted) chosen.margin = margin_between(scores[order[wanted - 1]], scores[order[wanted]]);
  return chosen;
}

}  // namespace oracle
