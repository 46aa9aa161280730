#include "quality.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <numeric>
#include <optional>

#include "job.hpp"
#include "logits.hpp"
#include "statistics.hpp"

namespace freekv::examples {

quality measure_quality(const contender& c, const common_settings& s, const model& model,
                        const decoded_text& decoded, const progress_function& progress, full_logits* full,
                        bool compares_attention) {
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  const auto steps = static_cast<int>(decoded.text.size()) - 1;
  const auto p = make_contender(c, s, model.shape(), decoded.prompt, steps, !compares_attention, backend);
  decoded.prompt.kv.restore(*p);
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});
  retrieval_attention attention(*p, model.shape(), c.keeps_everything() ? 0 : s.complete_layers);
  attention.compare_with_full(compares_attention);
  attention.select_by_layer_before(c.by_layer_before);
  const bool is_full = full != nullptr && full->rows.empty() && c.keeps_everything();
  quality q;
  for (int step = 0; step < steps; ++step) {
    const auto logits = decoding.decode(decoded.text[step], decoded.prompt.kv.tokens() + step, attention);
    q.losses.push_back(loss_of(logits, decoded.text[to_size(step) + 1]));
    q.choices.push_back(most_likely(logits));
    if (compares_attention) q.lse_lost.push_back(attention.lse_lost());
    if (is_full) full->rows.insert(full->rows.end(), logits.begin(), logits.end());
    if (full != nullptr)
      q.divergences.push_back(is_full ? 0 : divergence(full->row(step, logits.size()), logits));
    progress(decoded.what + " of " + c.name, static_cast<double>(step + 1) / steps);
  }
  q.by_head = attention.by_head();
  q.judged = attention.judged();
  for (const auto& head : q.by_head) q.attention += head;
  q.fast_tier_bytes = p->bytes().fast_tier() + learnt_bytes_of(c, decoded.prompt);
  q.slice_bytes = p->slice_bytes();
  q.summary_bytes = summary_bytes_of(c, *p);
  return q;
}

double quality::mean_loss() const {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}
double quality::perplexity() const { return std::exp(mean_loss()); }

namespace {

/// The mean mass of every layer and KV head, a line a layer.
void add_mass_by_head(job& j, const contender& c, const std::vector<attention_statistics>& by_head) {
  const auto kv_heads = to_size(j.model().shape().kv_heads);
  for (std::size_t first = 0; first < by_head.size(); first += kv_heads) {
    attention_statistics layer;
    std::vector<double> heads;
    for (const auto& head : std::span(by_head).subspan(first, kv_heads)) {
      layer += head;
      heads.push_back(head.mean_mass());
    }
    if (layer.heads > 0)
      j.lines().add("layer", c.name, "mass_kept", layer.mean_mass(), "",
                    {{"layer", first / kv_heads}, {"by_head", heads}, {"route", "resident"}});
  }
}

}  // namespace

std::vector<std::vector<double>> differences(const std::vector<std::vector<double>>& a,
                                             const std::vector<std::vector<double>>& b) {
  auto all = a;
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t k = 0; k < a[i].size(); ++k) all[i][k] -= b[i][k];
  return all;
}

std::string with_bounds(const estimate& nats) {
  return fixed(1e3 * nats.value, 1) + " (" + fixed(1e3 * nats.low, 1) + " .. " + fixed(1e3 * nats.high, 1) +
         ")";
}

void quality_of_texts::add(const quality& q, const quality& full) {
  losses.push_back(q.losses);
  divergences.push_back(q.divergences);
  lse_lost.push_back(q.lse_lost);
  for (std::size_t i = 0; i < q.choices.size(); ++i) agreeing += q.choices[i] == full.choices[i];
  steps += static_cast<long>(q.choices.size());
  by_head.resize(q.by_head.size());
  for (std::size_t i = 0; i < by_head.size(); ++i) by_head[i] += q.by_head[i];
  judged.insert(judged.end(), q.judged.begin(), q.judged.end());
  last = q;
}

double quality_of_texts::perplexity() const {
  double sum = 0;
  for (const auto& of_text : losses) sum = std::accumulate(of_text.begin(), of_text.end(), sum);
  return std::exp(sum / static_cast<double>(steps));
}

