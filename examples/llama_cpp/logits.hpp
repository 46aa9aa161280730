// What is read from a row of logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include "engine.hpp"

namespace freekv::examples {

/// -ln of the softmax of `logits` at `token`.
inline double loss_of(std::span<const float> logits, llama_token token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return std::log(sum) + largest - logits[static_cast<std::size_t>(token)];
}

inline llama_token most_likely(std::span<const float> logits) {
  return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace freekv::examples
