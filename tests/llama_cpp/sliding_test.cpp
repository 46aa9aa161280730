// A model of which some layers slide, as Gemma's do: a small one of random weights, so that nothing is
// fetched.

#include <ggml.h>
#include <gguf.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "contender.hpp"
#include "retrieval_attention.hpp"

namespace {

using namespace freekv::examples;

constexpr int layers = 7, heads = 4, head_dim = 64, width = 96, hidden = 128, vocabulary = 61, window = 40;

/// Writes a Gemma 3 whose file is silent about which layers slide, as those on the net are.
class small_gemma {
 public:
  small_gemma() : path_(std::filesystem::temp_directory_path() / "freekv-small-gemma.gguf") {
    const std::unique_ptr<gguf_context, decltype(&gguf_free)> file(gguf_init_empty(), gguf_free);
    gguf_set_val_str(file.get(), "general.architecture", "gemma3");
    gguf_set_val_str(file.get(), "general.name", "small gemma");
    gguf_set_val_str(file.get(), "tokenizer.ggml.model", "none");
    const auto number = [&](const char* key, std::uint32_t value) {
      gguf_set_val_u32(file.get(), (std::string("gemma3.") + key).c_str(), value);
    };
    number("vocab_size", vocabulary);
    number("block_count", layers);
    number("context_length", 4096);
    number("embedding_length", width);
    number("feed_forward_length", hidden);
    number("attention.head_count", heads);
    number("attention.head_count_kv", 1);
    number("attention.key_length", head_dim);
    number("attention.value_length", head_dim);
    number("attention.sliding_window", window);
    gguf_set_val_f32(file.get(), "gemma3.attention.layer_norm_rms_epsilon", 1e-6f);
    gguf_set_val_f32(file.get(), "gemma3.rope.freq_base", 1e6f);

    context_.reset(ggml_init({.mem_size = 16 << 20, .mem_buffer = nullptr, .no_alloc = false}));
    add(file.get(), "token_embd.weight", {width, vocabulary});
    add(file.get(), "output_norm.weight", {width});
    for (int layer = 0; layer < layers; ++layer) {
      const auto of_layer = [&](const char* name, std::initializer_list<std::int64_t> shape) {
        add(file.get(), "blk." + std::to_string(layer) + "." + name + ".weight", shape);
      };
      of_layer("attn_norm", {width});
      of_layer("attn_q", {width, heads * head_dim});
      of_layer("attn_k", {width, head_dim});
      of_layer("attn_v", {width, head_dim});
      of_layer("attn_output", {heads * head_dim, width});
      of_layer("post_attention_norm", {width});
      of_layer("attn_k_norm", {head_dim});
      of_layer("attn_q_norm", {head_dim});
      of_layer("ffn_norm", {width});
      of_layer("ffn_gate", {width, hidden});
      of_layer("ffn_up", {width, hidden});
      of_layer("ffn_down", {hidden, width});
      of_layer("post_ffw_norm", {width});
    }
    REQUIRE(gguf_write_to_file(file.get(), path_.c_str(), false));
  }
  small_gemma(const small_gemma&) = delete;
  small_gemma& operator=(const small_gemma&) = delete;
  ~small_gemma() { std::filesystem::remove(path_); }
  std::string path() const { return path_.string(); }

 private:
  void add(gguf_context* file, const std::string& name, std::initializer_list<std::int64_t> shape) {
    ggml_tensor* const tensor =
        ggml_new_tensor(context_.get(), GGML_TYPE_F32, static_cast<int>(shape.size()), shape.begin());
    ggml_set_name(tensor, name.c_str());
    const bool is_norm = shape.size() == 1;
    std::normal_distribution<float> values(
        is_norm ? 1.0f : 0.0f, is_norm ? 0.1f : 1.5f / std::sqrt(static_cast<float>(*shape.begin())));
    for (std::int64_t i = 0; i < ggml_nelements(tensor); ++i)
      static_cast<float*>(tensor->data)[i] = values(random_);
    gguf_add_tensor(file, tensor);
  }

