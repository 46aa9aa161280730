// key_signatures and colliding.
#pragma once

#include "by_hand.hpp"

namespace {

/// Two tables of two bits in two dimensions: the signs of x and y, and of x + y and x - y. The centre is (1,
/// 2).
oracle::settings two_tables() {
  oracle::settings s{.head_dim = 2, .page = 2, .unit = 1, .window = 2, .selected_units = 4, .scale = 1.0};
  s.summary = oracle::summary_kind::key_signatures;
  s.bits = s.tables = 2;
  s.bases = {{{1.0, 2.0}, {1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, -1.0}}};
  return s;
}

}  // namespace

TEST_CASE("key_signatures counts the tables in which all signs agree, of keys less their centre") {
  const auto s = two_tables();
  const auto summary_of = [&](const floats& keys) { return oracle::summarise(s, 0, rows_of(keys, 2)); };
  CHECK(summary_of({4, 3}).values == doubles{1.0, 1.0, 1.0, 1.0});  // (3, 1)
  CHECK(summary_of({2, 5}).values == doubles{1.0, 1.0, 1.0, 0.0});  // (1, 3)
  CHECK(summary_of({0, 2}).values == doubles{0.0, 0.0, 0.0, 0.0});  // (-1, 0): 0 counts as negative
  const auto score = [&](const floats& q, const floats& keys) {
    return oracle::score_unit(s, 0, q, summary_of(keys));
  };
  CHECK(score({3, 1}, {4, 3}) == 2.0);
  CHECK(score({1, 3}, {4, 3}) == 1.0);  // the query is not centred
  CHECK(score({-1, 3}, {4, 3}) == 0.0);
  CHECK(score({3, 1}, {2, 5}) == 1.0);
  CHECK(score({3, 1}, {0, 2, 2, 5}) == 1.0);  // of several tokens the best
  CHECK(score({3, 1}, {0, 2, 4, 3}) == 2.0);
  CHECK(std::isnan(score({3, 1}, {float_nan, 3})));
  CHECK(std::isnan(score({3, 1}, {4, 3, float_inf, 3})));
  CHECK(std::isnan(score({3, float_inf}, {4, 3})));
}

TEST_CASE("a sign that float32 may see otherwise puts a table in doubt, unless another sign differs") {
  const auto s = two_tables();
  const auto doubt = [&](const floats& q, const floats& key) {
    return oracle::score_doubt(s, 0, q, oracle::summarise(s, 0, rows_of(key, 2)));
  };
  CHECK(doubt({3, 1}, {4, 3}) == 0.0);
  CHECK(doubt({3, 3}, {4, 3}) == 1.0);    // x - y of the query is 0 of 6
  CHECK(doubt({-3, -3}, {4, 3}) == 0.0);  // and of this one x + y has another sign anyway
  CHECK(doubt({3, 1}, {4, 2}) == 1.0);    // y of the key is 0 of 4
  CHECK(doubt({3, 3}, {3, 2}) == 2.0);
}

TEST_CASE("the probability of two collisions, by hand") {
  const auto chance = [](double cosine, int bits, int tables) {
    return std::exp(oracle::log_sampling_probability(cosine, bits, tables));
  };
  CHECK(chance(1.0, 5, 2) == 1.0);
  CHECK(chance(0.0, 1, 2) == near(0.25));
  CHECK(chance(0.0, 1, 3) == near(0.5));
  CHECK(chance(0.0, 2, 3) == near(10.0 / 64.0));  // 3 (1/4)^2 (3/4) + (1/4)^3
  CHECK(chance(0.5, 1, 2) == near(4.0 / 9.0));    // pi / 3 apart
  CHECK(chance(-0.5, 2, 2) == near(1.0 / 81.0));  // 2 pi / 3
  const double w = std::pow(0.5, 10);
  CHECK(chance(0.0, 10, 150) == near(1.0 - std::pow(1.0 - w, 150) - 150 * w * std::pow(1.0 - w, 149)));
  CHECK(oracle::log_sampling_probability(-1.0, 3, 2) == near(2 * 3 * std::log(std::ldexp(1.0, -10))));
}

