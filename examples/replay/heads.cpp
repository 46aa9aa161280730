// freekv-heads: which KV heads must keep everything, from recorded layers: the list for RazorAttention's and
// DuoAttention's kind of plan.

#include <algorithm>
#include <cmath>
#include <iostream>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "cited.hpp"
#include "command_line.hpp"
#include "new_file.hpp"
#include "program.hpp"
#include "progress.hpp"
#include "trace.hpp"
#include "traces.hpp"

namespace freekv::examples {
namespace {

struct head_options {
  std::string traces, out;
  double share = 0.25;
  int page = 32, sink = 64, window = 128;
};

struct measured_head {
  int layer = 0, head = 0;
  double missed = 0;  // share of the attention mass that lies outside sink and window
};

/// Replays a trace with sink and window alone beside full attention.
std::vector<measured_head> measure(const trace& t, const head_options& o, host_backend& backend) {
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const auto p = make_pipeline({.element = t.element,
                                .head_dim = t.head_dim,
                                .query_heads = t.query_heads,
                                .kv_heads = t.kv_heads,
                                .page = o.page,
                                .budget = {o.sink, o.window, 1},
                                .max_tokens = t.tokens,
                                .in_place = true,
                                .does = {.plan = "window"}},
                               backend);
  p->begin_step(t.prompt_len, row_kind::prompt);
  p->append_stored(0, t.rows_of(t.keys, 0, t.prompt_len), t.rows_of(t.values, 0, t.prompt_len), {});
  p->end_step();
  std::vector<measured_head> heads(n(t.kv_heads));
  std::vector<float> out(n(t.query_heads * t.head_dim)), lse(n(t.query_heads)), full(out), full_lse(lse);
  const int group = t.query_heads / t.kv_heads;
  for (int token = t.prompt_len; token < t.tokens; ++token) {
    p->begin_step(1, row_kind::decode);
    p->append_stored(0, t.rows_of(t.keys, token, 1), t.rows_of(t.values, token, 1), t.queries_of(token, 1));
    p->attend(0, out, lse);
    p->attend_full(0, full, full_lse);
    p->end_step();
    for (int q = 0; q < t.query_heads; ++q)
      if (const double kept = std::exp(double{lse[n(q)]} - double{full_lse[n(q)]}); std::isfinite(kept))
        heads[n(q / group)].missed += (1 - kept) / (group * t.steps());
  }
  for (int head = 0; head < t.kv_heads; ++head) {
    heads[n(head)].layer = *t.layer;
    heads[n(head)].head = head;
  }
  return heads;
}

void run(int argc, char** argv) {
  head_options o;
  CLI::App app("Finds the KV heads that look beyond sink and window, from recorded layers.", "freekv-heads");
  app.add_option("traces", o.traces, "Folder of traces, one for each layer of a model (freekv-record)")
      ->required();
  app.add_option("--out", o.out, "List to write: lines \"layer head kind\"")->required();
  app.add_option("--share", o.share,
                 "Share of the heads that keep everything, those that miss most otherwise")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--page", o.page, "Tokens in a page")->capture_default_str();
  app.add_option("--sink", o.sink, "Sink tokens")->capture_default_str();
  app.add_option("--window", o.window, "Window tokens")->capture_default_str();
  if (!parsed(app, argc, argv)) return;
  check_writable(o.out);

  replay_options all_traces;
  all_traces.trace = o.traces;
  const replay_jobs jobs = jobs_of(all_traces);
  host_backend backend;
  progress_line progress("freekv-heads");
  std::vector<measured_head> heads;
  for (const replay_job& job : jobs.layers) {
    progress.show("layer", static_cast<int>(&job - jobs.layers.data()), static_cast<int>(jobs.layers.size()));
    const trace t = read_trace(job.trace, std::nullopt);
    check_compiled(t.head_dim);
    if (!t.layer)
      throw choice_error(cited_path(job.trace) +
                         " does not say which layer it is; record it with freekv-record");
    if (t.steps() < 1) throw choice_error(cited_path(job.trace) + " has no decode step to measure");
    const auto of_layer = measure(t, o, backend);
    heads.insert(heads.end(), of_layer.begin(), of_layer.end());
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const auto& a, const auto& b) { return a.missed > b.missed; });
  const auto complete = static_cast<std::size_t>(std::lround(o.share * static_cast<double>(heads.size())));
  std::ostringstream out;
  out << "# layer head kind; share of attention mass outside sink " << o.sink << " and window " << o.window
      << "\n";
  for (std::size_t i = 0; i < heads.size(); ++i)
    out << heads[i].layer << " " << heads[i].head << " " << (i < complete ? "complete" : "window") << "  # "
        << heads[i].missed << "\n";
  const std::string list = std::move(out).str();
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
