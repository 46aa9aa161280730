// One layer as the stages read and write it: its memory, its sizes, and the entries of a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/step_input.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/engine_blocks.hpp>
#include <freekv/storage/layout.hpp>
#include <freekv/storage/slice_store.hpp>
#include <span>

namespace freekv::detail {

/// One sequence's part of a step, as stages see it: `tokens` rows appended behind `before`, the first of them
/// row `first_row` of the step.
struct step_entry {
  int sequence = 0;
  int before = 0;
  int tokens = 0;
  int first_row = 0;
  step_phase phase = step_phase::decode;
  /// page whose rows are copied first, as other sequences have it too
  store_page_id shared_page = store_page_id::none;
  // Decode rows alone:
  int candidates_at = 0;  // the length whose candidates they select from, as the step before has fixed it
  int kept_row = -1;  // row of the step before whose queries are the previous ones; -1: there is no selection
  int decode_step = 0;  // since the last prompt
  FREEKV_HD constexpr int after() const { return before + tokens; }
};

/// Candidates that a decode entry selects among: units from `first` on, the first `now` of them for its own
/// step, the first `next` for the step behind it.
struct step_candidates {
  int first = 0, now = 0, next = 0;
  FREEKV_HD constexpr int most() const { return now > next ? now : next; }
};

/// Queries of a step's rows, `stride` elements apart: (rows, query_heads, head_dim).
struct step_queries {
  const void* data = nullptr;
  std::int64_t stride = 0;
  element_type type = element_type::f32;

  FREEKV_HD bool empty() const { return data == nullptr; }
  /// The numbers of a row from element `first` on.
  FREEKV_HD typed_numbers row(std::int64_t nth, std::int64_t first) const {
    return {static_cast<const char*>(data) + (nth * stride + first) * bytes_of(type), type};
  }
};

/// Rows of a step as stages see `kv_rows`.
template <class In>
struct step_rows {
  const In* keys = nullptr;
  const In* values = nullptr;
  std::int64_t key_stride = 0, value_stride = 0;
  step_queries queries{};
};

/// Outputs of attention: `out` (rows, query_heads, head_dim) of a type, `lse` (rows, query_heads), which may
/// be null.
struct attention_output {
  void* out = nullptr;
  float* lse = nullptr;
  float lse_per_nat = 1.0f;  // what a nat of lse is written as
  std::int64_t stride = 0;  // elements from a row of `out` to the next; 0: one behind the other
  element_type type = element_type::f32;

  /// The outputs as floats, where they are that, one row behind the other.
  float* floats() const { return static_cast<float*>(out); }
};

/// Output of the log-masses of a step's rows: (rows, query_heads, entries).
struct log_mass_output {
  float* log_masses = nullptr;
  int entries = 0;       // of a row's list, or more
  float per_nat = 1.0f;  // what a nat is written as
};

/// One KV head of one sequence.
struct sequence_head {
  int sequence = 0;
  int head = 0;
};

/// Rows of a page, one behind the other.
struct page_range {
  int page = 0;
  int first = 0;
  int tokens = 0;
};

/// The pages one KV head attends to, in ascending order: all pages, or sink, selected units and window; and
/// of the first page, where a window slides, not all tokens.
struct attention_list {
  page_roles roles;
  const std::int32_t* selected = nullptr;
  int selected_count = 0;
  bool complete = false;
  int tokens = 0;       // of the sequence
  int first_token = 0;  // tokens before it are not attended
  int page_tokens = 1, unit_tokens = 1;

  FREEKV_HD constexpr int size() const {
    return complete ? roles.page_end : roles.sink_end + selected_count + roles.page_end - roles.window_begin;
  }
  /// Number of entry i among the selected units; not one of theirs if it is none.
  FREEKV_HD constexpr int nth_selected(int i) const { return complete ? -1 : i - roles.sink_end; }
  FREEKV_HD constexpr bool is_selected(int i) const {
    return nth_selected(i) >= 0 && nth_selected(i) < selected_count;
  }
  /// Rows that entry i has: of its page, or of its unit's.
  FREEKV_HD constexpr page_range range(int i) const {
    if (is_selected(i)) {
      const int unit = selected[nth_selected(i)], units_per_page = page_tokens / unit_tokens;
      if (units_per_page == 1) return {unit, 0, page_tokens};
      return {unit / units_per_page, unit % units_per_page * unit_tokens, unit_tokens};
    }
    const int page =
        complete || i < roles.sink_end ? i : roles.window_begin + nth_selected(i) - selected_count;
    const int before = page * page_tokens, first = first_token > before ? first_token - before : 0;
    const int last = tokens - before < page_tokens ? tokens - before : page_tokens;
    return {page, first, last - first};
  }
  FREEKV_HD constexpr int page(int i) const { return range(i).page; }
};

/// `count` units of a sequence, from `first` on.
struct unit_range {
  int first = 0;
  int count = 0;
};

/// One layer's memory and sizes; trivially copyable. Arrays are indexed by (sequence, ...) as their comments
/// say.
template <class Shape>
struct layer_state {
  using element = typename Shape::element_type;
  static constexpr int head_dim = Shape::head_dim;

