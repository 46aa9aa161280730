// The arrays of each layer of an evicting pipeline.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/eviction_settings.hpp>
#include <freekv/pipeline/memory_bytes.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/layout.hpp>
#include <freekv/storage/memory.hpp>
#include <vector>

namespace freekv::detail {

/// One sequence's part of a step of an evicting pipeline: `tokens` rows behind `before`, the first of them
/// row `first_row` of the step.
struct eviction_entry {
  int sequence = 0;
  int staging = -1;  // where its prompt is staged; -1: nowhere
  int before = 0;
  int tokens = 0;
  int first_row = 0;
  int prompt = 0;  // tokens of the prompt so far
  int block = 0;   // first token of its block before, where it is cut by blocks
  bool decodes = false;
  bool ends_prompt = false;  // its first decode row
  bool behind = false;       // rows behind its prompt, which leave nothing
  constexpr row_span rows() const { return {first_row, tokens}; }
};

/// Rows of a pool that a KV head has, where heads keep different amounts, and its budget in tokens.
struct head_budget {
  std::int64_t first = 0;
  std::int32_t rows = 0, budget = 0;
};

/// One layer's memory and sizes; trivially copyable. A KV head's rows lie one behind the other: its units in
/// any order, all full but the last. Of a complete layer a row is a token, and there are no units.
template <class Shape>
struct eviction_state {
  using element = typename Shape::element_type;
  static constexpr int head_dim = Shape::head_dim;

  int layer = 0;
  bool complete = false;
  int place = 0, places = 1;  // of those that forget
  head_counts heads;
  float scale = 1.0f;
  int rows = 0;  // that a KV head has room for
  int unit_tokens = 1;
  int units = 0;  // that a KV head has room for; 0 in a complete layer
  /// (sequence, kv head, 2, rows, head_dim), or a pool's (rows, 2, head_dim): of this layer, or of all of
  /// them where a policy gives heads budgets. Where a policy demotes, (sequence, kv head, area): original
  /// tokens (2, head_dim) from an area's front on, coded ones from its end, so that whatever the number of
  /// each is, what is free lies between them
  element* kv = nullptr;
  head_budget* budgets = nullptr;  // (sequence, kv head): where the pool has what; null: no pool
  std::int64_t pool_rows = 0;      // of a sequence, where a pool is of all layers
  int staged_rows = 0;             // 0: prompts are in `kv` at once
  element* staged = nullptr;       // (staging, kv head, 2, staged_rows, head_dim)
  float* votes = nullptr;          // (staging, kv head, staged_rows): of all rows, where all are observed
  /// given ones of a prompt's tokens, where the policy takes them: (staging, kv head, worth_rows), or by
  /// sequence where prompts are not staged
  float* worths = nullptr;
  int worth_rows = 0;
  int kept_queries = 0;            // the last rows', where not all are observed
  bool keeps_decoded = false;      // decode rows' too: `queries` are a sequence's then, not a staging's
  bool cuts_blocks = false;        // of a prompt, which is in `kv` at once: the same
  float* queries = nullptr;        // (staging, kept_queries, query heads, head_dim)
  std::int32_t* probes = nullptr;  // (sequence): rows that observe its prompt from behind it, where some do
  std::size_t state_bytes = 0;     // of a unit
  std::byte* states = nullptr;     // (sequence, kv head, unit, state_bytes)
  std::int32_t* first_token = nullptr;  // (sequence, kv head, unit)
  float* log_weight = nullptr;          // (sequence, kv head, unit): added to scores; null: no token has one
  std::size_t memory_bytes = 0;         // of a head's memory, where a policy merges
  std::byte* memories = nullptr;        // (sequence, kv head, memory_bytes)
  std::int32_t* tokens = nullptr;       // (sequence, kv head): in `kv`
  // Where a policy demotes: numbers of elements of a head's area, bytes of a coded token, and how many of
  // `tokens` are coded, (sequence, kv head). What is known of original tokens lies at the front of a head's
  // units, of coded ones at the back, the first coded last.
  std::size_t area = 0, code_bytes = 0;
  std::int32_t* coded = nullptr;
  std::int32_t* attended_coded = nullptr;        // as `attended`, of them those that were coded
  std::int32_t* attended_coded_count = nullptr;  // (sequence, kv head)
  float* ratios = nullptr;                       // (sequence), where a policy rates layers
  /// (sequence, kv head, unit): numbers of the units that the last step attended to
  std::int32_t* attended = nullptr;
  std::int32_t* attended_count = nullptr;  // (sequence, kv head)

