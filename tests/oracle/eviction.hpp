// One layer of one sequence that forgets, by each method from its definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "codec.hpp"
#include "formats.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

enum class eviction_kind {
  h2o,
  mikv,
  q_hitter,
  tova,
  snapkv,
  dapq,
  epi_cache,
  pyramid_kv,
  raas,
  lazy_eviction,
  hard_kv,
  defensive_kv,
  layer_defensive_kv,
  compress_kv,
  cake,
  r_kv,
  arkv_origin,
  arkv,
  arkv_split,
  d2o,
  exact_merge,
  hard_kv_merge,
  hard_kv_pairs,
  kv_merger,
  trim_kv,
  given_worths
};

struct eviction_settings {
  int query_heads = 1;
  int kv_heads = 1;
  int head_dim = 1;
  int budget = 1;  // tokens
  double scale = 1.0;
  eviction_kind kind = eviction_kind::h2o;
  double recent = 0.5;                         // of h2o and given_worths
  int window = 32;                             // of snapkv, rows
  int kernel = 7;                              // of snapkv, tokens
  int page = 1;                                // of raas, tokens; 1 for the others
  double threshold = 1e-4;                     // of raas
  int room = 1;                                // of raas, tokens, where it keeps the prompt
  bool keeps_prompt = false;                   // of raas
  int sink = 0, recent_tokens = 0;             // of raas, where it does not keep the prompt
  int layer = 0, layers = 1;                   // of those that forget
  int beta = 20;                               // of pyramid_kv
  double p = 0.9;                              // of hard_kv
  int interval = 128;                          // of hard_kv, decode rows
  int takers = std::numeric_limits<int>::max();  // of hard_kv_pairs, tokens
  double heavy = 0.35;                           // of q_hitter
  double alpha = 0.75;                         // of arkv_origin, arkv and arkv_split
  double lambda = 0.1, similar = 0.5;          // of r_kv
  double gamma = 200, tau1 = 1.6, tau2 = 0.6;  // of cake
  double tau3 = 1;                             // of arkv
  double ratio = 1;                            // of arkv, what the layer has been given
  bool ratio_is_doubtful = false;              // what it comes to in tokens, to rounding
  double ema = 0.7;                            // of d2o
  element_kind element = element_kind::f32;    // of keys and values that are merged, or decoded
  int prompt_budget = -1;                      // of cake, what the layer has been given; -1: as all
  bool budget_is_doubtful = false;             // to rounding
  std::vector<int> head_budgets{};             // of layer_defensive_kv, by KV head; none: as all
  std::vector<int> voters{};                   // of compress_kv, query heads; none: all
};

/// What a unit is worth, as far as float32 can tell: two implementations agree on an order where these are
/// apart, or are exact and alike.
struct worth {
  double low = 0, high = 0;
  int source = -1;  // where it is one number of several units: which
  bool apart_from(const worth& other) const {
    const bool exact = low == high && other.low == other.high && low == other.low;
    return low > other.high || high < other.low || exact || (source >= 0 && source == other.source);
  }
};

/// What a step did, by query head and KV head.
struct eviction_step {
  attention attended;  // (n_qo, d) and (n_qo)
  std::vector<std::vector<int>>
      units;  // by KV head, ascending: what was attended to, the new token's unit among it
};

/// Keeps everything that was ever appended, and of each KV head the set of units that it has not forgotten.
class forgetful_decoder {
 public:
  explicit forgetful_decoder(const eviction_settings& s)
      : s_(s), heads_(static_cast<std::size_t>(s.kv_heads)) {}

  /// Rows of the prompt, of epi_cache a block: `q` (tokens, n_qo, d), keys and values (tokens, n_kv, d);
  /// worths (tokens, n_kv) of methods that take them.
  void prompt(std::span<const float> q, std::span<const float> keys, std::span<const float> values,
              std::span<const float> worths = {}) {
    if (cuts_blocks()) end_block();
    queries_.insert(queries_.end(), q.begin(), q.end());
    given_.insert(given_.end(), worths.begin(), worths.end());
    append(keys, values);
    if (cuts_blocks())
      for (head_state& h : heads_)
        for (int token = prompt_; token < length_; ++token) h.units.insert(token);
    prompt_ = length_;
  }
  /// Of epi_cache: what a KV head holds of the prompt so far.
  std::vector<int> held(int head) const {
    const auto& units = heads_[static_cast<std::size_t>(head)].units;
    return {units.begin(), units.end()};
  }

  /// Probe rows (rows, n_qo, d) that observe the prompt from behind it, or its last block.
  void observe(std::span<const float> q) { probes_.insert(probes_.end(), q.begin(), q.end()); }

  /// Exact attention of a prompt row to everything up to itself; of epi_cache, of the last block, to what is
  /// held of it.
  attention prompt_row(int row) const {
    attention all;
    for (int head = 0; head < s_.kv_heads; ++head) {
      std::vector<int> tokens = cuts_blocks() ? held(head) : tokens_up_to(row + 1);
      while (tokens.back() > row) tokens.pop_back();
      attend_group(query_row(row), head, tokens, all);
    }
    return all;
  }

  /// CAKE: what a layer's attention is like, by which it gets its budget.
  double preference() const {
    double entropy = 0, variance = 0;
    for (int head = 0; head < s_.kv_heads; ++head)
      for (const auto& rows : window_shares(head)) {
        for (const auto& row : rows)
          for (const double share : row) entropy -= share > 0 ? share * std::log(share) : 0;
        for (std::size_t t = 0; !rows.empty() && t < rows[0].size(); ++t)
          variance += variance_of(column(rows, t));
      }
    return std::pow(entropy, 1 / s_.tau1) * std::pow(variance, 1 / s_.tau2);
  }
  /// Layer-DefensiveKV: worths of a KV head's tokens before the window.
  std::vector<double> defended_worths(int head) const {
    std::vector<double> worths = worst_case(head);
    double mean = 0;
    for (const double of : worths) mean += of / static_cast<double>(worths.size());
    for (double& of : worths) of = std::max(of, mean);
    return worths;
  }
  /// ARKV, equations 3 to 6: how much a layer's attention to what is before the window asks for, by which it
  /// gets its ratio.
  double sensitivity() const {
    std::vector<double> p(static_cast<std::size_t>(std::max(0, prompt_ - s_.window)));
    double z = 0;
    for (int head = 0; head < s_.kv_heads; ++head)
      for (const auto& rows : window_shares(head))
        for (const auto& row : rows)
          for (std::size_t k = 0; k < p.size(); ++k) p[k] += row[k], z += row[k];
    double entropy = 0, mean = 0, second = 0, fourth = 0;
    for (double& of : p) {
      of /= z;
      mean += of / static_cast<double>(p.size());
      entropy -= of > 0 ? of * std::log(of) : 0;
    }
    for (const double of : p) {
      second += std::pow(of - mean, 2) / static_cast<double>(p.size());
      fourth += std::pow(of - mean, 4) / static_cast<double>(p.size());
    }
    return std::pow(entropy, 1 / s_.tau1) * std::pow(second, 1 / s_.tau2) *
           std::pow(fourth / std::pow(second, 2), 1 / s_.tau3);
  }
  /// The layer's ratio, before its prompt is cut.
  void take_ratio(const eviction_settings& given) {
    s_.ratio = given.ratio;
    s_.ratio_is_doubtful = given.ratio_is_doubtful;
  }
  /// The layer's budget or its heads', before its prompt is cut.
  void take_budget(const eviction_settings& given) {
    s_.prompt_budget = given.prompt_budget;
    s_.head_budgets = given.head_budgets;
    s_.budget_is_doubtful = given.budget_is_doubtful;
  }

  /// Tokens that have merged into others, and those that could have and are lost.
  long merged() const { return merged_; }
  long lost() const { return lost_; }

  /// What a KV head has not forgotten before the next step; a prompt has been cut.
  std::vector<int> kept(int head) {
    end_prompt();
    const auto& units = heads_[head].units;
    return {units.begin(), units.end()};
  }

  /// Whether another implementation may keep `units` instead: all that it swapped for one another has been
  /// worth the same, to rounding, when the last ones left. If so, this one keeps them too.
  bool accepts(int head, const std::vector<int>& units) {
    head_state& h = heads_[head];
    const std::set<int> theirs(units.begin(), units.end());
    if (selects_by_mass()) return accepts_selection(h, theirs);
    if (s_.kind == eviction_kind::kv_merger) return accepts_runs(h, theirs);
    if (s_.budget_is_doubtful && std::abs(std::ssize(theirs) - std::ssize(h.units)) <= 2 &&
        !h.just_left.empty()) {
      h.units.insert(h.just_left.begin(), h.just_left.end());
      leave(h, true, static_cast<int>(theirs.size()));
    }
    if (theirs.size() != h.units.size()) return false;
    for (const int only_theirs : theirs) {
      if (h.units.count(only_theirs) != 0) continue;
      if (h.just_left.count(only_theirs) == 0) return false;
      for (const int only_ours : h.units)
        if (theirs.count(only_ours) == 0 && (h.was_protected.count(only_ours) != 0 ||
                                             worth_of(h, only_theirs).apart_from(worth_of(h, only_ours))))
          return false;
    }
    keep_instead(h, theirs);
    return true;
  }

