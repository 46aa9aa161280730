// Conformance of a summary to its definition in float64, for tests of policies of one's own. It needs no test library:
//
//     for (const std::string& wrong : freekv::testing::conforms<end_keys>(definition)) std::puts(wrong.c_str());
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/algorithms/summarise_unit.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/pipeline/retrieval_pipeline.hpp>
#include <functional>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace freekv::testing {

using doubles = std::vector<double>;

/// A summary in float64.
struct summary_definition {
  /// Numbers of a unit's keys (tokens, head_dim), as `summarise` leaves them: `width(page)`.
  std::function<doubles(const doubles& keys, page_geometry page)> numbers;
  /// Score of a query (head_dim) with them, times `scale`.
  std::function<double(const doubles& query, const doubles& numbers, page_geometry page, double scale)> score;
  double tolerance = 2e-5;  ///< of a number or score, relative to the size of what it is a sum of
};

struct conformance_options {
  std::uint64_t seed = 1;
  int units = 120;  ///< random units that are scored, of each element type
  int runs = 6;     ///< random pipelines, of each element type
};

namespace detail {

class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : engine_(seed) {}
  int one_of(std::initializer_list<int> choices) { return choices.begin()[engine_() % choices.size()]; }
  template <class Element>
  std::vector<Element> normals(int count, float size = 1.0f) {
    std::vector<Element> numbers;
    for (int i = 0; i < count; ++i) numbers.push_back(from_float<Element>(size * normal_(engine_)));
    return numbers;
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

template <class Element>
doubles wide(const std::vector<Element>& elements) {
  doubles numbers;
  for (const Element x : elements) numbers.push_back(static_cast<double>(to_float(x)));
  return numbers;
}

inline double largest(const doubles& numbers) {
  double most = 0.0;
  for (const double x : numbers) most = std::max(most, std::fabs(x));
  return most;
}

inline double sum_of_sizes(const doubles& numbers) {
  double sum = 0.0;
  for (const double x : numbers) sum += std::fabs(x);
  return sum;
}

/// Calls `body(team, name)` for one lane and every instruction set of this machine.
template <class Body>
void on_every_team(const Body& body) {
  body(scalar_team{}, "one lane");
  for (const host::isa set : {host::isa::baseline, host::isa::avx2, host::isa::avx512})
    if (set <= host::best_isa())
      host::with_wide_team(set, [&](auto team) { body(team, std::string(host::name_of(set)).c_str()); });
}

/// What a team makes of a unit: the numbers before they are stored, what is stored of them, and scores of queries.
template <class Element>
struct scored_unit {
  std::vector<float> numbers, stored, scores;
};

template <class Element, team T, class Policy>
scored_unit<Element> score_by(T team, const Policy& policy, const std::vector<Element>& keys,
                              const std::vector<float>& queries, page_geometry page, float scale) {
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  const int d = page.head_dim, group = static_cast<int>(queries.size()) / d;
  const int width = policy.width(page), query_width = summary_query_width(policy, d);
  scored_unit<Element> unit{std::vector<float>(size(width)), std::vector<float>(size(width)),
                            std::vector<float>(size(group))};
  std::vector<float> key_scratch(keys.size()), prepared(size(prepared_queries::floats(group, query_width)));
  std::vector<std::byte> bytes(summary_bytes<Element>(policy, page));
  summarise_unit<Element>(team, policy, head_slice<const Element>{keys.data(), nullptr, d}, page,
                          {key_scratch.data(), unit.numbers.data()}, bytes.data());
  const auto of_group =
      prepare_group(team, policy, group_query{queries.data(), group, d}, scale, prepared.data());
  score_unit<Element>(team, policy, page, bytes.data(), of_group, unit.stored.data(),
                      {unit.scores.data(), 1});
  return unit;
}

/// Differences, of which the first few are told.
class differences {
 public:
  template <class... T>
  void add(const T&... parts) {
    if (sentences_.size() == 10) return;
    std::ostringstream text;
    text.precision(9);
    (text << ... << parts);
    sentences_.push_back(text.str());
  }
  std::vector<std::string> take() { return std::move(sentences_); }

 private:
  std::vector<std::string> sentences_;
};

/// Whether a unit of `page` suits the policy.
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
void compare_units(const Policy& policy, const summary_definition& definition,
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
      for (int g = 0; g < group; ++g) {
        const doubles query = wide(std::vector<float>(queries.begin() + g * page.head_dim,
                                                      queries.begin() + (g + 1) * page.head_dim));
        const double score = definition.score(query, stored, page, static_cast<double>(scale));
        const double got = static_cast<double>(unit.scores[static_cast<std::size_t>(g)]);
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
  if (compared == 0) wrong.add(element_name<Element>, ": no unit suits the policy");
}

/// Every step of a random sequence: the units attended to are best by the definition, and what attention gives is that
/// of these units in float64, the same bits on every backend.
template <class Element, class Policy>
void compare_pipelines(const Policy& policy, const summary_definition& definition,
                       const conformance_options& options, differences& wrong) {
  constexpr int d = 64, steps = 20;
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  using pipeline = retrieval_pipeline<kv_shape<Element, d>, page_size<dynamic>, Policy, mean_score, always,
                                      complete_first<0>>;
  random_numbers random(options.seed + 1);
  for (int run = 0; run < options.runs; ++run) {
    const int page = random.one_of({8, 16, 32}), kv_heads = random.one_of({1, 2, 3});
    const int group = random.one_of({1, 2, 3}), query_heads = kv_heads * group;
    const int prompt = page * random.one_of({6, 9, 12}) + random.one_of({0, 3, page - 1});
    if (!suits(policy, {page, d})) continue;
    typename pipeline::settings settings;
    settings.query_heads = query_heads;
    settings.kv_heads = kv_heads;
    settings.budget = {page, page, 2};
    settings.max_tokens = prompt + steps;
    settings.page = {page};
    settings.summary = policy;
    const auto keys = random.normals<Element>((prompt + steps) * kv_heads * d);
    const auto values = random.normals<Element>((prompt + steps) * kv_heads * d);
    const auto queries = random.normals<float>(steps * query_heads * d);
    const double scale = 1.0 / std::sqrt(static_cast<double>(d));
    const std::string where = std::string(element_name<Element>) + ", a pipeline of pages of " +
                              std::to_string(page) + ", " + std::to_string(query_heads) + "/" +
                              std::to_string(kv_heads) + " heads: ";
    const auto row = [&](const std::vector<Element>& of, int token, int head) {
      return doubles(wide(std::vector<Element>(of.begin() + (token * kv_heads + head) * d,
                                               of.begin() + (token * kv_heads + head + 1) * d)));
    };
    const auto dot = [](const doubles& a, const doubles& b) {
      double sum = 0.0;
      for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
      return sum;
    };
    const auto compare_head = [&](int step, int head, const std::vector<int>& attended,
                                  const std::vector<float>& out) {
      const int tokens = prompt + step + 1;
      const page_roles roles = roles_at(tokens, settings.budget, page);
      doubles scores;  // of candidates, means of the group's
      for (int unit = roles.sink_end; unit < roles.window_begin; ++unit) {
        std::vector<Element> of_unit;
        for (int t = unit * page; t < (unit + 1) * page; ++t)
          of_unit.insert(of_unit.end(), keys.begin() + (t * kv_heads + head) * d,
                         keys.begin() + (t * kv_heads + head + 1) * d);
        const std::vector<float> none(size(d));
        const doubles stored =
            wide(score_by<Element>(scalar_team{}, policy, of_unit, none, {page, d}, 1.0f).stored);
        double score = 0.0;
        for (int g = 0; g < group; ++g) {
          const auto first = queries.begin() + (step * query_heads + head * group + g) * d;
          score +=
              definition.score(wide(std::vector<float>(first, first + d)), stored, {page, d}, scale) / group;
        }
        scores.push_back(score);
      }
      const auto chosen = [&](int unit) {
        return std::find(attended.begin(), attended.end(), unit) != attended.end();
      };
      double worst = std::numeric_limits<double>::infinity(), best = -worst;
      for (int unit = roles.sink_end; unit < roles.window_begin; ++unit) {
        const double score = scores[size(unit - roles.sink_end)];
        if (chosen(unit))
          worst = std::min(worst, score);
        else
          best = std::max(best, score);
      }
      if (attended.size() != std::min(scores.size(), std::size_t{2}) ||
          worst + 100.0 * definition.tolerance * (1.0 + std::fabs(worst)) < best)
        wrong.add(where, "step ", step, ", head ", head, " selects units of score ", worst,
                  " and up, and leaves one of score ", best);
      for (int g = 0; g < group; ++g) {
        const int query_head = head * group + g;
        const auto first = queries.begin() + (step * query_heads + query_head) * d;
        const doubles query = wide(std::vector<float>(first, first + d));
        doubles sum(size(d));
        double mass = 0.0;
        for (int t = 0; t < tokens; ++t) {
          const int unit = t / page;
          if (unit >= roles.sink_end && unit < roles.window_begin && !chosen(unit)) continue;
          const double weight = std::exp(scale * dot(query, row(keys, t, head)));
          const doubles value = row(values, t, head);
          for (int i = 0; i < d; ++i) sum[size(i)] += weight * value[size(i)];
          mass += weight;
        }
        for (int i = 0; i < d; ++i)
          if (const double got = static_cast<double>(out[size(query_head * d + i)]);
              !(std::fabs(got - sum[size(i)] / mass) <= 1e-4))
            return wrong.add(where, "step ", step, ", query head ", query_head, " gives ", got,
                             ", in float64 ", sum[size(i)] / mass);
      }
    };

    std::vector<std::vector<float>> expected;
    const auto run_on = [&](const host_options& host, const char* on) {
      host_backend backend(host);
      pipeline retrieval(settings, backend);
      const sequence_id sequence = retrieval.open();
      const auto rows = [&](const std::vector<Element>& of, int first, int count) {
        return std::span(of).subspan(size(first * kv_heads * d), size(count * kv_heads * d));
      };
      auto prefill = retrieval.begin_step({{sequence, prompt, step_phase::prefill}});
      prefill.append(0, {.keys = rows(keys, 0, prompt), .values = rows(values, 0, prompt)});
      prefill.end();
      for (int step = 0; step < steps; ++step) {
        std::vector<float> out(size(query_heads * d));
        auto decode = retrieval.begin_step({{sequence}});
        decode.append(0, {.keys = rows(keys, prompt + step, 1),
                          .values = rows(values, prompt + step, 1),
                          .queries = std::span(queries).subspan(size(step * query_heads * d), out.size())});
        decode.attend(0, out);
        decode.end();
        if (expected.size() <= size(step)) {
          expected.push_back(out);
          const step_report report = retrieval.report(0)[sequence];
          const auto stride = static_cast<std::ptrdiff_t>(report.attended.size()) / kv_heads;
          for (int head = 0; head < kv_heads; ++head) {
            const auto first = report.attended.begin() + head * stride;
            compare_head(step, head, {first, first + report.attended_count[size(head)]}, out);
          }
        } else if (expected[size(step)] != out) {
          wrong.add(where, "step ", step, " with ", on, " differs from one thread's");
        }
      }
    };
    run_on({.threads = 1, .overlap = false}, "one thread");
    run_on({.threads = 3, .bytes_per_thread = 512}, "three threads");
  }
}

}  // namespace detail

/// Sentences of where `policy` differs from its definition, at most ten; none if it conforms. Random units of random
/// shapes are scored on one lane and on every instruction set of this machine, and random sequences are decoded, with
/// keys and values of each element type.
template <class Policy>
std::vector<std::string> conforms(const summary_definition& definition, const Policy& policy = {},
                                  const conformance_options& options = {}) {
  static_assert(summary_policy<Policy>, "conforms takes a summary policy");
  static_assert(!hooks_of<Policy>::has(hook::at), "conforms takes a summary that is the same for all heads");
  static_assert(!scores_stored_bytes<Policy>, "conforms takes a summary that scores its numbers");
  detail::differences wrong;
  const auto compare = [&]<class Element>(Element) {
    detail::compare_units<Element>(policy, definition, options, wrong);
    detail::compare_pipelines<Element>(policy, definition, options, wrong);
  };
  compare(float{}), compare(half{}), compare(bfloat16{});
  return wrong.take();
}

}  // namespace freekv::testing
