// Steps of several tokens, of which those that were guessed wrongly are taken back, as speculative decoding
// does.

#include <chrono>
#include <cmath>
#include <freekv/core/size.hpp>
#include <iostream>
#include <numeric>
#include <random>

#include "decoder.hpp"
#include "logits.hpp"
#include "quality.hpp"

namespace freekv::examples {

namespace {

constexpr unsigned one_wrong_of = 4;

/// A guess of every token of the text: one of four is replaced by one from elsewhere in it.
std::vector<llama_token> guesses_of(std::span<const llama_token> text, std::uint64_t seed) {
  std::vector<llama_token> guesses(text.begin(), text.end());
  std::mt19937_64 random(seed);
  for (llama_token& guess : guesses)
    if (random() % one_wrong_of == 0) guess = text[random() % text.size()];
  return guesses;
}

struct drafted {
  std::vector<double> losses;  ///< of every token of the text but the first
  int steps = 0;
  double seconds = 0;

  double perplexity() const {
    return std::exp(std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size()));
  }
  double per_second() const { return static_cast<double>(losses.size()) / seconds; }
  double kept_per_step() const { return static_cast<double>(losses.size()) / steps; }
};

/// A step decodes the next token and `rows - 1` guesses of those behind it, and keeps those before the first
/// that is not the text's.
drafted decode_drafts(decoder& who, const prompted_text& text, std::span<const llama_token> guesses,
                      std::size_t rows) {
  const auto truth = text.after_prompt();
  const std::size_t tokens = truth.size() - 1;
  drafted result;
  std::vector<llama_token> draft;
  while (result.losses.size() < tokens) {
    const std::size_t at = result.losses.size();
    const auto position = text.prompt.tokens() + static_cast<int>(at);
    draft.assign(guesses.begin() + static_cast<std::ptrdiff_t>(at),
                 guesses.begin() + static_cast<std::ptrdiff_t>(std::min(at + rows, tokens)));
    draft.front() = truth[at];
    const auto wrong =
        std::mismatch(draft.begin(), draft.end(), truth.begin() + static_cast<std::ptrdiff_t>(at));
    const auto kept = to_size(wrong.first - draft.begin());
    const sequence_tokens step{0, position, draft};
    const auto start = std::chrono::steady_clock::now();
    const auto logits = who.decode({&step, 1});
    who.truncate(position + static_cast<int>(kept), 0);
    result.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++result.steps;
    const std::size_t vocabulary = logits.size() / draft.size();
    for (std::size_t row = 0; row < kept; ++row)
      result.losses.push_back(loss_of(logits.subspan(row * vocabulary, vocabulary), truth[at + row + 1]));
  }
  return result;
}

struct draft_result {
  drafted text;
  attention_statistics attention{};

  double per_token(long long sum) const {
    return static_cast<double>(sum) / static_cast<double>(text.losses.size());
  }
};

draft_result draft_with_stock(job& j, const prompted_text& text, std::span<const llama_token> guesses,
                              int rows) {
  stock_decoder who(j, {&text, 1});
  return {decode_drafts(who, text, guesses, to_size(rows))};
}

/// Times decoding on route in_place, and takes all else from route resident, which computes the same.
draft_result draft_with(const contender& c, job& j, const prompted_text& text,
                        std::span<const llama_token> guesses, int rows) {
  const auto decode = [&](contender_decoder& who) {
    return decode_drafts(who, text, guesses, to_size(rows));
  };
  contender_decoder moving(j, c, {&text, 1}, {.rows = rows, .in_place = false});
  moving.attention().compare_with_full(true);
  draft_result r{decode(moving)};
  for (const auto& head : moving.attention().by_head()) r.attention += head;
  contender_decoder timed(j, c, {&text, 1}, {.rows = rows});
  r.text.seconds = decode(timed).seconds;
  return r;
}

void add_lines(job& j, const std::string& name, const draft_result& r, int rows) {
  const auto add = [&](const char* metric, double value, const char* unit, const char* route = "resident") {
    j.lines().add("draft", name, metric, value, unit,
                  {{"draft", rows},
                   {"one_wrong_of", one_wrong_of},
                   {"seed", j.options().sampled.seed},
                   {"route", route}});
  };
  add("perplexity", r.text.perplexity(), "");
  add("kept", r.text.kept_per_step(), "tokens per step");
  add("tokens_per_second", r.text.per_second(), "tokens/s", "in_place");
  if (r.attention.rows == 0) return;
  add("corrected", r.attention.corrected_share(), "of heads");
  add("slices_recalled", r.per_token(r.attention.recalled), "per token");
  add("slices_critical", r.per_token(r.attention.recalled_before_attention), "per token");
  add("mass_kept", r.attention.mean_mass(), "");
}

}  // namespace

