// least_recently_used is its definition.
#include <algorithm>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("least_recently_used conforms to its definition", "[conforms]") {
  const freekv::testing::residency_definition definition{
      .freed = [](const std::vector<freekv::unselected_slot>& slots) {
        const auto earlier = [](const auto& a, const auto& b) { return a.last_selected < b.last_selected; };
        return static_cast<int>(std::min_element(slots.begin(), slots.end(), earlier) - slots.begin());
      }};
  CHECK(freekv::testing::conforms<freekv::least_recently_used<3>>(definition) == std::vector<std::string>{});
}
