// mean, centroid_box, ball, key_sketch and key_clusters.
#pragma once

#include "by_hand.hpp"

namespace {

oracle::settings of_summary(oracle::summary_kind summary, int head_dim, int bits = 32) {
  oracle::settings s = tiny();
  s.head_dim = head_dim;
  s.scale = 0.5;
  s.summary = summary;
  s.bits = bits;
  return s;
}

}  // namespace

TEST_CASE("mean summary and score") {
  const auto s = of_summary(oracle::summary_kind::mean, 2);
  const floats keys{1, 3, 3, -1};
  const auto summary = oracle::summarise(s, 0, rows_of(keys, 2));
  CHECK(summary.values == doubles{2.0, 1.0});
  CHECK(oracle::score_unit(s, 0, floats{2, -1}, summary) == 1.5);
  CHECK(oracle::mean_key(rows_of(keys, 2)).sizes == doubles{2.0, 2.0});
}

TEST_CASE("centroid_box summary and score") {
  const auto s = of_summary(oracle::summary_kind::centroid_box, 2);
  // Centre 2; |k - 2| is 2, 1, 1, 2: h is 3/2. The second element does not vary.
  const floats keys{0, -1, 1, -1, 1, -1, 4, -1};
  const auto summary = oracle::summarise(s, 0, rows_of(keys, 2));
  CHECK(summary.values == doubles{0.5, -1.0, 3.5, -1.0});
  CHECK(oracle::score_unit(s, 0, floats{2, 3}, summary) == 2.0);
  CHECK(oracle::score_unit(s, 0, floats{-2, 3}, summary) == -2.0);
}

TEST_CASE("ball summary and score") {
  const auto s = of_summary(oracle::summary_kind::ball, 2);
  // Distances from (2, 0) are 2, 4, 2.
  const auto summary = oracle::summarise(s, 0, rows_of({0, 0, 6, 0, 0, 0}, 2));
  CHECK(summary.values == doubles{2.0, 0.0, 4.0});
  CHECK(oracle::score_unit(s, 0, floats{3, 4}, summary) == 13.0);   // (6 + 5 * 4) / 2
  CHECK(oracle::score_unit(s, 0, floats{-3, -4}, summary) == 7.0);  // (-6 + 5 * 4) / 2
  CHECK(oracle::summarise(s, 0, rows_of({0, 0, 6, 8}, 2)).values == doubles{3.0, 4.0, 5.0});
}

TEST_CASE("key_sketch keeps the mean and residuals in its bits") {
  // Mean (1, 2), residuals (3, 1) and (-3, -1).
  const floats keys{4, 3, -2, 1};
  const floats q{1, 1};  // <q, m> is 3
  const auto one = of_summary(oracle::summary_kind::key_sketch, 2, 1);
  const auto of_one = oracle::summarise(one, 0, rows_of(keys, 2));
  CHECK(of_one.values == doubles{1.0, 2.0, 2.0, 2.0, -2.0, -2.0});  // mean |r| is 2
  CHECK(of_one.doubt == doubles(6, 0.0));
  CHECK(oracle::score_unit(one, 0, q, of_one) == near(std::log(std::exp(3.5) + std::exp(-0.5))));
  const auto two = of_summary(oracle::summary_kind::key_sketch, 2, 2);
  const auto of_two = oracle::summarise(two, 0, rows_of(keys, 2));
  CHECK(of_two.values == doubles{1.0, 2.0, 3.0, 0.0, -3.0, 0.0});  // 1 is a third of the step
  CHECK(oracle::score_unit(two, 0, q, of_two) == near(std::log(std::exp(3.0) + 1.0)));
  const auto four = of_summary(oracle::summary_kind::key_sketch, 2, 4);
  const auto of_four = oracle::summarise(four, 0, rows_of(keys, 2));
  CHECK(of_four.values[2] == near(3.0));
  CHECK(of_four.values[3] == near(6.0 / 7.0));  // 7/3 steps of 3/7 are 2
  const double move = 0.5 * (3.0 + 6.0 / 7.0);
  CHECK(oracle::score_unit(four, 0, q, of_four) == near(1.5 + std::log(std::exp(move) + std::exp(-move))));
}

