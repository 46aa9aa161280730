// Tokens a second of a model in llama.cpp, with its own attention and with FreeKV's, beside what the bytes
// say that each token reads; and what a second level of summaries would save on that model's keys.

#include <freekv/core/size.hpp>
#include <freekv/freekv.hpp>

#include <algorithm>
#include <filesystem>
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
using examples::model_shape;

constexpr int page = 32, head_dim = 64, complete_layers = 1, rows_at_once = 512;
constexpr int budget_tokens = 512;  // the main job's
constexpr budget of_main_job{.sink = 64, .window = 128, .selected_units = (budget_tokens - 64 - 128) / page};
using pipeline_type = retrieval_pipeline<kv_shape<half, head_dim>, page_size<page>, min_max, in_place>;

/// A prompt's rows as llama.cpp computes them, of every layer.
class kept_rows : public examples::observer {
 public:
  std::vector<std::vector<float>> keys, values;  // (tokens, kv_heads, head_dim)
  std::vector<std::vector<float>> queries;       // (tokens, query_heads, head_dim), of the last chunk

  explicit kept_rows(const model_shape& shape)
      : keys(to_size(shape.layers)),
        values(keys.size()),
        queries(keys.size()),
        kv_row_(to_size(shape.kv_heads * head_dim)),
        query_row_(to_size(shape.query_heads * head_dim)) {}
  void observe(const layer_rows& rows) override {
    const auto add = [&](std::vector<float>& to, const float* from, std::size_t row) {
      to.insert(to.end(), from, from + to_size(rows.rows) * row);
    };
    add(keys[to_size(rows.layer)], rows.key, kv_row_);
    add(values[to_size(rows.layer)], rows.value, kv_row_);
    queries[to_size(rows.layer)].clear();
    add(queries[to_size(rows.layer)], rows.query, query_row_);
  }

 private:
  std::size_t kv_row_, query_row_;
};

/// Attends in llama.cpp's place.
class retrieval : public examples::attention {
 public:
  retrieval(pipeline_type& pipeline, const model_shape& shape)
      : pipeline_(pipeline), sequence_(pipeline.open()), shape_(shape) {}

  /// What has been kept becomes the sequence's tokens from `position` on: keys turn on to there.
  void append(const kept_rows& prompt, int position) {
    const std::size_t row = to_size(shape_.kv_heads * head_dim);
    const auto tokens = static_cast<int>(prompt.keys[0].size() / row);
    std::vector<float> keys;
    for (int first = 0; first < tokens; first += rows_at_once) {
      const int rows = std::min(rows_at_once, tokens - first);
      auto prefill = pipeline_.begin_step({{sequence_, rows, step_phase::prefill}});
      for (int layer = 0; layer < shape_.layers; ++layer) {
        const auto part = [&](const std::vector<float>& of) {
          return std::span(of).subspan(to_size(first) * row, to_size(rows) * row);
        };
        keys.assign(part(prompt.keys[to_size(layer)]).begin(), part(prompt.keys[to_size(layer)]).end());
        for (std::size_t at = 0; position > 0 && at < keys.size(); at += head_dim)
          rotate(shape_.rotary->view(), position, 1.0f, &keys[at]);
        prefill.append<float>(layer, {.keys = keys, .values = part(prompt.values[to_size(layer)])});
      }
      prefill.end();
    }
  }
  void truncate(int tokens) { pipeline_.truncate(sequence_, tokens); }

  void attend(const layer_rows& rows, float* output) override {
    if (rows.layer == 0) step_ = pipeline_.begin_step({{sequence_}});
    const std::size_t kv = to_size(shape_.kv_heads * head_dim),
                      heads = to_size(shape_.query_heads * head_dim);
    step_.append<float>(rows.layer,
                        {.keys = {rows.key, kv}, .values = {rows.value, kv}, .queries = {rows.query, heads}});
    step_.attend(rows.layer, {output, heads});
    if (rows.layer + 1 == shape_.layers) step_.end();
  }

 private:
  pipeline_type& pipeline_;
  pipeline_type::step step_;
  sequence_id sequence_;
  const model_shape& shape_;
};

