// The main job: full attention, a sliding window and retrieval side by side, in llama.cpp, on a real text.

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>

#include "command_line.hpp"
#include "measure.hpp"
#include "program.hpp"
#include "report.hpp"

namespace freekv::examples {
namespace {

struct arguments {
  std::string model, text, needle_text, cache, out, commit = "unknown";
  int prompt = 4096, steps = 128, basis_tokens = 7168, rounds = 5, timed_steps = 16;
  std::vector<int> needle_tokens{1024, 4096}, needle_budgets{512, 1024};
  std::vector<std::string> only;
  float tau = 0.9f;
  common_settings common;
};

arguments parse(int argc, char** argv) {
  arguments a;
  CLI::App app(
      "Decodes a text with full attention, a sliding window and FreeKV's retrieval in llama.cpp and compares "
      "them.",
      "freekv-compare");
  app.option_defaults()->always_capture_default();
  app.add_option("--model", a.model, "GGUF file")->required();
  app.add_option("--text", a.text, "Text to decode")->required();
  app.add_option(
         "--needle-text", a.needle_text,
         "Text that facts are hidden in; each text lends the other its basis as \"other text's basis\"")
      ->required();
  app.add_option("--cache", a.cache, "Folder for what llama.cpp computes once")->required();
  app.add_option("--out", a.out, "Folder for results.jsonl and table.txt")->required();
  app.add_option("--prompt", a.prompt, "Tokens of the prompt");
  app.add_option("--steps", a.steps, "Tokens decoded after it, teacher-forced");
  app.add_option("--budget", a.common.budget, "Tokens a head attends to: sink, window and selected pages");
  app.add_option("--page", a.common.page, "Tokens in a page");
  app.add_option("--sink", a.common.sink, "Sink tokens");
  app.add_option("--window", a.common.window, "Window tokens");
  app.add_option("--tau", a.tau, "Correction threshold of cosine_drift");
  app.add_option("--complete-layers", a.common.complete_layers,
                 "Leading layers that keep everything, in all methods");
  app.add_option("--variant", a.only, "Only these rows (and full), by name; several allowed");
  app.add_option("--basis-tokens", a.basis_tokens,
                 "Tokens of a text that its basis for the other is learnt from");
  app.add_option("--needle-tokens", a.needle_tokens,
                 "Lengths of the texts that facts are hidden in; 0: none");
  app.add_option("--needle-budgets", a.needle_budgets, "Budgets for finding them");
  app.add_option("--threads", a.common.threads, "Threads, of llama.cpp and of FreeKV alike");
  app.add_flag("--overlap", a.common.overlap, "Speculate on one more thread, beside llama.cpp's");
  app.add_option("--rounds", a.rounds, "Rounds of the speed measurement; 0: none");
  app.add_option("--timed-steps", a.timed_steps, "Tokens a round");
  app.add_option("--commit", a.commit, "Noted in the results");
  for (const char* option : {"--model", "--text", "--needle-text", "--cache", "--out", "--commit"})
    app.get_option(option)->take_last();  // examples/run.sh gives defaults before what a person gives
  if (!parsed(app, argc, argv)) std::exit(0);
  const auto require = [](bool holds, const std::string& sentence) {
    if (!holds) throw choice_error(sentence);
  };
  require(a.prompt >= 1 && a.steps >= 1, "--prompt and --steps are at least 1");
  require(a.rounds >= 0 && a.timed_steps >= 1, "--rounds is at least 0 and --timed-steps at least 1");
  for (const int tokens : a.needle_tokens)
    require(tokens == 0 || tokens >= 300, "--needle-tokens " + std::to_string(tokens) +
                                              " leaves no text between eight facts; give 300 or more");
  if (a.needle_tokens == std::vector<int>{0}) a.needle_tokens.clear();
  const common_settings& c = a.common;
  require(c.page >= 8 && c.page <= 256 && c.page % 8 == 0, "--page is a multiple of 8 from 8 to 256");
  require(c.sink >= 0 && c.sink % c.page == 0 && c.window >= c.page && c.window % c.page == 0,
          "--sink and --window are multiples of the page of " + std::to_string(c.page) +
              " tokens, the window at least one");
  std::vector<int> budgets = a.needle_tokens.empty() ? std::vector<int>{} : a.needle_budgets;
  budgets.push_back(a.common.budget);
  for (const int budget : budgets) {
    const int selected = budget - a.common.sink - a.common.window;
    require(selected >= a.common.page && selected % a.common.page == 0,
            "a budget of " + std::to_string(budget) + " tokens leaves " + std::to_string(selected) +
                " for selected pages of " + std::to_string(a.common.page) +
                " after sink and window; give a budget that leaves one or more whole pages");
  }
  return a;
}

std::vector<contender> contenders_of(const arguments& a) {
  std::vector<contender> all;
  for (const auto& variant : variants()) {
    if (variant.does.summary == "key_subspace") {
      all.push_back({std::string(variant.name), variant.does, basis_source::prompt});
      all.push_back(
          {std::string(variant.name) + ", other text's basis", variant.does, basis_source::other_text});
    } else {
      all.push_back({std::string(variant.name), variant.does, basis_source::none});
    }
  }
  std::string names;
  for (auto& c : all) {
    c.does.tau = a.tau;
    names += (names.empty() ? "" : "; ") + c.name;
  }
  const std::set<std::string> only(a.only.begin(), a.only.end());
  for (const auto& name : only)
    if (std::none_of(all.begin(), all.end(), [&](const contender& c) { return c.name == name; }))
      throw choice_error("--variant " + name + " is unknown; choose among: " + names);
  if (!only.empty())
    std::erase_if(all, [&](const contender& c) { return c.name != "full" && only.count(c.name) == 0; });
  return all;
}

std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

class main_job {
 public:
  explicit main_job(const arguments& a)
      : a_(a),
        model_(a.model),
        text_(read_text(a.text)),
        tokens_(first_tokens(model_, a.text, a.prompt + a.steps + 1)),
        place_{a.cache, key_of_file(a.model), a.common.threads},
        contenders_(contenders_of(a)) {
    const int needed = a.prompt + a.steps + 1;
    if (needed > model_.shape().trained_context)
      std::cerr << "note: " << needed << " tokens are more than the " << model_.shape().trained_context
                << " the model was trained for\n";
    std::filesystem::create_directories(a.out);
    const auto& shape = model_.shape();
    lines_.emplace(a.out + "/results.jsonl",
                   nlohmann::ordered_json{{"model", shape.name},
                                          {"text", std::filesystem::path(a.text).filename().string()},
                                          {"prompt", a.prompt},
                                          {"steps", a.steps},
                                          {"page", a.common.page},
                                          {"sink", a.common.sink},
                                          {"window", a.common.window},
                                          {"budget", a.common.budget},
                                          {"tau", a.tau},
                                          {"complete_layers", a.common.complete_layers},
                                          {"basis_tokens", a.basis_tokens},
                                          {"overlap", a.common.overlap},
                                          {"threads", a.common.threads},
                                          {"machine", processor()},
                                          {"instructions", host::name_of(host::best_isa())},
                                          {"compiler", __VERSION__},
                                          {"commit", a.commit}});
  }

