// What the papers of HARD-KV and ARKV say of them, on the model that runs.

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "job.hpp"
#include "quality.hpp"
#include "statistics.hpp"

namespace freekv::examples {

namespace {

constexpr int page = 8;  // tokens, of which budgets are multiples: equal ones are found by measuring others

row_to_measure row_of(job& j, const std::string& name, std::string_view eviction, int budget,
                      double share = 0) {
  row_to_measure row{{}, j.options().common, "budget " + std::to_string(budget)};
  row.who.name = name;
  row.who.page = page;
  row.who.method.plan = "eviction";
  row.who.method.eviction = eviction;
  if (share > 0) row.who.method.eviction_values["p"] = share;
  row.with.budget = budget;
  return row;
}
/// Budgets are whole pages behind sink and window.
int whole_pages(job& j, double tokens) {
  const common_settings& s = j.options().common;
  const int least = s.sink + s.window + page;
  return std::max(least, least + static_cast<int>(std::lround((tokens - least) / page)) * page);
}

std::vector<quality_of_texts> measure(job& j, std::vector<row_to_measure> rows) {
  rows.insert(rows.begin(), {j.contenders().front(), j.options().common, "full attention"});
  auto all = quality_of_all(j, rows, j.options().steps);
  all.erase(all.begin());
  return all;
}

/// The means of the quarters of each text's steps, all texts together.
std::vector<double> by_quarter(const std::vector<std::vector<double>>& by_step) {
  std::vector<double> quarters(4);
  for (const auto& of_text : by_step)
    for (std::size_t quarter = 0; quarter < 4; ++quarter) {
      const std::size_t first = quarter * of_text.size() / 4, end = (quarter + 1) * of_text.size() / 4;
      const double sum = std::accumulate(of_text.begin() + static_cast<std::ptrdiff_t>(first),
                                         of_text.begin() + static_cast<std::ptrdiff_t>(end), 0.0);
      quarters[quarter] += sum / static_cast<double>(std::max<std::size_t>(end - first, 1)) /
                           static_cast<double>(by_step.size());
    }
  return quarters;
}

void add(job& j, const char* bench, const std::string& name, const quality_of_texts& q, int budget) {
  const attention_statistics s = q.attention();
  const estimate kl = block_bootstrap(q.divergences);
  const nlohmann::ordered_json at{{"budget", budget}, {"n", q.steps}, {"texts", q.divergences.size()}};
  j.lines().add(bench, name, "divergence", kl, "nats per token", at);
  j.lines().add(bench, name, "attention_error", s.mean_error(), "relative L2", at);
  j.lines().add(bench, name, "mass_kept", s.mean_mass(), "", at);
  j.lines().add(bench, name, "tokens_attended", s.mean_attended(), "per KV head and step", at);
  j.lines().add(bench, name, "coded", s.coded_share(), "of these", at);
  const std::vector<double> lost = by_quarter(q.lse_lost);
  for (std::size_t quarter = 0; quarter < lost.size(); ++quarter)
    j.lines().add(bench, name, "log_sum_exp_lost", lost[quarter], "nats, of a quarter of the steps",
                  {{"budget", budget}, {"quarter", quarter}});
}

/// The scores that the rows before `end`, as many as `observed`, of one layer have of the tokens before it:
/// (rows, query_heads, end), -infinity behind a row.
std::vector<float> scores_before(job& j, int layer, int end, int observed) {
  const model_shape& shape = j.model().shape();
  const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads;
  const auto keys = j.prompt().kv.float_keys(layer);
  const auto queries = j.prompt().kv.queries_before(layer, end, observed, "shares");
  std::vector<float> scores(to_size(observed) * to_size(shape.query_heads) * to_size(end), -infinity);
  for (int row = 0; row < observed; ++row)
    for (int head = 0; head < shape.query_heads; ++head) {
      const float* const query = queries.data() + to_size(row * shape.query_heads + head) * to_size(d);
      float* const to = scores.data() + to_size(row * shape.query_heads + head) * to_size(end);
      for (int token = 0; token <= end - observed + row; ++token) {
        const float* const key = keys.data() + to_size(token * shape.kv_heads + head / group) * to_size(d);
        to[token] = shape.scale * std::inner_product(query, query + d, key, 0.0f);
      }
    }
  return scores;
}
bool retrieves(job& j, int layer) {
  return layer >= j.options().common.complete_layers && !j.model().shape().slides(layer);
}

/// HARD-KV's temperature of each KV head when a text of `end` tokens is cut.
std::vector<double> temperatures_at(job& j, int end) {
  const hard_kv policy;
  const model_shape& shape = j.model().shape();
  const int rows = std::min(policy.window, end), group = shape.query_heads / shape.kv_heads;
  std::vector<float> numbers(to_size(rows) * to_size(end)), scratch(numbers.size());
  std::vector<std::int32_t> tokens(to_size(end)), counts(to_size(2 * rows));
  std::iota(tokens.begin(), tokens.end(), 0);
  std::vector<double> all;
  for (int layer = 0; layer < shape.layers; ++layer) {
    if (!retrieves(j, layer)) continue;
    const auto scores = scores_before(j, layer, end, rows);
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::fill(numbers.begin(), numbers.end(), -infinity);
      for (int row = 0; row < rows; ++row)
        for (int g = 0; g < group; ++g)
          for (int token = 0; token < end; ++token) {
            float& of = numbers[to_size(row) * to_size(end) + to_size(token)];
            of = std::max(
                of,
                scores[to_size(row * shape.query_heads + head * group + g) * to_size(end) + to_size(token)]);
          }
      all.push_back(policy.calibrate({.units = end,
                                      .tokens = tokens.data(),
                                      .rows = rows,
                                      .numbers = numbers.data(),
                                      .scratch = scratch.data(),
                                      .counts = counts.data(),
                                      .stride = end}));
    }
    j.progress()("temperatures at " + std::to_string(end) + " tokens",
                 static_cast<double>(layer + 1) / shape.layers);
  }
  return all;
}

/// ARKV's ratios of the layers that forget, by a prompt's last rows.
std::vector<float> ratios(job& j) {
  const arkv policy;
  const model_shape& shape = j.model().shape();
  const int end = j.prompt().kv.tokens(), rows = std::min(policy.window, end);
  std::vector<double> sensitivities;
  for (int layer = 0; layer < shape.layers; ++layer) {
    if (!retrieves(j, layer)) continue;
    const auto scores = scores_before(j, layer, end, rows);
    std::vector<double> votes(to_size(end));
    for (std::size_t row = 0; row < scores.size(); row += to_size(end)) {
      const auto of = std::span(scores).subspan(row, to_size(end));
      const double most = static_cast<double>(*std::max_element(of.begin(), of.end()));
      double sum = 0;
      for (const float score : of) sum += std::exp(static_cast<double>(score) - most);
      for (std::size_t token = 0; token < of.size(); ++token)
        votes[token] += std::exp(static_cast<double>(of[token]) - most) / sum;
    }
    sensitivities.push_back(policy.sensitivity(votes.data(), end));
    j.progress()("ratios of layers", static_cast<double>(layer + 1) / shape.layers);
  }
  std::vector<float> all(sensitivities.size());
  policy.rate(sensitivities.data(), static_cast<int>(all.size()), all.data());
  return all;
}

}  // namespace