/// Of every layer and KV head, with some of the prompt's last queries, at several budgets.
void bench_two_levels_of(context& c, const std::string& name, const kept_rows& prompt,
                         const model_shape& shape) {
  constexpr int queries = 4, apart = 10;
  const int group = shape.query_heads / shape.kv_heads;
  const std::size_t kv_row = to_size(shape.kv_heads * head_dim),
                    query_row = to_size(shape.query_heads * head_dim);
  const auto tokens = static_cast<int>(prompt.keys[0].size() / kv_row);
  for (const int pages_of_box : {4, 16})
    for (const int share : {4, 16, 64}) {
      const int selected = std::max(1, tokens / page / share);
      ruled_out all;
      for (int layer = complete_layers; layer < shape.layers; ++layer)
        for (int head = 0; head < shape.kv_heads; ++head) {
          std::vector<float> keys, asking;
          const auto add = [](std::vector<float>& to, const std::vector<float>& from, std::size_t first,
                              int count) { to.insert(to.end(), &from[first], &from[first] + count); };
          for (int token = 0; token < tokens; ++token)
            add(keys, prompt.keys[to_size(layer)], to_size(token) * kv_row + to_size(head * head_dim),
                head_dim);
          const std::vector<float>& from = prompt.queries[to_size(layer)];
          for (int i = 0; i < queries; ++i)
            add(asking, from,
                from.size() - to_size(1 + i * apart) * query_row + to_size(head * group * head_dim),
                group * head_dim);
          all.add(keys, asking, {head_dim, group, pages_of_box, selected});
        }
      report_ruled_out(c,
                       name + std::to_string(tokens) + " tokens, 1 of " + std::to_string(share) +
                           " pages selected, boxes of " + std::to_string(pages_of_box) + " pages",
                       all);
    }
}

std::vector<llama_token> tokens_of(const examples::model& model, std::span<const std::string> files,
                                   int most) {
  std::vector<llama_token> all;
  for (const std::string& file : files) {
    std::ifstream in(file);
    const auto tokens = model.tokenize(std::string{std::istreambuf_iterator<char>(in), {}});
    all.insert(all.end(), tokens.begin(), tokens.end());
  }
  if (static_cast<int>(all.size()) < most)
    throw examples::choice_error("--text has " + std::to_string(all.size()) + " tokens, and " +
                                 std::to_string(most) + " are decoded: name more files");
  all.resize(to_size(most));
  return all;
}

}  // namespace

