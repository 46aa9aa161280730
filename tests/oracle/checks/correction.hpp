// Which heads are corrected, and what a correction brings.
#pragma once

#include "by_hand.hpp"
#include "top_p.hpp"

TEST_CASE("drift pools the least, the mean or the largest cosine") {
  // Cosines 1 and 3/5.
  const floats then{2, 0, 5, 0};
  const floats now{1, 0, 3, 4};
  using pools = oracle::drift_pool_kind;
  CHECK(oracle::drift(now, then, 2, 0.7, pools::min).pooled == near(0.6));
  CHECK(oracle::drift(now, then, 2, 0.7, pools::min).flagged);
  CHECK(oracle::drift(now, then, 2, 0.7, pools::mean).pooled == near(0.8));
  CHECK_FALSE(oracle::drift(now, then, 2, 0.7, pools::mean).flagged);
  CHECK(oracle::drift(now, then, 2, 0.9, pools::max).pooled == near(1.0));
  CHECK_FALSE(oracle::drift(now, then, 2, 0.9, pools::max).flagged);
  // The other head first.
  CHECK(oracle::drift(floats{3, 4, 1, 0}, then, 2, 0.7, pools::min).pooled == near(0.6));
  CHECK(oracle::drift(floats{3, 4, 1, 0}, then, 2, 0.7, pools::max).pooled == near(1.0));
  for (pools pool : {pools::min, pools::max})
    CHECK(oracle::drift(floats{1, 0, 0, 0}, then, 2, -2.0, pool).forced);

  oracle::settings s = tiny();
  s.head_dim = 2;
  s.query_heads = 2;
  s.drift_pool = pools::min;
  oracle::decoder decoder(s);
  decoder.step(then, floats(2), floats(2));
  CHECK(decoder.step(now, floats(2), floats(2)).rows[0].pooled_cosine == near(0.6));
}

TEST_CASE("every n decode steps a head is corrected, counted from the last prompt") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::every_n_steps;
  s.every = 3;
  oracle::decoder decoder(s);
  const auto flags = [&](int steps) {
    ints corrected;
    for (int i = 0; i < steps; ++i) {
      const auto row = decoder.step(floats{i % 2 == 0 ? 1.0F : -1.0F}, floats(1), floats(1)).rows[0];
      CHECK(row.corrected == row.flag_forced);
      CHECK(std::isnan(row.pooled_cosine));
      corrected.push_back(row.corrected ? 1 : 0);
    }
    return corrected;
  };
  CHECK(flags(8) == ints{1, 0, 0, 1, 0, 0, 1, 0});
  decoder.prompt(floats(1), floats(1), 1);
  CHECK(flags(5) == ints{1, 0, 0, 1, 0});
}

TEST_CASE("a deficit compares the mass of the selection with that of the best") {
  const auto best = oracle::top_k({3, 5, 6, 9}, logs({8, 4, 3, 1}), 2);  // 3 and 5: 12/16
  const auto kept = oracle::compare_masses(best, {3, 6}, 0.1);           // 11/16 of at least 10.8/16
  CHECK_FALSE(kept.missing_mass);
  CHECK(kept.margin == near(0.2 / 11.0));
  CHECK(kept.slack == near(0.0));
  CHECK(kept.is_firm());
  const auto missing = oracle::compare_masses(best, {3, 6}, 0.05);  // of at least 11.4/16
  CHECK(missing.missing_mass);
  CHECK(missing.margin == near(0.4 / 11.4));
  CHECK_FALSE(oracle::compare_masses(best, {3, 6}, 0.5).missing_mass);
  CHECK_FALSE(oracle::compare_masses(best, {3, 5}, 0.0).missing_mass);
  CHECK(oracle::compare_masses(best, {}, 0.1).missing_mass);
  // Equal sums in another order of summation may not be equal.
  CHECK_FALSE(oracle::compare_masses(best, {3, 5}, 0.0).is_firm());
  CHECK_FALSE(oracle::compare_masses(best, {3, 6}, 1.0 / 12.0).is_firm());
  // Nothing is missing of nothing.
  CHECK_FALSE(oracle::compare_masses(best, {}, 1.0).missing_mass);
  CHECK(oracle::compare_masses(best, {}, 1.0).margin == oracle::infinity);
  const auto none = oracle::compare_masses(oracle::top_k({3, 5}, logs({0, 0}), 1), {5}, 0.1);
  CHECK_FALSE(none.missing_mass);
  CHECK(none.margin == oracle::infinity);
  auto overflowing = best;
  overflowing.may_overflow = true;
  CHECK_FALSE(oracle::compare_masses(overflowing, {3, 6}, 0.5).is_firm());
  auto large = best;
  large.score_size = 1e5;
  CHECK_FALSE(oracle::compare_masses(large, {3, 6}, 0.05).is_firm());
}

