// What a truncation keeps, and what it drops.
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "by_hand.hpp"
#include "several_rows.hpp"

namespace {

void check_same_step(const oracle::step_result& a, const oracle::step_result& b) {
  CHECK(same_attention(a, b));
  REQUIRE(a.rows.size() == b.rows.size());
  for (std::size_t h = 0; h < a.rows.size(); ++h) {
    const oracle::row_result &x = a.rows[h], &y = b.rows[h];
    INFO("head " << h);
    CHECK(x.selected_before == y.selected_before);
    CHECK(x.selected == y.selected);
    CHECK(x.selected_next == y.selected_next);
    CHECK(x.corrected == y.corrected);
    CHECK(x.flag_forced == y.flag_forced);
    CHECK(std::isnan(x.pooled_cosine) == std::isnan(y.pooled_cosine));
    if (!std::isnan(x.pooled_cosine)) CHECK(x.pooled_cosine == y.pooled_cosine);
    CHECK(x.flag_margin == y.flag_margin);
    CHECK(x.recalled == y.recalled);
    CHECK(x.promoted == y.promoted);
    CHECK(x.recalled_before_attention == y.recalled_before_attention);
    CHECK(x.slots == y.slots);
    CHECK(x.correct_firm == y.correct_firm);
    CHECK(x.movement_firm == y.movement_firm);
    CHECK(x.truncation_firm == y.truncation_firm);
  }
}

/// Pages and window of 2, a prompt of 5, then 5 rows with q = 1. Page 3 is tokens 6 and 7; at 11 the window's
/// tokens 9 and 10 leave it a candidate.
oracle::decoder rows_beyond_the_window(oracle::correction_kind correction, const doubles& first_key_of_page_0,
                                       const doubles& key_of_page_3) {
  oracle::settings s = tiny();
  const int heads = static_cast<int>(first_key_of_page_0.size());
  s.query_heads = s.kv_heads = heads;
  s.correction = correction;
  s.max_rows = 5;
  const auto n = static_cast<std::size_t>(heads);
  floats before(5 * n), rows(5 * n);
  for (std::size_t h = 0; h < n; ++h) {
    before[h] = static_cast<float>(first_key_of_page_0[h]);
    rows[n + h] = static_cast<float>(key_of_page_3[h]);
  }
  oracle::decoder decoder(s);
  decoder.prompt(before, floats(5 * n), 5);
  decoder.step(floats(5 * n, 1.0F), rows, floats(5 * n), 5);
  return decoder;
}

}  // namespace

TEST_CASE("a truncation inside the last step keeps the selection, and q' is the last row left") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.window = 4;
  s.tau = -2.0;
  s.max_rows = 3;
  oracle::decoder decoder(s);
  decoder.prompt(floats{1, 1, 0, 0, 9, 9, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0}, floats(16), 8);
  decoder.step(floats{1, 0, 0, 1, 3, 4}, floats(6), floats(6), 3);
  CHECK(decoder.selected(0) == ints{1});
  CHECK(decoder.slots(0) == ints{1});
  // At 12 the window's tokens 8..11 are pages 4 and 5.
  CHECK(decoder.candidates() == ints{0, 1, 2, 3});
  const auto next_after = [&](const ints& lengths) {
    oracle::decoder truncated = decoder;
    for (int length : lengths) {
      truncated.truncate(length);
      CHECK(truncated.length() == length);
    }
    const bool kept = lengths.back() > 8;
    CHECK(truncated.selected(0) == (kept ? ints{1} : ints{}));
    CHECK(truncated.slots(0) == (kept ? ints{1} : ints{-1}));
    // At 9 the window's tokens 5..8 are pages 2 to 4, at 8 tokens 4..7 pages 2 and 3.
    CHECK(truncated.candidates() == (kept ? ints{0, 1, 2, 3} : ints{0, 1}));
    const auto row = truncated.step(floats{1, 0}, floats(2), floats(2)).rows[0];
    CHECK(row.corrected == !kept);
    CHECK(row.flag_forced == !kept);
    CHECK(row.recalled + row.promoted == (kept ? 0 : 1));
    CHECK(row.truncation_firm);
    return row.pooled_cosine;
  };
  CHECK(next_after({11}) == near(0.6));
  CHECK(next_after({10}) == near(0.0));
  CHECK(next_after({9}) == near(1.0));
  CHECK(next_after({10, 9}) == near(1.0));
  CHECK(next_after({10, 10}) == near(0.0));
  CHECK(std::isnan(next_after({8})));
  CHECK(std::isnan(next_after({9, 8})));
  CHECK(std::isnan(next_after({7})));
}

