// Steps of rows in an engine's own tensors, of other types and strides, beside the same rows as plain floats.
#pragma once

#include <cstdint>
#include <freekv/freekv.hpp>
#include <span>
#include <vector>

#include "../catch.hpp"
#include "steps.hpp"

namespace tests {

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

template <class Step>
concept attends_in_full = requires(Step s, std::span<float> out) {
  s.attend_full(0, out, out);
};

/// What a step of rows of `Number`, all of one tensor, gives beside the same step of floats that are one
/// behind the other.
template <class Number, class Out, class Pipeline>
void compare_step(Pipeline& plain, Pipeline& fused, const std::vector<freekv::step_input>& rows,
                  const std::vector<const text*>& sources, dice& d) {
  const auto& s = plain.configuration();
  const int width = s.model.query_heads * Pipeline::head_dim, kv = s.model.kv_heads * Pipeline::head_dim;
  std::vector<int> first;
  int total = 0;
  for (const auto& r : rows) first.push_back(plain.tokens(r.sequence)), total += r.tokens;
  auto a = plain.begin_step(rows);
  auto b = fused.begin_step(rows);
  const std::int64_t out_stride = d.below(2) == 0 ? 0 : width + d.below(9);
  const std::int64_t apart = out_stride == 0 ? width : out_stride;
  for (int layer = 0; layer < s.model.layers; ++layer) {
    fused_rows<Number> tensor{width, kv, d.below(20)}, other{width, kv, d.below(20)};
    std::vector<float> queries, keys, values, worths;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto from = sources[i]->at(layer, first[i], rows[i].tokens);
      for (int row = 0; row < rows[i].tokens; ++row) {
        tensor.add(from, row);
        other.add(from, row);
      }
      const auto q = values_of(stored_as<Number>(from.queries));
      queries.insert(queries.end(), q.begin(), q.end());
      keys.insert(keys.end(), from.keys.begin(), from.keys.end());
      values.insert(values.end(), from.values.begin(), from.values.end());
      if (gives_worths(plain)) worths.insert(worths.end(), from.worths.begin(), from.worths.end());
    }
    a.template append<float>(layer, {.keys = keys, .values = values, .queries = queries, .worths = worths});
    b.template append<Number, Number>(layer, {.keys = tensor.from(width),
                                              .values = other.from(width + kv),
                                              .queries = tensor.from(0),
                                              .strides = {tensor.stride(), other.stride(), tensor.stride()},
                                              .worths = worths});
    const auto attended = [&](bool full) {
      std::vector<float> expected(queries.size(), quiet_nan), lse(count(total * s.model.query_heads)),
          lse_b(lse);
      std::vector<Out> out(count(total * apart), freekv::from_float<Out>(quiet_nan));
      const auto out_before = out;
      if (full) {
        if constexpr (attends_in_full<decltype(a)>) {
          a.attend_full(layer, expected, lse);
          b.template attend_full<Out>(layer, out, lse_b, out_stride);
        }
      } else {
        a.attend(layer, expected, lse);
        b.template attend<Out>(layer, out, lse_b, out_stride);
      }
      std::vector<float> apart_too = values_of(out_before);
      for (int row = 0; row < total; ++row)
        for (int i = 0; i < width; ++i)
          apart_too[count(row * apart + i)] =
              freekv::to_float(freekv::from_float<Out>(expected[count(row * width + i)]));
      return same_bits(lse, lse_b) && same_bits(values_of(out), apart_too);
    };
    if (attends_in_full<decltype(a)> && d.below(4) == 0) REQUIRE(attended(true));
    REQUIRE(attended(false));
  }
  a.end();
  b.end();
  for (const auto& r : rows)
    for (int layer = 0; layer < s.model.layers && r.phase == freekv::step_phase::decode; ++layer) {
      sequence_result of_a, of_b;
      add_report(plain, layer, r.sequence, of_a);
      add_report(fused, layer, r.sequence, of_b);
      REQUIRE(of_a == of_b);
    }
}

}  // namespace tests
