// A policy of pages that takes worths of their tokens is its definition, with a prompt that is cut and one
// that is in the slots at once.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../unit/given_pages.hpp"

TEST_CASE("worths are given for each token of a page", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int first) {
        const int end = std::min(first + tests::given_pages::page, static_cast<int>(seen.worths.size()));
        double most = -HUGE_VAL;
        for (int token = first; token < end; ++token) most = std::max(most, seen.worths[token]);
        return most;
      }};
  for (const bool keeps_prompt : {false, true})
    CHECK(freekv::testing::conforms(definition, tests::given_pages{keeps_prompt}) ==
          std::vector<std::string>{});
}
