// Attention on the device: each row's entries in parts, one team a part, merged in order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cuda/std/type_traits>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/attend_tokens.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/backend/cuda/attention_parts.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/lane_attention.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/last_block.cuh>
#include <freekv/backend/cuda/match_by_warp.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/tensor_attention.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

struct attend_tuning {
  int threads = 128;              ///< of a block
  int registers = 208;            ///< of a thread at most; two blocks a multiprocessor, as 184 are too
  int tensor_registers = 255;     ///< the same by tensor cores: most are taken by pages that are decoded
  int heads = 4;                  ///< query heads that a team attends with by FMA; larger groups take several
  int part_tokens = 128;          ///< of a budgeted row that one part covers
  int part_tokens_of_all = 1024;  ///< of a row that attends to everything
  int rows_of_all = 16;           ///< that attend to everything in one launch; more take turns
  int tensor_blocks = 3;   ///< of a multiprocessor, by tensor cores, of pages that are kept as they are
  int begin_tokens = 384;  ///< that a block would attend to in the time that it takes to begin and to end
  int most_in_turn = 16;   ///< parts that one block attends to where there are more than fit; a power of two
  constexpr bool valid() const {
    return valid_block(threads, registers) && valid_block(threads, tensor_registers) && heads >= 1 &&
           heads <= 8 && part_tokens >= 8 && part_tokens_of_all >= part_tokens && rows_of_all >= 1 &&
           tensor_blocks >= 1 && begin_tokens >= 0 && most_in_turn >= 1;
  }
};
inline constexpr attend_tuning attend_default{};
static_assert(attend_default.valid());

/// The attention of a tile's query heads: by tensor cores or by lanes.
template <multiplies By, int HeadDim, class Element>
using tile_attention =
    cuda::std::conditional_t<By == multiplies::tensor_cores, tensor_attention<HeadDim, Element>,
                             lane_attention<HeadDim, attend_default.heads, Element>>;

/// Tokens that one part covers of a row, by whether it attends to everything.
FREEKV_HD constexpr int tokens_of_part(bool everything) {
  return everything ? attend_default.part_tokens_of_all : attend_default.part_tokens;
}

/// Entries of a list that one part covers. Parts are cut at multiples of it and merged in order, so that
/// results depend on neither the batch nor the grid.
FREEKV_HD constexpr int entries_of_part(bool everything, int page_tokens, int unit_tokens) {
  const int tokens = tokens_of_part(everything);
  const int entry = everything ? page_tokens : unit_tokens;
  return tokens > entry ? tokens / entry : 1;
}

/// Up to `Heads` query heads of one KV head, which a team attends with together.
template <int Heads>
struct head_tile {
  static constexpr int heads = Heads;
  int kv_head = 0;
  int group = 1;
  int first = 0;  // query head of the group

  FREEKV_HD static constexpr int tiles_of(int group) { return (group + Heads - 1) / Heads; }
  /// Tile n of all KV heads' groups.
  FREEKV_HD static constexpr head_tile nth(int n, int group) {
    const int tiles = tiles_of(group);
    return {n / tiles, group, n % tiles * Heads};
  }
  FREEKV_HD constexpr bool has(int h) const { return first + h < group; }
  /// Query head h of the tile among all; those that it does not have are the group's last.
  FREEKV_HD constexpr int query_head(int h) const {
    return kv_head * group + (has(h) ? first + h : group - 1);
  }
};

/// Takes a tile's queries of a row, (query_heads, head_dim).
template <int HeadDim, class Team, class Attention, class Tile>
__device__ void begin_tile(Team team, Attention& attention, const Tile& tile, const step_queries& queries,
                           int row, float scale) {
  asm volatile("" : "+r"(row));  // in a loop over parts, addresses of a row are computed anew and not kept
  attention.begin(
      team, [&](int h) { return queries.row(row, std::int64_t{tile.query_head(h)} * HeadDim); }, scale);
}

/// Leaves what a tile has attended to as part `part` of its row.
template <int HeadDim, class Team, class Attention, class Tile>
__device__ void store_tile(Team team, const Attention& attention, const Tile& tile,
                           const attention_scratch_memory& scratch, const parts_of_row& row, int part) {
  attention.store(team, [&](int h) {
    if (!tile.has(h)) return attention_part{};
    const std::int64_t at = row.at(tile.query_head(h), part);
    return attention_part{scratch.log_sum + at, scratch.weighted + at * HeadDim};
  });
}

