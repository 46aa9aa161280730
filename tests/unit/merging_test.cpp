// Merging: what a policy's fates make of keys, values and log-weights, and what attention then is.

#include <cmath>
#include <tuple>
#include <vector>

#include "../agreement.hpp"
#include "../catch.hpp"
#include "../sanitized.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using Catch::Contains;
using freekv::settings_error;
using freekv::step_phase;

constexpr int d = 24;
using shape = freekv::kv_shape<float, d>;
using everything = freekv::retrieval_pipeline<shape, freekv::every_layer<freekv::layer_kind::complete>>;

/// Tokens whose number is below `kinds` stay; others, which are copies of them, merge into the most similar.
struct merge_copies : freekv::tova {
  using hooks = freekv::hook_list<freekv::hook::merge>;
  static constexpr std::string_view name = "merge_copies";
  int kinds = 1;

  constexpr bool protects(int token, const freekv::eviction_moment&) const { return token < kinds; }
  struct head_memory {};
  constexpr freekv::merge_rule merge_by() const { return freekv::merge_rule::as_many; }
  void merge(const freekv::merging_tokens& of, const freekv::eviction_moment&, head_memory&,
             freekv::merge_fate* fates) const {
    for (int i = of.staying; i < of.end(); ++i) fates[i].into = of.nearest(i);
  }
};

/// Rows of one layer, and the same for a pipeline that keeps everything.
struct rows_of_text {
  std::vector<float> queries, keys, values;
};

/// Runs `prompt` tokens and then decode rows through both, and compares each decode row's output and
/// log-sum-exp.
template <class Eviction>
void compare_with_everything(const Eviction& eviction, int budget, int query_heads, int kv_heads,
                             const rows_of_text& text, int prompt, int tokens, double tolerance) {
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
  freekv::evicting_pipeline<shape, Eviction> merging(
      {.model = {.layers = 1, .query_heads = query_heads, .kv_heads = kv_heads},
       .budget = budget,
       .capacity = {.max_prompt = std::max(1, prompt), .max_generated = tokens},
       .plan = {{0}},
       .eviction = eviction},
      backend);
  everything full({.model = {.layers = 1, .query_heads = query_heads, .kv_heads = kv_heads},
                   .capacity = {.max_tokens = tokens}},
                  backend);
  const auto id = merging.open(), same = full.open();
  double worst_out = 0, worst_lse = 0;
  for (int done = 0; done < tokens;) {
    const int now = done < prompt ? prompt : 1;
    const auto phase = done < prompt ? step_phase::prefill : step_phase::decode;
    const auto part = [&](const std::vector<float>& of, int heads) {
      return std::span(of).subspan(count(done * heads * d), count(now * heads * d));
    };
    const auto run = [&](auto& pipeline, auto sequence) {
      std::vector<float> out(count(now * query_heads * d)), lse(count(now * query_heads));
      auto step = pipeline.begin_step({{sequence, now, phase}});
      step.template append<float>(
          0, {part(text.keys, kv_heads), part(text.values, kv_heads), part(text.queries, query_heads)});
      step.attend(0, out, lse);
      step.end();
      out.insert(out.end(), lse.begin(), lse.end());
      return out;
    };
    const auto got = run(merging, id), want = run(full, same);
    for (std::size_t i = 0; i < got.size(); ++i) {
      double& worst = i < count(now * query_heads * d) ? worst_out : worst_lse;
      worst = std::max(worst, std::fabs(static_cast<double>(got[i]) - static_cast<double>(want[i])));
    }
    done += now;
  }
  CHECK(worst_out < tolerance);
  CHECK(worst_lse < tolerance);
}

rows_of_text random_rows(dice& dice, int tokens, int query_heads, int kv_heads) {
  return {normals(dice, count(tokens * query_heads * d)), normals(dice, count(tokens * kv_heads * d)),
          normals(dice, count(tokens * kv_heads * d))};
}

}  // namespace

