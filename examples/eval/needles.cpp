#include <algorithm>
#include <array>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <optional>
#include <set>
#include <utility>

#include "job.hpp"
#include "logits.hpp"
#include "needle_text.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

namespace {

struct needle_result {
  std::vector<double> loss_per_digit;  ///< by question
  std::vector<bool> found;             ///< all digits most likely
  std::size_t summary_bytes = 0;

  double mean_loss() const {
    double sum = 0;
    for (const double loss : loss_per_digit) sum += loss;
    return sum / static_cast<double>(loss_per_digit.size());
  }
  int facts_found() const { return static_cast<int>(std::count(found.begin(), found.end(), true)); }
};

/// `prompt` is that of `needles`.
needle_result measure_needles(const contender& c, const common_settings& s, const model& model,
                              const prepared_prompt& prompt, const needle_text& needles,
                              const progress_function& progress) {
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  std::size_t longest = 0;
  for (const auto& question : needles.questions) longest = std::max(longest, question.tokens.size());
  auto options = options_of(c, s, model.shape(), prompt, static_cast<int>(longest), true);
  options.max_sequences = 2;
  const auto p = make_pipeline(options, backend);
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});
  const sequence_id parent = prompt.kv.open(*p);  // every question goes on in a fork of it
  needle_result result;
  result.summary_bytes = summary_bytes_of(c, *p);
  for (const auto& question : needles.questions) {
    const sequence_id asked = p->fork(parent);
    retrieval_attention attention(*p, {asked}, model.shape(), s.complete_layers);
    double loss = 0;
    bool found = true;
    const std::size_t first_digit = question.tokens.size() - to_size(question.digits);
    for (std::size_t i = 0; i + 1 < question.tokens.size(); ++i) {
      const auto logits =
          decoding.decode(question.tokens[i], prompt.kv.tokens() + static_cast<int>(i), attention);
      if (i + 1 < first_digit) continue;
      loss += loss_of(logits, question.tokens[i + 1]);
      found = found && most_likely(logits) == question.tokens[i + 1];
    }
    p->release(asked);
    result.loss_per_digit.push_back(loss / question.digits);
    result.found.push_back(found);
    progress("needles with " + c.name + ", budget " + std::to_string(s.budget) + ", " +
                 std::to_string(prompt.kv.tokens()) + " tokens",
             static_cast<double>(result.found.size()) / static_cast<double>(needles.questions.size()));
  }
  return result;
}

void compare_at(job& j, const std::string& text, int length, std::span<const int> budgets) {
  const arguments& a = j.options();
  const needle_text hidden = hide_needles(j.model(), text, length);
  const prepared_prompt prompt = j.prepare(hidden.tokens, a.needle_text);
  const std::string name = std::filesystem::path(a.needle_text).filename().string();
  std::vector<std::vector<std::string>> rows{
      {"8 facts in " + std::to_string(hidden.tokens.size()) + " tokens of " + name, "bytes/page/head"}};
  for (const int budget : budgets)
    rows[0].push_back("loss/digit, B " + std::to_string(budget)), rows[0].push_back("found");
  for (const contender& c : j.contenders()) {
    std::vector<std::string> row{c.name, ""};
    std::optional<needle_result> of_full;  // whose result does not depend on the budget
    for (const int budget : budgets) {
      common_settings s = a.common;
      s.budget = budget;
      if (!fits(c, s) || (c.deep && budget != budgets.front())) {
        row.insert(row.end(), {"", ""});
        continue;
      }
      const needle_result result =
          of_full ? *of_full : measure_needles(c, s, j.model(), prompt, hidden, j.progress());
      if (c.keeps_everything()) of_full = result;
      if (result.summary_bytes > 0) row[1] = std::to_string(result.summary_bytes);
      row.push_back(fixed(result.mean_loss(), 2));
      row.push_back(std::to_string(result.facts_found()) + "/8");
      if (budget == budgets.front())
        j.keep_in_short(c.name, "loss/digit, B " + std::to_string(budget), row[row.size() - 2]);
      const nlohmann::ordered_json at{
          {"budget", budget}, {"needle_tokens", hidden.tokens.size()}, {"text", name}, {"route", "in_place"}};
      j.lines().add("needle", c.name, "summary_bytes", static_cast<double>(result.summary_bytes),
                    "per page and KV head", at);
      j.lines().add("needle", c.name, "loss_per_digit", result.mean_loss(), "nats", at);
      j.lines().add("needle", c.name, "facts_found", result.facts_found(), "of 8", at);
      for (std::size_t i = 0; i < hidden.questions.size(); ++i) {
        auto deep = at;
        deep["depth"] = hidden.questions[i].depth;
        j.lines().add("needle_depth", c.name, "loss_per_digit", result.loss_per_digit[i], "nats", deep);
      }
    }
    rows.push_back(std::move(row));
  }
  j.say("\n" + table(rows) +
        "loss/digit: mean -ln p of the answer's digits (tokens of digits alone); found: every digit most "
        "likely;\n"
        "route in_place\n");
}

}  // namespace

void compare_needles(job& j) {
  const arguments& a = j.options();
  const std::string text = read_text(a.needle_text);
  std::set<int> lengths(a.needle_tokens.begin(), a.needle_tokens.end());
  if (a.full) lengths.insert(a.lengths.begin(), a.lengths.end());
  for (const int length : lengths) {
    const bool all_budgets =
        std::find(a.needle_tokens.begin(), a.needle_tokens.end(), length) != a.needle_tokens.end();
    compare_at(j, text, length, std::span(a.needle_budgets).first(all_budgets ? a.needle_budgets.size() : 1));
  }
}

}  // namespace freekv::examples
