// Completion on the host: entries that stand in attention for what is not selected.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/page_value.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/completion.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::host {

/// Brings a page's value up to date by what the query heads of a group have attended to in it, each alike:
/// writes to `to` what comes of `stored`.
template <int HeadDim>
void refresh_page_value(const attention_part& of_page, int group, float refreshed, const std::byte* stored,
                        std::byte* to, const workspace& w) {
  float* const fresh = w.page_value;
  std::fill_n(fresh, HeadDim, 0.0f);
  int heads = 0;
  for (int g = 0; g < group; ++g) {
    const float sum = of_page.log_sum[g].sum;
    if (!(sum > 0.0f)) continue;
    ++heads;
    for (int i = 0; i < HeadDim; ++i) fresh[i] += of_page.weighted[g * HeadDim + i] / sum;
  }
  if (heads == 0) {
    std::copy_n(stored, freekv::detail::page_value_bytes(HeadDim), to);
    return;
  }
  float* const before = fresh + HeadDim;
  const bool has = freekv::detail::read_page_value(stored, HeadDim, before);
  const float keeps = has ? 1.0f - refreshed : 0.0f, takes = has ? refreshed : 1.0f;
  for (int i = 0; i < HeadDim; ++i)
    fresh[i] = takes * (fresh[i] / static_cast<float>(heads)) + (has ? keeps * before[i] : 0.0f);
  freekv::detail::write_page_value(fresh, HeadDim, to);
}

/// Values of pages that a step's attention has brought up to date. They wait until all of its rows have
/// attended, which read those before, as the call does that is repeated behind a store_error. One for all
/// layers.
class refreshed_values {
 public:
  refreshed_values() = default;
  refreshed_values(const workspace_sizes& s, int sequences, carver& memory)
      : kv_heads_(s.kv_heads),
        entries_(s.entries_within),
        bytes_(freekv::detail::page_value_bytes(s.head_dim)) {
    data_ =
        memory.take<std::byte>(to_size(s.completes ? sequences * kv_heads_ : 0) * to_size(entries_) * bytes_);
  }

  /// The value of the page that is entry i of a head's list.
  std::byte* of(const sequence_head& at, int i) const {
    return data_ + (to_size(at.sequence * kv_heads_ + at.head) * to_size(entries_) + to_size(i)) * bytes_;
  }

 private:
  int kv_heads_ = 0, entries_ = 0;
  std::size_t bytes_ = 0;
  std::byte* data_ = nullptr;  // (sequence, kv head, entries, page_value_bytes)
};

/// Masses of what query heads have not selected, each `unselected_masses::floats(pages)` numbers from `first`
/// on: the largest log-mass of a unit, and for each page the sum of its units' masses relative to that.
struct unselected_masses {
  float* first = nullptr;
  std::int64_t stride = 0;

  static constexpr std::int64_t floats(int pages) { return 1 + std::int64_t{pages}; }
  float& largest(int query_head) const { return first[query_head * stride]; }
  float* of_pages(int query_head) const { return &largest(query_head) + 1; }
};

/// Masses that corrections leave for the attention of the same layer: where they score every unit of a head,
/// attention need not do it again. One for all layers.
class masses_left {
 public:
  masses_left() = default;
  masses_left(const workspace_sizes& s, int sequences, carver& memory)
      : kv_heads_(s.kv_heads),
        query_heads_(s.group * s.decode_rows),
        floats_(unselected_masses::floats(s.max_pages)) {
    if (!s.completes) return;  // and no memory: an empty array has an address, too
    const auto heads = to_size(sequences * kv_heads_);
    known_ = memory.take<std::int32_t>(heads);
    masses_ = memory.take<float>(heads * to_size(query_heads_) * to_size(floats_));
  }

  void forget(int sequence) {
    if (masses_ != nullptr) std::fill_n(known_ + sequence * kv_heads_, kv_heads_, 0);
  }
  /// Room for a head's masses in a layer, of all rows of a step, which are known from now on.
  unselected_masses take(int layer, const sequence_head& at) {
    known_[at.sequence * kv_heads_ + at.head] = layer + 1;
    return room(at);
  }
  /// Masses of a row's query heads, the first of them number `query_head`; nothing where they are not known,
  /// or are another layer's.
  unselected_masses known(int layer, const sequence_head& at, int query_head) const {
    if (masses_ == nullptr || known_[at.sequence * kv_heads_ + at.head] != layer + 1) return {};
    return {room(at).first + query_head * floats_, floats_};
  }

 private:
  unselected_masses room(const sequence_head& at) const {
    return {masses_ + (std::ptrdiff_t{at.sequence} * kv_heads_ + at.head) * query_heads_ * floats_, floats_};
  }

  int kv_heads_ = 0, query_heads_ = 0;  // query heads: of a KV head's group, in all rows of a step
  std::int64_t floats_ = 0;
  std::int32_t* known_ = nullptr;  // (sequence, kv head): 1 + the layer that they are of, or 0
  float* masses_ = nullptr;        // (sequence, kv head, query heads, floats)
};

/// True where a head has selected all of its `candidates`.
template <class State>
bool selects_all_of(const State& s, const sequence_head& at, int candidates) {
  return s.selected_count[s.head_index(at.sequence, at.head)] == candidates;
}

