// What a paged KV tensor is, and which of its blocks: an engine's prompts, slots inside its tensor, and the
// tables with which its own kernel attends to them.
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

/// One layer's keys and values in blocks of `block_tokens` tokens, as engines keep them. Row t of KV head h
/// of block b is head_dim elements, one behind the other, at `keys + b * block_stride + t * token_stride + h
/// * head_stride`, and so are its values. Strides in elements: keys and values may be planes of a block or of
/// the tensor, or side by side in each row of 2 * head_dim (`values = keys + head_dim`).
template <class Element>
struct paged_tensor {
  Element* keys = nullptr;
  Element* values = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  int block_tokens = 16;

  FREEKV_HD head_slice<Element> slice(std::int64_t block, int head) const {
    const std::int64_t offset = block * block_stride + head * head_stride;
    return {keys + offset, values + offset, token_stride};
  }
};

/// Some blocks of a tensor, by their numbers in it: a sequence's block table, whose n-th block has the tokens
/// from n * block_tokens on, or what an engine lends to a pipeline for slots.
template <class Element>
struct paged_blocks {
  paged_tensor<Element> tensor{};
  std::span<const std::int32_t> ids{};

  Element* key(int token, int head) const { return row(token, head).key; }
  Element* value(int token, int head) const { return row(token, head).value; }
  head_slice<Element> row(int token, int head) const {
    const auto block = tensor.slice(ids[to_size(token / tensor.block_tokens)], head);
    return detail::rows_behind(block, token % tensor.block_tokens);
  }
};

/// Size of the block table of a decode row, for a paged-attention kernel: `pages` pages, listed by block id
/// (the pipeline's own number of a block, where it has its own), with `tokens` tokens in them. All pages are
/// full but the last.
struct resident_table {
  int pages = 0;
  int tokens = 0;
};

namespace detail {

/// Blocks of a tensor as kernels take them: block i has the id `ids[i]`, or i where there is no list.
template <class Element>
struct listed_blocks {
  paged_tensor<Element> tensor{};
  const std::int32_t* ids = nullptr;

  /// Its number in the tensor.
  FREEKV_HD std::int64_t id(block_id block) const {
    return ids == nullptr ? number_of(block) : ids[number_of(block)];
  }
  FREEKV_HD head_slice<Element> slice(block_id block, int head) const {
    return tensor.slice(id(block), head);
  }
};

/// Pages of the pipeline's own as a tensor.
template <class Element, class PageSpan>
paged_tensor<Element> tensor_of(const PageSpan& pages) {
  const auto& map = pages.mapping();
  const auto stride = [&](page_axis axis) { return std::int64_t{map.stride(to_size(axis))}; };
  Element* const data = pages.data_handle();
  if (data == nullptr) return {};
  return {data,
          data + stride(page_axis::plane),
          stride(page_axis::page),
          stride(page_axis::token),
          stride(page_axis::head),
          static_cast<int>(pages.extent(to_size(page_axis::token)))};
}

/// Slots of pages of `page_tokens` tokens in `slots` blocks that an engine lends, whose rows begin at
/// multiples of `alignment` bytes. Throws settings_error.
template <class Element>
[[gnu::cold]] listed_blocks<Element> slots_in(const paged_blocks<Element>& blocks, int layer, int page_tokens,
                                              std::int64_t slots, std::uintptr_t alignment) {
  const auto refuse = [&](const std::string& what) {
    throw settings_error("blocks of layer " + std::to_string(layer) + ": " + what);
  };
  const paged_tensor<Element>& tensor = blocks.tensor;
  if (blocks.ids.size() != to_size(slots))
    refuse(std::to_string(blocks.ids.size()) + " blocks; needed are " + std::to_string(slots) +
           ", as footprint::slots says");
  if (slots > 0 && tensor.block_tokens != page_tokens)
    refuse("blocks of " + std::to_string(tensor.block_tokens) + " tokens, and a slot holds a page of " +
           std::to_string(page_tokens) + "; choose that page size");
  if (tensor.keys == nullptr || tensor.values == nullptr) refuse("keys or values are null");
  if (slots > 0 && blocks.ids.data() == nullptr) refuse("ids are null");
  const auto bytes = [](std::int64_t elements) {
    return static_cast<std::uintptr_t>(elements) * sizeof(Element);
  };
  for (const auto& [what, at] : {std::pair{"keys begin", reinterpret_cast<std::uintptr_t>(tensor.keys)},
                                 {"values begin", reinterpret_cast<std::uintptr_t>(tensor.values)},
                                 {"block_stride is", bytes(tensor.block_stride)},
                                 {"token_stride is", bytes(tensor.token_stride)},
                                 {"head_stride is", bytes(tensor.head_stride)}})
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
  return {tensor, blocks.ids.data()};
}

}  // namespace detail

}  // namespace freekv
