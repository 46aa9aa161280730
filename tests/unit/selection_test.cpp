// From scores to slots: pooling, the order of pages, the match of a selection with the slots, and the copy of
// a slice.

#include <algorithm>
#include <array>
#include <cmath>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/match_slots.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/policies/pooling.hpp>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "../catch.hpp"
#include "../instruction_sets.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::half;
using ints = std::vector<std::int32_t>;

/// (group, candidates) scores, settled: no NaN, nothing above the largest float.
using score_rows = std::vector<std::vector<float>>;

/// The library's pooled scores of a row, padded behind the candidates with -infinity as the backend does.
std::vector<float> pooled_by(executor on, const score_rows& scores) {
  const int group = static_cast<int>(scores.size()), candidates = static_cast<int>(scores[0].size());
  const std::int64_t stride = freekv::host::workspace_sizes::padded(candidates);
  std::vector<float> padded(count(group * stride), -inf), pooled(count(stride), quiet_nan), log_sums;
  for (int g = 0; g < group; ++g) {
    freekv::log_sum_exp mass;
    for (const float score : scores[count(g)]) mass.add(score);
    log_sums.push_back(mass.value());
    std::copy(scores[count(g)].begin(), scores[count(g)].end(), padded.begin() + g * stride);
  }
  run_on(on, [&](auto team) {
    for (std::int64_t j = 0; j < stride; j += decltype(team)::width)
      team.store(&pooled[count(j)],
                 freekv::mean_softmax{}.pool(team, {padded.data(), stride, log_sums.data(), group},
                                             static_cast<int>(j)));
  });
  // Padding pools like pages that score -infinity: it must never be better than a page.
  CHECK(std::all_of(pooled.begin() + candidates, pooled.end(), [](float x) { return x == -inf; }));
  pooled.resize(count(candidates));
  return pooled;
}

/// The same through the backend's stage.
std::vector<float> pooled_by_backend(freekv::host::isa set, const score_rows& scores) {
  const int group = static_cast<int>(scores.size()), candidates = static_cast<int>(scores[0].size());
  const std::int64_t stride = freekv::host::workspace_sizes::padded(candidates);
  std::vector<float> padded(count(group * stride), -inf), pooled(count(stride)), log_sums(count(group));
  for (int g = 0; g < group; ++g)
    std::copy(scores[count(g)].begin(), scores[count(g)].end(), padded.begin() + g * stride);
  freekv::host::workspace w;
  w.scores = padded.data();
  w.pooled = pooled.data();
  w.log_sums = log_sums.data();
  freekv::host::pool_candidates(set, freekv::mean_softmax{}, group, stride, stride, w);
  pooled.resize(count(candidates));
  return pooled;
}

score_rows random_scores(dice& d) {
  score_rows scores(count(d.one_of({1, 2, 3, 4, 5, 7, 8, 16})));
  const int candidates = d.between(1, 70);
  const float size = d.one_of({0.1f, 1.0f, 20.0f, 1e3f, 1e30f});
  for (auto& head : scores) {
    head = normals(d, count(candidates), size);
    const float shift = d.one_of({0.0f, 300.0f, -300.0f});
    for (float& x : head) x += shift;
  }
  return scores;
}

/// A page that is -infinity for one head is NaN's trace only if it is for all; alone it is a very low score.
void sprinkle(dice& d, score_rows& scores) {
  for (std::size_t j = 0; j < scores[0].size(); ++j) switch (d.below(8)) {
      case 0:
        for (auto& head : scores) head[j] = -inf;
        break;
      case 1:
        scores[count(d.below(static_cast<int>(scores.size())))][j] =
            d.one_of({-inf, largest, -largest, 0.0f, -0.0f});
        break;
      default:
        break;
    }
}

