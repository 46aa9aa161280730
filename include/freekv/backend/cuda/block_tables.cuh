// Block tables of what a step's decode rows attend to, written on the device for an engine's own kernel.
#pragma once

#include <cstdint>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/block_tables.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

/// Rows of a table, of a batch of `sequences`: the step's, in their order, and empty rows behind them.
enum class table_rows : std::uint8_t {
  by_head,    ///< (kv_heads, sequences): what a KV head attends to
  folded,     ///< (sequences, kv_heads): the same; id: block * kv_heads + head, of a tensor whose blocks are
              ///< (kv_heads, tokens)
  all_heads,  ///< (sequences): every page that some KV head of the sequence attends to
};

/// Tables in memory of the device, of fixed capacity and written in place; what is null is not asked for.
/// Blocks are in the order of their tokens, all of them full but the last, which has the last row of the
/// step; earlier rows of the step see as many tokens less as lie behind them. Sequences that bring no decode
/// rows have empty rows.
///
/// Blocks are pages, by their numbers in `paged_kv`; or, for kernels of smaller blocks and for units of less
/// than a page, `block_tokens` tokens, a divisor of a page's or a unit's. Ids then count as many rows of
/// `token_stride` elements, from the first key and the first value on: row t of KV head h of block b is at
/// `(b * block_tokens + t) * token_stride + h * head_stride`, without the last term where heads are folded.
/// `all_heads` has no units.
struct block_tables {
  table_rows rows = table_rows::by_head;
  int sequences = 0;                      ///< of the batch
  int max_blocks = 0;                     ///< of a row
  int block_tokens = 0;                   ///< of a block; 0: a page's
  std::int32_t* blocks = nullptr;         ///< (rows, max_blocks); -1 behind a row's
  std::int32_t* seq_lens = nullptr;       ///< (rows): tokens in a row's blocks
  std::int32_t* block_counts = nullptr;   ///< (rows)
  std::int32_t* indptr = nullptr;         ///< (rows + 1): where a row's blocks begin in `indices`
  std::int32_t* indices = nullptr;        ///< (rows * max_blocks), with `indptr`
  std::int32_t* last_page_len = nullptr;  ///< (rows): tokens in a row's last block; 0 where it has none

  FREEKV_HD constexpr int size(int kv_heads) const {
    return rows == table_rows::all_heads ? sequences : sequences * kv_heads;
  }
};

struct tables_tuning {
  int threads = 128;   ///< of a block, which writes a row
  int registers = 64;  ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr tables_tuning tables_default{};
static_assert(tables_default.valid());

/// List of what one KV head of the `nth` sequence of a step attends to with the last row.
template <class State>
__device__ attention_list last_row_attends(const State& s, const step_view& step, int nth, int head) {
  const attention_list nothing{.complete = true};
  if (nth >= step.size()) return nothing;
  const step_entry& entry = step.entries[nth];
  return entry.phase == step_phase::decode ? s.pages_attended(entry, entry.tokens - 1, head) : nothing;
}

/// A list cut into blocks of `tokens` rows. All entries are full but the last.
struct blocks_of_list {
  attention_list list;
  int tokens = 0;

