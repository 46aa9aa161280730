// h2o is its definition.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("h2o conforms to its definition", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int token) {
        double mass = 0.0;
        for (std::size_t row = static_cast<std::size_t>(token); row < seen.shares.size(); ++row)
          mass += seen.shares[row][token];
        return mass;
      }};
  CHECK(freekv::testing::conforms<freekv::h2o>(definition) == std::vector<std::string>{});
}
