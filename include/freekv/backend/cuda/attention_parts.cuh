// Parts of rows that have been attended to, and their merge: in order, with all that is summed up in
// registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <cuda/std/type_traits>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/team.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

/// Parts of rows before they are merged. For `rows` rows of `parts` parts.
struct attention_scratch_memory {
  log_sum_exp* log_sum = nullptr;             // (row, query head, part)
  float* weighted = nullptr;                  // (row, query head, part, head_dim)
  std::uint32_t* blocks_attending =
      nullptr;             // (row, tile of query heads, group of parts): those that are done
  std::int64_t parts = 0;  // of all rows and query heads that there is room for, times query heads

  static attention_scratch_memory carve(carver& memory, std::int64_t parts, int head_dim) {
    attention_scratch_memory m;
    m.parts = parts;
    m.log_sum = memory.take<log_sum_exp>(to_size(parts));
    m.weighted = memory.take<float>(to_size(parts * head_dim));
    m.blocks_attending = memory.take<std::uint32_t>(to_size(parts));
    return m;
  }

  /// Sets the counters to 0, before the scratch is used; kernels leave them at 0.
  void clear(cudaStream_t stream) const {
    check(cudaMemsetAsync(blocks_attending, 0, to_size(parts) * sizeof *blocks_attending, stream),
          "cudaMemsetAsync");
  }
};

/// Places of one row's parts in the scratch, behind those of `first` query heads of other rows.
struct parts_of_row {
  std::int64_t first = 0;
  int parts = 1;
  FREEKV_HD constexpr std::int64_t at(int query_head, int part) const {
    return (first + query_head) * parts + part;
  }
};

/// A query head of a row of the output, of which a row has so many.
struct head_of_row {
  std::int64_t row;
  int head, heads;
};

/// A warp that merges the parts of one query head of a row, up to 32 relative to their largest maximum; a
/// lane has four numbers or eight.
template <int HeadDim>
class warp_merge {
  static_assert(HeadDim % 4 == 0);
  static constexpr int pieces = HeadDim / 4, share = (pieces + 31) / 32;
  static constexpr int at_once = 16 / share;  // parts whose numbers are in flight
  static constexpr unsigned all = ~0u;

 public:
  static constexpr int threads = 32;
  static constexpr int group = 64;  // parts
  FREEKV_HD static constexpr int groups_of(int parts) { return (parts + group - 1) / group; }

  /// Merges a group of `count` parts to the place of its first, which is part `first`. By all threads of a
  /// warp, as `merge`.
  __device__ static void merge_group(const attention_scratch_memory& scratch, std::int64_t first, int count) {
    warp_merge merged;
    merged.add_all(scratch, first, count, 1);
    __syncwarp();  // all have read what is there
    if (lane() == 0) scratch.log_sum[first] = merged.log_sum_;
    merged.write(scratch.weighted + first * HeadDim);
  }
  /// Merges `count` parts from `first` on, at least 1, of which groups are merged if there are several, adds
  /// a sink logit (-infinity: none), and writes the output of `out`, times `value_scale`. By all threads of a
  /// warp.
  __device__ static void merge(const attention_scratch_memory& scratch, std::int64_t first, int count,
                               float sink_logit, const attention_output& to, const head_of_row& out,
                               float value_scale = 1.0f) {
    warp_merge merged;
    const int groups = groups_of(count);
    merged.add_all(scratch, first, groups > 1 ? groups : count, groups > 1 ? group : 1);
    if (sink_logit != -infinity) {  // NaN counts
      if (!(sink_logit <= merged.log_sum_.max)) merged.scale(merged.log_sum_.raise(sink_logit));
      merged.log_sum_.sum = rounded_sum(merged.log_sum_.sum, ::expf(sink_logit - merged.log_sum_.max));
    }
    const bool empty = merged.log_sum_.max == -infinity;
    merged.scale(empty ? 0.0f : 1.0f / merged.log_sum_.sum);
    if (value_scale != 1.0f) merged.scale(value_scale);
    const std::int64_t stride = to.stride == 0 ? std::int64_t{out.heads} * HeadDim : to.stride;
    visit_numbers(typed_numbers{to.out, to.type}, [&](const auto* numbers) {
      using number = cuda::std::remove_cvref_t<decltype(*numbers)>;
      merged.write(const_cast<number*>(numbers) + out.row * stride + std::int64_t{out.head} * HeadDim);
    });
    if (to.lse != nullptr && lane() == 0)
      to.lse[out.row * out.heads + out.head] =
          (empty ? -infinity : merged.log_sum_.max + ::logf(merged.log_sum_.sum)) * to.lse_per_nat;
  }

