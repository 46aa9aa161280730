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
                     const std::vector<float>& queries, kv_extent unit, float scale) {
  const int d = unit.head_dim, group = static_cast<int>(queries.size()) / d;
  const int width = policy.width(unit), query_width = summary_query_width(policy, d);
  scored_unit scored{std::vector<float>(to_size(width)), std::vector<float>(to_size(width)),
                     std::vector<float>(to_size(group))};
  std::vector<float> key_scratch(keys.size()),
      prepared(to_size(prepared_queries::floats(group, query_width)));
  std::vector<std::byte> bytes(summary_bytes<Element>(policy, unit));
  freekv::detail::summarise_unit<Element>(team, policy, head_slice<const Element>{keys.data(), nullptr, d},
                                          unit, {key_scratch.data(), scored.numbers.data()}, bytes.data());
  const auto of_group =
      prepare_group(team, policy, group_query{queries.data(), group, d}, scale, prepared.data());
  freekv::detail::score_unit<Element>(team, policy, unit, bytes.data(), of_group, scored.stored.data(),
                                      {scored.scores.data(), 1});
  return scored;
}

/// Numbers of a unit's keys, as a pipeline stores them.
template <class Element, class Policy>
doubles stored_numbers(const Policy& policy, const std::vector<Element>& keys, kv_extent unit) {
  const std::vector<float> no_query(to_size(unit.head_dim));
  return wide(score_by<Element>(scalar_team{}, policy, keys, no_query, unit, 1.0f).stored);
}

/// True where such units suit the policy.
template <class Policy>
bool suits(const Policy& policy, kv_extent unit) {
  try {
    if constexpr (hooks_of<Policy>::has(hook::validate))
      summary_kind::validate(policy, policy_setting{1, 1, unit.head_dim, unit.tokens, unit.tokens});
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
    const kv_extent unit{random.one_of({8, 8, 16, 24, 32, 64, 128}),
                         random.one_of({8, 16, 24, 64, 80, 128, 256})};
    const int group = random.one_of({1, 2, 3, 5, 8});
    const float scale = nth % 3 == 0 ? 0.3f : 1.0f / std::sqrt(static_cast<float>(unit.head_dim));
    if (!suits(policy, unit)) continue;
    ++compared;
    auto keys = random.normals<Element>(unit.tokens * unit.head_dim, nth % 5 == 0 ? 6.0f : 1.0f);
    const auto queries = random.normals<float>(group * unit.head_dim);
    const doubles wide_keys = wide(keys), want = definition.numbers(wide_keys, unit);
    const double key_size = largest(wide_keys);
    const auto where = [&](const char* on) {
      return std::string(element_name<Element>) + ", " + on + ", unit of " + std::to_string(unit.tokens) +
             ", head_dim " + std::to_string(unit.head_dim);
    };
    on_every_team([&](auto team, const char* on) {
      const auto scored = score_by<Element>(team, policy, keys, queries, unit, scale);
      if (scored.numbers.size() != want.size())
        return wrong.add(where(on), ": width ", scored.numbers.size(), ", of the definition ", want.size());
      for (std::size_t i = 0; i < want.size(); ++i)
        if (const double got = static_cast<double>(scored.numbers[i]);
            !(std::fabs(got - want[i]) <=
              definition.tolerance * (std::fabs(want[i]) + key_size + key_size * key_size)))
          wrong.add(where(on), ": number ", i, " is ", got, ", of the definition ", want[i]);
      const doubles stored = wide(scored.stored);
      if (!hooks_of<Policy>::has(hook::encode) && scored.stored != scored.numbers)
        wrong.add(where(on), ": what is stored are not its numbers");
      for (int g = 0; g < group; ++g) {
        const doubles query = wide(queries.data() + g * unit.head_dim, to_size(unit.head_dim));
        const double score = definition.score(query, stored, unit, static_cast<double>(scale));
        const double got = static_cast<double>(scored.scores[to_size(g)]);
        if (!(std::fabs(got - score) <=
              definition.tolerance * (1.0 + std::fabs(score) +
                                      static_cast<double>(scale) * sum_of_sizes(query) * largest(stored))))
          wrong.add(where(on), ": score ", got, ", of the definition ", score);
      }
    });
    const auto scores_nan = [&](const std::string& what) {
      on_every_team([&](auto team, const char* on) {
        for (const float score : score_by<Element>(team, policy, keys, queries, unit, scale).scores)
          if (score != -infinity) wrong.add(where(on), ": ", what, " scores ", score, ", not NaN");
      });
    };
    const auto nan = from_float<Element>(std::numeric_limits<float>::quiet_NaN());
    const int spoiled = random.below(unit.tokens * unit.head_dim);
    keys[to_size(spoiled)] = nan;
    scores_nan("a unit with NaN in number " + std::to_string(spoiled % unit.head_dim) + " of key " +
               std::to_string(spoiled / unit.head_dim));
    keys.assign(keys.size(), nan);
    scores_nan("a unit of NaN keys");
  }
  if (compared == 0 && options.units > 0) wrong.add(element_name<Element>, ": no unit suits the policy");
}

/// `mean`, by which pages are scored while a policy of another kind is judged.
inline summary_definition definition_of_mean() {
  return {.numbers =
              [](const doubles& keys, kv_extent unit) {
                doubles numbers(to_size(unit.head_dim));
                for (std::size_t i = 0; i < keys.size(); ++i)
                  numbers[i % numbers.size()] += keys[i] / unit.tokens;
                return numbers;
              },
          .score = [](const doubles& query, const doubles& numbers, kv_extent,
                      double scale) { return scale * inner_product(query, numbers); }};
}

}  // namespace freekv::testing::detail
