// What layers have of their own where a budget is not the same for all: a list that programs read, and how a
// budget is shared out.
#pragma once

#include <filesystem>
#include <istream>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace freekv::examples {

/// A layer's own values; none: those that all layers have.
struct layer_values {
  std::optional<int> selected_tokens{};  ///< that a KV head selects, besides sink and window
  std::optional<float> tau{};            ///< of cosine_drift
  std::optional<float> delta{};          ///< of mass_deficit
};

/// Values of all layers, (layers). A line of the file is `layer tokens tau delta`, `-` where the layer has
/// none of its own; layers that are not listed have none. `#` starts a comment. Throws file_error, which
/// names the line.
std::vector<layer_values> read_layer_list(const std::filesystem::path& path, int layers);
/// The same from a stream; `name` stands in messages.
std::vector<layer_values> read_layer_list(std::istream& in, const std::string& name, int layers);

/// Units for each layer, `total` together and each from `least` to `most`. `losses[layer][n]` is what the
/// layer loses with n units, n from 0 to `most`. A unit goes where it saves most, on the lower convex
/// envelope of each layer's losses; ties to the lower layer. A larger total takes none from any layer. Throws
/// std::invalid_argument where the total is out of reach, or losses are too short.
std::vector<int> share_units(std::span<const std::vector<double>> losses, int total, int least, int most);

/// Half of the way from `even` units for each layer to `units`, which are as many together: what was learnt
/// from one text is not all true of another. Of layers between two numbers the first half takes the larger.
std::vector<int> halfway(std::vector<int> units, int even);

}  // namespace freekv::examples