TEST_CASE("copies of tokens that merge weigh as many as they are", "[eviction][merging]") {
  dice random(1);
  for (int trial = 0; trial < some_of(12); ++trial) {
    const int kinds = random.between(1, 30), tokens = kinds + random.between(1, 90),
              kv_heads = random.between(1, 2), query_heads = kv_heads * random.between(1, 4);
    rows_of_text text = random_rows(random, tokens, query_heads, kv_heads);
    const int row = kv_heads * d;
    for (int t = kinds; t < tokens; ++t) {
      const int of = random.below(kinds);
      std::copy_n(text.keys.begin() + of * row, row, text.keys.begin() + t * row);
      std::copy_n(text.values.begin() + of * row, row, text.values.begin() + t * row);
    }
    merge_copies policy;
    policy.kinds = kinds;
    const int prompt = random.between(kinds, tokens);
    INFO(kinds << " kinds of " << tokens << " tokens, a prompt of " << prompt);
    compare_with_everything(policy, kinds, query_heads, kv_heads, text, prompt, tokens, 1e-5);
  }
}

TEST_CASE("for the query that it is made for exact_merge keeps output and log-sum-exp",
          "[eviction][merging]") {
  dice random(2);
  for (int trial = 0; trial < some_of(12); ++trial) {
    const int tokens = random.between(40, 150), kv_heads = random.between(1, 2),
              group = random.one_of({1, 1, 3}), query_heads = kv_heads * group;
    rows_of_text text = random_rows(random, tokens, query_heads, kv_heads);
    // All rows' queries are alike, and those of a KV head's query heads.
    for (int row = 0; row < tokens; ++row)
      for (int head = 0; head < query_heads; ++head)
        std::copy_n(text.queries.begin() + head / group * group * d, d,
                    text.queries.begin() + (row * query_heads + head) * d);
    const int prompt = random.between(0, tokens - 10), budget = random.between(1, 30);
    INFO(tokens << " tokens, a prompt of " << prompt << ", budget " << budget << ", group " << group);
    compare_with_everything(freekv::exact_merge{}, budget, query_heads, kv_heads, text, prompt, tokens, 2e-5);
    freekv::hard_kv_merge hard;
    hard.window = 2, hard.interval = 3, hard.p = 0.5f;
    compare_with_everything(hard, budget + 3, query_heads, kv_heads, text, prompt, tokens, 2e-5);
  }
}

TEST_CASE("products of rows in double are the same number by every instruction set", "[eviction][merging]") {
  dice random(5);
  for (const int count : {8, 64, 80, 96, 128, 192, 256})
    for (int nth = 0; nth < 50; ++nth) {
      std::vector<float> a, b;
      for (int i = 0; i < count; ++i)
        a.push_back(random.normal() * 1e3f), b.push_back(random.normal() * (nth % 2 == 0 ? 1e-3f : 1e20f));
      const double product = freekv::exact_product(a.data(), b.data(), count);
      for (const auto set : {freekv::host::isa::baseline, freekv::host::isa::avx2, freekv::host::isa::avx512})
        if (set <= freekv::host::best_isa())
          CHECK(freekv::host::exact_product_of(set)(a.data(), b.data(), count) == product);
    }
}

TEST_CASE("d2o merges by e and exponentials of cosines what is as similar as its threshold",
          "[eviction][merging]") {
  // Two axes and tokens near them; four stay.
  const std::vector<std::vector<float>> keys = {{1, 0, 0, 0, 0, 0, 0, 0},
                                                {0, 2, 0, 0, 0, 0, 0, 0},
                                                {0.6f, 0.8f, 0, 0, 0, 0, 0, 0},
                                                {0, 0, 3, 0, 0, 0, 0, 0},
                                                {0, 0, 0, 0, 0, 0, 0, 0}};
  std::vector<float> rows;
  std::vector<double> lengths;
  std::vector<std::int32_t> tokens;
  for (const auto& key : keys) {
    rows.insert(rows.end(), key.begin(), key.end());
    lengths.push_back(std::sqrt(freekv::exact_product(key.data(), key.data(), 8)));
    tokens.push_back(static_cast<std::int32_t>(tokens.size()));
  }
  const freekv::merging_tokens of{2, 3, tokens.data(), rows.data(), lengths.data(), 8};
  const freekv::d2o policy;
  freekv::d2o::head_memory memory;
  std::vector<freekv::merge_fate> fates(5);
  policy.merge(of, {}, memory, fates.data());
  // Cosines 0.8, 0 and, of no direction, 0.
  CHECK(is_near(memory.threshold, 0.8 / 3, 1e-7));
  CHECK(fates[2].into == 1);
  CHECK(is_near(fates[2].weight, std::exp(0.8), 1e-6));
  CHECK(fates[3].into == -1);
  CHECK(fates[4].into == -1);
  CHECK(fates[0].weight == std::exp(1.0));
  policy.merge({2, 1, tokens.data(), rows.data(), lengths.data(), 8}, {}, memory, fates.data());
  CHECK(is_near(memory.threshold, 0.7 * 0.8 + 0.3 * 0.8 / 3, 1e-6));
}