TEST_CASE("doubt in the masses uses up a deficit's margin") {
  auto best = oracle::top_k({3, 5}, logs({3, 1}), 1);
  best.high[1] += std::log(2.0);
  // 1/4 is held of 3/8. It may be 2 of at least 4, and 3/8 half of 3 in 5.
  const auto missing = oracle::compare_masses(best, {5}, 0.5);
  CHECK(missing.margin == near(1.0 / 3.0));
  CHECK(missing.slack == near(1.0 / 3.0 + (0.5 - 0.3) / 0.375));
  CHECK_FALSE(missing.is_firm());
  // Page 5 may be the best instead: 3 of 12 are held of half of everything.
  best.high[1] = 5.0 + std::log(9.0);
  const auto kept = oracle::compare_masses(best, {3}, 0.5);
  CHECK(kept.margin == near(0.5));
  CHECK(kept.slack == near(0.5 + (0.5 - 0.25) / 0.75));
}

TEST_CASE("a partial correction brings the best missing pages for the worst others") {
  const ints pages{3, 5, 6, 9};
  const auto best = oracle::top_k(pages, logs({8, 4, 3, 1}), 2);
  const auto one = oracle::replace_missing(best, {6, 9}, 0.1);  // 3 for 9: 11/16 of 10.8/16
  CHECK(one.pages == ints{3, 6});
  CHECK(one.firm);
  CHECK(oracle::replace_missing(best, {6, 9}, 0.05).pages == ints{3, 5});
  CHECK(oracle::replace_missing(best, {3, 9}, 0.1).pages == ints{3, 5});  // 5 for 9
  CHECK(oracle::replace_missing(best, {3, 6}, 0.1).pages == ints{3, 6});
  CHECK_FALSE(oracle::replace_missing(best, {6, 9}, 1.0 / 12.0).firm);  // 11/16 of 11/16
  // With nothing to give up the page is added.
  CHECK(oracle::replace_missing(best, {3}, 0.1).pages == ints{3, 5});
  CHECK(oracle::replace_missing(best, {}, 0.1).pages == ints{3, 5});
  CHECK(oracle::replace_missing(best, {}, 0.5).pages == ints{3});

  // 4, 4, 1, 1 of 10: page 3 before 5, and 9 goes before 6; 5 of at least 4.8.
  const auto ties = oracle::replace_missing(oracle::top_k(pages, logs({4, 4, 1, 1}), 2), {6, 9}, 0.4);
  CHECK(ties.pages == ints{3, 6});
  CHECK_FALSE(ties.firm);
  const auto tied_best = oracle::replace_missing(oracle::top_k(pages, logs({4, 4, 1, 2}), 2), {6, 9}, 0.3);
  CHECK(tied_best.pages == ints{3, 9});
  CHECK_FALSE(tied_best.firm);
  const auto tied_others = oracle::replace_missing(oracle::top_k(pages, logs({4, 8, 1, 1}), 2), {6, 9}, 0.4);
  CHECK(tied_others.pages == ints{5, 6});
  CHECK_FALSE(tied_others.firm);
  // Both of no mass at all: the larger page goes, in any precision.
  const auto lost = oracle::replace_missing(oracle::top_k(pages, logs({4, 8, 0, 0}), 2), {6, 9}, 0.4);
  CHECK(lost.pages == ints{5, 6});
  CHECK(lost.firm);
  // Masses that float32 takes for 0 tie there, and not here.
  const auto tiny_masses =
      oracle::replace_missing(oracle::top_k(pages, logs({4, 8, 1e-60, 1e-50}), 2), {6, 9}, 0.4);
  CHECK(tiny_masses.pages == ints{5, 9});
  CHECK_FALSE(tiny_masses.firm);
  // What may change places is not firm either.
  auto doubtful = best;
  doubtful.high[1] += 1.0;
  CHECK_FALSE(oracle::replace_missing(doubtful, {6, 9}, 0.01).firm);
  CHECK(oracle::precedes_firmly(best, oracle::masses_of(best), 0, 1));
  CHECK_FALSE(oracle::precedes_firmly(doubtful, oracle::masses_of(doubtful), 0, 1));
}

TEST_CASE("a deficit corrects the head whose selection misses mass, not the one whose query turned") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::mass_deficit;
  oracle::decoder decoder(s);
  // Pages 0 = {1, -5} and 1 = {3, 2}: with q a page scores the larger of its products.
  decoder.prompt(floats{1, -5, 3, 2, 0}, floats(5), 5);
  const auto first = decoder.step(floats{1}, floats{0}, floats{0}).rows[0];  // n 6: 1 and 3
  CHECK(first.corrected);
  CHECK(first.flag_forced);
  CHECK(first.flag_margin == oracle::infinity);
  CHECK(first.selected == ints{1});
  CHECK(first.selected_next == ints{1});
  oracle::decoder turned = decoder;
  // n 7: 0.05 and -0.02, so page 1 has mass m = 1 / (1 + e^0.07) of best 1 - m. 0.4825 of at least 0.4657.
  const auto kept = turned.step(floats{-0.01F}, floats{0}, floats{0}).rows[0];
  CHECK_FALSE(kept.corrected);
  CHECK(kept.selected == ints{1});
  CHECK(kept.recalled_before_attention == 0);
  const double m = 1.0 / (1.0 + std::exp(0.07));
  CHECK(kept.flag_margin == near((m - 0.9 * (1.0 - m)) / m));
  CHECK(oracle::flag_is_firm(kept, s.tau));
  CHECK(std::isnan(kept.pooled_cosine));
  // 5 and -2.
  const auto missing = decoder.step(floats{-1}, floats{0}, floats{0}).rows[0];
  CHECK(missing.corrected);
  CHECK_FALSE(missing.flag_forced);
  CHECK(oracle::flag_is_firm(missing, s.tau));
  CHECK(missing.selected == ints{0});
  CHECK(missing.correct_margin == near(7.0 / (7.0 + std::log1p(std::exp(-7.0)))));
  CHECK(missing.correct_firm);
  decoder.prompt(floats(1), floats(1), 1);
  CHECK(decoder.step(floats{1}, floats{0}, floats{0}).rows[0].flag_forced);
}

