// Defines make_pipeline_of; included by the generated source of each shape alone.
#pragma once

#include "pipeline.hpp"

namespace freekv::examples {

template <class Shape>
class pipeline_of_shape final : public pipeline {
  using implementation =
      retrieval_pipeline<Shape, page_size<dynamic>, any_summary, any_correction, any_plan, any_route>;
  using element = typename implementation::element;

 public:
  pipeline_of_shape(const pipeline_options& options, host_backend& backend)
      : pipeline_(settings(options), backend), sequence_(pipeline_.open()) {}

  void begin_step(int tokens, row_kind kind) override { pipeline_.begin_step({{sequence_, tokens, kind}}); }
  void append(int layer, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries) override {
    pipeline_.template append<float>(layer, {keys, values, queries});
  }
  void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                     std::span<const float> queries) override {
    const auto elements = [](std::span<const std::byte> bytes) {
      return std::span(reinterpret_cast<const element*>(bytes.data()), bytes.size() / sizeof(element));
    };
    pipeline_.append(layer, {elements(keys), elements(values), queries});
  }
  void attend(int layer, std::span<float> out, std::span<float> lse) override {
    pipeline_.attend(layer, out, lse);
  }
  void attend_full(int layer, std::span<float> out, std::span<float> lse) override {
    pipeline_.attend_full(layer, out, lse);
  }
  void end_step() override { pipeline_.end_step(); }
  void synchronize() override { pipeline_.synchronize(); }
  void restart() override {
    if (!pipeline_.abandon_step()) pipeline_.release(sequence_);
    sequence_ = pipeline_.open();
  }
  step_report report(int layer) const override { return pipeline_.report(layer, sequence_); }
  const memory_bytes& bytes() const override { return pipeline_.bytes(); }
  std::size_t slice_bytes() const override { return pipeline_.slice_bytes(); }
  std::size_t summary_bytes() const override { return pipeline_.summary_bytes(); }

 private:
  static typename implementation::settings settings(const pipeline_options& o) {
    const auto unknown = [](const std::string& kind, const std::string& name) -> choice_error {
      return choice_error("there is no " + kind + " named \"" + name + "\"");
    };
    typename implementation::settings s;
    s.layers = o.layers;
    s.query_heads = o.query_heads;
    s.kv_heads = o.kv_heads;
    s.budget = o.budget;
    s.max_tokens = o.max_tokens;
    s.scale = o.scale;
    s.page = {o.page};
    if (o.does.summary == "min_max")
      s.summary = min_max{};
    else if (o.does.summary == "chunk_means")
      s.summary = chunk_means<dynamic>{o.does.chunk};
    else if (o.does.summary == "key_subspace")
      s.summary = key_subspace<dynamic, dynamic>{{o.does.rank}, {o.does.bits}, o.basis};
    else
      throw unknown("summary", o.does.summary);
    if (o.does.correction == "cosine_drift")
      s.correction = cosine_drift{.tau = o.does.tau};
    else if (o.does.correction == "always")
      s.correction = always{};
    else if (o.does.correction == "never")
      s.correction = never{};
    else
      throw unknown("correction", o.does.correction);
    if (o.does.plan == "retrieval")
      s.plan = complete_first<dynamic>{o.complete_layers};
    else if (o.does.plan == "complete")
      s.plan = every_layer<layer_kind::complete>{};
    else if (o.does.plan == "window")
      s.plan = complete_first<dynamic, layer_kind::window>{o.complete_layers};
    else
      throw unknown("layer plan", o.does.plan);
    if (o.in_place)
      s.route = in_place{};
    else
      s.route = resident{};
    return s;
  }

  implementation pipeline_;
  sequence_id sequence_;
};

template <class Shape>
std::unique_ptr<pipeline> make_pipeline_of(const pipeline_options& options, host_backend& backend) {
  return std::make_unique<pipeline_of_shape<Shape>>(options, backend);
}

}  // namespace freekv::examples
