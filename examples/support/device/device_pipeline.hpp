// Pipelines on a device behind the programs' interface: rows and outputs in the host's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "choices.hpp"
#include "pipeline.hpp"

namespace freekv::examples {

/// What is compiled for devices: of `policy_shape` any summary, any codec or any of the other policies, with
/// all else as published; of each other shape what is published. Layouts, unit, plan and route are chosen in
/// all of them.
struct device_shape {
  data_type element;
  int head_dim;
};
inline constexpr device_shape policy_shape{data_type::f16, 64};
inline constexpr device_shape device_shapes[] = {
    {data_type::bf16, 128}, {data_type::f32, 80}, {data_type::f16, 256}};

/// The policies that are compiled for devices, by kind; the table of them in docs/policies.md is made from
/// these.
namespace for_devices {
using page = page_size<dynamic>;
using unit = freekv::unit<dynamic>;
using layouts = any_layouts;
using plan = any_plan;
using route = any_route;
using summary = device_summary_list::any;
using pooling = pooling_list::any;
using selection = device_selection_list::any;
using pinning = pinning_list::any;
using rows = scope_list::any;
using correction = device_correction_list::any;
using residency = residency_list::any;
using codec = codec_list::any;
}  // namespace for_devices

/// What these pipelines have besides; `dynamic_cast` finds it.
class device_controls {
 public:
  virtual ~device_controls() = default;
  /// Launches are sized for at least so many sequences, rows of all and pages of one, for decode rows,
  /// prompts of as many tokens as these pages have, and pages that are shared, whatever a step brings.
  virtual void size_launches_for(int sequences, int rows, int pages) = 0;
  /// Captures a step of so many sequences and rows of all, for `replay_step`.
  virtual void capture_step(int sequences, int rows) = 0;
  /// A captured step in place of begin_step, the layers' calls and end_step: rows and outputs lie in memory
  /// as theirs, layer after layer. `plan_step` waits where it must; then comes one `replay_step`, which waits
  /// for its outputs.
  virtual void plan_step(std::span<const step_input> rows) = 0;
  virtual void replay_step(std::span<const float> keys, std::span<const float> values,
                           std::span<const float> queries, std::span<float> out, std::span<float> lse) = 0;
  /// Heads that are flagged in the last step, of all its sequences.
  virtual int flagged_heads(int layer) const = 0;
};

/// Whether a device can be used; else why not.
bool device_is_there(std::string& why);

/// The pipeline on the device in use, with streams and memory of its own. Throws choice_error where there is
/// no device or it is not among what is compiled, or freekv::error.
std::unique_ptr<pipeline> make_device_pipeline(const pipeline_options& options);

// Those that it chooses from:
/// Of the shapes, as published.
std::unique_ptr<pipeline> make_device_shapes(const pipeline_options& options);
/// Of `policy_shape`, with any pooling, selection, pinning, rows, correction or residency.
std::unique_ptr<pipeline> make_device_policies(const pipeline_options& options);
/// Of `policy_shape`, with any summary.
std::unique_ptr<pipeline> make_device_summaries(const pipeline_options& options);
/// Of `policy_shape`, with any codec.
std::unique_ptr<pipeline> make_device_codecs(const pipeline_options& options);

}  // namespace freekv::examples
