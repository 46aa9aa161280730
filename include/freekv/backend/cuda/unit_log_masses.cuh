// The log-mass of each unit that a row attends to, beside attention, where it is asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/attend_tokens.hpp>
#include <freekv/backend/cuda/attend.cuh>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/unroll.hpp>
#include <freekv/pipeline/layer_state.hpp>

namespace freekv::device {

struct unit_log_masses_tuning {
  int threads = attend_default.threads;  ///< of a block
  int registers = 128;                   ///< of a thread at most
  constexpr bool valid() const { return valid_block(threads, registers); }
};
inline constexpr unit_log_masses_tuning unit_log_masses_default{};
static_assert(unit_log_masses_default.valid());

/// A team adds up the scores of one entry of a row's list for a tile's query heads.
template <class State, class Codec>
__global__ void unit_log_masses(State s, Codec codec, step_view step, step_queries queries,
                                attending_rows rows, log_mass_output to) {
  constexpr int d = State::head_dim;
  using element = typename State::element;
  using attention_type = register_log_sums<d, attend_default.heads, row_team<d>>;
  using block_type = attend_block<attention_type, d, element, Codec>;
  __shared__ typename block_type::storage shared[block_type::teams];
  const typename attention_type::team_type team;
  const auto tile = head_tile<attention_type::heads>::nth(block_y(), s.heads.group());
  const int i = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / team.lanes());
  const int row = rows.first + block_z();
  const step_entry* const entry = step.entry_of(row);
  if (entry == nullptr || i >= to.entries) return;
  const auto list = attended_list::of(s, *entry, row, tile.kv_head, rows);

  attention_type attention;
  if (const unsigned attending = i < list.size() ? attending_heads(s, list, i, tile) : 0u; attending != 0) {
    begin_tile<d>(team, attention, tile, queries, row, s.scale_of(tile.kv_head));
    if (is_encoded<Codec>(s, list, i))
      attend_encoded<block_type>(team, attention, s, codec, {list.step->sequence, list.head},
                                 list.entries.range(i), shared[thread_x() / team.lanes()], attending);
    else
      attention.attend(team, as_const(attended_slice<Codec>(s, list, i)), list.entries.range(i).tokens,
                       s.soft_cap, attending);
  }
  unroll<attention_type::heads>([&](auto h) {
    if (tile.has(h) && team.lane() == 0)
      to.log_masses[(std::int64_t{row} * s.heads.query + tile.query_head(h)) * to.entries + i] =
          attention.log_sum[h].value() * to.per_nat;
  });
}

/// Writes the log-masses of a step's rows, whose lists have at most `to.entries` entries.
template <class State, class Codec>
void launch_unit_log_masses(const State& s, const Codec& codec, const step_view& step,
                            const step_queries& queries, const log_mass_output& to, cudaStream_t stream) {
  using block_type =
      attend_block<register_log_sums<State::head_dim, attend_default.heads, row_team<State::head_dim>>,
                   State::head_dim, typename State::element, Codec>;
  constexpr int threads = block_type::size.threads, most_in_z = 65535;
  const int tiles = head_tile<attend_default.heads>::tiles_of(s.heads.group());
  for (int first = 0; first < step.bounds.rows; first += most_in_z) {
    const attending_rows rows{first, std::min(most_in_z, step.bounds.rows - first)};
    const dim3 grid(static_cast<unsigned>(blocks_for(std::int64_t{to.entries} * block_type::lanes, threads)),
                    static_cast<unsigned>(s.heads.kv * tiles), static_cast<unsigned>(rows.count));
    launch("log-masses of units", {grid, threads, stream}, unit_log_masses<State, Codec>, s, codec, step,
           queries, rows, to);
  }
}

}  // namespace freekv::device
