// Parts of a text decoded together, and each alone.

#include <chrono>
#include <cmath>
#include <freekv/core/size.hpp>
#include <functional>

#include "decoder.hpp"
#include "logits.hpp"

namespace freekv::examples {

namespace {

using decoder_maker = std::function<std::unique_ptr<decoder>(std::span<const prompted_text>)>;
using row_visitor = std::function<void(std::size_t text, std::size_t step, std::span<const float> logits)>;

/// What decoding together changes for one text.
struct change {
  double loss_alone = 0, loss_together = 0;  ///< a token
  double logit = 0;                          ///< the largest difference of a logit, of all steps
};

struct batch_result {
  std::vector<change> of_text;
  double alone = 0, together = 0;  ///< tokens a second

  double mean_loss_alone() const {
    double sum = 0;
    for (const change& c : of_text) sum += c.loss_alone;
    return sum / static_cast<double>(of_text.size());
  }
  double largest_loss_change() const {
    double largest = 0;
    for (const change& c : of_text) largest = std::max(largest, std::abs(c.loss_together - c.loss_alone));
    return largest;
  }
  double largest_logit_change() const {
    double largest = 0;
    for (const change& c : of_text) largest = std::max(largest, c.logit);
    return largest;
  }
};

/// One token of every text a step. Returns the seconds that decoding took.
double decode_all(decoder& who, std::span<const prompted_text> texts, const row_visitor& visit) {
  const std::size_t steps = texts.front().after_prompt().size() - 1;
  double seconds = 0;
  std::vector<sequence_tokens> rows(texts.size());
  for (std::size_t step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < texts.size(); ++i)
      rows[i] = {static_cast<int>(i), texts[i].prompt.tokens() + static_cast<int>(step),
                 texts[i].after_prompt().subspan(step, 1)};
    const auto start = std::chrono::steady_clock::now();
    const auto logits = who.decode(rows);
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const std::size_t vocabulary = logits.size() / texts.size();
    for (std::size_t i = 0; i < texts.size(); ++i) visit(i, step, logits.subspan(i * vocabulary, vocabulary));
  }
  return seconds;
}

batch_result compare_with_alone(std::span<const prompted_text> texts, const decoder_maker& make) {
  batch_result result;
  result.of_text.resize(texts.size());
  const std::size_t steps = texts.front().after_prompt().size() - 1;
  const auto loss_at = [&](std::size_t text, std::size_t step, std::span<const float> logits) {
    return loss_of(logits, texts[text].after_prompt()[step + 1]) / static_cast<double>(steps);
  };
  std::vector<std::vector<float>> alone(texts.size());  // logits, by text: (steps, vocabulary)
  double seconds = 0;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    const auto who = make(texts.subspan(i, 1));
    seconds += decode_all(*who, texts.subspan(i, 1), [&](std::size_t, std::size_t step, auto logits) {
      alone[i].insert(alone[i].end(), logits.begin(), logits.end());
      result.of_text[i].loss_alone += loss_at(i, step, logits);
    });
  }
  const auto tokens = static_cast<double>(texts.size() * steps);
  result.alone = tokens / seconds;
  const auto who = make(texts);
  seconds = decode_all(*who, texts, [&](std::size_t i, std::size_t step, auto logits) {
    change& c = result.of_text[i];
    c.loss_together += loss_at(i, step, logits);
    const float* before = &alone[i][step * logits.size()];
    for (std::size_t token = 0; token < logits.size(); ++token)
      c.logit = std::max(c.logit, std::abs(double{logits[token]} - before[token]));
  });
  result.together = tokens / seconds;
  return result;
}

/// `count` parts of the text, spread evenly over it, the first at its beginning; they overlap if it is short.
std::vector<std::span<const llama_token>> parts_of(std::span<const llama_token> text, int count,
                                                   std::size_t tokens) {
  std::vector<std::span<const llama_token>> parts;
  const std::size_t last = text.size() - tokens;
  for (int i = 0; i < count; ++i)
    parts.push_back(text.subspan(last * to_size(i) / to_size(count - 1), tokens));
  return parts;
}

}  // namespace

void compare_batch(job& j) {
  const arguments& a = j.options();
  const auto whole_text = j.model().tokenize(read_text(a.text));
  const auto parts = parts_of(whole_text, a.batch, to_size(a.prompt) + to_size(a.steps) + 1);
  std::vector<prompt_cache> other_prompts;
  for (const auto& part : std::span(parts).subspan(1))
    other_prompts.emplace_back(j.model(), part.first(to_size(a.prompt)), j.place(), j.progress());
  std::vector<prompted_text> texts{{j.prompt().kv, parts[0]}};
  for (std::size_t i = 1; i < parts.size(); ++i) texts.push_back({other_prompts[i - 1], parts[i]});

  std::vector<std::vector<std::string>> rows{{std::to_string(a.batch) + " texts, " + std::to_string(a.steps) +
                                                  " tokens after " + std::to_string(a.prompt),
                                              "loss alone", "together, up to", "logits, up to",
                                              "tokens/s alone", "together", "times"}};
  const auto measure = [&](const std::string& name, const decoder_maker& make) {
    j.progress()("batch of " + name, 0);
    const batch_result r = compare_with_alone(texts, make);
    rows.push_back({name, fixed(r.mean_loss_alone(), 3), fixed(r.largest_loss_change(), 4),
                    fixed(r.largest_logit_change(), 3), fixed(r.alone, 1), fixed(r.together, 1),
                    fixed(r.together / r.alone, 2)});
    nlohmann::ordered_json at{{"batch", a.batch}, {"route", "in_place"}};
    j.lines().add("batch", name, "tokens_per_second_alone", r.alone, "tokens/s", at);
    j.lines().add("batch", name, "tokens_per_second", r.together, "tokens/s", at);
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const change& c = r.of_text[i];
      at["part_from"] = texts[i].tokens.data() - whole_text.data();
      j.lines().add("batch", name, "loss_alone", c.loss_alone, "nats per token", at);
      j.lines().add("batch", name, "loss", c.loss_together, "nats per token", at);
      j.lines().add("batch", name, "logit_difference", c.logit, "largest", at);
    }
    j.progress()("batch of " + name, 1);
  };
  measure("llama.cpp, flash attention on",
          [&](auto some) { return std::make_unique<stock_decoder>(j, some); });
  for (const contender& c : j.contenders())
    measure(c.name, [&](auto some) {
      return std::make_unique<contender_decoder>(j, c, some, contender_decoder::options{});
    });
  j.say("\n" + table(rows) +
        "loss: a token's mean, in nats; up to: the largest change, of any text's loss and of any logit, by "
        "decoding the\ntexts together, where llama.cpp's own kernels may round otherwise; tokens/s: one run, "
        "not in turns; what is learnt\nfrom keys is from the first text's prompt; route in_place\n");
}

}  // namespace freekv::examples
