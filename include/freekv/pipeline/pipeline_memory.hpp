// A pipeline's arrays: how large each is, and where in the two blocks it lies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/pipeline/memory_bytes.hpp>
#include <freekv/pipeline/settings.hpp>
#include <freekv/pipeline/tables.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/scope.hpp>
#include <freekv/policies/summary.hpp>
#include <freekv/storage/block_pool.hpp>
#include <freekv/storage/memory.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <vector>

namespace freekv::detail {

/// All arrays of a pipeline, carved from a block of slow and a block of fast memory; with null blocks they
/// are only counted, by the same code.
template <class State, class Settings, class Stages>
class pipeline_memory {
 public:
  using element = typename State::element;

  /// `file` is where encoded pages are kept if the settings name a file; `blocks`, of each layer, where slots
  /// are if they are not the pipeline's own.
  template <class Backend>
  pipeline_memory(const Settings& s, Backend& backend, std::byte* slow_block, std::byte* fast_block,
                  slice_file* file, std::span<const paged_blocks<element>> blocks)
      : pipeline_memory(s, backend, carver(slow_block), carver(fast_block), file, blocks) {}

  std::vector<State> layers;
  std::vector<block_pool> block_pools;  // by layer
  typename Stages::tables tables;       // as the host writes them
  memory_bytes bytes;
  std::size_t slow_bytes = 0, fast_bytes = 0;  // of the blocks
  Stages stages;

 private:
  using tables_type = typename Stages::tables;
  static constexpr int head_dim = State::head_dim;

  template <class Backend>
  pipeline_memory(const Settings& s, Backend& backend, carver&& slow, carver&& fast, slice_file* file,
                  std::span<const paged_blocks<element>> blocks)
      : tables{.page_tables = tables_type::template take<std::int32_t>(
                   to_size(s.capacity.max_sequences) * to_size(s.max_pages()), slow, fast),
               .slot_sets =
                   tables_type::template take<std::int32_t>(to_size(s.capacity.max_sequences), slow, fast)},
        stages(backend, s, slow, fast) {
    if (!blocks.empty() && blocks.size() != to_size(s.model.layers))
      throw settings_error("blocks of " + std::to_string(blocks.size()) + " layers for " +
                           std::to_string(s.model.layers) + "; give those of each layer, or none");
    for (int layer = 0; layer < s.model.layers; ++layer)
      layers.push_back(layer_of(s, layer, slow, fast, file, blocks));
    bytes.host_copies = slow.used() - bytes.store;
    bytes.staging = stages.staging_bytes();
    slow_bytes = slow.used();
    fast_bytes = fast.used();
    bytes.state =
        fast_bytes - bytes.device_store - bytes.slots - bytes.summaries - bytes.codec - bytes.staging;
  }

