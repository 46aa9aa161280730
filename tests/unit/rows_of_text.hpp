// Rows of a text whose queries change slowly, and the steps that append them: of tests that know what every
// unit of a sequence is worth.
#pragma once

#include <span>
#include <vector>

#include "random_settings.hpp"

namespace tests {

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
