// A correction by mass of one KV head: whether it flags the head, and what the head has selected then.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/policies/correction.hpp>

namespace freekv::detail {

/// Units that a head has selected, and those that it would select now, both ascending. `selected` has room
/// for as many as `best` has.
struct selected_and_best {
  std::int32_t* selected = nullptr;
  const std::int32_t* best = nullptr;
  int count = 0, best_count = 0;
};

/// Exchanges units of `units.selected` for those of `units.best` that it misses until `correction` is
/// content; returns how many are selected then. `mass_of(units, count)`: their mass; `value(unit)`: the
/// greater, the better. (docs/contract.md, 8.3)
template <class Correction, class Mass, class Value>
FREEKV_HD int exchange_units(const Correction& correction, const selected_and_best& units, float of_best,
                             const Mass& mass_of, const Value& value) {
  int count = units.count;
  while (correction.flags(selection_masses{mass_of(units.selected, count), of_best})) {
    std::int32_t gain = -1;
    int loss = -1;
    for (int i = 0, j = 0; i < count || j < units.best_count;) {
      const bool is_selected = i < count && (j == units.best_count || units.selected[i] <= units.best[j]);
      const bool is_best = j < units.best_count && (i == count || units.best[j] <= units.selected[i]);
      if (!is_selected && (gain < 0 || value(units.best[j]) > value(gain))) gain = units.best[j];
      if (!is_best && (loss < 0 || value(units.selected[i]) < value(units.selected[loss]))) loss = i;
      i += is_selected;
      j += is_best;
    }
    if (gain < 0) break;
    // The gain goes to its place among those that stay.
    int at = loss < 0 ? count++ : loss;
    for (; at > 0 && units.selected[at - 1] > gain; --at) units.selected[at] = units.selected[at - 1];
    for (; at + 1 < count && units.selected[at + 1] < gain; ++at) units.selected[at] = units.selected[at + 1];
    units.selected[at] = gain;
  }
  return count;
}

/// Makes the best units the selected ones; returns how many.
FREEKV_HD inline int take_all_of_best(const selected_and_best& units) {
  for (int i = 0; i < units.best_count; ++i) units.selected[i] = units.best[i];
  return units.best_count;
}

/// Corrects one head: returns how many units it has selected then. `corrected`: it is flagged already, and
/// selects anew; set where the correction flags it, whose selection has too little of the mass.
template <class Correction, class Mass, class Value>
FREEKV_HD int correct_selection(const Correction& correction, const selected_and_best& units, bool& corrected,
                                const Mass& mass_of, const Value& value) {
  if (!corrected) {
    bool same = units.count == units.best_count;
    for (int i = 0; same && i < units.count; ++i) same = units.selected[i] == units.best[i];
    if (same) return units.count;
    const float of_best = mass_of(units.best, units.best_count);
    if (!correction.flags(selection_masses{mass_of(units.selected, units.count), of_best}))
      return units.count;
    corrected = true;
    if (correction.exchanges_units()) return exchange_units(correction, units, of_best, mass_of, value);
  }
  return take_all_of_best(units);
}

}  // namespace freekv::detail
