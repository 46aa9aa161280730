// Score, pool and select on the host: one KV head of one sequence at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <freekv/algorithms/correct_selection.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/host/isa.hpp>
#include <freekv/backend/host/order_candidates.hpp>
#include <freekv/backend/host/pool.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/layer_state.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/pooling.hpp>
#include <freekv/policies/selection.hpp>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>

namespace freekv::host {

/// Pins the units of `candidates` that are worth most to one KV head of a sequence.
template <class State>
void pin_units(const State& s, const sequence_head& at, const unit_range& candidates, const workspace& w) {
  const int count = std::min(s.pins, candidates.count);
  for (int j = 0; j < candidates.count; ++j) {
    const int unit = candidates.first + j;
    w.keys[j] = ordered_key(s.pin_worth_of_unit(at.sequence, at.head, unit), unit);
  }
  std::nth_element(w.keys, w.keys + count, w.keys + candidates.count, std::greater<>());
  std::int32_t* const pinned = s.pinned + s.head_index(at.sequence, at.head) * to_size(s.pins);
  for (int i = 0; i < count; ++i) pinned[i] = unit_of_key(w.keys[i]);
  std::sort(pinned, pinned + count);
  s.pinned_count[s.head_index(at.sequence, at.head)] = count;
}

/// Queries prepared to score with one head's summaries, in `to`.
template <class HeadSummary>
prepared_queries prepare_queries(isa set, const HeadSummary& summary, const group_query& query, float scale,
                                 float* to) {
  prepared_queries prepared;
  with_team(set, [&](auto team) { prepared = prepare_group(team, summary, query, scale, to); });
  return prepared;
}

/// Query head g's score of the j-th of some units to `to.first[g * to.stride + j]`, of units whose summaries
/// lie side by side together. `AmongMany`: the summary is one of many, chosen at run time.
template <bool AmongMany, class State, class HeadSummary>
void score_stored_units(isa set, const State& s, const HeadSummary& summary, const sequence_head& at,
                        const unit_range& units, const prepared_queries& prepared, float* numbers,
                        const score_column& to) {
  const auto stored = [&](int j) { return s.summary_of_unit(at.sequence, at.head, units.first + j); };
  const auto score = [&](auto team) {
    for (int first = 0, end; first < units.count; first = end) {
      const std::byte* const from = stored(first);
      end = first + 1;
      while (end < units.count && stored(end) == from + to_size(end - first) * s.summary_bytes) ++end;
      score_units<typename State::element, AmongMany>(team, summary, s.unit, from, s.summary_bytes,
                                                      end - first, prepared, numbers,
                                                      {to.first + first, to.stride});
    }
  };
  if constexpr (linear_summary<HeadSummary> || scores_four_heads<HeadSummary, simd_team<portable>>)
    with_wide_team(set, score);
  else
    with_team(set, score);
}

/// Selection for one KV head with the queries of a decode entry, or with those of one query head of its group
/// alone. `Policies` has the policy objects as members.
template <class State, class Policies>
class head_selection {
 public:
  head_selection(isa set, const State& s, const Policies& policies, const step_entry& entry, int head,
                 unit_range candidates, const workspace& w, int query_head = whole_group)
      : set_(set),
        s_(s),
        policies_(policies),
        at_{entry.sequence, head},
        w_(w),
        pinned_(s.pinned_of(entry.sequence, head)),
        first_unit_(candidates.first),
        candidates_(candidates.count),
        stride_(workspace_sizes::padded(candidates.count)),
        query_(query_head < 0 ? s.query_of(entry, head) : s.query_of(entry, head, query_head)) {}
  static constexpr int whole_group = -1;

  /// The selection among the first `candidates` candidates, as ascending unit ids in `units` (k); returns how
  /// many. Units that have been scored are not scored again, unless in two stages. `held`: those that a
  /// selection may favour, also in `units`.
  int best(int candidates, std::int32_t* units, std::span<const std::int32_t> held = {}) {
    if (takes_all(candidates)) {
      std::iota(units, units + candidates, first_unit_);
      return candidates;
    }
    score(candidates);
    int count = 0;
    resolve(policies_.selection, [&]<class Selection>(const Selection& selection) {
      if (chosen_ < 0) chosen_ = choose(selection, candidates, most_of(candidates));
      count = chosen_;
      if constexpr (favours_held<Selection>) {
        if (held.empty()) return;
        favour(selection.favour(), held, candidates, count);
        chosen_ = -1;
      }
    });
    for (int i = 0; i < count; ++i) units[i] = unit_of_key(w_.keys[i]);
    std::int32_t* const end = std::copy(pinned_.begin(), pinned_.end(), units + count);
    std::sort(units, end);
    return static_cast<int>(end - units);
  }

