// The reference itself, against numbers worked out by hand. `main` comes from elsewhere (CATCH_CONFIG_MAIN).
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "checks/by_hand.hpp"
#include "checks/channels.hpp"
#include "checks/coarse_to_fine.hpp"
#include "checks/codec.hpp"
#include "checks/correction.hpp"
#include "checks/formats.hpp"
#include "checks/head_plan.hpp"
#include "checks/key_codes.hpp"
#include "checks/pooling.hpp"
#include "checks/residency.hpp"
#include "checks/rows.hpp"
#include "checks/several_rows.hpp"
#include "checks/signatures.hpp"
#include "checks/summaries.hpp"
#include "checks/top_p.hpp"
#include "checks/truncation.hpp"
#include "oracle.hpp"

TEST_CASE("pages with a sink of one page and a window of two") {
  const oracle::settings s{.page = 4, .sink = 4, .window = 8, .scale = 1.0};
  struct expected {
    int length;
    ints sink, window, candidates, ring;
  };
  // The window is the pages of the last 8 tokens; the ring the last 8/4 + 1 = 3 pages; page 0 is the sink.
  const std::vector<expected> by_hand = {
      {1, {0}, {}, {}, {}},                        // token 0
      {4, {0}, {}, {}, {}},                        // tokens 0..3, all of the sink
      {5, {0}, {1}, {}, {1}},                      // token 4 opens page 1
      {12, {0}, {1, 2}, {}, {1, 2}},               // window tokens 4..11, pages 0..2 exist
      {13, {0}, {1, 2, 3}, {}, {1, 2, 3}},         // window tokens 5..12: unaligned, three pages
      {16, {0}, {2, 3}, {1}, {1, 2, 3}},           // window tokens 8..15: page 1 left it, the ring has it
      {17, {0}, {2, 3, 4}, {1}, {2, 3, 4}},        // window tokens 9..16: page 4 took page 1's ring slot
      {20, {0}, {3, 4}, {1, 2}, {2, 3, 4}},        // window tokens 12..19
      {23, {0}, {3, 4, 5}, {1, 2}, {3, 4, 5}},     // window tokens 15..22: token 15 ends page 3
      {24, {0}, {4, 5}, {1, 2, 3}, {3, 4, 5}},     // window tokens 16..23
      {25, {0}, {4, 5, 6}, {1, 2, 3}, {4, 5, 6}},  // window tokens 17..24
      {28, {0}, {5, 6}, {1, 2, 3, 4}, {4, 5, 6}},  // window tokens 20..27
  };
  for (const expected& e : by_hand) {
    INFO("length " << e.length);
    CHECK(oracle::sink_pages(s, e.length) == e.sink);
    CHECK(oracle::window_pages(s, e.length) == e.window);
    CHECK(oracle::candidate_pages(s, e.length) == e.candidates);
    CHECK(oracle::ring_pages(s, e.length) == e.ring);
  }
  CHECK_FALSE(oracle::is_complete(s, 4, 19));
  CHECK(oracle::is_complete(s, 4, 20));
  CHECK_FALSE(oracle::is_candidate(s, 6, 23));  // tokens 24..27 do not exist
  // At 23 the open page 5 holds tokens 20, 21, 22; selecting page 1 leaves out page 2, tokens 8..11.
  CHECK(oracle::attended_pages(s, 23, {1}) == ints{0, 1, 3, 4, 5});
  CHECK(oracle::tokens_of(s, 23, {0, 5}) == ints{0, 1, 2, 3, 20, 21, 22});
}

TEST_CASE("pages without a sink, window of one page") {
  const oracle::settings s = tiny();
  CHECK(oracle::window_pages(s, 1) == ints{0});
  CHECK(oracle::window_pages(s, 2) == ints{0});
  CHECK(oracle::window_pages(s, 3) == ints{0, 1});  // tokens 1, 2
  CHECK(oracle::candidate_pages(s, 3) == ints{});
  CHECK(oracle::window_pages(s, 4) == ints{1});  // tokens 2, 3
  CHECK(oracle::candidate_pages(s, 4) == ints{0});
  CHECK(oracle::candidate_pages(s, 5) == ints{0});  // tokens 3, 4 keep page 1
  CHECK(oracle::candidate_pages(s, 6) == ints{0, 1});
  CHECK(oracle::sink_pages(s, 6) == ints{});
}

TEST_CASE("attention over three tokens") {
  // scale * q * k is 0, ln 2, ln 4: weights 1/7, 2/7, 4/7.
  const floats keys{0.0F, 9.0F, std::log(2.0F), -9.0F, std::log(4.0F), 5.0F};
  const floats values{7.0F, 0.0F, 14.0F, 0.0F, 0.0F, 7.0F};
  const floats q{2.0F, 0.0F};
  const auto a = oracle::attend(q, rows_of(keys, 2), rows_of(values, 2), 0.5);
  CHECK(a.out[0] == near(5.0));  // (7 + 2*14) / 7
  CHECK(a.out[1] == near(4.0));  // 4*7 / 7
  CHECK(a.lse[0] == near(std::log(7.0)));
}

