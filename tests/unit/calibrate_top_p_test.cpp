// Temperatures of top_p: as many units are selected as have p of the attention.

#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace {

using namespace tests;

/// A prompt of one layer and a pipeline that selects by top_p for the row behind it.
struct selecting_case {
  using shape = freekv::kv_shape<float, 64>;
  using pipeline_type = freekv::retrieval_pipeline<shape, freekv::page_size<8>, freekv::unit<freekv::dynamic>,
                                                   freekv::any_of<freekv::min_max, freekv::mean>,
                                                   freekv::any_of<freekv::mean_softmax, freekv::max_score>,
                                                   freekv::top_p, freekv::always, freekv::complete_first<0>>;
  static constexpr int kv_heads = 2, group = 3, page = 8, tokens = 45 * page + 3, d = 64;

  std::vector<float> keys, query;
  float p;
  bool by_means = false, by_largest = false;
  int unit = page;

  selecting_case(dice& dealt, float share)
      : keys(normals(dealt, count(tokens * kv_heads * d))),
        query(normals(dealt, count(kv_heads * group * d))),
        p(share) {
    // Some pages are alike to a direction that all queries have, so that attention is neither flat nor one's.
    const std::vector<float> towards = normals(dealt, d);
    for (std::size_t i = 0; i < query.size(); ++i) query[i] += towards[i % d];
    for (int token = 0; token < tokens; ++token)
      if (const auto size = static_cast<float>(token / page % 7); size > 3)
        for (int i = 0; i < kv_heads * d; ++i)
          keys[count(token * kv_heads * d + i)] += 0.3f * size * towards[count(i % d)];
  }

  typename pipeline_type::settings settings(freekv::head_temperatures temperatures) const {
    typename pipeline_type::settings s{.model = {1, kv_heads * group, kv_heads},
                                       .budget = {.sink = page, .window = 2 * page, .selected_units = 400},
                                       .capacity = {.max_tokens = tokens + 1}};
    s.unit = {{unit}};
    if (by_means) s.summary = freekv::mean{};
    if (by_largest) s.pooling = freekv::max_score{};
    s.selection = {p, temperatures};
    return s;
  }
  std::vector<float> calibrated(const std::vector<float>& key_scales = {}) const {
    std::vector<float> temperatures(kv_heads);
    auto s = settings({});
    s.attention.key_scales = key_scales;
    freekv::calibrate_top_p<shape>(freekv::checked_settings<d>(s), 0, keys, query, temperatures);
    return temperatures;
  }
  /// Units that each KV head selects for a row with the query of the prompt's last.
  std::vector<int> selected(const std::vector<float>& temperatures) const {
    freekv::host_backend backend;
    pipeline_type pipeline(settings({temperatures.empty() ? nullptr : temperatures.data(), 1, kv_heads}),
                           backend);
    const auto id = pipeline.open();
    auto step = pipeline.begin_step({{id, tokens, freekv::step_phase::prefill}});
    step.template append<float>(0, {keys, keys, {}});
    step.end();
    std::vector<float> out(query.size());
    step = pipeline.begin_step({{id}});
    const auto last = std::span(keys).last(kv_heads * d);
    step.template append<float>(0, {last, last, query});
    step.attend(0, out);
    step.end();
    const auto report = pipeline.report(0);
    const auto counts = report[id].attended_count;
    return {counts.begin(), counts.end()};
  }
  /// From the definition: the fewest units of `unit` tokens, between sink and window, that have p of the
  /// attention that the group gives to all of them.
  int wanted(int head) const {
    std::vector<double> shares((tokens / page - 3) * page / unit);
    for (int g = 0; g < group; ++g) {
      std::vector<double> masses(shares.size());
      double sum = 0;
      for (std::size_t j = 0; j < masses.size(); ++j)
        for (int t = 0; t < unit; ++t) {
          const int token = page + static_cast<int>(j) * unit + t;
          double score = 0;
          for (int i = 0; i < d; ++i)
            score += double{query[count((head * group + g) * d + i)]} *
                     double{keys[count((token * kv_heads + head) * d + i)]};
          masses[j] += std::exp(score / 8.0);
        }
      for (const double mass : masses) sum += mass;
      for (std::size_t j = 0; j < masses.size(); ++j) shares[j] += masses[j] / sum / group;
    }
    std::sort(shares.begin(), shares.end(), std::greater<>());
    double taken = 0;
    int fewest = 0;
    while (taken < double{p}) taken += shares[count(fewest++)];
    return fewest;
  }
};

