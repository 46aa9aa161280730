// Selection of a layer's KV heads on the host: who scores what on which thread, corrects, and recalls.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/correct_selection.hpp>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/complete_attention.hpp>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/recall.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/backend/host/select_by_scope.hpp>
#include <freekv/backend/host/verify_selection.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/scope.hpp>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace freekv::host {

/// Selection and recall of one entry of a step. `State` is the layer_state; `Settings` has the policy objects
/// as members.
template <class State, class Settings>
class selection_stage {
 public:
  /// Takes scratch for all threads of `backend`.
  [[gnu::cold]] selection_stage(host_backend& backend, const Settings& policies,
                                const workspace_sizes& scratch, carver& memory)
      : backend_(&backend),
        policies_(&policies),
        shared_(to_size(std::min(scratch.kv_heads, backend.threads() - 1))),
        left_(scratch, policies.capacity.max_sequences, memory) {
    for (int i = 0; i < backend.workspaces(); ++i) workspaces_.push_back(workspace::carve(memory, scratch));
    for (std::size_t i = 0; i < shared_.size(); ++i)
      workspaces_of_heads_.push_back(workspace::carve(memory, scratch));
    heads_alone_.resize(to_size(scratch.kv_heads));
    if (!resolve(policies.summary, []<class Summary>(const Summary&) { return linear_summary<Summary>; }))
      decoded_bytes_ = to_size(scratch.summary_width) * sizeof(float);
    layer_stride_ = workspace_sizes::padded(scratch.max_units);
    for (float** pooled : {&pooled_now_, &pooled_next_, &pooled_behind_})
      *pooled = memory.take<float>(to_size(scratch.pooled_heads * layer_stride_));
  }

  /// The scratch of a thread, or behind all of them that of the recall stream.
  const workspace& workspace_of(int worker) const { return workspaces_[to_size(worker)]; }

  /// Masses that corrections have left for a layer's attention.
  const masses_left& left() const { return left_; }

  /// The flagged heads of a decode entry select with the current query among this step's candidates and
  /// recall what they miss; then every head's selection is what this step attends to. A correction by mass,
  /// or by sample, scores all heads to find the flagged ones. What is scored serves the next step's selection
  /// too. Who selects is the scope's.
  void correct(const State& s, const step_entry& entry) {
    left_.forget(entry.sequence);
    const bool by_mass = resolve(policies_->correction, []<class C>(const C&) {
      return correction_by_mass<C> || correction_by_sample<C>;
    });
    resolve(policies_->scope, [&]<class Scope>(const Scope&) {
      if constexpr (Scope::scope == selection_scope::layer) {
        if (by_mass || any_flagged(s, entry.sequence)) correct_layer(s, entry, by_mass);
      } else {
        const step_candidates c = s.candidates_of(entry);
        const auto wanted = [&](int head) {
          return is_to_select(s, entry.sequence, head, selection_time::correct, by_mass);
        };
        if (s.pins_anew(entry))
          for_heads(s, entry, wanted, [&](int head, const workspace& w) {
            pin_units(s, {entry.sequence, head}, {c.first, c.now}, w);
          });
        if constexpr (Scope::scope == selection_scope::query_head)
          for_heads(s, entry, wanted, [&](int head, const workspace& w) {
            select_by_query_head(instructions(), s, *policies_, entry, head, true, w);
            recall_corrected(s, entry, head, w);
          });
        else
          for_selections(s, entry, {c.first, c.most()}, wanted,
                         [&](int head, selection_type& of, const workspace& w) {
                           correct_head(s, entry, head, c, of, w);
                         });
      }
    });
    const std::size_t first = s.selected_index(entry.sequence, 0), at_head = s.head_index(entry.sequence, 0);
    std::copy_n(s.selected + first, s.selected_index(0, s.heads.kv), s.attended + first);
    std::copy_n(s.selected_by + s.mask_index(entry.sequence, 0), s.mask_index(0, s.heads.kv),
                s.attended_by + s.mask_index(entry.sequence, 0));
    std::copy_n(s.selected_count + at_head, s.heads.kv, s.attended_count + at_head);
  }