void bench_decoding(context& c, const std::string& model_path, std::span<const std::string> texts,
                    const std::string& folder) {
  if (!c.begins("decoding", model_path)) return;
  const examples::model model(model_path);
  const model_shape& shape = model.shape();
  if (shape.head_dim != head_dim || !shape.rotary)
    throw examples::choice_error("--model " + model_path + " has heads of " + std::to_string(shape.head_dim) +
                                 " dimensions" + (shape.rotary ? "" : " and scaled rotation") +
                                 ": this bench is compiled for " + std::to_string(head_dim) +
                                 ", and turns keys by plain rotary embedding");
  const std::string named = shape.name + ", ";

  // A prompt, timed there, and four times that.
  const int prompt_tokens = c.smoke ? 512 : 8192, copies = 4, steps = 8, rounds = c.smoke ? 2 : 7;
  const int room = (rounds + 1) * steps;
  const std::vector<llama_token> text = tokens_of(model, texts, prompt_tokens + room);
  // llama.cpp with flash attention, and without.
  std::vector<std::unique_ptr<engine>> stock;
  for (const bool flash : {true, false})
    stock.push_back(
        std::make_unique<engine>(model, engine::options{.threads = c.threads,
                                                        .context = (copies + 1) * prompt_tokens + room,
                                                        .rows = rows_at_once,
                                                        .sequences = 2,
                                                        .flash_attention = flash}));
  engine ours(model, {.threads = c.threads, .context = 1, .rows = 1});
  host_backend backend({.threads = c.threads, .overlap = false, .instructions = c.instructions});
  pipeline_type::settings s;
  s.model = {.layers = shape.layers, .query_heads = shape.query_heads, .kv_heads = shape.kv_heads};
  s.attention.scale = shape.scale;
  s.budget = of_main_job;
  s.capacity.max_tokens = copies * prompt_tokens + room;
  pipeline_type pipeline(s, backend);
  retrieval attention(pipeline, shape);

  const auto time_at = [&](int length) {
    const std::string of_case =
        named + std::to_string(length / 1024) + "K, in_place, " + std::to_string(c.threads) + " threads";
    const auto steps_of = [&](const auto& decode) {
      return [&, decode](int round) {
        for (int step = round * steps; step < (round + 1) * steps; ++step)
          decode(text[to_size(prompt_tokens + step)], length + step);
      };
    };
    const std::vector<std::function<void(int)>> bodies{
        steps_of([&](llama_token token, int at) { stock[0]->decode_stock(token, at); }),
        steps_of([&](llama_token token, int at) { stock[1]->decode_stock(token, at); }),
        steps_of([&](llama_token token, int at) { ours.decode(token, at, attention); })};
    const auto seconds = seconds_in_turns(rounds, bodies);
    for (const auto& peer : stock) peer->truncate(length);
    attention.truncate(length);

    const auto weights = static_cast<double>(model.weight_bytes());
    const double row = 2.0 * shape.kv_heads * head_dim * sizeof(half);
    const double summaries =
        static_cast<double>((length - of_main_job.sink - of_main_job.window) / page * shape.kv_heads) *
        static_cast<double>(pipeline.summary_bytes());
    const double all = weights + shape.layers * length * row;
    const double fewer = weights + complete_layers * length * row +
                         (shape.layers - complete_layers) * (summaries + budget_tokens * row);
    const double flash = steps / seconds[0], plain = steps / seconds[1], retrieving = steps / seconds[2];
    c.number("decoding", of_case, "llama_cpp_flash_attention", flash, "tokens/s");
    c.number("decoding", of_case, "llama_cpp_without", plain, "tokens/s");
    c.number("decoding", of_case, "freekv", retrieving, "tokens/s");
    c.number("decoding", of_case, "bytes_of_full_attention", all, "bytes/token");
    c.number("decoding", of_case, "bytes_of_retrieval", fewer, "bytes/token");
    c.ratio("decoding", of_case, "tokens/s over llama.cpp's with flash attention", retrieving / flash,
            length == 32768 ? 3 : 0);
    c.ratio("decoding", of_case, "the same over what the bytes say", retrieving / flash * fewer / all,
            length == 8192 ? 0.8 : 0);
    c.ratio("decoding", of_case, "tokens/s over llama.cpp's without", retrieving / plain);
  };

  kept_rows prompt(shape);
  const auto progress = [&](int done) {
    examples::progress_line()("decoding, prompt", static_cast<double>(done) / prompt_tokens);
  };
  const auto state_of = [&](std::size_t peer) {
    return (std::filesystem::path(folder) / ("prompt" + std::to_string(peer) + ".state")).string();
  };
  for (std::size_t peer = 0; peer < stock.size(); ++peer) {
    engine::prefill_options how{.progress = progress};
    if (peer == 0) how.seen_by = &prompt;
    stock[peer]->prefill(std::span(text).first(to_size(prompt_tokens)), 0, how);
    stock[peer]->save_state(state_of(peer));
  }
  attention.append(prompt, 0);
  bench_two_levels_of(c, named, prompt, shape);
  time_at(prompt_tokens);
  for (int copy = 1; copy < copies; ++copy) {
    for (std::size_t peer = 0; peer < stock.size(); ++peer) {
      stock[peer]->load_state(state_of(peer), 1);
      stock[peer]->join(1, 0);
    }
    attention.append(prompt, copy * prompt_tokens);
  }
  for (std::size_t peer = 0; peer < stock.size(); ++peer) std::filesystem::remove(state_of(peer));
  time_at(copies * prompt_tokens);
}

}  // namespace freekv::bench
