// One layer as the stages read and write it: its sizes, its selection and its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/page_value.hpp>
#include <freekv/config.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/attention_list.hpp>
#include <freekv/pipeline/selection_state.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/storage/layout.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <freekv/storage/slice_store.hpp>

namespace freekv::detail {

/// One layer's memory, beside its sizes and its selection; trivially copyable, as kernels take all of it by
/// value. Arrays are indexed by (sequence, ...) as their comments say.
template <class Shape>
struct layer_state : selection_state {
  using element = typename Shape::element_type;
  static constexpr int head_dim = Shape::head_dim;

  const float* sink_logits = nullptr;      // (query head); null: none
  const float* key_scales = nullptr;       // (kv head): stored keys are in units of it; null: of 1
  const float* value_scales = nullptr;     // (kv head), likewise
  strided_pages<element, head_dim> store;  // by store page, unless encoded
  strided_pages<element, head_dim> open;   // by sequence * open_pages + page % open_pages, if encoded
  slice_store slices;                      // complete pages, if encoded
  listed_blocks<element> blocks;  // of all slot sets: sink and ring, then what `selected_blocks` lists
  const std::int32_t* selected_blocks = nullptr;  // (slot set, blocks of the selected slots): its block
  const std::int32_t* page_table = nullptr;       // (sequence, max_pages): store page
  const std::int32_t* slot_sets = nullptr;        // (sequence): its slots among all, -1 while it is preempted
  std::byte* summaries = nullptr;                 // (kv head, store page, unit of the page, summary_bytes)
  std::size_t summary_bytes = 0;                  // of one unit
  float* pin_worth = nullptr;   // (kv head, store page, unit of the page), where units are pinned
  missed_attention* missed = nullptr;  // (sequence, kv head), where a correction draws samples; else null
  std::byte* page_values = nullptr;  // (sequence, kv head, max_pages, page_value_bytes), where there are any
  std::byte* shared = nullptr;  // (store page, shared_bytes): what a codec keeps of a page, if encoded
  std::size_t shared_bytes = 0;

  /// Scales of the scores of queries on a KV head's stored keys, of attention and of selection, and of its
  /// outputs.
  FREEKV_HD float scale_of(int head) const { return scaled_by(key_scales, head, scale); }
  FREEKV_HD float selection_scale_of(int head) const { return scaled_by(key_scales, head, selection_scale); }
  FREEKV_HD float value_scale_of(int head) const { return scaled_by(value_scales, head, 1.0f); }
  FREEKV_HD static float scaled_by(const float* scales, int head, float of_all) {
    return scales == nullptr ? of_all : of_all * scales[head];
  }

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
  /// Bytes of the values of one sequence's pages.
  FREEKV_HD constexpr std::size_t page_values_bytes() const {
    return head_index(1, 0) * to_size(max_pages) * page_value_bytes(head_dim);
  }
  FREEKV_HD std::byte* page_value(int sequence, int head, int page_index) const {
    const std::size_t nth = head_index(sequence, head) * to_size(max_pages) + to_size(page_index);
    return page_values + nth * page_value_bytes(head_dim);
  }
  FREEKV_HD std::byte* shared_of(store_page_id store_page) const {
    return shared + to_size(store_page) * shared_bytes;
  }
  FREEKV_HD head_slice<element> store_slice(int sequence, int page_index, int head) const {
    return slice_of(store, store_page(sequence, page_index), head);
  }
  /// Rows of the open page, where complete ones are encoded; after the page is complete until its place is
  /// taken by another.
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
  /// Rows of the unit in selected slot i.
  FREEKV_HD head_slice<element> selected_slice(int sequence, int i, int head) const {
    return rows_behind(block_slice(sequence, slots.selected_slot(i), head), first_row_of(i));
  }
  /// Rows of entry i of a head's list in its slot.
  FREEKV_HD head_slice<element> rows_in_slot(int sequence, int head, const attention_list& pages,
                                             int i) const {
    if (pages.is_selected(i))
      return selected_slice(sequence, selected_slot_of(sequence, head, pages, i), head);
    return rows_behind(block_slice(sequence, slot_of_page(pages, i), head), pages.range(i).first);
  }
  /// Block that entry i of a head's list is in, for a table: of the layer's slots, or of the store where
  /// there are none.
  FREEKV_HD std::int64_t block_attended(int sequence, int head, const attention_list& pages, int i) const {
    if (!keeps_slots) return number_of(store_page(sequence, pages.page(i)));
    const slot_id slot = pages.is_selected(i)
                             ? slots.selected_slot(selected_slot_of(sequence, head, pages, i))
                             : slot_of_page(pages, i);
    return blocks.id(block(sequence, slot));
  }
  /// Row of that block which the entry begins at.
  FREEKV_HD int row_attended(int sequence, int head, const attention_list& pages, int i) const {
    return keeps_slots && pages.is_selected(i) ? first_row_of(selected_slot_of(sequence, head, pages, i))
                                               : pages.range(i).first;
  }
};

/// Calls `use` as `for_each_array` does, and last for `kept_queries`.
template <class State, class Use>
void for_each_array_and_queries(State& s, const Use& use) {
  for_each_array(s, use);
  use(s.kept_queries, s.kept_query_numbers());
}

}  // namespace freekv::detail