  /// Every head selects with the current query among the next step's candidates and recalls what it misses.
  /// On the recall stream's thread if it has one.
  void speculate(const State& s, const step_entry& entry) {
    resolve(policies_->scope, [&]<class Scope>(const Scope&) {
      const auto unknown = [&](int head) {
        return is_to_select(s, entry.sequence, head, selection_time::speculate, false);
      };
      if constexpr (Scope::scope == selection_scope::layer)
        speculate_layer(s, entry);
      else if constexpr (Scope::scope == selection_scope::query_head)
        for_heads_next(s, entry, unknown, [&](int head, const workspace& w) {
          select_by_query_head(instructions(), s, *policies_, entry, head, false, w);
        });
      else
        for_selections_next(s, entry, unknown, [&](int head, selection_type& of, const workspace&) {
          select_next(s, entry, head, s.next_candidates(entry).count, of);
        });
    });
    for (int head = 0; head < s.heads.kv; ++head)
      if (s.kind_of(head) == layer_kind::retrieval) take_next_selected(s, entry, head);
    if (s.keeps_slots)
      for_heads_next(s, entry, every, [&](int head, const workspace& w) {
        recall(s, {entry.sequence, head}, entry.after(), w);
      });
  }

  /// Recalls what could not be read when it should have been, for a sequence of `tokens` tokens. Throws
  /// store_error.
  void recall_missing(const State& s, int sequence, int tokens) {
    if (!s.encoded || s.kind != layer_kind::retrieval) return;
    for (int head = 0; head < s.heads.kv; ++head) {
      std::uint8_t& missing = s.recall_failed[s.head_index(sequence, head)];
      if (missing != 0) recall_units(s, *policies_, {sequence, head}, tokens, workspace_of(0), true);
      missing = 0;
    }
  }

 private:
  isa instructions() const { return backend_->options().instructions; }

