// The reports of a layer's last step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/core/ids.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/policies/correction.hpp>
#include <span>

namespace freekv {

/// Report of a layer's last step with decode rows of one sequence; a prompt's rows leave it as it is, but
/// where a policy cuts prompts block by block.
struct step_report {
  /// (kv_heads): selected anew before it attended
  std::span<const std::uint8_t> corrected;
  /// (kv_heads): slices copied from the store, for this step or the next
  std::span<const std::int32_t> recalled;
  /// (kv_heads): those of `recalled` that attention waited for, by correction
  std::span<const std::int32_t> recalled_before_attention;
  /// (kv_heads): slices copied from the window ring
  std::span<const std::int32_t> promoted;
  /// (kv_heads, K): units attended as selected, ascending, pages unless they are less; K is selected_units,
  /// or what all query heads of a group select together at most, where each selects its own, and those pinned
  std::span<const std::int32_t> attended;
  /// (kv_heads): how many units `attended` has
  std::span<const std::int32_t> attended_count;
  /// (kv_heads, K, head_mask_words(group)): the mask of the query heads of the group that selected the unit
  /// and attend to it; empty where all of them do
  std::span<const std::uint32_t> attended_by{};
  /// (kv_heads): what the selection that the step before had made misses, with a correction by sample: NaN
  /// where there was none, empty with other corrections. A head that is `corrected` attends to another one.
  std::span<const missed_attention> missed{};
  /// (kv_heads, K), (kv_heads): of an evicting_pipeline those of `attended` that were coded, ascending, and
  /// how many; empty where its policy codes none
  std::span<const std::int32_t> coded{}, coded_count{};
};

/// Reports of a layer's last step, by sequence; a view. `State` is a layer_state that the host can read.
template <class State, bool counts_flags>
class layer_report {
 public:
  layer_report(const State& seen, const detail::sequence_table& sequences)
      : seen_(&seen), sequences_(&sequences) {}

  /// Report of a sequence's last step in the layer. Throws usage_error.
  step_report operator[](sequence_id id) const {
    sequences_->known(id);
    const State& s = *seen_;
    const auto sequence = static_cast<int>(id);
    const auto heads = to_size(s.heads.kv);
    const std::size_t at_head = s.head_index(sequence, 0), first = s.selected_index(sequence, 0);
    return {.corrected = {s.corrected + at_head, heads},
            .recalled = {s.recalled + at_head, heads},
            .recalled_before_attention = {s.recalled_before_attention + at_head, heads},
            .promoted = {s.promoted + at_head, heads},
            .attended = {s.attended + first, s.selected_index(0, 1) * heads},
            .attended_count = {s.attended_count + at_head, heads},
            .attended_by = {s.attended_by + s.mask_index(sequence, 0), s.mask_index(0, 1) * heads},
            .missed = {s.missed == nullptr ? nullptr : s.missed + at_head, s.missed == nullptr ? 0 : heads}};
  }
  /// Heads flagged for correction in the step begun last, over all its sequences, abandoned ones included. A
  /// device alone counts them.
  int flagged_heads() const requires counts_flags { return *seen_->flagged_count; }

 private:
  const State* seen_;
  const detail::sequence_table* sequences_;
};

}  // namespace freekv
