// given_worths, by scores and by flags, is its definition.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("given_worths conforms to its definition", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int token) { return seen.worths[token]; }};
  CHECK(freekv::testing::conforms<freekv::given_worths>(definition) == std::vector<std::string>{});
  CHECK(freekv::testing::conforms(definition, freekv::given_worths{.sink = 4, .recent = 0.5f}) ==
        std::vector<std::string>{});
  CHECK(freekv::testing::conforms(definition, freekv::given_worths{.recent = 0.0f}) ==
        std::vector<std::string>{});
}
