// What a replay prints.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "replay_layer.hpp"

namespace freekv::examples {

/// One trace's object: settings, and what the replay found. Numbers that have no value, such as a rate over
/// no steps, are null.
nlohmann::ordered_json summary_of(const replay_options& options, const host_options& host,
                                  const layer_result& result);

/// A folder's object: the settings that all layers share, an object for each layer, the mean over layers and
/// the worst layer's number.
nlohmann::ordered_json summary_of(const replay_options& options, const host_options& host,
                                  const std::vector<replay_job>& jobs,
                                  const std::vector<layer_result>& results);

}  // namespace freekv::examples
