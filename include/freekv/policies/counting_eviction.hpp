// Eviction by what is counted for each unit as rows attend to it, or when a prompt ends.
//
// These policies decide for each KV head alone and see a group's attention as the mean over its query heads.
// That is what differs here from papers that decide for a query head (H2O, SnapKV), for a layer (TOVA) or by
// the group's maximum (RaaS in FreeKV's comparison).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/policies/detail/group_codes.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/policies/integer_codecs.hpp>
#include <functional>
#include <string>
#include <string_view>

namespace freekv {

/// H2O (arXiv 2306.14048, section 4 and algorithm 1): the tokens that have had most attention of all rows so
/// far, and the latest. Half of the budget is recent, as published. At a prompt's end all of it is cut to the
/// budget at once, by the attention of all its rows, as the published code does.
struct h2o {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "h2o";
  float recent = 0.5f;  ///< share of the budget for the latest tokens

  struct unit_state {
    float mass;  // of all rows since the token was there
  };
  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }
  FREEKV_HD constexpr int observed_rows() const { return every_prompt_row; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const { return most.budget + 1; }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const { return at.budget; }
  FREEKV_HD constexpr bool protects(int token, const eviction_moment& at) const {
    return token >= at.tokens - static_cast<int>(recent * static_cast<float>(at.budget));
  }
  FREEKV_HD constexpr void on_append(unit_state& unit, int) const { unit.mass = 0.0f; }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    unit.mass = votes.shares[token];
  }
  FREEKV_HD constexpr void on_attended(unit_state& unit, float share, int) const { unit.mass += share; }
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.mass); }

  std::string values() const { return detail::decimal(recent); }
  void validate(const eviction_limits&, std::string_view who = name) const {
    if (!(recent >= 0.0f && recent < 1.0f))
      throw settings_error(std::string(who) + ": recent of " + detail::decimal(recent) +
                           " is not a share from 0 to below 1; 0.5 as published");
  }
};

/// MiKV (arXiv 2402.18096): no token leaves; those beyond the budget, which h2o would have leave, are kept in
/// 4 bits with a scale for each token. A token is coded once and stays so, whatever attention it has later.
/// Unlike the paper's, outlier channels of keys are not balanced before they are coded, what is not coded is
/// in the pipeline's element and not in fewer bits too, and the latest half of the budget is always as it is,
/// as of h2o. Slots are made for the longest sequence: one more than the budget as they are, the others
/// coded.
struct mikv : h2o {
  using hooks = hook_list<hook::demote, hook::validate, hook::values>;
  static constexpr std::string_view name = "mikv";

  constexpr int capacity(const eviction_limits& most) const { return most.max_prompt + most.max_generated; }
  constexpr int kept(const eviction_moment&) const { return every_token; }
  constexpr int4_token codec() const { return {}; }
  constexpr int originals(const eviction_moment& at) const { return at.budget; }
  constexpr int most_originals(const eviction_limits& most) const { return most.budget + 1; }
  void validate(const eviction_limits& most) const { h2o::validate(most, name); }
};

/// Q-Hitter (MLSys 2024, "A Better Token Oracle for Efficient LLM Inference via Sparse-Quantized KV Cache",
/// as its published code has it): h2o all of whose tokens are in 4 bits, and which keeps tokens that suit
/// this. Of the budget a `heavy` share is for the tokens of most attention so far, a `recent` share for the
/// latest, and the rest for those of the most `alpha` a + (1 - alpha) (1 - (k + v) / 2): a token's attention,
/// and how far coding takes its key and its value from what they were (the length of the difference), each
/// from 0 to 1 between the least and the most that the head's tokens have.
///
/// The published code takes these from all heads of a layer, of errors when a prompt ends and later from each
/// row alone; here they are those of the tokens that the KV head holds. Its codes have a zero point, where
/// here `int4_token` is symmetric; it rounds a token before its own row attends to it, here a token is coded
/// behind that. Its cache is 0.2 of the prompt, of which the shares are those here.
struct q_hitter : h2o {
  using hooks = hook_list<hook::demote, hook::rank, hook::rows, hook::validate, hook::values>;
  static constexpr std::string_view name = "q_hitter";
  constexpr q_hitter() : h2o{0.25f} {}
  float heavy = 0.35f, alpha = 0.5f;