  constexpr std::size_t head_index(int sequence, int head) const {
    return to_size(sequence) * to_size(heads.kv) + to_size(head);
  }
  constexpr std::size_t unit_index(int sequence, int head) const {
    return head_index(sequence, head) * to_size(units);
  }
  /// The KV head's tokens; of one that has coded ones the original ones.
  head_slice<element> slice(int sequence, int head) const {
    if (coded != nullptr) {
      element* const first = kv + head_index(sequence, head) * area;
      return {first, first + head_dim, 2 * head_dim};
    }
    if (budgets == nullptr) return slice_at(kv, rows, head_index(sequence, head));
    const head_budget& of = budgets[head_index(sequence, head)];
    return slice_at(kv + of.first * 2 * head_dim, of.rows, 0);
  }
  int coded_of(int sequence, int head) const {
    return coded == nullptr ? 0 : coded[head_index(sequence, head)];
  }
  /// The bytes of a KV head's coded token.
  std::byte* code(int sequence, int head, int nth) const {
    auto* const end = reinterpret_cast<std::byte*>(kv + (head_index(sequence, head) + 1) * area);
    return end - to_size(nth + 1) * code_bytes;
  }
  /// The place of a KV head's unit in the order of attention, where a policy demotes: of tokens in all
  /// `whole` are original.
  int place_of(int nth, int whole) const { return nth < whole ? nth : units - 1 - (nth - whole); }
  /// The first tokens of a KV head's units.
  std::int32_t* first_tokens(int sequence, int head) const {
    return first_token + (budgets == nullptr ? static_cast<std::ptrdiff_t>(unit_index(sequence, head))
                                             : budgets[head_index(sequence, head)].first);
  }
  /// The log-weights of a KV head's units, or null.
  float* log_weights(int sequence, int head) const {
    return log_weight == nullptr ? nullptr : log_weight + unit_index(sequence, head);
  }
  /// The memory that a policy which merges has of a KV head.
  template <class Eviction>
  typename Eviction::head_memory& memory_of(int sequence, int head) const {
    return *reinterpret_cast<typename Eviction::head_memory*>(memories +
                                                              head_index(sequence, head) * memory_bytes);
  }
  /// The rows of a prompt of KV head `head`, which are kept until the prompt ends.
  head_slice<element> prompt_slice(const eviction_entry& entry, int head) const {
    return staged_rows == 0 ? slice(entry.sequence, head)
                            : slice_at(staged, staged_rows, head_index(entry.staging, head));
  }
  float* votes_of(const eviction_entry& entry, int head) const {
    return votes + head_index(entry.staging, head) * to_size(staged_rows);
  }
  /// The worths that were given for a prompt's tokens of a KV head.
  float* worths_of(const eviction_entry& entry, int head) const {
    return worths + head_index(staged_rows == 0 ? entry.sequence : entry.staging, head) * to_size(worth_rows);
  }
  float* kept_query(const eviction_entry& entry, int token, int head) const {
    const int row = (by_sequence() ? entry.sequence : entry.staging) * kept_queries + token % kept_queries;
    return queries + (to_size(row) * to_size(heads.kv) + to_size(head)) * to_size(heads.group() * head_dim);
  }
  /// True where queries are kept for each sequence.
  bool by_sequence() const { return keeps_decoded || cuts_blocks; }
  /// Tokens that a row of a prompt attends to, of those that a KV head has of it, the entry's rows among
  /// them.
  int attended_by(const eviction_entry& entry, int head, int row) const {
    const int all = complete || !cuts_blocks ? entry.prompt : tokens[head_index(entry.sequence, head)];
    return entry.behind ? all : all - entry.tokens + row + 1;
  }
  /// End of the rows that observe a prompt which ends: the prompt's, or that of the probes behind it.
  int observed_end(const eviction_entry& entry) const { return entry.prompt + probes[entry.sequence]; }
  /// The states of a KV head's units.
  template <class Eviction>
  typename Eviction::unit_state* states_of(int sequence, int head) const {
    return reinterpret_cast<typename Eviction::unit_state*>(states +
                                                            unit_index(sequence, head) * state_bytes);
  }

 private:
  static head_slice<element> slice_at(element* base, int rows, std::size_t head) {
    const std::size_t plane = to_size(rows) * head_dim;
    return {base + head * 2 * plane, base + (head * 2 + 1) * plane, head_dim};
  }
};

/// All arrays of an evicting pipeline, carved from a block of slow memory, which complete layers alone take,
/// and one of fast memory; with null blocks they are only counted, by the same code.
template <class Shape, class Eviction, class Stages>
class eviction_memory {
 public:
  using state = eviction_state<Shape>;
  template <class Backend>
  eviction_memory(const eviction_settings<Eviction>& s, Backend& backend, std::byte* slow_block,
                  std::byte* fast_block)
      : eviction_memory(s, backend, carver(slow_block), carver(fast_block)) {}

