// Two stages of scores.
#pragma once

#include "by_hand.hpp"

namespace {

/// min_max, then key_sketch in 4 bits, which has these keys exactly.
oracle::settings two_stages(int selected_units, int times) {
  oracle::settings s = tiny();
  s.summary = oracle::summary_kind::coarse_to_fine;
  s.bits = 4;
  s.selected_units = selected_units;
  s.times = times;
  return s;
}

oracle::selection chosen_in(const oracle::settings& s, const floats& keys) {
  oracle::decoder decoder(s);
  const int tokens = static_cast<int>(keys.size());
  decoder.prompt(keys, floats(keys.size()), tokens);
  return decoder.choose(floats{1}, 0, tokens);
}

}  // namespace

TEST_CASE("the coarse summary keeps the candidates that the fine one scores") {
  // Largest keys 9, 10, 9.8; masses 2 e^9, e^10 + 1, 2 e^9.8.
  const floats keys{9, 9, 0, 10, 9.8F, 9.8F, 0, 0};
  const doubles masses{2 * std::exp(9.0), std::exp(10.0) + 1, 2 * std::exp(9.8)};
  const auto one = chosen_in(two_stages(1, 1), keys);
  CHECK(one.pages == ints{1});
  CHECK(one.candidates == ints{0, 1, 2});
  CHECK(one.pooled == doubles{-oracle::infinity, 0.0, -oracle::infinity});
  CHECK(one.margin == oracle::infinity);
  CHECK(oracle::is_firm(one));

  const auto two = chosen_in(two_stages(1, 2), keys);
  CHECK(two.pages == ints{2});
  CHECK(two.pooled[0] == -oracle::infinity);
  CHECK(two.pooled[1] == near(std::log(masses[1] / (masses[1] + masses[2]))));
  CHECK(two.pooled[2] == near(std::log(masses[2] / (masses[1] + masses[2]))));

  const auto all = chosen_in(two_stages(1, 3), keys);
  CHECK(all.pages == ints{2});
  for (std::size_t j = 0; j < 3; ++j)
    CHECK(all.pooled[j] == near(std::log(masses[j] / (masses[0] + masses[1] + masses[2]))));
  CHECK(chosen_in(two_stages(1, 1000), keys).pooled == all.pooled);
}

TEST_CASE("mass is that of the kept candidates") {
  const floats keys{9, 9, 0, 10, 9.8F, 9.8F, 0, 0};
  auto s = two_stages(2, 1);
  s.selection = oracle::selection_kind::top_p;
  s.top_p = 0.6;
  CHECK(chosen_in(s, keys).pages == ints{2});  // 0.62 of two
  s.times = 2;
  CHECK(chosen_in(s, keys).pages == ints{1, 2});  // 0.49 of all three
}

TEST_CASE("what is kept may be in doubt although what is selected of it is not") {
  const auto tie = chosen_in(two_stages(1, 1), {9, 9, 0, 10, 10, 10, 0, 0});
  CHECK(tie.pages == ints{1});
  CHECK(tie.margin == oracle::infinity);
  CHECK_FALSE(tie.kept_firm);
  CHECK_FALSE(oracle::is_firm(tie));
  CHECK(oracle::is_firm(chosen_in(two_stages(1, 2), {9, 9, 0, 10, 10, 10, 0, 0})));
}

TEST_CASE("a page of NaN keys is kept last, and counts like one that is not kept") {
  CHECK(chosen_in(two_stages(1, 1), {float_nan, 9, 0, 8, 7, 7, 0, 0}).pages == ints{1});
  const auto all = chosen_in(two_stages(2, 2), {float_nan, 9, float_nan, 8, 7, 7, 0, 0});
  CHECK(all.pages == ints{0, 2});
  CHECK(all.pooled == doubles{-oracle::infinity, -oracle::infinity, 0.0});
  // Candidates that all score -infinity: the first are kept, and of all the first are selected.
  CHECK(chosen_in(two_stages(1, 1), floats(8, float_nan)).pages == ints{0});
}

TEST_CASE("coarse_to_fine is of two summaries and keeps enough") {
  CHECK_THROWS_AS(oracle::decoder(two_stages(1, 0)), std::invalid_argument);
  auto s = two_stages(1, 1);
  s.bits = 3;
  CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
  s = two_stages(1, 1);
  s.fine = oracle::summary_kind::coarse_to_fine;
  CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
}
