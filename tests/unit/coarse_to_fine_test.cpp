// coarse_to_fine as a summary: what it stores, and what either stage scores. Selections by it are step_test's.

#include <freekv/policies/box_summaries.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/key_codes.hpp>
#include <limits>

#include "../catch.hpp"
#include "scored_page.hpp"

namespace {

using namespace tests;
using freekv::coarse_to_fine;
using freekv::dynamic;

/// The pair stores what both store, fine first, and scores as the fine one; its coarse stage as the coarse one.
template <class E, class Coarse, class Fine>
void check_pair(const page_case& c, const Coarse& coarse, const Fine& fine) {
  const coarse_to_fine<Coarse, Fine> both{{coarse, fine}, {}};
  INFO(freekv::detail::printed(both) << ", " << c);
  for (const executor on : executors()) {
    const auto pair = score_by<E>(on, both, c, c.d);
    const auto of_coarse = score_by<E>(on, coarse, c, c.d), of_fine = score_by<E>(on, fine, c, c.d);
    CHECK(pair.scores == of_fine.scores);
    REQUIRE(pair.stored.size() == of_fine.stored.size() + of_coarse.stored.size());
    CHECK(std::equal(of_fine.stored.begin(), of_fine.stored.end(), pair.stored.begin()));
    CHECK(std::equal(of_coarse.stored.rbegin(), of_coarse.stored.rend(), pair.stored.rbegin()));

    const auto policy = freekv::summary_at(both, 0, 0);
    const int width = freekv::summary_query_width(policy, c.d);
    CHECK(width == freekv::summary_query_width(both, c.d));
    std::vector<float> prepared(count(c.group * width)), numbers(count(policy.width(c.page()))),
        scores(count(c.group));
    run_on(on, [&](auto team) {
      for (int g = 0; g < c.group; ++g)
        freekv::prepare_query(team, policy, freekv::group_query{c.queries.data() + g * c.d, 1, c.d},
                              prepared.data() + g * width);
      freekv::score_unit_coarsely<E>(team, policy, c.page(), pair.stored.data(),
                                     {prepared.data(), width, c.group, c.scale}, numbers.data(),
                                     {scores.data(), 1});
    });
    CHECK(scores == of_coarse.scores);
  }
}

}  // namespace

TEMPLATE_TEST_CASE("two summaries side by side are what each is alone", "[summary]", float,
                   freekv::bfloat16) {
  dice d(31);
  for (int trial = 0; trial < 8; ++trial) {
    auto c = make_page<TestType>(d);
    c.rank = std::min(c.rank, c.d);
    freekv::key_codebooks form{nullptr, 1, 1, c.d, 2, 2, 3, 2};
    const auto data = random_codebooks(d, form);
    form.data = data.data();
    const freekv::key_codes<3, 2> codes{{}, {}, form};
    check_pair<TestType>(c, freekv::min_max{}, freekv::key_sketch<4>{});
    check_pair<TestType>(c, freekv::ball{}, c.subspace(3));
    check_pair<TestType>(c, c.subspace(2), codes);
    check_pair<TestType>(c, codes, freekv::key_sketch<2>{});
    using int8_mean = freekv::stored_as<freekv::mean, freekv::number_format::int8>;
    check_pair<TestType>(c, int8_mean{}, freekv::min_max{});
  }
}

TEST_CASE("coarse_to_fine keeps some times the selected pages, at most all", "[summary]") {
  const coarse_to_fine<freekv::min_max, freekv::key_sketch<4>> usual;
  CHECK(usual.kept(100, 3) == 12);
  CHECK(usual.kept(12, 3) == 12);
  CHECK(usual.kept(11, 3) == 11);
  CHECK(usual.kept(0, 3) == 0);
  constexpr int largest_int = std::numeric_limits<int>::max();
  CHECK(usual.kept(largest_int, largest_int) == largest_int);
  coarse_to_fine<freekv::min_max, freekv::key_sketch<dynamic>, dynamic> chosen{{{}, {{2}}}, {1}};
  CHECK(chosen.kept(100, 3) == 3);
  chosen.times.value = largest_int;
  CHECK(chosen.kept(100, largest_int) == 100);
  chosen.times.value = 7;
  CHECK(freekv::detail::printed(chosen) == "coarse_to_fine(min_max, key_sketch(2), 7)");
}

TEST_CASE("coarse_to_fine refuses what either summary refuses, and to keep less than is selected",
          "[summary]") {
  const freekv::summary_setting setting{{8, 64}, 1, 1};
  coarse_to_fine<freekv::key_sketch<dynamic>, freekv::key_sketch<dynamic>, dynamic> both{{{{2}}, {{4}}}, {1}};
  both.validate(setting);
  for (const int times : {0, -3}) {
    both.times.value = times;
    CHECK_THROWS_AS(both.validate(setting), freekv::settings_error);
  }
  both.times.value = 1;
  both.coarse.bits.value = 3;
  CHECK_THROWS_AS(both.validate(setting), freekv::settings_error);
  both.coarse.bits.value = 1;
  both.fine.bits.value = 3;
  CHECK_THROWS_AS(both.validate(setting), freekv::settings_error);
}
