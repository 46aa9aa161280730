// The clusters that programs find among a prompt's keys.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../catch.hpp"
#include "../property/random_case.hpp"
#include "basis.hpp"

namespace {

using freekv::examples::key_basis;
using tests::dice;

constexpr int kv_heads = 2, head_dim = 8;

/// Keys around `count` directions of each head, in turn: token t of head h is 1 to 3 times the unit vector
/// (t + h) % count, and a little beside it.
std::vector<float> around_axes(dice& d, int tokens, int count) {
  std::vector<float> keys;
  for (int t = 0; t < tokens; ++t)
    for (int head = 0; head < kv_heads; ++head) {
      const float length = 1.0f + 2.0f * d.uniform();
      for (int i = 0; i < head_dim; ++i)
        keys.push_back((i == (t + head) % count ? length : 0.0f) + 0.01f * d.normal());
    }
  return keys;
}

double cosine(const float* a, const float* b) {
  double product = 0.0, of_a = 0.0, of_b = 0.0;
  for (int i = 0; i < head_dim; ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    product += x * y, of_a += x * x, of_b += y * y;
  }
  return product / std::sqrt(of_a * of_b);
}

}  // namespace

TEST_CASE("clusters are found where keys lie in clusters", "[basis]") {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    dice d(seed);
    const int count = d.between(1, head_dim), tokens = 16 + count * d.between(3, 40);
    auto keys = around_axes(d, tokens, count);
    for (int i = 0; i < 16 * kv_heads * head_dim; ++i)
      keys[static_cast<std::size_t>(i)] = 100.0f;  // left out
    keys[static_cast<std::size_t>(20 * kv_heads * head_dim)] = NAN;
    keys[static_cast<std::size_t>(21 * kv_heads * head_dim)] = std::numeric_limits<float>::infinity();
    key_basis basis(1, kv_heads, 3 * count, head_dim);
    basis.cluster(0, keys);
    INFO("seed " << seed << ", " << count << " clusters, " << tokens << " tokens");
    for (int head = 0; head < kv_heads; ++head) {
      const float* const rows = basis.view().rows(0, head);
      for (int i = 0; i < head_dim; ++i) CHECK(basis.view().mean(0, head)[i] == 0.0f);
      for (int axis = 0; axis < count; ++axis) {
        float of_axis[head_dim] = {};
        of_axis[axis] = 1.0f;
        double best = -1.0;
        for (int c = 0; c < 3 * count; ++c) best = std::max(best, cosine(rows + c * head_dim, of_axis));
        CHECK(best > 0.99);
      }
    }
  }
}

TEST_CASE("a cluster's centroid is the mean of its keys when rounds end", "[basis]") {
  dice d(3);
  constexpr int tokens = 16 + 90, clusters = 5;
  std::vector<float> keys;
  for (int i = 0; i < tokens * kv_heads * head_dim; ++i) keys.push_back(d.normal());
  key_basis basis(1, kv_heads, clusters, head_dim);
  basis.cluster(0, keys);
  for (int head = 0; head < kv_heads; ++head) {
    const float* const rows = basis.view().rows(0, head);
    std::vector<double> sums(clusters * head_dim);
    std::vector<int> sizes(clusters);
    for (int t = 16; t < tokens; ++t) {
      const float* const key = keys.data() + (t * kv_heads + head) * head_dim;
      int nearest = 0;
      for (int c = 1; c < clusters; ++c)
        if (cosine(key, rows + c * head_dim) > cosine(key, rows + nearest * head_dim)) nearest = c;
      ++sizes[static_cast<std::size_t>(nearest)];
      for (int i = 0; i < head_dim; ++i)
        sums[static_cast<std::size_t>(nearest * head_dim + i)] += static_cast<double>(key[i]);
    }
    for (int c = 0; c < clusters; ++c) {
      REQUIRE(sizes[static_cast<std::size_t>(c)] > 0);
      for (int i = 0; i < head_dim; ++i)
        CHECK(static_cast<double>(rows[c * head_dim + i]) ==
              Approx(sums[static_cast<std::size_t>(c * head_dim + i)] / sizes[static_cast<std::size_t>(c)])
                  .margin(1e-5));
    }
  }
}

TEST_CASE("a prompt without a usable key leaves centroids of zeros", "[basis]") {
  for (const int tokens : {0, 3}) {
    const std::vector<float> keys(static_cast<std::size_t>(tokens * kv_heads * head_dim), NAN);
    key_basis basis(1, kv_heads, 4, head_dim);
    basis.cluster(0, keys);
    for (int i = 0; i < 4 * head_dim; ++i) CHECK(basis.view().rows(0, 1)[i] == 0.0f);
  }
}
