// What a method needs to replay a layer: its basis or codebooks, what its heads keep, its pipeline's options.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "basis.hpp"
#include "codebooks.hpp"
#include "options.hpp"
#include "pipeline.hpp"
#include "rotation.hpp"
#include "trace.hpp"

namespace freekv::examples {

/// What a method needs of the file of --basis; nothing where it is learnt from the prompt.
struct basis_file {
  std::optional<key_basis> basis;
  std::optional<codebook_set> codebooks;
};

/// Throws file_error.
basis_file basis_file_of(const replay_options& options);

/// The options of a layer: with what the file of --by-layer says of it, where there is one. Throws
/// choice_error or file_error.
replay_options options_of_layer(const replay_options& o, const trace_form& t);

/// On the host's `backend`, or on a device, as the options say. Throws choice_error or freekv::error.
std::unique_ptr<pipeline> replayed_pipeline(const replay_options& o, const pipeline_options& of_layer,
                                            host_backend& backend);

/// One layer's, by its trace. What comes from a file is `file`'s, which outlives this.
class layer_setup {
 public:
  /// Throws choice_error or file_error.
  layer_setup(const replay_options& o, const trace_form& t, const basis_file& file);
  layer_setup(const layer_setup&) = delete;
  layer_setup& operator=(const layer_setup&) = delete;

  /// Finds how the trace's keys are rotated, where the method asks for it, or checks what was said by the
  /// trace's k_pre; before `options`. Throws choice_error.
  void take_rotation(const trace& t);
  /// Learns from the trace's prompt what no file gives; pipelines see it, those made before too.
  void learn(const trace& t);
  /// All but the lengths and numbers of sequences. Their basis is this object's.
  const pipeline_options& options() const { return options_; }

 private:
  void take_basis(const replay_options& o, const trace_form& t, const basis_file& file);
  void take_factors(const replay_options& o, const trace_form& t);
  void take_channels(const replay_options& o, const trace_form& t);
  void take_codebooks(const replay_options& o, const trace_form& t, const basis_file& file);

  std::optional<key_basis> basis_;
  rotary_pairs pairs_ = rotary_pairs::halves;  // that a basis of pairs has
  std::optional<codebook_set> codebooks_;
  std::vector<float> temperatures_;
  std::vector<std::uint8_t> channels_;
  std::optional<key_basis> factors_;
  rotation rotation_;
  pipeline_options options_;
};

}  // namespace freekv::examples
