// Eviction that merges: a token that leaves goes into one that stays.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/policies/counting_eviction.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/policies/hard_kv.hpp>
#include <freekv/policies/plan.hpp>
#include <iterator>
#include <numbers>
#include <numeric>
#include <span>
#include <string>
#include <string_view>

namespace freekv {

/// D2O (arXiv 2406.13035, token level): h2o, a quarter of whose budget is recent, and a token that leaves
/// merges into the token that stays whose key is most like its own, where their cosine is at least a
/// threshold; else it is lost. The threshold is the mean of these cosines when tokens leave first, and then
/// `beta` of the mean and the rest of what it was. In the mean of keys and values a token weighs exp(cosine),
/// that which stays e. Unlike the paper's, all layers have the same budget (there by how dense their
/// attention is), and each KV head has its own threshold. The published code adds keys multiplied by their
/// cosines and divides by how many there are, which makes keys shorter; here the weights are the paper's. It
/// also keeps the first four tokens whatever they are worth, and the mean of all heads' cosines decides for
/// all of them.
struct d2o : h2o {
  using hooks = hook_list<hook::merge, hook::validate, hook::values>;
  static constexpr std::string_view name = "d2o";
  constexpr d2o() : h2o{0.25f} {}
  float beta = 0.7f;

  struct head_memory {
    double threshold = 0.0;
    bool begun = false;
  };
  constexpr merge_rule merge_by() const { return merge_rule::by_weights; }
  void merge(const merging_tokens& of, const eviction_moment&, head_memory& memory, merge_fate* fates) const {
    if (of.staying == 0) return;
    double sum = 0.0;
    for (int i = of.staying; i < of.end(); ++i) {
      fates[i].into = of.nearest(i);
      sum += fates[i].weight = of.cosine(i, fates[i].into);
    }
    constexpr double rounding = 1e-12;  // of means, above which no cosine need be where all are alike
    const double mean = sum / of.leaving, part = static_cast<double>(beta);
    memory = {memory.begun ? part * mean + (1.0 - part) * memory.threshold : mean, true};
    for (int i = 0; i < of.staying; ++i) fates[i].weight = std::numbers::e;
    for (int i = of.staying; i < of.end(); ++i) {
      if (!(fates[i].weight >= memory.threshold - rounding)) fates[i].into = -1;
      fates[i].weight = std::exp(fates[i].weight);
    }
  }

  std::string values() const { return h2o::values() + ", beta " + detail::decimal(beta); }
  void validate(const eviction_limits&) const {
    if (!(recent >= 0.0f && recent < 1.0f) || !(beta >= 0.0f && beta <= 1.0f))
      throw settings_error("d2o: recent of " + detail::decimal(recent) + " and a beta of " +
                           detail::decimal(beta) +
                           "; give a share below 1 and one from 0 to 1; 0.25 and 0.7 as published");
  }
};
static_assert(eviction_policy<d2o>);

/// TOVA without loss in the row that decides: the token that leaves merges into the one that stays whose key
/// is most like its own. Keys and values are weighed by what they have of that row, and a log-weight makes up
/// for what the row's score on the new key lacks, so that its output and log-sum-exp stay as they were. Where
/// a KV head has several query heads the weights are the mean of theirs, and so is the log-weight: exact is
/// one query head. KeepKV (arXiv 2504.09936) has the same aim and scales the new key instead, by a quotient
/// of logarithms that may be 0.
struct exact_merge : tova {
  using hooks = hook_list<hook::merge>;
  static constexpr std::string_view name = "exact_merge";

  struct head_memory {};
  constexpr merge_rule merge_by() const { return merge_rule::as_last_row; }
  void merge(const merging_tokens& of, const eviction_moment&, head_memory&, merge_fate* fates) const {
    for (int i = of.staying; i < of.end(); ++i) fates[i].into = of.nearest(i);
  }
};
static_assert(eviction_policy<exact_merge>);

/// HARD-KV (`hard_kv`) that keeps log-sum-exps as its appendix E means to: tokens that leave merge as in
/// exact_merge. The paper merges the i-th best token with the i-th worst, or the best with the mean of the
/// worst, by their scores. A mean of keys has the geometric mean of their masses, and one token is where two
/// were: the sum falls all the same.
struct hard_kv_merge : hard_kv {
  using hooks = hook_list<hook::merge, hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "hard_kv_merge";

