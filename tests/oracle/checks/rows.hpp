// Who shares one selection.
#pragma once

#include <stdexcept>

#include "by_hand.hpp"

namespace {

/// Pages 0 and 1 are candidates at length 7, pages 2 and 3 the window. Keys of page j are `keys[j]` for each
/// of its tokens, those of the window 0.
oracle::decoder with_two_candidates(const oracle::settings& s, const std::vector<floats>& keys) {
  oracle::decoder decoder(s);
  floats rows;
  for (int token = 0; token < 6; ++token)
    for (int i = 0; i < s.kv_heads * s.head_dim; ++i) rows.push_back(token < 4 ? keys[token / 2][i] : 0.0F);
  decoder.prompt(rows, floats(rows.size()), 6);
  return decoder;
}

oracle::settings for_two(oracle::scope_kind rows) {
  oracle::settings s = tiny();
  s.query_heads = 2;
  s.rows = rows;
  s.summary = oracle::summary_kind::mean;
  return s;
}

}  // namespace

TEST_CASE("query heads that select each for itself attend to nothing of each other's") {
  oracle::settings s = for_two(oracle::scope_kind::query_head);
  s.head_dim = 2;
  oracle::decoder decoder = with_two_candidates(s, {{1, 0}, {0, 3}});
  auto step = decoder.step(floats{1, 0, 0, 1}, floats(2), floats(2));
  CHECK(step.rows[0].selected == ints{0, 1});
  CHECK(step.rows[0].selected_by_head == std::vector<ints>{{0}, {1}});
  CHECK(step.rows[0].recalled_before_attention == 2);
  const double e = std::exp(1.0);
  CHECK(step.lse[0] == near(std::log(2 * e + 3)));  // two tokens of the page, three of the window
  CHECK(step.lse[1] == near(std::log(2 * e * e * e + 3)));
  CHECK(step.rows[0].slots == ints{0, 1});

  // The second turns to page 0 too, and page 1 goes.
  step = decoder.step(floats{1, 0, 1, -1}, floats(2), floats(2));
  CHECK(step.rows[0].corrected);
  CHECK(step.rows[0].selected == ints{0});
  CHECK(step.rows[0].selected_by_head == std::vector<ints>{{0}, {0}});
  CHECK(step.rows[0].recalled == 0);
  CHECK(step.rows[0].slots == ints{0, -1});

  // A group would have selected page 1 for both.
  s.rows = oracle::scope_kind::kv_head;
  s.pooling = oracle::pooling_kind::max_score;
  decoder = with_two_candidates(s, {{1, 0}, {0, 3}});
  CHECK(decoder.select(floats{1, 0, 0, 1}, 0, 7) == ints{1});

  s.rows = oracle::scope_kind::query_head;
  s.correction = oracle::correction_kind::mass_deficit;
  CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
}

TEST_CASE("a query head that selects for itself pools its own rows of a step") {
  oracle::settings s = for_two(oracle::scope_kind::query_head);
  s.pooling = oracle::pooling_kind::mean_score;
  s.max_rows = 2;
  const oracle::decoder decoder = with_two_candidates(s, {{1}, {2}});
  // Head 0 has queries -4 and 1, head 1 has -1 and 3: scores -1.5 and -3, and 1 and 2.
  const auto choice = decoder.choose(floats{-4, -1, 1, 3}, 0, 7, 2);
  CHECK(choice.pages == ints{0, 1});
  CHECK(choice.margin == near(0.5));  // of 1.5 in 3, and of 1 in 2
}

TEST_CASE("a NaN of one query head does not reach another that selects for itself") {
  const oracle::settings s = for_two(oracle::scope_kind::query_head);
  const oracle::decoder decoder = with_two_candidates(s, {{1}, {2}});
  CHECK(decoder.select(floats{float_nan, 1}, 0, 7) == ints{0, 1});
}

TEST_CASE("a layer's KV heads select together, each with the same share") {
  oracle::settings s = for_two(oracle::scope_kind::layer);
  s.kv_heads = 2;
  s.pooling = oracle::pooling_kind::mean_score;
  const std::vector<floats> keys{{1, 0}, {0, 3}};  // head 0 is for page 0, head 1 for page 1
  oracle::decoder decoder = with_two_candidates(s, keys);
  auto step = decoder.step(floats{1, 1}, floats(2), floats(2));
  for (const auto& row : step.rows) {
    CHECK(row.corrected);
    CHECK(row.selected == ints{1});
  }
  CHECK(step.lse[0] == near(std::log(5.0)));
  CHECK(step.lse[1] == near(std::log(2 * std::exp(3.0) + 3)));
  CHECK(decoder.choose(floats{1, 1}, 0, 7).pooled == doubles{0.5, 1.5});

  s.pooling = oracle::pooling_kind::max_softmax;
  const auto chosen = with_two_candidates(s, keys).choose(floats{1, 1}, 1, 7);
  const double of_first = 1 / (1 + std::exp(-1.0)), of_second = 1 / (1 + std::exp(-3.0));
  CHECK(chosen.pooled[0] == near(std::log((of_first + 1 - of_second) / 2)));
  CHECK(chosen.pooled[1] == near(std::log((of_second + 1 - of_first) / 2)));

  // One head turns, and all are corrected.
  step = decoder.step(floats{1, 1}, floats(2), floats(2));
  for (const auto& row : step.rows) CHECK_FALSE(row.corrected);
  step = decoder.step(floats{1, -1}, floats(2), floats(2));
  for (const auto& row : step.rows) CHECK(row.corrected);
}
