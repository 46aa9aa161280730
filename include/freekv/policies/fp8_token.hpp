// fp8 with a scale for each token: what evictions keep tokens in that are not worth their whole size.
#pragma once

#include <freekv/policies/integer_codecs.hpp>

namespace freekv {

/// fp8_e4m3 with a float32 scale `max|x| / 448` for each token's keys and values: `2 * p * (d + 4)` bytes for
/// p tokens of d numbers. Unlike `cast<fp8_e4m3>` it fits numbers of any size. A NaN or infinity makes all of
/// its row NaN.
struct fp8_token
    : detail::coded_planes<detail::by_token<detail::scaled_fp8>, detail::by_token<detail::scaled_fp8>> {
  static constexpr std::string_view name = "fp8_token";
};
static_assert(codec_policy<fp8_token>);

}  // namespace freekv