  /// True where the first `candidates` candidates are selected whatever their scores.
  bool takes_all(int candidates) const {
    return resolve(policies_.selection, [&](const auto& selection) {
      return selects_all(selection, unpinned(candidates), s_.budget.selected_units);
    });
  }

  int head() const { return at_.head; }

  /// Threads may score a head's candidates together: each some of them, behind what the first of them
  /// prepares. One goes on when all are scored. Where a selection scores nothing, or twice, they leave it to
  /// that one.
  void begin_once() {
    if (worth_sharing()) std::call_once(begun_, [&] { begin(); });
  }
  /// Scores candidates from `first` to `last`; `numbers` is the calling thread's.
  void score_some(int first, int last, float* numbers) {
    begin_once();
    resolve(policies_.summary, [&]<class Summary>(const Summary& summary) {
      if constexpr (!two_stage_summary<Summary>)
        if (worth_sharing()) score_candidates(summary, first, last, numbers);
    });
  }
  void all_are_scored() {
    if (worth_sharing()) scored_ = candidates_;
  }

  /// The scores of the first `candidates` candidates by each query, scaled as attention is, where they have
  /// been made: query head g's of candidate j at `first[g * stride + j]`. They may be written over when
  /// nothing is selected any more.
  std::optional<score_column> scores_of_each(int candidates) const {
    const bool each = resolve(policies_.pooling, []<class P>(const P&) { return !query_pooling<P>; }) &&
                      resolve(policies_.summary, []<class S>(const S&) { return !two_stage_summary<S>; });
    if (!each || scored_ < candidates || s_.selection_scale != s_.scale) return {};
    return column(0);
  }

  /// Copies the pooled scores of the first `candidates` candidates, padded, to `pooled`.
  void copy_pooled(int candidates, float* pooled) {
    score(candidates);
    std::copy_n(w_.pooled, workspace_sizes::padded(candidates), pooled);
  }
  /// Takes for the pooled scores of the first `candidates` candidates those of `heads` KV heads pooled once
  /// more: head h's are at `pooled + h * stride`, padded.
  void pool_heads(int candidates, float* pooled, std::int64_t stride, int heads) {
    workspace rows = w_;
    rows.scores = pooled;
    const std::int64_t padded = workspace_sizes::padded(candidates);
    resolve(policies_.pooling, [&]<class P>(const P&) {
      pool_candidates(set_, pooling_of_heads<P>{}, heads, stride, padded, rows);
    });
    scored_ = candidates;
    pooled_are(candidates);
  }

  /// Corrects the head by the masses of units, all of the first `candidates` candidates; returns how many it
  /// has selected then, and sets `corrected` where it is flagged. `sum_unselectable(sums)`: of each scoring
  /// head, what it attends to beside candidates, for a correction by shares of all attention.
  template <class Correction, class SumUnselectable>
  int correct(const Correction& correction, int candidates, const selected_and_best& units, bool& corrected,
              [[maybe_unused]] const SumUnselectable& sum_unselectable) {
    constexpr bool of_attention = hooks_of<Correction>::has(hook::of_attention);
    [[maybe_unused]] bool knows_attention = false;
    const auto mass_of = [&](const std::int32_t* of, int count) {
      score(candidates);
      if constexpr (of_attention) {
        if (!knows_attention) {
          sum_unselectable(w_.attention_sum);
          add_candidates(candidates);
        }
        knows_attention = true;
      }
      float sum = 0.0f;
      for (int i = 0; i < count; ++i)
        if constexpr (of_attention)
          sum += share_of_attention(of[i]);
        else
          sum += mass(of[i]);
      return sum;
    };
    return correct_selection(correction, units, corrected, mass_of, [&](std::int32_t unit) {
      return ordered_key(w_.pooled[unit - first_unit_], unit);
    });
  }

  /// Writes the estimated masses of the first `candidates` candidates, in masses of what each scoring head
  /// attends to and as these heads' mean, padded to whole packs, to `masses`. Only of a summary that
  /// estimates.
  void relative_masses(int candidates, const log_sum_exp* attended, float* masses) {
    score(candidates);
    for_mass_terms([&](auto team, int g, float term) {
      using pack = typename decltype(team)::pack;
      const pack part(1.0f / static_cast<float>(query_.group)), base(attended[g].value() - term);
      for (std::int64_t j = 0; j < workspace_sizes::padded(candidates); j += decltype(team)::width) {
        const pack mass = team.exp(team.load(w_.scores + g * stride_ + j) - base) * part;
        team.store(masses + j, g == 0 ? mass : team.load(masses + j) + mass);
      }
    });
  }

