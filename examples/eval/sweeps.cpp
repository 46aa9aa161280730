// What --full adds to the quality at one setting: the same against the budget, and against the correction
// threshold.

#include <algorithm>
#include <freekv/core/size.hpp>
#include <string>
#include <vector>

#include "job.hpp"
#include "quality.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

std::string texts_of(const arguments& a) {
  return std::to_string(a.deep_steps) + " tokens after " + std::to_string(a.prompt) +
         (a.more_texts.empty() ? "" : " of each of " + std::to_string(1 + a.more_texts.size()) + " texts");
}

/// The lines of a point of a sweep, at `at`; returns its KL.
estimate add_point(job& j, const std::string& bench, const std::string& name, const quality_of_texts& q,
                   nlohmann::ordered_json at) {
  const estimate kl = block_bootstrap(q.divergences);
  const attention_statistics s = q.attention();
  at.update(
      {{"steps", j.options().deep_steps}, {"n", q.steps}, {"texts", q.losses.size()}, {"route", "resident"}});
  j.lines().add(bench, name, "perplexity", q.perplexity(), "", at);
  j.lines().add(bench, name, "mass_kept", s.mean_mass(), "", at);
  j.lines().add(bench, name, "slices_critical", q.per_step(s.recalled_before_attention), "per step", at);
  at.update({{"low", kl.low}, {"high", kl.high}});
  j.lines().add(bench, name, "kl", kl.value, "nats", at);
  return kl;
}

}  // namespace

void compare_budgets(job& j) {
  const arguments& a = j.options();
  std::vector<std::vector<std::string>> table_rows{{"KL, 1/1000 nat (95 %), mass kept; " + texts_of(a)}};
  for (const int budget : a.budgets) table_rows[0].push_back("B " + std::to_string(budget));
  std::vector<row_to_measure> rows{{j.contenders().front(), a.common, "full attention"}};
  for (const contender& c : j.principal())
    for (const int budget : a.budgets) {
      common_settings s = a.common;
      s.budget = budget;
      if (!c.keeps_everything() && fits(c, s)) rows.push_back({c, s, "budget " + std::to_string(budget)});
    }
  const auto all = quality_of_all(j, rows, a.deep_steps);
  for (const contender& c : j.principal()) {
    std::vector<std::string> row{c.name};
    for (const int budget : a.budgets) {
      if (c.keeps_everything()) {
        row.push_back("perplexity " + fixed(all.front().perplexity(), 2));
        add_point(j, "budget", c.name, all.front(), {{"budget", budget}});
        continue;
      }
      const auto at = std::find_if(rows.begin(), rows.end(), [&](const row_to_measure& r) {
        return r.who.name == c.name && r.with.budget == budget;
      });
      if (at == rows.end()) {
        row.push_back("");
        continue;
      }
      const quality_of_texts& q = all[to_size(at - rows.begin())];
      const estimate kl = add_point(j, "budget", c.name, q, {{"budget", budget}});
      row.push_back(with_bounds(kl) + ", " + fixed(100 * q.attention().mean_mass(), 1) + " %");
    }
    table_rows.push_back(std::move(row));
  }
  j.say(
      "\n" + table(table_rows) +
      "KL: of the next token's distribution from full attention's, 95 % by a block bootstrap of steps; mass "
      "kept: share of full\nattention's softmax mass on what is attended. Route resident.\n");
}

