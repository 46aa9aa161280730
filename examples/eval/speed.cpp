#include <algorithm>
#include <chrono>
#include <cmath>
#include <freekv/core/size.hpp>

#include "fatal_signals.hpp"
#include "job.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

constexpr double steady_spread = 0.2;
constexpr int block_steps = 2;            // tokens of a block of a pair
constexpr int fewest_pairs = 12;          // behind which an interval is looked at
constexpr int most_pair_rounds = 100;     // of two pairs each, for which pipelines have room
constexpr double wanted_interval = 0.05;  // either way, of the ratio
constexpr std::string_view common_row = "freekv";

/// Decoding speed of a contender or of llama.cpp itself.
struct speed {
  std::string name;
  std::vector<double> tokens_per_second{};  ///< of the rounds
  std::vector<double> attention_seconds{};  ///< a step, of the rounds; empty for llama.cpp itself
  std::vector<double>
      over_stock{};  ///< by pairs with llama.cpp's best; none: it is that, or nothing was paired
  std::vector<double> over_common{};  ///< by pairs with `freekv`, of rows that differ from it by a part

  double median_tokens_per_second() const { return median(tokens_per_second); }
  double median_attention_seconds() const { return median(attention_seconds); }
  /// (largest - smallest) / median of the rounds.
  double spread() const {
    const auto [low, high] = std::minmax_element(tokens_per_second.begin(), tokens_per_second.end());
    return (*high - *low) / median_tokens_per_second();
  }
};

struct speed_settings {
  int rounds = 5, steps = 16;
  double pair_seconds = 0;  ///< that pairs may take; 0: none are measured
};

std::size_t best_of_stock(const std::vector<speed>& speeds) {
  return speeds[0].median_tokens_per_second() >= speeds[1].median_tokens_per_second() ? 0 : 1;
}

/// How far an interval goes to its farther side, of the value; NaN of an unknown one.
double width_of(const estimate& e) { return std::max(e.high - e.value, e.value - e.low) / e.value; }

/// llama.cpp with and without flash attention, then the contenders, all ready at the end of the prompt before
/// anybody is timed.
class speed_measurement {
 public:
  speed_measurement(std::span<const contender> contenders, const common_settings& s, const model& model,
                    const prepared_prompt& prompt, std::span<const llama_token> prompt_tokens,
                    std::span<const llama_token> text, const prompt_cache::place& place,
                    const speed_settings& how, const progress_function& progress)
      : how_(how),
        progress_(progress),
        text_(text),
        end_(prompt.kv.tokens()),
        backend_({.threads = s.threads, .overlap = s.overlap}),
        decoding_(model, {.threads = s.threads, .context = 1, .rows = 1}) {
    const int room =
        (1 + how.rounds) * how.steps + (how.pair_seconds > 0 ? 2 * block_steps * most_pair_rounds : 0);
    for (const bool flash : {true, false}) {
      stock_.push_back(std::make_unique<engine>(
          model, engine::options{.threads = s.threads, .context = end_ + room, .flash_attention = flash}));
      restore_stock(*stock_.back(), prompt_tokens, flash, place, progress);
      speeds_.push_back({std::string("llama.cpp, flash attention ") + (flash ? "on" : "off")});
    }
    attentions_.reserve(contenders.size());
    for (const contender& c : contenders) {
      pipelines_.push_back(make_contender(c, s, model.shape(), prompt, room, true, backend_));
      prompt.kv.restore(*pipelines_.back());
      attentions_.emplace_back(*pipelines_.back(), model.shape(), s.complete_layers);
      speeds_.push_back({c.name});
    }
    reached_.assign(speeds_.size(), end_);
  }

  std::vector<speed> measure() {
    for (int round = 0; round <= how_.rounds; ++round)
      for (std::size_t who = 0; who < speeds_.size(); ++who) {
        measure_round(who, round);
        progress_(round == 0 ? "speed, warming up" : "speed, round " + std::to_string(round),
                  static_cast<double>(who + 1) / static_cast<double>(speeds_.size()));
      }
    if (how_.pair_seconds > 0) measure_pairs();
    return std::move(speeds_);
  }

