// Rotary position embedding: what it did to a key, done again or undone.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/rounded_sum.hpp>

namespace freekv {

/// Pairs of a key's numbers that are turned together.
enum class rotary_pairs : std::uint8_t {
  halves,      ///< i and i + pairs, as Hugging Face's models have it
  neighbours,  ///< 2i and 2i + 1, as GGUF files of Llama's family have it
};

/// A model's rotary embedding: pair i of a key's numbers at position t is turned by the angle
/// `t * frequencies[i]`. Positions count from a sequence's first token. Numbers beyond the pairs stay as they
/// are.
struct rotary_embedding {
  const float* frequencies = nullptr;  ///< (pairs), radians a token, in memory that the backend can read
  int pairs = 0;                       ///< at most half of head_dim; 0: keys are not turned
  rotary_pairs of = rotary_pairs::halves;

  /// The nth number of a key where the two of pair i come as 2i and 2i + 1, and behind the pairs those that
  /// stay.
  FREEKV_HD constexpr int by_pairs(int nth) const {
    return of == rotary_pairs::neighbours || nth >= 2 * pairs ? nth : nth / 2 + nth % 2 * pairs;
  }
};

/// Turns the two numbers of a pair as they are at `position`; back, with `sign` -1. Angles are float64: at
/// position 1,000,000 those of float32 are off by 0.03.
FREEKV_HD inline void rotate_pair(const rotary_embedding& rotary, int pair, int position, float sign,
                                  float& a, float& b) {
  const double angle = static_cast<double>(position) * static_cast<double>(rotary.frequencies[pair]);
  const float c = static_cast<float>(::cos(angle)), s = sign * static_cast<float>(::sin(angle));
  const float turned = rounded_sum(a * c, -(b * s));
  b = rounded_sum(a * s, b * c);
  a = turned;
}

/// Turns a key (head_dim).
FREEKV_HD inline void rotate(const rotary_embedding& rotary, int position, float sign, float* key) {
  for (int i = 0; i < rotary.pairs; ++i)
    rotate_pair(rotary, i, position, sign, key[rotary.by_pairs(2 * i)], key[rotary.by_pairs(2 * i + 1)]);
}

}  // namespace freekv