/// Compares with the oracle. What counts of a pooled score's error is that of the heads that make it.
void check_pooled(const std::vector<float>& pooled, const score_rows& scores) {
  std::vector<std::vector<double>> exact;
  for (const auto& head : scores) exact.emplace_back(head.begin(), head.end());
  const auto expected = oracle::pool_mean_softmax(exact);
  const auto masses = oracle::log_masses(exact);
  int wrong = 0;
  for (std::size_t j = 0; j < pooled.size(); ++j) {
    double best = -oracle::infinity, rounding = 0.0;
    for (std::size_t g = 0; g < exact.size(); ++g)
      if (std::isfinite(exact[g][j])) best = std::max(best, exact[g][j] - masses[g]);
    for (std::size_t g = 0; g < exact.size(); ++g)
      if (std::isfinite(exact[g][j]) && exact[g][j] - masses[g] >= best - 20.0 - 1e-6 * std::fabs(best))
        rounding = std::max(rounding, std::fabs(exact[g][j]) + std::fabs(masses[g]));
    // Beside the lowest float, whether a sum is that or -infinity is rounding.
    const bool lowest =
        rounding > 1e37 && pooled[j] < -0.99999f * largest && expected[j] < -0.99999 * oracle::largest_float;
    if (!lowest && !is_near(freekv::detail::clamp_score(pooled[j]), expected[j], 2e-6 + 2e-7 * rounding))
      ++wrong;
  }
  CHECK(wrong == 0);
}

template <class Layout, class E>
struct pages {
  std::vector<E> data;
  freekv::page_span<E, 24, Layout> span;
};
template <class Layout, class E>
pages<Layout, E> make_pages(std::vector<E> data, int tokens, int heads) {
  pages<Layout, E> made{std::move(data), {}};
  made.span = freekv::make_page_span<Layout, 24>(made.data.data(), 2, {tokens, heads});
  return made;
}