/// Temperatures of several rows, where units are single tokens, from the definition in double precision.
struct rows_case {
  enum class pooled_by { mean_softmax, max_score, mean_query };
  static constexpr int d = 64, page = 8, tokens = 30 * page, kv_heads = 2, group = 3, candidates = 27 * page;
  pooled_by pooling{};
  bool each = false;  // query head selects for itself
  double p = 0.8, soft_cap = 0.0;
  int rows = 1;
  std::vector<float> keys, queries;

  rows_case(dice& dealt, int of_rows)
      : rows(of_rows),
        keys(normals(dealt, count(tokens * kv_heads * d))),
        queries(normals(dealt, count(of_rows * kv_heads * group * d))) {}

  template <class Scope>
  std::vector<float> calibrated() const {
    using shape = freekv::kv_shape<float, d>;
    using pipeline = freekv::retrieval_pipeline<
        shape, freekv::page_size<page>, freekv::unit<1>, freekv::mean, Scope,
        freekv::any_of<freekv::mean_softmax, freekv::max_score, freekv::mean_query>, freekv::top_p,
        freekv::complete_first<0>>;
    typename pipeline::settings s{.model = {1, kv_heads * group, kv_heads},
                                  .budget = {.sink = page, .window = 2 * page, .selected_units = candidates},
                                  .capacity = {.max_tokens = tokens + 1}};
    if (pooling == pooled_by::max_score) s.pooling = freekv::max_score{};
    if (pooling == pooled_by::mean_query) s.pooling = freekv::mean_query{};
    s.attention.soft_cap = static_cast<float>(soft_cap);
    s.selection = {static_cast<float>(p), {}};
    std::vector<float> temperatures(kv_heads);
    freekv::calibrate_top_p<shape>(freekv::checked_settings<d>(s), 0, keys, queries, temperatures);
    return temperatures;
  }

  double score(int row, int query_head, int candidate) const {
    double sum = 0;
    for (int i = 0; i < d; ++i)
      sum += double{queries[count((row * kv_heads * group + query_head) * d + i)]} *
             double{keys[count(((page + candidate) * kv_heads + query_head / group) * d + i)]};
    return sum / 8;
  }
  static std::vector<double> softmax(std::vector<double> scores, double temperature = 1) {
    const double most = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& of : scores) sum += of = std::exp((of - most) / temperature);
    for (double& of : scores) of /= sum;
    return scores;
  }
  /// What query heads rank the candidates by, and how many have p of their attention.
  std::pair<std::vector<double>, int> ranked(int row, int first_head, int heads) const {
    std::vector<double> shares(count(candidates)),
        pooled(shares.size(), pooling == pooled_by::max_score ? -1e9 : 0);
    for (int head = first_head; head < first_head + heads; ++head) {
      std::vector<double> scores, capped;
      for (int j = 0; j < candidates; ++j) {
        scores.push_back(score(row, head, j));
        capped.push_back(soft_cap == 0 ? scores.back() : soft_cap * std::tanh(scores.back() / soft_cap));
      }
      const auto own = softmax(scores), of_attention = softmax(capped);
      for (std::size_t j = 0; j < shares.size(); ++j) {
        shares[j] += of_attention[j] / heads;
        if (pooling == pooled_by::mean_softmax) pooled[j] += own[j] / heads;
        if (pooling == pooled_by::max_score) pooled[j] = std::max(pooled[j], scores[j]);
        if (pooling == pooled_by::mean_query) pooled[j] += scores[j] / heads;
      }
    }
    for (double& of : pooled)
      if (pooling == pooled_by::mean_softmax) of = std::log(of);
    std::sort(shares.begin(), shares.end(), std::greater<>());
    std::sort(pooled.begin(), pooled.end(), std::greater<>());
    int fewest = 0;
    for (double taken = 0; taken < static_cast<double>(static_cast<float>(p));
         taken += shares[count(fewest++)]) {
    }
    return {pooled, fewest};
  }
  double wanted(int kv_head) const {
    std::vector<std::pair<std::vector<double>, int>> all;
    for (int row = 0; row < rows; ++row)
      for (int nth = 0; nth < (each ? group : 1); ++nth)
        all.push_back(ranked(row, kv_head * group + nth, each ? 1 : group));
    const auto share = [&](double temperature) {
      double sum = 0;
      for (const auto& [pooled, fewest] : all) {
        const auto masses = softmax(pooled, temperature);
        for (int j = 0; j < fewest; ++j) sum += masses[count(j)] / static_cast<double>(all.size());
      }
      return sum;
    };
    double low = 1e-3, high = 10;
    while (high / low > 1 + 1e-9) {
      const double middle = std::sqrt(low * high);
      (share(middle) >= static_cast<double>(static_cast<float>(p)) ? low : high) = middle;
    }
    return low;
  }
};

}  // namespace

