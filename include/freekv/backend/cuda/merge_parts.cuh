// Parts of rows that have been attended to, and their merge: in order, with all that is summed up in registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/team.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

/// Parts of rows before they are merged. For `rows` rows of `parts` parts.
struct attention_scratch_memory {
  log_sum_exp* mass = nullptr;                // (row, query head, part)
  float* weighted = nullptr;                  // (row, query head, part, head_dim)
  std::uint32_t* blocks_attending = nullptr;  // (row, tile of query heads): those that have left their parts
  std::int64_t parts = 0;  // of all rows and query heads that there is room for, times query heads

  static attention_scratch_memory carve(carver& memory, std::int64_t parts, int head_dim) {
    attention_scratch_memory m;
    m.parts = parts;
    m.mass = memory.take<log_sum_exp>(static_cast<std::size_t>(parts));
    m.weighted = memory.take<float>(static_cast<std::size_t>(parts * head_dim));
    m.blocks_attending = memory.take<std::uint32_t>(static_cast<std::size_t>(parts));
    return m;
  }

  /// Before it is used: what counts, counts from 0, and kernels leave it so.
  void clear(cudaStream_t stream) const {
    check(cudaMemsetAsync(blocks_attending, 0, static_cast<std::size_t>(parts) * sizeof *blocks_attending,
                          stream),
          "cudaMemsetAsync");
  }
};

/// Where the parts of one row are in the scratch, of which `first` query heads of other rows lie before it.
struct parts_of_row {
  std::int64_t first = 0;
  int parts = 1;
  FREEKV_HD constexpr std::int64_t at(int query_head, int part) const {
    return (first + query_head) * parts + part;
  }
};

/// A block of `Threads` that merges the parts of one query head of a row: a warp a run of neighbouring parts, a lane four
/// numbers or eight, then the first warp the runs. The number of parts alone decides which parts are a run.
template <int Threads, int HeadDim>
struct merge_block {
  static_assert(Threads % 32 == 0 && HeadDim % 4 == 0);
  static constexpr int warps = Threads / 32, pieces = HeadDim / 4, share = (pieces + 31) / 32;
  static constexpr int at_once = 8 / share;  // parts whose numbers are in flight
  struct storage {
    float4 weighted[warps][pieces];
    log_sum_exp mass[warps];
  };

  /// Merges `count` parts from `first` on, at least 1, adds a sink logit (-infinity: none), and writes row and head
  /// number `out` of the output. By all threads of the block, which have left `shared`.
  __device__ static void merge(const attention_scratch_memory& scratch, std::int64_t first, int count,
                               float sink_logit, const attention_output& to, std::int64_t out,
                               storage& shared) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int each = (count + warps - 1) / warps, begin = warp * each, end = min(begin + each, count);
    merged all;
    for (int part = begin; part < end; part += 32) all.add(scratch, first + part, min(32, end - part));
    if (warp > 0) {
      all.for_pieces([&](int piece, float4& numbers) { shared.weighted[warp][piece] = numbers; });
      if (threadIdx.x % 32 == 0) shared.mass[warp] = all.mass;
    }
    if (warps > 1) __syncthreads();
    if (warp > 0) return;
    for (int run = 1; run < warps && run * each < count; ++run) {
      const log_sum_exp mass = shared.mass[run];
      if (mass.max == -infinity) continue;
      const float factor = all.reach(mass.max);
      all.mass.sum = ::fmaf(mass.sum, factor, all.mass.sum);
      all.for_pieces(
          [&](int piece, float4& numbers) { numbers = fused(shared.weighted[run][piece], factor, numbers); });
    }
    if (sink_logit != -infinity) {  // NaN counts
      const float factor = all.reach(sink_logit);
      all.mass.sum += factor;
    }
    const bool empty = all.mass.max == -infinity;
    const float scale = empty ? 0.0f : 1.0f / all.mass.sum;
    float* const row = to.out + out * HeadDim;
    const bool aligned = reinterpret_cast<std::uintptr_t>(row) % 16 == 0;
    all.for_pieces([&](int piece, const float4& x) {
      const float4 numbers{x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      float* const at = row + 4 * piece;
      if (aligned)
        *reinterpret_cast<float4*>(at) = numbers;
      else
        at[0] = numbers.x, at[1] = numbers.y, at[2] = numbers.z, at[3] = numbers.w;
    });
    if (to.lse != nullptr && threadIdx.x == 0)
      to.lse[out] = (empty ? -infinity : all.mass.max + ::logf(all.mass.sum)) * to.lse_unit;
  }

 private:
  __device__ static float4 fused(const float4& x, float by, const float4& onto) {
    return {::fmaf(x.x, by, onto.x), ::fmaf(x.y, by, onto.y), ::fmaf(x.z, by, onto.z),
            ::fmaf(x.w, by, onto.w)};
  }

  /// A mass, which all lanes of a warp know, and each lane's share of the weighted sum of values, relative to its maximum.
  struct merged {
    log_sum_exp mass;
    float4 weighted[share]{};

    template <class Body>
    __device__ void for_pieces(const Body& body) {
      unroll<share>([&](auto i) {
        if (const int piece = static_cast<int>(threadIdx.x) % 32 + 32 * i; piece < pieces)
          body(piece, weighted[i]);
      });
    }
    /// Makes `most` the maximum, if it is larger or NaN; returns what is multiplied that is relative to `most`.
    __device__ float reach(float most) {
      if (!(most <= mass.max)) {
        const float by = mass.raise(most);
        unroll<share>([&](auto i) { weighted[i] = fused(weighted[i], by, {}); });
      }
      return ::expf(most - mass.max);
    }
    /// Adds `count` parts from `first` on, at most 32: a lane knows one's mass.
    __device__ void add(const attention_scratch_memory& scratch, std::int64_t first, int count) {
      constexpr unsigned all = ~0u;
      const int lane = static_cast<int>(threadIdx.x) % 32;
      log_sum_exp of_part;
      if (lane < count) of_part = scratch.mass[first + lane];
      float most = of_part.max;
      for (int step = 16; step > 0; step /= 2)
        most = scalar_team{}.maximum(most, __shfl_xor_sync(all, most, step));
      if (most == -infinity) return;
      reach(most);
      // Nothing is added of parts without a mass, whatever their numbers are.
      const float factor = of_part.max == -infinity ? -1.0f : ::expf(of_part.max - mass.max);
      float sum = factor < 0.0f ? 0.0f : of_part.sum * factor;
      for (int step = 16; step > 0; step /= 2) sum = rounded_sum(sum, __shfl_xor_sync(all, sum, step));
      mass.sum = rounded_sum(mass.sum, sum);
      for (int part = 0; part < count; part += at_once) {
        float4 numbers[at_once][share];
        unroll<at_once>([&](auto n) {
          const std::int64_t at = (first + min(part + n, count - 1)) * HeadDim;
          unroll<share>([&](auto i) {
            if (const int piece = lane + 32 * i; piece < pieces)
              numbers[n][i] = reinterpret_cast<const float4*>(scratch.weighted + at)[piece];
          });
        });
        unroll<at_once>([&](auto n) {
          const float by = __shfl_sync(all, factor, part + n);
          if (part + n < count && !(by < 0.0f))
            unroll<share>([&](auto i) { weighted[i] = fused(numbers[n][i], by, weighted[i]); });
        });
      }
    }
  };
};

}  // namespace freekv::device
