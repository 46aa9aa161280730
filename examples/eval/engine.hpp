// A GGUF model, run on the CPU by an unpatched llama.cpp, whose attention anyone may see or take over.
//
// llama.cpp calls back before and after any node of its graph that the callback asks for (cb_eval). With
// flash attention on, one node per layer, FLASH_ATTN_EXT, has all that attention needs: the rotated queries
// are its first operand, the rotated keys and the values have just been written to the cache rows that it
// reads, and its own data is the attention's output. So the graph is stopped once per layer, after that node,
// and its output replaced before the graph goes on. While we decode, llama.cpp's own cache holds only the
// tokens of the step at hand, which makes the attention we replace cost next to nothing at any length.
#pragma once

#include <llama.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rotation.hpp"

namespace freekv::examples {

/// What llama.cpp or the model cannot do for us: one sentence, with the numbers and a remedy.
class engine_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A model as its attention sees it; all its layers have the same shape, others are refused. Layers that
/// slide attend to the last `sliding_window` tokens alone, a row's own included (Gemma 2 and 3).
struct model_shape {
  int layers = 0;  ///< that attend, in graph order
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;  ///< of keys and of values
  int vocabulary = 0;
  int trained_context = 0;
  float scale = 0;                   ///< of the logits, as the graph has it
  std::optional<rotation> rotary{};  ///< of keys in layers that do not slide, where the file says it in full
  std::optional<rotary_pairs> pairs{};  ///< numbers of a key that turn together, where all do, by any angle
  int sliding_window = 0;            ///< tokens; 0: no layer slides
  std::vector<bool> sliding{};       ///< (layers), as llama.cpp's caches have it; empty: no layer slides
  std::string name;

  bool slides(int layer) const { return !sliding.empty() && sliding[layer]; }
};

/// Consecutive tokens of one sequence.
struct sequence_tokens {
  int sequence = 0;  ///< from 0, below the engine's `sequences`
  int position = 0;  ///< of the first
  std::span<const llama_token> tokens;
};

/// One layer's input to attention, for the tokens of a step; valid during the call that it is passed to.
/// Keys and values are those of llama.cpp's cache: half precision, widened.
struct layer_rows {
  int layer = 0;
  int rows = 0;
  int position = 0;                          ///< of the first row
  std::span<const sequence_tokens> of = {};  ///< whose rows they are, one sequence's behind the other's
  const float* query = nullptr;  ///< (rows, query_heads, head_dim), contiguous, after rotary embedding
  const float* key = nullptr;    ///< (rows, kv_heads, head_dim), contiguous, after rotary embedding
  const float* value = nullptr;  ///< (rows, kv_heads, head_dim), contiguous
};

/// Stands in for llama.cpp's own attention; called once per layer, layers in order.
class attention {
 public:
  virtual ~attention() = default;
  /// Overwrites `output`, (rows, query_heads, head_dim): on entry it holds llama.cpp's own, over the same
  /// rows only. A sequence's rows are causal among themselves. May throw: the step stops there and
  /// `engine::decode` throws the same.
  virtual void attend(const layer_rows& rows, float* output) = 0;
};

/// Sees every layer's rows while llama.cpp attends itself; called once per layer and chunk, layers in order.
class observer {
 public:
  virtual ~observer() = default;
  /// May throw: the chunk stops there and `engine::prefill` throws the same.
  virtual void observe(const layer_rows& rows) = 0;
};

/// The weights and the tokenizer: loaded once, copied by reference, shared by any number of engines.
class model {
 public:
  /// Loads the file, and evaluates one token to learn the shape from the graph itself. llama.cpp's log, which
  /// is global, is silenced. Throws `engine_error` if the file cannot be loaded, or if the model's attention
  /// has what layer_rows cannot express (chunks, soft cap, sinks, ALiBi, ...).
  explicit model(const std::string& path);

  const model_shape& shape() const noexcept { return shape_; }
  /// `special`: add the tokens that the model wants around a text, and read control tokens in it as such.
  std::vector<llama_token> tokenize(std::string_view text, bool special = true) const;
  /// The tokens of a text behind another, control tokens in it read as such: what stands around a message in
  /// a chat.
  std::vector<llama_token> tokenize_part_of_chat(std::string_view text) const;
  /// What stands before and behind a user's message, up to where the model answers, by its own chat template.
  /// Throws engine_error where the file has none that llama.cpp knows.
  std::pair<std::string, std::string> around_message() const;
  std::string to_text(llama_token token) const;
  std::size_t weight_bytes() const;
  /// Does the token end a text? And all those that do.
  bool ends(llama_token token) const;
  std::vector<llama_token> ends() const;

 private:
  friend class engine;
  std::vector<llama_token> tokenize(std::string_view text, bool adds, bool reads_control) const;

