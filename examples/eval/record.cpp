// freekv-record: queries, keys and values of chosen layers of any GGUF model on a text, one trace a layer,
// for freekv-replay.

#include <algorithm>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <utility>

#include "command_line.hpp"
#include "fatal_signals.hpp"
#include "program.hpp"
#include "prompt.hpp"
#include "report.hpp"

namespace freekv::examples {
namespace {

struct arguments {
  std::string model, text, out;
  std::vector<int> layers;
  int prompt = 1024, steps = 128, threads = 2, repeated = 0;
  std::uint64_t seed = 1;
  bool full_queries = false;
};

/// Keeps the rows of the layers asked for.
class recorder : public observer {
 public:
  explicit recorder(const std::vector<int>& layers) {
    for (const int layer : layers) layers_[layer];
  }
  struct rows {
    std::vector<float> queries;
    std::vector<std::uint16_t> keys, values;
  };
  void observe(const layer_rows& r) override {
    const auto kept = layers_.find(r.layer);
    if (kept == layers_.end()) return;
    const auto append = [&](auto& to, const float* from, int heads, const auto& convert) {
      std::transform(from, from + static_cast<std::ptrdiff_t>(r.rows) * heads * shape.head_dim,
                     std::back_inserter(to), convert);
    };
    append(kept->second.queries, r.query, shape.query_heads, [](float x) { return x; });
    append(kept->second.keys, r.key, shape.kv_heads, float_to_half);  // exact: from a half-precision cache
    append(kept->second.values, r.value, shape.kv_heads, float_to_half);
  }
  const std::map<int, rows>& layers() const { return layers_; }
  model_shape shape;

 private:
  std::map<int, rows> layers_;
};

arguments parse(int argc, char** argv) {
  arguments a;
  CLI::App app("Records queries, keys and values of a model's layers on a text as traces for freekv-replay.",
               "freekv-record");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", a.model, "GGUF file")->required();
  app.add_option("--text", a.text, "Text");
  app.add_option(
      "--repeated", a.repeated,
      "So many tokens four times in a row, random ones without --text: the last time is the steps, what is "
      "before it the prompt; from such traces freekv-heads --by echo finds heads, and with --text --by span; "
      "0: "
      "none");
  app.add_option("--seed", a.seed, "Of the random tokens");
  app.add_option("--layers", a.layers, "Layers, by number; several allowed")->required()->delimiter(',');
  app.add_option("--prompt", a.prompt, "Tokens of the prompt");
  app.add_option("--steps", a.steps, "Tokens after it, a decode step each");
  app.add_option("--threads", a.threads, "Threads of llama.cpp");
  app.add_flag("--f32-queries", a.full_queries, "Queries as F32; else F16 like the keys");
  app.add_option("--out", a.out, "Folder; layer N goes to layer-N.safetensors")->required();
  if (!parsed(app, argc, argv)) std::exit(0);
  if (a.repeated < 0 || a.repeated == 1)
    throw choice_error("--repeated " + std::to_string(a.repeated) + " is not 0, or at least 2 tokens");
  if (a.text.empty() && a.repeated == 0) throw choice_error("give --text FILE, --repeated TOKENS, or both");
  if (a.repeated > 0) a.prompt = 3 * a.repeated, a.steps = a.repeated;
  if (a.prompt < 0 || a.steps < 0 || a.prompt + a.steps < 1)
    throw choice_error("--prompt and --steps must be 0 or more, and not both 0");
  return a;
}

/// `count` different tokens that end no text and are text of their own.
std::vector<llama_token> random_tokens(const model& m, int count, std::uint64_t seed) {
  std::vector<llama_token> tokens(to_size(m.shape().vocabulary));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::erase_if(tokens, [&](llama_token token) { return m.ends(token) || m.to_text(token).empty(); });
  if (to_size(count) > tokens.size())
    throw choice_error("--repeated " + std::to_string(count) + " is more than the " +
                       std::to_string(tokens.size()) + " tokens that the model's texts are made of");
  std::mt19937_64 random(seed);  // not std::shuffle, which differs between standard libraries
  for (std::size_t i = 0; i < to_size(count); ++i)
    std::swap(tokens[i], tokens[i + random() % (tokens.size() - i)]);
  tokens.resize(to_size(count));
  return tokens;
}
/// The tokens to record.
std::vector<llama_token> tokens_of(const arguments& a, const model& m) {
  if (a.repeated == 0) return first_tokens(m, a.text, a.prompt + a.steps);
  const auto once =
      a.text.empty() ? random_tokens(m, a.repeated, a.seed) : first_tokens(m, a.text, a.repeated);
  std::vector<llama_token> all;
  for (int time = 0; time < 4; ++time) all.insert(all.end(), once.begin(), once.end());
  return all;
}

void run(int argc, char** argv) {
  const arguments a = parse(argc, argv);
  note_stage("loading the model");
  const model m(a.model);
  note_stage("recording");
  for (const int layer : a.layers)
    if (layer < 0 || layer >= m.shape().layers)
      throw choice_error("--layers: the model has layers 0 to " + std::to_string(m.shape().layers - 1) +
                         ", so none numbered " + std::to_string(layer));
  const auto tokens = tokens_of(a, m);
  recorder recording(a.layers);
  recording.shape = m.shape();
  progress_line progress;
  engine(m, {.threads = a.threads, .context = static_cast<int>(tokens.size())})
      .prefill(tokens, 0, {.seen_by = &recording, .progress = [&](int done) {
                             progress("prefill",
                                      static_cast<double>(done) / static_cast<double>(tokens.size()));
                           }});
  std::filesystem::create_directories(a.out);
  for (const auto& [layer, rows] : recording.layers()) {
    const std::int64_t count = static_cast<std::int64_t>(tokens.size());
    const std::vector<std::int64_t> kv{count, m.shape().kv_heads, m.shape().head_dim};
    std::vector<std::uint16_t> half_queries(rows.queries.size());
    std::transform(rows.queries.begin(), rows.queries.end(), half_queries.begin(), float_to_half);
    const auto path = std::filesystem::path(a.out) / ("layer-" + std::to_string(layer) + ".safetensors");
    std::map<std::string, std::string, std::less<>> metadata{
        {"prompt_len", std::to_string(a.prompt)},
        {"layer", std::to_string(layer)},
        {"model", m.shape().name},
        {"text", (a.text.empty() ? "random tokens" : std::filesystem::path(a.text).filename().string()) +
                     (a.repeated > 0 ? ", four times" : "")}};
    std::ostringstream scale;
    scale << std::setprecision(9) << m.shape().scale;
    metadata["scale"] = scale.str();
    if (a.repeated > 0) metadata["period"] = std::to_string(a.repeated);
    if (const auto& rotary = m.shape().rotary) {
      metadata["rope_base"] = std::to_string(rotary->base);
      metadata["rope_pairs"] = rotary->of == rotary_pairs::halves ? "halves" : "neighbours";
    }
    write_safetensors(path, {.tensors = {{"q",
                                          a.full_queries ? data_type::f32 : data_type::f16,
                                          {count, m.shape().query_heads, m.shape().head_dim},
                                          a.full_queries ? std::as_bytes(std::span(rows.queries))
                                                         : std::as_bytes(std::span(half_queries))},
                                         {"k", data_type::f16, kv, std::as_bytes(std::span(rows.keys))},
                                         {"v", data_type::f16, kv, std::as_bytes(std::span(rows.values))}},
                             .metadata = std::move(metadata)});
    std::cout << path.string() << "\n";
  }
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-record", [&] { freekv::examples::run(argc, argv); });
}
