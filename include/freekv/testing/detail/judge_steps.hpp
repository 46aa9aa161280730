// Random sequences in pipelines: which heads are corrected, which units they attend to and what they get,
// beside the definitions of the pipeline's summary, pooling, selection and correction.
#pragma once

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/retrieval_pipeline.hpp>
#include <freekv/testing/detail/judge_correction.hpp>
#include <freekv/testing/detail/judge_summary.hpp>
#include <freekv/testing/detail/random_cases.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace freekv::testing::detail {

struct step_definitions {
  summary_definition summary = definition_of_mean();
  pooling_definition pooling{.scores = [](const std::vector<doubles>& scores) {
    doubles pooled(scores[0].size());
    for (const doubles& of_head : scores)
      for (std::size_t j = 0; j < pooled.size(); ++j)
        pooled[j] += of_head[j] / static_cast<double>(scores.size());
    return pooled;
  }};
  selection_definition selection{[](const doubles& scores, const std::vector<bool>&, int k) {
    std::vector<int> best(scores.size());
    for (std::size_t j = 0; j < best.size(); ++j) best[j] = static_cast<int>(j);
    std::stable_sort(best.begin(), best.end(),
                     [&](int a, int b) { return scores[to_size(a)] > scores[to_size(b)]; });
    best.resize(std::min(best.size(), to_size(k)));
    std::sort(best.begin(), best.end());
    return best;
  }};
  /// every_n_steps<2>: selections that are made for the step itself and for the next one take turns.
  correction_definition correction{
      .by_queries = [](const changed_queries& queries) { return queries.decode_step % 2 == 0; }};
};

/// The pipeline that judges a policy: its own and, of the other kinds, those of `step_definitions`.
template <class Element, class Policy>
using judging_pipeline =
    typename retrieval_pipeline<kv_shape<Element, random_text<Element>::d>, page_size<dynamic>, mean,
                                mean_score, every_n_steps<2>, complete_first<0>>::template with<Policy>;

/// Gives a judging pipeline's settings a model of one layer, pages, and room for `tokens` tokens.
template <class Settings>
void give_shape(Settings& settings, int page, int kv_heads, int group, int selected, int tokens) {
  settings.model.query_heads = kv_heads * group;
  settings.model.kv_heads = kv_heads;
  settings.budget = {page, page, selected};
  settings.capacity.max_tokens = tokens;
  settings.page = {page};
}

/// Beginning of a sentence of a pipeline: "f16, a pipeline of pages of 8, 6/2 heads: ".
template <class Element, class Settings>
std::string place_of(const Settings& settings) {
  return std::string(element_name<Element>) + ", a pipeline of pages of " +
         std::to_string(int{settings.page.tokens}) + ", " + std::to_string(settings.model.query_heads) + "/" +
         std::to_string(settings.model.kv_heads) + " heads: ";
}

/// Tokens that a KV head attends to with a row: those of sink and window, and of the units selected.
inline std::vector<int> attended_tokens(int row, const page_roles& roles, int page,
                                        const std::vector<int>& units) {
  std::vector<int> tokens;
  for (int t = 0; t <= row; ++t) {
    const int unit = t / page;
    if (unit < roles.sink_end || unit >= roles.window_begin ||
        std::find(units.begin(), units.end(), unit) != units.end())
      tokens.push_back(t);
  }
  return tokens;
}

/// One KV head's part of a random sequence, as the definitions have it.
template <class Element, class Pipeline>
struct head_judge {
  const random_text<Element>* text;
  const step_definitions* by;
  const typename Pipeline::settings* settings;
  int head = 0;
  std::vector<doubles> stored{};  // numbers of each complete unit
  std::optional<doubles>
      carried{};  // pooled scores that the selection was made by, among this step's candidates
  std::vector<bool> carried_held{};

  kv_extent page() const { return {int{settings->page.tokens}, random_text<Element>::d}; }
  int k() const { return settings->budget.selected_units; }

