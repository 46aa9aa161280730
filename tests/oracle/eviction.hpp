// One layer of one sequence that forgets: H2O, TOVA, SnapKV and RaaS, from their definitions.
#pragma once

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <vector>

#include "attention.hpp"
#include "numbers.hpp"
#include "settings.hpp"

namespace oracle {

enum class eviction_kind { h2o, tova, snapkv, raas };

struct eviction_settings {
  int query_heads = 1;
  int kv_heads = 1;
  int head_dim = 1;
  int budget = 1;  // tokens
  double scale = 1.0;
  eviction_kind kind = eviction_kind::h2o;
  double recent = 0.5;              // of h2o
  int window = 32;                  // of snapkv, rows
  int kernel = 7;                   // of snapkv, tokens
  int page = 1;                     // of raas, tokens; 1 for the others
  double threshold = 1e-4;          // of raas
  int room = 1;                     // of raas, tokens, where it keeps the prompt
  bool keeps_prompt = false;        // of raas
  int sink = 0, recent_tokens = 0;  // of raas, where it does not keep the prompt
};

/// What a unit is worth, as far as float32 can tell: two implementations agree on an order where these are apart, or are
/// exact and alike.
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

  /// Rows of the prompt: `q` (tokens, n_qo, d), keys and values (tokens, n_kv, d).
  void prompt(std::span<const float> q, std::span<const float> keys, std::span<const float> values) {
    queries_.insert(queries_.end(), q.begin(), q.end());
    append(keys, values);
    prompt_ = length_;
  }

  /// Exact attention of a prompt row to everything up to itself.
  attention prompt_row(int row) const {
    attention all;
    for (int head = 0; head < s_.kv_heads; ++head)
      attend_group(query_row(row), head, tokens_up_to(row + 1), all);
    return all;
  }

  /// What a KV head has not forgotten before the next step; a prompt has been cut.
  std::vector<int> kept(int head) {
    end_prompt();
    const auto& units = heads_[static_cast<std::size_t>(head)].units;
    return {units.begin(), units.end()};
  }

  /// Whether another implementation may keep `units` instead: all that it swapped for one another has been worth the
  /// same, to rounding, when the last ones left. If so, this one keeps them too.
  bool accepts(int head, const std::vector<int>& units) {
    head_state& h = heads_[static_cast<std::size_t>(head)];
    const std::set<int> theirs(units.begin(), units.end());
    if (theirs.size() != h.units.size()) return false;
    for (const int only_theirs : theirs) {
      if (h.units.count(only_theirs) != 0) continue;
      if (h.just_left.count(only_theirs) == 0) return false;
      for (const int only_ours : h.units)
        if (theirs.count(only_ours) == 0 && (h.was_protected.count(only_ours) != 0 ||
                                             worth_of(h, only_theirs).apart_from(worth_of(h, only_ours))))
          return false;
    }
    h.units = theirs;
    return true;
  }

  eviction_step step(std::span<const float> q, std::span<const float> key, std::span<const float> value) {
    end_prompt();
    decodes_ = true;
    append(key, value);
    eviction_step result;
    for (int head = 0; head < s_.kv_heads; ++head) {
      head_state& h = heads_[static_cast<std::size_t>(head)];
      const int row = length_ - 1;
      h.units.insert(row / s_.page);
      grow(h);
      if (s_.kind == eviction_kind::raas)
        h.worths[static_cast<std::size_t>(row / s_.page)] = {double(row), double(row), -1};
      std::vector<int> tokens;
      for (const int unit : h.units)
        for (int t = unit * s_.page; t < std::min((unit + 1) * s_.page, length_); ++t) tokens.push_back(t);
      const std::vector<double> shares = attend_group(q, head, tokens, result.attended);
      result.units.push_back({h.units.begin(), h.units.end()});
      count(h, tokens, shares, row);
      leave(h, false);
    }
    return result;
  }

 private:
  struct head_state {
    std::set<int> units;
    std::vector<worth> worths;  // by unit
    std::set<int> just_left, was_protected;
  };

  const worth& worth_of(const head_state& h, int unit) const {
    return h.worths[static_cast<std::size_t>(unit)];
  }
  void grow(head_state& h) const {
    h.worths.resize(static_cast<std::size_t>((length_ + s_.page - 1) / s_.page));
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
  }

