// Which of a KV head's candidates are the best.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <functional>
#include <span>

namespace freekv::host {

/// Puts the keys of the `count` best of the candidates, units from `first_unit` on, by `w.pooled` first in
/// `w.keys`, the least of them last; `pinned`, ascending, are left out. Of equal scores the smaller unit is
/// better, so that after the first `count` only a greater score than the least of the best so far is looked
/// at.
inline void order_candidates(std::int32_t first_unit, int candidates, std::span<const std::int32_t> pinned,
                             int count, const workspace& w) {
  if (count == 0) return;
  constexpr int at_once = 16;
  const std::ptrdiff_t room = std::max(4 * count, 128);
  std::uint64_t* end = w.keys;
  float least = -infinity;  // of the best so far
  bool full = false;        // whether there are so many
  const auto keep_best = [&] {
    std::nth_element(w.keys, w.keys + count - 1, end, std::greater<>());
    end = w.keys + count;
    least = w.pooled[unit_of_key(w.keys[count - 1]) - first_unit];
    full = true;
  };
  const auto add = [&](int from, int to) {
    for (; from < to; from += at_once) {
      const int stop = std::min(from + at_once, to);
      int greater = full ? 0 : 1;
      for (int j = from; j < stop; ++j) greater |= static_cast<int>(w.pooled[j] > least);
      if (greater == 0) continue;
      for (int j = from; j < stop; ++j) {  // without a branch, which would be guessed wrong
        *end = ordered_key(w.pooled[j], first_unit + j);
        end += !full || w.pooled[j] > least;
      }
      if (end - w.keys >= room) keep_best();
    }
  };
  int from = 0;
  for (const std::int32_t unit : pinned) {
    add(from, unit - first_unit);
    from = unit - first_unit + 1;
  }
  add(from, candidates);
  keep_best();
}

}  // namespace freekv::host
