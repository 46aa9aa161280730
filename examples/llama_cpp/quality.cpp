#include "quality.hpp"

#include <cmath>
#include <numeric>
#include <optional>

#include "job.hpp"
#include "logits.hpp"

namespace freekv::examples {

quality measure_quality(const contender& c, const common_settings& s, const model& model,
                        const prepared_prompt& prompt, std::span<const llama_token> text,
                        const std::string& what, const progress_function& progress) {
  host_backend backend({.threads = s.threads, .overlap = s.overlap});
  const auto steps = static_cast<int>(text.size()) - 1;
  const auto p = make_contender(c, s, model.shape(), prompt, steps, false, backend);
  prompt.kv.restore(*p);
  engine decoding(model, {.threads = s.threads, .context = 1, .rows = 1});
  retrieval_attention attention(*p, model.shape(), c.keeps_everything() ? 0 : s.complete_layers);
  attention.compare_with_full(true);
  quality q;
  for (int step = 0; step < steps; ++step) {
    const auto logits =
        decoding.decode(text[static_cast<std::size_t>(step)], prompt.kv.tokens() + step, attention);
    q.losses.push_back(loss_of(logits, text[static_cast<std::size_t>(step) + 1]));
    q.choices.push_back(most_likely(logits));
    progress(what + " of " + c.name, static_cast<double>(step + 1) / steps);
  }
  q.by_head = attention.by_head();
  for (const auto& head : q.by_head) q.attention += head;
  q.fast_tier_bytes = p->bytes().fast_tier() + learnt_bytes_of(c, prompt);
  q.slice_bytes = p->slice_bytes();
  q.summary_bytes = summary_bytes_of(c, *p);
  return q;
}

double quality::mean_loss() const {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}
double quality::perplexity() const { return std::exp(mean_loss()); }
double quality::per_step(long long sum) const {
  return static_cast<double>(sum) / static_cast<double>(losses.size());
}

namespace {

/// The mean mass of every layer and KV head, a line a layer.
void add_mass_by_head(job& j, const contender& c, const quality& q) {
  const auto kv_heads = static_cast<std::size_t>(j.model().shape().kv_heads);
  for (std::size_t first = 0; first < q.by_head.size(); first += kv_heads) {
    attention_statistics layer;
    std::vector<double> heads;
    for (const auto& head : std::span(q.by_head).subspan(first, kv_heads)) {
      layer += head;
      heads.push_back(head.mean_mass());
    }
    if (layer.heads > 0)
      j.lines().add("layer", c.name, "mass_kept", layer.mean_mass(), "",
                    {{"layer", first / kv_heads}, {"by_head", heads}, {"route", "resident"}});
  }
}

}  // namespace

void compare_quality(job& j) {
  const arguments& a = j.wanted();
  const nlohmann::ordered_json at{{"route", "resident"}};
  std::vector<std::vector<std::string>> rows{
      {"prompt " + std::to_string(a.prompt) + ", budget " + std::to_string(a.common.budget), "perplexity",
       "over full (95 %)", "top-1", "error", "mass", "corrected", "slices/step", "critical", "KB/step",
       "fast MB", "bytes/page/head"}};
  std::optional<quality> full;
  for (const contender& c : j.contenders()) {
    const quality q =
        measure_quality(c, a.common, j.model(), j.prompt(), j.after_prompt(), "quality", j.progress());
    if (!full) full = q;
    double agreeing = 0;
    for (std::size_t i = 0; i < q.choices.size(); ++i) agreeing += q.choices[i] == full->choices[i];
    agreeing /= static_cast<double>(q.choices.size());
    const interval more = paired_difference(q.losses, full->losses);
    const double of_full = full->perplexity(), difference = q.perplexity() - of_full;
    const double low = of_full * std::expm1(more.mean - more.half_width);
    const double high = of_full * std::expm1(more.mean + more.half_width);
    const auto& s = q.attention;
    const double slices = q.per_step(s.recalled), bytes = slices * static_cast<double>(q.slice_bytes);
    const auto if_it_selects = [&](const std::string& cell) { return c.selects() ? cell : ""; };
    rows.push_back(
        {c.name, fixed(q.perplexity(), 2),
         c.name == "full" ? "" : fixed(difference, 2) + " (" + fixed(low, 2) + " .. " + fixed(high, 2) + ")",
         fixed(100 * agreeing, 0) + " %", fixed(s.mean_error(), 3), fixed(100 * s.mean_mass(), 1) + " %",
         if_it_selects(fixed(100 * s.corrected_share(), 0) + " %"), if_it_selects(fixed(slices, 0)),
         if_it_selects(fixed(q.per_step(s.recalled_before_attention), 0)),
         if_it_selects(fixed(bytes / 1024, 0)), fixed(static_cast<double>(q.fast_tier_bytes) / 1e6, 1),
         if_it_selects(std::to_string(q.summary_bytes))});
    const auto add = [&](const char* metric, double value, const char* unit) {
      j.lines().add("quality", c.name, metric, value, unit, at);
    };
    add("perplexity", q.perplexity(), "");
    add("perplexity_difference", difference, "");
    add("perplexity_difference_low", low, "");
    add("perplexity_difference_high", high, "");
    add("top1_agreement", agreeing, "");
    add("attention_error", s.mean_error(), "relative L2");
    add("mass_kept", s.mean_mass(), "");
    add("corrected", s.corrected_share(), "of heads");
    add("slices_recalled", slices, "per step");
    add("slices_critical", q.per_step(s.recalled_before_attention), "per step");
    add("bytes_recalled", bytes, "per step");
    add("slices_promoted", q.per_step(s.promoted), "per step");
    add("pages_changed", s.pages_changed(), "per KV head and step");
    add("fast_tier_bytes", static_cast<double>(q.fast_tier_bytes), "bytes");
    add("summary_bytes", static_cast<double>(q.summary_bytes), "per page and KV head");
    if (a.full) add_mass_by_head(j, c, q);
  }
  j.say("\n" + table(rows) +
        "95 %: of the mean difference in loss, steps taken as independent and full's as given; top-1: same "
        "most likely\ntoken as full; error: relative L2 of a head's attention output; mass: share of full "
        "attention's softmax mass\non what is attended; corrected: KV heads that select anew before they "
        "attend; slices: recalled keys and values\nof a page and KV head, all layers; critical: those of "
        "them that "
        "attention waits for; fast MB: slots, summaries\nand their basis or codebooks, complete layers. "
        "Layers that keep "
        "everything (the first " +
        std::to_string(a.common.complete_layers) +
        ") count in none\nof error, mass and corrected. Route resident.\n");
}

}  // namespace freekv::examples
