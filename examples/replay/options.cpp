#include "options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iostream>
#include <limits>
#include <sstream>

#include "command_line.hpp"
#include "pipeline.hpp"

namespace freekv::examples {
namespace {

constexpr double largest_float = std::numeric_limits<float>::max();

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

/// All of `text` as a number. CLI11's own conversions take an empty argument for 0 and 010 for 8.
template <class Number>
std::optional<Number> number_in(const std::string& text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [reached, fault] = std::from_chars(text.data(), end, value);
  if (fault != std::errc{} || reached != end) return std::nullopt;
  return value;
}

int whole(const std::string& option, const std::string& text) {
  const auto value = number_in<int>(text);
  if (!value)
    refuse(option + " \"" + text + "\" is not a whole number from " +
           std::to_string(std::numeric_limits<int>::min()) + " to " +
           std::to_string(std::numeric_limits<int>::max()));
  return *value;
}

double finite(const std::string& option, const std::string& text) {
  const auto value = number_in<double>(text);
  if (!value || !std::isfinite(*value))
    refuse(option + " \"" + text + "\" is not a finite number; give one such as 0.9");
  return *value;
}

double positive_float_or_zero(const std::string& option, const std::string& text) {
  const double value = finite(option, text);
  if (value < 0)
    refuse(option + " " + text +
           " is negative; scores grow with the product of query and key, so give 0 or more");
  if (value > largest_float || (value > 0 && static_cast<float>(value) == 0.0f))
    refuse(option + " " + text + " is outside float32's range; give one from 1e-38 to 3e38, or 0");
  return value;
}

/// `name` among `choices`, or a sentence.
template <class Choices>
void one_of(const std::string& option, const std::string& name, const Choices& choices) {
  std::string names;
  for (const auto& choice : choices) {
    if (name == choice) return;
    names += (names.empty() ? "" : ", ") + std::string(choice);
  }
  refuse(option + " " + name + " is unknown; choose one of " + names);
}

/// Adds options of one type each; help shows their defaults.
class option_list {
 public:
  explicit option_list(CLI::App& app) : app_(app) {}

  void whole_number(const std::string& name, int& value, const std::string& help) {
    parsed(
        name, [name, &value](const std::string& text) { value = whole(name, text); }, help)
        ->type_name("INT")
        ->default_str(std::to_string(value));
  }
  void real_number(const std::string& name, double& value, const std::string& help) {
    std::ostringstream printed;
    printed << value;
    parsed(
        name, [name, &value](const std::string& text) { value = finite(name, text); }, help)
        ->type_name("FLOAT")
        ->default_str(printed.str());
  }
  void text(const std::string& name, std::string& value, const std::string& help) {
    app_.add_option(name, value, help)->capture_default_str();
  }
  void optional_text(const std::string& name, std::optional<std::string>& value, const std::string& otherwise,
                     const std::string& help) {
    app_.add_option(name, value, help)->default_str(otherwise);
  }
  template <class Parse>
  CLI::Option* parsed(const std::string& name, const Parse& parse, const std::string& help) {
    return app_.add_option_function<std::string>(name, parse, help);
  }

 private:
  CLI::App& app_;
};

/// What each variant stands for and what is written: the part of the help that no single flag explains.
std::string footer() {
  std::string text = "Variants:\n";
  for (const auto& variant : variants()) {
    std::string line = "  " + std::string(variant.name);
    line.resize(std::max<std::size_t>(line.size() + 1, 30), ' ');
    const method& does = variant.does;
    text += line +
            (does.plan == "complete" ? "attends to everything"
             : does.plan == "window" ? "attends to sink and window alone"
                                     : "--summary " + does.summary + " --correction " + does.correction) +
            "\n";
  }
  return text +
         "\nOutput tensors, a step for each token from prompt_len on:\n"
         "  out (steps, n_qo, d), lse (steps, n_qo)  F32, attention and its natural log-sum-exp\n"
         "  selected (steps, n_kv, k)                I32, pages attended as selected, ascending, then -1\n"
         "  corrected (steps, n_kv)                  U8, 1 where a head selected anew before it attended\n"
         "  recalled (steps, n_kv)                   I32, slices copied from the store\n"
         "Seconds are medians over the steps; a step is append, correct, attend and select for the next.\n"
         "Exit code 0, or 2 and one sentence on stderr.\n";
}

method chosen_method(const replay_options& o, const std::optional<std::string>& summary,
                     const std::optional<std::string>& correction, const method& numbers) {
  const auto& all = variants();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& v) { return v.name == o.variant; });
  if (found == all.end()) refuse("--variant " + o.variant + " is unknown; choose one of " + variant_names());
  if (summary) one_of("--summary", *summary, summary_names);
  if (correction) one_of("--correction", *correction, correction_names);
  method m = found->does;
  if (m.plan == "retrieval") {  // the others neither score pages nor correct
    m.summary = summary.value_or(m.summary);
    m.correction = correction.value_or(m.correction);
  }
  m.chunk = numbers.chunk;
  m.rank = numbers.rank;
  m.bits = numbers.bits;
  // A finite tau that float32 does not hold flags as its largest or lowest number does: always, or never.
  m.tau = static_cast<float>(std::clamp(o.tau, -largest_float, largest_float));
  return m;
}

}  // namespace

