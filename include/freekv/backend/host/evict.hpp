// The stages of an evicting pipeline on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/backend/host/leave_head.hpp>
#include <freekv/backend/host/row_numbers.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

namespace freekv::host {

/// The stages of one evicting pipeline on one entry of a step. Every call returns when its work is done. KV
/// heads and prompt rows are shared out over the backend's threads; one head of one row is one thread's, so
/// results depend neither on threads nor on the batch.
template <class Backend, class Shape, class Settings>
class eviction_stages {
 public:
  using state = eviction_state<Shape>;
  using element = typename state::element;
  static constexpr int d = state::head_dim;

  /// Takes scratch for all threads of `backend` from `memory`.
  eviction_stages(Backend& backend, const Settings& s, carver& memory)
      : eviction_stages(backend, s, memory, eviction_sizes::of<Shape>(s)) {}

  /// Gives each head its budget, or each layer its ratio, when a prompt ends and before any layer is cut.
  void allocate(const std::vector<state>& layers, const eviction_entry& entry) {
    resolve(settings_->eviction, [&]<class E>(const E& eviction) {
      if constexpr (allocates<E>) give_budgets(eviction, layers, entry);
      if constexpr (rates<E>) give_ratios(eviction, layers, entry);
    });
  }

  /// Puts rows where they belong; before a sequence's first decode row its prompt is cut to the budget, and
  /// before the next block of it where the policy cuts blocks.
  /// Observed prompt rows need their queries. `worths`: (rows of the step, kv_heads), of a layer that forgets
  /// by a policy that takes them.
  template <class In>
  void append(const state& s, const eviction_entry& entry, const step_rows<In>& rows, const float* worths) {
    const auto bytes =
        to_size(entry.decodes && entry.ends_prompt ? entry.before : entry.tokens) * 4 * d * sizeof(element);
    resolve(settings_->eviction, [&]<class E>(const E& eviction) {
      const bool observed = !entry.decodes && !s.complete && eviction.observed_rows() != 0;
      const bool reads_queries = observed || (entry.decodes && s.keeps_decoded);
      const float* const queries =
          reads_queries ? numbers_.of(rows.queries, entry.rows(), s.heads.query * d) : nullptr;
      backend_->parallel(s.heads.kv, bytes * to_size(s.heads.kv), [&](int head, int worker) {
        if constexpr (cuts_blocks<E>) {
          if (!entry.decodes || entry.ends_prompt)
            heads_.end_block(eviction, s, entry, head, scratch_[to_size(worker)]);
        } else {
          if (entry.decodes && entry.ends_prompt)
            heads_.end_prompt(eviction, s, entry, head, scratch_[to_size(worker)]);
        }
        if (entry.decodes)
          append_decoded(eviction, s, entry, head, rows, queries, worths);
        else
          append_prompt<cuts_blocks<E>>(s, entry, head, rows);
        if constexpr (takes_worths<E>)
          if (!entry.decodes && !s.complete) keep_worths(s, entry, head, worths);
      });
      if constexpr (cuts_blocks<E>)
        if (observed) s.probes[entry.sequence] = 0;  // they have observed the block before
      if (observed)
        observe(eviction, s, entry, queries + std::ptrdiff_t{entry.first_row} * s.heads.query * d);
    });
  }

  /// Keeps queries of rows behind a prompt, which observe it and are no part of it: the entry's, at most as
  /// many as are observed. The layer forgets.
  void probe(const state& s, const eviction_entry& entry, const step_queries& queries) {
    const int width = s.heads.query * d;
    keep_queries(s, entry,
                 numbers_.of(queries, entry.rows(), width) + std::ptrdiff_t{entry.first_row} * width);
    s.probes[entry.sequence] = entry.tokens;
  }

  /// Attends: a decode row to all that its heads have kept, then units leave; prompt rows to what there is up
  /// to themselves; rows behind a prompt to what there is of it.
  void attend(const state& s, const eviction_entry& entry, const step_queries& queries,
              const attention_output& to) {
    const int width = s.heads.query * d;
    attend_rows(s, entry, numbers_.of(queries, entry.rows(), width),
                numbers_.room_for(to, entry.rows(), width));
    numbers_.write(to, entry.rows(), width);
  }