TEST_CASE("attention where scores are infinite or NaN") {
  const floats one{1.0F};
  const floats values{3.0F, 5.0F};
  const auto with_keys = [&](floats keys) {
    return oracle::attend(one, rows_of(keys, 1), rows_of(values, 1), 1.0);
  };
  const auto nothing = oracle::attend(one, {}, {}, 1.0);
  CHECK(nothing.out[0] == 0.0);
  CHECK(nothing.lse[0] == -oracle::infinity);
  const auto all_minus = with_keys({-float_inf, -float_inf});
  CHECK(all_minus.out[0] == 0.0);
  CHECK(all_minus.lse[0] == -oracle::infinity);
  const auto one_minus = with_keys({-float_inf, 2.0F});
  CHECK(one_minus.out[0] == 5.0);
  CHECK(one_minus.lse[0] == 2.0);
  const auto with_nan = with_keys({float_nan, 2.0F});
  CHECK(std::isnan(with_nan.out[0]));
  CHECK(std::isnan(with_nan.lse[0]));
  CHECK(with_keys({1e4F, 1e4F}).lse[0] == near(1e4 + std::log(2.0)));  // exp(1e4) alone overflows
}

TEST_CASE("min_max summary and score") {
  const floats keys{1.0F, -2.0F, 3.0F, 4.0F, -1.0F, 0.0F};
  const doubles summary = oracle::min_max_summary(rows_of(keys, 2));
  CHECK(summary == doubles{-1.0, -2.0, 3.0, 4.0});
  // max(2*-1, 2*3) + max(-1*-2, -1*4) = 6 + 2, halved.
  CHECK(oracle::min_max_score(floats{2.0F, -1.0F}, summary, 0.5) == 4.0);

  for (floats with_nan : {floats{float_nan, 1.0F, 2.0F}, floats{1.0F, 2.0F, float_nan}}) {
    const doubles lost = oracle::min_max_summary(rows_of(with_nan, 1));
    CHECK(std::isnan(lost[0]));
    CHECK(std::isnan(lost[1]));
    CHECK(std::isnan(oracle::min_max_score(floats{1.0F}, lost, 1.0)));
  }
  // 0 * inf is NaN in one of the two products only.
  CHECK(std::isnan(oracle::min_max_score(floats{0.0F}, {1.0, oracle::infinity}, 1.0)));
}

TEST_CASE("chunk_means summary and score") {
  const floats keys{1.0F, 3.0F, -1.0F, 1.0F};
  const doubles summary = oracle::chunk_means_summary(rows_of(keys, 1), 2);
  CHECK(summary == doubles{2.0, 0.0});
  CHECK(oracle::chunk_means_score(floats{3.0F}, summary, 0.5) == near(std::log(std::exp(3.0) + 1.0)));
  CHECK(std::isnan(oracle::chunk_means_score(floats{3.0F}, {2.0, oracle::not_a_number}, 0.5)));
  CHECK(oracle::chunk_means_score(floats{3.0F}, {2.0, oracle::infinity}, 0.5) == oracle::infinity);
}

TEST_CASE("key_subspace coefficients and codes") {
  const oracle::basis b{{1.0, 0.0, 2.0}, {1.0, 0.0, 0.0, 0.0, 1.0, 0.0}};
  const doubles c = oracle::coefficients(floats{8.0F, 2.5F, 7.0F}, b);
  CHECK(c == doubles{7.0, 2.5});
  CHECK(oracle::quantised(c, 32) == c);
  CHECK(oracle::quantised({7.0, -2.6}, 4) == doubles{7.0, -3.0});  // step 1
  CHECK(oracle::quantised({7.0, 2.4}, 4) == doubles{7.0, 2.0});
  CHECK(oracle::quantised({-7.0, 3.4}, 2) == doubles{-7.0, 0.0});            // step 7
  CHECK(oracle::quantised({3.0, 1.4, -1.6}, 3) == doubles{3.0, 1.0, -2.0});  // step 1
  CHECK(oracle::quantised({127.0, -63.6}, 8) == doubles{127.0, -64.0});      // step 1
  CHECK(oracle::quantised({0.0, 0.0}, 4) == doubles{0.0, 0.0});
  for (double lost : {oracle::not_a_number, oracle::infinity, -oracle::infinity})
    for (double back : oracle::quantised({1.0, lost, 2.0}, 4)) CHECK(std::isnan(back));
}

TEST_CASE("key_subspace score of a page") {
  const oracle::basis b{{1.0, 0.0, 2.0}, {1.0, 0.0, 0.0, 0.0, 1.0, 0.0}};
  // Coefficients (7, 2.4) and (0, 0) read back as (7, 2) and (0, 0); E q is (2, 3), scale 1/4.
  const floats keys{8.0F, 2.4F, 5.0F, 1.0F, 0.0F, 6.0F};
  const doubles summary = oracle::subspace_summary(rows_of(keys, 3), b, 4);
  CHECK(summary == doubles{7.0, 2.0, 0.0, 0.0});
  const floats q{2.0F, 3.0F, 100.0F};
  CHECK(oracle::subspace_score(q, summary, b, 0.25) == near(std::log(std::exp(5.0) + 1.0)));

  const floats with_nan{8.0F, 2.4F, 5.0F, 1.0F, float_nan, 6.0F};
  CHECK(std::isnan(oracle::subspace_score(q, oracle::subspace_summary(rows_of(with_nan, 3), b, 4), b, 0.25)));
}

