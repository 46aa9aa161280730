// HARD-KV: budgets by a calibrated share of the attention of a window of rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/policies/detail/neighbours.hpp>
#include <freekv/policies/detail/temperature.hpp>
#include <freekv/policies/eviction.hpp>
#include <functional>
#include <string>
#include <string_view>

namespace freekv {

/// HARD-KV (arXiv 2606.28831): a head keeps as many tokens as its attention needs. Of each of the last
/// `window` rows the fewest tokens stay that have `p` of its softmax, over the largest score of the group; as
/// methods rank tokens by other numbers than scores, here by the largest of `kernel` neighbours as SnapKV,
/// these are brought to a temperature first at which as many tokens of a row have `p` as of its scores
/// (section 3). What any row selects stays, with the first `sink` tokens and the window, within the budget;
/// of more those with the largest share. It is done when a prompt ends and then every `interval` decode rows,
/// where there are more tokens than the budget.
///
/// With a kernel of 1, which needs no temperature, and a budget that holds all that is selected, no row of
/// the window loses more than -ln p of its log-sum-exp. Unlike the paper's, the temperature is found anew
/// each time, for a head's rows together (it is solved once there and kept; figure 17: it is stable), tokens
/// between two cuts and those of the cut lie in the same slots (its cascade's tiers are those of an engine's
/// page tables), and nothing is merged (appendix E; `hard_kv_pairs` and `hard_kv_merge` do).
struct hard_kv {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "hard_kv";
  float p = 0.9f;
  int window = 32;
  int interval = 128;
  int kernel = 7;  ///< 1: scores as they are
  int sink = 1;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return window; }
  constexpr int capacity(const eviction_limits& most) const { return most.budget + interval; }
  constexpr int kept(const eviction_moment& at) const {
    return (at.tokens - at.prompt) % interval == 0 ? at.budget : every_token;
  }
  constexpr bool protects(int token, const eviction_moment& at) const {
    return token < sink || token >= at.tokens - window;
  }
  constexpr group_rule group() const { return group_rule::largest_score; }
  constexpr bool observes_decoding() const { return true; }
  int observe(const observed_units& held, const eviction_moment& at, float* worths) const {
    const int n = held.units;
    const double temperature = calibrate(held);
    std::fill_n(worths, n, -1.0f);
    for (int r = 0; r < held.rows; ++r)
      if (const int count = held.counts[2 * r]; count > 0)
        select(held, r, detail::descending_masses(held.scratch_row(r), count, temperature), worths);
    int stay = 0;
    for (int i = 0; i < n; ++i) stay += worths[i] >= 0.0f || protects(held.tokens[i], at);
    return stay;
  }
  /// The temperature at which a head's rows select. Each row's numbers become what its tokens are ranked by,
  /// its scratch the same descending, and its counts how many there are and how many have `p` of its scores.
  double calibrate(const observed_units& held) const {
    const int n = held.units;
    const auto descending = [&](int r, const float* numbers) {
      float* const end =
          std::copy_if(numbers, numbers + n, held.scratch_row(r), [](float z) { return z > -infinity; });
      std::sort(held.scratch_row(r), end, std::greater<float>());
      return static_cast<int>(end - held.scratch_row(r));
    };
    std::int32_t* const counts = held.counts;
    for (int r = 0; r < held.rows; ++r) {
      float* const row = held.row(r);
      const int of_scores = descending(r, row);
      counts[2 * r] = of_scores;
      counts[2 * r + 1] =
          of_scores == 0 ? 0 : detail::descending_masses(held.scratch_row(r), of_scores, 1.0).fewest(p);
      if (kernel > 1) {
        detail::pool_largest(row, n, kernel, held.scratch_row(r));
        std::copy_n(held.scratch_row(r), n, row);
        descending(r, row);
      }
    }
    if (kernel == 1) return 1.0;
    return detail::calibrated_temperature(
        held.rows, p, [&](int r) { return held.scratch_row(r); }, [&](int r) { return counts[2 * r]; },
        [&](int r) { return counts[2 * r + 1]; });
  }

  std::string values() const {
    return detail::decimal(p) + ", window " + std::to_string(window) + ", every " + std::to_string(interval) +
           (kernel == 1 ? "" : ", kernel " + std::to_string(kernel));
  }
  void validate(const eviction_limits& most) const {
    detail::check_window(name, window, 32, kernel, 7, most);
    if (!(p > 0.0f && p <= 1.0f))
      throw settings_error("hard_kv: p of " + detail::decimal(p) +
                           " is not a share above 0, at most 1; 0.9 as published");
    if (interval < 1 || interval > eviction_limits::most_tokens || sink < 0 || sink > most.budget - window)
      throw settings_error("hard_kv: an interval of " + std::to_string(interval) +
                           " decode rows and a sink of " + std::to_string(sink) +
                           " tokens beside a window of " + std::to_string(window) + "; give 1 to " +
                           std::to_string(eviction_limits::most_tokens) +
                           " rows, and a sink within the budget of " + std::to_string(most.budget));
  }

 private:
  /// The fewest of a row's best that have `p`, of those alike the first.
  void select(const observed_units& held, int r, const detail::descending_masses& best, float* worths) const {
    const int selected = best.fewest(p);
    const float least = best.scores[selected - 1];
    int alike = selected - static_cast<int>(std::lower_bound(best.scores, best.scores + best.count, least,
                                                             std::greater<float>()) -
                                            best.scores);
    for (int i = 0; i < held.units; ++i) {
      const float score = held.row(r)[i];
      if (!(score > least || (score == least && alike-- > 0))) continue;
      worths[i] = std::max(worths[i], static_cast<float>(best.weight_of(score) / best.sum));
    }
  }
};
static_assert(eviction_policy<hard_kv>);

}  // namespace freekv