  int layer = 0;
  layer_kind kind = layer_kind::retrieval;  // of all heads, or retrieval where any head retrieves
  bool keeps_slots = false;
  /// complete pages are kept as a codec leaves them, or in a file, and open ones as they are
  bool encoded = false;
  int open_pages = 1;  // of one sequence, where encoded
  head_counts heads;
  page_geometry page;
  page_geometry unit;  // what is summarised, selected and recalled: a page, or a part of one
  int units_per_page = 1;
  freekv::budget budget;
  slot_roles slots;
  float scale = 1.0f;
  int sliding_window = 0;              // tokens; 0: there is none
  float soft_cap = 0.0f;               // of attention's scores; 0: none
  const float* sink_logits = nullptr;  // (query head); null: none
  int pins = 0;                        // units of a KV head that are selected whatever their scores
  int max_selected = 1;                // K, that one KV head has selected at most
  int mask_words = 0;   // of a selected unit's mask of query heads; 0: all heads of a group attend to it
  int max_pages = 0;    // of one sequence
  int store_pages = 0;  // of all
  strided_pages<element, head_dim> store;  // by store page, unless encoded
  strided_pages<element, head_dim> open;   // by sequence * open_pages + page % open_pages, if encoded
  slice_store slices;                      // complete pages, if encoded
  slot_blocks<element> blocks;  // of all slot sets: sink and ring, then what `selected_blocks` lists
  const std::int32_t* selected_blocks = nullptr;  // (slot set, blocks of the selected slots): its block
  const std::int32_t* page_table = nullptr;       // (sequence, max_pages): store page
  const std::int32_t* slot_sets = nullptr;        // (sequence): its slots among all, -1 while it is preempted
  std::byte* summaries = nullptr;                 // (kv head, store page, unit of the page, summary_bytes)
  std::size_t summary_bytes = 0;                  // of one unit
  float* pin_worth = nullptr;   // (kv head, store page, unit of the page), where units are pinned
  std::byte* shared = nullptr;  // (store page, shared_bytes): what a codec keeps of a page, if encoded
  std::size_t shared_bytes = 0;
  layer_kind* head_kinds = nullptr;  // (kv head)
  int decode_rows = 1;               // of one sequence in a step, at most
  /// (sequence, kv head, decode row, group, head_dim): the last decode step's queries, until `append` has
  /// judged drift; then this one's.
  float* kept_queries = nullptr;
  std::uint8_t* corrected = nullptr;  // (sequence, kv head): flagged in the last step
  /// of a device, (1): heads flagged in the step begun last, of all its entries
  std::int32_t* flagged_count = nullptr;
  std::uint8_t* recall_failed = nullptr;   // (sequence, kv head): selected units could not be read
  std::uint8_t* lacking = nullptr;         // (sequence): slots or the open page could not be read
  /// (sequence, kv head, K): ascending units in force: heads attend to them, flagged ones as `correct` has
  /// selected them anew; `speculate` puts the next step's in their place
  std::int32_t* selected = nullptr;
  std::int32_t* selected_count = nullptr;  // (sequence, kv head)
  /// (sequence, kv head, K): what `correct` has selected ahead for the next step, if it has
  std::int32_t* next_selected = nullptr;
  std::int32_t* next_selected_count = nullptr;  // (sequence, kv head): -1 where it is not known yet
  std::int32_t* attended = nullptr;             // (sequence, kv head, K): what the last step attended to
  std::int32_t* attended_count = nullptr;       // (sequence, kv head)
  /// (sequence, kv head, K, mask_words): query heads that selected the unit
  std::uint32_t* selected_by = nullptr;
  std::uint32_t* next_selected_by = nullptr;  // query heads that selected the units of `next_selected`
  std::uint32_t* attended_by = nullptr;       // query heads that selected the units of `attended`
  std::int32_t* pinned = nullptr;             // (sequence, kv head, pins): ascending units
  std::int32_t* pinned_count = nullptr;       // (sequence, kv head)
  std::int32_t* slot_unit = nullptr;          // (sequence, kv head, selected slot): unit in it, or -1
  std::int32_t* slot_stamp = nullptr;  // (sequence, kv head, selected slot): last selection with that unit
  std::int32_t* slot_of = nullptr;     // (sequence, kv head, K): slot of each selected unit
  std::int32_t* selections = nullptr;  // (sequence, kv head): how many there have been
  std::int32_t* recalled = nullptr;    // (sequence, kv head): slices from the store, last step
  /// (sequence, kv head): those of `recalled` that attention waited for
  std::int32_t* recalled_before_attention = nullptr;
  std::int32_t* promoted = nullptr;  // (sequence, kv head): slices from the ring, last step

