// The stages of a step on the host: who does what on which thread.
#pragma once

#include <array>
#include <freekv/backend/host/append.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/row_numbers.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/backend/host/select_by_scope.hpp>
#include <freekv/backend/host/sequence_slots.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/policies/scope.hpp>
#include <optional>
#include <utility>
#include <vector>

namespace freekv::host {

/// The stages of one pipeline on one entry of a step. `State` is its layer_state; `Policies` has its policy
/// objects as members. Every call returns when its work is done.
template <class State, class Policies>
class stages {
 public:
  using element = typename State::element;
  using sizes = workspace_sizes;
  static constexpr int d = State::head_dim;

  /// Takes scratch for all threads of `backend` from `memory`.
  [[gnu::cold]] stages(host_backend& backend, const Policies& policies, const workspace_sizes& scratch,
                       carver& memory)
      : backend_(&backend),
        policies_(&policies),
        max_parts_((scratch.most_entries() - 1) / entries_per_part(scratch.page_tokens) + 1),
        shared_(static_cast<std::size_t>(std::min(scratch.kv_heads, backend.threads() - 1))) {
    for (int i = 0; i < backend.workspaces(); ++i) workspaces_.push_back(workspace::carve(memory, scratch));
    for (std::size_t i = 0; i < shared_.size(); ++i)
      workspaces_of_heads_.push_back(workspace::carve(memory, scratch));
    heads_alone_.resize(static_cast<std::size_t>(scratch.kv_heads));
    if (!resolve(policies.summary, []<class Summary>(const Summary&) { return linear_summary<Summary>; }))
      decoded_bytes_ = static_cast<std::size_t>(scratch.summary_width) * sizeof(float);
    const auto heads = static_cast<std::size_t>(scratch.kv_heads * max_parts_ * scratch.group);
    part_mass_ = memory.take<log_sum_exp>(heads);
    part_weighted_ = memory.take<float>(heads * d);
    layer_stride_ = workspace_sizes::padded(scratch.max_units);
    for (float** pooled : {&pooled_now_, &pooled_next_, &pooled_behind_})
      *pooled = memory.take<float>(static_cast<std::size_t>(scratch.pooled_heads * layer_stride_));
  }

  /// A layer's state before any sequence.
  void clear(const State& s, int sequences) {
    const std::size_t selections = s.selection(sequences, 0);
    for (std::int32_t* pages : std::array{s.selected, s.next_selected, s.attended, s.slot_of})
      std::fill_n(pages, selections, -1);
    for (std::uint32_t* masks : std::array{s.selected_by, s.next_selected_by, s.attended_by})
      std::fill_n(masks, s.masks(sequences, 0), 0u);
    for (int sequence = 0; sequence < sequences; ++sequence) forget(s, sequence);
  }
  // Between steps, with nothing queued:

  /// A sequence's selection and report are forgotten, and what could not be read for it.
  void forget(const State& s, int sequence) {
    drop_selection(s, sequence);
    s.lacking[sequence] = 0;
    clear_report(s, s.head_index(sequence, 0), s.head_index(1, 0));
  }
  void compact_slots(const State& s, int sequence) { host::compact_slots(s, sequence); }
  int selected_blocks_in_use(const State& s, int sequence) const {
    return host::selected_blocks_in_use(s, sequence);
  }
  bool selects_within(const State& s, int sequence, int pages) const {
    return host::selects_within(s, sequence, pages);
  }
  struct truncation {
    int before = 0, tokens = 0;  // what it had and what it keeps
    bool keeps_selection = false;
    bool has_rows = false;  // those of the page that opens again are still there unencoded
  };
  /// A sequence loses its last tokens: the ring's pages that they have overwritten come back. Selected slots need
  /// nothing, since a page that is no longer complete can only be of the last selection, which is dropped then.
  [[gnu::cold]] void truncate(const State& s, int sequence, const truncation& to) {
    if (!to.keeps_selection) drop_selection(s, sequence);
    const int p = s.page.tokens, open = to.tokens / p;
    const bool opens = s.encoded && to.tokens % p != 0 && to.before >= (open + 1) * p;
    if (opens && !to.has_rows) s.lacking[sequence] |= lacks_open_page;
    if (s.keeps_slots && (opens || s.slots.ring_begin(to.before, p) > s.slots.ring_begin(to.tokens, p)))
      s.lacking[sequence] |= lacks_window;
    fill_or_leave(s, sequence, to.tokens);
  }
  /// `to` becomes what `from` is.
  [[gnu::cold]] void fork(const State& s, int from, int to) {
    copy_selection(s, from, to);
    s.lacking[to] = s.lacking[from];
    if (s.encoded) copy_open_pages(s, from, to);
    if (s.keeps_slots) copy_slots(s, from, to);
  }
  /// Fills the slots of a sequence from the store.
  [[gnu::cold]] void restore(const State& s, int sequence, int tokens) {
    if (s.keeps_slots) s.lacking[sequence] |= lacks_slots;
    fill_or_leave(s, sequence, tokens);
  }

