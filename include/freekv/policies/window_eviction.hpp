// Eviction by a window of rows: what the last rows attend to decides at once who leaves, and how many of a
// head stay.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/detail/neighbours.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/policies/fp8_token.hpp>
#include <span>
#include <string>
#include <string_view>

namespace freekv {

/// DefensiveKV (arXiv 2510.13334): snapkv for the worst case. Of each query head's shares, averaged over
/// `kernel` neighbours with the row's sum as it was, a token has the largest that any of the prompt's last
/// `window` rows gives it, and at least the mean of all tokens' largest; of those alike the latest stay.
/// Unlike the paper's, the worth is not multiplied by the norms of values behind the output projection, which
/// takes the model's weights, and heads of a layer have the same budget.
struct defensive_kv {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "defensive_kv";
  int window = 32;
  int kernel = 5;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return window; }
  constexpr int capacity(const eviction_limits& most) const { return most.budget + most.max_generated; }
  constexpr int kept(const eviction_moment& at) const { return at.prompt_ends ? at.budget : every_token; }
  constexpr bool protects(int token, const eviction_moment& at) const { return token >= at.prompt - window; }

  constexpr group_rule group() const { return group_rule::each; }
  constexpr bool observes_decoding() const { return false; }
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    std::fill_n(worths, held.units, 0.0f);
    worst_case(held, worths);
    return held.units;
  }

  std::string values() const { return std::to_string(window) + ", " + std::to_string(kernel); }
  void validate(const eviction_limits& most, std::string_view who = name) const {
    detail::check_window(who, window, 32, kernel, 5, most);
  }

 protected:
  /// Worths of what is before the window, of so many tokens; they may be where the first row's shares are.
  int worst_case(const observed_units& held, float* worths) const {
    const int voted = std::max(0, held.units - window);
    for (int r = 0; r < held.rows; ++r) {
      float* const near = held.scratch_row(r);
      detail::average_near(held.row(r), voted, kernel, near);
      double before = 0.0, now = 0.0;
      for (int i = 0; i < voted; ++i) {
        before += static_cast<double>(held.row(r)[i]);
        now += static_cast<double>(near[i]);
      }
      const auto factor = static_cast<float>(now > 0.0 ? before / now : 0.0);
      for (int i = 0; i < voted; ++i)
        worths[i] = r == 0 ? near[i] * factor : std::max(worths[i], near[i] * factor);
    }
    double sum = 0.0;
    for (int i = 0; i < voted; ++i) sum += static_cast<double>(worths[i]);
    const auto mean = static_cast<float>(voted > 0 ? sum / voted : 0.0);
    for (int i = 0; i < voted; ++i) worths[i] = std::max(worths[i], mean);
    return voted;
  }
};
static_assert(eviction_policy<defensive_kv>);

/// Layer-DefensiveKV (the same paper): `defensive_kv` whose heads have budgets by their tokens' worths. Of
/// all tokens of all heads of all layers that forget the best stay, as many as equal budgets sum up to;
/// beside these each head has its window. The paper's heads have no least budget, and neither have these.
/// Published code lets a window have the largest worth of its layer, which comes to the same where every
/// layer has one above the bar; here it always stays.
///
/// `allocate` is told how many tokens of a head have which worth, to a sixteenth of an octave: a head's
/// budget is that of the exact ranking but for tokens whose worth is in the bin of the last that stays. What
/// is left for these, heads share in proportion to how many each has there. Worths below 2^-40 count as
/// alike.
struct layer_defensive_kv : defensive_kv {
  using hooks = hook_list<hook::allocate, hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "layer_defensive_kv";
  static constexpr int octaves = 40, bins_of_octave = 16, bins = octaves * bins_of_octave + 1;

