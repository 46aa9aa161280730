// Attention on the host: one KV head's query group over a list of pages.
#pragma once

#include <algorithm>
#include <cstddef>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/merge_selections.hpp>
#include <freekv/backend/host/complete_attention.hpp>
#include <freekv/backend/host/encoded_pages.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/selection.hpp>

namespace freekv::host {

// Attention's algorithms on the team of an instruction set: compiled once for a head_dim and an element,
// whatever the pipeline.

/// Scales the queries (group, head_dim) to `scaled` and empties `part`.
template <int HeadDim>
void begin_attention(isa set, const float* queries, float scale, int group, float* scaled,
                     const attention_part& part) {
  with_team(set, [&](auto team) {
    using team_type = decltype(team);
    for (int i = 0; i < group * HeadDim; i += team_type::width)
      team.store(scaled + i, team.load(queries + i) * typename team_type::pack(scale));
    part.clear(team, group, HeadDim);
  });
}
template <int HeadDim>
void clear_part(isa set, const attention_part& part, int group) {
  with_team(set, [&](auto team) { part.clear(team, group, HeadDim); });
}
template <int HeadDim, class Element>
void attend_slice(isa set, const group_query& query, const head_slice<const Element>& slice, int tokens,
                  const attention_part& part, float* scratch, float soft_cap = 0.0f,
                  const Element* ahead = nullptr, const float* log_weights = nullptr) {
  with_wide_team(set, [&](auto team) {
    freekv::detail::attend_slice<HeadDim>(team, query, slice, tokens, part, scratch, soft_cap, ahead,
                                          log_weights);
  });
}
template <int HeadDim>
void merge_parts(isa set, const attention_part& from, const attention_part& into, int group) {
  with_team(set, [&](auto team) { freekv::detail::merge_parts<HeadDim>(team, from, into, group); });
}
/// `sink_logits` (group) may be null, and `lse` too.
template <int HeadDim>
void finish_attention(isa set, const float* sink_logits, const attention_part& part, int group, float* out,
                      float* lse) {
  with_team(set, [&](auto team) {
    if (sink_logits != nullptr) add_logits<HeadDim>(team, sink_logits, group, part);
    freekv::detail::finish_attention<HeadDim>(team, part, group, out, lse);
  });
}

/// Attention of the rows of one entry of a step. `complete`: to everything up to each row that the model
/// attends to, from the store; else each head to what its kind keeps.
template <class State, class Policies>
struct attention_job {
  using element = typename State::element;
  const State& s;
  const Policies& policies;
  const step_entry& entry;
  const float* queries = nullptr;  // the step's, (rows, query_heads, head_dim)
  attention_output to;
  bool complete = false;
  const masses_left* left = nullptr;            // by the layer's correction
  const refreshed_values* refreshed = nullptr;  // by the last row, until all have attended

  static constexpr int d = State::head_dim;

  attention_list list(int row, int head) const { return s.pages_attended(entry, row, head, complete); }
  int parts(int row) const {
    int parts = 1;
    for (int head = 0; head < s.heads.kv; ++head) {
      const attention_list entries = list(row, head);
      parts = std::max(parts, (entries.size() - 1) / entries_per_part(entries) + 1);
    }
    return parts;
  }
  /// Bytes of keys and values that one row reads.
  std::size_t bytes(int row) const {
    std::size_t tokens = 0;
    for (int head = 0; head < s.heads.kv; ++head) {
      const attention_list entries = list(row, head);
      const int units = entries.complete ? 0 : entries.selected_count;
      tokens += to_size(units * s.unit.tokens + (entries.size() - units) * s.page.tokens);
    }
    return tokens * 2 * d * sizeof(typename State::element);
  }

