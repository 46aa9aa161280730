// Rotary embeddings from a base and from keys before and after, and what factorising keys finds.

#include "rotation.hpp"

#include <cmath>

#include "../catch.hpp"
#include "../property/random_case.hpp"
#include "basis.hpp"

using namespace tests;
using freekv::rotary_pairs;
using freekv::examples::key_basis;
using freekv::examples::rotated;
using freekv::examples::rotation;
using freekv::examples::rotation_between;
using freekv::examples::rotation_of_base;

namespace {

std::vector<float> random_keys(dice& d, int tokens, int heads, int dim) {
  std::vector<float> keys(static_cast<std::size_t>(tokens * heads * dim));
  for (float& x : keys) x = d.normal();
  return keys;
}

}  // namespace

TEST_CASE("the rotation between keys before and after is found, whatever its frequencies and pairs",
          "[rotation]") {
  dice d(1);
  for (const rotary_pairs of : {rotary_pairs::halves, rotary_pairs::neighbours})
    for (const double base : {10000.0, 500000.0})
      for (const int tokens : {2, 40, 3000}) {
        rotation model = rotation_of_base(base, 32, of);
        if (base > 10000) model.frequencies[5] *= 0.125f;  // as scaled for longer contexts
        const auto before = random_keys(d, tokens, 2, 64);
        auto after = rotated(before, 2, 64, model, 1.0f);
        for (float& x : after) x = rounded(x, data_type::f16);
        const auto found = rotation_between(before, after, 2, 64);
        INFO(tokens << " tokens, base " << base);
        REQUIRE(found.has_value());
        CHECK(found->of == of);
        for (std::size_t i = 0; i < 32; ++i)
          CHECK(std::fabs(found->frequencies[i] - model.frequencies[i]) < 0.02f / static_cast<float>(tokens));
        const auto back = rotated(after, 2, 64, *found, -1.0f);
        double most = 0;
        for (std::size_t i = 0; i < back.size(); ++i)
          most = std::max(most, static_cast<double>(std::fabs(back[i] - before[i])));
        CHECK(most < 0.05);
      }
  const auto one = random_keys(d, 40, 1, 64), other = random_keys(d, 40, 1, 64);
  CHECK_FALSE(rotation_between(one, other, 1, 64).has_value());
  CHECK_FALSE(rotation_between(std::span(one).first(64), std::span(one).first(64), 1, 64).has_value());
}

TEST_CASE("the factorisation of keys that lie in few directions of all heads loses none of them",
          "[rotation]") {
  dice d(2);
  constexpr int heads = 3, dim = 16, rank = 5, tokens = 60, width = heads * dim;
  const auto directions = random_keys(d, rank, heads, dim);
  std::vector<float> keys(std::size_t{tokens} * width, 0.0f);
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < rank; ++r) {
      const float part = d.normal();
      for (int i = 0; i < width; ++i) keys[t * width + i] += part * directions[r * width + i];
    }
  keys[3] = std::nanf("");  // its token is left out
  key_basis factors(2, heads, rank, dim);
  factors.factorise(1, keys);
  const auto error = [&](int used) {
    double sum = 0;
    for (int t = 1; t < tokens; ++t) {
      std::vector<double> rest(keys.begin() + t * width, keys.begin() + (t + 1) * width);
      for (int r = 0; r < used; ++r) {
        double along = 0;
        const auto row = [&](int i) {
          return static_cast<double>(factors.view().rows(1, i / dim)[r * dim + i % dim]);
        };
        for (int i = 0; i < width; ++i) along += row(i) * static_cast<double>(keys[t * width + i]);
        for (int i = 0; i < width; ++i) rest[i] -= along * row(i);
      }
      for (const double x : rest) sum += x * x;
    }
    return sum;
  };
  CHECK(error(rank) < 1e-6);
  for (int used = 1; used <= rank; ++used) CHECK(error(used) < error(used - 1));
  for (int head = 0; head < heads; ++head)
    for (int i = 0; i < dim; ++i) CHECK(factors.view().mean(1, head)[i] == 0.0f);
}
