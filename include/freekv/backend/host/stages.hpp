// The stages of a step on the host: who does what on which thread.
#pragma once

#include <array>
#include <freekv/backend/host/append.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/core/policy.hpp>
#include <numeric>
#include <vector>

namespace freekv::host {

/// The stages of one pipeline on one entry of a step. `State` is its layer_state; `Policies` has its policy
/// objects as members. Every call returns when its work is done.
template <class State, class Policies>
class stages {
 public:
  using element = typename State::element;
  using sizes = workspace_sizes;
  using output = attention_output;
  static constexpr int d = State::head_dim;

  /// Takes scratch for all threads of `backend` from `memory`.
  stages(host_backend& backend, const Policies& policies, const workspace_sizes& scratch, carver& memory)
      : backend_(&backend),
        policies_(&policies),
        max_parts_((scratch.max_pages - 1) / pages_per_part(scratch.page_tokens) + 1) {
    for (int i = 0; i < backend.workspaces(); ++i) workspaces_.push_back(workspace::carve(memory, scratch));
    const auto heads = static_cast<std::size_t>(scratch.kv_heads * max_parts_ * scratch.group);
    part_mass_ = memory.take<log_sum_exp>(heads);
    part_weighted_ = memory.take<float>(heads * d);
  }

  /// A layer's state before any sequence.
  void clear(const State& s, int sequences) {
    const std::size_t rows = s.row(sequences, 0), selections = s.selection(sequences, 0);
    std::fill_n(s.corrected, rows, std::uint8_t{0});
    for (std::int32_t* counts : std::array{s.selected_count, s.attended_count, s.recalled, s.promoted})
      std::fill_n(counts, rows, 0);
    for (std::int32_t* pages : std::array{s.selected, s.attended, s.slot_page, s.slot_of})
      std::fill_n(pages, selections, -1);
    std::fill_n(s.has_selection, sequences, std::uint8_t{0});
  }
  /// A sequence's selection and previous query are forgotten.
  void forget(const State& s, int sequence) { drop_selection(s, sequence); }

  /// Appends rows, summarises the pages they complete, and in retrieval layers finds the heads that have
  /// drifted (decode) or forgets the selection (prompt).
  template <class In>
  void append(const State& s, const step_entry& entry, const new_rows<In>& rows) {
    const std::ptrdiff_t kv = std::ptrdiff_t{entry.first_row} * s.heads.kv * d;
    const int first_page = entry.before / s.page.tokens;
    const int pages = (entry.after() - 1) / s.page.tokens + 1 - first_page;
    const auto bytes = static_cast<std::size_t>(entry.tokens) * static_cast<std::size_t>(4 * s.heads.kv * d) *
                       sizeof(element);
    resolve(policies_->summary, [&](const auto& summary) {
      backend_->parallel(pages, bytes, [&](int unit, int worker) {
        append_page(instructions(), s, summary, entry, first_page + unit, rows.keys.data() + kv,
                    rows.values.data() + kv, workspaces_[static_cast<std::size_t>(worker)]);
      });
    });
    if (s.kind != layer_kind::retrieval) return;
    if (entry.kind == row_kind::prompt) return drop_selection(s, entry.sequence);
    resolve(policies_->correction, [&](const auto& correction) {
      detect_drift(instructions(), s, correction.at(s.layer), entry.sequence,
                   rows.queries.data() + std::ptrdiff_t{entry.first_row} * s.heads.query * d);
    });
  }

  /// The flagged heads of a decode entry select with the current query among this step's candidates and
  /// recall what they miss; then every head's selection is what this step attends to.
  void correct(const State& s, const step_entry& entry) {
    const page_roles roles = roles_at(entry.after(), s.budget, s.page.tokens);
    select(s, entry, roles, [&](int head) { return s.corrected[s.row(entry.sequence, head)] != 0; });
    const std::size_t first = s.selection(entry.sequence, 0), row = s.row(entry.sequence, 0);
    std::copy_n(s.selected + first, s.heads.kv * s.budget.selected_pages, s.attended + first);
    std::copy_n(s.selected_count + row, s.heads.kv, s.attended_count + row);
  }