  /// Scales the queries of a row and head (group, head_dim) to `scaled` and empties `part`.
  void begin(isa set, int row, int head, float* scaled, const attention_part& part) const {
    begin_attention<d>(set, queries_of(row, head), s.scale_of(head), s.heads.group(), scaled, part);
  }
  /// The `nth` part of one head's list, from nothing.
  void attend_part(isa set, int row, int head, int nth, const attention_part& part,
                   const workspace& w) const {
    begin(set, row, head, w.query, part);
    const attention_list entries = list(row, head);
    const int begin = nth * entries_per_part(entries);
    const int end = std::min(begin + entries_per_part(entries), entries.size());
    int gathered = 0;  // tokens of small units, which are attended to together
    const auto attend_gathered = [&] {
      if (gathered == 0) return;
      attend_slice<d>(set, {w.query, s.heads.group(), d}, as_const(gathered_rows(w, 0)), gathered, part,
                      w.rows, s.soft_cap);
      gathered = 0;
    };
    for_entries(entries, head, {begin, end - begin}, w,
                [&](int i, const head_slice<element>& rows, const element* ahead) {
                  if (gathers(entries, head, i, w)) {
                    copy_slice<d>(as_const(rows), gathered_rows(w, gathered), s.unit.tokens);
                    gathered += s.unit.tokens;
                    if (gathered + s.unit.tokens > gathered_tokens<d>) attend_gathered();
                    return;
                  }
                  attend_gathered();
                  if constexpr (freekv::detail::may_complete<Policies>)
                    if (refreshes(row, head, entries, i))
                      return attend_and_refresh(set, entries, head, i, rows, part, w, ahead);
                  attend_entry(set, entries, head, i, rows, part, w, ahead);
                });
    attend_gathered();
  }
  /// Calls `body(range, rows)` for all that a row and head attends to, page by page; only where `complete`.
  template <class Body>
  void for_all(int row, int head, const workspace& w, const Body& body) const {
    const attention_list entries = list(row, head);
    for_entries(
        entries, head, {0, entries.size()}, w,
        [&](int i, const head_slice<element>& rows, const element*) { body(entries.range(i), rows); });
  }
  /// Sums, as log-sum-exps (rows, group), what the kept queries of a retrieval head attend to: sink, window
  /// and sink logits, which they do whatever is selected, or with `selected_too` all. Leaves `w.query` as it
  /// is. Throws store_error.
  void sum_attended(isa set, int head, bool selected_too, log_sum_exp* sums, const workspace& w) const {
    const int group = s.heads.group();
    workspace scratch = w;
    scratch.query = w.sharing_query;
    for (int row = 0; row < entry.tokens; ++row) {
      const attention_list entries = list(row, head);
      const attention_part part{sums + row * group, nullptr};
      begin_attention<d>(set, s.kept_query(entry.sequence, head, row), s.scale_of(head), group, scratch.query,
                         part);
      const auto add = [&](int first, int end) {
        for_entries(entries, head, {first, end - first}, scratch,
                    [&](int i, const head_slice<element>& rows, const element* ahead) {
                      attend_entry(set, entries, head, i, rows, part, scratch, ahead);
                    });
      };
      const int sink = entries.roles.sink_end, window = sink + entries.selected_count;
      add(0, selected_too ? window : sink);
      add(window, entries.size());
      for (int g = 0; s.sink_logits != nullptr && g < group; ++g)
        part.log_sum[g].add(s.sink_logits[head * group + g]);
    }
  }
  /// Writes the log-masses of one head's list, (group, of.entries).
  void log_masses(isa set, int row, int head, const log_mass_output& of, const workspace& w) const {
    const int group = s.heads.group();
    const attention_part part{w.part_log_sum, nullptr};
    begin(set, row, head, w.query, part);
    const attention_list entries = list(row, head);
    float* const of_group = of.log_masses + first_query_head(row, head) * of.entries;
    std::fill_n(of_group, std::ptrdiff_t{group} * of.entries, -infinity);
    for_entries(entries, head, {0, entries.size()}, w,
                [&](int i, const head_slice<element>& rows, const element* ahead) {
                  std::fill_n(part.log_sum, group, log_sum_exp{});
                  attend_entry(set, entries, head, i, rows, part, w, ahead);
                  for (int g = 0; g < group; ++g)
                    of_group[std::ptrdiff_t{g} * of.entries + i] = part.log_sum[g].value() * of.per_nat;
                });
  }
  void finish(isa set, int row, int head, const attention_part& part,
              [[maybe_unused]] const workspace& w) const {
    const int group = s.heads.group();
    if constexpr (freekv::detail::may_complete<Policies>)
      if (completes(head))
        complete_attention(set, s, policies, entry, head, queries_of(row, head),
                           left->known(s.layer, {entry.sequence, head}, row * group), part, w);
    const std::ptrdiff_t first = first_query_head(row, head);
    float* const lse = to.lse == nullptr ? nullptr : to.lse + first;
    float* const out = to.floats() + first * d;
    finish_attention<d>(set, s.sink_logits == nullptr ? nullptr : s.sink_logits + head * group, part, group,
                        out, lse);
    for (int i = 0; s.value_scales != nullptr && i < group * d; ++i) out[i] *= s.value_scales[head];
    for (int g = 0; lse != nullptr && to.lse_per_nat != 1.0f && g < group; ++g) lse[g] *= to.lse_per_nat;
  }
  /// Gives pages the values that the last row has brought up to date.
  void keep_refreshed() const {
    const int last = entry.tokens - 1;
    for (int head = 0; head < s.heads.kv; ++head) {
      if (!completes(head)) continue;
      const attention_list entries = list(last, head);
      for (int i = 0; i < entries.size(); ++i)
        if (refreshes(last, head, entries, i))
          std::copy_n(refreshed->of({entry.sequence, head}, i), freekv::detail::page_value_bytes(d),
                      s.page_value(entry.sequence, head, entries.page(i)));
    }
  }

