// Footprint of a pipeline, known before anything is allocated: bytes, and slots by layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/pipeline/memory_bytes.hpp>
#include <freekv/pipeline/pipeline_memory.hpp>
#include <freekv/pipeline/settings.hpp>
#include <freekv/storage/memory.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <span>
#include <vector>

namespace freekv {

/// Footprint of a retrieval pipeline with some settings, counted once: an engine asks for what it has to
/// have, and constructs the pipeline from it.
template <class Shape, class Pack>
class pipeline_footprint {
 public:
  using settings_type = pipeline_settings<Pack>;
  using backend_type = typename Pack::backend;
  using stages_type = typename backend_type::template stages<detail::layer_state<Shape>, settings_type>;
  using memory_type = detail::pipeline_memory<detail::layer_state<Shape>, settings_type, stages_type>;

  using blocks_type = std::span<const paged_blocks<typename detail::layer_state<Shape>::element>>;

  /// Allocates none of what it counts. With `blocks`, as the pipeline will be given them, what these leave to
  /// take: no slots, and on a device their ids. Throws settings_error.
  [[gnu::cold]] pipeline_footprint(const settings_type& given, backend_type& backend, blocks_type blocks = {})
      : settings_(checked_settings<Shape::head_dim>(given)) {
    const memory_type counted(settings_, backend, nullptr, nullptr, nullptr, blocks);
    bytes_ = counted.bytes;
    slow_bytes_ = counted.slow_bytes;
    fast_bytes_ = counted.fast_bytes;
    for (std::size_t layer = 0; layer < counted.layers.size(); ++layer) {
      const detail::layer_state<Shape>& s = counted.layers[layer];
      slots_per_sequence_.push_back(s.keeps_slots ? s.slots.total() : 0);
      slots_.push_back(s.keeps_slots ? std::int64_t{settings_.capacity.max_resident} * s.slots.fixed() +
                                           counted.block_pools[layer].capacity()
                                     : 0);
    }
  }

  /// The settings with defaults filled in.
  const settings_type& configuration() const { return settings_; }
  /// Exact bytes of each part, and of all.
  const memory_bytes& bytes() const { return bytes_; }
  /// Bytes of the one block that is taken from each of `memory_resources`.
  std::size_t slow_bytes() const { return slow_bytes_; }
  std::size_t fast_bytes() const { return fast_bytes_; }
  /// Slots that a sequence has in a layer at most, and so the room that its `table` needs; 0 where it has
  /// none.
  int slots_per_sequence(int layer) const { return slots_per_sequence_.at(to_size(layer)); }
  /// Slots of all resident sequences in a layer, and so blocks of an engine's own tensor:
  /// `slots_per_sequence` times max_resident, or fewer with `selected_tokens`.
  std::int64_t slots(int layer) const { return slots_.at(to_size(layer)); }

 private:
  settings_type settings_;
  memory_bytes bytes_;
  std::size_t slow_bytes_ = 0, fast_bytes_ = 0;
  std::vector<int> slots_per_sequence_;  // by layer
  std::vector<std::int64_t> slots_;
};

}  // namespace freekv
