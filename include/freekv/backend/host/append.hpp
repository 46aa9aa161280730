// Append, summarise and drift on the host.
#pragma once

#include <algorithm>
#include <cstring>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/functors/summarise_page.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/correction.hpp>

namespace freekv::host {

/// Appends the rows of one entry that fall into one page: K and V to the store and, where the layer keeps
/// slots and the page stays in the fast tier, to its sink or ring slot; a page that becomes complete is
/// summarised.
///
/// `key`, `value`: the entry's first row, (rows, kv_heads, head_dim), of the stored element type or float.
template <class State, class Summary, class In>
void append_page(isa set, const State& s, const Summary& summary, const step_entry& entry, int page_index,
                 const In* key, const In* value, const workspace& w) {
  using element = typename State::element;
  constexpr int d = State::head_dim;
  const int first = std::max(entry.before, page_index * s.page.tokens);
  const int last = std::min(entry.after(), (page_index + 1) * s.page.tokens);
  const bool in_slots =
      s.keeps_slots && s.kind != layer_kind::complete &&
      (page_index < s.slots.sink || page_index >= s.slots.ring_begin(entry.after(), s.page.tokens));
  const int slot = page_index < s.slots.sink ? s.slots.sink_slot(page_index) : s.slots.ring_slot(page_index);
  const auto put = [](element* to, const In* from) {
    if constexpr (std::is_same_v<In, element>)
      std::memcpy(to, from, d * sizeof(element));
    else
      for (int i = 0; i < d; ++i) to[i] = from_float<element>(from[i]);
  };
  for (int head = 0; head < s.heads.kv; ++head) {
    const auto stored = s.store_slice(entry.sequence, page_index, head);
    for (int token = first; token < last; ++token) {
      const int t = token - page_index * s.page.tokens;
      const std::int64_t row = (static_cast<std::int64_t>(token - entry.before) * s.heads.kv + head) * d;
      put(stored.key + t * stored.stride, key + row);
      put(stored.value + t * stored.stride, value + row);
      if (in_slots) {
        const auto frame = s.frame_slice(entry.sequence, slot, head);
        std::memcpy(frame.key + t * frame.stride, stored.key + t * stored.stride, d * sizeof(element));
        std::memcpy(frame.value + t * frame.stride, stored.value + t * stored.stride, d * sizeof(element));
      }
    }
  }
  const bool complete = last == (page_index + 1) * s.page.tokens;
  if (!complete || s.kind != layer_kind::retrieval) return;
  const std::int32_t store_page = s.store_page(entry.sequence, page_index);
  with_team(set, [&](auto team) {
    for (int head = 0; head < s.heads.kv; ++head) {
      if (s.kind_of(head) != layer_kind::retrieval) continue;
      const auto slice = s.store_slice(entry.sequence, page_index, head);
      summarise_page<element>(team, summary_at(summary, s.layer, head), as_const(slice), s.page,
                              {w.block, w.numbers}, s.summary_of(store_page, head));
    }
  });
}

/// Forgets the selection and the previous query of a sequence that goes on with a prompt.
template <class State>
void drop_selection(const State& s, int sequence) {
  s.has_selection[sequence] = 0;
  s.decode_steps[sequence] = 0;
  for (int head = 0; head < s.heads.kv; ++head) {
    const slot_contents slots = s.slots_of(sequence, head);
    std::fill_n(slots.page, slots.count, -1);
    std::fill_n(slots.last_selected, slots.count, 0);
    s.selected_count[s.row(sequence, head)] = 0;
    s.upcoming_count[s.row(sequence, head)] = -1;
    s.selections[s.row(sequence, head)] = 0;
  }
}

/// Flags the KV heads of a sequence that have no selection or whose queries the correction does not accept, then keeps
/// `query` (query_heads, head_dim) as the one that makes the next selection. A correction by mass judges later, in
/// `correct_head`.
template <class State, class Correction>
void detect_drift(isa set, const State& s, const Correction& correction, int sequence, const float* query) {
  constexpr int d = State::head_dim;
  const int group = s.heads.group();
  with_team(set, [&](auto team) {
    for (int head = 0; head < s.heads.kv; ++head) {
      const std::size_t row = s.row(sequence, head);
      bool flagged = s.has_selection[sequence] == 0;
      if constexpr (correction_by_query<Correction>) {
        const group_query now{query + static_cast<std::ptrdiff_t>(head) * group * d, group, d};
        flagged = flagged || correction.at(s.layer).flags(
                                 team, {now, s.query_of(sequence, head), s.decode_steps[sequence]});
      }
      s.corrected[row] = flagged && s.kind_of(head) == layer_kind::retrieval;
      s.recalled[row] = s.recalled_before_attention[row] = s.promoted[row] = 0;
    }
  });
  std::memcpy(s.kept_query(sequence, 0), query, static_cast<std::size_t>(s.heads.query * d) * sizeof(float));
  s.has_selection[sequence] = 1;
  ++s.decode_steps[sequence];
}

}  // namespace freekv::host
