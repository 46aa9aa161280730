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
#include <freekv/core/element.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::device {

/// `Words` pairs of neighbouring 2-byte elements.
template <int Words>
struct alignas(4 * Words) element_pairs {
  std::uint32_t pair[Words];

  /// The pairs at `row`, which is aligned to their size; zeros if not `there`, where `row` may be any
  /// readable row.
  template <class Element>
  __device__ static element_pairs load(const Element* row, bool there) {
    element_pairs loaded = *reinterpret_cast<const element_pairs*>(row);
    unroll<Words>([&](auto i) { loaded.pair[i] = there ? loaded.pair[i] : 0u; });
    return loaded;
  }
  /// Copies the pairs at `row` to `here`, in shared memory, by cp.async; zeros if not `there`.
  template <class Element>
  __device__ static void copy_async(element_pairs* here, const Element* row, bool there) {
    constexpr int bytes = 4 * Words;
    const auto to = static_cast<unsigned>(__cvta_generic_to_shared(here));
    if constexpr (bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(row), "r"(there ? bytes : 0)
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(row), "n"(bytes),
                   "r"(there ? bytes : 0)
                   : "memory");
  }
  /// Copies the pairs at `row`, of any alignment, with plain loads; zeros if not `there`.
  template <class Element>
  __device__ static void copy_elements(element_pairs* here, const Element* row, bool there) {
    const auto* const bits = reinterpret_cast<const std::uint16_t*>(row);
    unroll<Words>(
        [&](auto i) { here->pair[i] = there ? bits[2 * i] | std::uint32_t{bits[2 * i + 1]} << 16 : 0u; });
  }
};

__device__ inline std::uint32_t pair_of(half a, half b) {
  return __half_as_ushort(a) | std::uint32_t{__half_as_ushort(b)} << 16;
}
__device__ inline std::uint32_t pair_of(bfloat16 a, bfloat16 b) {
  return __bfloat16_as_ushort(a) | std::uint32_t{__bfloat16_as_ushort(b)} << 16;
}

