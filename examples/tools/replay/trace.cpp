#include "trace.hpp"

#include <charconv>
#include <cmath>
#include <cstring>
#include <string_view>

#include "cited.hpp"

namespace freekv::examples {

namespace {

bool is_float(data_type dtype) {
  return dtype == data_type::f32 || dtype == data_type::f16 || dtype == data_type::bf16;
}

/// Rounds to `element` and returns the values' bytes; `values` become what the bytes say.
std::vector<std::byte> rounded(std::vector<float>& values, data_type element) {
  if (element == data_type::f32) {
    const auto bytes = std::as_bytes(std::span(values));
    return {bytes.begin(), bytes.end()};
  }
  std::vector<std::byte> bytes(values.size() * 2);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool is_half = element == data_type::f16;
    const std::uint16_t bits = is_half ? float_to_half(values[i]) : float_to_bfloat16(values[i]);
    std::memcpy(&bytes[2 * i], &bits, 2);
    values[i] = is_half ? half_to_float(bits) : bfloat16_to_float(bits);
  }
  return bytes;
}

/// All of `text` as digits.
std::optional<int> decimal(std::string_view text, int largest) {
  unsigned value = 0;  // a sign is none of its digits
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (fault != std::errc{} || end != text.data() + text.size() || value > static_cast<unsigned>(largest))
    return std::nullopt;
  return static_cast<int>(value);
}

trace_form form_of(const safetensors_file& file, std::optional<data_type> element) {
  const tensor_view &q = file.at("q"), &k = file.at("k"), &v = file.at("v");
  const auto fail = [&](const std::string& what) { throw file_error(cited_path(file.path()) + ": " + what); };
  for (const tensor_view* tensor : {&q, &k, &v}) {
    if (!is_float(tensor->dtype))
      fail("tensor " + tensor->name + " has dtype " + std::string(dtype_name(tensor->dtype)) +
           "; a trace has F32, F16 or BF16");
    if (tensor->shape.size() != 3)
      fail("tensor " + tensor->name + " has shape " + cited_shape(tensor->shape) +
           "; a trace has (tokens, heads, head_dim)");
  }
  if (k.shape != v.shape) fail("k has shape " + cited_shape(k.shape) + " but v has " + cited_shape(v.shape));
  if (q.shape[0] != k.shape[0] || q.shape[2] != k.shape[2])
    fail("q has shape " + cited_shape(q.shape) + " but k has " + cited_shape(k.shape) +
         ": tokens and head_dim must agree");
  if (k.shape[1] < 1 || q.shape[1] < 1 || q.shape[1] % k.shape[1] != 0)
    fail(std::to_string(q.shape[1]) + " query heads are not a positive multiple of " +
         std::to_string(k.shape[1]) + " KV heads");
  // A trace without tokens has no bytes that vouch for its heads, and memory is taken for each of them.
  constexpr std::int64_t most_tokens = 1 << 30, most_heads = 1024, most_elements = 1 << 20;
  if (q.shape[0] > most_tokens || q.shape[1] > most_heads || q.shape[2] > most_elements)
    fail("q has shape " + cited_shape(q.shape) + ", more than the " + std::to_string(most_tokens) +
         " tokens, " + std::to_string(most_heads) + " heads or head_dim " + std::to_string(most_elements) +
         " that are replayed");
  if (!element && k.dtype != v.dtype)
    fail("k is " + std::string(dtype_name(k.dtype)) + " but v is " + std::string(dtype_name(v.dtype)) +
         "; choose one with --dtype");

  trace_form t;
  t.tokens = static_cast<int>(q.shape[0]);
  t.query_heads = static_cast<int>(q.shape[1]);
  t.kv_heads = static_cast<int>(k.shape[1]);
  t.head_dim = static_cast<int>(q.shape[2]);
  const auto prompt_len = file.metadata().find("prompt_len");
  if (prompt_len == file.metadata().end())
    fail("metadata has no prompt_len; write the number of prompt tokens as a decimal string");
  const auto prompt_tokens = decimal(prompt_len->second, t.tokens);
  if (!prompt_tokens)
    fail("metadata prompt_len is " + cited(prompt_len->second) +
         ", not a decimal number from 0 to the trace's " + std::to_string(t.tokens) + " tokens");
  t.prompt_len = *prompt_tokens;
  // Other programs may keep a name under this key; only a number is ours.
  if (const auto layer = file.metadata().find("layer"); layer != file.metadata().end())
    t.layer = decimal(layer->second, 1 << 20);
  if (const auto period = file.metadata().find("period"); period != file.metadata().end())
    if (const auto tokens = decimal(period->second, t.tokens); tokens && *tokens > 0) t.period = tokens;
  const auto positive = [&](const char* key) -> std::optional<double> {
    const auto found = file.metadata().find(key);
    if (found == file.metadata().end()) return std::nullopt;
    double value = 0;
    const std::string& text = found->second;
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = fault == std::errc{} && end == text.data() + text.size();
    const auto nearest = static_cast<float>(value);  // as it will be computed with
    return whole && nearest > 0 && std::isfinite(nearest) ? std::optional(value) : std::nullopt;
  };
  t.rope_base = positive("rope_base");
  t.scale = positive("scale").value_or(0.0);
  if (const auto pairs = file.metadata().find("rope_pairs");
      pairs != file.metadata().end() && pairs->second == "neighbours")
    t.rope_pairs = "neighbours";

  t.element = element.value_or(k.dtype);
  if (const tensor_view* logits = file.find("sink_logits")) {
    if (!is_float(logits->dtype) || logits->shape != std::vector<std::int64_t>{q.shape[1]})
      fail("sink_logits is " + std::string(dtype_name(logits->dtype)) + " of shape " +
           cited_shape(logits->shape) + "; needed is F32, F16 or BF16 of (" + std::to_string(q.shape[1]) +
           "), a number for each query head");
    t.sink_logits = file.copy_as_float("sink_logits");
  }
  if (const tensor_view* before = file.find("k_pre")) {
    if (!is_float(before->dtype) || before->shape != k.shape)
      fail("k_pre is " + std::string(dtype_name(before->dtype)) + " of shape " + cited_shape(before->shape) +
           "; needed is F32, F16 or BF16 of k's shape " + cited_shape(k.shape));
    t.has_keys_before_rotation = true;
  }
  if (const tensor_view* worths = file.find("worths")) {
    if (!is_float(worths->dtype) || worths->shape != std::vector<std::int64_t>{k.shape[0], k.shape[1]})
      fail("worths is " + std::string(dtype_name(worths->dtype)) + " of shape " + cited_shape(worths->shape) +
           "; needed is F32, F16 or BF16 of (" + std::to_string(k.shape[0]) + ", " +
           std::to_string(k.shape[1]) + "), a number for each token and KV head");
    t.has_worths = true;
  }
  if (const tensor_view* probes = file.find("q_probe")) {
    if (!is_float(probes->dtype) || probes->shape.size() != 3 || probes->shape[0] < 1 ||
        probes->shape[0] > most_tokens || probes->shape[1] != q.shape[1] || probes->shape[2] != q.shape[2])
      fail("q_probe is " + std::string(dtype_name(probes->dtype)) + " of shape " +
           cited_shape(probes->shape) + "; needed is F32, F16 or BF16 of (rows, " +
           std::to_string(q.shape[1]) + ", " + std::to_string(q.shape[2]) + "), a row or more");
    t.probe_rows = static_cast<int>(probes->shape[0]);
  }
  return t;
}

}  // namespace

