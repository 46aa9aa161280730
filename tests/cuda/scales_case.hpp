// A sequence whose keys and values are stored in units of scales, in fp8 or in half, on one side, the
// device's or the host's, which different compilers compile.
#pragma once

#include <freekv/freekv.hpp>
#include <span>
#include <vector>

namespace scales_case {

using namespace freekv;
using freekv::to_size;

constexpr int head_dim = 64, query_heads = 6, kv_heads = 2, layers = 3, page = 8;
constexpr int max_tokens = 160, prompt_rows = 90, steps = 12;
constexpr int attending_rows = 10, most_masses = query_heads * 32;
constexpr std::size_t key_row = kv_heads * head_dim, query_row = query_heads * head_dim;

/// The first layer keeps everything.
template <class Element, class Backend>
using pipeline_on = retrieval_pipeline<kv_shape<Element, head_dim>, Backend, page_size<page>,
                                       any_of<min_max, key_subspace<head_dim, 32>>, complete_first<1>,
                                       any_of<resident, in_place>>;

/// Rows of a text as they are appended, and room for a row's output and log-sum-exps.
template <class Row>
struct rows_of_text {
  std::span<const Row> keys[layers], values[layers];
  std::span<const float> queries[layers];
  std::span<float> out, lse;     // (attending_rows, query_row), (attending_rows, query_heads)
  std::span<float> masses;       // (most_masses)
  const float* basis = nullptr;  // where the side reads it; null: the summary is min_max
  bool in_place = false;

  kv_rows<Row, float> at(int layer, int first, int rows) const {
    const auto part = [&](const auto& data, std::size_t row) {
      return data.subspan(to_size(first) * row, to_size(rows) * row);
    };
    return {part(keys[layer], key_row), part(values[layer], key_row), part(queries[layer], query_row)};
  }
};

template <class Pipeline, class Row>
typename Pipeline::settings settings_of(const rows_of_text<Row>& in) {
  typename Pipeline::settings s;
  s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
  s.budget = {.sink = page, .window = 2 * page, .selected_units = 3};
  s.capacity.max_tokens = max_tokens;
  s.attention.key_scales = {0.03f, 0.5f, 0.011f, 0.04f, 0.02f, 1.7f};
  s.attention.value_scales = {0.02f, 0.3f, 0.009f};
  if (in.basis != nullptr)
    s.summary = key_subspace<head_dim, 32>{.basis = {in.basis, layers, kv_heads, head_dim, head_dim}};
  if (in.in_place) s.route = in_place{};
  return s;
}

template <class Pipeline, class Row>
sequence_id prompt(Pipeline& pipeline, const rows_of_text<Row>& in) {
  const sequence_id id = pipeline.open();
  for (int first = 0, rows = 50; first < prompt_rows; first += rows, rows = prompt_rows - first) {
    auto step = pipeline.begin_step({{id, rows, step_phase::prefill}});
    for (int layer = 0; layer < layers; ++layer) step.append(layer, in.at(layer, first, rows));
    step.end();
  }
  return id;
}
/// Outputs and log-sum-exps of decode steps, of all layers.
template <class Pipeline, class Row>
std::vector<float> decode(Pipeline& pipeline, const rows_of_text<Row>& in) {
  const sequence_id id = prompt(pipeline, in);
  std::vector<float> all;
  for (int i = 0; i < steps; ++i) {
    auto step = pipeline.begin_step({{id}});
    for (int layer = 0; layer < layers; ++layer) {
      step.append(layer, in.at(layer, prompt_rows + i, 1));
      step.attend(layer, in.out, in.lse);
      pipeline.synchronize();
      all.insert(all.end(), in.out.begin(), in.out.begin() + query_row);
      all.insert(all.end(), in.lse.begin(), in.lse.begin() + query_heads);
    }
    step.end();
  }
  pipeline.release(id);
  return all;
}

/// Outputs and log-sum-exps of prompt rows, and log-masses of a decode row behind them, of all layers.
template <class Pipeline, class Row>
std::vector<float> attend_prompt(Pipeline& pipeline, const rows_of_text<Row>& in) {
  const sequence_id id = prompt(pipeline, in);
  std::vector<float> all;
  auto step = pipeline.begin_step({{id, attending_rows, step_phase::prefill}});
  for (int layer = 0; layer < layers; ++layer) {
    step.append(layer, in.at(layer, prompt_rows, attending_rows));
    step.attend(layer, in.out, in.lse);
    pipeline.synchronize();
    all.insert(all.end(), in.out.begin(), in.out.end());
    all.insert(all.end(), in.lse.begin(), in.lse.end());
  }
  step.end();
  step = pipeline.begin_step({{id}});
  for (int layer = 0; layer < layers; ++layer) {
    step.append(layer, in.at(layer, prompt_rows + attending_rows, 1));
    step.log_masses(layer, in.masses);
    step.attend(layer, in.out);
    pipeline.synchronize();
    const auto entries = to_size(query_heads * step.most_attended(layer));
    all.insert(all.end(), in.masses.begin(), in.masses.begin() + static_cast<std::ptrdiff_t>(entries));
  }
  step.end();
  pipeline.release(id);
  return all;
}

/// What the host gives: of `decode`, then of `attend_prompt`.
std::vector<float> of_host(const rows_of_text<half>& in, bool in_fp8);
std::vector<float> of_host(const rows_of_text<fp8_e4m3>& in);

}  // namespace scales_case
