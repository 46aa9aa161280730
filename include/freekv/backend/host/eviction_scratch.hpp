// Scratch of one host thread of an evicting pipeline.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/backend/host/merge_tokens.hpp>
#include <freekv/core/element.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/storage/memory.hpp>

namespace freekv::host {

/// Rows of numbers that an observed row's group of query heads has, or its layer's where they vote.
template <class Eviction>
int numbers_of_row(const Eviction& eviction, const eviction_moment& at, const head_counts& heads) {
  if constexpr (freekv::detail::votes_for_layer<Eviction>)
    return freekv::detail::voters_of(eviction, at, heads.query);
  return eviction.group() == group_rule::each ? heads.group() : 1;
}

/// Sizes that scratch depends on.
struct eviction_sizes {
  int group = 1;
  int most = 0;  // tokens that shares are wanted of, or units that a prompt has
  /// rows of numbers that a policy observes at a time, and units that it sees then
  std::int64_t observed = 0, units = 0;
  bool sees_keys = false, merges = false, merges_by_shares = false, rates = false;
  std::int64_t held = 0, coded = 0;  // tokens; those that may become coded at once
  std::int64_t ranked = 0;           // units whose states are ranked together
  std::size_t code_bytes = 0, state_bytes = 0, element_bytes = 0;  // of a coded token, of its state

  std::int64_t score_stride() const { return (std::int64_t{most} + 15) / 16 * 16; }

  template <class Shape, class Settings>
  static eviction_sizes of(const Settings& s) {
    return resolve(s.eviction, [&]<class E>(const E& eviction) {
      eviction_sizes sizes{.group = s.model.group(), .merges = freekv::merges<E>};
      int longest = allocates<E> ? s.max_tokens() : cuts_blocks<E> ? 0 : s.capacity.max_prompt;
      for (int layer = s.complete_layers(); layer < s.model.layers; ++layer)
        for (int head = 0; head < s.model.kv_heads; ++head)
          longest = std::max(longest, s.rows_of_head(eviction, layer, head));
      sizes.most = longest + eviction.unit_tokens();
      if (observes<E> || sizes.merges) sizes.units = sizes.most;
      if constexpr (observes<E>)
        for (int layer = s.complete_layers(); layer < s.model.layers; ++layer)
          sizes.observed = std::max(sizes.observed,
                                    std::int64_t{eviction.observed_rows()} *
                                        numbers_of_row(eviction, s.moment(layer),
                                                       head_counts{s.model.query_heads, s.model.kv_heads}));
      if constexpr (freekv::merges<E>) sizes.merges_by_shares = eviction.merge_by() == merge_rule::by_shares;
      if constexpr (hooks_of<E>::has(hook::sees_keys)) sizes.sees_keys = eviction.sees_keys();
      sizes.rates = freekv::rates<E>;
      if constexpr (demotes<E>) {
        sizes.units = sizes.held = sizes.most;
        for (int layer = s.complete_layers(); layer < s.model.layers; ++layer)
          sizes.coded = std::max(sizes.coded, std::int64_t{eviction.most_originals(s.limits(layer))});
        sizes.coded = std::min(sizes.coded, std::int64_t{sizes.most});
        sizes.element_bytes = sizeof(typename Shape::element_type);
        sizes.code_bytes = eviction.codec().bytes({1, Shape::head_dim}, sizes.element_bytes);
        if constexpr (!observes<E>) sizes.state_bytes = sizeof(typename E::unit_state);
        if constexpr (freekv::detail::ranks_units<E>) sizes.ranked = sizes.most;
      }
      return sizes;
    });
  }
};

/// One thread's scratch.
struct eviction_scratch {
  float* rows = nullptr;          // of attend_slice
  float* query = nullptr;         // (group, head_dim), scaled
  log_sum_exp* log_sum = nullptr;  // (group)
  float* weighted = nullptr;      // (group, head_dim)
  float* lse = nullptr;           // (group)
  float* scores = nullptr;        // (group, score_stride)
  float* shares = nullptr;        // (score_stride)
  float* votes = nullptr;         // (score_stride)
  std::uint64_t* keys = nullptr;  // (units of a prompt)
  // Policies that observe or merge have these as well.
  float* numbers = nullptr;        // (rows, score_stride)
  float* transformed = nullptr;    // (rows, score_stride)
  std::int32_t* counts = nullptr;  // (rows, 2)
  float* unit_keys = nullptr;      // (units, head_dim), of one that sees keys
  float* worths = nullptr;         // (units): in the order of the text
  std::int32_t* order = nullptr;   // (units): places, in the order of the text
  std::int32_t* tokens = nullptr;  // (units): numbers in the sequence, ascending
  std::int32_t* places = nullptr;  // (units): of those that stay, then of those that leave
  float* log_weights = nullptr;    // (units): of a prompt's tokens
  merge_scratch merge;
  // A policy that demotes has these as well, one that rates layers `sums`.
  std::int32_t* held = nullptr;  // (units): tokens in the order of attention
  std::byte* codes = nullptr;    // (tokens that become coded, bytes of a coded token)
  std::byte* states = nullptr;   // (the same, bytes of a state)
  std::byte* ranked = nullptr;   // (units, bytes of a state), of one that ranks units together
  std::byte* decoded = nullptr;  // (tokens of a block, 2, head_dim)
  double* sums = nullptr;        // (units): of a layer's votes

