// What happens to a sequence's selection and slots between steps: truncation, fork, restoring.
#pragma once

#include <algorithm>
#include <array>
#include <freekv/functors/copy_slice.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::host {

/// Whether all pages selected by the heads of a sequence are among its first `pages`.
template <class State>
bool selects_within(const State& s, int sequence, int pages) {
  for (int head = 0; head < s.heads.kv; ++head) {
    const std::int32_t* selected = s.selected + s.selection(sequence, head);
    const int count = s.selected_count[s.row(sequence, head)];
    if (count > 0 && selected[count - 1] >= pages) return false;
  }
  return true;
}

/// Copies a page of a sequence from the store to a slot, for all heads.
template <class State>
void fill_slot(const State& s, int sequence, int page, int slot) {
  for (int head = 0; head < s.heads.kv; ++head)
    copy_slice<State::head_dim>(as_const(s.store_slice(sequence, page, head)),
                                s.frame_slice(sequence, slot, head), s.page.tokens);
}

/// Fills the ring slots of pages [first, last).
template <class State>
void fill_ring(const State& s, int sequence, int first, int last) {
  for (int page = first; page < last; ++page) fill_slot(s, sequence, page, s.slots.ring_slot(page));
}

/// The ring's pages at length `tokens` that tokens up to `before` have overwritten come back. Selected slots need
/// nothing: a page that is no longer complete can only be of the last selection, which is dropped then.
template <class State>
void truncate_slots(const State& s, int sequence, int before, int tokens) {
  fill_ring(s, sequence, s.slots.ring_begin(tokens, s.page.tokens),
            std::min(s.pages_of(tokens), s.slots.ring_begin(before, s.page.tokens)));
}

/// Fills all slots: sink, ring, and what the selected slots of each head are to hold.
template <class State>
void fill_slots(const State& s, int sequence, int tokens) {
  const int pages = s.pages_of(tokens);
  for (int page = 0; page < std::min(s.slots.sink, pages); ++page)
    fill_slot(s, sequence, page, s.slots.sink_slot(page));
  fill_ring(s, sequence, s.slots.ring_begin(tokens, s.page.tokens), pages);
  for (int head = 0; head < s.heads.kv; ++head) {
    const slot_contents slots = s.slots_of(sequence, head);
    for (int i = 0; i < slots.count; ++i)
      if (slots.page[i] >= 0)
        copy_slice<State::head_dim>(as_const(s.store_slice(sequence, slots.page[i], head)),
                                    s.frame_slice(sequence, s.slots.selected_slot(i), head), s.page.tokens);
  }
}

/// Gives sequence `to` the slots' contents of `from`.
template <class State>
void copy_slots(const State& s, int from, int to) {
  for (int slot = 0; slot < s.slots.total(); ++slot)
    for (int head = 0; head < s.heads.kv; ++head)
      copy_slice<State::head_dim>(as_const(s.frame_slice(from, slot, head)), s.frame_slice(to, slot, head),
                                  s.page.tokens);
}

/// Gives sequence `to` the previous queries, the selection and the report of `from`.
template <class State>
void copy_selection(const State& s, int from, int to) {
  const auto copy = [&](auto* data, std::size_t row) {
    const std::size_t all = row * static_cast<std::size_t>(s.heads.kv);
    std::copy_n(data + all * static_cast<std::size_t>(from), all, data + all * static_cast<std::size_t>(to));
  };
  const auto n = [](int count) { return static_cast<std::size_t>(count); };
  copy(s.previous_query, n(s.decode_rows * s.heads.group() * State::head_dim));
  copy(s.corrected, 1);
  for (std::int32_t* counts : std::array{s.selected_count, s.upcoming_count, s.attended_count, s.selections,
                                         s.recalled, s.recalled_before_attention, s.promoted})
    copy(counts, 1);
  for (std::int32_t* lists : std::array{s.selected, s.upcoming, s.attended, s.slot_of})
    copy(lists, n(s.budget.selected_pages));
  for (std::int32_t* lists : std::array{s.slot_page, s.slot_stamp}) copy(lists, n(s.slots.selected));
}

}  // namespace freekv::host
