// A pipeline's arrays: how large each is, and where in the two blocks it lies.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/functors/attend_slice.hpp>
#include <freekv/pipeline/frame_pool.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/rows.hpp>
#include <freekv/policies/summary.hpp>
#include <freekv/storage/memory.hpp>
#include <vector>

namespace freekv {

/// All arrays of a pipeline, carved from a block of slow and a block of fast memory; with null blocks they
/// are only counted, by the same code.
template <class State, class Settings, class Stages>
class pipeline_memory {
 public:
  using element = typename State::element;

  /// `file` is where encoded pages are kept if the settings name a file; `frames`, of each layer, where slots are if they
  /// are not the pipeline's own.
  template <class Backend>
  pipeline_memory(const Settings& s, Backend& backend, std::byte* slow_block, std::byte* fast_block,
                  file_store* file, std::span<const engine_frames<element>> frames)
      : pipeline_memory(s, backend, carver(slow_block), carver(fast_block), file, frames) {}

  std::vector<State> layers;
  std::vector<frame_pool> frame_pools;  // by layer
  std::int32_t* page_tables = nullptr;  // (sequence, max_pages)
  std::int32_t* slot_sets = nullptr;    // (sequence)
  memory_bytes bytes;
  std::size_t slow_bytes = 0, fast_bytes = 0;  // of the blocks
  Stages stages;

 private:
  static constexpr int head_dim = State::head_dim;
  static constexpr std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

  template <class Backend>
  pipeline_memory(const Settings& s, Backend& backend, carver&& slow, carver&& fast, file_store* file,
                  std::span<const engine_frames<element>> frames)
      : page_tables(fast.take<std::int32_t>(size(s.max_sequences) * size(s.max_pages()))),
        slot_sets(fast.take<std::int32_t>(size(s.max_sequences))),
        stages(backend, s, scratch_sizes(s), fast) {
    for (int layer = 0; layer < s.layers; ++layer)
      layers.push_back(layer_part(s, layer, slow, fast, file, frames));
    slow_bytes = slow.used();
    fast_bytes = fast.used();
    bytes.state = fast_bytes - bytes.slots - bytes.summaries - bytes.codec;
  }

  State layer_part(const Settings& s, int layer, carver& slow, carver& fast, file_store* file,
                   std::span<const engine_frames<element>> frames) {
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
      l.budget = {.sink = 0, .window = pages * s.page.tokens, .selected_pages = 1};
    }
    l.soft_cap = s.soft_cap;
    if (!s.sink_logits.empty()) l.sink_logits = s.sink_logits.data() + size(layer) * size(s.query_heads);
    l.encoded = s.encodes() && l.kind != layer_kind::complete;
    l.open_frames = s.open_frames();
    l.pins = s.pinned_units();
    l.list_units = s.list_units(layer);
    l.mask_words = s.row() == selection_row::query_head ? head_mask_words(l.heads.group()) : 0;
    l.slots = slots_for(l.budget, l.page.tokens, s.spare_slots(), s.max_decode_rows);
    l.slots.selected = l.list_units + s.spare_slots();
    l.slots.units_per_page = l.units_per_page;
    l.decode_rows = s.max_decode_rows;
    if (l.kind == layer_kind::window || l.kind == layer_kind::sliding) l.slots.selected = 0;
    l.scale = s.scale;
    l.max_pages = s.max_pages();
    l.store_pages = s.store_pages();
    l.page_table = page_tables;
    l.slot_sets = slot_sets;
    l.summary_bytes =
        resolve(s.summary, [&](const auto& summary) { return summary_bytes<element>(summary, l.unit); });

