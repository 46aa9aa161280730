// The stages of a step on the host: who does what on which thread.
#pragma once

#include <array>
#include <cstring>
#include <freekv/algorithms/keep_selection.hpp>
#include <freekv/backend/host/append.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/row_numbers.hpp>
#include <freekv/backend/host/select_stage.hpp>
#include <freekv/backend/host/sequence_slots.hpp>
#include <freekv/backend/host/weigh_pages.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/pipeline/tables.hpp>
#include <freekv/policies/scope.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <span>

namespace freekv::host {

/// A step as the host's stages take it: its entries, one after the other.
struct step_view {
  std::span<const step_entry> entries;
};

/// The stages of one pipeline on the host. `State` is its layer_state; `Settings` has its policy objects as
/// members. Every call returns when its work is done, but for those that queue on the recall stream.
template <class State, class Settings>
class stages {
 public:
  using element = typename State::element;
  using event = host::event;
  using step = step_view;
  struct bounds {};  // no step is captured
  using tables = host_tables<State>;
  static constexpr bool selections_at_hand = true;
  static constexpr bool counts_flagged_heads = false;
  static constexpr int d = State::head_dim;

  /// Takes scratch for all threads of `backend` from `fast`.
  [[gnu::cold]] stages(host_backend& backend, const Settings& settings, carver&, carver& fast)
      : stages(backend, settings, workspace_sizes_of<State>(settings), fast) {}

  static std::size_t staging_bytes() { return 0; }

  /// Initialises the layers' arrays, before there is any sequence.
  [[gnu::cold]] void begin(const tables&, std::span<const State> layers) {
    layers_ = layers;
    for (const State& s : layers) {
      const int sequences = policies_->capacity.max_sequences;
      const std::size_t selections = s.selected_index(sequences, 0);
      for (std::int32_t* units : std::array{s.selected, s.next_selected, s.attended, s.slot_of})
        std::fill_n(units, selections, -1);
      for (std::uint32_t* masks : std::array{s.selected_by, s.next_selected_by, s.attended_by})
        std::fill_n(masks, s.mask_index(sequences, 0), 0u);
    }
    for (int sequence = 0; sequence < policies_->capacity.max_sequences; ++sequence) forget(sequence);
  }

  // Between steps, with nothing queued, in all layers:

  /// Forgets a sequence's selection and report, and what could not be read for it.
  void forget(int sequence) {
    for (const State& s : layers_) {
      drop_selection(s, sequence);
      forget_page_values(s, sequence, 0);
      s.lacking[sequence] = 0;
      for (int head = 0; head < s.heads.kv; ++head) {
        clear_report(s, sequence, head);
        if (s.missed != nullptr) s.missed[s.head_index(sequence, head)] = {};
      }
    }
  }
  /// Takes a sequence's last tokens from it: the ring's pages that they have overwritten come back. Selected
  /// slots need nothing, since a page that is no longer complete can only be of the last selection, which is
  /// dropped then.
  [[gnu::cold]] void truncate(int sequence, const truncation& to) {
    for (const State& s : layers_) {
      if (!to.keeps_selection) drop_selection(s, sequence);
      if (to.reopens_page(s)) s.lacking[sequence] |= lacks_open_page;
      if (to.window_lacks_pages(s)) s.lacking[sequence] |= lacks_window;
      forget_page_values(s, sequence, to.tokens / s.page.tokens);
      fill_or_leave(s, sequence, to.tokens);
    }
  }
  /// Makes `to` what `from` is.
  [[gnu::cold]] void fork(int from, int to, int) {
    for (const State& s : layers_) {
      copy_selection(s, from, to);
      copy_page_values(s, from, to);
      if (s.encoded) copy_open_pages(s, from, to);
      if (s.keeps_slots) copy_slots(s, from, to);
    }
  }
  /// Fills the slots of a sequence from the store.
  [[gnu::cold]] void restore(int sequence, int tokens) {
    for (const State& s : layers_) {
      if (s.keeps_slots) s.lacking[sequence] |= lacks_slots;
      fill_or_leave(s, sequence, tokens);
    }
  }
  void queue_copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
  }

  // In a layer:

  void compact_slots(const State& s, int sequence) const { host::compact_slots(s, sequence); }
  const State& read_back(const State& s) const { return s; }

  // Steps are not planned:

  static std::int64_t steps_ahead() { return 0; }
  static void wait_to_plan() {}