  std::filesystem::path path_;
  std::unique_ptr<ggml_context, decltype(&ggml_free)> context_{nullptr, ggml_free};
  std::mt19937 random_{7};
};

std::vector<llama_token> random_tokens(int count) {
  std::mt19937 random(11);
  std::vector<llama_token> tokens(static_cast<std::size_t>(count));
  for (llama_token& token : tokens) token = static_cast<llama_token>(random() % vocabulary);
  return tokens;
}

/// Root mean square of a difference, over that of the first.
double difference(std::span<const float> a, std::span<const float> b) {
  double sum = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    sum += std::pow(double{a[i]} - b[i], 2);
    size += std::pow(double{a[i]}, 2);
  }
  return std::sqrt(sum / size);
}

}  // namespace

TEST_CASE("layers that slide are known by llama.cpp's caches, and decode as llama.cpp has them",
          "[sliding]") {
  const small_gemma file;
  const model m(file.path());
  CHECK(m.shape().layers == layers);
  CHECK(m.shape().sliding_window == window);
  CHECK((m.shape().sliding == std::vector<bool>{true, true, true, true, true, false, true}));
  REQUIRE(m.shape().rotary.has_value());

  const int prompt = 700, steps = 24;  // many windows, and more than one chunk of a prompt
  const auto tokens = random_tokens(prompt + steps);
  const auto first = std::span(tokens).first(prompt);
  std::vector<std::vector<float>> stock;
  {
    engine e(m, {.threads = 1, .context = prompt + steps});
    e.prefill(first, 0);
    for (int i = prompt; i < prompt + steps; ++i) {
      const auto logits = e.decode_stock(tokens[i], i);
      stock.emplace_back(logits.begin(), logits.end());
    }
  }
  const auto no_progress = [](const std::string&, double) {};
  const learnt_keys nothing;
  const prepared_prompt prepared{
      prompt_cache(m, first, {.folder = {}, .threads = 1}, no_progress), {}, nothing};
  // The largest difference of a step's logits from llama.cpp's.
  const auto worst = [&](const contender& c, const common_settings& s, const model_shape& shape) {
    freekv::host_backend backend;
    const auto p = make_contender(c, s, shape, prepared, steps, false, backend);
    prepared.kv.restore(*p);
    retrieval_attention attention(*p, shape, s.complete_layers);
    attention.compare_with_full(true);
    engine e(m, {.threads = 1, .context = 1, .rows = 1});
    double largest = 0;
    for (int i = prompt; i < prompt + steps; ++i)
      largest = std::max(largest, difference(stock[i - prompt], e.decode(tokens[i], i, attention)));
    for (int layer = 0; layer < layers; ++layer)
      CHECK((attention.by_head()[layer].heads > 0) == !shape.slides(layer));
    return largest;
  };
  const common_settings all{.sink = 32, .window = 64, .budget = 1024, .complete_layers = 0},
      some{.sink = 32, .window = 64, .budget = 128, .complete_layers = 0};
  // llama.cpp sums values in half precision.
  constexpr double tolerance = 4e-3;
  const contender full{.name = "full", .method = {.plan = "complete"}};
  CHECK(worst(full, some, m.shape()) < tolerance);
  CHECK(worst({.name = "freekv", .method = {}}, all, m.shape()) < tolerance);
  CHECK(worst({.name = "streaming_llm", .method = {.plan = "window"}}, some, m.shape()) > 10 * tolerance);
  model_shape without_windows = m.shape();
  without_windows.sliding.clear();
  CHECK(worst(full, some, without_windows) > 10 * tolerance);

  SECTION("of a plan whose heads differ there is a sentence") {
    freekv::host_backend backend;
    const contender by_head{.name = "razor_attention", .method = {.plan = "by_head"}};
    CHECK_THROWS_WITH(make_contender(by_head, some, m.shape(), prepared, steps, false, backend),
                      Catch::Contains("by_head") && Catch::Contains("whole sequence"));
  }
}
