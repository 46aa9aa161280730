// FreeKV as a model's attention: what an engine does with a pipeline, layer by layer.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "engine.hpp"
#include "pipeline.hpp"

namespace freekv::examples {

/// What retrieval lost against full attention, and what it moved: sums over steps, and over the layers and
/// heads that they are of. Complete layers, and those that slide, are left out.
struct attention_statistics {
  double error = 0;     ///< relative L2 distance of a query head's output from full attention's
  double mass = 0;      ///< share of full attention's softmax mass on the attended set
  long long heads = 0;  ///< query heads that these are sums over
  long long rows = 0;   ///< KV heads that these are sums over:
  long long corrected = 0;
  long long recalled = 0;                   ///< slices
  long long recalled_before_attention = 0;  ///< those of them that attention waited for
  long long promoted = 0;                   ///< slices
  long long changed = 0;                    ///< pages attended as selected that were not in the step before
  long long followed = 0;                   ///< KV heads that had a step before
  long long attended = 0;                   ///< units as selected; of a method that evicts all its tokens
  long long coded = 0;                      ///< those of them that were coded

  attention_statistics& operator+=(const attention_statistics& more);
  double mean_error() const { return heads > 0 ? error / static_cast<double>(heads) : 0; }
  double mean_mass() const { return heads > 0 ? mass / static_cast<double>(heads) : 0; }
  double corrected_share() const { return share(corrected, rows); }
  double coded_share() const { return share(coded, attended); }
  /// Per KV head and step.
  double mean_attended() const { return share(attended, rows); }
  /// Per KV head and step.
  double pages_changed() const { return share(changed, followed); }

 private:
  static double share(long long part, long long whole) {
    return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0;
  }
};

/// One KV head in one step, against full attention.
struct judged_head {
  float missed = 0;                                       ///< share of full attention, mean over query heads
  float bound = std::numeric_limits<float>::quiet_NaN();  ///< of the selection before its correction, if any
  bool corrected = false;
};

/// Attends with `pipeline`, whose layers are the model's: decode rows.
class retrieval_attention : public attention {
 public:
  /// Of the pipeline's only sequence.
  retrieval_attention(pipeline& pipeline, const model_shape& shape, int complete_layers)
      : retrieval_attention(pipeline, {}, shape, complete_layers) {}
  /// `sequences`: the pipeline's, in the order of the engine's.
  retrieval_attention(pipeline& pipeline, std::vector<sequence_id> sequences, const model_shape& shape,
                      int complete_layers)
      : pipeline_(pipeline),
        sequences_(std::move(sequences)),
        shape_(shape),
        complete_layers_(complete_layers) {
    reset();
  }

  void attend(const layer_rows& rows, float* output) override;
  /// Another step's sequences, in the order of the engine's. Nothing is compared over such steps.
  void serve(std::vector<sequence_id> sequences) { sequences_ = std::move(sequences); }

  /// From now on every layer also computes full attention and compares, which costs as much as full
  /// attention.
  void compare_with_full(bool compare) { compare_ = compare; }

  /// From now on heads are corrected and select by the queries of the layer before, in the same step.
  void select_by_layer_before(bool select) { by_layer_before_ = select; }

  /// By layer and KV head, (layers, kv_heads).
  const std::vector<attention_statistics>& by_head() const { return by_head_; }
  /// The KV heads of all steps that were compared, of the pipeline's only sequence.
  const std::vector<judged_head>& judged() const { return judged_; }
  /// Of the last step that was compared: full attention's log-sum-exp less that of what was attended to, the
  /// mean over query heads.
  double lse_lost() const { return lse_heads_ > 0 ? lse_lost_ / static_cast<double>(lse_heads_) : 0; }
  /// Spent in append and attend since the last reset.
  double seconds() const { return seconds_; }
  void reset();

 private:
  void begin_step(const layer_rows& rows);
  void gather(const layer_rows& rows, const float* output);
  void judge(const step_report& report);
  void gather(const step_report& report, int layer, std::size_t sequence);

  pipeline& pipeline_;
  std::vector<sequence_id> sequences_;  // none: the pipeline's only one
  model_shape shape_;
  int complete_layers_;
  bool compare_ = false, by_layer_before_ = false;
  std::vector<float> queries_before_;  // the layer before's, where heads select by them
  std::vector<float> lse_, full_, full_lse_;
  std::vector<attention_statistics> by_head_;
  std::vector<judged_head> judged_;
  std::vector<step_input> step_;
  std::vector<std::vector<std::int32_t>>
      attended_;  // by sequence, layer and KV head, ascending, in its last step
  double seconds_ = 0;
  double lse_lost_ = 0;  // a sum over so many query heads
  long long lse_heads_ = 0;
};

}  // namespace freekv::examples
