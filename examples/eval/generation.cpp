#include "generation.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <set>

#include "job.hpp"
#include "logits.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

sampler::sampler(const sampling& how, std::vector<llama_token> never)
    : how_(how), never_(std::move(never)), random_(how.seed) {}

llama_token sampler::choose(std::span<const float> logits) {
  logits_.assign(logits.begin(), logits.end());
  for (const llama_token token : never_) logits_[token] = -std::numeric_limits<float>::infinity();
  const llama_token best = most_likely(logits_);
  if (how_.temperature == 0) return best;
  const double largest = logits_[best];
  weights_.resize(logits_.size());
  for (std::size_t i = 0; i < logits_.size(); ++i)
    weights_[i] = std::exp((logits_[i] - largest) / how_.temperature);
  double sum = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  if (how_.top_p < 1) sum = keep_likeliest(how_.top_p * sum);
  // Not std::uniform_real_distribution, which differs between standard libraries.
  const double uniform = static_cast<double>(random_() >> 11) * 0x1p-53;
  double left = uniform * sum;
  for (std::size_t i = 0; i < weights_.size(); ++i)
    if ((left -= weights_[i]) < 0) return static_cast<llama_token>(i);
  return best;  // rounding
}

/// Sets the weights to zero but for the fewest and largest that sum to `mass`, of equal ones those of earlier
/// tokens. Returns their sum.
double sampler::keep_likeliest(double mass) {
  const auto weight = [&](llama_token token) { return weights_[token]; };
  by_weight_.resize(weights_.size());
  std::iota(by_weight_.begin(), by_weight_.end(), 0);
  std::stable_sort(by_weight_.begin(), by_weight_.end(),
                   [&](llama_token a, llama_token b) { return weight(a) > weight(b); });
  double sum = 0;
  for (const llama_token token : by_weight_)
    if (sum < mass)
      sum += weight(token);
    else
      weights_[token] = 0;
  return sum;
}

int first_difference(std::span<const llama_token> a, std::span<const llama_token> b) {
  return static_cast<int>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

double agreement(std::span<const llama_token> a, std::span<const llama_token> b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0, std::plus<>(), std::equal_to<>()) /
         static_cast<double>(a.size());
}

double repetition(std::span<const llama_token> tokens) {
  if (tokens.size() < 4) return 0;
  const std::size_t runs = tokens.size() - 3, judged = std::min<std::size_t>(runs, 256);
  std::set<std::array<llama_token, 4>> seen;
  int repeated = 0;
  for (std::size_t i = 0; i < runs; ++i) {
    const bool is_new = seen.insert({tokens[i], tokens[i + 1], tokens[i + 2], tokens[i + 3]}).second;
    if (i >= runs - judged) repeated += !is_new;
  }
  return static_cast<double>(repeated) / static_cast<double>(judged);
}

namespace {

struct generated {
  std::vector<llama_token> tokens;
  double tokens_per_second = 0;
};

/// Begins with the token that follows the prompt in its text.
generated generate(const contender& c, const arguments& a, const model& model, const prepared_prompt& prompt,
                   llama_token token, const progress_function& progress) {
  const common_settings& s = a.common;
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  const auto p = make_contender(c, s, model.shape(), prompt, a.generate, true, backend);
  prompt.kv.restore(*p);
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});
  retrieval_attention attention(*p, model.shape(), s.complete_layers);
  sampler choice(a.sampled, model.ends());
  generated result;
  const auto start = std::chrono::steady_clock::now();
  for (int step = 0; step < a.generate; ++step) {
    token = choice.choose(decoding.decode(token, prompt.kv.tokens() + step, attention));
    result.tokens.push_back(token);
    progress("generation by " + c.name, static_cast<double>(step + 1) / a.generate);
  }
  result.tokens_per_second =
      a.generate / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

/// "generated-NAME.txt", with a hyphen for whatever does not suit a file's name.
std::string file_name(const std::string& name) {
  std::string file = "generated-";
  for (const char c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_';
    if (plain || file.back() != '-') file += plain ? c : '-';
  }
  return file + ".txt";
}

}  // namespace

void compare_generated(job& j) {
  const arguments& a = j.options();
  const bool greedy = a.sampled.temperature == 0;
  std::vector<std::vector<std::string>> rows{
      {std::to_string(a.generate) + " tokens after " + std::to_string(a.prompt + 1) +
           (greedy ? ", greedy"
                   : ", temperature " + fixed(a.sampled.temperature, 2) + ", top-p " +
                         fixed(a.sampled.top_p, 2) + ", seed " + std::to_string(a.sampled.seed)),
       "leaves full at", "same tokens", "repetition", "tokens/s"}};
  const nlohmann::ordered_json at{{"generate", a.generate},
                                  {"temperature", a.sampled.temperature},
                                  {"top_p", a.sampled.top_p},
                                  {"seed", a.sampled.seed},
                                  {"route", "in_place"}};
  std::optional<generated> full;
  for (const contender& c : j.contenders()) {
    const generated g = generate(c, a, j.model(), j.prompt(), j.after_prompt().front(), j.progress());
    if (!full) full = g;
    std::string text;
    for (const llama_token token : g.tokens) text += j.model().to_text(token);
    const std::string path = a.out + "/" + file_name(c.name);
    if (!(std::ofstream(path, std::ios::binary) << text << std::flush))
      throw file_error("'" + path + "' cannot be written; choose another folder with --out");
    const int leaves = first_difference(g.tokens, full->tokens);
    const double same = agreement(g.tokens, full->tokens), repeated = repetition(g.tokens);
    rows.push_back({c.name, leaves == a.generate ? "never" : std::to_string(leaves),
                    fixed(100 * same, 0) + " %", fixed(100 * repeated, 0) + " %",
                    fixed(g.tokens_per_second, 1)});
    const auto add = [&](const char* metric, double value, const char* unit) {
      j.lines().add("generate", c.name, metric, value, unit, at);
    };
    add("first_difference", leaves, "steps");
    add("same_tokens", same, "of positions");
    add("repetition", repeated, "of runs of four tokens");
    add("tokens_per_second", g.tokens_per_second, "tokens/s");
  }
  j.say("\n" + table(rows) +
        "leaves full at: the first of the generated tokens, from 0, that differs from full attention's; same "
        "tokens: "
        "by\nposition; repetition: of the last 256 runs of four tokens, those that were there before; "
        "tokens/s: one "
        "run, not\nin turns. Tokens that end a text are never chosen. Texts in " +
        file_name("NAME") + "; route in_place\n");
}

}  // namespace freekv::examples
