// Steps that append several rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "by_hand.hpp"

namespace {

/// How many tokens attention summed over, where every score is 0.
doubles counted(const oracle::step_result& step) {
  doubles counts;
  for (double lse : step.lse) counts.push_back(std::round(std::exp(lse)));
  return counts;
}

bool same_attention(const oracle::step_result& a, const oracle::step_result& b) {
  return a.out == b.out && a.lse == b.lse;
}

/// Two KV heads of two query heads each, sink 2, window 4, pages of 2.
oracle::settings with_rows(int max_rows) {
  oracle::settings s{.query_heads = 4, .kv_heads = 2, .head_dim = 4, .page = 2, .sink = 2, .window = 4};
  s.selected_units = 2;
  s.scale = 0.5;
  s.tau = 0.2;
  s.max_rows = max_rows;
  return s;
}

/// What one append of `with_rows` brings; `q` only where the rows are decoded.
struct append_rows {
  floats q, k, v;
  int rows;
};

append_rows random_rows(std::mt19937& generator, int rows) {
  return {random_floats(generator, rows * 16), random_floats(generator, rows * 8),
          random_floats(generator, rows * 8), rows};
}

oracle::step_result decode(oracle::decoder& decoder, const append_rows& a) {
  return decoder.step(a.q, a.k, a.v, a.rows);
}

void append_prompt(oracle::decoder& decoder, const append_rows& a) { decoder.prompt(a.k, a.v, a.rows); }

/// `rows` of the rows of `a`, from row `first` on.
append_rows some_rows(const append_rows& a, int first, int rows) {
  const auto part = [&](const floats& data) {
    const auto width = static_cast<std::ptrdiff_t>(data.size()) / a.rows;
    return floats(data.begin() + first * width, data.begin() + (first + rows) * width);
  };
  return {part(a.q), part(a.k), part(a.v), rows};
}

append_rows first_rows(const append_rows& a, int rows) { return some_rows(a, 0, rows); }

/// The largest difference of a step's outputs from each row's full attention.
double difference_from_full(oracle::decoder& decoder, const append_rows& a) {
  const int before = decoder.length();
  const auto result = decode(decoder, a);
  REQUIRE(result.out.size() == static_cast<std::size_t>(a.rows * 16));
  REQUIRE(result.lse.size() == static_cast<std::size_t>(a.rows * 4));
  double largest = 0.0;
  for (int i = 0; i < a.rows; ++i) {
    const auto full = decoder.full(oracle::row_of(a.q, i, 16), before + i + 1);
    const auto out = oracle::row_of(result.out, i, 16), lse = oracle::row_of(result.lse, i, 4);
    for (std::size_t e = 0; e < 16; ++e) largest = std::max(largest, std::fabs(out[e] - full.out[e]));
    for (std::size_t e = 0; e < 4; ++e) largest = std::max(largest, std::fabs(lse[e] - full.lse[e]));
  }
  return largest;
}

oracle::drift_result turned_to(double pooled, double tau) { return {pooled < tau, false, pooled, false}; }

bool rows_are_firm(const std::vector<oracle::drift_result>& rows, double tau) {
  const oracle::drift_result all = oracle::drift_of_rows(rows, tau);
  oracle::row_result row;
  row.corrected = all.flagged;
  row.pooled_cosine = all.pooled;
  row.norm_borderline = all.norm_borderline;
  return oracle::flag_is_firm(row, tau);
}

}  // namespace

TEST_CASE("the window ring has room for the pages that several rows open") {
  oracle::settings s{.page = 4, .sink = 4, .window = 8, .scale = 1.0};
  for (const auto& [max_rows, slots] : std::vector<std::pair<int, int>>{{1, 3}, {2, 4}, {3, 4}, {4, 5}}) {
    s.max_rows = max_rows;
    CHECK(oracle::ring_slots(s) == slots);
  }
  s.max_rows = 2;
  CHECK(oracle::ring_pages(s, 24) == ints{2, 3, 4, 5});
  CHECK(oracle::ring_pages(s, 12) == ints{1, 2});
  s = {.page = 1, .window = 1, .scale = 1.0, .max_rows = 4};
  CHECK(oracle::ring_slots(s) == 8);
}

