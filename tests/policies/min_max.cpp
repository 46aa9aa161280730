// min_max is its definition.
#include <algorithm>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

TEST_CASE("min_max conforms to its definition", "[conforms]") {
  using freekv::testing::doubles;
  const freekv::testing::summary_definition definition{
      .numbers =
          [](const doubles& keys, freekv::kv_extent unit) {
            const auto d = static_cast<std::size_t>(unit.head_dim);
            doubles numbers(keys.begin(), keys.begin() + unit.head_dim);  // minima, then maxima
            numbers.insert(numbers.end(), keys.begin(), keys.begin() + unit.head_dim);
            for (std::size_t i = 0; i < keys.size(); ++i) {
              numbers[i % d] = std::min(numbers[i % d], keys[i]);
              numbers[d + i % d] = std::max(numbers[d + i % d], keys[i]);
            }
            return numbers;
          },
      .score =
          [](const doubles& query, const doubles& numbers, freekv::kv_extent, double scale) {
            double bound = 0.0;
            for (std::size_t i = 0, d = query.size(); i < d; ++i)
              bound += std::max(query[i] * numbers[i], query[i] * numbers[d + i]);
            return scale * bound;
          }};
  CHECK(freekv::testing::conforms<freekv::min_max>(definition) == std::vector<std::string>{});
}