  void run() {
    const auto& shape = model_.shape();
    say(shape.name + ": " + std::to_string(shape.layers) + " layers, " + std::to_string(shape.query_heads) +
        "/" + std::to_string(shape.kv_heads) + " heads of " + std::to_string(shape.head_dim) + "; text " +
        std::filesystem::path(a_.text).filename().string() + "\n");
    if (!a_.needle_tokens.empty()) find_needles(basis_of(text_));

    const std::span<const llama_token> all(tokens_);
    const auto prompt_tokens = all.first(static_cast<std::size_t>(a_.prompt));
    const auto text = all.subspan(prompt_tokens.size(), static_cast<std::size_t>(a_.steps) + 1);
    const prompt_cache kv(model_, prompt_tokens, place_, std::ref(progress_));
    const key_basis own = kv.learn_basis(rank()), other = basis_of(read_text(a_.needle_text));
    const prepared_prompt prompt{kv, own, other};
    compare_quality(prompt, text);
    if (a_.rounds > 0) compare_speed(prompt, prompt_tokens, text);
    lines_->finish();
    std::ofstream(a_.out + "/table.txt") << said_;
  }

 private:
  int rank() const {
    int rank = 1;
    for (const auto& c : contenders_)
      if (c.does.summary == "key_subspace") rank = std::max(rank, c.does.rank);
    return rank;
  }

  /// The basis that a text's first tokens give, for use on another text.
  key_basis basis_of(const std::string& text) {
    if (std::none_of(contenders_.begin(), contenders_.end(),
                     [](const auto& c) { return c.basis == basis_source::other_text; }))
      return key_basis(1, 1, 1, 8);  // nobody asks for it
    const auto tokens = model_.tokenize(text);
    const auto count = std::min({tokens.size(), static_cast<std::size_t>(a_.basis_tokens),
                                 static_cast<std::size_t>(model_.shape().trained_context)});
    return prompt_cache(model_, std::span(tokens).first(count), place_, std::ref(progress_))
        .learn_basis(rank());
  }