  template <int HeadDim>
  static eviction_scratch carve(carver& memory, const eviction_sizes& s) {
    const std::int64_t merged = s.merges ? s.units : 0;
    return {
        .rows = memory.take<float>(to_size(attention_scratch<HeadDim>)),
        .query = memory.take<float>(to_size(s.group * HeadDim)),
        .log_sum = memory.take<log_sum_exp>(to_size(s.group)),
        .weighted = memory.take<float>(to_size(s.group * HeadDim)),
        .lse = memory.take<float>(to_size(s.group)),
        .scores = memory.take<float>(to_size(s.group * s.score_stride())),
        .shares = memory.take<float>(to_size(s.score_stride())),
        .votes = memory.take<float>(to_size(s.score_stride())),
        .keys = memory.take<std::uint64_t>(to_size(s.most)),
        .numbers = memory.take<float>(to_size(s.observed * s.score_stride())),
        .transformed = memory.take<float>(to_size(s.observed * s.score_stride())),
        .counts = memory.take<std::int32_t>(to_size(2 * s.observed)),
        .unit_keys = memory.take<float>(to_size(s.sees_keys || s.merges ? s.units * HeadDim : 0)),
        .worths = memory.take<float>(to_size(s.units)),
        .order = memory.take<std::int32_t>(to_size(s.units)),
        .tokens = memory.take<std::int32_t>(to_size(s.units)),
        .places = memory.take<std::int32_t>(to_size(s.units)),
        .log_weights = memory.take<float>(to_size(merged)),
        .merge = {.lengths = memory.take<double>(to_size(merged)),
                  .shares = memory.take<double>(to_size(s.merges_by_shares ? s.units : 0)),
                  .fates = memory.take<merge_fate>(to_size(merged)),
                  .next = memory.take<std::int32_t>(to_size(merged)),
                  .logits = memory.take<double>(to_size(merged)),
                  .sums = memory.take<double>(to_size(merged > 0 ? 2 * HeadDim : 0))},
        .held = memory.take<std::int32_t>(to_size(s.held)),
        .codes = memory.take<std::byte>(to_size(s.coded) * s.code_bytes),
        .states = memory.take<std::byte>(to_size(s.coded) * s.state_bytes),
        .ranked = memory.take<std::byte>(to_size(s.ranked) * s.state_bytes),
        .decoded = memory.take<std::byte>(to_size(2 * attention_block<HeadDim> * HeadDim) * s.element_bytes),
        .sums = memory.take<double>(to_size(s.rates ? s.units : 0))};
  }
};

}  // namespace freekv::host