 private:
  /// All at the same position, one after the other; the first round warms up.
  void measure_round(std::size_t who, int round) {
    note_detail(speeds_[who].name + ", round " + std::to_string(round) + " at " + std::to_string(end_) +
                " tokens");
    const double seconds = decode(who, end_ + round * how_.steps, how_.steps);
    if (round > 0) speeds_[who].tokens_per_second.push_back(how_.steps / seconds);
    if (who < stock_.size()) return;
    auto& attention = attentions_[who - stock_.size()];
    if (round > 0) speeds_[who].attention_seconds.push_back(attention.seconds() / how_.steps);
    attention.reset();
  }

  /// Two pairs of every contender a round, until all intervals are narrow enough or time is up.
  void measure_pairs() {
    const std::size_t best = best_of_stock(speeds_);
    const auto start = std::chrono::steady_clock::now();
    for (int round = 0; round < most_pair_rounds; ++round) {
      const int position = end_ + (1 + how_.rounds) * how_.steps + 2 * round * block_steps;
      for (std::size_t who = stock_.size(); who < speeds_.size(); ++who) pair_with(best, who, position);
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      progress_("speed, pairs", std::min(1.0, seconds / how_.pair_seconds));
      if (seconds >= how_.pair_seconds || (2 * (round + 1) >= fewest_pairs && all_narrow())) return;
    }
  }

  /// Blocks of llama.cpp, the contender and, where it is one of `freekv`'s kind, `freekv`, and the same
  /// backwards, all at the same positions: each block of the contender has a neighbour of either.
  void pair_with(std::size_t stock, std::size_t who, int position) {
    const std::size_t common = common_of(who);
    const int behind = position + block_steps;
    const double stock_before = decode(stock, position, block_steps);
    const double first = decode(who, position, block_steps);
    double common_first = 0, common_second = 0;
    if (common != who) {
      common_first = decode(common, position, block_steps);
      common_second = decode(common, behind, block_steps);
    }
    const double second = decode(who, behind, block_steps);
    const double stock_after = decode(stock, behind, block_steps);
    auto& s = speeds_[who];
    s.over_stock.insert(s.over_stock.end(), {stock_before / first, stock_after / second});
    if (common != who)
      s.over_common.insert(s.over_common.end(), {common_first / first, common_second / second});
  }

  /// The row `freekv`, if `who` is one of its kind, else `who`.
  std::size_t common_of(std::size_t who) const {
    if (!speeds_[who].name.starts_with(std::string(common_row) + "_")) return who;
    for (std::size_t i = stock_.size(); i < speeds_.size(); ++i)
      if (speeds_[i].name == common_row) return i;
    return who;
  }

  bool all_narrow() const {
    return std::all_of(speeds_.begin(), speeds_.end(),
                       [](const speed& s) { return narrow(s.over_stock) && narrow(s.over_common); });
  }
  static bool narrow(const std::vector<double>& ratios) {
    return ratios.empty() || width_of(median_interval(ratios)) <= wanted_interval;
  }