  void find_needles(const key_basis& other) {
    const std::string text = read_text(a_.needle_text);
    for (const int length : a_.needle_tokens) {
      const needle_text hidden = hide_needles(model_, text, length);
      const prompt_cache kv(model_, hidden.tokens, place_, std::ref(progress_));
      const key_basis own = kv.learn_basis(rank());
      const prepared_prompt prompt{kv, own, other};
      const std::string name = std::filesystem::path(a_.needle_text).filename().string();
      std::vector<std::vector<std::string>> rows{
          {"8 facts in " + std::to_string(hidden.tokens.size()) + " tokens of " + name, "bytes/page/head"}};
      for (const int budget : a_.needle_budgets)
        rows[0].push_back("loss/digit, B " + std::to_string(budget)), rows[0].push_back("found");
      for (const auto& c : contenders_) {
        std::vector<std::string> row{c.name, ""};
        std::optional<needle_result> of_full;  // whose result does not depend on the budget
        for (const int budget : a_.needle_budgets) {
          common_settings s = a_.common;
          s.budget = budget;
          const needle_result result =
              of_full ? *of_full : measure_needles(c, s, model_, prompt, hidden, std::ref(progress_));
          if (c.does.plan == "complete") of_full = result;
          if (result.summary_bytes > 0) row[1] = std::to_string(result.summary_bytes);
          row.push_back(fixed(result.mean_loss(), 2));
          row.push_back(std::to_string(result.facts_found()) + "/8");
          const nlohmann::ordered_json at{{"budget", budget},
                                          {"needle_tokens", hidden.tokens.size()},
                                          {"text", name},
                                          {"route", "in_place"}};
          lines_->add("needle", c.name, "summary_bytes", static_cast<double>(result.summary_bytes),
                      "per page and KV head", at);
          lines_->add("needle", c.name, "loss_per_digit", result.mean_loss(), "nats", at);
          lines_->add("needle", c.name, "facts_found", result.facts_found(), "of 8", at);
          for (std::size_t i = 0; i < hidden.questions.size(); ++i) {
            auto deep = at;
            deep["depth"] = hidden.questions[i].depth;
            lines_->add("needle_depth", c.name, "loss_per_digit", result.loss_per_digit[i], "nats", deep);
          }
        }
        rows.push_back(std::move(row));
      }
      say("\n" + table(rows) +
          "loss/digit: mean -ln p of the answer's digits (tokens of digits alone); found: every digit most "
          "likely;\n"
          "route in_place\n");
    }
  }

