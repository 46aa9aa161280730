// Block tables, as an engine's own kernel attends by them and as its own paged cache is read by.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/attention_list.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace freekv::detail {

/// The error of a layer of which `who` has no such table.
template <class State>
[[gnu::cold]] usage_error no_table(const State& s, const char* who, const std::string& why) {
  return usage_error(std::string(who) + ": layer " + std::to_string(s.layer) + why);
}

/// Checks that what a layer's heads attend to begins where a page or a unit does, and is the same for all
/// query heads of a KV head. Throws usage_error.
template <class State>
void expect_whole_units(const State& s, const char* who) {
  if (s.mask_words > 0)
    throw no_table(s, who,
                   " selects for each query head, and a table is for all that share a KV head; attend here");
  if (s.sliding_window > 0)
    throw no_table(s, who, " has a sliding window, which begins inside a page; attend here");
}

/// Checks that a layer's units are whole pages. Throws usage_error.
template <class State>
void expect_whole_pages(const State& s, const char* who, const char* remedy) {
  if (s.units_per_page > 1)
    throw no_table(s, who,
                   " selects units of " + std::to_string(s.unit.tokens) +
                       " tokens, and this table has whole pages; " + remedy);
}

/// The entry of a sequence whose table is asked for, with `room` for its blocks. Throws usage_error.
template <class State>
const step_entry& entry_for_table(const State& s, const std::vector<step_entry>& entries, sequence_id id,
                                  std::size_t room) {
  if (!s.keeps_slots) throw no_table(s, "table", " keeps no slots; attend from the store");
  expect_whole_units(s, "table");
  expect_whole_pages(s, "table", "attend here");
  if (room < to_size(s.slots.total()))
    throw no_table(s, "table",
                   " has " + std::to_string(s.slots.total()) + " slots a sequence, and there is room for " +
                       std::to_string(room));
  for (const step_entry& entry : entries)
    if (sequence_id{entry.sequence} == id && entry.phase == step_phase::decode && entry.tokens > 0)
      return entry;
  throw usage_error("table: " + name_of(id) + " has no decode rows in this step");
}

/// The table of what one KV head attends to with an entry's last row. Throws usage_error.
template <class State>
resident_table write_table(const State& s, const step_entry& entry, int head,
                           std::span<std::int32_t> blocks) {
  if (s.kind_of(head) == layer_kind::complete)
    throw usage_error("table: KV head " + std::to_string(head) + " of layer " + std::to_string(s.layer) +
                      " keeps everything, in the store; attend here");
  const attention_list pages = s.pages_attended(entry, entry.tokens - 1, head);
  int tokens = 0;
  for (int i = 0; i < pages.size(); ++i) {
    blocks[to_size(i)] = static_cast<std::int32_t>(s.block_attended(entry.sequence, head, pages, i));
    tokens += pages.range(i).tokens;
  }
  return {pages.size(), tokens};
}
/// Table of all KV heads, whose slots are the same. Throws usage_error where they are not.
template <class State>
resident_table write_table(const State& s, const step_entry& entry, std::span<std::int32_t> blocks) {
  const auto slots = [&](int head) {
    return std::span(s.slot_of + s.selected_index(entry.sequence, head),
                     to_size(s.selected_count[s.head_index(entry.sequence, head)]));
  };
  for (int head = 1; head < s.heads.kv; ++head)
    if (s.kind_of(head) != s.kind_of(0) ||
        !std::is_permutation(slots(0).begin(), slots(0).end(), slots(head).begin(), slots(head).end()))
      throw usage_error("table: KV heads 0 and " + std::to_string(head) + " of layer " +
                        std::to_string(s.layer) + " attend to different slots; take a table for each head");
  return write_table(s, entry, 0, blocks);
}

/// An engine's tables of the prompt rows of all entries. Throws usage_error.
template <class In>
void expect_prompt_tables(std::span<const paged_blocks<const In>> rows,
                          const std::vector<step_entry>& entries) {
  const auto text = [](auto n) { return std::to_string(n); };
  if (rows.size() != entries.size())
    throw usage_error("append_from: " + text(rows.size()) + " block tables for " + text(entries.size()) +
                      " sequences with rows");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const step_entry& entry = entries[i];
    const std::string who = "append_from: " + name_of(sequence_id{entry.sequence});
    if (entry.phase != step_phase::prefill)
      throw usage_error(who + " brings decode rows; append them with their queries");
    if (rows[i].tensor.block_tokens < 1)
      throw usage_error(who + " has blocks of " + text(rows[i].tensor.block_tokens) + " tokens");
    const std::int64_t covered = static_cast<std::int64_t>(rows[i].ids.size()) * rows[i].tensor.block_tokens;
    if (covered < entry.after())
      throw usage_error(who + " has blocks for " + text(covered) + " tokens of " + text(entry.after()));
  }
}