TEST_CASE("a partial correction in a step recalls less before attention") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.selected_units = 2;
  s.summary = oracle::summary_kind::mean;
  s.correction = oracle::correction_kind::mass_deficit;
  // The first query likes pages 2 and 3, the second scores pages 0 to 3 with ln 8, ln 4, ln 3 and 0.
  const floats a{0, 0, 5, 6, -9};
  floats b{std::log(8.0F), std::log(4.0F), std::log(3.0F), 0, -9};
  const auto second_step = [&](bool partial, double delta) {
    s.partial = partial;
    s.delta = delta;
    floats keys;
    for (std::size_t page = 0; page < 5; ++page)
      for (int token = 0; token < 2; ++token) keys.insert(keys.end(), {a[page], b[page]});
    oracle::decoder decoder(s);
    decoder.prompt(keys, floats(20), 10);
    const auto first = decoder.step(floats{1, 0}, floats{-9, -9}, floats(2)).rows[0];
    CHECK(first.selected == ints{2, 3});
    CHECK(first.recalled_before_attention == 2);
    CHECK(first.selected_next == ints{2, 3});
    return decoder.step(floats{0, 1}, floats{-9, -9}, floats(2)).rows[0];
  };
  struct expected {
    bool partial;
    double delta;
    ints selected;
    int before, after;
  };
  for (const expected& e : std::vector<expected>{{false, 0.1, {0, 1}, 2, 0},
                                                 {true, 0.1, {0, 2}, 1, 1},
                                                 {true, 0.05, {0, 1}, 2, 0},
                                                 {true, 0.7, {2, 3}, 0, 2},
                                                 {false, 0.7, {2, 3}, 0, 2}}) {
    const auto row = second_step(e.partial, e.delta);
    INFO(e.partial << " " << e.delta);
    CHECK(row.corrected == (e.delta != 0.7));  // 4/16 of 12/16 suffice there
    CHECK(row.selected == e.selected);
    CHECK(row.selected_next == ints{0, 1});
    CHECK(row.recalled_before_attention == e.before);
    CHECK(row.by_speculate.recalled == e.after);
    CHECK(row.recalled == e.before + e.after);
    CHECK(row.correct_firm);
    CHECK(row.movement_firm);
    CHECK(oracle::flag_is_firm(row, s.tau));
  }
  b[2] = 0;  // pages 2 and 3 tie: which of them page 0 replaces is not firm, what is best is
  const auto tied = second_step(true, 0.3);
  CHECK(tied.selected == ints{0, 2});
  CHECK(tied.selected_next == ints{0, 1});
  CHECK(oracle::flag_is_firm(tied, s.tau));
  CHECK(tied.correct_margin > 0.1);
  CHECK_FALSE(tied.correct_firm);
  CHECK_FALSE(tied.movement_firm);
}

TEST_CASE("a deficit that hangs on a doubtful selection or number of pages is not firm") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::mass_deficit;
  s.partial = true;
  // Pages 0 and 1 tie for q = 1; for q = -1 they score 0 and 5.
  for (float first : {3.0F, 2.0F}) {
    oracle::decoder decoder(s);
    decoder.prompt(floats{first, 0, 3, -5, -9}, floats(5), 5);
    decoder.step(floats{1}, floats{-9}, floats{0});
    const auto row = decoder.step(floats{-1}, floats{0}, floats{0}).rows[0];
    CHECK(row.selected_before == (first == 3.0F ? ints{0} : ints{1}));
    CHECK(oracle::flag_is_firm(row, s.tau) == (first != 3.0F));
    if (row.corrected) CHECK(row.correct_firm == (first != 3.0F));
  }

  s.selection = oracle::selection_kind::top_p;
  s.selected_units = 2;
  for (double p : {0.7, std::exp(1.0) / (1.0 + std::exp(1.0))}) {
    s.top_p = p;
    oracle::decoder decoder(s);
    decoder.prompt(floats{7, 1, 0, 0, -9}, floats(5), 5);
    decoder.step(floats{10}, floats{-9}, floats{0});  // firmly page 0, but for its p
    // Page 0 leads by ln of e / 1 here: as much as the second p is, which may take page 1 too.
    const auto row = decoder.step(floats{1.0F / 7.0F}, floats{0}, floats{0}).rows[0];
    CHECK(oracle::flag_is_firm(row, s.tau) == (p == 0.7));
  }
}