  [[gnu::cold]] State layer_of(const Settings& s, int layer, carver& slow, carver& fast, slice_file* file,
                               std::span<const paged_blocks<element>> blocks) {
    State l;
    l.layer = layer;
    l.kind = s.plan.kind(layer);
    l.keeps_slots = s.route.keeps_slots() && l.kind != layer_kind::complete;
    l.heads = {s.model.query_heads, s.model.kv_heads};
    l.page = {s.page.tokens, head_dim};
    l.unit = {s.unit_tokens(), head_dim};
    l.units_per_page = s.units_per_page();
    l.budget = s.budget_at(layer);
    if (l.kind == layer_kind::sliding) {
      l.sliding_window = s.attention.sliding_window;
      const int pages = std::min(s.pages_for(s.attention.sliding_window), s.max_pages());
      l.budget = {.sink = 0, .window = pages * s.page.tokens, .selected_units = 1};
    }
    l.soft_cap = s.attention.soft_cap;
    if (!s.attention.sink_logits.empty()) {
      const float* const logits =
          s.attention.sink_logits.data() + to_size(layer) * to_size(s.model.query_heads);
      l.sink_logits = tables.take_layer_floats(logits, to_size(s.model.query_heads), fast);
    }
    const auto scales_of = [&](const std::vector<float>& scales) -> const float* {
      if (scales.empty()) return nullptr;
      const std::size_t heads = to_size(s.model.kv_heads);
      return tables.take_layer_floats(scales.data() + to_size(layer) * heads, heads, fast);
    };
    l.key_scales = scales_of(s.attention.key_scales);
    l.value_scales = scales_of(s.attention.value_scales);
    l.encoded = s.encodes() && l.kind != layer_kind::complete;
    l.open_pages = s.open_pages();
    l.pins = s.pinned_units();
    l.max_selected = s.max_selected(layer);
    l.mask_words = s.selects_by() == selection_scope::query_head ? head_mask_words(l.heads.group()) : 0;
    l.slots = slots_for(l.budget, l.page.tokens, s.spare_slots(), s.capacity.max_decode_rows);
    l.slots.selected = l.max_selected + s.spare_slots();
    l.slots.units_per_page = l.units_per_page;
    l.decode_rows = s.capacity.max_decode_rows;
    if (l.kind == layer_kind::window || l.kind == layer_kind::sliding) l.slots.selected = 0;
    l.scale = s.attention.scale;
    l.selection_scale = s.attention.selection_scale;
    l.max_pages = s.max_pages();
    l.store_pages = s.store_pages();
    l.page_table = tables.page_tables.device;
    l.slot_sets = tables.slot_sets.device;
    l.summary_bytes =
        resolve(s.summary, [&](const auto& summary) { return summary_bytes<element>(summary, l.unit); });

    const page_shape shape{l.page.tokens, s.model.kv_heads};
    const std::int64_t row_pages =
        l.encoded ? std::int64_t{s.capacity.max_sequences} * l.open_pages : std::int64_t{s.store_pages()};
    const int most = l.keeps_slots ? l.slots.total() - l.slots.fixed() : 0;
    const std::int64_t fixed = l.keeps_slots ? std::int64_t{s.capacity.max_resident} * l.slots.fixed() : 0;
    const std::int64_t shared = selected_blocks(s, most), slots = fixed + shared;
    const std::int64_t own_blocks = blocks.empty() ? slots : 0;
    const auto elements = [&](std::int64_t pages) {
      return to_size(pages) * to_size(2 * shape.tokens * head_dim) * to_size(shape.kv_heads);
    };
    const std::size_t store_before = slow.used(), rows_before = fast.used();
    const std::size_t file_before = bytes.file;
    // A step reads all of a complete layer, and where pages are encoded those that are not yet.
    const bool each_step = l.encoded || l.kind == layer_kind::complete;
    carver& of_rows = each_step ? tables_type::memory_read_each_step(slow, fast) : slow;
    auto* const row_data = of_rows.template take<element>(elements(row_pages));
    const std::size_t blocks_before = fast.used(), rows_in_fast = blocks_before - rows_before;
    bytes.device_store += rows_in_fast;
    if (l.encoded) l.slices = slices_of(s, slow, file);
    auto* const own_data = fast.take<element>(elements(own_blocks));
    const std::size_t in_memory = slow.used() - store_before;
    bytes.store += in_memory;
    bytes.slots += fast.used() - blocks_before;
    resolve(s.layouts, [&]<class Layouts>(const Layouts&) {
      const auto rows =
          strided<head_dim>(make_page_span<typename Layouts::slow, head_dim>(row_data, row_pages, shape));
      (l.encoded ? l.open : l.store) = rows;
      l.blocks.tensor =
          tensor_of<element>(make_page_span<typename Layouts::fast, head_dim>(own_data, own_blocks, shape));
    });
    const auto listed = tables_type::template take<std::int32_t>(
        to_size(s.capacity.max_resident) * to_size(most), slow, fast);
    l.selected_blocks = listed.device;
    block_pools.emplace_back(fixed, shared, most, s.capacity.max_resident, listed.host);
    const std::int64_t engines = blocks.empty() ? 0 : slots;  // blocks of an engine's tensor
    if (engines > 0)
      l.blocks = slots_in(blocks[to_size(layer)], layer, s.page.tokens, slots, tables_type::block_alignment);
    l.blocks.ids = tables.take_block_ids(l.blocks.ids, to_size(engines), slow, fast);
    int complete_heads = 0;
    for (int head = 0; head < s.model.kv_heads; ++head)
      complete_heads += head_kind(s.plan, layer, head) == layer_kind::complete;
    bytes.complete += (in_memory + rows_in_fast + bytes.file - file_before) / to_size(s.model.kv_heads) *
                      to_size(complete_heads);
    if (l.kind == layer_kind::retrieval) {
      const std::size_t before = fast.used();
      l.summaries = fast.take<std::byte>(l.summary_bytes * to_size(s.units_per_page()) *
                                         to_size(s.store_pages()) * to_size(s.model.kv_heads));
      if (l.pins > 0)
        l.pin_worth = fast.take<float>(to_size(s.units_per_page()) * to_size(s.store_pages()) *
                                       to_size(s.model.kv_heads));
      if (s.completes())
        l.page_values = fast.take<std::byte>(l.page_values_bytes() * to_size(s.capacity.max_sequences));
      bytes.summaries += fast.used() - before;
      if constexpr (may_verify<Settings>)
        if (verifies(s))
          l.missed = fast.take<missed_attention>(to_size(s.capacity.max_sequences * s.model.kv_heads));
    }
    if (l.encoded) {
      const std::size_t before = fast.used();
      l.shared_bytes =
          resolve(s.codec, [&](const auto& codec) { return shared_bytes(codec, l.page, sizeof(element)); });
      l.shared = fast.take<std::byte>(l.shared_bytes * to_size(s.store_pages()));
      bytes.codec += fast.used() - before;
    }

    const auto kinds = tables_type::template take<layer_kind>(to_size(s.model.kv_heads), slow, fast);
    l.head_kinds = kinds.device;
    for (int head = 0; kinds.host != nullptr && head < s.model.kv_heads; ++head)
      kinds.host[head] = head_kind(s.plan, layer, head);
    l.kept_queries = fast.take<float>(to_size(s.capacity.max_sequences) * l.kept_query_numbers());
    tables.take_arrays(l, s.capacity.max_sequences, listed, kinds, slow, fast);
    return l;
  }

  /// Blocks that a layer's selected slots share, where those of one sequence are in `most`.
  static std::int64_t selected_blocks(const Settings& s, int most) {
    const std::int64_t all = std::int64_t{s.capacity.max_resident} * most;
    if (s.capacity.selected_tokens == 0) return all;
    return std::min(all, std::max(std::int64_t{most}, s.capacity.selected_tokens / s.page.tokens));
  }

  /// Room for a layer's complete pages.
  slice_store slices_of(const Settings& s, carver& slow, slice_file* file) {
    slice_store slices{.first = bytes.file,
                       .slice_bytes = stored_slice_bytes<element, head_dim>(s),
                       .kv_heads = s.model.kv_heads};
    const std::size_t all = slices.slice_bytes * to_size(s.store_pages()) * to_size(s.model.kv_heads);
    if (s.capacity.store_file) {
      slices.file = file;
      if (all > carver::most - bytes.file) carver::refuse();
      bytes.file += all;
    } else {
      slices.data = slow.take<std::byte>(all);
    }
    return slices;
  }
};

}  // namespace freekv::detail
