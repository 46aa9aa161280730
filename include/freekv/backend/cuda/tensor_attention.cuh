// Attention of up to eight query heads by tensor cores; `register_attention` (lane_attention.cuh) has the
// same members.
#pragma once

#include <cuda_pipeline_primitives.h>

#include <concepts>
#include <cstdint>
#include <cuda/std/bit>
#include <cuda/std/type_traits>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/multiplies.cuh>
#include <freekv/backend/cuda/tensor_core.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::device {

/// Attention of eight query heads so far, with the members of `register_attention`; a warp's threads share
/// the heads. Keys and values are multiplied as they are, and so are queries that are elements, too. Other
/// queries, and weights, are floats in several parts of 2 bytes each, two of F16 or three of BF16, which
/// together have all 24 bits but, of F16, at times the last; those of F16 are brought into its range by
/// powers of two. So a query gives the same bits whatever its type, if keys are finite. Of normally
/// distributed keys and queries the output's error against double precision is then 1.4 to 2.4 * 2^-23, as
/// without tensor cores; a third part of F16 does not lower it, with one part of a query of floats it is 700,
/// with two of BF16 11, with one 5400. Where queries are 6 times as large it is 54 for F16, whose products
/// fill a float, and 16 without tensor cores, 20 and 19 for BF16. Sums are floats, as exact as a tensor core
/// adds; these figures are an interpreter's. An infinite key or value makes NaN of what it takes part in, but
/// a key for queries that are elements.
///
/// fp8_e4m3 comes as it is and is multiplied as F16. The dimensions of its tiles are in the order in which
/// bytes are at hand, which sums do not depend on: where a thread has 2i, 2i + 1, 2i + 8 and 2i + 9 of other
/// keys it has 4i, 4i + 2, 4i + 1 and 4i + 3, and where it has g and g + 8 of other values, 2g and 2g + 1.
///
/// Blocks of tokens come by cp.async, row by row, through a ring in the warp's shared memory, whose rows lie
/// such that eight of them are read at a time without a conflict; alignment is looked at once an entry.
template <int HeadDim, element Element>
class tensor_attention {
  static_assert(sizeof(Element) <= 2, "tensor cores multiply F16, BF16 and fp8_e4m3");
  static_assert(HeadDim % 16 == 0, "tensor cores multiply 16 dimensions at a time");

 public:
  using team_type = lane_team<32, 1>;
  static constexpr int heads = 8;
  static constexpr int tokens_at_once = 16;

 private:
  using multiplied = multiplied_as<Element>;
  static constexpr bool widens = !std::same_as<Element, multiplied>;
  static constexpr float unit = widens ? 0x1p8f : 1.0f;                 // of what is multiplied
  static constexpr int parts = std::same_as<multiplied, half> ? 2 : 3;  // of a float
  static constexpr int tiles = HeadDim / 16;
  // What a weight of 1 is multiplied as: in F16 so much that small weights keep their bits; bfloat16 has a
  // float's range, which sums of its values may fill.
  static constexpr float weight_unit = std::same_as<multiplied, half> ? 0x1p14f : 1.0f;

  static constexpr int of_piece = element_piece<Element>::count;
  static constexpr int pieces = HeadDim / of_piece;            // of a row
  static constexpr int row_pieces = (pieces + 1) / 2 * 2 + 1;  // with room that keeps rows in other banks

  /// A block of tokens: keys, and values behind them.
  struct tile {
    element_piece<Element> rows[2][tokens_at_once][row_pieces];
  };
  /// Longer queries are read from shared memory for each block: registers do not hold them beside the sums.
  static constexpr bool query_in_registers = HeadDim <= 128;
  static constexpr int query_pieces = query_in_registers ? 1 : tiles * parts;

 public:
  static constexpr int warps = HeadDim <= 128 ? 4 : 2;  ///< of a block, which share a part
  static constexpr int row_stride = of_piece * row_pieces;  ///< of rows in shared memory, in elements