 private:
  using element = typename State::element;
  // The summary is one of many, chosen at run time.
  static constexpr bool among_many = requires(const Policies& p) { p.summary.chosen; };

  /// Candidates among the first `candidates` that are not pinned; the pinned ones are all among them.
  int unpinned(int candidates) const { return candidates - static_cast<int>(pinned_.size()); }
  int most_of(int candidates) const {
    return resolve(policies_.selection, [&](const auto& selection) {
      return selection.count(unpinned(candidates), s_.budget.selected_units);
    });
  }
  bool worth_sharing() const {
    const bool two_stages =
        resolve(policies_.summary, []<class S>(const S&) { return two_stage_summary<S>; });
    return !two_stages && !takes_all(candidates_);
  }
  /// Prepares the queries that score.
  void begin() {
    with_team(set_, [&](auto team) {
      resolve(policies_.pooling, [&]<class P>(const P& pooling) {
        if constexpr (query_pooling<P>) {
          pooling.pool_query(team, query_, w_.pooled_query);
          query_ = {w_.pooled_query, 1, State::head_dim};
        }
      });
    });
    resolve(policies_.summary, [&](const auto& summary) {
      prepared_ = prepare_queries(set_, summary_at(summary, s_.layer, at_.head), query_,
                                  s_.selection_scale_of(at_.head), w_.query);
    });
  }

  /// Scores and pools the first `candidates` candidates, unless that is what stands there already.
  void score(int candidates) {
    if (candidates == pooled_) return;
    if (scored_ == 0) begin();
    for (int j = candidates; j < workspace_sizes::padded(candidates); ++j) empty_column(j);
    resolve(policies_.summary, [&]<class Summary>(const Summary& summary) {
      if constexpr (two_stage_summary<Summary>)
        score_in_two_stages(summary, candidates);
      else
        score_candidates(summary, scored_, candidates, w_.numbers);
    });
    scored_ = candidates;
    for (const std::int32_t unit : pinned_) empty_column(unit - first_unit_);
    pool(candidates);
    pooled_are(candidates);
  }
  void pooled_are(int candidates) {
    pooled_ = candidates;
    chosen_ = -1;
    knows_log_sum_ = false;
  }

  void pool(int candidates) {
    resolve(policies_.pooling, [&](const auto& pooling) {
      pool_candidates(set_, pooling, query_.group, stride_, workspace_sizes::padded(candidates), w_);
    });
  }

  void empty_column(int j) {
    for (int g = 0; g < query_.group; ++g) w_.scores[g * stride_ + j] = -infinity;
  }

  /// Query head g's score of candidate j to `w.scores[g * stride + j]`.
  template <class Summary>
  void score_candidates(const Summary& summary, int first, int last, float* numbers) {
    score_stored_units<among_many>(set_, s_, summary_at(summary, s_.layer, at_.head), at_,
                                   {first_unit_ + first, last - first}, prepared_, numbers, column(first));
  }

  /// Scores the candidates that a coarse summary keeps; the others' columns are empty. Which these are
  /// depends on all candidates, so they are scored anew with every number of them.
  template <class Summary>
  void score_in_two_stages(const Summary& summary, int candidates) {
    const int kept = summary.kept(unpinned(candidates), s_.budget.selected_units);
    std::uint64_t least = 0;  // of the keys of those kept; 0: all are
    if (kept < unpinned(candidates)) {
      with_team(set_, [&](auto team) {
        const auto both = summary_at(summary, s_.layer, at_.head);
        for (int j = 0; j < candidates; ++j)
          score_unit_coarsely<element>(team, both, s_.unit, stored(j), prepared_, w_.numbers, column(j));
      });
      for (const std::int32_t unit : pinned_) empty_column(unit - first_unit_);
      pool(candidates);
      order_candidates(first_unit_, candidates, pinned_, kept, w_);
      least = w_.keys[kept - 1];
    }
    with_team(set_, [&](auto team) {
      const auto both = summary_at(summary, s_.layer, at_.head);
      for (int j = 0; j < candidates; ++j)
        if (is_kept(least, w_.pooled[j], first_unit_ + j))
          score_unit_finely<element>(team, both, s_.unit, stored(j), prepared_, w_.numbers, column(j));
        else
          empty_column(j);
    });
  }

  const std::byte* stored(int j) const { return s_.summary_of_unit(at_.sequence, at_.head, first_unit_ + j); }
  score_column column(int j) const { return {w_.scores + j, stride_}; }

