// Questions from a file, put to every contender.

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <deque>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <initializer_list>
#include <iostream>
#include <map>
#include <numeric>
#include <optional>
#include <random>

#include "generation.hpp"
#include "job.hpp"
#include "logits.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

/// A task as the model reads it. What a question puts behind the prompt, or else the prompt's last token, is
/// decoded by the contender.
struct tokenized_task {
  struct tokenized_question {
    std::vector<llama_token> lead;  ///< decoded before the answer; one or more
    std::vector<std::vector<llama_token>> choices;
    std::vector<llama_token> continuation;
  };
  task asked;
  std::vector<llama_token> prompt;  ///< what is prefilled
  std::vector<tokenized_question> questions;

  int room() const {
    std::size_t longest = 0;
    for (std::size_t i = 0; i < questions.size(); ++i) {
      const auto& q = questions[i];
      std::size_t answer = std::max(q.continuation.size(), asked.questions[i].answers.empty()
                                                               ? std::size_t{0}
                                                               : to_size(asked.questions[i].max_tokens));
      for (const auto& choice : q.choices) answer = std::max(answer, choice.size());
      longest = std::max(longest, q.lead.size() + answer);
    }
    return static_cast<int>(longest) + 2;
  }
};

/// All of them before any is scored, so that what cannot be asked is known at once.
std::vector<tokenized_task> tokenize_tasks(const model& model, const arguments& a) {
  std::vector<tokenized_task> tasks;
  int too_long = 0;
  const auto [before, behind] = a.chats ? model.around_message() : std::pair<std::string, std::string>{};
  for (const task& t : a.questions) {
    tokenized_task tokens{t, model.tokenize(before + t.prompt), {}};
    const auto where = "'" + a.tasks + "' line " + std::to_string(t.line);
    if (tokens.prompt.size() < 2)
      throw file_error(where + " has a prompt of " + std::to_string(tokens.prompt.size()) +
                       " tokens; give 2 or more");
    std::size_t longest = 0;
    for (const question& q : t.questions) {
      auto& made = tokens.questions.emplace_back();
      if (!q.text.empty()) made.lead = model.tokenize(q.text, false);
      const auto end = model.tokenize_part_of_chat(behind);
      made.lead.insert(made.lead.end(), end.begin(), end.end());
      if (made.lead.empty()) made.lead = {tokens.prompt.back()};
      for (const auto& choice : q.choices) made.choices.push_back(model.tokenize(choice, false));
      if (!q.continuation.empty()) made.continuation = model.tokenize(q.continuation, false);
      for (const std::string& answer : q.answers)
        if (const auto size = model.tokenize(answer, false).size(); size > to_size(q.max_tokens))
          throw file_error(where + " has an answer of " + std::to_string(size) + " tokens, but at most " +
                           std::to_string(q.max_tokens) +
                           " are decoded; ask for a shorter one, or give \"max_tokens\"");
      longest = std::max(longest, made.lead.size() + made.continuation.size());
    }
    if (t.questions.front().text.empty() && behind.empty()) tokens.prompt.pop_back();
    too_long += static_cast<int>(tokens.prompt.size() + longest) > model.shape().trained_context;
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

bool in_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; }

/// Does `answer` stand in the text at `from`? "12" stands in "12." but not in "123".
bool stands_at(const std::string& text, std::size_t from, const std::string& answer) {
  const std::size_t end = from + answer.size();
  return text.compare(from, answer.size(), answer) == 0 &&
         (from == 0 || !in_word(answer.front()) || !in_word(text[from - 1])) &&
         (end == text.size() || !in_word(answer.back()) || !in_word(text[end]));
}

bool stands_in(const std::string& text, const std::string& answer) {
  for (std::size_t at = text.find(answer); at != std::string::npos; at = text.find(answer, at + 1))
    if (stands_at(text, at, answer)) return true;
  return false;
}

/// Where the first of the words begins that stands in the text; npos for none.
std::size_t first_of(const std::string& text, std::span<const std::string> words) {
  std::size_t first = std::string::npos;
  for (const std::string& word : words) first = std::min(first, text.find(word));
  return first;
}

/// What comes behind a prompt and the beginning of a question, a token at a time.
class continuation {
 public:
  virtual ~continuation() = default;
  /// Told what the model makes of all before it; the token to decode next, or none where it has ended.
  virtual std::optional<llama_token> next(std::span<const float> logits) = 0;
};

/// A text that is given.
class given_text final : public continuation {
 public:
  explicit given_text(std::span<const llama_token> text) : text_(text) {}

  std::optional<llama_token> next(std::span<const float> logits) override {
    loss_ += loss_of(logits, text_[at_]);
    likely_ += most_likely(logits) == text_[at_];
    return ++at_ < text_.size() ? std::optional(text_[at_ - 1]) : std::nullopt;
  }
  /// -ln p per token.
  double loss() const { return loss_ / static_cast<double>(text_.size()); }
  /// Share of the tokens that were the most likely.
  double likely() const { return likely_ / static_cast<double>(text_.size()); }

 private:
  std::span<const llama_token> text_;
  std::size_t at_ = 0;
  double loss_ = 0, likely_ = 0;
};

/// Tokens that are chosen one by one: until a stop, or until there is a little more text than the answer has,
/// at most a line, or for what may stand anywhere as many as the question says.
class chosen_text final : public continuation {
 public:
  chosen_text(const model& model, const question& asked, const sampling& how)
      : model_(model), asked_(asked), choice_(how) {}

  std::optional<llama_token> next(std::span<const float> logits) override {
    const llama_token token = choice_.choose(logits);
    if (model_.ends(token) || (asked_.anywhere && tokens_ == asked_.max_tokens)) return end();
    text_ += model_.to_text(token);
    const std::size_t stop = first_of(text_, asked_.stops);
    text_.resize(std::min(text_.size(), stop));
    if (!asked_.anywhere) {
      const std::string line = first_line(text_);
      const bool ended = line.size() < trimmed(text_).size() || (!line.empty() && text_.back() == '\n');
      if (ended || line.size() > asked_.answers.front().size()) return end();
    }
    if (stop != std::string::npos || ++tokens_ > asked_.max_tokens) return end();
    return token;
  }
  const std::string& text() const { return text_; }

 private:
  std::nullopt_t end() {
    if (!asked_.anywhere) text_ = first_line(text_);
    return std::nullopt;
  }

  const model& model_;
  const question& asked_;
  sampler choice_;
  std::string text_;
  int tokens_ = 0;
};

/// Continuations of one beginning.
struct fan {
  std::span<const llama_token> lead;  ///< one or more
  std::vector<continuation*> behind;
};

/// Decoded together at most: llama.cpp reads its weights once for all of them.
constexpr std::size_t most_rows = 8;

/// One contender at the end of one task's prompt.
class candidate {
 public:
  candidate(const contender& c, const common_settings& s, const model& model, const prepared_prompt& prompt,
            const tokenized_task& asked, engine& decoding)
      : decoding_(decoding),
        backend_({.threads = s.threads, .overlap = s.overlap}),
        pipeline_(make_pipeline(options(c, s, model, prompt, asked), backend_)),
        attention_(*pipeline_, std::vector<sequence_id>(1), model.shape(), s.complete_layers),
        begun_(prompt.kv.open(*pipeline_)),
        position_(prompt.kv.tokens()) {}

  /// Decodes all continuations to their ends, several at a time; to be called once. What all leads begin with
  /// is decoded once, and then forked: so a method that cuts a prompt at its first decode row does it once.
  void decode(std::vector<fan> fans) {
    for (std::size_t shared = shared_of(fans); shared > 0; --shared) {
      step({{begun_, position_, fans.front().lead.front(), {}}});
      ++position_;
      for (fan& f : fans) f.lead = f.lead.subspan(1);
    }
    std::vector<row> rows;
    for (std::size_t begun = 0; begun < fans.size() || !rows.empty();) {
      std::size_t taken = 0;
      for (const row& r : rows) taken += r.of.behind.size();
      for (; begun < fans.size() && taken + fans[begun].behind.size() <= most_rows; ++begun) {
        taken += fans[begun].behind.size();
        rows.push_back({pipeline_->fork(begun_), position_, fans[begun].lead.front(), fans[begun]});
      }
      rows = after_step(rows);
    }
  }

 private:
  struct row {
    sequence_id sequence;
    int position;
    llama_token token;  // the next of the lead, or of the one continuation
    fan of;
  };

  static pipeline_options options(const contender& c, const common_settings& s, const model& model,
                                  const prepared_prompt& prompt, const tokenized_task& asked) {
    const int more = asked.room(), rows = static_cast<int>(most_rows);
    pipeline_options o = options_of(c, s, model.shape(), prompt, more, true);
    o.max_sequences = rows + 1;
    if (!c.method.evicts())
      o.store_tokens = prompt.kv.tokens() + more + 2 * o.page + std::int64_t{rows} * (more + 2 * o.page);
    return o;
  }

  /// How many tokens all leads begin with, their own last left aside.
  static std::size_t shared_of(const std::vector<fan>& fans) {
    std::size_t shared = fans.front().lead.size() - 1;
    for (const fan& f : fans) {
      const auto differs = std::mismatch(f.lead.begin(), f.lead.end() - 1, fans.front().lead.begin(),
                                         fans.front().lead.end() - 1);
      shared = std::min(shared, static_cast<std::size_t>(differs.first - f.lead.begin()));
    }
    return shared;
  }

  /// One token of each row. Logits: (rows, vocabulary).
  std::span<const float> step(const std::vector<row>& rows) {
    std::vector<sequence_tokens> tokens;
    std::vector<sequence_id> sequences;
    for (const row& r : rows) {
      tokens.push_back({static_cast<int>(tokens.size()), r.position, {&r.token, 1}});
      sequences.push_back(r.sequence);
    }
    attention_.serve(std::move(sequences));
    return decoding_.decode(tokens, attention_);
  }
  /// One token of each row; what then goes on.
  std::vector<row> after_step(std::vector<row>& rows) {
    const auto logits = step(rows);
    const std::size_t vocabulary = logits.size() / rows.size();
    std::vector<row> on;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      row& r = rows[i];
      ++r.position;
      if (r.of.lead.size() > 1) {
        r.of.lead = r.of.lead.subspan(1);
        r.token = r.of.lead.front();
        on.push_back(r);
      } else {
        branch(r, logits.subspan(i * vocabulary, vocabulary), on);
      }
    }
    return on;
  }
  /// A lead has ended, or one token of what is behind it: those that go on, one of them as the row's own
  /// sequence.
  void branch(const row& r, std::span<const float> logits, std::vector<row>& on) {
    const std::size_t before = on.size();
    for (continuation* c : r.of.behind)
      if (const auto token = c->next(logits))
        on.push_back(
            {on.size() == before ? r.sequence : pipeline_->fork(r.sequence), r.position, *token, {{}, {c}}});
    if (on.size() == before) pipeline_->release(r.sequence);
  }

  engine& decoding_;
  host_backend backend_;
  std::unique_ptr<pipeline> pipeline_;
  retrieval_attention attention_;
  sequence_id begun_;  // the prompt, and what all leads begin with
  int position_;
};