  /// Empties a sequence.
  void forget(const state& s, int sequence) {
    std::fill_n(s.tokens + s.head_index(sequence, 0), s.heads.kv, 0);
    std::fill_n(s.attended_count + s.head_index(sequence, 0), s.heads.kv, 0);
    if (s.complete) return;
    if (s.coded != nullptr) {
      std::fill_n(s.coded + s.head_index(sequence, 0), s.heads.kv, 0);
      std::fill_n(s.attended_coded_count + s.head_index(sequence, 0), s.heads.kv, 0);
    }
    if (s.ratios != nullptr) s.ratios[sequence] = 1.0f;
    if (s.probes != nullptr) s.probes[sequence] = 0;
    resolve(settings_->eviction, [&]<class E>(const E&) {
      if constexpr (merges<E>)
        for (int head = 0; head < s.heads.kv; ++head) s.template memory_of<E>(sequence, head) = {};
    });
  }

  /// Makes a sequence what another is: `made` and `from` are entries of no rows that say where each is, and
  /// how long it is. What `made` was before is lost.
  [[gnu::cold]] void fork(const state& s, const eviction_entry& from, const eviction_entry& made) {
    const std::size_t heads = to_size(s.heads.kv), units = s.unit_index(1, 0),
                      queries = to_size(s.kept_queries) * to_size(s.heads.query) * d * sizeof(float);
    const auto by_sequence = [&](void* all, std::size_t bytes) {
      copy_part(all, bytes, from.sequence, made.sequence);
    };
    by_sequence(s.tokens, heads * sizeof(*s.tokens));
    by_sequence(s.attended_count, heads * sizeof(*s.attended_count));
    by_sequence(s.coded, heads * sizeof(*s.coded));
    by_sequence(s.attended_coded_count, heads * sizeof(*s.attended_coded_count));
    by_sequence(s.memories, heads * s.memory_bytes);
    by_sequence(s.states, units * s.state_bytes);
    by_sequence(s.log_weight, units * sizeof(*s.log_weight));
    by_sequence(s.attended, units * sizeof(*s.attended));
    by_sequence(s.attended_coded, units * sizeof(*s.attended_coded));
    by_sequence(s.ratios, sizeof(*s.ratios));
    by_sequence(s.probes, sizeof(*s.probes));
    if (s.by_sequence())
      by_sequence(s.queries, queries);
    else if (from.staging >= 0)
      copy_part(s.queries, queries, from.staging, made.staging);
    if (s.pool_rows > 0) fork_budgets(s, from.sequence, made.sequence);
    for (int head = 0; head < s.heads.kv; ++head) fork_head(s, from, made, head);
  }

 private:
  using scratch = eviction_scratch;

  /// Copies one part of an array, of so many bytes each, to another; of null nothing.
  static void copy_part(void* all, std::size_t bytes, int from, int to) {
    auto* const parts = static_cast<std::byte*>(all);
    if (all != nullptr) std::memcpy(parts + to_size(to) * bytes, parts + to_size(from) * bytes, bytes);
  }
  /// Gives a sequence's heads as much of its own pool as another's have; pools lie one behind the other.
  static void fork_budgets(const state& s, int from, int to) {
    for (int head = 0; head < s.heads.kv; ++head) {
      if (s.tokens[s.head_index(from, head)] == 0) continue;  // its prompt has not been cut
      const head_budget& of = s.budgets[s.head_index(from, head)];
      s.budgets[s.head_index(to, head)] = {of.first + (to - from) * s.pool_rows, of.rows, of.budget};
    }
  }
  static void copy_rows(const head_slice<element>& from, const head_slice<element>& to, int rows) {
    for (int row = 0; row < rows; ++row) {
      std::memcpy(to.key + row * to.stride, from.key + row * from.stride, d * sizeof(element));
      std::memcpy(to.value + row * to.stride, from.value + row * from.stride, d * sizeof(element));
    }
  }
  /// Keys and values of one KV head, those that are coded by their codes, and what is staged of its prompt.
  static void fork_head(const state& s, const eviction_entry& from, const eviction_entry& made, int head) {
    const int tokens = s.tokens[s.head_index(from.sequence, head)], coded = s.coded_of(from.sequence, head);
    if (tokens > 0) {  // else a pool's rows are not given out yet
      copy_rows(s.slice(from.sequence, head), s.slice(made.sequence, head), tokens - coded);
      for (int nth = 0; nth < coded; ++nth)
        std::memcpy(s.code(made.sequence, head, nth), s.code(from.sequence, head, nth), s.code_bytes);
      if (!s.complete)
        std::copy_n(s.first_tokens(from.sequence, head),
                    s.budgets != nullptr ? s.budgets[s.head_index(from.sequence, head)].rows : s.units,
                    s.first_tokens(made.sequence, head));
    }
    if (s.complete) return;
    if (s.worths != nullptr && (s.staged_rows == 0 || from.staging >= 0))
      std::copy_n(s.worths_of(from, head), s.worth_rows, s.worths_of(made, head));
    if (from.staging < 0) return;
    copy_rows(s.prompt_slice(from, head), s.prompt_slice(made, head), from.prompt);
    if (s.votes != nullptr) std::copy_n(s.votes_of(from, head), from.prompt, s.votes_of(made, head));
  }

