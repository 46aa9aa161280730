// Sequences that join, branch, roll back, wait and leave, out of recorded layers.
#pragma once

#include <nlohmann/json.hpp>

#include "layer_setup.hpp"

namespace freekv::examples {

/// Replays the file of --events, writes its output, where one is wanted, and returns what is printed. Throws file_error,
/// choice_error or freekv::error; then nothing is written.
nlohmann::ordered_json replay_events(const replay_options& options, host_backend& backend);

}  // namespace freekv::examples