  // In a step. Those that throw store_error can be called again:

  step begin_step(std::span<const step_entry> entries, bool /*has_begun*/ = false) const { return {entries}; }

  /// Appends rows and summarises the pages they complete; in retrieval layers finds the heads that have
  /// drifted (decode) or forgets the selection (prompt). Throws store_error.
  template <class In>
  void append(const State& s, const step& of, const step_rows<In>& rows) {
    const auto is_to_append = [&](const step_entry& entry) {
      return s.lacking[entry.sequence] != lacks_weights;
    };
    for (const step_entry& entry : of.entries)
      if (is_to_append(entry)) retry_reads(s, entry);
    for (const step_entry& entry : of.entries)
      if (is_to_append(entry)) append_before_last(s, entry, rows);
    for (const step_entry& entry : of.entries)
      if (is_to_append(entry)) append_last(s, entry, rows);
    if constexpr (freekv::detail::may_complete<Settings>) {
      for (const step_entry& entry : of.entries) s.lacking[entry.sequence] = lacks_weights;
      for (const step_entry& entry : of.entries) weigh_pages(s, entry, rows.queries);
      for (const step_entry& entry : of.entries) s.lacking[entry.sequence] = 0;
    }
    for (const step_entry& entry : of.entries) detect(s, entry, rows.selecting);
  }

  /// Appends prompts from an engine's own cache, `rows[i]` those of the i-th entry, page by page on the
  /// recall stream, or at once into a file. The last page forgets the selection. Where pages are encoded, it
  /// waits for `recalled` first. Throws store_error.
  template <class In>
  void append_from(const State& s, const step& of, std::span<const paged_blocks<const In>> rows,
                   const event& recalled) {
    for (const step_entry& entry : of.entries)
      if (s.lacking[entry.sequence] == lacks_weights)
        throw usage_error(
            "append_from: the layer has this step's rows of an append that failed; repeat append, which "
            "weighs their pages");
    if (s.encoded) {
      recalled.wait();
      for (const step_entry& entry : of.entries) retry_reads(s, entry);
    }
    const auto append = [&](std::size_t i, int page) {
      const auto append_one = [this, layer = &s, entry = of.entries[i], table = rows[i], page](int worker) {
        append_page(instructions(), *layer, *policies_, entry, page, table, workspace_of(worker));
        if (layer->kind == layer_kind::retrieval && page == layer->pages_of(entry.after()) - 1)
          drop_selection(*layer, entry.sequence);
      };
      if (s.slices.file != nullptr)
        append_one(0);
      else
        backend_->recall().enqueue([append_one, this] { append_one(backend_->recall_workspace()); });
    };
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (int page = of.entries[i].before / s.page.tokens; page < end_before_last(s, of.entries[i]); ++page)
        append(i, page);
    for (std::size_t i = 0; i < rows.size(); ++i)
      if (s.appends_last_page_behind(of.entries[i])) append(i, end_before_last(s, of.entries[i]));
  }

  /// The flagged heads of decode entries select among this step's candidates and recall what they miss.
  void correct(const State& s, const step& of) {
    for (const step_entry& entry : of.entries)
      if (entry.phase == step_phase::decode) select_.correct(s, entry);
  }
  /// Recalls what `correct` could not. Throws store_error.
  void retry_correction_reads(const State& s, const step& of) {
    for (const step_entry& entry : of.entries) select_.recall_missing(s, entry.sequence, entry.after());
  }

  /// Queues on the recall stream that every head of a decode entry selects with the current query among the
  /// next step's candidates and recalls what it misses.
  void speculate(const State& s, const step& of) {
    for (const step_entry& entry : of.entries)
      if (entry.phase == step_phase::decode)
        backend_->recall().enqueue([this, layer = &s, entry] { select_.speculate(*layer, entry); });
  }

