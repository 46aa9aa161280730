// freekv-heads: which KV heads must keep everything, from recorded layers: the list for RazorAttention's and
// DuoAttention's kind of plan. Or which query heads retrieve whole passages: the list for CompressKV.

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <iostream>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cited.hpp"
#include "command_line.hpp"
#include "fatal_signals.hpp"
#include "new_file.hpp"
#include "program.hpp"
#include "progress.hpp"
#include "trace.hpp"
#include "traces.hpp"

namespace freekv::examples {
namespace {

struct head_options {
  std::string traces, out, by = "mass";
  std::optional<double> share;
  int page = 32, sink = 64, window = 128, complete_layers = 1, span = 32, voters = 4;

  /// RazorAttention's 14 % of induction heads and 1 % of echo heads, for `by` echo.
  double share_of_heads() const { return share.value_or(by == "echo" ? 0.15 : 0.25); }
};

struct measured_head {
  int layer = 0, head = 0;
  double missed = 0;  // by mass: share of the attention that lies outside sink and window
  double echo = 0,
         induction = 0;  // by echo: share of it on earlier copies of the token, and on what followed them
  double reach = 0;      // what heads are ranked by; by span: share of it on earlier copies of the passage
};

/// Replays a trace with sink and window alone beside full attention.
std::vector<measured_head> measure(const trace& t, const head_options& o, host_backend& backend) {
  const auto p = make_pipeline({.element = t.element,
                                .head_dim = t.head_dim,
                                .query_heads = t.query_heads,
                                .kv_heads = t.kv_heads,
                                .page = o.page,
                                .budget = {o.sink, o.window, 1},
                                .max_tokens = t.tokens,
                                .scale = static_cast<float>(t.scale),
                                .sink_logits = t.sink_logits,
                                .in_place = true,
                                .method = {.plan = "window"}},
                               backend);
  p->begin_step(t.prompt_len, step_phase::prefill);
  p->append_stored(0, t.rows_of(t.keys, 0, t.prompt_len), t.rows_of(t.values, 0, t.prompt_len), {});
  p->end_step();
  std::vector<measured_head> heads(to_size(t.kv_heads));
  std::vector<float> out(to_size(t.query_heads * t.head_dim)), lse(to_size(t.query_heads)), full(out),
      full_lse(lse);
  const int group = t.query_heads / t.kv_heads;
  for (int token = t.prompt_len; token < t.tokens; ++token) {
    p->begin_step(1, step_phase::decode);
    p->append_stored(0, t.rows_of(t.keys, token, 1), t.rows_of(t.values, token, 1), t.queries_of(token, 1));
    p->attend(0, out, lse);
    p->attend_full(0, full, full_lse);
    p->end_step();
    for (int q = 0; q < t.query_heads; ++q)
      if (const double kept = std::exp(double{lse[to_size(q)]} - double{full_lse[to_size(q)]});
          std::isfinite(kept))
        heads[to_size(q / group)].missed += (1 - kept) / (group * t.steps());
  }
  for (measured_head& head : heads) head.reach = head.missed;
  return heads;
}

/// Attention of a decode token's query head to all tokens up to itself: `weights`, (tokens).
void attend(const trace& t, const std::vector<float>& keys, int token, int query_head,
            std::vector<double>& weights) {
  const int head = query_head / (t.query_heads / t.kv_heads), d = t.head_dim;
  const double scale = t.scale_of_scores();
  const auto query = t.queries_of(token, 1).subspan(to_size(query_head * d), to_size(d));
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int i = 0; i <= token; ++i) {
    const float* const key = keys.data() + (to_size(i) * to_size(t.kv_heads) + to_size(head)) * to_size(d);
    weights[to_size(i)] =
        scale * static_cast<double>(std::inner_product(query.begin(), query.end(), key, 0.0f));
    largest = std::max(largest, weights[to_size(i)]);
  }
  if (!t.sink_logits.empty()) {
    const double sink = double{t.sink_logits[to_size(query_head)]};
    largest = std::max(largest, sink);
    sum = std::exp(sink - largest);
  }
  for (int i = 0; i <= token; ++i) sum += weights[to_size(i)] = std::exp(weights[to_size(i)] - largest);
  for (int i = 0; i <= token; ++i) weights[to_size(i)] /= sum;
}

/// The scores of RazorAttention (section 3.3), of a text that repeats itself: each decode token's attention
/// to the same token in all earlier repetitions, and to the one behind it. A KV head's are its group's means.
/// Its reach is the larger: the paper takes the best by each of the two, many by induction and few by echo.
std::vector<measured_head> measure_echo(const trace& t) {
  const int group = t.query_heads / t.kv_heads, period = t.period.value();
  const std::vector<float> keys = t.float_keys();
  std::vector<measured_head> heads(to_size(t.kv_heads));
  std::vector<double> weights(to_size(t.tokens));
  for (int token = t.prompt_len; token < t.tokens; ++token)
    for (int q = 0; q < t.query_heads; ++q) {
      attend(t, keys, token, q, weights);
      measured_head& head = heads[to_size(q / group)];
      for (int before = token - period; before >= 0; before -= period) {
        head.echo += weights[to_size(before)] / (group * t.steps());
        head.induction += weights[to_size(before + 1)] / (group * t.steps());
      }
    }
  for (measured_head& head : heads) head.reach = std::max(head.echo, head.induction);
  return heads;
}

/// CompressKV's semantic retrieval heads, of a text that repeats itself: what each query head of the decode
/// tokens attends to, in earlier repetitions, of the whole passage of `span` tokens that the token is in. The
/// paper hides a fact among other texts and sums this over tokens of it that the model generates. Here every
/// passage is one to retrieve, and the tokens are given.
std::vector<measured_head> measure_span(const trace& t, int span) {
  const int period = t.period.value();
  const std::vector<float> keys = t.float_keys();
  std::vector<measured_head> heads(to_size(t.query_heads));
  std::vector<double> weights(to_size(t.tokens));
  for (int token = t.prompt_len; token < t.tokens; ++token) {
    const int now = token / period * period, passage = (token - now) / span * span;
    for (int q = 0; q < t.query_heads; ++q) {
      attend(t, keys, token, q, weights);
      for (int copy = 0; copy < now; copy += period)
        for (int i = copy + passage; i < copy + std::min(passage + span, period); ++i)
          heads[to_size(q)].reach += weights[to_size(i)] / t.steps();
    }
  }
  return heads;
}

/// Of each layer the query heads of most reach, best first: lines "layer query_head".
std::string list_of_voters(std::vector<measured_head> heads, const head_options& o) {
  std::ostringstream out;
  out << "# layer query_head; share of attention on earlier copies of a passage of " << o.span << " tokens\n";
  std::stable_sort(heads.begin(), heads.end(),
                   [](const auto& a, const auto& b) { return a.layer < b.layer; });  // by reach already
  int listed = 0;
  for (std::size_t i = 0; i < heads.size(); ++i) {
    listed = i > 0 && heads[i - 1].layer == heads[i].layer ? listed + 1 : 0;
    if (listed < o.voters) out << heads[i].layer << " " << heads[i].head << "  # " << heads[i].reach << "\n";
  }
  return std::move(out).str();
}
std::string list_of_kinds(const std::vector<measured_head>& heads, const head_options& o) {
  const auto complete = to_size(std::lround(o.share_of_heads() * static_cast<double>(heads.size())));
  std::ostringstream out;
  if (o.by == "echo")
    out << "# layer head kind; share of attention on earlier copies of the token, and on what followed "
           "them\n";
  else
    out << "# layer head kind; share of attention mass outside sink " << o.sink << " and window " << o.window
        << "\n";
  for (std::size_t i = 0; i < heads.size(); ++i) {
    out << heads[i].layer << " " << heads[i].head << " " << (i < complete ? "complete" : "window") << "  # ";
    if (o.by == "echo")
      out << heads[i].echo << " " << heads[i].induction << "\n";
    else
      out << heads[i].missed << "\n";
  }
  return std::move(out).str();
}

void run(int argc, char** argv) {
  head_options o;
  CLI::App app("Finds the KV heads that look beyond sink and window, from recorded layers.", "freekv-heads");
  app.add_option("traces", o.traces, "Folder of traces, one for each layer of a model (freekv-record)")
      ->required();
  app.add_option("--out", o.out, "List to write: lines \"layer head kind\", by span \"layer query_head\"")
      ->required();
  app.add_option(
         "--by", o.by,
         "What tells them: mass, the attention that lies outside sink and window; or echo, RazorAttention's "
         "attention to earlier copies of the token and to what followed them, on traces of freekv-record "
         "--repeated; or span, on traces of freekv-record --repeated --text, the attention to earlier copies "
         "of "
         "the passage that a token is in: the query heads of each layer that have most, for compress_kv")
      ->capture_default_str()
      ->check(CLI::IsMember({"mass", "echo", "span"}));
  app.add_option("--span", o.span, "By span: tokens of a passage")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--voters", o.voters, "By span: query heads of each layer, 4 as published")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option(
         "--share", o.share,
         "Share of the heads that keep everything, those with most of it; by mass 0.25, by echo 0.15 as "
         "published")
      ->check(number_within(0, 1));
  app.add_option("--complete-layers", o.complete_layers,
                 "Leading layers that keep everything anyway: their heads are not listed")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--page", o.page, "Tokens in a page")->capture_default_str();
  app.add_option("--sink", o.sink, "Sink tokens")->capture_default_str();
  app.add_option("--window", o.window, "Window tokens")->capture_default_str();
  if (!parsed(app, argc, argv)) return;

