// The best of each of many rows of scores at once, by one of several algorithms that all give the same.
#pragma once

#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/radix_select.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

/// Algorithms that select from rows; CUB's are in top_k_by_cub.cuh.
enum class select_by : std::uint8_t {
  block_radix,     ///< `radix_select`, a block for each row, as the selection of a step has it
  segmented_sort,  ///< cub::DeviceSegmentedRadixSort of all scores
  batched_top_k,   ///< cub::DeviceBatchedTopK, which CCCL has from 3.5 on
};

struct top_k_tuning {
  int threads = 256;   ///< of a block
  int registers = 64;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers) && threads >= 256; }
};
inline constexpr top_k_tuning top_k_default{};
static_assert(top_k_default.valid());

/// Sizes that a selection from rows has room for: rows, scores of each, and how many are selected of each at
/// most.
struct top_k_sizes {
  int rows = 0, scores = 0, selected = 0;
  std::int64_t all_scores() const { return std::int64_t{rows} * scores; }
};

/// Rows of scores, none of them NaN, and what is selected of each. Only the device knows how long rows are.
struct score_rows {
  const float* scores = nullptr;         // (row, scores)
  const std::int32_t* counts = nullptr;  // (row): scores that there are
  const std::int32_t* wanted = nullptr;  // (row): how many are selected; of fewer all
  std::int32_t* selected = nullptr;      // (row, selected): indices, ascending
  top_k_sizes most;
};

using row_select = radix_select<top_k_default.threads>;

/// Finds what is selected among the scores.
struct by_scores {
  template <class Keys>
  __device__ row_select::least_key least(const row_select& select, Keys& keys, int, int count) const {
    return select.least_of_largest(keys, count);
  }
};
/// Finds what is selected by the best scores, which another kernel has found, but not which of equal ones are
/// selected.
struct by_best_scores {
  const float* best = nullptr;  // (row, stride), in any order
  std::int64_t stride = 0;
  template <class Keys>
  __device__ row_select::least_key least(const row_select& select, Keys&, int row, int count) const {
    return select.least_of([&](int i) { return order_bits(best[row * stride + i]); }, count);
  }
};

/// Selects from one row by a block. Among equal scores it takes the smaller index.
template <class By>
__global__ void select_from_rows(score_rows rows, By by) {
  __shared__ row_select::storage shared;
  const int row = block_x(), size = rows.counts[row], count = min(size, rows.wanted[row]);
  if (count <= 0) return;
  const float* const scores = rows.scores + std::int64_t{row} * rows.most.scores;
  std::int32_t* const selected = rows.selected + std::int64_t{row} * rows.most.selected;
  const row_select select(shared);
  const auto key_of = [&](int i) { return order_bits(scores[i]); };
  row_select::row<decltype(key_of)> keys(key_of, size);
  select.write_from(by.least(select, keys, row, count), keys, [&](int nth, int i) { selected[nth] = i; });
}
template <class By>
void launch_select_from_rows(const score_rows& rows, const By& by, cudaStream_t stream) {
  launch("selection from rows", {rows.most.rows, top_k_default.threads, stream}, select_from_rows<By>, rows,
         by);
}

/// The memory that an algorithm needs beside the rows, and how it is run.
template <select_by By>
struct top_k_scratch;

template <>
struct top_k_scratch<select_by::block_radix> {
  static top_k_scratch carve(carver&, const top_k_sizes&) { return {}; }
  void launch(const score_rows& rows, cudaStream_t stream) const {
    launch_select_from_rows(rows, by_scores{}, stream);
  }
};

/// Selects from rows, of sizes that `scratch` was carved for. Allocates nothing and may be captured.
template <select_by By>
void launch_top_k(const score_rows& rows, const top_k_scratch<By>& scratch, cudaStream_t stream) {
  if (rows.most.all_scores() > 0) scratch.launch(rows, stream);
}

}  // namespace freekv::device
