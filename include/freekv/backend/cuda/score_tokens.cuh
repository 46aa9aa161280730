// Scores of summaries that estimate each token of a unit: a lane has a token, and codes are decoded in
// registers. What comes out is what `score_unit` gives, to rounding; it decides where a score is not finite.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/rounded_sum.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/key_codes.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/policies/summary.hpp>

namespace freekv::device {

/// Estimates of a summary's tokens for `heads` query heads at a time; none unless specialised: `score_unit`
/// scores.
template <class Summary>
struct token_estimates {
  static constexpr bool there = false;
};

/// Products of a group's queries with coefficients: each query's numbers are side by side in shared memory.
template <int Rank, int Bits>
struct token_estimates<key_subspace<Rank, Bits>> {
  using summary = key_subspace<Rank, Bits>;
  static constexpr bool there = true;
  static constexpr int heads = 4;
  FREEKV_HD static bool decodes(const summary& s) { return s.bits != 32; }
  FREEKV_HD static int floats(const summary& s) { return heads * s.rank; }

  const summary& s;
  kv_extent unit;
  const float* tables;
  float scale;

  /// Estimates of `Units` units of a lane's token; each unit's bytes are `bytes` behind the one before, in
  /// shared memory.
  template <int Units>
  __device__ void estimate(const std::byte* stored, int bytes, int token, float (&of)[Units][heads]) const {
    const int bits = s.bits, step = unit.tokens * bits, rank = s.rank;
    const std::uint32_t mask = (1u << bits) - 1u;
    constexpr std::uint32_t float_2_23 = 0x4b000000u;  // whose lowest bits count ones
    const float zero = 8388608.0f + static_cast<float>((1 << (bits - 1)) - 1);
    unroll<Units * heads>([&](auto i) { of[i / heads][i % heads] = 0.0f; });
    int bit = token * bits;
#pragma unroll 4
    for (int r = 0; r < rank; ++r, bit += step) {
      const float4 query = reinterpret_cast<const float4*>(tables)[r];
      unroll<Units>([&](auto u) {
        const auto* const words = reinterpret_cast<const std::uint32_t*>(stored + u * bytes) + bit / 32;
        const std::uint32_t code = __funnelshift_r(words[0], words[1], static_cast<unsigned>(bit)) & mask;
        const float number = rounded_sum(__uint_as_float(code | float_2_23), -zero);
        of[u][0] = ::fmaf(query.x, number, of[u][0]);
        of[u][1] = ::fmaf(query.y, number, of[u][1]);
        of[u][2] = ::fmaf(query.z, number, of[u][2]);
        of[u][3] = ::fmaf(query.w, number, of[u][3]);
      });
    }
    const int scales = (rank * (unit.tokens / 8) * bits + 3) / 4;
    unroll<Units>([&](auto u) {
      const float of_token = scale * reinterpret_cast<const float*>(stored + u * bytes)[scales + token];
      unroll<heads>([&](auto h) { of[u][h] *= of_token; });
    });
  }
};

/// Look-ups in tables of two queries, side by side in shared memory.
template <int Codes, int MeanCodes>
struct token_estimates<key_codes<Codes, MeanCodes>> {
  using summary = key_codes<Codes, MeanCodes>;
  static constexpr bool there = true;
  static constexpr int heads = 2;
  FREEKV_HD static bool decodes(const summary&) { return true; }
  FREEKV_HD static int floats(const summary& s) { return heads * s.query_width(0); }

  const summary& s;
  kv_extent unit;
  const float* tables;
  float scale;

