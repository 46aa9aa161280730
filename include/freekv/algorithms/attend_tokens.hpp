// Attention of a few query heads over tokens, with all that is summed up in the lanes' registers: for teams
// whose lanes are device threads. What comes out is what `attend_slice` gives, to rounding.
#pragma once

#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::detail {

/// Log-sum-exps of the scores that `Heads` query heads have attended to so far, one for each head, which all
/// lanes know.
template <int HeadDim, int Heads, team T>
struct register_log_sums {
  using team_type = T;
  using pack = typename T::pack;
  static constexpr int heads = Heads;
  static constexpr int tokens_at_once = 4;
  static_assert(HeadDim % T::width == 0, "a row is whole packs");
  static constexpr int packs = HeadDim / T::width;
  using scores = float[tokens_at_once][Heads];

  pack query[Heads][packs];  ///< multiplied by the scale
  log_sum_exp log_sum[Heads];

  /// Takes the query of head h from `queries(h)`: head_dim floats, or typed_numbers.
  template <class Queries>
  FREEKV_HD void begin(T team, const Queries& queries, float scale) {
    unroll<Heads>([&](auto h) {
      log_sum[h] = {};
      visit_numbers(queries(h), [&](const auto* numbers) {
        unroll<packs>([&](auto i) { query[h][i] = team.load(numbers + i * T::width) * pack(scale); });
      });
    });
  }

  /// Adds the first `tokens` rows of a slice for the heads whose bits are set in `attending`. Scores become
  /// soft_cap * tanh(score / soft_cap), unless it is 0. A score of -infinity has weight 0; NaN propagates.
  template <class Element>
  FREEKV_HD void attend(T team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                        unsigned attending = ~0u) {
    for (int first = 0; first < tokens; first += tokens_at_once) {
      scores of;
      multiply_keys(team, slice, first, tokens, soft_cap, attending, of);
      unroll<Heads>([&](auto h) { weigh(h, of, [](float) {}); });
    }
  }

 protected:
  /// Scores of the tokens from `first` on; -infinity behind the last and of heads that do not attend.
  template <class Element>
  FREEKV_HD void multiply_keys(T team, const head_slice<const Element>& slice, int first, int tokens,
                               float soft_cap, unsigned attending, scores& of) const {
    unroll<tokens_at_once>([&](auto t) {
      const bool there = first + t < tokens;
      const Element* const key = slice.key + (there ? first + t : first) * slice.stride;
      pack products[Heads];
      unroll<Heads>([&](auto h) { products[h] = pack(0.0f); });
      unroll<packs>([&](auto i) {
        const pack numbers = team.load(key + i * T::width);
        unroll<Heads>([&](auto h) { products[h] = fused(query[h][i], numbers, products[h]); });
      });
      unroll<Heads>([&](auto h) {
        const float score = team.sum(products[h]);
        const bool counts = there && (attending >> h & 1u) != 0;
        of[t][h] = !counts ? -infinity : soft_cap > 0.0f ? soft_cap * ::tanhf(score / soft_cap) : score;
      });
    });
  }
  /// Makes scores of head h weights, relative to its maximum. `on_raised(factor)`: what was summed up
  /// relative to the maximum before is to be multiplied.
  template <class OnRaised>
  FREEKV_HD void weigh(int h, scores& of, const OnRaised& on_raised) {
    float most = of[0][h];
    unroll<tokens_at_once - 1>([&](auto t) { most = scalar_team{}.maximum(most, of[t + 1][h]); });
    if (!(most <= log_sum[h].max)) on_raised(log_sum[h].raise(most));
    const bool nothing = log_sum[h].max == -infinity;  // but -infinity so far
    unroll<tokens_at_once>([&](auto t) { of[t][h] = nothing ? 0.0f : ::expf(of[t][h] - log_sum[h].max); });
    unroll<tokens_at_once>([&](auto t) { log_sum[h].sum = rounded_sum(log_sum[h].sum, of[t][h]); });
  }
};

/// Log-sum-exps as in `register_log_sums`, and for each head the sum of values, weighted relative to the
/// maximum.
template <int HeadDim, int Heads, team T>
struct register_attention : register_log_sums<HeadDim, Heads, T> {
  using log_sums = register_log_sums<HeadDim, Heads, T>;
  using log_sums::log_sum;
  using log_sums::packs;
  using log_sums::tokens_at_once;
  using typename log_sums::pack;

  pack weighted[Heads][packs];

  /// Begins and attends as `register_log_sums` does.
  template <class Queries>
  FREEKV_HD void begin(T team, const Queries& queries, float scale) {
    log_sums::begin(team, queries, scale);
    unroll<Heads * packs>([&](auto i) { weighted[i / packs][i % packs] = pack(0.0f); });
  }
  template <class Element>
  FREEKV_HD void attend(T team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                        unsigned attending = ~0u) {
    for (int first = 0; first < tokens; first += tokens_at_once) {
      typename log_sums::scores weights;
      log_sums::multiply_keys(team, slice, first, tokens, soft_cap, attending, weights);
      unroll<Heads>([&](auto h) {
        log_sums::weigh(h, weights, [&](float by) {
          const pack factor(by);
          unroll<packs>([&](auto i) { weighted[h][i] = weighted[h][i] * factor; });
        });
      });
      unroll<tokens_at_once>([&](auto t) {
        if (first + t >= tokens) return;
        const Element* const value = slice.value + (first + t) * slice.stride;
        unroll<packs>([&](auto i) {
          const pack numbers = team.load(value + i * T::width);
          unroll<Heads>([&](auto h) {
            // Nothing is attended where all scores are -infinity, or by other heads, whatever the values.
            if (log_sum[h].max == -infinity || (attending >> h & 1u) == 0) return;
            weighted[h][i] = fused(pack(weights[t][h]), numbers, weighted[h][i]);
          });
        });
      });
    }
  }

  /// Stores the attention of each head h at `places(h)`, an attention_part; skips heads whose `log_sum` is
  /// null.
  template <class Places>
  FREEKV_HD void store(T team, const Places& places) const {
    unroll<Heads>([&](auto h) {
      const attention_part to = places(h);
      if (to.log_sum == nullptr) return;
      if (team.lane() == 0) *to.log_sum = log_sum[h];
      unroll<packs>([&](auto i) { team.store(to.weighted + i * T::width, weighted[h][i]); });
    });
  }
};

}  // namespace freekv::detail
