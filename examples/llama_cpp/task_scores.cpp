// Questions from a file, put to every contender.

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iostream>

#include "job.hpp"
#include "logits.hpp"
#include "retrieval_attention.hpp"

namespace freekv::examples {

namespace {

constexpr int most_answer_tokens = 64;

/// A task as the model reads it. The last token of the prompt is decoded by the contender.
struct tokenized_task {
  task asked;
  std::vector<llama_token> prompt;
  std::vector<std::vector<llama_token>> choices;

  std::span<const llama_token> prefilled() const { return std::span(prompt).first(prompt.size() - 1); }
  int room() const {
    std::size_t longest = most_answer_tokens;
    for (const auto& choice : choices) longest = std::max(longest, choice.size());
    return static_cast<int>(longest) + 2;
  }
};

/// All of them before any is scored, so that what cannot be asked is known at once.
std::vector<tokenized_task> tokenize_tasks(const model& model, const arguments& a) {
  std::vector<tokenized_task> tasks;
  int too_long = 0;
  for (const task& t : a.questions) {
    tokenized_task tokens{t, model.tokenize(t.prompt), {}};
    const auto where = "'" + a.tasks + "' line " + std::to_string(t.line);
    if (tokens.prompt.size() < 2)
      throw file_error(where + " has a prompt of " + std::to_string(tokens.prompt.size()) +
                       " tokens; give 2 or more");
    for (const auto& choice : t.choices) tokens.choices.push_back(model.tokenize(choice, false));
    if (t.choices.empty())
      if (const auto size = model.tokenize(t.answer, false).size(); size > most_answer_tokens)
        throw file_error(where + " has an answer of " + std::to_string(size) + " tokens, but at most " +
                         std::to_string(most_answer_tokens) + " are decoded; ask for a shorter one");
    too_long += static_cast<int>(tokens.prompt.size()) > model.shape().trained_context;
    tasks.push_back(std::move(tokens));
  }
  if (too_long > 0)
    std::cerr << "note: " << too_long << " of " << tasks.size() << " prompts have more than the "
              << model.shape().trained_context << " tokens the model was trained for\n";
  return tasks;
}

/// Without white space around it, and what comes before a first line that is not empty.
std::string first_line(const std::string& text) {
  const std::string visible = trimmed(text);
  return trimmed(visible.substr(0, visible.find('\n')));
}

/// "12" begins with the answer "12", as "12." does, but "123" does not.
bool begins_with(const std::string& text, const std::string& answer) {
  const auto in_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  return text.starts_with(answer) &&
         (text.size() == answer.size() || !in_word(answer.back()) || !in_word(text[answer.size()]));
}

/// One contender at the end of one task's prompt.
class candidate {
 public:
  candidate(const contender& c, const common_settings& s, const model& model, const prepared_prompt& prompt,
            const tokenized_task& asked, engine& decoding)
      : model_(model),
        prompt_(prompt),
        asked_(asked),
        decoding_(decoding),
        backend_({.threads = s.threads, .overlap = s.overlap}),
        pipeline_(make_contender(c, s, model.shape(), prompt, asked.room(), true, backend_)),
        attention_(*pipeline_, model.shape(), s.complete_layers) {}

  /// -ln p of a text after the prompt, per token.
  double mean_loss(std::span<const llama_token> text) {
    auto logits = after_prompt();
    double loss = 0;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (i > 0) logits = next(text[i - 1]);
      loss += loss_of(logits, text[i]);
    }
    return loss / static_cast<double>(text.size());
  }

  /// The most likely tokens, until there is a little more text than the answer has, at most a line.
  std::string answer() {
    std::string text;
    auto logits = after_prompt();
    for (int i = 0; i <= most_answer_tokens; ++i) {
      const llama_token token = most_likely(logits);
      if (model_.ends(token)) break;
      text += model_.to_text(token);
      const std::string line = first_line(text);
      const bool ended = line.size() < trimmed(text).size() || (!line.empty() && text.back() == '\n');
      if (ended || line.size() > asked_.asked.answer.size()) return line;
      logits = next(token);
    }
    return first_line(text);
  }

 private:
  std::span<const float> after_prompt() {
    prompt_.kv.restore(*pipeline_);
    position_ = prompt_.kv.tokens();
    return next(asked_.prompt.back());
  }
  std::span<const float> next(llama_token token) { return decoding_.decode(token, position_++, attention_); }

