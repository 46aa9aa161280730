// Sequences that join, branch, roll back, wait and leave, out of recorded layers.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>

#include "layer_setup.hpp"
#include "new_file.hpp"

namespace freekv::examples {

/// What is printed, and where an output is wanted, that, to take its place.
struct replayed_events {
  nlohmann::ordered_json summary;
  std::optional<new_file> written;
};

/// Replays the file of --events. Throws file_error, choice_error or freekv::error; then nothing is written.
replayed_events replay_events(const replay_options& options, host_backend& backend);

}  // namespace freekv::examples
