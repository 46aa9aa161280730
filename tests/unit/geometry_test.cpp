// Which page plays which role at which length, and which slot it has, against the oracle's page sets.

#include <algorithm>
#include <freekv/pipeline/attention_list.hpp>
#include <freekv/policies/geometry.hpp>
#include <set>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using ints = std::vector<int>;

ints range(int first, int last) {
  ints pages;
  for (int page = first; page < last; ++page) pages.push_back(page);
  return pages;
}

struct budget_case {
  int page, sink_pages, window_pages;
  freekv::budget budget(int selected = 3) const { return {sink_pages * page, window_pages * page, selected}; }
  oracle::settings settings() const {
    oracle::settings s;
    s.page = page;
    s.sink = sink_pages * page;
    s.window = window_pages * page;
    s.selected_units = 3;
    s.scale = 1.0;
    return s;
  }
};

std::vector<budget_case> budgets() {
  std::vector<budget_case> all;
  for (const int page : {8, 16, 24, 32, 128})
    for (const int sink : {0, 1, 2, 5})
      for (const int window : {1, 2, 3, 6}) all.push_back({page, sink, window});
  return all;
}

}  // namespace

TEST_CASE("roles at every length are the oracle's page sets", "[geometry]") {
  for (const auto& b : budgets()) {
    int wrong = 0;
    for (int n = 0; n <= std::max(300, 14 * b.page); ++n) {
      const auto roles = freekv::roles_at(n, b.budget(), b.page);
      const auto s = b.settings();
      wrong += range(0, roles.sink_end) != oracle::sink_pages(s, n);
      wrong += range(roles.sink_end, roles.window_begin) != oracle::candidate_pages(s, n);
      wrong += range(roles.window_begin, roles.page_end) != oracle::window_pages(s, n);
      wrong += roles.candidates() != static_cast<int>(oracle::candidate_pages(s, n).size());
    }
    INFO("page " << b.page << ", sink " << b.sink_pages << ", window " << b.window_pages << " pages");
    CHECK(wrong == 0);
  }
}

TEST_CASE("the ring holds its pages in slots of their own, apart from sink and selected slots",
          "[geometry]") {
  for (const auto& b : budgets()) {
    const auto slots = freekv::slots_for(b.budget(), b.page);
    CHECK(slots.sink == b.sink_pages);
    CHECK(slots.ring == b.window_pages + 1);
    CHECK(slots.selected == 3);
    CHECK(slots.total() == b.sink_pages + b.window_pages + 4);
    int wrong = 0;
    for (int n = 0; n <= std::max(300, 14 * b.page); ++n) {
      const auto s = b.settings();
      const int pages = oracle::page_count(s, n);
      const auto ring = oracle::ring_pages(s, n);
      wrong += range(std::min(slots.ring_begin(n, b.page), pages), pages) != ring;
      std::set<int> used;
      for (const int page : oracle::sink_pages(s, n)) used.insert(number_of(slots.sink_slot(page)));
      for (const int page : ring) used.insert(number_of(slots.ring_slot(page)));
      for (int i = 0; i < 3; ++i) used.insert(number_of(slots.selected_slot(i)));
      wrong += used.size() != oracle::sink_pages(s, n).size() + ring.size() + 3;
      wrong += *used.rbegin() >= slots.total();
      // Whatever is attended without being selected is in the ring.
      for (const int page : oracle::window_pages(s, n))
        wrong += std::find(ring.begin(), ring.end(), page) == ring.end();
    }
    INFO("page " << b.page << ", sink " << b.sink_pages << ", window " << b.window_pages << " pages");
    CHECK(wrong == 0);
  }
}

TEST_CASE("a page that becomes a candidate for the next step is still in the ring", "[geometry]") {
  for (const auto& b : budgets())
    for (int n = 0; n <= 12 * b.page; ++n) {
      const auto now = freekv::roles_at(n, b.budget(), b.page);
      const auto next = freekv::roles_at(n + 1, b.budget(), b.page);
      if (next.window_begin == now.window_begin) continue;
      const auto slots = freekv::slots_for(b.budget(), b.page);
      for (int page = std::max(now.window_begin, next.sink_end); page < next.window_begin; ++page) {
        CHECK(page >= slots.ring_begin(n, b.page));
        CHECK((page + 1) * b.page <= n);  // and complete
      }
    }
}

TEST_CASE("an attended list is sink, selected units and window in ascending order", "[geometry]") {
  dice d(1);
  for (int trial = 0; trial < 2000; ++trial) {
    const auto all = budgets();
    const auto& b = all[count(d.below(static_cast<int>(all.size())))];
    auto s = b.settings();
    s.unit = d.one_of({0, 1, 4, 8});
    const int n = d.between(1, 14 * b.page);
    ints selected;
    for (const int unit : oracle::units_of(s, oracle::candidate_pages(s, n)))
      if (d.below(3) == 0) selected.push_back(unit);
    const std::vector<std::int32_t> ids(selected.begin(), selected.end());
    freekv::detail::attention_list list{freekv::roles_at(n, b.budget(), b.page), ids.data(),
                                        static_cast<int>(ids.size())};
    list.tokens = n;
    list.page_tokens = b.page;
    list.unit_tokens = oracle::unit_tokens(s);
    const auto tokens_of = [&] {
      ints tokens;
      for (int i = 0; i < list.size(); ++i) {
        const auto [page, first, some] = list.range(i);
        for (int t = 0; t < some; ++t) tokens.push_back(page * b.page + first + t);
      }
      return tokens;
    };
    CHECK(tokens_of() ==
          oracle::attended_tokens(s, oracle::layer_kind::retrieval, n, selected, oracle::window_pages(s, n)));
    list.complete = true;
    CHECK(tokens_of() == range(0, n));
  }
}

TEST_CASE("roles are known at compile time", "[geometry]") {
  constexpr freekv::budget b{.sink = 8, .window = 16, .selected_units = 2};
  STATIC_REQUIRE(freekv::roles_at(0, b, 8) == freekv::page_roles{0, 0, 0});
  STATIC_REQUIRE(freekv::roles_at(1, b, 8) == freekv::page_roles{1, 1, 1});
  STATIC_REQUIRE(freekv::roles_at(40, b, 8) == freekv::page_roles{1, 3, 5});
  STATIC_REQUIRE(freekv::roles_at(41, b, 8) == freekv::page_roles{1, 3, 6});
  STATIC_REQUIRE(freekv::roles_at(47, b, 8) == freekv::page_roles{1, 3, 6});
  STATIC_REQUIRE(freekv::roles_at(48, b, 8) == freekv::page_roles{1, 4, 6});
  STATIC_REQUIRE(freekv::slots_for(b, 8).total() == 1 + 3 + 2);
}

TEST_CASE("a part of attention is 512 tokens, or one entry that is longer", "[geometry]") {
  STATIC_REQUIRE(freekv::detail::entries_per_part(8) == 64);
  STATIC_REQUIRE(freekv::detail::entries_per_part(32) == 16);
  STATIC_REQUIRE(freekv::detail::entries_per_part(24) == 21);
  STATIC_REQUIRE(freekv::detail::entries_per_part(256) == 2);
}