  // In a step. Those that throw store_error can be called again:

  /// Reads for a sequence that is about to append what could not be read when it should have been: what a truncation
  /// or restoration needs, and what is selected. Throws store_error.
  void retry_reads(const State& s, const step_entry& entry) {
    if (s.lacking[entry.sequence] != 0) fill(s, entry.sequence, entry.before, entry.shared_page);
    recall_missing(s, entry.sequence, entry.before);
  }

  /// Appends rows and summarises the pages they complete. Throws store_error.
  template <class In>
  void append(const State& s, const step_entry& entry, const step_rows<In>& rows) {
    const rows_from<In> source{rows, entry.before - entry.first_row, d};
    int first_page = entry.before / s.page.tokens, last_page = s.pages_of(entry.after());
    const auto bytes = static_cast<std::size_t>(entry.tokens) * static_cast<std::size_t>(4 * s.heads.kv * d) *
                       sizeof(element);
    const auto append_one = [&](int page, int worker) {
      append_page(instructions(), s, *policies_, entry, page, source, workspace_of(worker));
    };
    // An open page's unencoded rows may lie where those of the next open page go: nothing is written there before all
    // else has succeeded.
    const bool in_order = s.encoded && last_page - first_page > 1;
    if (in_order) append_one(first_page++, 0);
    backend_->parallel(last_page - in_order - first_page, bytes,
                       [&](int unit, int worker) { append_one(first_page + unit, worker); });
    if (in_order) append_one(last_page - 1, 0);
  }

  /// In retrieval layers finds the heads that have drifted (decode) or forgets the selection (prompt).
  void detect(const State& s, const step_entry& entry, const step_queries& queries) {
    if (s.kind != layer_kind::retrieval) return;
    if (entry.phase == step_phase::prefill) return drop_selection(s, entry.sequence);
    resolve(policies_->correction, [&](const auto& correction) {
      detect_drift(instructions(), s, correction, entry,
                   numbers_.of(queries, entry, s.heads.query * d) +
                       std::ptrdiff_t{entry.first_row} * s.heads.query * d);
    });
    resolve(policies_->scope, [&]<class Scope>(const Scope&) {
      if constexpr (Scope::scope == selection_scope::layer)
        if (any_flagged(s, entry.sequence)) flag_all(s, entry.sequence);
    });
  }

  /// Appends the rows of a prompt entry that fall into one page, from an engine's own cache. The last page
  /// forgets the selection. `behind`: on the recall stream's thread, if it has one; else on the calling one.
  /// Throws store_error.
  template <class In>
  void append_from(const State& s, const step_entry& entry, const paged_rows<In>& rows, int page,
                   bool behind) {
    append_page(instructions(), s, *policies_, entry, page, rows,
                workspace_of(behind ? backend_->recall_workspace() : 0));
    if (s.kind == layer_kind::retrieval && page == s.pages_of(entry.after()) - 1)
      drop_selection(s, entry.sequence);
  }

