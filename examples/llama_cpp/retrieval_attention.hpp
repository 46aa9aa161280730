// FreeKV as a model's attention: what an engine does with a pipeline, layer by layer.
#pragma once

#include <vector>

#include "engine.hpp"
#include "pipeline.hpp"

namespace freekv::examples {

/// What retrieval lost against full attention, and what it moved: sums over steps, layers and heads, complete
/// layers left out.
struct attention_statistics {
  double error = 0;     ///< relative L2 distance of a query head's output from full attention's
  double mass = 0;      ///< share of full attention's softmax mass on the attended set
  long long heads = 0;  ///< query heads that these are sums over
  long long rows = 0;   ///< KV heads that these are sums over:
  long long corrected = 0;
  long long recalled = 0;  ///< slices
  long long promoted = 0;  ///< slices
};

/// Attends with `pipeline`, whose layers are the model's: one sequence, one decode row at a time.
class retrieval_attention : public attention {
 public:
  retrieval_attention(pipeline& pipeline, const model_shape& shape, int complete_layers)
      : pipeline_(pipeline), shape_(shape), complete_layers_(complete_layers) {}

  void attend(const layer_rows& rows, float* output) override;

  /// From now on every layer also computes full attention and compares, which costs as much as full
  /// attention.
  void compare_with_full(bool compare) { compare_ = compare; }

  const attention_statistics& statistics() const { return statistics_; }
  /// Spent in append and attend since the last reset.
  double seconds() const { return seconds_; }
  void reset() {
    statistics_ = {};
    seconds_ = 0;
  }

 private:
  void gather(const layer_rows& rows, const float* output);

  pipeline& pipeline_;
  model_shape shape_;
  int complete_layers_;
  bool compare_ = false;
  std::vector<float> lse_, full_, full_lse_;
  attention_statistics statistics_;
  double seconds_ = 0;
};

}  // namespace freekv::examples
