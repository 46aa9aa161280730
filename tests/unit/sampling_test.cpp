// Samples by hash collisions: probabilities against float64, hyperplanes, and that sums over a sample are
// those of all tokens on average.

#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <functional>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../property/random_case.hpp"
#include "../sanitized.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using any_signatures = freekv::key_signatures<freekv::dynamic, freekv::dynamic>;

constexpr int d = 64;

/// Mean and its standard error of some numbers.
struct sample_mean {
  double sum = 0.0, squares = 0.0;
  int numbers = 0;
  void add(double x) { sum += x, squares += x * x, ++numbers; }
  double mean() const { return sum / numbers; }
  double error() const {
    const double variance = (squares / numbers - mean() * mean()) * numbers / (numbers - 1);
    return std::sqrt(std::max(variance, 0.0) / numbers);
  }
  /// How many standard errors the mean is from `x`.
  double from(double x) const { return (mean() - x) / error(); }
};

/// A centre, 0.5 of each number, and hyperplanes of a seed.
std::vector<float> basis_of(std::uint64_t seed, int rank) {
  std::vector<float> data(count((1 + rank) * d), 0.5f);
  freekv::draw_hyperplanes(seed, std::span(data).subspan(d));
  return data;
}

struct text {
  static constexpr int prompt = 63;
  std::vector<float> keys, values, query;
  explicit text(std::uint64_t seed) {
    dice dice(seed);
    for (int i = 0; i < (prompt + 1) * d; ++i) {
      keys.push_back(0.5f + 0.8f * dice.normal());
      values.push_back(dice.normal());
    }
    for (int i = 0; i < d; ++i) query.push_back(dice.normal());
    // Some keys are near the query, as text has them.
    for (int token = 0; token < prompt; token += 5)
      for (int i = 0; i < d; ++i) keys[count(token * d + i)] += 0.6f * query[count(i)];
  }
};

}  // namespace

TEST_CASE("probabilities of two collisions agree with float64", "[sampling]") {
  double most = 0.0;
  for (const int bits : {1, 2, 3, 5, 8, 10, 11})
    for (const int tables : {2, 3, 4, 7, 20, 75, 150, 300, 4096})
      for (int step = -1000; step <= 1000; ++step) {
        const float cosine = static_cast<float>(step) * 1e-3f;
        const double at = static_cast<double>(cosine);
        const double expected = oracle::log_sampling_probability(at, bits, tables);
        // acosf is good to an ulp of the angle, pi at most; and of 1 - angle / pi an ulp of 1 is lost: in all
        // what moves the angle by 5e-7.
        const double angle = std::acos(at);
        double doubt = 0.0;
        for (const double moved : {angle - 5e-7, angle + 5e-7})
          doubt =
              std::max(doubt, std::fabs(oracle::log_sampling_probability(
                                            std::cos(std::clamp(moved, 0.0, std::acos(-1.0))), bits, tables) -
                                        expected));
        const double got = static_cast<double>(freekv::detail::log_chance_of_two(cosine, bits, tables));
        const double within = doubt + 2e-6 + 1e-6 * std::fabs(expected);
        if (!(std::fabs(got - expected) <= within))
          FAIL_CHECK("cosine " << cosine << ", " << bits << " bits, " << tables << " tables: " << got
                               << " for " << expected << " within " << within);
        most = std::max(most, std::fabs(got - expected) / within);
        CHECK(got <= 0.0);
      }
  CHECK(most > 0.01);  // bounds say something
  const float nan = freekv::detail::log_chance_of_two(quiet_nan, 10, 150);
  CHECK(nan != nan);
  CHECK(freekv::detail::log_chance_of_two(1.5f, 10, 150) == 0.0f);
  CHECK(freekv::detail::log_chance_of_two(-1.5f, 10, 150) ==
        freekv::detail::log_chance_of_two(-1.0f, 10, 150));
}