double quality_of_texts::highest_divergences() const {
  std::vector<double> all;
  for (const auto& of_text : divergences) all.insert(all.end(), of_text.begin(), of_text.end());
  return percentile(std::move(all), 0.99);
}

attention_statistics quality_of_texts::attention() const {
  attention_statistics sum;
  for (const auto& head : by_head) sum += head;
  return sum;
}

std::vector<quality_of_texts> quality_of_all(job& j, std::span<const row_to_measure> rows, int steps) {
  const arguments& a = j.options();
  std::vector<quality_of_texts> all(rows.size());
  const auto measure = [&](const prepared_prompt& prompt, std::span<const llama_token> tokens,
                           const std::string& what) {
    const auto text = tokens.subspan(to_size(a.prompt), to_size(steps) + 1);
    full_logits logits;
    std::optional<quality> full;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const quality q = measure_quality(rows[i].who, rows[i].with, j.model(),
                                        {prompt, text, rows[i].what + what}, j.progress(), &logits);
      if (!full) full = q;
      all[i].add(q, *full);
    }
  };
  measure(j.prompt(), j.text(), "");
  for (const std::string& path : a.more_texts) {
    const auto tokens = first_tokens(j.model(), path, a.prompt + steps + 1);
    measure(j.prepare(std::span(tokens).first(to_size(a.prompt)), path), tokens,
            " on " + std::filesystem::path(path).filename().string());
  }
  return all;
}

namespace {

/// Of rows by layer: KL less that of the row whose layers are alike, paired by step, a line each.
std::string compare_with_even(job& j, std::span<const quality_of_texts> all,
                              const nlohmann::ordered_json& at) {
  std::string lines;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::string& name = j.contenders()[i].name;
    if (!std::string_view(name).ends_with(row_by_layer)) continue;
    const std::string even = name.substr(0, name.size() - row_by_layer.size());
    const auto beside = std::find_if(j.contenders().begin(), j.contenders().end(),
                                     [&](const contender& c) { return c.name == even; });
    const estimate over = block_bootstrap(
        differences(all[i].divergences, all[to_size(beside - j.contenders().begin())].divergences));
    lines += "KL of " + name + " over " + even + "'s: " + with_bounds(over) + "\n";
    j.lines().add("quality", name, "divergence_over_even", over, "nats per token", at);
  }
  return lines;
}

/// KL less that of each row of --true-mass, paired by step.
std::string compare_with_truth(job& j, std::span<const quality_of_texts> all,
                               const nlohmann::ordered_json& at) {
  const auto is_truth = [&](std::size_t i) { return j.contenders()[i].selects_by_true_mass(); };
  std::vector<std::vector<std::string>> rows{{"KL, 1/1000 nat (95 %), over that of"}};
  for (std::size_t t = 0; t < all.size(); ++t)
    if (is_truth(t)) rows[0].push_back(j.contenders()[t].name);
  if (rows[0].size() == 1) return "";
  for (std::size_t i = 1; i < all.size(); ++i) {
    const std::string& name = j.contenders()[i].name;
    rows.push_back({name});
    for (std::size_t t = 0; t < all.size(); ++t) {
      if (!is_truth(t)) continue;
      rows.back().emplace_back();
      if (i == t) continue;
      const estimate over = block_bootstrap(differences(all[i].divergences, all[t].divergences));
      rows.back().back() = with_bounds(over);
      auto here = at;
      here["truth"] = j.contenders()[t].name;
      j.lines().add("quality", name, "divergence_over_truth", over, "nats per token", here);
    }
  }
  return "\n" + table(rows) + "paired by step; rows of true mass hold all keys for it, in fast MB too.\n";
}