TEST_CASE("a coefficient at the edge of two codes is reported") {
  const oracle::basis b{{0.0, 0.0}, {1.0, 0.0, 0.0, 1.0}};
  CHECK(oracle::code_doubt(floats{7.0F, 2.4F}, b, 4) == doubles{0.0, 0.0});
  CHECK(oracle::code_doubt(floats{7.0F, 2.5F}, b, 4) == doubles{0.0, 1.0});
  CHECK(oracle::code_doubt(floats{7.0F, -2.5F}, b, 4) == doubles{0.0, 1.0});
  CHECK(oracle::code_doubt(floats{7.0F, 2.5F}, b, 32) == doubles{0.0, 0.0});
  // One token, so the score is its exponent, and moves by scale * |q_1| * step.
  CHECK(oracle::subspace_score_doubt(floats{1.0F, -3.0F}, {7.0, 2.0}, {0.0, 1.0}, b, 0.5) == near(1.5));
}

TEST_CASE("mean_softmax pools shares of the candidates") {
  // Head 0: 1/4, 3/4. Head 1: 1/2, 1/2.
  const doubles pooled = oracle::pool_mean_softmax({{0.0, std::log(3.0)}, {5.0, 5.0}});
  CHECK(pooled[0] == near(std::log(3.0 / 8.0)));
  CHECK(pooled[1] == near(std::log(5.0 / 8.0)));
  // exp(-2000) is 0 even in double: only the logarithm keeps the order.
  CHECK(oracle::pool_mean_softmax({{0.0, -2000.0}})[1] == near(-2000.0));
}

TEST_CASE("NaN for one head loses the page for the whole group") {
  const double nan = oracle::not_a_number;
  const doubles pooled = oracle::pool_mean_softmax({{1.0, 9.0, 1.0}, {2.0, nan, 2.0}});
  CHECK(pooled[0] == near(std::log(0.5)));  // page 1 has no share of head 0's softmax either
  CHECK(pooled[1] == -oracle::infinity);
  CHECK(pooled[2] == near(std::log(0.5)));
}

TEST_CASE("infinite scores in the pool") {
  const double inf = oracle::infinity;
  CHECK(oracle::clamped(inf) == oracle::largest_float);
  CHECK(oracle::clamped(1e39) == oracle::largest_float);
  CHECK(oracle::clamped(-1e39) == -inf);
  CHECK(oracle::clamped(-1e38) == -1e38);

  const doubles one_infinite = oracle::pool_mean_softmax({{inf, 3.0}});
  CHECK(one_infinite[0] == 0.0);
  CHECK(one_infinite[1] == -oracle::largest_float);             // 3 - FLT_MAX, in any precision
  CHECK(oracle::pool_mean_softmax({{inf, -1e38}})[1] == -inf);  // beyond the range, clamped again

  // Head 0 gives nothing to page 0, head 1 all of it: 1/2 of the pool.
  const doubles one_head = oracle::pool_mean_softmax({{-inf, 1.0}, {1.0, -inf}});
  CHECK(one_head[0] == near(std::log(0.5)));
  CHECK(one_head[1] == near(std::log(0.5)));
  // A head at -inf everywhere gives nothing, and spoils nothing.
  const doubles empty_head = oracle::pool_mean_softmax({{-inf, -inf, -inf}, {1.0, 1.0, -inf}});
  CHECK(empty_head[0] == near(std::log(0.25)));
  CHECK(empty_head[1] == near(std::log(0.25)));
  CHECK(empty_head[2] == -inf);
}

TEST_CASE("top_k takes the smaller page of a tie") {
  const double inf = oracle::infinity;
  const auto tie = oracle::top_k({3, 5, 6, 9}, {-3.0, -1.0, -1.0, -1.0}, 2);
  CHECK(tie.pages == ints{5, 6});
  CHECK(tie.margin == 0.0);
  CHECK_FALSE(oracle::is_firm(tie));
  CHECK(oracle::top_k({3, 5, 6}, {-0.0, 0.0, 0.0}, 2).pages == ints{3, 5});
  CHECK(oracle::top_k({3, 5, 6}, {0.0, -0.0, -0.0}, 2).pages == ints{3, 5});
  CHECK(oracle::top_k({3, 5, 6, 9}, {-inf, -7.0, -inf, -inf}, 2).pages == ints{3, 5});
  CHECK(oracle::top_k({3, 5, 6, 9}, {-inf, -7.0, -inf, -inf}, 2).margin == inf);
  CHECK(oracle::top_k({3, 5, 6, 9}, {-4.0, -8.0, -2.0, -16.0}, 2).pages == ints{3, 6});
  CHECK(oracle::top_k({3, 5, 6, 9}, {-4.0, -8.0, -2.0, -16.0}, 2).margin == 0.5);  // (8 - 4) / 8
  CHECK(oracle::top_k({3, 5}, {-0.25, -0.5}, 1).margin == 0.25);                   // the divisor is 1
  CHECK(oracle::top_k({3, 5}, {-1.0, -2.0}, 2).pages == ints{3, 5});
  CHECK(oracle::top_k({3, 5}, {-1.0, -2.0}, 2).margin == inf);
}

