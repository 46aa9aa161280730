// Does llama.cpp compute this model rightly on this machine? Asked in a fraction of a second before the long
// work: a kernel that a compiler got wrong for one kind of processor else spoils an hour's numbers, or ends
// it after minutes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine.hpp"

namespace freekv::examples {

/// A logit that a model is known to give.
struct known_logit {
  llama_token token = 0;
  float value = 0;
};

/// Logits of the token behind a text, from a machine where they were seen to be right.
struct known_model {
  std::uint64_t key = 0;  ///< of the file, see key_of_file
  std::vector<known_logit> last;
};
/// Nothing if the model is none of those that are known.
const known_model* find_known(std::uint64_t key);

// What is wrong, as the end of a sentence, or nothing. Tolerances are for what instruction sets differ by:
// the order of sums, and activations that are rounded to 8 bits before they are multiplied with quantised
// weights.

/// A logit that is no number, or logits that are all the same.
std::string fault_of(std::span<const float> logits);
/// A known logit that is not there to `known_tolerance`.
std::string fault_against(std::span<const float> logits, std::span<const known_logit> known);
/// A token's logits alone and in a batch that differ by more than `batch_tolerance` of their spread.
std::string fault_between(std::span<const float> alone, std::span<const float> in_batch);

inline constexpr float known_tolerance =
    1.5f;  // instruction sets were seen to differ by 0.4, of a spread of 2.8
inline constexpr double batch_tolerance = 0.3;  // by 0.08; a wrong kernel's logits are off by all of it

/// Evaluates a dozen tokens in a batch, and the last one once more alone. `known`: what find_known found.
/// Throws engine_error, which names the processor, its instruction sets, and how llama.cpp was built.
void check_model(const model& model, const known_model* known, int threads);

/// Half a sentence about the processor and how llama.cpp was built for it.
std::string processor_and_build();
/// What to do where llama.cpp does not work here, as a clause.
std::string rebuild_remedy();

/// The processor's name, as /proc/cpuinfo has it.
std::string processor_name();

}  // namespace freekv::examples