 private:
  int entries_per_part(const attention_list& entries) const {
    return freekv::detail::entries_per_part(entries.complete ? s.page.tokens : s.unit.tokens);
  }
  /// Runs body(i, rows, keys that come next or null) for some entries of a head's list.
  template <class Body>
  void for_entries(const attention_list& entries, int head, const unit_range& some, const workspace& w,
                   const Body& body) const {
    const int begin = some.first, end = some.first + some.count;
    if (!s.encoded || in_slots(entries)) {
      for (int i = begin; i < end; ++i) {
        if (const int later = i + gathered_tokens<d> / s.unit.tokens;
            w.gathered != nullptr && later < end && entries.is_selected(later))
          prefetch(rows_of(entries, later, entries.range(later), head), s.unit.tokens);
        const element* const ahead =
            i + 1 < end ? rows_of(entries, i + 1, entries.range(i + 1), head).key : nullptr;
        body(i, rows_of(entries, i, entries.range(i), head), ahead);
      }
      return;
    }
    // The open page is not encoded; it is the last.
    const bool open = begin < end && entries.page(end - 1) >= entry.after() / s.page.tokens;
    encoded_pages(s, policies, w)
        .read_each(
            {entry.sequence, head}, end - open - begin, [&](int i) { return entries.range(begin + i); },
            [&](int i, const auto& rows) { body(begin + i, rows, nullptr); });
    if (!open) return;
    const page_range last = entries.range(end - 1);
    body(end - 1, rows_behind(s.open_slice(entry.sequence, last.page, head), last.first), nullptr);
  }
  /// Adds the rows of entry i for the query heads that attend to it.
  void attend_entry(isa set, const attention_list& entries, int head, int i, const head_slice<element>& rows,
                    const attention_part& part, const workspace& w, const element* ahead) const {
    const int group = s.heads.group(), tokens = entries.range(i).tokens;
    const std::uint32_t* const mask = s.attended_by_heads(entry.sequence, head, entries, i);
    if constexpr (freekv::detail::may_sample<Policies>)
      if (entries.is_selected(i) && freekv::detail::samples(policies))
        return attend_sampled(set, mask, head, rows, part, w, ahead);
    for (head_run run = next_run(mask, 0, group); run.count > 0; run = next_run(mask, run.end(), group)) {
      float* const weighted = part.weighted == nullptr ? nullptr : part.weighted + run.first * d;
      attend_slice<d>(set, {w.query + run.first * d, run.count, d}, as_const(rows), tokens,
                      {part.log_sum + run.first, weighted}, w.rows, s.soft_cap, ahead);
    }
  }
  /// Adds a token that query heads have each sampled, by its weight for each of them.
  void attend_sampled(isa set, const std::uint32_t* mask, int head, const head_slice<element>& rows,
                      const attention_part& part, const workspace& w, const element* ahead) const {
    const int group = s.heads.group();
    resolve(policies.summary, [&]<class Summary>(const Summary& summary) {
      if constexpr (hooks_of<Summary>::has(hook::weighs)) {
        const auto of_head = summary_at(summary, s.layer, head);
        for (head_run run = next_run(mask, 0, group); run.count > 0; run = next_run(mask, run.end(), group))
          for (int g = run.first; g < run.end(); ++g) {
            const group_query query{w.query + g * d, 1, d};
            float log_weight = 0.0f;
            with_team(set, [&](auto team) {
              log_weight = of_head.log_weight(team, query, static_cast<const element*>(rows.key));
            });
            attend_slice<d>(set, query, as_const(rows), 1,
                            {part.log_sum + g, part.weighted == nullptr ? nullptr : part.weighted + g * d},
                            w.rows, s.soft_cap, ahead, &log_weight);
          }
      }
    });
  }
  /// True where entry i is a small unit, which all query heads attend to, each token with its own weight.
  bool gathers(const attention_list& entries, int head, int i, const workspace& w) const {
    if (w.gathered == nullptr || !entries.is_selected(i)) return false;
    if constexpr (freekv::detail::may_sample<Policies>)
      if (freekv::detail::samples(policies)) return false;
    return s.attended_by_heads(entry.sequence, head, entries, i) == nullptr;
  }
  static void prefetch(const head_slice<element>& rows, int tokens) {
    for (int t = 0; t < tokens; ++t) {
      freekv::detail::prefetch_row(simd_team<portable>{}, rows.key + t * rows.stride, d);
      freekv::detail::prefetch_row(simd_team<portable>{}, rows.value + t * rows.stride, d);
    }
  }
  /// Room for gathered small units, from token `first` on.
  static head_slice<element> gathered_rows(const workspace& w, int first) {
    auto* const keys = reinterpret_cast<element*>(w.gathered) + first * d;
    return {keys, keys + gathered_tokens<d> * d, d};
  }
  bool completes(int head) const {
    return s.page_values != nullptr && !complete && s.kind_of(head) == layer_kind::retrieval;
  }
  /// True where entry i brings its page's value up to date: a whole page that may come to be a candidate, by
  /// the last row of a step.
  bool refreshes(int row, int head, const attention_list& entries, int i) const {
    return completes(head) && row == entry.tokens - 1 && i >= entries.roles.sink_end &&
           !(entries.is_selected(i) && s.units_per_page > 1);
  }
  void attend_and_refresh(isa set, const attention_list& entries, int head, int i,
                          const head_slice<element>& rows, const attention_part& part, const workspace& w,
                          const element* ahead) const {
    const attention_part of_page{w.entry_log_sum, w.entry_weighted};
    clear_part<d>(set, of_page, s.heads.group());
    attend_entry(set, entries, head, i, rows, of_page, w, ahead);
    resolve(policies.completion, [&]<class Completion>(const Completion& completion) {
      if constexpr (Completion::completes)
        refresh_page_value<d>(of_page, s.heads.group(), completion.refreshed,
                              s.page_value(entry.sequence, head, entries.page(i)),
                              refreshed->of({entry.sequence, head}, i), w);
    });
    merge_parts<d>(set, of_page, part, s.heads.group());
  }
  const float* queries_of(int row, int head) const { return queries + first_query_head(row, head) * d; }
  bool in_slots(const attention_list& entries) const { return s.attends_to_slots(entries, complete); }
  /// Rows of entry i of a head's list, `range`: in the store, or in its slot.
  auto rows_of(const attention_list& entries, int i, const page_range& range, int head) const {
    if (in_slots(entries)) return s.rows_in_slot(entry.sequence, head, entries, i);
    return rows_behind(s.store_slice(entry.sequence, range.page, head), range.first);
  }
  std::ptrdiff_t first_query_head(int row, int head) const {
    return (std::ptrdiff_t{entry.first_row + row} * s.heads.kv + head) * s.heads.group();
  }
};

/// Attends with one head of one row, part after part on one thread.
template <class State, class Policies>
void attend_head(isa set, const attention_job<State, Policies>& job, int row, int head, const workspace& w) {
  const int group = job.s.heads.group(), parts = job.parts(row);
  const attention_part first{w.part_log_sum, w.weighted},
      next{w.part_log_sum + group, w.weighted + group * State::head_dim};
  for (int nth = 0; nth < parts; ++nth) {
    job.attend_part(set, row, head, nth, nth == 0 ? first : next, w);
    if (nth > 0) merge_parts<State::head_dim>(set, next, first, group);
  }
  job.finish(set, row, head, first, w);
}

}  // namespace freekv::host