  memory_bytes bytes;
  std::vector<state> layers;
  std::uint8_t* no_flags = nullptr;            // (kv head) zeros, for reports
  std::int32_t* no_counts = nullptr;           // (kv head) zeros
  std::size_t slow_bytes = 0, fast_bytes = 0;  // of the blocks
  Stages stages;

 private:
  template <class Backend>
  eviction_memory(const eviction_settings<Eviction>& s, Backend& backend, carver slow, carver fast)
      : layers(layers_of(s, slow, fast)),
        no_flags(fast.take<std::uint8_t>(to_size(s.model.kv_heads))),
        no_counts(fast.take<std::int32_t>(to_size(s.model.kv_heads))),
        stages(backend, s, fast) {
    bytes.store = bytes.complete = slow_bytes = slow.used();
    fast_bytes = fast.used();
    bytes.state = fast_bytes - bytes.slots - bytes.staging;
  }

  std::vector<state> layers_of(const eviction_settings<Eviction>& s, carver& slow, carver& fast) {
    std::vector<state> made;
    for (int layer = 0; layer < s.model.layers; ++layer) made.push_back(layer_of(s, layer, slow, fast));
    resolve(s.eviction, [&]<class E>(const E& eviction) {
      if constexpr (allocates<E>) share_pool(s, eviction, made, fast);
    });
    return made;
  }

  /// Rows of all heads and layers that forget, one pool for each sequence.
  template <class E>
  void share_pool(const eviction_settings<Eviction>& s, const E& eviction, std::vector<state>& made,
                  carver& fast) {
    std::int64_t rows = 0;
    for (const state& l : made)
      if (!l.complete)
        rows +=
            std::int64_t{s.model.kv_heads} * std::min(eviction.capacity(s.limits(l.layer)), s.max_tokens());
    const std::size_t before = fast.used();
    auto* const kv = fast.take<typename state::element>(to_size(s.capacity.max_sequences) * to_size(rows) *
                                                        2 * state::head_dim);
    bytes.slots += fast.used() - before;
    auto* const first_token = fast.take<std::int32_t>(to_size(s.capacity.max_sequences) * to_size(rows));
    for (state& l : made) {
      if (l.complete) continue;
      l.kv = kv;
      l.pool_rows = rows;
      l.first_token = first_token;
      l.budgets = fast.take<head_budget>(l.head_index(s.capacity.max_sequences, 0));
    }
  }

  /// Rows of a layer whose KV heads keep different amounts.
  void share_rows(const eviction_settings<Eviction>& s, state& l, carver& fast) {
    l.budgets = fast.take<head_budget>(l.head_index(s.capacity.max_sequences, 0));
    std::int64_t rows = 0;
    resolve(s.eviction, [&](const auto& eviction) {
      for (int sequence = 0; sequence < s.capacity.max_sequences; ++sequence)
        for (int head = 0; head < s.model.kv_heads; ++head) {
          const int own = s.rows_of_head(eviction, l.layer, head);
          if (l.budgets != nullptr) l.budgets[l.head_index(sequence, head)] = {rows, own, s.budget};
          rows += own;
        }
    });
    const std::size_t before = fast.used();
    l.kv = fast.take<typename state::element>(to_size(rows) * 2 * state::head_dim);
    bytes.slots += fast.used() - before;
    l.first_token = fast.take<std::int32_t>(to_size(rows));
  }