std::vector<float> trace::float_keys(int count) const {
  const auto bytes = rows_of(keys, 0, count);
  std::vector<float> result(bytes.size() / (element == data_type::f32 ? 4 : 2));
  if (element == data_type::f32) {
    if (!bytes.empty()) std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  }
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, bytes.data() + 2 * i, 2);
    result[i] = element == data_type::f16 ? half_to_float(bits) : bfloat16_to_float(bits);
  }
  return result;
}

trace_form read_form(const std::filesystem::path& path, std::optional<data_type> element) {
  return form_of(safetensors_file(path), element);
}

trace read_trace(const std::filesystem::path& path, std::optional<data_type> element) {
  const safetensors_file file(path);
  trace t;
  static_cast<trace_form&>(t) = form_of(file, element);
  t.queries = file.copy_as_float("q");
  if (element) rounded(t.queries, *element);
  for (auto [name, bytes] : {std::pair{"k", &t.keys}, std::pair{"v", &t.values}}) {
    std::vector<float> values = file.copy_as_float(name);
    *bytes = rounded(values, t.element);
  }
  if (t.has_worths) t.worths = file.copy_as_float("worths");
  if (t.probe_rows > 0) {
    t.probes = file.copy_as_float("q_probe");
    if (element) rounded(t.probes, *element);
  }
  if (t.has_keys_before_rotation) t.keys_before_rotation = file.copy_as_float("k_pre");
  return t;
}

}  // namespace freekv::examples