  /// Adds the group's output and lse to `to`; each token's softmax weight, averaged over the group. NaN counts as 0.
  std::vector<double> attend_group(std::span<const float> q, int head, const std::vector<int>& tokens,
                                   attention& to) const {
    const int group = s_.query_heads / s_.kv_heads;
    std::vector<std::span<const float>> keys, values;
    for (const int t : tokens) {
      keys.push_back(row_of(keys_, t * s_.kv_heads + head, s_.head_dim));
      values.push_back(row_of(values_, t * s_.kv_heads + head, s_.head_dim));
    }
    std::vector<double> shares(tokens.size(), 0.0);
    for (int g = 0; g < group; ++g) {
      const auto query = row_of(q, head * group + g, s_.head_dim);
      const attention one = oracle::attend(query, keys, values, s_.scale);
      to.out.insert(to.out.end(), one.out.begin(), one.out.end());
      to.lse.push_back(one.lse[0]);
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        const double weight = std::exp(s_.scale * dot(query, keys[i]) - one.lse[0]);
        if (!std::isnan(weight)) shares[i] += weight / group;
      }
    }
    return shares;
  }

  /// A sum of shares in float32.
  static worth about(double share) { return {share * (1 - 2e-4) - 1e-30, share * (1 + 2e-4) + 1e-30, -1}; }

  /// A prompt page that no row has stamped, older than all stamps: where the whole prompt has been kept only by age.
  worth stamp_below_rows(double share) const {
    const bool cut = !s_.keeps_prompt && (prompt_ + s_.page - 1) / s_.page > s_.budget / s_.page;
    const auto below = [](double of) { return -1 / std::max(of, 1e-40); };  // in the same order
    return cut ? worth{below(about(share).low), below(about(share).high), -1} : worth{below(0), below(0), -1};
  }

  void count(head_state& h, const std::vector<int>& tokens, const std::vector<double>& shares, int row) {
    std::vector<double> of_unit(h.worths.size(), 0.0);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      of_unit[static_cast<std::size_t>(tokens[i] / s_.page)] += shares[i];
    for (const int unit : h.units) {
      worth& w = h.worths[static_cast<std::size_t>(unit)];
      const double share = of_unit[static_cast<std::size_t>(unit)];
      switch (s_.kind) {
        case eviction_kind::h2o:
          w = {w.low + about(share).low, w.high + about(share).high, -1};
          break;
        case eviction_kind::tova:
          w = about(share);
          break;
        case eviction_kind::snapkv:
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
        return unit >= length_ - static_cast<int>(s_.recent * s_.budget);
      case eviction_kind::tova:
        return false;
      case eviction_kind::snapkv:
        return unit >= prompt_ - s_.window;
      default:
        if ((unit + 1) * s_.page > length_) return true;  // it is being filled
        if (!s_.keeps_prompt)
          return (unit + 1) * s_.page <= s_.sink || unit * s_.page >= length_ - s_.recent_tokens;
        return prompt_ends || unit * s_.page < prompt_;
    }
  }

  /// One after the other the least leaves, of those alike the first.
  void leave(head_state& h, bool prompt_ends) {
    h.just_left.clear();
    h.was_protected.clear();
    for (const int unit : h.units)
      if (is_protected(unit, prompt_ends)) h.was_protected.insert(unit);
    if (s_.kind == eviction_kind::snapkv && !prompt_ends) return;
    int most = s_.budget / s_.page;
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
  }

  /// The largest vote within the kernel, of those of tokens before the window.
  worth best_near(int token, const std::vector<double>& votes) const {
    worth best = about(0);
    for (int t = std::max(0, token - s_.kernel / 2); t <= token + s_.kernel / 2 && t < prompt_ - s_.window;
         ++t) {
      worth vote = about(votes[static_cast<std::size_t>(t)]);
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
    for (int head = 0; head < s_.kv_heads; ++head) {
      head_state& h = heads_[static_cast<std::size_t>(head)];
      grow(h);
      std::vector<double> votes(static_cast<std::size_t>(prompt_), 0.0);
      const int observed = s_.kind == eviction_kind::h2o    ? prompt_
                           : s_.kind == eviction_kind::tova ? 1
                           : s_.kind == eviction_kind::raas ? !s_.keeps_prompt
                                                            : s_.window;
      attention unused;
      for (int row = std::max(0, prompt_ - observed); row < prompt_; ++row) {
        const auto shares = attend_group(query_row(row), head, tokens_up_to(row + 1), unused);
        for (std::size_t t = 0; t < shares.size(); ++t) votes[t] += shares[t];
      }
      for (int unit = 0; unit < static_cast<int>(h.worths.size()); ++unit) {
        h.units.insert(unit);
        if (s_.kind == eviction_kind::snapkv) {
          h.worths[static_cast<std::size_t>(unit)] = best_near(unit, votes);
          continue;
        }
        double share = 0;
        for (int t = unit * s_.page; t < std::min((unit + 1) * s_.page, prompt_); ++t)
          share += votes[static_cast<std::size_t>(t)];
        h.worths[static_cast<std::size_t>(unit)] = about(share);
        if (s_.kind == eviction_kind::raas)
          h.worths[static_cast<std::size_t>(unit)] = stamp_below_rows(share);
      }
      leave(h, true);
    }
  }

  eviction_settings s_;
  int length_ = 0, prompt_ = 0;
  bool decodes_ = false, ended_ = false;
  std::vector<float> queries_, keys_, values_;  // of the prompt; of all tokens
  std::vector<head_state> heads_;
};

}  // namespace oracle