/// Keys (8 numbers each) that a row of query (1, 0, ...) and scale 1 gives these masses, and values.
rows_of_text rows_of_masses(const std::vector<float>& masses) {
  rows_of_text rows;
  for (const float mass : masses)
    for (int x = 0; x < 8; ++x) {
      rows.queries.push_back(x == 0 ? 1.0f : 0.0f);
      rows.keys.push_back(x == 0 ? std::log(mass) : 0.0f);
      rows.values.push_back(x == 0 ? mass : 0.0f);
    }
  return rows;
}
/// The first number and the log-sum-exp of the last row's output, a decode row behind a prompt of the others.
template <class Eviction>
std::pair<double, double> last_row_of(const Eviction& eviction, int budget, const rows_of_text& rows) {
  freekv::host_backend backend;
  const int tokens = static_cast<int>(rows.keys.size()) / 8;
  freekv::evicting_pipeline<freekv::kv_shape<float, 8>, Eviction> p(
      {.model = {.layers = 1, .query_heads = 1, .kv_heads = 1},
       .budget = budget,
       .capacity = {.max_prompt = tokens, .max_generated = 1},
       .attention = {.scale = 1.0f},
       .plan = {{0}},
       .eviction = eviction},
      backend);
  const auto id = p.open();
  std::vector<float> out(count(tokens * 8)), lse(count(tokens));
  for (const auto& [first, now, phase] :
       {std::tuple(0, tokens - 1, step_phase::prefill), std::tuple(tokens - 1, 1, step_phase::decode)}) {
    const auto part = [&](const std::vector<float>& of) {
      return std::span(of).subspan(count(first * 8), count(now * 8));
    };
    auto step = p.begin_step({{id, now, phase}});
    step.template append<float>(0, {part(rows.keys), part(rows.values), part(rows.queries)});
    step.attend(0, std::span(out).first(count(now * 8)), std::span(lse).first(count(now)));
    step.end();
  }
  return {static_cast<double>(out[0]), static_cast<double>(lse[0])};
}

TEST_CASE("of tokens that are all as similar d2o loses none to rounding", "[eviction][merging]") {
  dice random(7);
  int lost = 0;
  for (int set = 0; set < 1000; ++set) {
    const int leaving = 1 + set % 7;
    std::vector<float> keys = normals(random, 2 * 8);  // the second is that of all that leave
    for (int more = 1; more < leaving; ++more)
      for (int i = 0; i < 8; ++i) keys.push_back(keys[count(8 + i)]);
    std::vector<double> lengths;
    std::vector<std::int32_t> tokens;
    for (int i = 0; i <= leaving; ++i) {
      lengths.push_back(std::sqrt(freekv::exact_product(&keys[count(i * 8)], &keys[count(i * 8)], 8)));
      tokens.push_back(i);
    }
    const freekv::merging_tokens of{.staying = 1,
                                    .leaving = leaving,
                                    .tokens = tokens.data(),
                                    .keys = keys.data(),
                                    .lengths = lengths.data(),
                                    .head_dim = 8};
    freekv::d2o::head_memory memory;
    for (int cut = 0; cut < 3; ++cut) {
      std::vector<freekv::merge_fate> fates(tokens.size());
      freekv::d2o{}.merge(of, {}, memory, fates.data());
      lost +=
          static_cast<int>(std::count_if(fates.begin() + 1, fates.end(), [](auto f) { return f.into < 0; }));
    }
  }
  CHECK(lost == 0);
}