TEST_CASE("hyperplanes are normal numbers that a seed and a place decide", "[sampling]") {
  std::vector<float> numbers(20000), fewer(100), others(100);
  freekv::draw_hyperplanes(7, numbers);
  freekv::draw_hyperplanes(7, fewer);
  freekv::draw_hyperplanes(8, others);
  CHECK(std::equal(fewer.begin(), fewer.end(), numbers.begin()));
  for (std::size_t i = 0; i < 100; ++i) CHECK(fewer[i] != others[i]);
  sample_mean mean, squares, fourths, neighbours;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double x = static_cast<double>(numbers[i]);
    mean.add(x);
    squares.add(x * x);
    fourths.add(x * x * x * x);
    if (i > 0) neighbours.add(x * static_cast<double>(numbers[i - 1]));
  }
  CHECK(std::fabs(mean.from(0.0)) < 4.0);
  CHECK(std::fabs(squares.from(1.0)) < 4.0);
  CHECK(std::fabs(fourths.from(3.0)) < 4.0);
  CHECK(std::fabs(neighbours.from(0.0)) < 4.0);
}

TEST_CASE("a signature's collisions are those of the oracle, on every team", "[sampling]") {
  dice dice(5);
  for (int nth = 0; nth < 40; ++nth) {
    const int bits = dice.between(1, 11), tables = dice.between(2, 40), tokens = dice.one_of({1, 1, 2, 8});
    const std::vector<float> data = basis_of(count(nth), bits * tables);
    const any_signatures policy{{bits}, {tables}, {data.data(), 1, 1, bits * tables, d}};
    const auto of_head = policy.at(0, 0);
    const auto keys = normals(dice, count(tokens * d)), query = normals(dice, count(d));
    oracle::settings s{.head_dim = d};
    s.bits = bits;
    s.tables = tables;
    const oracle::basis b{{data.begin(), data.begin() + d}, {data.begin() + d, data.end()}};
    const auto expected =
        oracle::unit_collisions(query,
                                oracle::signature_summary(
                                    [&] {
                                      std::vector<std::span<const float>> rows;
                                      for (int t = 0; t < tokens; ++t)
                                        rows.push_back(std::span(keys).subspan(count(t * d), d));
                                      return rows;
                                    }(),
                                    s, b),
                                s, b);
    for (const executor on : executors()) {
      std::vector<float> numbers(count(tables * tokens)), prepared(count(tables));
      float score = -1.0f;
      run_on(on, [&](auto team) {
        of_head.summarise(team, {keys.data(), {tokens, d}}, numbers.data());
        of_head.prepare(team, {query.data(), 1, d}, prepared.data());
        score = of_head.score(team, {prepared.data(), {tokens, d}}, numbers.data());
      });
      CHECK(static_cast<double>(score) >= expected.least);
      CHECK(static_cast<double>(score) <= expected.most);
      for (const float code : numbers) {  // float16 holds them
        CHECK((code >= 0.0f && code < static_cast<float>(1 << bits)));
        CHECK(freekv::to_float(freekv::from_float<freekv::half>(code)) == code);
      }
    }
  }
}

