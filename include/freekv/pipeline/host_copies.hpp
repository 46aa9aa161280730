// Host copies of the tables of a device backend.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <freekv/pipeline/layer_state.hpp>
#include <type_traits>
#include <vector>

namespace freekv {

/// Whether a backend's stages work on a device, whose fast memory the host neither reads nor writes. They then take a
/// step's entries all at once, and keep `host_copies`. `T` is the backend or its stages; it says `on_device` if so.
template <class T>
inline constexpr bool on_device = requires {
  requires T::on_device;
};

/// A table that the host writes, and a device's copy of it.
template <class T>
struct host_and_device {
  T* host = nullptr;
  T* device = nullptr;
  std::size_t size = 0;
};

/// Tables of a pipeline in the host's memory and in the device's: the host writes the first six, and reads back
/// `arrays`.
template <class State>
struct host_copies {
  host_and_device<std::int32_t> page_tables{};  // (sequence, max_pages)
  host_and_device<std::int32_t> slot_sets{};    // (sequence)
  std::vector<host_and_device<std::int32_t>>
      selected_blocks{};  // by layer: (slot set, blocks of the selected slots)
  std::vector<host_and_device<std::int32_t>> block_ids{};   // by layer: of slots in an engine's tensor
  std::vector<host_and_device<layer_kind>> head_kinds{};    // by layer
  std::vector<host_and_device<const float>> sink_logits{};  // by layer
  std::vector<host_and_device<std::byte>>
      arrays{};                 // by layer: `flagged_count`, and what `for_each_array` lists
  std::vector<State> layers{};  // as the host sees them: its tables, and the copies of these arrays
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
  use(s.pinned, heads * static_cast<std::size_t>(s.pins));
  for (std::int32_t** lists : {&s.slot_unit, &s.slot_stamp})
    use(*lists, heads * static_cast<std::size_t>(s.slots.selected));
}

}  // namespace freekv
