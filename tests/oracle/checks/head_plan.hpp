// Heads of one layer that attend to different pages.
#pragma once

#include "by_hand.hpp"

TEST_CASE("each head of a plan attends to its own kind of pages") {
  using kinds = oracle::layer_kind;
  oracle::settings s{.query_heads = 6, .kv_heads = 3, .head_dim = 1, .page = 4, .sink = 4, .window = 4};
  s.scale = 1.0;
  s.head_kinds = {kinds::complete, kinds::retrieval, kinds::window};
  s.kind = kinds::window;  // of no head
  oracle::decoder decoder(s);
  decoder.prompt(floats(45), floats(45), 15);
  const auto step = decoder.step(floats{1, 1, 1, 1, 1, 1}, floats(3), floats(3));
  // Equal scores: the lse counts 16 tokens, 4 of the sink, 4 of page 1 and 4 of the window.
  const doubles counts{16, 16, 12, 12, 8, 8};
  for (std::size_t head = 0; head < 6; ++head) CHECK(step.lse[head] == near(std::log(counts[head])));
  for (std::size_t head : {0U, 2U}) {
    CHECK_FALSE(step.rows[head].corrected);
    CHECK(step.rows[head].selected_next == ints{});
    CHECK(step.rows[head].recalled == 0);
    CHECK(step.rows[head].slots == ints{});
  }
  CHECK(step.rows[1].corrected);
  CHECK(step.rows[1].selected == ints{1});
  CHECK(step.rows[1].recalled == 1);
  const floats q(6, 1.0F);
  CHECK(decoder.select(q, 1, 16) == ints{1});
  CHECK_THROWS_AS(decoder.select(q, 0, 16), std::invalid_argument);
  CHECK_THROWS_AS(decoder.select(q, 2, 16), std::invalid_argument);

  s.head_kinds.clear();
  CHECK(oracle::kind_of(s, 1) == kinds::window);
  // Settings of a retrieval head are checked where a plan has one.
  s.spare = -1;
  oracle::decoder no_retrieval(s);
  s.head_kinds = {kinds::complete, kinds::complete, kinds::retrieval};
  CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
}
