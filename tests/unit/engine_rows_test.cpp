// Rows of an engine's own tensors: queries and outputs of 16 bits, and rows that are parts of longer ones.

#include <vector>

#include "../catch.hpp"
#include "fused_rows.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::half;
using freekv::step_phase;

}  // namespace

TEST_CASE("rows of 16 bits in a fused tensor give what the same numbers give as floats", "[engine_rows]") {
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_sequences = 2;
    s.capacity.max_decode_rows = 2;
    if (seed % 3 == 0) s.attention.key_scales = {0.3f};
    if (seed % 4 == 0) s.attention.value_scales = {0.7f, 3.0f, 0.01f};
    INFO("seed " << seed);
    const text sources[] = {text(s, head_dim, 200, seed), text(s, head_dim, 200, seed + 1000)};
    freekv::host_backend backend({.threads = 1 + d.below(2)});
    tiny_pipeline plain(s, backend), fused(s, backend);
    const freekv::sequence_id ids[] = {plain.open(), plain.open()};
    REQUIRE((fused.open() == ids[0] && fused.open() == ids[1]));
    for (int step = 0; step < 8; ++step) {
      std::vector<freekv::step_input> rows;
      std::vector<const text*> of;
      for (const int nth : {0, 1}) {
        if (step > 0 && d.below(4) == 0) continue;
        const bool prompt = step == 0 || (plain.tokens(ids[nth]) < 100 && d.below(5) == 0);
        rows.push_back({ids[nth], prompt ? d.between(20, 40) : d.between(1, 2),
                        prompt ? step_phase::prefill : step_phase::decode});
        of.push_back(&sources[nth]);
      }
      if (d.below(2) == 0)
        compare_step<half, half>(plain, fused, rows, of, d);
      else if (d.below(2) == 0)
        compare_step<half, freekv::bfloat16>(plain, fused, rows, of, d);
      else
        compare_step<float, float>(plain, fused, rows, of, d);
    }
  }
}

TEST_CASE("scales that are powers of two change no bit of what all that is made of keys and values gives",
          "[engine_rows]") {
  const std::vector<float> of_keys{4.0f, 0.25f, 2.0f, 0.5f, 1.0f, 8.0f},
      of_values{0.5f, 2.0f, 4.0f, 1.0f, 0.125f, 4.0f};
  std::vector<float> stored_basis = basis_data();
  constexpr std::size_t of_head = (1 + 8) * head_dim;
  for (std::size_t head = 0; head < of_keys.size(); ++head)
    for (std::size_t i = 0; i < head_dim; ++i) stored_basis[head * of_head + i] /= of_keys[head];
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_decode_rows = 2;
    if (seed % 5 == 0) s.attention.soft_cap = 3.0f;
    auto scaled = s;
    scaled.attention.key_scales = of_keys;
    scaled.attention.value_scales = of_values;
    freekv::resolve(scaled.summary, [&]<class S>(const S& summary) {
      if constexpr (std::is_same_v<S, freekv::key_subspace<8, 3>>) {
        S of_stored = summary;
        of_stored.basis.data = stored_basis.data();
        scaled.summary = of_stored;
      }
    });
    INFO("seed " << seed);
    const text source(s, head_dim, 200, seed);
    fresh plain(s), other(scaled);
    const auto same = [&](int tokens, step_phase phase) {
      return run_step(plain.pipeline, plain.id, source, tokens, phase) ==
             run_step(other.pipeline, other.id, source, tokens, phase);
    };
    REQUIRE(same(d.between(20, 100), step_phase::prefill));
    for (int step = 0; step < 30; ++step) {
      REQUIRE(same(d.between(1, 2), step_phase::decode));
      if (d.below(8) != 0) continue;
      const int kept = plain.pipeline.tokens(plain.id) - d.between(1, 10);
      plain.pipeline.truncate(plain.id, kept);
      other.pipeline.truncate(other.id, kept);
    }
  }
}

TEST_CASE("strides that rows do not fit into are refused with what is needed", "[engine_rows]") {
  auto s = tiny_settings();
  fresh f(s);
  const int width = s.model.query_heads * head_dim, kv = s.model.kv_heads * head_dim;
  const std::vector<float> numbers(count(10 * width));
  auto step = f.pipeline.begin_step({{f.id, 3, step_phase::prefill}});
  const auto append = [&](freekv::row_strides strides, std::size_t keys) {
    step.append<float>(0, {.keys = std::span(numbers).first(keys),
                           .values = std::span(numbers),
                           .queries = std::span(numbers),
                           .strides = strides});
  };
  CHECK_THROWS_WITH(append({.keys = kv - 1}, numbers.size()),
                    Catch::Contains("append: keys: a stride of 47 for rows of 48 numbers"));
  CHECK_THROWS_WITH(append({.keys = kv + 8}, count(2 * (kv + 8) + kv - 1)),
                    Catch::Contains("append: keys: 159 numbers for 3 rows of 48, 56 apart"));
  append({.keys = kv + 8}, count(2 * (kv + 8) + kv));
  std::vector<half> out(count(3 * width));
  CHECK_THROWS_WITH(step.attend<half>(0, out, {}, width + 1),
                    Catch::Contains("attention output: 432 numbers for 3 rows of 144, 145 apart"));
  step.attend<half>(0, out);
}

namespace {

/// What a step's rows select and give where heads select by the queries of another text.
struct selected_by {
  const text* queries = nullptr;    // that attend
  const text* selecting = nullptr;  // none: the same
  bool as_bfloat16 = false;         // those that select, and in longer rows

