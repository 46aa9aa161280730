// The host's half of a device's stages: it fills packets with a step's entries and with what has changed in
// the tables, for steps that begin at once and for replays of captured ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/trace_range.cuh>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/pipeline/tables.hpp>
#include <initializer_list>
#include <span>
#include <vector>

namespace freekv::device {

/// Uploads of a pipeline's steps and tables, on the compute stream of a `Backend`.
template <class State, class Settings, class Backend>
class table_uploads {
 public:
  using tables = device_tables<State>;

  /// Uploads the step and what has changed in the tables, and no head of any layer is counted as flagged yet;
  /// or, where it has begun already, what is left of it. There is room in the ring.
  step_view begin_step(std::span<const step_entry> entries, bool has_begun = false) {
    const trace_range range("freekv begin step");
    if (entries.empty()) return ring_.empty_step();  // nothing is queued
    step_bounds most;
    const std::int32_t patches = fill_packet(entries, has_begun, most);
    return ring_.upload(patches, most.max_with(backend_->launch_bounds()), backend_->compute());
  }

  // Captured steps:

  /// Captures the upload of the step that each replay takes, `most` it at most.
  step_view capture_step(const step_bounds& most) { return ring_.capture(most, backend_->compute()); }
  /// The capture of a step of such bounds has not been abandoned, and replays may take it.
  void end_capture(const step_bounds& most) { captured_.push_back(most); }
  /// Fills in what `most` leaves out: rows and pages, from its sequences.
  step_bounds captured_bounds(step_bounds most) const {
    const int rows = settings_->capacity.max_decode_rows, p = settings_->page.tokens;
    if (most.rows == 0) most.rows = most.entries * rows;
    most.pages = std::max(most.pages, (p - 1 + std::min(rows, most.rows) + p - 1) / p);
    most.decodes = most.copies = true;
    return most;
  }
  /// True where a step has been captured that is large enough.
  bool is_captured(step_bounds brings) const {
    return std::any_of(captured_.begin(), captured_.end(),
                       [&](const step_bounds& most) { return brings.fits(most); });
  }
  /// True where a step can be planned at once; a stream that is asked hands on what its driver has not yet.
  bool can_plan() const { return !ring_.full() || (backend_->compute().idle(), !ring_.full()); }
  void wait_to_plan() const { ring_.wait(backend_->compute()); }
  /// Plans the step for the next replay.
  void plan_step(std::span<const step_entry> entries) {
    const trace_range range("freekv plan step");
    step_bounds most;
    fill_packet(entries, false, most);
  }
  /// Steps that are planned and that the device has not taken; throws replay_error if the order of replays
  /// was wrong.
  std::int64_t steps_ahead() const {
    ring_.check_order();
    return ring_.ahead();
  }

 protected:
  table_uploads(Backend& of, const Settings& s, carver& page_locked, carver& fast)
      : backend_(&of), settings_(&s), ring_(s.capacity.max_resident, most_patches(s), fast, page_locked) {}

  /// Uploads the tables that never change, of all layers, and empties the ring, before the first step.
  void begin(const tables& of, std::span<const State> layers) {
    tables_ = &of;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      flagged_counts_.push_back(layers[i].flagged_count);
      copy(of.head_kinds[i].device, of.head_kinds[i].host, of.head_kinds[i].size);
      copy(of.block_ids[i].device, of.block_ids[i].host, of.block_ids[i].size);
      const auto& blocks = of.selected_blocks[i];
      blocks_there_.emplace_back(blocks.size, -1);
      std::fill_n(blocks.host, blocks.size, -1);
      if (blocks.size > 0)
        check(cudaMemsetAsync(blocks.device, 0xff, blocks.size * sizeof(std::int32_t), compute()),
              "cudaMemsetAsync");
    }
    for (const auto& floats : of.layer_floats)
      copy(const_cast<float*>(floats.device), floats.host, floats.size);
    ring_.clear(backend_->compute());
  }
  template <class T>
  void copy(T* to, const T* from, std::size_t count) const {
    if (count > 0)
      check(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyHostToDevice, compute()),
            "cudaMemcpyAsync");
  }
  /// Queues an upload of what the tables say of resident sequences: of the last one `pages` pages, too.
  void upload_sequences(std::initializer_list<int> sequences, int pages = 0) {
    ring_.wait(backend_->compute());
    patch_list patches{ring_.patches()};
    for (const int& sequence : sequences)
      patch_sequence(patches, sequence, 0, &sequence == sequences.end() - 1 ? pages : 0);
    ring_.plan({}, patches.count, {});
    ring_.upload(patches.count, {}, backend_->compute());
  }

  const tables& on_host() const { return *tables_; }

 private:
  cudaStream_t compute() const { return backend_->compute().get(); }
  static std::int64_t most_patches(const Settings& s) {
    std::int64_t blocks = 0;
    for (int layer = 0; layer < s.model.layers; ++layer) blocks += s.max_selected(layer) + s.spare_slots();
    return std::int64_t{s.store_pages()} + std::int64_t{s.capacity.max_resident} * (3 + blocks) +
           s.model.layers;
  }
  /// Fills the ring's next packet; returns its patches. `most`: what it brings.
  std::int32_t fill_packet(std::span<const step_entry> entries, bool has_begun, step_bounds& most) {
    patch_list patches{ring_.patches()};
    const int p = settings_->page.tokens;
    for (const step_entry& entry : entries) {
      most = most.with(entry, p);
      patch_sequence(patches, entry.sequence, entry.before / p, settings_->pages_for(entry.after()));
    }
    if (!has_begun)
      for (std::int32_t* const flagged : flagged_counts_) patches.add(flagged, 0);
    ring_.plan(entries, patches.count, most);
    return patches.count;
  }
  /// Patches of a packet, the first `count` of `data`.
  struct patch_list {
    table_patch* data;
    std::int32_t count = 0;

    void add(std::int32_t* place, std::int32_t value) { data[count++] = {place, value}; }
    void add(const host_and_device<std::int32_t>& table, std::size_t i) {
      add(table.device + i, table.host[i]);
    }
  };
  /// Patches what the tables say of a resident sequence, its pages from `first` up to `end`.
  void patch_sequence(patch_list& patches, int sequence, int first, int end) {
    for (int page = first; page < end; ++page)
      patches.add(tables_->page_tables, to_size(sequence) * to_size(settings_->max_pages()) + to_size(page));
    patches.add(tables_->slot_sets, to_size(sequence));
    for (std::size_t layer = 0; layer < blocks_there_.size(); ++layer)
      patch_blocks(patches, layer, tables_->slot_sets.host[sequence]);
  }
  /// Patches what the device does not know of the blocks of a slot set.
  void patch_blocks(patch_list& patches, std::size_t layer, std::int32_t set) {
    const auto& table = tables_->selected_blocks[layer];
    const std::size_t most = table.size / to_size(settings_->capacity.max_resident);
    for (std::size_t i = to_size(set) * most; i < (to_size(set) + 1) * most; ++i)
      if (std::int32_t& there = blocks_there_[layer][i]; there != table.host[i]) {
        patches.add(table, i);
        there = table.host[i];
      }
  }

  Backend* backend_;
  const Settings* settings_;
  const tables* tables_ = nullptr;
  step_ring ring_;
  std::vector<std::vector<std::int32_t>> blocks_there_;  // by layer, as the device has them
  std::vector<std::int32_t*> flagged_counts_;            // by layer
  std::vector<step_bounds> captured_;                    // of steps
};

}  // namespace freekv::device
