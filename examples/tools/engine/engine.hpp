// What the engine is asked for, what it did, and who may watch: without CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <freekv/core/shape.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <span>
#include <string_view>
#include <vector>

namespace freekv::examples {

/// Sizes of a decoder: RMSNorm, attention with RoPE, SwiGLU.
struct model_shape {
  std::string_view name;
  int layers, hidden, query_heads, kv_heads, head_dim, ffn, vocab;
  float rope_base;
  bool norms_heads;  // queries and keys, head by head

  int query_width() const { return query_heads * head_dim; }
  int kv_width() const { return kv_heads * head_dim; }
  int qkv_width() const { return query_width() + 2 * kv_width(); }
};
inline constexpr std::array model_shapes{
    model_shape{"llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 500000.0f, false},
    model_shape{"qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, 1000000.0f, true},
    model_shape{"qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, 152064, 1000000.0f, false},
    model_shape{"tiny", 2, 32, 4, 2, 64, 32, 64, 10000.0f, false}};

struct engine_options {
  model_shape model = model_shapes.back();
  budget attends_to{};      // sink and window in tokens, and selected pages
  float similarity = 0.0f;  // cosine of a head's queries of tokens next to each other; 0: the model's own
  float tau = 0.9f;         // below which cosine a head of cosine_drift is corrected
  int batch = 8;            // sequences that step together at most
  int context = 0;          // tokens of random keys and values that each has from the start; 0: prompts
  int prompt = 24;          // tokens of a prompt at most, where there are prompts
  int output = 160;         // tokens that a request asks for at most
  int chunk = 16;           // rows of a prefill step at most
  int draft = 1;            // rows that a sequence brings to a step
  int steps = 1;            // replays
  unsigned seed = 1;
  int report_every = 0;              // replays; reports of each such one are read, which waits; 0: none is
  std::int64_t store_tokens = 0;     // of all sequences together; 0: enough for all
  std::int64_t selected_tokens = 0;  // as the setting of that name

  int max_tokens() const { return context > 0 ? context + steps * draft : prompt + output + draft; }
};

/// Tokens of a page, for models of a head_dim.
constexpr int page_tokens_for(int head_dim) { return head_dim < 128 ? 8 : 32; }

/// Settings of a pipeline of `Method`, with any backend.
template <class Method, class Settings>
Settings settings_for(const engine_options& o) {
  Settings s;
  s.model = {.layers = o.model.layers, .query_heads = o.model.query_heads, .kv_heads = o.model.kv_heads};
  s.budget = o.attends_to;
  s.capacity.max_tokens = o.max_tokens();
  s.capacity.max_sequences = o.context > 0 ? o.batch : 2 * o.batch;  // others are preempted
  s.capacity.max_resident = o.batch;
  s.capacity.max_decode_rows = o.draft;
  s.capacity.store_tokens = o.store_tokens;
  s.capacity.selected_tokens = o.selected_tokens;
  give_values<Method>(s);
  if constexpr (requires { s.correction.tau; }) s.correction.tau = o.tau;
  return s;
}

/// What happened while the engine served requests.
struct engine_counts {
  std::int64_t replays = 0;
  std::int64_t full = 0, padded = 0;  // batches; in a padded one fewer sequences step than the graph takes
  std::int64_t stepped = 0;           // sequences, in all replays
  std::int64_t tokens = 0;            // decoded, guesses that were taken back left out
  std::int64_t prefill_steps = 0;
  std::int64_t joined = 0, left = 0, forked = 0, truncated = 0;
  std::int64_t waited = 0;  // requests that found no pages yet
  std::int64_t pools_full = 0, preempted = 0, restored = 0, restarted = 0;
  std::int64_t pages_filled = 0;
  std::vector<std::int64_t> replays_of_graph;  // by size, rising
};

struct engine_result {
  engine_counts counts;
  std::int64_t store_pages = 0;
  double seconds = 0;  // of replays, from launch to end
  // Of the replays whose reports were read:
  std::int64_t reported_tokens = 0, heads = 0, corrected = 0, recalled = 0, recalled_before_attention = 0;
  std::size_t slice_bytes = 0;
};

/// A row of a step: `token` is what it reads, or where it is negative `chosen[~token]`, and what the model
/// says comes next goes to `chosen[to]`, or nowhere if that is negative.
struct row_input {
  std::int32_t token = 0, position = 0, to = -1;
};

/// What somebody who watches an engine is told.
class engine_observer {
 public:
  enum class change { open, fork, truncate, preempt, restore, release };
  virtual ~engine_observer() = default;
  /// `number`: the fork, or the tokens that stay.
  virtual void changed(change, sequence_id, int /*number*/) {}
  /// A step has been queued, and what it leaves in the model's rows can be queued to be copied.
  virtual void stepped(std::span<const step_input>, std::span<const row_input>, bool /*replayed*/) {}
};

/// A method that was compiled for a head_dim. `run` serves requests, on a device; it throws freekv::error.
struct engine_variant {
  std::string_view name;
  int head_dim, page_tokens;
  engine_result (*run)(const engine_options&);
};

}  // namespace freekv::examples
