// One recorded layer through a method: what it attended to, and how far that is from full attention.
#pragma once

#include <optional>
#include <vector>

#include "layer_setup.hpp"
#include "new_file.hpp"
#include "progress.hpp"
#include "traces.hpp"

namespace freekv::examples {

/// How far outputs are from full attention's, over the query heads of all steps.
struct head_errors {
  /// Of relative L2 errors; of shares of the softmax mass, where keys are as they came or as a codec has
  /// them.
  double sum = 0, most = 0, mass = 0;
  long long heads = 0, not_finite = 0;
};

/// A replayed layer's numbers, summed over steps and heads.
struct layer_result {
  trace_form form;
  head_errors errors;
  /// Of full attention over what the store gives back; none where that is exact, or of a thinned prompt.
  std::optional<head_errors> codec_errors{};
  bool keeps_coded_tokens = false;  ///< so that there is no full attention that masses are shares of
  long long selected = 0, recalled = 0, before_attention = 0, promoted = 0, corrected = 0;
  std::vector<double> seconds, full_seconds;  ///< by step
  std::optional<new_file> written{};          ///< where an output is wanted, to take its place
  std::size_t slice_bytes = 0, summary_bytes = 0, fast_tier_bytes = 0, store_bytes = 0, staging_bytes = 0;
};

/// What serves all layers of a replay.
struct replay_tools {
  host_backend& backend;
  const basis_file& file;
  progress_line& progress;
};

/// Whatever a layer's form says against its replay. Throws choice_error.
void check_layer(const replay_options& options, const replay_job& job, const basis_file& file);

/// Replays a layer and writes its output, where one is wanted, but for taking its place. Throws file_error,
/// choice_error or freekv::error.
layer_result replay_layer(const replay_options& options, const replay_job& job, const replay_tools& tools);

}  // namespace freekv::examples
