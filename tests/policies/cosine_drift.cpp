// cosine_drift, as published, is its definition.
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

double cosine(const freekv::testing::doubles& a, const freekv::testing::doubles& b) {
  double product = 0.0, of_a = 0.0, of_b = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) product += a[i] * b[i], of_a += a[i] * a[i], of_b += b[i] * b[i];
  return product / (std::sqrt(of_a) * std::sqrt(of_b));  // NaN for a query of zeros
}

}  // namespace

TEST_CASE("cosine_drift conforms to its definition", "[conforms]") {
  const freekv::testing::correction_definition definition{
      .by_queries = [](const freekv::testing::changed_queries& q) {
        double sum = 0.0;
        for (std::size_t g = 0; g < q.now.size(); ++g) sum += cosine(q.now[g], q.before[g]);
        return !(sum / static_cast<double>(q.now.size()) >= 0.9);  // NaN is flagged
      }};
  CHECK(freekv::testing::conforms(definition, freekv::cosine_drift{.tau = 0.9f}) ==
        std::vector<std::string>{});
}
