// Random numbers and texts for judges of policies, and attention to them in float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/core/element.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/team.hpp>
#include <freekv/pipeline/step_report.hpp>
#include <freekv/testing/definitions.hpp>
#include <initializer_list>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace freekv::testing::detail {

class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : engine_(seed) {}
  int one_of(std::initializer_list<int> choices) { return choices.begin()[engine_() % choices.size()]; }
  int below(int end) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(end)); }
  template <class Element>
  std::vector<Element> normals(int count, float size = 1.0f) {
    std::vector<Element> numbers;
    for (int i = 0; i < count; ++i) numbers.push_back(from_float<Element>(size * normal_(engine_)));
    return numbers;
  }
  float normal() { return normal_(engine_); }
  /// A number from -1 to 1.
  double either_way() { return std::uniform_real_distribution<double>(-1.0, 1.0)(engine_); }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

template <class Element>
doubles wide(const Element* elements, std::size_t count) {
  doubles numbers;
  for (std::size_t i = 0; i < count; ++i) numbers.push_back(static_cast<double>(to_float(elements[i])));
  return numbers;
}
template <class Element>
doubles wide(const std::vector<Element>& elements) {
  return wide(elements.data(), elements.size());
}

inline std::vector<float> narrow(const std::vector<doubles>& rows) {
  std::vector<float> numbers;
  for (const doubles& row : rows)
    for (const double x : row) numbers.push_back(static_cast<float>(x));
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

inline double inner_product(const doubles& a, const doubles& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
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

/// True where `accepts(moved)` holds of numbers as they are, or of numbers that rounding may have made of
/// them: each moved by up to `tolerance` of its size and of `unit`. Policies decide in float32, so what is
/// nearly alike may be decided either way.
template <class Accepts>
bool accepts_to_rounding(const doubles& numbers, double tolerance, double unit, const Accepts& accepts) {
  if (accepts(numbers)) return true;
  random_numbers random(1);
  for (int nth = 0; nth < 32; ++nth) {
    doubles moved = numbers;
    for (double& x : moved)
      if (std::isfinite(x)) x += tolerance * (unit + std::fabs(x)) * random.either_way();
    if (accepts(moved)) return true;
  }
  return false;
}

/// A KV head's token as merges have left it. Its score has the log-weight added.
struct merged_token {
  doubles key, value;  // (head_dim)
  double log_weight = 0.0;
};
/// Tokens that others have merged into, by their numbers.
using merged_tokens = std::map<int, merged_token>;

/// Rows of a sequence: keys that are alike within stretches of 16 tokens, and queries that turn from step to
/// step, now little and now much.
template <class Element>
struct random_text {
  static constexpr int d = 64;
  int kv_heads, group;
  std::vector<Element> keys, values;  // (tokens, kv_heads, head_dim)
  std::vector<float> queries;         // (tokens, kv_heads * group, head_dim)
  std::vector<float> worths{};        // (tokens, kv_heads), of a policy that takes them; else none

  random_text(random_numbers& random, int tokens, int heads, int group_size)
      : kv_heads(heads), group(group_size) {
    std::vector<float> base, query;
    for (int t = 0; t < tokens; ++t) {
      if (t % 16 == 0) base = random.normals<float>(kv_heads * d);
      const float turns = 0.1f * static_cast<float>(random.one_of({1, 3, 5, 8}));
      for (int i = 0; i < kv_heads * d; ++i)
        keys.push_back(from_float<Element>(0.7f * base[to_size(i)] + 0.7f * random.normal()));
      const auto more = random.normals<Element>(kv_heads * d);
      values.insert(values.end(), more.begin(), more.end());
      query.resize(to_size(kv_heads * group * d));
      for (float& x : query) x = std::sqrt(1.0f - turns * turns) * x + turns * 2.0f * random.normal();
      queries.insert(queries.end(), query.begin(), query.end());
    }
  }
  std::span<const Element> rows(const std::vector<Element>& of, int first, int count) const {
    return std::span(of).subspan(to_size(first * kv_heads * d), to_size(count * kv_heads * d));
  }
  std::span<const float> query_rows(int first, int count) const {
    return std::span(queries).subspan(to_size(first * kv_heads * group * d),
                                      to_size(count * kv_heads * group * d));
  }
  /// Draws worths: many below and near 1, and now and then 0, 1, one half, one beyond 1, one below 0 and NaN.
  void draw_worths(std::uint64_t seed) {
    random_numbers random(seed);
    worths.resize(keys.size() / to_size(d));
    for (float& worth : worths) {
      const float drawn = std::fabs(static_cast<float>(random.either_way()));
      const float odd[] = {0.0f, 1.0f, 1.0f, 0.5f, 0.5f, 2.0f + drawn, -drawn, NAN};
      const int kind = random.below(32);
      worth = kind < 8 ? odd[kind] : kind < 20 ? 1.0f - drawn * drawn * 0.05f : drawn;
    }
  }
  std::span<const float> worth_rows(int first, int count) const {
    if (worths.empty()) return {};
    return std::span(worths).subspan(to_size(first * kv_heads), to_size(count * kv_heads));
  }
  /// The worth that a policy is told of a KV head's token.
  double worth(int token, int head) const {
    const float given = worths[to_size(token * kv_heads + head)];
    return std::isnan(given) ? -HUGE_VAL : static_cast<double>(given);
  }
  doubles key(int token, int head) const { return wide(keys.data() + (token * kv_heads + head) * d, d); }
  doubles value(int token, int head) const { return wide(values.data() + (token * kv_heads + head) * d, d); }
  doubles query(int token, int query_head) const {
    return wide(queries.data() + (token * kv_heads * group + query_head) * d, d);
  }
  std::vector<doubles> group_of(int token, int head) const {
    std::vector<doubles> of_group;
    for (int g = 0; g < group; ++g) of_group.push_back(query(token, head * group + g));
    return of_group;
  }

  struct attention {
    doubles shares, out;  // (tokens), (head_dim)
  };
  /// A KV head's token now.
  merged_token token_now(int token, int head, const merged_tokens& merged) const {
    const auto at = merged.find(token);
    return at != merged.end() ? at->second : merged_token{key(token, head), value(token, head)};
  }
  /// A query head's scores of `tokens`, in float64.
  doubles scores(int row, int query_head, const std::vector<int>& tokens,
                 const merged_tokens& merged = {}) const {
    const doubles q = query(row, query_head);
    doubles of;
    for (const int t : tokens) {
      const merged_token now = token_now(t, query_head / group, merged);
      of.push_back(inner_product(q, now.key) / std::sqrt(double{d}) + now.log_weight);
    }
    return of;
  }
  /// A query head's attention to `tokens`, in float64.
  attention attend(int row, int query_head, const std::vector<int>& tokens,
                   const merged_tokens& merged = {}) const {
    attention of{scores(row, query_head, tokens, merged), doubles(to_size(d))};
    double most = -std::numeric_limits<double>::infinity(), mass = 0.0;
    for (const double score : of.shares) most = std::max(most, score);
    for (double& share : of.shares) mass += share = std::exp(share - most);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const doubles v = token_now(tokens[i], query_head / group, merged).value;
      of.shares[i] /= mass;
      for (std::size_t x = 0; x < v.size(); ++x) of.out[x] += of.shares[i] * v[x];
    }
    return of;
  }
  /// A sentence of where what a query head got is not its attention to `tokens`; empty where it is.
  std::string difference(int row, int query_head, const std::vector<int>& tokens,
                         const std::vector<float>& out, const merged_tokens& merged = {}) const {
    const doubles want = attend(row, query_head, tokens, merged).out;
    for (std::size_t i = 0; i < want.size(); ++i)
      if (const double got = static_cast<double>(out[to_size(query_head * d) + i]);
          !(std::fabs(got - want[i]) <= 1e-4)) {
        std::ostringstream sentence;
        sentence.precision(9);
        sentence << ", query head " << query_head << " gives " << got << ", in float64 " << want[i];
        return sentence.str();
      }
    return {};
  }
  /// Adds where what a query head got is not its attention to `tokens`.
  void compare(const std::string& where, int row, int query_head, const std::vector<int>& tokens,
               const std::vector<float>& out, differences& wrong) const {
    if (const std::string told = difference(row, query_head, tokens, out); !told.empty())
      wrong.add(where, told);
  }
};

/// Decodes `steps` rows behind a prompt of one layer, by one thread and by three. Of the first calls
/// `judge(where, step, head, corrected, units, out)`: for a KV head whether it was corrected and what it
/// attended to, and the whole row's output. Adds where the second's outputs are not the same bits.
template <class Pipeline, class Element, class Judge>
void decode_twice(const std::string& where, const typename Pipeline::settings& settings,
                  const random_text<Element>& text, int prompt, int steps, const Judge& judge,
                  differences& wrong) {
  std::vector<std::vector<float>> expected;
  for (const host_options& host :
       {host_options{.threads = 1, .overlap = false}, host_options{.threads = 3, .bytes_per_thread = 512}}) {
    host_backend backend(host);
    Pipeline pipeline(settings, backend);
    const sequence_id sequence = pipeline.open();
    auto prefill = pipeline.begin_step({{sequence, prompt, step_phase::prefill}});
    prefill.append(0, {.keys = text.rows(text.keys, 0, prompt),
                       .values = text.rows(text.values, 0, prompt),
                       .queries = text.query_rows(0, prompt),
                       .worths = text.worth_rows(0, prompt)});
    prefill.end();
    for (int step = 0; step < steps; ++step) {
      const int row = prompt + step;
      const std::string at = where + "step " + std::to_string(step);
      std::vector<float> out(text.query_rows(row, 1).size());
      auto decode = pipeline.begin_step({{sequence}});
      decode.append(0, {.keys = text.rows(text.keys, row, 1),
                        .values = text.rows(text.values, row, 1),
                        .queries = text.query_rows(row, 1),
                        .worths = text.worth_rows(row, 1)});
      decode.attend(0, out);
      decode.end();
      if (expected.size() > to_size(step)) {
        if (expected[to_size(step)] != out) wrong.add(at, " with three threads differs from one thread's");
        continue;
      }
      expected.push_back(out);
      const step_report report = pipeline.report(0)[sequence];
      const auto stride = static_cast<std::ptrdiff_t>(report.attended.size()) / text.kv_heads;
      for (int head = 0; head < text.kv_heads; ++head) {
        const auto first = report.attended.begin() + head * stride;
        judge(at + ", head " + std::to_string(head), step, head, report.corrected[to_size(head)] != 0,
              std::vector<int>(first, first + report.attended_count[to_size(head)]), out);
      }
    }
  }
}

}  // namespace freekv::testing::detail
