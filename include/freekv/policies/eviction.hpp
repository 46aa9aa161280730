// Eviction: which tokens leave a KV head for good, where methods keep no complete store. A policy has a few
// bytes of state for each unit that a head keeps, which is a token or a page, and functions that bring it up
// to date; or it observes the last rows and ranks all units at once. Policies are in counting_eviction.hpp,
// given_eviction.hpp, window_eviction.hpp, hard_kv.hpp and merging_eviction.hpp.
#pragma once

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
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
  /// The most that any setting may count, so that sums of two are counted right.
  static constexpr int most_tokens = 1 << 29;
  int budget = 0;
  int max_prompt = 0;
  int max_generated = 0;
  int layer = 0;  ///< the one asked for
  int layers = 1;
  int head = 0;  ///< KV head of the layer, the one asked for
  int kv_heads = 1;
  int query_heads = 1;  ///< of the layer
};

/// Moment at which units leave: after a decode row has attended, or before the first one, when a prompt ends.
/// Where a policy lists `hook::blocks`, a prompt ends behind each block, and has the tokens that came so far.
struct eviction_moment {
  int budget = 0;  ///< tokens
  int prompt = 0;  ///< tokens of the prompt
  int tokens = 0;  ///< of the sequence so far
  bool prompt_ends = false;
  int held = 0;               ///< tokens that the head has now
  int layer = 0, layers = 1;  ///< of those that forget
  int head = 0;               ///< KV head of the layer
  float ratio = 1.0f;         ///< of the layer, which a policy that lists `hook::rate` gave it
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

/// The product of two rows, a multiple of 8 numbers each, in double: the same for the same numbers.
inline double exact_product(const float* a, const float* b, int count) {
  double sums[8] = {};
  for (int i = 0; i < count; i += 8)
    for (int j = 0; j < 8; ++j) sums[j] += static_cast<double>(a[i + j]) * static_cast<double>(b[i + j]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/// Units that a KV head holds when some are to leave, tokens in the order of the text, and what the last
/// observed rows have of it: `observed_rows()` of the sequence's last, fewer where it has no more, those of a
/// query head apart with `group_rule::each`. When a prompt ends, probe rows that the engine gave are its last
/// (`evicting_pipeline::observe`); where it ends behind each block, rows before the block are not among them.
/// All of it but `tokens` is the policy's to write over.
struct observed_units {
  int units = 0;
  const std::int32_t* tokens = nullptr;  ///< (units): numbers in the sequence, ascending
  int rows = 0;              ///< row r is of query head r % heads of the row r / heads, of the last the last
  int heads = 1;             ///< of the group, or of the layer where they vote, that have rows of their own
  float* numbers = nullptr;  ///< (rows, stride)
  float* scratch = nullptr;  ///< (rows, stride)
  std::int32_t* counts = nullptr;  ///< (rows, 2)
  float* keys = nullptr;           ///< (units, head_dim), of a policy that `sees_keys()`
  int head_dim = 0;
  std::ptrdiff_t stride = 0;
  double (*product)(const float*, const float*, int) = exact_product;  ///< or another that gives the same

  float* row(int r) const { return numbers + r * stride; }
  float* scratch_row(int r) const { return scratch + r * stride; }
  float* key(int unit) const { return keys + std::ptrdiff_t{unit} * head_dim; }
};

/// Units that a KV head holds when some are to leave or become coded, in the order of the text, for a policy
/// that counts units and ranks them together.
template <class State>
struct counted_units {
  int units = 0;
  const std::int32_t* tokens = nullptr;  ///< (units): numbers in the sequence
  const State* states = nullptr;         ///< (units)
};

/// Rule of what a token that stays becomes when others merge into it.
enum class merge_rule : std::uint8_t {
  by_weights,   ///< the mean of their keys and values by the policy's weights; it weighs in attention as
                ///< before
  as_many,      ///< the same mean; it weighs as much as all of them
  as_last_row,  ///< the mean by what each had of the last row; it weighs so that the row's attention stays as
                ///< it was
  by_shares     ///< as by_weights, of a policy that observes: it is told what its rows have of each token
};

/// Tokens of a KV head of which some leave: first those that stay, then those that leave, both in the order
/// of the text.
struct merging_tokens {
  int staying = 0, leaving = 0;
  const std::int32_t* tokens = nullptr;  ///< (staying + leaving): numbers in the sequence
  const float* keys = nullptr;           ///< (staying + leaving, head_dim)
  const double* lengths = nullptr;       ///< of the keys
  int head_dim = 0;
  double (*product)(const float*, const float*, int) = exact_product;  ///< or another that gives the same
  /// (staying + leaving), with `merge_rule::by_shares` alone: a token's share of the softmax of the largest
  /// scores of the group over all of these tokens, the mean of the last `observed_rows()` rows, in double. A
  /// row has nothing of tokens behind it; NaN counts as -infinity.
  const double* shares = nullptr;
  std::int32_t* scratch = nullptr;  ///< (staying + leaving): the policy's to write over

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

/// True of a rule that gives tokens log-weights.
constexpr bool makes_log_weights(merge_rule rule) {
  return rule == merge_rule::as_many || rule == merge_rule::as_last_row;
}

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

/// True of a policy that lists `hook::observe`.
template <class E>
inline constexpr bool observes = hooks_of<E>::has(hook::observe);

/// True of a policy that lists `hook::allocate`.
template <class E>
inline constexpr bool allocates = hooks_of<E>::has(hook::allocate);

/// True of a policy that lists `hook::merge`.
template <class E>
inline constexpr bool merges = hooks_of<E>::has(hook::merge);

/// True of a policy that lists `hook::demote`.
template <class E>
inline constexpr bool demotes = hooks_of<E>::has(hook::demote);

/// True of a policy that lists `hook::rate`.
template <class E>
inline constexpr bool rates = hooks_of<E>::has(hook::rate);

/// True of a policy that lists `hook::blocks`.
template <class E>
inline constexpr bool cuts_blocks = hooks_of<E>::has(hook::blocks);

namespace detail {

/// True of a policy that lists `hook::votes`.
template <class E>
inline constexpr bool votes_for_layer = hooks_of<E>::has(hook::votes);

}  // namespace detail

/// True of a policy that lists `hook::worths`.
template <class E>
inline constexpr bool takes_worths = hooks_of<E>::has(hook::worths);

namespace detail {

/// True of a policy that lists `hook::rows`.
template <class E>
inline constexpr bool sees_rows = hooks_of<E>::has(hook::rows);

/// True of a policy that lists `hook::rank`.
template <class E>
inline constexpr bool ranks_units = hooks_of<E>::has(hook::rank);

}  // namespace detail

/// A policy that remembers something of each unit. `unit_state` is trivially copyable. It is told:
/// `on_append(unit, row)` for every decoded token, with its number in the sequence; of a prompt's units once,
/// with their last token, or where it lists `hook::rows` or `hook::worths` for each;
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
/// cut to the budget, else it is in the slots at once, and its rows are observed by a policy alone that cuts
/// blocks or observes decode rows too. `capacity(limits)`: tokens that a head ever holds.
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

namespace detail {

/// A policy with the members of `hook::demote`.
template <class P>
concept codes_tokens = requires(const P p, const eviction_moment& at, const eviction_limits& most) {
  { p.originals(at) } -> std::same_as<int>;
  { p.most_originals(most) } -> std::same_as<int>;
  requires std::same_as<typename decltype(p.codec())::policy_kind, codec_kind>;
};

/// Query heads of a layer that vote.
template <class P>
int voters_of(const P& policy, const eviction_moment& at, int query_heads) {
  int voters = 0;
  for (int head = 0; head < query_heads; ++head) voters += policy.votes(at, head);
  return voters;
}

/// A policy with the members of `hook::rate`.
template <class P>
concept rates_layers = requires(const P p, const double* votes, const double* sensitivities, float* ratios) {
  { p.sensitivity(votes, 1) } -> std::same_as<double>;
  p.rate(sensitivities, 1, ratios);
};

/// A policy with the members of `hook::blocks`.
template <class P>
concept has_blocks = requires(const P p, const eviction_limits& most) {
  { p.block(most) } -> std::same_as<int>;
};

}  // namespace detail

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
///   row's, whose queries `observed_rows()` keeps; `merge_rule::by_shares` is for one that observes;
/// - `originals(moment) -> int`, listed as `hook::demote`, with `codec()` and
///   `most_originals(limits) -> int`: of the tokens that stay, which units are then, so many stay as they
///   are, those that would leave last. The others become coded, each by `codec()` as a page of its own. A
///   token is coded once: it stays coded, the same bytes, until it leaves, and counts as no original.
///   Attention is to what is decoded, and so is what rows that are observed see. A head has room for
///   `most_originals(limits)` original tokens at a time, the one of a decode row among them, and for the
///   rest of its capacity coded;
/// - `rate(sensitivities, layers, ratios)`, with `sensitivity(votes, tokens) -> double`: when a prompt ends,
///   however long it is, and before any layer is cut, it sees of each layer that forgets what its tokens have
///   of the shares of the prompt's last rows, summed over these and all query heads, and gives each layer the
///   ratio of its moments; 1 where there is no prompt;
/// - `block(limits) -> int`, listed as `hook::blocks`, of a policy that observes and stages no prompt: most
///   tokens of a prompt that a step brings, its block. They go behind what a head holds, which is cut to
///   `kept(moment)` before the next block comes, and before the first decode row. So `capacity(limits)` has
///   room for a block beside what is kept;
/// - `votes(moment, query_head) -> bool`, of a policy that observes each query head of staged prompts alone:
///   when a prompt ends, what it observes of any KV head of a layer are the rows of the layer's query heads
///   that vote, each on its own KV head's keys, and not the group's; at least one votes. Of the moment
///   `layer` and `layers` are there;
/// - `on_row(unit, key, value, head_dim)`, listed as `hook::rows`, of a policy that counts units: behind each
///   `on_append` it is told the token's key and value as they are stored, (head_dim) floats each. Of a
///   prompt's tokens each has both calls, in their order, when the prompt ends;
/// - `rank(units, moment, worths)`, listed as `hook::rank`, of a policy that counts units and demotes: in
///   place of `worth(unit)` it gives all units that a head holds a worth each, which may depend on the
///   others' states (`counted_units`);
/// - `on_given(unit, worth)`, listed as `hook::worths`, of a policy that counts units: right behind each
///   `on_append` it is told what the engine gave for the row and KV head (`kv_rows::worths`), NaN as
///   -infinity. Of a prompt's rows each has both calls, in their order, when the prompt ends.
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
    static_assert(!demotes<P> || (!allocates<P> && !merges<P> && !hooks_of<P>::has(hook::sees_keys)),
                  "an eviction policy that lists hook::demote lists neither hook::allocate, hook::merge nor "
                  "hook::sees_keys");
    static_assert(!rates<P> || observes<P>, "an eviction policy that lists hook::rate lists hook::observe");
    static_assert(
        !cuts_blocks<P> || (observes<P> && !allocates<P> && !merges<P> && !demotes<P> && !rates<P>),
        "an eviction policy that lists hook::blocks lists hook::observe, and neither hook::allocate, "
        "hook::merge, hook::demote nor hook::rate");
    static_assert(!detail::votes_for_layer<P> ||
                      (observes<P> && !merges<P> && !demotes<P> && !rates<P> && !cuts_blocks<P>),
                  "an eviction policy that lists hook::votes lists hook::observe and neither hook::merge, "
                  "hook::demote, hook::rate nor hook::blocks");
    static_assert(!takes_worths<P> || !observes<P>,
                  "an eviction policy that lists hook::observe ranks units by what rows attend to and does "
                  "not list hook::worths");
    static_assert(!detail::sees_rows<P> || !observes<P>,
                  "an eviction policy that lists hook::observe has no units and does not list hook::rows");
    static_assert(!detail::ranks_units<P> || (demotes<P> && !observes<P>),
                  "an eviction policy that lists hook::rank counts units and lists hook::demote");
  };
  template <class P>
  static constexpr bool offers(hook h) {
    switch (h) {
      case hook::allocate:
        return gives_budgets<P>;
      case hook::blocks:
        return detail::has_blocks<P>;
      case hook::merge:
        return merges_tokens<P>;
      case hook::demote:
        return detail::codes_tokens<P>;
      case hook::observe:
        return requires(const P p, const observed_units& units, const eviction_moment& at, float* worths) {
          { p.observe(units, at, worths) } -> std::same_as<int>;
          { p.group() } -> std::same_as<group_rule>;
          { p.observes_decoding() } -> std::same_as<bool>;
        };
      case hook::rank:
        if constexpr (counts_units<P>)
          return requires(const P p, const counted_units<typename P::unit_state>& units,
                          const eviction_moment& at, float* worths) {
            p.rank(units, at, worths);
          };
        else
          return false;
      case hook::rate:
        return detail::rates_layers<P>;
      case hook::rows:
        if constexpr (counts_units<P>)
          return requires(const P p, typename P::unit_state& unit, const float* row) {
            p.on_row(unit, row, row, 8);
          };
        else
          return false;
      case hook::sees_keys:
        return requires(const P p) {
          { p.sees_keys() } -> std::same_as<bool>;
        };
      case hook::validate:
        return requires(const P p) { p.validate(eviction_limits{}); };
      case hook::votes:
        return requires(const P p, const eviction_moment& at) {
          { p.votes(at, 0) } -> std::same_as<bool>;
        };
      case hook::worths:
        if constexpr (counts_units<P>) return requires(const P p, typename P::unit_state& unit) {
            p.on_given(unit, 0.5f);
          };
        else
          return false;
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
