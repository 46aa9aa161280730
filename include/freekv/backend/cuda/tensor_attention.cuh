// Attention of up to eight query heads by tensor cores, with what `register_attention` offers.
#pragma once

#include <cstdint>
#include <cuda/std/bit>
#include <cuda/std/type_traits>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/functors/attend_slice.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::device {

/// What multiplies queries by keys, and weights by values. Which is faster has not been timed.
enum class multiplies : std::uint8_t {
  fma,           ///< `attend_default.heads` query heads at a time, of any element and head_dim
  tensor_cores,  ///< eight at a time; F16 and BF16, head_dim a multiple of 16, best with pages that are, too
};

/// `Words` pairs of neighbouring 2-byte elements.
template <int Words>
struct alignas(4 * Words) element_pairs {
  std::uint32_t pair[Words];

  /// Those at `row`, of any alignment; zeros where there is no row.
  template <class Element>
  __device__ static element_pairs load(const Element* row, bool there) {
    element_pairs loaded{};
    if (!there) return loaded;
    if (reinterpret_cast<std::uintptr_t>(row) % sizeof(element_pairs) == 0)
      return *reinterpret_cast<const element_pairs*>(row);
    const auto* const bits = reinterpret_cast<const std::uint16_t*>(row);
    unroll<Words>([&](auto i) { loaded.pair[i] = bits[2 * i] | std::uint32_t{bits[2 * i + 1]} << 16; });
    return loaded;
  }
};

__device__ inline std::uint32_t pair_of(half a, half b) {
  return __half_as_ushort(a) | std::uint32_t{__half_as_ushort(b)} << 16;
}
__device__ inline std::uint32_t pair_of(bfloat16 a, bfloat16 b) {
  return __bfloat16_as_ushort(a) | std::uint32_t{__bfloat16_as_ushort(b)} << 16;
}

/// A warp's product of 16 rows with 8 columns of 16 elements each, which is added to `sums`. With g = lane / 4 and
/// i = lane % 4 a thread has of rows g and g + 8 elements 2i, 2i + 1 in `rows[0]` and `rows[1]` and 2i + 8, 2i + 9
/// in `rows[2]` and `rows[3]`, of column g the same elements, and sums of row g, columns 2i and 2i + 1, then of
/// row g + 8.
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

/// What eight query heads have attended so far, as `register_attention` has it; a warp's threads share the heads.
/// Keys and values are multiplied as they are. Queries and weights are floats in several parts of 2 bytes each,
/// two of F16 or three of BF16, which together have all 24 bits but, of F16, at times the last; they are brought
/// into F16's range by powers of two. Of normally distributed keys and queries the output's error against double
/// precision is then 1.4 to 2.4 * 2^-23, as without tensor cores; a third part of F16 does not lower it, with one
/// part it is 700, with two of BF16 11, with one 5400. Where queries are 6 times as large it is 54 for F16, whose
/// products fill a float, and 16 without tensor cores, 20 and 19 for BF16. Sums are floats, as exact as a tensor
/// core adds; these figures are an interpreter's. An infinite key or value makes NaN of what it takes part in.
///
/// Dimensions are dealt to threads so that each loads neighbouring ones, up to 16 bytes at a time.
template <int HeadDim, element Element>
class tensor_attention {
  static_assert(sizeof(Element) == 2, "tensor cores multiply F16 and BF16");
  static_assert(HeadDim % 16 == 0, "tensor cores multiply 16 dimensions at a time");

 public:
  using team_type = lane_team<32, 1>;
  static constexpr int heads = 8;
  static constexpr int tokens_at_once = 16;

  /// Takes the query of head h from `queries(h)` (head_dim).
  template <class Queries>
  __device__ void begin(team_type team, const Queries& queries, float scale) {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    const float* const query = queries(nth) + quarter * key_run;
    float numbers[key_runs][key_run], largest = 0.0f;
    unroll<key_runs * key_run>([&](auto i) {
      const float number = query[i / key_run * 4 * key_run + i % key_run] * scale;
      numbers[i / key_run][i % key_run] = number;
      largest = ::fmaxf(largest, ::fabsf(number));
    });
    largest = ::fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = ::fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    const float factor = into_range(largest);
    unroll<key_runs * key_run / 2>([&](auto i) {
      const float* const two = numbers[i / (key_run / 2)] + i % (key_run / 2) * 2;
      std::uint32_t in_parts[parts];
      split(two[0] * factor, two[1] * factor, in_parts);
      unroll<parts>([&](auto part) { query_[i / 2][part][i % 2] = in_parts[part]; });
    });
    unroll<2>([&](auto j) {
      back_[j] = __shfl_sync(~0u, 1.0f / factor, (2 * quarter + j) * 4);
      mass_[j] = {};
    });
    unroll<tiles * 4>([&](auto i) { weighted_[i / 4][i % 4] = 0.0f; });
  }

  /// As `register_attention` attends.
  __device__ void attend(team_type team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                         unsigned attending = ~0u) {
    for (int first = 0; first < tokens; first += tokens_at_once) {
      const head_slice<const Element> rows = rows_behind(slice, first);
      const int count = tokens - first < tokens_at_once ? tokens - first : tokens_at_once;
      float weights[4];
      multiply_keys(team, rows, count, weights);
      weigh(team, count, soft_cap, attending, weights);
      add_values(team, rows, count, attending, weights);
    }
  }

