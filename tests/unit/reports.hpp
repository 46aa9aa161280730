// What reports of a step say, as tests compare it.
#pragma once

#include <cstdint>
#include <freekv/core/ids.hpp>
#include <span>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace tests {

inline std::vector<int> from_to(int first, int last) {
  std::vector<int> all;
  for (int i = first; i <= last; ++i) all.push_back(i);
  return all;
}

/// A head's part of a list of a report.
inline std::vector<int> of_head(std::span<const std::int32_t> all, std::span<const std::int32_t> counts,
                                int head) {
  const auto part = all.subspan(count(head) * all.size() / counts.size(), count(counts[count(head)]));
  return {part.begin(), part.end()};
}

/// The units that a layer's last step attended to.
template <class Pipeline>
std::vector<int> attended(const Pipeline& p, int layer, freekv::sequence_id id, int head) {
  const auto report = p.report(layer)[id];
  return of_head(report.attended, report.attended_count, head);
}

}  // namespace tests
