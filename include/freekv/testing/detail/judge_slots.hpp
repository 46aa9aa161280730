// Random units and slots, of which a pinning or a residency is to choose as its definition does.
#pragma once

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/policies/residency.hpp>
#include <freekv/testing/detail/judge_steps.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <functional>
#include <string>
#include <vector>

namespace freekv::testing::detail {

/// Judge of what random units are worth.
template <class Element, class Policy>
void judge_worths(const Policy& policy, const pinning_definition& definition,
                  const conformance_options& options, differences& wrong) {
  random_numbers random(options.seed);
  for (int nth = 0; nth < options.units; ++nth) {
    const kv_extent page{random.one_of({8, 8, 16, 24, 32, 64}), random.one_of({8, 16, 24, 64, 80, 128, 256})};
    const auto keys = wide(random.normals<Element>(page.tokens * page.head_dim, nth % 5 == 0 ? 6.0f : 1.0f));
    const double want = definition.worth(keys, page);
    on_every_team([&](auto team, const char* on) {
      std::vector<float> narrow_keys = narrow({keys}), scratch(to_size(page.head_dim));
      const double got =
          static_cast<double>(policy.worth(team, unit_keys{narrow_keys.data(), page}, scratch.data()));
      if (!(std::fabs(got - want) <= definition.tolerance * (1.0 + std::fabs(want))))
        wrong.add(element_name<Element>, ", ", on, ", unit of ", page.tokens, ", head_dim ", page.head_dim,
                  ": is worth ", got, ", of the definition ", want);
    });
  }
}

/// Judge of random sequences: in every step the units that the definition pins are attended to, those that
/// are worth more than all others by more than rounding.
template <class Element, class Policy>
void judge_pins(const Policy& policy, const pinning_definition& definition,
                const conformance_options& options, differences& wrong) {
  if (policy.units < 1) return wrong.add("pins no units: conforms takes a pinning with some");
  using pipeline = judging_pipeline<Element, Policy>;
  constexpr int d = random_text<Element>::d, steps = 12;
  random_numbers random(options.seed + 3);
  for (int run = 0; run < options.runs; ++run) {
    const int page = random.one_of({8, 16}), kv_heads = random.one_of({1, 2, 3}),
              group = random.one_of({1, 3});
    const int prompt = page * (4 + policy.units + random.one_of({2, 5, 9})) + random.one_of({0, 3});
    typename pipeline::settings settings;
    give_shape(settings, page, kv_heads, group, random.one_of({1, 2}), prompt + steps);
    give(settings, policy);
    const random_text<Element> text(random, prompt + steps, kv_heads, group);
    const std::string where = place_of<Element>(settings);
    const page_roles roles = roles_at(prompt + 1, settings.budget, page);
    std::vector<std::vector<int>> pinned(to_size(kv_heads));
    for (int head = 0; head < kv_heads; ++head) {
      std::vector<double> worths;
      for (int unit = roles.sink_end; unit < roles.window_begin; ++unit) {
        doubles keys;
        for (int t = unit * page; t < (unit + 1) * page; ++t) {
          const doubles key = text.key(t, head);
          keys.insert(keys.end(), key.begin(), key.end());
        }
        worths.push_back(definition.worth(keys, {page, d}));
      }
      std::vector<double> descending = worths;
      std::sort(descending.begin(), descending.end(), std::greater<>());
      const double least = descending[to_size(policy.units)];  // of those not pinned the best: there are more
      for (std::size_t j = 0; j < worths.size(); ++j)
        if (worths[j] > least + 2.0 * definition.tolerance * (1.0 + std::fabs(least)))
          pinned[to_size(head)].push_back(roles.sink_end + static_cast<int>(j));
    }
    decode_twice<pipeline>(
        where, settings, text, prompt, steps,
        [&](const std::string& at, int step, int head, bool, const std::vector<int>& units,
            const std::vector<float>& out) {
          const int row = prompt + step;
          for (const int unit : pinned[to_size(head)])
            if (std::find(units.begin(), units.end(), unit) == units.end())
              wrong.add(at, " does not attend to unit ", unit, ", which the definition pins");
          const auto tokens = attended_tokens(row, roles_at(row + 1, settings.budget, page), page, units);
          for (int g = 0; g < group; ++g) text.compare(at, row, head * group + g, tokens, out, wrong);
        },
        wrong);
  }
}

/// Judge of which of random slots is freed first.
template <class Policy>
void judge_freed(const Policy& policy, const residency_definition& definition,
                 const conformance_options& options, differences& wrong) {
  random_numbers random(options.seed);
  for (int nth = 0; nth < options.units; ++nth) {
    std::vector<unselected_slot> slots;
    for (int slot = 0; slot < 24; ++slot)
      if (random.one_of({0, 0, 1}) == 1) slots.push_back({slot, random.one_of({1, 2, 3, 5, 8, 9})});
    if (slots.empty()) continue;
    // Slots are matched one after the other, against the best so far,
    std::size_t freed = 0;
    for (std::size_t i = 1; i < slots.size(); ++i)
      if (policy.frees_before(slots[i], slots[freed])) freed = i;
    // and by a warp all pairs at once, of those alike the lower first.
    const auto sooner = [&](const unselected_slot& x, const unselected_slot& y) {
      return policy.frees_before(x, y) || (x.slot < y.slot && !policy.frees_before(y, x));
    };
    for (const unselected_slot& other : slots)
      if (other.slot != slots[freed].slot && sooner(other, slots[freed])) {
        wrong.add("slot ", slots[freed].slot, " (", slots[freed].last_selected, ") is freed before slot ",
                  other.slot, " (", other.last_selected, ") and after it: `frees_before` is no order");
        break;
      }
    const int want = definition.freed(slots);
    if (static_cast<int>(freed) == want) continue;
    std::string list;
    for (const unselected_slot& s : slots)
      list +=
          (list.empty() ? "" : ", ") + std::to_string(s.slot) + " (" + std::to_string(s.last_selected) + ")";
    wrong.add("of slots (and their last selections) ", list, ": slot ", slots[freed].slot,
              " is freed first, by the definition ", slots.at(to_size(want)).slot);
  }
}

}  // namespace freekv::testing::detail
