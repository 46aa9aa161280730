// Attention to an engine's own paged KV cache on the device: full attention without a pipeline.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/attend_tokens.hpp>
#include <freekv/backend/cuda/attend.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/tensor_attention.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/storage/memory.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <limits>
#include <string>

namespace freekv::device {

struct attend_paged_tuning {
  int threads = attend_default.threads;  ///< of a block
  int registers = 224;                   ///< of a thread at most
  multiplies by = multiplies::fma;
  constexpr bool valid() const { return valid_block(threads, registers); }
};
/// Tuning as a type: nvcc 13.0 does not take values of a class as a kernel's template arguments.
struct attend_paged_default {
  static constexpr attend_paged_tuning tuning{};
};
struct attend_paged_by_tensor_cores {
  static constexpr attend_paged_tuning tuning{.by = multiplies::tensor_cores};
};

/// One layer of an engine's paged KV cache, as paged-attention kernels take it; all in memory that the device
/// reads. Token t of sequence s is in block `block_table[s * max_blocks + t / block_tokens]` of the tensor.
/// Loads are of 16 bytes where addresses allow it. What lies behind a sequence's length is not read, of its
/// table neither.
template <element Element>
struct paged_cache {
  paged_tensor<const Element> tensor{};
  int max_blocks = 0;                         ///< of a sequence
  const std::int32_t* block_table = nullptr;  ///< (sequences, max_blocks)
  const std::int32_t* seq_lens = nullptr;     ///< (sequences): tokens, those of the decode rows included

  FREEKV_HD head_slice<const Element> slice(int sequence, int nth, int head) const {
    return tensor.slice(block_table[std::int64_t{sequence} * max_blocks + nth], head);
  }
};

/// Attention to an engine's paged cache: `rows` decode rows of each sequence, causal among themselves. The
/// last one attends to all of its sequence's tokens, each before it to one less; a row that has none gets
/// output 0 and lse -infinity, or its logit. The bounds size the launch, and a launch may be captured with
/// larger ones: what there is, is read on the device.
struct paged_attention {
  head_counts heads;               ///< any group
  const float* queries = nullptr;  ///< (sequences, rows, query_heads, head_dim): post-RoPE
  int max_sequences = 0;
  int max_tokens = 0;  ///< of a sequence; the rows of a longer one get NaN
  int rows = 1;
  const std::int32_t* sequences = nullptr;  ///< (1) on the device: how many there are; null: `max_sequences`
  float scale = 1.0f;
  float soft_cap = 0.0f;               ///< of scores: soft_cap * tanh(score / soft_cap); 0: none
  const float* sink_logits = nullptr;  ///< (query_heads); null: none
  attention_output to;                 ///< (sequences, rows, query_heads, ...)
  /// (sequences, rows, query_heads, max_blocks): the log-sum-exp of each block that the row has tokens of, in
  /// the unit of `to.lse`; null: not asked for. Where it is, each block is a part, which takes more scratch,
  /// and outputs are the same to rounding.
  float* block_lse = nullptr;

  FREEKV_HD constexpr int max_rows() const { return max_sequences * rows; }
  /// Tokens of whole blocks that one part covers.
  FREEKV_HD constexpr int part_tokens(int block_tokens) const {
    return block_lse != nullptr ? block_tokens
                                : entries_of_part(true, block_tokens, block_tokens) * block_tokens;
  }
};

/// Parts that a row of up to `max_tokens` tokens is attended to in.
inline int paged_parts(const paged_attention& attention, int block_tokens) {
  return std::max(1, blocks_for(attention.max_tokens, attention.part_tokens(block_tokens)));
}

/// Scratch for attention to blocks of `block_tokens` tokens: for all rows at once, or for as many as
/// `attend_default` says, whichever is less; the rest takes turns. Where `memory` is without memory it is
/// counted.
inline attention_scratch_memory paged_scratch(carver& memory, const paged_attention& attention,
                                              int block_tokens, int head_dim) {
  const std::int64_t rows = std::clamp(attention.max_rows(), 1, attend_default.rows_of_all);
  return attention_scratch_memory::carve(
      memory, rows * attention.heads.query * paged_parts(attention, block_tokens), head_dim);
}

/// The logit that makes a row NaN.
inline constexpr float not_attended = std::numeric_limits<float>::quiet_NaN();

/// A row as the device sees it.
struct paged_row {
  int sequence = 0;
  int tokens = 0;  // that it attends to; below 0: there is no such row