  /// Tokens of a KV head that are coded before the next step.
  const std::set<int>& coded(int head) {
    end_prompt();
    return heads_[head].coded;
  }
  /// As `accepts`, of what is coded of the units that stay.
  bool accepts_coded(int head, const std::set<int>& theirs) {
    head_state& h = heads_[head];
    const auto more = std::ssize(theirs) - std::ssize(h.coded);
    if (more != 0) {
      if (!s_.ratio_is_doubtful || std::abs(more) > 1 || h.coded_of == 0) return false;
      code_least(h, static_cast<int>(std::ssize(h.units) - std::ssize(theirs)));
      if (theirs.size() != h.coded.size()) return false;
    }
    const std::set<int> ours = h.coded;
    for (const int only_theirs : theirs) {
      if (ours.count(only_theirs) != 0) continue;
      if (h.units.count(only_theirs) == 0 || h.was_protected.count(only_theirs) != 0) return false;
      for (const int only_ours : ours)
        if (theirs.count(only_ours) == 0 &&
            (h.uncoded.count(only_ours) == 0 || worth_of(h, only_theirs).apart_from(worth_of(h, only_ours))))
          return false;
    }
    for (const int token : ours)
      if (theirs.count(token) == 0) {
        put_numbers(head, token, h.uncoded.at(token));
        h.uncoded.erase(token);
        h.coded.erase(token);
      }
    for (const int token : theirs)
      if (ours.count(token) == 0) code(h, token);
    return true;
  }

  eviction_step step(std::span<const float> q, std::span<const float> key, std::span<const float> value,
                     std::span<const float> worths = {}) {
    end_prompt();
    given_.insert(given_.end(), worths.begin(), worths.end());
    decodes_ = true;
    queries_.insert(queries_.end(), q.begin(), q.end());
    append(key, value);
    eviction_step result;
    for (int head = 0; head < s_.kv_heads; ++head) {
      head_state& h = heads_[head];
      const int row = length_ - 1;
      h.units.insert(row / s_.page);
      grow(h);
      if (s_.kind == eviction_kind::raas) h.worths[row / s_.page] = {double(row), double(row), -1};
      std::vector<int> tokens;
      for (const int unit : h.units)
        for (int t = unit * s_.page; t < std::min((unit + 1) * s_.page, length_); ++t) tokens.push_back(t);
      const std::vector<double> shares = attend_group(q, head, tokens, result.attended);
      result.units.push_back({h.units.begin(), h.units.end()});
      if (takes_worths()) {
        for (const int token : h.units) h.worths[token] = given_worth(head, token, row);
        leave(h, false);
        continue;
      }
      if (selects_by_mass()) {
        if ((length_ - prompt_) % s_.interval == 0) select_by_mass(h, head);
        continue;
      }
      if (s_.kind == eviction_kind::kv_merger) {
        h.just_left.clear();
        continue;
      }
      if (ranks_heavy_hitters()) {
        judge_heavy_hitters(h, head);
        continue;
      }
      if (s_.kind == eviction_kind::r_kv) {
        if ((length_ - prompt_) % s_.interval == 0) judge_redundancy(h, head);
        continue;
      }
      count(h, tokens, shares, row);
      leave(h, false);
    }
    return result;
  }

 private:
  /// Of lazy_eviction: a token's last active row, and the longest between two of them.
  struct recurrence {
    int active = -1, interval = 0;
    bool doubtful = false;  // rounding may have decided whether it was active
  };
  /// How far a merged token's numbers may be from the definition's: where a sum lies at the edge between two
  /// numbers of the element, either may be stored.
  struct number_doubts {
    std::vector<double> key, value;  // empty: none
    double log_weight = 0;
  };
  /// A head's token.
  struct token_numbers {
    std::vector<float> key, value;
    float log_weight = 0;
    number_doubts doubts = {};
  };
  /// Of d2o: the threshold, once there is one.
  struct merged_state {
    double threshold = 0;
    bool begun = false;
  };
  struct head_state {
    std::set<int> units;
    std::vector<worth> worths;  // by unit
    std::vector<worth> ranked;  // of q_hitter, by unit, when the last ones left
    std::vector<recurrence> recurrences;
    std::set<int> just_left, was_protected;
    std::set<int> surely_kept, possibly_kept;  // of hard_kv, when the last ones left
    merged_state merged, before_merging;       // now, and before the last ones left
    std::map<int, token_numbers> unmerged;     // tokens as they were then
    std::map<int, std::vector<int>> runs;      // of kv_merger, by the token that stays
    std::set<int> coded, coded_before;         // now, and before the last ones left
    std::map<int, token_numbers> uncoded;      // as they were, those that are coded since
    int coded_of = 0;                          // units, when the last ones left; 0: none has left
  };

  /// A row that is observed: its query, and the last token that it attends to.
  struct observed_row {
    std::span<const float> query;
    int last = 0;
  };
  /// The last `count` rows: when a prompt ends its own and behind them the probes. Later these are forgotten,
  /// and so is what was not among the last `count` because of them.
  std::vector<observed_row> observed_rows(int count) const {
    const int width = s_.query_heads * s_.head_dim, probes = static_cast<int>(probes_.size()) / width;
    const int known = std::max(0, prompt_ + std::min(probes, count) - count);
    std::vector<observed_row> rows;
    if (decodes_) {
      for (int row = std::max(known, length_ - count); row < length_; ++row)
        rows.push_back({query_row(row), row});
      return rows;
    }
    for (int row = std::max(block_, prompt_ + probes - count); row < prompt_ + probes; ++row)
      rows.push_back(row < prompt_ ? observed_row{query_row(row), row}
                                   : observed_row{row_of(probes_, row - prompt_, width), prompt_ - 1});
    return rows;
  }
  /// Scores of a row on tokens, the largest of the KV head's query heads; -infinity behind the row.
  std::vector<double> largest_scores(const observed_row& row, int head,
                                     const std::vector<int>& tokens) const {
    const int group = s_.query_heads / s_.kv_heads;
    std::vector<double> scores(tokens.size(), -std::numeric_limits<double>::infinity());
    for (std::size_t i = 0; i < tokens.size(); ++i)
      for (int g = 0; g < group && tokens[i] <= row.last; ++g) {
        const int place = tokens[i] * s_.kv_heads + head;
        const double score = s_.scale * dot(row_of(row.query, head * group + g, s_.head_dim),
                                            row_of(keys_, place, s_.head_dim)) +
                             static_cast<double>(log_weights_[place]);
        scores[i] = std::max(scores[i], score);
      }
    return scores;
  }
  /// A row of HARD-KV: scores that tokens are ranked by, and how many of the best have a share of p of its
  /// own scores, to rounding at least and at most.
  struct mass_row {
    std::vector<double> ranked;
    int fewest = 0, fewest_low = 0, fewest_high = 0;

