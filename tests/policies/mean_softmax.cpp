// mean_softmax is its definition.
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <limits>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("mean_softmax conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  const freekv::testing::pooling_definition definition{.scores = [](const std::vector<doubles>& scores) {
    const std::size_t candidates = scores[0].size();
    doubles pooled(candidates, -std::numeric_limits<double>::infinity());
    for (std::size_t j = 0; j < candidates; ++j) {
      double mean = 0.0;
      for (const doubles& of_head : scores) {
        double sum = 0.0;
        for (const double score : of_head) sum += std::exp(score);
        if (sum > 0.0) mean += std::exp(of_head[j]) / sum / static_cast<double>(scores.size());
      }
      pooled[j] = std::log(mean);
    }
    return pooled;
  }};
  CHECK(freekv::testing::conforms<freekv::mean_softmax>(definition) == std::vector<std::string>{});
}