/// How often heads miss more than each --epsilon of full attention. Of a correction that has bounds of it and
/// corrects nobody by them (verified_share=1): how often they hold, and how often one is below epsilon where
/// the head misses more.
std::string compare_missed(job& j, std::span<const quality_of_texts> all, const nlohmann::ordered_json& at) {
  const auto& epsilons = j.options().epsilons;
  if (epsilons.empty()) return "";
  std::vector<std::vector<std::string>> rows{{"share of full attention that heads miss", "mean"}};
  for (const double epsilon : epsilons)
    rows[0].insert(rows[0].end(),
                   {"over " + freekv::detail::decimal(static_cast<float>(epsilon)), "let pass"});
  rows[0].insert(rows[0].end(), {"mean bound", "bound holds"});
  for (std::size_t i = 1; i < all.size(); ++i) {
    const std::string& name = j.contenders()[i].name;
    const auto& judged = all[i].judged;
    const auto has_bound = [](const judged_head& head) { return head.bound == head.bound; };
    const bool has_bounds = std::any_of(judged.begin(), judged.end(), has_bound) &&
                            std::none_of(judged.begin(), judged.end(), [&](const judged_head& head) {
                              return has_bound(head) && head.corrected;
                            });
    const auto mean = [&](const auto& is_one, const auto& value) {
      double sum = 0;
      long count = 0;
      for (const judged_head& head : judged)
        if (is_one(head)) ++count, sum += value(head);
      return count > 0 ? sum / static_cast<double>(count) : 0.0;
    };
    const auto any = [](const judged_head&) { return true; };
    const auto add = [&](std::vector<std::string>& row, const char* metric, double share, double epsilon) {
      auto here = at;
      if (epsilon > 0) here["epsilon"] = epsilon;
      j.lines().add("quality", name, metric, share, "of heads and steps", here);
      row.push_back(fixed(100 * share, 1) + " %");
    };
    std::vector<std::string> row{name, fixed(mean(any, [](const judged_head& h) { return h.missed; }), 3)};
    for (const double epsilon : epsilons) {
      const auto over = [&](const judged_head& head) { return head.missed > epsilon; };
      add(row, "missing_more", mean(any, over), epsilon);
      if (has_bounds)
        add(row, "let_pass",
            mean([&](const judged_head& h) { return has_bound(h) && over(h); },
                 [&](const judged_head& h) { return h.bound <= epsilon; }),
            epsilon);
      else
        row.emplace_back();
    }
    if (has_bounds) {
      row.push_back(fixed(mean(has_bound, [](const judged_head& h) { return h.bound; }), 3));
      add(row, "bound_holds", mean(has_bound, [](const judged_head& h) { return h.missed <= h.bound; }), 0);
    } else {
      row.insert(row.end(), 2, "");
    }
    rows.push_back(std::move(row));
  }
  return "\n" + table(rows) +
         "over: KV heads of all layers and steps that miss more, mean of the group; let pass: of these, "
         "those\n"
         "whose bound is below; of verified_share=1, whose bounds correct nobody.\n";
}

}  // namespace

