// The stages of an evicting pipeline on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/attended_shares.hpp>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/merge_tokens.hpp>
#include <freekv/backend/host/thread_pool.hpp>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
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
    const auto [observed, units] = most_observed(s, most);
    const std::int64_t merged = merges_tokens_of(s) ? units : 0;
    for (int i = 0; i < backend.threads(); ++i)
      scratch_.push_back({.block = memory.take<float>(n(attention_scratch<d>)),
                          .query = memory.take<float>(n(group * d)),
                          .mass = memory.take<log_sum_exp>(n(group)),
                          .weighted = memory.take<float>(n(group * d)),
                          .lse = memory.take<float>(n(group)),
                          .scores = memory.take<float>(n(group * score_stride_)),
                          .shares = memory.take<float>(n(score_stride_)),
                          .votes = memory.take<float>(n(score_stride_)),
                          .keys = memory.take<std::uint64_t>(n(most)),
                          .numbers = memory.take<float>(n(observed * score_stride_)),
                          .transformed = memory.take<float>(n(observed * score_stride_)),
                          .counts = memory.take<std::int32_t>(n(2 * observed)),
                          .unit_keys = memory.take<float>(n(sees_keys(s) || merged > 0 ? units * d : 0)),
                          .worths = memory.take<float>(n(units)),
                          .order = memory.take<std::int32_t>(n(units)),
                          .tokens = memory.take<std::int32_t>(n(units)),
                          .places = memory.take<std::int32_t>(n(units)),
                          .log_weights = memory.take<float>(n(merged)),
                          .merge = {.lengths = memory.take<double>(n(merged)),
                                    .fates = memory.take<merge_fate>(n(merged)),
                                    .next = memory.take<std::int32_t>(n(merged)),
                                    .logits = memory.take<double>(n(merged)),
                                    .sums = memory.take<double>(n(merged > 0 ? 2 * d : 0))}});
    resolve(s.eviction, [&]<class E>(const E&) {
      if constexpr (allocates<E>) {
        const std::int64_t heads = std::int64_t{s.layers - s.complete_layers()} * s.kv_heads;
        statistics_ = memory.take<std::byte>(n(heads) * sizeof(typename E::statistic));
        head_budgets_ = memory.take<int>(n(heads));
      }
    });
  }

  /// When a prompt ends, before any layer is cut: what each head is to have.
  void allocate(const std::vector<state>& layers, const eviction_entry& entry) {
    resolve(settings_->eviction, [&]<class E>(const E& eviction) {
      if constexpr (allocates<E>) give_budgets(eviction, layers, entry);
    });
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
      backend_->parallel(s.heads.kv, row_bytes(std::min(s.rows, entry.before + 1)),
                         [&](int head, int worker) {
                           const scratch& w = scratch_[index(worker)];
                           const int tokens = s.tokens[s.head_index(entry.sequence, head)];
                           attend_head(s,
                                       {s.slice(entry.sequence, head), tokens, entry.first_row, head,
                                        !s.complete, s.log_weights(entry.sequence, head)},
                                       queries, to, w);
                           if (!s.complete) count(eviction, s, entry, head, queries, w);
                         });
    });
  }

  /// A sequence is empty.
  void forget(const state& s, int sequence) {
    std::fill_n(s.tokens + s.head_index(sequence, 0), s.heads.kv, 0);
    std::fill_n(s.attended_count + s.head_index(sequence, 0), s.heads.kv, 0);
    if (s.complete) return;
    resolve(settings_->eviction, [&]<class E>(const E&) {
      if constexpr (merges<E>)
        for (int head = 0; head < s.heads.kv; ++head) s.template memory_of<E>(sequence, head) = {};
    });
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
    // Policies that observe or merge have these as well.
    float* numbers = nullptr;        // (rows, score_stride)
    float* transformed = nullptr;    // (rows, score_stride)
    std::int32_t* counts = nullptr;  // (rows, 2)
    float* unit_keys = nullptr;      // (units, head_dim), of one that sees keys
    float* worths = nullptr;         // (units): in the order of the text
    std::int32_t* order = nullptr;   // (units): places, in the order of the text
    std::int32_t* tokens = nullptr;  // (units): numbers in the sequence, ascending
    std::int32_t* places = nullptr;  // (units): of those that stay, then of those that leave
    float* log_weights = nullptr;    // (units): of a prompt's tokens
    merge_scratch merge;
  };
  /// One KV head of one row of a step, and what it attends to.
  struct row_of_head {
    head_slice<element> slice;
    int tokens = 0;
    int row = 0;
    int head = 0;
    bool counts = false;                 // its scores are wanted
    const float* log_weights = nullptr;  // (tokens), or null
  };

  static constexpr std::size_t index(int n) { return static_cast<std::size_t>(n); }
  /// The most tokens that shares are wanted of, and units that a prompt has.
  static int longest(const Settings& s) {
    return resolve(s.eviction, [&]<class E>(const E& eviction) {
      int most = allocates<E> ? s.max_tokens() : s.max_prompt;
      for (int layer = s.complete_layers(); layer < s.layers; ++layer)
        most = std::max(most, std::min(eviction.capacity(s.limits(layer)), s.max_tokens()));
      return most + eviction.unit_tokens();
    });
  }
  /// Rows that a policy observes at a time, and units that it sees then.
  static std::pair<std::int64_t, std::int64_t> most_observed(const Settings& s, int most) {
    return resolve(s.eviction, [&]<class E>(const E& eviction) -> std::pair<std::int64_t, std::int64_t> {
      if constexpr (observes<E>)
        return {std::int64_t{std::min(eviction.observed_rows(), s.max_tokens())} *
                    rows_of(eviction, s.query_heads / s.kv_heads),
                most};
      else
        return {0, merges<E> ? most : 0};
    });
  }
  static bool merges_tokens_of(const Settings& s) {
    return resolve(s.eviction, []<class E>(const E&) { return merges<E>; });
  }
  static bool sees_keys(const Settings& s) {
    return resolve(s.eviction, [&]<class E>(const E& eviction) {
      if constexpr (hooks_of<E>::has(hook::sees_keys)) return eviction.sees_keys();
      return false;
    });
  }
  /// Rows of numbers that a row's group of query heads has.
  template <class Eviction>
  static int rows_of(const Eviction& eviction, int group) {
    return eviction.group() == group_rule::each ? group : 1;
  }
  isa instructions() const { return backend_->options().instructions; }
  /// When `held` tokens of a sequence of `tokens` are there.
  eviction_moment moment(const state& s, const eviction_entry& entry, int head, int tokens, int held) const {
    const int budget =
        s.budgets == nullptr ? settings_->budget : s.budgets[s.head_index(entry.sequence, head)].budget;
    return {budget, entry.prompt, tokens, false, held, s.place, s.places, head};
  }

  eviction_moment end_of_prompt(const state& s, const eviction_entry& entry, int head) const {
    eviction_moment at = moment(s, entry, head, entry.prompt, entry.prompt);
    at.prompt_ends = true;
    return at;
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
    if (s.keeps_decoded) {
      const int group = s.heads.group() * d;
      std::memcpy(s.kept_query(entry, entry.before, head),
                  rows.queries.data() + (std::ptrdiff_t{entry.first_row} * s.heads.kv + head) * group,
                  index(group) * sizeof(float));
    }
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    put(s.slice(entry.sequence, head), tokens, rows, std::ptrdiff_t{entry.first_row} * s.heads.kv + head);
    if (!s.complete) {
      const int unit = tokens / s.unit_tokens;
      if (tokens % s.unit_tokens == 0) s.first_tokens(entry.sequence, head)[unit] = entry.before;
      if (float* const weights = s.log_weights(entry.sequence, head)) weights[unit] = 0.0f;
      if constexpr (!observes<Eviction>)
        eviction.on_append(s.template states_of<Eviction>(entry.sequence, head)[unit], entry.before);
    }
    ++tokens;
  }

  /// A KV head's group attends to the first `tokens` rows of a slice.
  void attend_rows(const state& s, const float* queries, const head_slice<const element>& slice, int tokens,
                   const attention_part& part, const scratch& w, const float* log_weights = nullptr) const {
    const int group = s.heads.group();
    begin_attention<d>(instructions(), queries, s.scale, group, w.query, part);
    attend_slice<d, element>(instructions(), {w.query, group, d}, slice, tokens, part, w.block, 0.0f, nullptr,
                             log_weights);
  }

  /// Leaves the scores, where they are wanted, and the natural log-sum-exp in the scratch.
  void attend_head(const state& s, const row_of_head& at, const float* queries, const attention_output& to,
                   const scratch& w) const {
    const int group = s.heads.group();
    const std::ptrdiff_t first = (std::ptrdiff_t{at.row} * s.heads.kv + at.head) * group;
    const attention_part part{w.mass, w.weighted, at.counts ? w.scores : nullptr, score_stride_};
    attend_rows(s, queries + first * d, as_const(at.slice), at.tokens, part, w, at.log_weights);
    finish_attention<d>(instructions(), nullptr, part, group, to.floats() + first * d, w.lse);
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
  static std::uint64_t rank(const Eviction& eviction, std::uint32_t worth, int first_token,
                            const eviction_moment& at) {
    if (eviction.protects(first_token, at))
      return ~std::uint64_t{0} << 32 | static_cast<std::uint32_t>(first_token);
    worth = std::min(worth, ~std::uint32_t{0} - 1);
    return std::uint64_t{worth} << 32 | static_cast<std::uint32_t>(first_token);
  }

  /// Scores of a row of token `row`, by place, in the order of the text; -infinity behind the row.
  static void put_in_order(const scratch& w, const float* scores, int units, int row, float* to) {
    for (int i = 0; i < units; ++i) to[i] = w.tokens[i] <= row ? scores[w.order[i]] : -infinity;
  }
  /// Makes scores their shares; all 0 where any is NaN.
  void make_shares(float* scores, int units) const {
    log_sum_exp mass;
    for (int i = 0; i < units; ++i) mass.add(scores[i]);
    const float lse = mass.value();
    with_team(instructions(), [&](auto team) {
      mean_shares(team, {scores, score_stride_, &lse, 1}, units, scores);
    });
  }

  /// Keys of the rows at `places`, one behind the other.
  void load_keys(const head_slice<element>& slice, const std::int32_t* places, int count, float* keys) const {
    with_team(instructions(), [&](auto team) {
      for (int i = 0; i < count; ++i)
        for (int x = 0; x < d; x += decltype(team)::width)
          team.store(keys + i * d + x, team.load(slice.key + places[i] * slice.stride + x));
    });
  }

  /// Numbers that the last rows have of the units of `slice`; `w.order` has their places, `w.tokens` their tokens.
  template <class Eviction>
  observed_units see(const Eviction& eviction, const state& s, const eviction_entry& entry,
                     const head_slice<element>& slice, const float* log_weights, int units,
                     const eviction_moment& at, const scratch& w) const {
    const int group = s.heads.group(), heads = rows_of(eviction, group);
    const int first = std::max(0, at.tokens - s.kept_queries), rows = (at.tokens - first) * heads;
    const observed_units seen{units,         w.tokens, rows,        heads, w.numbers,
                              w.transformed, w.counts, w.unit_keys, d,     score_stride_};
    if (sees_keys(*settings_)) load_keys(slice, w.order, units, w.unit_keys);
    for (int row = first; row < at.tokens; ++row) {
      attend_rows(s, s.kept_query(entry, row, at.head), as_const(slice), units,
                  {w.mass, nullptr, w.scores, score_stride_}, w, log_weights);
      float* const to = seen.row((row - first) * heads);
      if (eviction.group() == group_rule::largest_score) {
        std::fill_n(to, units, -infinity);
        for (int g = 0; g < group; ++g) {
          put_in_order(w, w.scores + g * score_stride_, units, row, w.shares);
          for (int i = 0; i < units; ++i) to[i] = std::max(to[i], w.shares[i]);  // no NaN
        }
        continue;
      }
      for (int g = 0; g < group; ++g) {
        put_in_order(w, w.scores + g * score_stride_, units, row, to + g * score_stride_);
        make_shares(to + g * score_stride_, units);
      }
    }
    return seen;
  }
  /// Numbers that the last rows of a prompt that ends have of its tokens.
  template <class Eviction>
  observed_units see_prompt(const Eviction& eviction, const state& s, const eviction_entry& entry,
                            const eviction_moment& at, const scratch& w) const {
    for (int token = 0; token < entry.prompt; ++token) w.order[token] = w.tokens[token] = token;
    return see(eviction, s, entry, s.prompt_slice(entry, at.head), nullptr, entry.prompt, at, w);
  }

  template <class Eviction>
  void give_budgets(const Eviction& eviction, const std::vector<state>& layers, const eviction_entry& entry) {
    const int kv_heads = settings_->kv_heads, first = settings_->complete_layers(),
              heads = (settings_->layers - first) * kv_heads;
    auto* const statistics = reinterpret_cast<typename Eviction::statistic*>(statistics_);
    std::fill_n(head_budgets_, heads, settings_->budget);
    if (entry.prompt > settings_->budget) {
      const std::size_t bytes =
          index(heads * d) * index(entry.prompt) * index(eviction.observed_rows()) * sizeof(element);
      backend_->parallel(heads, bytes, [&](int unit, int worker) {
        const state& s = layers[index(first + unit / kv_heads)];
        const eviction_moment at = end_of_prompt(s, entry, unit % kv_heads);
        statistics[unit] = eviction.measure(see_prompt(eviction, s, entry, at, scratch_[index(worker)]), at);
      });
      eviction.allocate(statistics, {heads / kv_heads, kv_heads, settings_->budget, entry.prompt},
                        head_budgets_);
    }
    std::int64_t left = std::int64_t{heads} * settings_->budget, rows_of_all = 0;
    for (int unit = 0; unit < heads; ++unit)
      rows_of_all +=
          std::min(eviction.capacity(settings_->limits(first + unit / kv_heads)), settings_->max_tokens());
    std::int64_t row = rows_of_all * entry.sequence;
    for (int unit = 0; unit < heads; ++unit) {
      const state& s = layers[index(first + unit / kv_heads)];
      const int budget = static_cast<int>(std::clamp<std::int64_t>(head_budgets_[unit], 0, left));
      const int behind =
          eviction.capacity(settings_->limits(s.layer)) - settings_->budget;  // of decoded tokens
      const int rows = std::min(budget + behind, settings_->max_tokens());
      s.budgets[s.head_index(entry.sequence, unit % kv_heads)] = {row, rows, budget};
      left -= budget;
      row += rows;
    }
  }

  /// Cuts a prompt to what the head keeps of it, in the order of the text.
  template <class Eviction>
  void end_prompt(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                  const scratch& w) const {
    if (s.complete || entry.prompt == 0) return;
    const int u = s.unit_tokens, all = (entry.prompt + u - 1) / u;
    const eviction_moment at = end_of_prompt(s, entry, head);
    int kept = std::min(all, eviction.kept(at) / u);
    prompt_votes votes{w.votes, entry.prompt};
    if constexpr (observes<Eviction>) {
      if (kept < all) {
        kept = std::min(kept, eviction.observe(see_prompt(eviction, s, entry, at, w), at, w.worths));
      } else {
        std::fill_n(w.worths, all, 0.0f);
      }
    } else if (eviction.observed_rows() == every_prompt_row) {
      votes.shares = s.votes_of(entry, head);
    } else if (eviction.observed_rows() > 0 && kept < all) {
      std::fill_n(w.votes, entry.prompt, 0.0f);
      for (int token = std::max(0, entry.prompt - s.kept_queries); token < entry.prompt; ++token)
        vote(s, entry, head, token, s.kept_query(entry, token, head), w.votes, w);
    } else {
      std::fill_n(w.votes, entry.prompt, 0.0f);
    }
    const auto make = [&]([[maybe_unused]] auto& made, [[maybe_unused]] int unit) {
      if constexpr (!observes<Eviction>) {
        eviction.on_append(made, std::min((unit + 1) * u, entry.prompt) - 1);
        eviction.on_prompt(made, votes, unit * u);
      }
    };
    const auto worth_of = [&](int unit) {
      if constexpr (observes<Eviction>) {
        return order_bits(w.worths[unit]);
      } else {
        typename Eviction::unit_state made{};
        make(made, unit);
        return eviction.worth(made);
      }
    };
    for (int unit = 0; unit < all; ++unit) w.keys[unit] = rank(eviction, worth_of(unit), unit * u, at);
    std::nth_element(w.keys, w.keys + (all - kept), w.keys + all);
    std::uint64_t* const best = w.keys + (all - kept);
    const auto number = [](std::uint64_t key) { return static_cast<std::int32_t>(key & 0xffffffffu); };
    std::sort(best, best + kept, [&](std::uint64_t a, std::uint64_t b) { return number(a) < number(b); });

    float* const log_weights = s.log_weights(entry.sequence, head);
    if constexpr (merges<Eviction>) {
      std::transform(best, best + kept, w.places, number);
      std::transform(w.keys, best, w.places + kept, number);
      std::sort(w.places + kept, w.places + all);
      std::fill_n(w.log_weights, all, 0.0f);
      const bool by_row = eviction.merge_by() == merge_rule::as_last_row;
      if (kept < all)
        merge(eviction, s, entry, s.prompt_slice(entry, head), nullptr,
              log_weights == nullptr ? nullptr : w.log_weights, kept, all - kept, at,
              by_row ? s.kept_query(entry, entry.prompt - 1, head) : nullptr, w);
    }
    const auto from = as_const(s.prompt_slice(entry, head));
    const auto to = s.slice(entry.sequence, head);
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    tokens = 0;
    for (int i = 0; i < kept; ++i) {
      const int first = number(best[i]), length = std::min(u, entry.prompt - first);
      if (s.staged_rows > 0) copy_slice<d>(at_row(from, first), at_row(to, i * u), length);
      s.first_tokens(entry.sequence, head)[i] = first;
      if (log_weights != nullptr) log_weights[i] = w.log_weights[first];
      if constexpr (!observes<Eviction>)
        make(s.template states_of<Eviction>(entry.sequence, head)[i] = {}, first / u);
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
             const float* queries, const scratch& w) const {
    const int u = s.unit_tokens, row = entry.before;
    const std::size_t first = s.unit_index(entry.sequence, head),
                      at_head = s.head_index(entry.sequence, head);
    std::int32_t& tokens = s.tokens[at_head];
    const int units = (tokens + u - 1) / u;
    for (int unit = 0; unit < units; ++unit)
      s.attended[first + index(unit)] = s.first_tokens(entry.sequence, head)[unit] / u;
    s.attended_count[at_head] = units;
    const eviction_moment at = moment(s, entry, head, row + 1, tokens);
    const float* const query =
        queries + (std::ptrdiff_t{entry.first_row} * s.heads.kv + head) * s.heads.group() * d;
    if constexpr (observes<Eviction>) {
      if (s.keeps_decoded && tokens > eviction.kept(at)) compact(eviction, s, entry, head, at, query, w);
    } else {
      with_team(instructions(), [&](auto team) {
        mean_shares(team, {w.scores, score_stride_, w.lse, s.heads.group()}, tokens, w.shares);
      });
      auto* const states = s.template states_of<Eviction>(entry.sequence, head);
      for (int unit = 0; unit < units; ++unit) {
        float share = 0.0f;
        for (int t = unit * u; t < std::min((unit + 1) * u, tokens); ++t) share += w.shares[t];
        eviction.on_attended(states[unit], share, row);
      }
      if constexpr (merges<Eviction>) {
        if (tokens > eviction.kept(at)) merge_away(eviction, s, entry, head, at, query, w);
      } else {
        while ((tokens + u - 1) / u > eviction.kept(at) / u) evict(eviction, s, entry, head, at);
      }
    }
  }

  /// Places of a KV head's units and their tokens, in the order of the text.
  void order_by_text(const std::int32_t* first_token, int units, const scratch& w) const {
    std::iota(w.order, w.order + units, 0);
    std::sort(w.order, w.order + units, [&](int a, int b) { return first_token[a] < first_token[b]; });
    for (int i = 0; i < units; ++i) w.tokens[i] = first_token[w.order[i]];
  }
  /// Parts places in the order of the text: the `kept` of most `rank_at(i)` first.
  template <class Rank>
  static void part_places(int units, int kept, const Rank& rank_at, const scratch& w) {
    for (int i = 0; i < units; ++i) w.keys[i] = rank_at(i);
    std::nth_element(w.keys, w.keys + (units - kept), w.keys + units);
    int placed = 0;
    for (const bool stays : {true, false})
      for (int i = 0; i < units; ++i)
        if ((kept > 0 && rank_at(i) >= w.keys[units - kept]) == stays) w.places[placed++] = w.order[i];
  }

  /// Tokens of `slice` that leave merge into those that stay, by `w.places`. `first_token` is by place, null where places
  /// are tokens; `log_weights` by place, or null.
  template <class Eviction>
  void merge(const Eviction& eviction, const state& s, const eviction_entry& entry,
             const head_slice<element>& slice, const std::int32_t* first_token, float* log_weights,
             int staying, int leaving, const eviction_moment& at, const float* query,
             const scratch& w) const {
    const int all = staying + leaving;
    const auto product = exact_product_of(instructions());
    load_keys(slice, w.places, all, w.unit_keys);
    for (int i = 0; i < all; ++i) {
      const float* const key = w.unit_keys + i * d;
      w.tokens[i] = first_token == nullptr ? w.places[i] : first_token[w.places[i]];
      w.merge.lengths[i] = std::sqrt(product(key, key, d));
      w.merge.fates[i] = {};
    }
    const merging_tokens of{staying, leaving, w.tokens, w.unit_keys, w.merge.lengths, d, product};
    eviction.merge(of, at, s.template memory_of<Eviction>(entry.sequence, at.head), w.merge.fates);
    token_merger<d, element>{of,
                             slice,
                             w.places,
                             log_weights,
                             eviction.merge_by(),
                             query,
                             s.heads.group(),
                             static_cast<double>(s.scale),
                             w.merge}
        .merge_all();
  }

  /// All at once the units leave that are not kept, and merge into the others; the last ones take their places.
  template <class Eviction>
  void merge_away(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                  const eviction_moment& at, const float* query, const scratch& w) const {
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    float* const log_weights = s.log_weights(entry.sequence, head);
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    const auto slice = s.slice(entry.sequence, head);
    const int all = tokens, kept = eviction.kept(at);
    order_by_text(first_token, all, w);
    part_places(
        all, kept, [&](int i) { return rank(eviction, eviction.worth(states[w.order[i]]), w.tokens[i], at); },
        w);
    merge(eviction, s, entry, slice, first_token, log_weights, kept, all - kept, at, query, w);
    std::sort(w.places + kept, w.places + all, std::greater<std::int32_t>());
    for (int i = kept; i < all; ++i) {
      const int to = w.places[i], from = --tokens;
      if (from == to) continue;
      copy_slice<d>(at_row(as_const(slice), from), at_row(slice, to), 1);
      first_token[to] = first_token[from];
      states[to] = states[from];
      if (log_weights != nullptr) log_weights[to] = log_weights[from];
    }
  }

  /// All at once those leave that an observing policy does not keep; the others move up, in the order of their places.
  template <class Eviction>
  void compact(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
               const eviction_moment& at, const float* query, const scratch& w) const {
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    float* const log_weights = s.log_weights(entry.sequence, head);
    const auto slice = s.slice(entry.sequence, head);
    order_by_text(first_token, tokens, w);
    const int kept = std::min(
        {tokens, eviction.kept(at),
         eviction.observe(see(eviction, s, entry, slice, log_weights, tokens, at, w), at, w.worths)});
    part_places(
        tokens, kept, [&](int i) { return rank(eviction, order_bits(w.worths[i]), w.tokens[i], at); }, w);
    if constexpr (merges<Eviction>)
      merge(eviction, s, entry, slice, first_token, log_weights, kept, tokens - kept, at, query, w);
    std::sort(w.places, w.places + kept);
    for (int i = 0; i < kept; ++i) {
      const int from = w.places[i];
      if (from == i) continue;
      copy_slice<d>(at_row(as_const(slice), from), at_row(slice, i), 1);
      first_token[i] = first_token[from];
      if (log_weights != nullptr) log_weights[i] = log_weights[from];
    }
    tokens = kept;
  }

  /// The unit of least rank leaves, but never one that is being filled. Its place is the last full one's, and
  /// that one's is the open one's: full units stay in front.
  template <class Eviction>
  void evict(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
             const eviction_moment& at) const {
    const int u = s.unit_tokens;
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    const int units = (tokens + u - 1) / u, open = tokens % u, full = open > 0 ? units - 1 : units;
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    int leaves = 0;
    std::uint64_t least = ~std::uint64_t{0};
    for (int unit = 0; unit < full; ++unit)
      if (const std::uint64_t key = rank(eviction, eviction.worth(states[unit]), first_token[unit], at);
          key < least)
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
  std::byte* statistics_ = nullptr;  // (layers that forget, kv heads), of policies that allocate
  int* head_budgets_ = nullptr;      // the same
};

}  // namespace freekv::host
