// Masses, top_p and how firmly it stands.
#pragma once

#include "by_hand.hpp"

namespace {

doubles logs(const doubles& masses) {
  doubles scores;
  for (double mass : masses) scores.push_back(mass == 0.0 ? -oracle::infinity : 5.0 + std::log(mass));
  return scores;
}

}  // namespace

TEST_CASE("a page's mass is its part of the exponentials") {
  const auto masses = oracle::masses_of(oracle::top_k({3, 5, 6}, logs({3, 0, 1}), 1));
  CHECK(masses.value[0] == near(0.75));
  CHECK(masses.value[1] == 0.0);
  CHECK(masses.value[2] == near(0.25));
  CHECK(masses.low == masses.value);
  CHECK(masses.high == masses.value);
  CHECK(oracle::masses_of(oracle::top_k({3, 5}, logs({0, 0}), 1)).value == doubles{0.0, 0.0});
}

TEST_CASE("top_p takes the shortest prefix that has the mass, at least one page and at most k") {
  const ints pages{3, 5, 6, 9};
  const doubles scores = logs({4, 1, 8, 3});  // 1/4, 1/16, 1/2, 3/16
  CHECK(oracle::top_p(pages, scores, 4, 0.0).pages == ints{6});
  CHECK(oracle::top_p(pages, scores, 4, 0.49).pages == ints{6});
  CHECK(oracle::top_p(pages, scores, 4, 0.51).pages == ints{3, 6});
  CHECK(oracle::top_p(pages, scores, 4, 0.74).pages == ints{3, 6});
  CHECK(oracle::top_p(pages, scores, 4, 0.76).pages == ints{3, 6, 9});
  CHECK(oracle::top_p(pages, scores, 4, 0.95).pages == pages);
  CHECK(oracle::top_p(pages, scores, 9, 1.0).pages == pages);
  CHECK(oracle::top_p(pages, scores, 2, 0.95).pages == ints{3, 6});
  CHECK(oracle::top_p(pages, logs({1, 4, 2, 1}), 4, 0.8).pages == ints{3, 5, 6});  // 3 and 9 tie
  CHECK(oracle::top_p(pages, logs({0, 0, 0, 0}), 2, 0.5).pages == ints{3, 5});
  CHECK(oracle::top_p(pages, logs({0, 0, 2, 0}), 3, 0.5).pages == ints{6});
  CHECK(oracle::top_p({}, {}, 3, 0.5).pages == ints{});
}

TEST_CASE("a temperature evens masses out, or sets them apart") {
  const ints pages{3, 5, 6};
  const auto scores = logs({4, 1, 9});  // 9, 4, 1 of 14; at a temperature of 2 it is 3, 2, 1 of 6
  CHECK(oracle::top_p(pages, scores, 3, 0.6).pages == ints{6});
  CHECK(oracle::top_p(pages, scores, 3, 0.6, 2.0).pages == ints{3, 6});
  CHECK(oracle::top_p(pages, scores, 3, 0.84, 2.0).pages == pages);
  CHECK(oracle::top_p(pages, scores, 3, 0.82, 0.5).pages == ints{6});  // 81 of 98
  CHECK(oracle::top_p(pages, scores, 3, 0.83, 0.5).pages == ints{3, 6});
  CHECK(oracle::mass_margin_of(oracle::top_k(pages, scores, 3), 3, 0.6, 2.0) == near(0.1));
  // At a half, errors of scores count twice.
  CHECK(oracle::mass_margin_of(oracle::top_k(pages, scores, 3), 2, 0.8, 0.5) ==
        near(0.5 * (81.0 / 98.0 - 0.8)));
}

TEST_CASE("top_p is not firm where a prefix nearly has the mass") {
  const ints pages{3, 5, 6, 9};
  const doubles scores = logs({8, 4, 3, 1});  // prefixes 1/2, 3/4, 15/16
  const auto at = [&](double p, int k) { return oracle::top_p(pages, scores, k, p); };
  CHECK(at(0.74, 4).mass_margin == near(0.01));
  CHECK(at(0.9, 3).mass_margin == near(0.15));  // the third prefix is taken in any case
  CHECK(at(0.7, 1).mass_margin == oracle::infinity);
  CHECK(at(0.51, 4).margin == near(std::log(4.0 / 3.0) / (5.0 + std::log(4.0))));
  CHECK(oracle::is_firm(at(0.7502, 4)));
  CHECK_FALSE(oracle::is_firm(at(0.75005, 4)));
  CHECK_FALSE(oracle::is_firm(at(0.74995, 4)));
  CHECK(oracle::is_firm(at(0.75005, 2)));
  auto large = at(0.7502, 4);
  large.score_size = 200.0;  // float32 scores may be off by as much as the masses' distance
  CHECK_FALSE(oracle::is_firm(large));
  // The page left out ties with the last one taken.
  CHECK_FALSE(oracle::is_firm(oracle::top_p(pages, logs({4, 2, 1, 1}), 4, 0.8)));
}