TEST_CASE("the candidates of a selection that stays do, too") {
  oracle::settings s = tiny();
  s.tau = -2.0;
  s.max_rows = 3;
  oracle::decoder decoder(s);
  decoder.prompt(floats(7), floats(7), 7);
  decoder.step(floats(3, 1.0F), floats(3), floats(3), 3);
  const auto count_after = [&](int length) {
    oracle::decoder truncated = decoder;
    truncated.truncate(length);
    return counted(truncated.step(floats(2, 1.0F), floats(2), floats(2), 2));
  };
  // At 11 the window's tokens 9 and 10 begin in page 4, so that pages 0 to 3 are candidates: page 0 and what
  // is from token 8 on. At 9 page 3 would have been the window's.
  CHECK(count_after(10) == doubles{5, 6});
  CHECK(count_after(9) == doubles{4, 5});
  CHECK(count_after(8) == doubles{3, 4});
  // Dropped: at 8 the window's tokens 6 and 7 are page 3. At 7 tokens 5 and 6 begin in page 2.
  CHECK(count_after(7) == doubles{4, 5});
  CHECK(count_after(6) == doubles{5, 6});
}

TEST_CASE("a page that is no longer complete is the window's, or drops the selection it is in") {
  const auto never = oracle::correction_kind::never;
  const auto after = [](oracle::decoder decoder, const ints& lengths, bool kept) {
    for (int length : lengths) decoder.truncate(length);
    const auto heads = static_cast<std::size_t>(decoder.config().kv_heads);
    for (int h = 0; h < decoder.config().kv_heads; ++h) {
      CHECK(decoder.selected(h).size() == (kept ? 1 : 0));
      CHECK((decoder.slots(h) == ints{-1}) == !kept);
    }
    const ints candidates = decoder.candidates();
    const auto result = decoder.step(floats(heads), floats(heads), floats(heads));
    for (const oracle::row_result& row : result.rows) {
      CHECK(row.corrected == !kept);
      CHECK(row.truncation_firm);
    }
    return std::pair(candidates, counted(result));
  };
  using seen = std::pair<ints, doubles>;
  const oracle::decoder first = rows_beyond_the_window(never, {9}, {1});
  CHECK(first.selected(0) == ints{0});
  CHECK(first.candidates() == ints{0, 1, 2, 3});
  CHECK(after(first, {9}, true) == seen({0, 1, 2, 3}, {4}));  // page 0 and tokens 8, 9
  CHECK(after(first, {8}, true) == seen({0, 1, 2, 3}, {3}));
  CHECK(after(first, {7}, true) == seen({0, 1, 2}, {4}));  // page 0 and tokens 6, 7
  CHECK(after(first, {6}, true) == seen({0, 1, 2}, {3}));
  CHECK(after(first, {7, 6}, true) == seen({0, 1, 2}, {3}));
  CHECK(after(first, {5}, false) == seen({0, 1}, {4}));  // page 0 and tokens 4, 5

  const oracle::decoder third = rows_beyond_the_window(never, {1}, {9});
  CHECK(third.selected(0) == ints{3});
  CHECK(after(third, {8}, true) == seen({0, 1, 2, 3}, {3}));
  CHECK(after(third, {7}, false) == seen({0, 1, 2}, {4}));  // at 8: page 0 and tokens 6, 7
  CHECK(after(third, {6}, false) == seen({0, 1}, {5}));     // at 7: page 0 and tokens 4 to 6
  CHECK(after(third, {7, 6}, false) == seen({0, 1}, {5}));  // nothing brings the selection back

  // One head's lost page drops every head's selection.
  const oracle::decoder both = rows_beyond_the_window(never, {9, 1}, {1, 9});
  CHECK(both.selected(0) == ints{0});
  CHECK(both.selected(1) == ints{3});
  CHECK(after(both, {8}, true) == seen({0, 1, 2, 3}, {3, 3}));
  CHECK(after(both, {7}, false) == seen({0, 1, 2}, {4, 4}));
}

