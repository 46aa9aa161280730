// Numbers that stand for what is not there: weights, keys and values, and what queries have in common.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/splitmix.hpp>

namespace freekv::examples {

/// About normal numbers, each by its index: the sum of four uniform ones.
FREEKV_HD inline float random_normal(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t x = freekv::detail::splitmix64(freekv::detail::splitmix64(seed) ^ index);
  const auto sum = static_cast<float>((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
  return (sum - 131070.0f) * (1.7320508f / 65536.0f);
}

/// The direction that all queries of a head have in common where queries are made similar: it turns to
/// another one in 64 tokens.
FREEKV_HD inline float common_query(int layer, int head, int position, int i) {
  constexpr int tokens = 64;
  const std::uint64_t seed = 0x5eedu + static_cast<std::uint64_t>(layer * 1024 + head);
  const auto at = [&](int turn) {
    return random_normal(seed, static_cast<std::uint64_t>(turn) << 16 | static_cast<std::uint64_t>(i));
  };
  const float next = static_cast<float>(position % tokens) / tokens, now = 1.0f - next;
  return (now * at(position / tokens) + next * at(position / tokens + 1)) / sqrtf(now * now + next * next);
}

}  // namespace freekv::examples
