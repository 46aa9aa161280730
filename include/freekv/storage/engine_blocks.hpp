// Slots inside an engine's own paged KV tensor, and the tables with which the engine's own kernel attends to
// them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/storage/layout.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace freekv {

/// One layer of an engine's paged KV tensor, some of whose blocks are a pipeline's slots. Row t of KV head h
/// of block b is head_dim elements at `keys + b * block_stride + t * token_stride + h * head_stride`, and so
/// are its values. Strides in elements: keys and values may be planes of a block or of the tensor, or side by
/// side in each row of 2 * head_dim (`values = keys + head_dim`). A block holds a page. The engine keeps
/// tensor and list as long as the pipeline lives, and does not write to these blocks. Of a device the tensor
/// is in its memory, rows at multiples of 16 bytes, and the list in the host's.
template <class Element>
struct engine_blocks {
  Element* keys = nullptr;
  Element* values = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::span<const std::int32_t> ids{};  ///< ids, all different: the footprint's `slots`
};

/// Size of the block table of a decode row, for a paged-attention kernel: `pages` pages, listed by block id
/// (the pipeline's own number of a block, where it has its own), with `tokens` tokens in them. All pages are
/// full but the last.
struct resident_table {
  int pages = 0;
  int tokens = 0;
};

/// Blocks of a layer's slots: block i has the id `ids[i]` in its tensor, or i where there is no list.
template <class Element>
struct slot_blocks {
  Element* keys = nullptr;
  Element* values = nullptr;
  std::int64_t block_stride = 0, token_stride = 0, head_stride = 0;
  const std::int32_t* ids = nullptr;

  /// Its number in the tensor.
  FREEKV_HD std::int64_t id(block_id block) const {
    return ids == nullptr ? number_of(block) : ids[number_of(block)];
  }
  FREEKV_HD head_slice<Element> slice(block_id block, int head) const {
    const std::int64_t offset = id(block) * block_stride + head * head_stride;
    return {keys + offset, values + offset, token_stride};
  }
};

namespace detail {

/// Slots in pages of the pipeline's own.
template <class Element, class PageSpan>
slot_blocks<Element> blocks_of(const PageSpan& pages) {
  const auto& map = pages.mapping();
  const auto stride = [&](page_axis axis) { return std::int64_t{map.stride(to_size(axis))}; };
  Element* const data = pages.data_handle();
  if (data == nullptr) return {};
  return {data, data + stride(page_axis::plane), stride(page_axis::page), stride(page_axis::token),
          stride(page_axis::head)};
}

/// Slots in an engine's blocks, `slots` of them, whose rows begin at multiples of `alignment` bytes. Throws
/// settings_error.
template <class Element>
[[gnu::cold]] slot_blocks<Element> blocks_of(const engine_blocks<Element>& blocks, int layer,
                                             std::int64_t slots, std::uintptr_t alignment) {
  const auto refuse = [&](const std::string& what) {
    throw settings_error("blocks of layer " + std::to_string(layer) + ": " + what);
  };
  if (blocks.ids.size() != to_size(slots))
    refuse(std::to_string(blocks.ids.size()) + " blocks; needed are " + std::to_string(slots) +
           ", as footprint::slots says");
  if (blocks.keys == nullptr || blocks.values == nullptr) refuse("keys or values are null");
  const auto bytes = [](std::int64_t elements) {
    return static_cast<std::uintptr_t>(elements) * sizeof(Element);
  };
  for (const auto& [what, at] : {std::pair{"keys begin", reinterpret_cast<std::uintptr_t>(blocks.keys)},
                                 {"values begin", reinterpret_cast<std::uintptr_t>(blocks.values)},
                                 {"block_stride is", bytes(blocks.block_stride)},
                                 {"token_stride is", bytes(blocks.token_stride)},
                                 {"head_stride is", bytes(blocks.head_stride)}})
    if (at % alignment != 0)
      refuse(std::string(what) + " " + std::to_string(at % alignment) + " bytes behind a multiple of " +
             std::to_string(alignment) +
             ", by which a device reads and writes rows; pad the tensor's rows to " +
             std::to_string(alignment / sizeof(Element)) + " elements, and begin it at such an address");
  std::vector<std::int32_t> ids(blocks.ids.begin(), blocks.ids.end());
  std::sort(ids.begin(), ids.end());
  if (!ids.empty() && ids.front() < 0) refuse("block " + std::to_string(ids.front()) + " is below 0");
  if (const auto twice = std::adjacent_find(ids.begin(), ids.end()); twice != ids.end())
    refuse("block " + std::to_string(*twice) + " is listed twice");
  return {blocks.keys,         blocks.values,      blocks.block_stride,
          blocks.token_stride, blocks.head_stride, blocks.ids.data()};
}

}  // namespace detail

}  // namespace freekv