  struct unit_state : h2o::unit_state {
    float key_error, value_error;  // of the token in 4 bits
  };
  void on_row(unit_state& unit, const float* key, const float* value, int head_dim) const {
    unit.key_error = coding_error(key, head_dim);
    unit.value_error = coding_error(value, head_dim);
  }
  void rank(const counted_units<unit_state>& held, const eviction_moment& at, float* worths) const {
    int heaviest = static_cast<int>(heavy * static_cast<float>(at.budget)), others = 0;
    for (int i = 0; i < held.units; ++i)
      if (!protects(held.tokens[i], at)) worths[others++] = held.states[i].mass;
    heaviest = std::min(heaviest, others);
    float least = HUGE_VALF;  // mass of a heavy token
    if (heaviest > 0) {
      std::nth_element(worths, worths + (heaviest - 1), worths + others, std::greater<float>());
      least = worths[heaviest - 1];
      heaviest -=
          static_cast<int>(std::count_if(worths, worths + others, [&](float mass) { return mass > least; }));
    }
    const range masses(held, [](const unit_state& unit) { return unit.mass; });
    const range of_keys(held, [](const unit_state& unit) { return unit.key_error; });
    const range of_values(held, [](const unit_state& unit) { return unit.value_error; });
    for (int i = held.units; i-- > 0;) {  // of tokens alike the latest are heavy
      const unit_state& unit = held.states[i];
      const float errors = of_keys.part(unit.key_error) + of_values.part(unit.value_error);
      worths[i] = alpha * masses.part(unit.mass) + (1.0f - alpha) * (1.0f - errors / 2.0f);
      if (protects(held.tokens[i], at)) continue;
      if (unit.mass > least || (unit.mass == least && heaviest-- > 0)) worths[i] = 2.0f;
    }
  }

  constexpr int4_token codec() const { return {}; }
  constexpr int originals(const eviction_moment&) const { return 0; }
  constexpr int most_originals(const eviction_limits&) const { return 1; }

  std::string values() const {
    return h2o::values() + ", heavy " + detail::decimal(heavy) + ", alpha " + detail::decimal(alpha);
  }
  void validate(const eviction_limits& most) const {
    h2o::validate(most, name);
    if (!(heavy >= 0.0f && heavy + recent <= 1.0f) || !(alpha >= 0.0f && alpha <= 1.0f))
      throw settings_error("q_hitter: heavy of " + detail::decimal(heavy) + " beside a recent of " +
                           detail::decimal(recent) + " and an alpha of " + detail::decimal(alpha) +
                           "; give shares of the budget whose sum is at most 1, and one from 0 to 1; 0.35, "
                           "0.25 and 0.5 as published");
  }

 private:
  /// The least and the most of units' numbers; NaN is neither.
  struct range {
    float least = HUGE_VALF, most = -HUGE_VALF;
    template <class Number>
    range(const counted_units<unit_state>& held, const Number& number) {
      for (int i = 0; i < held.units; ++i) {
        least = std::min(least, number(held.states[i]));
        most = std::max(most, number(held.states[i]));
      }
    }
    /// From 0 to 1; 1 of NaN too.
    float part(float of) const { return of < most ? (of - least) / (most - least) : 1.0f; }
  };
  static float coding_error(const float* row, int count) {
    using codes = detail::symmetric<4>::groups<float, 1>;
    detail::extremes<1> seen;
    for (int x = 0; x < count; x += 8) seen.add<8>(row + x);
    codes group;
    group.fit(seen);
    double squares = 0.0;
    for (int x = 0; x < count; ++x) {
      const double apart =
          static_cast<double>(group.number(0, group.code(0, row[x]))) - static_cast<double>(row[x]);
      squares += apart * apart;
    }
    return static_cast<float>(std::sqrt(squares));
  }
};

/// TOVA (arXiv 2401.06104, section 3.2): the token that the current row attends to least leaves, the row's
/// own too if it is that; nothing else is remembered. At a prompt's end its last row decides.
struct tova {
  using policy_kind = eviction_kind;
  static constexpr std::string_view name = "tova";