  __device__ static paged_row of(const paged_attention& attention, const std::int32_t* seq_lens, int row) {
    const int sequence = row / attention.rows, later = attention.rows - 1 - row % attention.rows;
    if (attention.sequences != nullptr && sequence >= *attention.sequences) return {sequence, -1};
    const int tokens = seq_lens[sequence] - later;
    return {sequence, tokens > 0 ? tokens : 0};
  }
};

/// Attention with the query heads of a tile.
template <class Tuned, int HeadDim, class Element>
using paged_tile = tile_attention<multiplies_for<Tuned::tuning.by, HeadDim, Element>, HeadDim, Element>;

/// A team, or a block whose warps share it, attends with a tile's query heads to one part of a row. The first
/// part of a row without tokens is one that is empty.
template <class Tuned, int HeadDim, element Element>
__global__ void attend_paged_parts(paged_cache<Element> cache, paged_attention attention, attending_rows rows,
                                   attention_scratch_memory scratch) {
  using attention_type = paged_tile<Tuned, HeadDim, Element>;
  using block_type = attend_block<attention_type, HeadDim, Element, identity>;
  alignas(16) extern __shared__ std::byte attend_memory[];
  auto* const of_teams = reinterpret_cast<typename block_type::storage*>(attend_memory);
  const typename attention_type::team_type team;
  const auto tile = head_tile<attention_type::heads>::nth(block_y(), attention.heads.group());
  const int nth_team = thread_x() / team.lanes();
  const int part = shares_parts<attention_type> ? block_x() : block_x() * block_type::teams + nth_team;
  const int nth = rows.first + block_z();
  const paged_row row = paged_row::of(attention, cache.seq_lens, nth);
  if (row.tokens < 0 || part >= rows.parts) return;
  const int block = cache.tensor.block_tokens, each = attention.part_tokens(block);
  const int tokens = row.tokens < attention.max_tokens ? row.tokens : attention.max_tokens;
  const int begin = part * each, end = begin + each < tokens ? begin + each : tokens;
  if (begin >= end && part > 0) return;

  attention_type attended(of_teams[nth_team]);
  begin_tile<HeadDim>(team, attended, tile,
                      step_queries{attention.queries, std::int64_t{attention.heads.query} * HeadDim}, nth,
                      attention.scale);
  const auto blocks = [&](int nth_block) {
    const int first = nth_block * block;
    return entry_rows<Element>{cache.slice(row.sequence, nth_block, tile.kv_head),
                               end - first < block ? end - first : block, ~0u};
  };
  const int first_block = begin / block, end_block = (end + block - 1) / block;
  const parts_of_row to{std::int64_t{blockIdx.z} * attention.heads.query, rows.parts};
  if constexpr (shares_parts<attention_type>) {
    attended.attend_entries(team, first_block, end_block, blocks, attention.soft_cap,
                            {nth_team, block_type::teams});
    store_shared_tile<HeadDim>(team, attended, of_teams, tile, scratch, to, part);
  } else {
    attended.attend_entries(team, first_block, end_block, blocks, attention.soft_cap);
    store_tile<HeadDim>(team, attended, tile, scratch, to, part);
  }
}

/// A warp merges the parts of one query head of a row, and writes its output.
template <int HeadDim>
__global__ void merge_paged_parts(paged_attention attention, const std::int32_t* seq_lens, int block_tokens,
                                  int max_blocks, attending_rows rows, attention_scratch_memory scratch) {
  const int query_heads = attention.heads.query;
  const int nth = block_x() / query_heads, head = block_x() % query_heads;
  const paged_row row = paged_row::of(attention, seq_lens, rows.first + nth);
  if (row.tokens < 0) return;
  const int each = attention.part_tokens(block_tokens), all = (row.tokens - 1) / each + 1;
  const int parts = row.tokens == 0 ? 1 : all < rows.parts ? all : rows.parts;
  const std::int64_t out = std::int64_t{rows.first + nth} * query_heads + head;
  const parts_of_row of{std::int64_t{nth} * query_heads, rows.parts};
  const float logit = attention.sink_logits == nullptr ? -infinity : attention.sink_logits[head];
  if (attention.block_lse != nullptr && row.tokens > 0)
    for (int part = thread_x(); part < parts; part += threads_x())
      attention.block_lse[out * max_blocks + part] =
          scratch.log_sum[of.at(head, part)].value() * attention.to.lse_per_nat;
  using merging = warp_merge<HeadDim>;
  __syncwarp();  // groups are merged to where parts were
  for (int first = 0; parts > merging::group && first < parts; first += merging::group)
    merging::merge_group(scratch, of.at(head, first), min(merging::group, parts - first));
  __syncwarp();
  merging::merge(scratch, of.at(head, 0), parts, row.tokens > attention.max_tokens ? not_attended : logit,
                 attention.to, {rows.first + nth, head, query_heads});
}

namespace detail {

inline void check_paged(int block_tokens, int max_blocks, const paged_attention& attention,
                        const attention_scratch_memory& scratch) {
  const auto refuse = [](const std::string& what) {
    throw settings_error("attention to a paged cache: " + what);
  };
  const auto [query, kv] = attention.heads;
  if (kv < 1 || query < 1 || query % kv != 0)
    refuse(std::to_string(query) + " query heads of " + std::to_string(kv) +
           " KV heads; they are a multiple");
  if (block_tokens < 1 || attention.rows < 1)
    refuse("blocks of " + std::to_string(block_tokens) + " tokens and " + std::to_string(attention.rows) +
           " rows of a sequence; at least 1 of each");
  if (attention.max_tokens > std::int64_t{max_blocks} * block_tokens)
    refuse("max_tokens is " + std::to_string(attention.max_tokens) + ", and a sequence's " +
           std::to_string(max_blocks) + " blocks have room for " +
           std::to_string(std::int64_t{max_blocks} * block_tokens));
  if (const std::int64_t row = std::int64_t{query} * paged_parts(attention, block_tokens);
      scratch.parts < row)
    refuse("the scratch has room for " + std::to_string(scratch.parts) + " parts, and a row takes " +
           std::to_string(row) + "; paged_scratch carves enough");
}

}  // namespace detail

/// Attends all rows: queued on `stream`, nothing waits and nothing is allocated. One call at a time uses a
/// scratch. What comes out of a row depends on the row alone, not on the bounds, the scratch or other rows,
/// and equals bit for bit what a complete layer with pages of as many tokens gives in a pipeline whose
/// backend multiplies by FMA, and to rounding by tensor cores. O(tokens * query heads * head_dim) for each
/// row; the query heads of a tile read their keys and values once. Throws settings_error, with nothing
/// queued, and device_error.
template <int HeadDim, class Tuned = attend_paged_default, element Element>
void attend_paged(const paged_cache<Element>& cache, const paged_attention& attention,
                  const attention_scratch_memory& scratch, cudaStream_t stream) {
  static_assert(kv_shape<Element, HeadDim>::head_dim == HeadDim);
  detail::check_paged(cache.tensor.block_tokens, cache.max_blocks, attention, scratch);
  static_assert(Tuned::tuning.valid());
  using attention_type = paged_tile<Tuned, HeadDim, Element>;
  using block_type = attend_block<attention_type, HeadDim, Element, identity>;
  constexpr int threads = block_type::size.threads;
  const int query_heads = attention.heads.query;
  const int parts = paged_parts(attention, cache.tensor.block_tokens);
  const int tiles = head_tile<attention_type::heads>::tiles_of(attention.heads.group());
  const int at_once = rows_at_once(scratch, parts, query_heads);
  for (int first = 0; first < attention.max_rows(); first += at_once) {
    const attending_rows rows{first, std::min(at_once, attention.max_rows() - first), parts};
    const dim3 grid(static_cast<unsigned>(blocks_for(parts, parts_of_block<attention_type, block_type>)),
                    static_cast<unsigned>(attention.heads.kv * tiles), static_cast<unsigned>(rows.count));
    launch("attention to a paged cache", {grid, threads, stream, attend_block_bytes<block_type>},
           attend_paged_parts<Tuned, HeadDim, Element>, cache, attention, rows, scratch);
    launch("merge of attention to a paged cache",
           {dim3(static_cast<unsigned>(rows.count * query_heads)), warp_merge<HeadDim>::threads, stream},
           merge_paged_parts<HeadDim>, attention, cache.seq_lens, cache.tensor.block_tokens, cache.max_blocks,
           rows, scratch);
  }
}

}  // namespace freekv::device
