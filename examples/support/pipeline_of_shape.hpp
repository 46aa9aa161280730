// Defines make_pipeline_of; included by the generated source of each shape alone.
#pragma once

#include <utility>

#include "evicting_pipeline_of_shape.hpp"
#include "pipeline.hpp"
#include "settings_of_options.hpp"
#include "thinned_pipeline_of_shape.hpp"

namespace freekv::examples {

template <class Shape>
class pipeline_of_shape final : public pipeline {
  using implementation =
      retrieval_pipeline<Shape, page_size<dynamic>, unit<dynamic>, any_layouts, summary_list::any,
                         pooling_list::any, selection_list::any, pinning_list::any, scope_list::any,
                         correction_list::any, completion_list::any, residency_list::any, any_plan, any_route,
                         codec_list::any>;
  using element = typename implementation::element;

 public:
  pipeline_of_shape(const pipeline_options& options, host_backend& backend)
      : pipeline_(settings(options), backend) {}

  sequence_id open() override { return pipeline_.open(); }
  sequence_id fork(sequence_id parent) override { return pipeline_.fork(parent); }
  void truncate(sequence_id id, int tokens) override { pipeline_.truncate(id, tokens); }
  void preempt(sequence_id id) override { pipeline_.preempt(id); }
  void restore(sequence_id id) override { pipeline_.restore(id); }
  void release(sequence_id id) override { pipeline_.release(id); }
  int tokens(sequence_id id) const override { return pipeline_.tokens(id); }
  std::int32_t free_pages() const override { return pipeline_.free_pages(); }
  bool observes_prompts() const override { return pipeline_.configuration().completes(); }

  void begin_step(std::span<const step_input> rows) override { step_ = pipeline_.begin_step(rows); }
  void append(int layer, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries) override {
    step_.template append<float>(
        layer,
        {.keys = keys, .values = values, .queries = queries, .selecting = std::exchange(selecting_, {})});
  }
  void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                     std::span<const float> queries) override {
    const auto elements = [](std::span<const std::byte> bytes) {
      return std::span(reinterpret_cast<const element*>(bytes.data()), bytes.size() / sizeof(element));
    };
    step_.append(layer, {.keys = elements(keys),
                         .values = elements(values),
                         .queries = queries,
                         .selecting = std::exchange(selecting_, {})});
  }
  void select_by(int, std::span<const float> queries) override { selecting_ = queries; }
  void correct(int layer) override { step_.correct(layer); }
  void attend(int layer, std::span<float> out, std::span<float> lse) override {
    step_.attend(layer, out, lse);
  }
  void attend_full(int layer, std::span<float> out, std::span<float> lse) override {
    step_.attend_full(layer, out, lse);
  }
  void end_step() override { step_.end(); }
  bool abandon_step() override { return step_.abandon(); }
  void synchronize() override { pipeline_.synchronize(); }
  step_report report(int layer, sequence_id id) const override { return pipeline_.report(layer)[id]; }
  const memory_bytes& bytes() const override { return pipeline_.bytes(); }
  std::size_t slice_bytes() const override { return pipeline_.slice_bytes(); }
  std::size_t summary_bytes() const override {
    return pipeline_.summary_bytes() * static_cast<std::size_t>(pipeline_.configuration().units_per_page());
  }

  static typename implementation::settings settings(const pipeline_options& o) {
    method_data data{o.basis,        o.codebooks, o.factors,    o.rotary,
                     o.temperatures, o.channels,  o.head_kinds, o.kv_heads};
    data.sliding_layers = o.sliding_layers;
    data.by_layer = o.by_layer;
    auto s = settings_of_options<typename implementation::settings>(o, data);
    s.summary = find_by_name("summary", summaries, o.method.summary).make(o.method, data);
    s.pooling = find_by_name("pooling", poolings, o.method.pooling).make(o.method, data);
    s.selection = find_by_name("selection", selections, o.method.selection).make(o.method, data);
    s.pinning = find_by_name("pinning", pinnings, o.method.pinning).make(o.method, data);
    s.scope = find_by_name("rows", selection_scopes, o.method.rows).make(o.method, data);
    s.correction = find_by_name("correction", corrections, o.method.correction).make(o.method, data);
    s.completion = find_by_name("completion", completions, o.method.completion).make(o.method, data);
    s.residency = find_by_name("residency", residencies, o.method.residency).make(o.method, data);
    s.codec = find_by_name("codec", codecs, o.method.codec).make(o.method, data);
    s.capacity.store_file = store_file_of(o);
    return s;
  }

 private:
  implementation pipeline_;
  typename implementation::step step_;
  std::span<const float> selecting_;  // of the rows that are appended next
};

template <class Shape>
std::unique_ptr<pipeline> make_pipeline_of(const pipeline_options& options, host_backend& backend) {
  if (options.method.evicts()) return std::make_unique<evicting_pipeline_of_shape<Shape>>(options, backend);
  if (options.method.thins()) return std::make_unique<thinned_pipeline_of_shape<Shape>>(options, backend);
  return std::make_unique<pipeline_of_shape<Shape>>(options, backend);
}

template <class Shape>
void calibrate_of(const pipeline_options& o, int layer, std::span<const float> keys,
                  std::span<const float> queries, std::span<float> temperatures) {
  calibrate_top_p<Shape>(checked_settings<Shape::head_dim>(pipeline_of_shape<Shape>::settings(o)), layer,
                         keys, queries, temperatures);
}

}  // namespace freekv::examples