    std::vector<double> weights(double temperature) const {
      const double most = *std::max_element(ranked.begin(), ranked.end());
      double sum = 0;
      std::vector<double> all;
      for (const double score : ranked) sum += all.emplace_back(std::exp((score - most) / temperature));
      for (double& weight : all) weight /= sum;
      return all;
    }
    double mass_of_best(int n, double temperature) const {
      std::vector<double> all = weights(temperature);
      std::sort(all.rbegin(), all.rend());
      double mass = 0;
      for (int i = 0; i < n; ++i) mass += all[i];
      return mass;
    }
  };
  static constexpr double mass_doubt = 3e-6;
  mass_row mass_row_of(const std::vector<double>& scores) const {
    mass_row row{scores};
    const auto fewest = [&](double p) {
      for (int n = 1; n < std::ssize(scores); ++n)
        if (row.mass_of_best(n, 1.0) >= p) return n;
      return static_cast<int>(
          std::count_if(scores.begin(), scores.end(), [](double s) { return std::isfinite(s); }));
    };
    row.fewest = fewest(s_.p), row.fewest_low = fewest(s_.p - mass_doubt),
    row.fewest_high = fewest(s_.p + mass_doubt);
    for (int i = 0; i < std::ssize(scores); ++i) {
      if (!std::isfinite(scores[i])) continue;
      for (int near = std::max(0, i - s_.kernel / 2); near <= i + s_.kernel / 2 && near < std::ssize(scores);
           ++near)
        row.ranked[i] = std::max(row.ranked[i], scores[near]);
    }
    return row;
  }
  /// The temperature at which the wanted best of the rows have p on average.
  double temperature_of(const std::vector<mass_row>& rows, int mass_row::*wanted) const {
    if (s_.kernel == 1) return 1.0;
    double low = std::log(1e-3), high = std::log(10.0);
    while (high - low > 1e-9) {
      const double middle = (low + high) / 2;
      double share = 0;
      for (const mass_row& row : rows) share += row.mass_of_best(row.*wanted, std::exp(middle));
      (share >= s_.p * static_cast<double>(rows.size()) ? low : high) = middle;
    }
    return std::exp(low);
  }
  /// HARD-KV, section 3: the union of what each of the last rows selects, sink and window; within the budget
  /// those with the largest share.
  void select_by_mass(head_state& h, int head) {
    h.just_left.clear();
    if (std::ssize(h.units) <= s_.budget) return;
    const std::vector<int> tokens(h.units.begin(), h.units.end());
    std::vector<mass_row> rows;
    for (const observed_row& row : observed_rows(s_.window))
      rows.push_back(mass_row_of(largest_scores(row, head, tokens)));
    const double middle = temperature_of(rows, &mass_row::fewest),
                 low = temperature_of(rows, &mass_row::fewest_low) * (1 - 1e-5),
                 high = temperature_of(rows, &mass_row::fewest_high) * (1 + 1e-5);
    std::vector<bool> selected(tokens.size());
    for (const int token : tokens) h.worths[token] = {-1, -1, -1};
    for (const mass_row& row : rows) {
      const auto at_middle = row.weights(middle), at_low = row.weights(low), at_high = row.weights(high);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const double score = row.ranked[i], near = 2e-6 * (1 + std::abs(score));
        if (!std::isfinite(score)) continue;
        double better = 0, better_at_most = 0, better_at_least = 0;  // masses of what is ranked before it
        for (std::size_t j = 0; j < tokens.size(); ++j) {
          const bool first = row.ranked[j] > score || (row.ranked[j] == score && j < i);
          const bool alike = row.ranked[j] != score && std::abs(row.ranked[j] - score) <= near;
          if (first) better += at_middle[j];
          if (first || alike) better_at_most += at_low[j];
          if (first && !alike) better_at_least += at_high[j];
        }
        worth& of = h.worths[tokens[i]];
        if (better < s_.p) selected[i] = true;
        const double shares[] = {at_low[i], at_middle[i], at_high[i]};
        const auto [least, most] = std::minmax_element(std::begin(shares), std::end(shares));
        if (better_at_most < s_.p - mass_doubt) of.low = std::max(of.low, *least * (1 - 1e-4));
        if (better_at_least < s_.p + mass_doubt) of.high = std::max(of.high, *most * (1 + 1e-4));
      }
    }
    h.units.clear(), h.surely_kept.clear(), h.possibly_kept.clear(), h.was_protected.clear();
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const int token = tokens[i];
      const bool stays = token < s_.sink || token >= length_ - s_.window;
      const worth& of = worth_of(h, token);
      if (stays) h.was_protected.insert(token);
      if (stays || of.low >= 0) h.surely_kept.insert(token);
      if (stays || of.high >= 0) h.possibly_kept.insert(token);
      (stays || selected[i] ? h.units : h.just_left).insert(token);
    }
    while (std::ssize(h.units) > s_.budget) {
      int least = -1;
      for (const int token : h.units)
        if (h.was_protected.count(token) == 0 &&
            (least < 0 || worth_of(h, token).low + worth_of(h, token).high <
                              worth_of(h, least).low + worth_of(h, least).high))
          least = token;
      h.units.erase(least);
      h.just_left.insert(least);
    }
    if (merges()) merge(h, h.units, h.just_left);
  }
  bool accepts_selection(head_state& h, const std::set<int>& theirs) {
    const auto within = [](const std::set<int>& part, const std::set<int>& of) {
      return std::includes(of.begin(), of.end(), part.begin(), part.end());
    };
    if (h.just_left.empty() || !within(theirs, h.possibly_kept) || std::ssize(theirs) > s_.budget)
      return false;
    const bool cut = std::ssize(theirs) == s_.budget;  // not all that is selected need be there
    if (!(cut ? within(h.was_protected, theirs) : within(h.surely_kept, theirs))) return false;
    for (const int only_theirs : theirs)
      for (const int only_ours : h.units)
        if (cut && h.units.count(only_theirs) == 0 && theirs.count(only_ours) == 0 &&
            worth_of(h, only_theirs).apart_from(worth_of(h, only_ours)))
          return false;
    keep_instead(h, theirs);
    return true;
  }

  const worth& worth_of(const head_state& h, int unit) const {
    return s_.kind == eviction_kind::q_hitter ? h.ranked[unit] : h.worths[unit];
  }
  void grow(head_state& h) const {
    h.worths.resize(static_cast<std::size_t>((length_ + s_.page - 1) / s_.page));
    h.ranked.resize(h.worths.size());
    while (std::ssize(h.recurrences) < length_)
      h.recurrences.push_back({static_cast<int>(std::ssize(h.recurrences))});
  }
  bool votes_by_window() const {
    return s_.kind == eviction_kind::snapkv || s_.kind == eviction_kind::dapq ||
           s_.kind == eviction_kind::pyramid_kv || judges_rows();
  }
  bool judges_rows() const {
    return defends() || s_.kind == eviction_kind::cake || s_.kind == eviction_kind::compress_kv;
  }
  bool defends() const {
    return s_.kind == eviction_kind::defensive_kv || s_.kind == eviction_kind::layer_defensive_kv;
  }
  /// What PyramidKV gives this layer: the budgets beside the window fall evenly from layer to layer, and
  /// their mean is that of SnapKV; the last has a `beta`th of it, or the first all of the prompt.
  int prompt_budget(int head) const {
    if (!s_.head_budgets.empty()) return s_.head_budgets[static_cast<std::size_t>(head)];
    if (s_.prompt_budget >= 0) return s_.prompt_budget;
    if (s_.kind != eviction_kind::pyramid_kv || s_.layers < 2 || prompt_ <= s_.budget) return s_.budget;
    const int mean = s_.budget - s_.window, last = mean / s_.beta;
    const int first = std::min(2 * mean - last, prompt_ - s_.window);
    const double above = static_cast<double>(first - mean) * (s_.layers - 1 - 2 * s_.layer) / (s_.layers - 1);
    return s_.budget + static_cast<int>(std::trunc(above));
  }

  /// What the window's rows give a KV head's tokens before the window: by query head, row and token.
  std::vector<std::vector<std::vector<double>>> window_shares(int head) const {
    const int group = s_.query_heads / s_.kv_heads, before = std::max(0, prompt_ - s_.window);
    std::vector<std::vector<std::vector<double>>> shares(static_cast<std::size_t>(group));
    for (int g = 0; g < group; ++g)
      for (const observed_row& row : observed_rows(s_.window)) {
        const auto query = row_of(row.query, head * group + g, s_.head_dim);
        std::vector<double> scores, of_row;
        for (int t = 0; t <= row.last; ++t)
          scores.push_back(s_.scale * dot(query, row_of(keys_, t * s_.kv_heads + head, s_.head_dim)));
        const double most = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (const double score : scores) sum += std::exp(score - most);
        for (int t = 0; t < before; ++t) of_row.push_back(std::exp(scores[t] - most) / sum);
        shares[g].push_back(of_row);
      }
    return shares;
  }
  std::vector<double> averaged(const std::vector<double>& numbers) const {
    std::vector<double> means(numbers.size());
    for (int i = 0; i < std::ssize(numbers); ++i)
      for (int j = i - s_.kernel / 2; j <= i + s_.kernel / 2; ++j)
        if (j >= 0 && j < std::ssize(numbers)) means[i] += numbers[j] / s_.kernel;
    return means;
  }
  static double variance_of(const std::vector<double>& of) {
    double mean = 0, sum = 0;
    for (const double x : of) mean += x / static_cast<double>(of.size());
    for (const double x : of) sum += (x - mean) * (x - mean);
    return of.size() > 1 ? sum / static_cast<double>(of.size() - 1) : 0;
  }
  /// A token's shares from each of a query head's rows.
  static std::vector<double> column(const std::vector<std::vector<double>>& rows, std::size_t token) {
    std::vector<double> of;
    for (const auto& row : rows) of.push_back(row[token]);
    return of;
  }
  /// The largest share that a row of the window gives each token before it, with neighbours.
  std::vector<double> worst_case(int head) const {
    std::vector<double> worths(static_cast<std::size_t>(std::max(0, prompt_ - s_.window)));
    for (const auto& rows : window_shares(head))
      for (const auto& row : rows) {
        const auto near = averaged(row);
        double sum = 0, near_sum = 0;
        for (std::size_t t = 0; t < worths.size(); ++t) sum += row[t], near_sum += near[t];
        for (std::size_t t = 0; t < worths.size(); ++t)
          worths[t] = std::max(worths[t], near_sum > 0 ? near[t] * sum / near_sum : 0);
      }
    return worths;
  }
  void judge_rows(head_state& h, int head) const {
    const auto before = static_cast<std::size_t>(std::max(0, prompt_ - s_.window));
    std::vector<double> worths(before);
    if (s_.kind == eviction_kind::compress_kv) {  // the same for all KV heads
      const int group = s_.query_heads / s_.kv_heads;
      for (int voter = 0; voter < s_.query_heads; ++voter) {
        if (!s_.voters.empty() && std::count(s_.voters.begin(), s_.voters.end(), voter) == 0) continue;
        const auto of_group = window_shares(voter / group);
        for (const auto& row : of_group[static_cast<std::size_t>(voter % group)])
          for (std::size_t t = 0; t < before; ++t) worths[t] += row[t];
      }
      worths = averaged(worths);
    } else if (s_.kind == eviction_kind::cake) {  // mean + gamma variance, then neighbours and the group
      for (const auto& rows : window_shares(head))
        for (std::size_t t = 0; t < before; ++t) {
          const auto of = column(rows, t);
          double mean = 0;
          for (const double share : of) mean += share / static_cast<double>(of.size());
          worths[t] += mean + s_.gamma * variance_of(of);
        }
      worths = averaged(worths);
    } else {  // the worst case, and the prior
      worths = worst_case(head);
    }
    double mean = 0;
    for (const double of : worths) mean += of / static_cast<double>(before);
    for (std::size_t t = 0; t < before; ++t) {
      h.worths[t] = about(worths[t]);
      if (!defends() || h.worths[t].low > about(mean).high) continue;
      const bool below = h.worths[t].high < about(mean).low;
      h.worths[t] = {about(mean).low, std::max(about(mean).high, h.worths[t].high), below ? prompt_ : -1};
    }
  }

  /// ARKV, equations 9 and 10: by mean and variance over query heads and rows.
  void judge_heavy_hitters(head_state& h, int head) {
    h.just_left.clear();
    h.uncoded.clear();
    h.coded_before = h.coded;
    h.coded_of = 0;
    if (std::ssize(h.units) < s_.budget) return;
    const std::vector<int> tokens(h.units.begin(), h.units.end());
    const int group = s_.query_heads / s_.kv_heads;
    std::vector<std::vector<double>> rows;  // of each query head, shares of what is before the window
    const std::size_t voted = tokens.size() - static_cast<std::size_t>(s_.window);
    for (const observed_row& row : observed_rows(s_.window))
      for (int g = 0; g < group; ++g) {
        std::vector<double> shares;
        double sum = 0;
        for (const int token : tokens)
          if (token <= row.last)
            sum += shares.emplace_back(
                std::exp(s_.scale * dot(row_of(row.query, head * group + g, s_.head_dim),
                                        row_of(keys_, token * s_.kv_heads + head, s_.head_dim))));
        for (double& share : shares) share /= sum;
        shares.resize(voted);
        rows.push_back(shares);
      }
    std::vector<double> scores(voted);
    for (std::size_t t = 0; t < voted; ++t) {
      const auto of = column(rows, t);
      const auto samples = static_cast<double>(of.size());
      for (const double share : of) scores[t] += share / samples;
      scores[t] += s_.gamma * variance_of(of) * (samples - 1) / samples;
    }
    scores = averaged(scores);
    for (std::size_t t = 0; t < voted; ++t) h.worths[tokens[t]] = about(scores[t]);
    leave(h, true, s_.window + best_of_budget());
    if (s_.kind == eviction_kind::arkv_origin) return;
    h.coded_of = static_cast<int>(std::ssize(h.units));
    code_least(h, most_original());
  }
  bool ranks_heavy_hitters() const {
    return s_.kind == eviction_kind::arkv_origin || s_.kind == eviction_kind::arkv ||
           s_.kind == eviction_kind::arkv_split;
  }
  /// b of equation 10, of a length of the budget.
  int best_of_budget() const { return static_cast<int>(s_.alpha * (s_.budget - s_.window)); }
  /// Tokens that are original behind a cut, the window among them: of equation 8, or of what stays. Of mikv
  /// the budget, and none of q_hitter.
  int most_original() const {
    if (s_.kind == eviction_kind::mikv) return s_.budget;
    if (s_.kind == eviction_kind::q_hitter) return 0;
    const int of = s_.kind == eviction_kind::arkv ? s_.budget - s_.window : best_of_budget();
    return s_.window + static_cast<int>(s_.ratio * of);
  }
  /// From what was coded when the last ones left: of the units that are not, the least worth become coded
  /// until `original` are left.
  void code_least(head_state& h, int original) {
    const auto head = static_cast<int>(&h - heads_.data());
    for (const auto& [token, numbers] : h.uncoded) put_numbers(head, token, numbers);
    h.uncoded.clear();
    h.coded.clear();
    for (const int token : h.coded_before)
      if (h.units.count(token) != 0) h.coded.insert(token);
    while (std::ssize(h.units) - std::ssize(h.coded) > original) {
      int least = -1;
      for (const int token : h.units)
        if (h.coded.count(token) == 0 &&
            (h.was_protected.count(token) == 0 || s_.kind == eviction_kind::q_hitter) &&
            (least < 0 || worth_of(h, token).low + worth_of(h, token).high <
                              worth_of(h, least).low + worth_of(h, least).high))
          least = token;
      require(least >= 0, "a token to be coded is left");
      code(h, least);
    }
  }
  /// A number in 4 bits with a scale, in float32.
  static double in_4_bits(float x, double scale) {
    const double in_scales = scale == 0 ? 0 : rounded_to(static_cast<double>(x) / scale, element_kind::f32);
    return rounded_to(std::nearbyint(in_scales) * scale, element_kind::f32);
  }
  /// Q-Hitter: how far 4 bits are from a row.
  static double coding_error(std::span<const float> row) {
    double most = 0, squares = 0;
    for (const float x : row) most = std::max(most, std::abs(static_cast<double>(x)));
    const double scale = rounded_to(most / 7, element_kind::f32);
    for (const float x : row) squares += std::pow(in_4_bits(x, scale) - static_cast<double>(x), 2);
    return std::sqrt(squares);
  }
  /// Where a number is between the least and the most of all, 0 and 1, to rounding.
  static worth part_of_range(const worth& of, const std::vector<worth>& all) {
    worth least = all[0], most = all[0];
    for (const worth& one : all) {
      least = {std::min(least.low, one.low), std::min(least.high, one.high)};
      most = {std::max(most.low, one.low), std::max(most.high, one.high)};
    }
    if (most.low <= least.high) return {0, 1};
    return {std::max(0.0, (of.low - least.high) / (most.high - least.low)),
            std::min(1.0, (of.high - least.low) / (most.low - least.high))};
  }
  /// Q-Hitter: tokens by attention and by how well 4 bits suit them, behind those of most attention, to
  /// rounding; those beyond the budget leave, and all others are coded.
  void leave_by_errors(head_state& h) {
    const auto head = static_cast<int>(&h - heads_.data());
    const std::vector<int> units(h.units.begin(), h.units.end());
    std::vector<worth> masses, of_keys, of_values;
    for (const int token : units) {
      const auto [of_key, of_value] = errors_[static_cast<std::size_t>(token * s_.kv_heads + head)];
      masses.push_back(h.worths[token]);
      of_keys.push_back({of_key * (1 - 1e-5), of_key * (1 + 1e-5)});
      of_values.push_back({of_value * (1 - 1e-5), of_value * (1 + 1e-5)});
    }
    const auto middle = [](const worth& of) { return (of.low + of.high) / 2; };
    const int heaviest = static_cast<int>(static_cast<float>(s_.heavy) * static_cast<float>(s_.budget));
    std::vector<std::pair<double, int>> by_rank;  // of those that may leave
    for (std::size_t i = 0; i < units.size(); ++i) {
      if (h.was_protected.count(units[i]) != 0) continue;
      int heavier = 0, surely_heavier = 0, possibly_heavier = 0;
      for (std::size_t j = 0; j < units.size(); ++j) {
        if (j == i || h.was_protected.count(units[j]) != 0) continue;
        heavier += middle(masses[j]) > middle(masses[i]) || (middle(masses[j]) == middle(masses[i]) && j > i);
        surely_heavier += masses[j].low > masses[i].high;
        possibly_heavier += masses[j].high >= masses[i].low;
      }
      const worth mass = part_of_range(masses[i], masses), of_key = part_of_range(of_keys[i], of_keys),
                  of_value = part_of_range(of_values[i], of_values);
      const worth fits{1 - (of_key.high + of_value.high) / 2, 1 - (of_key.low + of_value.low) / 2};
      const worth by_both{s_.alpha * mass.low + (1 - s_.alpha) * fits.low - 1e-6,
                          s_.alpha * mass.high + (1 - s_.alpha) * fits.high + 1e-6};
      h.ranked[units[i]] = {possibly_heavier < heaviest ? 2 : by_both.low,
                            surely_heavier < heaviest ? 2 : by_both.high};
      by_rank.push_back({heavier < heaviest ? 2 : middle(by_both), units[i]});
    }
    std::sort(by_rank.begin(), by_rank.end());
    for (const auto& [rank, token] : by_rank) {
      if (std::ssize(h.units) <= s_.budget) break;
      h.units.erase(token);
      h.just_left.insert(token);
    }
    h.coded_of = static_cast<int>(std::ssize(h.units));
    code_least(h, 0);
  }
  /// Makes a token what fp8, or of mikv and q_hitter 4 bits, with a scale of its keys and one of its values
  /// leaves of it.
  void code(head_state& h, int token) {
    const auto head = static_cast<int>(&h - heads_.data());
    token_numbers of = numbers_of(head, token);
    h.uncoded[token] = of;
    h.coded.insert(token);
    for (std::vector<float>* const row : {&of.key, &of.value}) {
      double most = 0;
      for (const float x : *row) most = std::max(most, std::abs(static_cast<double>(x)));
      const bool bits = s_.kind == eviction_kind::mikv || s_.kind == eviction_kind::q_hitter;
      const double scale = rounded_to(most / (bits ? 7 : 448), element_kind::f32);
      for (float& x : *row) {
        const double in_scales =
            scale == 0 ? 0 : rounded_to(static_cast<double>(x) / scale, element_kind::f32);
        const double number =
            bits ? in_4_bits(x, scale) : rounded_to(rounded_to_fp8(in_scales) * scale, element_kind::f32);
        x = static_cast<float>(rounded_to(number, s_.element));
      }
    }
    put_numbers(head, token, of);
  }

  /// R-KV: importance less redundancy.
  void judge_redundancy(head_state& h, int head) {
    h.just_left.clear();
    if (std::ssize(h.units) <= s_.budget) return;
    const std::vector<int> tokens(h.units.begin(), h.units.end());
    const std::size_t n = tokens.size(), voted = n - static_cast<std::size_t>(s_.window);
    std::vector<double> importance(voted), likeness(n), redundancy(n);
    const auto rows = observed_rows(s_.window);
    for (const observed_row& row : rows) {
      const auto scores = largest_scores(row, head, tokens);
      double sum = 0;
      for (std::size_t i = 0; i < voted; ++i) sum += std::exp(scores[i]);
      for (std::size_t i = 0; i < voted; ++i)
        importance[i] += std::exp(scores[i]) / sum / static_cast<double>(rows.size());
    }
    const auto key = [&](std::size_t i) {
      return row_of(keys_, tokens[i] * s_.kv_heads + head, s_.head_dim);
    };
    for (std::size_t i = 0; i < n; ++i) {
      std::vector<double> cosines(n);
      for (std::size_t j = 0; j < n; ++j)
        if (j != i) cosines[j] = dot(key(i), key(j)) / std::sqrt(dot(key(i), key(i)) * dot(key(j), key(j)));
      for (std::size_t j = n; j-- > 0;)
        if (cosines[j] > s_.similar) {
          cosines[j] = 0;
          break;
        }
      for (std::size_t j = 0; j < n; ++j) likeness[j] += cosines[j] / static_cast<double>(n);
    }
    double sum = 0;
    for (std::size_t j = 0; j < n; ++j) sum += redundancy[j] = std::exp(likeness[j]);
    for (std::size_t j = 0; j < voted; ++j) {
      double most = 0;
      for (int near = static_cast<int>(j) - s_.kernel / 2; near <= static_cast<int>(j) + s_.kernel / 2;
           ++near)
        if (near >= 0 && near < static_cast<int>(voted)) most = std::max(most, importance[near]);
      const double gain = s_.lambda * most, loss = (1 - s_.lambda) * redundancy[j] / sum;
      const double doubt = 1e-5 * (gain + loss);
      h.worths[tokens[j]] = {gain - loss - doubt, gain - loss + doubt, -1};
    }
    leave(h, true);
  }

  /// KVMerger: of each token but the last the cosine with the next, as float32; below all where one of them
  /// is a run of its own.
  std::vector<double> neighbours_alike(int head) const {
    std::vector<double> alike;
    for (int t = 0; t + 1 < prompt_; ++t) {
      const token_numbers one = numbers_of(head, t), next = numbers_of(head, t + 1);
      const double lengths = std::sqrt(dot(one.key, one.key)) * std::sqrt(dot(next.key, next.key));
      const bool merge = t >= s_.sink && t + 1 < prompt_ - s_.window;
      alike.push_back(!merge         ? -std::numeric_limits<double>::infinity()
                      : lengths == 0 ? 0.0
                                     : rounded_to(dot(one.key, next.key) / lengths, element_kind::f32));
    }
    return alike;
  }
  /// Of each token of a prompt the attention of the window's rows; 0 in the window, where none is asked for.
  std::vector<double> window_attention(int head) const {
    std::vector<double> attention(static_cast<std::size_t>(prompt_));
    for (const auto& rows : window_shares(head))
      for (const auto& row : rows)
        for (std::size_t t = 0; t < row.size(); ++t) attention[t] += row[t];
    return attention;
  }
  /// The prompt is cut behind these tokens, and of each run that comes of it the pivot stays.
  void keep_runs(head_state& h, int head, const std::set<int>& cuts, const std::set<int>& pivots) {
    h.runs.clear();
    for (const int pivot : pivots) {
      const auto behind = cuts.lower_bound(pivot);
      const int first = behind == cuts.begin() ? 0 : *std::prev(behind) + 1;
      const int last = behind == cuts.end() ? prompt_ - 1 : *behind;
      for (int t = first; t <= last; ++t) h.runs[pivot].push_back(t);
    }
    h.units = pivots;
    h.just_left.clear();
    for (int t = 0; t < prompt_; ++t)
      if (pivots.count(t) == 0) h.just_left.insert(t);
    h.unmerged.clear();
    for (const int pivot : pivots) h.unmerged[pivot] = numbers_of(head, pivot);
    for (const auto& [pivot, run] : h.runs) {
      merged_ += std::ssize(run) - 1;
      if (run.size() > 1) put_numbers(head, pivot, merged_run(head, pivot, run));
    }
  }
  /// The mean by a Gaussian of the distance from the pivot's key, of the run's mean squared distance, which
  /// weighs as many as there are.
  token_numbers merged_run(int head, int pivot, const std::vector<int>& run) const {
    std::vector<double> weights;
    double mean = 0, sum = 0;
    for (const int token : run) {
      const token_numbers of = numbers_of(head, token), to = numbers_of(head, pivot);
      double squares = 0;
      for (std::size_t x = 0; x < of.key.size(); ++x)
        squares += std::pow(static_cast<double>(of.key[x]) - static_cast<double>(to.key[x]), 2);
      weights.push_back(squares);
      mean += squares / static_cast<double>(run.size() - 1);
    }
    for (double& weight : weights) sum += weight = mean == 0 ? 1 : std::exp(-weight / (2 * mean));
    for (double& weight : weights) weight /= sum;
    token_numbers merged = mean_of(head, run, weights);
    merged.log_weight = static_cast<float>(std::log(static_cast<double>(run.size())));
    return merged;
  }
  /// One cut after the other, where neighbours are least alike, until there are as many runs as the budget.
  void keep_pivots(head_state& h, int head) {
    const std::vector<double> alike = neighbours_alike(head), attention = window_attention(head);
    std::set<int> cuts, pivots;
    while (std::ssize(cuts) + 1 < s_.budget) {
      int least = -1;
      for (int t = 0; t + 1 < prompt_; ++t)
        if (cuts.count(t) == 0 && (least < 0 || alike[t] < alike[least])) least = t;
      cuts.insert(least);
    }
    for (int t = 0, pivot = 0; t < prompt_; ++t) {
      if (attention[t] > attention[pivot]) pivot = t;
      if (t + 1 < prompt_ && cuts.count(t) == 0) continue;
      pivots.insert(pivot);
      pivot = t + 1;
    }
    keep_runs(h, head, cuts, pivots);
  }
  /// Whether `theirs` are pivots to rounding: of runs that are cut by pairs which are no more alike than
  /// those that are not cut, each of the most attention.
  bool accepts_runs(head_state& h, const std::set<int>& theirs) {
    if (h.just_left.empty() || std::ssize(theirs) != s_.budget) return false;
    const auto head = static_cast<int>(&h - heads_.data());
    forget_merging(h);
    const std::vector<double> alike = neighbours_alike(head), attention = window_attention(head);
    std::set<int> cuts;
    double most_cut = -1, least_whole = 2;
    for (auto pivot = theirs.begin(); std::next(pivot) != theirs.end(); ++pivot)
      cuts.insert(static_cast<int>(
          std::min_element(alike.begin() + *pivot, alike.begin() + *std::next(pivot)) - alike.begin()));
    for (int t = 0; t + 1 < prompt_; ++t)
      if (cuts.count(t) != 0)
        most_cut = std::max(most_cut, alike[t]);
      else
        least_whole = std::min(least_whole, alike[t]);
    keep_runs(h, head, cuts, theirs);
    for (const auto& [pivot, run] : h.runs)
      for (const int token : run)
        if (about(attention[token]).low > about(attention[pivot]).high) return false;
    return most_cut <= least_whole + 3e-7;
  }

  bool takes_worths() const {
    return s_.kind == eviction_kind::trim_kv || s_.kind == eviction_kind::given_worths;
  }
  /// What a token is worth at a row by what was given for it: NaN is least. Of trim_kv (2512.03324) it was
  /// given a beta, and is worth the logarithm of beta to the power of its age.
  worth given_worth(int head, int token, int row) const {
    require(given_.size() == static_cast<std::size_t>(length_ * s_.kv_heads), "a worth of each token");
    constexpr double least = -std::numeric_limits<double>::infinity();
    const auto given = static_cast<double>(given_[token * s_.kv_heads + head]);
    if (std::isnan(given)) return {least, least, -1};
    if (s_.kind == eviction_kind::given_worths) return {given, given, -1};
    if (given <= 0) return {least, least, -1};
    const double of = (row - token) * std::log(std::min(given, 1.0));
    return {of * (1 + 1e-6), of * (1 - 1e-6), -1};
  }

  /// A row of `share` on a token of lazy_eviction, and what the token is worth behind it.
  worth recur(recurrence& token, double share, int row) const {
    token.doubtful = token.doubtful || (about(share).high >= s_.threshold && about(share).low < s_.threshold);
    if (share >= s_.threshold) {
      token.interval = std::max(token.interval, row - token.active);
      token.active = row;
    }
    if (token.doubtful) return {-1e9, 1e9, -1};
    const int inactive = row - token.active;
    const double by_interval = inactive == 0         ? 0
                               : token.interval == 0 ? -1e9
                                                     : -double(inactive) / token.interval;
    return {by_interval, by_interval, -1};
  }
  std::span<const float> query_row(int row) const {
    return row_of(queries_, row, s_.query_heads * s_.head_dim);
  }
  static std::vector<int> tokens_up_to(int end) {
    std::vector<int> tokens;
    for (int t = 0; t < end; ++t) tokens.push_back(t);
    return tokens;
  }
  void append(std::span<const float> keys, std::span<const float> values) {
    keys_.insert(keys_.end(), keys.begin(), keys.end());
    values_.insert(values_.end(), values.begin(), values.end());
    length_ = static_cast<int>(keys_.size()) / (s_.kv_heads * s_.head_dim);
    log_weights_.resize(static_cast<std::size_t>(length_ * s_.kv_heads));
    for (int row = 0; s_.kind == eviction_kind::q_hitter && row * s_.head_dim < std::ssize(keys); ++row)
      errors_.push_back(
          {coding_error(row_of(keys, row, s_.head_dim)), coding_error(row_of(values, row, s_.head_dim))});
  }

  bool selects_by_mass() const {
    return s_.kind == eviction_kind::hard_kv || s_.kind == eviction_kind::hard_kv_merge ||
           s_.kind == eviction_kind::hard_kv_pairs;
  }
  bool merges() const {
    return s_.kind == eviction_kind::d2o || s_.kind == eviction_kind::exact_merge ||
           s_.kind == eviction_kind::hard_kv_merge || s_.kind == eviction_kind::hard_kv_pairs;
  }
  /// Of what was there when the last ones left `theirs` stay, and not the units.
  void keep_instead(head_state& h, const std::set<int>& theirs) {
    if (merges()) {
      std::set<int> leaving = h.units;
      leaving.insert(h.just_left.begin(), h.just_left.end());
      for (const int token : theirs) leaving.erase(token);
      forget_merging(h);
      merge(h, theirs, leaving);
    }
    h.units = theirs;
    if (h.coded_of > 0) code_least(h, most_original());
  }
  const number_doubts& doubts_of(int row) const {
    static const number_doubts none;
    const auto found = doubts_.find(row);
    return found == doubts_.end() ? none : found->second;
  }
  token_numbers numbers_of(int head, int token) const {
    const int row = token * s_.kv_heads + head;
    const auto key = row_of(keys_, row, s_.head_dim), value = row_of(values_, row, s_.head_dim);
    return {{key.begin(), key.end()}, {value.begin(), value.end()}, log_weights_[row], doubts_of(row)};
  }
  void put_numbers(int head, int token, const token_numbers& of) {
    const int row = token * s_.kv_heads + head;
    std::copy(of.key.begin(), of.key.end(), keys_.begin() + row * s_.head_dim);
    std::copy(of.value.begin(), of.value.end(), values_.begin() + row * s_.head_dim);
    log_weights_[row] = of.log_weight;
    doubts_.erase(row);
    if (!of.doubts.value.empty()) doubts_[row] = of.doubts;
  }
  void forget_merging(head_state& h) {
    const auto head = static_cast<int>(&h - heads_.data());
    for (const auto& [token, numbers] : h.unmerged) put_numbers(head, token, numbers);
    h.merged = h.before_merging;
  }

  /// Means of tokens' keys and values, as they are stored.
  token_numbers mean_of(int head, const std::vector<int>& tokens, const std::vector<double>& weights) const {
    std::vector<token_numbers> of;
    for (const int token : tokens) of.push_back(numbers_of(head, token));
    const auto stored = [&](double x) { return rounded_to(rounded_to(x, element_kind::f32), s_.element); };
    const auto mean = [&](std::vector<float> token_numbers::*part, std::vector<double> number_doubts::*doubts,
                          token_numbers& to) {
      for (std::size_t x = 0; x < static_cast<std::size_t>(s_.head_dim); ++x) {
        double sum = 0, error = 0;
        for (std::size_t i = 0; i < of.size(); ++i) {
          const double number = static_cast<double>((of[i].*part)[x]);
          sum += weights[i] * number;
          error += weights[i] * std::fabs(number) * 4 * float_sum_error;  // of the weights too
          if (!(of[i].doubts.*doubts).empty()) error += weights[i] * (of[i].doubts.*doubts)[x];
        }
        (to.*part).push_back(static_cast<float>(stored(sum)));
        (to.doubts.*doubts)
            .push_back(std::max(stored(sum + error) - stored(sum), stored(sum) - stored(sum - error)));
      }
    };
    token_numbers merged;
    mean(&token_numbers::key, &number_doubts::key, merged);
    mean(&token_numbers::value, &number_doubts::value, merged);
    for (const token_numbers& one : of)
      merged.doubts.log_weight = std::max(merged.doubts.log_weight, one.doubts.log_weight);
    return merged;
  }
  /// What the doubts of a key make of a row's score.
  double score_doubt(std::span<const float> query, const number_doubts& of) const {
    return of.key.empty() ? 0.0 : static_cast<double>(std::fabs(s_.scale)) * product_doubt(query, of.key);
  }
  /// What the last rows' softmaxes, of the largest scores of the group, have of each token; the mean.
  std::map<int, double> mean_shares(int head, const std::set<int>& tokens) const {
    const int group = s_.query_heads / s_.kv_heads;
    std::map<int, double> shares;
    const auto rows = observed_rows(s_.window);
    for (const observed_row& row : rows) {
      std::map<int, double> scores;
      for (const int token : tokens)
        for (int g = 0; g < group && token <= row.last; ++g) {
          const double score = score_of(row.query, head * group + g, numbers_of(head, token).key);
          scores[token] = g == 0 ? score : std::max(scores[token], score);
        }
      double most = -std::numeric_limits<double>::infinity(), sum = 0;
      for (const auto& [token, score] : scores) most = std::max(most, score);
      for (const auto& [token, score] : scores) sum += std::exp(score - most);
      for (const auto& [token, score] : scores)
        shares[token] += std::exp(score - most) / sum / static_cast<double>(rows.size());
    }
    return shares;
  }
  /// HARD-KV, appendix E: the i-th worst goes into the i-th best, which begin again where they are fewer.
  void merge_pairs(int head, const std::set<int>& staying, const std::set<int>& leaving) {
    std::set<int> all = staying;
    all.insert(leaving.begin(), leaving.end());
    std::map<int, double> shares = mean_shares(head, all);
    std::vector<int> best, worst(leaving.begin(), leaving.end());
    for (const int token : staying)
      if (token >= s_.sink && token < length_ - s_.window && shares[token] > 0) best.push_back(token);
    std::stable_sort(best.begin(), best.end(), [&](int a, int b) { return shares[a] > shares[b]; });
    if (std::ssize(best) > s_.takers) best.resize(static_cast<std::size_t>(s_.takers));
    std::stable_sort(worst.begin(), worst.end(), [&](int a, int b) { return shares[a] < shares[b]; });
    std::map<int, std::vector<int>> sets;
    for (std::size_t nth = 0; nth < worst.size(); ++nth) {
      if (best.empty() || !(shares[worst[nth]] > 0)) {
        ++lost_;
        continue;
      }
      sets[best[nth % best.size()]].push_back(worst[nth]);
      ++merged_;
    }
    for (auto& [token, others] : sets) {
      others.push_back(token);
      std::vector<double> weights;
      double sum = 0;
      for (const int other : others) sum += shares[other];
      for (const int other : others) weights.push_back(shares[other] / sum);
      put_numbers(head, token, mean_of(head, others, weights));
    }
  }

  /// Tokens that leave go into those that stay, each into the one of most similar key.
  void merge(head_state& h, const std::set<int>& staying, const std::set<int>& leaving) {
    const auto head = static_cast<int>(&h - heads_.data());
    h.unmerged.clear();
    for (const int token : staying) h.unmerged[token] = numbers_of(head, token);
    h.before_merging = h.merged;
    if (staying.empty() || leaving.empty()) return;
    if (s_.kind == eviction_kind::hard_kv_pairs) return merge_pairs(head, staying, leaving);
    const auto cosine = [&](int a, int b) {
      const token_numbers of_a = numbers_of(head, a), of_b = numbers_of(head, b);
      const double lengths = std::sqrt(dot(of_a.key, of_a.key)) * std::sqrt(dot(of_b.key, of_b.key));
      return lengths > 0 ? dot(of_a.key, of_b.key) / lengths : 0.0;
    };
    std::map<int, std::vector<int>> sets;  // by the token that stays, which is the first
    std::map<int, double> similarity;      // of those that leave
    std::map<int, int> nearest;
    double mean = 0;
    for (const int token : leaving) {
      for (const int other : staying)
        if (const double of = cosine(token, other); similarity.count(token) == 0 || of > similarity.at(token))
          similarity[token] = of, nearest[token] = other;
      mean += similarity.at(token) / static_cast<double>(leaving.size());
    }
    if (s_.kind == eviction_kind::d2o)
      h.merged = {h.merged.begun ? s_.ema * mean + (1 - s_.ema) * h.merged.threshold : mean, true};
    for (const int token : leaving) {
      if (s_.kind == eviction_kind::d2o && similarity.at(token) < h.merged.threshold) {
        ++lost_;
        continue;
      }
      sets[nearest.at(token)].push_back(token);
      ++merged_;
    }
    for (auto& [token, others] : sets) {
      others.insert(others.begin(), token);
      std::vector<double> weights;
      double log_weight = 0;
      if (s_.kind == eviction_kind::d2o) {
        double sum = std::exp(1.0);
        for (std::size_t i = 1; i < others.size(); ++i) sum += std::exp(similarity.at(others[i]));
        for (const int other : others)
          weights.push_back(std::exp(other == token ? 1.0 : similarity.at(other)) / sum);
      } else {
        weights = last_row_weights(head, others, log_weight);
      }
      token_numbers merged = mean_of(head, others, weights);
      const int group = s_.query_heads / s_.kv_heads;
      for (int g = 0; s_.kind != eviction_kind::d2o && g < group; ++g) {
        log_weight -= last_row_score(head * group + g, merged.key) / group;
        merged.doubts.log_weight +=
            score_doubt(row_of(observed_rows(1).back().query, head * group + g, s_.head_dim), merged.doubts) /
            group;
      }
      merged.log_weight = static_cast<float>(log_weight);
      put_numbers(head, token, merged);
    }
  }
  /// A query head's score of a row on a key; the scale is a float32.
  double score_of(std::span<const float> row, int query_head, std::span<const float> key) const {
    return static_cast<double>(static_cast<float>(s_.scale)) * dot(row_of(row, query_head, s_.head_dim), key);
  }
  double last_row_score(int query_head, std::span<const float> key) const {
    return score_of(observed_rows(1).back().query, query_head, key);
  }
  /// What tokens have of the last row among themselves, and the logarithm of what they have together; means
  /// over the query heads.
  std::vector<double> last_row_weights(int head, const std::vector<int>& tokens, double& log_mass) const {
    const int group = s_.query_heads / s_.kv_heads;
    std::vector<double> weights(tokens.size());
    for (int g = 0; g < group; ++g) {
      std::vector<double> scores;
      for (const int token : tokens) {
        const token_numbers of = numbers_of(head, token);
        scores.push_back(last_row_score(head * group + g, of.key) + static_cast<double>(of.log_weight));
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      for (const double score : scores) sum += std::exp(score - most);
      for (std::size_t i = 0; i < tokens.size(); ++i) weights[i] += std::exp(scores[i] - most) / sum / group;
      log_mass += (most + std::log(sum)) / group;
    }
    return weights;
  }

  /// Adds the group's output and lse to `to`; each token's softmax weight, averaged over the group. NaN
  /// counts as 0.
  std::vector<double> attend_group(std::span<const float> q, int head, const std::vector<int>& tokens,
                                   attention& to) const {
    const int group = s_.query_heads / s_.kv_heads;
    std::vector<std::span<const float>> keys, values;
    std::vector<float> log_weights;
    std::vector<const number_doubts*> doubts;
    for (const int t : tokens) {
      const int row = t * s_.kv_heads + head;
      doubts.push_back(&doubts_of(row));
      log_weights.push_back(log_weights_[row]);
      keys.push_back(row_of(keys_, row, s_.head_dim));
      values.push_back(row_of(values_, row, s_.head_dim));
    }
    std::vector<double> shares(tokens.size(), 0.0);
    for (int g = 0; g < group; ++g) {
      const auto query = row_of(q, head * group + g, s_.head_dim);
      std::vector<double> of_weights;
      for (const number_doubts* of : doubts) of_weights.push_back(of->log_weight + score_doubt(query, *of));
      attention one =
          oracle::attend(query, keys, values, s_.scale, {.log_weights = log_weights, .doubts = of_weights});
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const double weight =
            std::exp(s_.scale * dot(query, keys[i]) + static_cast<double>(log_weights[i]) - one.lse[0]);
        if (std::isnan(weight)) continue;
        shares[i] += weight / group;
        for (std::size_t x = 0; x < doubts[i]->value.size(); ++x)
          one.doubt[x] += weight * doubts[i]->value[x];
      }
      to.out.insert(to.out.end(), one.out.begin(), one.out.end());
      to.doubt.insert(to.doubt.end(), one.doubt.begin(), one.doubt.end());
      to.lse.push_back(one.lse[0]);
      to.lse_rounding.push_back(one.lse_rounding[0]);
    }
    return shares;
  }

  /// A sum of shares in float32.
  static worth about(double share) { return {share * (1 - 2e-4) - 1e-30, share * (1 + 2e-4) + 1e-30, -1}; }

  /// A prompt page that no row has stamped, older than all stamps: where the whole prompt has been kept only
  /// by age.
  worth stamp_below_rows(double share) const {
    const bool cut = !s_.keeps_prompt && (prompt_ + s_.page - 1) / s_.page > s_.budget / s_.page;
    const auto below = [](double of) { return -1 / std::max(of, 1e-40); };  // in the same order
    return cut ? worth{below(about(share).low), below(about(share).high), -1} : worth{below(0), below(0), -1};
  }

  void count(head_state& h, const std::vector<int>& tokens, const std::vector<double>& shares, int row) {
    std::vector<double> of_unit(h.worths.size(), 0.0);
    for (std::size_t i = 0; i < tokens.size(); ++i) of_unit[tokens[i] / s_.page] += shares[i];
    for (const int unit : h.units) {
      worth& w = h.worths[unit];
      const double share = of_unit[unit];
      switch (s_.kind) {
        case eviction_kind::h2o:
        case eviction_kind::mikv:
        case eviction_kind::q_hitter:
        case eviction_kind::d2o:
          w = {w.low + about(share).low, w.high + about(share).high, -1};
          break;
        case eviction_kind::tova:
        case eviction_kind::exact_merge:
          w = about(share);
          break;
        case eviction_kind::snapkv:
        case eviction_kind::dapq:
        case eviction_kind::epi_cache:
        case eviction_kind::pyramid_kv:
          break;
        case eviction_kind::lazy_eviction:
          w = recur(h.recurrences[unit], share, row);
          break;
        case eviction_kind::hard_kv:
        case eviction_kind::hard_kv_merge:
        case eviction_kind::hard_kv_pairs:
        case eviction_kind::kv_merger:
        case eviction_kind::defensive_kv:
        case eviction_kind::layer_defensive_kv:
        case eviction_kind::compress_kv:
        case eviction_kind::cake:
        case eviction_kind::r_kv:
        case eviction_kind::arkv_origin:
        case eviction_kind::arkv:
        case eviction_kind::arkv_split:
        case eviction_kind::trim_kv:
        case eviction_kind::given_worths:
          break;
        case eviction_kind::raas:
          if (about(share).high >= s_.threshold) w.high = row;
          if (about(share).low >= s_.threshold) w.low = row;
          break;
      }
    }
  }

  bool is_protected(int unit, bool prompt_ends) const {
    switch (s_.kind) {
      case eviction_kind::h2o:
      case eviction_kind::mikv:
      case eviction_kind::q_hitter:
      case eviction_kind::d2o:
        return unit >= length_ - static_cast<int>(s_.recent * s_.budget);
      case eviction_kind::given_worths:
        return unit < s_.sink || unit >= length_ - static_cast<int>(s_.recent * s_.budget);
      case eviction_kind::tova:
      case eviction_kind::exact_merge:
      case eviction_kind::trim_kv:
      case eviction_kind::dapq:
      case eviction_kind::epi_cache:
        return false;
      case eviction_kind::snapkv:
      case eviction_kind::pyramid_kv:
      case eviction_kind::defensive_kv:
      case eviction_kind::layer_defensive_kv:
      case eviction_kind::compress_kv:
      case eviction_kind::cake:
        return unit >= prompt_ - s_.window;
      case eviction_kind::lazy_eviction:
      case eviction_kind::r_kv:
      case eviction_kind::arkv_origin:
      case eviction_kind::arkv:
      case eviction_kind::arkv_split:
        return unit >= length_ - s_.window;
      default:
        if ((unit + 1) * s_.page > length_) return true;  // it is being filled
        if (!s_.keeps_prompt)
          return (unit + 1) * s_.page <= s_.sink || unit * s_.page >= length_ - s_.recent_tokens;
        return prompt_ends || unit * s_.page < prompt_;
    }
  }

  /// One after the other the least leaves, of those alike the first.
  void leave(head_state& h, bool prompt_ends, int other_budget = 0) {
    h.just_left.clear();
    h.was_protected.clear();
    for (const int unit : h.units)
      if (is_protected(unit, prompt_ends)) h.was_protected.insert(unit);
    if (s_.kind == eviction_kind::mikv) {
      h.uncoded.clear();
      h.coded_before = h.coded;
      h.coded_of = static_cast<int>(std::ssize(h.units));
      return code_least(h, most_original());
    }
    if (s_.kind == eviction_kind::q_hitter) {
      h.uncoded.clear();
      h.coded_before = h.coded;
      return leave_by_errors(h);
    }
    if ((votes_by_window() || cuts_blocks()) && !prompt_ends) return;
    if (s_.kind == eviction_kind::lazy_eviction && (length_ - prompt_) % s_.window != 0) return;
    const auto head = static_cast<int>(&h - heads_.data());
    int most = (other_budget > 0 ? other_budget : prompt_budget(head)) / s_.page;
    if (s_.keeps_prompt)
      most = std::max(s_.budget, (prompt_ + s_.page - 1) / s_.page * s_.page + s_.room) / s_.page;
    while (static_cast<int>(h.units.size()) > most) {
      int least = -1;
      for (const int unit : h.units) {
        if (h.was_protected.count(unit) != 0) continue;
        if (least < 0 ||
            worth_of(h, unit).low + worth_of(h, unit).high < worth_of(h, least).low + worth_of(h, least).high)
          least = unit;
      }
      require(least >= 0, "an unprotected unit is left");
      h.units.erase(least);
      h.just_left.insert(least);
    }
    if (merges()) merge(h, h.units, h.just_left);
  }

  bool cuts_blocks() const { return s_.kind == eviction_kind::epi_cache; }
  /// EpiCache, by its published code: behind a block its tokens and those that stayed before are worth the
  /// largest share that any observed row and query head gives them, and those of most worth stay.
  void end_block() {
    if (prompt_ == 0) return;
    const int group = s_.query_heads / s_.kv_heads;
    for (int head = 0; head < s_.kv_heads; ++head) {
      head_state& h = heads_[static_cast<std::size_t>(head)];
      grow(h);
      std::map<int, double> largest;
      for (const observed_row& row : observed_rows(s_.window))
        for (int g = 0; g < group; ++g) {
          std::map<int, double> scores;
          double most = -std::numeric_limits<double>::infinity(), sum = 0;
          for (const int token : h.units)
            if (token <= row.last)
              scores[token] = s_.scale * dot(row_of(row.query, head * group + g, s_.head_dim),
                                             row_of(keys_, token * s_.kv_heads + head, s_.head_dim));
          for (const auto& [token, score] : scores) most = std::max(most, score);
          for (const auto& [token, score] : scores) sum += std::exp(score - most);
          for (const auto& [token, score] : scores)
            largest[token] = std::max(largest[token], std::exp(score - most) / sum);
        }
      for (const int token : h.units) h.worths[static_cast<std::size_t>(token)] = about(largest[token]);
      leave(h, true);
    }
    probes_.clear();
    block_ = prompt_;
  }

  /// The largest vote within the kernel, of those of tokens before the window, which dapq's is behind.
  worth best_near(int token, const std::vector<double>& votes) const {
    worth best = about(0);
    const int voted = s_.kind == eviction_kind::dapq ? prompt_ : prompt_ - s_.window;
    for (int t = std::max(0, token - s_.kernel / 2); t <= token + s_.kernel / 2 && t < voted; ++t) {
      worth vote = about(votes[t]);
      vote.source = vote.apart_from(best) ? t : -1;
      if (vote.high > best.high)
        best = vote;
      else if (!vote.apart_from(best))
        best.source = -1;
    }
    return best;
  }

  void end_prompt() {
    if (decodes_ || ended_ || prompt_ == 0) return;
    ended_ = true;
    if (cuts_blocks()) return end_block();
    for (int head = 0; head < s_.kv_heads; ++head) {
      head_state& h = heads_[head];
      grow(h);
      if (selects_by_mass()) {
        for (int token = 0; token < prompt_; ++token) h.units.insert(token);
        select_by_mass(h, head);
        continue;
      }
      if (takes_worths()) {
        for (int token = 0; token < prompt_; ++token) {
          h.units.insert(token);
          h.worths[token] = given_worth(head, token, prompt_ - 1);
        }
        leave(h, true);
        continue;
      }
      if (s_.kind == eviction_kind::kv_merger) {
        for (int token = 0; token < prompt_; ++token) h.units.insert(token);
        if (prompt_ > s_.budget) keep_pivots(h, head);
        continue;
      }
      if (ranks_heavy_hitters()) {
        for (int token = 0; token < prompt_; ++token) h.units.insert(token);
        judge_heavy_hitters(h, head);
        continue;
      }
      if (s_.kind == eviction_kind::r_kv) {
        for (int token = 0; token < prompt_; ++token) h.units.insert(token);
        judge_redundancy(h, head);
        continue;
      }
      if (judges_rows()) {
        for (int token = 0; token < prompt_; ++token) h.units.insert(token);
        if (prompt_ > s_.budget) judge_rows(h, head);
        leave(h, true);
        continue;
      }
      std::vector<double> votes(static_cast<std::size_t>(prompt_), 0.0);
      const int observed = s_.kind == eviction_kind::h2o             ? prompt_
                           : s_.kind == eviction_kind::mikv          ? prompt_
                           : s_.kind == eviction_kind::q_hitter      ? prompt_
                           : s_.kind == eviction_kind::d2o           ? prompt_
                           : s_.kind == eviction_kind::tova          ? 1
                           : s_.kind == eviction_kind::exact_merge   ? 1
                           : s_.kind == eviction_kind::lazy_eviction ? 1
                           : s_.kind == eviction_kind::raas          ? !s_.keeps_prompt
                                                                     : s_.window;
      attention unused;
      for (const observed_row& row : observed_rows(observed)) {
        const auto shares = attend_group(row.query, head, tokens_up_to(row.last + 1), unused);
        for (std::size_t t = 0; t < shares.size(); ++t) votes[t] += shares[t];
      }
      for (int unit = 0; unit < static_cast<int>(h.worths.size()); ++unit) {
        h.units.insert(unit);
        if (votes_by_window()) {
          h.worths[unit] = best_near(unit, votes);
          continue;
        }
        if (s_.kind == eviction_kind::lazy_eviction) {
          const bool cut = prompt_ > s_.budget;  // else the last row is not counted
          h.worths[unit] = recur(h.recurrences[unit], cut ? votes[unit] : 0.0, prompt_ - 1);
          continue;
        }
        double share = 0;
        for (int t = unit * s_.page; t < std::min((unit + 1) * s_.page, prompt_); ++t) share += votes[t];
        h.worths[unit] = about(share);
        if (s_.kind == eviction_kind::raas) h.worths[unit] = stamp_below_rows(share);
      }
      leave(h, true);
    }
  }

  eviction_settings s_;
  int length_ = 0, prompt_ = 0;
  int block_ = 0;  // of epi_cache, the first token of the last block
  bool decodes_ = false, ended_ = false;
  long merged_ = 0, lost_ = 0;
  std::vector<float> queries_, keys_, values_;  // keys and values of a head's token as it is now
  std::vector<float> log_weights_;              // (tokens, kv heads)
  std::map<int, number_doubts> doubts_;         // of merged tokens, by their place there
  std::vector<float> given_;                    // worths, the same
  std::vector<float> probes_;                   // queries of rows behind the prompt
  std::vector<std::pair<double, double>> errors_;  // of q_hitter, of keys and values, as given_
  std::vector<head_state> heads_;
};

