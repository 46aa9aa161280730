// What a decode step reports, and where another implementation may legitimately differ.
#pragma once

#include <cmath>
#include <vector>

#include "numbers.hpp"
#include "selection.hpp"

namespace oracle {

/// What a selection costs a KV head's selected slots.
struct movement {
  int recalled = 0;  // slices copied from the store: |wanted \ held|
  int promoted = 0;  // slices copied from the window ring
};

/// One KV head of one step.
struct row_result {
  std::vector<int> selected_before;  // carried into this step
  std::vector<int> selected;         // attended in this step
  std::vector<int> selected_next;    // carried into the next step
  // Where query heads select each for itself: what each of the group attended to; `selected` is all of it.
  std::vector<std::vector<int>> selected_by_head = {};
  bool corrected = false;
  double pooled_cosine = not_a_number;  // the smallest of the step's rows; NaN where one has none
  bool flag_forced = false;             // flagged by a rule other than a comparison
  bool norm_borderline = false;         // the flag may legitimately differ, see drift.hpp
  double flag_margin = infinity;        // of mass_deficit, see mass_comparison; infinite without comparison
  double flag_slack = 0.0;              // the part of it that rounding and doubts could use up
  int recalled = 0;                     // by correct and speculate together; 0 in place
  int promoted = 0;
  int recalled_before_attention = 0;  // by correct
  movement by_correct;
  movement by_speculate;
  double correct_margin = infinity;  // of the selection that correct made; infinite where it made none
  double speculate_margin = infinity;
  bool correct_firm = true;  // `selected` must agree if it was corrected; true where it was not
  bool speculate_firm = true;
  // Recalled and promoted must agree: what was held depends on flags and selections before this step, without
  // spare slots on the last of them, with spare slots on all since the slots were empty.
  bool movement_firm = true;
  double score_size = 0.0;  // the larger score_size of the two
  // The truncation before this step kept the selection and its candidates, or dropped them, beyond doubt. If
  // not, the step's candidates and window may differ, and with them everything about it.
  bool truncation_firm = true;
  std::vector<int> slots;  // the selected slots' pages after the step, -1 for an empty one; none in place
};

struct step_result {
  std::vector<double> out;       // (m, n_qo, d)
  std::vector<double> lse;       // (m, n_qo)
  std::vector<double> doubt;     // (m, n_qo, d): what float32's outputs may be off by
  std::vector<double> lse_doubt;  // (m, n_qo): what doubts of log-weights make of lse
  std::vector<row_result> rows;  // per KV head
};

/// Two float32 implementations must agree on this row's flag.
inline bool flag_is_firm(const row_result& row, double tau) {
  if (row.norm_borderline || !row.truncation_firm) return false;
  if (!(row.flag_margin > 1e-4 + row.flag_slack)) return false;
  return std::isnan(row.pooled_cosine) || std::fabs(row.pooled_cosine - tau) > cosine_error;
}

}  // namespace oracle
