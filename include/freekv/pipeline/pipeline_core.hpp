// Parts that a retrieval pipeline and its step share: memory, sequences, the step's entries, and what is
// queued.
#pragma once

#include <algorithm>
#include <cstddef>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/pipeline/call_order.hpp>
#include <freekv/pipeline/footprint.hpp>
#include <freekv/pipeline/pipeline_memory.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/pipeline/settings.hpp>
#include <freekv/pipeline/slot_budget.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace freekv::detail {

/// State of a retrieval pipeline, and what both it and its step do with it.
template <class Shape, class Pack>
struct pipeline_core {
  using state = layer_state<Shape>;
  using footprint_type = pipeline_footprint<Shape, Pack>;
  using settings_type = pipeline_settings<Pack>;
  using backend_type = typename Pack::backend;
  using stages_type = typename footprint_type::stages_type;
  using memory_type = typename footprint_type::memory_type;
  using step_view = typename stages_type::step;
  using step_bounds = typename stages_type::bounds;
  static constexpr int head_dim = Shape::head_dim;
  static_assert(retrieval_backend<backend_type, state, settings_type>,
                "a pipeline's backend has the streams and stages of freekv/pipeline/backend.hpp");

  [[gnu::cold]] pipeline_core(const footprint_type& needs, backend_type& processor,
                              const memory_resources& from,
                              std::span<const paged_blocks<typename state::element>> blocks)
      : settings(needs.configuration()),
        backend(processor),
        recalled(to_size(settings.model.layers)),
        order(settings.model.layers) {
    std::size_t slow_bytes = 0, fast_bytes = 0;
    {  // with these blocks, which hold the slots and are checked, whatever `needs` was counted with
      const memory_type counted(settings, backend, nullptr, nullptr, nullptr, blocks);
      slow_bytes = counted.slow_bytes;
      fast_bytes = counted.fast_bytes;
    }
    if (settings.capacity.store_file)
      file = settings.capacity.store_file->open(*settings.capacity.store_file, needs.bytes().file);
    slow_block = memory_block(*from.slow, slow_bytes);
    fast_block = memory_block(*from.fast, fast_bytes);
    memory.emplace(settings, backend, slow_block.data(), fast_block.data(), file.get(), blocks);
    memory->stages.begin(memory->tables, memory->layers);
    sequences.emplace(sequence_limits{.page_tokens = settings.page.tokens,
                                      .max_tokens = settings.capacity.max_tokens,
                                      .max_sequences = settings.capacity.max_sequences,
                                      .max_resident = settings.capacity.max_resident,
                                      .max_decode_rows = settings.capacity.max_decode_rows,
                                      .store_pages = settings.store_pages()},
                      memory->tables.page_tables.host, memory->tables.slot_sets.host);
    entries.reserve(to_size(settings.capacity.max_sequences));
  }
  pipeline_core(const pipeline_core&) = delete;
  pipeline_core& operator=(const pipeline_core&) = delete;

  settings_type settings;
  backend_type& backend;
  std::vector<typename backend_type::event> recalled;  // by layer: recall of its last step
  call_order order;
  std::unique_ptr<slice_file> file;
  memory_block slow_block, fast_block;
  std::optional<memory_type> memory;
  std::optional<sequence_table> sequences;
  // The step in progress has these.
  std::vector<step_entry> entries;
  step_view step;        // the same, as stages take it
  step_queries queries;  // of the layer appended to last
  int rows = 0;
  int longest = 0, longest_prompt = 0;  // tokens of its sequences, or of those that bring prompt rows
  bool in_capture = false;              // it is captured
  bool recalls_in_capture = false;      // it has used the recall stream

  auto& stages() { return memory->stages; }
  auto& stages() const { return memory->stages; }
  const state& layer_of(int layer, const char* call) const {
    order.expect_layer(layer, call);
    return memory->layers[to_size(layer)];
  }
  bool any_decode() const {
    return in_capture || std::any_of(entries.begin(), entries.end(),
                                     [](const auto& e) { return e.phase == step_phase::decode; });
  }

  /// Waits until everything queued has happened.
  void synchronize() {
    backend.compute().synchronize();
    backend.recall().synchronize();
  }
  /// Waits as `synchronize`, so for all steps; throws usage_error where some are planned whose replay is not
  /// queued.
  void wait_for_steps(const char* call) {
    expect_no_capture(call);
    synchronize();
    check_order(call);
    if (const std::int64_t ahead = stages().steps_ahead(); ahead > 0)
      throw usage_error(std::string(call) + ": steps are planned whose replay is not queued, " +
                        std::to_string(ahead) + " of them; launch the captured step first");
  }
  /// Throws usage_error where nothing can be read: while a step is captured, or where replays were in the
  /// wrong order.
  void check_order(const char* call) const {
    if (in_capture)
      throw usage_error(std::string(call) + ": a step is being captured, and the host reads nothing of it");
    stages().steps_ahead();
  }
  /// Throws usage_error where the engine captures the compute stream, and a call would queue its work in the
  /// graph, or wait.
  void expect_no_capture(const char* call) const {
    if (backend.compute().is_capturing())
      throw usage_error(
          std::string(call) +
          ": the compute stream is captured; end the capture first, as this happens now and not "
          "in a replay");
  }
  /// The compute stream waits for the recall of steps before, once.
  void join_recall() {
    for (auto& of_layer : recalled) {
      backend.compute().wait(of_layer);
      of_layer = {};
    }
  }
  /// Prepares a change of a sequence: what is queued comes before what the compute stream is given from now
  /// on, so that pages, slots and blocks that are given back can be taken at once; and there is room for the
  /// change, where it `uploads`. On the host, whose compute stream is the caller, what is queued has
  /// happened.
  void before_change(const char* call, bool uploads = true) {
    check_order(call);
    expect_no_capture(call);
    if (uploads) stages().wait_to_plan();
    join_recall();
  }
  [[gnu::cold]] void release(sequence_id id) {
    sequences->known(id);
    before_change("release");
    if (sequences->is_resident(id)) slot_budget(*this).give_back(id);
    sequences->release(id);
    stages().forget(static_cast<int>(id));
  }

  void abandon_step() noexcept {
    order.leave_step();
    in_capture = false;
    try {
      if (!entries.empty()) wait_for_steps("abandon");
      for (const step_entry& entry : entries) release(sequence_id{entry.sequence});
    } catch (const error&) {  // of a device, behind which the pipeline has to go
    }
  }
};

}  // namespace freekv::detail