TEST_CASE("candidates are fixed before the rows, every later page is their window") {
  using kinds = oracle::layer_kind;
  oracle::settings s{.query_heads = 3, .kv_heads = 3, .page = 4, .sink = 4, .window = 4, .scale = 1.0};
  s.head_kinds = {kinds::retrieval, kinds::window, kinds::complete};
  s.max_rows = 5;
  oracle::decoder decoder(s);
  decoder.prompt(floats(45), floats(45), 15);
  const auto counts = [&](int rows) {
    const auto n = static_cast<std::size_t>(rows * 3);
    const auto result = decoder.step(floats(n, 1.0F), floats(n), floats(n), rows);
    CHECK(result.out.size() == n);
    return counted(result);
  };
  // At 16 the window's tokens 12..15 are page 3. Selected: the sink, page 1, from page 3 to the row.
  // The window head's windows begin at 12, 12 (tokens 13..16) and 12.
  CHECK(decoder.candidates() == ints{1, 2});
  CHECK(counts(3) == doubles{12, 8, 16, 13, 9, 17, 14, 10, 18});
  // At 19 the window's tokens 15..18 begin in page 3.
  CHECK(decoder.candidates() == ints{1, 2});
  CHECK(counts(1) == doubles{15, 11, 19});
  // At 20 they are page 4, and page 4 stays the window's though at 24 only page 5 would.
  CHECK(decoder.candidates() == ints{1, 2, 3});
  CHECK(counts(5) == doubles{12, 8, 20, 13, 9, 21, 14, 10, 22, 15, 11, 23, 16, 8, 24});
  CHECK(decoder.candidates() == ints{1, 2, 3, 4});  // at 25 from token 21 on
}

TEST_CASE("several rows into an empty sequence") {
  oracle::settings s{.page = 4, .sink = 4, .window = 4, .scale = 1.0, .max_rows = 6};
  oracle::decoder decoder(s);
  CHECK(decoder.candidates() == ints{});
  CHECK(counted(decoder.step(floats(3), floats(3), floats(3), 3)) == doubles{1, 2, 3});
  CHECK(counted(decoder.step(floats(6), floats(6), floats(6), 6)) == doubles{4, 5, 6, 7, 8, 9});
}

TEST_CASE("a row attends to itself and the rows before it") {
  oracle::settings s{.page = 4, .window = 4, .scale = 1.0, .max_rows = 3};
  oracle::decoder decoder(s);
  // Row 0 with q 1: keys 0 and ln 2, weights 1/3 and 2/3. Row 1 with q 0: 1/3 each. Row 2 with q 1: keys
  // 0, ln 2, ln 3, ln 6, weights 1/12, 2/12, 3/12, 6/12.
  decoder.prompt(floats{0}, floats{3}, 1);
  const auto result = decoder.step(floats{1, 0, 1}, floats{std::log(2.0F), std::log(3.0F), std::log(6.0F)},
                                   floats{6, 9, 24}, 3);
  CHECK(result.out[0] == near(5.0));
  CHECK(result.out[1] == near(6.0));
  CHECK(result.out[2] == near((3.0 + 12.0 + 27.0 + 144.0) / 12.0));
  CHECK(result.lse[0] == near(std::log(3.0)));
  CHECK(result.lse[1] == near(std::log(3.0)));
  CHECK(result.lse[2] == near(std::log(12.0)));
}

TEST_CASE("rows do not see what comes after them") {
  std::mt19937 generator(31);
  oracle::settings s = with_rows(5);
  s.correction = oracle::correction_kind::never;  // or the later queries would share in the selection
  oracle::decoder decoder(s);
  append_prompt(decoder, random_rows(generator, 23));
  decode(decoder, random_rows(generator, 1));
  const append_rows all = random_rows(generator, 5);
  oracle::decoder whole = decoder;
  const auto result = decode(whole, all);
  for (int rows = 1; rows < 5; ++rows) {
    INFO(rows << " rows");
    oracle::decoder fewer = decoder;
    const auto first = decode(fewer, first_rows(all, rows));
    const auto outs = static_cast<std::ptrdiff_t>(first.out.size());
    const auto lses = static_cast<std::ptrdiff_t>(first.lse.size());
    CHECK(first.out == doubles(result.out.begin(), result.out.begin() + outs));
    CHECK(first.lse == doubles(result.lse.begin(), result.lse.begin() + lses));
  }
}