  struct statistic {
    std::array<std::int32_t, bins> tokens{};  // of a head, before the window, by worth, ascending
  };
  /// Bin of a worth, of which none is above 1 but by rounding.
  static int bin_of(float worth) {
    constexpr int below = 19;  // bits of a float's fraction that tell worths of a bin apart
    const auto bits_of = [](float x) { return static_cast<int>(std::bit_cast<std::uint32_t>(x) >> below); };
    return worth > 0.0f ? std::clamp(bits_of(worth) - bits_of(1.0f) + bins - 1, 0, bins - 1) : 0;
  }
  statistic measure(const observed_units& held, const eviction_moment&) const {
    statistic of;
    float* const worths = held.row(0);
    const int voted = held.rows > 0 ? worst_case(held, worths) : 0;
    for (int i = 0; i < voted; ++i) ++of.tokens[to_size(bin_of(worths[i]))];
    return of;
  }
  void allocate(const statistic* of, const eviction_heads& over, int* budgets) const {
    const int heads = over.layers * over.kv_heads;
    std::int64_t left = std::int64_t{heads} * (over.budget - window);
    std::fill_n(budgets, heads, window);
    for (std::size_t bin = bins; bin-- > 0 && left > 0;) {
      std::int64_t all = 0;
      for (int head = 0; head < heads; ++head) all += of[head].tokens[bin];
      if (all == 0) continue;
      const std::int64_t given = std::min(all, left);
      std::int64_t before = 0;
      for (int head = 0; head < heads; ++head) {
        const std::int64_t end = before + of[head].tokens[bin];
        budgets[head] += static_cast<int>(given * end / all - given * before / all);
        before = end;
      }
      left -= given;
    }
  }
  void validate(const eviction_limits& most) const { defensive_kv::validate(most, name); }
};
static_assert(eviction_policy<layer_defensive_kv>);

/// CompressKV (arXiv 2508.02401): semantic retrieval heads, a few query heads of each layer that are found
/// offline for a model, choose for all KV heads of their layer. Tokens stay by the shares that the chosen
/// heads' last `window` rows give them, averaged over `kernel` neighbours, and layers keep as much as a list
/// says, which the paper makes from the error that cutting a layer alone gives its output. The published code
/// takes the 4 best heads of each layer, those that attend most to a fact's whole span while its answer is
/// generated. Here every KV head computes the votes anew: with all heads they cost what snapkv's do as many
/// times as there are KV heads. A prompt that is within its layer's budget stays whole.
struct compress_kv {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::observe, hook::validate, hook::values, hook::votes>;
  static constexpr std::string_view name = "compress_kv";
  /// Query heads of the model, (layers, query_heads): 1 for those that choose, else 0; without any all of a
  /// layer choose. The caller keeps their memory.
  std::span<const std::uint8_t> heads{};
  int query_heads = 1;
  /// Tokens that each KV head of the model's layers keeps, (layers); without them each has the budget. The
  /// caller keeps their memory.
  std::span<const std::int32_t> budgets{};
  int window = 8;
  int kernel = 5;

  int unit_tokens() const { return 1; }
  bool stages_prompt() const { return true; }
  int observed_rows() const { return window; }
  int capacity(const eviction_limits& most) const {
    return budget_of(most.budget, most.layer, most.layers) + most.max_generated;
  }
  int kept(const eviction_moment& at) const {
    return at.prompt_ends ? budget_of(at.budget, at.layer, at.layers) : every_token;
  }
  bool protects(int token, const eviction_moment& at) const { return token >= at.prompt - window; }