  static constexpr auto every = [](int) { return true; };
  /// Runs `body(head, workspace)` for the retrieval heads that are `wanted`.
  template <class Wanted, class Body>
  void for_heads(const State& s, const step_entry& entry, const Wanted& wanted, const Body& body) {
    const int candidates = s.next_candidates(entry).count;
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
  /// Bytes of memory traffic that scoring takes as long as: those of summaries that are multiplied as they
  /// are stored, of others their numbers.
  std::size_t bytes_scored(const State& s, int heads, int candidates) const {
    return to_size(heads) * to_size(candidates) * std::max(s.summary_bytes, decoded_bytes_);
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
  using selection_type = head_selection<State, Settings>;
  /// Runs `body(head, selection among candidates, workspace)` for the retrieval heads that are `wanted`. Each
  /// thread scores whole heads, and all together those that are left, so that what is prepared for a head's
  /// queries is mostly read where it was made.
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
    const auto shared = [&](int nth) -> selection_type& { return *shared_[to_size(nth)]; };
    int head = -1;
    const auto next = [&] {
      do ++head;
      while (s.kind_of(head) != layer_kind::retrieval || !wanted(head));
      return head;
    };
    for (std::size_t nth = 0; nth < to_size(left); ++nth)
      shared_[nth].emplace(instructions(), s, *policies_, entry, next(), candidates,
                           workspaces_of_heads_[nth]);
    const int blocks = (candidates.count + score_block - 1) / score_block,
              parts = std::min(blocks, 4 * threads), whole = heads - left;
    for (int nth = 0; nth < whole; ++nth) heads_alone_[to_size(nth)] = next();
    // First what others wait for.
    backend_->parallel(left + whole + left * parts, bytes, [&](int task, int worker) {
      if (task < left) return shared(task).begin_once();
      if (task < left + whole) return alone(heads_alone_[to_size(task - left)], workspace_of(worker));
      task -= left + whole;
      const auto end_of = [&](int part) {
        return std::min(blocks * part / parts * score_block, candidates.count);
      };
      const int part = task % parts;
      shared(task / parts).score_some(end_of(part), end_of(part + 1), workspace_of(worker).numbers);
    });
    backend_->parallel(left, bytes, [&](int task, int) {
      selection_type& of = shared(task);
      of.all_are_scored();
      body(of.head(), of, workspaces_of_heads_[to_size(task)]);
    });
  }
  template <class Wanted, class Body>
  void for_selections_next(const State& s, const step_entry& entry, const Wanted& wanted, const Body& body) {
    const unit_range next = s.next_candidates(entry);
    if (!backend_->options().overlap) return for_selections(s, entry, next, wanted, body);
    for_heads_next(s, entry, wanted, [&](int head, const workspace& w) {
      selection_type of(instructions(), s, *policies_, entry, head, next, w);
      body(head, of, w);
    });
  }

  void correct_head(const State& s, const step_entry& entry, int head, const step_candidates& c,
                    selection_type& selection, const workspace& w) {
    take_best(s, entry, head, selection, c.now, {w.units, to_size(selection.best(c.now, w.units))}, w);
    recall_corrected(s, entry, head, w);
    select_next(s, entry, head, c.next, selection);
    if constexpr (freekv::detail::may_complete<Settings>) leave_masses(s, entry, head, c, selection);
  }
  /// Leaves the masses of what has not been selected to an attention that is completed.
  void leave_masses(const State& s, const step_entry& entry, int head, const step_candidates& c,
                    const selection_type& selection) {
    const sequence_head at{entry.sequence, head};
    if (s.page_values == nullptr || selects_all_of(s, at, c.now)) return;
    if (const auto scores = selection.scores_of_each(c.now);
        scores && (entry.tokens == 1 || !lacks_scores(*scores, c.now, entry.tokens * s.heads.group())))
      sum_unselected(instructions(), s, *policies_, at, c, s.query_of(entry, head), *scores,
                     left_.take(s.layer, at));
  }
  /// True where a unit has no score: of NaN of one row's query, which is no matter for the others' entries.
  static bool lacks_scores(const score_column& scores, int candidates, int heads) {
    for (int j = 0; j < candidates; ++j) {
      bool none = true;
      for (int g = 0; none && g < heads; ++g) none = scores.first[g * scores.stride + j] == -infinity;
      if (none) return true;
    }
    return false;
  }
  /// A head that is flagged selects `best`, among so many candidates; else the correction judges by masses or
  /// by a sample, where it does.
  void take_best(const State& s, const step_entry& entry, int head, selection_type& selection, int candidates,
                 std::span<const std::int32_t> best, [[maybe_unused]] const workspace& w) {
    const std::size_t at_head = s.head_index(entry.sequence, head);
    const selected_and_best units{s.selected + s.selected_index(entry.sequence, head), best.data(),
                                  s.selected_count[at_head], static_cast<int>(best.size())};
    bool corrected = s.corrected[at_head] != 0;
    resolve(policies_->correction, [&]<class Correction>(const Correction& correction) {
      if constexpr (correction_by_mass<Correction>)
        s.selected_count[at_head] = selection.correct(
            correction.at(s.layer), candidates, units, corrected,
            [&](auto* sums) {  // compiled if it is called
              attention_job<State, Settings>{s, *policies_, entry, nullptr, {}}.sum_attended(
                  instructions(), head, false, sums, w);
            });
      else {
        if constexpr (correction_by_sample<Correction>) {
          missed_attention& missed = s.missed[at_head] = {};
          if (!corrected) {
            const auto of_layer = correction.at(s.layer);
            missed = selection_sample(instructions(), s, *policies_, entry, head, w)
                         .judge(of_layer, candidates, selection);
            corrected = of_layer.flags(missed);
          }
        }
        if (corrected) s.selected_count[at_head] = take_all_of_best(units);
      }
    });
    s.corrected[at_head] = corrected;
  }
  /// Selects for the step behind `entry`, among so many candidates.
  static void select_next(const State& s, const step_entry& entry, int head, int candidates,
                          selection_type& selection) {
    const std::size_t at_head = s.head_index(entry.sequence, head),
                      first = s.selected_index(entry.sequence, head);
    s.next_selected_count[at_head] = selection.best(candidates, s.next_selected + first,
                                                    {s.selected + first, to_size(s.selected_count[at_head])});
  }
  void recall_corrected(const State& s, const step_entry& entry, int head, const workspace& w) {
    const std::size_t at_head = s.head_index(entry.sequence, head);
    if (s.corrected[at_head] == 0 || !s.keeps_slots) return;
    recall(s, {entry.sequence, head}, entry.after(), w);
    s.recalled_before_attention[at_head] = s.recalled[at_head];
  }

  /// The layer's flagged heads, all of them, select as one, or a correction by mass finds whether they are
  /// to.
  void correct_layer(const State& s, const step_entry& entry, bool by_mass) {
    const step_candidates c = s.candidates_of(entry);
    const unit_range all{c.first, c.most()};
    for_selections(s, entry, all, every, [&](int head, selection_type& selection, const workspace&) {
      const std::ptrdiff_t at = retrieving_before(s, head) * layer_stride_;
      if (by_mass || !selection.takes_all(c.now)) selection.copy_pooled(c.now, pooled_now_ + at);
      if (!selection.takes_all(c.next)) selection.copy_pooled(c.next, pooled_next_ + at);
    });
    const workspace& w = workspace_of(0);
    const int head = first_retrieving(s), heads = retrieving_before(s, s.heads.kv);
    const std::size_t at_head = s.head_index(entry.sequence, head);
    head_selection selection(instructions(), s, *policies_, entry, head, all, w);
    if (by_mass || !selection.takes_all(c.now))
      selection.pool_heads(c.now, pooled_now_, layer_stride_, heads);
    take_best(s, entry, head, selection, c.now, {w.units, to_size(selection.best(c.now, w.units))}, w);
    if (!selection.takes_all(c.next)) selection.pool_heads(c.next, pooled_next_, layer_stride_, heads);
    select_next(s, entry, head, c.next, selection);
    share_list(s, entry.sequence, s.next_selected, s.next_selected_count);
    if (s.corrected[at_head] == 0) return;
    flag_all(s, entry.sequence);
    share_list(s, entry.sequence, s.selected, s.selected_count);
    for_heads(s, entry, every,
              [&](int other, const workspace& scratch) { recall_corrected(s, entry, other, scratch); });
  }
  /// The layer's heads select as one for the next step, unless a correction has done so.
  void speculate_layer(const State& s, const step_entry& entry) {
    const int head = first_retrieving(s), heads = retrieving_before(s, s.heads.kv);
    if (!is_to_select(s, entry.sequence, head, selection_time::speculate, false)) return;
    const unit_range next = s.next_candidates(entry);
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

  /// Takes the next step's selection, found before, for the step's.
  void take_next_selected(const State& s, const step_entry& entry, int head) {
    const std::size_t at_head = s.head_index(entry.sequence, head),
                      first = s.selected_index(entry.sequence, head);
    const std::int32_t count = s.selected_count[at_head] = std::exchange(s.next_selected_count[at_head], -1);
    std::copy_n(s.next_selected + first, count, s.selected + first);
    std::copy_n(s.next_selected_by + s.mask_index(entry.sequence, head), count * s.mask_words,
                s.selected_by + s.mask_index(entry.sequence, head));
  }

  /// Recalls what a head's slots lack; what cannot be read is left to `recall_missing`.
  void recall(const State& s, const sequence_head& at, int tokens, const workspace& w) {
    try {
      recall_units(s, *policies_, at, tokens, w);
    } catch (const store_error&) {
      s.recall_failed[s.head_index(at.sequence, at.head)] = 1;
    }
  }

  host_backend* backend_;
  const Settings* policies_;
  std::vector<workspace> workspaces_;
  std::vector<workspace> workspaces_of_heads_;         // where threads score one head's candidates together,
  std::vector<std::optional<selection_type>> shared_;  // for as many heads as they do so at a time
  masses_left left_;
  std::vector<int> heads_alone_;                       // the others of a call, by who scores them alone
  std::size_t decoded_bytes_ = 0;                      // of a summary that is not multiplied as it is stored
  std::int64_t layer_stride_ = 0;                      // padded candidates
  // Pooled scores of KV heads that select together: (kv head, layer_stride). On the compute stream for this
  // step and the next, and on the recall stream.
  float *pooled_now_ = nullptr, *pooled_next_ = nullptr, *pooled_behind_ = nullptr;
};

}  // namespace freekv::host
