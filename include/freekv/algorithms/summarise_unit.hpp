// A unit of a completed page to its stored summary.
#pragma once

#include <freekv/policies/summary.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::detail {

/// The team's scratch: a unit's keys (tokens, head_dim) as floats, and a summary's numbers.
struct summary_scratch {
  float* keys = nullptr;
  float* numbers = nullptr;
};

/// Summarises one KV head's keys of a unit of a complete page into `stored`.
template <class Key, team T, class S>
FREEKV_HD void summarise_unit(T team, const S& summary, const head_slice<const Key>& slice, kv_extent unit,
                              const summary_scratch& scratch, std::byte* stored) {
  if constexpr (requires {
                  team.widen_rows(slice.key, slice.stride, unit.tokens, scratch.keys, unit.head_dim);
                })
    team.widen_rows(slice.key, slice.stride, unit.tokens, scratch.keys, unit.head_dim);
  else
    for (int t = 0; t < unit.tokens; ++t)
      team.widen(slice.key + t * slice.stride, scratch.keys + t * unit.head_dim, unit.head_dim);
  team.sync();
  summary.summarise(team, unit_keys{scratch.keys, unit}, scratch.numbers);
  team.sync();
  encode_summary<Key>(team, summary, unit, scratch.numbers, stored);
}

}  // namespace freekv::detail