  /// The flagged heads of a decode entry select with the current query among this step's candidates and recall what
  /// they miss; then every head's selection is what this step attends to. A correction by mass scores all heads to
  /// find the flagged ones. What is scored serves the next step's selection too. Who selects is the scope's.
  void correct(const State& s, const step_entry& entry) {
    const bool by_mass =
        resolve(policies_->correction, []<class C>(const C&) { return correction_by_mass<C>; });
    resolve(policies_->scope, [&]<class Scope>(const Scope&) {
      if constexpr (Scope::scope == selection_scope::layer) {
        if (by_mass || any_flagged(s, entry.sequence)) correct_layer(s, entry, by_mass);
      } else {
        const step_candidates c = candidates_at(s, entry);
        const auto wanted = [&](int head) {
          return by_mass || s.corrected[s.head_index(entry.sequence, head)] != 0;
        };
        if (s.pins > 0 && entry.kept_row < 0)
          for_heads(s, entry, wanted, [&](int head, const workspace& w) {
            pin_units(s, {entry.sequence, head}, {c.range.first, c.now}, w);
          });
        if constexpr (Scope::scope == selection_scope::query_head)
          for_heads(s, entry, wanted, [&](int head, const workspace& w) {
            select_by_query_head(instructions(), s, *policies_, entry, head, true, w);
            recall_corrected(s, entry, head, w);
          });
        else
          for_selections(s, entry, c.range, wanted, [&](int head, selection_type& of, const workspace& w) {
            correct_head(s, entry, head, c, of, w);
          });
      }
    });
    const std::size_t first = s.selection(entry.sequence, 0), row = s.head_index(entry.sequence, 0);
    std::copy_n(s.selected + first, s.selection(0, s.heads.kv), s.attended + first);
    std::copy_n(s.selected_by + s.masks(entry.sequence, 0), s.masks(0, s.heads.kv),
                s.attended_by + s.masks(entry.sequence, 0));
    std::copy_n(s.selected_count + row, s.heads.kv, s.attended_count + row);
  }

  /// Every head selects with the current query among the next step's candidates and recalls what it misses. On the
  /// recall stream's thread if it has one.
  void speculate(const State& s, const step_entry& entry) {
    resolve(policies_->scope, [&]<class Scope>(const Scope&) {
      const auto unknown = [&](int head) {
        return s.next_selected_count[s.head_index(entry.sequence, head)] < 0;
      };
      if constexpr (Scope::scope == selection_scope::layer)
        foresee_layer(s, entry);
      else if constexpr (Scope::scope == selection_scope::query_head)
        for_heads_next(s, entry, unknown, [&](int head, const workspace& w) {
          select_by_query_head(instructions(), s, *policies_, entry, head, false, w);
        });
      else
        for_selections_next(s, entry, unknown, [&](int head, selection_type& of, const workspace&) {
          select_next(s, entry, head, s.candidates_at(entry.after() + 1).count, of);
        });
    });
    for (int head = 0; head < s.heads.kv; ++head)
      if (s.kind_of(head) == layer_kind::retrieval) take_next_selected(s, entry, head);
    if (s.keeps_slots)
      for_heads_next(s, entry, every, [&](int head, const workspace& w) {
        recall(s, {entry.sequence, head}, entry.after(), w);
      });
  }

  /// Recalls what `correct` could not. Throws store_error.
  void retry_correction_reads(const State& s, const step_entry& entry) {
    recall_missing(s, entry.sequence, entry.after());
  }

  /// Attends decode rows within the budget: to sink, selected and window pages; prompt rows, and all rows of
  /// complete layers, to everything before them and themselves.
  void attend(const State& s, const step_entry& entry, const step_queries& queries,
              const attention_output& to) {
    attend(s, entry, queries, to, entry.phase == step_phase::prefill);
  }

  /// Attends each row to everything before it and itself, straight from the store.
  void attend_full(const State& s, const step_entry& entry, const step_queries& queries,
                   const attention_output& to) {
    attend(s, entry, queries, to, true);
  }

  /// The log-mass of each unit that each row attends to.
  void masses(const State& s, const step_entry& entry, const step_queries& queries, const mass_output& to) {
    const float* const numbers = numbers_.of(queries, entry, s.heads.query * d);
    const attention_job<State, Policies> job{s,       *policies_, entry,
                                             numbers, {},         entry.phase == step_phase::prefill};
    const int heads = s.heads.kv;
    backend_->parallel(entry.tokens * heads,
                       job.bytes(entry.tokens - 1) * static_cast<std::size_t>(entry.tokens),
                       [&](int unit, int worker) {
                         job.masses(instructions(), unit / heads, unit % heads, to, workspace_of(worker));
                       });
  }