  /// Every head selects with the current query among the next step's candidates and recalls what it misses. A
  /// corrected head whose candidates stay as they are has that selection already. On the recall stream's
  /// thread if it has one.
  void speculate(const State& s, const step_entry& entry) {
    const page_roles now = roles_at(entry.after(), s.budget, s.page.tokens);
    const page_roles next = roles_at(entry.after() + 1, s.budget, s.page.tokens);
    const bool same = now.sink_end == next.sink_end && now.window_begin == next.window_begin;
    const auto wanted = [&](int head) { return !same || s.corrected[s.row(entry.sequence, head)] == 0; };
    if (!backend_->options().overlap) return select(s, entry, next, wanted);
    const workspace& w = workspaces_[static_cast<std::size_t>(backend_->recall_workspace())];
    for (int head = 0; head < s.heads.kv; ++head)
      if (wanted(head)) select_head(s, entry, head, next, w);
  }

  /// Attends decode rows within the budget: to sink, selected and window pages; prompt rows, and all rows of
  /// complete layers, to everything before them and themselves.
  void attend(const State& s, const step_entry& entry, const float* queries, const attention_output& to) {
    attend_rows({s, entry, queries, to, s.kind == layer_kind::complete || entry.kind == row_kind::prompt});
  }

  /// Attends each row to everything before it and itself, straight from the store.
  void attend_full(const State& s, const step_entry& entry, const float* queries,
                   const attention_output& to) {
    attend_rows({s, entry, queries, to, true});
  }

 private:
  isa instructions() const { return backend_->options().instructions; }

  template <class Wanted>
  void select(const State& s, const step_entry& entry, page_roles roles, const Wanted& wanted) {
    const auto bytes = static_cast<std::size_t>(s.heads.kv * roles.candidates()) * s.summary_bytes;
    backend_->parallel(s.heads.kv, bytes, [&](int head, int worker) {
      if (wanted(head)) select_head(s, entry, head, roles, workspaces_[static_cast<std::size_t>(worker)]);
    });
  }

  void select_head(const State& s, const step_entry& entry, int head, page_roles roles, const workspace& w) {
    const head_of at{entry.sequence, head};
    std::int32_t* pages = s.selected + s.selection(at.sequence, head);
    const int candidates = roles.candidates();
    const int count = resolve(policies_->selection, [&](const auto& selection) {
      return selection.count(candidates, s.budget.selected_pages);
    });
    if (count == candidates) {
      std::iota(pages, pages + count, roles.sink_end);
    } else {
      const std::int64_t stride = resolve(policies_->summary, [&](const auto& summary) {
        return score_candidates(instructions(), s, summary, at, roles, w);
      });
      resolve(policies_->pooling, [&](const auto& pooling) {
        pool_candidates(instructions(), pooling, s.heads.group(), stride, w);
      });
      best_pages(roles, count, w, pages);
    }
    s.selected_count[s.row(at.sequence, head)] = count;
    if (s.keeps_slots) recall_pages(s, at, entry.after());
  }

  /// Where heads alone occupy the threads, each head is one thread's; else a row's parts are shared out.
  /// Parts are cut and merged alike either way.
  void attend_rows(const attention_job<State>& job) {
    const int heads = job.s.heads.kv, last = job.entry.tokens - 1;
    const std::size_t bytes = job.bytes(last);
    const int threads =
        std::min(backend_->threads(), 1 + static_cast<int>(bytes / backend_->options().bytes_per_thread));
    if (threads == 1 || job.entry.tokens * heads >= 4 * threads) {
      backend_->parallel(job.entry.tokens * heads, bytes * static_cast<std::size_t>(job.entry.tokens),
                         [&](int unit, int worker) {
                           attend_head(instructions(), job, unit / heads, unit % heads,
                                       workspaces_[static_cast<std::size_t>(worker)]);
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
        with_team(instructions(), [&](auto team) {
          job.attend_part(team, row, unit / parts, unit % parts, part(unit / parts, unit % parts),
                          workspaces_[static_cast<std::size_t>(worker)]);
        });
      });
      with_team(instructions(), [&](auto team) {
        for (int head = 0; head < heads; ++head) {
          for (int nth = 1; nth < parts; ++nth) merge_parts<d>(team, part(head, nth), part(head, 0), group);
          job.finish(team, row, head, part(head, 0));
        }
      });
    }
  }

  host_backend* backend_;
  const Policies* policies_;
  int max_parts_;
  std::vector<workspace> workspaces_;
  log_sum_exp* part_mass_ = nullptr;  // (kv head, max_parts, group)
  float* part_weighted_ = nullptr;    // (kv head, max_parts, group, head_dim)
};

}  // namespace freekv::host
