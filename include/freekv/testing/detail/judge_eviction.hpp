// Random sequences of an evicting pipeline: who has left, beside an eviction's definition, and what attention
// to the others gives.
#pragma once

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/evicting_pipeline.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace freekv::testing::detail {

/// One KV head's part of a random sequence, as the definition has it.
template <class Element, class Policy>
struct eviction_judge {
  const random_text<Element>* text;
  const eviction_definition* by;
  const eviction_settings<Policy>* settings;
  int head = 0;
  attended_rows seen{};
  std::set<int> held{};  // tokens, before some of them leave
  int tokens = 0;        // of the sequence

  /// A row has attended to tokens.
  void observe(int row, const std::vector<int>& to) {
    doubles shares(to_size(row + 1));
    for (int g = 0; g < text->group; ++g) {
      const doubles of_head = text->attend(row, head * text->group + g, to).shares;
      for (std::size_t i = 0; i < to.size(); ++i) shares[to_size(to[i])] += of_head[i] / text->group;
    }
    seen.shares.push_back(std::move(shares));
  }
  void prompt(int count) {
    seen.prompt = tokens = count;
    for (int token = 0; token < count; ++token) held.insert(token);
    seen.prompt_is_cut = static_cast<int>(held.size()) > settings->eviction.kept(moment());
    for (int row = 0; row < count; ++row) {
      std::vector<int> to;
      for (int t = 0; t <= row; ++t) to.push_back(t);
      observe(row, to);
    }
  }
  /// When units leave that are held now.
  eviction_moment moment() const {
    return {settings->budget,
            seen.prompt,
            tokens,
            tokens == seen.prompt,
            static_cast<int>(held.size()),
            0,
            1,
            head};
  }

  /// Rows that have been seen, and what rounding may have made of it.
  std::vector<attended_rows> seen_to_rounding() const {
    std::vector<attended_rows> all(5, seen);
    random_numbers random(1);
    for (std::size_t moved = 1; moved < all.size(); ++moved)
      for (doubles& row : all[moved].shares)
        for (double& share : row) share *= 1.0 + 2e-5 * random.either_way();
    return all;
  }

  /// Judge of the tokens that are still there when the next row comes.
  void judge(const std::string& where, const std::set<int>& now, differences& wrong) {
    const Policy& policy = settings->eviction;
    const eviction_moment at = moment();
    const int kept = std::min(static_cast<int>(held.size()), policy.kept(at));
    if (static_cast<int>(now.size()) != kept)
      wrong.add(where, " has kept ", now.size(), " units, by the policy it keeps ", kept);
    std::vector<int> left;
    for (const int token : held)
      if (now.count(token) == 0) left.push_back(token);
    for (const int token : now)
      if (held.count(token) == 0)
        return wrong.add(where, " has unit ", token, " back, which it has forgotten");
    if (left.empty()) return;
    const std::vector<attended_rows> of = seen_to_rounding();
    const auto worth = [&](int token) {  // the least and the most that it may be
      std::pair<double, double> range(HUGE_VAL, -HUGE_VAL);
      for (const attended_rows& rows : of) {
        const double one = by->worth(rows, token);
        if (!(one == one)) wrong.add(where, ": the definition's worth of unit ", token, " is NaN");
        range = {std::min(range.first, one), std::max(range.second, one)};
      }
      return range;
    };
    for (const int one : left) {
      const auto [low, high] = worth(one);
      for (const int other : now) {
        if (policy.protects(other, at)) continue;
        if (policy.protects(one, at))
          return wrong.add(where, " has lost unit ", one, ", which is protected, and kept ", other);
        const auto [other_low, other_high] = worth(other);
        const bool alike = low == high && other_low == other_high && low == other_low;
        if (alike ? one > other : low > other_high)
          return wrong.add(where, " has lost unit ", one, ", worth ", low, ", and kept ", other, ", worth ",
                           other_high);
      }
    }
  }

  /// A decode row, for which `units` were there, and what it got.
  void step(const std::string& where, int row, const std::vector<int>& units, const std::vector<float>& out,
            differences& wrong) {
    std::set<int> stayed(units.begin(), units.end());
    if (stayed.erase(row) == 0) return wrong.add(where, " does not attend to its own token");
    judge(where, stayed, wrong);
    held = {units.begin(), units.end()};
    tokens = row + 1;
    for (int g = 0; g < text->group; ++g)
      text->compare(where, row, head * text->group + g, units, out, wrong);
    observe(row, units);
  }
};

/// Judge of every step of random sequences: those have left that the definition gives the least worth, what
/// attention gives is that of the others in float64, and the same bits with three threads as with one.
template <class Element, class Policy>
void judge_evictions(const Policy& policy, const eviction_definition& definition,
                     const conformance_options& options, differences& wrong) {
  using pipeline = evicting_pipeline<kv_shape<Element, random_text<Element>::d>, Policy>;
  constexpr int d = random_text<Element>::d, steps = 30;
  random_numbers random(options.seed);
  int judged = 0;
  for (int run = 0; run < options.runs; ++run) {
    const int kv_heads = random.one_of({1, 2}), group = random.one_of({1, 2, 3, 5});
    const int budget = random.one_of({16, 24, 48, 80});
    const int prompt = random.one_of({1, budget / 2, budget, budget + 7, 2 * budget + 3, 4 * budget});
    const random_text<Element> text(random, prompt + steps, kv_heads, group);
    typename pipeline::settings settings;
    settings.model.query_heads = kv_heads * group;
    settings.model.kv_heads = kv_heads;
    settings.budget = budget;
    settings.capacity.max_prompt = prompt;
    settings.capacity.max_generated = steps;
    settings.plan = {{0}};
    settings.eviction = policy;
    try {
      settings = checked_settings<d>(settings);
    } catch (const settings_error&) {
      continue;  // a budget that does not suit the policy
    }
    ++judged;
    const std::string where = "a budget of " + std::to_string(budget) + " tokens, a prompt of " +
                              std::to_string(prompt) + ", " + std::to_string(kv_heads * group) + "/" +
                              std::to_string(kv_heads) + " heads: ";
    std::vector<eviction_judge<Element, Policy>> judges;
    for (int head = 0; head < kv_heads; ++head) judges.push_back({&text, &definition, &settings, head});
    for (auto& judge : judges) judge.prompt(prompt);

    decode_twice<pipeline>(
        where, settings, text, prompt, steps,
        [&](const std::string& at, int step, int head, bool, const std::vector<int>& units,
            const std::vector<float>& out) {
          judges[to_size(head)].step(at, prompt + step, units, out, wrong);
        },
        wrong);
  }
  if (judged == 0 && options.runs > 0) wrong.add("no budget from 16 to 80 tokens suits the policy");
}

}  // namespace freekv::testing::detail