  /// Seconds for `steps` tokens from `position` on, to which who is further is taken back.
  double decode(std::size_t who, int position, int steps) {
    if (reached_[who] > position) {
      if (who < stock_.size())
        stock_[who]->truncate(position);
      else
        pipelines_[who - stock_.size()]->truncate(pipelines_[who - stock_.size()]->only(), position);
    }
    reached_[who] = position + steps;
    const auto start = std::chrono::steady_clock::now();
    for (int at = position; at < position + steps; ++at) {
      const llama_token token = text_[to_size(at - end_) % text_.size()];
      if (who < stock_.size())
        stock_[who]->decode_stock(token, at);
      else
        decoding_.decode(token, at, attentions_[who - stock_.size()]);
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  speed_settings how_;
  progress_function progress_;
  std::span<const llama_token> text_;
  int end_;  // of the prompt
  host_backend backend_;
  engine decoding_;
  std::vector<std::unique_ptr<engine>> stock_;
  std::vector<std::unique_ptr<pipeline>> pipelines_;
  std::vector<retrieval_attention> attentions_;
  std::vector<speed> speeds_;
  std::vector<int> reached_;  // tokens
};

void add_lines(json_lines& lines, const char* bench, const speed& s, double stock,
               nlohmann::ordered_json at) {
  at["route"] = "in_place";
  const double rate = s.median_tokens_per_second();
  lines.add(bench, s.name, "tokens_per_second", rate, "tokens/s", at);
  if (s.over_stock.empty()) lines.add(bench, s.name, "over_stock", rate / stock, "", at);
  lines.add(bench, s.name, "spread", s.spread(), "", at);
  const auto add_pairs = [&](const char* metric, const std::vector<double>& ratios) {
    if (ratios.empty()) return;
    const estimate e = median_interval(ratios);
    auto with_interval = at;
    with_interval["n"] = ratios.size();
    if (!std::isnan(e.low)) with_interval["low"] = e.low, with_interval["high"] = e.high;
    lines.add(bench, s.name, metric, e.value, "", with_interval);
  };
  add_pairs("over_stock", s.over_stock);
  add_pairs("over_freekv", s.over_common);
  if (!s.attention_seconds.empty())
    lines.add(bench, s.name, "attention_seconds", s.median_attention_seconds(), "s/token", at);
}

std::string with_interval(const std::vector<double>& ratios) {
  if (ratios.empty()) return "";
  const estimate e = median_interval(ratios);
  const std::string interval =
      std::isnan(e.low) ? "" : " (" + fixed(e.low, 2) + " .. " + fixed(e.high, 2) + ")";
  return fixed(e.value, 2) + interval;
}

std::string pairs_sentence(const std::vector<speed>& speeds) {
  const auto& pairs = speeds.back().over_stock;
  if (pairs.empty()) return "";
  double widest = 0;
  for (const speed& s : speeds)
    for (const auto* ratios : {&s.over_stock, &s.over_common})
      if (!ratios->empty()) widest = std::max(widest, width_of(median_interval(*ratios)));
  const bool few = std::isnan(median_interval(pairs).low);
  return "ratios: medians of " + std::to_string(pairs.size()) + " pairs of " + std::to_string(block_steps) +
         " tokens each, timed one beside the other" +
         (few ? ", too few for intervals\n"
              : ",\nwith 95 % intervals, the widest " + fixed(100 * widest, 0) + " % either way\n");
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
  const speed_settings how{a.rounds, a.timed_steps, a.pair_seconds};
  const auto tokens = j.text().first(to_size(a.prompt));
  const auto speeds = speed_measurement(j.contenders(), a.common, j.model(), j.prompt(), tokens,
                                        j.after_prompt(), j.place(), how, j.progress())
                          .measure();
  const double stock = speeds[best_of_stock(speeds)].median_tokens_per_second();
  std::vector<std::vector<std::string>> rows{
      {"at " + std::to_string(a.prompt) + " tokens, " + std::to_string(a.common.threads) + " threads",
       "tokens/s", "over llama.cpp's best", "over freekv", "attention ms/token", "spread"}};
  for (const auto& s : speeds) {
    const double rate = s.median_tokens_per_second();
    rows.push_back({s.name, fixed(rate, 1),
                    s.over_stock.empty() ? fixed(rate / stock, 2) : with_interval(s.over_stock),
                    with_interval(s.over_common),
                    s.attention_seconds.empty() ? "" : fixed(1e3 * s.median_attention_seconds(), 2),
                    fixed(100 * s.spread(), 0) + " %" + (s.spread() > steady_spread ? " unsteady" : "")});
    j.keep_in_short(s.name, "tokens/s " + rows[0][2], rows.back()[2]);
    add_lines(j.lines(), "speed", s, stock, {});
  }
  j.say("\n" + table(rows) + rounds_sentence(a.common, how) + pairs_sentence(speeds));
}

void compare_lengths(job& j) {
  const arguments& a = j.options();
  const speed_settings how{std::min(a.rounds, 3), std::min(a.timed_steps, 8)};
  std::vector<std::vector<std::string>> rows{
      {"tokens/s (attention ms/token), " + std::to_string(a.common.threads) + " threads"}};
  for (const int length : a.lengths) {
    const auto tokens = j.text().first(to_size(length));
    const prepared_prompt prompt = j.prepare(tokens, a.text, true);
    const auto speeds = speed_measurement(j.principal(), a.common, j.model(), prompt, tokens, j.text(),
                                          j.place(), how, j.progress())
                            .measure();
    const double stock = speeds[best_of_stock(speeds)].median_tokens_per_second();
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
