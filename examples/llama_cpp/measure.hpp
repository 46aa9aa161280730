// What the main job measures: quality, needles, speed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "prompt.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

/// Where key_subspace's basis comes from.
enum class basis_source { none, prompt, other_text };

/// A row of the tables.
struct contender {
  std::string name;
  method does;
  basis_source basis = basis_source::none;
};

/// What all contenders share.
struct common_settings {
  int page = 32, sink = 64, window = 128;
  int budget = 512;         ///< tokens a head attends to: sink, window and selected pages
  int complete_layers = 1;  ///< leading layers that keep everything
  int threads = 2;
  bool overlap = false;  ///< speculate on a thread of its own
};

/// A prompt and the bases that are at hand with it.
struct prepared_prompt {
  const prompt_cache& kv;
  const key_basis& own;
  const key_basis& other;
};

/// Bytes of a contender's summary for a page and KV head; 0 if it does not retrieve.
std::size_t summary_bytes_of(const contender& c, const pipeline& p);

/// The pipeline of a contender, with room for `more` tokens after the prompt. At equal budget, a method that
/// selects nothing has all but the sink as its window.
std::unique_ptr<pipeline> make_contender(const contender& c, const common_settings& s,
                                         const model_shape& shape, const prepared_prompt& prompt, int more,
                                         bool in_place, host_backend& backend);

/// Teacher-forced decoding of a text after a prompt, on the resident route, compared with full attention.
struct quality {
  std::vector<double> losses;  ///< -ln p of the next token, by step
  std::vector<int> choices;    ///< most likely next token, by step
  attention_statistics attention;
  std::size_t fast_tier_bytes = 0;  ///< slots, summaries, complete layers, and the summaries' basis
  std::size_t slice_bytes = 0;
  std::size_t summary_bytes = 0;
};
/// `text`: the tokens decoded, and one more to predict.
quality measure_quality(const contender& c, const common_settings& s, const model& model,
                        const prepared_prompt& prompt, std::span<const llama_token> text,
                        const progress_function& progress);

/// Facts hidden in a text and asked for at its end.
struct needle_text {
  std::vector<llama_token> tokens;  ///< about as many as asked for, with the facts
  struct question {
    double depth = 0;                 ///< of its fact, 0 to 1: where it was put, to a sentence
    std::vector<llama_token> tokens;  ///< the question, then the answer's digits
    int digits = 0;                   ///< how many of the last tokens are digits
  };
  std::vector<question> questions;
};
needle_text hide_needles(const model& model, const std::string& text, int tokens);

struct needle_result {
  std::vector<double> loss_per_digit;  ///< by question
  std::vector<bool> found;             ///< all digits most likely
  std::size_t summary_bytes = 0;
  double mean_loss() const;
  int facts_found() const;
};
/// `prompt` is that of `needles`.
needle_result measure_needles(const contender& c, const common_settings& s, const model& model,
                              const prepared_prompt& prompt, const needle_text& needles,
                              const progress_function& progress);

/// Decoding speed of all contenders and of llama.cpp itself, in turns.
struct speed {
  std::string name;
  std::vector<double> tokens_per_second;  ///< of the rounds that count
  std::vector<double> attention_seconds;  ///< a step, of the rounds that count; empty for llama.cpp itself
  double median_tokens_per_second() const;
  double median_attention_seconds() const;
  /// (largest - smallest) / median of the rounds that count.
  double spread() const;
};
/// One after the other for `steps` tokens each, all at the same position: once to warm up, then `rounds` times over;
/// while a contender's rounds differ by more than 20 %, up to `rounds` more, of which the last `rounds` count.
struct speed_settings {
  int rounds = 5, steps = 16;
};
std::vector<speed> measure_speed(const std::vector<contender>& contenders, const common_settings& s,
                                 const model& model, const prepared_prompt& prompt,
                                 std::span<const llama_token> prompt_tokens,
                                 std::span<const llama_token> text, const prompt_cache::place& place,
                                 const speed_settings& how, const progress_function& progress);

}  // namespace freekv::examples