TEST_CASE("rows under a budget that covers everything are full attention") {
  std::mt19937 generator(32);
  for (int pages : {40, 2}) {
    oracle::settings s = with_rows(7);
    s.selected_units = pages;
    oracle::decoder decoder(s);
    append_prompt(decoder, random_rows(generator, 20));
    double difference = 0.0;
    for (int rows : {1, 7, 3, 2, 5, 1, 4, 6})
      difference = std::max(difference, difference_from_full(decoder, random_rows(generator, rows)));
    CHECK((difference < 1e-9) == (pages == 40));
  }
}

TEST_CASE("room for more rows changes nothing about single ones but the ring") {
  std::mt19937 generator(33);
  oracle::decoder one(with_rows(1)), many(with_rows(4));
  const append_rows before = random_rows(generator, 17);
  append_prompt(one, before);
  append_prompt(many, before);
  int promoted_of_one = 0, promoted_of_many = 0;
  for (int i = 0; i < 20; ++i) {
    const append_rows a = random_rows(generator, 1);
    const auto of_one = one.step(a.q, a.k, a.v), of_many = decode(many, a);
    CHECK(same_attention(of_one, of_many));
    for (std::size_t h = 0; h < 2; ++h) {
      const oracle::row_result &x = of_one.rows[h], &y = of_many.rows[h];
      CHECK(x.corrected == y.corrected);
      CHECK(x.selected == y.selected);
      CHECK(x.selected_next == y.selected_next);
      CHECK(x.slots == y.slots);
      CHECK(x.recalled + x.promoted == y.recalled + y.promoted);
      promoted_of_one += x.promoted;
      promoted_of_many += y.promoted;
    }
  }
  CHECK(promoted_of_one < promoted_of_many);
}

TEST_CASE("all rows select as one group") {
  // Mean keys (4, 0), (0, 4) and (3, 3): the first query alone takes page 0, the second page 1.
  for (auto pooling : {oracle::pooling_kind::mean_score, oracle::pooling_kind::mean_query}) {
    oracle::settings s = tiny();
    s.head_dim = 2;
    s.summary = oracle::summary_kind::mean;
    s.pooling = pooling;
    s.max_rows = 2;
    oracle::decoder decoder(s);
    decoder.prompt(floats{4, 0, 4, 0, 0, 4, 0, 4, 3, 3, 3, 3, 0, 0, 0, 0}, floats(16), 8);
    CHECK(decoder.candidates() == ints{0, 1, 2});
    CHECK(decoder.select(floats{1, 0}, 0, 9) == ints{0});
    CHECK(decoder.select(floats{0, 1}, 0, 9) == ints{1});
    CHECK(decoder.select(floats{1, 0, 0, 1}, 0, 9, 2) == ints{2});
    const auto row = decoder.step(floats{1, 0, 0, 1}, floats(4), floats(4), 2).rows[0];
    CHECK(row.selected == ints{2});
    CHECK(row.selected_next == ints{2});
  }
}

TEST_CASE("the rows of a group pool as one row of a larger group does") {
  std::mt19937 generator(34);
  using kinds = oracle::pooling_kind;
  const append_rows before = random_rows(generator, 23);
  const append_rows a = random_rows(generator, 3);
  // (3 rows, 2 KV heads, 2 heads, 4) to (2 KV heads, 3 * 2 heads, 4).
  floats as_one_row;
  for (int kv_head = 0; kv_head < 2; ++kv_head)
    for (int i = 0; i < 3; ++i)
      for (float element : oracle::row_of(a.q, i * 2 + kv_head, 8)) as_one_row.push_back(element);
  for (kinds pooling : {kinds::mean_softmax, kinds::max_softmax, kinds::mean_score, kinds::max_score,
                        kinds::mean_query, kinds::max_query}) {
    oracle::settings s = with_rows(3);
    s.pooling = pooling;
    oracle::decoder rows(s);
    s.query_heads = 12;
    oracle::decoder heads(s);
    append_prompt(rows, before);
    append_prompt(heads, before);
    std::vector<oracle::selection> from_rows;
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      from_rows.push_back(rows.choose(a.q, kv_head, 24, 3));
      const auto from_heads = heads.choose(as_one_row, kv_head, 24);
      CHECK(from_rows.back().pooled == from_heads.pooled);
      CHECK(from_rows.back().score_size == from_heads.score_size);
      CHECK(from_rows.back().pages == from_heads.pages);
      CHECK(from_rows.back().pooled != rows.choose(oracle::row_of(a.q, 2, 16), kv_head, 24).pooled);
    }
    const auto result = decode(rows, a);
    for (std::size_t h = 0; h < 2; ++h) {
      CHECK(result.rows[h].selected == from_rows[h].pages);
      CHECK(result.rows[h].correct_margin == from_rows[h].margin);
      CHECK(result.rows[h].selected_next == rows.select(a.q, static_cast<int>(h), 27, 3));
    }
  }
}