  group_rule group() const { return group_rule::each; }
  bool observes_decoding() const { return false; }
  bool votes(const eviction_moment& at, int query_head) const {
    if (heads.empty()) return true;
    return heads[to_size(layer_in(std::ssize(heads) / query_heads, at.layer, at.layers) * query_heads +
                         query_head)] != 0;
  }
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    const int voted = std::max(0, held.units - window);
    float* const sums = held.scratch_row(0);
    std::fill_n(worths, held.units, 0.0f);
    std::fill_n(sums, held.units, 0.0f);
    for (int r = 0; r < held.rows; ++r)
      for (int i = 0; i < voted; ++i) sums[i] += held.row(r)[i];
    detail::average_near(sums, voted, kernel, worths);
    return held.units;
  }

  std::string values() const {
    const auto listed = std::ssize(heads) - std::count(heads.begin(), heads.end(), 0);
    return std::to_string(window) + ", " + std::to_string(kernel) + ", " +
           (heads.empty() ? "all" : std::to_string(listed)) + " query heads" +
           (budgets.empty() ? "" : ", budgets by layer");
  }
  void validate(const eviction_limits& most) const {
    const auto text = [](auto n) { return std::to_string(n); };
    const auto fail = [](const std::string& what) { throw settings_error(std::string(name) + what); };
    detail::check_window(name, window, 8, kernel, 5, most);
    if (!heads.empty() && (query_heads != most.query_heads || std::ssize(heads) % query_heads != 0 ||
                           std::ssize(heads) / query_heads < most.layers))
      fail(" lists " + text(heads.size()) + " query heads, " + text(query_heads) +
           " a layer; needed are those of all layers of the model, of which " + text(most.layers) +
           " forget, with " + text(most.query_heads) + " query heads each");
    if (budgets.empty()) return;
    if (std::ssize(budgets) < most.layers)
      fail(" has budgets of " + text(budgets.size()) +
           " layers; needed are those of all layers of the model, of which " + text(most.layers) + " forget");
    std::int64_t sum = 0;
    for (int layer = 0; layer < most.layers; ++layer) {
      const int of = budget_of(most.budget, layer, most.layers);
      if (of <= window)
        fail(" gives a layer a budget of " + text(of) + " tokens; give each more than the window of " +
             text(window));
      if (of > eviction_limits::most_tokens)
        fail(" gives a layer a budget of " + text(of) + " tokens, more than " +
             text(eviction_limits::most_tokens));
      sum += of;
    }
    if (sum > std::int64_t{most.layers} * most.budget)
      fail(" gives layers " + text(sum) + " tokens together, and a budget of " + text(most.budget) + " is " +
           text(std::int64_t{most.layers} * most.budget) + " for " + text(most.layers) +
           "; give less, or raise the budget");
  }

 private:
  /// A layer that forgets among the model's `all`, of which the last `layers` do.
  static std::int64_t layer_in(std::int64_t all, int layer, int layers) { return all - layers + layer; }
  int budget_of(int budget, int layer, int layers) const {
    return budgets.empty() ? budget : budgets[to_size(layer_in(std::ssize(budgets), layer, layers))];
  }
};
static_assert(eviction_policy<compress_kv>);