/// A warp's product of 16 rows with 8 columns of 16 elements each, which is added to `sums`. With g = lane /
/// 4 and i = lane % 4 a thread has of rows g and g + 8 elements 2i, 2i + 1 in `rows[0]` and `rows[1]` and 2i
/// + 8, 2i + 9 in `rows[2]` and `rows[3]`, of column g the same elements, and sums of row g, columns 2i and
/// 2i + 1, then of row g + 8.
template <element Element>
__device__ void add_product(float (&sums)[4], const std::uint32_t (&rows)[4],
                            const std::uint32_t (&column)[2]) {
  if constexpr (std::same_as<Element, half>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(column[0]), "r"(column[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(column[0]), "r"(column[1]));
}

/// Attention of eight query heads so far, with the members of `register_attention`; a warp's threads share
/// the heads. Keys and values are multiplied as they are. Queries and weights are floats in several parts of
/// 2 bytes each, two of F16 or three of BF16, which together have all 24 bits but, of F16, at times the last;
/// they are brought into F16's range by powers of two. Of normally distributed keys and queries the output's
/// error against double precision is then 1.4 to 2.4 * 2^-23, as without tensor cores; a third part of F16
/// does not lower it, with one part it is 700, with two of BF16 11, with one 5400. Where queries are 6 times
/// as large it is 54 for F16, whose products fill a float, and 16 without tensor cores, 20 and 19 for BF16.
/// Sums are floats, as exact as a tensor core adds; these figures are an interpreter's. An infinite key or
/// value makes NaN of what it takes part in.
///
/// Dimensions are dealt to threads so that each loads neighbouring ones, up to 16 bytes at a time. Blocks of
/// tokens come by cp.async through a ring in the warp's shared memory, in which each thread has the places
/// that it reads, so that threads wait for their own copies alone; alignment is looked at once an entry.
template <int HeadDim, element Element>
class tensor_attention {
  static_assert(sizeof(Element) == 2, "tensor cores multiply F16 and BF16");
  static_assert(HeadDim % 16 == 0, "tensor cores multiply 16 dimensions at a time");

 public:
  using team_type = lane_team<32, 1>;
  static constexpr int heads = 8;
  static constexpr int tokens_at_once = 16;

 private:
  static constexpr int parts = std::same_as<Element, half> ? 2 : 3;  // of a float
  static constexpr int tiles = HeadDim / 16;
  static constexpr int key_run =
      4 * largest_share(tiles, 2);  // neighbouring dimensions that a thread multiplies
  static constexpr int key_runs = HeadDim / 4 / key_run;
  static constexpr int value_pairs = largest_share(tiles, 4);  // neighbouring pairs that a thread adds up
  static constexpr float weight_unit = 0x1p14f;                // what a weight of 1 is multiplied as

  /// A block of tokens, by the thread that multiplies it: keys of token `lane / 4`, then of that and 8.
  struct tile {
    element_pairs<key_run / 2> key[2 * key_runs][32];
    element_pairs<value_pairs> value[4 * tiles / value_pairs][32];
  };
  static_assert(sizeof(tile) == 2 * tokens_at_once * HeadDim * sizeof(Element));
  /// Longer queries are read from shared memory for each block: registers do not hold them beside the sums.
  static constexpr bool query_in_registers = HeadDim <= 128;
  static constexpr int query_pieces = query_in_registers ? 1 : tiles * parts;

 public:
  static constexpr int warps = HeadDim <= 128 ? 4 : 2;  ///< of a block, which share a part

 private:
  static constexpr int fitting = (16 << 10) / static_cast<int>(sizeof(tile));  // in what a warp's ring takes
  static constexpr int stages = fitting < 2 ? 2 : fitting < 4 ? fitting : 4;
  struct query_pieces_of_lanes {
    element_pairs<2> piece[query_pieces][32];
  };
  struct nothing {};

 public:
  /// A warp's shared memory.
  struct alignas(16) storage : cuda::std::conditional_t<query_in_registers, nothing, query_pieces_of_lanes> {
    tile ring[stages];
    /// Room for `tokens_at_once` rows of keys, and of values behind them, while nothing is on its way.
    __device__ Element* rows() { return reinterpret_cast<Element*>(ring); }
    /// Room for what head h has attended to, when nothing comes any more.
    __device__ attention_part part(int h) {
      static_assert(sizeof ring >= heads * (HeadDim * sizeof(float) + sizeof(log_sum_exp)));
      float* const numbers = reinterpret_cast<float*>(ring);
      return {reinterpret_cast<log_sum_exp*>(numbers + heads * HeadDim) + h, numbers + h * HeadDim};
    }
  };
  /// Which blocks of tokens a warp has: one of `warps`, in turn.
  struct turn {
    int warp = 0, warps = 1;
  };

  __device__ explicit tensor_attention(storage& shared) : shared_(shared) {}

  /// Takes the query of head h from `queries(h)`: typed_numbers, head_dim of them.
  template <class Queries>
  __device__ void begin(team_type team, const Queries& queries, float scale) {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    float numbers[key_runs][key_run], largest = 0.0f;
    visit_numbers(queries(nth), [&](const auto* head) {
      using number = cuda::std::remove_cvref_t<decltype(*head)>;
      struct alignas(4 * sizeof(number)) four {
        number x[4];
      };
      const number* const query = head + quarter * key_run;
      if (reinterpret_cast<std::uintptr_t>(query) % sizeof(four) == 0)
        unroll<key_runs * key_run / 4>([&](auto i) {
          constexpr int run = i * 4 / key_run, at = i * 4 % key_run;
          const four read = *reinterpret_cast<const four*>(query + run * 4 * key_run + at);
          unroll<4>([&](auto n) { numbers[run][at + n] = to_float(read.x[n]); });
        });
      else
        unroll<key_runs * key_run>([&](auto i) {
          numbers[i / key_run][i % key_run] = to_float(query[i / key_run * 4 * key_run + i % key_run]);
        });
    });
    unroll<key_runs * key_run>([&](auto i) {
      float& number = numbers[i / key_run][i % key_run];
      number *= scale;
      largest = ::fmaxf(largest, ::fabsf(number));
    });
    largest = ::fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = ::fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float factor = into_range(largest);
    unroll<key_runs * key_run / 2>([&](auto i) {
      const float* const two = numbers[i / (key_run / 2)] + i % (key_run / 2) * 2;
      std::uint32_t in_parts[parts];
      split(two[0] * factor, two[1] * factor, in_parts);
      unroll<parts>([&](auto part) { query_piece(i / 2 * parts + part).pair[i % 2] = in_parts[part]; });
    });
    unroll<2>([&](auto j) {
      back_[j] = __shfl_sync(~0u, 1.0f / factor, (2 * quarter + j) * 4);
      log_sum_[j] = {};
    });
    unroll<tiles * 4>([&](auto i) { weighted_[i / 4][i % 4] = 0.0f; });
  }

  /// Adds the warp's blocks of the entries from `begin` to before `end`: `entries(i)` is an `entry_rows`.
  /// Each lane is asked for others, so that what an entry's address hangs on is on its way for many at a
  /// time. The loop's code is there once: what is fetched to be run a few times takes longer than to run it.
  template <class Entries>
  __device__ void attend_entries(team_type team, int begin, int end, const Entries& entries, float soft_cap,
                                 const turn& mine = {}) {
    entry_rows<Element> found, now;
    int next = begin, first = mine.warp * tokens_at_once;  // entry behind `now`, token of `now`
    const auto fill = [&](tile& to) {
      while (first >= now.tokens && next < end) {
        first -= (now.tokens + tokens_at_once - 1) / tokens_at_once * tokens_at_once;
        const int nth = (next - begin) % 32;
        if (nth == 0) found = next + team.lane() < end ? entries(next + team.lane()) : entry_rows<Element>{};
        now = found.of_lane(nth);
        if (now.attending == 0) now.tokens = 0;
        ++next;
      }
      waiting_block block;
      if (first < now.tokens) {
        block = {min(now.tokens - first, tokens_at_once), now.attending};
        copy_tile(team, to, rows_behind(now.rows, first), block.tokens);
        first += mine.warps * tokens_at_once;
      }
      __pipeline_commit();
      return block;
    };
    waiting_block waiting[stages];
    int stage = 0, filled = 0;
#pragma unroll 1
    for (;;) {
      tile& at = shared_.ring[stage];
      if (filled >= stages) {
        if (waiting[0].tokens == 0) break;
        __pipeline_wait_prior(stages - 1);
        attend_block(team, of_tile{at, team.lane()}, waiting[0].tokens, soft_cap, waiting[0].attending);
      }
      unroll<stages - 1>([&](auto i) { waiting[i] = waiting[i + 1]; });
      waiting[stages - 1] = fill(at);
      ++filled;
      stage = stage + 1 < stages ? stage + 1 : 0;
    }
  }

  /// Adds the first `tokens` rows of a slice in shared memory, whose rows are aligned to 16 bytes.
  __device__ void attend(team_type team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                         unsigned attending = ~0u) {
    for (int first = 0; first < tokens; first += tokens_at_once) {
      const int count = tokens - first < tokens_at_once ? tokens - first : tokens_at_once;
      attend_block(team, of_rows{rows_behind(slice, first), count, team.lane() / 4, team.lane() % 4}, count,
                   soft_cap, attending);
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
      constexpr int at_once = value_pairs < 2 ? 2 : 4;  // numbers, of 2 * value_pairs that are neighbours
      struct alignas(4 * at_once) piece {
        float x[at_once];
      };
      unroll<tiles * 2 / at_once>([&](auto i) {
        constexpr int run = i * at_once / (2 * value_pairs), behind = i * at_once % (2 * value_pairs);
        piece numbers;
        unroll<at_once>([&](auto n) {
          constexpr int of_run = behind + n;
          numbers.x[n] = weighted_[run * value_pairs + of_run / 2][of_run % 2 * 2 + j] * (1.0f / weight_unit);
        });
        *reinterpret_cast<piece*>(to.weighted + (run * 8 + nth) * 2 * value_pairs + behind) = numbers;
      });
    });
  }

 private:
  /// Tokens that are on their way, and which heads attend to them.
  struct waiting_block {
    int tokens = 0;
    unsigned attending = 0;
  };
  /// A block of tokens in the ring.
  struct of_tile {
    const tile& from;
    int lane;
    __device__ auto key(int run, int half_of_block) const {
      return from.key[half_of_block * key_runs + run][lane];
    }
    __device__ auto value(int run, int t) const { return from.value[run * 4 + t][lane]; }
  };
  /// A block of tokens whose rows are in shared memory.
  struct of_rows {
    head_slice<const Element> rows;
    int count, nth, quarter;
    __device__ auto key(int run, int half_of_block) const {
      const int t = nth + 8 * half_of_block;
      return element_pairs<key_run / 2>::load(
          rows.key + (t < count ? t : 0) * rows.stride + quarter * key_run + run * 4 * key_run, t < count);
    }
    __device__ auto value(int run, int n) const {
      const int t = 2 * quarter + n / 2 * 8 + n % 2;
      return element_pairs<value_pairs>::load(
          rows.value + (t < count ? t : 0) * rows.stride + nth * 2 * value_pairs + run * 16 * value_pairs,
          t < count);
    }
  };

  storage& shared_;
  element_pairs<2> query_[query_in_registers ? tiles * parts : 1];  // by tile and part
  float back_[2];  // what scores are multiplied by, as queries have been brought into range
  log_sum_exp log_sum_[2];  // the sums of the thread's own tokens
  float weighted_[tiles][4];

  __device__ element_pairs<2>& query_piece(int i) {
    if constexpr (query_in_registers)
      return query_[i];
    else
      return shared_.piece[i][threadIdx.x % 32];
  }

  /// Copies a block's tokens to where this thread reads them, zeros for those that it has not.
  __device__ static void copy_tile(team_type team, tile& to, const head_slice<const Element>& rows,
                                   int count) {
    const int lane = team.lane(), nth = lane / 4, quarter = lane % 4;
    const auto copy = [&](const auto& how) {
      unroll<2>([&](auto half_of_block) {
        const int t = nth + 8 * half_of_block;
        const Element* const key = rows.key + (t < count ? t : 0) * rows.stride + quarter * key_run;
        unroll<key_runs>([&](auto run) {
          how(&to.key[half_of_block * key_runs + run][lane], key + run * 4 * key_run, t < count);
        });
      });
      unroll<4>([&](auto n) {
        const int t = 2 * quarter + n / 2 * 8 + n % 2;
        const Element* const value = rows.value + (t < count ? t : 0) * rows.stride + nth * 2 * value_pairs;
        unroll<tiles / value_pairs>(
            [&](auto run) { how(&to.value[run * 4 + n][lane], value + run * 16 * value_pairs, t < count); });
      });
    };
    const auto bits = reinterpret_cast<std::uintptr_t>(rows.key) |
                      reinterpret_cast<std::uintptr_t>(rows.value) |
                      static_cast<std::uintptr_t>(rows.stride) * sizeof(Element);
    if (bits % 16 == 0)
      copy([]<int Words>(element_pairs<Words>* here, const Element* row, bool there) {
        element_pairs<Words>::copy_async(here, row, there);
      });
    else
      copy([]<int Words>(element_pairs<Words>* here, const Element* row, bool there) {
        element_pairs<Words>::copy_elements(here, row, there);
      });
  }

  template <class Block>
  __device__ void attend_block(team_type team, const Block& block, int count, float soft_cap,
                               unsigned attending) {
    float weights[4];
    multiply_keys(block, weights);
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
      const Element of_a = from_float<Element>(a), of_b = from_float<Element>(b);
      into[part] = pair_of(of_a, of_b);
      a = rounded_sum(a, -to_float(of_a));
      b = rounded_sum(b, -to_float(of_b));
    });
  }

  /// Scores of a block's tokens g and g + 8 with the thread's two heads, as `add_product` deals them.
  template <class Block>
  __device__ void multiply_keys(const Block& block, float (&scores)[4]) {
    float sums[parts][4] = {};  // by part, so that products do not wait for each other
    unroll<key_runs>([&](auto run) {
      const auto low = block.key(run, 0), high = block.key(run, 1);
      unroll<key_run / 4>([&](auto i) {
        const std::uint32_t both[4] = {low.pair[2 * i], high.pair[2 * i], low.pair[2 * i + 1],
                                       high.pair[2 * i + 1]};
        unroll<parts>([&](auto part) {
          const element_pairs<2> query = query_piece((run * (key_run / 4) + i) * parts + part);
          add_product<Element>(sums[part], both, query.pair);
        });
      });
    });
    unroll<4>([&](auto i) {
      scores[i] = sums[parts - 1][i];
      unroll<parts - 1>([&](auto part) { scores[i] = rounded_sum(sums[parts - 2 - part][i], scores[i]); });
    });
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
  template <class Block>
  __device__ void add_values(team_type team, const Block& block, unsigned attending,
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
    unroll<tiles / value_pairs>([&](auto run) {
      element_pairs<value_pairs> of_token[4];
      unroll<4>([&](auto n) { of_token[n] = block.value(run, n); });
      unroll<value_pairs>([&](auto i) {
        constexpr unsigned first_of_two = 0x5410, second_of_two = 0x7632;
        const auto two = [&](int t, unsigned which) {
          return __byte_perm(of_token[t].pair[i], of_token[t + 1].pair[i], which);
        };
        const std::uint32_t dimensions[4] = {two(0, first_of_two), two(0, second_of_two),
                                             two(2, first_of_two), two(2, second_of_two)};
        float(&weighted)[4] = weighted_[run * value_pairs + i];
        float sums[4];
        unroll<4>([&](auto x) { sums[x] = weighted[x]; });
        unroll<parts>([&](auto part) { add_product<Element>(sums, dimensions, column[part]); });
        unroll<4>([&](auto x) { weighted[x] = counts[x % 2] ? sums[x] : weighted[x]; });
      });
    });
  }
};

}  // namespace freekv::device
