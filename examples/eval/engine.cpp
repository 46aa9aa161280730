#include "engine.hpp"

#include <ggml-cpu.h>
#include <gguf.h>
#include <freekv/core/size.hpp>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <span>
#include <sstream>
#include <utility>

#include "new_file.hpp"

namespace freekv::examples {
namespace {

// llama.cpp says why something failed only in its log, which is global: errors are kept, the rest is dropped.
std::mutex log_mutex;
std::string logged_errors;

void keep_errors(ggml_log_level level, const char* text, void*) {
  if (level != GGML_LOG_LEVEL_ERROR) return;
  const std::lock_guard lock(log_mutex);
  logged_errors += text;
}

void forget_errors() {
  const std::lock_guard lock(log_mutex);
  logged_errors.clear();
}

// The first error is the cause, later ones only its echo. "function: " before it says nothing to a user.
std::string logged_cause() {
  const std::lock_guard lock(log_mutex);
  const auto line = logged_errors.substr(0, logged_errors.find('\n'));
  const auto colon = line.find(": ");
  if (line.empty()) return "llama.cpp gives no reason";
  return colon == std::string::npos ? line : line.substr(colon + 2);
}

std::string metadata(const llama_model* weights, const std::string& key) {
  std::array<char, 256> text{};
  llama_model_meta_val_str(weights, key.c_str(), text.data(), text.size());
  return text.data();
}

/// Which numbers of a key turn together, where all do and as one position.
std::optional<rotary_pairs> pairs_of(const llama_model* weights, int head_dim) {
  const std::string dims =
      metadata(weights, metadata(weights, "general.architecture") + ".rope.dimension_count");
  if (!dims.empty() && dims != std::to_string(head_dim)) return std::nullopt;
  const auto kind = llama_model_rope_type(weights);
  if (kind == LLAMA_ROPE_TYPE_NORM) return rotary_pairs::neighbours;
  if (kind == LLAMA_ROPE_TYPE_NEOX) return rotary_pairs::halves;
  return std::nullopt;
}

/// The rotary embedding of keys, where the file says all of it: without scaling and factors for each pair.
std::optional<rotation> rotation_of(const llama_model* weights, const std::string& path,
                                    const model_shape& shape) {
  if (!shape.pairs) return std::nullopt;
  const std::string rope = metadata(weights, "general.architecture") + ".rope.";
  const std::string scaling = metadata(weights, rope + "scaling.type");
  if (!scaling.empty() && scaling != "none") return std::nullopt;
  const std::unique_ptr<gguf_context, decltype(&gguf_free)> file(
      gguf_init_from_file(path.c_str(), {true, nullptr}), gguf_free);
  if (!file || gguf_find_tensor(file.get(), "rope_freqs.weight") >= 0) return std::nullopt;
  for (const char* key : {"scaling.factor", "scale_linear"})
    if (scaling != "none" && gguf_find_key(file.get(), (rope + key).c_str()) >= 0) return std::nullopt;
  const std::int64_t base = gguf_find_key(file.get(), (rope + "freq_base").c_str());
  return rotation_of_base(base >= 0 ? static_cast<double>(gguf_get_val_f32(file.get(), base)) : 10000.0,
                          shape.head_dim / 2, *shape.pairs);
}

[[noreturn]] void refuse(const model_shape& shape, const std::string& property) {
  throw engine_error("model '" + shape.name + "' " + property +
                     ": take a model whose layers attend to the whole sequence, or to a sliding window of "
                     "it, by plain softmax "
                     "attention");
}

/// Tokens beside a window and an evaluation's rows: llama.cpp rounds a cache up to 256.
constexpr int window_slack = 1024;

bool in_host_memory(const ggml_tensor* tensor) {
  return tensor->buffer != nullptr && ggml_backend_buffer_is_host(tensor->buffer);
}

// A row of attention's operand, (head_dim, rows, heads, 1) in ggml's order, fastest first.
const char* row_of(const ggml_tensor* tensor, std::int64_t row, std::int64_t head) {
  return static_cast<const char*>(tensor->data) + row * tensor->nb[1] + head * tensor->nb[2];
}

}  // namespace

model::model(const std::string& path) {
  static std::once_flag started;
  std::call_once(started, [] {
    llama_log_set(keep_errors, nullptr);
    llama_backend_init();
  });

  // all layers stay in host memory, where we read the rows
  std::array<ggml_backend_dev_t, 1> no_devices{};
  auto parameters = llama_model_default_params();
  parameters.devices = no_devices.data();
  parameters.n_gpu_layers = 0;
  forget_errors();
  weights_.reset(llama_model_load_from_file(path.c_str(), parameters), llama_model_free);
  if (!weights_) {
    throw engine_error("cannot load model '" + path + "' (" + logged_cause() +
                       "): give the path of a complete GGUF file");
  }

  const auto* weights = weights_.get();
  const auto architecture = metadata(weights, "general.architecture");
  shape_.name = metadata(weights, "general.name");
  if (shape_.name.empty()) shape_.name = architecture;
  shape_.vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(weights));
  shape_.trained_context = llama_model_n_ctx_train(weights);

