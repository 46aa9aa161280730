// Poolings other than mean_softmax.
#pragma once

#include "by_hand.hpp"

TEST_CASE("poolings of scores and shares") {
  using kinds = oracle::pooling_kind;
  // Shares 1/4, 3/4 and 1/2, 1/2.
  const auto shares = oracle::pool(kinds::max_softmax, {{0.0, std::log(3.0)}, {5.0, 5.0}});
  CHECK(shares[0] == near(std::log(0.5)));
  CHECK(shares[1] == near(std::log(0.75)));
  const std::vector<doubles> scores{{1.0, 6.0, -2.0}, {3.0, -4.0, 0.0}};
  CHECK(oracle::pool(kinds::mean_score, scores) == doubles{2.0, 1.0, -1.0});
  CHECK(oracle::pool(kinds::max_score, scores) == doubles{3.0, 6.0, 0.0});
  CHECK(oracle::pool(kinds::mean_query, {{3.0, -4.0}}) == doubles{3.0, -4.0});
}

TEST_CASE("NaN and infinity in every pooling") {
  using kinds = oracle::pooling_kind;
  const double nan = oracle::not_a_number, inf = oracle::infinity;
  for (kinds kind : {kinds::mean_softmax, kinds::max_softmax, kinds::mean_score, kinds::max_score}) {
    const auto pooled = oracle::pool(kind, {{1.0, nan, -inf}, {2.0, 9.0, -inf}});
    CHECK(std::isfinite(pooled[0]));
    CHECK(pooled[1] == -inf);
    CHECK(pooled[2] == -inf);
  }
  CHECK(oracle::pool(kinds::mean_score, {{-inf, inf}, {3.0, inf}}) == doubles{-inf, oracle::largest_float});
  CHECK(oracle::pool(kinds::max_score, {{-inf, inf}, {3.0, 1.0}}) == doubles{3.0, oracle::largest_float});
  CHECK(oracle::pool(kinds::mean_query, {{nan, inf, -1e39}}) == doubles{-inf, oracle::largest_float, -inf});
  // A head at -inf everywhere has no share and spoils none.
  CHECK(oracle::pool(kinds::max_softmax, {{-inf, -inf}, {2.0, -inf}}) == doubles{0.0, -inf});
  CHECK(oracle::mean_score_may_overflow({{3e38}, {3e38}}));
  CHECK(oracle::mean_score_may_overflow({{inf}, {inf}}));
  CHECK_FALSE(oracle::mean_score_may_overflow({{inf, 1.0}, {1.0, 3e38}}));
}

TEST_CASE("queries are pooled elementwise, with their signs") {
  using kinds = oracle::pooling_kind;
  const floats queries{1, -5, 3, 2};
  CHECK(oracle::pooled_query(kinds::mean_query, queries, 2) == floats{2, -1.5F});
  CHECK(oracle::pooled_query(kinds::max_query, queries, 2) == floats{3, 2});
  CHECK(oracle::pooled_query(kinds::max_query, floats{-3, -1}, 2) == floats{-1});
  for (kinds kind : {kinds::mean_query, kinds::max_query})
    for (const floats& lost : {floats{1, float_nan}, floats{float_nan, 1}})
      CHECK(std::isnan(oracle::pooled_query(kind, lost, 2)[0]));
}

TEST_CASE("each pooling has a page of its own") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.query_heads = 2;
  s.summary = oracle::summary_kind::mean;
  // Queries (3, -1) and (-1, 3) score the pages: 0: 8 and -8; 1: 4, 4; 2: 7, -5; 3 is the window's.
  oracle::decoder decoder(s);
  const floats keys{2, -2, 2, -2, 2, 2, 2, 2, 2, -1, 2, -1, 0, 0, 0, 0};
  const auto chosen = [&](oracle::pooling_kind kind) {
    s.pooling = kind;
    oracle::decoder each(s);
    each.prompt(keys, floats(16), 8);
    return each.choose(floats{3, -1, -1, 3}, 0, 8);
  };
  using kinds = oracle::pooling_kind;
  CHECK(chosen(kinds::mean_score).pooled == doubles{0.0, 4.0, 1.0});
  CHECK(chosen(kinds::max_score).pooled == doubles{8.0, 4.0, 7.0});
  CHECK(chosen(kinds::mean_query).pooled == doubles{0.0, 4.0, 1.0});  // (1, 1)
  CHECK(chosen(kinds::max_query).pooled == doubles{0.0, 12.0, 3.0});  // (3, 3)
  CHECK(chosen(kinds::max_query).score_size == near(12.0));
  CHECK(chosen(kinds::mean_query).score_size == near(4.0));
  const double first = 8.0 + std::log1p(std::exp(-4.0) + std::exp(-1.0));
  const double second = 4.0 + std::log1p(std::exp(-12.0) + std::exp(-9.0));
  const auto shares = chosen(kinds::max_softmax);
  CHECK(shares.pooled[0] == near(8.0 - first));
  CHECK(shares.pooled[1] == near(4.0 - second));
  CHECK(shares.pages == ints{1});
  CHECK(chosen(kinds::max_score).pages == ints{0});
}

TEST_CASE("sums over a group that float32 cannot hold are reported where a pooling makes them") {
  oracle::settings s = tiny();
  s.query_heads = 2;
  s.summary = oracle::summary_kind::mean;
  using kinds = oracle::pooling_kind;
  const auto overflows = [&](kinds kind, float key, float q) {
    s.pooling = kind;
    oracle::decoder decoder(s);
    decoder.prompt(floats{key, key, 0, 0, 0, 0}, floats(6), 6);
    return decoder.choose(floats{q, q}, 0, 6).may_overflow;
  };
  for (kinds kind : {kinds::mean_softmax, kinds::max_score, kinds::mean_score, kinds::mean_query}) {
    CHECK(overflows(kind, 2e20F, 1e18F) == (kind == kinds::mean_score));  // two scores of 2e38
    CHECK(overflows(kind, 1e-5F, 2e38F) == (kind == kinds::mean_query));  // two elements of 2e38
  }
}

TEST_CASE("doubt widens every pooling") {
  using kinds = oracle::pooling_kind;
  const std::vector<doubles> scores{{1.0}, {3.0}}, doubts{{0.5}, {1.5}};
  CHECK(oracle::pool_range(kinds::mean_score, scores, doubts).low == doubles{1.0});
  CHECK(oracle::pool_range(kinds::mean_score, scores, doubts).high == doubles{3.0});
  CHECK(oracle::pool_range(kinds::max_score, scores, doubts).low == doubles{1.5});
  CHECK(oracle::pool_range(kinds::max_score, scores, doubts).high == doubles{4.5});
  const double ln2 = std::log(2.0), ln3 = std::log(3.0);
  const auto range = oracle::pool_range(kinds::max_softmax, {{0.0, ln3}}, {{ln2, 0.0}});
  CHECK(range.low[0] == near(std::log(0.5 / 5.0)));
  CHECK(range.high[0] == near(std::log(2.0 / 3.5)));
  const double inf = oracle::infinity;
  const auto any = oracle::pool_range(kinds::max_score, {{oracle::not_a_number}}, {{inf}});
  CHECK(any.low[0] == -inf);
  CHECK(any.high[0] == oracle::largest_float);
  CHECK(oracle::pool_range(kinds::max_score, {{1.0}, {inf}}, {{0.0}, {inf}}).low == doubles{1.0});
}
