// A sequence's selection and slots between steps: truncation, fork, restoring.
#pragma once

#include <algorithm>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/backend/host/encoded_pages.hpp>
#include <freekv/backend/host/recall.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/pipeline/selection_state.hpp>

namespace freekv::host {

/// Moves what a sequence's selected slots hold to the lowest ones, unless there are spare ones; those of a
/// head for which a recall is to be made up stay.
template <class State>
void compact_slots(const State& s, int sequence) {
  if (s.has_spare_slots()) return;
  for (int head = 0; head < s.heads.kv; ++head) {
    if (s.recall_failed[s.head_index(sequence, head)] != 0) continue;
    freekv::detail::compact_slots(s.slots_of(sequence, head), [&](int from, int to) {
      copy_slice<State::head_dim>(as_const(s.selected_slice(sequence, from, head)),
                                  s.selected_slice(sequence, to, head), s.unit.tokens);
      note_move(s, sequence, head, from, to);
    });
  }
}

/// Copies pages of a sequence to slots of one KV head, at length `tokens`: for i of `count` the page
/// `page(i)` to slot `slot(i)`, the open one last if it is among them. Throws store_error.
template <class State, class Policies, class Page, class Slot>
void fill_slots(const encoded_pages<State, Policies>& stored, const State& s, const sequence_head& at,
                int tokens, int count, const Page& page, const Slot& slot) {
  const auto to = [&](int i) { return s.block_slice(at.sequence, slot(i), at.head); };
  const auto copy = [&](const auto& from, int i) {
    copy_slice<State::head_dim>(as_const(from), to(i), s.page.tokens);
  };
  if (!s.encoded) {
    for (int i = 0; i < count; ++i) copy(s.store_slice(at.sequence, page(i), at.head), i);
    return;
  }
  const bool open = count > 0 && page(count - 1) == tokens / s.page.tokens;
  const auto whole = [&](int i) { return page_range{page(i), 0, s.page.tokens}; };
  stored.read(at, count - open, whole, to);
  if (open) copy(s.open_slice(at.sequence, page(count - 1), at.head), count - 1);
}

/// Fills the sink slots of pages from `first_sink` on, and the ring. Throws store_error.
template <class State, class Policies>
void fill_window(const encoded_pages<State, Policies>& stored, const State& s, int sequence, int tokens,
                 int first_sink) {
  const int pages = s.pages_of(tokens), sink = std::min(s.slots.sink, pages);
  const int ring = s.slots.ring_begin(tokens, s.page.tokens);
  for (int head = 0; head < s.heads.kv; ++head) {
    const sequence_head at{sequence, head};
    fill_slots(
        stored, s, at, tokens, std::max(0, sink - first_sink), [&](int i) { return first_sink + i; },
        [&](int i) { return s.slots.sink_slot(first_sink + i); });
    fill_slots(
        stored, s, at, tokens, std::max(0, pages - ring), [&](int i) { return ring + i; },
        [&](int i) { return s.slots.ring_slot(ring + i); });
  }
}

/// Fills what the selected slots of each head are to hold. Throws store_error.
template <class State, class Policies>
void fill_selected(const encoded_pages<State, Policies>& stored, const State& s, int sequence) {
  for (int head = 0; head < s.heads.kv; ++head) {
    const slot_contents slots = s.slots_of(sequence, head);
    for (int i = 0; i < slots.count; ++i)
      if (slots.unit[i] >= 0)
        bring_units(
            stored, s, {sequence, head}, 1, [&](int) { return slots.unit[i]; }, [&](int) { return i; });
  }
}

/// Reads store page `store_page` to where the rows of page `page`, which is open again, are kept unencoded.
/// Throws store_error.
template <class State, class Policies>
void read_open_page(const encoded_pages<State, Policies>& stored, const State& s, int sequence, int page,
                    store_page_id store_page) {
  for (int head = 0; head < s.heads.kv; ++head)
    stored.read_stored(
        {sequence, head}, 1,
        [&](int) {
          return page_range{page, 0, s.page.tokens};
        },
        [&](int) { return store_page; }, [&](int) { return s.open_slice(sequence, page, head); });
}

/// Gives sequence `to` the unencoded pages of `from`.
template <class State>
void copy_open_pages(const State& s, int from, int to) {
  for (int block = 0; block < s.open_pages; ++block)
    for (int head = 0; head < s.heads.kv; ++head)
      copy_slice<State::head_dim>(as_const(s.open_slice(from, block, head)), s.open_slice(to, block, head),
                                  s.page.tokens);
}

/// Gives sequence `to` the slots' contents of `from`.
template <class State>
void copy_slots(const State& s, int from, int to) {
  const int used = s.slots.fixed() + selected_blocks_in_use(s, from);
  for (int slot = 0; slot < used; ++slot)
    for (int head = 0; head < s.heads.kv; ++head)
      copy_slice<State::head_dim>(as_const(s.block_slice(from, slot_id{slot}, head)),
                                  s.block_slice(to, slot_id{slot}, head), s.page.tokens);
}

/// Takes their values from a sequence's pages, from `first_page` on.
template <class State>
void forget_page_values(const State& s, int sequence, int first_page) {
  if (s.page_values == nullptr) return;
  for (int head = 0; head < s.heads.kv; ++head) {
    std::byte* const values = s.page_value(sequence, head, first_page);
    std::fill(values, s.page_value(sequence, head, s.max_pages), std::byte{0});
  }
}

/// Gives the pages of sequence `to` the values of those of `from`.
template <class State>
void copy_page_values(const State& s, int from, int to) {
  if (s.page_values != nullptr)
    std::copy_n(s.page_value(from, 0, 0), s.page_values_bytes(), s.page_value(to, 0, 0));
}

/// Gives sequence `to` the previous queries, the selection and the report of `from`.
template <class State>
void copy_selection(State s, int from, int to) {
  for_each_array_and_queries(s, [&](auto* array, std::size_t of_sequence) {
    std::copy_n(array + of_sequence * to_size(from), of_sequence, array + of_sequence * to_size(to));
  });
  for (int head = 0; s.missed != nullptr && head < s.heads.kv; ++head)
    s.missed[s.head_index(to, head)] = s.missed[s.head_index(from, head)];
}

}  // namespace freekv::host
