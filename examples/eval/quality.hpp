// Teacher-forced decoding of a text after a prompt, compared with full attention.
#pragma once

#include <freekv/core/size.hpp>
#include <span>
#include <string>
#include <vector>

#include "contender.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

class job;

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
  std::vector<double> lse_lost;  ///< `retrieval_attention::lse_lost`, by step; none where nothing is compared
  std::vector<llama_token> choices;  ///< most likely next token, by step
  attention_statistics attention;    ///< of all layers and heads
  std::vector<attention_statistics> by_head;
  std::vector<judged_head> judged;  ///< of all steps
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

/// One row of a table on all texts.
struct quality_of_texts {
  std::vector<std::vector<double>> losses, divergences, lse_lost;  ///< by text and step
  std::vector<attention_statistics> by_head;
  std::vector<judged_head> judged;
  long agreeing = 0, steps = 0;
  quality last;  ///< what is the same for all texts

  void add(const quality& q, const quality& full);
  double perplexity() const;
  double top1() const { return static_cast<double>(agreeing) / static_cast<double>(steps); }
  double highest_divergences() const;
  /// Of all layers and heads.
  attention_statistics attention() const;
  /// A sum over all layers and heads, per step.
  double per_step(long long sum) const { return static_cast<double>(sum) / static_cast<double>(steps); }
};

/// Of two series by text and step, step by step.
std::vector<std::vector<double>> differences(const std::vector<std::vector<double>>& a,
                                             const std::vector<std::vector<double>>& b);
/// "12.3 (10.1 .. 14.5)", in thousandths.
std::string with_bounds(const estimate& nats);

/// A contender and its settings; `what` is being done, for `progress`.
struct row_to_measure {
  contender who;
  common_settings with;
  std::string what;
};

/// `rows`, the first of which keeps everything, on --text and --more-texts: `steps` tokens of each.
std::vector<quality_of_texts> quality_of_all(job& j, std::span<const row_to_measure> rows, int steps);

}  // namespace freekv::examples
