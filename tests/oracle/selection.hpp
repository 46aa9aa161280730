// top_k, top_p and sticky_top_k, and how firmly a selection stands.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "numbers.hpp"

namespace oracle {

struct selection {
  std::vector<int> pages;         // ascending
  double margin = infinity;       // see margin_between; infinite where every candidate was taken
  double slack = 0.0;             // the part of the margin that codes at a rounding edge could use up
  double mass_margin = infinity;  // of top_p: the least distance from P of a prefix that decides
  double score_size = 0.0;        // the most that the absolute terms of one score add up to
  bool may_overflow = false;      // finite input, but float32 sums could leave float32's range
  bool kept_firm = true;          // of coarse_to_fine: two implementations must keep the same candidates
  bool counts = false;            // scores are whole numbers, so that equal ones are equal to all
  bool admitted_firm = true;      // of colliding: two implementations must admit the same candidates
  std::vector<int> candidates;    // ascending
  std::vector<double> pooled;     // one per candidate
  std::vector<double> low;        // the least that a pooled score may be, see pooled_range
  std::vector<double> high;
};

/// What masses in float32 may be off by, relative or absolute: their logarithms are sums of such terms.
inline double mass_error(double score_size) { return 1e-4 + 1e-6 * score_size; }

/// Of whole numbers: none that may be another is at, or may come to, the least score taken.
inline bool counted_firmly(const selection& chosen) {
  if (chosen.margin == infinity) return true;
  double least = infinity;
  for (std::size_t j = 0; j < chosen.candidates.size(); ++j)
    if (std::find(chosen.pages.begin(), chosen.pages.end(), chosen.candidates[j]) != chosen.pages.end())
      least = std::min(least, chosen.pooled[j]);
  for (std::size_t j = 0; j < chosen.candidates.size(); ++j)
    if (chosen.low[j] != chosen.high[j] && chosen.low[j] <= least && chosen.high[j] >= least) return false;
  return true;
}

/// Two float32 implementations must select the same pages.
inline bool is_firm(const selection& chosen) {
  const bool in_order = chosen.counts ? counted_firmly(chosen) : chosen.margin > 1e-4 + chosen.slack;
  return in_order && chosen.admitted_firm && !chosen.may_overflow && chosen.kept_firm &&
         chosen.mass_margin > mass_error(chosen.score_size);
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

/// Indices of `scores`, the highest first, ties to the smaller page. `pages` ascending, no score NaN.
inline std::vector<std::size_t> ranked(const std::vector<int>& pages, const std::vector<double>& scores) {
  std::vector<std::size_t> order;
  for (std::size_t j = 0; j < pages.size(); ++j) order.push_back(j);
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    if (scores[a] != scores[b]) return scores[a] > scores[b];
    return pages[a] < pages[b];
  });
  return order;
}

/// The first `count` candidates of `order`.
inline selection take(const std::vector<int>& pages, const std::vector<double>& scores,
                      const std::vector<std::size_t>& order, std::size_t count) {
  selection chosen;
  chosen.candidates = pages;
  chosen.pooled = chosen.low = chosen.high = scores;
  for (std::size_t i = 0; i < count; ++i) chosen.pages.push_back(pages[order[i]]);
  std::sort(chosen.pages.begin(), chosen.pages.end());
  if (count > 0 && order.size() > count)
    chosen.margin = margin_between(scores[order[count - 1]], scores[order[count]]);
  return chosen;
}

/// The `k` pages of highest score, ties to the smaller page. `pages` ascending, no score NaN.
inline selection top_k(const std::vector<int>& pages, const std::vector<double>& scores, int k) {
  return take(pages, scores, ranked(pages, scores), std::min(pages.size(), static_cast<std::size_t>(k)));
}

/// The `k` pages of highest score of those with 2 or more. Where there are no more than k, no margin decides.
inline selection colliding(const std::vector<int>& pages, const std::vector<double>& scores, int k) {
  int admitted = 0;
  for (const double score : scores) admitted += score >= 2.0;
  selection chosen = top_k(pages, scores, std::min(admitted, k));
  if (admitted <= k) chosen.margin = infinity;
  return chosen;
}

