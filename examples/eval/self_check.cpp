#include "self_check.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <freekv/core/size.hpp>
#include <fstream>
#include <sstream>
#include <string_view>

namespace freekv::examples {

namespace {

/// Words of one token each in most vocabularies, so that every model has a dozen tokens of them.
constexpr std::string_view checked_text =
    "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen";
constexpr std::size_t checked_tokens = 12;

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.4g", value);
  return text.data();
}

/// What follows "NAME : " or "NAME: " in the first line that starts with NAME; empty if there is none.
std::string value_in(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name))
      if (const auto colon = line.find(": ", name.size()); colon != std::string::npos)
        return line.substr(colon + 2);
  return {};
}

/// Of a processor's flags those that kernels of models use.
std::string vector_flags() {
  std::istringstream flags(value_in("/proc/cpuinfo", "flags"));
  std::string found;
  for (std::string flag; flags >> flag;)
    if (flag.starts_with("avx") || flag.starts_with("amx") || flag == "fma" || flag == "f16c")
      found += (found.empty() ? "" : " ") + flag;
  return found.empty() ? "instruction sets that the system does not list" : found;
}

/// What of instruction sets llama.cpp was compiled for, as it says itself: "AVX2 FMA".
std::string compiled_features() {
  std::istringstream parts(llama_print_system_info());
  std::string found;
  for (std::string part; std::getline(parts, part, '|');)
    if (const auto equals = part.find(" = 1"); equals != std::string::npos) {
      std::string name = part.substr(0, equals);
      name.erase(0, name.rfind(' ') + 1);
      found += (found.empty() ? "" : " ") + name;
    }
  return found.empty() ? "no instruction sets beyond the least" : found;
}

}  // namespace

const known_model* find_known(std::uint64_t key) {
  // The model that examples/run.sh fetches: half-way between what llama.cpp gave with AVX-512 and with AVX2,
  // of which neither was further off than 0.2.
  static const std::array known{known_model{0x119cdcb571abd979,
                                            {{7462, 28.36f},
                                             {7522, 28.21f},
                                             {314, 28.04f},
                                             {3772, 27.96f},
                                             {20654, 27.97f},
                                             {100, 20.41f},
                                             {5000, 17.88f},
                                             {20000, 11.24f},
                                             {40000, 16.75f}}}};
  const auto found = std::find_if(known.begin(), known.end(), [&](const auto& m) { return m.key == key; });
  return found == known.end() ? nullptr : &*found;
}

std::string fault_of(std::span<const float> logits) {
  if (logits.empty()) return "there are no logits";
  const auto wrong = std::count_if(logits.begin(), logits.end(), [](float x) { return !std::isfinite(x); });
  if (wrong > 0)
    return std::to_string(wrong) + " of " + std::to_string(logits.size()) + " logits are not finite";
  const auto [least, most] = std::minmax_element(logits.begin(), logits.end());
  return *least == *most ? "all logits are " + number(*least) : "";
}

std::string fault_against(std::span<const float> logits, std::span<const known_logit> known) {
  for (const auto& [token, value] : known) {
    if (token < 0 || to_size(token) >= logits.size())
      return "there is no logit of token " + std::to_string(token);
    const float is = logits[token];
    if (!(std::abs(is - value) <= known_tolerance))
      return "the logit of token " + std::to_string(token) + " is " + number(is) + " and not " +
             number(value) + ", to " + number(known_tolerance);
  }
  return {};
}

std::string fault_between(std::span<const float> alone, std::span<const float> in_batch) {
  if (alone.size() != in_batch.size())
    return "there are " + std::to_string(alone.size()) + " logits of a token alone, and " +
           std::to_string(in_batch.size()) + " in a batch";
  double mean = 0, spread = 0, difference = 0;
  for (const float x : in_batch) mean += x / static_cast<double>(in_batch.size());
  for (std::size_t i = 0; i < alone.size(); ++i) {
    spread += std::pow(in_batch[i] - mean, 2);
    difference += std::pow(double{alone[i]} - in_batch[i], 2);
  }
  const double share = std::sqrt(difference / spread);
  if (share <= batch_tolerance) return {};
  return "a token's logits alone and in a batch differ by " + number(share) + " of their spread, more than " +
         number(batch_tolerance);
}

void check_model(const model& model, const known_model* known, int threads) {
  auto tokens = model.tokenize(checked_text);
  tokens.resize(std::min(tokens.size(), checked_tokens));
  const auto last = static_cast<int>(tokens.size()) - 1;
  engine checked(model, {.threads = threads,
                         .context = static_cast<int>(checked_tokens),
                         .rows = static_cast<int>(checked_tokens)});
  const auto vocabulary = to_size(model.shape().vocabulary);
  const sequence_tokens step{0, 0, tokens};
  const auto all = checked.decode_stock({&step, 1});
  const auto of_last = all.last(vocabulary);
  const std::vector<float> in_batch(of_last.begin(), of_last.end());
  std::string fault = fault_of(all);
  if (fault.empty()) {
    checked.truncate(last);
    const auto alone = checked.decode_stock(tokens.back(), last);
    fault = fault_of(alone);
    if (fault.empty()) fault = fault_between(alone, in_batch);
  }
  if (fault.empty() && known != nullptr) fault = fault_against(in_batch, known->last);
  if (fault.empty()) return;
  throw engine_error(
      "model '" + model.shape().name + "' gives wrong logits here: " + fault + ". " + processor_and_build() +
      "; " + (known != nullptr ? "" : "if the model's file is whole (fetch it again), ") + rebuild_remedy());
}

std::string processor_name() {
  const std::string name = value_in("/proc/cpuinfo", "model name");
  return name.empty() ? "unknown" : name;
}

std::string processor_and_build() {
  const std::string record = FREEKV_LLAMA_CPP_BUILD "/complete";
  const std::string compiler = value_in(record, "compiler"), native = value_in(record, "march=native");
  const std::string resolved = native.substr(0, native.find(' '));
  return "The processor is " + processor_name() + " with " + vector_flags() + "; llama.cpp was built " +
         (compiler.empty() ? "" : "by " + compiler + " ") +
         (resolved.empty() ? "" : "with -march=native, which was " + resolved + ", ") + "for " +
         compiled_features();
}

std::string rebuild_remedy() {
  return "build llama.cpp for less: FREEKV_LLAMA_CPP_OPTIONS=-DGGML_NATIVE=OFF bash examples/run.sh";
}

}  // namespace freekv::examples