  if (llama_model_has_encoder(weights)) refuse(shape_, "has an encoder");
  if (llama_model_is_recurrent(weights)) refuse(shape_, "is recurrent");
  if (llama_model_is_hybrid(weights)) refuse(shape_, "has recurrent layers");
  if (llama_model_is_diffusion(weights)) refuse(shape_, "is a diffusion model");
  if (architecture == "llama4") refuse(shape_, "has layers that attend to chunks");
  shape_.sliding_window = static_cast<int>(llama_model_n_swa(weights));

  // Layers that slide have caches of their window, which is less than this context.
  engine probe(*this, {.threads = 1,
                       .context = shape_.sliding_window > 0 ? shape_.sliding_window + window_slack : 1,
                       .rows = 1});
  const llama_token token = 0;
  const sequence_tokens step{0, 0, {&token, 1}};
  probe.evaluate({&step, 1}, 1, [](const layer_rows&, float*) {});
  shape_ = probe.model_.shape_;
  if (std::count(shape_.sliding.begin(), shape_.sliding.end(), true) == 0) {
    shape_.sliding.clear();
    shape_.sliding_window = 0;
  }
  shape_.pairs = pairs_of(weights, shape_.head_dim);
  shape_.rotary = rotation_of(weights, path, shape_);
  context_sets_rotation_ = metadata(weights, architecture + ".rope.scaling.type") == "longrope";
}

std::vector<llama_token> model::tokenize(std::string_view text, bool adds, bool reads_control) const {
  const auto* vocabulary = llama_model_get_vocab(weights_.get());
  std::vector<llama_token> tokens(text.size() + 2);  // at most one a byte, begin and end
  const auto count = llama_tokenize(vocabulary, text.data(), static_cast<int>(text.size()), tokens.data(),
                                    static_cast<int>(tokens.size()), adds, reads_control);
  if (count < 0)
    throw engine_error("llama.cpp cannot tokenize a text of " + std::to_string(text.size()) +
                       " bytes: split it");
  tokens.resize(to_size(count));
  return tokens;
}

std::vector<llama_token> model::tokenize(std::string_view text, bool special) const {
  return tokenize(text, special, special);
}

std::vector<llama_token> model::tokenize_part_of_chat(std::string_view text) const {
  return tokenize(text, false, true);
}