void compare_drafts(job& j) {
  const arguments& a = j.options();
  const auto length = to_size(a.prompt) + to_size(a.steps) + 1;
  const prompted_text text{j.prompt().kv, j.text().first(length)};
  const auto guesses = guesses_of(text.after_prompt(), a.sampled.seed);
  std::vector<std::vector<std::string>> rows{{"drafts of " + std::to_string(a.draft) + ", " +
                                                  std::to_string(a.steps) + " tokens after " +
                                                  std::to_string(a.prompt),
                                              "perplexity", "drafted, over it (95 %)", "kept/step",
                                              "corrected", "slices/token", "mass", "tokens/s"}};
  const auto measure = [&](const std::string& name, bool selects, const auto& decoded_with) {
    j.progress()("drafts of " + name, 0);
    const draft_result one = decoded_with(1), many = decoded_with(a.draft);
    j.progress()("drafts of " + name, 1);
    add_lines(j, name, one, 1);
    add_lines(j, name, many, a.draft);
    const estimate more = block_bootstrap(differences({many.text.losses}, {one.text.losses}));
    const double of_one = one.text.perplexity();
    const auto percent = [](double share, int digits) { return fixed(100 * share, digits) + " %"; };
    const auto both = [&](bool shown, const auto& of) { return shown ? of(one) + ", " + of(many) : ""; };
    rows.push_back(
        {name, fixed(of_one, 2),
         fixed(many.text.perplexity() - of_one, 2) + " (" + fixed(of_one * std::expm1(more.low), 2) + " .. " +
             fixed(of_one * std::expm1(more.high), 2) + ")",
         fixed(many.text.kept_per_step(), 2),
         both(selects, [&](auto& r) { return percent(r.attention.corrected_share(), 0); }),
         both(selects, [&](auto& r) { return fixed(r.per_token(r.attention.recalled), 0); }),
         both(one.attention.rows > 0, [&](auto& r) { return percent(r.attention.mean_mass(), 1); }),
         both(true, [&](auto& r) { return fixed(r.text.per_second(), 1); })});
  };
  measure("llama.cpp, flash attention on", false,
          [&](int rows_a_step) { return draft_with_stock(j, text, guesses, rows_a_step); });
  for (const contender& c : j.contenders()) {
    if (c.method.evicts() || c.method.selection == colliding::name) {
      std::cerr << "note: " << c.name
                << " is left out of drafts: it decodes one token a step, or takes none back\n";
      continue;
    }
    measure(c.name, c.selects(),
            [&](int rows_a_step) { return draft_with(c, j, text, guesses, rows_a_step); });
  }
  j.say(
      "\n" + table(rows) + "a step decodes the next token and " + std::to_string(a.draft - 1) +
      " guesses of those behind it, one of " + std::to_string(one_wrong_of) +
      " being from elsewhere in the text; what\nfollows the first wrong one is taken back. Pairs: one token "
      "a step, and drafted; 95 %: block bootstrap of steps. corrected: KV heads that select\nanew before "
      "they attend, a step's tokens being "
      "one group; slices: recalled keys and values of a page and KV head,\nall layers, per token kept; mass: "
      "share of full attention's softmax mass on what is attended; route resident.\ntokens/s: kept, one run, "
      "not in turns, route in_place\n");
}

}  // namespace freekv::examples
