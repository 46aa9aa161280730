// What full attention goes on with on its own, given to every contender: texts that each writes itself differ
// after a few tokens, whatever the method, and say nothing about how far it is from full attention.

#include <array>
#include <optional>
#include <utility>

#include "generation.hpp"
#include "job.hpp"
#include "logits.hpp"
#include "quality.hpp"
#include "retrieval_attention.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

/// The token that follows the prompt in its text, then --own-continuation tokens that full attention finds
/// most likely, none of those that end a text.
std::vector<llama_token> own_continuation(job& j, const contender& full) {
  const arguments& a = j.options();
  host_backend backend({.threads = a.common.threads});
  const auto p =
      make_contender(full, a.common, j.model().shape(), j.prompt(), a.own_continuation, true, backend);
  j.prompt().kv.restore(*p);
  engine decoding(j.model(), {.threads = a.common.threads, .context = 1, .rows = 1});
  retrieval_attention attention(*p, j.model().shape(), 0);
  sampler choice({}, j.model().ends());
  std::vector<llama_token> tokens{j.after_prompt().front()};
  for (int step = 0; step < a.own_continuation; ++step) {
    tokens.push_back(choice.choose(decoding.decode(tokens.back(), j.prompt().kv.tokens() + step, attention)));
    j.progress()("continuation by full attention", static_cast<double>(step + 1) / a.own_continuation);
  }
  return tokens;
}

}  // namespace

void compare_continuation(job& j) {
  const arguments& a = j.options();
  const auto tokens = own_continuation(j, j.contenders().front());
  const int n = a.own_continuation;
  const std::array<std::pair<int, int>, 4> parts{{{0, n / 8}, {n / 8, n / 4}, {n / 4, n / 2}, {n / 2, n}}};
  std::vector<std::vector<std::string>> rows{
      {std::to_string(n) + " tokens of full attention's own after " + std::to_string(a.prompt + 1)}};
  for (const auto& [first, end] : parts)
    rows[0].push_back("loss at " + std::to_string(first) + " .. " + std::to_string(end - 1));
  for (const char* column : {"all", "over full (95 %)", "KL, 1/1000 nat (95 %)", "its 99 %", "top-1"})
    rows[0].push_back(column);
  full_logits logits;
  std::optional<quality> full;
  for (const contender& c : j.contenders()) {
    const quality q =
        measure_quality(c, a.common, j.model(), {j.prompt(), tokens, "full attention's continuation"},
                        j.progress(), &logits, false);
    if (!full) full = q;
    const nlohmann::ordered_json at{{"tokens", n}, {"n", n}, {"route", "in_place"}};
    std::vector<std::string> row{c.name};
    for (const auto& [first, end] : parts) {
      double sum = 0;
      for (int i = first; i < end; ++i) sum += q.losses[i];
      row.push_back(end > first ? fixed(sum / (end - first), 3) : "");
      auto there = at;
      there["first"] = first, there["end"] = end;
      if (end > first)
        j.lines().add("continuation", c.name, "loss_at", sum / (end - first), "nats per token", there);
    }
    std::vector<std::vector<double>> more{q.losses};
    double same = 0;
    for (std::size_t i = 0; i < q.losses.size(); ++i) {
      more[0][i] -= full->losses[i];
      same += q.choices[i] == full->choices[i];
    }
    same /= static_cast<double>(q.losses.size());
    const estimate over = block_bootstrap(more), kl = block_bootstrap({&q.divergences, 1});
    const double highest = percentile(q.divergences, 0.99);
    const auto thousandths = [](double nats) { return fixed(1000 * nats, nats < 0.01 ? 2 : 1); };
    const auto unless_full = [&](const std::string& cell) { return c.keeps_everything() ? "" : cell; };
    row.push_back(fixed(q.mean_loss(), 3));
    row.push_back(
        unless_full(fixed(over.value, 3) + " (" + fixed(over.low, 3) + " .. " + fixed(over.high, 3) + ")"));
    row.push_back(unless_full(thousandths(kl.value) + " (" + thousandths(kl.low) + " .. " +
                              thousandths(kl.high) + ")"));
    row.push_back(unless_full(thousandths(highest)));
    row.push_back(fixed(100 * same, 1) + " %");
    rows.push_back(std::move(row));
    const auto add = [&](const char* metric, const auto& value, const char* unit) {
      j.lines().add("continuation", c.name, metric, value, unit, at);
    };
    add("loss", q.mean_loss(), "nats per token");
    add("loss_difference", over, "nats per token");
    add("divergence", kl, "nats per token");
    add("divergence_99", highest, "nats, 99th percentile of tokens");
    add("top1_agreement", same, "");
  }
  j.say("\n" + table(rows) + "n = " + std::to_string(n) +
        " tokens that full attention generates greedily, none of which ends the text, given to every method "
        "one by "
        "one;\n95 %: block bootstrap of steps, blocks of at most 64; KL: of the next token's distribution "
        "from full "
        "attention's, mean\nand 99th percentile over tokens; top-1: same most likely token as full. Budget " +
        std::to_string(a.common.budget) + ", route in_place.\n");
}

}  // namespace freekv::examples
