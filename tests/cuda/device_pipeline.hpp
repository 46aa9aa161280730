// Pipelines on a device behind the programs' interface: rows and outputs in the host's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "pipeline.hpp"

namespace tests {

/// Whether a device can be used; else why not.
bool device_is_there(std::string& why);

/// What device pipelines are compiled for: of each shape the published policies, and of `policy_shape` others.
struct device_shape {
  freekv::examples::data_type element;
  int head_dim;
};
inline constexpr device_shape policy_shape{freekv::examples::data_type::f16, 64};
std::vector<device_shape> device_shapes();

using device_pipeline = std::unique_ptr<freekv::examples::pipeline>;

/// With streams and memory of its own, of the published policies but for layout, unit, plan and route, which `options`
/// chooses. Throws freekv::error.
device_pipeline make_device_pipeline(const freekv::examples::pipeline_options& options);
/// The same of `policy_shape`, with any pooling, selection, correction or residency that devices have.
device_pipeline make_device_policies(const freekv::examples::pipeline_options& options);
/// And with any summary.
device_pipeline make_device_summaries(const freekv::examples::pipeline_options& options);

}  // namespace tests