void compare_taus(job& j) {
  const arguments& a = j.options();
  std::vector<std::vector<std::string>> table_rows{
      {"KL, 1/1000 nat (95 %); heads corrected; pages changed; " + texts_of(a)}};
  for (const double tau : a.taus) table_rows[0].push_back("tau " + fixed(tau, 2));
  std::vector<row_to_measure> rows{{j.contenders().front(), a.common, "full attention"}};
  for (contender c : j.principal())
    for (const double tau : a.taus)
      if (c.selects() && c.method.correction == "cosine_drift") {
        c.method.tau = static_cast<float>(tau);
        rows.push_back({c, a.common, "tau " + fixed(tau, 2)});
      }
  const auto all = quality_of_all(j, rows, a.deep_steps);
  const auto kv_heads = to_size(j.model().shape().kv_heads);
  for (std::size_t i = 1; i < rows.size(); ++i) {
    const std::string& name = rows[i].who.name;
    const quality_of_texts& q = all[i];
    const double tau = a.taus[(i - 1) % a.taus.size()];
    if ((i - 1) % a.taus.size() == 0) table_rows.push_back({name});
    const estimate kl = add_point(j, "tau_kl", name, q, {{"tau", tau}});
    const attention_statistics of_all = q.attention();
    table_rows.back().push_back(with_bounds(kl) + "; " + fixed(100 * of_all.corrected_share(), 0) + " %; " +
                                fixed(of_all.pages_changed(), 2));
    for (std::size_t first = 0; first < q.by_head.size(); first += kv_heads) {
      attention_statistics layer;
      for (const auto& head : std::span(q.by_head).subspan(first, kv_heads)) layer += head;
      if (layer.rows == 0) continue;
      const nlohmann::ordered_json at{
          {"tau", tau}, {"layer", first / kv_heads}, {"steps", a.deep_steps}, {"route", "resident"}};
      j.lines().add("tau", name, "corrected", layer.corrected_share(), "of heads", at);
      j.lines().add("tau", name, "pages_changed", layer.pages_changed(), "per KV head and step", at);
      j.lines().add("tau", name, "mass_kept", layer.mean_mass(), "", at);
    }
  }
  j.say("\n" + table(table_rows) +
        "KL: of the next token's distribution from full attention's, 95 % by a block bootstrap of steps; "
        "corrected: KV heads\nthat select anew before they attend; pages changed: attended as selected, and "
        "not in "
        "the step before, a KV head and step.\nBudget " +
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
      row.push_back(with_bounds(kl));
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

void compare_sources(job& j) {
  const arguments& a = j.options();
  struct source {
    const char* name;
    const char* correction;
    bool layer_before = false;
  };
  const std::vector<source> sources{{"this step's", "always"},
                                    {"the step before's", "never"},
                                    {"the same, but where cosines are below tau", "cosine_drift"},
                                    {"the layer before's", "always", true}};
  std::vector<std::string> compared;
  std::vector<row_to_measure> rows{{j.contenders().front(), a.common, "full attention"}};
  for (const contender& c : j.principal())
    if (c.selects() && c.method.correction == "cosine_drift" && fits(c, a.common)) {
      compared.push_back(c.name);
      for (const source& of : sources) {
        contender by = c;
        by.method.correction = of.correction;
        by.by_layer_before = of.layer_before;
        rows.push_back({by, a.common, of.name});
      }
    }
  const auto all = quality_of_all(j, rows, a.deep_steps);
  std::vector<std::vector<std::string>> table_rows{{"by whose queries; " + texts_of(a)}};
  for (const source& of : sources) table_rows.push_back({of.name});
  for (std::size_t i = 0; i < compared.size(); ++i) {
    table_rows[0].insert(table_rows[0].end(), {compared[i] + ": KL (95 %)", "mass kept", "before attention"});
    for (std::size_t k = 0; k < sources.size(); ++k) {
      const quality_of_texts& q = all[1 + i * sources.size() + k];
      const estimate kl = add_point(j, "source", compared[i], q, {{"source", sources[k].name}});
      const attention_statistics s = q.attention();
      table_rows[1 + k].insert(table_rows[1 + k].end(),
                               {with_bounds(kl), fixed(100 * s.mean_mass(), 1) + " %",
                                fixed(q.per_step(s.recalled_before_attention), 0)});
    }
  }
  j.say(
      "\n" + table(table_rows) +
      "KL: of the next token's distribution from full attention's, 1/1000 nat, 95 % by a block bootstrap of "
      "steps; mass kept:\nshare of full attention's softmax mass on what is attended; before attention: "
      "slices that are recalled a step before it\nattends, or, by the layer before's queries, while that "
      "layer goes on. Budget " +
      std::to_string(a.common.budget) + ", route resident.\n");
}

}  // namespace freekv::examples