TEST_CASE("what is sampled weighs the inverse of its probability, by the key less its centre") {
  const auto s = two_tables();
  const auto weight = [&](const floats& q, const floats& key) {
    return oracle::sampled_weight(q, key, s, s.bases[0]).log_weight;
  };
  CHECK(weight({2, 0}, {4, 2}) == near(0.0));                // (3, 0)
  CHECK(weight({2, 0}, {1, 7}) == near(4 * std::log(2.0)));  // a right angle: (1/2)^(2 * 2)
  CHECK(weight({0, 0}, {1, 7}) == near(4 * std::log(2.0)));  // as if it were one
  CHECK(weight({2, 0}, {1, 2}) == near(4 * std::log(2.0)));
  CHECK(weight({0.5, 0}, {2, 3}) == near(-4 * std::log(0.75)));  // pi / 4
}

TEST_CASE("colliding takes the k with most of those with two or more") {
  const ints units{3, 4, 5, 6, 7};
  CHECK(oracle::colliding(units, {1.0, 2.0, 5.0, -oracle::infinity, 2.0}, 3).pages == ints{4, 5, 7});
  CHECK(oracle::colliding(units, {1.0, 2.0, 5.0, 0.0, 2.0}, 2).pages == ints{4, 5});
  CHECK(oracle::colliding(units, {1.0, 1.0, 0.0, 0.0, 1.0}, 2).pages.empty());
  CHECK(oracle::colliding({}, {}, 2).pages.empty());
}

TEST_CASE("counts that are equal stand firm, and those that may be others do not") {
  oracle::selection chosen = oracle::top_k({3, 4, 5}, {2.0, 2.0, 7.0}, 2);
  chosen.low = chosen.high = chosen.pooled;
  CHECK_FALSE(oracle::is_firm(chosen));  // by its margin
  chosen.counts = true;
  CHECK(oracle::is_firm(chosen));
  chosen.high[2] = 8.0;
  CHECK(oracle::is_firm(chosen));
  chosen.low[2] = 2.0;
  CHECK_FALSE(oracle::is_firm(chosen));
  chosen.low[2] = 7.0;
  chosen.low[1] = 1.0;
  CHECK_FALSE(oracle::is_firm(chosen));
  chosen.low[1] = 2.0;
  chosen.admitted_firm = false;
  CHECK_FALSE(oracle::is_firm(chosen));
}

TEST_CASE("attention weighs a sampled token, and others by 1") {
  oracle::settings s = two_tables();
  s.selection = oracle::selection_kind::colliding;
  s.rows = oracle::scope_kind::query_head;
  s.correction = oracle::correction_kind::always;
  s.pooling = oracle::pooling_kind::max_score;
  oracle::decoder decoder(s);
  // Candidates are tokens 0 and 1, less their centre (3, 1) and (-3, -1); tokens 2 to 4 are the window.
  const floats keys{4, 3, -2, 1, 0, 0, 0, 0}, values{1, 0, 5, 5, 0, 0, 0, 0};
  decoder.prompt(keys, values, 4);
  const floats q{0.25F, 0.125F};
  const auto step = decoder.step(q, floats{0, 0}, floats{0, 0});
  CHECK(step.rows[0].selected_by_head == std::vector<ints>{{0}});
  const double cosine = 0.875 / (std::sqrt(0.078125) * std::sqrt(10.0));
  const double chance = std::pow(1.0 - std::acos(cosine) / std::acos(-1.0), 4.0);
  const double of_token = std::exp(0.25 * 4 + 0.125 * 3) / chance;
  CHECK(step.out[0] == near(of_token / (of_token + 3.0)));
  CHECK(step.lse[0] == near(std::log(of_token + 3.0)));
  CHECK(step.lse_doubt[0] > 0.0);
  CHECK(step.lse_doubt[0] < 1e-3);
}
