// Geometry of a layer: its sizes, and what follows from them for a sequence of some length.
#pragma once

#include <cstddef>
#include <freekv/config.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/policies/plan.hpp>

namespace freekv::detail {

/// One KV head of one sequence.
struct sequence_head {
  int sequence = 0;
  int head = 0;
};

/// `count` units of a sequence, from `first` on.
struct unit_range {
  int first = 0;
  int count = 0;
};

/// One layer's sizes, the same for all of its sequences.
struct layer_geometry {
  int layer = 0;
  layer_kind kind = layer_kind::retrieval;  // its heads' kind; retrieval where they differ and one retrieves
  bool keeps_slots = false;
  /// complete pages are kept by a codec, or in a file, and only open ones as they are
  bool encoded = false;
  int open_pages = 1;  // of one sequence, where encoded
  head_counts heads;
  kv_extent page;
  kv_extent unit;  // what is summarised, selected and recalled: a page, or a part of one
  int units_per_page = 1;
  freekv::budget budget;
  slot_roles slots;
  float scale = 1.0f;
  float selection_scale = 1.0f;
  int sliding_window = 0;  // tokens; 0: there is none
  float soft_cap = 0.0f;   // of attention's scores; 0: none
  int pins = 0;            // units of a KV head that are selected whatever their scores
  int max_selected = 1;    // K: units that one KV head has selected at most
  int mask_words = 0;      // of a selected unit's mask of query heads; 0: all heads of a group attend to it
  int max_pages = 0;       // of one sequence
  int store_pages = 0;     // of all
  int decode_rows = 1;     // of one sequence in a step, at most

  FREEKV_HD constexpr std::size_t head_index(int sequence, int head) const {
    return to_size(sequence) * to_size(heads.kv) + to_size(head);
  }
  FREEKV_HD constexpr std::size_t selected_index(int sequence, int head) const {
    return head_index(sequence, head) * to_size(max_selected);
  }
  FREEKV_HD constexpr std::size_t mask_index(int sequence, int head) const {
    return selected_index(sequence, head) * to_size(mask_words);
  }
  FREEKV_HD int pages_of(int tokens) const { return (tokens + page.tokens - 1) / page.tokens; }
  /// Page that unit `index` of a sequence is part of.
  FREEKV_HD constexpr int page_of(int index) const {
    return units_per_page == 1 ? index : index / units_per_page;
  }
  /// First row, in its page or block, of unit, or selected slot, `index`.
  FREEKV_HD constexpr int first_row_of(int index) const { return index % units_per_page * unit.tokens; }
  /// True where a head's selected slots also keep units that it no longer selects, in the residency's order.
  FREEKV_HD constexpr bool has_spare_slots() const { return slots.selected > max_selected; }
  /// Index, among all units of a layer's store, of unit `nth` of a page.
  FREEKV_HD constexpr std::size_t summary_index(store_page_id store_page, int head, int nth) const {
    const std::size_t row = to_size(head) * to_size(store_pages) + to_size(store_page);
    return row * to_size(units_per_page) + to_size(nth);
  }
  /// First page of a decode entry's window, the one behind its candidates. After a truncation the last
  /// candidates may not be complete any more: they are the window's then.
  FREEKV_HD int window_begin(const step_entry& entry) const {
    const int begin = roles_at(entry.candidates_at, budget, page.tokens).window_begin;
    return begin < entry.before / page.tokens ? begin : entry.before / page.tokens;
  }
  /// True where the last page that an entry writes to waits for all that can fail: it stays open, and its
  /// rows may lie where those of the first page are, which are encoded once more if the call is repeated.
  FREEKV_HD bool appends_last_page_behind(const step_entry& entry) const {
    return encoded && entry.after() % page.tokens != 0 &&
           entry.after() / page.tokens > entry.before / page.tokens;
  }
  /// True where a decode entry's heads pin units: behind a prompt, or a truncation that dropped the
  /// selection.
  FREEKV_HD bool pins_anew(const step_entry& entry) const { return pins > 0 && entry.kept_row < 0; }
  /// Candidates of a selection at length `tokens`.
  FREEKV_HD unit_range candidates_at(int tokens) const {
    const page_roles roles = roles_at(tokens, budget, page.tokens);
    return {roles.sink_end * units_per_page, roles.candidates() * units_per_page};
  }
  /// Candidates of the step behind a decode entry, whose own row makes the sequence longer by one.
  FREEKV_HD unit_range next_candidates(const step_entry& entry) const {
    return candidates_at(entry.after() + 1);
  }
  /// Candidates of a decode entry, and of the step behind it.
  FREEKV_HD step_candidates candidates_of(const step_entry& entry) const {
    const unit_range next = next_candidates(entry);
    const int now = window_begin(entry) * units_per_page - next.first;
    return {next.first, now > 0 ? now : 0, next.count};
  }
  /// The sink or ring slot that page `page_index` of a sequence of `tokens` tokens has, if any.
  FREEKV_HD slot_id fixed_slot(int page_index, int tokens) const {
    if (!keeps_slots) return slot_id::none;
    if (page_index < slots.sink) return slots.sink_slot(page_index);
    return page_index >= slots.ring_begin(tokens, page.tokens) ? slots.ring_slot(page_index) : slot_id::none;
  }
  /// True where a unit's page is still whole in the ring at length `tokens`, so that its rows are copied from
  /// there (promotion) and not from the store (recall).
  FREEKV_HD bool in_ring(int index, int tokens) const {
    return page_of(index) >= slots.ring_begin(tokens, page.tokens);
  }
};

}  // namespace freekv::detail