TEST_CASE("under a budget that covers everything rows are full attention after any truncation") {
  std::mt19937 generator(47);
  const auto random_up_to = [&](int most) { return std::uniform_int_distribution<int>(0, most)(generator); };
  for (int page : {1, 2, 3})
    for (auto correction : {oracle::correction_kind::cosine_drift, oracle::correction_kind::never})
      for (int pages : {1000, 2}) {
        oracle::settings s = with_rows(6);
        s.page = s.window = page;
        s.sink = random_up_to(1) * page;
        s.selected_units = pages;
        s.spare = 2;
        s.correction = correction;
        oracle::decoder decoder(s);
        double difference = 0.0;
        int kept = 0, incomplete = 0;
        for (int i = 0; i < 60; ++i) {
          if (random_up_to(9) == 0) append_prompt(decoder, random_rows(generator, random_up_to(9)));
          const append_rows a = random_rows(generator, 1 + random_up_to(5));
          difference = std::max(difference, difference_from_full(decoder, a));
          for (int times = random_up_to(2); times > 0; --times) {
            decoder.truncate(std::max(0, decoder.length() - random_up_to(a.rows)));
            kept += decoder.selected(0).empty() ? 0 : 1;
            for (int h = 0; h < 2; ++h)
              for (int held : decoder.slots(h)) incomplete += (held + 1) * page > decoder.length() ? 1 : 0;
          }
        }
        CHECK(kept > 10);
        CHECK(incomplete == 0);
        CHECK((difference < 1e-9) == (pages == 1000));
      }
}

TEST_CASE("a truncation that hangs on a doubtful selection is not firm") {
  for (auto correction : {oracle::correction_kind::always, oracle::correction_kind::never}) {
    const bool always = correction == oracle::correction_kind::always;
    const auto row_after = [&](oracle::decoder decoder, const ints& lengths) {
      for (int length : lengths) decoder.truncate(length);
      const auto n = static_cast<std::size_t>(decoder.config().kv_heads);
      const auto row = decoder.step(floats(n, 1.0F), floats(n), floats(n)).rows[0];
      CHECK(oracle::flag_is_firm(row, 0.5) == row.truncation_firm);
      if (!row.truncation_firm) {
        CHECK(row.correct_firm == !row.corrected);
        CHECK_FALSE(row.movement_firm);
      }
      CHECK(row.corrected == (always || decoder.length() == 6));
      CHECK(decoder.step(floats(n, 1.0F), floats(n), floats(n)).rows[0].truncation_firm);
      return row;
    };
    const oracle::decoder tied = rows_beyond_the_window(correction, {9}, {9});  // pages 0 and 3
    CHECK(tied.selected(0) == ints{0});
    CHECK(row_after(tied, {8}).truncation_firm);  // both are still complete
    CHECK_FALSE(row_after(tied, {8}).movement_firm);
    CHECK_FALSE(row_after(tied, {7}).truncation_firm);
    CHECK_FALSE(row_after(tied, {6}).truncation_firm);
    CHECK_FALSE(row_after(tied, {7, 6}).truncation_firm);
    CHECK(row_after(tied, {5}).truncation_firm);
    CHECK(row_after(tied, {5}).movement_firm);
    CHECK(row_after(tied, {6, 5}).truncation_firm);
    oracle::decoder prompted = tied;
    prompted.truncate(6);
    prompted.prompt(floats(1), floats(1), 1);
    CHECK(prompted.step(floats{1}, floats{0}, floats{0}).rows[0].truncation_firm);
  }
  const auto always = oracle::correction_kind::always;
  const auto firm = [](oracle::decoder decoder) {
    decoder.truncate(6);
    return decoder.step(floats(2, 1.0F), floats(2), floats(2)).rows[0].truncation_firm;
  };
  CHECK_FALSE(firm(rows_beyond_the_window(always, {9, 9}, {9, 1})));
  CHECK(firm(rows_beyond_the_window(always, {9, 1}, {9, 9})));  // the other head lost page 3 in any case
}