/// Parts of a block's warps, each with its `storage` of those `of_warps`: leaves them merged, in their order,
/// as part `part` of the row.
template <int HeadDim, class Team, class Attention, class Storage, class Tile>
__device__ void store_shared_tile(Team team, const Attention& attention, Storage* of_warps, const Tile& tile,
                                  const attention_scratch_memory& scratch, const parts_of_row& row,
                                  int part) {
  constexpr int warps = Attention::warps, pieces = HeadDim / 4;
  Storage& mine = of_warps[thread_x() / 32];
  team.sync();  // all lanes have read what had come
  attention.store(team, [&](int h) { return mine.part(h); });
  __syncthreads();
#pragma unroll 1
  for (int i = thread_x(); i < Tile::heads * pieces; i += threads_x()) {
    const int h = i / pieces, piece = i % pieces;
    if (!tile.has(h)) break;
    float most = -infinity, sum = 0.0f;
    float4 weighted{};
    unroll<warps>(
        [&](auto warp) { most = scalar_team{}.maximum(of_warps[warp].part(h).log_sum->max, most); });
    unroll<warps>([&](auto warp) {
      const attention_part of = of_warps[warp].part(h);
      if (of.log_sum->max == -infinity) return;  // nothing, whatever its numbers are
      const float by = ::expf(of.log_sum->max - most);
      const float4 x = reinterpret_cast<const float4*>(of.weighted)[piece];
      sum = ::fmaf(of.log_sum->sum, by, sum);
      weighted = {::fmaf(x.x, by, weighted.x), ::fmaf(x.y, by, weighted.y), ::fmaf(x.z, by, weighted.z),
                  ::fmaf(x.w, by, weighted.w)};
    });
    const std::int64_t at = row.at(tile.query_head(h), part);
    reinterpret_cast<float4*>(scratch.weighted + at * HeadDim)[piece] = weighted;
    if (piece == 0) scratch.log_sum[at] = {most, sum};
  }
}

/// Rows of `parts` parts whose attention the scratch has room for at a time, at least 1.
inline int rows_at_once(const attention_scratch_memory& scratch, int parts, int query_heads) {
  constexpr std::int64_t most_in_z = 65535;
  return static_cast<int>(
      std::clamp<std::int64_t>(scratch.parts / (std::int64_t{parts} * query_heads), 1, most_in_z));
}

/// Kinds of a step's rows that a launch is for.
enum class rows_attending : std::uint8_t { all, decodes, prompts };

/// Rows of a step that attend in one launch.
struct attending_rows {
  int first = 0, count = 0;
  int parts = 1;            // of a row at most
  bool everything = false;  // whatever their kind
  rows_attending kind = rows_attending::all;
  int first_entry = 0, entries = 1 << 30;  // whose rows they are

  /// True where any of an entry's rows is among them.
  __device__ bool overlap(const step_entry& entry) const {
    return entry.first_row < first + count && entry.first_row + entry.tokens > first;
  }
  __device__ bool has(const step_view& step, const step_entry* entry) const {
    const int nth = static_cast<int>(entry - step.entries) - first_entry;
    const auto of = entry->phase == step_phase::prefill ? rows_attending::prompts : rows_attending::decodes;
    return (kind == rows_attending::all || kind == of) && nth >= 0 && nth < entries;
  }
};

/// True where a row attends to all that its model attends to, in the store; else to what the head keeps.
FREEKV_HD inline bool attends_to_all(const step_entry& entry, const attending_rows& rows) {
  return rows.everything || entry.phase == step_phase::prefill;
}
/// List of what a KV head attends to with one row.
struct attended_list {
  const step_entry* step = nullptr;
  int head = 0;
  bool everything = false;  // whatever the head's kind
  attention_list entries;