void compare_hard_kv(job& j) {
  const arguments& a = j.options();
  const int budget = a.common.budget;
  struct setting {
    double p;
    int cap;
  };
  const std::vector<setting> settings{{0.9, budget},     {0.9, 2 * budget}, {0.9, 4 * budget},
                                      {0.8, 4 * budget}, {0.7, 4 * budget}, {0.6, 4 * budget}};
  std::vector<row_to_measure> rows;
  for (const setting& s : settings)
    rows.push_back(row_of(j, "hard_kv, p " + fixed(s.p, 1), hard_kv::name, s.cap, s.p));
  for (const std::string_view merging : {hard_kv_merge::name, hard_kv_pairs::name})
    rows.push_back(row_of(j, std::string(merging), merging, budget));
  const auto by_head = measure(j, rows);

  // As many tokens, the same for each head: what p of 1 leaves, the best by the same ranking. Between two
  // cuts both take what is decoded.
  const int interval = hard_kv{}.interval;
  double grown = 0;
  for (int step = 0; step < a.steps; ++step) grown += step % interval + 1;
  std::vector<row_to_measure> equal;
  for (std::size_t i = 0; i < settings.size(); ++i)
    equal.push_back(row_of(j, "equal budgets", hard_kv::name,
                           whole_pages(j, by_head[i].attention().mean_attended() - grown / a.steps), 1.0));
  const auto uniform = measure(j, equal);

  std::vector<std::vector<std::string>> table_rows{
      {"HARD-KV, " + std::to_string(a.steps) + " steps after " + std::to_string(a.prompt), "cap",
       "tokens a head", "KL, 1/1000 nat (95 %)", "over equal budgets' (95 %)", "error", "mass"}};
  const auto add_row = [&](const std::string& name, const quality_of_texts& q, int cap,
                           const std::string& over) {
    const attention_statistics s = q.attention();
    table_rows.push_back({name, std::to_string(cap), fixed(s.mean_attended(), 0),
                          with_bounds(block_bootstrap(q.divergences)), over, fixed(s.mean_error(), 3),
                          fixed(100 * s.mean_mass(), 1) + " %"});
    add(j, "hard_kv", name, q, cap);
  };
  for (std::size_t i = 0; i < settings.size(); ++i) {
    const auto over = differences(by_head[i].divergences, uniform[i].divergences);
    add_row(rows[i].who.name, by_head[i], settings[i].cap, with_bounds(block_bootstrap(over)));
    add_row("equal budgets, as many as p " + fixed(settings[i].p, 1), uniform[i], equal[i].with.budget, "");
  }
  std::vector<std::vector<std::string>> lost{{"log-sum-exp lost, nats, cap " + std::to_string(budget),
                                              "first quarter of steps", "second", "third", "fourth"}};
  for (const std::size_t i : {std::size_t{0}, settings.size(), settings.size() + 1}) {
    std::vector<std::string> row{rows[i].who.name};
    for (const double nats : by_quarter(by_head[i].lse_lost)) row.push_back(fixed(nats, 3));
    lost.push_back(std::move(row));
    if (i > 0) add(j, "hard_kv", rows[i].who.name, by_head[i], budget);
  }

  std::vector<std::vector<double>> by_cut;
  for (int quarter = 1; quarter <= 4; ++quarter) by_cut.push_back(temperatures_at(j, quarter * a.prompt / 4));
  std::vector<double> means, spreads;
  for (std::size_t head = 0; head < by_cut[0].size(); ++head) {
    double sum = 0, squares = 0;
    for (const auto& cut : by_cut) sum += cut[head] / 4, squares += cut[head] * cut[head] / 4;
    means.push_back(sum);
    spreads.push_back(std::sqrt(std::max(0.0, squares - sum * sum)) / sum);
  }
  j.lines().add("hard_kv", "temperatures", "mean", median(means), "median of heads", {{"by_head", means}});
  j.lines().add("hard_kv", "temperatures", "spread", median(spreads), "deviation over mean, median of heads",
                {{"by_head", spreads}});
  j.say(
      "\n" + table(table_rows) +
      "tokens a head: attended to in a step, the mean; equal budgets: the best by the same ranking, as many "
      "for each head as\nthe row above has in the mean; error: relative L2 of a head's attention "
      "output.\n\n" +
      table(lost) +
      "log-sum-exp lost: full attention's less that of what is attended to, the mean over query heads.\n"
      "Temperatures at a quarter, a half, three quarters and all of the prompt: of a head's four the "
      "standard "
      "deviation\nis " +
      fixed(100 * median(spreads), 0) +
      " % of their mean, the median of heads, of nine in ten heads at most " +
      fixed(100 * percentile(spreads, 0.9), 0) + " %; the means are " + fixed(percentile(means, 0.1), 2) +
      " to " + fixed(percentile(means, 0.9), 2) + ", leaving out a tenth at each end.\n");
}

