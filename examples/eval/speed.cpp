#include <algorithm>
#include <chrono>
#include <freekv/core/size.hpp>

#include "fatal_signals.hpp"
#include "job.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

constexpr double steady_spread = 0.2;

/// Decoding speed of a contender or of llama.cpp itself.
struct speed {
  std::string name;
  std::vector<double> tokens_per_second;  ///< of the rounds that count
  std::vector<double> attention_seconds;  ///< a step, of the rounds that count; empty for llama.cpp itself

  double median_tokens_per_second() const { return median(tokens_per_second); }
  double median_attention_seconds() const { return median(attention_seconds); }
  /// (largest - smallest) / median of the rounds that count.
  double spread() const {
    const auto [low, high] = std::minmax_element(tokens_per_second.begin(), tokens_per_second.end());
    return (*high - *low) / median_tokens_per_second();
  }
};

struct speed_settings {
  int rounds = 5, steps = 16;
};

/// llama.cpp with and without flash attention, then the contenders, one after the other for `steps` tokens
/// each, all at the same position: once to warm up, then `rounds` times over; while a contender's rounds
/// differ by more than 20 %, up to `rounds` more, of which the last `rounds` count.
std::vector<speed> measure_speed(std::span<const contender> contenders, const common_settings& s,
                                 const model& model, const prepared_prompt& prompt,
                                 std::span<const llama_token> prompt_tokens,
                                 std::span<const llama_token> text, const prompt_cache::place& place,
                                 const speed_settings& how, const progress_function& progress) {
  const int most_rounds = 2 * how.rounds, room = (1 + most_rounds) * how.steps;
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});

  // Everybody is ready at the end of the prompt before anybody is timed.
  std::vector<std::unique_ptr<pipeline>> pipelines;
  std::vector<retrieval_attention> attentions;
  attentions.reserve(contenders.size());
  for (const contender& c : contenders) {
    pipelines.push_back(make_contender(c, s, model.shape(), prompt, room, true, backend));
    prompt.kv.restore(*pipelines.back());
    attentions.emplace_back(*pipelines.back(), model.shape(), s.complete_layers);
  }
  std::vector<std::unique_ptr<engine>> stock;
  std::vector<speed> speeds;
  for (const bool flash : {true, false}) {
    stock.push_back(std::make_unique<engine>(
        model, engine::options{
                   .threads = s.threads, .context = prompt.kv.tokens() + room, .flash_attention = flash}));
    restore_stock(*stock.back(), prompt_tokens, flash, place, progress);
    speeds.push_back({std::string("llama.cpp, flash attention ") + (flash ? "on" : "off"), {}, {}});
  }
  for (const contender& c : contenders) speeds.push_back({c.name, {}, {}});

  const auto timed = [&](std::size_t who, int round) {
    note_detail(speeds[who].name + ", round " + std::to_string(round) + " at " +
                std::to_string(prompt.kv.tokens()) + " tokens");
    const auto start = std::chrono::steady_clock::now();
    for (int step = 0; step < how.steps; ++step) {
      const int at = round * how.steps + step;
      const llama_token token = text[to_size(at) % text.size()];
      if (who < stock.size())
        stock[who]->decode_stock(token, prompt.kv.tokens() + at);
      else
        decoding.decode(token, prompt.kv.tokens() + at, attentions[who - stock.size()]);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const auto keep = [&](std::vector<double>& rounds, double value) {
      if (static_cast<int>(rounds.size()) == how.rounds) rounds.erase(rounds.begin());
      if (round > 0) rounds.push_back(value);
    };
    keep(speeds[who].tokens_per_second, how.steps / seconds);
    if (who < stock.size()) return;
    auto& attention = attentions[who - stock.size()];
    keep(speeds[who].attention_seconds, attention.seconds() / how.steps);
    attention.reset();
  };
  const auto steady = [](const speed& v) { return v.spread() <= steady_spread; };
  for (int round = 0; round <= most_rounds; ++round) {
    for (std::size_t who = 0; who < speeds.size(); ++who) {
      timed(who, round);
      progress(round == 0 ? "speed, warming up" : "speed, round " + std::to_string(round),
               static_cast<double>(who + 1) / static_cast<double>(speeds.size()));
    }
    if (round >= how.rounds && std::all_of(speeds.begin(), speeds.end(), steady)) break;
  }
  return speeds;
}

