// Slots with room for pages that are no longer selected.
#pragma once

#include "by_hand.hpp"

namespace {

struct held_case {
  ints wanted;
  int recalled;
  ints slots;
};

/// Selections one after the other at 40 tokens, 20 pages: the ring holds pages 18 and 19.
void check_slots(oracle::slot_cache& cache, const oracle::settings& s, const std::vector<held_case>& cases) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    INFO("selection " << i);
    const auto moved = cache.hold(s, cases[i].wanted, 40);
    CHECK(moved.recalled == cases[i].recalled);
    CHECK(moved.promoted == 0);
    CHECK(cache.pages() == cases[i].slots);
  }
}

oracle::settings with_spare(int spare, oracle::residency_kind residency) {
  oracle::settings s = tiny();
  s.selected_units = 2;
  s.spare = spare;
  s.residency = residency;
  return s;
}

}  // namespace

TEST_CASE("without spare slots only the selection is held") {
  for (auto residency :
       {oracle::residency_kind::first_unselected, oracle::residency_kind::least_recently_used}) {
    const auto s = with_spare(0, residency);
    oracle::slot_cache cache(s);
    check_slots(cache, s,
                {{{5, 7}, 2, {5, 7}},
                 {{3, 7}, 1, {3, 7}},  // 3 for 5
                 {{3}, 0, {3, -1}},    // 7 goes though nothing needs its slot
                 {{3, 7}, 1, {3, 7}},
                 {{1, 2}, 2, {1, 2}}});
  }
}

TEST_CASE("the lowest slot that is not wanted goes first") {
  const auto s = with_spare(1, oracle::residency_kind::first_unselected);
  oracle::slot_cache cache(s);
  check_slots(cache, s,
              {{{1, 2}, 2, {1, 2, -1}},
               {{2, 3}, 1, {1, 2, 3}},  // an empty slot before any eviction
               {{3, 4}, 1, {4, 2, 3}},
               {{2, 4}, 0, {4, 2, 3}},
               {{4, 5}, 1, {4, 5, 3}},  // 2, though used later than 3
               {{3, 5}, 0, {4, 5, 3}},
               {{}, 0, {-1, -1, 3}},  // three are not wanted, one may stay
               {{8, 9}, 2, {8, 9, 3}}});
  cache.clear();
  CHECK(cache.pages() == ints{-1, -1, -1});
}

TEST_CASE("the slot that was used longest ago goes first") {
  const auto s = with_spare(1, oracle::residency_kind::least_recently_used);
  oracle::slot_cache cache(s);
  check_slots(cache, s,
              {{{1, 2}, 2, {1, 2, -1}},
               {{2, 3}, 1, {1, 2, 3}},
               {{3, 4}, 1, {4, 2, 3}},
               {{2, 4}, 0, {4, 2, 3}},  // wanting a held page uses it
               {{4, 5}, 1, {4, 2, 5}},  // 3 goes
               {{3, 5}, 1, {4, 3, 5}},  // 2 goes
               {{}, 0, {-1, -1, 5}},    // 4, then 3 and 5 tie
               {{8}, 1, {8, -1, 5}}});
}

TEST_CASE("a wanted page keeps its slot while others take the rest in ascending order") {
  const auto s = with_spare(2, oracle::residency_kind::least_recently_used);
  oracle::slot_cache cache(s);
  check_slots(cache, s,
              {{{1, 2}, 2, {1, 2, -1, -1}},
               {{5, 6}, 2, {1, 2, 5, 6}},
               {{1, 6}, 0, {1, 2, 5, 6}},
               {{3, 9}, 2, {1, 3, 9, 6}},    // 2, then 5
               {{1, 4}, 1, {1, 3, 9, 4}}});  // 6, of the third selection
}

