// Prefixes saved and loaded on one side, the device's or the host's, which different compilers compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/freekv.hpp>
#include <span>
#include <string>
#include <vector>

namespace prefix_case {

using namespace freekv;

constexpr int head_dim = 64, query_heads = 4, kv_heads = 2, layers = 3, page = 8, rank = 8, factors = 24;
constexpr int max_tokens = 160, prompt_rows = 75, kept = prompt_rows / page * page, steps = 6;
constexpr std::size_t key_row = kv_heads * head_dim, query_row = query_heads * head_dim;
constexpr std::uint64_t model = 42;

// The first layer keeps everything, on a device in its own memory. Coefficients and what units are worth are
// there too.
template <class Backend>
using pipeline_on = retrieval_pipeline<kv_shape<half, head_dim>, Backend, page_size<page>, unit<4>,
                                       key_subspace<rank, 32>, any_of<no_pins, pin_outliers<2>>,
                                       any_of<identity, low_rank_keys<factors>>, always, complete_first<1>>;

using freekv::to_size;

/// Rows of a text, room for an output, and data of the policies, where the side reads them.
struct input {
  std::span<const half> keys[layers], values[layers];
  std::span<const float> queries[layers];
  std::span<float> out;  // (query_row)
  const float *basis = nullptr, *factors = nullptr, *frequencies = nullptr;
  bool coefficients = false;  // the codec is low_rank_keys, else identity
  bool pins = true;
};

/// A pipeline on one side.
template <class Backend>
struct side {
  using pipeline_type = pipeline_on<Backend>;
  input in;
  pipeline_type pipeline;

  side(const input& given, Backend& backend, const memory_resources& memory)
      : in(given), pipeline(settings(given), backend, memory) {}

  static typename pipeline_type::settings settings(const input& in) {
    typename pipeline_type::settings s;
    s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
    s.budget = {.sink = page, .window = 2 * page, .selected_units = 5};
    s.capacity.max_tokens = max_tokens;
    s.capacity.max_sequences = 3;
    s.summary.basis = {in.basis, layers, kv_heads, rank, head_dim};
    if (in.pins) s.pinning = pin_outliers<2>{};
    if (in.coefficients)
      s.codec = low_rank_keys<prefix_case::factors>{
          .basis = {in.factors, layers, kv_heads, prefix_case::factors, head_dim},
          .rotary = {in.frequencies, 20}};
    return s;
  }

  void prompt(sequence_id id, int rows) {
    const int first = pipeline.tokens(id);
    auto step = pipeline.begin_step({{id, rows, step_phase::prefill}});
    for (int layer = 0; layer < layers; ++layer) step.append(layer, rows_at(layer, first, rows));
    step.end();
  }
  std::vector<float> decode(sequence_id id, int rows = steps) {
    std::vector<float> all;
    for (int i = 0; i < rows; ++i) {
      const int first = pipeline.tokens(id);
      auto step = pipeline.begin_step({{id}});
      for (int layer = 0; layer < layers; ++layer) {
        step.append(layer, rows_at(layer, first, 1));
        step.attend(layer, in.out);
        pipeline.synchronize();
        all.insert(all.end(), in.out.begin(), in.out.end());
      }
      step.end();
    }
    return all;
  }
  kv_rows<half> rows_at(int layer, int first, int rows) const {
    const auto part = [&](const auto& data, std::size_t row) {
      return data.subspan(to_size(first) * row, to_size(rows) * row);
    };
    return {part(in.keys[layer], key_row), part(in.values[layer], key_row),
            part(in.queries[layer], query_row)};
  }

  /// What a sequence gives behind a prompt of as many rows as the prefix has.
  std::vector<float> expected() {
    const sequence_id id = pipeline.open();
    prompt(id, kept);
    std::vector<float> all = decode(id);
    pipeline.release(id);
    return all;
  }
  /// What a prefix is saved as, of whose rows so many are of the prompt, and the others are decode rows.
  std::string save(int of_prompt = prompt_rows) {
    const sequence_id id = pipeline.open();
    prompt(id, of_prompt);
    decode(id, prompt_rows - of_prompt);
    std::string bytes;
    pipeline.save_prefix(
        pipeline.keep_prefix(id, prompt_rows),  // which is queued still
        [&](std::span<const std::byte> more) {
          bytes.append(reinterpret_cast<const char*>(more.data()), more.size());
        },
        model);
    pipeline.release(id);
    return bytes;
  }
  prefix load(const std::string& bytes) {
    std::size_t at = 0;
    return pipeline.load_prefix(
        [&](std::span<std::byte> to) {
          std::memcpy(to.data(), bytes.data() + at, to.size());
          at += to.size();
        },
        model);
  }
  /// What a sequence gives that begins with a prefix, where another has taken pages.
  std::vector<float> given(const std::string& bytes) {
    const sequence_id other = pipeline.open();
    prompt(other, 2 * page + 3);
    const sequence_id id = pipeline.open(load(bytes));
    std::vector<float> all = decode(id);
    pipeline.release(id);
    pipeline.release(other);
    return all;
  }
};

/// What the host saves, and what a sequence gives there behind a prompt.
struct of_host {
  std::string saved;
  std::vector<float> expected;
};
of_host run_host(const input& in);
/// What a sequence gives on the host that begins with a prefix.
std::vector<float> given_by_host(const input& in, const std::string& bytes);

}  // namespace prefix_case