/// Sums what `queries` have not selected of a head's first `candidates.now` candidates, by the scores of all,
/// which are written over: query head g's of candidate j is at `scores.first[g * scores.stride + j]`. What
/// has been selected, and a page without a value, has no mass.
template <class State, class Policies>
void sum_unselected(isa set, const State& s, const Policies& policies, const sequence_head& at,
                    const step_candidates& candidates, const group_query& queries, const score_column& scores,
                    const unselected_masses& to) {
  const int group = queries.group, now = candidates.now, units = s.units_per_page, pages = now / units,
            first_page = candidates.first / units;
  const std::int64_t padded = workspace_sizes::padded(now);
  const auto empty = [&](int j) {
    for (int g = 0; g < group; ++g) scores.first[g * scores.stride + j] = -infinity;
  };
  const std::int32_t* const selected = s.selected + s.selected_index(at.sequence, at.head);
  for (int i = 0; i < s.selected_count[s.head_index(at.sequence, at.head)]; ++i)
    if (selected[i] < candidates.first + now) empty(selected[i] - candidates.first);
  for (int page = 0; page < pages; ++page)
    if (freekv::detail::scale_of_page_value(s.page_value(at.sequence, at.head, first_page + page)) == 0.0f)
      for (int i = 0; i < units; ++i) empty(page * units + i);
  for (auto j = static_cast<int>(padded); --j >= now;) empty(j);

  const auto sum = [&](const auto& term_of) {
    with_team(set, [&](auto team) {
      using pack = typename decltype(team)::pack;
      constexpr int width = decltype(team)::width;
      for (int g = 0; g < group; ++g) {
        float* const masses = scores.first + g * scores.stride;
        const pack term(term_of(team, g));
        pack most(-infinity);
        for (std::int64_t j = 0; j < padded; j += width) {
          const pack mass = team.load(masses + j) + term;
          team.store(masses + j, mass);
          most = team.maximum(most, mass);
        }
        const float largest = to.largest(g) = team.max(most);
        const pack base(largest > -infinity ? largest : 0.0f);
        for (std::int64_t j = 0; j < padded; j += width)
          team.store(masses + j, team.bounded_exp(team.load(masses + j) - base));
        for (int page = 0; page < pages; ++page) {
          float of_page = 0.0f;
          for (int i = 0; i < units; ++i) of_page = rounded_sum(of_page, masses[page * units + i]);
          to.of_pages(g)[page] = of_page;
        }
      }
    });
  };
  resolve(policies.summary, [&]<class Summary>(const Summary& summary) {
    if constexpr (mass_estimating_summary<Summary>) {
      const auto policy = summary_at(summary, s.layer, at.head);
      sum([&](auto team, int g) {
        return s.scale_of(at.head) * policy.mass_term(team, group_query{queries.head(g), 1, State::head_dim});
      });
    }
  });
}

/// Adds to `part`, attention of one row and KV head, an entry for each page of its candidates, of what it has
/// not selected there.
template <class State>
void add_unselected(isa set, const State& s, const sequence_head& at, const step_candidates& candidates,
                    const unselected_masses& masses, const attention_part& part, const workspace& w) {
  constexpr int d = State::head_dim;
  const int group = s.heads.group(), units = s.units_per_page, pages = candidates.now / units,
            first_page = candidates.first / units;
  with_team(set, [&](auto team) {
    using pack = typename decltype(team)::pack;
    constexpr int width = decltype(team)::width;
    for (int g = 0; g < group; ++g) {
      const float most = masses.largest(g);
      log_sum_exp& log_sum = part.log_sum[g];
      if (!(most <= log_sum.max)) {
        const pack factor(log_sum.raise(most));
        for (int i = 0; i < d; i += width) {
          float* const weighted = part.weighted + g * d + i;
          team.store(weighted, team.load(weighted) * factor);
        }
      }
      // A row's own factor, from the largest mass to what the part's sum is relative to.
      w.log_sums[g] = most > -infinity ? expf(most - log_sum.max) : 0.0f;
      float total = 0.0f;
      for (int page = 0; page < pages; ++page) total += masses.of_pages(g)[page];
      log_sum.sum = rounded_sum(log_sum.sum, w.log_sums[g] * total);
    }
    for (int page = 0; page < pages; ++page) {
      if (!freekv::detail::read_page_value(s.page_value(at.sequence, at.head, first_page + page), d,
                                           w.page_value))
        continue;
      for (int g = 0; g < group; ++g) {
        const pack of_page(w.log_sums[g] * masses.of_pages(g)[page]);
        for (int i = 0; i < d; i += width) {
          float* const weighted = part.weighted + g * d + i;
          team.store(weighted, team.load(weighted) + of_page * team.load(w.page_value + i));
        }
      }
    }
  });
}

/// Completes `part`, attention of one row and KV head. `known`: masses of what the row has not selected,
/// where correction has left them. `queries` (group, head_dim) are not scaled.
template <class State, class Policies>
void complete_attention(isa set, const State& s, const Policies& policies, const step_entry& entry, int head,
                        const float* queries, const unselected_masses& known, const attention_part& part,
                        const workspace& w) {
  const sequence_head at{entry.sequence, head};
  const step_candidates c = s.candidates_of(entry);
  if (selects_all_of(s, at, c.now)) return;
  if (known.first != nullptr) return add_unselected(set, s, at, c, known, part, w);
  const group_query query{queries, s.heads.group(), State::head_dim};
  const score_column scores{w.scores, workspace_sizes::padded(c.now)};
  resolve(policies.summary, [&]<class Summary>(const Summary& summary) {
    if constexpr (mass_estimating_summary<Summary>)
      score_stored_units<true>(
          set, s, summary_at(summary, s.layer, head), at, {c.first, c.now},
          prepare_queries(set, summary_at(summary, s.layer, head), query, s.scale_of(head), w.query),
          w.numbers, scores);
  });
  const unselected_masses masses{w.unselected, unselected_masses::floats(c.now / s.units_per_page)};
  sum_unselected(set, s, policies, at, c, query, scores, masses);
  add_unselected(set, s, at, c, masses, part, w);
}

}  // namespace freekv::host
