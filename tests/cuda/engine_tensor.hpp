// What is done with a pipeline beside an engine's own paged tensor: on the host, which another compiler
// compiles, and on a device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <freekv/freekv.hpp>
#include <list>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "random_numbers.hpp"

namespace engine_tensor {

using namespace freekv;
using both_sides::pinned;
using both_sides::random_numbers;

inline constexpr int head_dim = 64, query_heads = 6, kv_heads = 2, group = query_heads / kv_heads, layers = 3,
                     page = 8, max_tokens = 150;
inline constexpr std::size_t key_row = kv_heads * head_dim, query_row = query_heads * head_dim;

using freekv::to_size;

/// The first layer keeps everything.
template <class Backend>
using pipeline_of = retrieval_pipeline<kv_shape<half, head_dim>, Backend, page_size<page>, complete_first<1>,
                                       any_of<min_max, key_subspace<24, 3>>, any_of<identity, int8_token>>;

enum class kept { as_is, encoded, by_subspace };

template <class Settings>
Settings settings(kept what, const pinned<float>& basis) {
  Settings s;
  s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
  s.budget = {.sink = 8, .window = 16, .selected_units = 3};
  s.capacity.max_tokens = max_tokens;
  s.capacity.max_sequences = 4;
  s.capacity.max_resident = 3;
  s.capacity.max_decode_rows = 3;
  s.correction.tau = 0.8f;
  if (what == kept::encoded) s.codec = int8_token{};
  if (what == kept::by_subspace)
    s.summary = key_subspace<24, 3>{.basis = {basis.data(), layers, kv_heads, 24, head_dim}};
  return s;
}

/// Rows of one sequence in all layers.
struct text {
  explicit text(unsigned seed) : random(seed) {
    for (int layer = 0; layer < layers; ++layer) {
      keys[layer] = random.normals<half>(max_tokens * key_row);
      values[layer] = random.normals<half>(max_tokens * key_row);
      queries[layer] = random.normals<float>(max_tokens * query_row);
      for (std::size_t i = query_row; i < queries[layer].size(); ++i)  // some drift
        queries[layer][i] = 0.8f * queries[layer][i - query_row] + 0.6f * queries[layer][i];
    }
  }
  random_numbers random;
  pinned<half> keys[layers], values[layers];
  pinned<float> queries[layers];
};

/// How an engine's tensor has keys and values: planes of the tensor or of a block, or side by side in a row.
struct layout {
  const char* name;
  std::int64_t head, values;  // in elements
  std::int64_t token, block;
  static layout nhd(int tokens, int blocks) {
    return {"NHD", head_dim, tokens * std::int64_t{key_row} * blocks, key_row,
            tokens * std::int64_t{key_row}};
  }
  static layout hnd(int tokens, int) {
    return {"HND", tokens * head_dim, tokens * std::int64_t{key_row}, head_dim,
            2 * tokens * std::int64_t{key_row}};
  }
  static layout packed_nhd(int tokens, int) {
    return {"packed NHD", 2 * head_dim, head_dim, 2 * key_row, 2 * tokens * std::int64_t{key_row}};
  }
  static layout packed_hnd(int tokens, int) {
    return {"packed HND", 2 * tokens * head_dim, head_dim, 2 * head_dim, 2 * tokens * std::int64_t{key_row}};
  }
  /// Rows with 8 elements behind each.
  static layout padded(int tokens, int) {
    return {"padded HND", tokens * (2 * head_dim + 8), head_dim, 2 * head_dim + 8,
            kv_heads * tokens * std::int64_t{2 * head_dim + 8}};
  }
  std::size_t numbers(int tokens, int blocks) const {
    return to_size(std::max(blocks * block + values + tokens * token, blocks * block * 2));
  }
};
using layout_of = layout (*)(int tokens, int blocks);
inline constexpr layout_of layouts[] = {layout::nhd, layout::hnd, layout::packed_nhd, layout::packed_hnd,
                                        layout::padded};

/// Different block ids below `blocks`, in random order.
inline std::vector<std::int32_t> draw_ids(random_numbers& random, int blocks, int count) {
  std::vector<std::int32_t> ids(to_size(blocks));
  std::iota(ids.begin(), ids.end(), 0);
  for (int i = blocks - 1; i > 0; --i) std::swap(ids[to_size(i)], ids[to_size(random.below(i + 1))]);
  ids.resize(to_size(count));
  return ids;
}

/// A prompt in a paged tensor of the engine's, of which another stream's kernels have filled it.
template <class In>
struct prompt_tensor {
  pinned<In> data, source;  // `source` comes to `data` by the compute stream
  pinned<std::int32_t> table;
  paged_blocks<const In> rows;