TEST_CASE("key_sketch reports codes at an edge and signs near 0") {
  // Residuals (2, 1) and (-2, -1): half a step of 2 bits.
  const auto two = of_summary(oracle::summary_kind::key_sketch, 2, 2);
  const auto edge = oracle::summarise(two, 0, rows_of({2, 1, -2, -1}, 2));
  CHECK(edge.values == doubles{0.0, 0.0, 2.0, 0.0, -2.0, 0.0});
  CHECK(edge.doubt == doubles{0.0, 0.0, 0.0, 2.0, 0.0, 2.0});

  // Residuals (0, -2) and (0, 2): a step of 1, and 0 counts as positive, which float32 sums may not show.
  const auto one = of_summary(oracle::summary_kind::key_sketch, 2, 1);
  const auto zero = oracle::summarise(one, 0, rows_of({1, 0, 1, 4}, 2));
  CHECK(zero.values == doubles{1.0, 2.0, 1.0, -1.0, 1.0, 1.0});
  CHECK(zero.doubt == doubles{0.0, 0.0, 2.0, 0.0, 2.0, 0.0});
  CHECK(oracle::score_doubt(one, 0, floats{0, 5}, zero) == 0.0);
  // Both exponents may fall by scale * |q_0| * 2 steps.
  CHECK(oracle::score_doubt(one, 0, floats{-3, 0}, zero) == near(3.0));
  // A 0 that no sum made is 0 everywhere.
  CHECK(oracle::summarise(one, 0, rows_of({0, 0, 0, 4}, 2)).doubt == doubles(6, 0.0));
  CHECK(oracle::signed_means({-0.0, 2.0}) == doubles{1.0, 1.0});
}

TEST_CASE("a NaN key makes every summary's score NaN") {
  using kinds = oracle::summary_kind;
  for (kinds kind : {kinds::mean, kinds::centroid_box, kinds::ball, kinds::key_sketch})
    for (int bits : {1, 2, 4})
      for (const floats& keys : {floats{float_nan, 1, 2, 1}, floats{1, 2, 1, float_nan}}) {
        const auto s = of_summary(kind, 2, bits);
        CHECK(std::isnan(oracle::score_unit(s, 0, floats{1, 1}, oracle::summarise(s, 0, rows_of(keys, 2)))));
      }
}

TEST_CASE("what a stored number may be off by moves the score") {
  using kinds = oracle::summary_kind;
  const auto doubt = [](kinds kind, const oracle::page_summary& summary, const floats& q) {
    return oracle::score_doubt(of_summary(kind, 2), 0, q, summary);
  };
  CHECK(doubt(kinds::mean, {{7.0, 2.0}, {0.0, 1.0}}, {1, -3}) == near(1.5));
  CHECK(doubt(kinds::mean, {{7.0, 2.0}, {}}, {1, -3}) == 0.0);
  CHECK(doubt(kinds::min_max, {{0.0, 0.0, 1.0, 1.0}, {0.0, 1.0, 0.0, 2.0}}, {1, -3}) == near(3.0));
  CHECK(doubt(kinds::centroid_box, {{0.0, 0.0, 1.0, 1.0}, {4.0, 0.0, 0.0, 0.0}}, {1, -3}) == near(2.0));
  CHECK(doubt(kinds::ball, {{2.0, 0.0, 4.0}, {0.0, 1.0, 2.0}}, {3, 4}) == near(7.0));
  CHECK(doubt(kinds::ball, {{2.0, 0.0, 4.0}, {}}, {3, 4}) == 0.0);
  // Two equal chunks: what both may move by, the score may.
  CHECK(doubt(kinds::chunk_means, {{7.0, 2.0, 7.0, 2.0}, {0.0, 1.0, 0.0, 1.0}}, {1, -3}) == near(1.5));
  for (kinds kind : {kinds::mean, kinds::chunk_means})
    CHECK(doubt(kind, {{7.0, 2.0}, {0.0, oracle::infinity}}, {1, 0}) == oracle::infinity);
  const double inf = oracle::infinity;  // a stored infinity that may have been finite
  CHECK(doubt(kinds::mean, {{inf, 2.0}, {inf, 0.0}}, {1, 0}) == inf);
  CHECK(doubt(kinds::ball, {{7.0, 2.0, 1.0}, {0.0, 0.0, oracle::infinity}}, {0, 0}) == oracle::infinity);
  // A radius whose square float32 does not hold may come out as 0.
  CHECK(doubt(kinds::ball, {{2.0, 0.0, 1e-25}, {}}, {1e18F, 0}) >= 0.5e-7);
}