/// Tensor whose blocks a device's tables list, by their ids.
template <class State>
paged_tensor<typename State::element> paged_kv(const State& s) {
  return s.keeps_slots ? s.blocks.tensor : tensor_of<typename State::element>(s.store);
}

/// Blocks of a row of a device's table at most, of `block_tokens` tokens each, or pages where these are 0.
/// Throws usage_error for tables that there are none of in the layer.
template <class State, class Settings, class Rows>
int most_blocks(const State& s, const Settings& settings, Rows rows, int block_tokens, const char* who) {
  expect_whole_units(s, who);
  const bool united = rows == Rows::all_heads;
  if (united && s.keeps_slots)
    throw no_table(
        s, who,
        " has a slot for pages that differ by head, and no table is for all of them; take one by head");
  if (block_tokens == 0 || united)
    expect_whole_pages(s, who,
                       united ? "take one by head, of block_tokens of such units at most"
                              : "choose block_tokens of a unit at most");
  if (block_tokens < 0 || (block_tokens > 0 && s.unit.tokens % block_tokens != 0))
    throw no_table(s, who,
                   ": blocks of " + std::to_string(block_tokens) + " tokens; choose a divisor of " +
                       std::to_string(s.unit.tokens) + ", which are selected together, or 0 for whole pages");
  const auto blocks_of = [&](int tokens) { return block_tokens == 0 ? 1 : tokens / block_tokens; };
  const int of_page = blocks_of(s.page.tokens), all = s.max_pages * of_page;
  if (settings.any_complete(s.layer)) return all;
  const int most = (settings.entries_within(s.layer) - s.max_selected) * of_page +
                   s.max_selected * blocks_of(s.unit.tokens);
  return united ? std::min(all, most + (s.heads.kv - 1) * s.max_selected * of_page) : most;
}

/// Ids of blocks of a device's tables: `block * by_block + head * by_head + row / tokens`, of a row of one of
/// the layer's blocks.
struct table_ids {
  int tokens = 0;
  std::int64_t by_block = 1, by_head = 0;
};

/// The ids that tables of a layer have. Throws usage_error where its blocks are not what they count.
template <class State, class Tables>
table_ids ids_of_table(const State& s, const Tables& to, const char* who) {
  const auto kv = paged_kv(s);
  const bool folds = to.rows == std::remove_cvref_t<decltype(to.rows)>::folded;
  if (to.block_tokens == 0) {
    if (folds && kv.block_stride != s.heads.kv * kv.head_stride)
      throw no_table(s, who, " has blocks whose heads are not pages of their own; take layout hnd for them");
    return {s.page.tokens, folds ? s.heads.kv : 1, folds ? 1 : 0};
  }
  const std::int64_t piece = to.block_tokens * kv.token_stride;
  const auto in_pieces = [&](const char* name, std::int64_t stride) {
    if (stride % piece != 0)
      throw no_table(s, who,
                     std::string(" has a ") + name + " of " + std::to_string(stride) +
                         " elements, no multiple of " + std::to_string(piece) + ", those of " +
                         std::to_string(to.block_tokens) +
                         " tokens, which ids would count; take a layout of such blocks, or whole pages");
    return stride / piece;
  };
  return {to.block_tokens, in_pieces("block_stride", kv.block_stride),
          folds ? in_pieces("head_stride", kv.head_stride) : 0};
}

/// A device's tables `to`, as wide and as many as `entries` sequences need: the ids that they have. Throws
/// usage_error.
template <class State, class Settings, class Tables>
table_ids expect_tables(const State& s, const Settings& settings, int entries, const Tables& to) {
  using rows = std::remove_cvref_t<decltype(to.rows)>;
  const char* who = "queue_tables";
  const int most = most_blocks(s, settings, to.rows, to.block_tokens, who);
  if (!s.keeps_slots && s.encoded)
    throw no_table(s, who, " keeps its pages encoded; attend here, or keep slots");
  if (s.keeps_slots && settings.any_complete(s.layer))
    throw no_table(s, who, " has heads that keep everything, in the store, beside slots; attend here");
  if (to.rows == rows::all_heads && (to.indptr != nullptr || to.indices != nullptr))
    throw no_table(s, who, ": a table of all heads has rows of max_blocks, and no ragged form");
  if (to.indices != nullptr && to.indptr == nullptr)
    throw no_table(s, who, ": indices without indptr, which says where a row's begin; give both");
  if (to.sequences < std::max(entries, 1))
    throw no_table(s, who,
                   ": tables are for " + std::to_string(to.sequences) + " sequences, and there are " +
                       std::to_string(entries) + "; give room for them, and for one at least");
  if (to.max_blocks < most)
    throw no_table(s, who,
                   ": a row has " + std::to_string(most) + " blocks at most, and there is room for " +
                       std::to_string(to.max_blocks));
  return ids_of_table(s, to, who);
}

}  // namespace freekv::detail
