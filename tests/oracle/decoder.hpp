// One layer of one sequence. A decode step: append, drift, correct, attend, speculate.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "correction.hpp"
#include "drift.hpp"
#include "numbers.hpp"
#include "pages.hpp"
#include "pinning.hpp"
#include "residency.hpp"
#include "results.hpp"
#include "rows.hpp"
#include "scoring.hpp"
#include "selection.hpp"
#include "settings.hpp"
#include "summaries.hpp"

namespace oracle {

/// A copy of a decoder is a fork. Throws std::invalid_argument for wrong shapes.
class decoder {
 public:
  explicit decoder(settings s)
      : s_((check(s), std::move(s))),
        heads_(static_cast<std::size_t>(s_.kv_heads),
               head_state{{}, {}, {}, {}, {}, slot_cache(s_), true, true}) {}

  const settings& config() const { return s_; }
  int length() const { return length_; }

  /// Appends `tokens` rows of keys and values, each (n_kv, d). Selection, q' and what the selected slots hold
  /// are dropped, and decode steps are counted anew.
  void prompt(std::span<const float> keys, std::span<const float> values, int tokens) {
    require(tokens >= 0, "a prompt has no negative length");
    if (tokens == 0) return;
    append(keys, values, tokens);
    given_from_ = length_ / s_.page;
    drop_selection();
    truncation_firm_ = true;
    decode_index_ = 0;
  }

