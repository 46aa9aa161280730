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
  bool corrected = false;
  double pooled_cosine = not_a_number;  // NaN where none was computed
  bool flag_forced = false;             // flagged by a rule other than the comparison with tau
  bool norm_borderline = false;         // the flag may legitimately differ, see drift.hpp
  int recalled = 0;                     // by correct and speculate together; 0 in place
  int promoted = 0;
  movement by_correct;
  movement by_speculate;
  double correct_margin = infinity;  // of the selection that correct made; infinite where it made none
  double speculate_margin = infinity;
  bool correct_firm = true;  // is_firm of that selection; true where none was made
  bool speculate_firm = true;
  double score_size = 0.0;  // the larger score_size of the two
};

struct step_result {
  std::vector<double> out;       // (n_qo, d)
  std::vector<double> lse;       // (n_qo)
  std::vector<row_result> rows;  // per KV head
};

/// Two float32 implementations must agree on this row's flag.
inline bool flag_is_firm(const row_result& row, double tau) {
  if (row.norm_borderline) return false;
  return std::isnan(row.pooled_cosine) || std::fabs(row.pooled_cosine - tau) > 1e-5;
}

}  // namespace oracle