  using head_memory = exact_merge::head_memory;
  constexpr merge_rule merge_by() const { return merge_rule::as_last_row; }
  void merge(const merging_tokens& of, const eviction_moment& at, head_memory& memory,
             merge_fate* fates) const {
    exact_merge{}.merge(of, at, memory, fates);
  }
};
static_assert(eviction_policy<hard_kv_merge>);

/// HARD-KV (`hard_kv`) with the merging of its appendix E: of those that leave the i-th worst token goes into
/// the i-th best of those that stay, beside sink and window, and the best becomes (s x + s' x') / (s + s') of
/// both keys and values; with one taker, the paper's many-to-one, the mean of all by s. The paper's s is a
/// token's attention score; here, as in the published code, its share of a row's softmax of the group's
/// largest scores, neither pooled nor at another temperature, the mean of the window's rows. The published
/// code takes the worst by the calibrated shares instead, needs as many that stay as leave, and drops what it
/// has merged; here ranks begin again where fewer stay, so that a best token is the mean of a set, and a
/// token of share 0 is lost. Log-sum-exps fall, as the paper does not mean it (`hard_kv_merge` keeps the last
/// row's).
struct hard_kv_pairs : hard_kv {
  using hooks = hook_list<hook::merge, hook::observe, hook::validate, hook::values>;
  static constexpr std::string_view name = "hard_kv_pairs";
  int takers = every_token;  ///< tokens, the best, that others merge into, at most; 1: many-to-one

  struct head_memory {};
  constexpr merge_rule merge_by() const { return merge_rule::by_shares; }
  void merge(const merging_tokens& of, const eviction_moment& at, head_memory&, merge_fate* fates) const {
    std::int32_t *const best = of.scratch, *const worst = of.scratch + of.staying;
    std::iota(best, best + of.end(), 0);
    std::int32_t* const end =
        std::remove_if(best, worst, [&](int i) { return protects(of.tokens[i], at) || of.shares[i] == 0.0; });
    const auto sort_by_share = [&](std::int32_t* first, std::int32_t* last, double sign) {
      std::sort(first, last, [&](int a, int b) {
        return of.shares[a] == of.shares[b] ? a < b : sign * of.shares[a] < sign * of.shares[b];
      });
    };
    sort_by_share(best, end, -1.0);
    sort_by_share(worst, worst + of.leaving, 1.0);
    const int taking = std::min(takers, static_cast<int>(end - best));
    for (int i = 0; i < of.end(); ++i) fates[i].weight = of.shares[i];
    for (int nth = 0; taking > 0 && nth < of.leaving; ++nth)
      if (of.shares[worst[nth]] > 0.0) fates[worst[nth]].into = best[nth % taking];
  }

  std::string values() const {
    return hard_kv::values() + (takers == every_token ? "" : ", into the best " + std::to_string(takers));
  }
  void validate(const eviction_limits& most) const {
    hard_kv::validate(most);
    if (takers < 1)
      throw settings_error("hard_kv_pairs: " + std::to_string(takers) +
                           " tokens take others; at least 1, which is the paper's many-to-one");
  }
};
static_assert(eviction_policy<hard_kv_pairs>);

/// KVMerger (arXiv 2407.08454): runs of neighbours with similar keys become a token each. When a prompt ends
/// it is cut between neighbours of the least cosine until there are as many runs as the budget has tokens;
/// the first `sink` tokens and the latest `window` are runs of their own. Of a run the token stays that has
/// most of the window's attention, the pivot p. It becomes the mean of the run's keys and values by weights
/// exp(-|k_p - k_i|^2 / (2 sigma^2)), and weighs as many as they are. All that is decoded stays.
///
/// The paper cuts where a cosine is below 0.75, so that its budget is what a text comes to; it leaves out of
/// merging, beside the latest tokens, those of most attention, and counts the attention of all rows. Its
/// sigma is a mean of weights that depend on it, about 5 for its models; here sigma^2 is the mean of the
/// run's squared distances from the pivot, whatever the size of keys. The paper multiplies the mean of values
/// by the number of tokens; here a log-weight counts them, in the softmax's sum too. Cosines are compared as
/// float32.
struct kv_merger {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::merge, hook::observe, hook::sees_keys, hook::validate, hook::values>;
  static constexpr std::string_view name = "kv_merger";
  int window = 32;
  int sink = 1;

