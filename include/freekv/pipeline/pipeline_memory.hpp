// A pipeline's arrays: how large each is, and where in the two blocks it lies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/pipeline/host_copies.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/scope.hpp>
#include <freekv/policies/summary.hpp>
#include <freekv/storage/block_pool.hpp>
#include <freekv/storage/memory.hpp>
#include <vector>

namespace freekv {

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
                  slice_file* file, std::span<const engine_blocks<element>> blocks)
      : pipeline_memory(s, backend, carver(slow_block), carver(fast_block), file, blocks) {}

  std::vector<State> layers;
  std::vector<block_pool> block_pools;     // by layer
  freekv::host_copies<State> host_copies;  // of a device's memory; else empty but for the next two
  std::int32_t* page_tables = nullptr;     // (sequence, max_pages), as the host writes them
  std::int32_t* slot_sets = nullptr;       // (sequence), the same
  memory_bytes bytes;
  std::size_t slow_bytes = 0, fast_bytes = 0;  // of the blocks
  Stages stages;

 private:
  static constexpr int head_dim = State::head_dim;
  static constexpr std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

  template <class Backend>
  pipeline_memory(const Settings& s, Backend& backend, carver&& slow, carver&& fast, slice_file* file,
                  std::span<const engine_blocks<element>> blocks)
      : host_copies{.page_tables =
                        table<std::int32_t>(size(s.max_sequences) * size(s.max_pages()), slow, fast),
                    .slot_sets = table<std::int32_t>(size(s.max_sequences), slow, fast)},
        page_tables(host_copies.page_tables.host),
        slot_sets(host_copies.slot_sets.host),
        stages(make_stages(s, backend, slow, fast)) {
    for (int layer = 0; layer < s.layers; ++layer)
      layers.push_back(layer_part(s, layer, slow, fast, file, blocks));
    if constexpr (on_device<Stages>) {
      bytes.host_copies = slow.used() - bytes.store;
      bytes.staging = stages.staging_bytes();
      if (slow.base() != nullptr) stages.begin(host_copies, layers);
    }
    slow_bytes = slow.used();
    fast_bytes = fast.used();
    bytes.state =
        fast_bytes - bytes.device_store - bytes.slots - bytes.summaries - bytes.codec - bytes.staging;
  }

  /// A table that the host writes: of a device, beside the device's own.
  template <class T>
  static host_and_device<T> table(std::size_t count, carver& slow, carver& fast) {
    T* const device = fast.take<T>(count);
    if constexpr (on_device<Stages>) return {slow.take<T>(count), device, count};
    return {device, device, count};
  }
  template <class Backend>
  static Stages make_stages(const Settings& s, Backend& backend, carver& slow, carver& fast) {
    if constexpr (on_device<Stages>)
      return Stages(backend, s, slow, fast);
    else
      return Stages(backend, s, scratch_sizes(s), fast);
  }

  [[gnu::cold]] State layer_part(const Settings& s, int layer, carver& slow, carver& fast, slice_file* file,
                                 std::span<const engine_blocks<element>> blocks) {
    State l;
    l.layer = layer;
    l.kind = s.plan.kind(layer);
    l.keeps_slots = s.route.keeps_slots() && l.kind != layer_kind::complete;
    l.heads = {s.query_heads, s.kv_heads};
    l.page = {s.page.tokens, head_dim};
    l.unit = {s.unit_tokens(), head_dim};
    l.units_per_page = s.units_per_page();
    l.budget = s.budget_at(layer);
    if (l.kind == layer_kind::sliding) {
      l.sliding_window = s.sliding_window;
      const int pages = std::min(s.pages_for(s.sliding_window), s.max_pages());
      l.budget = {.sink = 0, .window = pages * s.page.tokens, .selected_units = 1};
    }
    l.soft_cap = s.soft_cap;
    if (!s.sink_logits.empty()) {
      const float* const logits = s.sink_logits.data() + size(layer) * size(s.query_heads);
      l.sink_logits = on_device<Stages> ? fast.take<float>(size(s.query_heads)) : logits;
      if (on_device<Stages>) host_copies.sink_logits.push_back({logits, l.sink_logits, size(s.query_heads)});
    }
    l.encoded = s.encodes() && l.kind != layer_kind::complete;
    l.open_pages = s.open_pages();
    l.pins = s.pinned_units();
    l.max_selected = s.max_selected(layer);
    l.mask_words = s.selects_by() == selection_scope::query_head ? head_mask_words(l.heads.group()) : 0;
    l.slots = slots_for(l.budget, l.page.tokens, s.spare_slots(), s.max_decode_rows);
    l.slots.selected = l.max_selected + s.spare_slots();
    l.slots.units_per_page = l.units_per_page;
    l.decode_rows = s.max_decode_rows;
    if (l.kind == layer_kind::window || l.kind == layer_kind::sliding) l.slots.selected = 0;
    l.scale = s.scale;
    l.max_pages = s.max_pages();
    l.store_pages = s.store_pages();
    l.page_table = host_copies.page_tables.device;
    l.slot_sets = host_copies.slot_sets.device;
    l.summary_bytes =
        resolve(s.summary, [&](const auto& summary) { return summary_bytes<element>(summary, l.unit); });

    const page_shape shape{l.page.tokens, s.kv_heads};
    const std::int64_t row_pages =
        l.encoded ? std::int64_t{s.max_sequences} * l.open_pages : std::int64_t{s.store_pages()};
    const int most = l.keeps_slots ? l.slots.total() - l.slots.fixed() : 0;
    const std::int64_t fixed = l.keeps_slots ? std::int64_t{s.max_resident} * l.slots.fixed() : 0;
    const std::int64_t shared = selected_blocks(s, most), slots = fixed + shared;
    const std::int64_t own_blocks = blocks.empty() ? slots : 0;
    const auto elements = [&](std::int64_t pages) {
      return size(pages) * size(2 * shape.tokens * head_dim) * size(shape.kv_heads);
    };
    const std::size_t store_before = slow.used(), rows_before = fast.used();
    const std::size_t file_before = bytes.file;
    // A device reads all of a complete layer in every step, and what it has not encoded when it does: from its
    // own memory.
    const bool in_fast = on_device<Stages> && (l.encoded || l.kind == layer_kind::complete);
    auto* const row_data = (in_fast ? fast : slow).template take<element>(elements(row_pages));
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
      l.blocks =
          blocks_of<element>(make_page_span<typename Layouts::fast, head_dim>(own_data, own_blocks, shape));
    });
    const auto listed = table<std::int32_t>(size(s.max_resident) * size(most), slow, fast);
    l.selected_blocks = listed.device;
    block_pools.emplace_back(fixed, shared, most, s.max_resident, listed.host);
    host_and_device<std::int32_t> ids;  // of an engine's blocks, which a device reads from its own memory
    if (!blocks.empty() && slots > 0) {
      constexpr std::uintptr_t alignment = on_device<Stages> ? 16 : 1;
      l.blocks = blocks_of(blocks[size(layer)], layer, slots, alignment);
      if constexpr (on_device<Stages>) {
        ids = table<std::int32_t>(size(slots), slow, fast);
        if (ids.host != nullptr) std::copy_n(l.blocks.ids, slots, ids.host);
        l.blocks.ids = ids.device;
      }
    }
    int complete_heads = 0;
    for (int head = 0; head < s.kv_heads; ++head)
      complete_heads += head_kind(s.plan, layer, head) == layer_kind::complete;
    bytes.complete +=
        (in_memory + rows_in_fast + bytes.file - file_before) / size(s.kv_heads) * size(complete_heads);
    if (l.kind == layer_kind::retrieval) {
      const std::size_t before = fast.used();
      l.summaries = fast.take<std::byte>(l.summary_bytes * size(s.units_per_page()) * size(s.store_pages()) *
                                         size(s.kv_heads));
      if (l.pins > 0)
        l.pin_worth = fast.take<float>(size(s.units_per_page()) * size(s.store_pages()) * size(s.kv_heads));
      bytes.summaries += fast.used() - before;
    }
    if (l.encoded) {
      const std::size_t before = fast.used();
      l.shared_bytes =
          resolve(s.codec, [&](const auto& codec) { return shared_bytes(codec, l.page, sizeof(element)); });
      l.shared = fast.take<std::byte>(l.shared_bytes * size(s.store_pages()));
      bytes.codec += fast.used() - before;
    }

    const auto kinds = table<layer_kind>(size(s.kv_heads), slow, fast);
    l.head_kinds = kinds.device;
    for (int head = 0; kinds.host != nullptr && head < s.kv_heads; ++head)
      kinds.host[head] = head_kind(s.plan, layer, head);
    const std::size_t rows = l.head_index(s.max_sequences, 0);
    l.kept_queries = fast.take<float>(rows * size(l.decode_rows * l.heads.group() * head_dim));
    const auto take_arrays = [&](State& arrays, carver& memory) {
      if constexpr (on_device<Stages>) arrays.flagged_count = memory.take<std::int32_t>(1);
      for_each_array(arrays, [&]<class T>(T*& array, std::size_t of_sequence) {
        array = memory.take<T>(size(s.max_sequences) * of_sequence);
      });
    };
    const std::size_t arrays_before = fast.used();
    take_arrays(l, fast);
    if constexpr (on_device<Stages>) {
      State seen = l;
      seen.page_table = page_tables;
      seen.slot_sets = slot_sets;
      seen.selected_blocks = listed.host;
      seen.blocks.ids = ids.host;
      seen.head_kinds = kinds.host;
      const std::size_t host_copies_before = slow.used();
      take_arrays(seen, slow);
      std::byte* const host = slow.base() == nullptr ? nullptr : slow.base() + host_copies_before;
      std::byte* const device = fast.base() == nullptr ? nullptr : fast.base() + arrays_before;
      host_copies.arrays.push_back({host, device, fast.used() - arrays_before});
      host_copies.selected_blocks.push_back(listed);
      host_copies.block_ids.push_back(ids);
      host_copies.head_kinds.push_back(kinds);
      host_copies.layers.push_back(seen);
    }
    return l;
  }

  /// Blocks that a layer's selected slots share, where those of one sequence are in `most`.
  static std::int64_t selected_blocks(const Settings& s, int most) {
    const std::int64_t all = std::int64_t{s.max_resident} * most;
    if (s.selected_tokens == 0) return all;
    return std::min(all, std::max(std::int64_t{most}, s.selected_tokens / s.page.tokens));
  }

  /// Room for a layer's complete pages.
  slice_store slices_of(const Settings& s, carver& slow, slice_file* file) {
    slice_store slices{.first = bytes.file, .slice_bytes = slice_bytes(s), .kv_heads = s.kv_heads};
    const std::size_t all = slices.slice_bytes * size(s.store_pages()) * size(s.kv_heads);
    if (s.store_file) {
      slices.file = file;
      bytes.file += all;
    } else {
      slices.data = slow.take<std::byte>(all);
    }
    return slices;
  }
  static std::size_t slice_bytes(const Settings& s) {
    const std::size_t bytes = resolve(s.codec, [&](const auto& codec) {
      return codec.bytes(page_geometry{s.page.tokens, head_dim}, sizeof(element));
    });
    return s.store_file ? s.store_file->aligned(bytes) : bytes;
  }

  static auto scratch_sizes(const Settings& s) {
    typename Stages::sizes sizes{.kv_heads = s.kv_heads,
                                 .group = s.query_heads / s.kv_heads,
                                 .decode_rows = s.max_decode_rows,
                                 .head_dim = head_dim,
                                 .page_tokens = s.page.tokens,
                                 .unit_tokens = s.unit_tokens(),
                                 .attention_floats = attention_scratch<head_dim>,
                                 .max_pages = s.max_pages(),
                                 .max_units = s.max_units()};
    if (s.encodes()) {
      sizes.slice_bytes = slice_bytes(s);
      if (s.store_file) sizes.slice_alignment = s.store_file->alignment();
      sizes.decoded_bytes = size(2 * s.page.tokens * head_dim) * sizeof(element);
      sizes.shared_floats = resolve(s.codec, [&](const auto& codec) {
        return freekv::shared_floats(codec, {s.page.tokens, head_dim});
      });
    }
    resolve(s.summary, [&](const auto& summary) {
      sizes.summary_width = summary.width({s.unit_tokens(), head_dim});
      sizes.query_width = summary_query_width(summary, head_dim);
    });
    for (int layer = 0; layer < s.layers; ++layer)
      sizes.selected_units = std::max(sizes.selected_units, s.max_selected(layer));
    if (s.selects_by() == selection_scope::layer) sizes.pooled_heads = s.kv_heads;
    return sizes;
  }
};

}  // namespace freekv