  struct unit_state {
    float share;  // of the last row
  };
  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }
  FREEKV_HD constexpr int observed_rows() const { return 1; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const { return most.budget + 1; }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const { return at.budget; }
  FREEKV_HD constexpr bool protects(int, const eviction_moment&) const { return false; }
  FREEKV_HD constexpr void on_append(unit_state& unit, int) const { unit.share = 0.0f; }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    unit.share = votes.shares[token];
  }
  FREEKV_HD constexpr void on_attended(unit_state& unit, float share, int) const { unit.share = share; }
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.share); }
};

/// SnapKV (arXiv 2404.14469, section 4, listing 1): at a prompt's end its last `window` rows vote for the
/// tokens before them, a vote spreads to the neighbours (maximum over `kernel` tokens), and the best stay,
/// with the window, within the budget. Tokens that are decoded are all kept, as published, so slots are made
/// for budget and max_generated tokens.
struct snapkv {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "snapkv";
  int window = 32;
  int kernel = 7;

  struct unit_state {
    float votes;
  };
  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }
  FREEKV_HD constexpr int observed_rows() const { return window; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const {
    return most.budget + most.max_generated;
  }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const {
    return at.prompt_ends ? at.budget : every_token;
  }
  FREEKV_HD constexpr bool protects(int token, const eviction_moment& at) const {
    return token >= at.prompt - window;
  }
  FREEKV_HD constexpr void on_append(unit_state& unit, int) const { unit.votes = 0.0f; }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    take_largest(unit, votes, token, votes.tokens - window);
  }
  FREEKV_HD constexpr void on_attended(unit_state&, float, int) const {}
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.votes); }

  std::string values() const { return std::to_string(window) + ", " + std::to_string(kernel); }
  void validate(const eviction_limits& most) const {
    detail::check_window("snapkv", window, 32, kernel, 7, most);
  }

 protected:
  /// The largest of a token's and its neighbours' votes, among the first `voted` tokens.
  FREEKV_HD constexpr void take_largest(unit_state& unit, const prompt_votes& votes, int token,
                                        int voted) const {
    const int first = token > kernel / 2 ? token - kernel / 2 : 0;
    const int end = voted < token + kernel / 2 + 1 ? voted : token + kernel / 2 + 1;
    for (int t = first; t < end; ++t)
      if (votes.shares[t] > unit.votes) unit.votes = votes.shares[t];
  }
};

/// DapQ (arXiv 2603.11564): snapkv whose window of rows is behind the prompt. The rows are those of pseudo
/// tokens at the positions that decoded tokens will have, whose queries are near theirs whatever the tokens
/// are; an engine runs `window` of them behind the prompt and gives their queries, and no keys and values, to
/// `evicting_pipeline::observe`. They vote on all of the prompt, so none of it stays but by votes. The
/// kernel, and that it takes the largest, are snapkv's. Without probe rows the prompt's last ones vote.
struct dapq : snapkv {
  static constexpr std::string_view name = "dapq";

  FREEKV_HD constexpr bool protects(int, const eviction_moment&) const { return false; }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    take_largest(unit, votes, token, votes.tokens);
  }
  void validate(const eviction_limits& most) const {
    detail::check_window("dapq", window, 32, kernel, 7, most);
  }
};

/// PyramidKV (arXiv 2406.02069): snapkv whose budget falls from layer to layer, as much above the mean in
/// the first as below it in the last, which has a `beta`th of it beside the window. Where that would be more
/// than the prompt has, the first layer keeps the prompt and the slope is less. Layers are those that forget;
/// of one alone it is snapkv with another window.
struct pyramid_kv : snapkv {
  static constexpr std::string_view name = "pyramid_kv";
  constexpr pyramid_kv() : snapkv{8, 7} {}
  int beta = 20;

  FREEKV_HD constexpr int capacity(const eviction_limits& most) const {
    const int largest = budget_of(most.budget, most.max_prompt, most.layer, most.layers);
    return (largest > most.budget ? largest : most.budget) + most.max_generated;
  }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const {
    return at.prompt_ends ? budget_of(at.budget, at.prompt, at.layer, at.layers) : every_token;
  }