TEST_CASE("after a deep truncation a sequence is as one that never was longer") {
  using corrections = oracle::correction_kind;
  using kinds = oracle::layer_kind;
  std::mt19937 generator(41);
  for (corrections correction :
       {corrections::cosine_drift, corrections::always, corrections::never, corrections::mass_deficit})
    for (int spare : {0, 1})
      for (bool mixed : {false, true}) {
        oracle::settings s = with_rows(5);
        s.correction = correction;
        s.spare = spare;
        if (mixed) s.head_kinds = {kinds::retrieval, spare == 0 ? kinds::window : kinds::complete};
        const append_rows all = random_rows(generator, 40);
        const append_rows other = random_rows(generator, 40);
        oracle::decoder decoder(s);
        append_prompt(decoder, some_rows(all, 0, 21));
        decode(decoder, some_rows(all, 21, 1));
        decode(decoder, some_rows(all, 22, 5));
        decode(decoder, some_rows(all, 27, 3));
        // The last step's begin, inside the one before, page boundaries, the prompt's end and inside it, the
        // sink's end and inside it, nothing.
        for (int length : {27, 26, 25, 21, 20, 13, 2, 1, 0})
          for (const append_rows* again : {&all, &other}) {
            INFO("length " << length);
            oracle::decoder truncated = decoder, fresh(s);
            truncated.truncate(length);
            append_prompt(fresh, some_rows(all, 0, length));
            for (int rows : {3, 1, 5, 4}) {
              CHECK(truncated.candidates() == fresh.candidates());
              const append_rows a = some_rows(*again, fresh.length(), rows);
              check_same_step(decode(truncated, a), decode(fresh, a));
            }
          }
      }
}

TEST_CASE("a truncation of a prompt keeps its beginning") {
  std::mt19937 generator(42);
  const append_rows all = random_rows(generator, 30), more = random_rows(generator, 3);
  oracle::decoder decoder(with_rows(3));
  append_prompt(decoder, some_rows(all, 0, 20));
  decode(decoder, more);
  append_prompt(decoder, some_rows(all, 20, 1));
  decoder.truncate(22);  // inside the step, but that is not the last append
  oracle::decoder fresh(with_rows(3));
  append_prompt(fresh, some_rows(all, 0, 20));
  append_prompt(fresh, first_rows(more, 2));
  CHECK(decoder.candidates() == fresh.candidates());
  check_same_step(decode(decoder, more), decode(fresh, more));

  oracle::decoder prompted(with_rows(3)), shorter(with_rows(3));
  append_prompt(prompted, all);
  prompted.truncate(23);
  append_prompt(shorter, some_rows(all, 0, 23));
  check_same_step(decode(prompted, more), decode(shorter, more));
}

TEST_CASE("a truncation into the sink or to nothing") {
  oracle::settings s{.page = 4, .sink = 4, .window = 4, .scale = 1.0, .max_rows = 2};
  oracle::decoder decoder(s);
  decoder.prompt(floats(9), floats(9), 9);
  decoder.step(floats(2, 1.0F), floats(2), floats(2), 2);
  for (int length : {5, 4, 3, 0}) {
    oracle::decoder truncated = decoder;
    truncated.truncate(length);
    CHECK(truncated.candidates() == ints{});
    const auto counts = counted(truncated.step(floats(2), floats(2), floats(2), 2));
    CHECK(counts == doubles{length + 1.0, length + 2.0});
  }
}

TEST_CASE("a page completed again has the summary of its new keys") {
  oracle::decoder decoder(tiny());
  decoder.prompt(floats{1, 1, 9, 9, 0, 0, 0, 0}, floats(8), 8);
  CHECK(decoder.select(floats{1}, 0, 8) == ints{1});
  decoder.truncate(3);
  CHECK_THROWS_AS(decoder.select(floats{1}, 0, 5), std::invalid_argument);
  decoder.prompt(floats{-1, 0, 0, 0, 0}, floats(5), 5);
  CHECK(decoder.select(floats{1}, 0, 8) == ints{1});  // the 9 that was kept
  decoder.truncate(2);
  decoder.prompt(floats{-1, -1, 0, 0, 0, 0}, floats(6), 6);
  CHECK(decoder.select(floats{1}, 0, 8) == ints{0});
}

