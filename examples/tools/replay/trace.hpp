// A recorded layer: queries, keys and values of one sequence, prompt first.
#pragma once

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "safetensors.hpp"

namespace freekv::examples {

/// What a trace's header says, checked: all that can be known of a trace before its data is read.
struct trace_form {
  int tokens = 0, query_heads = 0, kv_heads = 0, head_dim = 0;
  int prompt_len = 0;
  std::optional<int> layer;          ///< the model's layer, where the trace says so
  data_type element{};               ///< that keys and values are kept as
  std::vector<float> sink_logits{};  ///< (query_heads), where the trace has them
  bool has_keys_before_rotation = false, has_worths = false;
  int probe_rows = 0;               ///< that observe the prompt; 0: the trace has none
  std::optional<double> rope_base;  ///< where the trace says it
  std::string rope_pairs = "halves";
  double scale = 0.0;         ///< of the model's scores, where the trace says it, or 0
  std::optional<int> period;  ///< after how many tokens the text repeats itself, where the trace says so

  int steps() const { return tokens - prompt_len; }
  /// 1 / sqrt(head_dim) where the trace does not say it.
  double scale_of_scores() const { return scale != 0 ? scale : 1 / std::sqrt(static_cast<double>(head_dim)); }
};

/// A trace as `freekv-replay` reads and `freekv-record` writes it: tensors `q` (tokens, query_heads,
/// head_dim), `k` and `v` (tokens, kv_heads, head_dim) in F32, F16 or BF16, and `prompt_len` in the metadata;
/// optionally `sink_logits` (query_heads), as gpt-oss has them, `k_pre`, as `k` is, the keys before
/// rotation, `worths` (tokens, kv_heads), what gates of the model say of each token, and `q_probe` (rows,
/// query_heads, head_dim), queries of pseudo tokens behind the prompt. The metadata may name `layer`,
/// `scale`, `rope_base` and `rope_pairs`, halves or neighbours, and `period`. Tokens before prompt_len are
/// the prompt, each later one is a decode step.
struct trace : trace_form {
  std::vector<float> queries;
  std::vector<std::byte> keys, values;      ///< elements of type `element`
  std::vector<float> keys_before_rotation;  ///< where the trace has them
  std::vector<float> worths, probes;        ///< the same

  std::span<const float> queries_of(int first, int count) const {
    const auto row = to_size(query_heads * head_dim);
    return std::span(queries).subspan(to_size(first) * row, to_size(count) * row);
  }
  /// Rows of `keys` or `values`.
  std::span<const std::byte> rows_of(const std::vector<std::byte>& of, int first, int count) const {
    const auto row = to_size(kv_heads * head_dim) * (element == data_type::f32 ? 4 : 2);
    return std::span(of).subspan(to_size(first) * row, to_size(count) * row);
  }
  std::span<const float> worths_of(int first, int count) const {
    return std::span(worths).subspan(to_size(first) * to_size(kv_heads), to_size(count) * to_size(kv_heads));
  }
  /// Keys as float: all, or those of the prompt.
  std::vector<float> float_keys() const { return float_keys(tokens); }
  std::vector<float> prompt_keys() const { return float_keys(prompt_len); }

 private:
  std::vector<float> float_keys(int count) const;
};

/// Both throw file_error. With `element`, queries, keys and values are rounded to it.
trace_form read_form(const std::filesystem::path& path, std::optional<data_type> element);
trace read_trace(const std::filesystem::path& path, std::optional<data_type> element);

}  // namespace freekv::examples