TEST_CASE("hard_kv_pairs merges the i-th worst into the i-th best", "[eviction][merging]") {
  const std::vector<std::int32_t> tokens{3, 5, 8, 40, 4, 6, 7};  // 40 is of the window
  const std::vector<double> shares{0.1, 0.3, 0.3, 0.05, 0.02, 0.01, 0.02};
  const auto fates_of = [&](const freekv::hard_kv_pairs& policy, int leaving) {
    std::vector<std::int32_t> scratch(7);
    std::vector<freekv::merge_fate> fates(7);
    freekv::hard_kv_pairs::head_memory memory;
    policy.merge({.staying = 4,
                  .leaving = leaving,
                  .tokens = tokens.data(),
                  .shares = shares.data(),
                  .scratch = scratch.data()},
                 {.tokens = 41}, memory, fates.data());
    std::vector<int> into;
    for (int i = 0; i < 7; ++i) into.push_back(fates[count(i)].into);
    for (int i = 0; i < 4 + leaving; ++i) CHECK(fates[count(i)].weight == shares[count(i)]);
    return into;
  };
  const freekv::hard_kv_pairs pairs{{.window = 1}}, many_to_one{{.window = 1}, 1};
  CHECK(fates_of(pairs, 3) == std::vector{-1, -1, -1, -1, 2, 1, 0});  // of alike shares the first
  CHECK(fates_of(pairs, 1) == std::vector{-1, -1, -1, -1, 1, -1, -1});
  CHECK(fates_of(many_to_one, 3) == std::vector{-1, -1, -1, -1, 1, 1, 1});
  // Ranks begin again where fewer stay than leave, and where there is nobody all are lost.
  CHECK(fates_of({{.window = 1}, 2}, 3) == std::vector{-1, -1, -1, -1, 2, 1, 1});
  CHECK(fates_of({{.window = 41}}, 3) == std::vector{-1, -1, -1, -1, -1, -1, -1});
}

TEST_CASE("hard_kv_pairs loses log-sum-exp where hard_kv_merge keeps it", "[eviction][merging]") {
  // Shares of the prompt's last row are sixteenths; two tokens have 0.7 of it, and they and that row stay.
  const rows_of_text rows = rows_of_masses({4, 1, 8, 2, 1, 1});
  const freekv::hard_kv settings{.p = 0.7f, .window = 1, .kernel = 1, .sink = 0};
  const double all = std::log(17.0), all_values = (16.0 + 1 + 64 + 4 + 1 + 1) / 17;
  const auto of = [&](const auto& eviction) { return last_row_of(eviction, 4, rows); };

  freekv::hard_kv_merge by_row;
  static_cast<freekv::hard_kv&>(by_row) = settings;
  CHECK(is_near(of(by_row).second, all, 1e-6));
  CHECK(is_near(of(by_row).first, all_values, 1e-5));

  // 8 takes 1, and 4 takes 2: keys are logarithms, whose means are products of powers.
  const double first = std::pow(8.0, 8.0 / 9), second = std::pow(4.0, 4.0 / 6) * std::pow(2.0, 2.0 / 6);
  const double pairs = first + second + 2;
  CHECK(is_near(of(freekv::hard_kv_pairs{settings}).second, std::log(pairs), 1e-6));
  CHECK(is_near(of(freekv::hard_kv_pairs{settings}).first, (first * 65 / 9 + second * 20 / 6 + 2) / pairs,
                1e-5));
  // 8 takes 1 and 2, 4 stays as it is.
  const double taken = std::pow(8.0, 8.0 / 11) * std::pow(2.0, 2.0 / 11), one = taken + 4 + 2;
  CHECK(is_near(of(freekv::hard_kv_pairs{settings, 1}).second, std::log(one), 1e-6));
  CHECK(is_near(of(freekv::hard_kv_pairs{settings, 1}).first, (taken * 69 / 11 + 16 + 2) / one, 1e-5));
  // Neither has what was there, nor even what the sets' weighted means of masses would be (Jensen); nothing
  // merged has less yet.
  CHECK(std::log(pairs) < std::log(65.0 / 9 + 20.0 / 6 + 2));
  CHECK(std::log(65.0 / 9 + 20.0 / 6 + 2) < all);
}

