// trim_kv is its definition.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("trim_kv conforms to its definition", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int token) {
        const double beta = seen.worths[token];
        const auto age = static_cast<double>(std::ssize(seen.shares) - 1 - token);
        return beta > 0 ? age * std::log(std::min(beta, 1.0)) : -HUGE_VAL;
      }};
  CHECK(freekv::testing::conforms<freekv::trim_kv>(definition) == std::vector<std::string>{});
}
