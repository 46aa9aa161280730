// Teacher-forced decoding of a text after a prompt, compared with full attention.
#pragma once

#include <freekv/core/size.hpp>
#include <span>
#include <string>
#include <vector>

#include "contender.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

/// Full attention's logits at every step of a text, (steps, vocabulary): 4 bytes a number.
struct full_logits {
  std::vector<float> rows;
  std::span<const float> row(int step, std::size_t vocabulary) const {
    return std::span(rows).subspan(to_size(step) * vocabulary, vocabulary);
  }
};

struct quality {
  std::vector<double> losses;  ///< -ln p of the next token, by step
  std::vector<double>
      divergences;  ///< of the next token's distribution from full attention's, by step, in nats
  std::vector<llama_token> choices;  ///< most likely next token, by step
  attention_statistics attention;    ///< of all layers and heads
  std::vector<attention_statistics> by_head;
  std::size_t fast_tier_bytes =
      0;  ///< slots, summaries, complete layers, and the summaries' basis or codebooks
  std::size_t slice_bytes = 0;
  std::size_t summary_bytes = 0;

  double mean_loss() const;
  double perplexity() const;
};

/// `text`: the tokens decoded, and one more to predict. `what` is being done, for `progress`.
struct decoded_text {
  const prepared_prompt& prompt;
  std::span<const llama_token> text;
  std::string what;
};

/// On the resident route, each head's attention compared with full attention's; without that, on the route in
/// place and without statistics of attention. `full`: written by a contender that keeps everything, if it is
/// empty, and read by others for their divergences; null: there are none.
quality measure_quality(const contender& c, const common_settings& s, const model& model,
                        const decoded_text& decoded, const progress_function& progress,
                        full_logits* full = nullptr, bool compares_attention = true);

}  // namespace freekv::examples
