// Eviction: which tokens leave a KV head for good, where methods keep no complete store. A policy has a few
// bytes of state for each unit that a head keeps, which is a token or a page, and functions that bring it up
// to date.
//
// Policies of this header decide for each KV head alone and see a group's attention as the mean over its
// query heads. Where the papers decide for a query head (H2O, SnapKV), for a layer (TOVA) or by the group's
// maximum (RaaS in FreeKV's comparison), that is what differs here.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/config.hpp>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace freekv {

/// Limits of an evicting pipeline, in tokens: what a KV head keeps, and the most that a sequence brings.
/// Layers are those that forget, counted among themselves.
struct eviction_limits {
  int budget = 0;
  int max_prompt = 0;
  int max_generated = 0;
  int layer = 0;  ///< the one asked for
  int layers = 1;
};

/// When units leave: after a decode row has attended, or before the first one, which is when a prompt ends.
struct eviction_moment {
  int budget = 0;  ///< tokens
  int prompt = 0;  ///< tokens of the prompt
  int tokens = 0;  ///< of the sequence so far
  bool prompt_ends = false;
  int held = 0;               ///< tokens that the head has now
  int layer = 0, layers = 1;  ///< of those that forget
  int head = 0;               ///< KV head of the layer
};

/// Votes for prompt tokens: the shares that each has of the observed prompt rows' attention, summed (tokens).
struct prompt_votes {
  const float* shares = nullptr;
  int tokens = 0;
};

/// Rows that a group's query heads make for a policy that observes.
enum class group_rule : std::uint8_t {
  each,           ///< a row each: its shares of the softmax over what the head holds
  largest_score,  ///< one row: the largest of their scores; -infinity for what the row does not attend to
};

/// Units that a KV head holds when some are to leave, tokens in the order of the text, and what the last
/// observed rows have of it: `observed_rows()` of the sequence's last, fewer where it has no more, those of a
/// query head apart with `group_rule::each`. All of it but `tokens` is the policy's to write over.
struct observed_units {
  int units = 0;
  const std::int32_t* tokens = nullptr;  ///< (units): numbers in the sequence, ascending
  int rows = 0;              ///< row r is of query head r % heads of the row r / heads, of the last the last
  int heads = 1;             ///< of the group, that have rows of their own
  float* numbers = nullptr;  ///< (rows, stride)
  float* scratch = nullptr;  ///< (rows, stride)
  std::int32_t* counts = nullptr;  ///< (rows, 2)
  float* keys = nullptr;           ///< (units, head_dim), of a policy that `sees_keys()`
  int head_dim = 0;
  std::ptrdiff_t stride = 0;

  float* row(int r) const { return numbers + r * stride; }
  float* scratch_row(int r) const { return scratch + r * stride; }
};

/// Rule of what a token that stays becomes when others merge into it.
enum class merge_rule : std::uint8_t {
  by_weights,  ///< the mean of their keys and values by the policy's weights; it weighs in attention as
               ///< before
  as_many,     ///< the same mean; it weighs as much as all of them
  as_last_row  ///< the mean by what each had of the last row; it weighs so that the row's attention stays as
               ///< it was
};