std::pair<std::string, std::string> model::around_message() const {
  const char* const chat_template = llama_model_chat_template(weights_.get(), nullptr);
  const std::string content = "CONTENT";
  const llama_chat_message message{"user", content.c_str()};
  std::string whole(4096, '\0');
  const auto size = chat_template == nullptr
                        ? -1
                        : llama_chat_apply_template(chat_template, &message, 1, true, whole.data(),
                                                    static_cast<int>(whole.size()));
  const std::size_t at = size < 0 ? std::string::npos : whole.find(content);
  if (at == std::string::npos)
    throw engine_error(
        "model '" + shape_.name + "' has " +
        (chat_template == nullptr ? "no chat template" : "a chat template that llama.cpp does not know") +
        ": ask it without --chat, or take one that is made to chat");
  whole.resize(std::min(whole.size(), to_size(size)));
  return {whole.substr(0, at), whole.substr(at + content.size())};
}

std::string model::to_text(llama_token token) const {
  const auto* vocabulary = llama_model_get_vocab(weights_.get());
  std::string text(32, '\0');
  for (;;) {
    const auto count =
        llama_token_to_piece(vocabulary, token, text.data(), static_cast<int>(text.size()), 0, true);
    text.resize(to_size(std::abs(count)));
    if (count >= 0) return text;
  }
}

std::size_t model::weight_bytes() const { return llama_model_size(weights_.get()); }

bool model::ends(llama_token token) const {
  return llama_vocab_is_eog(llama_model_get_vocab(weights_.get()), token);
}

std::vector<llama_token> model::ends() const {
  std::vector<llama_token> tokens;
  for (llama_token token = 0; token < shape_.vocabulary; ++token)
    if (ends(token)) tokens.push_back(token);
  return tokens;
}

engine::engine(model shared, options wanted) : model_(std::move(shared)), options_(wanted) {
  if (options_.threads < 1 || options_.context < 0 || options_.rows < 1) {
    throw engine_error("an engine needs at least 1 thread, 1 row and a context of 0 or more tokens, not " +
                       std::to_string(options_.threads) + ", " + std::to_string(options_.rows) + " and " +
                       std::to_string(options_.context));
  }
  if (const auto most = static_cast<int>(llama_max_parallel_sequences());
      options_.sequences < 1 || options_.sequences > most) {
    throw engine_error("an engine has 1 to " + std::to_string(most) +
                       " sequences, which is llama.cpp's most, not " + std::to_string(options_.sequences));
  }
  if (const int least = options_.context > 0 ? std::min(options_.context, options_.rows) : options_.rows;
      options_.sequences > least) {
    throw engine_error("an engine of " + std::to_string(options_.sequences) +
                       " sequences evaluates a row of each at once, not " + std::to_string(options_.rows) +
                       " rows in a context of " + std::to_string(options_.context) +
                       ": give a row and a token of context for each");
  }
  if (model_.context_sets_rotation_ && options_.context != 0) {
    throw engine_error("model '" + shape().name +
                       "' has LongRoPE, whose rotation llama.cpp chooses by the context's size: " +
                       "FreeKV's engines have contexts of different sizes, so choose another model");
  }
  auto parameters = llama_context_default_params();
  parameters.n_ctx = static_cast<std::uint32_t>(options_.context);
  // equal, so that an evaluation is one graph: its attention nodes, counted, are the layers
  parameters.n_batch = parameters.n_ubatch = static_cast<std::uint32_t>(options_.rows);
  parameters.n_seq_max = static_cast<std::uint32_t>(options_.sequences);
  parameters.kv_unified = options_.unified;
  parameters.n_threads = parameters.n_threads_batch = options_.threads;
  parameters.flash_attn_type =
      options_.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  parameters.type_k = parameters.type_v = GGML_TYPE_F16;
  parameters.swa_full =
      false;  // layers that slide keep their window and an evaluation's rows, as in llama.cpp's programs
  parameters.offload_kqv = false;
  if (options_.flash_attention) {
    parameters.cb_eval = on_node;
    parameters.cb_eval_user_data = this;
  }
  forget_errors();
  context_.reset(llama_init_from_model(model_.weights_.get(), parameters));
  if (!context_) {
    throw engine_error("llama.cpp cannot make a context of " + std::to_string(options_.context) +
                       " tokens (" + logged_cause() + "): ask for fewer tokens or rows");
  }
  options_.rows = static_cast<int>(llama_n_batch(context_.get()));

  // Between two parts of a graph llama.cpp's threads must sleep, not spin: our attention needs the cores.
  auto pool = ggml_threadpool_params_default(options_.threads);
  pool.poll = 0;
  threads_.reset(ggml_threadpool_new(&pool));
  llama_attach_threadpool(context_.get(), threads_.get(), threads_.get());
}