TEST_CASE("hard_kv_pairs loses what has no share", "[eviction][merging]") {
  freekv::hard_kv_pairs pairs{{.p = 0.7f, .window = 1, .kernel = 1, .sink = 0}};
  // A key that is NaN would be the worst, which 8 takes; 4 takes 2 as before.
  const rows_of_text spoilt = rows_of_masses({4, static_cast<float>(quiet_nan), 8, 2, 1, 1});
  const double second = std::pow(4.0, 4.0 / 6) * std::pow(2.0, 2.0 / 6);
  CHECK(is_near(last_row_of(pairs, 4, spoilt).second, std::log(8 + second + 2), 1e-6));
  // A row whose query is NaN selects nothing, and only its own token and the next are there.
  rows_of_text rows = rows_of_masses({4, 1, 8, 2, 1, 1});
  std::fill_n(rows.queries.begin() + 4 * 8, 8, quiet_nan);
  CHECK(is_near(last_row_of(pairs, 4, rows).second, std::log(2.0), 1e-6));
}

TEST_CASE("for no query hard_kv_pairs keeps log-sum-exp, which falls from cut to cut",
          "[eviction][merging]") {
  dice random(7);
  for (int trial = 0; trial < some_of(8); ++trial) {
    const rows_of_text text = [&] {
      rows_of_text rows = rows_of_masses(std::vector<float>(60, 1.0f));
      rows.keys = normals(random, 60 * 8), rows.queries = normals(random, 60 * 8);
      return rows;
    }();
    double all = 0;
    for (int t = 0; t < 60; ++t)
      all += std::exp(freekv::exact_product(text.queries.data() + 59 * 8, text.keys.data() + t * 8, 8));
    freekv::hard_kv_pairs pairs;
    pairs.window = 2, pairs.p = random.one_of({0.5f, 0.9f}),
    pairs.takers = random.one_of({1, 3, freekv::every_token});
    CHECK(last_row_of(pairs, 20, text).second < std::log(all) - 1e-3);
  }
}

/// What kv_merger makes of a prompt's keys (8 numbers each): places that stay, and of each other token the
/// place that it goes into, with its weight. `attention` is of one row.
struct merged_runs {
  std::vector<int> pivots, into;
  std::vector<double> weights;
};
merged_runs runs_of(const freekv::kv_merger& policy, int budget, std::vector<float> keys,
                    std::vector<float> attention) {
  const int n = static_cast<int>(attention.size());
  std::vector<std::int32_t> tokens;
  for (int i = 0; i < n; ++i) tokens.push_back(i);
  const freekv::eviction_moment at{.budget = budget, .prompt = n, .tokens = n, .prompt_ends = true};
  std::vector<float> scratch(count(n)), worths(count(n)), parted;
  const std::vector<float> exact = keys;
  merged_runs of;
  CHECK(policy.observe({.units = n,
                        .tokens = tokens.data(),
                        .rows = 1,
                        .numbers = attention.data(),
                        .scratch = scratch.data(),
                        .keys = keys.data(),
                        .head_dim = 8,
                        .stride = n},
                       at, worths.data()) == std::min(n, budget));
  std::vector<std::int32_t> order;
  for (const float stays : {1.0f, 0.0f})
    for (int i = 0; i < n; ++i)
      if (worths[count(i)] == stays) order.push_back(i);
  std::vector<double> lengths;
  for (const int i : order) {
    parted.insert(parted.end(), exact.begin() + i * 8, exact.begin() + i * 8 + 8);
    lengths.push_back(std::sqrt(freekv::exact_product(exact.data() + i * 8, exact.data() + i * 8, 8)));
  }
  const int staying = static_cast<int>(std::count(worths.begin(), worths.end(), 1.0f));
  CHECK(staying == std::min(n, budget));
  std::vector<freekv::merge_fate> fates(count(n));
  freekv::kv_merger::head_memory memory;
  policy.merge({staying, n - staying, order.data(), parted.data(), lengths.data(), 8}, at, memory,
               fates.data());
  of.pivots.assign(order.begin(), order.begin() + staying);
  of.into.resize(count(n)), of.weights.resize(count(n));
  for (int i = 0; i < n; ++i) {
    of.into[count(order[count(i)])] = i < staying ? order[count(i)] : order[count(fates[count(i)].into)];
    of.weights[count(order[count(i)])] = fates[count(i)].weight;
  }
  return of;
}