void compare_quality(job& j) {
  const arguments& a = j.options();
  std::vector<row_to_measure> wanted;
  for (const contender& c : j.contenders()) wanted.push_back({c, a.common, "quality"});
  const auto all = quality_of_all(j, wanted, a.steps);
  const quality_of_texts& full = all.front();
  const auto contenders = j.contenders();
  const std::optional<std::size_t> quest = j.quest();
  const std::string texts =
      std::to_string(full.losses.size()) + (full.losses.size() == 1 ? " text" : " texts");
  nlohmann::ordered_json at{{"route", "resident"}, {"n", full.steps}, {"texts", full.losses.size()}};
  std::vector<std::vector<std::string>> rows{
      {"prompt " + std::to_string(a.prompt) + ", budget " + std::to_string(a.common.budget), "perplexity",
       "over full (95 %)", "KL, 1/1000 nat (95 %)", "over quest's (95 %)", "its 99 %", "top-1", "error",
       "mass", "corrected", "slices/step", "critical", "KB/step", "fast MB", "bytes/page/head"}};
  for (std::size_t i = 0; i < all.size(); ++i) {
    const contender& c = contenders[i];
    const quality_of_texts& q = all[i];
    const bool beside_quest = quest && i != 0 && *quest != i;
    const attention_statistics s = q.attention();
    const estimate more = block_bootstrap(differences(q.losses, full.losses));
    const estimate kl = block_bootstrap(q.divergences);
    const estimate over_quest =
        beside_quest ? block_bootstrap(differences(q.divergences, all[*quest].divergences)) : estimate{};
    const double of_full = full.perplexity();
    const estimate difference{q.perplexity() - of_full, of_full * std::expm1(more.low),
                              of_full * std::expm1(more.high)};
    const double slices = q.per_step(s.recalled), bytes = slices * static_cast<double>(q.last.slice_bytes);
    const auto if_it_selects = [&](const std::string& cell) { return c.selects() ? cell : ""; };
    const auto unless_full = [&](const std::string& cell) { return i == 0 ? "" : cell; };
    const auto thousandths = [](double nats) { return fixed(1000 * nats, std::abs(nats) < 0.01 ? 2 : 1); };
    const auto finely = [&](const estimate& nats) {
      return thousandths(nats.value) + " (" + thousandths(nats.low) + " .. " + thousandths(nats.high) + ")";
    };
    rows.push_back(
        {c.name, fixed(q.perplexity(), 2),
         unless_full(fixed(difference.value, 2) + " (" + fixed(difference.low, 2) + " .. " +
                     fixed(difference.high, 2) + ")"),
         unless_full(finely(kl)), beside_quest ? finely(over_quest) : "",
         unless_full(thousandths(q.highest_divergences())), fixed(100 * q.top1(), 1) + " %",
         fixed(s.mean_error(), 3), fixed(100 * s.mean_mass(), 1) + " %",
         if_it_selects(fixed(100 * s.corrected_share(), 0) + " %"), if_it_selects(fixed(slices, 0)),
         if_it_selects(fixed(q.per_step(s.recalled_before_attention), 0)),
         if_it_selects(fixed(bytes / 1024, 0)), fixed(static_cast<double>(q.last.fast_tier_bytes) / 1e6, 1),
         if_it_selects(std::to_string(q.last.summary_bytes))});
    j.keep_in_short(c.name, rows[0][3], unless_full(finely(kl)));
    const auto add = [&](const char* metric, const auto& value, const char* unit) {
      j.lines().add("quality", c.name, metric, value, unit, at);
    };
    add("perplexity", q.perplexity(), "");
    add("perplexity_difference", difference, "");
    add("divergence", kl, "nats per token");
    if (beside_quest) add("divergence_over_quest", over_quest, "nats per token");
    add("divergence_99", q.highest_divergences(), "nats, 99th percentile of tokens");
    add("top1_agreement", q.top1(), "");
    add("attention_error", s.mean_error(), "relative L2");
    add("mass_kept", s.mean_mass(), "");
    add("corrected", s.corrected_share(), "of heads");
    add("slices_recalled", slices, "per step");
    add("slices_critical", q.per_step(s.recalled_before_attention), "per step");
    add("bytes_recalled", bytes, "per step");
    add("slices_promoted", q.per_step(s.promoted), "per step");
    add("pages_changed", s.pages_changed(), "per KV head and step");
    add("fast_tier_bytes", static_cast<double>(q.last.fast_tier_bytes), "bytes");
    add("summary_bytes", static_cast<double>(q.last.summary_bytes), "per page and KV head");
    if (a.full) add_mass_by_head(j, c, q.by_head);
  }
  j.say("\n");
  j.say(table(rows) + "n = " + std::to_string(full.steps) + " tokens of " + texts +
        "; 95 %: block bootstrap of steps, blocks of at most 64, full's loss as given; KL: of the next "
        "token's\n"
        "distribution from full attention's, mean and 99th percentile over tokens; top-1: same most likely "
        "token as "
        "full; error:\nrelative L2 of a head's attention output; mass: share of full attention's softmax "
        "mass on what "
        "is attended; corrected:\nKV heads that select anew before they attend; slices: recalled keys and "
        "values of a "
        "page and KV head, all layers;\ncritical: those of them that attention waits for; fast MB: slots, "
        "summaries "
        "and their basis or codebooks, complete\nlayers. Layers that keep everything (the first " +
        std::to_string(a.common.complete_layers) +
        (j.model().shape().sliding_window > 0 ? ", and those that slide" : "") +
        ") count in none of error, mass and corrected. Error and mass are\nagainst full attention of the "
        "keys and "
        "values that a method keeps: what rebuilding keys loses is in perplexity and KL\nalone. Route "
        "resident.\n" +
        compare_with_even(j, all, at) + compare_with_truth(j, all, at) + compare_missed(j, all, at));
}

}  // namespace freekv::examples