/// top_k of `all`, a selection of the same candidates, with `bonus` on the scores of those that are `held`.
inline selection sticky_top_k(const selection& all, const std::vector<int>& held, int k, double bonus) {
  const auto favoured = [&](std::vector<double> scores) {
    for (std::size_t j = 0; j < scores.size(); ++j)
      if (std::find(held.begin(), held.end(), all.candidates[j]) != held.end()) scores[j] += bonus;
    return scores;
  };
  const selection best = top_k(all.candidates, favoured(all.pooled), k);
  selection chosen = all;
  chosen.pages = best.pages;
  chosen.pooled = best.pooled;
  chosen.margin = best.margin;
  chosen.low = favoured(all.low);
  chosen.high = favoured(all.high);
  if (all.slack != infinity) chosen.slack = slack_of(chosen, chosen.low, chosen.high);
  return chosen;
}

/// Each candidate's part of the mass of all, and the least and the most that it may be.
struct page_masses {
  std::vector<double> value;
  std::vector<double> low;
  std::vector<double> high;
};

inline page_masses masses_of(const selection& chosen, double temperature = 1.0) {
  const auto shares = [&](const std::vector<double>& scores, const std::vector<double>& of_all) {
    std::vector<double> divided;
    for (double score : of_all) divided.push_back(score / temperature);
    const double total = log_sum_exp(divided);
    std::vector<double> parts;
    // Without any mass, or at the ends of a range, exp(score - total) may be NaN or more than the whole.
    for (double score : scores)
      parts.push_back(score == -infinity ? 0.0 : std::min(1.0, std::exp(score / temperature - total)));
    return parts;
  };
  return {shares(chosen.pooled, chosen.pooled), shares(chosen.low, chosen.high),
          shares(chosen.high, chosen.low)};
}

/// The most that `count` of the masses add up to.
inline double largest_sum(std::vector<double> masses, std::size_t count) {
  std::sort(masses.begin(), masses.end());
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) sum += masses[masses.size() - 1 - i];
  return std::min(sum, 1.0);
}

/// How near P a prefix comes whose mass decides how many pages top_p takes, doubts at their worst. The mass
/// of all min(k, candidates) decides nothing: they are taken if no shorter prefix suffices. As scores' errors
/// are larger where a temperature below 1 divides them, the distance is less by as much.
inline double mass_margin_of(const selection& chosen, int k, double p, double temperature = 1.0) {
  const page_masses masses = masses_of(chosen, temperature);
  const std::vector<std::size_t> order = ranked(chosen.candidates, chosen.pooled);
  double margin = infinity, low = 0.0;
  for (std::size_t i = 1; i < order.size() && i < static_cast<std::size_t>(k); ++i) {
    low += masses.low[order[i - 1]];
    const double high = largest_sum(masses.high, i);
    margin = std::min(margin, p < low ? low - p : p > high ? p - high : 0.0);
  }
  return margin * std::min(1.0, temperature);
}

/// The shortest prefix of the pages, highest score first, whose mass is at least `p`: at least one page, at
/// most k. Mass is of scores over a temperature; it rises with the score, and unlike it cannot underflow to a
/// tie.
inline selection top_p(const std::vector<int>& pages, const std::vector<double>& scores, int k, double p,
                       double temperature = 1.0) {
  const std::vector<std::size_t> order = ranked(pages, scores);
  const std::size_t most = std::min(order.size(), static_cast<std::size_t>(k));
  const page_masses masses = masses_of(take(pages, scores, order, most), temperature);
  std::size_t count = 0;
  double sum = 0.0;
  while (count < most && (count == 0 || sum < p)) sum += masses.value[order[count++]];
  selection chosen = take(pages, scores, order, count);
  chosen.mass_margin = mass_margin_of(chosen, k, p, temperature);
  return chosen;
}

}  // namespace oracle