  template <class State>
  FREEKV_HD static attended_list of(const State& s, const step_entry& step, int row, int head,
                                    const attending_rows& rows) {
    const bool everything = attends_to_all(step, rows);
    return {&step, head, everything, s.pages_attended(step, row - step.first_row, head, everything)};
  }
  FREEKV_HD int size() const { return entries.size(); }
  /// True where the list is of the store's pages; else of slots.
  template <class State>
  FREEKV_HD bool in_store(const State& s) const {
    return !s.attends_to_slots(entries, everything);
  }
};

/// A block of attention to pages of `Codec`: its launch, each team's shared memory, and the rows of encoded
/// pages that a team decodes at a time, which are fewer where there is no room for more.
template <class Attention, int HeadDim, class Element, class Codec>
struct attend_block {
  static constexpr int lanes = Attention::team_type::lane_count;
  struct sizes {
    int threads = attend_default.threads, rows = Attention::tokens_at_once;
    constexpr int numbers() const { return threads / lanes * rows * 2 * HeadDim; }
  };
  static constexpr sizes fitting() {
    constexpr int room = (48 << 10) / static_cast<int>(sizeof(Element));
    sizes s;
    while (s.numbers() > room && s.threads > 32) s.threads /= 2;
    while (s.numbers() > room && s.rows > 1) s.rows /= 2;
    while (s.numbers() > room) s.threads /= 2;
    return s;
  }
  static constexpr sizes size = encodes_pages<Codec> ? fitting() : sizes{};
  static constexpr bool takes_turns = false;
  static constexpr int of_multiprocessor = 1;
  static constexpr int teams = size.threads / lanes, row_stride = HeadDim;  // of rows that are decoded
  static_assert(teams > 0);
  struct alignas(encodes_pages<Codec> ? 16 : alignof(Element)) storage {
    Element decoded[encodes_pages<Codec> ? size.rows * 2 * HeadDim : 1];
    __device__ Element* rows() { return decoded; }
  };
};
/// Tensor cores have a ring, whose memory takes rows that are decoded as well.
template <int HeadDim, class Element, class Codec>
struct attend_block<tensor_attention<HeadDim, Element>, HeadDim, Element, Codec> {
  using attention_type = tensor_attention<HeadDim, Element>;
  static constexpr int lanes = 32, teams = attention_type::warps, row_stride = attention_type::row_stride;
  struct sizes {
    int threads = 32 * attention_type::warps, rows = attention_type::tokens_at_once;
  };
  static constexpr sizes size{};
  using storage = typename attention_type::storage;
  /// Attends to several parts of a row, where there are more of them than blocks.
  static constexpr bool takes_turns = !encodes_pages<Codec>;
  static constexpr int of_multiprocessor = takes_turns ? attend_default.tensor_blocks : 1;
};
template <multiplies By, class State, class Codec>
using attend_block_of = attend_block<tile_attention<By, State::head_dim, typename State::element>,
                                     State::head_dim, typename State::element, Codec>;
/// A block's shared memory.
template <class Block>
inline constexpr std::size_t attend_block_bytes = sizeof(typename Block::storage) * Block::teams;

/// True of attention whose warps share a part of a row: each has some of its tokens, and what they have
/// attended to is merged before it leaves the block, so that a short part is soon done.
template <class Attention>
inline constexpr bool shares_parts = requires {
  typename Attention::turn;
};
/// Parts that a block attends to.
template <class Attention, class Block>
inline constexpr int parts_of_block = shares_parts<Attention> ? 1 : Block::teams;

/// Parts of a row that each of its blocks attends to, one after the other: the least power of two with which
/// there are `blocks` at most.
struct parts_in_turn {
  int log = 0;
  FREEKV_HD static constexpr parts_in_turn of(int parts, int blocks) {
    parts_in_turn turn;
    while (turn.blocks(parts) > blocks) ++turn.log;
    return turn;
  }
  FREEKV_HD constexpr int count() const { return 1 << log; }
  FREEKV_HD constexpr int blocks(int parts) const { return (parts + count() - 1) >> log; }
};
/// Blocks for each of `rows` rows and tiles of up to `parts` parts of `part_tokens` tokens, of which
/// `at_once` run at a time: those that soonest have attended to all of them, if all take as long.
inline int blocks_of_row(int parts, int part_tokens, std::int64_t rows, std::int64_t at_once) {
  int best = parts;
  double least = infinity;
  for (parts_in_turn turn; turn.count() <= attend_default.most_in_turn; ++turn.log) {
    const int blocks = turn.blocks(parts);
    const auto rounds = static_cast<double>((rows * blocks + at_once - 1) / at_once);
    const double takes =
        rounds * (attend_default.begin_tokens + turn.count() * static_cast<double>(part_tokens));
    if (takes >= least) continue;
    least = takes;
    best = blocks;
  }
  return best;
}