  /// Puts the keys of the selected units first in `w.keys`.
  template <class Selection>
  int choose(const Selection& selection, int candidates, int most) {
    order_candidates(first_unit_, candidates, pinned_, most, w_);
    if constexpr (selection_by_mass<Selection>) {
      std::sort(w_.keys, w_.keys + most, std::greater<>());
      const float factor = freekv::detail::per_temperature(selection, s_.layer, at_.head);
      const log_sum_exp all = factor == 1.0f ? log_sum_of_pooled() : tempered_log_sum(factor);
      float taken = 0.0f;
      for (int i = 0; i < most; ++i) {
        taken += all.share(tempered_score(w_.pooled[unit_of_key(w_.keys[i]) - first_unit_], factor));
        if (selection.enough(taken)) return i + 1;
      }
    }
    if constexpr (sampling_selection<Selection>)
      return static_cast<int>(std::partition(w_.keys, w_.keys + most,
                                             [&](std::uint64_t key) {
                                               return selection.admits(
                                                   w_.pooled[unit_of_key(key) - first_unit_]);
                                             }) -
                              w_.keys);
    return most;
  }

  /// Puts the keys of the `count` best first in `w.keys`, where those without a bonus stand, when `held`
  /// units' pooled scores are `bonus` more. A unit without it is among these only if it was among those.
  void favour(float bonus, std::span<const std::int32_t> held, int candidates, int count) {
    std::uint64_t* const chosen = w_.keys + count;
    std::uint64_t* end = chosen;
    for (const std::int32_t unit : held) {
      const int j = unit - first_unit_;
      if (j < 0 || j >= candidates || std::binary_search(pinned_.begin(), pinned_.end(), unit)) continue;
      std::uint64_t* const at = std::find(w_.keys, chosen, ordered_key(w_.pooled[j], unit));
      *(at < chosen ? at : end++) = ordered_key(w_.pooled[j] + bonus, unit);
    }
    std::nth_element(w_.keys, chosen, end, std::greater<>());
  }

  /// Calls `body(team, g, term)` for each scoring head g with what the summary's scores lack to be
  /// log-masses; not at all of a summary that estimates none.
  template <class Body>
  void for_mass_terms(const Body& body) const {
    resolve(policies_.summary, [&]<class Summary>(const Summary& summary) {
      if constexpr (hooks_of<Summary>::has(hook::mass_term))
        with_team(set_, [&](auto team) {
          const auto policy = summary_at(summary, s_.layer, at_.head);
          for (int g = 0; g < query_.group; ++g)
            body(team, g,
                 s_.scale_of(at_.head) *
                     policy.mass_term(team, group_query{query_.head(g), 1, State::head_dim}));
        });
    });
  }
  /// Adds the first `candidates` candidates to each scoring head's attention, which is then relative to what
  /// the summary's scores lack to be log-masses.
  void add_candidates(int candidates) {
    for_mass_terms([&](auto team, int g, float term) {
      log_sum_exp& all = w_.attention_sum[g];
      all.max -= term;
      all.add(log_sum_exp_of(team, w_.scores + g * stride_, workspace_sizes::padded(candidates)));
    });
  }
  /// A unit's share of all attention, the scoring heads' mean.
  float share_of_attention(std::int32_t unit) const {
    float sum = 0.0f;
    for (int g = 0; g < query_.group; ++g)
      sum += w_.attention_sum[g].share(w_.scores[g * stride_ + unit - first_unit_]);
    return sum / static_cast<float>(query_.group);
  }

  /// A unit's share of the softmax of the pooled scores; 0 where no unit has any.
  float mass(std::int32_t unit) { return log_sum_of_pooled().share(w_.pooled[unit - first_unit_]); }
  log_sum_exp tempered_log_sum(float factor) const {
    log_sum_exp all;
    with_team(set_, [&](auto team) {
      all = log_sum_exp_of<true>(team, w_.pooled, workspace_sizes::padded(pooled_), factor);
    });
    return all;
  }
  const log_sum_exp& log_sum_of_pooled() {
    if (!knows_log_sum_)
      with_team(set_, [&](auto team) {
        log_sum_ = log_sum_exp_of(team, w_.pooled, workspace_sizes::padded(pooled_));
      });
    knows_log_sum_ = true;
    return log_sum_;
  }

  isa set_;
  const State& s_;
  const Policies& policies_;
  sequence_head at_;
  const workspace& w_;
  std::span<const std::int32_t> pinned_;
  int first_unit_, candidates_;
  std::int64_t stride_;
  group_query query_;
  prepared_queries prepared_{};
  std::once_flag begun_;
  int scored_ = 0, pooled_ = 0;  // candidates that have been
  int chosen_ = -1;              // of those pooled, whose keys are first in `w.keys`; below 0: none yet
  log_sum_exp log_sum_;          // of the pooled scores, once it is known
  bool knows_log_sum_ = false;
};

}  // namespace freekv::host
