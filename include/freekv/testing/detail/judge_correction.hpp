// Random changes of a group's queries, and random masses, which are to be flagged as a correction's
// definition has it.
#pragma once

#include <freekv/policies/correction.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <string>
#include <vector>

namespace freekv::testing::detail {

/// A group's queries and those before them, from which each is turned by a random angle or none, and scaled
/// or not; now and then one of zeros.
inline changed_queries random_change(random_numbers& random, int nth) {
  const int group = random.one_of({1, 2, 3, 4, 5, 7, 8, 16}), d = random.one_of({8, 64, 80, 96, 128, 256});
  const float turns = 0.1f * static_cast<float>(random.one_of({0, 1, 3, 4, 5, 6, 8, 10}));
  changed_queries change{.now = {}, .before = {}, .decode_step = 1 + nth % 40};
  for (int g = 0; g < group; ++g) {
    const float scale = 0.1f * static_cast<float>(random.one_of({10, 10, 3, 5, 20, 40}));
    const auto before = random.normals<float>(d);
    std::vector<float> now;
    for (const float x : before)
      now.push_back(scale * (std::sqrt(1.0f - turns * turns) * x + turns * random.normal()));
    if (random.one_of({0, 0, 0, 0, 0, 0, 0, 0, 0, 1}) == 1) now.assign(now.size(), 0.0f);
    change.now.push_back(wide(now));
    change.before.push_back(wide(before));
  }
  return change;
}

/// True where the definition flags the change, or one that rounding may have made of it, as `flags` has it.
inline bool flags_to_rounding(const correction_definition& definition, const changed_queries& change,
                              bool flags) {
  const std::size_t group = change.now.size(), d = change.now[0].size();
  doubles all;
  for (const auto* of : {&change.now, &change.before})
    for (const doubles& q : *of) all.insert(all.end(), q.begin(), q.end());
  return accepts_to_rounding(all, 1e-5, 0.0, [&](const doubles& moved) {
    changed_queries other{{}, {}, change.decode_step};
    for (std::size_t i = 0; i < 2 * group; ++i) {
      const auto first = moved.begin() + static_cast<std::ptrdiff_t>(i * d);
      (i < group ? other.now : other.before).emplace_back(first, first + static_cast<std::ptrdiff_t>(d));
    }
    return definition.by_queries(other) == flags;
  });
}

template <class Policy>
void judge_flags(const Policy& policy, const correction_definition& definition,
                 const conformance_options& options, differences& wrong) {
  static_assert(
      correction_by_mass<Policy> || correction_by_query<Policy>,
      "conforms judges corrections by queries and by masses; one by a sample is judged by a test of "
      "its own, as verified_share is");
  random_numbers random(options.seed);
  const auto in_words = [](bool flags) { return flags ? "is flagged" : "is not flagged"; };
  for (int nth = 0; nth < options.units; ++nth) {
    if constexpr (correction_by_mass<Policy>) {
      const double best = 0.5 + 0.5 * random.either_way(),
                   selected = best * (0.5 + 0.5 * random.either_way());
      const bool flags =
          policy.at(0).flags(selection_masses{static_cast<float>(selected), static_cast<float>(best)});
      if (!accepts_to_rounding({selected, best}, 1e-6, 0.0,
                               [&](const doubles& m) { return definition.by_masses(m[0], m[1]) == flags; }))
        wrong.add("a head of mass ", selected, ", where ", best, " is the best, ", in_words(flags));
    } else {
      const changed_queries change = random_change(random, nth);
      const int group = static_cast<int>(change.now.size()), d = static_cast<int>(change.now[0].size());
      const std::vector<float> now = narrow(change.now), before = narrow(change.before);
      on_every_team([&](auto team, const char* on) {
        const bool flags = policy.at(0).flags(
            team, query_change{{now.data(), group, d}, {before.data(), group, d}, change.decode_step});
        if (!flags_to_rounding(definition, change, flags))
          wrong.add(on, ", group of ", group, ", head_dim ", d, ", decode step ", change.decode_step,
                    ": the head ", in_words(flags), ", by the definition it ", in_words(!flags));
      });
    }
  }
}

}  // namespace freekv::testing::detail