/// CAKE (arXiv 2503.12491): layers have budgets by how far their attention is spread over tokens and how much
/// it shifts from row to row, and tokens stay by the mean and `gamma` times the variance of the shares that
/// the prompt's last `window` rows give them, averaged over `kernel` neighbours and the group. A layer's
/// preference is H^(1/tau1) V^(1/tau2), of the entropies H of these rows' shares of what is before the window
/// and the variances V of each token's, summed over the layer's query heads. What a layer cannot use goes
/// evenly to the others. tau1, tau2 and gamma are chosen for each model in the paper; these are those of one.
/// Layers are given their budgets when the prompt has ended and not in a cascade while it is read, which
/// comes to the same tokens, and all that is decoded stays.
struct cake {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::allocate, hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "cake";
  int window = 32;
  int kernel = 5;
  float gamma = 200.0f, tau1 = 1.6f, tau2 = 0.6f;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return window; }
  constexpr int capacity(const eviction_limits& most) const { return most.budget + most.max_generated; }
  constexpr int kept(const eviction_moment& at) const { return at.prompt_ends ? at.budget : every_token; }
  constexpr bool protects(int token, const eviction_moment& at) const { return token >= at.prompt - window; }

  constexpr group_rule group() const { return group_rule::each; }
  constexpr bool observes_decoding() const { return false; }
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    const int voted = std::max(0, held.units - window);
    float* const sums = held.scratch_row(0);
    std::fill_n(worths, held.units, 0.0f);
    std::fill_n(sums, held.units, 0.0f);
    for (int g = 0; g < held.heads; ++g)
      for (int i = 0; i < voted; ++i) {
        const moments of = moments_of(held, g, i);
        sums[i] += static_cast<float>(of.mean + static_cast<double>(gamma) * of.variance);
      }
    detail::average_near(sums, voted, kernel, worths);
    return held.units;
  }

  struct statistic {
    double entropy = 0.0, variance = 0.0;  // of a KV head's query heads together
  };
  statistic measure(const observed_units& held, const eviction_moment&) const {
    statistic of;
    const int voted = std::max(0, held.units - window);
    for (int r = 0; r < held.rows; ++r)
      for (int i = 0; i < voted; ++i)
        if (const auto share = static_cast<double>(held.row(r)[i]); share > 0.0)
          of.entropy -= share * std::log(share);
    for (int g = 0; g < held.heads; ++g)
      for (int i = 0; i < voted; ++i) of.variance += moments_of(held, g, i).variance;
    return of;
  }
  void allocate(const statistic* of, const eviction_heads& over, int* budgets) const {
    const auto log_preference = [&](int layer) {
      statistic all;
      for (int head = 0; head < over.kv_heads; ++head) {
        all.entropy += of[layer * over.kv_heads + head].entropy;
        all.variance += of[layer * over.kv_heads + head].variance;
      }
      return std::log(all.entropy) / static_cast<double>(tau1) +
             std::log(all.variance) / static_cast<double>(tau2);
    };
    // Beside the largest one, as powers of small taus overflow; those that are all 0 leave budgets as they
    // are.
    double most = -HUGE_VAL, sum = 0.0;
    for (int layer = 0; layer < over.layers; ++layer) most = std::max(most, log_preference(layer));
    const auto preference = [&](int layer) {
      const double share = std::exp(log_preference(layer) - most);
      return share > 0.0 ? share : 0.0;  // no NaN
    };
    for (int layer = 0; layer < over.layers; ++layer) sum += preference(layer);
    if (!(sum > 0.0)) return;
    // A layer's budget beside the window, which all heads of it have; the first head's holds it meanwhile.
    const int room = over.prompt - window;
    std::int64_t left = std::int64_t{over.layers} * (over.budget - window);
    const auto budget = [&](int layer) -> int& { return budgets[layer * over.kv_heads]; };
    const double total = static_cast<double>(left);
    for (int layer = 0; layer < over.layers; ++layer) {
      budget(layer) = static_cast<int>(std::min(static_cast<double>(room), preference(layer) / sum * total));
      left -= budget(layer);
    }
    while (left > 0) {
      std::int64_t open = 0;
      for (int layer = 0; layer < over.layers; ++layer) open += budget(layer) < room;
      if (open == 0) break;
      const std::int64_t each = left / open, first = left % open;  // that have one more
      std::int64_t nth = 0;
      for (int layer = 0; layer < over.layers; ++layer) {
        if (budget(layer) >= room) continue;
        const int more =
            static_cast<int>(std::min<std::int64_t>(each + (nth++ < first), room - budget(layer)));
        budget(layer) += more;
        left -= more;
      }
    }
    for (int layer = 0; layer < over.layers; ++layer)
      for (int head = over.kv_heads; head-- > 0;)
        budgets[layer * over.kv_heads + head] = budget(layer) + window;
  }

  std::string values() const {
    return std::to_string(window) + ", " + std::to_string(kernel) + ", gamma " + detail::decimal(gamma) +
           ", tau " + detail::decimal(tau1) + " " + detail::decimal(tau2);
  }
  void validate(const eviction_limits& most) const {
    detail::check_window(name, window, 32, kernel, 5, most);
    if (!(gamma >= 0.0f && gamma < HUGE_VALF) || !(tau1 > 0.0f) || !(tau2 > 0.0f))
      throw settings_error("cake: a gamma of " + detail::decimal(gamma) + " and taus of " +
                           detail::decimal(tau1) + " and " + detail::decimal(tau2) +
                           "; gamma is 0 or more and finite, taus are above 0");
  }

 private:
  struct moments {
    double mean = 0.0, variance = 0.0;  // the latter of a sample
  };
  /// Moments of the shares that a query head's rows give a unit.
  static moments moments_of(const observed_units& held, int g, int unit) {
    moments of;
    const int rows = held.rows / held.heads;
    for (int r = 0; r < rows; ++r) of.mean += static_cast<double>(held.row(r * held.heads + g)[unit]);
    of.mean /= rows;
    for (int r = 0; r < rows; ++r) {
      const double apart = static_cast<double>(held.row(r * held.heads + g)[unit]) - of.mean;
      of.variance += apart * apart;
    }
    of.variance = rows > 1 ? of.variance / (rows - 1) : 0.0;
    return of;
  }
};
static_assert(eviction_policy<cake>);

