// Completion on the host: entries that stand in attention for what is not selected.
#pragma once

#include <algorithm>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/algorithms/page_value.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/completion.hpp>

namespace freekv::host {

/// Brings a page's value up to date by what the query heads of a group have attended to in it, each alike.
template <int HeadDim>
void refresh_page_value(const attention_part& of_page, int group, float refreshed, std::byte* stored,
                        const workspace& w) {
  float* const fresh = w.page_value;
  std::fill_n(fresh, HeadDim, 0.0f);
  int heads = 0;
  for (int g = 0; g < group; ++g) {
    const float sum = of_page.log_sum[g].sum;
    if (!(sum > 0.0f)) continue;
    ++heads;
    for (int i = 0; i < HeadDim; ++i) fresh[i] += of_page.weighted[g * HeadDim + i] / sum;
  }
  if (heads == 0) return;
  float* const before = fresh + HeadDim;
  const bool has = freekv::detail::read_page_value(stored, HeadDim, before);
  const float keeps = has ? 1.0f - refreshed : 0.0f, takes = has ? refreshed : 1.0f;
  for (int i = 0; i < HeadDim; ++i)
    fresh[i] = takes * (fresh[i] / static_cast<float>(heads)) + (has ? keeps * before[i] : 0.0f);
  freekv::detail::write_page_value(fresh, HeadDim, stored);
}

/// Adds to `part`, attention of one row and KV head, an entry for each of its candidates that is not selected
/// and whose page has a value. `queries` (group, head_dim) are not scaled.
template <class State, class Policies>
void complete_attention(isa set, const State& s, const Policies& policies, const step_entry& entry, int head,
                        const float* queries, const attention_part& part, const workspace& w) {
  constexpr int d = State::head_dim;
  const step_candidates c = s.candidates_of(entry);
  const int group = s.heads.group();
  const std::int64_t padded = workspace_sizes::padded(c.now);
  if (c.now == 0) return;
  const group_query query{queries, group, d};
  resolve(policies.summary, [&]<class Summary>(const Summary& summary) {
    if constexpr (mass_estimating_summary<Summary>) {
      const auto policy = summary_at(summary, s.layer, head);
      const prepared_queries prepared = prepare_queries(set, policy, query, s.scale, w.query);
      with_team(set, [&](auto team) {
        for (int g = 0; g < group; ++g)
          w.log_sums[g] = s.scale * policy.mass_term(team, group_query{query.head(g), 1, d});
      });
      score_stored_units<true>(set, s, policy, {entry.sequence, head}, {c.first, c.now}, prepared, w.numbers,
                               {w.scores, padded});
    }
  });

  // What is selected, and a page without a value, has no entry.
  const auto empty = [&](int unit) {
    for (int g = 0; g < group; ++g) w.scores[g * padded + unit - c.first] = -infinity;
  };
  const std::int32_t* const selected = s.selected + s.selected_index(entry.sequence, head);
  for (int i = 0; i < s.selected_count[s.head_index(entry.sequence, head)]; ++i)
    if (selected[i] < c.first + c.now) empty(selected[i]);
  const int pages = c.now / s.units_per_page, first_page = c.first / s.units_per_page;
  for (int page = first_page; page < first_page + pages; ++page)
    if (freekv::detail::scale_of_page_value(s.page_value(entry.sequence, head, page)) == 0.0f)
      for (int i = 0; i < s.units_per_page; ++i) empty(page * s.units_per_page + i);
  for (int j = c.now; j < padded; ++j) empty(c.first + j);

  with_team(set, [&](auto team) {
    using pack = typename decltype(team)::pack;
    constexpr int width = decltype(team)::width;
    for (int g = 0; g < group; ++g) {
      float* const masses = w.scores + g * padded;
      const pack term(w.log_sums[g]);
      pack largest(-infinity);
      for (std::int64_t j = 0; j < padded; j += width) {
        const pack mass = team.load(masses + j) + term;
        team.store(masses + j, mass);
        largest = team.maximum(largest, mass);
      }
      log_sum_exp& log_sum = part.log_sum[g];
      const float most = team.max(largest);
      if (!(most <= log_sum.max)) {
        const pack factor(log_sum.raise(most));
        for (int i = 0; i < d; i += width) {
          float* const weighted = part.weighted + g * d + i;
          team.store(weighted, team.load(weighted) * factor);
        }
      }
      const pack base(log_sum.max > -infinity ? log_sum.max : 0.0f);
      pack total(0.0f);
      for (std::int64_t j = 0; j < padded; j += width) {
        const pack weight = team.bounded_exp(team.load(masses + j) - base);
        team.store(masses + j, weight);
        total = total + weight;
      }
      log_sum.sum = rounded_sum(log_sum.sum, team.sum(total));
    }
    for (int page = 0; page < pages; ++page) {
      if (!freekv::detail::read_page_value(s.page_value(entry.sequence, head, first_page + page), d,
                                           w.page_value))
        continue;
      for (int g = 0; g < group; ++g) {
        float weight = 0.0f;
        for (int i = 0; i < s.units_per_page; ++i)
          weight = rounded_sum(weight, w.scores[g * padded + page * s.units_per_page + i]);
        const pack of_page(weight);
        for (int i = 0; i < d; i += width) {
          float* const weighted = part.weighted + g * d + i;
          team.store(weighted, team.load(weighted) + of_page * team.load(w.page_value + i));
        }
      }
    }
  });
}

}  // namespace freekv::host