 private:
  static void clear_report(const State& s, std::size_t first, std::size_t rows) {
    std::fill_n(s.corrected + first, rows, std::uint8_t{0});
    for (std::int32_t* counts :
         std::array{s.attended_count, s.recalled, s.recalled_before_attention, s.promoted})
      std::fill_n(counts + first, rows, 0);
  }

  isa instructions() const { return backend_->options().instructions; }
  const workspace& workspace_of(int worker) const { return workspaces_[static_cast<std::size_t>(worker)]; }

  enum lacks : std::uint8_t { lacks_open_page = 1, lacks_window = 2, lacks_slots = 4 };
  /// Reads what `lacking` says, for a sequence of `tokens` tokens. `open_page`: the store's page of its open page, if
  /// that is no longer the one in the table.
  void fill(const State& s, int sequence, int tokens, std::int32_t open_page = -1) {
    const encoded_pages stored(s, *policies_, workspace_of(0));
    const int page = tokens / s.page.tokens;
    if ((s.lacking[sequence] & lacks_open_page) != 0 && tokens % s.page.tokens != 0)
      read_open_page(stored, s, sequence, page, open_page >= 0 ? open_page : s.store_page(sequence, page));
    const bool all = (s.lacking[sequence] & lacks_slots) != 0;
    if (all || (s.lacking[sequence] & lacks_window) != 0)
      fill_window(stored, s, sequence, tokens, all ? 0 : page);
    if (all) fill_selected(stored, s, sequence);
    s.lacking[sequence] = 0;
  }
  /// Fills slots as `fill` does, or leaves them: the next append tries again and says what is wrong.
  void fill_or_leave(const State& s, int sequence, int tokens) {
    try {
      if (s.lacking[sequence] != 0) fill(s, sequence, tokens);
    } catch (const store_error&) {
    }
  }

  static constexpr auto every = [](int) { return true; };
  /// Runs `body(head, workspace)` for the retrieval heads that are `wanted`.
  template <class Wanted, class Body>
  void for_heads(const State& s, const step_entry& entry, const Wanted& wanted, const Body& body) {
    const int candidates = s.candidates_at(entry.after() + 1).count;
    const std::size_t bytes = bytes_scored(s, retrieving(s, wanted), candidates);
    backend_->parallel(s.heads.kv, bytes, [&](int head, int worker) {
      if (s.kind_of(head) == layer_kind::retrieval && wanted(head)) body(head, workspace_of(worker));
    });
  }
  template <class Wanted>
  static int retrieving(const State& s, const Wanted& wanted) {
    int heads = 0;
    for (int head = 0; head < s.heads.kv; ++head)
      heads += static_cast<int>(s.kind_of(head) == layer_kind::retrieval && wanted(head));
    return heads;
  }
  /// Bytes of memory traffic that scoring takes as long as: those of summaries that are multiplied as they are stored, of
  /// others their numbers.
  std::size_t bytes_scored(const State& s, int heads, int candidates) const {
    return static_cast<std::size_t>(heads) * static_cast<std::size_t>(candidates) *
           std::max(s.summary_bytes, decoded_bytes_);
  }

  /// `for_heads` for the next step: on the recall stream's thread if it has one.
  template <class Wanted, class Body>
  void for_heads_next(const State& s, const step_entry& entry, const Wanted& wanted, const Body& body) {
    if (!backend_->options().overlap) return for_heads(s, entry, wanted, body);
    const workspace& w = workspace_of(backend_->recall_workspace());
    for (int head = 0; head < s.heads.kv; ++head)
      if (s.kind_of(head) == layer_kind::retrieval && wanted(head)) body(head, w);
  }