/// R-KV (arXiv 2505.24133): tokens that are attended to and not said already. Importance is a token's share
/// of the largest scores of the group, its softmax over what is before the window, averaged over the last
/// `window` rows, the largest of `kernel` neighbours; redundancy the softmax over all tokens of the mean
/// cosine of a token's key with the others', where each of these counts all but the last key that is more
/// like it than `similar`. Those with the most lambda importance - (1 - lambda) redundancy stay, and the
/// window. It is done when a prompt ends and then every `interval` decode rows, where there are more tokens
/// than the budget.
struct r_kv {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::observe, hook::sees_keys, hook::validate, hook::values>;
  static constexpr std::string_view name = "r_kv";
  float lambda = 0.1f;
  int window = 8;
  int interval = 128;
  int kernel = 7;
  float similar = 0.5f;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return window; }
  constexpr int capacity(const eviction_limits& most) const { return most.budget + interval; }
  constexpr int kept(const eviction_moment& at) const {
    return (at.tokens - at.prompt) % interval == 0 ? at.budget : every_token;
  }
  constexpr bool protects(int token, const eviction_moment& at) const { return token >= at.tokens - window; }

  constexpr group_rule group() const { return group_rule::largest_score; }
  constexpr bool observes_decoding() const { return true; }
  constexpr bool sees_keys() const { return true; }
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    const int n = held.units, voted = std::max(0, n - window);
    float* const shares = held.scratch_row(0);
    std::fill_n(shares, n, 0.0f);
    for (int r = 0; r < held.rows; ++r) {
      const float* const row = held.row(r);
      log_sum_exp log_sum;
      for (int i = 0; i < voted; ++i) log_sum.add(row[i]);
      for (int i = 0; i < voted; ++i) shares[i] += log_sum.share(row[i]) / static_cast<float>(held.rows);
    }
    detail::pool_largest(shares, voted, kernel, worths);

    normalise(held);
    float* const likeness = held.row(0);
    add_likeness(held, likeness, shares);
    log_sum_exp log_sum;
    for (int i = 0; i < n; ++i) log_sum.add(likeness[i] /= static_cast<float>(n));
    for (int i = 0; i < n; ++i)
      worths[i] = lambda * (i < voted ? worths[i] : 0.0f) - (1.0f - lambda) * log_sum.share(likeness[i]);
    return n;
  }

  std::string values() const {
    return "lambda " + detail::decimal(lambda) + ", window " + std::to_string(window) + ", every " +
           std::to_string(interval) + ", kernel " + std::to_string(kernel);
  }
  void validate(const eviction_limits& most) const {
    detail::check_window(name, window, 8, kernel, 7, most);
    if (interval < 1 || interval > eviction_limits::most_tokens || !(lambda >= 0.0f && lambda <= 1.0f) ||
        !(similar >= -1.0f && similar <= 1.0f))
      throw settings_error("r_kv: an interval of " + std::to_string(interval) + " decode rows, lambda of " +
                           detail::decimal(lambda) + " and similar of " + detail::decimal(similar) +
                           "; give 1 to " + std::to_string(eviction_limits::most_tokens) +
                           " rows, a share, and a cosine; 128, 0.1 and 0.5 as published");
  }

 private:
  /// Makes keys of length 1, those of length 0 or NaN zero.
  static void normalise(const observed_units& held) {
    for (int i = 0; i < held.units; ++i) {
      float* const key = held.key(i);
      const double squares = held.product(key, key, held.head_dim);
      const double factor = squares > 0.0 ? 1.0 / std::sqrt(squares) : 0.0;
      for (int x = 0; x < held.head_dim; ++x)
        key[x] = factor > 0.0 ? static_cast<float>(static_cast<double>(key[x]) * factor) : 0.0f;
    }
  }
  /// Adds up the cosines of each unit's key with the others', each of which leaves out the last that it is
  /// similar to. `last` (units): to write over, with numbers of units, which are exact below 2^24.
  void add_likeness(const observed_units& held, float* likeness, float* last) const {
    const auto cosine = [&](int a, int b) { return held.product(held.key(a), held.key(b), held.head_dim); };
    std::fill_n(likeness, held.units, 0.0f);
    std::fill_n(last, held.units, -1.0f);
    for (int i = 0; i < held.units; ++i)
      for (int k = i + 1; k < held.units; ++k) {
        const double of_both = cosine(i, k);
        likeness[i] += static_cast<float>(of_both);
        likeness[k] += static_cast<float>(of_both);
        if (of_both > static_cast<double>(similar))
          last[i] = static_cast<float>(k), last[k] = static_cast<float>(i);
      }
    for (int i = 0; i < held.units; ++i)
      if (const int other = static_cast<int>(last[i]); other >= 0)
        likeness[other] -= static_cast<float>(cosine(i, other));
  }
};
static_assert(eviction_policy<r_kv>);