  prompt_tensor(const text& from, int layer, int tokens, layout_of how, int block_tokens,
                random_numbers& random) {
    const int held = (tokens + block_tokens - 1) / block_tokens, blocks = held + 3;
    const layout of = how(block_tokens, blocks);
    const auto ids = draw_ids(random, blocks, held);
    table.assign(ids.begin(), ids.end());
    source.assign(of.numbers(block_tokens, blocks), from_float<In>(NAN));
    data = source;
    for (int t = 0; t < tokens; ++t)
      for (int head = 0; head < kv_heads; ++head)
        for (int i = 0; i < head_dim; ++i) {
          const std::int64_t at =
              table[to_size(t / block_tokens)] * of.block + t % block_tokens * of.token + head * of.head + i;
          const std::size_t in_text = to_size(t) * key_row + to_size(head * head_dim + i);
          source[to_size(at)] = from_float<In>(to_float(from.keys[layer][in_text]));
          source[to_size(at + of.values)] = from_float<In>(to_float(from.values[layer][in_text]));
        }
    rows = {{data.data(), data.data() + of.values, of.block, of.token, of.head, block_tokens}, table};
  }
};

/// What a run gives: outputs and reports of decode steps, in order.
struct run_results {
  pinned<float> out;
  pinned<std::int32_t> reports;
};

/// A pipeline and what is done with it. Of a device, `bring` is queued, and a kernel of the engine's may
/// attend.
template <class Backend>
class engine {
 public:
  using pipeline_type = pipeline_of<Backend>;
  using footprint = typename pipeline_type::footprint;
  struct options {
    kept what = kept::as_is;
    layout_of prompts_from = nullptr;  // append_from, of that layout
    bool hurried = false;              // prompts come in chunks of 5 tokens, and nothing waits
    bool by_tables = false;
  };

  engine(Backend& backend, const footprint& needs, const memory_resources& memory, const options& o,
         const std::vector<paged_blocks<half>>& lent)
      : options_(o), pipeline_(needs, backend, memory, lent) {}
  virtual ~engine() = default;

  /// Two sequences, and others that take turns with the second: prompts, steps of 1 to 3 rows, drafts taken
  /// back, branches whose open pages are written to by prompts.
  run_results live(const text& first, const text& second) {
    const auto a = pipeline_.open(), b = pipeline_.open();
    prompt({{a, &first, 70}, {b, &second, 37}});
    for (int i = 0; i < 9; ++i) {
      const int rows = 1 + i % 3;
      decode({{a, &first, rows}, {b, &second, 1}});
      if (rows == 3) pipeline_.truncate(a, pipeline_.tokens(a) - 2);
      if (i == 4) {
        pipeline_.preempt(b);
        const auto c = pipeline_.open(), branch = pipeline_.fork(a);
        prompt({{c, &second, 60}, {branch, &first, 11}, {a, &first, 3}});
        decode({{c, &second, 1}, {branch, &first, 2}, {a, &first, 1}});
        pipeline_.release(branch);
        pipeline_.release(c);
        pipeline_.restore(b);
      }
    }
    return std::move(results_);
  }
  pipeline_type& pipeline() { return pipeline_; }