  const model& model_;
  const prepared_prompt& prompt_;
  const tokenized_task& asked_;
  engine& decoding_;
  host_backend backend_;
  std::unique_ptr<pipeline> pipeline_;
  retrieval_attention attention_;
  int position_ = 0;
};

struct score {
  int choices = 0, choices_right = 0, answers = 0, answers_right = 0;
  double loss = 0;  ///< of the right choices, per token

  double right() const {
    return static_cast<double>(choices_right + answers_right) / static_cast<double>(choices + answers);
  }
};

/// Puts one task to one contender, adds to its score and writes a line of its own.
void ask(job& j, const contender& c, const prepared_prompt& prompt, const tokenized_task& t, engine& decoding,
         score& s) {
  candidate who(c, j.wanted().common, j.model(), prompt, t, decoding);
  nlohmann::ordered_json at{
      {"task", t.asked.line}, {"prompt_tokens", t.prompt.size()}, {"route", "in_place"}};
  bool right = false;
  if (t.choices.empty()) {
    const std::string answer = who.answer();
    right = begins_with(answer, t.asked.answer);
    at["answered"] = answer;
    ++s.answers, s.answers_right += right;
  } else {
    std::vector<double> losses;
    for (const auto& choice : t.choices) losses.push_back(who.mean_loss(choice));
    const auto best = std::min_element(losses.begin(), losses.end()) - losses.begin();
    right = best == t.asked.correct;
    at["chosen"] = best;
    at["losses"] = losses;
    s.loss += losses[static_cast<std::size_t>(t.asked.correct)];
    ++s.choices, s.choices_right += right;
  }
  j.lines().add("task", c.name, "right", right, "", at);
}

}  // namespace

void compare_tasks(job& j) {
  const arguments& a = j.wanted();
  const auto tasks = tokenize_tasks(j.model(), a);
  const auto contenders = j.contenders();
  std::vector<score> scores(contenders.size());
  engine decoding(j.model(), {.threads = a.common.threads, .context = 1, .rows = 1});
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const prepared_prompt prompt = j.prepare(tasks[i].prefilled(), a.needle_text);
    for (std::size_t who = 0; who < contenders.size(); ++who) {
      ask(j, contenders[who], prompt, tasks[i], decoding, scores[who]);
      j.progress()("task " + std::to_string(i + 1) + " of " + std::to_string(tasks.size()),
                   static_cast<double>(who + 1) / static_cast<double>(contenders.size()));
    }
  }
  const std::string name = std::filesystem::path(a.tasks).filename().string();
  std::vector<std::vector<std::string>> rows{{std::to_string(tasks.size()) + " tasks of " + name, "right",
                                              "choices", "loss of the right one", "answers"}};
  const nlohmann::ordered_json at{{"tasks", name}, {"count", tasks.size()}, {"route", "in_place"}};
  for (std::size_t who = 0; who < contenders.size(); ++who) {
    const score& s = scores[who];
    const auto of = [](int right, int all) {
      return all > 0 ? std::to_string(right) + "/" + std::to_string(all) : "";
    };
    rows.push_back({contenders[who].name, fixed(100 * s.right(), 0) + " %", of(s.choices_right, s.choices),
                    s.choices > 0 ? fixed(s.loss / s.choices, 2) : "", of(s.answers_right, s.answers)});
    const auto add = [&](const char* metric, double value, const std::string& unit) {
      j.lines().add("tasks", contenders[who].name, metric, value, unit, at);
    };
    add("right", s.right(), "of tasks");
    if (s.choices > 0) {
      add("choices_right", s.choices_right, "of " + std::to_string(s.choices));
      add("choice_loss", s.loss / s.choices, "nats per token");
    }
    if (s.answers > 0) add("answers_right", s.answers_right, "of " + std::to_string(s.answers));
  }
  j.say("\n" + table(rows) +
        "right: tasks answered rightly; choices: the likeliest per token after the prompt is the right one; "
        "loss: "
        "its mean\n-ln p per token; answers: the most likely tokens begin with the answer; budget " +
        std::to_string(a.common.budget) + ", route in_place\n");
}

}  // namespace freekv::examples
