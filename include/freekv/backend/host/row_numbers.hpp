// Queries and outputs of a step as the host computes with them, where the caller has them otherwise.
#pragma once

#include <cstddef>
#include <freekv/core/element.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <vector>

namespace freekv::host {

/// Floats, one row behind the other: the caller's own memory where it is that, else a copy, which grows to the largest
/// step's. A row has `width` numbers.
class row_numbers {
 public:
  /// Queries of all rows of a step, of which those of `entry` are there.
  const float* of(const step_queries& queries, const step_entry& entry, int width) {
    if (queries.type == element_type::f32 && queries.stride == width)
      return static_cast<const float*>(queries.data);
    float* const copy = room(queries_, entry, width);
    for (int row = entry.first_row; row < entry.first_row + entry.tokens; ++row)
      widen(queries.row(row, 0), width, copy + std::ptrdiff_t{row} * width);
    return copy;
  }
  /// Outputs that the rows of `entry` are attended to, before `write`.
  attention_output room_for(const attention_output& to, const step_entry& entry, int width) {
    if (is_floats(to, width)) return to;
    return {room(outputs_, entry, width), to.lse, to.lse_unit};
  }
  void write(const attention_output& to, const step_entry& entry, int width) const {
    if (is_floats(to, width)) return;
    for (int row = entry.first_row; row < entry.first_row + entry.tokens; ++row) {
      const std::int64_t first = row * (to.stride == 0 ? width : to.stride);
      for (int i = 0; i < width; ++i)
        put_number(to.out, to.type, first + i, outputs_[static_cast<std::size_t>(row * width + i)]);
    }
  }

 private:
  static void widen(const typed_numbers& from, int width, float* to) {
    switch (from.type) {
      case element_type::f16:
        return widen(static_cast<const half*>(from.data), width, to);
      case element_type::bf16:
        return widen(static_cast<const bfloat16*>(from.data), width, to);
      default:
        return widen(static_cast<const float*>(from.data), width, to);
    }
  }
  template <class From>
  static void widen(const From* from, int width, float* to) {
    for (int i = 0; i < width; ++i) to[i] = to_float(from[i]);
  }
  static bool is_floats(const attention_output& to, int width) {
    return to.type == element_type::f32 && (to.stride == 0 || to.stride == width);
  }
  static float* room(std::vector<float>& numbers, const step_entry& entry, int width) {
    const std::size_t size =
        static_cast<std::size_t>(entry.first_row + entry.tokens) * static_cast<std::size_t>(width);
    if (numbers.size() < size) numbers.resize(size);
    return numbers.data();
  }

  std::vector<float> queries_, outputs_;
};

}  // namespace freekv::host