  void attend_rows(const state& s, const eviction_entry& entry, const float* queries,
                   const attention_output& to) {
    const auto row_bytes = [&](int tokens) {
      return to_size(s.heads.kv * 2 * d) * to_size(tokens) * sizeof(element);
    };
    if (!entry.decodes) {
      const int heads = s.heads.kv;
      backend_->parallel(entry.tokens * heads, row_bytes(entry.before + entry.tokens) * to_size(entry.tokens),
                         [&](int task, int worker) {
                           const int row = task / heads, head = task % heads;
                           heads_.attend_head(
                               s,
                               {s.complete ? s.slice(entry.sequence, head) : s.prompt_slice(entry, head),
                                s.attended_by(entry, head, row), entry.first_row + row, head},
                               queries, to, scratch_[to_size(worker)]);
                         });
      return;
    }
    resolve(settings_->eviction, [&]<class E>(const E& eviction) {
      backend_->parallel(
          s.heads.kv, row_bytes(std::min(s.rows, entry.before + 1)), [&](int head, int worker) {
            const scratch& w = scratch_[to_size(worker)];
            const int tokens = s.tokens[s.head_index(entry.sequence, head)];
            if constexpr (demotes<E>) {
              const int coded = s.coded_of(entry.sequence, head);
              heads_.attend_held(
                  eviction, s, entry.sequence,
                  {s.slice(entry.sequence, head), tokens - coded, entry.first_row, head, !s.complete}, coded,
                  queries, to, w);
            } else {
              heads_.attend_head(s,
                                 {s.slice(entry.sequence, head), tokens, entry.first_row, head, !s.complete,
                                  s.log_weights(entry.sequence, head)},
                                 queries, to, w);
            }
            if (!s.complete) heads_.count(eviction, s, entry, head, queries, w);
          });
    });
  }

  eviction_stages(Backend& backend, const Settings& s, carver& memory, const eviction_sizes& sizes)
      : backend_(&backend), settings_(&s), heads_(backend.options().instructions, sizes, s) {
    for (int i = 0; i < backend.threads(); ++i) scratch_.push_back(scratch::template carve<d>(memory, sizes));
    resolve(s.eviction, [&]<class E>(const E&) {
      if constexpr (allocates<E>) {
        const std::size_t heads = to_size((s.model.layers - s.complete_layers()) * s.model.kv_heads);
        statistics_ = memory.take<std::byte>(heads * sizeof(typename E::statistic));
        head_budgets_ = memory.take<int>(heads);
      }
      if constexpr (rates<E>) {
        sensitivities_ = memory.take<double>(to_size(s.model.layers - s.complete_layers()));
        ratios_ = memory.take<float>(to_size(s.model.layers - s.complete_layers()));
      }
    });
  }
  /// Row `at` of a head's becomes a row of the step.
  template <class In>
  static void put(const head_slice<element>& to, int at, const step_rows<In>& rows, int row, int head) {
    const auto copy = [&](element* into, const In* source) {
      if constexpr (std::is_same_v<In, element>)
        std::memcpy(into, source, d * sizeof(element));
      else
        for (int i = 0; i < d; ++i) into[i] = from_float<element>(source[i]);
    };
    copy(to.key + at * to.stride, rows.keys + row * rows.key_stride + head * d);
    copy(to.value + at * to.stride, rows.values + row * rows.value_stride + head * d);
  }