std::span<const float> engine::prefill(std::span<const llama_token> tokens, int position,
                                       const prefill_options& how) {
  require_length(position, how.sequence);
  row_handler handler;
  if (how.seen_by) {
    require_flash_attention();
    handler = [&how](const layer_rows& rows, float*) { how.seen_by->observe(rows); };
  }
  std::span<const float> logits;
  for (std::size_t done = 0; done < tokens.size();) {
    const auto chunk = tokens.subspan(done, std::min<std::size_t>(tokens.size() - done, options_.rows));
    const auto rows = static_cast<int>(chunk.size());
    const bool last = done + chunk.size() == tokens.size();
    const sequence_tokens step{how.sequence, position + static_cast<int>(done), chunk};
    logits = evaluate({&step, 1}, last ? rows - 1 : rows, handler);
    done += chunk.size();
    if (how.progress) how.progress(static_cast<int>(done));
  }
  return logits;
}

std::span<const float> engine::decode(std::span<const sequence_tokens> step, attention& ours) {
  require_flash_attention();
  if (!options_.unified && options_.sequences > 1) {
    throw engine_error(
        "this engine was made with unified = false, where no attention node has the rows of all sequences: "
        "make it with unified = true");
  }
  clear();
  return evaluate(step, 0, [&ours](const layer_rows& rows, float* output) { ours.attend(rows, output); });
}

std::span<const float> engine::decode_stock(std::span<const sequence_tokens> step) {
  for (const sequence_tokens& of : step) require_length(of.position, of.sequence);
  return evaluate(step, 0, nullptr);
}

int engine::length(int sequence) const {
  require_sequence(sequence);
  return llama_memory_seq_pos_max(llama_get_memory(context_.get()), sequence) + 1;
}

void engine::truncate(int position, int sequence) {
  require_sequence(sequence);
  llama_memory_seq_rm(llama_get_memory(context_.get()), sequence, position, -1);
}

void engine::join(int from, int to) {
  auto* const memory = llama_get_memory(context_.get());
  const int tokens = length(from), before = length(to);
  if (!options_.unified || from == to || !llama_memory_can_shift(memory)) {
    throw engine_error(
        "sequence " + std::to_string(from) + " of " + std::to_string(tokens) +
        " tokens cannot be moved behind sequence " + std::to_string(to) + " of " + std::to_string(before) +
        ": take two sequences of an engine made with unified = true, and a model with rotary embedding");
  }
  llama_memory_seq_add(memory, from, 0, -1, before);
  llama_memory_seq_cp(memory, from, to, -1, -1);
  llama_memory_seq_rm(memory, from, -1, -1);
}

void engine::clear() { llama_memory_seq_rm(llama_get_memory(context_.get()), -1, 0, -1); }

std::string engine::state_title() const { return "FreeKV llama.cpp state, " + shape().name; }

// Not llama_state_seq_save_file and _load_file: the latter aborts the process on a truncated file, reading
// from memory is checked.
void engine::save_state(const std::string& path, int sequence) const {
  require_sequence(sequence);
  forget_errors();
  std::vector<std::uint8_t> state(llama_state_seq_get_size(context_.get(), sequence));
  const auto size = llama_state_seq_get_data(context_.get(), state.data(), state.size(), sequence);
  if (size == 0)
    throw engine_error("llama.cpp cannot save its state (" + logged_cause() + "): prefill again");
  const std::string title = state_title() + '\n';
  try {
    new_file file(path);
    file.write(std::as_bytes(std::span(title)));
    file.write(std::as_bytes(std::span(state).first(size)));
    file.finish();
    file.take_place();
  } catch (const file_error& e) {
    throw engine_error(std::string(e.what()) + "; give a path with room for " + std::to_string(size) +
                       " bytes");
  }
}