TEST_CASE("one row that turned flags the head, and the last row is the next q'") {
  for (const floats& rows : {floats{2, 0, 3, 4}, floats{3, 4, 2, 0}, floats{0, 0, 3, 4}}) {
    oracle::settings s = tiny();
    s.head_dim = 2;
    s.max_rows = 2;
    s.tau = 0.7;
    const bool zero = rows[0] == 0.0F;
    for (double tau : {0.7, 0.5}) {
      s.tau = tau;
      oracle::decoder decoder(s);
      decoder.step(floats{1, 0}, floats(2), floats(2));
      const auto row = decoder.step(rows, floats(4), floats(4), 2).rows[0];
      CHECK(row.corrected == (zero || tau == 0.7));
      CHECK(row.flag_forced == zero);
      CHECK(oracle::flag_is_firm(row, tau));
      if (zero)
        CHECK(std::isnan(row.pooled_cosine));
      else
        CHECK(row.pooled_cosine == near(0.6));
      const auto next = decoder.step(floats{3, 4}, floats(2), floats(2)).rows[0];
      CHECK(next.pooled_cosine == near(rows[2] == 3.0F ? 1.0 : 0.6));
    }
  }
}

TEST_CASE("each row's group is pooled by itself") {
  // Rows of two heads with cosines (1, 0) and (0.6, 0.6): means 0.5 and 0.6, least 0 and 0.6, most 1 and 0.6.
  using pools = oracle::drift_pool_kind;
  for (const auto& [pool, smallest] :
       std::vector<std::pair<pools, double>>{{pools::mean, 0.5}, {pools::min, 0.0}, {pools::max, 0.6}}) {
    oracle::settings s = tiny();
    s.head_dim = 2;
    s.query_heads = 2;
    s.max_rows = 2;
    s.drift_pool = pool;
    oracle::decoder decoder(s);
    decoder.step(floats{1, 0, 1, 0}, floats(2), floats(2));
    const floats rows{5, 0, 0, 1, 3, 4, 6, 8};
    CHECK(decoder.step(rows, floats(4), floats(4), 2).rows[0].pooled_cosine == near(smallest));
  }
}

TEST_CASE("one firmly flagged row makes the flag firm, otherwise all have to be firm") {
  const double tau = 0.5;
  const auto above = turned_to(0.8, tau), below = turned_to(0.2, tau);
  const auto edge = turned_to(0.5 + 1e-6, tau), other_edge = turned_to(0.5 - 1e-6, tau);
  oracle::drift_result forced{true, true, oracle::not_a_number, false};
  const auto borderline = [](oracle::drift_result row) {
    row.norm_borderline = true;
    return row;
  };
  CHECK(rows_are_firm({above, above}, tau));
  CHECK(rows_are_firm({above, below}, tau));
  CHECK(rows_are_firm({below, edge}, tau));
  CHECK(rows_are_firm({edge, below}, tau));
  CHECK(rows_are_firm({forced, edge}, tau));
  CHECK(rows_are_firm({borderline(above), below}, tau));
  CHECK(rows_are_firm({borderline(forced), below}, tau));
  CHECK(rows_are_firm({forced, borderline(forced)}, tau));
  CHECK_FALSE(rows_are_firm({above, edge}, tau));
  CHECK_FALSE(rows_are_firm({above, borderline(above)}, tau));
  CHECK_FALSE(rows_are_firm({above, borderline(below)}, tau));
  CHECK_FALSE(rows_are_firm({above, borderline(forced)}, tau));
  CHECK_FALSE(rows_are_firm({edge, borderline(below)}, tau));
  CHECK_FALSE(rows_are_firm({other_edge, borderline(below)}, tau));
  CHECK_FALSE(rows_are_firm({other_edge, borderline(forced)}, tau));

  const auto mixed = oracle::drift_of_rows({above, below, turned_to(0.3, tau)}, tau);
  CHECK(mixed.flagged);
  CHECK_FALSE(mixed.forced);
  CHECK(mixed.pooled == 0.2);
  CHECK_FALSE(oracle::drift_of_rows({above, turned_to(0.6, tau)}, tau).flagged);
  CHECK(oracle::drift_of_rows({above, turned_to(0.6, tau)}, tau).pooled == 0.6);
  const auto one_forced = oracle::drift_of_rows({above, forced}, tau);
  CHECK(one_forced.flagged);
  CHECK(one_forced.forced);
  CHECK(std::isnan(one_forced.pooled));
}