TEST_CASE("doubt widens the masses and what they decide") {
  auto chosen = oracle::top_k({3, 5}, {0.0, std::log(3.0)}, 2);
  chosen.low[0] = -std::log(2.0);
  chosen.high[0] = std::log(2.0);
  const auto masses = oracle::masses_of(chosen);
  CHECK(masses.value[0] == near(0.25));
  CHECK(masses.low[0] == near(0.1));  // 1/2 of 2 + 3
  CHECK(masses.high[0] == near(2.0 / 3.5));
  CHECK(masses.low[1] == near(0.6));
  CHECK(masses.high[1] == near(3.0 / 3.5));
  CHECK(oracle::mass_margin_of(chosen, 2, 0.8) == 0.0);
  CHECK(oracle::mass_margin_of(chosen, 2, 0.5) == near(0.1));
  CHECK(oracle::mass_margin_of(chosen, 2, 0.9) == near(0.9 - 3.0 / 3.5));
  CHECK(oracle::mass_margin_of(chosen, 1, 0.8) == oracle::infinity);
  // Whichever pages lead, the largest masses bound the prefix.
  chosen.high[0] = std::log(12.0);
  CHECK(oracle::mass_margin_of(chosen, 2, 0.9) == 0.0);
}

TEST_CASE("a layer that selects by mass selects fewer pages where one has it all") {
  oracle::settings s = tiny();
  s.selected_units = 2;
  s.selection = oracle::selection_kind::top_p;
  const auto chosen = [&](double p, float second) {
    s.top_p = p;
    oracle::decoder decoder(s);
    decoder.prompt(floats{3, 3, second, second, -1, -1, 0, 0}, floats(8), 8);
    return decoder.choose(floats{1}, 0, 8);
  };
  // Masses e^3, 1 and 1/e: 0.936, 0.047, 0.017.
  CHECK(chosen(0.9, 0).pages == ints{0});
  CHECK(oracle::is_firm(chosen(0.9, 0)));
  CHECK(chosen(0.95, 0).pages == ints{0, 1});
  CHECK(chosen(0.999, 0).pages == ints{0, 1});
  CHECK(chosen(0.9, 3).pages == ints{0, 1});

  // A code at an edge decides the mass: page 0 leads by 6 steps of 1 and has 0.9975, or by 5 and has 0.9933.
  s.head_dim = 2;
  s.summary = oracle::summary_kind::mean;
  s.format = oracle::stored_format::int8;
  s.top_p = 0.995;
  for (float second : {5.5F, 5.6F}) {
    oracle::decoder decoder(s);
    decoder.prompt(floats{127, second, 127, second, 127, 0, 127, 0, 0, 0, 0, 0}, floats(12), 6);
    const auto one_page = decoder.choose(floats{1, 1}, 0, 6);
    CHECK(one_page.pages == ints{0});
    CHECK(oracle::is_firm(one_page) == (second == 5.6F));
    CHECK((one_page.low[0] < one_page.pooled[0]) == (second == 5.5F));
    CHECK((one_page.high[1] > one_page.pooled[1]) == (second == 5.5F));
  }
}

TEST_CASE("sticky_top_k keeps a held page until another is better by the bonus") {
  const auto all = oracle::top_k({3, 5, 6, 9}, {1.0, 2.0, 0.5, 1.4}, 2);
  CHECK(all.pages == ints{5, 9});
  CHECK(oracle::sticky_top_k(all, {}, 2, 1.0).pages == ints{5, 9});
  CHECK(oracle::sticky_top_k(all, {3}, 2, 0.3).pages == ints{5, 9});
  const auto kept = oracle::sticky_top_k(all, {3, 4}, 2, 0.5);  // 4 is no candidate
  CHECK(kept.pages == ints{3, 5});
  CHECK(kept.margin == near((1.5 - 1.4) / 1.5));
  CHECK(oracle::sticky_top_k(all, {3, 6}, 2, 0.95).pages == ints{3, 5});
  CHECK(oracle::sticky_top_k(all, {3, 6}, 2, 9.0).pages == ints{3, 6});
  CHECK(oracle::sticky_top_k(all, {3, 9}, 2, 0.4).pages == ints{5, 9});  // 1.4 and 1.8 behind 2
}