 private:
  __device__ static int lane() { return thread_x() % 32; }
  template <class Number>
  __device__ void write(Number* to) const {
    struct alignas(4 * sizeof(Number)) four {
      Number x[4];
    };
    const bool aligned = reinterpret_cast<std::uintptr_t>(to) % sizeof(four) == 0;
    unroll<share>([&](auto i) {
      const int piece = lane() + 32 * i;
      if (piece >= pieces) return;
      const float4& w = weighted_[i];
      const four x{{from_float<Number>(w.x), from_float<Number>(w.y), from_float<Number>(w.z),
                    from_float<Number>(w.w)}};
      if (aligned)
        reinterpret_cast<four*>(to)[piece] = x;
      else
        unroll<4>([&](auto n) { to[4 * piece + n] = x.x[n]; });
    });
  }
  __device__ void scale(float by) {
    unroll<share>([&](auto i) {
      float4& x = weighted_[i];
      x = {x.x * by, x.y * by, x.z * by, x.w * by};
    });
  }
  /// Adds `count` parts, each `step` behind the one before.
  __device__ void add_all(const attention_scratch_memory& scratch, std::int64_t first, int count, int step) {
#pragma unroll 1
    for (int part = 0; part < count; part += 32)
      add(scratch, first + std::int64_t{part} * step, min(32, count - part), step);
    for (int half = 16; half > 0; half /= 2)
      log_sum_.sum = rounded_sum(log_sum_.sum, __shfl_xor_sync(all, log_sum_.sum, half));
  }
  /// Parts, at most 32, of which a lane knows one: adds them.
  __device__ void add(const attention_scratch_memory& scratch, std::int64_t first, int count, int step) {
    float4 numbers[at_once][share];
    const auto load = [&](int part) {
      unroll<at_once>([&](auto n) {
        const std::int64_t at = (first + std::int64_t{min(part + n, count - 1)} * step) * HeadDim;
        unroll<share>([&](auto i) {
          if (const int piece = lane() + 32 * i; piece < pieces)
            numbers[n][i] = reinterpret_cast<const float4*>(scratch.weighted + at)[piece];
        });
      });
    };
    load(0);  // on its way together with the log-sum-exps
    log_sum_exp of_part;
    if (lane() < count) of_part = scratch.log_sum[first + std::int64_t{lane()} * step];
    float most = of_part.max;
    for (int half = 16; half > 0; half /= 2)
      most = scalar_team{}.maximum(most, __shfl_xor_sync(all, most, half));
    if (!(most <= log_sum_.max)) scale(log_sum_.raise(most));
    // Nothing is added of parts whose log-sum-exp is -infinity, whatever their numbers are.
    const bool is_present = of_part.max != -infinity;
    const unsigned present = __ballot_sync(all, is_present);
    const float factor = is_present ? ::expf(of_part.max - log_sum_.max) : 0.0f;
    log_sum_.sum = ::fmaf(of_part.sum, factor, log_sum_.sum);
#pragma unroll 1
    for (int part = 0; part < count; part += at_once) {
      if (part > 0) load(part);
      unroll<at_once>([&](auto n) {
        const float by = __shfl_sync(all, factor, (part + n) % 32);
        if (part + n >= count || (present >> (part + n) & 1u) == 0) return;
        unroll<share>([&](auto i) {
          const float4 &w = weighted_[i], &x = numbers[n][i];
          weighted_[i] = {::fmaf(x.x, by, w.x), ::fmaf(x.y, by, w.y), ::fmaf(x.z, by, w.z),
                          ::fmaf(x.w, by, w.w)};
        });
      });
    }
  }

  log_sum_exp log_sum_;  // whose maximum all lanes know, while each has a share of the sum
  float4 weighted_[share]{};
};

}  // namespace freekv::device