  std::string values() const { return snapkv::values() + ", beta " + std::to_string(beta); }
  void validate(const eviction_limits& most) const {
    detail::check_window("pyramid_kv", window, 8, kernel, 7, most);
    if (beta < 1)
      throw settings_error("pyramid_kv: a beta of " + std::to_string(beta) + " is below 1; 20 as published");
  }

 private:
  FREEKV_HD constexpr int budget_of(int mean, int prompt, int layer, int layers) const {
    const int steepest = (mean - window) - (mean - window) / beta, room = prompt - mean;
    const std::int64_t slope = steepest < room ? steepest : room;
    if (layers < 2 || slope <= 0) return mean;
    return mean + static_cast<int>(slope * (layers - 1 - 2 * layer) / (layers - 1));
  }
};

/// LazyEviction (arXiv 2506.15969): a token that has at least `threshold` of a row's attention is active
/// then, and the longest that it has been between two such rows is its interval. Every `window` decode rows,
/// where there are more than the budget, those leave that have been inactive for longest in their own
/// intervals, but never the latest `window`. The first of the paper's two scores alone ranks tokens, H1,
/// which falls with inactivity / interval; the second weighs in its ablation (table 4) 0.4 to 1.2 points of
/// accuracy to the first one's 4 to 5.6. A prompt is cut to the budget when it ends, its last row then
/// counting like a decode row: the paper cuts it in the first window's end.
struct lazy_eviction {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "lazy_eviction";
  int window = 64;  ///< decode rows; the paper takes the 80th percentile of intervals, below 175 on MATH-500
  float threshold = 1e-4f;

  struct unit_state {
    /// the last active row, the longest interval, the last row that attended
    std::int32_t active, interval, row;
  };
  FREEKV_HD constexpr int unit_tokens() const { return 1; }
  FREEKV_HD constexpr bool stages_prompt() const { return true; }
  FREEKV_HD constexpr int observed_rows() const { return 1; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const { return most.budget + window; }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const {
    return (at.tokens - at.prompt) % window == 0 ? at.budget : every_token;
  }
  FREEKV_HD constexpr bool protects(int token, const eviction_moment& at) const {
    return token >= at.tokens - window;
  }
  FREEKV_HD constexpr void on_append(unit_state& unit, int row) const { unit = {row, 0, row}; }
  FREEKV_HD constexpr void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    on_attended(unit, votes.shares[token], votes.tokens - 1);
  }
  FREEKV_HD constexpr void on_attended(unit_state& unit, float share, int row) const {
    unit.row = row;
    if (!(share >= threshold)) return;
    if (row - unit.active > unit.interval) unit.interval = row - unit.active;
    unit.active = row;
  }
  /// One that has no interval yet is older than all that have one, unless it is active now.
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const {
    const float inactive = static_cast<float>(unit.row - unit.active);
    return inactive == 0.0f     ? order_bits(0.0f)
           : unit.interval == 0 ? 0
                                : order_bits(-inactive / static_cast<float>(unit.interval));
  }

  std::string values() const { return std::to_string(window) + ", " + detail::decimal(threshold); }
  void validate(const eviction_limits& most) const {
    if (window < 1 || window >= most.budget)
      throw settings_error("lazy_eviction: a window of " + std::to_string(window) +
                           " rows is not from 1 to below the budget of " + std::to_string(most.budget) +
                           " tokens");
    if (std::isnan(threshold)) throw settings_error("lazy_eviction: threshold is NaN; 1e-4 as published");
  }
};