void engine::load_state(const std::string& path, int sequence) {
  truncate(0, sequence);
  std::ifstream file(path, std::ios::binary);
  std::string title;
  if (!std::getline(file, title) || title != state_title()) {
    throw engine_error("'" + path + "' holds no state of model '" + shape().name +
                       "': save one with this model first");
  }
  std::ostringstream rest;
  rest << file.rdbuf();
  const auto state = std::move(rest).str();
  forget_errors();
  if (llama_state_seq_set_data(context_.get(), reinterpret_cast<const std::uint8_t*>(state.data()),
                               state.size(), sequence) != 0)
    return;
  const auto cause = logged_cause();
  truncate(0, sequence);
  throw engine_error("cannot load state '" + path + "' (" + cause +
                     "): give a whole one saved with the same flash_attention, and a context that holds it");
}

void engine::require_sequence(int sequence) const {
  if (sequence >= 0 && sequence < options_.sequences) return;
  throw engine_error("sequence " + std::to_string(sequence) + " is not one of this engine's, 0 to " +
                     std::to_string(options_.sequences - 1) + ": make it with more sequences");
}

void engine::require_length(int position, int sequence) const {
  const int has = length(sequence);
  if (position == has) return;
  throw engine_error("position " + std::to_string(position) + " does not follow the " + std::to_string(has) +
                     " tokens in llama.cpp's cache: prefill, load or truncate to " +
                     std::to_string(position) + " first");
}

void engine::require_flash_attention() const {
  if (options_.flash_attention) return;
  throw engine_error(
      "this engine was made with flash_attention = false, and rows are read at the flash attention node: "
      "make it with flash_attention = true");
}

// Evaluates the tokens as one graph, with logits of the rows from `first_logits` on; a handler gets all
// layers' rows.
std::span<const float> engine::evaluate(std::span<const sequence_tokens> step, int first_logits,
                                        row_handler handler) {
  std::vector<llama_token> token;
  std::vector<llama_pos> positions;
  std::vector<llama_seq_id> sequence;
  for (const sequence_tokens& of : step) {
    require_sequence(of.sequence);
    for (std::size_t row = 0; row < of.tokens.size(); ++row) {
      token.push_back(of.tokens[row]);
      positions.push_back(of.position + static_cast<int>(row));
      sequence.push_back(of.sequence);
    }
  }
  const auto rows = static_cast<int>(token.size());
  const int position = step.empty() ? 0 : step.front().position;
  if (rows < 1 || rows > options_.rows || *std::min_element(positions.begin(), positions.end()) < 0) {
    throw engine_error("cannot evaluate " + std::to_string(rows) + " tokens at position " +
                       std::to_string(position) + ": give 1 to " + std::to_string(options_.rows) +
                       " (rows) at position 0 or later");
  }
  std::vector<std::int32_t> sequence_count(token.size(), 1);
  std::vector<llama_seq_id*> sequences;
  std::vector<std::int8_t> wants_logits;
  for (int row = 0; row < rows; ++row) {
    sequences.push_back(&sequence[row]);
    wants_logits.push_back(row >= first_logits);
  }
  llama_batch batch{};
  batch.n_tokens = rows;
  batch.token = token.data();
  batch.pos = positions.data();
  batch.n_seq_id = sequence_count.data();
  batch.seq_id = sequences.data();
  batch.logits = wants_logits.data();

  handler_ = std::move(handler);
  thrown_ = nullptr;
  layer_ = 0;
  step_ = step;
  writes_.clear();
  forget_errors();
  const auto status = llama_decode(context_.get(), batch);
  const bool handled = std::exchange(handler_, nullptr) != nullptr;
  try {
    if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
    if (status != 0) {
      throw engine_error("llama.cpp cannot evaluate " + std::to_string(rows) + " tokens at position " +
                         std::to_string(position) + ", " + std::to_string(llama_n_ctx(context_.get())) +
                         " fit in its context (" + logged_cause() +
                         "): give fewer tokens or a larger context");
    }
    if (shape().layers == 0) model_.shape_.layers = layer_;  // the model's probe: its shape is what we saw
    if (handled && layer_ == 0) refuse(shape(), "has no flash attention node in llama.cpp's graph");
    if (handled && layer_ != shape().layers) {
      refuse(shape(), "attends in " + std::to_string(layer_) + " layers after " +
                          std::to_string(shape().layers) + " before");
    }
  } catch (...) {
    for (const sequence_tokens& of : step) truncate(of.position, of.sequence);
    throw;
  }
  if (first_logits >= rows) return {};
  const auto vocabulary = to_size(shape().vocabulary);
  return {llama_get_logits(context_.get()), to_size(rows - first_logits) * vocabulary};
}