/// EpiCache (arXiv 2509.17396, and its published code): a prompt under a bounded memory. It is read in blocks
/// of `block_tokens`, and what a head holds is cut to the budget behind each, so that it never holds more
/// than the budget and a block. Rows of a patched prompt behind the block, an instruction and the
/// representative text of one episode of a dialogue, decide who stays: a token is worth the largest share
/// that any of them and any query head of the group gives it, of the softmax over what the head holds; of
/// those alike the latest stay, and none stays by its place. An engine runs these rows behind each block,
/// keeps nothing of them, and gives their queries to `evicting_pipeline::observe`, of which the last `window`
/// count; without them the block's own last rows decide, each of which sees nothing behind itself. All that
/// is decoded stays.
///
/// Layers may have budgets of their own: `layer_budgets` (layers that forget), tokens, from
/// `epi_cache_budgets`; null for equal ones. Clustering a dialogue into episodes is the engine's: an episode
/// is a sequence. Unlike the published code's default, the heads of a layer have the same budget, as with its
/// "uniform" level. That 32 rows count is ours: the paper's patched prompts are as long as their texts.
struct epi_cache {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::blocks, hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "epi_cache";
  int window = 32;
  int block_tokens = 2048;
  const std::int32_t* layer_budgets = nullptr;  ///< (layers that forget), tokens

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return false; }
  constexpr int observed_rows() const { return window; }
  constexpr int block(const eviction_limits&) const { return block_tokens; }
  constexpr int capacity(const eviction_limits& most) const {
    return budget_of(most.layer, most.budget) + std::max(block_tokens, most.max_generated);
  }
  constexpr int kept(const eviction_moment& at) const {
    return at.prompt_ends ? budget_of(at.layer, at.budget) : every_token;
  }
  constexpr bool protects(int, const eviction_moment&) const { return false; }

  constexpr group_rule group() const { return group_rule::each; }
  constexpr bool observes_decoding() const { return false; }
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    std::fill_n(worths, held.units, 0.0f);
    for (int r = 0; r < held.rows; ++r)
      for (int i = 0; i < held.units; ++i) worths[i] = std::max(worths[i], held.row(r)[i]);
    return held.units;
  }

  std::string values() const {
    return std::to_string(window) + ", blocks of " + std::to_string(block_tokens) +
           (layer_budgets == nullptr ? "" : ", budgets by layer");
  }
  void validate(const eviction_limits& most) const {
    for (int layer = 0; layer_budgets != nullptr && layer < most.layers; ++layer)
      if (layer_budgets[layer] < 1 || layer_budgets[layer] > eviction_limits::most_tokens)
        throw settings_error("epi_cache: a budget of " + std::to_string(layer_budgets[layer]) +
                             " tokens for layer " + std::to_string(layer) +
                             " of those that forget; give 1 to " +
                             std::to_string(eviction_limits::most_tokens));
  }

 private:
  constexpr int budget_of(int layer, int equal) const {
    return layer_budgets == nullptr ? equal : layer_budgets[layer];
  }
};
static_assert(eviction_policy<epi_cache>);

