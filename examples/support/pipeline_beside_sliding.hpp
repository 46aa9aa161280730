// A method whose pipeline has no sliding layers, in a model that has some.
#pragma once

#include <memory>
#include <vector>

#include "pipeline.hpp"

namespace freekv::examples {

/// Two pipelines, each of some of the model's layers: one of the method, of the layers that attend to the
/// whole sequence, and one that keeps the window of those that slide. What a method allots over layers it
/// allots over its own. Bytes are of both.
class pipeline_beside_sliding final : public pipeline {
 public:
  using maker = std::unique_ptr<pipeline> (*)(const pipeline_options&, host_backend&);

  /// `options.sliding_layers` says which layers slide: some, and not all.
  pipeline_beside_sliding(const pipeline_options& options, host_backend& backend, maker make);

  sequence_id open() override;
  sequence_id fork(sequence_id parent) override;
  void truncate(sequence_id id, int tokens) override;
  void preempt(sequence_id id) override;
  void restore(sequence_id id) override;
  void release(sequence_id id) override;
  int tokens(sequence_id id) const override { return method_->tokens(id); }
  std::int32_t free_pages() const override { return method_->free_pages(); }
  bool observes_prompts() const override { return method_->observes_prompts(); }
  bool takes_probes() const override { return method_->takes_probes(); }
  bool cuts_blocks() const override { return method_->cuts_blocks(); }
  int most_prompt_rows() const override { return method_->most_prompt_rows(); }

  void begin_step(std::span<const step_input> rows) override;
  void append(int layer, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries) override;
  void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                     std::span<const float> queries) override;
  void observe(sequence_id id, int layer, std::span<const float> queries) override;
  void select_by(int layer, std::span<const float> queries) override;
  void correct(int layer) override;
  void attend(int layer, std::span<float> out, std::span<float> lse) override;
  void attend_full(int layer, std::span<float> out, std::span<float> lse) override;
  void end_step() override;
  bool abandon_step() override;
  void synchronize() override;

  step_report report(int layer, sequence_id id) const override;
  const memory_bytes& bytes() const override { return bytes_; }
  std::size_t slice_bytes() const override { return method_->slice_bytes(); }
  std::size_t summary_bytes() const override { return method_->summary_bytes(); }

 private:
  struct place {
    pipeline* of;
    int layer;  ///< of that pipeline
  };

  std::unique_ptr<pipeline> method_, sliding_;
  std::vector<place> places_;  ///< by the model's layer
  memory_bytes bytes_;
};

}  // namespace freekv::examples
