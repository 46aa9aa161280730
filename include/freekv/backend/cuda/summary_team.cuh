// The team that a summary's algorithms run on.
#pragma once

#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/core/hooks.hpp>
#include <type_traits>

namespace freekv::device {

/// True of a summary that states `summarised_by_whole_rows`: its numbers are rows of head_dim, which a team
/// as wide works on, and lie in the store as elements. Not of one with a format of its own, as `stored_as`
/// has.
template <class Summary>
concept summary_of_rows = !hooks_of<Summary>::has(hook::bytes) && requires {
  requires Summary::summarised_by_whole_rows;
};

/// The team on which a summary's algorithms run: whole rows where their numbers are head_dim apart, else the
/// narrowest that every count of numbers is a multiple of.
template <class Summary, int HeadDim>
using summary_team_t = std::conditional_t<summary_of_rows<Summary>, row_team<HeadDim>, lane_team<8, 1>>;

}  // namespace freekv::device
