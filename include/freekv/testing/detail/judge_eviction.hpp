// Random sequences of an evicting pipeline: who has left, beside an eviction's definition, and what attention
// to the others gives, merged or not.
#pragma once

#include <algorithm>
#include <cmath>
#include <freekv/core/hooks.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/evicting_pipeline.hpp>
#include <freekv/testing/detail/judge_merging.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace freekv::testing::detail {

/// Worths of a KV head's units and how many stay, as its rows are and as rounding may have made them.
struct unit_ranking {
  std::vector<doubles> worths{};  // by unit, in each of these cases
  int fewest = 0, most = 0;       // that stay
  double near = 0.0;              // what worths made of given ones may differ by, relative to their size

  std::pair<double, double> range(std::size_t unit) const {
    const auto [low, high] = std::minmax_element(worths[unit].begin(), worths[unit].end());
    return {*low, *high};
  }
  /// True where one unit has to leave before another: it is worth less, or always the same and was there
  /// first.
  bool leaves_before(std::size_t one, std::size_t other) const {
    if (worths[one] == worths[other]) return one < other;
    const double one_least = range(one).first, other_most = range(other).second;
    const bool finite = std::isfinite(one_least) && std::isfinite(other_most);
    return one_least <= other_most ||
           (finite && one_least - other_most <= near * (std::fabs(one_least) + std::fabs(other_most)));
  }
};

/// One KV head's part of a random sequence, as the definition has it.
template <class Element, class Policy>
struct eviction_judge {
  const random_text<Element>* text;
  const eviction_definition* by;
  const eviction_settings<Policy>* settings;
  int head = 0;
  attended_rows seen{};
  std::vector<int> held{};  // units, ascending, before some of them leave
  int tokens = 0;           // of the sequence
  bool any_left = false;
  merged_tokens merged{};
  std::vector<parted_tokens> partings{};

  int unit_tokens() const { return settings->eviction.unit_tokens(); }
  /// Tokens of units, of those that the sequence has.
  std::vector<int> tokens_of(const std::vector<int>& units) const {
    std::vector<int> of;
    for (const int unit : units)
      for (int t = unit * unit_tokens(); t < std::min((unit + 1) * unit_tokens(), tokens); ++t)
        of.push_back(t);
    return of;
  }
  /// A row has attended to tokens.
  void observe(int row, const std::vector<int>& to) {
    if constexpr (observes<Policy>) return;
    doubles shares(to_size(row + 1));
    for (int g = 0; g < text->group; ++g) {
      const doubles of_head = text->attend(row, head * text->group + g, to, merged).shares;
      for (std::size_t i = 0; i < to.size(); ++i) shares[to_size(to[i])] += of_head[i] / text->group;
    }
    seen.shares.push_back(std::move(shares));
    if constexpr (takes_worths<Policy>) seen.worths.push_back(text->worth(row, head));
    if constexpr (freekv::detail::sees_rows<Policy>) {
      seen.keys.push_back(text->key(row, head));
      seen.values.push_back(text->value(row, head));
    }
  }
  void prompt(int count) {
    seen.prompt = tokens = count;
    for (int unit = 0; unit * unit_tokens() < count; ++unit) held.push_back(unit);
    seen.prompt_is_cut = static_cast<int>(held.size()) > settings->eviction.kept(moment()) / unit_tokens();
    for (int row = 0; row < count; ++row) {
      std::vector<int> to;
      for (int t = 0; t <= row; ++t) to.push_back(t);
      observe(row, to);
    }
  }
  /// Moment at which units leave of those that are held now.
  eviction_moment moment() const {
    const int now = static_cast<int>(tokens_of(held).size());
    return {settings->budget, seen.prompt, tokens, tokens == seen.prompt, now, 0, 1, head};
  }
  /// True of units that do not leave before others: those that the policy protects, and one that is being
  /// filled.
  bool stays(int unit, const eviction_moment& at) const {
    const bool fills = !at.prompt_ends && (unit + 1) * unit_tokens() > tokens;
    return fills || settings->eviction.protects(unit * unit_tokens(), at);
  }

