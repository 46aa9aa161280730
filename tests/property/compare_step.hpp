// One decode step of the library beside the oracle's: agreement as docs/contract.md, 13.8 states it.
#pragma once

#include <sstream>
#include <vector>

#include "../agreement.hpp"
#include "random_case.hpp"

namespace tests {

/// What was compared, so that a test can require that it was.
struct coverage {
  long steps = 0, firm_selections = 0, firm_own_selections = 0, compared_outputs = 0, corrected = 0,
       recalled = 0, promoted = 0;
};

template <class V>
std::string listed(const V& pages) {
  std::ostringstream text;
  for (const auto page : pages) text << " " << page;
  return text.str();
}

inline std::string listed_by_head(const std::vector<std::vector<int>>& own) {
  std::string text;
  for (std::size_t g = 0; g < own.size(); ++g) text += sentence("; head ", g, listed(own[g]));
  return text;
}

/// What the comparison of a sequence's next step has to know of those before: by KV head, whether the
/// selection carried into it must agree.
class step_comparison {
 public:
  explicit step_comparison(int kv_heads) : carried_firm_(static_cast<std::size_t>(kv_heads), true) {}

  /// The selection is dropped.
  void drop() { carried_firm_.assign(carried_firm_.size(), true); }

  /// `out` (rows, query_heads, head_dim) and `lse` (rows, query_heads) are the library's. Throws
  /// `disagreement`, which begins with `where`.
  void compare(const std::string& where, const random_case& c, const oracle::step_result& want,
               const freekv::step_report& report, std::span<const float> out, std::span<const float> lse,
               coverage& seen) const {
    const auto n = [](int x) { return static_cast<std::size_t>(x); };
    const int heads = c.options.kv_heads, group = c.options.query_heads / heads;
    const int rows = static_cast<int>(want.lse.size()) / c.options.query_heads;
    const auto stride = report.attended.size() / n(heads);
    ++seen.steps;
    for (int h = 0; h < heads; ++h) {
      const auto& row = want.rows[n(h)];
      const auto at_head = sentence(where, ", KV head ", h, ": ");
      const bool corrected = report.corrected[n(h)] != 0;
      if (corrected != row.corrected && oracle::flag_is_firm(row, static_cast<double>(c.options.method.tau)))
        throw disagreement{
            sentence(at_head, "corrected is ", corrected, ", pooled cosine ", row.pooled_cosine)};
      const bool same_flag = corrected == row.corrected && row.truncation_firm;
      const auto first = report.attended.begin() + static_cast<long>(n(h) * stride);
      const std::vector<int> got(first, first + report.attended_count[n(h)]);
      const auto own = selected_by_head(report, h, group);
      const bool equal = got == row.selected && (got.empty() || own == row.selected_by_head);
      const bool firm = same_flag && (row.corrected ? row.correct_firm : carried_firm_[n(h)]);
      if (!equal && firm)
        throw disagreement{sentence(at_head, "attended", listed(got), " for", listed(row.selected),
                                    listed_by_head(own), own.empty() ? "" : " for",
                                    listed_by_head(row.selected_by_head))};
      seen.firm_selections += firm && !row.selected.empty();
      seen.firm_own_selections += firm && row.selected.size() > 1 && row.selected_by_head.size() > 1;
      if (equal && row.truncation_firm)
        for (int r = 0; r < rows; ++r)
          for (int g = h * group; g < (h + 1) * group; ++g) {
            compare_output(sentence(at_head, "query head ", g, " of row ", r), r * c.options.query_heads + g,
                           c.options.head_dim, want, out, lse);
            ++seen.compared_outputs;
          }
      // Recall is that of this selection and the next: both, and what was held, must be equal. The next is
      // known to be where it is firm.
      if (equal && carried_firm_[n(h)] && same_flag && row.speculate_firm && row.movement_firm &&
          (report.recalled[n(h)] != row.recalled || report.promoted[n(h)] != row.promoted ||
           report.recalled_before_attention[n(h)] != row.recalled_before_attention))
        throw disagreement{sentence(
            at_head, "recalled ", report.recalled[n(h)], " (", report.recalled_before_attention[n(h)],
            " before attention) and promoted ", report.promoted[n(h)], " for ", row.recalled, " (",
            row.recalled_before_attention, ") and ", row.promoted)};
      seen.corrected += corrected;
      seen.recalled += report.recalled[n(h)];
      seen.promoted += report.promoted[n(h)];
    }
  }

  /// The sequence has taken this step; the next is compared.
  void follow(const oracle::step_result& want) {
    for (std::size_t h = 0; h < carried_firm_.size(); ++h) {
      const auto& row = want.rows[h];
      carried_firm_[h] =
          row.speculate_firm && (row.correct_firm || !row.corrected || row.selected != row.selected_next);
    }
  }

 private:
  static void compare_output(const std::string& where, int row, int head_dim, const oracle::step_result& want,
                             std::span<const float> out, std::span<const float> lse) {
    const auto n = [](int x) { return static_cast<std::size_t>(x); };
    if (!close(lse[n(row)], want.lse[n(row)], 1e-5) &&
        !(std::fabs(lse[n(row)] - want.lse[n(row)]) <= want.lse_doubt[n(row)]))
      throw disagreement{sentence(where, ": lse is ", lse[n(row)], " for ", want.lse[n(row)])};
    for (int i = 0; i < head_dim; ++i) {
      const auto at = n(row * head_dim + i);
      if (!close(out[at], want.out[at], 2e-5) && !(std::fabs(out[at] - want.out[at]) <= want.doubt[at]))
        throw disagreement{sentence(where, ": output ", i, " is ", out[at], " for ", want.out[at])};
    }
  }

  std::vector<bool> carried_firm_;
};

}  // namespace tests