TEST_CASE("drift compares the mean cosine of the group with tau") {
  // Cosines 1 and 3/5.
  const floats then{2.0F, 0.0F, 5.0F, 0.0F};
  const floats now{1.0F, 0.0F, 3.0F, 4.0F};
  const auto above = oracle::drift(now, then, 2, 0.79);
  CHECK(above.pooled == near(0.8));
  CHECK_FALSE(above.flagged);
  const auto below = oracle::drift(now, then, 2, 0.81);
  CHECK(below.flagged);
  CHECK_FALSE(below.forced);
  // Equality does not flag.
  CHECK_FALSE(oracle::drift(floats{1.0F}, floats{1.0F}, 1, 1.0).flagged);
}

TEST_CASE("norms without a float32 value flag the head") {
  const auto flagged = [](const floats& now, const floats& then) {
    const auto turn = oracle::drift(now, then, 2, -2.0);
    CHECK(turn.flagged == turn.forced);
    CHECK(turn.flagged == std::isnan(turn.pooled));
    return turn.flagged;
  };
  const floats good{1.0F, 1.0F};
  CHECK_FALSE(flagged(good, good));
  CHECK(flagged({1.0F, 0.0F}, good));  // the second head of the group alone
  CHECK(flagged(good, {0.0F, 1.0F}));
  CHECK(flagged({1.0F, float_nan}, good));
  CHECK(flagged({float_inf, 1.0F}, good));
  CHECK(flagged({1.0F, 1e20F}, good));   // 1e40 overflows float32
  CHECK(flagged({1.0F, 1e-30F}, good));  // 1e-60 underflows float32
  CHECK_FALSE(flagged({1.0F, 1e18F}, good));
  CHECK_FALSE(flagged({1.0F, 1e-18F}, good));
  CHECK_FALSE(oracle::is_norm_borderline(floats{1.0F, 1e18F}));
  CHECK_FALSE(oracle::is_norm_borderline(floats{1e20F, 1e20F}));
  CHECK(oracle::is_norm_borderline(floats{1.8446743e19F, 0.0F}));  // its square is FLT_MAX
  CHECK(oracle::is_norm_borderline(floats{1e-20F, 0.0F}));         // its square is subnormal
}

TEST_CASE("each KV head is flagged by its own group") {
  oracle::settings s = tiny();
  s.query_heads = 4;
  s.kv_heads = 2;
  oracle::decoder decoder(s);
  decoder.step(floats{1, 1, 1, 1}, floats(2), floats(2));
  const auto rows = decoder.step(floats{2, 2, 1, -1}, floats(2), floats(2)).rows;
  CHECK(rows[0].pooled_cosine == 1.0);
  CHECK_FALSE(rows[0].corrected);
  CHECK(rows[1].pooled_cosine == 0.0);
  CHECK(rows[1].corrected);
  CHECK(oracle::flag_is_firm(rows[1], 0.5));
  CHECK_FALSE(oracle::flag_is_firm(rows[1], 1e-6));
  const auto subnormal = decoder.step(floats{1e-20F, 1e-20F, 1, 1}, floats(2), floats(2)).rows;
  CHECK_FALSE(oracle::flag_is_firm(subnormal[0], 0.5));
  CHECK(oracle::flag_is_firm(subnormal[1], 0.5));
}

TEST_CASE("each summary has a page of its own") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.query_heads = 2;
  s.kv_heads = 2;
  s.chunk = 2;
  s.bases = {{{0, 0}, {0.6, 0.8}}, {{0, 0}, {1, 0}}};
  // Both heads: page 0 = {(4, 0), (-4, 0)}, page 1 = {(3, 0), (3, 0)}, page 2 = {(1, 9), (1, 9)}.
  const floats keys{4, 0, 4, 0, -4, 0, -4, 0, 3, 0, 3, 0, 3, 0, 3, 0, 1, 9, 1, 9, 1, 9, 1, 9};
  const auto chosen = [&](oracle::summary_kind summary, int kv_head) {
    s.summary = summary;
    oracle::decoder decoder(s);
    decoder.prompt(keys, floats(24), 6);
    decoder.prompt(floats(8), floats(8), 2);
    return decoder.choose(floats{1, 0, 1, 0}, kv_head, 8);
  };
  // One head a group: pooled scores differ by what raw scores do.
  const auto min_max = chosen(oracle::summary_kind::min_max, 0);  // 4, 3, 1
  CHECK(min_max.pages == ints{0});
  CHECK(min_max.pooled[0] - min_max.pooled[2] == near(3.0));
  const auto chunk_means = chosen(oracle::summary_kind::chunk_means, 0);  // 0, 3, 1
  CHECK(chunk_means.pages == ints{1});
  CHECK(chunk_means.pooled[1] - chunk_means.pooled[0] == near(3.0));
  // Head 0: c is -+2.4, 1.8 and 7.8, E q is 0.6. Head 1: c is the first element, E q is 1.
  const auto tilted = chosen(oracle::summary_kind::key_subspace, 0);
  CHECK(tilted.pages == ints{2});
  CHECK(tilted.pooled[2] - tilted.pooled[1] == near(0.6 * 6.0));
  const auto straight = chosen(oracle::summary_kind::key_subspace, 1);
  CHECK(straight.pages == ints{0});
  CHECK(straight.pooled[1] - straight.pooled[2] == near(2.0));
}

