// What --full adds to the quality at one setting: the same against the budget, and against the correction
// threshold.

#include <freekv/core/size.hpp>
#include <optional>

#include "job.hpp"
#include "quality.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

std::span<const llama_token> swept_text(const job& j) {
  const arguments& a = j.options();
  return j.text().subspan(to_size(a.prompt), to_size(a.deep_steps) + 1);
}

}  // namespace

void compare_budgets(job& j) {
  const arguments& a = j.options();
  std::vector<std::vector<std::string>> rows{{"perplexity (mass kept), " + std::to_string(a.deep_steps) +
                                              " tokens after " + std::to_string(a.prompt)}};
  for (const int budget : a.budgets) rows[0].push_back("B " + std::to_string(budget));
  for (const contender& c : j.principal()) {
    std::vector<std::string> row{c.name};
    std::optional<quality> of_full;  // which does not depend on the budget
    for (const int budget : a.budgets) {
      common_settings s = a.common;
      s.budget = budget;
      if (!fits(c, s)) {
        row.push_back("");
        continue;
      }
      const quality q = of_full
                            ? *of_full
                            : measure_quality(c, s, j.model(),
                                              {j.prompt(), swept_text(j), "budget " + std::to_string(budget)},
                                              j.progress());
      if (c.keeps_everything()) of_full = q;
      row.push_back(fixed(q.perplexity(), 2) + " (" + fixed(100 * q.attention.mean_mass(), 1) + " %)");
      const nlohmann::ordered_json at{{"budget", budget}, {"steps", a.deep_steps}, {"route", "resident"}};
      j.lines().add("budget", c.name, "perplexity", q.perplexity(), "", at);
      j.lines().add("budget", c.name, "mass_kept", q.attention.mean_mass(), "", at);
    }
    rows.push_back(std::move(row));
  }
  j.say("\n" + table(rows) +
        "mass kept: share of full attention's softmax mass on what is attended. Route resident.\n");
}

void compare_taus(job& j) {
  const arguments& a = j.options();
  std::vector<std::vector<std::string>> rows{{"heads corrected (pages changed), " +
                                              std::to_string(a.deep_steps) + " tokens after " +
                                              std::to_string(a.prompt)}};
  for (const double tau : a.taus) rows[0].push_back("tau " + fixed(tau, 2));
  const auto kv_heads = to_size(j.model().shape().kv_heads);
  for (contender c : j.principal()) {
    if (!c.selects() || c.method.correction != "cosine_drift") continue;
    std::vector<std::string> row{c.name};
    for (const double tau : a.taus) {
      c.method.tau = static_cast<float>(tau);
      const quality q = measure_quality(c, a.common, j.model(),
                                        {j.prompt(), swept_text(j), "tau " + fixed(tau, 2)}, j.progress());
      const auto& all = q.attention;
      row.push_back(fixed(100 * all.corrected_share(), 0) + " % (" + fixed(all.pages_changed(), 2) + ")");
      for (std::size_t first = 0; first < q.by_head.size(); first += kv_heads) {
        attention_statistics layer;
        for (const auto& head : std::span(q.by_head).subspan(first, kv_heads)) layer += head;
        if (layer.rows == 0) continue;
        const nlohmann::ordered_json at{
            {"tau", tau}, {"layer", first / kv_heads}, {"steps", a.deep_steps}, {"route", "resident"}};
        j.lines().add("tau", c.name, "corrected", layer.corrected_share(), "of heads", at);
        j.lines().add("tau", c.name, "pages_changed", layer.pages_changed(), "per KV head and step", at);
        j.lines().add("tau", c.name, "mass_kept", layer.mean_mass(), "", at);
      }
    }
    rows.push_back(std::move(row));
  }
  j.say("\n" + table(rows) +
        "corrected: KV heads that select anew before they attend; pages changed: attended as selected, and "
        "not in "
        "the\nstep before, a KV head and step. Budget " +
        std::to_string(a.common.budget) + ", route resident.\n");
}

void compare_poolings(job& j) {
  const arguments& a = j.options();
  const std::vector<std::string> compared{"min_max", "mean"};
  std::vector<std::vector<std::string>> rows{
      {"KL, 1/1000 nat (95 %), " + std::to_string(a.steps) + " tokens after " + std::to_string(a.prompt)}};
  for (const auto& summary : compared) rows[0].insert(rows[0].end(), {summary, "mass"});
  full_logits logits;
  const auto measure = [&](const contender& c) {
    return measure_quality(c, a.common, j.model(), {j.prompt(), j.after_prompt(), "pooling"}, j.progress(),
                           &logits);
  };
  measure(j.contenders().front());
  struct rule {
    std::string pooling;
    bool scaled = true;  // the products whose softmaxes are pooled
  };
  std::vector<rule> rules;
  for (const auto& pooling : poolings) rules.push_back({std::string(pooling.name)});
  for (const char* of_softmaxes : {"mean_softmax", "max_softmax"}) rules.push_back({of_softmaxes, false});
  for (const auto& [pooling, scaled] : rules) {
    std::vector<std::string> row{pooling + (scaled ? "" : ", unscaled")};
    for (const auto& summary : compared) {
      contender c{.name = summary + ", " + row.front(), .method = {}};
      c.method.summary = summary;
      c.method.pooling = pooling;
      if (!scaled) c.method.selection_scale = 1.0f;
      c.method.correction = "always";  // so that what is selected is this step's
      const quality q = measure(c);
      const estimate kl = block_bootstrap(std::span(&q.divergences, 1));
      row.push_back(fixed(1e3 * kl.value, 1) + " (" + fixed(1e3 * kl.low, 1) + " .. " +
                    fixed(1e3 * kl.high, 1) + ")");
      row.push_back(fixed(100 * q.attention.mean_mass(), 1) + " %");
      const nlohmann::ordered_json at{
          {"summary", summary}, {"pooling", row.front()}, {"steps", a.steps}, {"route", "resident"}};
      auto with_bounds = at;
      with_bounds.update({{"low", kl.low}, {"high", kl.high}});
      j.lines().add("pooling", c.name, "kl", kl.value, "nats", with_bounds);
      j.lines().add("pooling", c.name, "mass_kept", q.attention.mean_mass(), "", at);
    }
    rows.push_back(std::move(row));
  }
  j.say("\n" + table(rows) +
        "KL: of the next token's distribution from full attention's, 95 % by a block bootstrap of steps; "
        "mass: share "
        "of full\nattention's softmax mass on what is attended; every head selects anew each step; budget " +
        std::to_string(a.common.budget) + ", route resident\n");
}

}  // namespace freekv::examples