 protected:
  struct part {
    sequence_id id;
    const text* source;
    int tokens;
  };
  virtual void bring(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
  virtual void attend(typename pipeline_type::step& step, int layer, const std::vector<part>&,
                      const pinned<float>&, pinned<float>& out) {
    step.attend(layer, out);
  }
  const options& chosen() const { return options_; }

 private:
  struct rows_of_step {
    pinned<half> keys, values;
    pinned<float> queries;
  };
  rows_of_step rows_of(const std::vector<part>& parts, int layer) const {
    rows_of_step rows;
    for (const part& p : parts) {
      const auto take = [&](const auto& from, auto& to, std::size_t width) {
        const auto begin =
            from.begin() + static_cast<long>(to_size(pipeline_.tokens(p.id) - p.tokens) * width);
        to.insert(to.end(), begin, begin + static_cast<long>(to_size(p.tokens) * width));
      };
      take(p.source->keys[layer], rows.keys, key_row);
      take(p.source->values[layer], rows.values, key_row);
      take(p.source->queries[layer], rows.queries, query_row);
    }
    return rows;
  }
  void prompt(std::vector<part> parts) {
    const int chunk = options_.hurried ? 5 : max_tokens;
    for (bool more = true; more;) {
      std::vector<part> now;
      std::vector<step_input> inputs;
      more = false;
      for (part& p : parts) {
        const int tokens = std::min(chunk, p.tokens);
        p.tokens -= tokens;
        more = more || p.tokens > 0;
        if (tokens == 0) continue;
        now.push_back({p.id, p.source, tokens});
        inputs.push_back({p.id, tokens, step_phase::prefill});
      }
      auto step = pipeline_.begin_step(inputs);
      for (int layer = 0; layer < layers; ++layer) {
        if (options_.prompts_from == nullptr) {
          rows_of_step& rows = waiting_.emplace_back(rows_of(now, layer));
          step.append(layer, {rows.keys, rows.values, {}});
        } else if (random_.below(2) == 0) {
          append_from(step, layer, now, tensors_);
        } else {
          append_from(step, layer, now, float_tensors_);
        }
      }
      step.end();
      if (!options_.hurried) pipeline_.synchronize();
    }
  }
  template <class In>
  void append_from(typename pipeline_type::step& step, int layer, const std::vector<part>& parts,
                   std::vector<std::unique_ptr<prompt_tensor<In>>>& tensors) {
    std::vector<paged_blocks<const In>> rows;
    for (const part& p : parts) {
      constexpr int sizes[] = {1, 5, 16, 64};
      const auto& made = tensors.emplace_back(std::make_unique<prompt_tensor<In>>(
          *p.source, layer, pipeline_.tokens(p.id), options_.prompts_from, sizes[random_.below(4)], random_));
      rows.push_back(made->rows);
      bring(made->data.data(), made->source.data(), made->data.size() * sizeof(In));
    }
    step.template append_from<In>(layer, rows);
  }

  void decode(const std::vector<part>& parts) {
    std::vector<step_input> inputs;
    bool single = true;
    for (const part& p : parts) {
      inputs.push_back({p.id, p.tokens});
      single = single && p.tokens == 1;
    }
    auto step = pipeline_.begin_step(inputs);
    std::vector<pinned<float>> outs;
    for (int layer = 0; layer < layers; ++layer) {
      rows_of_step& rows = waiting_.emplace_back(rows_of(parts, layer));
      pinned<float>& out = outs.emplace_back(rows.queries.size());
      step.append(layer, {rows.keys, rows.values, rows.queries});
      if (options_.by_tables && single && layer > 0)
        attend(step, layer, parts, rows.queries, out);
      else
        step.attend(layer, out);
    }
    step.end();
    pipeline_.synchronize();
    for (int layer = 0; layer < layers; ++layer) {
      results_.out.insert(results_.out.end(), outs[to_size(layer)].begin(), outs[to_size(layer)].end());
      for (const part& p : parts) {
        const step_report r = pipeline_.report(layer)[p.id];
        for (const auto& numbers : {r.recalled, r.promoted, r.attended_count})
          results_.reports.insert(results_.reports.end(), numbers.begin(), numbers.end());
        if (layer == 0) continue;
        for (int head = 0; head < kv_heads; ++head) {
          const auto attended = r.attended.subspan(r.attended.size() / kv_heads * to_size(head));
          results_.reports.insert(results_.reports.end(), attended.begin(),
                                  attended.begin() + r.attended_count[to_size(head)]);
        }
      }
    }
  }
  options options_;
  random_numbers random_{11};
  std::list<rows_of_step> waiting_;
  std::vector<std::unique_ptr<prompt_tensor<half>>> tensors_;
  std::vector<std::unique_ptr<prompt_tensor<float>>> float_tensors_;
  run_results results_;
  pipeline_type pipeline_;  // goes first
};

/// The same on the host, whose prompts come out of a packed tensor.
run_results run_on_host(kept what, const text& first, const text& second, const pinned<float>& basis);

}  // namespace engine_tensor