TEST_CASE("doubt in a raw score widens the pooled ones") {
  // Shares 1/4 and 3/4; page 0's weight 1 may be 1/2 or 2, so its share 1/2 of 1/2 + 3 and so on, with the
  // mass at its other end.
  const double ln2 = std::log(2.0), ln3 = std::log(3.0);
  const auto range = oracle::pool_mean_softmax_range({{0.0, ln3}}, {{ln2, 0.0}});
  CHECK(range.low[0] == near(std::log(0.5 / 5.0)));
  CHECK(range.high[0] == near(std::log(2.0 / 3.5)));
  CHECK(range.low[1] == near(std::log(3.0 / 5.0)));
  CHECK(range.high[1] == near(std::log(3.0 / 3.5)));

  const auto chosen = oracle::top_k({3, 5, 6}, {-4.0, -2.0, -8.0}, 2);  // takes -4, leaves -8: gap 4 of 8
  CHECK(oracle::slack_of(chosen, {-4.0, -2.0, -8.0}, {-4.0, -2.0, -8.0}) == 0.0);
  CHECK(oracle::slack_of(chosen, {-5.0, -2.5, -9.0}, {-3.0, -1.0, -7.0}) == 0.25);   // gap 2 is left
  CHECK(oracle::slack_of(chosen, {-4.0, -9.0, -8.0}, {-4.0, -2.0, -8.0}) == 0.625);  // gap -1
  CHECK(oracle::slack_of(oracle::top_k({3, 5}, {-1.0, -2.0}, 2), {-5.0, -5.0}, {0.0, 0.0}) == 0.0);
}

TEST_CASE("a selection that hangs on the edge of two codes is not firm") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.summary = oracle::summary_kind::key_subspace;
  s.bits = 4;
  s.bases = {{{0, 0}, {1, 0, 0, 1}}};
  for (float second : {2.5F, 2.4F}) {
    const bool edge = second == 2.5F;
    oracle::decoder decoder(s);
    decoder.prompt(floats{7, second, 7, second, 7, 1, 7, 1}, floats(8), 4);
    decoder.prompt(floats(4), floats(4), 2);
    const floats q{1, 1};
    // Page 0's codes are (7, 2) either way and lead page 1's (7, 1) by 1. At the edge they may be (7, 3),
    // and page 0 is given one step to both sides: low it ties with page 1.
    const oracle::selection chosen = decoder.choose(q, 0, 6);
    CHECK(chosen.pages == ints{0});
    const double left_out = 1.0 + std::log1p(std::exp(-1.0));
    CHECK(chosen.margin == near(1.0 / left_out));
    const double lost =
        1.0 + std::log(std::exp(10.0) + std::exp(8.0)) - std::log(std::exp(8.0) + std::exp(8.0));
    CHECK(chosen.slack == near(edge ? lost / left_out : 0.0));
    const auto row = decoder.step(q, floats(2), floats(2)).rows[0];
    CHECK(row.correct_firm == !edge);
    CHECK(row.speculate_firm == !edge);
    CHECK(row.correct_margin == near(1.0 / left_out));
    // The zero page 2 joins: 9, 8 and 0, each plus ln 2.
    CHECK(row.speculate_margin == near(1.0 / (1.0 + std::log(1.0 + std::exp(-1.0) + std::exp(-9.0)))));
  }
}

TEST_CASE("a budget that covers everything is full attention") {
  std::mt19937 generator(1);
  const int d = 6;
  oracle::settings s{.query_heads = 6, .kv_heads = 2, .head_dim = d, .page = 4, .sink = 4, .window = 8};
  s.scale = oracle::default_scale(d);
  s.selected_units = 20;
  s.chunk = 2;
  s.bits = 3;
  for (int h = 0; h < 2; ++h) s.bases.push_back({doubles(6, 0.1), {1, 0, 0, 0, 0, 0, 0, 0.6, 0.8, 0, 0, 0}});
  using kinds = oracle::summary_kind;
  for (kinds summary : {kinds::min_max, kinds::chunk_means, kinds::key_subspace})
    for (int pages : {20, 2}) {
      s.summary = summary;
      s.selected_units = pages;
      oracle::decoder decoder(s);
      decoder.prompt(random_floats(generator, 33 * 2 * d), random_floats(generator, 33 * 2 * d), 33);
      bool differs = false;
      for (int i = 0; i < 20; ++i) {
        const floats q = random_floats(generator, 6 * d);
        const auto step = decoder.step(q, random_floats(generator, 2 * d), random_floats(generator, 2 * d));
        const auto full = decoder.full(q);
        REQUIRE(step.out.size() == 36);
        REQUIRE(step.lse.size() == 6);
        REQUIRE(full.lse.size() == 6);
        for (std::size_t e = 0; e < step.lse.size(); ++e)
          differs |= std::fabs(step.lse[e] - full.lse[e]) > 1e-9;
        for (std::size_t e = 0; e < step.out.size(); ++e)
          differs |= std::fabs(step.out[e] - full.out[e]) > 1e-9;
      }
      // At 33 tokens and up there are more than two candidates: the small budget must show.
      CHECK(differs == (pages == 2));
    }
}