/// The product of two rows, a multiple of 8 numbers each, in double: the same for the same numbers.
inline double exact_product(const float* a, const float* b, int count) {
  double sums[8] = {};
  for (int i = 0; i < count; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// Tokens of a KV head of which some leave: first those that stay, then those that leave, both in the order
/// of the text.
struct merging_tokens {
  int staying = 0, leaving = 0;
  const std::int32_t* tokens = nullptr;  ///< (staying + leaving): numbers in the sequence
  const float* keys = nullptr;           ///< (staying + leaving, head_dim)
  const double* lengths = nullptr;       ///< of the keys
  int head_dim = 0;
  double (*product)(const float*, const float*, int) = exact_product;  ///< or another that gives the same

  int end() const { return staying + leaving; }
  const float* key(int token) const { return keys + std::ptrdiff_t{token} * head_dim; }
  /// The cosine of two keys; 0 where one has no direction.
  double cosine(int a, int b) const {
    const double of = product(key(a), key(b), head_dim) / (lengths[a] * lengths[b]);
    return std::isfinite(of) ? of : 0.0;
  }
  /// The token that stays whose key is most like a token's, the first of those alike; -1: none stays.
  int nearest(int token) const {
    int best = -1;
    double most = 0.0;
    for (int i = 0; i < staying; ++i)
      if (const double of = cosine(token, i); best < 0 || of > most) best = i, most = of;
    return best;
  }
};

/// Fate of a token: of one that leaves, `into` which of those that stay it merges, or -1 where it is lost,
/// and its weight in what that becomes; of one that stays its own weight alone.
struct merge_fate {
  int into = -1;
  double weight = 1.0;
};

/// Heads that budgets are given to, and how many tokens each had if all had the same.
struct eviction_heads {
  int layers = 0, kv_heads = 0;
  int budget = 0, prompt = 0;  ///< tokens
};

/// All rows of a prompt are observed; all tokens are kept.
inline constexpr int every_prompt_row = std::numeric_limits<int>::max();
inline constexpr int every_token = std::numeric_limits<int>::max();

namespace detail {

/// Throws settings_error for a window of rows, or a kernel, that a method cannot have; `p_` are the published
/// ones.
inline void check_window(std::string_view name, int window, int p_window, int kernel, int p_kernel,
                         const eviction_limits& most) {
  if (window < 1 || window >= most.budget)
    throw settings_error(std::string(name) + ": a window of " + std::to_string(window) +
                         " rows is not from 1 to below the budget of " + std::to_string(most.budget) +
                         " tokens; " + std::to_string(p_window) + " as published");
  if (kernel < 1 || kernel % 2 == 0)
    throw settings_error(std::string(name) + ": a kernel of " + std::to_string(kernel) +
                         " tokens is not odd; " + std::to_string(p_kernel) + " as published");
}

}  // namespace detail

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
  void validate(const eviction_limits&) const {
    if (!(recent >= 0.0f && recent < 1.0f))
      throw settings_error("h2o: recent of " + values() +
                           " is not a share from 0 to below 1; 0.5 as published");
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
    const int first = token > kernel / 2 ? token - kernel / 2 : 0;
    const int end =
        votes.tokens - window < token + kernel / 2 + 1 ? votes.tokens - window : token + kernel / 2 + 1;
    for (int t = first; t < end; ++t)
      if (votes.shares[t] > unit.votes) unit.votes = votes.shares[t];
  }
  FREEKV_HD constexpr void on_attended(unit_state&, float, int) const {}
  FREEKV_HD std::uint32_t worth(const unit_state& unit) const { return order_bits(unit.votes); }

  std::string values() const { return std::to_string(window) + ", " + std::to_string(kernel); }
  void validate(const eviction_limits& most) const {
    detail::check_window("snapkv", window, 32, kernel, 7, most);
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
  int sink = 64,
      window = 128;  ///< tokens, where it is not: whole pages of the one, pages that begin in the other

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
    if (!keeps_prompt && page >= 1 && sink / page + window / page + 1 > most.budget / page)
      throw settings_error("raas: a budget of " + std::to_string(most.budget) + " tokens leaves no page of " +
                           std::to_string(page) + " beside a sink of " + std::to_string(sink) +
                           " and a window of " + std::to_string(window) + "; give a page or more");
    if (page < 1 || room < page)
      throw settings_error("raas: pages of " + std::to_string(page) + " tokens and room for " +
                           std::to_string(room) + " decoded tokens; give at least 1, and room for a page");
    if (std::isnan(threshold)) throw settings_error("raas: threshold is NaN; 1e-4 as published");
  }
};

/// True of a policy that lists `hook::observe`.
template <class E>
inline constexpr bool observes = hooks_of<E>::has(hook::observe);

/// True of a policy that lists `hook::allocate`.
template <class E>
inline constexpr bool allocates = hooks_of<E>::has(hook::allocate);

/// True of a policy that lists `hook::merge`.
template <class E>
inline constexpr bool merges = hooks_of<E>::has(hook::merge);

/// A policy that remembers something of each unit. `unit_state` is trivially copyable. It is told:
/// `on_append(unit, row)` for every token, with its number in the sequence;
/// `on_prompt(unit, votes, first_token)` when a prompt ends, with the votes of its last `observed_rows()`
/// rows, 0 where the prompt is kept as it is and not every row is observed; `on_attended(unit, share, row)`
/// for all units that a decode row has attended to, with the row's share on each.
template <class E>
concept counts_units = std::is_trivially_copyable_v<typename E::unit_state> &&
    requires(const E e, typename E::unit_state& unit, const prompt_votes& votes) {
  e.on_append(unit, 0);
  e.on_prompt(unit, votes, 0);
  e.on_attended(unit, 0.5f, 0);
  { e.worth(unit) } -> std::same_as<std::uint32_t>;
};

/// Says which units of a KV head leave when there are more than `kept(moment)` tokens' worth: of those that
/// it does not protect the one of least `worth`, of those alike the one that was there first.
///
/// It counts units, or observes the rows of a window. `stages_prompt()`: a prompt is kept apart until it is
/// cut to the budget, else it is in the slots at once. `capacity(limits)`: tokens that a head ever holds.
/// `protects(first_token, moment)`.
template <class E>
concept eviction_policy = policy<E> && std::same_as<typename E::policy_kind, eviction_kind> &&
    (observes<E> || counts_units<E>)&&requires(const E e, const eviction_moment& at,
                                               const eviction_limits& most) {
  { E::name } -> std::convertible_to<std::string_view>;
  { e.unit_tokens() } -> std::same_as<int>;
  { e.stages_prompt() } -> std::same_as<bool>;
  { e.observed_rows() } -> std::same_as<int>;
  { e.capacity(most) } -> std::same_as<int>;
  { e.kept(at) } -> std::same_as<int>;
  { e.protects(0, at) } -> std::same_as<bool>;
};

static_assert(eviction_policy<h2o> && eviction_policy<tova> && eviction_policy<snapkv> &&
              eviction_policy<pyramid_kv> && eviction_policy<lazy_eviction> && eviction_policy<raas>);

/// A policy with the members of `hook::allocate`.
template <class P>
concept gives_budgets = requires {
  typename P::statistic;
}
&&std::is_trivially_copyable_v<typename P::statistic>&& requires(const P p, const observed_units& units,
                                                                 const eviction_moment& at,
                                                                 const typename P::statistic* of,
                                                                 const eviction_heads& over, int* budgets) {
  { p.measure(units, at) } -> std::same_as<typename P::statistic>;
  p.allocate(of, over, budgets);
};

/// A policy with the members of `hook::merge`.
template <class P>
concept merges_tokens = requires {
  typename P::head_memory;
}
&&std::is_trivially_copyable_v<typename P::head_memory>&& requires(const P p, const merging_tokens& tokens,
                                                                   const eviction_moment& at,
                                                                   typename P::head_memory& memory,
                                                                   merge_fate* fates) {
  { p.merge_by() } -> std::same_as<merge_rule>;
  p.merge(tokens, at, memory, fates);
};

/// Optional: `validate(limits)`, `values()`, and
/// - `observe(units, moment, worths) -> int`, with `group()` and `observes_decoding()`: before units, which
///   are tokens then, leave, it gives each a worth, and says how many of them stay at most, the protected
///   ones among them. `group()` is what it sees of query heads, `observes_decoding()` whether decode rows are
///   among its rows, whose queries are kept for each sequence then; else units leave when a prompt ends
///   alone;
/// - `sees_keys() -> bool`, whether it is given the units' keys with them;
/// - `allocate(statistics, over, budgets)`, with a trivially copyable `statistic` and
///   `measure(units, moment) -> statistic`: when a prompt that is longer than the budget ends, it sees what
///   was measured of each head of all layers that forget (layers, kv_heads) and gives them budgets, whose sum
///   is at most that of equal ones;
/// - `merge(tokens, moment, memory, fates)`, with a trivially copyable `head_memory`, one for each head of a
///   sequence, and `merge_by() -> merge_rule`: when tokens leave, it says which of those that stay each
///   merges into, and with what weight. Units are tokens then. By `merge_rule::as_last_row` weights are the
///   row's, whose queries `observed_rows()` keeps.
struct eviction_kind : kind_defaults {
  template <class P>
  struct check {
    static_assert(eviction_policy<P>,
                  "an eviction policy has a name, a trivially copyable unit_state, unit_tokens(), "
                  "stages_prompt(), observed_rows(), capacity(limits), kept(moment), protects(token, "
                  "moment), worth(unit) -> uint32, and the hooks on_append(unit, row), on_prompt(unit, "
                  "votes, token) and on_attended(unit, share, row); one that lists hook::observe has no "
                  "unit_state, worth and hooks of units");
    static_assert(!allocates<P> || observes<P>,
                  "an eviction policy that lists hook::allocate lists hook::observe");
    static_assert(!allocates<P> || !merges<P>,
                  "an eviction policy that lists hook::merge does not list hook::allocate");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    switch (h) {
      case hook::allocate:
        return gives_budgets<P>;
      case hook::merge:
        return merges_tokens<P>;
      case hook::observe:
        return requires(const P p, const observed_units& units, const eviction_moment& at, float* worths) {
          { p.observe(units, at, worths) } -> std::same_as<int>;
          { p.group() } -> std::same_as<group_rule>;
          { p.observes_decoding() } -> std::same_as<bool>;
        };
      case hook::sees_keys:
        return requires(const P p) {
          { p.sees_keys() } -> std::same_as<bool>;
        };
      case hook::validate:
        return requires(const P p) { p.validate(eviction_limits{}); };
      default:
        return kind_defaults::offers<P>(h);
    }
  }
  template <class P>
  [[gnu::always_inline]] static void validate(const P& policy, const eviction_limits& limits) {
    policy.validate(limits);
  }
};

}  // namespace freekv
