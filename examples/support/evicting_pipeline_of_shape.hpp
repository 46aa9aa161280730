// A method that evicts, as a pipeline that is chosen at run time.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "pipeline.hpp"

namespace freekv::examples {

/// Beside it full attention of the same rows is kept, for `attend_full`: what the method itself has
/// forgotten. Its bytes are not the method's; of the time of an `append` it takes a copy of the rows. The
/// budget is sink, window and selected pages together; page, sink and window are raas' page, and its own sink
/// and window, or its room where it keeps prompts. Of epi_cache a block is as many tokens as the budget.
template <class Shape>
class evicting_pipeline_of_shape final : public pipeline {
  using implementation = evicting_pipeline<Shape, eviction_list::any>;
  using element = typename implementation::element;

 public:
  evicting_pipeline_of_shape(const pipeline_options& options, host_backend& backend)
      : takes_probes_(options.method.takes_probes()),
        head_kinds_(options.head_kinds),
        voters_(options.voters),
        pipeline_(settings(options, head_kinds_, voters_), backend),
        full_(make_pipeline_of<Shape>(everything(options), backend)) {}

  sequence_id open() override {
    const sequence_id id = pipeline_.open();
    return full_->open(), id;  // both give the lowest that is free
  }
  sequence_id fork(sequence_id parent) override {
    const sequence_id id = pipeline_.fork(parent);
    return full_->fork(parent), id;
  }
  void truncate(sequence_id, int) override { throw refused("truncate"); }
  void preempt(sequence_id) override { throw refused("preempt"); }
  void restore(sequence_id) override { throw refused("restore"); }
  void release(sequence_id id) override {
    pipeline_.release(id);
    full_->release(id);
  }
  int tokens(sequence_id id) const override { return pipeline_.tokens(id); }
  std::int32_t free_pages() const override { return 0; }
  bool observes_prompts() const override {
    return resolve(pipeline_.configuration().eviction, [](const auto& e) { return e.observed_rows() > 0; });
  }
  bool takes_probes() const override { return takes_probes_; }
  bool cuts_blocks() const override {
    return resolve(pipeline_.configuration().eviction,
                   []<class E>(const E&) { return freekv::cuts_blocks<E>; });
  }
  int most_prompt_rows() const override { return pipeline_.most_prompt_rows(); }

  void begin_step(std::span<const step_input> rows) override {
    step_ = pipeline_.begin_step(rows);
    all_prompt_.assign(rows.begin(), rows.end());
    for (step_input& r : all_prompt_) r.phase = step_phase::prefill;  // so that none of them has to attend
    full_->begin_step(all_prompt_);
  }
  void append(int layer, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries) override {
    step_.template append<float>(
        layer, {.keys = keys, .values = values, .queries = queries, .worths = std::exchange(worths_, {})});
    full_->append(layer, keys, values, queries);
  }
  void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                     std::span<const float> queries) override {
    const auto elements = [](std::span<const std::byte> bytes) {
      return std::span(reinterpret_cast<const element*>(bytes.data()), bytes.size() / sizeof(element));
    };
    step_.append(layer, {.keys = elements(keys),
                         .values = elements(values),
                         .queries = queries,
                         .worths = std::exchange(worths_, {})});
    full_->append_stored(layer, keys, values, queries);
  }
  void give_worths(std::span<const float> worths) override { worths_ = worths; }
  void observe(sequence_id id, int layer, std::span<const float> queries) override {
    pipeline_.observe(id, layer, queries);
  }
  void attend(int layer, std::span<float> out, std::span<float> lse) override {
    step_.attend(layer, out, lse);
  }
  void attend_full(int layer, std::span<float> out, std::span<float> lse) override {
    full_->attend_full(layer, out, lse);
  }
  void end_step() override {
    step_.end();
    full_->end_step();
  }
  bool abandon_step() override { return full_->abandon_step(), step_.abandon(); }
  void synchronize() override {}
  step_report report(int layer, sequence_id id) const override { return pipeline_.report(layer)[id]; }
  const memory_bytes& bytes() const override { return pipeline_.bytes(); }
  std::size_t slice_bytes() const override { return pipeline_.slice_bytes(); }
  std::size_t summary_bytes() const override { return 0; }

 private:
  static typename implementation::settings settings(const pipeline_options& o,
                                                    std::span<const layer_kind> head_kinds,
                                                    std::span<const std::uint8_t> voters) {
    const int longest = std::max(1, o.max_tokens);
    const std::int64_t budget =
        std::int64_t{o.budget.sink} + o.budget.window + std::int64_t{o.budget.selected_units} * o.page;
    typename implementation::settings s;
    s.model = {.layers = o.layers, .query_heads = o.query_heads, .kv_heads = o.kv_heads};
    s.budget = static_cast<int>(std::clamp<std::int64_t>(budget, 0, 2 * std::int64_t{longest} + 1024));
    s.capacity.max_prompt = o.max_prompt > 0 ? o.max_prompt : longest;
    s.capacity.max_generated = o.max_prompt > 0 ? longest - o.max_prompt : longest;
    s.capacity.max_sequences = s.capacity.max_prefills = o.max_sequences;
    s.attention.scale = o.scale;
    s.plan = {{o.complete_layers}};
    method_data data;
    data.page = o.page;
    data.sink = std::min(o.budget.sink, longest + o.page);
    data.window = std::min(o.budget.window, longest + o.page);
    data.head_kinds = head_kinds;
    data.voters = voters;
    data.query_heads = o.query_heads;
    data.kv_heads = o.kv_heads;
    data.budget = s.budget;
    s.eviction = eviction_of(o.method, data);
    return s;
  }
  static pipeline_options everything(pipeline_options o) {
    o.method = {.plan = "complete"};
    o.max_tokens = std::max(1, o.max_tokens) + (o.max_prompt > 0 ? 0 : std::max(1, o.max_tokens));
    o.budget = {0, o.page, 1};
    o.in_place = true;
    o.layout = "nhd";
    return o;
  }
  usage_error refused(const std::string& call) const {
    return usage_error(call + ": " + pipeline_.name() +
                       " keeps no complete store to do this from; choose a method that retrieves");
  }

  bool takes_probes_;
  std::vector<layer_kind> head_kinds_;
  std::vector<std::uint8_t> voters_;
  implementation pipeline_;
  typename implementation::step step_;
  std::unique_ptr<pipeline> full_;
  std::vector<step_input> all_prompt_;
  std::span<const float> worths_;  // of the rows that are appended next
};

}  // namespace freekv::examples