 private:
  static constexpr int fitting = (16 << 10) / static_cast<int>(sizeof(tile));  // in what a warp's ring takes
  static constexpr int stages = fitting < 2 ? 2 : fitting < 4 ? fitting : 4;
  struct query_pieces_of_lanes {
    element_pairs piece[query_pieces][32];
  };
  struct nothing {};
  /// An entry that each lane has found, for all of the warp.
  struct entries_of_lanes {
    const Element *key[32], *value[32];
    std::int64_t stride[32];
    int tokens[32];
    unsigned attending[32];
    __device__ void put(int i, const entry_rows<Element>& entry) {
      key[i] = entry.rows.key;
      value[i] = entry.rows.value;
      stride[i] = entry.rows.stride;
      tokens[i] = entry.attending != 0 ? entry.tokens : 0;
      attending[i] = entry.attending;
    }
    __device__ head_slice<const Element> rows(int i) const { return {key[i], value[i], stride[i]}; }
  };

 public:
  /// A warp's shared memory.
  struct alignas(16) storage : cuda::std::conditional_t<query_in_registers, nothing, query_pieces_of_lanes> {
    tile ring[stages];
    entries_of_lanes found;
    int free_tile;  // of the ring, when a part has been attended to
    /// Room for `tokens_at_once` rows of keys, and of values behind them, while nothing is on its way.
    __device__ Element* rows() { return reinterpret_cast<Element*>(ring); }
    /// Room for what head h has attended to in a part, which is where its last tile was. Heads lie such that
    /// threads write to all banks.
    __device__ attention_part part(int h) {
      constexpr int of_head = HeadDim + 4;
      static_assert(sizeof(tile) >= heads * (of_head * sizeof(float) + sizeof(log_sum_exp)));
      float* const numbers = reinterpret_cast<float*>(ring + free_tile);
      return {reinterpret_cast<log_sum_exp*>(numbers + heads * of_head) + h, numbers + h * of_head};
    }
  };
  /// Turn of a warp among `warps`: it has every such block of tokens.
  struct turn {
    int warp = 0, warps = 1;
  };
  /// Entries from `begin` to before `end`, in parts of `each` of them.
  struct entry_parts {
    int begin = 0, end = 0, each = 1;
  };

  __device__ explicit tensor_attention(storage& shared) : shared_(shared) {}

  /// Takes the query of head h from `queries(h)`: typed_numbers, head_dim of them.
  template <class Queries>
  __device__ void begin(team_type team, const Queries& queries, float scale) {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    float factor = 1.0f;
    visit_numbers(queries(nth), [&](const auto* head) {
      using number = cuda::std::remove_cvref_t<decltype(*head)>;
      struct alignas(2 * sizeof(number)) pair {
        number x[2];
      };
      const number* const query = head + (widens ? 4 : 2) * quarter;
      const bool aligned = reinterpret_cast<std::uintptr_t>(query) % sizeof(pair) == 0;
      pair loaded[tiles * 2];  // of neighbouring dimensions, two of each tile
      unroll<tiles * 2>([&](auto i) {
        const number* const at = query + (widens ? i / 2 * 16 + i % 2 * 2 : i * 8);
        loaded[i] = aligned ? *reinterpret_cast<const pair*>(at) : pair{{at[0], at[1]}};
      });
      const auto dealt = [&](int i, int nth) {
        return widens ? loaded[i / 2 * 2 + nth].x[i % 2] : loaded[i].x[nth];
      };
      in_parts_ = !std::same_as<number, multiplied>;
      if constexpr (std::same_as<number, multiplied>) {
        unroll<tiles * 2>(
            [&](auto i) { query_piece(i / 2 * parts).pair[i % 2] = pair_of(dealt(i, 0), dealt(i, 1)); });
      } else {
        float numbers[tiles * 2][2];
        unroll<tiles * 4>([&](auto i) { numbers[i / 2][i % 2] = to_float(dealt(i / 2, i % 2)); });
        if constexpr (std::same_as<multiplied, half>) {  // bfloat16 has a float's range
          float largest = 0.0f;
          unroll<tiles * 4>([&](auto i) { largest = ::fmaxf(largest, ::fabsf(numbers[i / 2][i % 2])); });
          largest = ::fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
          largest = ::fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
          factor = into_range(largest);
        }
        unroll<tiles * 2>([&](auto i) {
          std::uint32_t in_parts[parts];
          split(numbers[i][0] * factor, numbers[i][1] * factor, in_parts);
          unroll<parts>([&](auto part) { query_piece(i / 2 * parts + part).pair[i % 2] = in_parts[part]; });
        });
      }
    });
    unroll<2>([&](auto j) { back_[j] = __shfl_sync(~0u, scale / factor * unit, (2 * quarter + j) * 4); });
    if (team.lane() == 0) shared_.free_tile = 0;
    restart();
  }
  /// Forgets what has been attended to, with the same queries.
  __device__ void restart() {
    unroll<2>([&](auto j) { log_sum_[j] = {}; });
    unroll<tiles * 4>([&](auto i) { weighted_[i / 4][i % 4] = 0.0f; });
  }