  /// Attends decode rows within the budget: to sink, selected and window pages; prompt rows, and all rows of
  /// complete layers, to everything before them and themselves.
  void attend(const State& s, const step& of, const step_queries& queries, const attention_output& to) {
    for (const step_entry& entry : of.entries)
      attend(s, entry, queries, to, entry.phase == step_phase::prefill);
    if constexpr (freekv::detail::may_complete<Settings>)
      for (const step_entry& entry : of.entries)
        job_of(s, entry, nullptr, {}, entry.phase == step_phase::prefill).keep_refreshed();
  }
  /// Attends each row to everything before it and itself, straight from the store.
  void attend_full(const State& s, const step& of, const step_queries& queries, const attention_output& to) {
    for (const step_entry& entry : of.entries) attend(s, entry, queries, to, true);
  }
  /// The log-mass of each unit that each row attends to.
  void log_masses(const State& s, const step& of, const step_queries& queries, const log_mass_output& to) {
    for (const step_entry& entry : of.entries) log_masses(s, entry, queries, to);
  }

 private:
  [[gnu::cold]] stages(host_backend& backend, const Settings& policies, const workspace_sizes& scratch,
                       carver& memory)
      : backend_(&backend),
        policies_(&policies),
        select_(backend, policies, scratch, memory),
        refreshed_(scratch, policies.capacity.max_sequences, memory),
        max_parts_((scratch.most_entries() - 1) / entries_per_part(scratch.page_tokens) + 1) {
    const auto heads = to_size(scratch.kv_heads) * to_size(max_parts_) * to_size(scratch.group);
    part_log_sums_ = memory.take<log_sum_exp>(heads);
    part_weighted_ = memory.take<float>(heads * d);
  }

  /// Reads for a sequence that is about to append what could not be read when it should have been: what a
  /// truncation or restoration needs, and what is selected.
  void retry_reads(const State& s, const step_entry& entry) {
    if (s.lacking[entry.sequence] != 0) fill(s, entry.sequence, entry.before, entry.shared_page);
    select_.recall_missing(s, entry.sequence, entry.before);
  }

  /// End of the pages of an entry that wait for nothing.
  static int end_before_last(const State& s, const step_entry& entry) {
    return s.pages_of(entry.after()) - s.appends_last_page_behind(entry);
  }
  template <class In>
  void append_before_last(const State& s, const step_entry& entry, const step_rows<In>& rows) {
    const int first_page = entry.before / s.page.tokens;
    const auto bytes = to_size(entry.tokens) * to_size(4 * s.heads.kv * d) * sizeof(element);
    backend_->parallel(end_before_last(s, entry) - first_page, bytes, [&](int task, int worker) {
      append_given(s, entry, first_page + task, rows, workspace_of(worker));
    });
  }
  /// Appends the page that waits, once those of all entries before it have been: it cannot fail.
  template <class In>
  void append_last(const State& s, const step_entry& entry, const step_rows<In>& rows) {
    if (s.appends_last_page_behind(entry))
      append_given(s, entry, end_before_last(s, entry), rows, workspace_of(0));
  }
  template <class In>
  void append_given(const State& s, const step_entry& entry, int page, const step_rows<In>& rows,
                    const workspace& w) {
    append_page(instructions(), s, *policies_, entry, page,
                rows_from<In>{rows, entry.before - entry.first_row, d}, w);
  }

  /// The last rows of a prompt give pages their values, where attention is completed and they have queries.
  void weigh_pages(const State& s, const step_entry& entry, const step_queries& queries) {
    if (s.page_values == nullptr || entry.phase != step_phase::prefill || queries.empty()) return;
    resolve(policies_->completion, [&]<class Completion>(const Completion& completion) {
      if constexpr (Completion::completes) {
        const attention_job<State, Settings> job{
            s, *policies_, entry, numbers_.of(queries, entry.rows(), s.heads.query * d), {}, true};
        const int rows = std::min(completion.prompt_rows, entry.tokens);
        backend_->parallel(s.heads.kv, to_size(rows) * job.bytes(entry.tokens - 1),
                           [&](int head, int worker) {
                             if (s.kind_of(head) == layer_kind::retrieval)
                               host::weigh_pages(instructions(), job, head, rows, workspace_of(worker));
                           });
      }
    });
  }

  void detect(const State& s, const step_entry& entry, const step_queries& queries) {
    if (s.kind != layer_kind::retrieval) return;
    if (entry.phase == step_phase::prefill) return drop_selection(s, entry.sequence);
    resolve(policies_->correction, [&](const auto& correction) {
      detect_drift(instructions(), s, correction, entry,
                   numbers_.of(queries, entry.rows(), s.heads.query * d) +
                       std::ptrdiff_t{entry.first_row} * s.heads.query * d);
    });
    resolve(policies_->scope, [&]<class Scope>(const Scope&) {
      if constexpr (Scope::scope == selection_scope::layer)
        if (any_flagged(s, entry.sequence)) flag_all(s, entry.sequence);
    });
  }

