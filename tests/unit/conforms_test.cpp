// The judge of summaries that users have: it passes a summary that is its definition, and tells of each flaw.

#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../property/random_case.hpp"

namespace {

using freekv::testing::doubles;

enum class flaw { none, score, numbers, width, drops_nan, of_wide_teams };

/// The page's mean key, or nearly.
struct flawed_mean {
  using policy_kind = freekv::summary_kind;
  static constexpr std::string_view name = "flawed_mean";
  flaw has = flaw::none;

  constexpr int width(freekv::page_geometry page) const {
    return page.head_dim + (has == flaw::width ? 8 : 0);
  }
  template <freekv::team T>
  void summarise(T team, freekv::unit_keys keys, float* numbers) const {
    for (int i = keys.page.head_dim; i < width(keys.page); ++i) numbers[i] = 0.0f;
    if (has == flaw::numbers) --keys.page.tokens;
    freekv::mean{}.summarise(team, keys, numbers);
  }
  template <freekv::team T>
  float score(T team, const freekv::unit_query& query, const float* numbers) const {
    const float score = freekv::mean{}.score(team, query, numbers);
    if (has == flaw::drops_nan && score != score) return 0.0f;
    if (has == flaw::of_wide_teams && T::width > 1) return score + 1.0f;
    return has == flaw::score ? -score : score;
  }
};

std::vector<std::string> told(flaw has) {
  const freekv::testing::summary_definition mean{
      .numbers =
          [](const doubles& keys, freekv::page_geometry page) {
            const auto d = static_cast<std::size_t>(page.head_dim);
            doubles numbers(d);
            for (std::size_t i = 0; i < keys.size(); ++i) numbers[i % d] += keys[i] / page.tokens;
            return numbers;
          },
      .score =
          [](const doubles& query, const doubles& numbers, freekv::page_geometry, double scale) {
            double product = 0.0;
            for (std::size_t i = 0; i < query.size(); ++i) product += query[i] * numbers[i];
            return scale * product;
          }};
  flawed_mean policy;
  policy.has = has;
  return freekv::testing::conforms(mean, policy, {.units = 30, .runs = 3});
}

bool mentions(const std::vector<std::string>& sentences, const std::string& words) {
  for (const std::string& one : sentences)
    if (one.find(words) != std::string::npos) return true;
  return false;
}

}  // namespace

TEST_CASE("a summary that is its definition conforms to it", "[conforms]") {
  CHECK(told(flaw::none) == std::vector<std::string>{});
}

TEST_CASE("the oracle knows every summary that programs offer, or a file in tests/policies does",
          "[conforms]") {
  const std::string conforming = "," FREEKV_CONFORMING ",";
  for (const auto& one : freekv::examples::summaries) {
    INFO(one.name);
    const auto same = [&](const auto& word) { return word.name == one.name; };
    const bool by_oracle =
        std::any_of(std::begin(tests::oracle_summaries), std::end(tests::oracle_summaries), same);
    CHECK((by_oracle || conforming.find("," + std::string(one.name) + ",") != std::string::npos));
  }
}

TEST_CASE("what differs from a summary's definition is told", "[conforms]") {
  CHECK(mentions(told(flaw::score), "one lane, unit of"));
  CHECK(mentions(told(flaw::score), "of the definition"));
  CHECK(mentions(told(flaw::numbers), ": number 0 is "));
  CHECK(mentions(told(flaw::width), ", of the definition "));
  CHECK(mentions(told(flaw::drops_nan), "a unit of NaN keys scores 0, not NaN"));
  CHECK(mentions(told(flaw::of_wide_teams), "baseline, unit of"));
  CHECK_FALSE(mentions(told(flaw::of_wide_teams), "one lane"));
  CHECK(told(flaw::score).size() == 10);
}