  /// Adds the warp's blocks of all parts: `entries(i)` is an `entry_rows`. Each lane is asked for others, so
  /// that what an entry's address hangs on is on its way for many at a time. The loop's code is there once:
  /// what is fetched to be run a few times takes longer than to run it. `stay()` is asked once, when the
  /// first blocks are on their way: false where they are not to be attended to, and then nothing is. Behind
  /// the last block of a part `leave()` is called, by each warp for each part, while the next part's rows are
  /// on their way. Returns what `stay` said.
  template <class Entries, class Stay, class Leave>
  __device__ bool attend_parts(team_type team, const entry_parts& all, const Entries& entries, float soft_cap,
                               const turn& mine, const Stay& stay, const Leave& leave) {
    int next = all.begin, tokens = 0;        // entry behind the one at hand, and the tokens of that
    int first = mine.warp * tokens_at_once;  // of these
    int part_end = min(all.begin + all.each, all.end);
    bool begins = true;  // a part of which there has been no block
    const auto fill = [&](tile& to) {
      waiting_block block;
      for (;;) {
        if (first < tokens) {
          const int at = (next - 1 - all.begin) % 32;
          block = {min(tokens - first, tokens_at_once), shared_.found.attending[at], begins};
          copy_tile(team, to, rows_behind(shared_.found.rows(at), first), block.tokens);
          first += mine.warps * tokens_at_once;
          break;
        }
        if (next < part_end) {
          first -= (tokens + tokens_at_once - 1) / tokens_at_once * tokens_at_once;
          const int nth = (next - all.begin) % 32;
          if (nth == 0) {
            __syncwarp();  // all have read those before
            shared_.found.put(team.lane(), next + team.lane() < all.end ? entries(next + team.lane())
                                                                        : entry_rows<Element>{});
            __syncwarp();
          }
          tokens = shared_.found.tokens[nth];
          ++next;
          continue;
        }
        if (begins && next > all.begin) {  // the warp has nothing of it, and leaves that
          block = {0, 0, true};
          break;
        }
        if (part_end >= all.end) break;
        part_end = min(part_end + all.each, all.end);
        first = mine.warp * tokens_at_once;
        tokens = 0;
        begins = true;
      }
      begins = false;
      __pipeline_commit();
      return block;
    };
    waiting_block waiting[stages];
#pragma unroll 1
    for (int filled = 0;; ++filled) {
      const int nth = filled % stages;
      tile& at = shared_.ring[nth];
      if (filled >= stages) {
        if (filled == stages && !stay()) {
          __pipeline_wait_prior(0);
          __syncwarp();  // the ring is free again
          return false;
        }
        if (waiting[0].tokens < 0) break;
        __pipeline_wait_prior(stages - 1);
        __syncwarp();  // what other lanes have copied is there, too
        if (waiting[0].tokens > 0)
          attend_block(team, block_of(at.rows[0][0], at.rows[1][0], row_pieces * 16, tokens_at_once),
                       waiting[0].tokens, soft_cap, waiting[0].attending);
        __syncwarp();  // all have read it
        if (waiting[1].begins) {
          if (team.lane() == 0) shared_.free_tile = nth;
          leave();
        }
      }
      unroll<stages - 1>([&](auto i) { waiting[i] = waiting[i + 1]; });
      waiting[stages - 1] = fill(at);
    }
    return true;
  }
  /// Adds the warp's blocks of the entries from `begin` to before `end`, as `attend_parts` of one part.
  template <class Entries>
  __device__ void attend_entries(team_type team, int begin, int end, const Entries& entries, float soft_cap,
                                 const turn& mine = {}) {
    attend_parts(
        team, {begin, end, max(end - begin, 1)}, entries, soft_cap, mine, [] { return true; }, [] {});
  }

