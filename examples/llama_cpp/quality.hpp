// Teacher-forced decoding of a text after a prompt, on the resident route, compared with full attention.
#pragma once

#include <vector>

#include "contender.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

struct quality {
  std::vector<double> losses;        ///< -ln p of the next token, by step
  std::vector<llama_token> choices;  ///< most likely next token, by step
  attention_statistics attention;    ///< of all layers and heads
  std::vector<attention_statistics> by_head;
  std::size_t fast_tier_bytes =
      0;  ///< slots, summaries, complete layers, and the summaries' basis or codebooks
  std::size_t slice_bytes = 0;
  std::size_t summary_bytes = 0;

  double mean_loss() const;
  double perplexity() const;
  /// A sum over all layers and heads, per step.
  double per_step(long long sum) const;
};

/// `text`: the tokens decoded, and one more to predict. `what` is being done, for `progress`.
quality measure_quality(const contender& c, const common_settings& s, const model& model,
                        const prepared_prompt& prompt, std::span<const llama_token> text,
                        const std::string& what, const progress_function& progress);

}  // namespace freekv::examples