// llama.cpp asks about every node of the graph, in order, until we need one; then it computes all nodes up to
// that one and calls again with `ask` false. Returning false then stops the graph. Exceptions must not cross
// its C code.
bool engine::on_node(ggml_tensor* node, bool ask, void* self) noexcept {
  auto& engine = *static_cast<examples::engine*>(self);
  if (!engine.handler_) return !ask;  // needs nothing
  if (engine.thrown_) return ask;     // needs the next node, to stop there
  try {
    if (ask && node->op == GGML_OP_SET_ROWS) engine.note_cache_write(node);
    if (!ask) engine.hand_over(node);
    return !ask || node->op == GGML_OP_FLASH_ATTN_EXT;
  } catch (...) {
    engine.thrown_ = std::current_exception();
    return ask;
  }
}

// The cells are an input of the graph, read before the write is computed: the last layer's is the input's
// last use, later nodes may lie in its memory.
void engine::note_cache_write(const ggml_tensor* node) {
  const auto* cells = node->src[1];
  if (cells->type != GGML_TYPE_I64 || !ggml_is_contiguous(cells) || !in_host_memory(cells)) return;
  const auto* first = static_cast<const std::int64_t*>(cells->data);
  writes_.push_back({node->view_src, {first, first + ggml_nelements(cells)}});
}

void engine::hand_over(ggml_tensor* attention_node) {
  check_shape(attention_node);
  if (shape().layers == 0 && shape().sliding_window > 0) note_window(attention_node->src[1]->view_src);
  const auto* q = attention_node->src[0];
  const auto heads = q->ne[2];
  const auto rows = static_cast<int>(q->ne[1]);
  const auto head_dim = to_size(q->ne[0]);
  query_.resize(rows * heads * head_dim);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t head = 0; head < heads; ++head) {
      std::memcpy(&query_[(row * heads + head) * head_dim], row_of(q, row, head), head_dim * sizeof(float));
    }
  }
  const layer_rows seen{.layer = layer_,
                        .rows = rows,
                        .position = step_.front().position,
                        .of = step_,
                        .query = query_.data(),
                        .key = read_cache(attention_node->src[1], rows, key_),
                        .value = read_cache(attention_node->src[2], rows, value_)};
  writes_.clear();
  ++layer_;
  handler_(seen, static_cast<float*>(attention_node->data));
}

// Keys and values are read from the cache, not where they were computed: other nodes may lie there by now.
const float* engine::read_cache(const ggml_tensor* view, int rows, std::vector<float>& into) const {
  const auto write =
      std::find_if(writes_.begin(), writes_.end(), [&](const auto& w) { return w.cache == view->view_src; });
  if (write == writes_.end() || std::ssize(write->cells) != rows) {
    refuse(shape(),
           "attends in layer " + std::to_string(layer_) + " to keys or values that the layer did not write");
  }
  const auto heads = view->ne[2];
  const auto head_dim = view->ne[0];
  into.resize(to_size(rows * heads * head_dim));
  auto* row = into.data();
  for (const auto cell : write->cells) {
    for (std::int64_t head = 0; head < heads; ++head, row += head_dim) {
      ggml_cpu_fp16_to_fp32(reinterpret_cast<const ggml_fp16_t*>(row_of(view, cell, head)), row, head_dim);
    }
  }
  return into.data();
}

