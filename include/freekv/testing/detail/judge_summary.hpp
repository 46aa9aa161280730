// Random units, whose numbers and scores are to be a summary's definition's.
#pragma once

#include <cmath>
#include <cstddef>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/mean_summaries.hpp>
#include <freekv/policies/summary.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <limits>
#include <string>
#include <vector>

namespace freekv::testing::detail {

/// A unit as a team makes it: the numbers before they are stored, what is stored of them, and scores of
/// queries.
struct scored_unit {
  std::vector<float> numbers, stored, scores;
};

template <class Element, team T, class Policy>
scored_unit score_by(T team, const Policy& policy, const std::vector<Element>& keys,
                     const std::vector<float>& queries, page_geometry page, float scale) {
  const int d = page.head_dim, group = static_cast<int>(queries.size()) / d;
  const int width = policy.width(page), query_width = summary_query_width(policy, d);
  scored_unit unit{std::vector<float>(to_size(width)), std::vector<float>(to_size(width)),
                   std::vector<float>(to_size(group))};
  std::vector<float> key_scratch(keys.size()),
      prepared(to_size(prepared_queries::floats(group, query_width)));
  std::vector<std::byte> bytes(summary_bytes<Element>(policy, page));
  freekv::detail::summarise_unit<Element>(team, policy, head_slice<const Element>{keys.data(), nullptr, d},
                                          page, {key_scratch.data(), unit.numbers.data()}, bytes.data());
  const auto of_group =
      prepare_group(team, policy, group_query{queries.data(), group, d}, scale, prepared.data());
  freekv::detail::score_unit<Element>(team, policy, page, bytes.data(), of_group, unit.stored.data(),
                                      {unit.scores.data(), 1});
  return unit;
}

/// Numbers of a unit's keys, as a pipeline stores them.
template <class Element, class Policy>
doubles stored_numbers(const Policy& policy, const std::vector<Element>& keys, page_geometry page) {
  const std::vector<float> no_query(to_size(page.head_dim));
  return wide(score_by<Element>(scalar_team{}, policy, keys, no_query, page, 1.0f).stored);
}

/// True where a unit of `page` suits the policy.
template <class Policy>
bool suits(const Policy& policy, page_geometry page) {
  try {
    if constexpr (hooks_of<Policy>::has(hook::validate))
      summary_kind::validate(policy, policy_setting{1, 1, page.head_dim, page.tokens, page.tokens});
    return true;
  } catch (const settings_error&) {
    return false;
  }
}

template <class Element, class Policy>
void judge_units(const Policy& policy, const summary_definition& definition,
                 const conformance_options& options, differences& wrong) {
  random_numbers random(options.seed);
  int compared = 0;
  for (int nth = 0; nth < options.units; ++nth) {
    const page_geometry page{random.one_of({8, 8, 16, 24, 32, 64, 128}),
                             random.one_of({8, 16, 24, 64, 80, 128, 256})};
    const int group = random.one_of({1, 2, 3, 5, 8});
    const float scale = nth % 3 == 0 ? 0.3f : 1.0f / std::sqrt(static_cast<float>(page.head_dim));
    if (!suits(policy, page)) continue;
    ++compared;
    auto keys = random.normals<Element>(page.tokens * page.head_dim, nth % 5 == 0 ? 6.0f : 1.0f);
    const auto queries = random.normals<float>(group * page.head_dim);
    const doubles wide_keys = wide(keys), want = definition.numbers(wide_keys, page);
    const double key_size = largest(wide_keys);
    const auto where = [&](const char* on) {
      return std::string(element_name<Element>) + ", " + on + ", unit of " + std::to_string(page.tokens) +
             ", head_dim " + std::to_string(page.head_dim);
    };
    on_every_team([&](auto team, const char* on) {
      const auto unit = score_by<Element>(team, policy, keys, queries, page, scale);
      if (unit.numbers.size() != want.size())
        return wrong.add(where(on), ": width ", unit.numbers.size(), ", of the definition ", want.size());
      for (std::size_t i = 0; i < want.size(); ++i)
        if (const double got = static_cast<double>(unit.numbers[i]);
            !(std::fabs(got - want[i]) <=
              definition.tolerance * (std::fabs(want[i]) + key_size + key_size * key_size)))
          wrong.add(where(on), ": number ", i, " is ", got, ", of the definition ", want[i]);
      const doubles stored = wide(unit.stored);
      if (!hooks_of<Policy>::has(hook::encode) && unit.stored != unit.numbers)
        wrong.add(where(on), ": what is stored are not its numbers");
      for (int g = 0; g < group; ++g) {
        const doubles query = wide(queries.data() + g * page.head_dim, to_size(page.head_dim));
        const double score = definition.score(query, stored, page, static_cast<double>(scale));
        const double got = static_cast<double>(unit.scores[to_size(g)]);
        if (!(std::fabs(got - score) <=
              definition.tolerance * (1.0 + std::fabs(score) +
                                      static_cast<double>(scale) * sum_of_sizes(query) * largest(stored))))
          wrong.add(where(on), ": score ", got, ", of the definition ", score);
      }
    });
    keys.assign(keys.size(), from_float<Element>(std::numeric_limits<float>::quiet_NaN()));
    on_every_team([&](auto team, const char* on) {
      for (const float score : score_by<Element>(team, policy, keys, queries, page, scale).scores)
        if (score != -infinity) wrong.add(where(on), ": a unit of NaN keys scores ", score, ", not NaN");
    });
  }
  if (compared == 0 && options.units > 0) wrong.add(element_name<Element>, ": no unit suits the policy");
}

/// `mean`, by which pages are scored while a policy of another kind is judged.
inline summary_definition definition_of_mean() {
  return {.numbers =
              [](const doubles& keys, page_geometry page) {
                doubles numbers(to_size(page.head_dim));
                for (std::size_t i = 0; i < keys.size(); ++i)
                  numbers[i % numbers.size()] += keys[i] / page.tokens;
                return numbers;
              },
          .score = [](const doubles& query, const doubles& numbers, page_geometry,
                      double scale) { return scale * inner_product(query, numbers); }};
}

}  // namespace freekv::testing::detail
