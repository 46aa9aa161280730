// Attention of one query group over pages, one slice after the other, by online softmax; and the merge of
// parts.
#pragma once

#include <cstdint>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv {

/// What has been attended so far by the `group` query heads of a KV head: for each a running log-sum-exp and
/// the weighted sum of values, relative to the maximum.
struct attention_part {
  log_sum_exp* mass = nullptr;  // (group)
  float* weighted = nullptr;    // (group, head_dim); null: masses alone are wanted
  float* scores = nullptr;      // (group, score_stride): where wanted, the slice's scores as they are
  std::int64_t score_stride = 0;

  template <team T>
  FREEKV_HD void clear(T team, int group, int head_dim) const {
    for (int g = 0; g < group; ++g) mass[g] = {};
    for (int i = 0; weighted != nullptr && i < group * head_dim; i += T::width)
      team.store(weighted + i, typename T::pack(0.0f));
  }
};

/// Tokens that are widened and attended together, so that keys and values of a block stay in the nearest
/// cache.
template <int HeadDim>
inline constexpr int attention_block = HeadDim <= 64 ? 32 : (HeadDim <= 128 ? 16 : 8);

/// Floats of scratch for `attend_slice`.
template <int HeadDim>
inline constexpr int attention_scratch = 2 * attention_block<HeadDim>* HeadDim + attention_block<HeadDim>;

/// Adds the first `tokens` rows of a slice to `part`. The query is multiplied by the scale already. Scores become
/// soft_cap * tanh(score / soft_cap), unless it is 0. A score of -infinity has weight 0; NaN propagates.
template <int HeadDim, team T, class Element>
FREEKV_HD void attend_slice(T team, const group_query& query, const head_slice<const Element>& slice,
                            int tokens, const attention_part& part, float* scratch, float soft_cap = 0.0f) {
  using pack = typename T::pack;
  constexpr int width = T::width, block = attention_block<HeadDim>;
  constexpr int packs = HeadDim / width, at_once = packs < 8 ? packs : 8;
  float* keys = scratch;
  float* values = keys + block * HeadDim;
  float* weights = values + block * HeadDim;

  for (int first = 0; first < tokens; first += block) {
    const int count = tokens - first < block ? tokens - first : block;
    const int padded = (count + width - 1) / width * width;
    for (int t = 0; t < count; ++t) {
      team.widen(slice.key + (first + t) * slice.stride, keys + t * HeadDim, HeadDim);
      if (part.weighted != nullptr)
        team.widen(slice.value + (first + t) * slice.stride, values + t * HeadDim, HeadDim);
    }
    for (int i = count * HeadDim; i < padded * HeadDim; i += width) team.store(keys + i, pack(0.0f));
    team.sync();

    for (int g = 0; g < query.group; ++g) {
      for (int t = 0; t < padded; t += width) {
        pack products[width];
        unroll<width>([&](auto i) { products[i] = pack(0.0f); });
        for (int d = 0; d < HeadDim; d += width) {
          const pack q = team.load(query.head(g) + d);
          unroll<width>(
              [&](auto i) { products[i] = products[i] + q * team.load(keys + (t + i) * HeadDim + d); });
        }
        team.store(weights + t, team.sum_each(products));
      }
      for (int t = count; t < padded; ++t) weights[t] = -infinity;
      team.sync();
      if (soft_cap > 0.0f) {
        for (int t = team.lane(); t < count; t += team.lanes())
          weights[t] = soft_cap * ::tanhf(weights[t] / soft_cap);
        team.sync();
      }
      if (part.scores != nullptr)
        for (int t = team.lane(); t < count; t += team.lanes())
          part.scores[g * part.score_stride + first + t] = weights[t];

      log_sum_exp& mass = part.mass[g];
      float* weighted = part.weighted == nullptr ? nullptr : part.weighted + g * HeadDim;
      pack largest = team.load(weights);
      for (int t = width; t < padded; t += width) largest = team.maximum(largest, team.load(weights + t));
      const float m = team.max(largest);
      if (!(m <= mass.max)) {
        const pack factor(mass.raise(m));
        for (int d = 0; weighted != nullptr && d < HeadDim; d += width)
          team.store(weighted + d, team.load(weighted + d) * factor);
      }
      if (!(mass.max > -infinity) && mass.max == mass.max) continue;  // nothing but -infinity so far
      const pack base(mass.max);
      pack total(0.0f);
      for (int t = 0; t < padded; t += width) {
        const pack weight = team.exp(team.load(weights + t) - base);
        team.store(weights + t, weight);
        total = total + weight;
      }
      mass.sum += team.sum(total);
      team.sync();
      if (weighted == nullptr) continue;

      const auto weigh = [&]<int Count>(
                             int d, cuda::std::integral_constant<int, Count>) {  // Count packs from element d
        pack sums[Count];
        unroll<Count>([&](auto i) { sums[i] = team.load(weighted + d + i * width); });
        for (int t = 0; t < count; ++t) {
          const pack weight(weights[t]);
          const float* value = values + t * HeadDim + d;
          unroll<Count>([&](auto i) { sums[i] = sums[i] + weight * team.load(value + i * width); });
        }
        unroll<Count>([&](auto i) { team.store(weighted + d + i * width, sums[i]); });
      };
      for (int i = 0; i < packs / at_once; ++i)
        weigh(i * at_once * width, cuda::std::integral_constant<int, at_once>{});
      if constexpr (packs % at_once != 0)
        weigh(packs / at_once * at_once * width, cuda::std::integral_constant<int, packs % at_once>{});
      team.sync();
    }
  }
}