/// What a contender made of one question.
struct outcome {
  bool chooses = false;
  bool right = false;  ///< of several samples the first
  double share = 0;    ///< of the answers found, or of the continuation's tokens that were most likely
  int right_samples = 0;
  std::optional<double> loss{};  ///< of the right choice, or of the continuation, per token
};

/// All of one contender's, in the order of the questions.
struct outcomes {
  std::vector<outcome> all;

  int count(bool chooses) const {
    return static_cast<int>(
        std::count_if(all.begin(), all.end(), [&](const outcome& o) { return o.chooses == chooses; }));
  }
  int right(bool chooses) const {
    return static_cast<int>(std::count_if(all.begin(), all.end(),
                                          [&](const outcome& o) { return o.chooses == chooses && o.right; }));
  }
};

/// Of a sample of a question of a line: another for each, and the same for every method.
std::uint64_t seed_of(std::uint64_t seed, std::initializer_list<int> which) {
  std::vector<std::uint32_t> all{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (const int number : which) all.push_back(static_cast<std::uint32_t>(number));
  std::seed_seq mixed(all.begin(), all.end());
  std::array<std::uint32_t, 2> halves{};
  mixed.generate(halves.begin(), halves.end());
  return std::uint64_t{halves[0]} << 32 | halves[1];
}

/// One question that is put to one contender.
class asking {
 public:
  asking(const job& j, const tokenized_task& t, std::size_t nth)
      : task_(t), nth_(nth), asked_(t.asked.questions[nth]), tokens_(t.questions[nth]) {
    if (!asked_.choices.empty()) {
      for (const auto& choice : tokens_.choices) choices_.emplace_back(choice);
    } else if (!asked_.answers.empty()) {
      for (int sample = 0; sample < std::max(1, j.options().samples); ++sample) {
        sampling how = j.options().samples > 0 ? j.options().sampled : sampling{};
        how.seed = seed_of(how.seed, {t.asked.line, static_cast<int>(nth), sample});
        answers_.emplace_back(j.model(), asked_, how);
      }
    }
    if (!tokens_.continuation.empty()) forced_.emplace(tokens_.continuation);
  }

  /// What is to be decoded; `asking` stays where it is meanwhile. At most `most_rows` behind one lead.
  void add_to(std::vector<fan>& fans) {
    std::vector<continuation*> all;
    for (given_text& choice : choices_) all.push_back(&choice);
    for (chosen_text& answer : answers_) all.push_back(&answer);
    if (forced_) all.push_back(&*forced_);
    for (std::size_t i = 0; i < all.size(); i += most_rows) {
      const auto from = all.begin() + static_cast<std::ptrdiff_t>(i);
      const auto count = static_cast<std::ptrdiff_t>(std::min(most_rows, all.size() - i));
      fans.push_back({tokens_.lead, {from, from + count}});
    }
  }

  /// What became of it, when all is decoded; writes a line of its own.
  outcome made_of(job& j, const contender& c) const {
    nlohmann::ordered_json at{
        {"task", task_.asked.line},
        {"question", nth_},
        {"prompt_tokens", task_.prompt.size() + (asked_.text.empty() && !j.options().chats ? 1 : 0)},
        {"route", "in_place"}};
    if (!asked_.group.empty()) at["group"] = asked_.group;
    if (asked_.depth >= 0) at["depth"] = asked_.depth;
    outcome result;
    if (!choices_.empty()) {
      std::vector<double> losses;
      for (const given_text& choice : choices_) losses.push_back(choice.loss());
      const auto best = std::min_element(losses.begin(), losses.end()) - losses.begin();
      const bool right = best == asked_.correct;
      result = {.chooses = true, .right = right, .share = right ? 1.0 : 0.0, .loss = losses[asked_.correct]};
      at["chosen"] = best;
      at["losses"] = losses;
    } else if (!answers_.empty()) {
      std::vector<std::string> texts;
      for (const chosen_text& answer : answers_) {
        texts.push_back(answer.text());
        const auto found =
            std::count_if(asked_.answers.begin(), asked_.answers.end(), [&](const std::string& wanted) {
              return asked_.anywhere ? stands_in(texts.back(), wanted) : stands_at(texts.back(), 0, wanted);
            });
        const bool right = found == static_cast<std::ptrdiff_t>(asked_.answers.size());
        result.right_samples += right;
        if (texts.size() > 1) continue;
        result.right = right;
        result.share = static_cast<double>(found) / static_cast<double>(asked_.answers.size());
      }
      at["answered"] = texts.front();
      if (texts.size() > 1) at["samples"] = texts, at["right_samples"] = result.right_samples;
    }
    if (forced_) {
      result.loss = forced_->loss();
      if (asked_.answers.empty()) result.right = forced_->likely() == 1, result.share = forced_->likely();
    }
    // What is not sampled is right in every sample or in none.
    if (asked_.answers.empty()) result.right_samples = result.right ? j.options().samples : 0;
    at["share"] = result.share;
    if (result.loss) at["loss"] = *result.loss;
    j.lines().add("task", c.name, "right", result.right, "", at);
    return result;
  }

 private:
  const tokenized_task& task_;
  std::size_t nth_;
  const question& asked_;
  const tokenized_task::tokenized_question& tokens_;
  std::vector<given_text> choices_{};
  std::deque<chosen_text> answers_{};  // whose samplers do not move
  std::optional<given_text> forced_{};
};

/// Puts all of a task's questions to one contender.
void ask(job& j, const contender& c, const tokenized_task& t, const prepared_prompt& prompt, engine& decoding,
         outcomes& all) {
  std::deque<asking> questions;
  std::vector<fan> fans;
  for (std::size_t nth = 0; nth < t.questions.size(); ++nth) questions.emplace_back(j, t, nth).add_to(fans);
  candidate(c, j.options().common, j.model(), prompt, t, decoding).decode(std::move(fans));
  for (const asking& question : questions) all.all.push_back(question.made_of(j, c));
}

/// The questions of one group: for each of its prompts their places in `outcomes::all`.
using group_of_questions = std::vector<std::vector<std::size_t>>;

/// Of each prompt's questions with a loss what `of` makes of one; prompts without any are left out.
template <class Of>
std::vector<std::vector<double>> by_prompt(const group_of_questions& group, const outcomes& has_loss,
                                           const Of& of) {
  std::vector<std::vector<double>> all;
  for (const auto& prompt : group) {
    std::vector<double> some;
    for (const std::size_t q : prompt)
      if (has_loss.all[q].loss) some.push_back(of(q));
    if (!some.empty()) all.push_back(std::move(some));
  }
  return all;
}

/// The chance that one or more of `k` samples are right, drawn from `n` of which `right` are: pass@k without
/// bias.
double pass_at(int k, int n, int right) {
  double none = 1;
  for (int i = 0; i < k; ++i) none *= std::max(0.0, static_cast<double>(n - right - i)) / (n - i);
  return 1 - none;
}

/// How a contender's answers differ from another's, question by question.
struct pairing {
  int only_it = 0, only_other = 0;
  double p = 1;
};
pairing paired(const group_of_questions& group, const outcomes& it, const outcomes& other) {
  pairing result;
  for (const auto& prompt : group)
    for (const std::size_t q : prompt) {
      result.only_it += it.all[q].right && !other.all[q].right;
      result.only_other += other.all[q].right && !it.all[q].right;
    }
  result.p = mcnemar(result.only_it, result.only_other);
  return result;
}

/// The table of one group, and its lines.
void show_group(job& j, const std::string& name, const group_of_questions& group,
                const std::vector<outcomes>& scores) {
  constexpr double answerable = 0.6;  // of full attention's; of fewer right answers little can be said
  const auto contenders = j.contenders();
  const std::optional<std::size_t> quest = j.quest();
  int count = 0;
  for (const auto& prompt : group) count += static_cast<int>(prompt.size());
  const auto right_of = [&](const outcomes& of) {
    int right = 0;
    for (const auto& prompt : group)
      for (const std::size_t q : prompt) right += of.all[q].right;
    return right;
  };
  const bool by_loss_only = right_of(scores.front()) < answerable * count;
  std::vector<std::vector<std::string>> rows{{name + ": " + std::to_string(count) + " questions on " +
                                              std::to_string(group.size()) +
                                              (group.size() == 1 ? " prompt" : " prompts")}};
  auto& head = rows.front();
  if (!by_loss_only) head.insert(head.end(), {"right (95 %)", "in part", "p, full"});
  if (!by_loss_only && quest) head.push_back("p, quest");
  const int samples = j.options().samples;
  if (samples > 1)
    head.insert(head.end(),
                {"avg@" + std::to_string(samples) + " (95 %)", "pass@" + std::to_string(samples)});
  head.insert(head.end(), {"loss", "over full (95 %)"});
  for (std::size_t who = 0; who < contenders.size(); ++who) {
    const outcomes& of = scores[who];
    nlohmann::ordered_json at{
        {"group", name}, {"n", count}, {"prompts", group.size()}, {"route", "in_place"}};
    const auto add = [&](const char* metric, double value, const std::string& unit,
                         const nlohmann::ordered_json& more = nlohmann::ordered_json::object()) {
      auto all = at;
      all.update(more);
      j.lines().add("task_group", contenders[who].name, metric, value, unit, all);
    };
    std::vector<std::string> row{contenders[who].name};
    const int right = right_of(of);
    const estimate share = share_of(right, count);
    add("right", share.value, "of questions", {{"low", share.low}, {"high", share.high}});
    double in_part = 0;
    for (const auto& prompt : group)
      for (const std::size_t q : prompt) in_part += of.all[q].share / count;
    add("in_part", in_part, "of answers");
    const auto compare = [&](std::size_t other, const char* metric) -> std::string {
      if (who == other) return "";
      const pairing with = paired(group, of, scores[other]);
      add(metric, with.p, "McNemar's, two-sided",
          {{"only_it", with.only_it}, {"only_other", with.only_other}});
      return fixed(with.p, 3);
    };
    const std::string against_full = compare(0, "p_full");
    const std::string against_quest = quest ? compare(*quest, "p_quest") : "";
    if (!by_loss_only) {
      row.insert(row.end(), {std::to_string(right) + "/" + std::to_string(count) + " (" +
                                 fixed(100 * share.low, 0) + " .. " + fixed(100 * share.high, 0) + " %)",
                             fixed(100 * in_part, 0) + " %", against_full});
      if (quest) row.push_back(against_quest);
    }
    if (samples > 1) {
      std::vector<std::vector<double>> shares;
      for (const auto& prompt : group) {
        shares.emplace_back();
        for (const std::size_t q : prompt)
          shares.back().push_back(static_cast<double>(of.all[q].right_samples) / samples);
      }
      const estimate average = group_bootstrap(shares);
      add("average", average.value, "of samples",
          {{"samples", samples}, {"low", average.low}, {"high", average.high}});
      double pass = 0;
      for (int k = 1; k <= samples; k = k < samples ? std::min(2 * k, samples) : k + 1) {
        pass = 0;
        for (const auto& prompt : group)
          for (const std::size_t q : prompt) pass += pass_at(k, samples, of.all[q].right_samples) / count;
        add("pass", pass, "of questions", {{"samples", samples}, {"k", k}});
      }
      row.insert(row.end(), {fixed(100 * average.value, 0) + " % (" + fixed(100 * average.low, 0) + " .. " +
                                 fixed(100 * average.high, 0) + " %)",
                             fixed(100 * pass, 0) + " %"});
    }
    const auto losses = by_prompt(group, of, [&](std::size_t q) { return *of.all[q].loss; });
    if (losses.empty()) {
      row.insert(row.end(), {"", ""});
    } else {
      const auto over_that_of = [&](const outcomes& other) {
        return group_bootstrap(
            by_prompt(group, of, [&](std::size_t q) { return *of.all[q].loss - *other.all[q].loss; }));
      };
      const estimate over = over_that_of(scores.front());
      const double loss = group_bootstrap(losses).value;
      add("loss", loss, "nats per token");
      add("loss_difference", over.value, "nats per token", {{"low", over.low}, {"high", over.high}});
      if (quest && who != 0 && who != *quest) {
        const estimate more = over_that_of(scores[*quest]);
        add("loss_over_quest", more.value, "nats per token", {{"low", more.low}, {"high", more.high}});
      }
      row.push_back(fixed(loss, 3));
      row.push_back(who == 0 ? ""
                             : fixed(over.value, 3) + " (" + fixed(over.low, 3) + " .. " +
                                   fixed(over.high, 3) + ")");
    }
    rows.push_back(std::move(row));
  }
  j.say(
      "\n" + table(rows) +
      std::string(
          samples > 1
              ? "right, in part, p: of the first sample; avg: samples that are right, 95 % by a bootstrap of "
                "prompts; pass:\nquestions with a right one\n"
              : "") +
      (by_loss_only ? "full attention has fewer than 60 % of these right: they are compared by loss alone\n"
                    : ""));
}

/// What was written of a whole file before there were groups.
void add_totals(job& j, const std::string& name, std::size_t prompts, const std::vector<outcomes>& scores) {
  for (std::size_t who = 0; who < scores.size(); ++who) {
    const outcomes& s = scores[who];
    const nlohmann::ordered_json at{
        {"tasks", name}, {"count", prompts}, {"n", s.all.size()}, {"route", "in_place"}};
    const auto add = [&](const char* metric, double value, const std::string& unit) {
      j.lines().add("tasks", j.contenders()[who].name, metric, value, unit, at);
    };
    add("right", static_cast<double>(s.right(true) + s.right(false)) / static_cast<double>(s.all.size()),
        "of questions");
    if (const int choices = s.count(true); choices > 0) {
      double loss = 0;
      for (const outcome& o : s.all) loss += o.chooses ? *o.loss : 0;
      add("choices_right", s.right(true), "of " + std::to_string(choices));
      add("choice_loss", loss / choices, "nats per token");
    }
    if (const int answers = s.count(false); answers > 0)
      add("answers_right", s.right(false), "of " + std::to_string(answers));
  }
}

}  // namespace

