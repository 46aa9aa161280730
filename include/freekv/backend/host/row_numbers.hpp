// Queries and outputs of a step as the host computes with them, where the caller has them otherwise.
#pragma once

#include <cstddef>
#include <freekv/core/element.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <vector>

namespace freekv::host {

/// Floats, one row behind the other: the caller's own memory where it is that, else a copy, which grows to
/// the largest step's. A row has `width` numbers.
class row_numbers {
 public:
  /// Queries of all rows of a step, of which `rows` are there.
  const float* of(const step_queries& queries, const row_span& rows, int width) {
    if (queries.type == element_type::f32 && queries.stride == width)
      return static_cast<const float*>(queries.data);
    float* const copy = room(queries_, rows, width);
    for (int row = rows.first; row < rows.end(); ++row)
      visit_numbers(queries.row(row, 0), widening{copy + std::ptrdiff_t{row} * width, width});
    return copy;
  }
  /// Outputs that `rows` are attended to, before `write`.
  attention_output room_for(const attention_output& to, const row_span& rows, int width) {
    if (is_floats(to, width)) return to;
    return {room(outputs_, rows, width), to.lse, to.lse_per_nat};
  }
  void write(const attention_output& to, const row_span& rows, int width) const {
    if (is_floats(to, width)) return;
    const step_queries out{to.out, to.stride == 0 ? width : to.stride, to.type};
    for (int row = rows.first; row < rows.end(); ++row)
      visit_numbers(out.row(row, 0), rounding{outputs_.data() + std::ptrdiff_t{row} * width, width});
  }

 private:
  // Not lambdas, which a visit for host and device may not call.
  struct widening {
    float* to;
    int width;
    template <class From>
    FREEKV_HD void operator()(const From* from) const {
      for (int i = 0; i < width; ++i) to[i] = to_float(from[i]);
    }
  };
  struct rounding {
    const float* from;
    int width;
    template <class To>
    FREEKV_HD void operator()(const To* to) const {
      for (int i = 0; i < width; ++i) const_cast<To*>(to)[i] = from_float<To>(from[i]);
    }
  };
  static bool is_floats(const attention_output& to, int width) {
    return to.type == element_type::f32 && (to.stride == 0 || to.stride == width);
  }
  static float* room(std::vector<float>& numbers, const row_span& rows, int width) {
    const std::size_t size = to_size(rows.end()) * to_size(width);
    if (numbers.size() < size) numbers.resize(size);
    return numbers.data();
  }

  std::vector<float> queries_, outputs_;
};

}  // namespace freekv::host
