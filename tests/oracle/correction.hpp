// mass_deficit: how much of the current query's mass the selection in use misses, and bringing only the best
// of the missing pages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "numbers.hpp"
#include "selection.hpp"

namespace oracle {

inline bool contains(const std::vector<int>& pages, int page) {
  return std::find(pages.begin(), pages.end(), page) != pages.end();
}

/// Is sum_S w < (1 - delta) * sum_best w?
struct mass_comparison {
  bool missing_mass = false;
  double margin = infinity;  // the difference of the two sides over the larger; infinite where both are 0
  double slack = 0.0;        // the part of the margin that rounding and doubts could use up

  bool is_firm() const { return margin > 1e-4 + slack; }
};

/// `best` is what the selection policy takes now, with its candidates and their pooled scores; `selected` the
/// selection in use, of the same candidates.
inline mass_comparison compare_masses(const selection& best, const std::vector<int>& selected, double delta) {
  const page_masses masses = masses_of(best);
  const auto sum_over = [&](const std::vector<int>& pages, const std::vector<double>& of_page) {
    double sum = 0.0;
    for (std::size_t j = 0; j < best.candidates.size(); ++j)
      if (contains(pages, best.candidates[j])) sum += of_page[j];
    return sum;
  };
  const double part = 1.0 - delta;
  const double held = sum_over(selected, masses.value), needed = part * sum_over(best.pages, masses.value);
  const double held_low = sum_over(selected, masses.low);
  const double held_high = std::min(1.0, sum_over(selected, masses.high));
  const double needed_low = part * sum_over(best.pages, masses.low);
  // Whatever pages are the best, there are this many of them.
  std::size_t count = 0;
  for (int page : best.pages) count += contains(best.candidates, page);
  const double needed_high = part * largest_sum(masses.high, count);

  mass_comparison result;
  result.missing_mass = held < needed;
  // Nothing is less than a share of nothing, whatever the doubts.
  if (needed_high == 0.0) return result;
  const double larger = std::max(held, needed);
  if (larger == 0.0 || best.may_overflow) {
    result.margin = 0.0;
    return result;
  }
  result.margin = std::fabs(held - needed) / larger;
  const double worst = result.missing_mass ? needed_low - held_high : held_low - needed_high;
  result.slack = result.margin - worst / larger + (mass_error(best.score_size) - 1e-4);
  return result;
}

struct replacement {
  std::vector<int> pages;  // ascending
  bool firm = true;        // every comparison on the way is
};

/// Whether the candidate `first` comes before `second` beyond doubt. Masses that float32 cannot hold tie, so
/// that the pages decide, which no margin of the scores tells.
inline bool precedes_firmly(const selection& best, const page_masses& masses, std::size_t first,
                            std::size_t second) {
  if (best.high[first] == -infinity && best.high[second] == -infinity) return true;
  if (masses.low[first] < 1e-30) return false;
  const double margin = margin_between(best.pooled[first], best.pooled[second]);
  const double worst = margin_between(best.low[first], best.high[second]);
  return std::min(margin, worst) > 1e-4;
}

/// The pages of `best` that `selected` lacks, in falling mass (ties: smaller page), each in place of the page
/// of least mass (ties: larger page) that is not among the best, until the deficit is at most delta.
inline replacement replace_missing(const selection& best, std::vector<int> selected, double delta) {
  const page_masses masses = masses_of(best);
  replacement result;
  // The candidates in or not in a set of pages, in falling mass, ties to the smaller page.
  const auto those = [&](const std::vector<int>& in, const std::vector<int>& not_in) {
    std::vector<std::size_t> found;
    for (std::size_t j : ranked(best.candidates, masses.value))
      if (contains(in, best.candidates[j]) && !contains(not_in, best.candidates[j])) found.push_back(j);
    return found;
  };
  const auto in_order = [&](std::size_t first, std::size_t second) {
    if (!precedes_firmly(best, masses, first, second)) result.firm = false;
  };
  for (;;) {
    const mass_comparison now = compare_masses(best, selected, delta);
    result.firm = result.firm && now.is_firm();
    const std::vector<std::size_t> missing = those(best.pages, selected);
    if (!now.missing_mass || missing.empty()) break;
    if (missing.size() > 1) in_order(missing[0], missing[1]);
    const std::vector<std::size_t> others = those(selected, best.pages);
    if (others.size() > 1) in_order(others[others.size() - 2], others.back());
    if (!others.empty())
      selected.erase(std::find(selected.begin(), selected.end(), best.candidates[others.back()]));
    selected.push_back(best.candidates[missing[0]]);
    std::sort(selected.begin(), selected.end());
  }
  result.pages = selected;
  return result;
}

}  // namespace oracle