TEST_CASE("the log-sum-exp of equal scores counts the attended tokens") {
  oracle::settings s{.page = 4, .sink = 4, .window = 4, .selected_units = 1, .scale = 1.0};
  const floats zero{0.0F};
  const auto counts = [&](oracle::layer_kind kind) {
    s.kind = kind;
    oracle::decoder decoder(s);
    doubles counted;
    for (int n = 1; n <= 14; ++n)
      counted.push_back(std::round(std::exp(decoder.step(floats{1.0F}, zero, zero).lse[0])));
    return counted;
  };
  // Sink tokens 0..3; at 9 the window's tokens 5..8 touch pages 1 and 2, at 12 its tokens 8..11 page 2 alone.
  CHECK(counts(oracle::layer_kind::window) == doubles{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 10});
  // From 12 on page 1 is a candidate, and the only one.
  CHECK(counts(oracle::layer_kind::retrieval) == doubles{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
  CHECK(counts(oracle::layer_kind::complete) == doubles{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14});
}

TEST_CASE("a trace with recalls and promotions counted by hand") {
  oracle::settings s = tiny();
  const auto run = [&](oracle::route_kind route) {
    s.route = route;
    oracle::decoder decoder(s);
    // Pages: 0 = {1, -5}, 1 = {3, 2}, 2 = {-9, 0}, 3 = {0, 0}. With q = 1 a page scores its largest key,
    // with q = -1 minus its smallest.
    decoder.prompt(floats{1, -5, 3, 2}, floats(4), 4);
    std::vector<oracle::row_result> rows;
    const auto step = [&](float q, float key) {
      rows.push_back(decoder.step(floats{q}, floats{key}, floats{0}).rows[0]);
    };
    step(1, -9);  // n 5
    step(1, 0);   // n 6
    step(-1, 0);  // n 7
    step(-1, 0);  // n 8
    step(1, 0);   // n 9
    return rows;
  };
  const auto rows = run(oracle::route_kind::resident);
  struct expected {
    bool corrected;
    ints selected, next;
    int correct_recalled, correct_promoted, speculate_recalled, speculate_promoted;
  };
  const std::vector<expected> by_hand = {
      // n 5, ring {1, 2}. No q'. Candidates {0}: not in the ring. For n 6 {0, 1}: page 1, from the ring.
      {true, {0}, {1}, 1, 0, 0, 1},
      // n 6, ring {1, 2}. For n 7 {0, 1}: page 1 again.
      {false, {1}, {1}, 0, 0, 0, 0},
      // n 7, ring {2, 3}. Turned. Of {0, 1} page 0, from the store. For n 8 {0, 1, 2}: page 2, in the ring.
      {true, {0}, {2}, 1, 0, 0, 1},
      // n 8, ring {2, 3}. For n 9 {0, 1, 2}: page 2 again.
      {false, {2}, {2}, 0, 0, 0, 0},
      // n 9, ring {3, 4}. Turned. Of {0, 1, 2} page 1, from the store. For n 10 {0, 1, 2, 3}: page 1 again.
      {true, {1}, {1}, 1, 0, 0, 0},
  };
  REQUIRE(rows.size() == by_hand.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    INFO("step " << i);
    CHECK(rows[i].corrected == by_hand[i].corrected);
    CHECK(rows[i].flag_forced == (i == 0));
    CHECK(rows[i].selected_before == (i == 0 ? ints{} : by_hand[i - 1].next));
    CHECK(rows[i].selected == by_hand[i].selected);
    CHECK(rows[i].selected_next == by_hand[i].next);
    CHECK(rows[i].by_correct.recalled == by_hand[i].correct_recalled);
    CHECK(rows[i].by_correct.promoted == by_hand[i].correct_promoted);
    CHECK(rows[i].by_speculate.recalled == by_hand[i].speculate_recalled);
    CHECK(rows[i].by_speculate.promoted == by_hand[i].speculate_promoted);
    CHECK(rows[i].recalled == by_hand[i].correct_recalled + by_hand[i].speculate_recalled);
    CHECK(rows[i].promoted == by_hand[i].correct_promoted + by_hand[i].speculate_promoted);
  }
  CHECK(std::isnan(rows[0].pooled_cosine));
  CHECK(rows[1].pooled_cosine == 1.0);
  CHECK(rows[2].pooled_cosine == -1.0);
  CHECK(rows[0].correct_margin == oracle::infinity);  // one candidate: it fits
  CHECK(rows[1].correct_margin == oracle::infinity);  // none made
  // Of q = -1 pages 0 and 1 score 5 and -2.
  CHECK(rows[2].correct_margin == near(7.0 / (7.0 + std::log1p(std::exp(-7.0)))));
  // Scores 1 and 3: pooled -2.127 and -0.127, their difference 2 over the larger.
  CHECK(rows[0].speculate_margin == near(2.0 / (2.0 + std::log1p(std::exp(-2.0)))));

  const auto in_place = run(oracle::route_kind::in_place);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    CHECK(in_place[i].selected == rows[i].selected);
    CHECK(in_place[i].recalled == 0);
    CHECK(in_place[i].promoted == 0);
  }
}

TEST_CASE("a correction can be served from the ring") {
  // W 2, p 2: at n 4 the candidate is page 0 and the ring holds pages 0 and 1.
  oracle::decoder decoder(tiny());
  decoder.prompt(floats{1, 1, 1}, floats(3), 3);
  const auto row = decoder.step(floats{1}, floats{1}, floats{0}).rows[0];
  CHECK(row.selected == ints{0});
  CHECK(row.by_correct.promoted == 1);
  CHECK(row.recalled == 0);
}

TEST_CASE("a NaN page is left out while others suffice, for its own head only") {
  oracle::settings s = tiny();
  s.query_heads = 2;
  s.kv_heads = 2;
  // Pages 0, 1, 2 of head 0: 9, NaN and 1; of head 1: 1, 9 and 2.
  const floats keys{9, 1, 9, 1, float_nan, 9, 1, 9, 1, 2, 1, 2, 0, 0, 0, 0};
  for (int k : {1, 2, 3}) {
    s.selected_units = k;
    oracle::decoder decoder(s);
    decoder.prompt(keys, floats(16), 8);
    const floats q{1, 1};
    CHECK(decoder.select(q, 0, 8) == (k == 1 ? ints{0} : k == 2 ? ints{0, 2} : ints{0, 1, 2}));
    CHECK(decoder.select(q, 1, 8) == (k == 1 ? ints{1} : k == 2 ? ints{1, 2} : ints{0, 1, 2}));
    const auto step = decoder.step(q, floats(2), floats(2));
    CHECK(std::isnan(step.lse[0]) == (k == 3));
    CHECK_FALSE(std::isnan(step.lse[1]));
  }
}

TEST_CASE("always and never select as a from-scratch selection does") {
  std::mt19937 generator(2);
  const int d = 4;
  oracle::settings s{.query_heads = 4, .kv_heads = 2, .head_dim = d, .page = 2, .sink = 2, .window = 4};
  s.selected_units = 3;
  s.scale = 0.5;
  for (oracle::correction_kind correction :
       {oracle::correction_kind::always, oracle::correction_kind::never}) {
    s.correction = correction;
    const bool always = correction == oracle::correction_kind::always;
    oracle::decoder decoder(s);
    decoder.prompt(random_floats(generator, 21 * 2 * d), random_floats(generator, 21 * 2 * d), 21);
    floats previous;
    bool ever_different = false;
    for (int i = 0; i < 25; ++i) {
      const floats q = random_floats(generator, 4 * d);
      const auto step = decoder.step(q, random_floats(generator, 2 * d), random_floats(generator, 2 * d));
      for (int h = 0; h < 2; ++h) {
        const oracle::row_result& row = step.rows[h];
        const int n = decoder.length();
        CHECK(row.corrected == (always || i == 0));
        CHECK(std::isnan(row.pooled_cosine));
        CHECK(row.selected == decoder.select(always || i == 0 ? q : previous, h, n));
        CHECK(row.selected_next == decoder.select(q, h, n + 1));
        ever_different |= row.selected != row.selected_next;
      }
      previous = q;
    }
    CHECK(ever_different);
  }
}

TEST_CASE("a zero query flags under cosine_drift and changes nothing under never") {
  oracle::settings s = tiny();
  for (oracle::correction_kind correction :
       {oracle::correction_kind::cosine_drift, oracle::correction_kind::never}) {
    s.correction = correction;
    oracle::decoder decoder(s);
    decoder.step(floats{1}, floats{1}, floats{1});
    const auto row = decoder.step(floats{0}, floats{1}, floats{1}).rows[0];
    const bool drifts = correction == oracle::correction_kind::cosine_drift;
    CHECK(row.corrected == drifts);
    CHECK(row.flag_forced == drifts);
  }
}

TEST_CASE("a prompt after decoding drops the selection and the query") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::never;
  oracle::decoder decoder(s);
  decoder.prompt(floats(8), floats(8), 8);
  CHECK(decoder.step(floats{1}, floats{0}, floats{0}).rows[0].corrected);
  CHECK_FALSE(decoder.step(floats{1}, floats{0}, floats{0}).rows[0].corrected);
  oracle::decoder fork = decoder;
  decoder.prompt(floats(2), floats(2), 2);
  const auto row = decoder.step(floats{1}, floats{0}, floats{0}).rows[0];
  CHECK(row.selected_before == ints{});
  CHECK(row.corrected);
  CHECK(row.recalled == 1);
  CHECK_FALSE(fork.step(floats{1}, floats{0}, floats{0}).rows[0].corrected);
}

