// How a page's keys or values come back from the slow tier, for each way of storing them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "codes.hpp"
#include "formats.hpp"
#include "numbers.hpp"

namespace oracle {

enum class codec_kind { identity, bf16, f16, fp8, int8_token, int4_token, int8_channel, int4_channel };
enum class plane_kind { keys, values };

/// What 8 bits stand for in OCP's E4M3: a sign, 4 bits of exponent, 3 of mantissa; all seven set are NaN.
inline double fp8_number(int code) {
  const int exponent = code / 8 % 16, mantissa = code % 8;
  if (exponent == 15 && mantissa == 7) return not_a_number;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code >= 128 ? -size : size;
}

/// The nearest of them, of two as near the one with the even code; 448 for all that is larger.
inline double rounded_to_fp8(double x) {
  if (std::isnan(x)) return x;
  const double size = std::min(std::fabs(x), 448.0);
  int nearest = 0;
  for (int code = 1; code < 127; ++code) {
    const double before = std::fabs(fp8_number(nearest) - size), now = std::fabs(fp8_number(code) - size);
    if (now < before || (now == before && code % 2 == 0)) nearest = code;
  }
  return std::copysign(fp8_number(nearest), x);
}

/// As they read back from the nearest of 2^bits numbers, evenly spaced from their lowest to their highest;
/// all NaN with a NaN or infinity among them.
inline std::vector<double> spread(const std::vector<double>& c, int bits) {
  double low = infinity, high = -infinity;
  for (double value : c) low = min_or_nan(low, value);
  for (double value : c) high = max_or_nan(high, value);
  if (!std::isfinite(low) || !std::isfinite(high)) return std::vector<double>(c.size(), not_a_number);
  const double step = (high - low) / static_cast<double>((1 << bits) - 1);
  std::vector<double> back;
  for (double value : c)
    back.push_back(step == 0.0 ? value : low + std::nearbyint((value - low) / step) * step);
  return back;
}

/// As code_doubt, for `spread`: a whole step where the number lies between two of them.
inline std::vector<double> spread_doubt(const std::vector<double>& c, int bits) {
  const auto [low, high] = std::minmax_element(c.begin(), c.end());
  const double step = (*high - *low) / static_cast<double>((1 << bits) - 1);
  std::vector<double> doubt;
  for (double value : c) {
    const double position = (value - *low) / step;
    const double to_edge = std::fabs(position - std::floor(position) - 0.5);
    doubt.push_back(to_edge <= float_sum_error * position ? step : 0.0);
  }
  return doubt;
}

/// `values`, before they are rounded to an element, may be off by `doubt`.
struct decoded_plane {
  std::vector<double> values;
  std::vector<double> doubt;
};

/// (tokens, head_dim) keys or values, stored and read back.
inline decoded_plane decoded(codec_kind codec, plane_kind plane, const std::vector<double>& numbers,
                             int head_dim) {
  using enum codec_kind;
  decoded_plane back{numbers, std::vector<double>(numbers.size(), 0.0)};
  if (codec == identity) return back;
  if (codec == bf16 || codec == f16 || codec == fp8) {
    for (double& x : back.values)
      x = codec == fp8 ? rounded_to_fp8(x)
                       : rounded_to(x, codec == f16 ? element_kind::f16 : element_kind::bf16);
    return back;
  }
  const auto width = static_cast<std::size_t>(head_dim), tokens = numbers.size() / width;
  const bool channels = plane == plane_kind::keys && (codec == int8_channel || codec == int4_channel);
  const int bits = codec == int8_token || codec == int8_channel ? 8 : 4;
  for (std::size_t group = 0; group < (channels ? width : tokens); ++group) {
    std::vector<std::size_t> members;
    for (std::size_t i = 0; i < (channels ? tokens : width); ++i)
      members.push_back(channels ? i * width + group : group * width + i);
    std::vector<double> c;
    for (std::size_t i : members) c.push_back(numbers[i]);
    double largest = 0.0;
    for (double x : c) largest = max_or_nan(largest, std::fabs(x));
    const bool asymmetric = codec == int4_channel;
    const auto values = asymmetric ? spread(c, bits) : quantised(c, bits);
    const auto doubt =
        asymmetric ? spread_doubt(c, bits) : code_doubt(c, std::vector<double>(c.size(), 0.0), bits);
    for (std::size_t i = 0; i < members.size(); ++i) {
      back.values[members[i]] = values[i];
      back.doubt[members[i]] = doubt[i] + 0.5 * float_sum_error * largest;
    }
  }
  return back;
}

}  // namespace oracle
