// missing_share is its definition, by the shares that it is told; which these are, on random steps:
// tests/unit/missing_share_test.cpp.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("missing_share conforms to its definition", "[conforms]") {
  const freekv::testing::correction_definition definition{
      .by_masses = [](double selected, double best) { return best - selected > 0.1; }};
  for (const bool partial : {false, true})
    CHECK(freekv::testing::conforms(definition, freekv::missing_share{.delta = 0.1f, .partial = partial}) ==
          std::vector<std::string>{});
}