TEST_CASE("layers that select nothing report nothing") {
  oracle::settings s = tiny();
  for (oracle::layer_kind kind : {oracle::layer_kind::complete, oracle::layer_kind::window}) {
    s.kind = kind;
    oracle::decoder decoder(s);
    decoder.prompt(floats(8), floats(8), 8);
    const auto row = decoder.step(floats{1}, floats{0}, floats{0}).rows[0];
    CHECK_FALSE(row.corrected);
    CHECK_FALSE(row.flag_forced);
    CHECK(row.selected == ints{});
    CHECK(row.recalled == 0);
  }
}

TEST_CASE("heads keep their own keys, values and queries") {
  // Two KV heads of two query heads each, three tokens, everything in the window.
  oracle::settings s{.query_heads = 4, .kv_heads = 2, .head_dim = 1, .page = 4, .window = 4, .scale = 1.0};
  oracle::decoder decoder(s);
  decoder.prompt(floats{0, 0, 1, 2}, floats{10, 20, 30, 40}, 2);
  const auto step = decoder.step(floats{0, 1, 0, 1}, floats{0, 0}, floats{50, 90});
  CHECK(step.out[0] == near(30.0));
  CHECK(step.lse[1] == near(std::log(2.0 + std::exp(1.0))));
  CHECK(step.out[2] == near(50.0));
  CHECK(step.lse[3] == near(std::log(2.0 + std::exp(2.0))));
}