  replay_options all_traces;
  all_traces.trace = o.traces;
  const replay_jobs jobs = jobs_of(all_traces);
  std::vector<std::filesystem::path> read;
  for (const replay_job& job : jobs.layers) read.push_back(job.trace);
  check_output(all_traces, o.out, read);
  host_backend backend;
  progress_line progress("freekv-heads");
  note_stage("measuring heads");
  std::vector<measured_head> heads;
  for (const replay_job& job : jobs.layers) {
    progress.show("layer", static_cast<int>(&job - jobs.layers.data()), static_cast<int>(jobs.layers.size()));
    const trace t = read_trace(job.trace, std::nullopt);
    check_compiled(t.element, t.head_dim);
    if (!t.layer)
      throw choice_error(cited_path(job.trace) +
                         " does not say which layer it is; record it with freekv-record");
    if (t.steps() < 1) throw choice_error(cited_path(job.trace) + " has no decode step to measure");
    if (&job != jobs.layers.data() && (&job - 1)->form.layer == t.layer)  // they are in layers' order
      throw choice_error(cited_path(job.trace) + " and " + cited_path((&job - 1)->trace) +
                         " are both of layer " + std::to_string(*t.layer) + "; keep one of them");
    if (*t.layer < o.complete_layers) continue;
    if (o.by != "mass" && !t.period)
      throw choice_error(
          cited_path(job.trace) +
          " does not say after how many tokens it repeats itself; record it with freekv-record "
          "--repeated");
    auto of_layer = o.by == "echo"   ? measure_echo(t)
                    : o.by == "span" ? measure_span(t, o.span)
                                     : measure(t, o, backend);
    for (std::size_t head = 0; head < of_layer.size(); ++head) {
      of_layer[head].layer = *t.layer;
      of_layer[head].head = static_cast<int>(head);
    }
    heads.insert(heads.end(), of_layer.begin(), of_layer.end());
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const auto& a, const auto& b) { return a.reach > b.reach; });
  if (heads.empty())
    throw choice_error("all layers of \"" + o.traces + "\" are among the " +
                       std::to_string(o.complete_layers) +
                       " that keep everything; record others, or give --complete-layers 0");
  const std::string list = o.by == "span" ? list_of_voters(heads, o) : list_of_kinds(heads, o);
  new_file file(o.out);
  file.write(std::as_bytes(std::span(list)));
  file.finish();
  file.take_place();
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-heads", [&] { freekv::examples::run(argc, argv); });
}