  constexpr int unit_tokens() const { return 1; }
  constexpr bool stages_prompt() const { return true; }
  constexpr int observed_rows() const { return window; }
  constexpr int capacity(const eviction_limits& most) const { return most.budget + most.max_generated; }
  constexpr int kept(const eviction_moment& at) const { return at.prompt_ends ? at.budget : every_token; }
  constexpr bool protects(int token, const eviction_moment& at) const {
    return token < sink || token >= at.prompt - window;
  }

  constexpr group_rule group() const { return group_rule::each; }
  constexpr bool observes_decoding() const { return false; }
  constexpr bool sees_keys() const { return true; }
  int observe(const observed_units& held, const eviction_moment& at, float* worths) const {
    const int n = held.units, cuts = std::min(n, at.budget) - 1;
    float* const attention = held.scratch_row(0);
    std::fill_n(attention, n, 0.0f);
    for (int r = 0; r < held.rows; ++r)
      for (int i = 0; i < n; ++i) attention[i] += held.row(r)[i];

    float* const pairs = held.row(0);  // of unit i and the next
    double before = length(held, 0);
    for (int i = 0; i + 1 < n; ++i) {
      const double behind = length(held, i + 1),
                   product = held.product(held.key(i), held.key(i + 1), held.head_dim);
      pairs[i] = likeness(held.tokens[i], held.tokens[i + 1], product / (before * behind), at);
      before = behind;
    }
    float most = -HUGE_VALF;  // of a pair that is cut
    int alike = 0;            // pairs that are as much, and cut: the first of them
    if (cuts > 0) {
      std::copy_n(pairs, n - 1, worths);
      std::nth_element(worths, worths + (cuts - 1), worths + (n - 1));
      most = worths[cuts - 1];
      alike =
          cuts - static_cast<int>(std::count_if(pairs, pairs + (n - 1), [&](float of) { return of < most; }));
    }
    std::fill_n(worths, n, 0.0f);
    for (int i = 0, pivot = 0; i < n; ++i) {
      if (attention[i] > attention[pivot]) pivot = i;
      if (i + 1 < n && !(pairs[i] < most) && !(pairs[i] == most && alike-- > 0)) continue;
      worths[pivot] = 1.0f;
      pivot = i + 1;
    }
    return cuts + 1;
  }

  struct head_memory {};
  constexpr merge_rule merge_by() const { return merge_rule::as_many; }
  /// Finds the runs again: between two pivots that follow each other one pair was cut, the least.
  void merge(const merging_tokens& of, const eviction_moment& at, head_memory&, merge_fate* fates) const {
    if (of.staying == 0) return;
    int next = of.staying;  // of those that leave
    for (int behind = 0; behind <= of.staying; ++behind) {
      const int first = next;
      while (next < of.end() && (behind == of.staying || of.tokens[next] < of.tokens[behind])) ++next;
      const int cut = behind == 0            ? first
                      : behind == of.staying ? next
                                             : least_pair(of, at, behind, first, next);
      for (int i = first; i < next; ++i) fates[i].into = i < cut ? behind - 1 : behind;
    }
    for (int first = of.staying, end = first; first < of.end(); first = end) {
      const int pivot = fates[first].into;
      double sum = 0.0;
      for (; end < of.end() && fates[end].into == pivot; ++end)
        sum += fates[end].weight = squared_distance(of, pivot, end);
      const double twice_variance = 2.0 * sum / (end - first);
      for (int i = first; i < end; ++i)
        fates[i].weight = sum == 0.0 ? 1.0 : std::exp(-fates[i].weight / twice_variance);
    }
  }

  std::string values() const { return std::to_string(window) + ", sink " + std::to_string(sink); }
  void validate(const eviction_limits& most) const {
    if (window < 1 || sink < 0 || std::int64_t{sink} + window >= most.budget)
      throw settings_error("kv_merger: a sink of " + std::to_string(sink) + " tokens and a window of " +
                           std::to_string(window) + " of a budget of " + std::to_string(most.budget) +
                           "; give a window of at least 1, and leave room for a token between them");
  }