  /// Leaves what each head h has attended to at `places(h)`, if that is anywhere.
  template <class Places>
  __device__ void store(team_type team, const Places& places) const {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    unroll<2>([&](auto j) {
      const attention_part to = places(2 * quarter + j);
      if (to.mass == nullptr) return;
      if (nth == 0) *to.mass = mass_[j];
      unroll<tiles * 2>([&](auto i) {
        constexpr int tile = i / 2, of_run = tile % value_pairs * 2 + i % 2;
        to.weighted[(tile / value_pairs * 8 + nth) * 2 * value_pairs + of_run] =
            weighted_[tile][i % 2 * 2 + j] * (1.0f / weight_unit);
      });
    });
  }

 private:
  static constexpr int parts = std::same_as<Element, half> ? 2 : 3;  // of a float
  static constexpr int tiles = HeadDim / 16;
  static constexpr int key_run =
      4 * largest_share(tiles, 2);  // neighbouring dimensions that a thread multiplies
  static constexpr int key_runs = HeadDim / 4 / key_run;
  static constexpr int value_pairs = largest_share(tiles, 4);  // neighbouring pairs that a thread adds up
  static constexpr float weight_unit = 0x1p14f;                // what a weight of 1 is multiplied as

  std::uint32_t query_[tiles][parts][2];
  float back_[2];  // what scores are multiplied by, as queries have been brought into range
  log_sum_exp mass_[2];
  float weighted_[tiles][4];

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
      a -= to_float(of_a);
      b -= to_float(of_b);
    });
  }

  /// Scores of a block's tokens g and g + 8 with the thread's two heads, as `add_product` deals them.
  __device__ void multiply_keys(team_type team, const head_slice<const Element>& rows, int count,
                                float (&scores)[4]) const {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    float rest[4];
    unroll<4>([&](auto i) { scores[i] = rest[i] = 0.0f; });
    const Element* const key = rows.key + nth * rows.stride + quarter * key_run;
    unroll<key_runs>([&](auto run) {
      using pairs = element_pairs<key_run / 2>;
      const pairs low = pairs::load(key + run * 4 * key_run, nth < count);
      const pairs high = pairs::load(key + 8 * rows.stride + run * 4 * key_run, nth + 8 < count);
      unroll<key_run / 4>([&](auto i) {
        const std::uint32_t both[4] = {low.pair[2 * i], high.pair[2 * i], low.pair[2 * i + 1],
                                       high.pair[2 * i + 1]};
        unroll<parts>([&](auto part) {
          add_product<Element>(part == 0 ? scores : rest, both, query_[run * (key_run / 4) + i][part]);
        });
      });
    });
    unroll<4>([&](auto i) { scores[i] += rest[i]; });
  }

  /// Scores to weights, relative to a maximum that may rise with them.
  __device__ void weigh(team_type team, int count, float soft_cap, unsigned attending, float (&scores)[4]) {
    const int nth = team.lane() / 4, quarter = team.lane() % 4;
    unroll<2>([&](auto j) {
      float most = -infinity;
      unroll<2>([&](auto t) {
        float& score = scores[2 * t + j];
        score *= back_[j];
        const bool counts = nth + 8 * t < count && (attending >> (2 * quarter + j) & 1u) != 0;
        score = !counts ? -infinity : soft_cap > 0.0f ? soft_cap * ::tanhf(score / soft_cap) : score;
        most = scalar_team{}.maximum(score, most);
      });
      most = across_tokens(most, [](float a, float b) { return scalar_team{}.maximum(a, b); });
      log_sum_exp& mass = mass_[j];
      const float factor = most <= mass.max ? 1.0f : mass.raise(most);
      unroll<tiles * 2>([&](auto i) { weighted_[i / 2][i % 2 * 2 + j] *= factor; });
      const bool nothing = mass.max == -infinity;  // but -infinity so far
      unroll<2>([&](auto t) { scores[2 * t + j] = nothing ? 0.0f : ::expf(scores[2 * t + j] - mass.max); });
      mass.sum += across_tokens(scores[j] + scores[2 + j], [](float a, float b) { return a + b; });
    });
  }
  template <class Combine>
  __device__ static float across_tokens(float x, const Combine& combine) {
    unroll<3>([&](auto i) { x = combine(x, __shfl_xor_sync(~0u, x, 4 << i)); });
    return x;
  }

  /// Adds a block's values, weighted, for the heads that attend.
  __device__ void add_values(team_type team, const head_slice<const Element>& rows, int count,
                             unsigned attending, const float (&weights)[4]) {
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
    unroll<2>(
        [&](auto j) { counts[j] = mass_[j].max != -infinity && (attending >> (2 * quarter + j) & 1u) != 0; });
    const Element* const value = rows.value + 2 * quarter * rows.stride + nth * 2 * value_pairs;
    unroll<tiles / value_pairs>([&](auto run) {
      using pairs = element_pairs<value_pairs>;
      pairs of_token[4];
      unroll<4>([&](auto t) {
        constexpr int behind = t / 2 * 8 + t % 2;
        of_token[t] =
            pairs::load(value + behind * rows.stride + run * 16 * value_pairs, 2 * quarter + behind < count);
      });
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