TEST_CASE("a truncation to the present length changes nothing") {
  std::mt19937 generator(43);
  oracle::decoder decoder(with_rows(3));
  append_prompt(decoder, random_rows(generator, 20));
  decode(decoder, random_rows(generator, 3));
  for (int length : {23, 21, 17}) {
    decoder.truncate(length);
    oracle::decoder again = decoder;
    again.truncate(length);
    const append_rows a = random_rows(generator, 2);
    oracle::decoder once = decoder;
    check_same_step(decode(again, a), decode(once, a));
  }
  const append_rows a = random_rows(generator, 1);
  decode(decoder, a);
  const ints selected = decoder.selected(0);
  decoder.truncate(18);
  CHECK(selected.size() == 2);
  CHECK(decoder.selected(0) == selected);
  CHECK_FALSE(decode(decoder, a).rows[0].flag_forced);
}

TEST_CASE("every n steps counts on after a truncation") {
  oracle::settings s = tiny();
  s.correction = oracle::correction_kind::every_n_steps;
  s.every = 3;
  oracle::decoder decoder(s);
  decoder.prompt(floats(6), floats(6), 6);
  const auto corrected = [&](int steps) {
    ints flags;
    for (int i = 0; i < steps; ++i)
      flags.push_back(decoder.step(floats{1}, floats{0}, floats{0}).rows[0].corrected ? 1 : 0);
    return flags;
  };
  CHECK(corrected(2) == ints{1, 0});
  decoder.truncate(6);
  CHECK(corrected(5) == ints{1, 1, 0, 0, 1});  // the first for want of q'
}

// What `always` selects does not depend on what was carried into the step. Rejected rows are thus traceless
// but for one thing: the candidates fixed behind them. How many rows were rejected decides those, what they
// were does not, and only where a page left the window in between do they differ from those of a sequence
// that never saw the rows. One step later they are fixed anew, and nothing is left. (The row that is kept
// shared its own step's selection with the rejected ones; its outputs are not those it would get alone.)
TEST_CASE("under always rejected rows leave their number, for one step") {
  std::mt19937 generator(44);
  oracle::settings s = with_rows(4);
  s.correction = oracle::correction_kind::always;
  int equal_candidates = 0, other_candidates = 0, other_attention = 0;
  for (int before = 14; before < 22; ++before)
    for (int kept : {1, 2})
      for (int rejected = 1; kept + rejected <= 4; ++rejected) {
        INFO(before << " tokens, " << kept << " kept, " << rejected << " rejected");
        oracle::decoder start(s);
        append_prompt(start, random_rows(generator, before));
        append_rows rows = random_rows(generator, kept + rejected);
        oracle::decoder never_saw = start, saw = start, saw_others = start;
        decode(never_saw, first_rows(rows, kept));
        decode(saw, rows);
        // Other rejected rows after the same ones.
        const append_rows others = random_rows(generator, kept + rejected);
        std::copy(others.q.begin() + kept * 16, others.q.end(), rows.q.begin() + kept * 16);
        std::copy(others.k.begin() + kept * 8, others.k.end(), rows.k.begin() + kept * 8);
        std::copy(others.v.begin() + kept * 8, others.v.end(), rows.v.begin() + kept * 8);
        decode(saw_others, rows);
        saw.truncate(before + kept);
        saw_others.truncate(before + kept);

        const bool equal = saw.candidates() == never_saw.candidates();
        CHECK(saw.candidates() == saw_others.candidates());
        const append_rows next = random_rows(generator, 2);
        const auto a = decode(never_saw, next), b = decode(saw, next), c = decode(saw_others, next);
        CHECK(same_attention(b, c));
        for (std::size_t h = 0; h < 2; ++h) {
          CHECK(b.rows[h].selected == c.rows[h].selected);
          if (equal) CHECK(b.rows[h].selected == a.rows[h].selected);
          CHECK(b.rows[h].selected_next == a.rows[h].selected_next);
        }
        if (equal) CHECK(same_attention(a, b));
        ++(equal ? equal_candidates : other_candidates);
        if (!same_attention(a, b)) ++other_attention;
        const append_rows last = random_rows(generator, 3);
        const auto x = decode(never_saw, last), y = decode(saw, last);
        CHECK(same_attention(x, y));
        for (std::size_t h = 0; h < 2; ++h) CHECK(x.rows[h].selected == y.rows[h].selected);
      }
  CHECK(equal_candidates > 0);
  CHECK(other_candidates > 0);
  CHECK(other_attention > 0);
}

