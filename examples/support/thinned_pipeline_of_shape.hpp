// A method whose prompts are thinned before it has them, as a pipeline that is chosen at run time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <freekv/core/size.hpp>
#include <map>

#include "pipeline.hpp"

namespace freekv::examples {

/// The rows that a sequence begins with, if they are a prompt's, come in one step and are thinned to a share,
/// in all layers; those that slide take the last of them instead. Beside it full attention of all rows is
/// kept, for `attend_full`: what was not kept is part of it. Its bytes are not the method's; of the time of
/// an `append` it takes a copy of the rows. Lengths are the text's, and numbers in reports those of kept
/// rows.
template <class Shape>
class thinned_pipeline_of_shape final : public pipeline {
  using element = typename Shape::element_type;
  static constexpr int d = Shape::head_dim;

 public:
  thinned_pipeline_of_shape(const pipeline_options& options, host_backend& backend) : options_(options) {
    check_thinning(options.method);
    pipeline_ = make_pipeline_of<Shape>(of_kept(options), backend);
    full_ = make_pipeline_of<Shape>(everything(options), backend);
    kept_.resize(to_size(options.layers));
  }

  sequence_id open() override {
    const sequence_id id = pipeline_->open();
    prompts_[id] = {};
    return full_->open(), id;  // both give the lowest that is free
  }
  sequence_id fork(sequence_id parent) override {
    const sequence_id id = pipeline_->fork(parent);
    prompts_[id] = prompts_[parent];
    return full_->fork(parent), id;
  }
  void truncate(sequence_id id, int tokens) override {
    prompt& of = prompts_[id];
    if (tokens > 0 && tokens < of.tokens && of.kept < of.tokens)
      throw usage_error("truncate: " + std::to_string(tokens) + " tokens are part of a prompt of " +
                        std::to_string(of.tokens) + " that was thinned to " + std::to_string(of.kept) +
                        "; keep all of it, or nothing");
    pipeline_->truncate(id, tokens >= of.tokens ? tokens - (of.tokens - of.kept) : tokens);
    full_->truncate(id, tokens);
    if (tokens < of.tokens) of = {tokens, tokens};
  }
  void preempt(sequence_id id) override {
    pipeline_->preempt(id);
    full_->preempt(id);
  }
  void restore(sequence_id id) override {
    pipeline_->restore(id);
    full_->restore(id);
  }
  void release(sequence_id id) override {
    pipeline_->release(id);
    full_->release(id);
  }
  int tokens(sequence_id id) const override { return full_->tokens(id); }
  std::int32_t free_pages() const override { return pipeline_->free_pages(); }
  bool observes_prompts() const override { return true; }
  std::span<const std::int32_t> kept_tokens(int layer) const override { return kept_.at(to_size(layer)); }

  void begin_step(std::span<const step_input> rows) override {
    step_.assign(rows.begin(), rows.end());
    thinned_.assign(rows.begin(), rows.end());
    begins_.clear();
    for (step_input& r : thinned_) {
      begins_.push_back(r.phase == step_phase::prefill && full_->tokens(r.sequence) == 0);
      if (begins_.back()) r.tokens = kept_of(options_, r.tokens);
    }
    pipeline_->begin_step(thinned_);
    all_prompt_ = step_;
    for (step_input& r : all_prompt_) r.phase = step_phase::prefill;  // so that none of them has to attend
    full_->begin_step(all_prompt_);
  }
  void append(int layer, std::span<const float> keys, std::span<const float> values,
              std::span<const float> queries) override {
    if (thins()) {  // by keys as they are kept
      const auto stored = [](std::span<const float> numbers) {
        std::vector<element> elements(numbers.size());
        std::transform(numbers.begin(), numbers.end(), elements.begin(), from_float<element>);
        return elements;
      };
      const std::vector<element> stored_keys = stored(keys), stored_values = stored(values);
      append_thinned(layer, {stored_keys, stored_values, queries});
    } else {
      pipeline_->append(layer, keys, values, queries);
    }
    full_->append(layer, keys, values, queries);
  }
  void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                     std::span<const float> queries) override {
    const auto elements = [](std::span<const std::byte> bytes) {
      return std::span(reinterpret_cast<const element*>(bytes.data()), bytes.size() / sizeof(element));
    };
    if (thins()) {
      append_thinned(layer, {elements(keys), elements(values), queries});
    } else {
      pipeline_->append_stored(layer, keys, values, queries);
    }
    full_->append_stored(layer, keys, values, queries);
  }
  void correct(int layer) override { pipeline_->correct(layer); }
  void attend(int layer, std::span<float> out, std::span<float> lse) override {
    pipeline_->attend(layer, out, lse);
  }
  void attend_full(int layer, std::span<float> out, std::span<float> lse) override {
    full_->attend_full(layer, out, lse);
  }
  void end_step() override {
    pipeline_->end_step();
    full_->end_step();
    for (std::size_t i = 0; i < step_.size(); ++i)
      if (begins_[i]) prompts_[step_[i].sequence] = {step_[i].tokens, thinned_[i].tokens};
  }
  bool abandon_step() override { return full_->abandon_step(), pipeline_->abandon_step(); }
  void synchronize() override { pipeline_->synchronize(); }
  step_report report(int layer, sequence_id id) const override { return pipeline_->report(layer, id); }
  const memory_bytes& bytes() const override { return pipeline_->bytes(); }
  std::size_t slice_bytes() const override { return pipeline_->slice_bytes(); }
  std::size_t summary_bytes() const override { return pipeline_->summary_bytes(); }