  template <int Units>
  __device__ void estimate(const std::byte* stored, int bytes, int token, float (&of)[Units][heads]) const {
    static_assert(Units == 4, "a lane for each unit and each of eight codes of its mean");
    constexpr int rows = codebook::centroids_per_code;
    const auto* const table = reinterpret_cast<const float2*>(tables);
    const auto* const codes = reinterpret_cast<const std::uint8_t*>(stored);
    const int lane = thread_x() % 32, mean_codes = s.mean_codes;
    float2 mean{0.0f, 0.0f};
    for (int nth = lane % 8; nth < mean_codes; nth += 8) {
      const float2 found = table[nth * rows + codes[lane / 8 * bytes + nth]];
      mean = {rounded_sum(mean.x, found.x), rounded_sum(mean.y, found.y)};
    }
    for (int other = 4; other > 0; other /= 2)
      mean = {rounded_sum(mean.x, __shfl_xor_sync(~0u, mean.x, other)),
              rounded_sum(mean.y, __shfl_xor_sync(~0u, mean.y, other))};
    unroll<Units>([&](auto u) {
      const auto* const of_token = codes + u * bytes + mean_codes + token;
      const float2* row = table + mean_codes * rows;
      float2 sum{0.0f, 0.0f};
#pragma unroll 6
      for (int nth = 0; nth < s.codes; ++nth, row += rows) {
        const float2 found = row[of_token[nth * unit.tokens]];
        sum = {rounded_sum(sum.x, found.x), rounded_sum(sum.y, found.y)};
      }
      of[u][0] = ::fmaf(scale, sum.x, scale * __shfl_sync(~0u, mean.x, 8 * u));
      of[u][1] = ::fmaf(scale, sum.y, scale * __shfl_sync(~0u, mean.y, 8 * u));
    });
  }
};

/// Units whose bytes a warp has in shared memory at a time, and pieces of 8 bytes that a lane brings of each.
inline constexpr int units_staged = 4, pieces_of_lane = 2;

/// True where a block scores units by tokens.
template <class Summary>
FREEKV_HD bool scores_by_tokens(const Summary& summary, kv_extent unit, std::size_t bytes) {
  if constexpr (token_estimates<Summary>::there)
    return unit.tokens <= 32 && bytes % 8 == 0 && bytes <= 32 * 8 * pieces_of_lane &&
           token_estimates<Summary>::decodes(summary);
  else
    return false;
}
/// Floats of shared memory that scoring by tokens takes: the tables, and for each warp the bytes of some
/// units.
template <class Summary>
FREEKV_HD int floats_by_tokens(const Summary& summary, kv_extent unit, std::size_t bytes, int threads) {
  if constexpr (token_estimates<Summary>::there) {
    if (!scores_by_tokens(summary, unit, bytes)) return 0;
    return (token_estimates<Summary>::floats(summary) + 3) / 4 * 4 +
           threads / 32 * (units_staged * static_cast<int>(bytes) / 4 + 4);
  } else {
    return 0;
  }
}

/// Scores units `first` .. `last`, at most `OfWarp` for each warp of the block, by all its threads: that of
/// unit j and query g to `scores[g * stride + j]`. Unit j's bytes are number `row_of(j)` from `rows` on.
/// Returns whether a score of this thread's is not finite. `shared`: `floats_by_tokens`, aligned to 16 bytes.
template <int OfWarp, class Summary, class RowOf>
__device__ bool score_units_by_tokens(const Summary& summary, kv_extent unit, const std::byte* rows,
                                      int bytes, const RowOf& row_of, int first, int last,
                                      const prepared_queries& queries, float* scores, std::int64_t stride,
                                      float* shared) {
  using estimates = token_estimates<Summary>;
  constexpr lane_team<32, 1> warp{};
  constexpr int heads = estimates::heads, at_once = 32 / heads;
  static_assert(OfWarp <= 32 && OfWarp % at_once == 0 && at_once % units_staged == 0);
  const int thread = thread_x(), lane = thread % 32, threads = threads_x();
  const int floats = estimates::floats(summary), width = floats / heads, pieces = bytes / 8;
  auto* const staged = reinterpret_cast<std::byte*>(shared + (floats + 3) / 4 * 4) +
                       thread / 32 * (units_staged * bytes + 16);  // and what is read behind them
  const int begin = first + thread / 32 * OfWarp;
  const int mine = begin < last ? row_of(min(begin + thread % OfWarp, last - 1)) : 0;
  const int token = min(lane, unit.tokens - 1);
  const bool there = lane < unit.tokens;
  const estimates estimated{summary, unit, shared, queries.scale};
  bool all_finite = true;
#pragma unroll 1
  for (int g = 0; g < queries.group; g += heads) {
    __syncthreads();  // all have read the tables before
    for (int i = thread; i < floats; i += threads)
      shared[i % width * heads + i / width] =
          queries.data[min(g + i / width, queries.group - 1) * queries.width + i % width];
    __syncthreads();
#pragma unroll 1
    for (int batch = 0; batch < OfWarp && begin + batch < last; batch += at_once) {
      lane_pack<1> of_tokens[32];  // of head h and unit u at h * at_once + u
      unroll<at_once / units_staged>([&](auto part) {
        uint2 loaded[units_staged][pieces_of_lane];
        unroll<units_staged>([&](auto u) {
          const std::int64_t row = __shfl_sync(~0u, mine, batch + part * units_staged + u);
          const auto* const from = reinterpret_cast<const uint2*>(rows + row * bytes);
          unroll<pieces_of_lane>([&](auto piece) {
            if (lane + 32 * piece < pieces) loaded[u][piece] = __ldg(from + lane + 32 * piece);
          });
        });
        __syncwarp();  // all have read the units before
        unroll<units_staged * pieces_of_lane>([&](auto i) {
          constexpr int u = i / pieces_of_lane, piece = i % pieces_of_lane;
          if (lane + 32 * piece < pieces)
            reinterpret_cast<uint2*>(staged + u * bytes)[lane + 32 * piece] = loaded[u][piece];
        });
        __syncwarp();
        float of[units_staged][heads];
        estimated.estimate(staged, bytes, token, of);
        unroll<units_staged * heads>([&](auto i) {
          constexpr int u = i / heads, h = i % heads;
          of_tokens[h * at_once + part * units_staged + u].x[0] = there ? of[u][h] : -infinity;
        });
      });
      const float most = warp.max_each(of_tokens).x[0];
      unroll<32>([&](auto i) { of_tokens[i].x[0] = ::expf(of_tokens[i].x[0] - __shfl_sync(~0u, most, i)); });
      const float score = rounded_sum(most, ::logf(warp.sum_each(of_tokens).x[0]));
      const int head = g + lane / at_once, j = begin + batch + lane % at_once;
      if (head < queries.group && j < last) {
        scores[head * stride + j] = score;
        all_finite = all_finite && score * 0.0f == 0.0f;
      }
    }
  }
  return !all_finite;
}

}  // namespace freekv::device
