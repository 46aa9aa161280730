// Tokens a second of a model in llama.cpp, with its own attention and with FreeKV's, beside what the bytes say that each
// token reads.

#include <freekv/freekv.hpp>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iterator>
#include <memory>

#include "command_line.hpp"
#include "engine.hpp"
#include "measure.hpp"

namespace freekv::bench {

namespace {

using examples::engine;
using examples::layer_rows;

constexpr int page = 32, head_dim = 64, complete_layers = 1;
constexpr budget of_main_job{.sink = 64, .window = 128, .selected_pages = (512 - 64 - 128) / page};
using pipeline_type = retrieval_pipeline<kv_shape<half, head_dim>, page_size<page>, min_max, in_place>;

/// Appends what llama.cpp prefills.
class copied_prompt : public examples::observer {
 public:
  copied_prompt(pipeline_type& pipeline, sequence_id sequence, const examples::model_shape& shape)
      : pipeline_(pipeline), sequence_(sequence), shape_(shape) {}
  void observe(const layer_rows& rows) override {
    if (rows.layer == 0) pipeline_.begin_step({{sequence_, rows.rows, row_kind::prompt}});
    const auto size = static_cast<std::size_t>(rows.rows * shape_.kv_heads * head_dim);
    pipeline_.append<float>(rows.layer, {.keys = {rows.key, size}, .values = {rows.value, size}});
    if (rows.layer + 1 == shape_.layers) pipeline_.end_step();
  }

 private:
  pipeline_type& pipeline_;
  sequence_id sequence_;
  const examples::model_shape& shape_;
};

/// Attends in llama.cpp's place.
class retrieval : public examples::attention {
 public:
  retrieval(pipeline_type& pipeline, sequence_id sequence, const examples::model_shape& shape)
      : pipeline_(pipeline), sequence_(sequence), shape_(shape) {}
  void attend(const layer_rows& rows, float* output) override {
    if (rows.layer == 0) pipeline_.begin_step({{sequence_}});
    const auto kv = static_cast<std::size_t>(shape_.kv_heads * head_dim);
    const auto heads = static_cast<std::size_t>(shape_.query_heads * head_dim);
    pipeline_.append<float>(
        rows.layer, {.keys = {rows.key, kv}, .values = {rows.value, kv}, .queries = {rows.query, heads}});
    pipeline_.attend(rows.layer, {output, heads});
    if (rows.layer + 1 == shape_.layers) pipeline_.end_step();
  }

 private:
  pipeline_type& pipeline_;
  sequence_id sequence_;
  const examples::model_shape& shape_;
};

std::vector<llama_token> tokens_of(const examples::model& model, std::span<const std::string> files) {
  std::vector<llama_token> all;
  for (const std::string& file : files) {
    std::ifstream in(file);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    if (text.empty())
      throw examples::choice_error("--text " + file + " cannot be read, or is empty: name a text");
    const auto tokens = model.tokenize(text);
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  return all;
}

}  // namespace

void bench_decoding(context& c, const std::string& model_path, std::span<const std::string> texts) {
  const examples::model model(model_path);
  const examples::model_shape& shape = model.shape();
  if (shape.head_dim != head_dim)
    throw examples::choice_error("--model " + model_path + " has heads of " + std::to_string(shape.head_dim) +
                                 " dimensions, and this bench is compiled for " + std::to_string(head_dim));
  const std::string named = shape.name + ", ";
  if (!c.begins("decoding", named)) return;

  // A prompt of two pieces, timed there, then others up to the longest; each of these is prefilled as a sequence of its
  // own, at its positions.
  const int piece = c.smoke ? 256 : 4096, pieces = c.smoke ? 3 : 8, steps = 8, rounds = c.smoke ? 2 : 7;
  const int room = (rounds + 1) * steps, most = piece * pieces + room;
  const auto tokens = tokens_of(model, texts);
  if (static_cast<int>(tokens.size()) < steps) throw examples::choice_error("--text is too short");
  std::vector<llama_token> text;  // repeated, where there is too little of it
  while (static_cast<int>(text.size()) < most) text.insert(text.end(), tokens.begin(), tokens.end());

  engine stock(model,
               {.threads = c.threads, .context = most, .rows = std::min(512, piece), .sequences = pieces});
  engine ours(model, {.threads = c.threads, .context = 1, .rows = 1});
  host_backend backend({.threads = c.threads, .overlap = false});
  pipeline_type::settings s;
  s.layers = shape.layers;
  s.query_heads = shape.query_heads;
  s.kv_heads = shape.kv_heads;
  s.scale = shape.scale;
  s.budget = of_main_job;
  s.max_tokens = most;
  pipeline_type pipeline(s, backend);
  const sequence_id sequence = pipeline.open();
  copied_prompt copying(pipeline, sequence, shape);
  retrieval attention(pipeline, sequence, shape);

  const auto prefill = [&](int from, int count, int as) {
    stock.prefill(
        std::span(text).subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(count)), from,
        {.seen_by = &copying,
         .progress =
             [&](int done) {
               examples::progress_line()("decoding, prefilling", static_cast<double>(from + done) / most);
             },
         .sequence = as,
         .at_any_position = true});
    if (as > 0) stock.join(as, 0);
  };
  const auto time_at = [&](int length) {
    const std::string of_case =
        named + std::to_string(length / 1024) + "K, in_place, " + std::to_string(c.threads) + " threads";
    const auto seconds = [&](const auto& decode) {
      return [&, decode](int round) {
        for (int step = 0; step < steps; ++step) {
          const int at = length + round * steps + step;
          decode(text[static_cast<std::size_t>(at)], at);
        }
      };
    };
    const std::vector<std::function<void(int)>> bodies{
        seconds([&](llama_token token, int at) { stock.decode_stock(token, at); }),
        seconds([&](llama_token token, int at) { ours.decode(token, at, attention); })};
    const auto taken = seconds_in_turns(rounds, bodies);
    stock.truncate(length);
    pipeline.truncate(sequence, length);

    const auto n = [](int x) { return static_cast<double>(x); };
    const double row = n(shape.kv_heads * head_dim) * 2 * sizeof(half),
                 weights = static_cast<double>(model.weight_bytes());
    const double summaries = n((length - of_main_job.sink - of_main_job.window) / page) * n(shape.kv_heads) *
                             static_cast<double>(pipeline.summary_bytes());
    const double all = weights + n(shape.layers) * length * row;
    const double fewer = weights + complete_layers * length * row +
                         n(shape.layers - complete_layers) * (summaries + 512 * row);
    c.number("decoding", of_case, "llama_cpp", steps / taken[0], "tokens/s");
    c.number("decoding", of_case, "freekv", steps / taken[1], "tokens/s");
    c.number("decoding", of_case, "weights", weights, "bytes");
    c.ratio("decoding", of_case, "tokens/s over llama.cpp's", taken[0] / taken[1], length == 32768 ? 3 : 0);
    c.ratio("decoding", of_case, "the same over what the bytes say", taken[0] / taken[1] * fewer / all,
            length == 8192 ? 0.8 : 0);
  };
  prefill(0, 2 * piece, 0);
  time_at(2 * piece);
  for (int nth = 2; nth < pieces; ++nth) prefill(nth * piece, piece, nth);
  time_at(pieces * piece);
}

}  // namespace freekv::bench
