// Random pipelines of one layer, rows of a text whose queries change slowly, and the steps that append them:
// of tests that know what every unit of a sequence is worth.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "random_settings.hpp"

namespace tests {

struct sizes {
  int page = 8, unit = 0, sink = 8, window = 8, k = 3, group = 2, kv_heads = 2, rows = 1;

  static sizes random(dice& dice, int most_selected) {
    sizes of;
    of.page = dice.one_of({8, 16, 32});
    of.unit = dice.one_of({0, 0, 8});
    of.sink = dice.below(3) * of.page;
    of.window = (1 + dice.below(3)) * of.page;
    of.k = 1 + dice.below(most_selected);
    of.group = dice.one_of({1, 2, 3, 4, 7});
    of.kv_heads = 1 + dice.below(3);
    of.rows = 1 + dice.below(3);
    return of;
  }
};

/// Settings of a pipeline that selects by `rank` rows of a basis.
template <class Pipeline>
typename Pipeline::settings settings_of(const sizes& s, const std::vector<float>& basis, int rank, int d) {
  typename Pipeline::settings all;
  all.model = {.query_heads = s.group * s.kv_heads, .kv_heads = s.kv_heads};
  all.budget = {.sink = s.sink, .window = s.window, .selected_units = s.k};
  all.page = {{s.page}};
  all.unit = {{s.unit}};
  all.capacity = {.max_tokens = 24 * s.page, .max_sequences = 3, .max_decode_rows = s.rows};
  all.summary.basis = {basis.data(), 1, s.kv_heads, rank, d};
  return all;
}

/// Gives settings sink logits or none, and scales of keys or none; then `basis` is that of stored keys.
template <class Settings>
void draw_logits_and_scales(dice& dice, int d, Settings& given, std::vector<float>& basis) {
  std::vector<float> logits = normals(dice, count(given.model.query_heads), 2.0f);
  for (float& logit : logits) logit += 5.0f;  // as much as other tokens together
  if (dice.below(3) == 0) given.attention.sink_logits = logits;
  if (dice.below(3) != 0) return;
  auto& scales = given.attention.key_scales;
  for (int head = 0; head < given.model.kv_heads; ++head) scales.push_back(dice.one_of({0.25f, 2.0f, 8.0f}));
  for (int head = 0; head < given.model.kv_heads; ++head)
    for (int i = 0; i < d; ++i) basis[count(head * (1 + d) * d + i)] /= scales[count(head)];
}

/// Refusals of pipelines by a policy, which names itself and says what to choose.
struct refusals {
  const char* policy;
  freekv::host_backend& backend;
  const std::vector<float>& basis;  // of two KV heads, d rows each

  template <class Pipeline, class Change>
  void check(const char* sentence, const Change& change) const {
    constexpr int d = Pipeline::head_dim;
    typename Pipeline::settings s;
    s.model = {.query_heads = 4, .kv_heads = 2};
    s.capacity = {.max_tokens = 640};
    if constexpr (requires { s.summary.basis; }) s.summary.basis = {basis.data(), 1, 2, d, d};
    change(s);
    CHECK_THROWS_WITH(Pipeline(s, backend), Catch::Contains(policy) && Catch::Contains(sentence));
  }
};

/// Rows of one sequence, (tokens, heads, d).
struct rows_of_text {
  std::vector<float> q, k;
  std::size_t query_row, key_row;

  template <class Settings>
  rows_of_text(dice& dice, int tokens, const Settings& s, int d = 64)
      : query_row(count(s.model.query_heads * d)), key_row(count(s.model.kv_heads * d)) {
    q = normals(dice, count(tokens) * query_row, 1.5f);
    k = normals(dice, count(tokens) * key_row, 1.0f);
    // Queries change slowly, and now and then look at what is near.
    for (std::size_t i = query_row; i < q.size(); ++i) q[i] = 0.9f * q[i - query_row] + 0.44f * q[i];
    for (int t = 0; t < tokens; ++t)
      if (dice.below(3) == 0)
        for (std::size_t i = 0; i < query_row; ++i)
          q[count(t) * query_row + i] +=
              0.6f * k[count(t) * key_row + i / count(d) / (query_row / key_row) * count(d) + i % count(d)];
  }
  std::span<const float> part(const std::vector<float>& of, std::size_t row, int first, int tokens) const {
    return std::span(of).subspan(count(first) * row, count(tokens) * row);
  }
};

/// Appends a sequence's next rows to a pipeline of one layer and attends them, of a decode step.
template <class Pipeline>
void run(Pipeline& pipeline, freekv::sequence_id id, const rows_of_text& text, int tokens,
         freekv::step_phase phase) {
  const int first = pipeline.tokens(id);
  const auto k = text.part(text.k, text.key_row, first, tokens);
  auto step = pipeline.begin_step({{id, tokens, phase}});
  step.template append<float>(
      0, {.keys = k, .values = k, .queries = text.part(text.q, text.query_row, first, tokens)});
  std::vector<float> out(count(tokens) * text.query_row);
  if (phase == freekv::step_phase::decode) step.attend(0, out);
  step.end();
}

template <class Pipeline>
std::vector<int> attended_of(const Pipeline& pipeline, freekv::sequence_id id, int head) {
  const auto report = pipeline.report(0)[id];
  const std::size_t stride = report.attended.size() / report.attended_count.size();
  const auto first = report.attended.begin() + static_cast<long>(count(head) * stride);
  return {first, first + report.attended_count[count(head)]};
}

}  // namespace tests
