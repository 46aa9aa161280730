// raas, whose units are pages, is its definition.
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("raas conforms to its definition", "[conforms]") {
  constexpr int page = 4;
  constexpr double threshold = 0.01;
  const freekv::testing::eviction_definition definition{
      .worth = [](const freekv::testing::attended_rows& seen, int first) {
        const auto share = [&](int row) {
          double sum = 0.0;
          for (int token = first; token < first + page && token <= row; ++token)
            sum += seen.shares[row][token];
          return sum;
        };
        for (int row = static_cast<int>(std::ssize(seen.shares)) - 1; row >= seen.prompt; --row) {
          const bool is_of_page = row >= first && row < first + page;
          if (is_of_page || share(row) >= threshold) return static_cast<double>(row);  // the last stamp
        }
        return seen.prompt_is_cut ? -1.0 / share(seen.prompt - 1) : -HUGE_VAL;
      }};
  freekv::raas policy{.page = page, .threshold = 0.01f, .room = 8, .sink = 4, .window = 8};
  CHECK(freekv::testing::conforms(definition, policy) == std::vector<std::string>{});
  policy.keeps_prompt = true;
  CHECK(freekv::testing::conforms(definition, policy) == std::vector<std::string>{});
}
