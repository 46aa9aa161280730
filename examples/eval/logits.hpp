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
  return std::log(sum) + largest - logits[token];
}

/// The Kullback-Leibler divergence of a method's next-token distribution from full attention's, in nats: the
/// sum over tokens of p ln(p / q), with p the softmax of `full` and q that of `method`.
inline double divergence(std::span<const float> full, std::span<const float> method) {
  const double most_full = *std::max_element(full.begin(), full.end());
  const double most_method = *std::max_element(method.begin(), method.end());
  double of_full = 0, of_method = 0, weighted = 0;
  for (std::size_t i = 0; i < full.size(); ++i) {
    const double a = full[i] - most_full, b = method[i] - most_method, weight = std::exp(a);
    of_full += weight;
    of_method += std::exp(b);
    weighted += weight * (a - b);
  }
  return std::max(
      0.0, weighted / of_full - std::log(of_full) + std::log(of_method));  // rounding may give less than 0
}

inline llama_token most_likely(std::span<const float> logits) {
  return static_cast<llama_token>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

}  // namespace freekv::examples
