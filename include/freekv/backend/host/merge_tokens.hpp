// Tokens that leave a KV head, merged into those that stay.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/core/element.hpp>
#include <freekv/policies/eviction.hpp>
#include <freekv/storage/layout.hpp>
#include <limits>
#include <utility>

namespace freekv::host {

/// Scratch of one thread for so many tokens as a head ever has.
struct merge_scratch {
  double* lengths = nullptr;    // (tokens): of keys
  double* shares = nullptr;     // (tokens): of a policy that merges by them
  merge_fate* fates = nullptr;  // (tokens)
  /// (tokens): of one that stays the first that merges into it, of that the next; -1: none. Before that the
  /// policy's scratch
  std::int32_t* next = nullptr;
  double* logits = nullptr;  // (tokens)
  double* sums = nullptr;    // (2, head_dim)
};

/// Rewrites the tokens of a slice that others merge into. Sums are in double, in the order of the text, so
/// that what is stored depends on nothing but the numbers.
template <int HeadDim, class Element>
struct token_merger {
  merging_tokens of;
  head_slice<Element> slice;
  const std::int32_t* places = nullptr;  // (tokens): in the slice
  float* log_weights = nullptr;          // by place; null: by weights alone
  merge_rule rule = merge_rule::by_weights;
  const float* query = nullptr;  // (group, head_dim) of the last row
  int group = 1;
  double scale = 1.0;
  merge_scratch w;

  void merge_all() const {
    std::fill_n(w.next, of.end(), -1);
    for (int i = of.end(); i-- > of.staying;)
      if (const int into = w.fates[i].into;
          into >= 0 && into < of.staying && std::isfinite(of.lengths[i]) && has_finite_value(i))
        w.next[i] = std::exchange(w.next[into], i);
    for (int into = 0; into < of.staying; ++into)
      if (w.next[into] >= 0) merge_into(into);
  }

 private:
  bool has_finite_value(int i) const {
    const Element* const value = slice.value + places[i] * slice.stride;
    return std::all_of(value, value + HeadDim, [](Element x) { return std::isfinite(to_float(x)); });
  }
  /// Calls `visit(token)` for one that stays and all that merge into it.
  template <class Visit>
  void each(int into, const Visit& visit) const {
    for (int i = into; i >= 0; i = w.next[i]) visit(i);
  }
  double log_weight(int i) const {
    return log_weights == nullptr ? 0.0 : static_cast<double>(log_weights[places[i]]);
  }
  double score(int g, const float* key) const {
    return scale * of.product(query + std::ptrdiff_t{g} * HeadDim, key, HeadDim);
  }

  /// Makes weights what the tokens have of the last row among themselves, the mean over the query heads;
  /// returns the mean logarithm of what they have together.
  double weigh_by_last_row(int into) const {
    double log_mass = 0.0;
    each(into, [&](int i) { w.fates[i].weight = 0.0; });
    for (int g = 0; g < group; ++g) {
      double most = -std::numeric_limits<double>::infinity(), sum = 0.0;
      each(into, [&](int i) {
        w.logits[i] = score(g, of.key(i)) + log_weight(i);
        most = std::max(most, w.logits[i]);
      });
      each(into, [&](int i) { sum += w.logits[i] = std::exp(w.logits[i] - most); });
      each(into, [&](int i) { w.fates[i].weight += w.logits[i] / sum / group; });
      log_mass += (most + std::log(sum)) / group;
    }
    return log_mass;
  }
  /// The logarithm of how many tokens they are.
  double log_count(int into) const {
    double most = -std::numeric_limits<double>::infinity(), sum = 0.0;
    each(into, [&](int i) { most = std::max(most, log_weight(i)); });
    each(into, [&](int i) { sum += std::exp(log_weight(i) - most); });
    return most + std::log(sum);
  }

  /// Tokens whose weights are not numbers do not merge: those that leave are lost.
  void merge_into(int into) const {
    double log_weight_now = 0.0, total = 0.0;
    if (rule == merge_rule::as_last_row) log_weight_now = weigh_by_last_row(into);
    if (rule == merge_rule::as_many) log_weight_now = log_count(into);
    each(into, [&](int i) { total += w.fates[i].weight; });
    if (!std::isfinite(log_weight_now) || !std::isfinite(total) || !(total > 0.0)) return;

    std::fill_n(w.sums, 2 * HeadDim, 0.0);
    each(into, [&](int i) {
      const double weight = w.fates[i].weight / total;
      const Element* const value = slice.value + places[i] * slice.stride;
      for (int x = 0; x < HeadDim; ++x) {
        w.sums[x] += weight * static_cast<double>(of.key(i)[x]);
        w.sums[HeadDim + x] += weight * static_cast<double>(to_float(value[x]));
      }
    });
    float key[HeadDim];
    for (int x = 0; x < HeadDim; ++x) {
      Element& stored = slice.key[places[into] * slice.stride + x];
      stored = from_float<Element>(static_cast<float>(w.sums[x]));
      key[x] = to_float(stored);
      slice.value[places[into] * slice.stride + x] =
          from_float<Element>(static_cast<float>(w.sums[HeadDim + x]));
    }
    if (rule == merge_rule::as_last_row)
      for (int g = 0; g < group; ++g) log_weight_now -= score(g, key) / group;
    if (log_weights != nullptr) log_weights[places[into]] = static_cast<float>(log_weight_now);
  }
};

}  // namespace freekv::host
