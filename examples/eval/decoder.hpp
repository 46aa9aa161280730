// Texts decoded beside each other after their prompts, by llama.cpp itself or by a contender.
#pragma once

#include <freekv/core/size.hpp>
#include <memory>
#include <span>

#include "job.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

/// A prompt and what follows it.
struct prompted_text {
  const prompt_cache& prompt;
  std::span<const llama_token> tokens;  ///< the prompt's, those decoded after it, and one more to predict

  std::span<const llama_token> prompt_tokens() const { return tokens.first(size()); }
  std::span<const llama_token> after_prompt() const { return tokens.subspan(size()); }

 private:
  std::size_t size() const { return to_size(prompt.tokens()); }
};

/// Has texts of equal lengths at the ends of their prompts: a sequence each, in their order.
class decoder {
 public:
  virtual ~decoder() = default;
  /// Logits of all the step's tokens, in its order, valid until the next call.
  virtual std::span<const float> decode(std::span<const sequence_tokens> step) = 0;
  /// Takes a sequence's tokens from `position` on back.
  virtual void truncate(int position, int sequence) = 0;
};

/// llama.cpp with flash attention, its own cache in a part for each sequence, which is how it is fastest.
class stock_decoder : public decoder {
 public:
  stock_decoder(job& j, std::span<const prompted_text> texts);
  std::span<const float> decode(std::span<const sequence_tokens> step) override {
    return engine_.decode_stock(step);
  }
  void truncate(int position, int sequence) override { engine_.truncate(position, sequence); }

 private:
  engine engine_;
};

/// A contender, all sequences in one pipeline. What it learns is the job's prompt's.
class contender_decoder : public decoder {
 public:
  struct options {
    int rows = 1;  ///< that a sequence brings to a step, at most
    bool in_place = true;
  };
  contender_decoder(job& j, const contender& c, std::span<const prompted_text> texts, const options& how);
  std::span<const float> decode(std::span<const sequence_tokens> step) override {
    return engine_.decode(step, attention_);
  }
  void truncate(int position, int sequence) override;
  retrieval_attention& attention() { return attention_; }

 private:
  host_backend backend_;
  std::unique_ptr<pipeline> pipeline_;
  std::vector<sequence_id> sequences_;
  engine engine_;
  retrieval_attention attention_;
};

}  // namespace freekv::examples