TEST_CASE(
    "temperatures of several rows, of each pooling and of query heads by themselves are the definition's",
    "[top_p]") {
  dice d(31);
  for (const auto pooling : {rows_case::pooled_by::mean_softmax, rows_case::pooled_by::max_score,
                             rows_case::pooled_by::mean_query})
    for (const bool each : {false, true})
      for (const double soft_cap : {0.0, 1.0}) {
        rows_case c(d, d.one_of({1, 2, 5}));
        c.pooling = pooling, c.each = each, c.soft_cap = soft_cap, c.p = d.one_of({0.5, 0.9});
        const auto got = each ? c.calibrated<freekv::per_query_head>() : c.calibrated<freekv::per_kv_head>();
        for (int head = 0; head < c.kv_heads; ++head) {
          const double want = c.wanted(head);
          INFO("pooling " << static_cast<int>(pooling) << ", each " << each << ", rows " << c.rows << ", p "
                          << c.p << ", soft cap " << soft_cap << ", KV head " << head);
          CHECK(std::fabs(double{got[count(head)]} / want - 1) < 1e-4);
        }
      }
}

TEST_CASE("temperatures are the same where keys are stored in units of a power of two", "[top_p]") {
  dice d(22);
  selecting_case c(d, 0.8f);
  for (const bool by_means : {false, true}) {
    c.by_means = by_means;
    CHECK(c.calibrated({0.25f}) == c.calibrated());
    CHECK(c.calibrated({8.0f, 0.5f}) == c.calibrated());
  }
}

TEST_CASE("a key that is NaN has no mass, as in a selection", "[top_p]") {
  dice d(23);
  for (const bool by_means : {false, true}) {
    selecting_case c(d, 0.8f);
    c.by_means = by_means;
    const std::vector<float> before = c.calibrated();
    std::fill_n(c.keys.begin() + 100 * c.kv_heads * c.d, c.d, quiet_nan);  // of the first KV head
    const std::vector<float> now = c.calibrated();
    CHECK(now[1] == before[1]);
    CHECK(std::fabs(now[0] / before[0] - 1) < 0.2f);
  }
}

TEST_CASE("by calibrated temperatures as many pages are selected as have p of the attention", "[top_p]") {
  dice d(21);
  int otherwise = 0;
  const auto check = [&](const selecting_case& c) {
    const std::vector<float> temperatures = c.calibrated();
    const std::vector<int> counts = c.selected(temperatures), by_scores = c.selected({});
    for (int head = 0; head < c.kv_heads; ++head) {
      const int wanted = c.wanted(head), got = counts[count(head)], uncalibrated = by_scores[count(head)];
      INFO("p " << c.p << ", unit " << c.unit << ", KV head " << head << ", temperature "
                << temperatures[count(head)] << ", by scores " << uncalibrated);
      // The share at the temperature is p but for float32's rounding, so that one more may be taken.
      CHECK(got >= wanted);
      CHECK(got <= wanted + 1);
      otherwise += uncalibrated < wanted || uncalibrated > wanted + 1;
    }
  };
  for (int repeat = 0; repeat < 12; ++repeat) {
    selecting_case c(d, d.one_of({0.3f, 0.5f, 0.8f, 0.95f}));
    check(c);
    c.by_means = c.by_largest = true;
    check(c);
    c.unit = 1;
    check(c);
  }
  CHECK(otherwise > 24);  // of 72: scores are estimates
}

TEST_CASE("scores that are the attention's own have temperatures of at least 1", "[top_p]") {
  dice d(22);
  for (int repeat = 0; repeat < 8; ++repeat) {
    selecting_case c(d, 0.9f);
    c.by_means = true, c.unit = 1;
    for (const float temperature : c.calibrated()) CHECK(temperature >= 0.999f);
  }
}

