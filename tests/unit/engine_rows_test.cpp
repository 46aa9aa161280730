// Rows of an engine's own tensors: queries and outputs of 16 bits, and rows that are parts of longer ones.

#include <vector>

#include "../catch.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::half;
using freekv::step_phase;

/// A tensor of a step's rows, each with its queries, keys and values and something behind: a fused
/// projection's.
template <class Number>
struct fused_rows {
  std::int64_t queries, keys, padding;
  std::vector<Number> data{};

  std::int64_t stride() const { return queries + 2 * keys + padding; }
  void add(const text::rows& rows, int row) {
    const auto put = [&](std::span<const float> from, std::int64_t width) {
      for (std::int64_t i = 0; i < width; ++i)
        data.push_back(freekv::from_float<Number>(from[count(row * width + i)]));
    };
    put(rows.queries, queries);
    put(rows.keys, keys);
    put(rows.values, keys);
    data.insert(data.end(), count(padding), freekv::from_float<Number>(quiet_nan));
  }
  std::span<const Number> from(std::int64_t first) const { return std::span(data).subspan(count(first)); }
};

template <class To>
std::vector<To> rounded(std::span<const float> numbers) {
  std::vector<To> result;
  for (const float x : numbers) result.push_back(freekv::from_float<To>(x));
  return result;
}
template <class From>
std::vector<float> widened(const std::vector<From>& numbers) {
  std::vector<float> result;
  for (const From x : numbers) result.push_back(freekv::to_float(x));
  return result;
}

/// What a step of rows of `Number`, all of one tensor, gives beside the same step of floats that are one
/// behind the other.
template <class Number, class Out>
void compare_step(tiny_pipeline& plain, tiny_pipeline& fused, const std::vector<freekv::step_input>& rows,
                  const std::vector<const text*>& sources, dice& d) {
  const auto& s = plain.configuration();
  const int width = s.model.query_heads * head_dim, kv = s.model.kv_heads * head_dim;
  std::vector<int> first;
  int total = 0;
  for (const auto& r : rows) first.push_back(plain.tokens(r.sequence)), total += r.tokens;
  auto a = plain.begin_step(rows);
  auto b = fused.begin_step(rows);
  const std::int64_t out_stride = d.below(2) == 0 ? 0 : width + d.below(9);
  const std::int64_t apart = out_stride == 0 ? width : out_stride;
  for (int layer = 0; layer < s.model.layers; ++layer) {
    fused_rows<Number> tensor{width, kv, d.below(20)}, other{width, kv, d.below(20)};
    std::vector<float> queries, keys, values;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto from = sources[i]->at(layer, first[i], rows[i].tokens);
      for (int row = 0; row < rows[i].tokens; ++row) {
        tensor.add(from, row);
        other.add(from, row);
      }
      const auto q = widened(rounded<Number>(from.queries));
      queries.insert(queries.end(), q.begin(), q.end());
      keys.insert(keys.end(), from.keys.begin(), from.keys.end());
      values.insert(values.end(), from.values.begin(), from.values.end());
    }
    a.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
    b.append<Number, Number>(layer, {.keys = tensor.from(width),
                                     .values = other.from(width + kv),
                                     .queries = tensor.from(0),
                                     .strides = {tensor.stride(), other.stride(), tensor.stride()}});
    const auto attended = [&](bool full) {
      std::vector<float> expected(queries.size(), quiet_nan), lse(count(total * s.model.query_heads)),
          lse_b(lse);
      std::vector<Out> out(count(total * apart), freekv::from_float<Out>(quiet_nan));
      const auto out_before = out;
      if (full) {
        a.attend_full(layer, expected, lse);
        b.template attend_full<Out>(layer, out, lse_b, out_stride);
      } else {
        a.attend(layer, expected, lse);
        b.template attend<Out>(layer, out, lse_b, out_stride);
      }
      std::vector<float> apart_too = widened(out_before);
      for (int row = 0; row < total; ++row)
        for (int i = 0; i < width; ++i)
          apart_too[count(row * apart + i)] =
              freekv::to_float(freekv::from_float<Out>(expected[count(row * width + i)]));
      return same_bits(lse, lse_b) && same_bits(widened(out), apart_too);
    };
    if (d.below(4) == 0) REQUIRE(attended(true));
    REQUIRE(attended(false));
  }
  a.end();
  b.end();
  for (const auto& r : rows)
    for (int layer = 0; layer < s.model.layers && r.phase == step_phase::decode; ++layer) {
      sequence_result of_a, of_b;
      add_report(plain, layer, r.sequence, of_a);
      add_report(fused, layer, r.sequence, of_b);
      REQUIRE(of_a == of_b);
    }
}

}  // namespace

TEST_CASE("rows of 16 bits in a fused tensor give what the same numbers give as floats", "[engine_rows]") {
  for (std::uint64_t seed = 1; seed <= 24; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_sequences = 2;
    s.capacity.max_decode_rows = 2;
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