TEST_CASE("a deficit is of the masses of all rows") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::mass_deficit;
  s.max_rows = 2;
  for (double delta : {0.1, 0.3}) {
    s.delta = delta;
    oracle::decoder decoder(s);
    decoder.prompt(floats{1, -5, 3, 2, 0}, floats(5), 5);
    CHECK(decoder.step(floats{1}, floats{0}, floats{0}).rows[0].selected_next == ints{1});
    // q = 1 scores pages 0 and 1 with 1 and 3, q = -1 with 5 and -2. The second row alone misses nearly all.
    const double held = (1.0 / (1.0 + std::exp(-2.0)) + 1.0 / (1.0 + std::exp(7.0))) / 2.0;
    const double needed = (1.0 - delta) * (1.0 - held);
    const auto row = decoder.step(floats{1, -1}, floats(2), floats(2), 2).rows[0];
    CHECK(row.corrected == (delta == 0.1));
    CHECK(row.selected == (delta == 0.1 ? ints{0} : ints{1}));
    CHECK(row.flag_margin == near(std::fabs(held - needed) / std::max(held, needed)));
    CHECK(oracle::flag_is_firm(row, s.tau));
  }
}

TEST_CASE("every n steps counts steps, not rows") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::every_n_steps;
  s.every = 2;
  s.max_rows = 3;
  oracle::decoder decoder(s);
  ints corrected;
  for (int rows : {3, 1, 2, 3, 1}) {
    const floats data(static_cast<std::size_t>(rows), 1.0F);
    corrected.push_back(decoder.step(data, data, data, rows).rows[0].corrected ? 1 : 0);
  }
  CHECK(corrected == ints{1, 0, 1, 0, 1});
}

TEST_CASE("slots are filled from the ring as it is after all rows") {
  oracle::settings s = tiny();
  s.max_rows = 3;  // R is 4
  oracle::decoder decoder(s);
  decoder.prompt(floats{5, 5, 1, 1, 2, 2, 9, 9}, floats(8), 8);
  // From 8 to 11: the ring holds pages 0 to 3, then 2 to 5. At 9 page 3 is the window's, at 12 a candidate.
  const auto row = decoder.step(floats{1, 1, 1}, floats(3), floats(3), 3).rows[0];
  CHECK(row.selected == ints{0});
  CHECK(row.by_correct.recalled == 1);
  CHECK(row.by_correct.promoted == 0);
  CHECK(row.selected_next == ints{3});
  CHECK(row.by_speculate.recalled == 0);
  CHECK(row.by_speculate.promoted == 1);
  CHECK(row.slots == ints{3});
  CHECK(decoder.slots(0) == ints{3});
  CHECK(decoder.selected(0) == ints{3});
}

TEST_CASE("more rows than the settings allow are refused") {
  oracle::settings s = tiny();
  s.max_rows = 0;
  CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
  s.max_rows = 2;
  oracle::decoder decoder(s);
  CHECK_THROWS_AS(decoder.step(floats(3), floats(3), floats(3), 3), std::invalid_argument);
  CHECK_THROWS_AS(decoder.step(floats(0), floats(0), floats(0), 0), std::invalid_argument);
  CHECK_THROWS_AS(decoder.step(floats(1), floats(2), floats(2), 2), std::invalid_argument);
  CHECK_THROWS_AS(decoder.step(floats(2), floats(1), floats(2), 2), std::invalid_argument);
  CHECK_THROWS_AS(decoder.step(floats(2), floats(2), floats(1), 2), std::invalid_argument);
  CHECK_THROWS_AS(decoder.full(floats(1), 1), std::invalid_argument);
  CHECK(decoder.length() == 0);
}
