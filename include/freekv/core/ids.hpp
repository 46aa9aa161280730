// Ids as types: of sequences, and of places, where a page of the store is no page of a sequence, and a slot
// no block.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>

namespace freekv {

/// Names one live sequence of a pipeline; given out by `open()`.
enum class sequence_id : std::int32_t {};

/// A page of the store, valid in every layer's; tables have its number.
enum class store_page_id : std::int32_t { none = -1 };
/// A slot of one sequence in a layer: sink slots, the window ring, then those of selected units.
enum class slot_id : std::int32_t { none = -1 };
/// A slot of any sequence in a layer: what a slot of one is among those of all.
enum class block_id : std::int64_t { none = -1 };

FREEKV_HD constexpr std::int32_t number_of(store_page_id id) { return static_cast<std::int32_t>(id); }
FREEKV_HD constexpr std::int32_t number_of(slot_id id) { return static_cast<std::int32_t>(id); }
FREEKV_HD constexpr std::int64_t number_of(block_id id) { return static_cast<std::int64_t>(id); }

}  // namespace freekv
