// Selection from rows of scores by CUB's device-wide algorithms. Which scores are the best does not depend on
// what an algorithm does with equal ones, so CUB sorts or selects scores alone; a pass over the rows finds
// their indices.
#pragma once

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <freekv/core/size.hpp>

#include <cstddef>
#include <cstdint>
#include <cub/device/device_segmented_radix_sort.cuh>
#include <freekv/backend/cuda/top_k.cuh>
#include <freekv/core/error.hpp>
#include <limits>
#include <string>
#if __has_include(<cub/device/device_batched_topk.cuh>)
#include <cub/device/device_batched_topk.cuh>
#endif

namespace freekv::device {

/// True of an algorithm that the CCCL in use has.
template <select_by By>
inline constexpr bool has_top_k = By != select_by::batched_top_k;

/// `function(i)` for i = 0, 1, ...
template <class Function>
auto each_index(const Function& function) {
  return thrust::make_transform_iterator(thrust::make_counting_iterator(0), function);
}

/// Offset of a row of scores: its beginning, or with `counts` its end.
struct row_offset {
  int stride = 0;
  const std::int32_t* counts = nullptr;  // null: where it begins
  FREEKV_HD int operator()(int row) const { return row * stride + (counts == nullptr ? 0 : counts[row]); }
};

/// Sorts all scores: O(rows * scores) memory beside them.
template <>
struct top_k_scratch<select_by::segmented_sort> {
  float* sorted = nullptr;  // (row, scores), falling
  std::byte* temporary = nullptr;
  std::size_t temporary_bytes = 0;

  /// Throws `settings_error` for more scores than 32 bits count, which are all that CUB sorts.
  static top_k_scratch carve(carver& memory, const top_k_sizes& most) {
    if (most.all_scores() > std::numeric_limits<int>::max())
      throw settings_error("a segmented sort takes " + std::to_string(std::numeric_limits<int>::max()) +
                           " scores at most, not " + std::to_string(most.all_scores()));
    top_k_scratch scratch;
    score_rows rows;
    rows.most = most;
    scratch.sort(rows, nullptr, scratch.temporary_bytes, nullptr);
    scratch.sorted = memory.take<float>(to_size(most.all_scores()));
    scratch.temporary = memory.take<std::byte>(scratch.temporary_bytes);
    return scratch;
  }
  void launch(const score_rows& rows, cudaStream_t stream) const {
    std::size_t bytes = temporary_bytes;
    sort(rows, temporary, bytes, stream);
    launch_select_from_rows(rows, by_best_scores{sorted, rows.most.scores}, stream);
  }

 private:
  void sort(const score_rows& rows, void* memory, std::size_t& bytes, cudaStream_t stream) const {
    const top_k_sizes& most = rows.most;
    check(cub::DeviceSegmentedRadixSort::SortKeysDescending(
              memory, bytes, rows.scores, sorted, static_cast<int>(most.all_scores()), most.rows,
              each_index(row_offset{most.scores}), each_index(row_offset{most.scores, rows.counts}), 0, 32,
              stream),
          "cub::DeviceSegmentedRadixSort");
  }
};

#if __has_include(<cub/device/device_batched_topk.cuh>)

/// A round of a tournament: CUB selects by one block, so a row that is longer than a tile is cut into tiles,
/// and the best of its tiles are the row of the next round.
struct top_k_round {
  static constexpr int tile = 8192;  // floats, the most that a block of CUB's has shared memory for
  score_rows rows;
  int nth = 0;
  const float* scores = nullptr;  // (row, stride)
  float* best = nullptr;          // (row, best_stride)
  std::int64_t stride = 0, best_stride = 0;