TEST_CASE("kv_merger makes runs of neighbours tokens", "[eviction][merging]") {
  // Angles in degrees of keys of length 2, all in one plane.
  const std::vector<double> angles{50, 10, 12, 60, 62, 67, 20, 90};
  std::vector<float> keys;
  for (const double angle : angles)
    for (int x = 0; x < 8; ++x) {
      const double turn = angle * 3.14159265358979 / 180;
      keys.push_back(static_cast<float>(x == 0 ? 2 * std::cos(turn) : x == 1 ? 2 * std::sin(turn) : 0));
    }
  const std::vector<float> attention{0, 1, 2, 3, 5, 4, 1, 9};
  const freekv::kv_merger policy{.window = 1, .sink = 1};
  const merged_runs five = runs_of(policy, 5, keys, attention);
  CHECK(five.pivots == std::vector{0, 2, 4, 6, 7});
  CHECK(five.into == std::vector{0, 2, 2, 4, 4, 4, 6, 7});
  // One other: its squared distance is the mean.
  CHECK(is_near(five.weights[1], std::exp(-0.5), 1e-9));
  // Chords of 2 and 5 degrees.
  const double near = std::pow(std::sin(3.14159265358979 / 180), 2),
               far = std::pow(std::sin(2.5 * 3.14159265358979 / 180), 2);
  CHECK(is_near(five.weights[3], std::exp(-near / (near + far)), 1e-4));
  CHECK(is_near(five.weights[5], std::exp(-far / (near + far)), 1e-4));
  CHECK(five.weights[4] == 1.0);
  // Pairs of 5 degrees are cut next, and those of 47 and 48 last.
  CHECK(runs_of(policy, 6, keys, attention).into == std::vector{0, 2, 2, 4, 4, 5, 6, 7});
  CHECK(runs_of(policy, 4, keys, attention).into == std::vector{0, 2, 2, 4, 4, 4, 4, 7});
  CHECK(runs_of(policy, 3, keys, attention).into == std::vector{0, 4, 4, 4, 4, 4, 4, 7});
  CHECK(runs_of(policy, 8, keys, attention).into == std::vector{0, 1, 2, 3, 4, 5, 6, 7});
  // Without a sink the first token goes with the others.
  CHECK(runs_of({.window = 1, .sink = 0}, 2, keys, attention).into == std::vector{4, 4, 4, 4, 4, 4, 4, 7});
}

TEST_CASE("kv_merger finds the runs again that it has ranked pivots by", "[eviction][merging]") {
  dice random(11);
  for (int trial = 0; trial < some_of(400); ++trial) {
    const int n = random.between(6, 120), window = random.between(1, 3), sink = random.between(0, 2),
              budget = random.between(sink + window + 1, n);
    std::vector<float> keys = normals(random, n * 8), attention = normals(random, n);
    // Some keys are copies, of no direction, or not finite: their pairs are alike.
    for (int i = 1; i < n; ++i) {
      const int kind = random.below(12);
      if (kind < 5) std::copy_n(keys.begin() + (i - 1) * 8, 8, keys.begin() + i * 8);
      if (kind == 5) std::fill_n(keys.begin() + i * 8, 8, 0.0f);
      if (kind == 6 && trial % 8 == 0) keys[count(i * 8)] = quiet_nan;
      if (kind < 8) attention[count(i)] = attention[count(i - 1)];
    }
    // Runs by their definition: pairs are cut one after the other.
    std::vector<float> pairs;
    for (int i = 0; i + 1 < n; ++i) {
      const float *const a = keys.data() + i * 8, *const b = a + 8;
      const double cosine = freekv::exact_product(a, b, 8) / (std::sqrt(freekv::exact_product(a, a, 8)) *
                                                              std::sqrt(freekv::exact_product(b, b, 8)));
      const bool apart = i < sink || i + 1 >= n - window;
      pairs.push_back(apart ? -2.0f : std::isfinite(cosine) ? static_cast<float>(cosine) : 0.0f);
    }
    for (int cut = 1; cut < budget; ++cut) *std::min_element(pairs.begin(), pairs.end()) = 3.0f;
    std::vector<int> into, pivots;
    for (int first = 0, end = 0; first < n; first = end) {
      while (end < n && (end + 1 == n || pairs[count(end)] < 3.0f)) ++end;
      end = std::min(n, end + 1);
      const auto most = std::max_element(attention.begin() + first, attention.begin() + end);
      pivots.push_back(static_cast<int>(most - attention.begin()));
      into.insert(into.end(), count(end - first), pivots.back());
    }
    const merged_runs of = runs_of({.window = window, .sink = sink}, budget, keys, attention);
    INFO(n << " tokens, budget " << budget << ", sink " << sink << ", window " << window);
    CHECK(of.pivots == pivots);
    CHECK(of.into == into);
  }
}

