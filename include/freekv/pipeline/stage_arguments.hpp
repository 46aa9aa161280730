// Arguments of stages: a step's entries, their rows, and where outputs go.
#pragma once

#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/element.hpp>
#include <freekv/core/element_rows.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/pipeline/step_input.hpp>

namespace freekv::detail {

/// Rows of a step that one entry brings: `count` from `first` on.
struct row_span {
  int first = 0;
  int count = 0;
  constexpr int end() const { return first + count; }
};

/// One sequence's part of a step, as stages see it: `tokens` rows appended behind `before`, the first of them
/// row `first_row` of the step.
struct step_entry {
  int sequence = 0;
  int before = 0;
  int tokens = 0;
  int first_row = 0;
  step_phase phase = step_phase::decode;
  /// copy on write: the page that the sequence shares with others, whose rows are copied first
  store_page_id shared_page = store_page_id::none;
  // of decode rows alone:
  int candidates_at = 0;  // length at which their candidates are taken; the step before has fixed it
  int kept_row = -1;      // row of the step before that drift is judged against; -1: there is no selection
  int decode_step = 0;    // since the last prompt
  FREEKV_HD constexpr int after() const { return before + tokens; }
  constexpr row_span rows() const { return {first_row, tokens}; }
};

/// Candidates of a decode entry: units from `first` on, of which its own step selects among the first `now`,
/// and the step behind it among the first `next`.
struct step_candidates {
  int first = 0, now = 0, next = 0;
  FREEKV_HD constexpr int most() const { return now > next ? now : next; }
};

/// Queries of a step's rows, `stride` elements apart: (rows, query_heads, head_dim).
struct step_queries {
  const void* data = nullptr;
  std::int64_t stride = 0;
  element_type type = element_type::f32;

  FREEKV_HD bool empty() const { return data == nullptr; }
  /// The numbers of a row from element `first` on.
  FREEKV_HD typed_numbers row(std::int64_t nth, std::int64_t first) const {
    return {static_cast<const char*>(data) + (nth * stride + first) * bytes_of(type), type};
  }
};

/// Rows of a step as stages see `kv_rows`.
template <class In>
struct step_rows {
  const In* keys = nullptr;
  const In* values = nullptr;
  std::int64_t key_stride = 0, value_stride = 0;
  step_queries queries{};
  step_queries selecting{};  // by which heads are corrected and select: `queries`, or others
};

/// Outputs of attention: `out` (rows, query_heads, head_dim) of a type, `lse` (rows, query_heads), which may
/// be null.
struct attention_output {
  void* out = nullptr;
  float* lse = nullptr;
  float lse_per_nat = 1.0f;  // what a nat of lse is written as
  std::int64_t stride = 0;   // elements from a row of `out` to the next; 0 as well: one behind the other
  element_type type = element_type::f32;

  /// Outputs, which are floats, one row behind the other.
  float* floats() const { return static_cast<float*>(out); }
};

/// Output of the log-masses of a step's rows: (rows, query_heads, entries).
struct log_mass_output {
  float* log_masses = nullptr;
  int entries = 0;       // of a row's list, or more
  float per_nat = 1.0f;  // what a nat is written as
};

}  // namespace freekv::detail
