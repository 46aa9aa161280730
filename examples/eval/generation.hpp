// What is said of a generated text beside another one.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "engine.hpp"

namespace freekv::examples {

/// How tokens are chosen.
struct sampling {
  double temperature = 0;  ///< 0: the most likely token always
  double top_p =
      1;  ///< of the softmax's mass, which the fewest and most likely tokens share; above 0, at most 1
  std::uint64_t seed = 0;
};

/// Chooses tokens from logits: the most likely at temperature 0, else by softmax(logits / temperature), of
/// which top_p is kept. Two samplers with one seed choose alike from equal logits, on every machine.
class sampler {
 public:
  /// `never`: tokens that are not chosen, for instance those that end a text.
  explicit sampler(const sampling& how, std::vector<llama_token> never = {});
  llama_token choose(std::span<const float> logits);

 private:
  double keep_likeliest(double mass);

  sampling how_;
  std::vector<llama_token> never_;
  std::mt19937_64 random_;
  std::vector<float> logits_;
  std::vector<double> weights_;
  std::vector<llama_token> by_weight_;
};

/// The first position where `a` differs from `b`, or their length if they are equal.
int first_difference(std::span<const llama_token> a, std::span<const llama_token> b);
/// Share of positions where they are equal. Both have as many tokens.
double agreement(std::span<const llama_token> a, std::span<const llama_token> b);
/// Share of the last 256 runs of four tokens (or all, if there are fewer) that began earlier in the text as
/// well.
double repetition(std::span<const llama_token> tokens);

}  // namespace freekv::examples
