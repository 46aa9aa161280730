// coarse_to_fine as a summary: what it stores, and what either stage scores. Selections by it are
// step_test's.

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

/// The pair stores what both store, fine first, and scores as the fine one; its coarse stage as the coarse
/// one.
template <class E, class Coarse, class Fine>
void check_pair(const page_case& c, const Coarse& coarse, const Fine& fine) {
  const coarse_to_fine<Coarse, Fine> both{{coarse, fine}, {}};
  INFO(freekv::detail::printed(both) << ", " << c);
  for (const executor on : executors()) {
    const auto pair = score_by<E>(on, both, c, c.d);
    const auto of_coarse = score_by<E>(on, coarse, c, c.d), of_fine = score_by<E>(on, fine, c, c.d);
    REQUIRE(pair.stored.size() == of_fine.stored.size() + of_coarse.stored.size());
    CHECK(std::equal(of_fine.stored.begin(), of_fine.stored.end(), pair.stored.begin()));
    CHECK(std::equal(of_coarse.stored.rbegin(), of_coarse.stored.rend(), pair.stored.rbegin()));

    const auto policy = freekv::summary_at(both, 0, 0);
    const int width = freekv::summary_query_width(policy, c.d);
    CHECK(width == freekv::summary_query_width(both, c.d));
    std::vector<float> prepared(count(c.group * width)), numbers(count(policy.width(c.page())));
    std::vector<float> scores[3];
    run_on(on, [&](auto team) {
      // One head at a time, as neither stage scores four at once.
      const auto prepare = [&](const auto& summary) {
        const int floats = freekv::summary_query_width(summary, c.d);
        for (int g = 0; g < c.group; ++g)
          freekv::prepare_query(team, summary, freekv::group_query{c.queries.data() + g * c.d, 1, c.d},
                                prepared.data() + g * floats);
        return freekv::prepared_queries{prepared.data(), floats, c.group, c.scale};
      };
      const auto to = [&](std::vector<float>& column) {
        column.resize(count(c.group));
        return freekv::detail::score_column{column.data(), 1};
      };
      freekv::detail::score_unit_coarsely<E>(team, policy, c.page(), pair.stored.data(), prepare(policy),
                                             numbers.data(), to(scores[0]));
      const auto alone = [&](const auto& summary, const scored& of, std::vector<float>& column) {
        const auto of_head = freekv::summary_at(summary, 0, 0);
        freekv::detail::score_unit<E>(team, of_head, c.page(), of.stored.data(), prepare(of_head),
                                      numbers.data(), to(column));
      };
      alone(coarse, of_coarse, scores[1]);
      alone(fine, of_fine, scores[2]);
    });
    CHECK(scores[0] == scores[1]);
    CHECK(pair.scores == scores[2]);
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
