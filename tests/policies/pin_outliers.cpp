// pin_outliers is its definition.
#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("pin_outliers conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  // The unit's least cosine of a key with the mean key, turned round.
  const freekv::testing::pinning_definition definition{
      .worth = [](const doubles& keys, freekv::kv_extent unit) {
        const auto d = static_cast<std::size_t>(unit.head_dim);
        doubles mean(d);
        for (std::size_t i = 0; i < keys.size(); ++i) mean[i % d] += keys[i] / unit.tokens;
        double least = 2.0;
        for (std::size_t row = 0; row < keys.size(); row += d) {
          double product = 0.0, of_key = 0.0, of_mean = 0.0;
          for (std::size_t i = 0; i < d; ++i) {
            product += keys[row + i] * mean[i];
            of_key += keys[row + i] * keys[row + i];
            of_mean += mean[i] * mean[i];
          }
          least = std::min(least, product / std::sqrt(of_key * of_mean));
        }
        return -least;
      }};
  CHECK(freekv::testing::conforms<freekv::pin_outliers<2>>(definition) == std::vector<std::string>{});
}