// Of 3000 sets of hyperplanes: means of the sums over what is sampled, weighed, are within 4 standard errors,
// of less than 1.5 % each, of the sums over all tokens; without weights they are more than 20 away.
TEST_CASE("sums over a sample are those over all tokens on average over hyperplanes", "[sampling]") {
  constexpr int bits = 4, tables = 8, tokens = 30, n = 3000;
  const text of(3);
  const auto key = [&](int token) { return of.keys.data() + token * d; };
  std::vector<double> scores, values, chances(tokens);
  double numerator = 0.0, denominator = 0.0;
  for (int token = 0; token < tokens; ++token) {
    double score = 0.0;
    for (int i = 0; i < d; ++i)
      score += 0.125 * static_cast<double>(of.query[count(i)]) * static_cast<double>(key(token)[i]);
    scores.push_back(std::exp(score));
    values.push_back(static_cast<double>(of.values[count(token * d)]) + 2.0);
    denominator += scores.back();
    numerator += scores.back() * values.back();
  }
  sample_mean of_numerator, of_denominator, unweighted;
  std::vector<int> sampled(tokens, 0);
  for (int seed = 0; seed < n; ++seed) {
    const std::vector<float> data = basis_of(count(seed), bits * tables);
    const any_signatures policy{{bits}, {tables}, {data.data(), 1, 1, bits * tables, d}};
    const auto of_head = policy.at(0, 0);
    double top = 0.0, bottom = 0.0, plain = 0.0;
    run_on(best(), [&](auto team) {
      std::vector<float> numbers(tables), prepared(tables);
      of_head.prepare(team, {of.query.data(), 1, d}, prepared.data());
      for (int token = 0; token < tokens; ++token) {
        of_head.summarise(team, {key(token), {1, d}}, numbers.data());
        if (!freekv::colliding{}.admits(of_head.score(team, {prepared.data(), {1, d}}, numbers.data())))
          continue;
        const double weight =
            std::exp(static_cast<double>(of_head.log_weight(team, {of.query.data(), 1, d}, key(token))));
        chances[count(token)] = 1.0 / weight;
        ++sampled[count(token)];
        const double term = scores[count(token)] * weight;
        bottom += term;
        top += term * values[count(token)];
        plain += scores[count(token)];
      }
    });
    of_numerator.add(top);
    of_denominator.add(bottom);
    unweighted.add(plain);
  }
  INFO("denominator " << of_denominator.mean() << " +- " << of_denominator.error() << " for " << denominator
                      << ", numerator " << of_numerator.mean() << " +- " << of_numerator.error() << " for "
                      << numerator << ", unweighted " << unweighted.mean());
  CHECK(of_denominator.error() < 0.015 * denominator);
  CHECK(std::fabs(of_denominator.from(denominator)) < 4.0);
  CHECK(std::fabs(of_numerator.from(numerator)) < 4.0);
  CHECK(std::fabs(unweighted.from(denominator)) > 20.0);
  for (int token = 0; token < tokens; ++token) {  // and each token is sampled as often as its weight says
    const double u = chances[count(token)];
    INFO("token " << token << ", " << sampled[count(token)] << " of " << n << " for " << u);
    CHECK(u > 0.02);
    CHECK(std::fabs(sampled[count(token)] - n * u) < 5.0 * std::sqrt(n * u * (1.0 - u)));
  }
}

namespace {

/// What magicpig's policies with other bits and tables answer to a text, and full attention.
struct answer {
  std::vector<float> out = std::vector<float>(d), full = std::vector<float>(d);
  float lse = 0.0f, full_lse = 0.0f;
  int selected = 0;
};

using any_sampling =
    freekv::retrieval_pipeline<freekv::kv_shape<float, d>, freekv::page_size<8>, freekv::unit<1>,
                               any_signatures, freekv::max_score, freekv::colliding, freekv::per_query_head,
                               freekv::always, freekv::any_of<freekv::resident, freekv::in_place>,
                               freekv::every_layer<freekv::layer_kind::retrieval>>;

answer answer_to(const text& of, std::uint64_t seed, int bits, int tables, bool in_place,
                 float soft_cap = 0.0f) {
  static freekv::host_backend backend({.overlap = false});
  const std::vector<float> data = basis_of(seed, bits * tables);
  any_sampling::settings s;
  s.model = {.layers = 1, .query_heads = 1, .kv_heads = 1};
  s.budget = {.sink = 0, .window = 8, .selected_units = 64};
  s.capacity.max_tokens = 64;
  s.attention.soft_cap = soft_cap;
  s.summary = {{bits}, {tables}, {data.data(), 1, 1, bits * tables, d}};
  if (in_place)
    s.route = freekv::in_place{};
  else
    s.route = freekv::resident{};
  any_sampling pipeline(s, backend);
  const auto id = pipeline.open();
  const auto part = [](const std::vector<float>& all, int first, int rows) {
    return std::span(all).subspan(count(first * d), count(rows * d));
  };
  {
    auto step = pipeline.begin_step({{id, text::prompt, freekv::step_phase::prefill}});
    step.append<float>(0,
                       {.keys = part(of.keys, 0, text::prompt), .values = part(of.values, 0, text::prompt)});
    step.end();
  }
  answer a;
  auto step = pipeline.begin_step({{id}});
  step.append<float>(0, {.keys = part(of.keys, text::prompt, 1),
                         .values = part(of.values, text::prompt, 1),
                         .queries = of.query});
  step.attend(0, a.out, {&a.lse, 1});
  step.attend_full(0, a.full, {&a.full_lse, 1});
  step.end();
  a.selected = pipeline.report(0)[id].attended_count[0];
  return a;
}

double squared_error(const answer& a) {
  double sum = 0.0;
  for (int i = 0; i < d; ++i) {
    const double apart = static_cast<double>(a.out[count(i)]) - static_cast<double>(a.full[count(i)]);
    sum += apart * apart;
  }
  return sum;
}

}  // namespace