  /// Shares or scores that the last rows have of the units, which are tokens.
  observed_tokens observed(const eviction_moment& at) const {
    const Policy& policy = settings->eviction;
    const bool apart = policy.group() == group_rule::each;
    observed_tokens of{.tokens = held, .at = at};
    for (int row = std::max(0, tokens - policy.observed_rows()); row < tokens; ++row) {
      std::vector<doubles>& of_row = of.rows.emplace_back();
      const std::vector<int> before(held.begin(), std::upper_bound(held.begin(), held.end(), row));
      for (int g = 0; g < text->group; ++g) {
        const int query_head = head * text->group + g;
        doubles numbers = apart ? text->attend(row, query_head, before, merged).shares
                                : text->scores(row, query_head, before, merged);
        numbers.resize(held.size(), apart ? 0.0 : -HUGE_VAL);
        if (apart || g == 0)
          of_row.push_back(numbers);
        else
          std::transform(numbers.begin(), numbers.end(), of_row[0].begin(), of_row[0].begin(),
                         [](double a, double b) { return std::max(a, b); });
      }
    }
    if constexpr (hooks_of<Policy>::has(hook::sees_keys))
      for (const int token : held)
        if (policy.sees_keys()) of.keys.push_back(text->token_now(token, head, merged).key);
    return of;
  }

  /// Shares that the last rows have of the tokens that are held, by the largest score of the group; means.
  doubles mean_shares() const {
    doubles shares(held.size());
    const int first = std::max(0, tokens - settings->eviction.observed_rows());
    for (int row = first; row < tokens; ++row) {
      const std::vector<int> before(held.begin(), std::upper_bound(held.begin(), held.end(), row));
      doubles largest(before.size(), -HUGE_VAL);
      for (int g = 0; g < text->group; ++g) {
        const doubles of_head = text->scores(row, head * text->group + g, before, merged);
        for (std::size_t i = 0; i < before.size(); ++i) largest[i] = std::max(largest[i], of_head[i]);
      }
      double sum = 0.0;
      for (const double score : largest) sum += std::exp(score);
      for (std::size_t i = 0; i < before.size(); ++i)
        shares[i] += std::exp(largest[i]) / sum / (tokens - first);
    }
    return shares;
  }

  /// Units that are held, ranked as rows have attended to them, or `kept` of them at most by what the last
  /// rows have.
  unit_ranking rank(const eviction_moment& at, int kept) const {
    unit_ranking ranked{std::vector<doubles>(held.size()), kept, kept,
                        takes_worths<Policy> || freekv::detail::sees_rows<Policy> ? 1e-6 : 0.0};
    random_numbers random(1);
    const auto move = [&](double& x, double size) { x += 2e-5 * size * random.either_way(); };
    if constexpr (observes<Policy>) {
      ranked.fewest = static_cast<int>(held.size());
      ranked.most = 0;
      const observed_tokens exact = observed(at);
      observed_tokens of = exact;
      const bool apart = settings->eviction.group() == group_rule::each;
      for (int moved = 0; moved < 5; ++moved) {
        const doubles worths = by->worths(of);
        for (std::size_t i = 0; i < held.size(); ++i)
          ranked.worths[i].push_back(i < worths.size() ? worths[i] : NAN);
        const int staying = by->staying ? std::min(by->staying(of, worths), kept) : kept;
        ranked.fewest = std::min(ranked.fewest, staying);
        ranked.most = std::max(ranked.most, staying);
        of = exact;
        for (std::vector<doubles>& row : of.rows)
          for (doubles& numbers : row)
            for (double& x : numbers)
              if (std::isfinite(x)) move(x, apart ? x : 1.0);  // a share by its size, as its score by 1
        for (doubles& key : of.keys)
          for (double& x : key) move(x, x);
      }
    } else {
      attended_rows of = seen;
      for (int moved = 0; moved < 5; ++moved) {
        for (std::size_t i = 0; i < held.size(); ++i)
          ranked.worths[i].push_back(by->worth(of, held[i] * unit_tokens()));
        of = seen;
        for (doubles& row : of.shares)
          for (double& share : row) move(share, share);
      }
    }
    return ranked;
  }