  std::vector<std::int32_t> reports{};
  std::vector<float> out{};

  void run(tiny_pipeline& pipeline, freekv::sequence_id id, const text& keys, int tokens, step_phase phase) {
    const auto& s = pipeline.configuration();
    const int first = pipeline.tokens(id), width = s.model.query_heads * head_dim;
    auto step = pipeline.begin_step({{id, tokens, phase}});
    for (int layer = 0; layer < s.model.layers; ++layer) {
      const auto rows = keys.at(layer, first, tokens), attending = queries->at(layer, first, tokens);
      std::vector<float> given(attending.queries.begin(), attending.queries.end()), by{};
      if (selecting != nullptr) {
        const auto others = selecting->at(layer, first, tokens);
        by.assign(others.queries.begin(), others.queries.end());
      }
      const auto narrow = stored_as<freekv::bfloat16>(given);  // which attention still reads
      std::vector<freekv::bfloat16> longer{};
      if (as_bfloat16) {
        for (int row = 0; row < tokens; ++row) {
          for (int i = 0; i < width; ++i)
            longer.push_back(freekv::from_float<freekv::bfloat16>(by[count(row * width + i)]));
          longer.insert(longer.end(), 3, freekv::from_float<freekv::bfloat16>(quiet_nan));
        }
        step.append<float, freekv::bfloat16>(layer, {.keys = rows.keys,
                                                     .values = rows.values,
                                                     .queries = narrow,
                                                     .strides = {.selecting = width + 3},
                                                     .selecting = longer});
      } else {
        step.append<float>(layer,
                           {.keys = rows.keys, .values = rows.values, .queries = given, .selecting = by});
      }
      std::vector<float> layers_out(given.size(), quiet_nan);
      step.attend(layer, layers_out);
      out.insert(out.end(), layers_out.begin(), layers_out.end());
    }
    step.end();
    if (phase == step_phase::prefill) return;
    for (int layer = 0; layer < s.model.layers; ++layer) {
      sequence_result of;
      add_report(pipeline, layer, id, of);
      reports.insert(reports.end(), of.report.begin(), of.report.end());
    }
  }
};

/// Queries as bfloat16 has them, so that no width tells them apart.
text rounded_text(const tiny_pipeline::settings& s, std::uint64_t seed) {
  text of(s, head_dim, 200, seed);
  of.round_queries();
  return of;
}

}  // namespace

TEST_CASE("heads select by the queries that are given for it, and attend by the others", "[engine_rows]") {
  int told_apart = 0;
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_decode_rows = 2;
    const bool selects_all = d.below(3) == 0;  // so that outputs are those of the queries alone
    if (selects_all) s.budget.selected_units = 200;
    INFO("seed " << seed << ", selects all " << selects_all);
    const text keys = rounded_text(s, seed), others = rounded_text(s, seed + 1000);
    freekv::host_backend backend({.threads = 1 + d.below(2)});
    tiny_pipeline both(s, backend), by_others(s, backend), by_its_own(s, backend), narrow(s, backend);
    const auto id = both.open();
    REQUIRE((by_others.open() == id && by_its_own.open() == id && narrow.open() == id));
    selected_by given{&keys, &others}, expected{&others}, own{&keys}, narrowed{&keys, &others, true};
    for (int step = 0; step < 10; ++step) {
      const auto phase = step == 0 ? step_phase::prefill : step_phase::decode;
      const int tokens = step == 0 ? d.between(90, 130) : d.between(1, 2);
      given.run(both, id, keys, tokens, phase);
      expected.run(by_others, id, keys, tokens, phase);
      own.run(by_its_own, id, keys, tokens, phase);
      narrowed.run(narrow, id, keys, tokens, phase);
    }
    CHECK(given.reports == expected.reports);
    CHECK(narrowed.reports == expected.reports);
    CHECK(same_bits(given.out, narrowed.out));
    if (selects_all) CHECK(same_bits(given.out, own.out));
    told_apart += given.reports != own.reports;
    CHECK_FALSE(same_bits(given.out, expected.out));
  }
  CHECK(told_apart > 8);
}

TEST_CASE("queries to select by are refused where they do not fit, or nothing selects", "[engine_rows]") {
  auto s = tiny_settings();
  fresh f(s);
  const int width = s.model.query_heads * head_dim, kv = s.model.kv_heads * head_dim;
  const std::vector<float> numbers(count(2 * width));
  const freekv::kv_rows<float> rows{.keys = std::span(numbers).first(count(kv)),
                                    .values = std::span(numbers).first(count(kv)),
                                    .queries = numbers,
                                    .selecting = std::span(numbers).first(count(width - 1))};
  auto step = f.pipeline.begin_step({{f.id, 1, step_phase::prefill}});
  CHECK_THROWS_WITH(step.append<float>(0, rows),
                    Catch::Contains("append: selecting queries: 143 numbers for 1 rows of 144"));
  freekv::evicting_pipeline<freekv::kv_shape<float, head_dim>, freekv::h2o> evicting(
      {.model = s.model, .budget = 40, .capacity = {.max_prompt = 64, .max_generated = 64}}, f.backend);
  auto all = rows;
  all.selecting = numbers;
  auto other = evicting.begin_step({{evicting.open(), 1, step_phase::prefill}});
  CHECK_THROWS_WITH(other.append<float>(0, all), Catch::Contains("takes no other queries to select by"));
}