/// Rows of entry i of a list: in its slot, in the store if that keeps them as they are, or in an open page.
template <class Codec, class State>
FREEKV_HD auto attended_slice(const State& s, const attended_list& list, int i) {
  const int sequence = list.step->sequence, head = list.head;
  const page_range part = list.entries.range(i);
  if (list.in_store(s))
    return rows_behind(encodes_pages<Codec> ? s.open_slice(sequence, part.page, head)
                                            : s.store_slice(sequence, part.page, head),
                       part.first);
  return s.rows_in_slot(sequence, head, list.entries, i);
}

/// Query heads of a tile that attend to entry i of their KV head's list, a bit each.
template <class State, class Tile>
FREEKV_HD unsigned attending_heads(const State& s, const attended_list& list, int i, const Tile& tile) {
  const std::uint32_t* const mask = s.attended_by_heads(list.step->sequence, list.head, list.entries, i);
  if (mask == nullptr) return ~0u;
  unsigned heads = 0;
  for (int h = 0; h < Tile::heads && tile.has(h); ++h)
    heads |= (has_head(mask, tile.first + h) ? 1u : 0u) << h;
  return heads;
}

/// True where entry i of a list is of an encoded page.
template <class Codec, class State>
__device__ bool is_encoded(const State& s, const attended_list& list, int i) {
  return encodes_pages<Codec> && list.in_store(s) &&
         list.entries.page(i) < list.step->after() / s.page.tokens;
}

/// Attends to a part of a page that is encoded, some rows after others through the team's shared memory.
template <class Block, class Team, class Attention, class State, class Codec>
__device__ void attend_encoded(Team team, Attention& attention, const State& s, const Codec& codec,
                               const sequence_head& at, const page_range& part,
                               typename Block::storage& shared, unsigned attending) {
  constexpr int most = Block::size.rows;
  using element = typename State::element;
  element* const key = shared.rows();
  const head_slice<element> rows{key, key + most * Block::row_stride, Block::row_stride};
  for (int first = 0; first < part.tokens; first += most) {
    const int count = part.tokens - first < most ? part.tokens - first : most;
    team.sync();  // all lanes have read the rows before
    decode_by_lanes<Team::lane_count>(s, codec, at, {part.page, part.first + first, count}, rows);
    team.sync();
    attention.attend(team, as_const(rows), count, s.soft_cap, attending);
  }
  team.sync();  // as above
}

/// Merges the parts of a query head of a row, and writes its output: by a warp.
template <class State>
__device__ void merge_head(const State& s, const attention_scratch_memory& scratch, const parts_of_row& of,
                           int parts, int row, int query_head, const attention_output& to) {
  warp_merge<State::head_dim>::merge(
      scratch, of.at(query_head, 0), parts, s.sink_logits == nullptr ? -infinity : s.sink_logits[query_head],
      to, {row, query_head, s.heads.query}, s.value_scale_of(query_head / s.heads.group()));
}