  /// Judge of the units that are still there when the next row comes.
  void judge(const std::string& where, const std::vector<int>& now, differences& wrong) const {
    const Policy& policy = settings->eviction;
    const eviction_moment at = moment();
    const int all = static_cast<int>(held.size());
    int kept = std::min(all, policy.kept(at) / unit_tokens());
    if constexpr (observes<Policy>)
      if (!at.prompt_ends && !policy.observes_decoding()) kept = all;
    for (const int unit : now)
      if (!std::binary_search(held.begin(), held.end(), unit))
        return wrong.add(where, " has unit ", unit, " back, which it has forgotten");
    const unit_ranking ranked = kept < all ? rank(at, kept) : unit_ranking{{}, all, all};
    for (std::size_t i = 0; i < ranked.worths.size(); ++i)
      for (const double worth : ranked.worths[i])
        if (!(worth == worth))
          return wrong.add(where, ": the definition's worth of unit ", held[i], " is NaN, or not there");
    const int count = static_cast<int>(now.size());
    if (count < ranked.fewest || count > ranked.most)
      wrong.add(where, " has kept ", count, " units, by the ", by->staying ? "definition" : "policy",
                " it keeps ", ranked.most);
    if (ranked.worths.empty()) return;
    const auto is_there = [&](std::size_t i) { return std::binary_search(now.begin(), now.end(), held[i]); };
    for (std::size_t one = 0; one < held.size(); ++one) {
      if (is_there(one)) continue;
      for (std::size_t other = 0; other < held.size(); ++other) {
        if (!is_there(other) || stays(held[other], at)) continue;
        if (stays(held[one], at))
          return wrong.add(where, " has lost unit ", held[one], ", which is protected, and kept ",
                           held[other]);
        if (!ranked.leaves_before(one, other))
          return wrong.add(where, " has lost unit ", held[one], ", worth ", ranked.range(one).first,
                           ", and kept ", held[other], ", worth ", ranked.range(other).second);
      }
    }
  }

  /// Parts the tokens that are held into those that are there `now` and those that merge into them, and gives
  /// what may have become of them, most likely first.
  std::vector<merged_tokens> part(const std::string& where, const std::vector<int>& now, differences& wrong) {
    if constexpr (merges<Policy>) {
      if (now.size() == held.size()) return {merged};
      parted_tokens parted{.staying = static_cast<int>(now.size()), .tokens = now, .at = moment()};
      std::set_difference(held.begin(), held.end(), now.begin(), now.end(),
                          std::back_inserter(parted.tokens));
      for (const int token : parted.tokens) parted.keys.push_back(text->token_now(token, head, merged).key);
      if (by->merge_by == merge_rule::by_shares) {
        const doubles shares = mean_shares();
        for (const int token : parted.tokens)
          parted.shares.push_back(
              shares[to_size(std::lower_bound(held.begin(), held.end(), token) - held.begin())]);
      }
      partings.push_back(std::move(parted));
      std::vector<merged_tokens> may_be;
      for (const std::vector<merge_fate>& fates : fates_to_rounding(*by, partings))
        may_be.push_back(
            merge_in_double(*text, head, tokens - 1, by->merge_by, partings.back(), fates, merged));
      if (!may_be.empty()) return may_be;
      wrong.add(where, ": the definition gives a fate to each token");
    }
    return {merged};
  }

  /// A decode row, for which `units` were there, and what it got.
  void step(const std::string& where, int row, const std::vector<int>& units, const std::vector<float>& out,
            differences& wrong) {
    const int own = row / unit_tokens();
    std::vector<int> stayed = units;
    if (stayed.empty() || stayed.back() != own) return wrong.add(where, " does not attend to its own token");
    if (row % unit_tokens() == 0) stayed.pop_back();
    judge(where, stayed, wrong);
    any_left = any_left || stayed.size() < held.size();
    const std::vector<merged_tokens> may_be = part(where, stayed, wrong);
    held = units;
    tokens = row + 1;
    const std::vector<int> attended = tokens_of(held);
    std::vector<std::string> told;  // of what most likely has become of the tokens
    for (const merged_tokens& now : may_be) {
      std::vector<std::string> differ;
      for (int g = 0; g < text->group; ++g)
        if (std::string one = text->difference(row, head * text->group + g, attended, out, now); !one.empty())
          differ.push_back(std::move(one));
      if (&now == may_be.data() || differ.empty()) merged = now, told = differ;
      if (differ.empty()) break;
    }
    for (const std::string& one : told) wrong.add(where, one);
    observe(row, attended);
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
  bool any_left = false;
  for (int run = 0; run < options.runs; ++run) {
    const int kv_heads = random.one_of({1, 2}), group = random.one_of({1, 2, 3, 5});
    const int budget = random.one_of({16, 24, 48, 80});
    const int drawn = random.one_of({1, budget / 2, budget, budget + 7, 2 * budget + 3, 4 * budget});
    const int prompt = judged == 0 ? 2 * budget + 3 : drawn;
    random_text<Element> text(random, prompt + steps, kv_heads, group);
    if constexpr (takes_worths<Policy>) text.draw_worths(options.seed + to_size(run));
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
    for (const auto& judge : judges) any_left = any_left || judge.any_left;
  }
  if (judged > 0 && !any_left)
    wrong.add("no unit has left in ", judged,
              " sequences with budgets from 16 to 80 tokens: nothing is shown");
  if (judged == 0 && options.runs > 0) wrong.add("no budget from 16 to 80 tokens suits the policy");
}

}  // namespace freekv::testing::detail