// Of 400 sets of hyperplanes and a whole step of a pipeline: the estimate of what attention divides by.
TEST_CASE("a step's exp(lse) is that of full attention on average over hyperplanes", "[sampling]") {
  const text of(4);
  sample_mean estimate;
  double exact = 0.0;
  int least = text::prompt, most = 0;
  for (std::uint64_t seed = 0; seed < some_of(400u); ++seed) {
    const answer a = answer_to(of, seed, 4, 8, seed % 2 == 0);
    estimate.add(std::exp(static_cast<double>(a.lse)));
    exact = std::exp(static_cast<double>(a.full_lse));
    least = std::min(least, a.selected);
    most = std::max(most, a.selected);
  }
  INFO(estimate.mean() << " +- " << estimate.error() << " for " << exact << ", of " << least << " to " << most
                       << " tokens");
  CHECK(std::fabs(estimate.from(exact)) < 4.0);
  CHECK(estimate.error() < 0.05 * exact);
  CHECK(most < 50);
  CHECK(least < most);
}

TEST_CASE("the more tables, the less a sample errs", "[sampling]") {
  const text of(6);
  double last = 1e30;
  for (const int tables : {4, 16, 64, 256}) {
    double sum = 0.0;
    for (std::uint64_t seed = 0; seed < 40; ++seed)
      sum += squared_error(answer_to(of, seed, 4, tables, true));
    INFO(tables << " tables: " << sum << " after " << last);
    CHECK(sum < 0.5 * last);
    last = sum;
  }
}

TEST_CASE("where every token collides a sample is full attention, under a soft cap too", "[sampling]") {
  const text of(7);
  for (const float soft_cap : {0.0f, 0.5f})
    for (const bool in_place : {false, true}) {
      const answer a = answer_to(of, 1, 1, 300, in_place, soft_cap);
      CHECK(a.selected == 56);
      CHECK(a.lse == Approx(a.full_lse).epsilon(1e-6));
      for (int i = 0; i < d; ++i) CHECK(a.out[count(i)] == Approx(a.full[count(i)]).margin(2e-6));
    }
}

TEST_CASE("where none collides there are sink and window", "[sampling]") {
  const text of(8);
  const answer a = answer_to(of, 1, 11, 2, true);
  CHECK(a.selected == 0);
  double sum = 0.0;
  for (int token = 56; token < 64; ++token) {
    double score = 0.0;
    for (int i = 0; i < d; ++i)
      score += 0.125 * static_cast<double>(of.query[count(i)]) *
               static_cast<double>(of.keys[count(token * d + i)]);
    sum += std::exp(score);
  }
  CHECK(a.lse == Approx(std::log(sum)).epsilon(1e-5));
}

