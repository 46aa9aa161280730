// sticky_top_k is its definition.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("sticky_top_k conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  // One unit after the other is taken, the first of the best.
  const freekv::testing::selection_definition definition{
      .selected = [](const doubles& scores, const std::vector<bool>& held, int k) {
        std::vector<int> taken;
        const auto favoured = [&](std::size_t j) { return scores[j] + (held[j] ? std::log(2.0) : 0.0); };
        while (static_cast<int>(taken.size()) < std::min(k, static_cast<int>(scores.size()))) {
          int best = -1;
          for (int j = 0; j < static_cast<int>(scores.size()); ++j) {
            const bool free = std::find(taken.begin(), taken.end(), j) == taken.end();
            if (free && (best < 0 ||
                         favoured(static_cast<std::size_t>(j)) > favoured(static_cast<std::size_t>(best))))
              best = j;
          }
          taken.push_back(best);
        }
        std::sort(taken.begin(), taken.end());
        return taken;
      }};
  CHECK(freekv::testing::conforms<freekv::sticky_top_k>(definition) == std::vector<std::string>{});
}
