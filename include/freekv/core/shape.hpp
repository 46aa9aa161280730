// The compile-time shape of a KV cache, and the run-time counts that go with it.
#pragma once

#include <cstdint>
#include <freekv/core/element.hpp>

namespace freekv {

/// A size that is known at run time: `page_size<dynamic>`, `key_subspace<dynamic, dynamic>`.
inline constexpr int dynamic = -1;

/// A count that is part of a type, or with `count_of<dynamic>` a value; either way it converts to int.
/// Policies hold it as a plain member: with [[no_unique_address]], nvcc 13.0 and GCC lay out a policy with
/// two counts of one type differently, and what the host passes to a kernel arrives broken.
template <int N>
struct count_of {
  FREEKV_HD constexpr operator int() const { return N; }
};
template <>
struct count_of<dynamic> {
  int value = 0;
  FREEKV_HD constexpr operator int() const { return value; }
};

/// Element type of keys and values, and the number of elements in one key. Head counts are run-time values.
template <element Element, int HeadDim>
struct kv_shape {
  using element_type = Element;
  static constexpr int head_dim = HeadDim;
  static_assert(HeadDim >= 8 && HeadDim <= 256 && HeadDim % 8 == 0,
                "head_dim must be a multiple of 8 from 8 to 256");  // last: compilers know the members then
};

/// `group = query_heads / kv_heads` query heads share one KV head; any integer from 1 up.
struct head_counts {
  int query = 0;
  int kv = 0;
  FREEKV_HD constexpr int group() const { return query / kv; }
};

/// Tokens of a page or unit, and numbers of a key.
struct kv_extent {
  int tokens = 0;
  int head_dim = 0;
};

/// The keys of one unit and one KV head as floats: (tokens, head_dim), contiguous. A unit is a page, or a
/// part of one.
struct unit_keys {
  const float* data = nullptr;
  kv_extent unit;
  FREEKV_HD constexpr const float* row(int token) const { return data + token * unit.head_dim; }
};

/// Query that a unit is scored with: one query head's, as prepared for the summary.
struct unit_query {
  const float* data = nullptr;
  kv_extent unit;
  float scale = 1.0f;
};

/// The prepared queries of one group: (group, width), or `by_four`: (group / 4 rounded up, width, 4 query
/// heads).
struct prepared_queries {
  const float* data = nullptr;
  int width = 0;
  int group = 1;
  float scale = 1.0f;
  bool by_four = false;

  /// Floats that they take at most.
  FREEKV_HD static constexpr int floats(int heads, int width) { return (heads + 3) / 4 * 4 * width; }
};

namespace detail {

/// Places of a unit's scores: query head g's is `first[g * stride]`.
struct score_column {
  float* first = nullptr;
  std::int64_t stride = 0;
};

}  // namespace detail

/// The queries of one KV head's group: (group, head_dim), or every `step`-th of more.
struct group_query {
  const float* data = nullptr;
  int group = 1;
  int head_dim = 0;
  int step = 1;
  FREEKV_HD constexpr const float* head(int g) const { return data + g * step * head_dim; }
};

}  // namespace freekv