TEST_CASE("what colliding does not go with is refused in a sentence", "[sampling]") {
  using pack = freekv::policy_pack_of<freekv::page_size<8>, freekv::unit<freekv::dynamic>,
                                      freekv::any_of<any_signatures, freekv::min_max>,
                                      freekv::any_of<freekv::max_score, freekv::mean_softmax>,
                                      freekv::any_of<freekv::colliding, freekv::top_k>,
                                      freekv::any_of<freekv::per_query_head, freekv::per_kv_head>,
                                      freekv::any_of<freekv::always, freekv::cosine_drift>,
                                      freekv::any_of<freekv::no_pins, freekv::pin_outliers<3>>,
                                      freekv::any_of<freekv::no_completion, freekv::page_values>>;
  using settings = freekv::pipeline_settings<pack>;
  const std::vector<float> data = basis_of(1, 40);
  const auto good = [&] {
    settings s;
    s.model = {.layers = 1, .query_heads = 2, .kv_heads = 1};
    s.capacity.max_tokens = 100;
    s.unit = {1};
    s.summary = any_signatures{{4}, {10}, {data.data(), 1, 1, 40, d}};
    return s;
  };
  CHECK_NOTHROW(freekv::checked_settings<d>(good()));
  const auto refuses = [&](const std::string& sentence, const std::function<void(settings&)>& change) {
    settings s = good();
    change(s);
    CHECK_THROWS_WITH(freekv::checked_settings<d>(s), sentence);
  };
  refuses(
      "colliding needs to know how probable what it samples was, and min_max does not; choose key_signatures",
      [](settings& s) { s.summary = freekv::min_max{}; });
  refuses("colliding samples single tokens, and a unit has 4; choose units of 1",
          [](settings& s) { s.unit = {4}; });
  refuses("colliding weighs a token by each query head's own probability; choose per_query_head",
          [](settings& s) { s.scope = freekv::per_kv_head{}; });
  refuses("colliding counts collisions, of which mean_softmax makes shares; choose max_score",
          [](settings& s) { s.pooling = freekv::mean_softmax{}; });
  refuses(
      "colliding weighs by the query that has sampled, and with cosine_drift another one attends; choose "
      "always",
      [](settings& s) { s.correction = freekv::cosine_drift{}; });
  refuses("colliding samples for one decode row a step, and max_decode_rows is 3; leave it at 1",
          [](settings& s) { s.capacity.max_decode_rows = 3; });
  refuses("colliding has no weight for units that are selected whatever their scores; choose no_pins",
          [](settings& s) { s.pinning = freekv::pin_outliers<3>{}; });
  refuses("key_signatures: 12 bits; choose from 1 to 11", [&](settings& s) {
    s.summary = any_signatures{{12}, {2}, {data.data(), 1, 1, 40, d}};
  });
  refuses("key_signatures: 1 tables; choose from 2 to 4096", [&](settings& s) {
    s.summary = any_signatures{{12 - 8}, {1}, {data.data(), 1, 1, 40, d}};
  });
  refuses(
      "key_signatures needs the keys' mean and its hyperplanes as data: take the mean of the prompt's keys "
      "or a "
      "text's, and draw_hyperplanes",
      [](settings& s) {
        s.summary = any_signatures{{4}, {10}, {}};
      });
  refuses(
      "key_signatures: the basis has 40 hyperplanes for each of 1 layers of 1 heads, head_dim 64; needed are "
      "44 or "
      "more for 1 layers of 1 heads, head_dim 64",
      [&](settings& s) {
        s.summary = any_signatures{{4}, {11}, {data.data(), 1, 1, 40, d}};
      });
  settings ranks = good();  // as a summary alone it goes with all of these
  ranks.selection = freekv::top_k{};
  ranks.scope = freekv::per_kv_head{};
  ranks.pooling = freekv::mean_softmax{};
  ranks.correction = freekv::cosine_drift{};
  ranks.unit = {8};
  ranks.capacity.max_decode_rows = 3;
  CHECK_NOTHROW(freekv::checked_settings<d>(ranks));
}

TEST_CASE("the cosine with a key at the centre is 0, and so is that with a query of length 0", "[sampling]") {
  const std::vector<float> data = basis_of(1, 8), zero(d);
  const auto of_head = any_signatures{{2}, {4}, {data.data(), 1, 1, 8, d}}.at(0, 0);
  const float at_0 = -freekv::detail::log_chance_of_two(0.0f, 2, 4);
  const std::vector<float> query(d, 1.0f), key(d, 2.0f);
  for (const executor on : executors())
    run_on(on, [&](auto team) {
      CHECK(is_near(of_head.log_weight(team, {query.data(), 1, d}, data.data()), at_0, 1e-5));
      CHECK(is_near(of_head.log_weight(team, {zero.data(), 1, d}, key.data()), at_0, 1e-5));
    });
}