TEST_CASE("copies that kv_merger makes a token of weigh as many as they are", "[eviction][merging]") {
  dice random(12);
  for (int trial = 0; trial < some_of(8); ++trial) {
    const int kv_heads = random.between(1, 2), query_heads = kv_heads * random.between(1, 3),
              runs = random.between(4, 20), prompt = 2 * runs + 40, tokens = prompt + 20;
    rows_of_text text = random_rows(random, tokens, query_heads, kv_heads);
    const int row = kv_heads * d;
    for (int t = 1, begun = 1; t < prompt; ++t) {  // runs of copies, of which the window has none
      const bool begins = t >= prompt - 3 || (begun < runs - 3 && random.below(3) == 0);
      begun += begins;
      if (begins) continue;
      std::copy_n(text.keys.begin() + (t - 1) * row, row, text.keys.begin() + t * row);
      std::copy_n(text.values.begin() + (t - 1) * row, row, text.values.begin() + t * row);
    }
    INFO(runs << " runs at most of " << prompt << " tokens");
    compare_with_everything(freekv::kv_merger{.window = 3, .sink = 0}, runs, query_heads, kv_heads, text,
                            prompt, tokens, 1e-5);
  }
}

TEST_CASE("what is not a number does not merge, and the others do", "[eviction][merging]") {
  // The last row's query is NaN: the policy has no weights, so what leaves is lost; all rows after are as
  // TOVA's.
  dice random(3);
  rows_of_text text = random_rows(random, 60, 2, 2);
  std::fill_n(text.queries.begin() + 39 * 2 * d, 2 * d, quiet_nan);
  freekv::host_backend backend;
  const auto outputs = [&](auto eviction) {
    freekv::evicting_pipeline<shape, decltype(eviction)> p(
        {.model = {.layers = 1, .query_heads = 2, .kv_heads = 2},
         .budget = 10,
         .capacity = {.max_prompt = 40, .max_generated = 1},
         .plan = {{0}},
         .eviction = eviction},
        backend);
    const auto id = p.open();
    std::vector<float> out(40 * 2 * d);
    for (const auto& [first, tokens, phase] :
         {std::tuple(0, 40, step_phase::prefill), std::tuple(40, 1, step_phase::decode)}) {
      const auto part = [&](const std::vector<float>& of) {
        return std::span(of).subspan(count(first * 2 * d), count(tokens * 2 * d));
      };
      auto step = p.begin_step({{id, tokens, phase}});
      step.template append<float>(0, {part(text.keys), part(text.values), part(text.queries)});
      step.attend(0, std::span(out).first(count(tokens * 2 * d)));
      step.end();
    }
    out.resize(2 * d);
    return out;
  };
  const auto merged = outputs(freekv::exact_merge{});
  CHECK(std::all_of(merged.begin(), merged.end(), [](float x) { return std::isfinite(x); }));
  CHECK(same_bits(merged, outputs(freekv::tova{})));
}

TEST_CASE("log-weights take memory only where tokens have some", "[eviction][merging][memory]") {
  freekv::host_backend backend;
  const auto state_bytes = [&](auto eviction, int sequences) {
    return typename freekv::evicting_pipeline<shape, decltype(eviction)>::footprint(
               {.model = {.layers = 3, .query_heads = 4, .kv_heads = 4},
                .budget = 127,
                .capacity = {.max_prompt = 300, .max_generated = 40, .max_sequences = sequences},
                .eviction = eviction},
               backend)
        .bytes()
        .state;
  };
  // Of 32 more sequences, 2 layers that forget and 4 KV heads.
  const auto grows = [&](auto eviction) { return state_bytes(eviction, 33) - state_bytes(eviction, 1); };
  const std::size_t heads = 2 * 32 * 4;
  const auto about = [](std::size_t bytes) {
    return Approx(static_cast<double>(bytes)).epsilon(0).margin(512);  // arrays begin at multiples
  };
  CHECK(static_cast<double>(grows(freekv::d2o{}) - grows(freekv::h2o{})) ==
        about(heads * sizeof(freekv::d2o::head_memory)));
  CHECK(static_cast<double>(grows(freekv::exact_merge{}) - grows(freekv::tova{})) ==
        about(heads * (128 * sizeof(float) + 1)));
}