void compare_tasks(job& j) {
  const arguments& a = j.options();
  const auto tasks = tokenize_tasks(j.model(), a);
  const std::string name = std::filesystem::path(a.tasks).filename().string();
  const auto contenders = j.contenders();
  std::vector<outcomes> scores(contenders.size());
  std::vector<std::string> order;  // of the groups, by their first question
  std::map<std::string, group_of_questions> groups;
  constexpr int rows = static_cast<int>(most_rows);
  engine decoding(j.model(), {.threads = a.common.threads, .context = rows, .rows = rows, .sequences = rows});
  for (std::size_t i = 0; i < tasks.size(); ++i) {
    const tokenized_task& t = tasks[i];
    const prepared_prompt prompt = j.prepare(t.prompt, "");
    std::map<std::string, std::vector<std::size_t>> here;
    for (std::size_t nth = 0; nth < t.questions.size(); ++nth) {
      const std::string& group = t.asked.questions[nth].group;
      here[group.empty() ? name : group].push_back(scores.front().all.size() + nth);
      if (std::find(order.begin(), order.end(), group.empty() ? name : group) == order.end())
        order.push_back(group.empty() ? name : group);
    }
    for (auto& [group, questions] : here) groups[group].push_back(std::move(questions));
    for (std::size_t who = 0; who < contenders.size(); ++who) {
      ask(j, contenders[who], t, prompt, decoding, scores[who]);
      j.progress()("task " + std::to_string(i + 1) + " of " + std::to_string(tasks.size()),
                   static_cast<double>(who + 1) / static_cast<double>(contenders.size()));
    }
  }
  for (const std::string& group : order) show_group(j, group, groups.at(group), scores);
  add_totals(j, name, tasks.size(), scores);
  j.say(
      "right: the likeliest choice per token is the right one, the most likely tokens begin with the answer, "
      "have all answers\nanywhere, or are the continuation; 95 %: Wilson's; in part: answers found, or "
      "tokens of "
      "the continuation that are\nmost likely; p: McNemar's exact test of the questions that one of two "
      "methods "
      "alone has right; loss: mean -ln p per\ntoken of the right choice or continuation, over full's by a "
      "bootstrap of prompts; budget " +
      std::to_string(a.common.budget) + ", route in_place\n");
}

}  // namespace freekv::examples
