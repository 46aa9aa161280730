// The stages of an evicting pipeline on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/attended_shares.hpp>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/thread_pool.hpp>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <limits>
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
  eviction_stages(Backend& backend, const Settings& s, carver& memory) : backend_(&backend), settings_(&s) {
    const int most = longest(s);
    score_stride_ = (most + 15) / 16 * 16;
    const auto n = [](std::int64_t x) { return static_cast<std::size_t>(x); };
    const int group = s.query_heads / s.kv_heads;
    for (int i = 0; i < backend.threads(); ++i)
      scratch_.push_back({.block = memory.take<float>(n(attention_scratch<d>)),
                          .query = memory.take<float>(n(group * d)),
                          .mass = memory.take<log_sum_exp>(n(group)),
                          .weighted = memory.take<float>(n(group * d)),
                          .lse = memory.take<float>(n(group)),
                          .scores = memory.take<float>(n(group * score_stride_)),
                          .shares = memory.take<float>(n(score_stride_)),
                          .votes = memory.take<float>(n(score_stride_)),
                          .keys = memory.take<std::uint64_t>(n(most))});
  }

  /// Puts rows where they belong; before a sequence's first decode row its prompt is cut to the budget.
  /// Observed prompt rows need their queries.
  template <class In>
  void append(const state& s, const eviction_entry& entry, const kv_rows<In>& rows) {
    const auto bytes =
        static_cast<std::size_t>(entry.decodes && entry.ends_prompt ? entry.before : entry.tokens) * 4 * d *
        sizeof(element);
    resolve(settings_->eviction, [&](const auto& eviction) {
      backend_->parallel(s.heads.kv, bytes * static_cast<std::size_t>(s.heads.kv), [&](int head, int worker) {
        if (entry.decodes && entry.ends_prompt) end_prompt(eviction, s, entry, head, scratch_[index(worker)]);
        if (entry.decodes)
          append_decoded(eviction, s, entry, head, rows);
        else
          append_prompt(s, entry, head, rows);
      });
      if (entry.decodes || s.complete || eviction.observed_rows() == 0) return;
      observe(eviction, s, entry, rows.queries.data() + std::ptrdiff_t{entry.first_row} * s.heads.query * d);
    });
  }

  /// A decode row to all that its heads have kept, then units leave; prompt rows to everything up to themselves.
  void attend(const state& s, const eviction_entry& entry, const float* queries, const attention_output& to) {
    const auto row_bytes = [&](int tokens) {
      return static_cast<std::size_t>(s.heads.kv * 2 * d) * static_cast<std::size_t>(tokens) *
             sizeof(element);
    };
    if (!entry.decodes) {
      const int heads = s.heads.kv;
      backend_->parallel(entry.tokens * heads,
                         row_bytes(entry.before + entry.tokens) * static_cast<std::size_t>(entry.tokens),
                         [&](int unit, int worker) {
                           const int row = unit / heads, head = unit % heads;
                           attend_head(
                               s,
                               {s.complete ? s.slice(entry.sequence, head) : s.prompt_slice(entry, head),
                                entry.before + row + 1, entry.first_row + row, head},
                               queries, to, scratch_[index(worker)]);
                         });
      return;
    }
    resolve(settings_->eviction, [&](const auto& eviction) {
      backend_->parallel(
          s.heads.kv, row_bytes(std::min(s.rows, entry.before + 1)), [&](int head, int worker) {
            const scratch& w = scratch_[index(worker)];
            const int tokens = s.tokens[s.head_index(entry.sequence, head)];
            attend_head(s, {s.slice(entry.sequence, head), tokens, entry.first_row, head, !s.complete},
                        queries, to, w);
            if (!s.complete) count(eviction, s, entry, head, w);
          });
    });
  }

  /// A sequence is empty.
  void forget(const state& s, int sequence) {
    std::fill_n(s.tokens + s.head_index(sequence, 0), s.heads.kv, 0);
    std::fill_n(s.attended_count + s.head_index(sequence, 0), s.heads.kv, 0);
  }

 private:
  struct scratch {
    float* block = nullptr;         // of attend_slice
    float* query = nullptr;         // (group, head_dim), scaled
    log_sum_exp* mass = nullptr;    // (group)
    float* weighted = nullptr;      // (group, head_dim)
    float* lse = nullptr;           // (group)
    float* scores = nullptr;        // (group, score_stride)
    float* shares = nullptr;        // (score_stride)
    float* votes = nullptr;         // (score_stride)
    std::uint64_t* keys = nullptr;  // (units of a prompt)
  };
  /// One KV head of one row of a step, and what it attends to.
  struct row_of_head {
    head_slice<element> slice;
    int tokens = 0;
    int row = 0;
    int head = 0;
    bool counts = false;  // its scores are wanted
  };

  static constexpr std::size_t index(int n) { return static_cast<std::size_t>(n); }
  /// The most tokens that shares are wanted of, and units that a prompt has.
  static int longest(const Settings& s) {
    return resolve(s.eviction, [&](const auto& eviction) {
      return std::max(std::min(eviction.capacity(s.limits()), s.max_tokens()), s.max_prompt) +
             eviction.unit_tokens();
    });
  }
  isa instructions() const { return backend_->options().instructions; }
  eviction_moment moment(const eviction_entry& entry, int tokens, bool prompt_ends) const {
    return {settings_->budget, entry.prompt, tokens, prompt_ends};
  }

  template <class In>
  static void put(const head_slice<element>& to, int at, const kv_rows<In>& rows, std::ptrdiff_t from) {
    const auto copy = [&](element* row, const In* source) {
      if constexpr (std::is_same_v<In, element>)
        std::memcpy(row, source, d * sizeof(element));
      else
        for (int i = 0; i < d; ++i) row[i] = from_float<element>(source[i]);
    };
    copy(to.key + at * to.stride, rows.keys.data() + from * d);
    copy(to.value + at * to.stride, rows.values.data() + from * d);
  }

  template <class In>
  void append_prompt(const state& s, const eviction_entry& entry, int head, const kv_rows<In>& rows) const {
    const auto to = s.complete ? s.slice(entry.sequence, head) : s.prompt_slice(entry, head);
    for (int row = 0; row < entry.tokens; ++row)
      put(to, entry.before + row, rows, (std::ptrdiff_t{entry.first_row} + row) * s.heads.kv + head);
    if (s.complete || s.staged_rows == 0)
      s.tokens[s.head_index(entry.sequence, head)] = entry.before + entry.tokens;
  }

  template <class Eviction, class In>
  void append_decoded(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                      const kv_rows<In>& rows) const {
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    put(s.slice(entry.sequence, head), tokens, rows, std::ptrdiff_t{entry.first_row} * s.heads.kv + head);
    if (!s.complete) {
      const int unit = tokens / s.unit_tokens;
      if (tokens % s.unit_tokens == 0)
        s.first_token[s.unit_index(entry.sequence, head) + index(unit)] = entry.before;
      eviction.on_append(s.template states_of<Eviction>(entry.sequence, head)[unit], entry.before);
    }
    ++tokens;
  }

  /// A KV head's group attends to the first `tokens` rows of a slice.
  void attend_rows(const state& s, const float* queries, const head_slice<const element>& slice, int tokens,
                   const attention_part& part, const scratch& w) const {
    const int group = s.heads.group();
    begin_attention<d>(instructions(), queries, s.scale, group, w.query, part);
    attend_slice<d>(instructions(), {w.query, group, d}, slice, tokens, part, w.block);
  }

  /// Leaves the scores, where they are wanted, and the natural log-sum-exp in the scratch.
  void attend_head(const state& s, const row_of_head& at, const float* queries, const attention_output& to,
                   const scratch& w) const {
    const int group = s.heads.group();
    const std::ptrdiff_t first = (std::ptrdiff_t{at.row} * s.heads.kv + at.head) * group;
    const attention_part part{w.mass, w.weighted, at.counts ? w.scores : nullptr, score_stride_};
    attend_rows(s, queries + first * d, as_const(at.slice), at.tokens, part, w);
    finish_attention<d>(instructions(), nullptr, part, group, to.out + first * d, w.lse);
    for (int g = 0; to.lse != nullptr && g < group; ++g) to.lse[first + g] = w.lse[g] * to.lse_unit;
  }

  /// Adds to `votes` what a prompt row's attention has on each token up to itself.
  void vote(const state& s, const eviction_entry& entry, int head, int token, const float* queries,
            float* votes, const scratch& w) const {
    const int group = s.heads.group(), tokens = token + 1;
    attend_rows(s, queries, as_const(s.prompt_slice(entry, head)), tokens,
                {w.mass, nullptr, w.scores, score_stride_}, w);
    for (int g = 0; g < group; ++g) w.lse[g] = w.mass[g].value();
    with_team(instructions(), [&](auto team) {
      mean_shares(team, {w.scores, score_stride_, w.lse, group}, tokens, w.shares);
    });
    for (int t = 0; t < tokens; ++t) votes[t] += w.shares[t];
  }

  /// Observes a prompt chunk: all its rows vote at once, or the last ones' queries are kept.
  template <class Eviction>
  void observe(const Eviction& eviction, const state& s, const eviction_entry& entry, const float* queries) {
    const int group = s.heads.group(), end = entry.before + entry.tokens;
    const auto query = [&](int token, int head) {
      return queries + (std::ptrdiff_t{token - entry.before} * s.heads.kv + head) * group * d;
    };
    if (eviction.observed_rows() != every_prompt_row) {
      for (int token = std::max(entry.before, end - s.kept_queries); token < end; ++token)
        for (int head = 0; head < s.heads.kv; ++head)
          std::memcpy(s.kept_query(entry, token, head), query(token, head), index(group * d) * sizeof(float));
      return;
    }
    const std::size_t bytes = index(s.heads.kv * d) * index(end) * index(entry.tokens) * sizeof(element);
    backend_->parallel(s.heads.kv, bytes, [&](int head, int worker) {
      float* const votes = s.votes_of(entry, head);
      std::fill(votes + entry.before, votes + end, 0.0f);
      for (int token = entry.before; token < end; ++token)
        vote(s, entry, head, token, query(token, head), votes, scratch_[index(worker)]);
    });
  }

  /// Larger for what stays longer; all that is protected is above.
  template <class Eviction>
  static std::uint64_t rank(const Eviction& eviction, const typename Eviction::unit_state& unit,
                            int first_token, const eviction_moment& at) {
    if (eviction.protects(first_token, at))
      return ~std::uint64_t{0} << 32 | static_cast<std::uint32_t>(first_token);
    const std::uint32_t worth = std::min(eviction.worth(unit), ~std::uint32_t{0} - 1);
    return std::uint64_t{worth} << 32 | static_cast<std::uint32_t>(first_token);
  }

  /// Cuts a prompt to what the head keeps of it, in the order of the text.
  template <class Eviction>
  void end_prompt(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                  const scratch& w) const {
    if (s.complete || entry.prompt == 0) return;
    const int u = s.unit_tokens, all = (entry.prompt + u - 1) / u;
    const eviction_moment at = moment(entry, entry.prompt, true);
    const int kept = std::min(all, eviction.kept(at) / u);
    prompt_votes votes{w.votes, entry.prompt};
    if (eviction.observed_rows() == every_prompt_row) {
      votes.shares = s.votes_of(entry, head);
    } else if (eviction.observed_rows() > 0 && kept < all) {
      std::fill_n(w.votes, entry.prompt, 0.0f);
      for (int token = std::max(0, entry.prompt - s.kept_queries); token < entry.prompt; ++token)
        vote(s, entry, head, token, s.kept_query(entry, token, head), w.votes, w);
    } else {
      std::fill_n(w.votes, entry.prompt, 0.0f);
    }
    const auto unit_at = [&](int unit) {
      typename Eviction::unit_state made{};
      eviction.on_append(made, std::min((unit + 1) * u, entry.prompt) - 1);
      eviction.on_prompt(made, votes, unit * u);
      return made;
    };
    for (int unit = 0; unit < all; ++unit) w.keys[unit] = rank(eviction, unit_at(unit), unit * u, at);
    std::nth_element(w.keys, w.keys + (all - kept), w.keys + all);
    std::uint64_t* const best = w.keys + (all - kept);
    const auto number = [](std::uint64_t key) { return static_cast<std::int32_t>(key & 0xffffffffu); };
    std::sort(best, best + kept, [&](std::uint64_t a, std::uint64_t b) { return number(a) < number(b); });

    const auto from = as_const(s.prompt_slice(entry, head));
    const auto to = s.slice(entry.sequence, head);
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    tokens = 0;
    for (int i = 0; i < kept; ++i) {
      const int first = number(best[i]), length = std::min(u, entry.prompt - first);
      if (s.staged_rows > 0) copy_slice<d>(at_row(from, first), at_row(to, i * u), length);
      s.first_token[s.unit_index(entry.sequence, head) + index(i)] = first;
      states[i] = unit_at(first / u);
      tokens += length;
    }
  }

  template <class Element>
  static head_slice<Element> at_row(const head_slice<Element>& slice, int row) {
    return {slice.key + row * slice.stride, slice.value + row * slice.stride, slice.stride};
  }

  /// After a decode row has attended: its shares on the units, and who leaves.
  template <class Eviction>
  void count(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
             const scratch& w) const {
    const int u = s.unit_tokens, row = entry.before;
    const std::size_t first = s.unit_index(entry.sequence, head),
                      at_head = s.head_index(entry.sequence, head);
    std::int32_t& tokens = s.tokens[at_head];
    const int units = (tokens + u - 1) / u;
    with_team(instructions(), [&](auto team) {
      mean_shares(team, {w.scores, score_stride_, w.lse, s.heads.group()}, tokens, w.shares);
    });
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    for (int unit = 0; unit < units; ++unit) {
      float share = 0.0f;
      for (int t = unit * u; t < std::min((unit + 1) * u, tokens); ++t) share += w.shares[t];
      eviction.on_attended(states[unit], share, row);
      s.attended[first + index(unit)] = s.first_token[first + index(unit)] / u;
    }
    s.attended_count[at_head] = units;
    const eviction_moment at = moment(entry, row + 1, false);
    while ((tokens + u - 1) / u > eviction.kept(at) / u) evict(eviction, s, entry, head, at);
  }

  /// The unit of least rank leaves, but never one that is being filled. Its place is the last full one's, and
  /// that one's is the open one's: full units stay in front.
  template <class Eviction>
  void evict(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
             const eviction_moment& at) const {
    const int u = s.unit_tokens;
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    const int units = (tokens + u - 1) / u, open = tokens % u, full = open > 0 ? units - 1 : units;
    std::int32_t* const first_token = s.first_token + s.unit_index(entry.sequence, head);
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    int leaves = 0;
    std::uint64_t least = ~std::uint64_t{0};
    for (int unit = 0; unit < full; ++unit)
      if (const std::uint64_t key = rank(eviction, states[unit], first_token[unit], at); key < least)
        least = key, leaves = unit;
    const auto slice = s.slice(entry.sequence, head);
    const auto move = [&](int from, int to, int length) {
      if (from == to) return;
      copy_slice<d>(at_row(as_const(slice), from * u), at_row(slice, to * u), length);
      first_token[to] = first_token[from];
      states[to] = states[from];
    };
    move(full - 1, leaves, u);
    if (open > 0) move(full, full - 1, open);
    tokens -= u;
  }

  Backend* backend_;
  const Settings* settings_;
  std::int64_t score_stride_ = 0;
  std::vector<scratch> scratch_;
};

}  // namespace freekv::host