/// RaaS (arXiv 2502.11147, section 3): a page that has at least `threshold` of a row's attention gets the
/// row's time stamp, and beyond the budget the page with the oldest stamp leaves. A page's attention is that
/// of its tokens, exactly, where the paper estimates it from a representative of its keys.
///
/// A prompt is cut to the budget when it ends, as in FreeKV's comparison: pages of the first `sink` and of
/// the latest `window` tokens always stay, and of the others those that its last row attends to most. Until a
/// decode row stamps them these are older than any decoded page, the least attended first; those of a prompt
/// that fits, the earliest first. With `keeps_prompt`, as the paper has it, the prompt's pages all stay and
/// count, and there is no sink and window; where they leave less than `room` of the budget, decoded tokens
/// have `room` still, which the paper leaves open: memory then grows with the prompt.
struct raas {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::validate, hook::values>;
  static constexpr std::string_view name = "raas";
  int page = 16;  ///< tokens
  float threshold = 1e-4f;
  int room = 128;  ///< tokens, where the prompt is kept
  bool keeps_prompt = false;
  /// tokens, where the prompt is not kept: whole pages of the sink, pages that begin in the window
  int sink = 64, window = 128;

  struct unit_state {
    std::int32_t stamp;  // the last row that it mattered to; below 0: none yet, by the prompt's attention
  };
  FREEKV_HD constexpr int unit_tokens() const { return page; }
  FREEKV_HD constexpr bool stages_prompt() const { return !keeps_prompt; }
  FREEKV_HD constexpr int observed_rows() const { return keeps_prompt ? 0 : 1; }
  FREEKV_HD constexpr int capacity(const eviction_limits& most) const {
    return page + kept({most.budget, most.max_prompt, most.max_prompt, true});
  }
  FREEKV_HD constexpr int kept(const eviction_moment& at) const {
    if (!keeps_prompt) return at.budget;
    const int least = (at.prompt + page - 1) / page * page + room;
    return at.budget > least ? at.budget : least;
  }
  FREEKV_HD constexpr bool protects(int token, const eviction_moment& at) const {
    if (keeps_prompt) return token < at.prompt;
    const bool fills = at.prompt_ends && token + page > at.tokens;  // it is the last, and goes on
    return token + page <= sink || token >= at.tokens - window || fills;
  }
  FREEKV_HD constexpr void on_append(unit_state& unit, int row) const { unit.stamp = row; }
  FREEKV_HD void on_prompt(unit_state& unit, const prompt_votes& votes, int token) const {
    if (keeps_prompt) return;
    float share = 0.0f;
    for (int t = token; t < votes.tokens && t < token + page; ++t) share += votes.shares[t];
    constexpr std::int32_t oldest = INT32_MIN;
    unit.stamp = oldest + static_cast<std::int32_t>(order_bits(share) & 0x7fffffffu);  // no share is below 0
  }
  FREEKV_HD constexpr void on_attended(unit_state& unit, float share, int row) const {
    if (share >= threshold) unit.stamp = row;
  }
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const {
    return static_cast<std::uint32_t>(unit.stamp) ^ 0x80000000u;  // orders like the stamp
  }

  std::string values() const {
    return "page " + std::to_string(page) + ", " + detail::decimal(threshold) +
           (keeps_prompt ? ", prompt kept" : "");
  }
  void validate(const eviction_limits& most) const {
    if (sink < 0 || window < 0)
      throw settings_error("raas: a sink of " + std::to_string(sink) + " and a window of " +
                           std::to_string(window) + " tokens; give 0 or more");
    if (!keeps_prompt && page >= 1 && std::int64_t{sink / page} + window / page + 1 > most.budget / page)
      throw settings_error("raas: a budget of " + std::to_string(most.budget) + " tokens leaves no page of " +
                           std::to_string(page) + " beside a sink of " + std::to_string(sink) +
                           " and a window of " + std::to_string(window) + "; give a page or more");
    if (page < 1 || room < page || room > eviction_limits::most_tokens)
      throw settings_error("raas: pages of " + std::to_string(page) + " tokens and room for " +
                           std::to_string(room) +
                           " decoded tokens; give at least 1, and room for a page, at most " +
                           std::to_string(eviction_limits::most_tokens));
    if (std::isnan(threshold)) throw settings_error("raas: threshold is NaN; 1e-4 as published");
  }
};

static_assert(eviction_policy<h2o> && eviction_policy<mikv> && eviction_policy<q_hitter> &&
              eviction_policy<tova> && eviction_policy<snapkv> && eviction_policy<dapq> &&
              eviction_policy<pyramid_kv> && eviction_policy<lazy_eviction> && eviction_policy<raas>);

}  // namespace freekv