void compare_arkv(job& j) {
  const arguments& a = j.options();
  const std::vector<int> budgets{whole_pages(j, a.common.budget / 2.0), a.common.budget, 2 * a.common.budget};
  std::vector<row_to_measure> rows;
  for (const int budget : budgets)
    for (const std::string_view name : {arkv_origin::name, arkv::name, arkv_split::name})
      rows.push_back(row_of(j, std::string(name), name, budget));
  const auto measured = measure(j, rows);
  std::vector<std::vector<std::string>> table_rows{
      {"ARKV, " + std::to_string(a.steps) + " steps after " + std::to_string(a.prompt), "budget",
       "tokens a head", "of them in fp8", "bytes, of all tokens'", "KL, 1/1000 nat (95 %)",
       "over arkv_origin's (95 %)", "error"}};
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const attention_statistics s = measured[i].attention();
    const auto over = differences(measured[i].divergences, measured[i - i % 3].divergences);
    const double all = a.prompt + (a.steps + 1) / 2.0;
    table_rows.push_back({rows[i].who.name, std::to_string(rows[i].with.budget), fixed(s.mean_attended(), 0),
                          fixed(100 * s.coded_share(), 1) + " %",
                          fixed(100 * s.mean_attended() * (1 - s.coded_share() / 2) / all, 1) + " %",
                          with_bounds(block_bootstrap(measured[i].divergences)),
                          i % 3 == 0 ? "" : with_bounds(block_bootstrap(over)), fixed(s.mean_error(), 3)});
    add(j, "arkv", rows[i].who.name, measured[i], rows[i].with.budget);
  }
  const std::vector<float> of_layers = ratios(j);
  const arkv policy;
  double below_all = 0, below_alpha = 0;
  int coding = 0;
  for (const float ratio : of_layers) {
    below_all += static_cast<double>(1 - ratio) / static_cast<double>(of_layers.size());
    below_alpha +=
        static_cast<double>(std::max(0.0f, policy.alpha - ratio)) / static_cast<double>(of_layers.size());
    coding += ratio < policy.alpha;
  }
  j.lines().add("arkv", "ratios", "mean_below_one", below_all, "of layers", {{"by_layer", of_layers}});
  j.say("\n" + table(table_rows) +
        "in fp8: the mean over steps and heads; bytes: of fp8 half. Ratios of the " +
        std::to_string(of_layers.size()) + " layers that forget, by the prompt: 1 less these is " +
        fixed(100 * below_all, 1) + " % in the mean,\nwhich the paper calls its quantisation ratio, and " +
        std::to_string(coding) +
        " layers of a ratio below alpha have anything in fp8: right behind a cut to\na budget of " +
        std::to_string(a.common.budget) + ", by its equations, " +
        fixed(100 * below_alpha * (1 - static_cast<double>(policy.window) / a.common.budget), 1) +
        " % of it.\n");
}

}  // namespace freekv::examples