  static constexpr int score_block = 16;  // candidates that one thread scores at least
  using selection_type = head_selection<State, Policies>;
  /// Runs `body(head, selection among candidates, workspace)` for the retrieval heads that are `wanted`. Each thread
  /// scores whole heads, and all together those that are left, so that what is prepared for a head's queries is mostly
  /// read where it was made.
  template <class Wanted, class Body>
  void for_selections(const State& s, const step_entry& entry, const unit_range& candidates,
                      const Wanted& wanted, const Body& body) {
    const int heads = retrieving(s, wanted);
    const std::size_t bytes = bytes_scored(s, heads, candidates.count);
    const int threads = backend_->threads_worth(bytes);
    const auto alone = [&](int head, const workspace& w) {
      selection_type of(instructions(), s, *policies_, entry, head, candidates, w);
      body(head, of, w);
    };
    const int left = threads == 1 || heads >= 4 * threads ? 0 : heads % threads;
    if (left == 0) return for_heads(s, entry, wanted, alone);
    const auto shared = [&](int nth) -> selection_type& { return *shared_[static_cast<std::size_t>(nth)]; };
    int head = -1;
    const auto next = [&] {
      do ++head;
      while (s.kind_of(head) != layer_kind::retrieval || !wanted(head));
      return head;
    };
    for (std::size_t nth = 0; nth < static_cast<std::size_t>(left); ++nth)
      shared_[nth].emplace(instructions(), s, *policies_, entry, next(), candidates,
                           workspaces_of_heads_[nth]);
    const int blocks = (candidates.count + score_block - 1) / score_block,
              parts = std::min(blocks, 4 * threads), whole = heads - left;
    for (int nth = 0; nth < whole; ++nth) heads_alone_[static_cast<std::size_t>(nth)] = next();
    // First what others wait for.
    backend_->parallel(left + whole + left * parts, bytes, [&](int unit, int worker) {
      if (unit < left) return shared(unit).begin_once();
      if (unit < left + whole)
        return alone(heads_alone_[static_cast<std::size_t>(unit - left)], workspace_of(worker));
      unit -= left + whole;
      const auto end_of = [&](int part) {
        return std::min(blocks * part / parts * score_block, candidates.count);
      };
      const int part = unit % parts;
      shared(unit / parts).score_some(end_of(part), end_of(part + 1), workspace_of(worker).numbers);
    });
    backend_->parallel(left, bytes, [&](int unit, int) {
      selection_type& of = shared(unit);
      of.all_are_scored();
      body(of.head(), of, workspaces_of_heads_[static_cast<std::size_t>(unit)]);
    });
  }
  template <class Wanted, class Body>
  void for_selections_next(const State& s, const step_entry& entry, const Wanted& wanted, const Body& body) {
    const unit_range next = s.candidates_at(entry.after() + 1);
    if (!backend_->options().overlap) return for_selections(s, entry, next, wanted, body);
    for_heads_next(s, entry, wanted, [&](int head, const workspace& w) {
      selection_type of(instructions(), s, *policies_, entry, head, next, w);
      body(head, of, w);
    });
  }

  void correct_head(const State& s, const step_entry& entry, int head, const step_candidates& c,
                    selection_type& selection, const workspace& w) {
    const std::size_t row = s.head_index(entry.sequence, head), first = s.selection(entry.sequence, head);
    std::int32_t* selected = s.selected + first;
    const int count = selection.best(c.now, w.units);
    const bool anew = s.corrected[row] != 0;
    if (anew) {
      std::copy_n(w.units, count, selected);
      s.selected_count[row] = count;
    } else {
      resolve(policies_->correction, [&]<class Correction>(const Correction& correction) {
        if constexpr (correction_by_mass<Correction>)
          correct_by_mass(s, row, correction.at(s.layer), selection, c.now,
                          {selected, {w.units, static_cast<std::size_t>(count)}});
      });
    }
    recall_corrected(s, entry, head, w);
    select_next(s, entry, head, c.next, selection);
  }
  /// Selects for the step behind `entry`, among so many candidates.
  static void select_next(const State& s, const step_entry& entry, int head, int candidates,
                          selection_type& selection) {
    const std::size_t row = s.head_index(entry.sequence, head), first = s.selection(entry.sequence, head);
    s.next_selected_count[row] =
        selection.best(candidates, s.next_selected + first,
                       {s.selected + first, static_cast<std::size_t>(s.selected_count[row])});
  }
  void recall_corrected(const State& s, const step_entry& entry, int head, const workspace& w) {
    const std::size_t row = s.head_index(entry.sequence, head);
    if (s.corrected[row] == 0 || !s.keeps_slots) return;
    recall(s, {entry.sequence, head}, entry.after(), w);
    s.recalled_before_attention[row] = s.recalled[row];
  }

