// freekv-engine: times and counts a decoder of a real model's sizes, with random weights and FreeKV in every
// layer. Its decode steps are captured, and replayed for requests that come and go.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "command_line.hpp"
#include "compiled_variants.hpp"
#include "fatal_signals.hpp"
#include "program.hpp"

namespace freekv::examples {
namespace {

struct chosen_options : engine_options {
  std::string model_name = "tiny", variant = "freekv";
};

chosen_options options_of(int argc, char** argv, bool& helped) {
  chosen_options o;
  o.steps = 256, o.report_every = 16, o.similarity = 0.95f;
  o.prompt = o.output = o.chunk = 0;  // the model's defaults
  o.attends_to = {0, 0, 0};
  CLI::App app("Decodes with a model of random weights and FreeKV in every layer, a captured graph a step.",
               "freekv-engine");
  const auto option = [&](const char* name, auto& value, const char* text) {
    return app.add_option(name, value, text)->capture_default_str();
  };
  std::string models, variants;
  for (const model_shape& m : model_shapes) models += (models.empty() ? "" : ", ") + std::string(m.name);
  for (const engine_variant* v : compiled_variants)
    variants += (variants.empty() ? "" : ", ") + std::string(v->name) + " for head_dim " +
                std::to_string(v->head_dim);
  option("--model", o.model_name, ("One of " + models).c_str());
  option("--variant", o.variant, ("A method: " + variants).c_str());
  option("--batch", o.batch, "Sequences that step together at most")->check(CLI::Range(1, 1024));
  option(
      "--context", o.context,
      "Tokens of random keys and values that every sequence of the batch begins with; 0: requests come and "
      "go, and the model computes their prompts")
      ->check(CLI::Range(0, 1 << 24));
  option("--prompt", o.prompt, "Tokens of a request's prompt at most; 0: the model's default")
      ->check(CLI::Range(0, 1 << 20));
  option("--output", o.output, "Tokens that a request asks for at most; 0: the model's default")
      ->check(CLI::Range(0, 1 << 20));
  option("--chunk", o.chunk, "Rows of a prompt's step; 0: the model's default")->check(CLI::Range(0, 4096));
  option("--steps", o.steps, "Replays")->check(CLI::Range(1, 1 << 24));
  option("--draft", o.draft, "Rows a sequence brings to a step; how many of them are kept is drawn")
      ->check(CLI::Range(1, 64));
  option("--sink", o.attends_to.sink, "Tokens; 0: the model's default")->check(CLI::NonNegativeNumber);
  option("--window", o.attends_to.window, "Tokens; 0: the model's default")->check(CLI::NonNegativeNumber);
  option("--k", o.attends_to.selected_units, "Selected pages; 0: the model's default")
      ->check(CLI::NonNegativeNumber);
  option("--similarity", o.similarity,
         "Cosine of a head's queries of tokens next to each other; 0: what the random weights give")
      ->check(number_within(0, 1));
  option("--tau", o.tau, "Cosine below which a head is corrected, where the variant corrects by it")
      ->check(number_within(-1, 1));
  option("--store-tokens", o.store_tokens, "Room of the store, for all sequences; 0: enough")
      ->check(CLI::NonNegativeNumber);
  option("--report-every", o.report_every,
         "Replays from one whose corrections and recalls are read, which waits, to the next; 0: none")
      ->check(CLI::NonNegativeNumber);
  option("--seed", o.seed, "Of weights, requests and tokens");
  helped = !parsed(app, argc, argv);
  if (helped) return o;

  const auto named = [&](const model_shape& m) { return m.name == o.model_name; };
  const auto model = std::find_if(model_shapes.begin(), model_shapes.end(), named);
  if (model == model_shapes.end())
    throw choice_error("model " + cited(o.model_name) + " is unknown; choose one of " + models);
  o.model = *model;
  if (o.context > 0 && (o.prompt > 0 || o.output > 0 || o.chunk > 0))
    throw choice_error(
        "--context gives every sequence random keys and values, and --prompt, --output and --chunk are of "
        "requests whose prompts the model computes; leave out one or the others");
  const bool tiny = o.model.head_dim < 128;
  const auto default_of = [&](int& value, int of_tiny, int of_others) {
    if (value == 0) value = tiny ? of_tiny : of_others;
  };
  default_of(o.attends_to.sink, 8, 512);
  default_of(o.attends_to.window, 16, 512);
  default_of(o.attends_to.selected_units, 3, 32);
  default_of(o.prompt, 24, 1024);
  default_of(o.output, 160, 256);
  default_of(o.chunk, 16, 256);
  const std::int64_t longest = o.max_tokens();
  // Sequences with a context are there from first to last.
  const std::int64_t together = o.context > 0 ? o.batch : 1;
  if (o.store_tokens > 0 && o.store_tokens < together * (longest + page_tokens_for(o.model.head_dim)))
    throw choice_error("--store-tokens " + std::to_string(o.store_tokens) + " leaves no room for " +
                       (together == 1 ? "a sequence" : std::to_string(together) + " sequences") +
                       " of up to " + std::to_string(longest) + " tokens, which may begin a page more");
  return o;
}

const engine_variant* variant_of(const std::string& name, int head_dim) {
  const auto fits = [&](const engine_variant* v) { return v->name == name && v->head_dim == head_dim; };
  const auto found = std::find_if(std::begin(compiled_variants), std::end(compiled_variants), fits);
  return found == std::end(compiled_variants) ? nullptr : *found;
}

engine_result decode(const engine_variant& variant, const chosen_options& o) {
  note_stage("decoding with " + std::string(variant.name));
  note_detail(o.model_name + ", batch " + std::to_string(o.batch) + ", up to " +
              std::to_string(o.max_tokens()) + " tokens");
  return variant.run(o);
}

double milliseconds(const engine_result& r) {
  return 1e3 * r.seconds / static_cast<double>(r.counts.replays);
}

/// As it was given: 0.95 of 0.95f.
double decimal(float x) { return std::round(1e6 * static_cast<double>(x)) / 1e6; }

nlohmann::ordered_json printed(const chosen_options& o, const engine_result& r) {
  const engine_counts& c = r.counts;
  nlohmann::ordered_json json{{"model", o.model_name},
                              {"variant", o.variant},
                              {"batch", o.batch},
                              {"context", o.context},
                              {"draft", o.draft},
                              {"seed", o.seed},
                              {"similarity", decimal(o.similarity)},
                              {"tau", decimal(o.tau)},
                              {"budget",
                               {{"sink", o.attends_to.sink},
                                {"window", o.attends_to.window},
                                {"selected_pages", o.attends_to.selected_units}}},
                              {"replays", c.replays},
                              {"tokens", c.tokens},
                              {"ms_a_step", milliseconds(r)},
                              {"ms_a_token_of_a_sequence", milliseconds(r) * static_cast<double>(c.stepped) /
                                                               static_cast<double>(c.tokens)}};
  if (r.reported_tokens > 0) {
    const auto a_step = [&](std::int64_t n) {
      return static_cast<double>(n) / static_cast<double>(r.reported_tokens);
    };
    const double kilobytes = static_cast<double>(r.slice_bytes) / 1024;
    json["of_a_sequence_and_step"] = {
        {"heads", a_step(r.heads)},
        {"corrected_heads", a_step(r.corrected)},
        {"kilobytes_recalled", kilobytes * a_step(r.recalled)},
        {"kilobytes_recalled_before_attention", kilobytes * a_step(r.recalled_before_attention)}};
  }
  if (o.context == 0)
    json["served"] = {{"joined", c.joined},
                      {"left", c.left},
                      {"forked", c.forked},
                      {"truncated", c.truncated},
                      {"waited", c.waited},
                      {"pools_full", c.pools_full},
                      {"preempted", c.preempted},
                      {"restored", c.restored},
                      {"restarted", c.restarted},
                      {"pages_filled", c.pages_filled},
                      {"padded", c.padded},
                      {"prefill_steps", c.prefill_steps},
                      {"replays_of_graph", c.replays_of_graph}};
  return json;
}

int run(int argc, char** argv) {
  bool helped = false;
  const chosen_options o = options_of(argc, argv, helped);
  if (helped) return 0;
  const engine_variant* const variant = variant_of(o.variant, o.model.head_dim);
  if (variant == nullptr)
    throw choice_error("variant " + cited(o.variant) + " is not compiled for head_dim " +
                       std::to_string(o.model.head_dim) + "; --help lists those that are");
  note_stage("looking for a device");
  cudaDeviceProp device{};
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess) {
    std::cerr << "freekv-engine: there is no NVIDIA device to run on" << std::endl;
    return 77;
  }

  const engine_result result = decode(*variant, o);
  nlohmann::ordered_json json = printed(o, result);
  // The same steps with nothing but attention to as many tokens, all of which are there.
  if (const engine_variant* const plain = variant_of("streaming_llm", o.model.head_dim);
      plain != nullptr && plain != variant) {
    chosen_options same = o;
    const std::int64_t page = plain->page_tokens, pages = o.max_tokens() / page + 1;
    const std::int64_t more = page * std::min<std::int64_t>(o.attends_to.selected_units, pages);
    same.attends_to.window =
        static_cast<int>(std::min<std::int64_t>(o.attends_to.window, page * pages) / page * page + more);
    same.report_every = 0;
    const double without = milliseconds(decode(*plain, same));
    json["ms_a_step_without_retrieval"] = without;
    json["share_of_retrieval"] = 1 - without / milliseconds(result);
  }
  json["device"] = device.name;
  if (!(std::cout << json.dump() << std::endl))
    throw choice_error("the results cannot be written to standard output; check where it is redirected");
  return 0;
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  int status = 0;
  const int failed =
      freekv::examples::exit_code_of("freekv-engine", [&] { status = freekv::examples::run(argc, argv); });
  return failed != 0 ? failed : status;
}
