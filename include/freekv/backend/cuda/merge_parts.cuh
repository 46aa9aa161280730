// Parts of rows that have been attended to, and their merge: in order, with all that is summed up in registers.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/team.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::device {

/// Parts of rows before they are merged. For `rows` rows of `parts` parts.
struct attention_scratch_memory {
  log_sum_exp* mass = nullptr;  // (row, query head, part)
  float* weighted = nullptr;    // (row, query head, part, head_dim)
  std::int64_t parts = 0;       // of all rows and query heads that there is room for, times query heads

  static attention_scratch_memory carve(carver& memory, std::int64_t parts, int head_dim) {
    attention_scratch_memory m;
    m.parts = parts;
    m.mass = memory.take<log_sum_exp>(static_cast<std::size_t>(parts));
    m.weighted = memory.take<float>(static_cast<std::size_t>(parts * head_dim));
    return m;
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

/// A block of `Threads` that merges the parts of one query head of a row: teams of threads, four numbers a thread, merge
/// runs of neighbouring parts, then one team merges the runs. The number of parts alone decides which parts are a run.
template <int Threads, int HeadDim>
struct merge_block {
  static_assert(HeadDim % 4 == 0 && HeadDim / 4 <= Threads);
  static constexpr int lanes = HeadDim / 4, at_once = 8;
  static constexpr int teams = Threads / lanes < 8 ? Threads / lanes : 8;
  struct storage {
    float4 weighted[teams][lanes];
    log_sum_exp mass[teams];
  };

  /// A mass and a thread's share of the weighted sum of values, relative to its maximum.
  struct merged {
    log_sum_exp mass;
    float4 weighted{};

    __device__ void scale(float by) {
      weighted = {weighted.x * by, weighted.y * by, weighted.z * by, weighted.w * by};
    }
    /// Makes `most` the maximum, if it is larger or NaN.
    __device__ void reach(float most) {
      if (!(most <= mass.max)) scale(mass.raise(most));
    }
    /// Adds what lies behind, of a maximum that has been reached.
    __device__ void add(const log_sum_exp& of, const float4& numbers) {
      if (of.max == -infinity) return;  // nothing, whatever the numbers
      const float factor = ::expf(of.max - mass.max);
      mass.sum = rounded_sum(mass.sum, of.sum * factor);
      // As `merge_parts` adds, which prompts are merged by.
      weighted = {rounded_sum(weighted.x, numbers.x * factor), rounded_sum(weighted.y, numbers.y * factor),
                  rounded_sum(weighted.z, numbers.z * factor), rounded_sum(weighted.w, numbers.w * factor)};
    }
  };

  /// Merges `count` parts from `first` on, at least 1, adds a sink logit (-infinity: none), and writes row and head
  /// number `out` of the output. By all threads of the block.
  __device__ static void merge(const attention_scratch_memory& scratch, std::int64_t first, int count,
                               float sink_logit, const attention_output& to, std::int64_t out,
                               storage& shared) {
    const int team = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
    const int each = (count + teams - 1) / teams, begin = team * each, end = min(begin + each, count);
    merged all;
    if (team < teams) {
      for (int part = begin; part < end; part += at_once) {
        log_sum_exp mass[at_once];
        float4 numbers[at_once];
        unroll<at_once>([&](auto i) {
          const std::int64_t at = first + min(part + i, end - 1);
          mass[i] = scratch.mass[at];
          numbers[i] = reinterpret_cast<const float4*>(scratch.weighted + at * HeadDim)[lane];
        });
        float most = -infinity;
        unroll<at_once>([&](auto i) {
          if (part + i >= end) mass[i].max = -infinity;
          most = scalar_team{}.maximum(most, mass[i].max);
        });
        all.reach(most);
        unroll<at_once>([&](auto i) { all.add(mass[i], numbers[i]); });
      }
      shared.weighted[team][lane] = all.weighted;
      if (lane == 0) shared.mass[team] = all.mass;
    }
    __syncthreads();
    if (team > 0) return;
    for (int run = 1; run * each < count; ++run) {
      const log_sum_exp mass = shared.mass[run];
      all.reach(mass.max);
      all.add(mass, shared.weighted[run][lane]);
    }
    all.reach(sink_logit);
    all.add({sink_logit, 1.0f}, {});
    const bool empty = all.mass.max == -infinity;
    all.scale(empty ? 0.0f : 1.0f / all.mass.sum);
    float* const numbers = to.out + out * HeadDim + 4 * lane;
    if (reinterpret_cast<std::uintptr_t>(numbers) % 16 == 0)
      *reinterpret_cast<float4*>(numbers) = all.weighted;
    else
      numbers[0] = all.weighted.x, numbers[1] = all.weighted.y, numbers[2] = all.weighted.z,
      numbers[3] = all.weighted.w;
    if (to.lse != nullptr && lane == 0)
      to.lse[out] = (empty ? -infinity : all.mass.max + ::logf(all.mass.sum)) * to.lse_unit;
  }
};

}  // namespace freekv::device