/// EpiCache's budgets of layers, by how much it matters to them that a prompt is cut. `similarities`
/// (layers): of each layer's keys of some text the mean cosine of those under full attention with those under
/// attention within blocks, which an engine measures once for a model. With these scaled from 0 to 1 a
/// layer's weight is (1 - similarity) to the power of `alpha`, its part of all budgets that of all weights,
/// rounded down, and at least a quarter of `budget`, so that the sum may be larger than `layers` times that.
/// As in the published code; all are `budget` where no layer differs. Writes `budgets` (layers). Throws
/// settings_error without layers, or for an alpha that is negative or NaN.
inline void epi_cache_budgets(const float* similarities, int layers, int budget, float alpha,
                              std::int32_t* budgets) {
  if (layers < 1 || !(alpha >= 0.0f))
    throw settings_error("epi_cache_budgets: " + std::to_string(layers) + " layers and an alpha of " +
                         detail::decimal(alpha) + "; give 1 or more layers, and an alpha of 0 or more");
  const auto [least, most] = std::minmax_element(similarities, similarities + layers);
  const auto weight = [&, low = static_cast<double>(*least), high = static_cast<double>(*most)](int layer) {
    return std::pow(1.0 - (static_cast<double>(similarities[layer]) - low) / (high - low),
                    static_cast<double>(alpha));
  };
  double sum = 0.0;
  for (int layer = 0; *most > *least && layer < layers; ++layer) sum += weight(layer);
  for (int layer = 0; layer < layers; ++layer) {
    const double part = sum > 0.0 ? weight(layer) / sum * layers * budget : budget;
    budgets[layer] = std::max({static_cast<int>(part), budget / 4, 1});
  }
}

/// ARKV's heavy hitters (Lei and Ilager 2026, equations 9 and 10 and algorithm 1): tokens by the mean and
/// `gamma` times the variance of the shares that the query heads of the last `window` rows give them,
/// averaged over `kernel` neighbours. When a head holds as much as the budget, `alpha` of it beside the
/// window stays, so that a cut makes room for many rows. This is the paper's baseline Origin, without what
/// `arkv` keeps in fp8.
struct arkv_origin {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "arkv_origin";
  int window = 32;
  int kernel = 5;
  float gamma = 263.81f, alpha = 0.75f;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return window; }
  constexpr int capacity(const eviction_limits& most) const { return most.budget; }
  constexpr int kept(const eviction_moment& at) const {
    return at.held < at.budget ? every_token
                               : window + static_cast<int>(alpha * static_cast<float>(at.budget - window));
  }
  constexpr bool protects(int token, const eviction_moment& at) const { return token >= at.tokens - window; }

  constexpr group_rule group() const { return group_rule::each; }
  constexpr bool observes_decoding() const { return true; }
  int observe(const observed_units& held, const eviction_moment&, float* worths) const {
    const int n = held.units, voted = std::max(0, n - window);
    float* const scores = held.scratch_row(0);
    std::fill_n(worths, n, 0.0f);
    for (int i = 0; i < voted; ++i) {
      double mean = 0.0, variance = 0.0;
      for (int r = 0; r < held.rows; ++r) mean += static_cast<double>(held.row(r)[i]);
      mean /= held.rows;
      for (int r = 0; r < held.rows; ++r) {
        const double apart = static_cast<double>(held.row(r)[i]) - mean;
        variance += apart * apart;
      }
      scores[i] = static_cast<float>(mean + static_cast<double>(gamma) * variance / held.rows);
    }
    detail::average_near(scores, voted, kernel, worths);
    return n;
  }

  std::string values() const {
    return std::to_string(window) + ", " + std::to_string(kernel) + ", gamma " + detail::decimal(gamma) +
           ", alpha " + detail::decimal(alpha);
  }
  void validate(const eviction_limits& most, std::string_view who = name) const {
    detail::check_window(who, window, 32, kernel, 5, most);
    if (!(gamma >= 0.0f && gamma < HUGE_VALF) || !(alpha >= 0.0f && alpha < 1.0f))
      throw settings_error(std::string(who) + ": a gamma of " + detail::decimal(gamma) + " and an alpha of " +
                           detail::decimal(alpha) +
                           "; gamma is 0 or more and finite, alpha a share below 1; 0.75 as published");
  }
};
static_assert(eviction_policy<arkv_origin>);