  void complete_units(int tokens) {
    const int p = page().tokens;
    for (int unit = static_cast<int>(stored.size()); (unit + 1) * p <= tokens; ++unit) {
      std::vector<Element> keys;
      for (int t = unit * p; t < (unit + 1) * p; ++t) {
        const auto row = text->keys.begin() + (t * text->kv_heads + head) * page().head_dim;
        keys.insert(keys.end(), row, row + page().head_dim);
      }
      stored.push_back(stored_numbers(settings->summary, keys, page()));
    }
  }

  /// Pooled scores of the candidates at `roles`, by the queries of a row.
  doubles pooled(int row, const page_roles& roles) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(page().head_dim));
    const auto scores_of = [&](const doubles& query) {
      doubles scores;
      for (int unit = roles.sink_end; unit < roles.window_begin; ++unit)
        scores.push_back(by->summary.score(query, stored[to_size(unit)], page(), scale));
      return scores;
    };
    const std::vector<doubles> queries = text->group_of(row, head);
    if (by->pooling.query) return scores_of(by->pooling.query(queries));
    std::vector<doubles> scores;
    for (const doubles& query : queries) scores.push_back(scores_of(query));
    return by->pooling.scores(scores);
  }

  std::vector<int> select(const doubles& scores, const std::vector<bool>& held) const {
    return by->selection.selected(scores, held, k());
  }
  /// Mass of candidates: their share of the softmax of the pooled scores.
  static double mass_of(const doubles& scores, const std::vector<int>& candidates) {
    double most = -std::numeric_limits<double>::infinity(), all = 0.0, of_these = 0.0;
    for (const double score : scores) most = std::max(most, score);
    for (const double score : scores) all += std::exp(score - most);
    for (const int j : candidates) of_these += std::exp(scores[to_size(j)] - most);
    return of_these / all;
  }

  static std::string list(const std::vector<int>& numbers) {
    std::string text = "{";
    for (const int n : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
    return text + "}";
  }

  /// Step `step` at `row`: what was reported of it.
  void judge(const std::string& where, int step, int row, bool corrected, const std::vector<int>& units,
             const std::vector<float>& out, differences& wrong) {
    const double tolerance = 100.0 * by->summary.tolerance;
    const page_roles roles = roles_at(row + 1, settings->budget, page().tokens);
    complete_units(row + 1);
    const doubles now = pooled(row, roles);
    const std::vector<bool> none(now.size());
    std::vector<int> got;  // candidates' numbers
    for (const int unit : units) got.push_back(unit - roles.sink_end);

    const auto& correction = settings->correction;
    bool exchanges = false;
    if constexpr (correction_by_mass<std::remove_cvref_t<decltype(correction)>>)
      exchanges = correction.at(0).exchanges_units();
    const auto deficient = [&](const doubles& scores, const std::vector<int>& selected) {
      const std::vector<int> best = select(scores, none);
      return !std::includes(selected.begin(), selected.end(), best.begin(), best.end()) &&
             by->correction.by_masses(mass_of(scores, selected), mass_of(scores, best));
    };
    bool flags = false, expected = true;
    if (!carried) {
      flags = true;
      expected = corrected;
    } else if (by->correction.by_queries) {
      const changed_queries queries{text->group_of(row, head), text->group_of(row - 1, head), step};
      flags = by->correction.by_queries(queries);
      expected = flags_to_rounding(by->correction, queries, corrected);
    } else {
      const std::vector<int> selected = corrected ? select(*carried, carried_held) : got;
      flags = deficient(now, selected);
      expected = accepts_to_rounding(
          now, tolerance, 1.0, [&](const doubles& moved) { return deficient(moved, selected) == corrected; });
    }
    if (!expected)
      wrong.add(where, " is ", corrected ? "" : "not ", "corrected, by the definition it is ",
                flags ? "" : "not");

    const bool anew = corrected && !(carried && exchanges);
    const doubles& scores = anew || !carried ? now : *carried;
    const std::vector<bool>& held = anew || !carried ? none : carried_held;
    if (corrected && !anew) {
      if (!accepts_to_rounding(now, tolerance, 1.0,
                               [&](const doubles& moved) { return !deficient(moved, got); }))
        wrong.add(where, " has exchanged units for ", list(units), ", whose deficit is still flagged");
    } else if (!accepts_to_rounding(scores, tolerance, 1.0,
                                    [&](const doubles& moved) { return select(moved, held) == got; })) {
      std::vector<int> want = select(scores, held);
      for (int& unit : want) unit += roles.sink_end;
      wrong.add(where, " attends to units ", list(units), ", by the definition ", list(want));
    }

    const std::vector<int> tokens = attended_tokens(row, roles, page().tokens, units);
    for (int g = 0; g < text->group; ++g)
      text->compare(where, row, head * text->group + g, tokens, out, wrong);

    const page_roles next = roles_at(row + 2, settings->budget, page().tokens);
    carried = pooled(row, next);
    carried_held.assign(carried->size(), false);
    for (const int unit : units)
      if (unit >= next.sink_end && unit < next.window_begin)
        carried_held[to_size(unit - next.sink_end)] = true;
  }
};