    const page_shape shape{l.page.tokens, s.kv_heads};
    const std::int64_t row_pages =
        l.encoded ? std::int64_t{s.max_sequences} * l.open_frames : std::int64_t{s.store_pages()};
    const int most = l.keeps_slots ? l.slots.total() - l.slots.fixed() : 0;
    const std::int64_t fixed = l.keeps_slots ? std::int64_t{s.max_resident} * l.slots.fixed() : 0;
    const std::int64_t shared = selected_frames(s, most), slots = fixed + shared;
    const std::int64_t frame_pages = frames.empty() ? slots : 0;
    const auto elements = [&](std::int64_t pages) {
      return size(pages) * size(2 * shape.tokens * head_dim) * size(shape.kv_heads);
    };
    const std::size_t store_before = slow.used(), frames_before = fast.used();
    const std::size_t file_before = bytes.file;
    auto* const row_data = slow.take<element>(elements(row_pages));
    if (l.encoded) l.slices = slices_of(s, slow, file);
    auto* const frame_data = fast.take<element>(elements(frame_pages));
    const std::size_t in_memory = slow.used() - store_before;
    bytes.store += in_memory;
    bytes.slots += fast.used() - frames_before;
    resolve(s.layouts, [&]<class Layouts>(const Layouts&) {
      const auto rows =
          strided<head_dim>(make_page_span<typename Layouts::slow, head_dim>(row_data, row_pages, shape));
      (l.encoded ? l.open : l.store) = rows;
      l.frames = frames_of<element>(
          make_page_span<typename Layouts::fast, head_dim>(frame_data, frame_pages, shape));
    });
    auto* const listed = fast.take<std::int32_t>(size(s.max_resident) * size(most));
    l.selected_frames = listed;
    frame_pools.emplace_back(fixed, shared, most, s.max_resident, listed);
    if (!frames.empty() && slots > 0) l.frames = frames_of(frames[size(layer)], layer, slots);
    int complete_heads = 0;
    for (int head = 0; head < s.kv_heads; ++head)
      complete_heads += head_kind(s.plan, layer, head) == layer_kind::complete;
    bytes.complete += (in_memory + bytes.file - file_before) / size(s.kv_heads) * size(complete_heads);
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

    l.head_kinds = fast.take<layer_kind>(size(s.kv_heads));
    for (int head = 0; l.head_kinds != nullptr && head < s.kv_heads; ++head)
      l.head_kinds[head] = head_kind(s.plan, layer, head);
    const std::size_t rows = l.row(s.max_sequences, 0), selections = l.selection(s.max_sequences, 0);
    l.previous_query = fast.take<float>(rows * size(l.decode_rows * l.heads.group() * head_dim));
    for (std::uint8_t** flags : {&l.corrected, &l.unrecalled}) *flags = fast.take<std::uint8_t>(rows);
    l.unfilled = fast.take<std::uint8_t>(size(s.max_sequences));
    for (std::int32_t** counts : {&l.selected_count, &l.upcoming_count, &l.attended_count, &l.pinned_count,
                                  &l.selections, &l.recalled, &l.recalled_before_attention, &l.promoted})
      *counts = fast.take<std::int32_t>(rows);
    for (std::int32_t** lists : {&l.selected, &l.upcoming, &l.attended, &l.slot_of})
      *lists = fast.take<std::int32_t>(selections);
    for (std::uint32_t** masks : {&l.selected_by, &l.upcoming_by, &l.attended_by})
      *masks = fast.take<std::uint32_t>(l.masks(s.max_sequences, 0));
    l.pinned = fast.take<std::int32_t>(rows * size(l.pins));
    for (std::int32_t** lists : {&l.slot_page, &l.slot_stamp})
      *lists = fast.take<std::int32_t>(rows * size(l.slots.selected));
    return l;
  }

  /// Frames that a layer's selected slots share, where those of one sequence are in `most`.
  static std::int64_t selected_frames(const Settings& s, int most) {
    const std::int64_t all = std::int64_t{s.max_resident} * most;
    if (s.selected_tokens == 0) return all;
    return std::min(all, std::max(std::int64_t{most}, s.selected_tokens / s.page.tokens));
  }

  /// Room for a layer's complete pages.
  slice_store slices_of(const Settings& s, carver& slow, file_store* file) {
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
      sizes.selected_units = std::max(sizes.selected_units, s.list_units(layer));
    if (s.row() == selection_row::layer) sizes.pooled_heads = s.kv_heads;
    return sizes;
  }
};

}  // namespace freekv
