// Attention of one query group over pages, one slice after the other, by online softmax; and the merge of
// parts.
#pragma once

#include <cstdint>
#include <freekv/algorithms/row_products.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::detail {

/// Attention so far of the `group` query heads of a KV head: for each a running log-sum-exp and the weighted
/// sum of values, relative to the maximum.
struct attention_part {
  log_sum_exp* log_sum = nullptr;  // (group)
  float* weighted = nullptr;       // (group, head_dim); null: log-sum-exps alone are wanted
  float* scores = nullptr;      // (group, score_stride): where wanted, the slice's scores as they are
  std::int64_t score_stride = 0;

  template <team T>
  FREEKV_HD void clear(T team, int group, int head_dim) const {
    for (int g = 0; g < group; ++g) log_sum[g] = {};
    for (int i = 0; weighted != nullptr && i < group * head_dim; i += T::width)
      team.store(weighted + i, typename T::pack(0.0f));
  }
};

/// Tokens that are attended together, so that keys and values of a block stay in the nearest cache.
template <int HeadDim>
inline constexpr int attention_block = HeadDim <= 128 ? 32 : 16;

/// Floats of scratch for `attend_slice`: weights, and the sums of one team's lanes.
template <int HeadDim>
inline constexpr int attention_scratch = heads_at_once* attention_block<HeadDim> + row_products_scratch;

/// Adds `count` values to the weighted sums of `Heads` query heads. Asks for `count` rows of `ahead`
/// meanwhile, unless it is null.
template <int HeadDim, int Heads, class T, class Element>
FREEKV_HD void weigh_values(T team, const head_slice<const Element>& rows, int count, const float* weights,
                            float* weighted, const Element* ahead) {
  using pack = typename T::pack;
  constexpr int width = T::width, packs = HeadDim / width;
  constexpr int most = (width > 8 ? width : Heads == 3 ? 12 : 8) / Heads, rounds = (packs + most - 1) / most;
  constexpr int at_once = (packs + rounds - 1) / rounds;  // alike in each round where that is possible
  const auto weigh = [&]<int Count>(int d,
                                    cuda::std::integral_constant<int, Count>) {  // packs from element d
    pack sums[Heads][Count];
    FREEKV_UNROLL
    for (int i = 0; i < Heads * Count; ++i)
      sums[i / Count][i % Count] = team.load(weighted + i / Count * HeadDim + d + i % Count * width);
    for (int t = 0; t < count; ++t) {
      if (d == 0 && ahead != nullptr) prefetch_row(team, ahead + t * rows.stride, HeadDim);
      pack weight[Heads];
      FREEKV_UNROLL
      for (int g = 0; g < Heads; ++g) weight[g] = pack(weights[g * attention_block<HeadDim> + t]);
      FREEKV_UNROLL
      for (int i = 0; i < Count; ++i) {
        const pack value = team.load(rows.value + t * rows.stride + d + i * width);
        FREEKV_UNROLL
        for (int g = 0; g < Heads; ++g) sums[g][i] = sums[g][i] + weight[g] * value;
      }
    }
    FREEKV_UNROLL
    for (int i = 0; i < Heads * Count; ++i)
      team.store(weighted + i / Count * HeadDim + d + i % Count * width, sums[i / Count][i % Count]);
  };
  for (int i = 0; i < packs / at_once; ++i)
    weigh(i * at_once * width, cuda::std::integral_constant<int, at_once>{});
  if constexpr (packs % at_once != 0)
    weigh(packs / at_once * at_once * width, cuda::std::integral_constant<int, packs % at_once>{});
}

