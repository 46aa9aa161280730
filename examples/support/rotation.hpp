// What a model's rotary embedding does to keys, as data: from its base, or found from keys before and after.
#pragma once

#include <freekv/core/rotary.hpp>
#include <optional>
#include <span>
#include <vector>

namespace freekv::examples {

/// A rotary embedding and the memory of its frequencies.
struct rotation {
  std::vector<float> frequencies;  ///< (pairs), radians a token
  rotary_pairs of = rotary_pairs::halves;
  double base = 0;  ///< what the frequencies come from; 0 where they are no powers of one

  rotary_embedding view() const { return {frequencies.data(), static_cast<int>(frequencies.size()), of}; }
};

/// Pair i of `pairs` turns by `base ^ (-i / pairs)` a token, as most models have it.
rotation rotation_of_base(double base, int pairs, rotary_pairs of);

/// Keys (tokens, kv_heads, head_dim) from position 0 on, turned by `sign`: 1 as the model does, or -1 back.
std::vector<float> rotated(std::span<const float> keys, int kv_heads, int head_dim, const rotation& by,
                           float sign);

/// Whether rotation turns `before` into `after`, both (tokens, kv_heads, head_dim) from position 0 on, to 2 %
/// of their size.
bool turns_into(std::span<const float> before, std::span<const float> after, int kv_heads, int head_dim,
                const rotation& by);
/// The rotation of all pairs of `head_dim` that turns `before` into `after`, both (tokens, kv_heads,
/// head_dim) from position 0 on; nothing if none does so to 2 % of their size, or where there is but one
/// token. Frequencies are from -pi to pi.
std::optional<rotation> rotation_between(std::span<const float> before, std::span<const float> after,
                                         int kv_heads, int head_dim);

}  // namespace freekv::examples