  /// The layer's flagged heads, all of them, select as one, or a correction by mass finds whether they are to.
  void correct_layer(const State& s, const step_entry& entry, bool by_mass) {
    const step_candidates c = candidates_at(s, entry);
    for_selections(s, entry, c.range, every, [&](int head, selection_type& selection, const workspace&) {
      const std::ptrdiff_t at = retrieving_before(s, head) * layer_stride_;
      if (by_mass || !selection.takes_all(c.now)) selection.copy_pooled(c.now, pooled_now_ + at);
      if (!selection.takes_all(c.next)) selection.copy_pooled(c.next, pooled_next_ + at);
    });
    const workspace& w = workspace_of(0);
    const int head = first_retrieving(s), heads = retrieving_before(s, s.heads.kv);
    const std::size_t row = s.head_index(entry.sequence, head), first = s.selection(entry.sequence, head);
    head_selection selection(instructions(), s, *policies_, entry, head, c.range, w);
    if (by_mass || !selection.takes_all(c.now))
      selection.pool_heads(c.now, pooled_now_, layer_stride_, heads);
    const int count = selection.best(c.now, w.units);
    const std::span<const std::int32_t> best(w.units, static_cast<std::size_t>(count));
    if (s.corrected[row] != 0) {
      std::copy_n(w.units, count, s.selected + first);
      s.selected_count[row] = count;
    } else {
      resolve(policies_->correction, [&]<class Correction>(const Correction& correction) {
        if constexpr (correction_by_mass<Correction>)
          correct_by_mass(s, row, correction.at(s.layer), selection, c.now, {s.selected + first, best});
      });
    }
    if (!selection.takes_all(c.next)) selection.pool_heads(c.next, pooled_next_, layer_stride_, heads);
    select_next(s, entry, head, c.next, selection);
    share_list(s, entry.sequence, s.next_selected, s.next_selected_count);
    if (s.corrected[row] == 0) return;
    flag_all(s, entry.sequence);
    share_list(s, entry.sequence, s.selected, s.selected_count);
    for_heads(s, entry, every,
              [&](int other, const workspace& scratch) { recall_corrected(s, entry, other, scratch); });
  }
  /// The layer's heads select as one for the next step, unless a correction has done so.
  void foresee_layer(const State& s, const step_entry& entry) {
    const int head = first_retrieving(s), heads = retrieving_before(s, s.heads.kv);
    if (s.next_selected_count[s.head_index(entry.sequence, head)] >= 0) return;
    const unit_range next = s.candidates_at(entry.after() + 1);
    const int count = next.count;
    for_selections_next(s, entry, every, [&](int each, selection_type& selection, const workspace&) {
      if (!selection.takes_all(count))
        selection.copy_pooled(count, pooled_behind_ + retrieving_before(s, each) * layer_stride_);
    });
    const int worker = backend_->options().overlap ? backend_->recall_workspace() : 0;
    selection_type selection(instructions(), s, *policies_, entry, head, next, workspace_of(worker));
    if (!selection.takes_all(count)) selection.pool_heads(count, pooled_behind_, layer_stride_, heads);
    select_next(s, entry, head, count, selection);
    share_list(s, entry.sequence, s.next_selected, s.next_selected_count);
  }

  struct selected_and_best {
    std::int32_t* selected;
    std::span<const std::int32_t> best;
  };
  template <class Correction, class Selection>
  void correct_by_mass(const State& s, std::size_t row, const Correction& correction, Selection& selection,
                       int candidates, const selected_and_best& pages) {
    const int count = s.selected_count[row];
    const auto held = std::span(pages.selected, static_cast<std::size_t>(count));
    if (std::equal(held.begin(), held.end(), pages.best.begin(), pages.best.end())) return;
    if (!correction.flags(selection.masses(candidates, held, pages.best))) return;
    s.corrected[row] = 1;
    if (correction.exchanges_pages()) {
      s.selected_count[row] = selection.exchange(correction, pages.selected, count, pages.best);
    } else {
      std::copy(pages.best.begin(), pages.best.end(), pages.selected);
      s.selected_count[row] = static_cast<std::int32_t>(pages.best.size());
    }
  }

