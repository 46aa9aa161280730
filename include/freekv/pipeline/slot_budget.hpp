// Blocks of selected slots: who holds how many of those that sequences share, and who gives up those that
// hold nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/pipeline/selection_state.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/storage/block_pool.hpp>
#include <span>
#include <string>

namespace freekv::detail {

/// Blocks of selected slots, by layer and sequence; a view of a pipeline_core.
template <class Core>
class slot_budget {
 public:
  explicit slot_budget(Core& core) : core_(core) {}

  /// Blocks in which a sequence has anything.
  int in_use(std::size_t layer, sequence_id id) const {
    const auto& s = core_.memory->layers[layer];
    return s.keeps_slots ? selected_blocks_in_use(core_.stages().read_back(s), static_cast<int>(id)) : 0;
  }
  int held(std::size_t layer, sequence_id id) const {
    return core_.memory->block_pools[layer].held(core_.sequences->slot_set_of(id));
  }
  /// Blocks that one sequence holds at most.
  int most(std::size_t layer) const { return core_.memory->block_pools[layer].most(); }
  /// True where a layer has fewer blocks left than one sequence may hold.
  bool is_short() const {
    return std::any_of(core_.memory->block_pools.begin(), core_.memory->block_pools.end(),
                       [](const block_pool& pool) { return pool.available() < pool.most(); });
  }

  /// Has a sequence hold `of_layer(layer)` blocks from now on; there is room for them.
  template <class Blocks>
  void hold(sequence_id id, const Blocks& of_layer) const {
    for (std::size_t layer = 0; layer < core_.memory->block_pools.size(); ++layer)
      core_.memory->block_pools[layer].hold(core_.sequences->slot_set_of(id), of_layer(layer));
  }
  void give_back(sequence_id id) const {
    hold(id, [](std::size_t) { return 0; });
  }

  /// Sees to it that each layer has `more(layer)` blocks for `who`: if it must, and `waits`, what is queued
  /// happens, and resident sequences that are not `spared` give up those that hold nothing. Throws
  /// pool_exhausted.
  template <class More, class Spared>
  void make_room(const char* who, const More& more, const Spared& spared, bool waits = true) const {
    auto& pools = core_.memory->block_pools;
    const auto lacking = [&] {
      std::size_t layer = 0;
      while (layer < pools.size() && more(layer) <= pools[layer].available()) ++layer;
      return layer;
    };
    if (lacking() == pools.size()) return;
    if (waits) core_.wait_for_steps(who);
    for (int i = 0; waits && i < core_.settings.capacity.max_sequences; ++i) {
      const sequence_id id{i};
      if (core_.sequences->slot_set_of(id) < 0 || spared(id)) continue;
      for (const auto& s : core_.memory->layers)
        if (s.keeps_slots) core_.stages().compact_slots(s, i);
      hold(id, [&](std::size_t layer) { return std::min(in_use(layer, id), held(layer, id)); });
    }
    if (const std::size_t layer = lacking(); layer < pools.size())
      throw pool_exhausted(
          "blocks of selected slots in layer " + std::to_string(layer), pools[layer].capacity(),
          pools[layer].capacity() - pools[layer].available(), who, more(layer),
          std::string(waits ? "" : "call reserve, which has others give up what holds nothing, ") +
              "let fewer sequences step together, preempt or release one, or raise selected_tokens");
  }
  /// Blocks for all that decode rows may select. Throws pool_exhausted, as `make_room`.
  void reserve(std::span<const step_input> rows, bool waits = true) const {
    const auto decodes = [](const step_input& r) { return r.phase == step_phase::decode && r.tokens > 0; };
    make_room(
        "the step",
        [&](std::size_t layer) {
          std::int64_t more = 0;
          for (const step_input& r : rows)
            if (decodes(r)) more += most(layer) - held(layer, r.sequence);
          return more;
        },
        [&](sequence_id id) {
          return std::any_of(rows.begin(), rows.end(),
                             [&](const step_input& r) { return decodes(r) && r.sequence == id; });
        },
        waits);
    for (const step_input& r : rows)
      if (decodes(r)) hold(r.sequence, [&](std::size_t layer) { return most(layer); });
  }

 private:
  Core& core_;
};

}  // namespace freekv::detail