  /// Blocks of entry i.
  FREEKV_HD constexpr int of(int i) const { return (list.range(i).tokens + tokens - 1) / tokens; }
  /// Blocks of the entries before it.
  FREEKV_HD constexpr int before(int i) const {
    const int nth = list.nth_selected(i);
    const int selected = nth < 0 ? 0 : nth < list.selected_count ? nth : list.selected_count;
    return ((i - selected) * list.page_tokens + selected * list.unit_tokens) / tokens;
  }
  FREEKV_HD constexpr int size() const {
    const int last = list.size() - 1;
    return last < 0 ? 0 : before(last) + of(last);
  }
  /// Tokens of the last block.
  FREEKV_HD constexpr int last_tokens() const {
    const int last = list.size() - 1;
    return last < 0 ? 0 : (list.range(last).tokens - 1) % tokens + 1;
  }
};

/// Pages of a row of `all_heads`, as bits: (words) for a sequence's pages. By a block.
template <class State>
__device__ void merge_pages(const State& s, const step_view& step, int nth, int words, unsigned* pages) {
  const int thread = thread_x(), threads = threads_x();
  for (int i = thread; i < words; i += threads) pages[i] = 0;
  __syncthreads();
  for (int head = 0; head < s.heads.kv; ++head) {
    const attention_list list = last_row_attends(s, step, nth, head);
    for (int i = thread; i < list.size(); i += threads) {
      const int page = list.page(i);
      atomicOr(pages + page / 32, 1u << page % 32);
    }
  }
  __syncthreads();
}

/// Writes one row of a table. With `all_heads`, dynamic shared memory of a bit for each page of a sequence.
template <class State>
__global__ void write_table(State s, step_view step, block_tables to, table_ids ids) {
  extern __shared__ unsigned merged[];
  __shared__ int before, count;
  const int row = block_x();
  const int thread = thread_x(), threads = threads_x();
  const int heads = s.heads.kv;
  const bool merges = to.rows == table_rows::all_heads, folds = to.rows == table_rows::folded;
  const auto sequence_of = [&](int r) { return merges ? r : folds ? r / heads : r % to.sequences; };
  const auto head_of = [&](int r) { return merges ? 0 : folds ? r % heads : r / to.sequences; };
  const auto blocks_of = [&](int r) {
    return blocks_of_list{last_row_attends(s, step, sequence_of(r), head_of(r)), ids.tokens};
  };
  const int head = head_of(row);
  const blocks_of_list listed = blocks_of(row);
  const attention_list& list = listed.list;
  std::int32_t* const blocks = to.blocks == nullptr ? nullptr : to.blocks + std::int64_t{row} * to.max_blocks;
  if (thread == 0) {
    before = 0;
    count = merges ? 0 : listed.size();
  }
  __syncthreads();
  if (to.indptr != nullptr)
    for (int r = thread; r < row; r += threads) atomicAdd(&before, blocks_of(r).size());
  if (merges) {
    const int words = (s.max_pages + 31) / 32, of_page = s.page.tokens / ids.tokens;
    merge_pages(s, step, row, words, merged);
    const int last_page = list.size() == 0 ? -1 : list.page(list.size() - 1);
    // A page's place is the number of those before it.
    for (int word = thread; word < words; word += threads) {
      int place = 0;
      for (int i = 0; i < word; ++i) place += __popc(merged[i]);
      for (unsigned rest = merged[word]; rest != 0; rest &= rest - 1, ++place) {
        const int page = word * 32 + __ffs(static_cast<int>(rest)) - 1;
        const int written = page == last_page ? listed.of(list.size() - 1) : of_page;
        if (blocks != nullptr) {
          const std::int64_t first = number_of(s.store_page(step.entries[row].sequence, page)) * ids.by_block;
          for (int i = 0; i < written; ++i)
            blocks[place * of_page + i] = static_cast<std::int32_t>(first + i);
        }
        atomicAdd(&count, written);
      }
    }
  }
  __syncthreads();
  if (!merges)
    for (int i = thread; i < list.size(); i += threads) {
      const int sequence = step.entries[sequence_of(row)].sequence, place = listed.before(i);
      const std::int64_t first = s.block_attended(sequence, head, list, i) * ids.by_block +
                                 head * ids.by_head + s.row_attended(sequence, head, list, i) / ids.tokens;
      for (int n = 0; n < listed.of(i); ++n) {
        const auto id = static_cast<std::int32_t>(first + n);
        if (blocks != nullptr) blocks[place + n] = id;
        if (to.indices != nullptr) to.indices[before + place + n] = id;
      }
    }
  if (blocks != nullptr)
    for (int i = count + thread; i < to.max_blocks; i += threads) blocks[i] = -1;
  if (thread != 0) return;
  const int last = listed.last_tokens();
  if (to.seq_lens != nullptr) to.seq_lens[row] = count == 0 ? 0 : (count - 1) * ids.tokens + last;
  if (to.block_counts != nullptr) to.block_counts[row] = count;
  if (to.last_page_len != nullptr) to.last_page_len[row] = last;
  if (to.indptr == nullptr) return;
  to.indptr[row] = before;
  if (row + 1 == blocks_x()) to.indptr[row + 1] = before + count;
}
/// Bytes of shared memory in which a table of all heads marks pages.
template <class State>
std::size_t marked_bytes(const State& s) {
  return to_size(s.max_pages + 31) / 32 * sizeof(unsigned);
}
template <class State>
void launch_tables(const State& s, const step_view& step, const block_tables& to, const table_ids& ids,
                   cudaStream_t stream) {
  launch("block tables",
         {static_cast<unsigned>(to.size(s.heads.kv)), tables_default.threads, stream,
          to.rows == table_rows::all_heads ? marked_bytes(s) : 0},
         write_table<State>, s, step, to, ids);
}

}  // namespace freekv::device