  /// Takes the next step's selection, found before, for the step's.
  void take_next_selected(const State& s, const step_entry& entry, int head) {
    const std::size_t row = s.head_index(entry.sequence, head), first = s.selection(entry.sequence, head);
    const std::int32_t count = s.selected_count[row] = std::exchange(s.next_selected_count[row], -1);
    std::copy_n(s.next_selected + first, count, s.selected + first);
    std::copy_n(s.next_selected_by + s.masks(entry.sequence, head), count * s.mask_words,
                s.selected_by + s.masks(entry.sequence, head));
  }

  /// Recalls what a head's slots lack; what cannot be read is left to `recall_missing`.
  void recall(const State& s, const sequence_head& at, int tokens, const workspace& w) {
    try {
      recall_units(s, *policies_, at, tokens, w);
    } catch (const store_error&) {
      s.recall_failed[s.head_index(at.sequence, at.head)] = 1;
    }
  }
  void recall_missing(const State& s, int sequence, int tokens) {
    if (!s.encoded || s.kind != layer_kind::retrieval) return;
    for (int head = 0; head < s.heads.kv; ++head) {
      std::uint8_t& missing = s.recall_failed[s.head_index(sequence, head)];
      if (missing != 0) recall_units(s, *policies_, {sequence, head}, tokens, workspace_of(0));
      missing = 0;
    }
  }

  void attend(const State& s, const step_entry& entry, const step_queries& queries,
              const attention_output& to, bool complete) {
    const int width = s.heads.query * d;
    attend_rows({s, *policies_, entry, numbers_.of(queries, entry, width),
                 numbers_.room_for(to, entry, width), complete});
    numbers_.write(to, entry, width);
  }
  /// Attends rows: a head is one thread's where heads alone occupy the threads, else its parts are shared out.
  /// Parts are cut and merged alike either way.
  void attend_rows(const attention_job<State, Policies>& job) {
    const int heads = job.s.heads.kv, last = job.entry.tokens - 1;
    const std::size_t bytes = job.bytes(last);
    const int threads = backend_->threads_worth(bytes);
    if (threads == 1 || job.entry.tokens * heads >= 4 * threads) {
      backend_->parallel(job.entry.tokens * heads, bytes * static_cast<std::size_t>(job.entry.tokens),
                         [&](int unit, int worker) {
                           attend_head(instructions(), job, unit / heads, unit % heads, workspace_of(worker));
                         });
      return;
    }
    const int group = job.s.heads.group();
    const auto part = [&](int head, int nth) {
      const int first = (head * max_parts_ + nth) * group;
      return attention_part{part_mass_ + first, part_weighted_ + std::ptrdiff_t{first} * d};
    };
    for (int row = 0; row <= last; ++row) {
      const int parts = job.parts(row);
      backend_->parallel(heads * parts, bytes, [&](int unit, int worker) {
        const int head = unit / parts, nth = unit % parts;
        job.attend_part(instructions(), row, head, nth, part(head, nth), workspace_of(worker));
      });
      for (int head = 0; head < heads; ++head) {
        for (int nth = 1; nth < parts; ++nth)
          merge_parts<d>(instructions(), part(head, nth), part(head, 0), group);
        job.finish(instructions(), row, head, part(head, 0));
      }
    }
  }

  host_backend* backend_;
  const Policies* policies_;
  int max_parts_;
  std::vector<workspace> workspaces_;
  std::vector<workspace> workspaces_of_heads_;         // where threads score one head's candidates together,
  std::vector<std::optional<selection_type>> shared_;  // for as many heads as they do so at a time
  std::vector<int> heads_alone_;                       // the others of a call, by who scores them alone
  std::size_t decoded_bytes_ = 0;                      // of a summary that is not multiplied as it is stored
  row_numbers numbers_;
  log_sum_exp* part_mass_ = nullptr;  // (kv head, max_parts, group)
  float* part_weighted_ = nullptr;    // (kv head, max_parts, group, head_dim)
  std::int64_t layer_stride_ = 0;     // padded candidates
  // Pooled scores of KV heads that select together: (kv head, layer_stride). On the compute stream for this step
  // and the next, and on the recall stream.
  float *pooled_now_ = nullptr, *pooled_next_ = nullptr, *pooled_behind_ = nullptr;
};

}  // namespace freekv::host