  /// Adds the first `tokens` rows of a slice in shared memory, whose rows are aligned to 16 bytes.
  __device__ void attend(team_type team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                         unsigned attending = ~0u) {
    for (int first = 0; first < tokens; first += tokens_at_once) {
      const int count = tokens - first < tokens_at_once ? tokens - first : tokens_at_once;
      const auto rows = rows_behind(slice, first);
      attend_block(team,
                   block_of(rows.key, rows.value, static_cast<int>(rows.stride * sizeof(Element)), count),
                   count, soft_cap, attending);
    }
  }

  /// Stores the attention of each head h at `places(h)`, an attention_part; skips heads whose `log_sum` is
  /// null.
  template <class Places>
  __device__ void store(team_type team, const Places& places) const {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    unroll<2>([&](auto j) {
      log_sum_exp log_sum = log_sum_[j];
      log_sum.sum = across_tokens(log_sum.sum, [](float a, float b) { return rounded_sum(a, b); });
      const attention_part to = places(2 * quarter + j);
      if (to.log_sum == nullptr) return;
      if (nth == 0) *to.log_sum = log_sum;
      unroll<tiles * 2>([&](auto i) {
        const int dimension = widens ? i / 2 * 16 + 2 * nth + i % 2 : i * 8 + nth;
        to.weighted[dimension] = weighted_[i / 2][i % 2 * 2 + j] * (unit / weight_unit);
      });
    });
  }

 private:
  /// Tokens that are on their way, -1 behind all; which heads attend to them; and whether a part begins.
  struct waiting_block {
    int tokens = -1;
    unsigned attending = 0;
    bool begins = true;
  };
  /// A block of tokens in shared memory: the lane's addresses of rows, as `load_blocks` takes them, of keys
  /// for 16 tokens by 16 dimensions, and of values.
  struct token_block {
    unsigned keys, values;
  };
  /// Rows from `count` on are the first, whose weights are 0.
  __device__ static token_block block_of(const void* keys, const void* values, int row_bytes, int count) {
    const int lane = thread_x() % 32, row = lane % 8, second = lane / 8 % 2, last = lane / 16;
    const auto at = [&](const void* rows, int t, int piece) {
      return static_cast<unsigned>(__cvta_generic_to_shared(rows)) +
             static_cast<unsigned>((t < count ? t : 0) * row_bytes + piece * 16);
    };
    return {at(keys, row + 8 * second, last), at(values, row + 8 * last, second)};
  }

  storage& shared_;
  element_pairs query_[query_in_registers ? tiles * parts : 1];  // by tile and part
  bool in_parts_;  // else queries are elements, and a tile has one piece
  float back_[2];  // what scores are multiplied by: the scale, and what has brought queries into range
  log_sum_exp log_sum_[2];  // the sums of the thread's own tokens
  float weighted_[tiles][4];

  __device__ element_pairs& query_piece(int i) {
    if constexpr (query_in_registers)
      return query_[i];
    else
      return shared_.piece[i][threadIdx.x % 32];
  }