// Of the model's probe: a cache, (numbers of a cell, cells, streams), that has fewer cells than the context
// is a window's.
void engine::note_window(const ggml_tensor* cache) {
  model_.shape_.sliding.push_back(cache != nullptr && cache->ne[1] < llama_n_ctx(context_.get()));
}

void engine::check_shape(const ggml_tensor* attention_node) {
  auto& shape = model_.shape_;
  const auto *q = attention_node->src[0], *k = attention_node->src[1], *v = attention_node->src[2];
  const auto *mask = attention_node->src[3], *sinks = attention_node->src[4];
  std::array<float, 3> parameters;
  std::memcpy(parameters.data(), attention_node->op_params, sizeof parameters);
  const auto [scale, alibi, soft_cap] = parameters;

  if (k->view_src && k->view_src == v->view_src)
    refuse(shape, "keeps keys and values as one compressed row (MLA)");
  if (k->ne[0] != v->ne[0] || k->ne[2] != v->ne[2]) {
    refuse(shape, "has keys of " + std::to_string(k->ne[2]) + " heads and " + std::to_string(k->ne[0]) +
                      " dimensions, values of " + std::to_string(v->ne[2]) + " and " +
                      std::to_string(v->ne[0]));
  }
  if (q->ne[0] % 8 != 0 || q->ne[0] > 256) {
    refuse(shape, "has heads of " + std::to_string(q->ne[0]) + " dimensions, not a multiple of 8 up to 256");
  }
  if (soft_cap != 0) refuse(shape, "caps its logits at " + std::to_string(soft_cap));
  if (alibi != 0) refuse(shape, "biases its logits by distance (ALiBi, " + std::to_string(alibi) + ")");
  if (sinks) refuse(shape, "has attention sinks");
  if (!mask || mask->op != GGML_OP_NONE) refuse(shape, "computes which tokens it attends to");
  if (q->type != GGML_TYPE_F32 || k->type != GGML_TYPE_F16 || v->type != GGML_TYPE_F16) {
    refuse(shape, std::string("attends with ") + ggml_type_name(q->type) + ", " + ggml_type_name(k->type) +
                      ", " + ggml_type_name(v->type) + " queries, keys, values instead of f32, f16, f16");
  }
  if (!in_host_memory(q) || !in_host_memory(k) || !in_host_memory(v) || !in_host_memory(attention_node)) {
    refuse(shape, "keeps layer " + std::to_string(layer_) + "'s rows outside host memory");
  }

  const auto query_heads = static_cast<int>(q->ne[2]), kv_heads = static_cast<int>(k->ne[2]);
  const auto head_dim = static_cast<int>(q->ne[0]);
  if (shape.head_dim == 0) {  // the model's first layer
    shape.query_heads = query_heads;
    shape.kv_heads = kv_heads;
    shape.head_dim = head_dim;
    shape.scale = scale;
  }
  if (query_heads != shape.query_heads || kv_heads != shape.kv_heads || head_dim != shape.head_dim ||
      scale != shape.scale) {
    refuse(shape, "has layers of different shapes, " + std::to_string(shape.query_heads) + " and " +
                      std::to_string(shape.kv_heads) + " heads of " + std::to_string(shape.head_dim) +
                      " dimensions before layer " + std::to_string(layer_) + ", there " +
                      std::to_string(query_heads) + " and " + std::to_string(kv_heads) + " of " +
                      std::to_string(head_dim));
  }
}

}  // namespace freekv::examples
