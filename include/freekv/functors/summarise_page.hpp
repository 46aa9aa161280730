// A completed page to its stored summary.
#pragma once

#include <freekv/policies/summary.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv {

/// Summarises one KV head's keys of a complete page. `keys` (p, d) and `numbers` (width) are the team's
/// scratch.
template <int HeadDim, team T, class S, class Key>
FREEKV_HD void summarise_page(T team, const S& summary, int page_tokens, const head_slice<const Key>& slice,
                              float* keys, float* numbers, std::byte* out) {
  const page_geometry page{page_tokens, HeadDim};
  for (int t = 0; t < page_tokens; ++t) team.widen(slice.key + t * slice.stride, keys + t * HeadDim, HeadDim);
  team.sync();
  summary.summarise(team, keys, page, numbers);
  team.sync();
  encode_summary<Key>(team, summary, page, numbers, out);
}

}  // namespace freekv
