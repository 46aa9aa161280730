#include "rotation.hpp"

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>

namespace freekv::examples {

namespace {

/// Of one pair, the angle by which the tokens' vectors are turned, the sum over heads, and how long they are.
struct turn {
  double angle = 0, weight = 0;
};

turn turn_at(std::span<const float> before, std::span<const float> after, int kv_heads, int head_dim,
             std::size_t token, std::size_t first, std::size_t second) {
  double along = 0, across = 0;
  for (int head = 0; head < kv_heads; ++head) {
    const std::size_t at = (token * to_size(kv_heads) + to_size(head)) * to_size(head_dim);
    const double a = before[at + first], b = before[at + second], c = after[at + first],
                 d = after[at + second];
    if (!std::isfinite(a + b + c + d)) continue;
    along += a * c + b * d;
    across += a * d - b * c;
  }
  return {std::atan2(across, along), std::hypot(along, across)};
}

/// One pair's radians a token. The first tokens say it roughly, later ones, whose angles are known up to
/// whole turns then, more and more exactly.
double frequency_of(std::span<const float> before, std::span<const float> after, int kv_heads, int head_dim,
                    std::size_t first, std::size_t second) {
  const std::size_t row = to_size(kv_heads) * to_size(head_dim);
  const std::size_t tokens = before.size() / row;
  double frequency = 0;
  for (std::size_t begin = 1; begin < tokens; begin *= 2) {
    double sum = 0, weights = 0;
    for (std::size_t t = begin; t < std::min(2 * begin, tokens); ++t) {
      const turn seen = turn_at(before, after, kv_heads, head_dim, t, first, second);
      const double position = static_cast<double>(t);
      sum += seen.weight * position * std::remainder(seen.angle - position * frequency, 2 * std::acos(-1.0));
      weights += seen.weight * position * position;
    }
    if (weights > 0) frequency += sum / weights;
  }
  return frequency;
}

/// The squared difference of rotated keys, relative.
double error_of(std::span<const float> before, std::span<const float> after, int kv_heads, int head_dim,
                const rotation& by) {
  const std::vector<float> turned = rotated(before, kv_heads, head_dim, by, 1.0f);
  double error = 0, size = 0;
  for (std::size_t i = 0; i < after.size(); ++i) {
    const double difference = turned[i] - after[i];
    if (!std::isfinite(difference)) continue;
    error += difference * difference;
    size += static_cast<double>(after[i]) * static_cast<double>(after[i]);
  }
  return error / std::max(size, 1e-300);
}
constexpr double most_error = 0.02 * 0.02;

}  // namespace

bool turns_into(std::span<const float> before, std::span<const float> after, int kv_heads, int head_dim,
                const rotation& by) {
  return error_of(before, after, kv_heads, head_dim, by) <= most_error;
}

rotation rotation_of_base(double base, int pairs, rotary_pairs of) {
  rotation r{.frequencies = {}, .of = of, .base = base};
  for (int i = 0; i < pairs; ++i)
    r.frequencies.push_back(static_cast<float>(std::pow(base, -static_cast<double>(i) / pairs)));
  return r;
}

std::vector<float> rotated(std::span<const float> keys, int kv_heads, int head_dim, const rotation& by,
                           float sign) {
  std::vector<float> turned(keys.begin(), keys.end());
  const auto d = to_size(head_dim), row = d * to_size(kv_heads);
  for (std::size_t at = 0; at < turned.size(); at += d)
    rotate(by.view(), static_cast<int>(at / row), sign, turned.data() + at);
  return turned;
}

std::optional<rotation> rotation_between(std::span<const float> before, std::span<const float> after,
                                         int kv_heads, int head_dim) {
  std::optional<rotation> best;
  double least = most_error;
  for (const rotary_pairs of : {rotary_pairs::halves, rotary_pairs::neighbours}) {
    rotation found{.frequencies = {}, .of = of};
    const auto pairs = to_size(head_dim / 2);
    for (std::size_t i = 0; i < pairs; ++i) {
      const bool halves = of == rotary_pairs::halves;
      found.frequencies.push_back(static_cast<float>(frequency_of(
          before, after, kv_heads, head_dim, halves ? i : 2 * i, halves ? i + pairs : 2 * i + 1)));
    }
    const double error = error_of(before, after, kv_heads, head_dim, found);
    if (!(error <= least) || before.size() < 2 * to_size(kv_heads * head_dim)) continue;
    least = error;
    best = found;
  }
  return best;
}

}  // namespace freekv::examples