  /// Puts a prompt's rows behind those before, or as a block behind what the head holds, all of which is then
  /// what the block's last row attends to.
  template <bool AsBlock, class In>
  void append_prompt(const state& s, const eviction_entry& entry, int head, const step_rows<In>& rows) const {
    const std::size_t at_head = s.head_index(entry.sequence, head);
    const auto to = s.complete ? s.slice(entry.sequence, head) : s.prompt_slice(entry, head);
    const bool as_block = AsBlock && !s.complete;
    const int first = as_block ? s.tokens[at_head] : entry.before;
    for (int row = 0; row < entry.tokens; ++row) put(to, first + row, rows, entry.first_row + row, head);
    if (s.complete || s.staged_rows == 0) s.tokens[at_head] = first + entry.tokens;
    if (!as_block) return;
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    std::iota(first_token + first, first_token + first + entry.tokens, entry.before);
    std::copy_n(first_token, s.tokens[at_head], s.attended + s.unit_index(entry.sequence, head));
    s.attended_count[at_head] = s.tokens[at_head];
  }

  template <class Eviction, class In>
  void append_decoded(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                      const step_rows<In>& rows, const float* queries,
                      [[maybe_unused]] const float* worths) const {
    if (s.keeps_decoded) {
      const int group = s.heads.group() * d;
      std::memcpy(s.kept_query(entry, entry.before, head),
                  queries + (std::ptrdiff_t{entry.first_row} * s.heads.kv + head) * group,
                  to_size(group) * sizeof(float));
    }
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    int place = tokens;
    if constexpr (demotes<Eviction>) place -= s.coded_of(entry.sequence, head);
    put(s.slice(entry.sequence, head), place, rows, entry.first_row, head);
    if (!s.complete) {
      const int unit = place / s.unit_tokens;
      if (place % s.unit_tokens == 0) s.first_tokens(entry.sequence, head)[unit] = entry.before;
      if (float* const weights = s.log_weights(entry.sequence, head)) weights[unit] = 0.0f;
      if constexpr (!observes<Eviction>) {
        auto& made = s.template states_of<Eviction>(entry.sequence, head)[unit];
        eviction.on_append(made, entry.before);
        if constexpr (takes_worths<Eviction>)
          eviction.on_given(made, given_worth(s, worths, entry.first_row, head));
        if constexpr (freekv::detail::sees_rows<Eviction>)
          heads_.tell_row(eviction, made, as_const(s.slice(entry.sequence, head)), place);
      }
    }
    ++tokens;
  }

  /// The worth that was given for a row of the step; NaN as -infinity, which is worth least.
  static float given_worth(const state& s, const float* worths, int row, int head) {
    const float worth = worths[std::ptrdiff_t{row} * s.heads.kv + head];
    return std::isnan(worth) ? -std::numeric_limits<float>::infinity() : worth;
  }
  /// Keeps a prompt's worths until it ends.
  void keep_worths(const state& s, const eviction_entry& entry, int head, const float* worths) const {
    float* const to = s.worths_of(entry, head) + entry.before;
    for (int row = 0; row < entry.tokens; ++row)
      to[row] = given_worth(s, worths, entry.first_row + row, head);
  }

  /// The queries of a KV head's group for an entry's row; `queries` are the entry's.
  static const float* query_of(const state& s, const eviction_entry& entry, const float* queries, int token,
                               int head) {
    return queries + (std::ptrdiff_t{token - entry.before} * s.heads.kv + head) * s.heads.group() * d;
  }
  /// Keeps the queries of an entry's last rows.
  void keep_queries(const state& s, const eviction_entry& entry, const float* queries) const {
    const int end = entry.before + entry.tokens;
    for (int token = std::max(entry.before, end - s.kept_queries); token < end; ++token)
      for (int head = 0; head < s.heads.kv; ++head)
        std::memcpy(s.kept_query(entry, token, head), query_of(s, entry, queries, token, head),
                    to_size(s.heads.group() * d) * sizeof(float));
  }

