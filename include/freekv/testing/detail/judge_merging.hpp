// Random partings of tokens and their fates, beside an eviction's definition, and in float64 what tokens
// become when others merge into them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <string>
#include <utility>
#include <vector>

namespace freekv::testing::detail {

/// Makes `into` of each token that merges into none of those that stay -1: it is lost.
inline void mark_lost(std::vector<merge_fate>& fates, int staying) {
  for (merge_fate& fate : fates)
    if (fate.into < 0 || fate.into >= staying) fate.into = -1;
}

/// Fates by the definition, of the partings' keys and shares first and then of these moved by rounding; none
/// where the definition gives another number of fates than there are tokens.
inline std::vector<std::vector<merge_fate>> fates_to_rounding(const eviction_definition& definition,
                                                              std::vector<parted_tokens> so_far) {
  std::vector<std::vector<merge_fate>> all;
  random_numbers random(1);
  const std::vector<parted_tokens> exact = so_far;
  for (int moved = 0; moved < 5; ++moved) {
    all.push_back(definition.fates(so_far));
    if (all.back().size() != exact.back().tokens.size()) return {};
    mark_lost(all.back(), exact.back().staying);
    for (std::size_t nth = 0; nth < exact.size(); ++nth)
      for (std::size_t i = 0; i < exact[nth].keys.size(); ++i)
        for (std::size_t x = 0; x < exact[nth].keys[i].size(); ++x)
          so_far[nth].keys[i][x] = exact[nth].keys[i][x] * (1.0 + 2e-5 * random.either_way());
    for (std::size_t nth = 0; nth < exact.size(); ++nth)
      for (std::size_t i = 0; i < exact[nth].shares.size(); ++i)
        so_far[nth].shares[i] = exact[nth].shares[i] * (1.0 + 2e-6 * random.either_way());
  }
  return all;
}

/// Places, among tokens that are parted, of one that stays and those that merge into it.
inline std::vector<int> merging_into(int into, int staying, const std::vector<merge_fate>& fates) {
  std::vector<int> places{into};
  for (int i = staying; i < static_cast<int>(fates.size()); ++i)
    if (fates[to_size(i)].into == into) places.push_back(i);
  return places;
}

/// Weights of tokens in what they become, whose sum is 1.
inline doubles part_weights(const std::vector<int>& places, const std::vector<merge_fate>& fates) {
  doubles weights;
  double sum = 0.0;
  for (const int i : places) sum += weights.emplace_back(fates[to_size(i)].weight);
  for (double& weight : weights) weight /= sum;
  return weights;
}

/// Tokens that stay as they become when others merge into them by `rule` (docs/contract.md, 12.5). `row` is
/// the last of the sequence.
template <class Element>
merged_tokens merge_in_double(const random_text<Element>& text, int head, int row, merge_rule rule,
                              const parted_tokens& of, const std::vector<merge_fate>& fates,
                              const merged_tokens& before) {
  merged_tokens after = before;
  const auto scores = [&](int g, const std::vector<int>& tokens, const merged_tokens& now) {
    return text.scores(row, head * text.group + g, tokens, now);
  };
  for (int into = 0; into < of.staying; ++into) {
    const std::vector<int> places = merging_into(into, of.staying, fates);
    if (places.size() == 1) continue;
    std::vector<int> tokens;
    for (const int i : places) tokens.push_back(of.tokens[to_size(i)]);
    doubles weights(places.size());
    merged_token made{doubles(to_size(text.d)), doubles(to_size(text.d))};
    if (rule == merge_rule::as_last_row) {
      for (int g = 0; g < text.group; ++g) {
        const doubles of_head = scores(g, tokens, before);
        const double most = *std::max_element(of_head.begin(), of_head.end());
        double sum = 0.0;
        for (const double score : of_head) sum += std::exp(score - most);
        for (std::size_t i = 0; i < places.size(); ++i)
          weights[i] += std::exp(of_head[i] - most) / sum / text.group;
        made.log_weight += (most + std::log(sum)) / text.group;
      }
    } else {
      weights = part_weights(places, fates);
      double count = 0.0;
      for (const int token : tokens) count += std::exp(text.token_now(token, head, before).log_weight);
      if (rule == merge_rule::as_many) made.log_weight = std::log(count);
    }
    for (std::size_t i = 0; i < places.size(); ++i) {
      const merged_token one = text.token_now(tokens[i], head, before);
      for (std::size_t x = 0; x < made.key.size(); ++x) {
        made.key[x] += weights[i] * one.key[x];
        made.value[x] += weights[i] * one.value[x];
      }
    }
    // A set whose weights are not numbers does not merge (docs/contract.md, 12.5).
    if (!std::isfinite(made.log_weight) || !std::isfinite(sum_of_sizes(made.key))) continue;
    for (doubles* const numbers : {&made.key, &made.value})
      for (double& x : *numbers)
        x = static_cast<double>(to_float(from_float<Element>(static_cast<float>(x))));
    // The log-weight makes up for what the merged key's own score is less than the sum: scored without one.
    after[tokens[0]] = {made.key, made.value, 0.0};
    for (int g = 0; rule == merge_rule::as_last_row && g < text.group; ++g)
      made.log_weight -= scores(g, {tokens[0]}, after)[0] / text.group;
    after[tokens[0]].log_weight = made.log_weight;
  }
  for (int i = of.staying; i < static_cast<int>(of.tokens.size()); ++i) after.erase(of.tokens[to_size(i)]);
  return after;
}

/// Judge of a policy's fates of one parting, the last of `so_far`.
template <class Policy>
void judge_parting(const Policy& policy, const eviction_definition& definition,
                   const std::vector<parted_tokens>& so_far, typename Policy::head_memory& memory,
                   const std::string& where, differences& wrong) {
  const parted_tokens& of = so_far.back();
  const std::vector<std::vector<merge_fate>> expected = fates_to_rounding(definition, so_far);
  if (expected.empty()) return wrong.add(where, ": the definition must give a fate to each token");
  const int all = static_cast<int>(of.tokens.size()), head_dim = static_cast<int>(of.keys[0].size());
  const std::vector<float> keys = narrow(of.keys);
  const std::vector<std::int32_t> tokens(of.tokens.begin(), of.tokens.end());
  doubles lengths;
  for (const doubles& key : of.keys) lengths.push_back(std::sqrt(inner_product(key, key)));
  std::vector<merge_fate> fates(to_size(all));
  std::vector<std::int32_t> scratch(to_size(all));
  policy.merge({.staying = of.staying,
                .leaving = all - of.staying,
                .tokens = tokens.data(),
                .keys = keys.data(),
                .lengths = lengths.data(),
                .head_dim = head_dim,
                .shares = of.shares.empty() ? nullptr : of.shares.data(),
                .scratch = scratch.data()},
               of.at, memory, fates.data());
  mark_lost(fates, of.staying);
  for (int i = of.staying; i < all; ++i) {
    const int into = fates[to_size(i)].into;
    bool taken = false;
    for (const auto& by_definition : expected) taken = taken || by_definition[to_size(i)].into == into;
    const auto fate = [&](int place) {
      return place < 0 ? "is lost" : "merges into token " + std::to_string(of.tokens[to_size(place)]);
    };
    if (!taken)
      return wrong.add(where, ": token ", of.tokens[to_size(i)], " ", fate(into), ", by the definition it ",
                       fate(expected[0][to_size(i)].into));
  }
  if (definition.merge_by == merge_rule::as_last_row) return;  // weights are the row's
  for (int into = 0; into < of.staying; ++into) {
    const std::vector<int> places = merging_into(into, of.staying, fates);
    if (places.size() == 1 || places != merging_into(into, of.staying, expected[0])) continue;
    const doubles got = part_weights(places, fates), want = part_weights(places, expected[0]);
    for (std::size_t i = 0; i < places.size(); ++i)
      if (const bool neither = got[i] != got[i] && want[i] != want[i];
          !neither && !(std::fabs(got[i] - want[i]) <= 2e-5))
        return wrong.add(where, ": token ", of.tokens[to_size(places[i])], " has ", got[i], " of what token ",
                         of.tokens[to_size(into)], " becomes, by the definition ", want[i]);
  }
}

/// Judge of a policy's fates of random tokens: three partings of a head one behind the other, a prompt's end
/// and two decode rows. Those that leave are any that the policy does not protect.
template <class Policy>
void judge_fates(const Policy& policy, const eviction_definition& definition,
                 const conformance_options& options, differences& wrong) {
  using text_type = random_text<float>;
  random_numbers random(options.seed);
  for (int unit = 0; unit < options.units; unit += 3) {
    const int prompt = random.one_of({5, 20, 40, 70}), budget = random.one_of({4, 12, 30});
    const text_type text(random, prompt + 2, 1, 1);
    typename Policy::head_memory memory{};
    std::vector<parted_tokens> so_far;
    std::vector<int> held;
    for (int token = 0; token < prompt; ++token) held.push_back(token);
    for (int nth = 0; nth < 3; ++nth) {
      if (nth > 0) held.push_back(prompt + nth - 1);
      const int tokens = prompt + nth;
      parted_tokens now{.at = {budget, prompt, tokens, nth == 0, static_cast<int>(held.size()), 0, 1, 0}};
      std::vector<int> leaving;
      for (const int token : held) {
        const bool may_leave = !policy.protects(token, now.at) && held.size() > leaving.size() + 1;
        (may_leave && random.one_of({0, 1, 2}) == 0 ? leaving : now.tokens).push_back(token);
      }
      if (leaving.empty() || now.tokens.empty()) continue;
      held = now.tokens;
      now.staying = static_cast<int>(held.size());
      now.tokens.insert(now.tokens.end(), leaving.begin(), leaving.end());
      for (const int token : now.tokens) now.keys.push_back(text.key(token, 0));
      if (definition.merge_by == merge_rule::by_shares)
        for (const int token : now.tokens)
          now.shares.push_back(random.one_of({0, 1, 4}) * std::exp(text.key(token, 0)[0]));
      so_far.push_back(std::move(now));
      judge_parting(
          policy, definition, so_far, memory,
          "parting " + std::to_string(nth) + " of " + std::to_string(so_far.back().tokens.size()) + " tokens",
          wrong);
    }
  }
}

}  // namespace freekv::testing::detail