/// ARKV's ratio of one layer among others, equation 7; 1 where its sensitivity is no number above 0.
inline void give_arkv_ratio(eviction_settings& s, const std::vector<double>& sensitivities) {
  double most = 0;
  for (const double of : sensitivities)
    if (std::isfinite(of)) most = std::max(most, of);
  const double own = sensitivities[s.layer];
  s.ratio = std::isfinite(own) && own > 0 ? own / most : 1;
  const int beside = s.budget - s.window;
  const double tokens =
      s.ratio * (s.kind == eviction_kind::arkv ? beside : static_cast<int>(s.alpha * beside));
  s.ratio_is_doubtful = std::abs(tokens - std::round(tokens)) < 1e-3 * (1 + tokens);
}

/// How many tokens Layer-DefensiveKV leaves a KV head: by the exact ranking, and at least and at most where
/// worths are told apart to a sixteenth of an octave, and to rounding.
struct head_budget_range {
  int exact = 0, least = 0, most = 0;
};
/// Of all heads by their `defended_worths`: beside the windows the best of all tokens stay, as many as heads
/// have on average; of those worth the same the first heads' do.
inline std::vector<head_budget_range> layer_defensive_budgets(
    const eviction_settings& s, const std::vector<std::vector<double>>& worths_of_heads) {
  constexpr double bin = 17.0 / 16, rounding = 1e-3, least_worth = 0x1p-40 * bin;
  std::vector<double> all;
  for (const auto& worths : worths_of_heads) all.insert(all.end(), worths.begin(), worths.end());
  std::sort(all.rbegin(), all.rend());
  const auto stay = worths_of_heads.size() * static_cast<std::size_t>(s.budget - s.window);
  const double bar = all.at(stay - 1), above = std::max(bar, least_worth) * bin * (1 + rounding),
               below = bar / bin * (1 - rounding);
  const auto beyond = [](double of) { return [of](double worth) { return worth > of; }; };
  auto alike = static_cast<std::ptrdiff_t>(stay) - std::count_if(all.begin(), all.end(), beyond(bar));
  std::vector<head_budget_range> ranges;
  for (const auto& worths : worths_of_heads) {
    const auto beyond_of = [&](double of) {
      return static_cast<int>(std::count_if(worths.begin(), worths.end(), beyond(of)));
    };
    const auto own = std::min<std::ptrdiff_t>(alike, std::count(worths.begin(), worths.end(), bar));
    alike -= own;
    ranges.push_back({s.window + beyond_of(bar) + static_cast<int>(own), s.window + beyond_of(above),
                      s.window + beyond_of(bar <= least_worth ? -1 : below)});
  }
  return ranges;
}