TEST_CASE("squares and differences that float32 cannot hold are reported") {
  oracle::settings s = tiny();
  const auto overflows = [&](oracle::summary_kind kind, float key, float q) {
    s.summary = kind;
    s.bits = 2;
    oracle::decoder decoder(s);
    decoder.prompt(floats{key, key, 1, 1, 1, 1, 1, 1}, floats(8), 8);
    return decoder.choose(floats{q}, 0, 8).may_overflow;
  };
  using kinds = oracle::summary_kind;
  CHECK(overflows(kinds::ball, 1e19F, 1));
  CHECK_FALSE(overflows(kinds::ball, 1e18F, 1));
  CHECK(overflows(kinds::ball, 1, 1e20F));
  CHECK_FALSE(overflows(kinds::mean, 1e19F, 1));
  CHECK_FALSE(overflows(kinds::mean, 1, 1e20F));
  CHECK(overflows(kinds::centroid_box, 1e38F, 1));
  CHECK(overflows(kinds::key_sketch, 1e38F, 1));
  CHECK_FALSE(overflows(kinds::mean, 1e38F, 1));
  // |q| |c| and |q| r, r being at most twice the largest key; a residual is that too.
  for (kinds kind : {kinds::ball, kinds::key_sketch}) {
    s.summary = kind;
    oracle::decoder decoder(s);
    decoder.prompt(floats(8, 1.0F), floats(8), 8);
    CHECK(decoder.choose(floats{3}, 0, 8).score_size == near(9.0));
  }
}

TEST_CASE("key_clusters is in the cluster whose centroid points most alike, not in the nearest") {
  auto s = of_summary(oracle::summary_kind::key_clusters, 2);
  s.bases = {{{9.0, 9.0}, {8.0, 8.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0}}};  // the mean has no part in it
  const auto cluster_of = [&](const floats& keys) { return oracle::summarise(s, 0, rows_of(keys, 2)); };
  CHECK(cluster_of({1, 2, 1, 0}).values == doubles{0.0});  // their mean is (1, 1)
  const auto tied = cluster_of({1, -1, 1, 0.5});
  CHECK(tied.values == doubles{1.0});  // as much as cluster 2's, which comes behind it
  CHECK(tied.others == std::vector<oracle::other_code>{{0, 0, 2}});
  CHECK(oracle::score_unit(s, 0, floats{3, 1}, tied) == 1.5);
  CHECK(oracle::score_doubt(s, 0, floats{3, 1}, tied) == 1.5);
  CHECK(oracle::score_unit(s, 0, floats{3, 1}, cluster_of({1, 1, 1, 1})) == 16.0);
  CHECK(std::isnan(oracle::score_unit(s, 0, floats{3, 1}, cluster_of({1, float_nan, 1, 1}))));
  CHECK(std::isnan(oracle::score_unit(s, 0, floats{3, 1}, cluster_of({float_inf, 0, 1, 1}))));
  CHECK(cluster_of({-1, 0.5, -1, -0.5}).values == doubles{0.0});  // all but the last are behind it
}