  /// `rows` decode rows: `q` is (rows, n_qo, d), `k` and `v` are (rows, n_kv, d). Each row attends to itself
  /// and to what is before it.
  step_result step(std::span<const float> q, std::span<const float> k, std::span<const float> v,
                   int rows = 1) {
    require(rows >= 1 && rows <= s_.max_rows, "a step has between one row and max_rows");
    require_queries(q, rows);
    const std::vector<int> fixed_candidates = candidates();
    const int before = length_;
    append(k, v, rows);
    if (!previous_query_)
      for (head_state& head : heads_)
        if (!head.unlikeness.empty())
          head.pinned = pin(units_of(s_, fixed_candidates), head.unlikeness, s_.pinned);
    given_from_ = before / s_.page;

    step_result result;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      row_result row;
      row.selected_before = heads_[kv_head].selected;
      if (retrieves(s_, kv_head)) flag(row, group_of(q, kv_head), kv_head);
      result.rows.push_back(row);
    }
    if (s_.rows == scope_kind::layer && !corrects_by_mass()) share_flags(retrieving(result.rows), s_.tau);
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      row_result& row = result.rows[kv_head];
      head_state& head = heads_[kv_head];
      if (retrieves(s_, kv_head)) correct(row, q, kv_head, fixed_candidates, head);
      row.selected = head.selected;
      row.selected_by_head = head.selected_by_head;
    }
    for (int i = 0; i < rows; ++i)
      attend_row(row_of(q, i, query_size()), before + i + 1, fixed_candidates, result);
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      row_result& row = result.rows[kv_head];
      head_state& head = heads_[kv_head];
      if (retrieves(s_, kv_head)) speculate(row, q, kv_head, head);
      row.selected_next = head.selected;
      row.recalled = row.by_correct.recalled + row.by_speculate.recalled;
      row.promoted = row.by_correct.promoted + row.by_speculate.promoted;
      row.recalled_before_attention = row.by_correct.recalled;
    }
    last_queries_.assign(q.begin(), q.end());
    last_before_ = before;
    keep_query(rows - 1);
    candidates_at_ = length_ + 1;
    truncation_firm_ = true;
    ++decode_index_;
    return result;
  }

  /// Keeps the first `length` tokens. If that cuts only rows of the last append, a decode step, and leaves at
  /// least one of them, the selection and the candidates it was made from stay, and q' becomes the last row
  /// left. Otherwise, or if a head has selected a page that is no longer complete, they are dropped as by a
  /// prompt, but decode steps are counted on.
  void truncate(int length) {
    require(length >= 0 && length <= length_, "a truncation keeps between no token and all");
    if (length == length_) return;
    // There is a q' only if the last append was a decode step.
    const bool keeps = previous_query_ && length > last_before_ && !loses_selected_page(length);
    truncation_firm_ = length <= last_before_ || (truncation_firm_ && loss_is_firm(length));

    const std::size_t elements = static_cast<std::size_t>(length) * static_cast<std::size_t>(s_.kv_heads) *
                                 static_cast<std::size_t>(s_.head_dim);
    open_again(length);
    for (std::vector<float>* rows : {&keys_, &values_, &stored_keys_, &stored_values_})
      rows->resize(elements);
    length_ = length;
    for (head_state& head : heads_)
      while (!head.summaries.empty() &&
             !is_complete(s_, page_of(s_, static_cast<int>(head.summaries.size()) - 1), length)) {
        head.summaries.pop_back();
        if (s_.pinned > 0) head.unlikeness.pop_back();
      }
    // Spare slots never hold a page that is no longer complete: only the last selection can have one.
    if (keeps)
      keep_query(length - last_before_ - 1);
    else
      drop_selection();
  }

  /// Whether the next step goes on with a selection, and with the queries that made it.
  bool has_selection() const { return previous_query_.has_value(); }

  /// The pages that the next step's selections come from, whether carried into it or made in it.
  std::vector<int> candidates() const { return candidate_pages(s_, candidates_at_, length_); }

  /// What a KV head carries into the next step: its selection, and the selected slots' pages, -1 for an empty
  /// one; none in place.
  std::vector<int> selected(int kv_head) const { return heads_[kv_head].selected; }

  std::vector<int> slots(int kv_head) const {
    if (s_.route == route_kind::in_place || !retrieves(s_, kv_head)) return {};
    return heads_[kv_head].slots.pages();
  }

  /// Exact attention of `q` (n_qo, d) over everything appended so far.
  attention full(std::span<const float> q) const { return full(q, length_); }

  /// Exact attention over the first `length` tokens.
  attention full(std::span<const float> q, int length) const {
    require_queries(q, 1);
    require(length >= 0 && length <= length_, "so many tokens were not appended");
    std::vector<int> tokens;
    for (int token = s_.kind == layer_kind::sliding ? std::max(0, length - s_.sliding_window) : 0;
         token < length; ++token)
      tokens.push_back(token);
    attention result;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) attend_group(q, kv_head, tokens, result);
    return result;
  }

  /// A KV head's from-scratch selection with `q` (rows, n_qo, d), all rows as one group, among the candidates
  /// at `length`, at most one more than was appended.
  selection choose(std::span<const float> q, int kv_head, int length, int rows = 1) const {
    require_queries(q, rows);
    require(retrieves(s_, kv_head), "only a retrieval head selects");
    require(length >= 0 && length <= length_ + 1, "candidates at this length are not complete yet");
    return choose_row(units_of(s_, candidate_pages(s_, length)), q, kv_head).all;
  }

  /// The units of `choose`, ascending.
  std::vector<int> select(std::span<const float> q, int kv_head, int length, int rows = 1) const {
    return choose(q, kv_head, length, rows).pages;
  }

 private:
  struct head_state {
    std::vector<page_summary> summaries;  // per unit of complete pages
    std::vector<double> unlikeness;       // per unit of complete pages, where units are pinned
    pins pinned;
    std::vector<int> selected;                       // ascending
    std::vector<std::vector<int>> selected_by_head;  // of it, where each query head selects for itself
    slot_cache slots;
    bool carried_firm;  // `selected` must agree
    bool history_firm;  // all flags and selections since the slots were empty must
  };

  int query_size() const { return s_.query_heads * s_.head_dim; }

  void require_queries(std::span<const float> q, int rows) const {
    require(rows >= 1 && q.size() == static_cast<std::size_t>(rows) * static_cast<std::size_t>(query_size()),
            "q is (rows, query_heads, head_dim)");
  }

  void append(std::span<const float> keys, std::span<const float> values, int tokens) {
    const std::size_t elements = static_cast<std::size_t>(tokens) * static_cast<std::size_t>(s_.kv_heads) *
                                 static_cast<std::size_t>(s_.head_dim);
    require(keys.size() == elements && values.size() == elements,
            "keys and values are (tokens, kv_heads, head_dim)");
    for (std::vector<float>* rows : {&keys_, &stored_keys_})
      rows->insert(rows->end(), keys.begin(), keys.end());
    for (std::vector<float>* rows : {&values_, &stored_values_})
      rows->insert(rows->end(), values.begin(), values.end());
    const int first = length_ / s_.page;
    length_ += tokens;
    for (int page = first; is_complete(s_, page, length_); ++page) store(page);
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      if (!retrieves(s_, kv_head)) continue;
      std::vector<page_summary>& of_head = heads_[kv_head].summaries;
      while (is_complete(s_, page_of(s_, static_cast<int>(of_head.size())), length_)) {
        const int unit = static_cast<int>(of_head.size());
        const auto rows = token_rows(keys_, kv_head, tokens_of_units(s_, {unit}));
        of_head.push_back(summarise(s_, kv_head, rows));
        if (s_.pinned > 0) heads_[kv_head].unlikeness.push_back(unlikeness(rows));
      }
    }
  }

  /// One KV head's rows of a page in `data`, one behind the other.
  std::vector<float> page_rows(const std::vector<float>& data, int kv_head, int page) const {
    std::vector<float> rows;
    for (const auto& row : token_rows(data, kv_head, tokens_of(s_, length_, {page})))
      rows.insert(rows.end(), row.begin(), row.end());
    return rows;
  }

  /// A complete page is from now on what comes back of it.
  void store(int page) {
    bool all_complete = true;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head)
      all_complete = all_complete && kind_of(s_, kv_head) == layer_kind::complete;
    if (!s_.read_back || all_complete) return;
    std::vector<std::vector<float>> keys, values;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      keys.push_back(page_rows(keys_, kv_head, page));
      values.push_back(page_rows(values_, kv_head, page));
    }
    s_.read_back(page, keys, values);
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head)
      for (int t = 0; t < s_.page; ++t)
        for (int i = 0; i < s_.head_dim; ++i) {
          const auto head = static_cast<std::size_t>(kv_head);
          const auto to =
              static_cast<std::size_t>(((page * s_.page + t) * s_.kv_heads + kv_head) * s_.head_dim + i);
          const auto from = static_cast<std::size_t>(t * s_.head_dim + i);
          stored_keys_[to] = keys[head][from];
          stored_values_[to] = values[head][from];
        }
  }

  /// The page that token `length` goes to is no longer complete. Its rows are those that were appended, if
  /// that was in the last append or they were never stored; else nobody has them, and they are what came
  /// back.
  void open_again(int length) {
    const int page = length / s_.page;
    const auto first = static_cast<std::ptrdiff_t>(page * s_.page * s_.kv_heads * s_.head_dim);
    const auto copy = [&](const std::vector<float>& from, std::vector<float>& to) {
      std::copy(from.begin() + first, from.end(), to.begin() + first);
    };
    if (page < given_from_) {
      copy(stored_keys_, keys_);
      copy(stored_values_, values_);
    } else {
      copy(keys_, stored_keys_);
      copy(values_, stored_values_);
    }
    given_from_ = std::min(given_from_, page);
  }

  void drop_selection() {
    previous_query_.reset();
    candidates_at_ = length_ + 1;
    for (head_state& head : heads_) {
      head.selected.clear();
      head.selected_by_head.clear();
      head.pinned = {};
      head.slots.clear();
      head.carried_firm = head.history_firm = true;
    }
  }

  /// q' becomes that of a row of the last step.
  void keep_query(int row) {
    const std::span<const float> kept = row_of(last_queries_, row, query_size());
    previous_query_ = std::vector<float>(kept.begin(), kept.end());
  }

  bool loses_selected_page(const head_state& head, int length) const {
    return std::any_of(head.selected.begin(), head.selected.end(),
                       [&](int unit) { return !is_complete(s_, page_of(s_, unit), length); });
  }

  bool loses_selected_page(int length) const {
    return std::any_of(heads_.begin(), heads_.end(),
                       [&](const head_state& head) { return loses_selected_page(head, length); });
  }

  /// Another implementation must say the same of `loses_selected_page`.
  bool loss_is_firm(int length) const {
    const bool none_lost = candidates() == candidate_pages(s_, candidates_at_, length);
    bool all_firm = true;
    for (const head_state& head : heads_) {
      if (head.carried_firm && loses_selected_page(head, length)) return true;
      all_firm = all_firm && head.carried_firm;
    }
    return all_firm || none_lost;
  }

  /// `chosen`, or what sticky_top_k makes of it where a step attends to `held`.
  selection favouring(const selection& chosen, const std::vector<int>& held) const {
    if (s_.selection != selection_kind::sticky_top_k || held.empty()) return chosen;
    return sticky_top_k(chosen, held, s_.selected_units, s_.bonus);
  }

  /// `queries` is (m * G, d) here and below: the group's heads in every row of the step.
  selection choose_among(const std::vector<int>& units, std::span<const float> queries, int kv_head,
                         const std::vector<int>& held = {}) const {
    const head_state& head = heads_[kv_head];
    const std::vector<int> others = without(units, head.pinned.units);
    selection chosen = select_pages(s_, kv_head, queries, others, head.summaries);
    measure_scores(chosen, s_, kv_head, queries, token_rows(keys_, kv_head, tokens_of_units(s_, others)));
    return with_pinned(favouring(chosen, held), head.pinned);
  }

  /// What a KV head selects with `q` (rows, n_qo, d), with whom it shares its selection or who of it has one;
  /// `after` is the head when it selects for the step behind that.
  row_choice choose_row(const std::vector<int>& units, std::span<const float> q, int kv_head,
                        const head_state* after = nullptr) const {
    std::vector<selection> each;
    const std::vector<int> held = after == nullptr ? std::vector<int>{} : after->selected;
    const auto held_by = [&](int g) {
      return after == nullptr ? std::vector<int>{} : after->selected_by_head[g];
    };
    switch (s_.rows) {
      case scope_kind::query_head:
        for (int g = 0; g < group_size(s_); ++g)
          each.push_back(
              choose_among(units, queries_of_head(s_, group_of(q, kv_head), g), kv_head, held_by(g)));
        return max_with(each);
      case scope_kind::layer:
        for (int other = 0; other < s_.kv_heads; ++other)
          if (retrieves(s_, other)) each.push_back(choose_among(units, group_of(q, other), other));
        return {favouring(select_together(s_, each), held)};
      default:
        return {choose_among(units, group_of(q, kv_head), kv_head, held)};
    }
  }

  std::vector<row_result*> retrieving(std::vector<row_result>& rows) const {
    std::vector<row_result*> those;
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head)
      if (retrieves(s_, kv_head)) those.push_back(&rows[kv_head]);
    return those;
  }

  bool corrects_by_mass() const {
    return s_.correction == correction_kind::mass_deficit && previous_query_.has_value();
  }

  /// A row that is flagged, or of which that is still to be said by its masses.
  void correct(row_result& row, std::span<const float> q, int kv_head,
               const std::vector<int>& fixed_candidates, head_state& head) const {
    const bool by_mass = corrects_by_mass();
    if (!by_mass && !row.corrected) return;

    const row_choice choice = choose_row(units_of(s_, fixed_candidates), q, kv_head);
    const selection& best = choice.all;
    row.score_size = best.score_size;
    if (by_mass) flag_by_mass(row, best, head);
    if (!row.corrected) return;
    row.correct_margin = best.margin;
    row.correct_firm = is_firm(best) && truncation_firm_;
    std::vector<int> pages = best.pages;
    if (by_mass && s_.partial) {
      const replacement replaced = replace_missing(best, head.selected, s_.delta);
      pages = replaced.pages;
      row.correct_firm = row.correct_firm && replaced.firm && head.carried_firm;
    }
    row.by_correct = hold(head, pages);
    head.selected = pages;
    head.selected_by_head = choice.own;
  }

  /// Skipping this for a corrected head whose candidates stay the same would change nothing: the same query
  /// over the same pages selects the same, and all of it is held. (Unless the correction was partial.)
  void speculate(row_result& row, std::span<const float> q, int kv_head, head_state& head) const {
    const row_choice choice = choose_row(units_of(s_, candidate_pages(s_, length_ + 1)), q, kv_head, &head);
    const selection& chosen = choice.all;
    row.by_speculate = hold(head, chosen.pages);
    row.speculate_margin = chosen.margin;
    row.speculate_firm = is_firm(chosen);
    if (s_.selection == selection_kind::sticky_top_k) {  // what is favoured must agree
      const bool anew = row.corrected && !(s_.partial && corrects_by_mass());
      row.speculate_firm =
          row.speculate_firm && flag_is_firm(row, s_.tau) && row.correct_firm && (anew || head.carried_firm);
    }
    row.score_size = std::max(row.score_size, chosen.score_size);
    head.selected = chosen.pages;
    head.selected_by_head = choice.own;

    const bool step_firm = flag_is_firm(row, s_.tau) && row.correct_firm && row.speculate_firm;
    const bool before_firm = s_.spare == 0 ? head.carried_firm : head.history_firm;
    row.movement_firm = s_.route == route_kind::in_place || (step_firm && before_firm);
    head.history_firm = head.history_firm && step_firm;
    head.carried_firm = row.speculate_firm;
    if (s_.route == route_kind::resident) row.slots = head.slots.pages();
  }

  void flag(row_result& row, std::span<const float> queries, int kv_head) const {
    row.truncation_firm = truncation_firm_;
    if (corrects_by_mass()) return;
    const bool due = s_.correction == correction_kind::always ||
                     (s_.correction == correction_kind::every_n_steps && decode_index_ % s_.every == 0);
    if (due || !previous_query_) {
      row.corrected = true;
      row.flag_forced = true;
      return;
    }
    if (s_.correction != correction_kind::cosine_drift) return;
    const std::vector<float> then = group_of(*previous_query_, kv_head);
    std::vector<drift_result> turns;
    for (int i = 0; i < query_count(s_, queries) / group_size(s_); ++i)
      turns.push_back(drift(row_of(queries, i, group_size(s_) * s_.head_dim), then, group_size(s_), s_.tau,
                            s_.drift_pool));
    const drift_result turn = drift_of_rows(turns, s_.tau);
    row.corrected = turn.flagged;
    row.flag_forced = turn.forced;
    row.pooled_cosine = turn.pooled;
    row.norm_borderline = turn.norm_borderline;
  }

  void flag_by_mass(row_result& row, const selection& best, const head_state& head) const {
    const mass_comparison missed = compare_masses(best, head.selected, s_.delta);
    row.corrected = missed.missing_mass;
    row.flag_margin = missed.margin;
    row.flag_slack = missed.slack;
    // Another selection in use, or another number of best pages, compares other sums.
    const bool same_sums =
        head.carried_firm && best.kept_firm && best.mass_margin > mass_error(best.score_size);
    if (!same_sums) row.flag_slack = infinity;
  }

  movement hold(head_state& head, const std::vector<int>& wanted) const {
    if (s_.route == route_kind::in_place) return {};
    return head.slots.hold(s_, wanted, length_);
  }

  /// One row of a step: `q` is (n_qo, d), `length` counts the row itself.
  void attend_row(std::span<const float> q, int length, const std::vector<int>& fixed_candidates,
                  step_result& result) const {
    if (s_.kind == layer_kind::sliding) {
      const attention all = full(q, length);
      result.out.insert(result.out.end(), all.out.begin(), all.out.end());
      result.lse.insert(result.lse.end(), all.lse.begin(), all.lse.end());
      result.doubt.insert(result.doubt.end(), all.doubt.begin(), all.doubt.end());
      result.lse_doubt.insert(result.lse_doubt.end(), all.lse_doubt.begin(), all.lse_doubt.end());
      return;
    }
    for (int kv_head = 0; kv_head < s_.kv_heads; ++kv_head) {
      const head_state& head = heads_[kv_head];
      const std::vector<int> window =
          retrieves(s_, kv_head) ? window_pages(s_, length, fixed_candidates) : window_pages(s_, length);
      for (int g = 0; g < group_size(s_); ++g) {
        const std::vector<int>& selected =
            head.selected_by_head.empty() ? head.selected : head.selected_by_head[g];
        const std::vector<int> tokens = attended_tokens(s_, kind_of(s_, kv_head), length, selected, window);
        const weights_of_tokens weights =
            s_.selection == selection_kind::colliding && retrieves(s_, kv_head)
                ? sample_weights(row_of(group_of(q, kv_head), g, s_.head_dim), kv_head, tokens, selected)
                : weights_of_tokens{};
        attend_head(q, kv_head, g, tokens, result, weights);
      }
    }
  }

  void attend_group(std::span<const float> q, int kv_head, const std::vector<int>& tokens,
                    attention& to) const {
    for (int g = 0; g < group_size(s_); ++g) attend_head(q, kv_head, g, tokens, to, {});
  }

  /// What tokens have been sampled with, as logarithms, and doubts of these; none: nothing was sampled.
  struct weights_of_tokens {
    std::vector<double> log_weights, doubts;
  };

  /// Of the tokens that a query head attends to those that it has `sampled`, single ones; others weigh 1.
  weights_of_tokens sample_weights(std::span<const float> query, int kv_head, const std::vector<int>& tokens,
                                   const std::vector<int>& sampled) const {
    weights_of_tokens weights;
    for (const int token : tokens) {
      const bool was = std::binary_search(sampled.begin(), sampled.end(), token);
      const token_weight one =
          was ? sampled_weight(query, token_rows(stored_keys_, kv_head, {token})[0], s_, s_.bases[kv_head])
              : token_weight{0.0, 0.0};
      weights.log_weights.push_back(one.log_weight);
      weights.doubts.push_back(one.doubt);
    }
    return weights;
  }

  template <class To>
  void attend_head(std::span<const float> q, int kv_head, int g, const std::vector<int>& tokens, To& to,
                   const weights_of_tokens& weights) const {
    const auto query_head = static_cast<std::size_t>(kv_head * group_size(s_) + g);
    const double logit = s_.sink_logits.empty() ? -infinity : s_.sink_logits[query_head];
    attention head =
        attend(row_of(group_of(q, kv_head), g, s_.head_dim), token_rows(stored_keys_, kv_head, tokens),
               token_rows(stored_values_, kv_head, tokens), s_.scale * scale_of(s_.key_scales, kv_head),
               {s_.soft_cap, logit, {}, weights.log_weights, weights.doubts});
    for (std::vector<double>* of_values : {&head.out, &head.doubt})
      for (double& x : *of_values) x *= scale_of(s_.value_scales, kv_head);
    to.out.insert(to.out.end(), head.out.begin(), head.out.end());
    to.lse.push_back(head.lse[0]);
    to.doubt.insert(to.doubt.end(), head.doubt.begin(), head.doubt.end());
    to.lse_doubt.push_back(head.lse_doubt[0]);
  }

  /// (m * G, d): the queries of one KV head's group, out of (m, n_qo, d).
  std::vector<float> group_of(std::span<const float> q, int kv_head) const {
    std::vector<float> queries;
    for (int i = 0; i < static_cast<int>(q.size()) / query_size(); ++i) {
      const std::span<const float> of_row =
          row_of(row_of(q, i, query_size()), kv_head, group_size(s_) * s_.head_dim);
      queries.insert(queries.end(), of_row.begin(), of_row.end());
    }
    return queries;
  }

  /// One KV head's rows of the tokens named, out of (tokens, n_kv, d).
  std::vector<std::span<const float>> token_rows(const std::vector<float>& data, int kv_head,
                                                 const std::vector<int>& tokens) const {
    std::vector<std::span<const float>> result;
    for (int token : tokens) result.push_back(row_of(data, token * s_.kv_heads + kv_head, s_.head_dim));
    return result;
  }

  settings s_;
  int length_ = 0;
  std::vector<float> keys_;                           // (tokens, n_kv, d)
  std::vector<float> values_;                         // (tokens, n_kv, d)
  std::vector<float> stored_keys_, stored_values_;    // the same, complete pages as they come back
  int given_from_ = 0;                                // the first page whose rows are kept as they were given
  std::vector<head_state> heads_;                     // per KV head
  std::optional<std::vector<float>> previous_query_;  // q', (n_qo, d)
  std::vector<float> last_queries_;                   // of the last decode step, (m, n_qo, d)
  int last_before_ = 0;                               // the length before that step
  int candidates_at_ = 1;                             // the length whose candidates the next step has
  bool truncation_firm_ = true;                       // see row_result
  int decode_index_ = 0;                              // of the next step, from 0 after a prompt
};

}  // namespace oracle
