// Recall of one KV head on the host: the selected units that its slots lack are brought from the store.
#pragma once

#include <cstdint>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/backend/host/encoded_pages.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::host {

/// Brings units of one KV head from the store to its selected slots: for i of `count` the unit `unit(i)`,
/// ascending, to slot `slot(i)`. Throws store_error.
template <class State, class Policies, class Unit, class Slot>
void bring_units(const encoded_pages<State, Policies>& stored, const State& s, const sequence_head& at,
                 int count, const Unit& unit, const Slot& slot) {
  const auto to = [&](int i) { return s.selected_slice(at.sequence, slot(i), at.head); };
  const auto page = [&](int i) { return s.page_of(unit(i)); };
  if (s.encoded)
    return stored.read(
        at, count,
        [&](int i) {
          return page_range{page(i), s.first_row_of(unit(i)), s.unit.tokens};
        },
        to);
  for (int i = 0; i < count; ++i)
    copy_slice<State::head_dim>(
        as_const(rows_behind(s.store_slice(at.sequence, page(i), at.head), s.first_row_of(unit(i)))), to(i),
        s.unit.tokens);
}

/// Brings the selected units of one KV head into its selected slots: what is held stays, what is missing is
/// copied from the ring (promotion) where it is still there at length `tokens`, else from the store (recall).
/// Throws store_error; what is missing is still missing then, and has been counted: a call that `repeats` one
/// counts nothing.
template <class State, class Policies>
void recall_units(const State& s, const Policies& policies, const sequence_head& at, int tokens,
                  const workspace& w, bool repeats = false) {
  const std::size_t at_head = s.head_index(at.sequence, at.head),
                    first = s.selected_index(at.sequence, at.head);
  const std::int32_t* units = s.selected + first;
  const int count = s.selected_count[at_head];
  std::int32_t* slot_of = s.slot_of + first;
  const slot_contents slots = s.slots_of(at.sequence, at.head);
  resolve(policies.residency, [&](const auto& residency) {
    match_slots(residency, units, count, slots, ++s.selections[at_head], slot_of);
  });
  int missing = 0;  // those to bring from the store, in w.units
  for (int i = 0; i < count; ++i) {
    if (slot_of[i] >= 0) continue;
    slot_of[i] = ~slot_of[i];
    const bool in_ring = s.in_ring(units[i], tokens);
    (in_ring ? s.promoted : s.recalled)[at_head] += repeats ? 0 : 1;
    if (!in_ring) {
      w.units[missing++] = i;
      continue;
    }
    const auto from = s.block_slice(at.sequence, s.slots.ring_slot(s.page_of(units[i])), at.head);
    copy_slice<State::head_dim>(as_const(rows_behind(from, s.first_row_of(units[i]))),
                                s.selected_slice(at.sequence, slot_of[i], at.head), s.unit.tokens);
  }
  try {
    bring_units(
        encoded_pages(s, policies, w), s, at, missing, [&](int i) { return units[w.units[i]]; },
        [&](int i) { return slot_of[w.units[i]]; });
  } catch (const store_error&) {
    for (int i = 0; i < missing; ++i) slots.unit[slot_of[w.units[i]]] = -1;
    throw;
  }
}

}  // namespace freekv::host