TEST_CASE("calibrate_top_p says what it is lacking, and what takes no temperature", "[top_p]") {
  dice d(23);
  const selecting_case c(d, 0.9f);
  const auto settings = freekv::checked_settings<64>(c.settings({}));
  std::vector<float> temperatures(2);
  const auto calibrate = [&](std::span<const float> keys, std::span<const float> queries, auto to) {
    freekv::calibrate_top_p<freekv::kv_shape<float, 64>>(settings, 0, keys, queries, to);
  };
  using freekv::usage_error;
  CHECK_THROWS_AS(calibrate(std::span(c.keys).first(100), c.query, std::span(temperatures)), usage_error);
  CHECK_THROWS_AS(calibrate(c.keys, std::span(c.query).first(100), std::span(temperatures)), usage_error);
  CHECK_THROWS_AS(calibrate(c.keys, c.query, std::span(temperatures).first(1)), usage_error);
  CHECK_THROWS_AS(calibrate({}, c.query, std::span(temperatures)), usage_error);
  for (const int layer : {-1, 1})
    CHECK_THROWS_WITH(
        (freekv::calibrate_top_p<freekv::kv_shape<float, 64>>(settings, layer, c.keys, c.query,
                                                              temperatures)),
        "calibrate_top_p: layer " + std::to_string(layer) + " is not one of 1; choose from 0 to 0");
  calibrate({}, {}, std::span(temperatures));  // of no prompt
  CHECK(temperatures == std::vector<float>{1.0f, 1.0f});

  auto best = c.settings({});
  using top_k_pipeline = freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, freekv::page_size<8>>;
  top_k_pipeline::settings of_best{.model = best.model, .budget = best.budget, .capacity = best.capacity};
  const auto of_best_pages = freekv::checked_settings<64>(of_best);
  const auto calibrate_best = [&] {
    freekv::calibrate_top_p<freekv::kv_shape<float, 64>>(of_best_pages, 0, c.keys, c.query, temperatures);
  };
  CHECK_THROWS_AS(calibrate_best(), usage_error);
  auto short_of = c.settings({temperatures.data(), 1, 1});
  CHECK_THROWS_AS(freekv::checked_settings<64>(short_of), freekv::settings_error);
  using by_layer = freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, freekv::top_p, freekv::per_layer>;
  by_layer::settings together{.model = best.model, .budget = best.budget, .capacity = best.capacity};
  together.budget = {};
  together.selection = {0.9f, {temperatures.data(), 1, 2}};
  CHECK_THROWS_AS(freekv::checked_settings<64>(together), freekv::settings_error);
}

TEST_CASE("units are selected by scores of selection_scale, and temperatures grow with it", "[top_p]") {
  using shape = freekv::kv_shape<float, 64>;
  using pipeline = freekv::retrieval_pipeline<shape, freekv::page_size<8>, freekv::unit<1>, freekv::mean,
                                              freekv::mean_score, freekv::top_p, freekv::complete_first<0>>;
  dice d(31);
  const auto keys = normals(d, 240 * 64), queries = normals(d, 64);
  const auto of = [&](float selection_scale) {
    pipeline::settings s{.model = {1, 1, 1},
                         .budget = {.sink = 8, .window = 16, .selected_units = 200},
                         .capacity = {.max_tokens = 241}};
    s.attention.selection_scale = selection_scale;
    s.selection = {0.8f, {}};
    float temperature = 0.0f;
    freekv::calibrate_top_p<shape>(freekv::checked_settings<64>(s), 0, keys, queries, {&temperature, 1});
    return temperature;
  };
  CHECK(of(0.25f) == Approx(2.0f * of(0.125f)).epsilon(1e-5));  // scale is 0.125
}

TEST_CASE("scores beyond float32 by their temperature count as the largest float", "[top_p]") {
  using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<float, 8>, freekv::page_size<8>, freekv::mean,
                                              freekv::max_score, freekv::top_p, freekv::always,
                                              freekv::every_layer<freekv::layer_kind::retrieval>>;
  const float temperature = 0.1f;
  freekv::host_backend backend;
  pipeline p({.model = {.layers = 1, .query_heads = 1, .kv_heads = 1},
              .budget = {.sink = 0, .window = 8, .selected_units = 4},
              .capacity = {.max_tokens = 100},
              .attention = {.scale = 1.0f},
              .selection = {0.6f, {&temperature, 1, 1}}},
             backend);
  const auto id = p.open();
  std::vector<float> keys(81 * 8), query(8), out(8);
  for (int t = 16; t < 32; ++t) keys[count(t * 8)] = 1e19f;
  query[0] = 1e19f;
  auto prompt = p.begin_step({{id, 80, freekv::step_phase::prefill}});
  const std::span<const float> rows(keys);
  prompt.append<float>(0, {.keys = rows.first(640), .values = rows.first(640)});
  prompt.end();
  auto step = p.begin_step({{id}});
  step.append<float>(0, {.keys = rows.last(8), .values = rows.last(8), .queries = query});
  step.attend(0, out);
  step.end();
  CHECK(p.report(0)[id].attended_count[0] == 2);
  CHECK(p.report(0)[id].attended[0] == 2);
}
