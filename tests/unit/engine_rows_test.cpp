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