/// A team, or a block whose warps share it, attends with a tile's query heads to one part of a row; the last
/// block of the row and tile merges its parts.
template <multiplies By, class State, class Codec>
__launch_bounds__(attend_block_of<By, State, Codec>::size.threads,
                  attend_block_of<By, State, Codec>::of_multiprocessor) __global__
    void attend_parts(State s, Codec codec, step_view step, step_queries queries, attending_rows rows,
                      attention_scratch_memory scratch, attention_output out) {
  constexpr int d = State::head_dim;
  using element = typename State::element;
  using attention_type = tile_attention<By, d, element>;
  using block_type = attend_block<attention_type, d, element, Codec>;
  using storage = typename block_type::storage;
  constexpr int teams = block_type::teams, at_once = parts_of_block<attention_type, block_type>;
  alignas(16) extern __shared__ std::byte attend_memory[];
  auto* const of_teams = reinterpret_cast<storage*>(attend_memory);
  const typename attention_type::team_type team;
  const auto tile = head_tile<attention_type::heads>::nth(block_y(), s.heads.group());
  const int row = rows.first + block_z(), nth = thread_x() / team.lanes();
  // Queries, and what a step is, have been there since before the kernel that appends.
  const step_entry* const entry = step.entry_of(row);
  const bool attends = entry != nullptr && rows.has(step, entry);
  attention_type attention(of_teams[nth]);
  if (attends) begin_tile<d>(team, attention, tile, queries, row, s.scale_of(tile.kv_head));
  attended_list list;
  int parts = 0;  // of the row
  parts_in_turn turn;
  // Blocks that so many parts take.
  const auto blocks_of = [&](int count) { return turn.blocks((count + at_once - 1) / at_once); };
  const auto entries = [&](int i) {
    const unsigned attending = attending_heads(s, list, i, tile);
    if (attending == 0) return entry_rows<element>{};
    return entry_rows<element>{as_const(attended_slice<Codec>(s, list, i)), list.entries.range(i).tokens,
                               attending};
  };
  const parts_of_row to{std::int64_t{blockIdx.z} * s.heads.query, rows.parts};
  // A head's list and all rows but the step's own have been there as long, unless a correction selects anew:
  // they come ahead, and once more if it has. While it does, what is read is nonsense of no harm: a warp that
  // matches slots writes nothing but slots.
  const bool selects = s.kind == layer_kind::retrieval;
  bool ahead = kernels_overlap && shares_parts<attention_type> && !encodes_pages<Codec> && attends &&
               (!selects || match_storage::has_room(s.max_selected, s.slots.selected));
#pragma unroll 1
  for (;; ahead = false) {
    if (!ahead) wait_for_kernel_before();
    if (!attends) return;
    list = attended_list::of(s, *entry, row, tile.kv_head, rows);
    // A warp's lanes agree, whatever a correction is about to write.
    if constexpr (shares_parts<attention_type>)
      list.entries.selected_count = __shfl_sync(~0u, list.entries.selected_count, 0);
    const int each = entries_of_part(list.entries.complete, s.page.tokens, s.unit.tokens);
    parts = (list.size() + each - 1) / each;
    if constexpr (block_type::takes_turns) turn = parts_in_turn::of(parts, static_cast<int>(gridDim.x));
    const int part = shares_parts<attention_type> ? block_x() << turn.log : block_x() * teams + nth;
    const int begin = part * each, end = min(begin + (each << turn.log), list.size());
    if (ahead) {
      const bool has_new = begin >= end || list.entries.page(end - 1) >= entry->before / s.page.tokens;
      if (__any_sync(~0u, has_new)) continue;
    }
    if (block_x() >= blocks_of(parts)) return;
    if (begin >= end) break;
    if constexpr (encodes_pages<Codec>) {
      constexpr int step = shares_parts<attention_type> ? teams : 1;
      for (int i = begin + (step > 1 ? nth : 0); i < end; i += step) {
        const unsigned attending = attending_heads(s, list, i, tile);
        if (attending != 0 && is_encoded<Codec>(s, list, i))
          attend_encoded<block_type>(team, attention, s, codec, {list.step->sequence, list.head},
                                     list.entries.range(i), of_teams[nth], attending);
        else
          attention.attend_entries(team, i, i + 1, entries, s.soft_cap);
      }
    } else if constexpr (shares_parts<attention_type>) {
      const auto stays = [&] {
        if (!ahead) return true;
        wait_for_kernel_before();
        return !selects || s.corrected[s.head_index(entry->sequence, tile.kv_head)] == 0;
      };
      int left = part;
      const auto leave = [&] {
        store_shared_tile<d>(team, attention, of_teams, tile, scratch, to, left++);
        if (left * each >= end) return;
        __syncthreads();  // all have read what the warps have left
        attention.restart();
      };
      if (!attention.attend_parts(team, {begin, end, each}, entries, s.soft_cap, {nth, teams}, stays, leave))
        continue;
    } else {
      attention.attend_entries(team, begin, end, entries, s.soft_cap);
    }
    if constexpr (!shares_parts<attention_type>)
      store_tile<d>(team, attention, tile, scratch, to, part);
    else if constexpr (encodes_pages<Codec>)
      store_shared_tile<d>(team, attention, of_teams, tile, scratch, to, part);
    break;
  }
  // Attention has no use for its memory any more. The last block of each group of parts merges that, and the
  // last of these the groups.
  using merging = warp_merge<d>;
  auto& blocks_before = *reinterpret_cast<std::uint32_t*>(attend_memory);
  const int group = (block_x() << turn.log) * at_once / merging::group, groups = merging::groups_of(parts);
  std::uint32_t* const counters =
      scratch.blocks_attending +
      (std::int64_t{blockIdx.z} * gridDim.y + blockIdx.y) * (merging::groups_of(rows.parts) + 1);
  static_assert(merging::group % at_once == 0, "a block's parts are of one group");
  const auto for_heads = [&](const auto& call) {
    for (int h = thread_x() / merging::threads; h < attention_type::heads && tile.has(h);
         h += block_type::size.threads / merging::threads)
      call(tile.query_head(h));
  };
  if (groups > 1) {
    const int of_group = min(parts - group * merging::group, merging::group);
    if (!is_last_block(counters + group, blocks_of(of_group), blocks_before)) return;
    for_heads([&](int query_head) {
      merging::merge_group(scratch, to.at(query_head, group * merging::group), of_group);
    });
  }
  if (!is_last_block(counters + merging::groups_of(rows.parts), groups > 1 ? groups : blocks_of(parts),
                     blocks_before))
    return;
  for_heads([&](int query_head) { merge_head(s, scratch, to, parts, row, query_head, out); });
}