TEST_CASE("without a correction the selection that rejected rows shared in is their trace") {
  std::mt19937 generator(45);
  oracle::settings s = with_rows(3);
  s.correction = oracle::correction_kind::never;
  int different = 0;
  for (int i = 0; i < 10; ++i) {
    oracle::decoder saw(s);
    append_prompt(saw, random_rows(generator, 24));
    oracle::decoder saw_others = saw;
    append_rows rows = random_rows(generator, 3);
    decode(saw, rows);
    std::copy(rows.q.begin(), rows.q.begin() + 16, rows.q.begin() + 32);
    decode(saw_others, rows);
    saw.truncate(25);
    saw_others.truncate(25);
    const append_rows next = random_rows(generator, 1);
    const auto a = decode(saw, next), b = decode(saw_others, next);
    for (std::size_t h = 0; h < 2; ++h) {
      CHECK(a.rows[h].selected == a.rows[h].selected_before);
      CHECK_FALSE(a.rows[h].corrected);
      different += a.rows[h].selected != b.rows[h].selected;
    }
  }
  CHECK(different > 0);
}

TEST_CASE("a fork and its parent go on as if each were alone") {
  std::mt19937 generator(46);
  oracle::settings s = with_rows(4);
  s.spare = 1;
  const append_rows before = random_rows(generator, 19), shared = random_rows(generator, 4);
  const append_rows of_parent = random_rows(generator, 3), of_child = random_rows(generator, 2);
  const auto begun = [&] {
    oracle::decoder decoder(s);
    append_prompt(decoder, before);
    decode(decoder, shared);
    return decoder;
  };
  for (int length : {23, 21, 12}) {
    std::vector<oracle::step_result> child_alone, parent_alone;
    oracle::decoder alone = begun();
    alone.truncate(length);
    for (int i = 0; i < 3; ++i) child_alone.push_back(decode(alone, of_child));
    alone = begun();
    for (int i = 0; i < 3; ++i) parent_alone.push_back(decode(alone, of_parent));

    oracle::decoder parent = begun();
    oracle::decoder child = parent;
    check_same_step(decode(parent, of_parent), parent_alone[0]);
    child.truncate(length);
    check_same_step(decode(child, of_child), child_alone[0]);
    for (std::size_t i : {1U, 2U}) {
      check_same_step(decode(parent, of_parent), parent_alone[i]);
      check_same_step(decode(child, of_child), child_alone[i]);
    }
    CHECK(parent.length() == 32);
    CHECK(child.length() == length + 6);
  }
}

TEST_CASE("the ring after a truncation is that of the length") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.correction = oracle::correction_kind::always;
  s.max_rows = 3;  // R is 4
  oracle::decoder decoder(s);
  // Page 0 is the first query's, page 2 the second's.
  decoder.prompt(floats{9, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, floats(20), 10);
  decoder.step(floats{1, 0, 1, 0, 1, 0}, floats(6), floats(6), 3);
  CHECK(decoder.selected(0) == ints{0});
  oracle::decoder truncated = decoder;
  truncated.truncate(11);
  CHECK(truncated.selected(0) == ints{0});
  const auto at_14 = decoder.step(floats{0, 1}, floats(2), floats(2)).rows[0];  // pages 3 to 6
  CHECK(at_14.selected == ints{2});
  CHECK(at_14.recalled == 1);
  CHECK(at_14.promoted == 0);
  const auto at_12 = truncated.step(floats{0, 1}, floats(2), floats(2)).rows[0];  // pages 2 to 5
  CHECK(at_12.selected == ints{2});
  CHECK(at_12.recalled == 0);
  CHECK(at_12.promoted == 1);
}

TEST_CASE("a truncation to a length that is not there is refused") {
  oracle::decoder decoder(tiny());
  decoder.prompt(floats(4), floats(4), 4);
  CHECK_THROWS_AS(decoder.truncate(5), std::invalid_argument);
  CHECK_THROWS_AS(decoder.truncate(-1), std::invalid_argument);
  CHECK(decoder.length() == 4);
}