  /// Copies a block's tokens, zeros for those that it has not: rows side by side, a piece a lane.
  __device__ static void copy_tile(team_type team, tile& to, const head_slice<const Element>& rows,
                                   int count) {
    constexpr int at_a_time = 32 / pieces, turns = (tokens_at_once + at_a_time - 1) / at_a_time;  // rows
    const int piece = team.lane() % pieces, first = team.lane() / pieces;
    const auto copy = [&](const auto& how) {
      unroll<turns>([&](auto turn) {
        const int t = first + at_a_time * turn;
        if ((32 % pieces != 0 || tokens_at_once % at_a_time != 0) &&
            (first >= at_a_time || t >= tokens_at_once))
          return;
        const std::int64_t at = (t < count ? t : 0) * rows.stride + of_piece * piece;
        how(&to.rows[0][t][piece], rows.key + at, t < count);
        how(&to.rows[1][t][piece], rows.value + at, t < count);
      });
    };
    const auto bits = reinterpret_cast<std::uintptr_t>(rows.key) |
                      reinterpret_cast<std::uintptr_t>(rows.value) |
                      static_cast<std::uintptr_t>(rows.stride) * sizeof(Element);
    if (bits % 16 == 0)
      copy(element_piece<Element>::copy_async);
    else
      copy(element_piece<Element>::copy_elements);
  }

  __device__ void attend_block(team_type team, const token_block& block, int count, float soft_cap,
                               unsigned attending) {
    float weights[4];
    if (in_parts_)
      multiply_keys<parts>(block, weights);
    else
      multiply_keys<1>(block, weights);
    weigh(team, count, soft_cap, attending, weights);
    add_values(team, block, attending, weights);
  }

  /// The power of two that brings a number to 2^13 or a little more.
  __device__ static float into_range(float largest) {
    const std::uint32_t exponent = cuda::std::bit_cast<std::uint32_t>(largest) >> 23;
    const std::uint32_t wanted = 127 + 13 + 127 - exponent;
    return cuda::std::bit_cast<float>((wanted < 253 ? wanted : 253) << 23);
  }
  /// Two numbers in parts: each part has what those before it leave.
  __device__ static void split(float a, float b, std::uint32_t (&into)[parts]) {
    unroll<parts>([&](auto part) {
      const multiplied of_a = from_float<multiplied>(a), of_b = from_float<multiplied>(b);
      into[part] = pair_of(of_a, of_b);
      a = rounded_sum(a, -to_float(of_a));
      b = rounded_sum(b, -to_float(of_b));
    });
  }

  /// Calls `body(tile, rows)` for all tiles of a block's keys, or `Transposed` of its values, with `rows` as
  /// `add_product` takes them.
  template <bool Transposed, class Body>
  __device__ static void for_tiles(unsigned address, const Body& body) {
    std::uint32_t rows[4];
    if constexpr (!widens) {
      unroll<tiles>([&](auto tile) {
        load_blocks<Transposed>(rows, address + 32 * tile);
        body(tile, rows);
      });
    } else {
      unroll<(tiles + 1) / 2>([&](auto two) {
        std::uint32_t loaded[4];
        load_blocks<Transposed>(loaded, address + 32 * two);
        unroll<2>([&](auto nth) {
          if constexpr (2 * two + nth < tiles) {
            if constexpr (Transposed) {
              widen(loaded[nth], rows[0], rows[1]);
              widen(loaded[nth + 2], rows[2], rows[3]);
            } else {
              widen(loaded[2 * nth], rows[0], rows[2]);
              widen(loaded[2 * nth + 1], rows[1], rows[3]);
            }
            body(2 * two + nth, rows);
          }
        });
      });
    }
  }