TEST_CASE("a page of the ring is promoted, once") {
  const auto s = with_spare(1, oracle::residency_kind::first_unselected);
  oracle::slot_cache cache(s);
  auto moved = cache.hold(s, {17, 18}, 40);
  CHECK(moved.recalled == 1);
  CHECK(moved.promoted == 1);
  moved = cache.hold(s, {18, 19}, 40);
  CHECK(moved.recalled == 0);
  CHECK(moved.promoted == 1);
}

TEST_CASE("a spare slot saves the recall of a page that comes back") {
  using kinds = oracle::residency_kind;
  for (kinds residency : {kinds::first_unselected, kinds::least_recently_used}) {
    oracle::settings s = tiny();
    s.spare = 1;
    s.residency = residency;
    oracle::decoder decoder(s);
    // The trace of one selected page: 0 and 1, 1, 0 and 2, 2, 1 by correct and speculate.
    decoder.prompt(floats{1, -5, 3, 2}, floats(4), 4);
    const floats queries{1, 1, -1, -1, 1}, keys{-9, 0, 0, 0, 0};
    std::vector<oracle::row_result> rows;
    for (std::size_t i = 0; i < 5; ++i)
      rows.push_back(decoder.step(floats{queries[i]}, floats{keys[i]}, floats{0}).rows[0]);
    const bool first = residency == kinds::first_unselected;
    const std::vector<ints> slots = first ? std::vector<ints>{{0, 1}, {0, 1}, {2, 1}, {2, 1}, {2, 1}}
                                          : std::vector<ints>{{0, 1}, {0, 1}, {0, 2}, {0, 2}, {1, 2}};
    // Only page 1 at the end differs: it is held where page 0 went.
    const ints recalled = first ? ints{1, 0, 0, 0, 0} : ints{1, 0, 0, 0, 1};
    for (std::size_t i = 0; i < 5; ++i) {
      INFO("step " << i);
      CHECK(rows[i].slots == slots[i]);
      CHECK(rows[i].recalled == recalled[i]);
      CHECK(rows[i].recalled_before_attention == recalled[i]);
      CHECK(rows[i].promoted == (i == 0 || i == 2 ? 1 : 0));
    }
    oracle::decoder fork = decoder;
    // A prompt empties the slots: page 1 has to be recalled again.
    decoder.prompt(floats{-9}, floats{0}, 1);
    const auto again = decoder.step(floats{1}, floats{-9}, floats{0}).rows[0];
    CHECK(again.selected == ints{1});
    CHECK(again.recalled == 1);
    CHECK(again.slots == ints{1, -1});
    CHECK(fork.step(floats{1}, floats{-9}, floats{0}).rows[0].recalled == 0);

    s.route = oracle::route_kind::in_place;
    oracle::decoder in_place(s);
    in_place.prompt(floats{1, -5, 3, 2}, floats(4), 4);
    const auto row = in_place.step(floats{1}, floats{-9}, floats{0}).rows[0];
    CHECK(row.slots == ints{});
    CHECK(row.recalled_before_attention == 0);
  }
}

TEST_CASE("movement is firm again after one firm selection, with spare slots only after a prompt") {
  for (int spare : {0, 1}) {
    oracle::settings s = tiny();
    s.spare = spare;
    oracle::decoder decoder(s);
    decoder.prompt(floats{3, 3, 3, 3, 1}, floats(5), 5);
    const auto firm = [&](float key) {
      return decoder.step(floats{1}, floats{key}, floats{0}).rows[0].movement_firm;
    };
    CHECK_FALSE(firm(1));            // n 6: pages 0 and 1 tie
    CHECK_FALSE(firm(9));            // n 7: still, and what is held is not known
    CHECK_FALSE(firm(9));            // n 8: still
    CHECK_FALSE(firm(0));            // n 9: page 3 is next, firmly, but page 0 or 1 was held
    CHECK(firm(0) == (spare == 0));  // n 10: page 3 was, and of what else there is nothing is known
    CHECK(firm(0) == (spare == 0));
    decoder.prompt(floats{0}, floats{0}, 1);
    CHECK(firm(0));
  }
}
