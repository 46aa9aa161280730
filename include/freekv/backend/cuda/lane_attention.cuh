// Attention of a few query heads by multiplying and adding in lanes; `tensor_attention` has the same members.
#pragma once

#include <cstdint>
#include <freekv/algorithms/attend_tokens.hpp>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/multiplies.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/storage/layout.hpp>

namespace freekv::device {

/// `register_attention`, whose rows are loaded some at a time, keys and values together, where they are
/// aligned. Whether they are is looked at once a slice.
template <int HeadDim, int Heads, class Element>
class lane_attention : public register_attention<HeadDim, Heads, row_team<HeadDim>> {
  using base = register_attention<HeadDim, Heads, row_team<HeadDim>>;
  using base::log_sum;
  using base::packs;
  using base::query;
  using base::weighted;
  using typename base::log_sums;
  using typename base::pack;

 public:
  using team_type = row_team<HeadDim>;
  using base::heads;
  using base::tokens_at_once;
  template <class Shared>
  __device__ explicit lane_attention(Shared&) {}  // it takes no shared memory

  /// Adds the entries from `begin` to before `end`: `entries(i)` is an `entry_rows`.
  template <class Entries>
  __device__ void attend_entries(team_type team, int begin, int end, const Entries& entries, float soft_cap) {
    for (int i = begin; i < end; ++i) {
      const entry_rows<Element> entry = entries(i);
      if (entry.attending != 0) attend(team, entry.rows, entry.tokens, soft_cap, entry.attending);
    }
  }

  /// Attends to a slice's rows, four of them on their way together; equal bits to `register_attention`.
  __device__ void attend(team_type team, const head_slice<const Element>& slice, int tokens, float soft_cap,
                         unsigned attending = ~0u) {
    const auto bits = reinterpret_cast<std::uintptr_t>(slice.key) |
                      reinterpret_cast<std::uintptr_t>(slice.value) |
                      static_cast<std::uintptr_t>(slice.stride) * sizeof(Element);
    if (bits % sizeof(piece) != 0) return base::attend(team, slice, tokens, soft_cap, attending);
    for (int first = 0; first < tokens; first += tokens_at_once) {
      block keys, values;
      load(team, slice.key, slice.stride, first, tokens, keys);
      load(team, slice.value, slice.stride, first, tokens, values);
      typename log_sums::scores weights;
      unroll<tokens_at_once>([&](auto t) {
        pack products[Heads];
        unroll<Heads>([&](auto h) { products[h] = pack(0.0f); });
        unroll<packs>([&](auto i) {
          const pack numbers = widened(keys.of[t][i]);
          unroll<Heads>([&](auto h) { products[h] = fused(query[h][i], numbers, products[h]); });
        });
        unroll<Heads>([&](auto h) {
          const float score = team.sum(products[h]);
          const bool counts = first + t < tokens && (attending >> h & 1u) != 0;
          weights[t][h] = !counts           ? -infinity
                          : soft_cap > 0.0f ? soft_cap * ::tanhf(score / soft_cap)
                                            : score;
        });
      });
      unroll<Heads>([&](auto h) {
        log_sums::weigh(h, weights, [&](float by) {
          const pack factor(by);
          unroll<packs>([&](auto i) { weighted[h][i] = weighted[h][i] * factor; });
        });
      });
      unroll<tokens_at_once>([&](auto t) {
        unroll<packs>([&](auto i) {
          const pack numbers = widened(values.of[t][i]);
          unroll<Heads>([&](auto h) {
            const bool counts =
                first + t < tokens && log_sum[h].max != -infinity && (attending >> h & 1u) != 0;
            const pack sum = fused(pack(weights[t][h]), numbers, weighted[h][i]);
            weighted[h][i] = pack::of([&](auto x) { return counts ? sum.x[x] : weighted[h][i].x[x]; });
          });
        });
      });
    }
  }

 private:
  static constexpr int share = team_type::width / team_type::lane_count;
  static constexpr int bytes = share * static_cast<int>(sizeof(Element));
  struct alignas(bytes < 16 ? bytes : 16) piece {
    Element x[(bytes < 16 ? bytes : 16) / sizeof(Element)];
  };
  static constexpr int pieces = bytes / static_cast<int>(sizeof(piece));
  struct share_of_row {
    piece of[pieces];
  };
  struct block {
    share_of_row of[tokens_at_once][packs];
  };

  /// Rows behind the last are the first.
  __device__ static void load(team_type team, const Element* rows, std::int64_t stride, int first, int tokens,
                              block& to) {
    unroll<tokens_at_once>([&](auto t) {
      const Element* const row =
          rows + (first + t < tokens ? first + t : first) * stride + team.lane() * share;
      unroll<packs * pieces>([&](auto i) {
        constexpr int pack_of_row = i / pieces, nth = i % pieces;
        to.of[t][pack_of_row].of[nth] =
            reinterpret_cast<const piece*>(row + pack_of_row * team_type::width)[nth];
      });
    });
  }
  __device__ static pack widened(const share_of_row& from) {
    constexpr int each = share / pieces;
    return pack::of([&](auto i) { return to_float(from.of[i / each].x[i % each]); });
  }
};

}  // namespace freekv::device
