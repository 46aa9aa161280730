// Tables of a pipeline, which the host writes and stages read: in one memory, or in the host's and a
// device's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/selection_state.hpp>
#include <freekv/storage/memory.hpp>
#include <vector>

namespace freekv::detail {

/// A table that the host writes, and a device's copy of it; or the same one twice.
template <class T>
struct host_and_device {
  T* host = nullptr;
  T* device = nullptr;
  std::size_t size = 0;
};

/// Takes the arrays of a layer, as `for_each_array` lists them, for so many sequences.
template <class State>
void take_arrays_of(State& layer, int sequences, carver& memory) {
  for_each_array(layer, [&]<class T>(T*& array, std::size_t of_sequence) {
    array = memory.take<T>(to_size(sequences) * of_sequence);
  });
}

/// Tables of a pipeline whose stages read the host's memory: there is one of each.
template <class State>
struct host_tables {
  static constexpr std::uintptr_t block_alignment = 1;  ///< bytes, of an engine's tensor

  host_and_device<std::int32_t> page_tables{};  // (sequence, max_pages)
  host_and_device<std::int32_t> slot_sets{};    // (sequence)

  template <class T>
  static host_and_device<T> take(std::size_t count, carver&, carver& fast) {
    T* const only = fast.take<T>(count);
    return {only, only, count};
  }
  /// Memory of rows that are read in every step.
  static carver& memory_read_each_step(carver& slow, carver&) { return slow; }
  const float* take_layer_floats(const float* given, std::size_t, carver&) const { return given; }
  const std::int32_t* take_block_ids(const std::int32_t* given, std::size_t, carver&, carver&) const {
    return given;
  }
  /// Takes the arrays of a layer for so many sequences.
  void take_arrays(State& layer, int sequences, const host_and_device<std::int32_t>&,
                   const host_and_device<layer_kind>&, carver&, carver& fast) const {
    take_arrays_of(layer, sequences, fast);
  }
};

/// Tables of a pipeline whose stages work on a device, whose memory the host neither reads nor writes: the
/// host writes the first six, and reads back `arrays`.
template <class State>
struct device_tables {
  static constexpr std::uintptr_t block_alignment = 16;

  host_and_device<std::int32_t> page_tables{};  // (sequence, max_pages)
  host_and_device<std::int32_t> slot_sets{};    // (sequence)
  /// by layer: (slot set, blocks of the selected slots)
  std::vector<host_and_device<std::int32_t>> selected_blocks{};
  std::vector<host_and_device<std::int32_t>> block_ids{};   // by layer: of slots in an engine's tensor
  std::vector<host_and_device<layer_kind>> head_kinds{};    // by layer
  std::vector<host_and_device<const float>> layer_floats{};  // sink logits and scales, in any order
  /// by layer: `flagged_count`, and what `for_each_array` lists
  std::vector<host_and_device<std::byte>> arrays{};
  std::vector<State> layers{};  // as the host sees them: its tables, and the copies of these arrays

  template <class T>
  static host_and_device<T> take(std::size_t count, carver& slow, carver& fast) {
    T* const device = fast.take<T>(count);
    return {slow.take<T>(count), device, count};
  }
  /// Memory of rows that are read in every step: the device's own.
  static carver& memory_read_each_step(carver&, carver& fast) { return fast; }
  const float* take_layer_floats(const float* given, std::size_t count, carver& fast) {
    layer_floats.push_back({given, fast.take<float>(count), count});
    return layer_floats.back().device;
  }
  const std::int32_t* take_block_ids(const std::int32_t* given, std::size_t count, carver& slow,
                                     carver& fast) {
    block_ids.emplace_back();
    if (count == 0) return given;
    block_ids.back() = take<std::int32_t>(count, slow, fast);
    if (block_ids.back().host != nullptr) std::copy_n(given, count, block_ids.back().host);
    return block_ids.back().device;
  }
  /// Takes the arrays of a layer in both memories, and keeps the layer as the host sees it.
  void take_arrays(State& layer, int sequences, const host_and_device<std::int32_t>& blocks,
                   const host_and_device<layer_kind>& kinds, carver& slow, carver& fast) {
    const auto take_all = [&](State& of, carver& memory) {
      const std::size_t before = memory.used();
      of.flagged_count = memory.take<std::int32_t>(1);
      take_arrays_of(of, sequences, memory);
      return memory.base() == nullptr ? nullptr : memory.base() + before;
    };
    const std::size_t fast_before = fast.used();
    std::byte* const there = take_all(layer, fast);
    const std::size_t bytes = fast.used() - fast_before;
    State seen = layer;
    seen.page_table = page_tables.host;
    seen.slot_sets = slot_sets.host;
    seen.selected_blocks = blocks.host;
    seen.blocks.ids = block_ids.back().host;
    seen.head_kinds = kinds.host;
    arrays.push_back({take_all(seen, slow), there, bytes});
    selected_blocks.push_back(blocks);
    head_kinds.push_back(kinds);
    layers.push_back(seen);
  }
};

}  // namespace freekv::detail