  /// Scores of a block's tokens g and g + 8 with the thread's two heads, as `add_product` deals them, but for
  /// `back_`, by the first `Parts` parts of queries.
  template <int Parts>
  __device__ void multiply_keys(const token_block& block, float (&scores)[4]) {
    // Of the first part in two, so that products do not wait for each other, and of all others.
    float sums[2][4] = {}, rest[4] = {};
    for_tiles<false>(block.keys, [&](int tile, const std::uint32_t(&keys)[4]) {
      unroll<Parts>([&](auto part) {
        add_product<multiplied>(part == 0 ? sums[tile % 2] : rest, keys,
                                query_piece(tile * parts + part).pair);
      });
    });
    unroll<4>([&](auto i) { scores[i] = rounded_sum(rounded_sum(sums[0][i], sums[1][i]), rest[i]); });
  }

  /// Scores to weights, relative to a maximum that may rise with them, which it does seldom: threads look at
  /// each other's scores where one of theirs is larger than all before.
  __device__ void weigh(team_type team, int count, float soft_cap, unsigned attending, float (&scores)[4]) {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    float most[2];
    bool rises = false;
    unroll<2>([&](auto j) {
      most[j] = -infinity;
      unroll<2>([&](auto t) {
        float& score = scores[2 * t + j];
        score *= back_[j];
        const bool counts = nth + 8 * t < count && (attending >> (2 * quarter + j) & 1u) != 0;
        score = !counts ? -infinity : soft_cap > 0.0f ? soft_cap * ::tanhf(score / soft_cap) : score;
        most[j] = scalar_team{}.maximum(score, most[j]);
      });
      rises = rises || !(most[j] <= log_sum_[j].max);
    });
    if (__any_sync(~0u, rises))
      unroll<2>([&](auto j) {
        const float of_all =
            across_tokens(most[j], [](float a, float b) { return scalar_team{}.maximum(a, b); });
        const float factor = of_all <= log_sum_[j].max ? 1.0f : log_sum_[j].raise(of_all);
        unroll<tiles * 2>([&](auto i) { weighted_[i / 2][i % 2 * 2 + j] *= factor; });
      });
    unroll<2>([&](auto j) {
      const bool nothing = log_sum_[j].max == -infinity;  // but -infinity so far
      unroll<2>(
          [&](auto t) { scores[2 * t + j] = nothing ? 0.0f : ::expf(scores[2 * t + j] - log_sum_[j].max); });
      log_sum_[j].sum = rounded_sum(log_sum_[j].sum, rounded_sum(scores[j], scores[2 + j]));
    });
  }
  template <class Combine>
  __device__ static float across_tokens(float x, const Combine& combine) {
    unroll<3>([&](auto i) { x = combine(x, __shfl_xor_sync(~0u, x, 4 << i)); });
    return x;
  }

  /// Adds a block's values, weighted, for the heads that attend.
  __device__ void add_values(team_type team, const token_block& block, unsigned attending,
                             const float (&weights)[4]) {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    std::uint32_t column[parts][2];
    unroll<2>([&](auto t) {
      float of_head[2];  // of tokens 2 * quarter and the next, of head `nth`
      unroll<2>([&](auto i) {
        const int from = (2 * quarter + i) * 4 + nth / 2;
        const float even = __shfl_sync(~0u, weights[2 * t], from);
        const float odd = __shfl_sync(~0u, weights[2 * t + 1], from);
        of_head[i] = (nth % 2 == 0 ? even : odd) * weight_unit;
      });
      std::uint32_t in_parts[parts];
      split(of_head[0], of_head[1], in_parts);
      unroll<parts>([&](auto part) { column[part][t] = in_parts[part]; });
    });
    bool counts[2];
    unroll<2>([&](auto j) {
      counts[j] = log_sum_[j].max != -infinity && (attending >> (2 * quarter + j) & 1u) != 0;
    });
    for_tiles<true>(block.values, [&](int tile, const std::uint32_t(&values)[4]) {
      float(&weighted)[4] = weighted_[tile];
      float sums[4];
      unroll<4>([&](auto x) { sums[x] = weighted[x]; });
      unroll<parts>([&](auto part) { add_product<multiplied>(sums, values, column[part]); });
      unroll<4>([&](auto x) { weighted[x] = counts[x % 2] ? sums[x] : weighted[x]; });
    });
  }
};

}  // namespace freekv::device
