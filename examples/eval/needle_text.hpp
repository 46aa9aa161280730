// Facts hidden in a text and asked for at its end.
#pragma once

#include <string>
#include <vector>

#include "engine.hpp"

namespace freekv::examples {

/// Eight facts, a paragraph each, at depths from 5 to 90 %, and the question for each.
struct needle_text {
  std::vector<llama_token> tokens;  ///< about as many as asked for, with the facts
  struct question {
    double depth = 0;                 ///< of its fact, 0 to 1: where it was put, to a sentence
    std::vector<llama_token> tokens;  ///< the question, then the answer's digits
    int digits = 0;                   ///< how many of the last tokens are digits
  };
  std::vector<question> questions;
};

/// As much of `text` as makes, with the facts, no more than `tokens` tokens. Throws engine_error for a model
/// whose tokens do not keep digits apart.
needle_text hide_needles(const model& model, const std::string& text, int tokens);

}  // namespace freekv::examples