/// Copies the first `tokens` rows of every (page, head) slice and compares every element of the target.
template <class From, class To, class E>
void check_copy(dice& d) {
  constexpr int p = 16, heads = 3;
  const std::size_t elements = 2 * 2 * p * heads * 24;
  const auto from = make_pages<From>(stored_as<E>(normals(d, elements)), p, heads);
  for (const int tokens : {0, 1, 7, 16}) {
    const auto before = stored_as<E>(normals(d, elements));
    auto to = make_pages<To>(before, p, heads);
    const auto old = make_pages<To>(before, p, heads);
    freekv::detail::copy_slice<24>(freekv::detail::as_const(freekv::detail::slice_of(from.span, 0, 1)),
                                   freekv::detail::slice_of(to.span, 1, 2), tokens);
    int wrong = 0;
    for (int page = 0; page < 2; ++page)
      for (int plane = 0; plane < 2; ++plane)
        for (int t = 0; t < p; ++t)
          for (int head = 0; head < heads; ++head)
            for (int i = 0; i < 24; ++i) {
              const bool copied = page == 1 && head == 2 && t < tokens;
              const E expected = copied ? from.span(0, plane, t, 1, i) : old.span(page, plane, t, head, i);
              const E got = to.span(page, plane, t, head, i);
              if (std::memcmp(&got, &expected, sizeof(E)) != 0) ++wrong;
            }
    INFO(From::name << " to " << To::name << ", " << tokens << " tokens");
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("mean_softmax pools as the oracle for every group size", "[pooling]") {
  dice d(1);
  for (int trial = 0; trial < 300; ++trial) {
    const auto scores = random_scores(d);
    for (const executor on : executors()) check_pooled(pooled_by(on, scores), scores);
    for (const auto set : instruction_sets()) check_pooled(pooled_by_backend(set, scores), scores);
  }
}

TEST_CASE("mean_softmax pools pages at -infinity and at the ends of the range as the oracle", "[pooling]") {
  dice d(2);
  for (int trial = 0; trial < 300; ++trial) {
    auto scores = random_scores(d);
    sprinkle(d, scores);
    for (const executor on : executors()) check_pooled(pooled_by(on, scores), scores);
    check_pooled(pooled_by_backend(freekv::host::best_isa(), scores), scores);
  }
}

TEST_CASE("a head whose scores are all -infinity has no share, and the others decide", "[pooling]") {
  for (const executor on : executors()) {
    const auto pooled = pooled_by(on, {{-inf, -inf, -inf}, {0.0f, 1.0f, 2.0f}});
    const double total = 1.0 + std::exp(1.0) + std::exp(2.0);
    for (int j = 0; j < 3; ++j)
      CHECK(pooled[count(j)] ==
            Approx(static_cast<double>(j) - std::log(total) - std::log(2.0)).epsilon(1e-6));
    for (const float x : pooled_by(on, {{-inf, -inf}, {-inf, -inf}})) CHECK(x == -inf);
  }
}

TEST_CASE("scores at the largest float share the mass among themselves", "[pooling]") {
  for (const executor on : executors()) {
    const auto pooled = pooled_by(on, {{largest, 0.0f, largest, -largest, -inf}});
    CHECK(pooled[0] == pooled[2]);
    CHECK(pooled[0] > pooled[1]);
    CHECK(pooled[1] > pooled[3]);
    CHECK(pooled[4] == -inf);
    for (const float x : pooled) CHECK_FALSE(std::isnan(x));
  }
}

TEST_CASE("the mean of largest floats is finite for every group size", "[pooling]") {
  for (int group = 1; group <= 16; ++group)
    for (const auto set : instruction_sets()) {
      std::vector<float> scores(count(group) * 16, std::numeric_limits<float>::max()), pooled(16), sums(16);
      freekv::host::workspace w;
      w.scores = scores.data(), w.pooled = pooled.data(), w.log_sums = sums.data();
      freekv::host::pool_candidates(set, freekv::mean_score{}, group, 16, 16, w);
      INFO(group);
      for (const float x : pooled) CHECK(std::isfinite(x));
    }
}

TEST_CASE("keys of scores order like the scores, and ties go to the smaller page", "[ordered_key]") {
  dice d(3);
  std::vector<float> scores{0.0f, -0.0f,   1.0f,     -1.0f,  1e-45f,  -1e-45f, inf,
                            -inf, largest, -largest, 1e-38f, -1e-38f, 0.5f,    -0.5f};
  for (int i = 0; i < 100; ++i) scores.push_back(d.normal() * std::exp(20.0f * d.normal()));
  for (float& x : scores)
    if (std::isnan(x)) x = 0.0f;
  const ints page_ids{0, 1, 2, 1000, 0x7ffffffe, 0x7fffffff};
  int wrong = 0;
  for (const float a : scores)
    for (const float b : scores) {
      if ((a < b) != (freekv::order_bits(a) < freekv::order_bits(b))) ++wrong;
      if ((a == b) != (freekv::order_bits(a) == freekv::order_bits(b))) ++wrong;
      for (const auto p : page_ids)
        for (const auto q : page_ids) {
          const bool better = a > b || (a == b && p < q);
          if (better != (freekv::detail::ordered_key(a, p) > freekv::detail::ordered_key(b, q))) ++wrong;
        }
    }
  for (const float a : scores)
    for (const auto p : page_ids)
      wrong += freekv::detail::unit_of_key(freekv::detail::ordered_key(a, p)) != p;
  CHECK(wrong == 0);
  CHECK(freekv::order_bits(0.0f) == freekv::order_bits(-0.0f));
}

TEST_CASE("the best pages are the oracle's, ties, infinities and all", "[selection]") {
  dice d(4);
  for (int trial = 0; trial < 2000; ++trial) {
    const int candidates = d.one_of({d.between(2, 60), d.between(2, 700)});
    const int chosen = d.between(1, std::min(candidates - 1, 90)), sink = d.below(5);
    std::vector<float> pooled;
    for (int j = 0; j < candidates; ++j)
      pooled.push_back(d.one_of({d.normal(), static_cast<float>(d.below(4)), -inf, 0.0f, -0.0f, largest}));
    if (d.below(4) == 0) std::sort(pooled.begin(), pooled.end());  // each better than all before
    std::vector<std::uint64_t> keys(count(candidates));
    freekv::host::workspace w;
    w.pooled = pooled.data();
    w.keys = keys.data();
    freekv::host::order_candidates(sink, candidates, {}, chosen, w);
    ints best;
    for (int i = 0; i < chosen; ++i) best.push_back(freekv::detail::unit_of_key(keys[count(i)]));
    CHECK(*std::min_element(keys.begin(), keys.begin() + chosen) == keys[count(chosen - 1)]);
    std::sort(best.begin(), best.end());
    std::vector<int> ids;
    std::vector<double> scores;
    for (int j = 0; j < candidates; ++j) {
      ids.push_back(sink + j);
      scores.push_back(oracle::clamped(static_cast<double>(pooled[count(j)])));
    }
    const auto expected = oracle::top_k(ids, scores, chosen);
    CHECK(std::equal(best.begin(), best.end(), expected.pages.begin(), expected.pages.end()));
  }
}

TEST_CASE("top_k selects k, or all candidates if there are no more", "[selection]") {
  CHECK(freekv::top_k{}.count(0, 3) == 0);
  CHECK(freekv::top_k{}.count(2, 3) == 2);
  CHECK(freekv::top_k{}.count(3, 3) == 3);
  CHECK(freekv::top_k{}.count(100, 3) == 3);
}

TEST_CASE("a new selection keeps what is held in place and fills the lowest free slots", "[match_slots]") {
  dice d(5);
  for (int trial = 0; trial < 300; ++trial) {
    const int slots = d.between(1, 20);
    ints slot_unit(count(slots), -1), stamps(count(slots));
    for (int step = 0; step < 20; ++step) {
      std::set<std::int32_t> wanted_set;
      const int size = d.between(0, slots);
      while (static_cast<int>(wanted_set.size()) < size) wanted_set.insert(d.below(2 * slots + 3));
      const ints wanted(wanted_set.begin(), wanted_set.end()), before = slot_unit;

      ints expected = before, expected_slot;
      for (auto& page : expected)
        if (wanted_set.count(page) == 0) page = -1;
      int expected_misses = 0;
      for (const auto page : wanted) {
        const auto held = std::find(before.begin(), before.end(), page);
        if (held != before.end()) {
          expected_slot.push_back(static_cast<std::int32_t>(held - before.begin()));
        } else {
          const auto free = std::find(expected.begin(), expected.end(), -1);
          *free = page;
          expected_slot.push_back(~static_cast<std::int32_t>(free - expected.begin()));
          ++expected_misses;
        }
      }

      ints slot_of(wanted.size() + 1, 77);
      const int misses =
          freekv::detail::match_slots(freekv::first_unselected<>{}, wanted.data(), size,
                                      {slot_unit.data(), stamps.data(), slots}, step + 1, slot_of.data());
      CHECK(misses == expected_misses);
      CHECK(slot_unit == expected);
      CHECK(slot_of.back() == 77);
      slot_of.pop_back();
      CHECK(slot_of == expected_slot);
    }
  }
}

TEST_CASE("the same selection again moves nothing", "[match_slots]") {
  ints slot_unit{-1, -1, -1}, stamps(3), slot_of(3);
  const ints wanted{3, 5, 9};
  const auto misses = [&](int nth) {
    return freekv::detail::match_slots(freekv::least_recently_used<>{}, wanted.data(), 3,
                                       {slot_unit.data(), stamps.data(), 3}, nth, slot_of.data());
  };
  CHECK(misses(1) == 3);
  CHECK(slot_of == ints{~0, ~1, ~2});
  CHECK(misses(2) == 0);
  CHECK(slot_of == ints{0, 1, 2});
  CHECK(slot_unit == wanted);
}

TEST_CASE("spare slots keep what the residency frees last", "[match_slots]") {
  ints slot_unit(4, -1), stamps(4), slot_of(2);
  int nth = 0;
  const auto select = [&](const auto& residency, const ints& wanted) {
    return freekv::detail::match_slots(residency, wanted.data(), 2, {slot_unit.data(), stamps.data(), 4},
                                       ++nth, slot_of.data());
  };
  const freekv::least_recently_used<2> recent;
  CHECK(select(recent, {1, 2}) == 2);
  CHECK(select(recent, {2, 3}) == 1);
  CHECK(slot_unit == ints{1, 2, 3, -1});
  CHECK(select(recent, {1, 4}) == 1);  // 2 and 3 stay, both selected last
  CHECK(slot_unit == ints{1, 2, 3, 4});
  CHECK(select(recent, {1, 3}) == 0);
  CHECK(select(recent, {3, 5}) == 1);  // 2 was selected longest ago, then 4
  CHECK(slot_unit == ints{1, 5, 3, 4});
  const freekv::first_unselected<2> first;
  CHECK(select(first, {6, 7}) == 2);  // of 1, 5, 3, 4 the lowest two slots are freed
  CHECK(slot_unit == ints{6, 7, 3, 4});
  CHECK(select(freekv::first_unselected<0>{}, {3, 6}) == 0);
  CHECK(slot_unit == ints{6, -1, 3, -1});
}

TEMPLATE_TEST_CASE("a slice is copied whole between all layouts, and nothing else is touched", "[copy_slice]",
                   float, half, bfloat16) {
  dice d(6);
  using freekv::hnd;
  using freekv::nhd;
  check_copy<nhd, nhd, TestType>(d);
  check_copy<nhd, hnd, TestType>(d);
  check_copy<hnd, nhd, TestType>(d);
  check_copy<hnd, hnd, TestType>(d);
}

TEST_CASE("with one head NHD rows are one run too, and are copied as such", "[copy_slice]") {
  dice d(7);
  const auto from = make_pages<freekv::nhd>(normals(d, 2 * 2 * 8 * 24), 8, 1);
  auto to = make_pages<freekv::nhd>(std::vector<float>(2 * 2 * 8 * 24), 8, 1);
  for (int page = 0; page < 2; ++page)
    freekv::detail::copy_slice<24>(freekv::detail::as_const(freekv::detail::slice_of(from.span, page, 0)),
                                   freekv::detail::slice_of(to.span, page, 0), 8);
  CHECK(same_bits(from.data, to.data));
}

TEST_CASE("a union has each page once, ascending, with the mask of the heads that selected it",
          "[merge_selections]") {
  dice d(19);
  for (int trial = 0; trial < 300; ++trial) {
    const int group = d.one_of({1, 2, 3, 31, 32, 33, 70}), most = d.between(1, 40);
    const int words = freekv::head_mask_words(group);
    std::map<int, std::set<int>> expected;
    ints pages(count(most), -7);
    std::vector<std::uint32_t> masks(count(most * words), 0xdeadbeefu);
    int size = 0;
    for (int g = 0; g < group; ++g) {
      std::set<int> own;
      for (int i = d.below(5); i > 0; --i) own.insert(d.below(most));
      for (const int page : own) expected[page].insert(g);
      const ints added(own.begin(), own.end());
      size = freekv::detail::merge_selections({pages.data(), masks.data(), words}, size, added.data(),
                                              static_cast<int>(added.size()), g);
      REQUIRE(size == static_cast<int>(expected.size()));
    }
    int i = 0;
    for (const auto& [page, heads] : expected) {
      CHECK(pages[count(i)] == page);
      std::set<int> got;
      const std::uint32_t* const mask = masks.data() + i++ * words;
      int previous_end = -1;
      for (auto run = freekv::detail::next_run(mask, 0, group); run.count > 0;
           run = freekv::detail::next_run(mask, run.end(), group)) {
        CHECK(run.first > previous_end);  // runs are as long as they can be
        for (int g = run.first; g < run.end(); ++g) got.insert(g);
        previous_end = run.end();
      }
      CHECK(got == heads);
      for (int bit = group; bit < 32 * words; ++bit) CHECK((mask[bit / 32] >> bit % 32 & 1u) == 0);
    }
  }
  // Of no mask: all, in one run.
  const freekv::detail::head_run all = freekv::detail::next_run(nullptr, 0, 5);
  CHECK((all.first == 0 && all.count == 5));
  CHECK(freekv::detail::next_run(nullptr, all.end(), 5).count == 0);
}