TEST_CASE("finite input that float32 sums cannot hold is reported") {
  oracle::decoder decoder(tiny());
  decoder.prompt(floats{1e30F, 1, 1, 1, 1, 1, 1, 1}, floats(8), 8);
  CHECK_FALSE(decoder.choose(floats{1e7F}, 0, 8).may_overflow);
  CHECK(decoder.choose(floats{1e7F}, 0, 8).score_size == near(1e37).epsilon(1e-6));
  CHECK(oracle::is_firm(decoder.choose(floats{1e7F}, 0, 8)));
  CHECK(decoder.choose(floats{1e9F}, 0, 8).may_overflow);
  CHECK_FALSE(oracle::is_firm(decoder.choose(floats{1e9F}, 0, 8)));
  CHECK_FALSE(decoder.choose(floats{float_inf}, 0, 8).may_overflow);
  oracle::decoder large(tiny());
  large.prompt(floats{3e38F, 3e38F, 0, 0}, floats(4), 4);  // the sum of a chunk's keys overflows
  CHECK(large.choose(floats{1e-9F}, 0, 4).may_overflow);
}

TEST_CASE("undefined configurations and shapes are refused") {
  const auto refused = [](const std::function<void(oracle::settings&)>& change) {
    oracle::settings s{.query_heads = 4, .kv_heads = 2, .head_dim = 2, .page = 4, .sink = 4, .window = 8};
    s.scale = 1.0;
    oracle::decoder accepted(s);
    change(s);
    CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
  };
  refused([](oracle::settings& s) { s.query_heads = 3; });
  refused([](oracle::settings& s) { s.kv_heads = -1; });
  refused([](oracle::settings& s) { s.sink = 6; });
  refused([](oracle::settings& s) { s.window = 0; });
  refused([](oracle::settings& s) { s.window = 6; });
  refused([](oracle::settings& s) { s.selected_units = 0; });
  refused([](oracle::settings& s) { s.scale = 0.0; });
  refused([](oracle::settings& s) { s.summary = oracle::summary_kind::chunk_means, s.chunk = 3; });
  refused([](oracle::settings& s) { s.summary = oracle::summary_kind::key_subspace; });
  for (int bits : {0, 3, 8, 32})
    refused([&](oracle::settings& s) { s.summary = oracle::summary_kind::key_sketch, s.bits = bits; });
  for (double p : {-0.1, 1.1, oracle::not_a_number})
    refused([&](oracle::settings& s) { s.selection = oracle::selection_kind::top_p, s.top_p = p; });
  refused([](oracle::settings& s) { s.correction = oracle::correction_kind::every_n_steps, s.every = 0; });
  for (double delta : {-0.1, 1.1, oracle::not_a_number})
    refused(
        [&](oracle::settings& s) { s.correction = oracle::correction_kind::mass_deficit, s.delta = delta; });
  refused([](oracle::settings& s) { s.spare = -1; });
  refused([](oracle::settings& s) { s.head_kinds = {oracle::layer_kind::retrieval}; });

  oracle::decoder decoder(tiny());
  CHECK_THROWS_AS(decoder.step(floats(2), floats(1), floats(1)), std::invalid_argument);
  CHECK_THROWS_AS(decoder.step(floats(1), floats(2), floats(1)), std::invalid_argument);
  CHECK(decoder.length() == 0);
  CHECK_THROWS_AS(decoder.select(floats(1), 0, 2), std::invalid_argument);
}