/// ARKV (Lei and Ilager 2026, equations 1 to 10 and algorithm 1): of a budget of B tokens, W of them the
/// window, a cut leaves the b = floor(alpha (B - W)) best of `arkv_origin`, of them the best rho (B - W) as
/// they are and the others in fp8 with a scale for each token, and the window as it is. A layer's ratio rho
/// is H^(1/tau1) V^(1/tau2) K^(1/tau3) over the largest of all layers, of the entropy, variance and kurtosis
/// of what tokens before the window have of the shares of the prompt's last W rows, summed over the layer's
/// query heads; 1 where these give none, as of a prompt that is within the window.
///
/// Since b is cut first, which is algorithm 1's order, a layer of a ratio of alpha or more has no token in
/// fp8: right after a cut the part in fp8 of all budgets is (1 - W/B) times the mean of max(0, alpha - rho).
/// It is not the paper's "quant ratio", which is the mean of 1 - rho, of the prompt alone. Unlike the
/// published code, which decodes and encodes all that stays at every cut, each token is encoded once: one
/// that is in fp8 already stays so, however well it ranks, and is no original. gamma weighs the variance, as
/// in algorithm 1 and not squared as in equation 9; shares are those of the last W rows in every cut, and B
/// is the budget in equation 8 less the window, as in algorithm 1. A budget counts tokens of either kind.
/// Before its first cut a head may hold B tokens as they are, so that is the room that it has; tokens in fp8
/// take their own size of it.
struct arkv : arkv_origin {
  using hooks = hook_list<hook::demote, hook::observe, hook::rate, hook::validate, hook::values>;
  static constexpr std::string_view name = "arkv";
  float tau1 = 7.774f, tau2 = 5.407f, tau3 = 5.528f;

  constexpr fp8_token codec() const { return {}; }
  constexpr int most_originals(const eviction_limits& most) const { return most.budget; }
  constexpr int originals(const eviction_moment& at) const {
    return at.held < at.budget ? every_token : window + part_of(at, at.budget - window);
  }

  double sensitivity(const double* votes, int tokens) const {
    const int voted = std::max(0, tokens - window);
    double sum = 0.0, entropy = 0.0, squares = 0.0, fourths = 0.0;
    for (int i = 0; i < voted; ++i) sum += votes[i];
    for (int i = 0; i < voted; ++i) {
      const double share = votes[i] / sum, apart = share - 1.0 / voted;
      if (share > 0.0) entropy -= share * std::log(share);
      squares += apart * apart;
      fourths += apart * apart * apart * apart;
    }
    const double variance = squares / voted, kurtosis = fourths / voted / (variance * variance);
    return std::pow(entropy, 1.0 / static_cast<double>(tau1)) *
           std::pow(variance, 1.0 / static_cast<double>(tau2)) *
           std::pow(kurtosis, 1.0 / static_cast<double>(tau3));
  }
  void rate(const double* sensitivities, int layers, float* ratios) const {
    const auto tells = [](double of) { return std::isfinite(of) && of > 0.0; };
    double most = 0.0;
    for (int layer = 0; layer < layers; ++layer)
      if (tells(sensitivities[layer])) most = std::max(most, sensitivities[layer]);
    for (int layer = 0; layer < layers; ++layer)
      ratios[layer] = tells(sensitivities[layer]) ? static_cast<float>(sensitivities[layer] / most) : 1.0f;
  }

  std::string values() const {
    return arkv_origin::values() + ", tau " + detail::decimal(tau1) + " " + detail::decimal(tau2) + " " +
           detail::decimal(tau3);
  }
  void validate(const eviction_limits& most, std::string_view who = name) const {
    arkv_origin::validate(most, who);
    if (!(tau1 > 0.0f) || !(tau2 > 0.0f) || !(tau3 > 0.0f))
      throw settings_error(std::string(who) + ": taus of " + detail::decimal(tau1) + ", " +
                           detail::decimal(tau2) + " and " + detail::decimal(tau3) +
                           "; taus are above 0; 7.774, 5.407 and 5.528 as published");
  }

 protected:
  static constexpr int part_of(const eviction_moment& at, int tokens) {
    return static_cast<int>(static_cast<double>(at.ratio) * tokens);
  }
};
static_assert(eviction_policy<arkv>);

/// `arkv` whose ratio is of what stays: of the b tokens beside the window the best rho b stay as they are, so
/// that every layer whose ratio is below 1 has tokens in fp8, 1 - rho of b.
struct arkv_split : arkv {
  static constexpr std::string_view name = "arkv_split";

  constexpr int originals(const eviction_moment& at) const {
    return at.held < at.budget ? every_token : window + part_of(at, kept(at) - window);
  }
  void validate(const eviction_limits& most) const { arkv::validate(most, name); }
};
static_assert(eviction_policy<arkv_split>);

}  // namespace freekv
