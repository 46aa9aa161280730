#include "pipeline_beside_sliding.hpp"

#include <algorithm>
#include <freekv/core/size.hpp>

namespace freekv::examples {

namespace {

pipeline_options of_whole_layers(pipeline_options o) {
  const auto first_slide = o.sliding_layers.begin();
  const int leading = std::min(o.complete_layers, o.layers);
  o.complete_layers -= static_cast<int>(std::count(first_slide, first_slide + leading, true));
  o.layers -= static_cast<int>(std::count(first_slide, o.sliding_layers.end(), true));
  o.sliding_layers.clear();
  o.sliding_window = 0;
  return o;
}

pipeline_options of_sliding_layers(pipeline_options o) {
  o.layers = static_cast<int>(std::count(o.sliding_layers.begin(), o.sliding_layers.end(), true));
  o.sliding_layers.assign(to_size(o.layers), true);
  o.complete_layers = 0;
  // A method that evicts has room for max_tokens behind a prompt as long, unless max_prompt says how long it
  // is.
  if (o.max_prompt == 0) o.max_tokens *= 2;
  o.budget = {0, o.page, 1};
  o.method = {.plan = "complete"};
  return o;
}

memory_bytes sum_of(memory_bytes a, const memory_bytes& b) {
  for (const auto part :
       {&memory_bytes::store, &memory_bytes::file, &memory_bytes::complete, &memory_bytes::slots,
        &memory_bytes::summaries, &memory_bytes::codec, &memory_bytes::state, &memory_bytes::staging,
        &memory_bytes::device_store, &memory_bytes::host_copies})
    a.*part += b.*part;
  return a;
}

}  // namespace

pipeline_beside_sliding::pipeline_beside_sliding(const pipeline_options& options, host_backend& backend,
                                                 maker make)
    : method_(make(of_whole_layers(options), backend)),
      sliding_(make(of_sliding_layers(options), backend)),
      bytes_(sum_of(method_->bytes(), sliding_->bytes())) {
  int whole = 0, sliding = 0;
  for (const bool slides : options.sliding_layers)
    places_.push_back(slides ? place{sliding_.get(), sliding++} : place{method_.get(), whole++});
}

sequence_id pipeline_beside_sliding::open() {
  const sequence_id id = method_->open();
  return sliding_->open(), id;  // both give the lowest that is free
}
sequence_id pipeline_beside_sliding::fork(sequence_id parent) {
  const sequence_id id = method_->fork(parent);
  return sliding_->fork(parent), id;
}
void pipeline_beside_sliding::truncate(sequence_id id, int tokens) {
  method_->truncate(id, tokens);
  sliding_->truncate(id, tokens);
}
void pipeline_beside_sliding::preempt(sequence_id id) {
  method_->preempt(id);
  sliding_->preempt(id);
}
void pipeline_beside_sliding::restore(sequence_id id) {
  method_->restore(id);
  sliding_->restore(id);
}
void pipeline_beside_sliding::release(sequence_id id) {
  method_->release(id);
  sliding_->release(id);
}

void pipeline_beside_sliding::begin_step(std::span<const step_input> rows) {
  method_->begin_step(rows);
  sliding_->begin_step(rows);
}
void pipeline_beside_sliding::append(int layer, std::span<const float> keys, std::span<const float> values,
                                     std::span<const float> queries) {
  const place& at = places_.at(to_size(layer));
  at.of->append(at.layer, keys, values, queries);
}
void pipeline_beside_sliding::append_stored(int layer, std::span<const std::byte> keys,
                                            std::span<const std::byte> values,
                                            std::span<const float> queries) {
  const place& at = places_.at(to_size(layer));
  at.of->append_stored(at.layer, keys, values, queries);
}
void pipeline_beside_sliding::observe(sequence_id id, int layer, std::span<const float> queries) {
  const place& at = places_.at(to_size(layer));
  if (at.of == method_.get()) at.of->observe(id, at.layer, queries);
}
void pipeline_beside_sliding::select_by(int layer, std::span<const float> queries) {
  const place& at = places_.at(to_size(layer));
  if (at.of == method_.get()) at.of->select_by(at.layer, queries);
}
void pipeline_beside_sliding::correct(int layer) {
  const place& at = places_.at(to_size(layer));
  at.of->correct(at.layer);
}
void pipeline_beside_sliding::attend(int layer, std::span<float> out, std::span<float> lse) {
  const place& at = places_.at(to_size(layer));
  at.of->attend(at.layer, out, lse);
}
void pipeline_beside_sliding::attend_full(int layer, std::span<float> out, std::span<float> lse) {
  const place& at = places_.at(to_size(layer));
  at.of->attend_full(at.layer, out, lse);
}
void pipeline_beside_sliding::end_step() {
  method_->end_step();
  sliding_->end_step();
}
bool pipeline_beside_sliding::abandon_step() {
  const bool sliding_had_one = sliding_->abandon_step();
  return method_->abandon_step() || sliding_had_one;
}
void pipeline_beside_sliding::synchronize() {
  method_->synchronize();
  sliding_->synchronize();
}
step_report pipeline_beside_sliding::report(int layer, sequence_id id) const {
  const place& at = places_.at(to_size(layer));
  return at.of->report(at.layer, id);
}

}  // namespace freekv::examples