  void compare_quality(const prepared_prompt& prompt, std::span<const llama_token> text) {
    const nlohmann::ordered_json at{{"route", "resident"}};
    std::vector<std::vector<std::string>> rows{
        {"prompt " + std::to_string(a_.prompt) + ", budget " + std::to_string(a_.common.budget), "perplexity",
         "over full (95 %)", "top-1", "error", "mass", "corrected", "slices/step", "KB/step", "fast MB",
         "bytes/page/head"}};
    std::optional<quality> full;
    for (const auto& c : contenders_) {
      quality q = measure_quality(c, a_.common, model_, prompt, text, std::ref(progress_));
      if (!full) full = q;
      const auto steps = static_cast<double>(q.losses.size());
      double total = 0, agreeing = 0;
      for (std::size_t i = 0; i < q.losses.size(); ++i) {
        total += q.losses[i];
        agreeing += q.choices[i] == full->choices[i];
      }
      const interval more = paired_difference(q.losses, full->losses);
      double full_total = 0;
      for (const double loss : full->losses) full_total += loss;
      const double perplexity = std::exp(total / steps), full_perplexity = std::exp(full_total / steps);
      const double low = full_perplexity * std::expm1(more.mean - more.half_width);
      const double high = full_perplexity * std::expm1(more.mean + more.half_width);
      const auto& s = q.attention;
      const auto share = [](double part, long long whole) {
        return whole > 0 ? part / static_cast<double>(whole) : 0.0;
      };
      const double pages = static_cast<double>(s.recalled) / steps;
      const bool retrieves = c.does.plan == "retrieval";
      rows.push_back({c.name, fixed(perplexity, 2),
                      c.name == "full" ? ""
                                       : fixed(perplexity - full_perplexity, 2) + " (" + fixed(low, 2) +
                                             " .. " + fixed(high, 2) + ")",
                      fixed(100 * agreeing / steps, 0) + " %", fixed(share(s.error, s.heads), 3),
                      fixed(100 * share(s.mass, s.heads), 1) + " %",
                      retrieves ? fixed(100 * share(static_cast<double>(s.corrected), s.rows), 0) + " %" : "",
                      retrieves ? fixed(pages, 0) : "",
                      retrieves ? fixed(pages * static_cast<double>(q.slice_bytes) / 1024, 0) : "",
                      fixed(static_cast<double>(q.fast_tier_bytes) / 1e6, 1),
                      retrieves ? std::to_string(q.summary_bytes) : ""});
      const auto add = [&](const char* metric, double value, const char* unit) {
        lines_->add("quality", c.name, metric, value, unit, at);
      };
      add("perplexity", perplexity, "");
      add("perplexity_difference", perplexity - full_perplexity, "");
      add("perplexity_difference_low", low, "");
      add("perplexity_difference_high", high, "");
      add("top1_agreement", agreeing / steps, "");
      add("attention_error", share(s.error, s.heads), "relative L2");
      add("mass_kept", share(s.mass, s.heads), "");
      add("corrected", share(static_cast<double>(s.corrected), s.rows), "of heads");
      add("slices_recalled", pages, "per step");
      add("bytes_recalled", pages * static_cast<double>(q.slice_bytes), "per step");
      add("slices_promoted", static_cast<double>(s.promoted) / steps, "per step");
      add("fast_tier_bytes", static_cast<double>(q.fast_tier_bytes), "bytes");
      add("summary_bytes", static_cast<double>(q.summary_bytes), "per page and KV head");
    }
    say("\n" + table(rows) +
        "95 %: of the mean difference in loss, steps taken as independent and full's as given; top-1: same "
        "most likely\ntoken as full; error: relative L2 of a head's attention output; mass: share of full "
        "attention's softmax mass\non what is attended; corrected: KV heads that select anew before they "
        "attend; slices: recalled keys and values\nof a page and KV head, all layers; fast MB: slots, "
        "summaries and their basis, complete layers. Layers that\nkeep everything (the first " +
        std::to_string(a_.common.complete_layers) +
        ") count in none of error, mass and corrected. Route resident.\n");
  }

  void compare_speed(const prepared_prompt& prompt, std::span<const llama_token> prompt_tokens,
                     std::span<const llama_token> text) {
    const auto speeds = measure_speed(contenders_, a_.common, model_, prompt, prompt_tokens, text, place_,
                                      {a_.rounds, a_.timed_steps}, std::ref(progress_));
    const double stock = std::max(speeds[0].median_tokens_per_second(), speeds[1].median_tokens_per_second());
    const nlohmann::ordered_json at{{"route", "in_place"}};
    std::vector<std::vector<std::string>> rows{
        {"at " + std::to_string(a_.prompt) + " tokens, " + std::to_string(a_.common.threads) + " threads",
         "tokens/s", "over llama.cpp's best", "attention ms/token", "spread"}};
    for (const auto& s : speeds) {
      const double rate = s.median_tokens_per_second();
      rows.push_back({s.name, fixed(rate, 1), fixed(rate / stock, 2),
                      s.attention_seconds.empty() ? "" : fixed(1e3 * s.median_attention_seconds(), 2),
                      fixed(100 * s.spread(), 0) + " %" + (s.spread() > 0.2 ? " unsteady" : "")});
      lines_->add("speed", s.name, "tokens_per_second", rate, "tokens/s", at);
      lines_->add("speed", s.name, "over_stock", rate / stock, "", at);
      lines_->add("speed", s.name, "spread", s.spread(), "", at);
      if (!s.attention_seconds.empty())
        lines_->add("speed", s.name, "attention_seconds", s.median_attention_seconds(), "s/token", at);
    }
    say("\n" + table(rows) + "medians of " + std::to_string(a_.rounds) + " rounds of " +
        std::to_string(a_.timed_steps) + " tokens in turns; attention: append and attend, all layers" +
        (a_.common.overlap ? ", what is selected for the next step on a thread beside\n"
                           : ", and what is selected\nfor the next step, which nothing overlaps here") +
        "; route in_place\n");
  }

  void say(const std::string& text) {
    std::cout << text << std::flush;
    said_ += text;
  }

  arguments a_;
  model model_;
  std::string text_, said_;
  std::vector<llama_token> tokens_;
  prompt_cache::place place_;
  std::vector<contender> contenders_;
  std::optional<json_lines> lines_;
  progress_line progress_;
};

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of(
      "freekv-compare", [&] { freekv::examples::main_job(freekv::examples::parse(argc, argv)).run(); });
}