/// CAKE's budget of one layer among others: its part of what all have beside the window, at most the
/// prompt's; what a layer cannot have goes evenly to those that can, and so does what is left of rounding,
/// the first of them first.
inline void give_cake_budget(eviction_settings& s, const std::vector<double>& preferences, int prompt) {
  if (prompt <= s.budget) return;
  const int room = prompt - s.window, layers = static_cast<int>(preferences.size());
  double sum = 0;
  for (const double of : preferences) sum += of;
  if (!(sum > 0)) return;  // attention that varies nowhere tells no layer apart
  std::vector<int> budgets;
  int left = layers * (s.budget - s.window);
  const double total = left;
  for (const double of : preferences) {
    const double part = of / sum * total;
    s.budget_is_doubtful = s.budget_is_doubtful || std::abs(part - std::round(part)) < 1e-3 * (1 + part);
    left -= budgets.emplace_back(std::min(room, static_cast<int>(part)));
  }
  while (left > 0) {
    std::vector<int*> open;
    for (int& of : budgets)
      if (of < room) open.push_back(&of);
    if (open.empty()) break;
    const int before = left, count = static_cast<int>(open.size());
    for (int i = 0; i < count; ++i) {
      const int more = std::min(room - *open[i], before / count + (i < before % count));
      *open[i] += more;
      left -= more;
    }
  }
  s.prompt_budget = budgets[s.layer] + s.window;
}

}  // namespace oracle
