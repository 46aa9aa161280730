// Attention of a few query heads over tokens, with all that is summed up in the lanes' registers: for teams whose lanes are
// device threads. What comes out is what `attend_slice` gives, to rounding.
#pragma once

#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/functors/attend_slice.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv {

/// What `Heads` query heads have attended so far: for each a running log-sum-exp, which all lanes know, and the weighted
/// sum of values relative to the maximum.
template <int HeadDim, int Heads, team T>
struct register_attention {
  using team_type = T;
  using pack = typename T::pack;
  static constexpr int heads = Heads;
  static_assert(HeadDim % T::width == 0, "a row is whole packs");
  static constexpr int packs = HeadDim / T::width;

  pack query[Heads][packs];  ///< multiplied by the scale
  log_sum_exp mass[Heads];
  pack weighted[Heads][packs];

  /// Takes the query of head h from `queries(h)` (head_dim).
  template <class Queries>
  FREEKV_HD void begin(T team, const Queries& queries, float scale) {
    unroll<Heads>([&](auto h) {
      mass[h] = {};
      unroll<packs>([&](auto i) {
        query[h][i] = team.load(queries(h) + i * T::width) * pack(scale);
        weighted[h][i] = pack(0.0f);
      });
    });
  }

  /// Adds the first `tokens` rows of a slice for the heads whose bits are set in `attending`. Scores become soft_cap * tanh(score / soft_cap), unless it is 0. A score of
  /// -infinity has weight 0; NaN propagates.
  template <class Element>
  FREEKV_HD void attend(T team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                        unsigned attending = ~0u) {
    constexpr int at_once = 4;
    for (int first = 0; first < tokens; first += at_once) {
      float scores[at_once][Heads];
      unroll<at_once>([&](auto t) {
        const bool there = first + t < tokens;
        const Element* const key = slice.key + (there ? first + t : first) * slice.stride;
        pack products[Heads];
        unroll<Heads>([&](auto h) { products[h] = pack(0.0f); });
        unroll<packs>([&](auto i) {
          const pack numbers = team.load(key + i * T::width);
          unroll<Heads>([&](auto h) { products[h] = products[h] + query[h][i] * numbers; });
        });
        unroll<Heads>([&](auto h) {
          const float score = team.sum(products[h]);
          const bool counts = there && (attending >> h & 1u) != 0;
          scores[t][h] = !counts ? -infinity : soft_cap > 0.0f ? soft_cap * ::tanhf(score / soft_cap) : score;
        });
      });
      unroll<Heads>([&](auto h) {
        float most = scores[0][h];
        unroll<at_once - 1>([&](auto t) { most = scalar_team{}.maximum(most, scores[t + 1][h]); });
        if (!(most <= mass[h].max)) {
          const pack factor(mass[h].raise(most));
          unroll<packs>([&](auto i) { weighted[h][i] = weighted[h][i] * factor; });
        }
        const bool nothing = mass[h].max == -infinity;  // but -infinity so far
        unroll<at_once>([&](auto t) { scores[t][h] = nothing ? 0.0f : ::expf(scores[t][h] - mass[h].max); });
        unroll<at_once>([&](auto t) { mass[h].sum += scores[t][h]; });
      });
      unroll<at_once>([&](auto t) {
        if (first + t >= tokens) return;
        const Element* const value = slice.value + (first + t) * slice.stride;
        unroll<packs>([&](auto i) {
          const pack numbers = team.load(value + i * T::width);
          unroll<Heads>([&](auto h) {
            // Nothing is attended where all scores are -infinity, or by other heads, whatever the values.
            if (mass[h].max == -infinity || (attending >> h & 1u) == 0) return;
            weighted[h][i] = weighted[h][i] + pack(scores[t][h]) * numbers;
          });
        });
      });
    }
  }

  /// Leaves what each head h has attended to at `places(h)`, if that is anywhere.
  template <class Places>
  FREEKV_HD void store(T team, const Places& places) const {
    unroll<Heads>([&](auto h) {
      const attention_part to = places(h);
      if (to.mass == nullptr) return;
      if (team.lane() == 0) *to.mass = mass[h];
      unroll<packs>([&](auto i) { team.store(to.weighted + i * T::width, weighted[h][i]); });
    });
  }
};

}  // namespace freekv