  std::shared_ptr<llama_model> weights_;
  model_shape shape_;
  bool context_sets_rotation_ = false;  // LongRoPE
};

/// Sequences of a model, one unless more are asked for: a llama.cpp context with its own cache and threads.
/// Used by one thread at a time.
class engine {
 public:
  struct options {
    int threads = 2;
    /// Tokens that the engine's own cache holds, rounded up to 256; 0: the trained context. An engine for
    /// `decode` needs only `rows`: positions may go beyond.
    int context = 0;
    int rows = 512;  ///< tokens evaluated at once, at most
    int sequences = 1;
    /// All sequences share the context and one attention node has all their rows, as `decode` needs it; off:
    /// each has its part of the context, and llama.cpp's own attention does not pass over the others' tokens.
    bool unified = true;
    bool flash_attention = true;  ///< needed to see the rows; off: for comparison only
  };

  struct prefill_options {
    observer* seen_by = nullptr;
    std::function<void(int tokens_done)> progress = {};
    int sequence = 0;
  };

  /// Throws `engine_error` if llama.cpp cannot make such a context.
  engine(model shared, options wanted);
  engine(const engine&) = delete;
  engine& operator=(const engine&) = delete;

  const model_shape& shape() const noexcept { return model_.shape_; }

  /// llama.cpp's own attention, which keeps the tokens in the engine's cache. `position` is that of the first
  /// token and must be the sequence's `length`. Returns the last token's logits, valid until the next
  /// evaluation. Throws `engine_error`, or what the observer threw; a chunk that failed leaves no tokens in
  /// the cache.
  std::span<const float> prefill(std::span<const llama_token> tokens, int position,
                                 const prefill_options& how);
  std::span<const float> prefill(std::span<const llama_token> tokens, int position) {
    return prefill(tokens, position, {});
  }

  /// Our attention, which keeps what it needs of the tokens. The engine's own cache is emptied first, so any
  /// position is possible, also beyond the engine's context. Returns the logits of every token, (tokens,
  /// vocabulary), in the step's order, valid until the next evaluation. Throws `engine_error`, or what the
  /// attention threw; either way the engine stays usable.
  std::span<const float> decode(std::span<const sequence_tokens> step, attention& ours);
  std::span<const float> decode(std::span<const llama_token> tokens, int position, attention& ours) {
    const sequence_tokens step{0, position, tokens};
    return decode({&step, 1}, ours);
  }
  std::span<const float> decode(llama_token token, int position, attention& ours) {
    return decode({&token, 1}, position, ours);
  }

  /// llama.cpp's own attention over its own cache, without a stop. Positions must be the sequences' `length`.
  /// Returns the logits of every token, as `decode` does.
  std::span<const float> decode_stock(std::span<const sequence_tokens> step);
  std::span<const float> decode_stock(llama_token token, int position) {
    const sequence_tokens step{0, position, {&token, 1}};
    return decode_stock({&step, 1});
  }

  /// The position that follows a sequence's last token in the engine's own cache; 0 if it has none.
  int length(int sequence = 0) const;
  /// Forgets a sequence's tokens from `position` on.
  void truncate(int position, int sequence = 0);
  /// Moves the tokens of one sequence behind those of another, to the positions that follow; keys are rotated
  /// on. The cache is a unified one. Throws `engine_error`.
  void join(int from, int to);
  /// Forgets all tokens of all sequences.
  void clear();
  /// A sequence of the engine's own cache, to a file and back, so that a prompt need not be prefilled again.
  /// Both sides need the same model and the same `flash_attention`: without it llama.cpp transposes the
  /// values. The file takes its place when it is complete. Throws `engine_error`; a load that failed leaves
  /// the sequence empty.
  void save_state(const std::string& path, int sequence = 0) const;
  void load_state(const std::string& path, int sequence = 0);

 private:
  friend class model;
  using row_handler = std::function<void(const layer_rows&, float* output)>;

  struct cache_write {
    const ggml_tensor* cache;
    std::vector<std::int64_t> cells;
  };
  struct context_deleter {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  struct threads_deleter {
    void operator()(ggml_threadpool* threads) const { ggml_threadpool_free(threads); }
  };

  static bool on_node(ggml_tensor* node, bool ask, void* self) noexcept;
  void note_cache_write(const ggml_tensor* node);
  void hand_over(ggml_tensor* attention_node);
  void check_shape(const ggml_tensor* attention_node);
  void note_window(const ggml_tensor* cache);
  const float* read_cache(const ggml_tensor* view, int rows, std::vector<float>& into) const;
  std::span<const float> evaluate(std::span<const sequence_tokens> step, int first_logits,
                                  row_handler handler);
  std::string state_title() const;
  void require_sequence(int sequence) const;
  void require_length(int position, int sequence) const;
  void require_flash_attention() const;

  model model_;
  options options_;
  std::unique_ptr<ggml_threadpool, threads_deleter> threads_;
  std::unique_ptr<llama_context, context_deleter> context_;

  // of the evaluation under way; no tensor is remembered beyond its layer, as llama.cpp may rebuild its graph
  row_handler handler_;
  std::exception_ptr thrown_;
  int layer_ = 0;
  std::span<const sequence_tokens> step_;
  std::vector<cache_write> writes_;
  std::vector<float> query_, key_, value_;
};

}  // namespace freekv::examples