  FREEKV_HD constexpr std::size_t head_index(int sequence, int head) const {
    return to_size(sequence) * to_size(heads.kv) + to_size(head);
  }
  FREEKV_HD constexpr std::size_t selection(int sequence, int head) const {
    return head_index(sequence, head) * to_size(max_selected);
  }
  FREEKV_HD constexpr std::size_t masks(int sequence, int head) const {
    return selection(sequence, head) * to_size(mask_words);
  }
  FREEKV_HD unit_union selected_union(int sequence, int head) const {
    return {selected + selection(sequence, head), selected_by + masks(sequence, head), mask_words};
  }
  FREEKV_HD unit_union next_selected_union(int sequence, int head) const {
    return {next_selected + selection(sequence, head), next_selected_by + masks(sequence, head), mask_words};
  }
  FREEKV_HD slot_contents slots_of(int sequence, int head) const {
    const std::size_t first = head_index(sequence, head) * to_size(slots.selected);
    return {slot_unit + first, slot_stamp + first, slots.selected};
  }
  /// First page of a decode entry's window: behind its candidates, as far as these are complete, which after
  /// a truncation not all of them need be.
  FREEKV_HD int window_begin(const step_entry& entry) const {
    const int begin = roles_at(entry.candidates_at, budget, page.tokens).window_begin;
    return begin < entry.before / page.tokens ? begin : entry.before / page.tokens;
  }
  /// The candidates of a selection at length `tokens`.
  FREEKV_HD unit_range candidates_at(int tokens) const {
    const page_roles roles = roles_at(tokens, budget, page.tokens);
    return {roles.sink_end * units_per_page, roles.candidates() * units_per_page};
  }
  /// The candidates of a decode entry, and of the step behind it.
  FREEKV_HD step_candidates candidates_of(const step_entry& entry) const {
    const unit_range next = candidates_at(entry.after() + 1);
    const int now = window_begin(entry) * units_per_page - next.first;
    return {next.first, now > 0 ? now : 0, next.count};
  }
  FREEKV_HD int pages_of(int tokens) const { return (tokens + page.tokens - 1) / page.tokens; }
  FREEKV_HD layer_kind kind_of(int head) const { return head_kinds[head]; }
  FREEKV_HD float* kept_query(int sequence, int head, int decode_row = 0) const {
    const std::size_t nth = head_index(sequence, head) * to_size(decode_rows) + to_size(decode_row);
    return kept_queries + nth * to_size(heads.group() * head_dim);
  }
  /// Numbers of the kept queries of one sequence.
  FREEKV_HD constexpr std::size_t kept_query_numbers() const {
    return head_index(1, 0) * to_size(decode_rows * heads.group() * head_dim);
  }
  /// The queries of all rows of a decode step as one group.
  FREEKV_HD group_query query_of(const step_entry& entry, int head) const {
    return {kept_query(entry.sequence, head), entry.tokens * heads.group(), head_dim};
  }
  /// The queries of all rows of a decode step of query head g of the group alone.
  FREEKV_HD group_query query_of(const step_entry& entry, int head, int g) const {
    return {kept_query(entry.sequence, head) + g * head_dim, entry.tokens, head_dim, heads.group()};
  }
  FREEKV_HD store_page_id store_page(int sequence, int page_index) const {
    return store_page_id{page_table[to_size(sequence) * to_size(max_pages) + to_size(page_index)]};
  }
  /// Summary of the `nth` unit of a page (summary_bytes). A KV head's lie side by side, in the order of the
  /// store's pages.
  FREEKV_HD std::byte* summary_of(store_page_id store_page, int head, int nth = 0) const {
    return summaries + summary_index(store_page, head, nth) * summary_bytes;
  }
  FREEKV_HD float& pin_worth_of(store_page_id store_page, int head, int nth) const {
    return pin_worth[summary_index(store_page, head, nth)];
  }
  /// Number of a sequence's unit among all that one KV head has in the store.
  FREEKV_HD int stored_unit(int sequence, int index) const {
    const int page_index = page_of(index);
    return number_of(store_page(sequence, page_index)) * units_per_page + index - page_index * units_per_page;
  }
  FREEKV_HD const std::byte* summary_of_unit(int sequence, int head, int index) const {
    const int page_index = page_of(index);
    return summary_of(store_page(sequence, page_index), head, index - page_index * units_per_page);
  }
  FREEKV_HD float pin_worth_of_unit(int sequence, int head, int index) const {
    const int page_index = page_of(index);
    return pin_worth_of(store_page(sequence, page_index), head, index - page_index * units_per_page);
  }
  FREEKV_HD constexpr std::size_t summary_index(store_page_id store_page, int head, int nth) const {
    const std::size_t row = to_size(head) * to_size(store_pages) + to_size(store_page);
    return row * to_size(units_per_page) + to_size(nth);
  }
  FREEKV_HD std::byte* shared_of(store_page_id store_page) const {
    return shared + to_size(store_page) * shared_bytes;
  }
  std::span<const std::int32_t> pinned_of(int sequence, int head) const {
    return {pinned + head_index(sequence, head) * to_size(pins),
            to_size(pinned_count[head_index(sequence, head)])};
  }
  /// The page that unit `index` of a sequence is part of, and its first row there.
  FREEKV_HD constexpr int page_of(int index) const {
    return units_per_page == 1 ? index : index / units_per_page;
  }
  FREEKV_HD constexpr int first_token_of(int index) const { return index % units_per_page * unit.tokens; }
  FREEKV_HD head_slice<element> store_slice(int sequence, int page_index, int head) const {
    return slice_of(store, store_page(sequence, page_index), head);
  }
  /// Rows of a page that is not complete, and for a while of one that is, where complete pages are encoded.
  FREEKV_HD head_slice<element> open_slice(int sequence, int page_index, int head) const {
    return slice_of(open, std::int64_t{sequence} * open_pages + page_index % open_pages, head);
  }
  FREEKV_HD block_id block(int sequence, slot_id slot) const {
    const std::int64_t set = slot_sets[sequence], fixed = slots.fixed(), nth = number_of(slot);
    if (nth < fixed) return block_id{set * fixed + nth};
    return block_id{selected_blocks[set * (slots.total() - fixed) + nth - fixed]};
  }
  FREEKV_HD head_slice<element> block_slice(int sequence, slot_id slot, int head) const {
    return blocks.slice(block(sequence, slot), head);
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
  /// Selected slot i: a unit's rows.
  FREEKV_HD head_slice<element> selected_slice(int sequence, int i, int head) const {
    return rows_behind(block_slice(sequence, slots.selected_slot(i), head), first_token_of(i));
  }

  /// The pages that one head attends to with row `row` of an entry. `everything`: all that the model attends
  /// to, in the store; else what the head keeps.
  FREEKV_HD attention_list pages_attended(const step_entry& entry, int row, int head,
                                          bool everything = false) const {
    const int tokens = entry.before + row + 1;
    if (sliding_window > 0) {
      const int first = tokens > sliding_window ? tokens - sliding_window : 0;
      return {.roles = {0, first / page.tokens, pages_of(tokens)},
              .tokens = tokens,
              .first_token = first,
              .page_tokens = page.tokens,
              .unit_tokens = unit.tokens};
    }
    const bool selects = !everything && kind_of(head) == layer_kind::retrieval;
    page_roles roles = roles_at(tokens, budget, page.tokens);
    if (selects) {
      const int begin = window_begin(entry);
      roles.window_begin = begin > roles.sink_end ? begin : roles.sink_end;
    }
    return {roles,
            selected + selection(entry.sequence, head),
            selects ? selected_count[this->head_index(entry.sequence, head)] : 0,
            everything || kind_of(head) == layer_kind::complete,
            tokens,
            0,
            page.tokens,
            unit.tokens};
  }
  /// Selected slot of entry i of a head's list, which is selected; the head attends to slots.
  FREEKV_HD int selected_slot_of(int sequence, int head, const attention_list& pages, int i) const {
    return slot_of[selection(sequence, head) + to_size(pages.nth_selected(i))];
  }
  /// Slot of entry i of a head's list, which is not selected.
  FREEKV_HD slot_id slot_of_page(const attention_list& pages, int i) const {
    const int page_index = pages.page(i);
    return pages.nth_selected(i) < 0 ? slots.sink_slot(page_index) : slots.ring_slot(page_index);
  }
  /// True where a head attends to a list in its slots, else in the store. `everything`: as `pages_attended`
  /// was asked.
  FREEKV_HD bool attends_to_slots(const attention_list& pages, bool everything) const {
    return keeps_slots && !everything && !pages.complete;
  }
  /// Rows of entry i of a head's list in its slot.
  FREEKV_HD head_slice<element> rows_in_slot(int sequence, int head, const attention_list& pages,
                                             int i) const {
    if (pages.is_selected(i))
      return selected_slice(sequence, selected_slot_of(sequence, head, pages, i), head);
    return rows_behind(block_slice(sequence, slot_of_page(pages, i), head), pages.range(i).first);
  }
  /// Mask of the query heads that attend to entry i of a head's list; null: all of the group.
  FREEKV_HD const std::uint32_t* attended_by_heads(int sequence, int head, const attention_list& pages,
                                                   int i) const {
    if (mask_words == 0 || !pages.is_selected(i)) return nullptr;
    return selected_by + masks(sequence, head) + std::int64_t{pages.nth_selected(i)} * mask_words;
  }
  /// Block that entry i of a head's list is in, for a table of whole pages: of the layer's slots, or of the
  /// store where there are none.
  FREEKV_HD std::int64_t block_attended(int sequence, int head, const attention_list& pages, int i) const {
    if (!keeps_slots) return number_of(store_page(sequence, pages.page(i)));
    const slot_id slot = pages.is_selected(i)
                             ? slots.selected_slot(selected_slot_of(sequence, head, pages, i))
                             : slot_of_page(pages, i);
    return blocks.id(block(sequence, slot));
  }
};

/// Calls `use(pointer, numbers of one sequence)` for each array of a layer that selection keeps by sequence,
/// but for previous queries.
template <class State, class Use>
void for_each_array(State& s, const Use& use) {
  const std::size_t heads = s.head_index(1, 0), units = s.selection(1, 0), masks = s.masks(1, 0);
  for (std::uint8_t** flags : {&s.corrected, &s.recall_failed}) use(*flags, heads);
  use(s.lacking, std::size_t{1});
  for (std::int32_t** counts : {&s.selected_count, &s.next_selected_count, &s.attended_count, &s.pinned_count,
                                &s.selections, &s.recalled, &s.recalled_before_attention, &s.promoted})
    use(*counts, heads);
  for (std::int32_t** lists : {&s.selected, &s.next_selected, &s.attended, &s.slot_of}) use(*lists, units);
  for (std::uint32_t** lists : {&s.selected_by, &s.next_selected_by, &s.attended_by}) use(*lists, masks);
  use(s.pinned, heads * to_size(s.pins));
  for (std::int32_t** lists : {&s.slot_unit, &s.slot_stamp}) use(*lists, heads * to_size(s.slots.selected));
}
/// Calls `use` as `for_each_array` does, and last for the previous queries.
template <class State, class Use>
void for_each_array_and_queries(State& s, const Use& use) {
  for_each_array(s, use);
  use(s.kept_queries, s.kept_query_numbers());
}

/// List entries of `entry_tokens` tokens in one part of attention. Parts begin at multiples of it and are
/// merged in order, so that results depend neither on threads nor on the batch.
FREEKV_HD constexpr int entries_per_part(int entry_tokens) {
  constexpr int part_tokens = 512;
  return entry_tokens < part_tokens ? part_tokens / entry_tokens : 1;
}

}  // namespace freekv::detail
