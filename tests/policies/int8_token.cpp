// int8_token is its definition.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/policies/integer_codecs.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("int8_token conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  const auto read = [](const doubles& numbers, freekv::kv_extent page) {
    doubles back(numbers.size());
    const auto d = static_cast<std::size_t>(page.head_dim);
    for (std::size_t row = 0; row < numbers.size(); row += d) {
      double most = 0.0;
      for (std::size_t i = row; i < row + d; ++i) most = std::max(most, std::fabs(numbers[i]));
      for (std::size_t i = row; i < row + d; ++i)
        back[i] = most == 0.0 ? 0.0 : std::nearbyint(numbers[i] / (most / 127.0)) * (most / 127.0);
    }
    return back;
  };
  CHECK(freekv::testing::conforms<freekv::int8_token>({.keys = read, .values = read}) ==
        std::vector<std::string>{});
}