TEST_CASE("policies that cannot merge as they say are refused", "[eviction][merging][errors]") {
  struct by_every_row : freekv::exact_merge {
    constexpr int observed_rows() const { return freekv::every_prompt_row; }
  };
  struct of_pages : freekv::exact_merge {
    constexpr int unit_tokens() const { return 8; }
  };
  freekv::host_backend backend;
  const auto make = [&](auto eviction) {
    freekv::evicting_pipeline<shape, decltype(eviction)>(
        {.model = {.layers = 2, .query_heads = 2, .kv_heads = 2},
         .capacity = {.max_generated = 9},
         .eviction = eviction},
        backend);
  };
  const auto refuses = [&](auto eviction, const char* words) {
    try {
      make(eviction);
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const settings_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  refuses(by_every_row{}, "exact_merge merges by the last row's attention and observes no row or all");
  refuses(of_pages{}, "exact_merge merges units of 8 tokens; merge units of 1");
  struct shares_of_nothing : freekv::exact_merge {
    constexpr freekv::merge_rule merge_by() const { return freekv::merge_rule::by_shares; }
  };
  refuses(shares_of_nothing{}, "exact_merge merges by the shares of rows that it observes and observes none");
  refuses(freekv::hard_kv_pairs{{}, 0}, "hard_kv_pairs: 0 tokens take others; at least 1");
  refuses(freekv::kv_merger{.window = 511},
          "kv_merger: a sink of 1 tokens and a window of 511 of a budget of 512");
  freekv::d2o d2o;
  d2o.beta = 1.5f;
  refuses(d2o, "d2o: recent of 0.25 and a beta of 1.5");
}

TEST_CASE("hard_kv_pairs merges nothing into a token without a share", "[eviction][merging]") {
  const std::vector<std::int32_t> tokens{3, 5, 8, 40, 4, 6, 7};  // 40 is of the window
  const std::vector<double> shares{0.1, 0.0, 0.3, 0.05, 0.02, 0.01, 0.02};
  std::vector<std::int32_t> scratch(7);
  std::vector<freekv::merge_fate> fates(7);
  freekv::hard_kv_pairs::head_memory memory;
  freekv::hard_kv_pairs{{.window = 1}}.merge({.staying = 4,
                                              .leaving = 3,
                                              .tokens = tokens.data(),
                                              .shares = shares.data(),
                                              .scratch = scratch.data()},
                                             {.tokens = 41}, memory, fates.data());
  CHECK(std::vector{fates[4].into, fates[5].into, fates[6].into} == std::vector{0, 2, 2});
}

TEST_CASE("r_kv counts a key that is exactly as similar as it says", "[eviction][merging]") {
  // Cosines: of 0 and 1 exactly 0.5, of all others 0.
  const int n = 3, d8 = 8;
  std::vector<float> keys(count(n * d8)), numbers(32), scratch(64);
  keys[0] = 1.0f;
  for (int x = 0; x < 4; ++x) keys[count(d8 + x)] = 1.0f;
  keys[count(2 * d8 + 7)] = 1.0f;
  std::vector<float> worths(8);
  const std::vector<std::int32_t> tokens{0, 1, 2};
  const freekv::r_kv policy{.lambda = 0.0f, .window = 1, .kernel = 1, .similar = 0.5f};
  policy.observe({.units = n,
                  .tokens = tokens.data(),
                  .rows = 1,
                  .heads = 1,
                  .numbers = numbers.data(),
                  .scratch = scratch.data(),
                  .keys = keys.data(),
                  .head_dim = d8,
                  .stride = 16},
                 {}, worths.data());
  CHECK(worths[0] < worths[2]);  // 0 and 1 are like each other, 2 is like none
  CHECK(worths[1] < worths[2]);
}
