// What the stages read and write of one layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/functors/diff_pages.hpp>
#include <freekv/policies/geometry.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/layout.hpp>
#include <span>

namespace freekv {

/// What the rows that one sequence brings to a step are.
enum class row_kind : std::uint8_t {
  decode,  ///< attended within the budget
  prompt,  ///< exact and causal; drops the selection and the previous query
};

/// One sequence's part of a step, as stages see it: `tokens` rows appended behind `before`, the first of them
/// row `first_row` of the step.
struct step_entry {
  int sequence = 0;
  int before = 0;
  int tokens = 0;
  int first_row = 0;
  row_kind kind = row_kind::decode;
  constexpr int after() const { return before + tokens; }
};

/// The rows of a step as the caller hands them to a layer; they are read until the layer has attended.
template <class In>
struct new_rows {
  std::span<const In> keys{};    ///< (rows, kv_heads, head_dim)
  std::span<const In> values{};  ///< (rows, kv_heads, head_dim)
  std::span<const float>
      queries{};  ///< (rows, query_heads, head_dim); may be empty if all rows are prompt and none attends
};

/// One KV head of one sequence.
struct head_of {
  int sequence = 0;
  int head = 0;
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
  head_counts heads;
  page_geometry page;
  freekv::budget budget;
  slot_roles slots;
  float scale = 1.0f;
  int max_pages = 0;                         // of one sequence
  strided_pages<element, head_dim> store;    // by store page
  strided_pages<element, head_dim> frames;   // by sequence * slots.total() + slot
  const std::int32_t* page_table = nullptr;  // (sequence, max_pages): store page
  std::byte* summaries = nullptr;            // (store page, kv head, summary_bytes)
  std::size_t summary_bytes = 0;
  layer_kind* head_kinds = nullptr;        // (kv head)
  float* previous_query = nullptr;         // (sequence, query head, head_dim)
  std::int32_t* decode_steps = nullptr;    // (sequence): since its last prompt
  std::uint8_t* has_selection = nullptr;   // (sequence): previous_query and selected mean something
  std::uint8_t* corrected = nullptr;       // (sequence, kv head): flagged in the last step
  std::int32_t* selected = nullptr;        // (sequence, kv head, k): ascending pages, for the next step
  std::int32_t* selected_count = nullptr;  // (sequence, kv head)
  std::int32_t* upcoming = nullptr;        // (sequence, kv head, k): what speculate will select, where known
  std::int32_t* upcoming_count = nullptr;  // (sequence, kv head): -1 where it is not known yet
  std::int32_t* attended = nullptr;        // (sequence, kv head, k): what the last step attended to
  std::int32_t* attended_count = nullptr;  // (sequence, kv head)
  std::int32_t* slot_page = nullptr;       // (sequence, kv head, selected slot): page in it, or -1
  std::int32_t* slot_stamp = nullptr;  // (sequence, kv head, selected slot): last selection with that page
  std::int32_t* slot_of = nullptr;     // (sequence, kv head, k): slot of each selected page
  std::int32_t* selections = nullptr;  // (sequence, kv head): how many there have been
  std::int32_t* recalled = nullptr;    // (sequence, kv head): slices from the store, last step
  std::int32_t* recalled_before_attention =
      nullptr;                       // (sequence, kv head): those of them that attention waited for
  std::int32_t* promoted = nullptr;  // (sequence, kv head): slices from the ring, last step

  constexpr std::size_t row(int sequence, int head) const {
    return static_cast<std::size_t>(sequence) * static_cast<std::size_t>(heads.kv) +
           static_cast<std::size_t>(head);
  }
  constexpr std::size_t selection(int sequence, int head) const {
    return row(sequence, head) * static_cast<std::size_t>(budget.selected_pages);
  }
  slot_contents slots_of(int sequence, int head) const {
    const std::size_t first = row(sequence, head) * static_cast<std::size_t>(slots.selected);
    return {slot_page + first, slot_stamp + first, slots.selected};
  }
  layer_kind kind_of(int head) const { return head_kinds[head]; }
  float* kept_query(int sequence, int head) const {
    return previous_query + row(sequence, head) * static_cast<std::size_t>(heads.group() * head_dim);
  }
  group_query query_of(int sequence, int head) const {
    return {kept_query(sequence, head), heads.group(), head_dim};
  }
  std::int32_t store_page(int sequence, int page_index) const {
    return page_table[static_cast<std::size_t>(sequence) * static_cast<std::size_t>(max_pages) +
                      static_cast<std::size_t>(page_index)];
  }
  std::byte* summary_of(std::int32_t store_page, int head) const {
    return summaries + (static_cast<std::size_t>(store_page) * static_cast<std::size_t>(heads.kv) +
                        static_cast<std::size_t>(head)) *
                           summary_bytes;
  }
  head_slice<element> store_slice(int sequence, int page_index, int head) const {
    return slice_of(store, store_page(sequence, page_index), head);
  }
  head_slice<element> frame_slice(int sequence, int slot, int head) const {
    return slice_of(frames, static_cast<std::int64_t>(sequence) * slots.total() + slot, head);
  }
};

/// The pages one KV head attends to, in ascending order: all pages, or sink, selected and window.
struct page_list {
  page_roles roles;
  const std::int32_t* selected = nullptr;
  int selected_count = 0;
  bool complete = false;
  int tokens = 0;  // of the sequence

  constexpr int size() const {
    return complete ? roles.page_end : roles.sink_end + selected_count + roles.page_end - roles.window_begin;
  }
  constexpr int page(int i) const {
    if (complete || i < roles.sink_end) return i;
    i -= roles.sink_end;
    return i < selected_count ? selected[i] : roles.window_begin + i - selected_count;
  }
  /// Tokens of page `page_index` that exist.
  constexpr int tokens_in(int page_index, int page_tokens) const {
    const int left = tokens - page_index * page_tokens;
    return left < page_tokens ? left : page_tokens;
  }
};

/// Pages that one unit of attention covers; parts are cut and merged at multiples of it, so that results
/// depend neither on threads nor on the batch.
constexpr int pages_per_part(int page_tokens) {
  constexpr int part_tokens = 512;
  return page_tokens < part_tokens ? part_tokens / page_tokens : 1;
}

}  // namespace freekv
