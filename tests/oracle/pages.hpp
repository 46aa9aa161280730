// Which pages are sink, window, candidates and ring at a length. Every set is ascending.
#pragma once

#include <algorithm>
#include <vector>

#include "settings.hpp"

namespace oracle {

/// Pages that hold at least one of `length` tokens, the open page included.
inline int page_count(const settings& s, int length) { return (length + s.page - 1) / s.page; }

inline bool is_sink(const settings& s, int page) { return page < s.sink / s.page; }

inline bool is_complete(const settings& s, int page, int length) { return (page + 1) * s.page <= length; }

/// A non-sink page holding one of the tokens length-W .. length-1.
inline bool is_window(const settings& s, int page, int length) {
  if (is_sink(s, page)) return false;
  for (int token = page * s.page; token < (page + 1) * s.page; ++token)
    if (token >= length - s.window && token <= length - 1) return true;
  return false;
}

inline bool is_candidate(const settings& s, int page, int length) {
  return is_complete(s, page, length) && !is_sink(s, page) && !is_window(s, page, length);
}

/// R = W/p + 1 + ceil(2 * (max_rows - 1) / p).
inline int ring_slots(const settings& s) {
  return s.window / s.page + 1 + page_count(s, 2 * (s.max_rows - 1));
}

/// Pages that the window ring still holds at `length`: non-sink, among the last R.
inline bool is_in_ring(const settings& s, int page, int length) {
  const int count = page_count(s, length);
  return !is_sink(s, page) && page < count && page >= count - ring_slots(s);
}

inline std::vector<int> sink_pages(const settings& s, int length) {
  std::vector<int> pages;
  for (int page = 0; page < page_count(s, length); ++page)
    if (is_sink(s, page)) pages.push_back(page);
  return pages;
}

inline std::vector<int> window_pages(const settings& s, int length) {
  std::vector<int> pages;
  for (int page = 0; page < page_count(s, length); ++page)
    if (is_window(s, page, length)) pages.push_back(page);
  return pages;
}

inline std::vector<int> candidate_pages(const settings& s, int length) {
  std::vector<int> pages;
  for (int page = 0; page < page_count(s, length); ++page)
    if (is_candidate(s, page, length)) pages.push_back(page);
  return pages;
}

/// The candidates at length `fixed` that the first `length` tokens complete.
inline std::vector<int> candidate_pages(const settings& s, int fixed, int length) {
  std::vector<int> pages;
  for (int page : candidate_pages(s, fixed))
    if (is_complete(s, page, length)) pages.push_back(page);
  return pages;
}

/// The window at `length` of a step whose candidates are given: every other non-sink page.
inline std::vector<int> window_pages(const settings& s, int length, const std::vector<int>& candidates) {
  std::vector<int> pages;
  for (int page = 0; page < page_count(s, length); ++page)
    if (!is_sink(s, page) && std::find(candidates.begin(), candidates.end(), page) == candidates.end())
      pages.push_back(page);
  return pages;
}

inline std::vector<int> ring_pages(const settings& s, int length) {
  std::vector<int> pages;
  for (int page = 0; page < page_count(s, length); ++page)
    if (is_in_ring(s, page, length)) pages.push_back(page);
  return pages;
}

/// The pages that a KV head of `kind` attends to, with this window. Nothing is made unique on purpose: a page
/// that two rules name would be attended twice, and has to show.
inline std::vector<int> attended_pages(const settings& s, layer_kind kind, int length,
                                       const std::vector<int>& selected, const std::vector<int>& window) {
  std::vector<int> pages;
  if (kind == layer_kind::complete) {
    for (int page = 0; page < page_count(s, length); ++page) pages.push_back(page);
    return pages;
  }
  for (int page : sink_pages(s, length)) pages.push_back(page);
  if (kind == layer_kind::retrieval)
    for (int page : selected) pages.push_back(page);
  for (int page : window) pages.push_back(page);
  std::sort(pages.begin(), pages.end());
  return pages;
}

inline std::vector<int> attended_pages(const settings& s, int length, const std::vector<int>& selected) {
  return attended_pages(s, s.kind, length, selected, window_pages(s, length));
}

/// The page that a unit is part of.
inline int page_of(const settings& s, int unit) { return unit * unit_tokens(s) / s.page; }

/// The units of whole pages.
inline std::vector<int> units_of(const settings& s, const std::vector<int>& pages) {
  std::vector<int> units;
  for (int page : pages)
    for (int token = page * s.page; token < (page + 1) * s.page; token += unit_tokens(s))
      units.push_back(token / unit_tokens(s));
  return units;
}

/// The tokens of units of complete pages.
inline std::vector<int> tokens_of_units(const settings& s, const std::vector<int>& units) {
  std::vector<int> tokens;
  for (int unit : units)
    for (int i = 0; i < unit_tokens(s); ++i) tokens.push_back(unit * unit_tokens(s) + i);
  return tokens;
}

/// The tokens of whole pages, the open page as far as it is filled.
inline std::vector<int> tokens_of(const settings& s, int length, const std::vector<int>& pages) {
  std::vector<int> tokens;
  for (int page : pages)
    for (int token = page * s.page; token < (page + 1) * s.page && token < length; ++token)
      tokens.push_back(token);
  return tokens;
}

/// The tokens that a KV head of `kind` attends to where it has selected these units, with this window;
/// nothing is made unique here either.
inline std::vector<int> attended_tokens(const settings& s, layer_kind kind, int length,
                                        const std::vector<int>& selected, const std::vector<int>& window) {
  std::vector<int> tokens = tokens_of(s, length, attended_pages(s, kind, length, {}, window));
  if (kind == layer_kind::retrieval)
    for (int token : tokens_of_units(s, selected)) tokens.push_back(token);
  std::sort(tokens.begin(), tokens.end());
  return tokens;
}

}  // namespace oracle
