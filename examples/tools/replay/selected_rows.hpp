// The tensor `selected`: what each row of a step, KV heads or query heads, attended to as selected.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <string>

#include "choices.hpp"

namespace freekv::examples {

/// Columns of `selected` where k units are selected.
inline std::int64_t columns_of(const method_spec& m, int k) {
  return std::int64_t{k} + (m.retrieves() && m.pinning == "pin_outliers" ? m.pinned : 0);
}

/// The flags that say how many: "--k 8", or "--k 8 and --pinned 48".
inline std::string columns_text(const method_spec& m, int k) {
  const bool pins = columns_of(m, k) != k;
  return "--k " + std::to_string(k) +
         (pins ? " and --pinned " + std::to_string(m.pinned) + " give" : " gives");
}

/// Whether rows are query heads, each with pages of its own.
inline bool selects_per_query_head(const method_spec& m) {
  return m.retrieves() && m.rows == per_query_head::name;
}

/// Writes the pages of `rows` rows, ascending, `k` numbers each, over the -1 that stand there. `rows` is the
/// number of KV heads or of query heads.
inline void copy_selected(const step_report& report, std::size_t rows, std::size_t k, std::int32_t* to) {
  const std::size_t heads = report.corrected.size(), group = rows / heads;
  const std::size_t most = report.attended.size() / heads;
  const std::size_t words = most == 0 ? 0 : report.attended_by.size() / report.attended.size();
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t head = row / group, g = row % group;
    std::int32_t* next = to + row * k;
    for (std::size_t i = head * most; i < head * most + to_size(report.attended_count[head]); ++i)
      if (group == 1 || (report.attended_by[i * words + g / 32] >> g % 32 & 1u) != 0)
        *next++ = report.attended[i];
  }
}

}  // namespace freekv::examples