/// The settings' member for a policy.
template <class Settings, class Policy>
void give(Settings& settings, const Policy& policy) {
  using kind = typename Policy::policy_kind;
  if constexpr (std::is_same_v<kind, summary_kind>) settings.summary = policy;
  if constexpr (std::is_same_v<kind, pooling_kind>) settings.pooling = policy;
  if constexpr (std::is_same_v<kind, selection_kind>) settings.selection = policy;
  if constexpr (std::is_same_v<kind, correction_kind>) settings.correction = policy;
  if constexpr (std::is_same_v<kind, pinning_kind>) settings.pinning = policy;
  if constexpr (std::is_same_v<kind, residency_kind>) settings.residency = policy;
  if constexpr (std::is_same_v<kind, codec_kind>) settings.codec = policy;
}

/// Judge of every step of random sequences: heads are corrected and units attended to as the definitions have
/// it, what attention gives is that of these units in float64, and the same bits with three threads as with
/// one.
template <class Element, class Policy>
void judge_steps(const Policy& policy, const step_definitions& by, const conformance_options& options,
                 differences& wrong) {
  using pipeline = judging_pipeline<Element, Policy>;
  constexpr int d = random_text<Element>::d, steps = 20;
  random_numbers random(options.seed + 1);
  int decoded = 0;
  for (int run = 0; run < options.runs; ++run) {
    const int page = random.one_of({8, 16, 32}), kv_heads = random.one_of({1, 2, 3});
    const int group = random.one_of({1, 2, 3, 5});
    const int prompt = page * random.one_of({3, 6, 9, 12}) + random.one_of({0, 3, page - 1});
    typename pipeline::settings settings;
    give_shape(settings, page, kv_heads, group, random.one_of({1, 2, 4}), prompt + steps);
    give(settings, policy);
    if (!suits(settings.summary, {page, d})) continue;
    ++decoded;
    const random_text<Element> text(random, prompt + steps, kv_heads, group);
    const std::string where = place_of<Element>(settings);
    std::vector<head_judge<Element, pipeline>> judges;
    for (int head = 0; head < kv_heads; ++head) judges.push_back({&text, &by, &settings, head});

    decode_twice<pipeline>(
        where, settings, text, prompt, steps,
        [&](const std::string& at, int step, int head, bool corrected, const std::vector<int>& units,
            const std::vector<float>& out) {
          judges[to_size(head)].judge(at, step, prompt + step, corrected, units, out, wrong);
        },
        wrong);
  }
  if (decoded == 0 && options.runs > 0)
    wrong.add(element_name<Element>,
              ": no page of 8, 16 or 32 tokens suits the summary, and no sequence was decoded");
}

}  // namespace freekv::testing::detail