void add_lines(json_lines& lines, const char* bench, const speed& s, double stock,
               nlohmann::ordered_json at) {
  at["route"] = "in_place";
  const double rate = s.median_tokens_per_second();
  lines.add(bench, s.name, "tokens_per_second", rate, "tokens/s", at);
  lines.add(bench, s.name, "over_stock", rate / stock, "", at);
  lines.add(bench, s.name, "spread", s.spread(), "", at);
  if (!s.attention_seconds.empty())
    lines.add(bench, s.name, "attention_seconds", s.median_attention_seconds(), "s/token", at);
}

double best_of_stock(const std::vector<speed>& speeds) {
  return std::max(speeds[0].median_tokens_per_second(), speeds[1].median_tokens_per_second());
}

std::string rounds_sentence(const common_settings& s, const speed_settings& how) {
  return "medians of " + std::to_string(how.rounds) + " rounds of " + std::to_string(how.steps) +
         " tokens in turns; attention: append and attend, all layers" +
         (s.overlap ? ", what is selected for the next step on a thread beside\n"
                    : ", and what is selected\nfor the next step, which nothing overlaps here") +
         "; route in_place\n";
}

}  // namespace

void compare_speed(job& j) {
  const arguments& a = j.options();
  const speed_settings how{a.rounds, a.timed_steps};
  const auto tokens = j.text().first(to_size(a.prompt));
  const auto speeds = measure_speed(j.contenders(), a.common, j.model(), j.prompt(), tokens, j.after_prompt(),
                                    j.place(), how, j.progress());
  const double stock = best_of_stock(speeds);
  std::vector<std::vector<std::string>> rows{
      {"at " + std::to_string(a.prompt) + " tokens, " + std::to_string(a.common.threads) + " threads",
       "tokens/s", "over llama.cpp's best", "attention ms/token", "spread"}};
  for (const auto& s : speeds) {
    const double rate = s.median_tokens_per_second();
    rows.push_back({s.name, fixed(rate, 1), fixed(rate / stock, 2),
                    s.attention_seconds.empty() ? "" : fixed(1e3 * s.median_attention_seconds(), 2),
                    fixed(100 * s.spread(), 0) + " %" + (s.spread() > steady_spread ? " unsteady" : "")});
    add_lines(j.lines(), "speed", s, stock, {});
  }
  j.say("\n" + table(rows) + rounds_sentence(a.common, how));
}

void compare_lengths(job& j) {
  const arguments& a = j.options();
  const speed_settings how{std::min(a.rounds, 3), std::min(a.timed_steps, 8)};
  std::vector<std::vector<std::string>> rows{
      {"tokens/s (attention ms/token), " + std::to_string(a.common.threads) + " threads"}};
  for (const int length : a.lengths) {
    const auto tokens = j.text().first(to_size(length));
    const prepared_prompt prompt = j.prepare(tokens, a.needle_text, true);
    const auto speeds = measure_speed(j.principal(), a.common, j.model(), prompt, tokens, j.text(), j.place(),
                                      how, j.progress());
    const double stock = best_of_stock(speeds);
    rows[0].push_back("at " + std::to_string(length));
    rows.resize(speeds.size() + 1);
    for (std::size_t i = 0; i < speeds.size(); ++i) {
      const speed& s = speeds[i];
      if (rows[i + 1].empty()) rows[i + 1].push_back(s.name);
      rows[i + 1].push_back(
          fixed(s.median_tokens_per_second(), 1) +
          (s.attention_seconds.empty() ? "" : " (" + fixed(1e3 * s.median_attention_seconds(), 2) + ")"));
      add_lines(j.lines(), "length", s, stock, {{"length", length}});
    }
  }
  j.say("\n" + table(rows) + rounds_sentence(a.common, how));
}

}  // namespace freekv::examples