 private:
  static double length(const observed_units& held, int unit) {
    return std::sqrt(held.product(held.key(unit), held.key(unit), held.head_dim));
  }
  /// Likeness of two neighbours, of which the least are cut.
  float likeness(int token, int behind, double cosine, const eviction_moment& at) const {
    if (protects(token, at) || protects(behind, at)) return -HUGE_VALF;
    return std::isfinite(cosine) ? static_cast<float>(cosine) : 0.0f;
  }
  /// Place of the first token behind the least pair, of those that leave between pivots behind - 1 and
  /// behind.
  int least_pair(const merging_tokens& of, const eviction_moment& at, int behind, int first, int end) const {
    int cut = first;
    float least = HUGE_VALF;
    for (int i = first; i <= end; ++i) {
      const int one = i == first ? behind - 1 : i - 1, other = i == end ? behind : i;
      const float now = likeness(of.tokens[one], of.tokens[other], of.cosine(one, other), at);
      if (now < least) least = now, cut = i;
    }
    return cut;
  }
  static double squared_distance(const merging_tokens& of, int one, int other) {
    double sum = 0.0;
    for (int x = 0; x < of.head_dim; ++x) {
      const double apart = static_cast<double>(of.key(one)[x]) - static_cast<double>(of.key(other)[x]);
      sum += apart * apart;
    }
    return sum;
  }
};
static_assert(eviction_policy<kv_merger>);

/// RazorAttention (arXiv 2407.15891) with its compensation token: some KV heads keep everything, the others
/// the first `sink` tokens, the latest, and one token for all that have left, the mean of their keys and
/// values, which weighs as many as they are. Unlike the paper's, these heads have the budget, and not the
/// larger of 4000 tokens and a fifth of the prompt; their keys are averaged rotated, as they are kept, in the
/// element type.
struct razor_attention_compensated {
  using policy_kind = eviction_kind;
  using hooks = hook_list<hook::merge, hook::validate, hook::values>;
  static constexpr std::string_view name = "razor_attention_compensated";
  /// Kinds of the model's KV heads, (layers, kv_heads); the caller keeps their memory. Those of kind window
  /// forget, the others keep everything; without any kinds, all forget.
  std::span<const layer_kind> kinds{};
  int kv_heads = 1;
  int sink = 4;

  struct unit_state {
    std::uint32_t token;
  };
  int unit_tokens() const { return 1; }
  bool stages_prompt() const { return true; }
  int observed_rows() const { return 0; }
  int capacity(const eviction_limits& most) const {
    return forgets(most.layer - most.layers, most.head) ? most.budget + 1
                                                        : most.max_prompt + most.max_generated;
  }
  int kept(const eviction_moment& at) const {
    return forgets(at.layer - at.layers, at.head) ? at.budget : every_token;
  }
  bool protects(int token, const eviction_moment&) const { return token <= sink; }
  void on_append(unit_state& unit, int row) const { unit.token = static_cast<std::uint32_t>(row); }
  void on_prompt(unit_state&, const prompt_votes&, int) const {}
  void on_attended(unit_state&, float, int) const {}
  std::uint32_t worth(const unit_state& unit) const { return unit.token; }

  struct head_memory {
    std::int64_t merged =
        0;  // tokens, besides the one that they merge into, which is the first behind the sink
  };
  merge_rule merge_by() const { return merge_rule::as_many; }
  void merge(const merging_tokens& of, const eviction_moment&, head_memory& memory, merge_fate* fates) const {
    if (of.staying <= sink) return;
    fates[sink].weight = static_cast<double>(1 + memory.merged);
    for (int i = of.staying; i < of.end(); ++i) fates[i].into = sink;
    memory.merged += of.leaving;
  }

  std::string values() const {
    const auto forget = std::count(kinds.begin(), kinds.end(), layer_kind::window);
    return std::to_string(std::ssize(kinds) - forget) + " heads keep everything, sink " +
           std::to_string(sink);
  }
  void validate(const eviction_limits& most) const {
    const auto text = [](auto n) { return std::to_string(n); };
    if (sink < 0 || sink > most.budget - 2)
      throw settings_error(std::string(name) + ": a sink of " + text(sink) + " tokens of a budget of " +
                           text(most.budget) + "; leave room for two tokens behind it");
    if (!kinds.empty() &&
        (kv_heads != most.kv_heads || std::ssize(kinds) % kv_heads != 0 || layers() < most.layers))
      throw settings_error(std::string(name) + " has kinds for " + text(kinds.size()) + " heads, " +
                           text(kv_heads) +
                           " a layer; needed are those of all layers of the model, of which " +
                           text(most.layers) + " forget, with " + text(most.kv_heads) + " heads each");
  }

 private:
  int layers() const { return static_cast<int>(std::ssize(kinds)) / kv_heads; }
  /// `layer` from the end, -1 being the last.
  bool forgets(int layer, int head) const {
    return kinds.empty() || kinds[to_size((layers() + layer) * kv_heads + head)] == layer_kind::window;
  }
};
static_assert(eviction_policy<razor_attention_compensated>);

}  // namespace freekv