/// A warp writes the output of one query head of a prompt's row, whose parts are one by now.
template <class State>
__global__ void finish_prompts(State s, step_view step, attending_rows rows, attention_scratch_memory scratch,
                               attention_output to) {
  const int nth = block_x() / s.heads.query, query_head = block_x() % s.heads.query;
  const int row = rows.first + nth;
  const step_entry* const entry = step.entry_of(row);
  if (entry == nullptr || !rows.has(step, entry)) return;
  merge_head(s, scratch, {std::int64_t{nth} * s.heads.query, rows.parts}, 1, row, query_head, to);
}

/// Attends rows of a step, of which each has at most `parts` parts. `codec`: of the layer's complete pages.
template <multiplies Wanted = multiplies::fma, class State, class Codec>
void launch_attend(const State& s, const Codec& codec, const step_view& step, const step_queries& queries,
                   rows_attending kind, bool everything, int parts, const attention_output& to,
                   const attention_scratch_memory& scratch, cudaStream_t stream) {
  constexpr int d = State::head_dim;
  constexpr multiplies by = multiplies_for<Wanted, d, typename State::element>;
  using attention_type = tile_attention<by, d, typename State::element>;
  using block_type = attend_block<attention_type, d, typename State::element, Codec>;
  constexpr int threads = block_type::size.threads;
  constexpr std::size_t bytes = std::max(attend_block_bytes<block_type>, sizeof(std::uint32_t));
  const int tiles = head_tile<attention_type::heads>::tiles_of(s.heads.group()), heads = s.heads.kv * tiles;
  const int at_once = rows_at_once(scratch, parts, s.heads.query);
  constexpr auto kernel = attend_parts<by, State, Codec>;
  const int part_tokens = tokens_of_part(everything || s.kind == layer_kind::complete);
  for (int first = 0; first < step.bounds.rows; first += at_once) {
    const attending_rows rows{first, std::min(at_once, step.bounds.rows - first), parts, everything, kind};
    int blocks = blocks_for(parts, parts_of_block<attention_type, block_type>);
    if constexpr (block_type::takes_turns)
      blocks = blocks_of_row(parts, part_tokens, std::int64_t{rows.count} * heads,
                             blocks_at_once("attend", kernel, threads, bytes));
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(heads),
                    static_cast<unsigned>(rows.count));
    launch("attend", {grid, threads, stream, bytes, true}, kernel, s, codec, step, queries, rows, scratch,
           to);
  }
}

}  // namespace freekv::device