/// Adds a token without a value for each query head, whose score is its logit: it takes its share of the weights and
/// counts in the log-sum-exp. (gpt-oss)
template <int HeadDim, team T>
FREEKV_HD void add_logits(T team, const float* logits, int group, const attention_part& part) {
  for (int g = 0; g < group; ++g) {
    log_sum_exp& mass = part.mass[g];
    const float before = mass.max;
    mass.add(logits[g]);
    if (mass.max == before) continue;
    const typename T::pack factor(before > -infinity ? ::expf(before - mass.max) : 0.0f);
    for (int d = 0; d < HeadDim; d += T::width) {
      float* w = part.weighted + g * HeadDim + d;
      team.store(w, team.load(w) * factor);
    }
  }
}

/// Adds `from` to `into`, which holds earlier pages: parts are always merged in page order.
template <int HeadDim, team T>
FREEKV_HD void merge_parts(T team, const attention_part& from, const attention_part& into, int group) {
  using pack = typename T::pack;
  for (int g = 0; g < group; ++g) {
    const log_sum_exp& a = from.mass[g];
    log_sum_exp& b = into.mass[g];
    if (a.max == -infinity) continue;
    const float keep = a.max <= b.max ? 1.0f : b.raise(a.max);
    const float factor = ::expf(a.max - b.max);
    b.sum += a.sum * factor;
    for (int d = 0; d < HeadDim; d += T::width) {
      float* w = into.weighted + g * HeadDim + d;
      team.store(w, team.load(w) * pack(keep) + team.load(from.weighted + g * HeadDim + d) * pack(factor));
    }
  }
}

/// Writes the attention output (group, head_dim) and its natural log-sum-exp (group); of an empty set, or one
/// whose scores are all -infinity, 0 and -infinity. `lse` may be null.
template <int HeadDim, team T>
FREEKV_HD void finish_attention(T team, const attention_part& part, int group, float* out, float* lse) {
  using pack = typename T::pack;
  for (int g = 0; g < group; ++g) {
    const log_sum_exp& mass = part.mass[g];
    const bool empty = mass.max == -infinity;
    const pack factor(empty ? 0.0f : 1.0f / mass.sum);
    for (int d = 0; d < HeadDim; d += T::width)
      team.store(out + g * HeadDim + d, team.load(part.weighted + g * HeadDim + d) * factor);
    if (lse != nullptr) lse[g] = empty ? -infinity : mass.max + ::logf(mass.sum);
  }
}

}  // namespace freekv