/// `attend_slice` of at most `heads_at_once` query heads and a block of rows, token `first` of its slice the
/// first.
template <int HeadDim, team T, class Element>
FREEKV_HD void attend_block(T team, const group_query& query, int first_head, int heads,
                            const head_slice<const Element>& rows, int first, int count,
                            const attention_part& part, float* scratch, float soft_cap, const Element* ahead,
                            const float* log_weights) {
  using pack = typename T::pack;
  constexpr int width = T::width, block = attention_block<HeadDim>;
  const int padded = (count + width - 1) / width * width;
  const bool wants_values = part.weighted != nullptr;
  using wide = typename wide_team<T>::type;
  using multiplier = cuda::std::conditional_t<HeadDim % wide::width == 0, wide, T>;
  const multiplier multiplying{};
  const row_block<Element> keys{rows.key, rows.stride, HeadDim, count, wants_values ? rows.value : nullptr,
                                HeadDim};
  for_heads_at_once<multiplier>(heads, [&]<int Heads>(int g, cuda::std::integral_constant<int, Heads>) {
    row_products<Heads>(multiplying, query_rows{query.head(first_head + g), query.step * HeadDim}, keys, 1.0f,
                        scratch + g * block, block, scratch + heads_at_once * block);
  });
  unsigned attending = 0;  // heads with more than -infinity so far
  for (int g = 0; g < heads; ++g) {
    float* const weights = scratch + g * block;
    team.sync();
    if (soft_cap > 0.0f) {
      const pack cap(soft_cap), inverse(1.0f / soft_cap);
      for (int t = 0; t < padded; t += width)
        team.store(weights + t, cap * team.tanh(team.load(weights + t) * inverse));
      team.sync();
    }
    if (log_weights != nullptr) {
      for (int t = team.lane(); t < count; t += team.lanes()) weights[t] += log_weights[t];
      team.sync();
    }
    for (int t = count; t < padded; ++t) weights[t] = -infinity;
    team.sync();
    if (part.scores != nullptr)
      for (int t = team.lane(); t < count; t += team.lanes())
        part.scores[(first_head + g) * part.score_stride + first + t] = weights[t];

    log_sum_exp& log_sum = part.log_sum[first_head + g];
    pack largest = team.load(weights);
    for (int t = width; t < padded; t += width) largest = team.maximum(largest, team.load(weights + t));
    const float m = team.max(largest);
    if (!(m <= log_sum.max)) {
      const pack factor(log_sum.raise(m));
      for (int d = 0; wants_values && d < HeadDim; d += width) {
        float* const weighted = part.weighted + (first_head + g) * HeadDim + d;
        team.store(weighted, team.load(weighted) * factor);
      }
    }
    if (log_sum.max == -infinity) continue;
    attending |= 1u << g;
    const pack base(log_sum.max);
    pack total(0.0f);
    for (int t = 0; t < padded; t += width) {
      const pack weight = team.bounded_exp(team.load(weights + t) - base);
      team.store(weights + t, weight);
      total = total + weight;
    }
    log_sum.sum = rounded_sum(log_sum.sum, team.sum(total));
  }
  team.sync();
  if (!wants_values) return;
  float* const weighted = part.weighted + first_head * HeadDim;
  const int at_once = attending == (1u << heads) - 1 ? heads : 1;
  for (int first_of = 0; first_of < heads; first_of += at_once) {
    if ((attending >> first_of & 1u) == 0) continue;
    for_heads_at_once<multiplier>(at_once, [&]<int Heads>(int nth, cuda::std::integral_constant<int, Heads>) {
      const int g = first_of + nth;
      weigh_values<HeadDim, Heads>(multiplying, rows, count, scratch + g * block, weighted + g * HeadDim,
                                   ahead);
    });
  }
  team.sync();
}

/// Adds the first `tokens` rows of a slice to `part`. The query is multiplied by the scale already. Scores
/// become soft_cap * tanh(score / soft_cap), unless it is 0. A score of -infinity has weight 0; NaN
/// propagates. `ahead`: keys that are attended next, laid out as the slice's, or null. `log_weights`
/// (tokens), or null: each is added to its token's score behind the soft cap, so that one of ln n makes a
/// token weigh as n that are alike.
template <int HeadDim, team T, class Element>
FREEKV_HD void attend_slice(T team, const group_query& query, const head_slice<const Element>& slice,
                            int tokens, const attention_part& part, float* scratch, float soft_cap = 0.0f,
                            const Element* ahead = nullptr, const float* log_weights = nullptr) {
  constexpr int block = attention_block<HeadDim>;
  for (int first = 0; first < tokens; first += block) {
    const int count = tokens - first < block ? tokens - first : block;
    const head_slice<const Element> rows = rows_behind(slice, first);
    const Element* const next = first + block < tokens ? rows.key + block * rows.stride : ahead;
    for (int g = 0; g < query.group; g += heads_at_once) {
      const int heads = query.group - g < heads_at_once ? query.group - g : heads_at_once;
      detail::attend_block<HeadDim>(team, query, g, heads, rows, first, count, part, scratch, soft_cap,
                                    g + heads == query.group ? next : nullptr,
                                    log_weights == nullptr ? nullptr : log_weights + first);
    }
  }
}

/// Adds a token without a value for each query head, whose score is its logit: it takes its share of the
/// weights and counts in the log-sum-exp. (gpt-oss)
template <int HeadDim, team T>
FREEKV_HD void add_logits(T team, const float* logits, int group, const attention_part& part) {
  for (int g = 0; g < group; ++g) {
    log_sum_exp& log_sum = part.log_sum[g];
    const float before = log_sum.max;
    log_sum.add(logits[g]);
    if (log_sum.max == before) continue;
    const typename T::pack factor(before > -infinity ? ::expf(before - log_sum.max) : 0.0f);
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
    const log_sum_exp& a = from.log_sum[g];
    log_sum_exp& b = into.log_sum[g];
    if (a.max == -infinity) continue;
    const float keep = a.max <= b.max ? 1.0f : b.raise(a.max);
    const float factor = ::expf(a.max - b.max);
    b.sum = rounded_sum(b.sum, a.sum * factor);
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
    const log_sum_exp& log_sum = part.log_sum[g];
    const bool empty = log_sum.max == -infinity;
    const pack factor(empty ? 0.0f : 1.0f / log_sum.sum);
    for (int d = 0; d < HeadDim; d += T::width)
      team.store(out + g * HeadDim + d, team.load(part.weighted + g * HeadDim + d) * factor);
    if (lse != nullptr) lse[g] = empty ? -infinity : log_sum.max + ::logf(log_sum.sum);
  }
}

}  // namespace freekv::detail
