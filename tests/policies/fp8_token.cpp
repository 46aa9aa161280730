// fp8_token is its definition.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/policies/fp8_token.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

/// The nearest number of a sign, 4 bits of exponent from -6 on and 3 of mantissa, 448 the largest.
double in_fp8(double x) {
  const double size = std::min(std::fabs(x), 448.0);
  const double quantum = std::ldexp(1.0, std::max(size > 0.0 ? std::ilogb(size) : -6, -6) - 3);
  return std::copysign(std::nearbyint(size / quantum) * quantum, x);
}

}  // namespace

TEST_CASE("fp8_token conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  const auto read = [](const doubles& numbers, freekv::kv_extent page) {
    doubles back(numbers.size());
    const auto d = static_cast<std::size_t>(page.head_dim);
    for (std::size_t row = 0; row < numbers.size(); row += d) {
      double most = 0.0;
      for (std::size_t i = row; i < row + d; ++i) most = std::max(most, std::fabs(numbers[i]));
      const double scale = most / 448.0;
      for (std::size_t i = row; i < row + d; ++i)
        back[i] = scale > 0.0 ? in_fp8(numbers[i] / scale) * scale : 0.0;
    }
    return back;
  };
  CHECK(freekv::testing::conforms<freekv::fp8_token>({.keys = read, .values = read}) ==
        std::vector<std::string>{});
}
