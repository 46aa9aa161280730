// Eviction by what the engine says that tokens are worth (`kv_rows::worths`), as gates and heads that a model
// was trained with say it. What they compute is the engine's.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/policies/eviction.hpp>
#include <string>
#include <string_view>

namespace freekv {

/// TRIM-KV (Cache What Lasts, arXiv 2512.03324): a gate gives each token a beta from 0 to 1 when it comes,
/// what is retained of token i is beta^(t - i) at row t, and the token of which least is retained leaves.
/// Betas are the worths that are given; above 1 they count as 1, and at 0, below or NaN nothing is ever
/// retained, at the token's own row neither. Compared are logarithms, (t - i) ln(beta), so that no retention
/// is rounded to 0; of tokens with beta 1 the first leaves. t is the number of the last row, when a prompt
/// ends that of its last token, as the paper has it; its code adds 2, so that a token may leave in its own
/// row. A prompt is cut to the budget at once when it ends, which is not what cuts row by row would leave, as
/// retentions may pass each other.
struct trim_kv {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::worths>;
  static constexpr std::string_view name = "trim_kv";

  struct unit_state {
    float log_beta;
    std::int32_t token, row;  // its number, and that of the last row
  };
  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }
  FREEKV_HD constexpr int observed_rows() const { return 0; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const { return most.budget + 1; }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const { return at.budget; }
  FREEKV_HD constexpr bool protects(int, const eviction_moment&) const { return false; }
  FREEKV_HD constexpr void on_append(unit_state& unit, int row) const { unit = {0.0f, row, row}; }
  FREEKV_HD void on_given(unit_state& unit, float beta) const {
    unit.log_beta = beta >= 1.0f ? 0.0f : beta > 0.0f ? ::logf(beta) : -infinity;
  }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int) const {
    unit.row = votes.tokens - 1;
  }
  FREEKV_HD constexpr void on_attended(unit_state& unit, float, int row) const { unit.row = row; }
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const {
    if (unit.log_beta == -infinity) return order_bits(unit.log_beta);
    return order_bits(static_cast<float>(unit.row - unit.token) * unit.log_beta);
  }
};

/// Locret (arXiv 2410.01805): a trained head gives each token a score when it comes, and those of least score
/// leave, but never the latest. Scores are the worths that are given, whatever numbers they are; NaN is below
/// all, and of those alike the first leaves. Flags and scores of other trained gates and heads (LookaheadKV,
/// Attention-Gate, NGC) run through it too, where an engine knows them when it appends the row. The first
/// `sink` tokens may be protected as well. Unlike the paper's, a prompt is cut at once when it ends, where
/// Locret cuts behind each chunk of it, decoded tokens leave as a prompt's do, and the latest are a share of
/// the budget.
struct given_worths {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::validate, hook::values, hook::worths>;
  static constexpr std::string_view name = "given_worths";
  int sink = 0;          ///< tokens
  float recent = 0.25f;  ///< share of the budget for the latest tokens

  struct unit_state {
    float given;
  };
  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }
  FREEKV_HD constexpr int observed_rows() const { return 0; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const { return most.budget + 1; }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const { return at.budget; }
  FREEKV_HD constexpr bool protects(int token, const eviction_moment& at) const {
    return token < sink || token >= at.tokens - latest(at.budget);
  }
  FREEKV_HD constexpr void on_append(unit_state& unit, int) const { unit.given = 0.0f; }
  FREEKV_HD constexpr void on_given(unit_state& unit, float worth) const { unit.given = worth; }
  FREEKV_HD constexpr void on_prompt(unit_state&, const prompt_votes&, int) const {}
  FREEKV_HD constexpr void on_attended(unit_state&, float, int) const {}
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.given); }

  std::string values() const {
    return detail::decimal(recent) + (sink > 0 ? ", sink " + std::to_string(sink) : "");
  }
  void validate(const eviction_limits& most) const {
    if (!(recent >= 0.0f && recent < 1.0f))
      throw settings_error("given_worths: recent of " + detail::decimal(recent) +
                           " is not a share from 0 to below 1; 0.25 unless said");
    if (sink < 0 || sink >= most.budget - latest(most.budget))
      throw settings_error("given_worths: a sink of " + std::to_string(sink) +
                           " tokens is not from 0 to below what a budget of " + std::to_string(most.budget) +
                           " has beside the latest " + std::to_string(latest(most.budget)));
  }

 private:
  FREEKV_HD constexpr int latest(int budget) const {
    return static_cast<int>(recent * static_cast<float>(budget));
  }
};

static_assert(eviction_policy<trim_kv> && eviction_policy<given_worths>);

}  // namespace freekv