 private:
  /// The rows that a sequence began with, and how many of them were kept.
  struct prompt {
    int tokens = 0, kept = 0;
  };
  static int kept_of(const pipeline_options& o, int tokens) {
    const auto share = std::int64_t{std::lround(static_cast<double>(o.method.thin) * tokens)};
    const std::int64_t least = std::max<std::int64_t>(std::int64_t{o.budget.sink} + o.budget.window,
                                                      o.sliding_layers.empty() ? 0 : o.sliding_window);
    return static_cast<int>(std::min<std::int64_t>(std::max(share, least), tokens));
  }
  static pipeline_options of_kept(pipeline_options o) {
    if (o.max_prompt > 0) {
      const int left_out = o.max_prompt - kept_of(o, o.max_prompt);
      o.max_tokens -= left_out;
      o.max_prompt -= left_out;
    }
    o.method.thin = 1.0f;
    return o;
  }
  static pipeline_options everything(pipeline_options o) {
    o.method = {.plan = "complete"};
    o.budget = {0, o.page, 1};
    o.selected_tokens = 0;
    o.in_place = true;
    o.layout = "nhd";
    o.store_file.clear();
    return o;
  }

  bool thins() const { return std::find(begins_.begin(), begins_.end(), true) != begins_.end(); }
  /// Gives the method a step's rows, those of prompts thinned.
  void append_thinned(int layer, const prompt_rows<element>& of) {
    const std::size_t key_row = to_size(options_.kv_heads * d), query_row = to_size(options_.query_heads * d);
    std::vector<element> to_keys, to_values;
    std::vector<float> to_queries;
    std::size_t at = 0, into = 0;  // rows
    for (std::size_t i = 0; i < step_.size(); ++i) {
      const std::size_t rows = to_size(step_[i].tokens), kept = to_size(thinned_[i].tokens);
      to_keys.resize((into + kept) * key_row);
      to_values.resize((into + kept) * key_row);
      const auto keys = of.keys.subspan(at * key_row, rows * key_row),
                 values = of.values.subspan(at * key_row, rows * key_row);
      const auto queries =
          of.queries.empty() ? of.queries : of.queries.subspan(at * query_row, rows * query_row);
      const auto kept_keys = std::span(to_keys).subspan(into * key_row),
                 kept_values = std::span(to_values).subspan(into * key_row);
      if (begins_[i]) {
        thin(layer, {keys, values, queries}, {kept_keys, kept_values});
      } else {
        std::copy(keys.begin(), keys.end(), kept_keys.begin());
        std::copy(values.begin(), values.end(), kept_values.begin());
      }
      // Of a prompt's rows, which do not attend, queries are of no use, but have their place.
      const auto last = queries.last(std::min(kept * query_row, queries.size()));
      to_queries.insert(to_queries.end(), last.begin(), last.end());
      at += rows, into += kept;
    }
    pipeline_->append_stored(layer, std::as_bytes(std::span(to_keys)), std::as_bytes(std::span(to_values)),
                             to_queries);
  }

  void thin(int layer, const prompt_rows<element>& of, thinned_rows<element> to) {
    const std::size_t key_row = to_size(options_.kv_heads * d);
    const int tokens = static_cast<int>(of.keys.size() / key_row),
              kept = static_cast<int>(to.keys.size() / key_row);
    std::vector<std::int32_t>& numbers = kept_[to_size(layer)];
    numbers.resize(to_size(kept * options_.kv_heads));
    if (!options_.sliding_layers.empty() && options_.sliding_layers[to_size(layer)]) {
      std::copy_n(of.keys.end() - std::ssize(to.keys), to.keys.size(), to.keys.begin());
      std::copy_n(of.values.end() - std::ssize(to.values), to.values.size(), to.values.begin());
      for (std::size_t i = 0; i < numbers.size(); ++i)
        numbers[i] = tokens - kept + static_cast<int>(i) / options_.kv_heads;
      return;
    }
    to.tokens = numbers;
    const std::size_t voting = to_size(std::min(tokens, rows_that_thin) * options_.query_heads * d);
    thin_prompt<Shape, element>({.model = {1, options_.query_heads, options_.kv_heads},
                                 .kept = kept,
                                 .sink = options_.budget.sink,
                                 .window = options_.budget.window,
                                 .scale = options_.scale,
                                 .soft_cap = options_.soft_cap},
                                {of.keys, of.values, of.queries.last(std::min(voting, of.queries.size()))},
                                to);
  }

  pipeline_options options_;
  std::unique_ptr<pipeline> pipeline_, full_;
  std::map<sequence_id, prompt> prompts_;
  std::vector<step_input> step_, thinned_,
      all_prompt_;                               // as it is, as the method has it, and as `full_` has it
  std::vector<bool> begins_;                     // whether an entry of the step is a prompt that is thinned
  std::vector<std::vector<std::int32_t>> kept_;  // by layer, (kept, kv_heads), of the last prompt
};

}  // namespace freekv::examples
