// Input of a step, from its caller: sequences, and rows of keys, values and queries.
#pragma once

#include <cstdint>
#include <freekv/core/ids.hpp>
#include <span>

namespace freekv {

/// Phase of one sequence in a step: what its rows are.
enum class step_phase : std::uint8_t {
  decode,   ///< attended within the budget
  prefill,  ///< exact and causal; drops the selection and the previous query
};

/// The rows one sequence brings to a step. Keys, values, queries and outputs of a step's sequences lie one
/// behind the other, in the order in which they are listed.
struct step_input {
  sequence_id sequence{};
  int tokens = 1;  ///< 0: it sits the step out; of decode rows at most max_decode_rows
  step_phase phase = step_phase::decode;
};

/// Elements from a row to the next one, where a row is part of another, as of a fused projection of queries,
/// keys and values; 0: rows lie one behind the other.
struct row_strides {
  std::int64_t keys = 0, values = 0, queries = 0, selecting = 0;
};

/// The rows of a step as the caller hands them to a layer; they are read until the layer has attended.
template <class In, class Query = float>
struct kv_rows {
  std::span<const In> keys{};    ///< (rows, kv_heads, head_dim)
  std::span<const In> values{};  ///< (rows, kv_heads, head_dim)
  /// (rows, query_heads, head_dim); may be empty if all rows are prompt and none attends
  std::span<const Query> queries{};
  row_strides strides{};
  /// (rows, kv_heads), one behind the other: what the engine says each row is worth to each KV head, of
  /// policies that take them (`hook::worths`) alone
  std::span<const float> worths{};
  /// (rows, query_heads, head_dim): other queries than those that attend, by which decode rows' heads are
  /// corrected and select, such as the previous layer's or a prediction; empty: `queries`. A pipeline that
  /// retrieves takes them.
  std::span<const Query> selecting{};
};

}  // namespace freekv
