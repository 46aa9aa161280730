#include <algorithm>
#include <chrono>

#include "measure.hpp"

namespace freekv::examples {

namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

constexpr double steady_spread = 0.2;

}  // namespace

double speed::median_tokens_per_second() const { return median(tokens_per_second); }
double speed::median_attention_seconds() const { return median(attention_seconds); }
double speed::spread() const {
  const auto [low, high] = std::minmax_element(tokens_per_second.begin(), tokens_per_second.end());
  return (*high - *low) / median_tokens_per_second();
}

std::vector<speed> measure_speed(const std::vector<contender>& contenders, const common_settings& s,
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
    const auto start = std::chrono::steady_clock::now();
    for (int step = 0; step < how.steps; ++step) {
      const int at = round * how.steps + step;
      const llama_token token = text[static_cast<std::size_t>(at) % text.size()];
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

}  // namespace freekv::examples
