// d2o, as published, is its definition.
#include <cmath>
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <iterator>
#include <string>
#include <vector>

#include "../catch.hpp"

namespace {

using freekv::testing::doubles;

double cosine(const doubles& a, const doubles& b) {
  double product = 0.0, of_a = 0.0, of_b = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) product += a[i] * b[i], of_a += a[i] * a[i], of_b += b[i] * b[i];
  return product / std::sqrt(of_a * of_b);
}

/// Fates of tokens that leave: each into the one of the nearest key, with their cosine for a weight.
std::vector<freekv::merge_fate> nearest(const freekv::testing::parted_tokens& of) {
  std::vector<freekv::merge_fate> fates(of.tokens.size(), {.weight = -2.0});
  for (int i = of.staying; i < std::ssize(fates); ++i)
    for (int into = 0; into < of.staying; ++into)
      if (const double like = cosine(of.keys[i], of.keys[into]); like > fates[i].weight)
        fates[i] = {into, like};
  return fates;
}

}  // namespace

TEST_CASE("d2o conforms to its definition", "[conforms]") {
  const freekv::testing::eviction_definition definition{
      .worth =
          [](const freekv::testing::attended_rows& seen, int token) {
            double mass = 0.0;
            for (int row = token; row < std::ssize(seen.shares); ++row) mass += seen.shares[row][token];
            return mass;
          },
      .fates =
          [](const std::vector<freekv::testing::parted_tokens>& so_far) {
            double threshold = 0.0;
            std::vector<freekv::merge_fate> fates;
            for (const freekv::testing::parted_tokens& of : so_far) {
              fates = nearest(of);
              double sum = 0.0;
              for (int i = of.staying; i < std::ssize(fates); ++i) sum += fates[i].weight;
              const double mean = sum / static_cast<double>(std::ssize(fates) - of.staying);
              threshold = &of == so_far.data() ? mean : 0.7 * mean + 0.3 * threshold;
            }
            for (int i = 0; i < std::ssize(fates); ++i) {
              const bool stays = i < so_far.back().staying;
              if (!stays && fates[i].weight < threshold) fates[i].into = -1;
              fates[i].weight = std::exp(stays ? 1.0 : fates[i].weight);
            }
            return fates;
          }};
  CHECK(freekv::testing::conforms<freekv::d2o>(definition) == std::vector<std::string>{});
}
