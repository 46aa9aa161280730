// mass_deficit is its definition.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("mass_deficit conforms to its definition", "[conforms]") {
  const freekv::testing::correction_definition definition{
      .by_masses = [](double selected, double best) { return selected < 0.9 * best; }};
  for (const bool partial : {false, true})
    CHECK(freekv::testing::conforms(definition, freekv::mass_deficit{.delta = 0.1f, .partial = partial}) ==
          std::vector<std::string>{});
}