  /// Observes a prompt chunk: all its rows vote at once, or the last ones' queries are kept.
  template <class Eviction>
  void observe(const Eviction& eviction, const state& s, const eviction_entry& entry, const float* queries) {
    if (eviction.observed_rows() != every_prompt_row) return keep_queries(s, entry, queries);
    const int end = entry.before + entry.tokens;
    const std::size_t bytes =
        to_size(s.heads.kv * d) * to_size(end) * to_size(entry.tokens) * sizeof(element);
    backend_->parallel(s.heads.kv, bytes, [&](int head, int worker) {
      float* const votes = s.votes_of(entry, head);
      std::fill(votes + entry.before, votes + end, 0.0f);
      for (int token = entry.before; token < end; ++token)
        heads_.vote(s, entry, head, token, query_of(s, entry, queries, token, head), votes,
                    scratch_[to_size(worker)]);
    });
  }

  template <class Eviction>
  void give_budgets(const Eviction& eviction, const std::vector<state>& layers, const eviction_entry& entry) {
    const int kv_heads = settings_->model.kv_heads, first = settings_->complete_layers(),
              heads = (settings_->model.layers - first) * kv_heads;
    auto* const statistics = reinterpret_cast<typename Eviction::statistic*>(statistics_);
    std::fill_n(head_budgets_, heads, settings_->budget);
    if (entry.prompt > settings_->budget) {
      const std::size_t bytes =
          to_size(heads * d) * to_size(entry.prompt) * to_size(eviction.observed_rows()) * sizeof(element);
      backend_->parallel(heads, bytes, [&](int task, int worker) {
        const state& s = layers[to_size(first + task / kv_heads)];
        eviction_moment at = heads_.end_of_prompt(s, entry, task % kv_heads);
        at.budget = settings_->budget;  // its own is what this is about
        statistics[task] =
            eviction.measure(heads_.see_prompt(eviction, s, entry, at, scratch_[to_size(worker)]), at);
      });
      eviction.allocate(statistics, {heads / kv_heads, kv_heads, settings_->budget, entry.prompt},
                        head_budgets_);
    }
    std::int64_t left = std::int64_t{heads} * settings_->budget,
                 row = layers.back().pool_rows * entry.sequence;
    for (int nth = 0; nth < heads; ++nth) {
      const state& s = layers[to_size(first + nth / kv_heads)];
      const int budget = static_cast<int>(std::clamp<std::int64_t>(head_budgets_[nth], 0, left));
      const int behind =
          eviction.capacity(settings_->limits(s.layer)) - settings_->budget;  // of decoded tokens
      const int rows = std::min(budget + behind, settings_->max_tokens());
      s.budgets[s.head_index(entry.sequence, nth % kv_heads)] = {row, rows, budget};
      left -= budget;
      row += rows;
    }
  }

  template <class Eviction>
  void give_ratios(const Eviction& eviction, const std::vector<state>& layers, const eviction_entry& entry) {
    if (entry.prompt == 0) return;
    const int first = settings_->complete_layers(), count = settings_->model.layers - first;
    const std::size_t bytes = to_size(count * settings_->model.kv_heads * d) * to_size(entry.prompt) *
                              to_size(eviction.observed_rows()) * sizeof(element);
    backend_->parallel(count, bytes, [&](int nth, int worker) {
      const state& s = layers[to_size(first + nth)];
      const scratch& w = scratch_[to_size(worker)];
      std::fill_n(w.sums, entry.prompt, 0.0);
      for (int head = 0; head < s.heads.kv; ++head) {
        const observed_units seen =
            heads_.see_prompt(eviction, s, entry, heads_.end_of_prompt(s, entry, head), w);
        for (int r = 0; r < seen.rows; ++r)
          for (int i = 0; i < seen.units; ++i) w.sums[i] += static_cast<double>(seen.row(r)[i]);
      }
      sensitivities_[nth] = eviction.sensitivity(w.sums, entry.prompt);
    });
    eviction.rate(sensitivities_, count, ratios_);
    for (int nth = 0; nth < count; ++nth) layers[to_size(first + nth)].ratios[entry.sequence] = ratios_[nth];
  }

  Backend* backend_;
  const Settings* settings_;
  head_eviction<Shape, Settings> heads_;
  std::vector<scratch> scratch_;
  row_numbers numbers_;
  std::byte* statistics_ = nullptr;  // (layers that forget, kv heads), of policies that allocate
  int* head_budgets_ = nullptr;      // the same
  double* sensitivities_ = nullptr;  // (layers that forget), of policies that rate them
  float* ratios_ = nullptr;          // the same
};

}  // namespace freekv::host