std::optional<replay_options> parse_replay_options(int argc, char** argv) {
  replay_options o;
  method numbers;
  std::optional<std::string> summary, correction;
  CLI::App app("Replays a recorded layer through a retrieval method. Prints one JSON object.",
               "freekv-replay");
  app.set_help_flag("-h,--help", "Show this help and exit");
  app.add_option("trace", o.trace,
                 "safetensors file: q (T, n_qo, d), k and v (T, n_kv, d) in F32, F16 or BF16; metadata "
                 "prompt_len, the number of prompt tokens")
      ->required();
  option_list add(app);
  add.text("--variant", o.variant, "Method, see below: " + variant_names());
  add.whole_number("--page", o.page, "Tokens in a page, a multiple of 8 from 8 to 256");
  add.whole_number("--sink", o.sink, "Sink tokens, a multiple of the page");
  add.whole_number("--window", o.window, "Window tokens, a positive multiple of the page");
  add.whole_number("--k", o.k, "Selected pages of each KV head");
  add.real_number("--tau", o.tau, "cosine_drift: correct a KV head whose queries' mean cosine is below this");
  add.optional_text("--summary", summary, "the variant's",
                    "Page summary: min_max, chunk_means, key_subspace");
  add.whole_number("--chunk", numbers.chunk, "chunk_means: tokens in a chunk, a divisor of the page");
  add.whole_number("--rank", numbers.rank, "key_subspace: dimensions, at most head_dim");
  add.whole_number("--bits", numbers.bits,
                   "key_subspace: bits of a coefficient: 2, 3, 4, 8, or 32 for unquantised");
  add.text("--basis", o.basis,
           "key_subspace: prompt, to learn from the prompt's keys, or a file of freekv-basis");
  add.parsed(
         "--basis-layer", [&](const std::string& text) { o.basis_layer = whole("--basis-layer", text); },
         "key_subspace: layer of the basis file")
      ->type_name("INT")
      ->default_str("the only one, or the trace's");
  add.optional_text("--correction", correction, "the variant's", "Correction: cosine_drift, always, never");
  add.text("--route", o.route, "resident (recall into slots) or in_place (attend from the store)");
  add.text("--dtype", o.dtype, "Round q, k and v to f32, f16 or bf16; stored: as in the trace");
  add.parsed(
         "--scale", [&](const std::string& text) { o.scale = positive_float_or_zero("--scale", text); },
         "Of scores and attention; 0 for the default")
      ->type_name("FLOAT")
      ->default_str("1/sqrt(head_dim)");
  add.whole_number("--threads", o.threads, "Threads that attend, 1 to 1024");
  add.optional_text("--out", o.out, "none", "safetensors file to write, see below");
  app.footer(footer());
  if (!parsed(app, argc, argv)) return std::nullopt;
  one_of("--route", o.route, std::array{"resident", "in_place"});
  one_of("--dtype", o.dtype, std::array{"stored", "f32", "f16", "bf16"});
  if (o.k < 1) refuse("--k " + std::to_string(o.k) + " is below 1; select at least one page");
  o.does = chosen_method(o, summary, correction, numbers);
  return o;
}

}  // namespace freekv::examples