  /// Number of scores that the next round has, of `count` in this one: only a row's last tile may have fewer
  /// than are wanted.
  FREEKV_HD static constexpr std::int64_t left_of(std::int64_t count, int wanted) {
    const std::int64_t rest = count % tile;
    return count / tile * wanted + (rest < wanted ? rest : wanted);
  }
  FREEKV_HD int tiles() const { return static_cast<int>((stride + tile - 1) / tile); }
  FREEKV_HD int row_of(int segment) const { return segment / tiles(); }
  FREEKV_HD int tile_of(int segment) const { return segment % tiles(); }
};
/// Scores of the tiles of all rows, which are CUB's segments.
struct tile_scores {
  top_k_round round;
  FREEKV_HD const float* operator()(int segment) const {
    return round.scores + round.row_of(segment) * round.stride + round.tile_of(segment) * round.tile;
  }
};
struct tile_count {
  top_k_round round;
  FREEKV_HD int operator()(int segment) const {
    const int row = round.row_of(segment);
    std::int64_t count = round.rows.counts[row];
    for (int i = 0; i < round.nth; ++i) count = round.left_of(count, round.rows.wanted[row]);
    count -= std::int64_t{round.tile_of(segment)} * round.tile;
    return count < 0 ? 0 : count < round.tile ? static_cast<int>(count) : round.tile;
  }
};
struct tile_wanted {
  top_k_round round;
  FREEKV_HD int operator()(int segment) const { return round.rows.wanted[round.row_of(segment)]; }
};
struct tile_best {
  top_k_round round;
  FREEKV_HD float* operator()(int segment) const {
    return round.best + round.row_of(segment) * round.best_stride +
           std::int64_t{round.tile_of(segment)} * tile_wanted{round}(segment);
  }
};

/// O(rows * (scores / tile + 1) * selected) memory beside the scores.
template <>
struct top_k_scratch<select_by::batched_top_k> {
  float* best[2] = {};  // of even and of odd rounds
  std::byte* temporary = nullptr;
  std::size_t temporary_bytes = 0;

  /// Throws `settings_error` where more are selected than half a tile has: rounds would not make rows
  /// shorter.
  static top_k_scratch carve(carver& memory, const top_k_sizes& most) {
    if (most.selected > top_k_round::tile / 2)
      throw settings_error("cub::DeviceBatchedTopK selects " + std::to_string(top_k_round::tile / 2) +
                           " of a row at most here, not " + std::to_string(most.selected));
    top_k_scratch scratch;
    const top_k_round first = first_round(score_rows{.most = most});
    select_tiles(first, nullptr, scratch.temporary_bytes, nullptr);
    const std::int64_t after_next = top_k_round::left_of(first.best_stride, most.selected);
    scratch.best[0] = memory.take<float>(to_size(most.rows * first.best_stride));
    scratch.best[1] = memory.take<float>(to_size(most.rows * after_next));
    scratch.temporary = memory.take<std::byte>(scratch.temporary_bytes);
    return scratch;
  }
  void launch(const score_rows& rows, cudaStream_t stream) const {
    top_k_round round = first_round(rows);
    for (round.best = best[0];; round = next_round(round)) {
      std::size_t bytes = temporary_bytes;
      select_tiles(round, temporary, bytes, stream);
      if (round.tiles() <= 1) break;
    }
    launch_select_from_rows(rows, by_best_scores{round.best, round.best_stride}, stream);
  }

 private:
  static top_k_round first_round(const score_rows& rows) {
    top_k_round round{.rows = rows, .scores = rows.scores, .stride = rows.most.scores};
    round.best_stride = top_k_round::left_of(round.stride, rows.most.selected);
    return round;
  }
  top_k_round next_round(const top_k_round& round) const {
    top_k_round next{.rows = round.rows, .nth = round.nth + 1, .scores = round.best};
    next.best = best[next.nth % 2];
    next.stride = round.best_stride;
    next.best_stride = top_k_round::left_of(next.stride, next.rows.most.selected);
    return next;
  }
  static void select_tiles(const top_k_round& round, void* memory, std::size_t& bytes, cudaStream_t stream) {
    namespace execution = cuda::execution;
    auto any_order =
        execution::require(execution::determinism::not_guaranteed, execution::tie_break::unspecified,
                           execution::output_ordering::unsorted);
    using environment = cuda::std::execution::env<decltype(any_order), cuda::stream_ref>;
    const auto in_tile = cuda::args::bounds<0, top_k_round::tile>();
    check(cub::DeviceBatchedTopK::MaxKeys(
              memory, bytes, each_index(tile_scores{round}), each_index(tile_best{round}),
              cuda::args::deferred_sequence(each_index(tile_count{round}), in_tile),
              cuda::args::deferred_sequence(each_index(tile_wanted{round}), in_tile),
              round.rows.most.rows * round.tiles(), environment{any_order, cuda::stream_ref(stream)}),
          "cub::DeviceBatchedTopK");
  }
};
template <>
inline constexpr bool has_top_k<select_by::batched_top_k> = true;

#endif

}  // namespace freekv::device
