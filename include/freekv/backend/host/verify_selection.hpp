// What a KV head's selection misses on the host, by a sample of the candidates that are not selected.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <freekv/algorithms/draw_units.hpp>
#include <freekv/backend/host/attend.hpp>
#include <freekv/backend/host/encoded_pages.hpp>
#include <freekv/backend/host/select.hpp>
#include <freekv/backend/host/workspace.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/correction.hpp>
#include <span>

namespace freekv::host {

/// One KV head of a decode entry, judged by units that are drawn and read.
template <class State, class Policies>
class selection_sample {
 public:
  /// `w.query` has `selection`'s prepared queries, which stay.
  selection_sample(isa set, const State& s, const Policies& policies, const step_entry& entry, int head,
                   const workspace& w)
      : set_(set), s_(s), policies_(policies), entry_(entry), head_(head), scratch_(w) {
    scratch_.query = w.sharing_query;
  }

  /// Judges what the head misses of its first `candidates` candidates. `correction` is of the layer.
  template <class Correction>
  missed_attention judge(const Correction& correction, int candidates,
                         head_selection<State, Policies>& selection) const {
    const int first = s_.candidates_of(entry_).first;
    const std::size_t at_head = s_.head_index(entry_.sequence, head_);
    const std::span selected{s_.selected + s_.selected_index(entry_.sequence, head_),
                             to_size(s_.selected_count[at_head])};
    const auto is_candidate = [&](std::int32_t unit) { return unit >= first && unit < first + candidates; };
    if (std::count_if(selected.begin(), selected.end(), is_candidate) == candidates) return {0.0f, 0.0f};
    attention_job<State, Policies>{s_, policies_, entry_, nullptr, {}}.sum_attended(
        set_, head_, true, scratch_.attention_sum, scratch_);
    selection.relative_masses(candidates, scratch_.attention_sum, scratch_.draw_weights);
    for (const std::int32_t unit : selected)
      if (is_candidate(unit)) scratch_.draw_weights[unit - first] = -1.0f;

    constexpr int most = verified_share::most_samples;
    std::array<double, most> at{}, masses{};
    std::array<freekv::detail::drawn_unit, most> drawn{};
    const auto draws = to_size(correction.samples);
    for (std::size_t i = 0; i < draws; ++i) {
      const std::uint64_t numbers[] = {correction.seed, to_size(s_.layer), to_size(head_),
                                       to_size(entry_.before), i};
      at[i] = freekv::detail::uniform_of(numbers);
    }
    std::sort(at.begin(), at.begin() + correction.samples);
    if (!freekv::detail::draw_units({scratch_.draw_weights, to_size(candidates)}, {at.data(), draws},
                                    {drawn.data(), draws}))
      return {};
    read_masses(first, {drawn.data(), draws}, masses.data());
    return correction.judge({masses.data(), draws});
  }

 private:
  using element = typename State::element;
  static constexpr int d = State::head_dim;

  /// Writes the mass of each drawn candidate, relative to what is attended to and as the scoring heads' mean,
  /// over its probability. A unit that is drawn twice is read once.
  void read_masses(int first, std::span<const freekv::detail::drawn_unit> drawn, double* masses) const {
    std::array<std::size_t, verified_share::most_samples> begin{};  // of each unit's draws
    int units = 0;
    for (std::size_t i = 0; i < drawn.size(); ++i)
      if (i == 0 || drawn[i].nth != drawn[i - 1].nth) begin[to_size(units++)] = i;
    const auto part = [&](int nth) {
      const int unit = first + drawn[begin[to_size(nth)]].nth;
      return page_range{s_.page_of(unit), s_.first_row_of(unit), s_.unit.tokens};
    };
    const auto use = [&](int nth, const head_slice<element>& rows) {
      const double mass = relative_mass(rows);
      const std::size_t end = nth + 1 < units ? begin[to_size(nth + 1)] : drawn.size();
      for (std::size_t i = begin[to_size(nth)]; i < end; ++i) masses[i] = mass / drawn[i].probability;
    };
    const sequence_head of{entry_.sequence, head_};
    if (s_.encoded) return encoded_pages(s_, policies_, scratch_).read_each(of, units, part, use);
    for (int nth = 0; nth < units; ++nth)
      use(nth, rows_behind(s_.store_slice(of.sequence, part(nth).page, head_), part(nth).first));
  }
  double relative_mass(const head_slice<element>& rows) const {
    const int group = s_.heads.group();
    const attention_part part{scratch_.part_log_sum, nullptr};
    double sum = 0.0;
    for (int row = 0; row < entry_.tokens; ++row) {
      begin_attention<d>(set_, queries(row), s_.scale_of(head_), group, scratch_.query, part);
      attend_slice<d>(set_, {scratch_.query, group, d}, as_const(rows), s_.unit.tokens, part, scratch_.rows,
                      s_.soft_cap);
      for (int g = 0; g < group; ++g) {
        const log_sum_exp &of = part.log_sum[g], &all = scratch_.attention_sum[row * group + g];
        sum += double{of.sum} / double{all.sum} * std::exp(double{of.max} - double{all.max});
      }
    }
    return sum / (group * entry_.tokens);
  }
  const float* queries(int row) const { return s_.kept_query(entry_.sequence, head_, row); }

  isa set_;
  const State& s_;
  const Policies& policies_;
  const step_entry& entry_;
  int head_;
  workspace scratch_;
};

}  // namespace freekv::host