  void log_masses(const State& s, const step_entry& entry, const step_queries& queries,
                  const log_mass_output& to) {
    const float* const numbers = numbers_.of(queries, entry.rows(), s.heads.query * d);
    const attention_job<State, Settings> job{s,       *policies_, entry,
                                             numbers, {},         entry.phase == step_phase::prefill};
    const int heads = s.heads.kv;
    backend_->parallel(entry.tokens * heads, job.bytes(entry.tokens - 1) * to_size(entry.tokens),
                       [&](int task, int worker) {
                         job.log_masses(instructions(), task / heads, task % heads, to, workspace_of(worker));
                       });
  }

  isa instructions() const { return backend_->options().instructions; }
  const workspace& workspace_of(int worker) const { return select_.workspace_of(worker); }

  /// `lacks_weights`: the rows of the step are appended, and what weighs their pages could not be read.
  enum lacks : std::uint8_t { lacks_open_page = 1, lacks_window = 2, lacks_slots = 4, lacks_weights = 8 };
  /// Reads what `lacking` says, for a sequence of `tokens` tokens. `open_page`: the store's page of its open
  /// page, if that is no longer the one in the table.
  void fill(const State& s, int sequence, int tokens, store_page_id open_page = store_page_id::none) {
    const encoded_pages stored(s, *policies_, workspace_of(0));
    const int page = tokens / s.page.tokens;
    if ((s.lacking[sequence] & lacks_open_page) != 0 && tokens % s.page.tokens != 0)
      read_open_page(stored, s, sequence, page,
                     open_page != store_page_id::none ? open_page : s.store_page(sequence, page));
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

  void attend(const State& s, const step_entry& entry, const step_queries& queries,
              const attention_output& to, bool complete) {
    const int width = s.heads.query * d;
    attend_rows(job_of(s, entry, numbers_.of(queries, entry.rows(), width),
                       numbers_.room_for(to, entry.rows(), width), complete));
    numbers_.write(to, entry.rows(), width);
  }
  attention_job<State, Settings> job_of(const State& s, const step_entry& entry, const float* queries,
                                        const attention_output& to, bool complete) const {
    return {s, *policies_, entry, queries, to, complete, &select_.left(), &refreshed_};
  }
  /// Attends rows: a head is one thread's where heads alone occupy the threads, else its parts are shared
  /// out. Parts are cut and merged alike either way.
  void attend_rows(const attention_job<State, Settings>& job) {
    const int heads = job.s.heads.kv, last = job.entry.tokens - 1;
    const std::size_t bytes = job.bytes(last);
    const int threads = backend_->threads_worth(bytes);
    if (threads == 1 || job.entry.tokens * heads >= 4 * threads) {
      backend_->parallel(job.entry.tokens * heads, bytes * to_size(job.entry.tokens),
                         [&](int task, int worker) {
                           attend_head(instructions(), job, task / heads, task % heads, workspace_of(worker));
                         });
      return;
    }
    const int group = job.s.heads.group();
    const auto part = [&](int head, int nth) {
      const int first = (head * max_parts_ + nth) * group;
      return attention_part{part_log_sums_ + first, part_weighted_ + std::ptrdiff_t{first} * d};
    };
    for (int row = 0; row <= last; ++row) {
      const int parts = job.parts(row);
      backend_->parallel(heads * parts, bytes, [&](int task, int worker) {
        const int head = task / parts, nth = task % parts;
        job.attend_part(instructions(), row, head, nth, part(head, nth), workspace_of(worker));
      });
      for (int head = 0; head < heads; ++head) {
        for (int nth = 1; nth < parts; ++nth)
          merge_parts<d>(instructions(), part(head, nth), part(head, 0), group);
        job.finish(instructions(), row, head, part(head, 0), workspace_of(0));
      }
    }
  }

  host_backend* backend_;
  const Settings* policies_;
  std::span<const State> layers_;
  selection_stage<State, Settings> select_;
  refreshed_values refreshed_;
  int max_parts_;
  row_numbers numbers_;
  log_sum_exp* part_log_sums_ = nullptr;  // (kv head, max_parts, group)
  float* part_weighted_ = nullptr;    // (kv head, max_parts, group, head_dim)
};

}  // namespace freekv::host