  state layer_of(const eviction_settings<Eviction>& s, int layer, carver& slow, carver& fast) {
    using element = typename state::element;
    state l;
    l.layer = layer;
    l.complete = s.plan.kind(layer) == layer_kind::complete;
    l.heads = {s.model.query_heads, s.model.kv_heads};
    l.scale = s.attention.scale;
    const std::size_t heads = l.head_index(s.capacity.max_sequences, 0),
                      staged_heads = l.head_index(s.capacity.max_prefills, 0);
    const auto numbers = [&](std::size_t of_heads, int rows) {
      return of_heads * 2 * to_size(rows) * state::head_dim;
    };
    l.tokens = fast.take<std::int32_t>(heads);
    l.attended_count = fast.take<std::int32_t>(heads);
    if (l.complete) {
      l.rows = s.max_tokens();
      l.kv = slow.take<element>(numbers(heads, l.rows));
      return l;
    }
    bool pooled = false, by_head = false, weighs = false, all_vote = false, rates_layer = false;
    resolve(s.eviction, [&]<class E>(const E& eviction) {
      pooled = allocates<E>;
      l.unit_tokens = eviction.unit_tokens();
      const eviction_limits most = s.limits(layer);
      l.place = most.layer;
      l.places = most.layers;
      int rows = pooled ? s.max_tokens() : 0;  // of the pool of all layers a head may have any part
      std::int64_t rows_of_all = 0;
      for (int head = 0; !pooled && head < s.model.kv_heads; ++head) {
        rows = std::max(rows, s.rows_of_head(eviction, layer, head));
        rows_of_all += s.rows_of_head(eviction, layer, head);
      }
      by_head = !pooled && !demotes<E> && rows_of_all < std::int64_t{rows} * s.model.kv_heads;
      l.units = (rows + l.unit_tokens - 1) / l.unit_tokens;
      if constexpr (!observes<E>) l.state_bytes = sizeof(typename E::unit_state);
      l.staged_rows = eviction.stages_prompt() ? s.capacity.max_prompt : 0;
      all_vote = eviction.observed_rows() == every_prompt_row;
      if (!all_vote) l.kept_queries = eviction.observed_rows();
      if constexpr (takes_worths<E>) l.worth_rows = s.capacity.max_prompt;
      if constexpr (observes<E>) l.keeps_decoded = eviction.observes_decoding();
      l.cuts_blocks = freekv::cuts_blocks<E>;
      if constexpr (merges<E>) {
        weighs = makes_log_weights(eviction.merge_by());
        l.memory_bytes = sizeof(typename E::head_memory);
      }
      if constexpr (demotes<E>) {
        constexpr std::size_t original = std::size_t{2} * state::head_dim * sizeof(element);
        const std::size_t all = to_size(rows),
                          originals = to_size(std::clamp(eviction.most_originals(most), 0, rows));
        l.code_bytes = eviction.codec().bytes({1, state::head_dim}, sizeof(element));
        l.area = std::max(originals * original + (all - originals) * l.code_bytes, all * l.code_bytes) /
                 sizeof(element);
      }
      rates_layer = rates<E>;
    });
    l.rows = l.units * l.unit_tokens;
    const auto counted = [&](std::size_t& of, auto take) {
      const std::size_t before = fast.used();
      take();
      of += fast.used() - before;
    };
    const auto take_queries = [&](int of) {
      l.queries = fast.take<float>(to_size(of) * to_size(l.kept_queries) * to_size(s.model.query_heads) *
                                   state::head_dim);
    };
    if (by_head) share_rows(s, l, fast);
    if (!pooled && !by_head)
      counted(bytes.slots,
              [&] { l.kv = fast.take<element>(l.code_bytes > 0 ? heads * l.area : numbers(heads, l.rows)); });
    counted(bytes.staging, [&] {
      l.staged = fast.take<element>(numbers(staged_heads, l.staged_rows));
      if (all_vote) l.votes = fast.take<float>(staged_heads * to_size(l.staged_rows));
      l.worths = fast.take<float>((l.staged_rows == 0 ? heads : staged_heads) * to_size(l.worth_rows));
      if (!l.by_sequence()) take_queries(s.capacity.max_prefills);
    });
    if (l.by_sequence()) take_queries(s.capacity.max_sequences);
    if (l.kept_queries > 0) l.probes = fast.take<std::int32_t>(to_size(s.capacity.max_sequences));
    l.states = fast.take<std::byte>(l.unit_index(s.capacity.max_sequences, 0) * l.state_bytes);
    if (!pooled && !by_head)
      l.first_token = fast.take<std::int32_t>(l.unit_index(s.capacity.max_sequences, 0));
    l.attended = fast.take<std::int32_t>(l.unit_index(s.capacity.max_sequences, 0));
    if (weighs) l.log_weight = fast.take<float>(l.unit_index(s.capacity.max_sequences, 0));
    l.memories = fast.take<std::byte>(heads * l.memory_bytes);
    if (l.code_bytes > 0) {
      l.coded = fast.take<std::int32_t>(heads);
      l.attended_coded = fast.take<std::int32_t>(l.unit_index(s.capacity.max_sequences, 0));
      l.attended_coded_count = fast.take<std::int32_t>(heads);
    }
    if (rates_layer) l.ratios = fast.take<float>(to_size(s.capacity.max_sequences));
    return l;
  }
};

}  // namespace freekv::detail
