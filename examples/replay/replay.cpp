// freekv-replay: a recorded layer through any variant; selections and outputs as tensors, a summary as JSON.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "basis.hpp"
#include "choices.hpp"
#include "options.hpp"
#include "pipeline.hpp"
#include "program.hpp"
#include "progress.hpp"
#include "trace.hpp"

namespace freekv::examples {
namespace {

using json = nlohmann::ordered_json;

constexpr std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

std::optional<data_type> wanted_element(const std::string& dtype) {
  if (dtype == "f32") return data_type::f32;
  if (dtype == "f16") return data_type::f16;
  if (dtype == "bf16") return data_type::bf16;
  return std::nullopt;
}

/// What can be seen to fail before anything is read or computed: a long replay must not end in such a
/// sentence.
void check_output(const replay_options& o) {
  if (!o.out) return;
  check_writable(*o.out);
  const auto same = [&](const std::string& input) {
    std::error_code not_there;
    return std::filesystem::equivalent(*o.out, input, not_there);
  };
  if (same(o.trace) || (o.basis != "prompt" && same(o.basis)))
    refuse("--out \"" + *o.out + "\" is an input of this replay; name another file");
}

/// `selected` has a number for each of --k, however few pages there are.
void check_size(const replay_options& o, const trace& t) {
  constexpr double most = 1 << 30;
  const double numbers = static_cast<double>(t.steps()) * t.kv_heads * o.k;
  if (o.out && numbers > most) {
    std::ostringstream counts;
    counts << "--k " << o.k << " gives selected " << t.steps() << " x " << t.kv_heads << " x " << o.k
           << " numbers, more than " << static_cast<long long>(most) << "; the trace has "
           << (t.tokens + o.page - 1) / std::max(o.page, 1) << " pages, and a larger --k selects no more";
    refuse(counts.str());
  }
}

/// The basis for a trace's layer: to be learnt from its prompt, or one layer of a file.
struct chosen_basis {
  std::optional<key_basis> all;
  subspace_basis layer{};
  bool to_learn = false;
};

chosen_basis basis_for(const replay_options& o, const trace& t) {
  chosen_basis b;
  if (o.does.summary != "key_subspace" || o.does.plan != "retrieval") return b;
  if (o.basis == "prompt") {
    if (o.does.rank < 1 || o.does.rank > t.head_dim)
      refuse("--rank " + std::to_string(o.does.rank) + " is not between 1 and head_dim " +
             std::to_string(t.head_dim));
    b.all.emplace(1, t.kv_heads, o.does.rank, t.head_dim);
    b.layer = b.all->layer(0);
    b.to_learn = true;
    return b;
  }
  b.all.emplace(key_basis::load(o.basis));
  const int layers = b.all->view().layers;
  if (!o.basis_layer && !t.layer && layers != 1)
    refuse("\"" + o.basis + "\" has " + std::to_string(layers) +
           " layers and the trace names none; give --basis-layer");
  const int layer = o.basis_layer.value_or(layers == 1 ? 0 : t.layer.value_or(0));
  if (layer < 0 || layer >= layers)
    refuse("\"" + o.basis + "\" has " + std::to_string(layers) + " layers, so none numbered " +
           std::to_string(layer) + "; give --basis-layer from 0 to " + std::to_string(layers - 1));
  b.layer = b.all->layer(layer);
  return b;
}

/// Everything that is written out; empty where nothing is to be.
struct results {
  std::vector<float> out, lse;
  std::vector<std::int32_t> selected, recalled;
  std::vector<std::uint8_t> corrected;

  results(const trace& t, int k) {
    const std::size_t rows = size(t.steps()) * size(t.kv_heads),
                      heads = size(t.steps()) * size(t.query_heads);
    out.resize(heads * size(t.head_dim));
    lse.resize(heads);
    selected.assign(rows * size(k), -1);
    corrected.resize(rows);
    recalled.resize(rows);
  }
};

struct statistics {
  double error_sum = 0, error_max = 0, mass_sum = 0;
  long long heads = 0, not_finite = 0, selected = 0, recalled = 0, promoted = 0, corrected = 0;
  std::vector<double> seconds, full_seconds;  // by step
};

template <class Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 != 0) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

/// Adds one step's heads: how far the output is from full attention's, and how much of its softmax mass was
/// attended to. Heads where either is NaN or infinite are counted apart.
void compare(std::span<const float> out, std::span<const float> lse, std::span<const float> full,
             std::span<const float> full_lse, statistics& s) {
  const std::size_t d = out.size() / lse.size();
  for (std::size_t head = 0; head < lse.size(); ++head) {
    double difference = 0, length = 0;
    for (std::size_t i = head * d; i < (head + 1) * d; ++i) {
      difference += std::pow(double{out[i]} - double{full[i]}, 2);
      length += std::pow(double{full[i]}, 2);
    }
    const double error = length > 0 ? std::sqrt(difference / length) : std::sqrt(difference);
    const double mass = std::exp(double{lse[head]} - double{full_lse[head]});
    if (!std::isfinite(error) || !std::isfinite(mass)) {
      ++s.not_finite;
      continue;
    }
    ++s.heads;
    s.error_sum += error;
    s.error_max = std::max(s.error_max, error);
    s.mass_sum += mass;
  }
}

void append_prompt(pipeline& p, const trace& t, progress_line& progress) {
  constexpr int chunk = 4096;
  for (int done = 0; done < t.prompt_len; done += chunk) {
    progress.show("prompt token", done, t.prompt_len);
    const int tokens = std::min(chunk, t.prompt_len - done);
    p.begin_step(tokens, row_kind::prompt);
    p.append_stored(0, t.rows_of(t.keys, done, tokens), t.rows_of(t.values, done, tokens), {});
    p.end_step();
  }
}

/// What a step reports, into the row of each KV head.
void keep_report(const step_report& report, std::size_t step, results* r, statistics& s) {
  const std::size_t rows = report.corrected.size(), stride = report.attended.size() / rows;
  for (std::size_t row = 0; row < rows; ++row) {
    s.selected += report.attended_count[row];
    s.corrected += report.corrected[row];
    s.recalled += report.recalled[row];
    s.promoted += report.promoted[row];
    if (r == nullptr) continue;
    const std::size_t at = step * rows + row, k = r->selected.size() / r->corrected.size();
    const auto pages = report.attended.subspan(row * stride, size(report.attended_count[row]));
    std::copy(pages.begin(), pages.end(), r->selected.begin() + static_cast<std::ptrdiff_t>(at * k));
    r->corrected[at] = report.corrected[row];
    r->recalled[at] = report.recalled[row];
  }
}

/// `r` may be null.
void replay_steps(pipeline& p, const trace& t, progress_line& progress, results* r, statistics& s) {
  const std::size_t heads = size(t.query_heads), out_row = heads * size(t.head_dim);
  std::vector<float> out(out_row), lse(heads), full(out_row), full_lse(heads);
  for (int step = 0; step < t.steps(); ++step) {
    progress.show("step", step, t.steps());
    const int token = t.prompt_len + step;
    p.begin_step(1, row_kind::decode);
    double seconds = seconds_of([&] {
      p.append_stored(0, t.rows_of(t.keys, token, 1), t.rows_of(t.values, token, 1), t.queries_of(token, 1));
    });
    // In turns, each twice behind itself and twice behind the other: caches are equally warm for both.
    const auto attend_full = [&] {
      s.full_seconds.push_back(seconds_of([&] { p.attend_full(0, full, full_lse); }));
    };
    const bool full_first = step % 2 != 0;
    if (full_first) attend_full();
    seconds += seconds_of([&] {
      p.attend(0, out, lse);
      p.synchronize();
    });
    if (!full_first) attend_full();
    s.seconds.push_back(seconds);
    p.end_step();

    compare(out, lse, full, full_lse, s);
    keep_report(p.report(0), size(step), r, s);
    if (r == nullptr) continue;
    std::copy(out.begin(), out.end(), r->out.begin() + static_cast<std::ptrdiff_t>(size(step) * out_row));
    std::copy(lse.begin(), lse.end(), r->lse.begin() + static_cast<std::ptrdiff_t>(size(step) * heads));
  }
}

json settings_of(const replay_options& o, const trace& t, const host_options& host) {
  const method& m = o.does;
  const bool retrieves = m.plan == "retrieval";
  json settings{{"trace", o.trace},
                {"variant", o.variant},
                {"summary", retrieves ? json(m.summary) : json(nullptr)},
                {"correction", retrieves ? json(m.correction) : json(nullptr)},
                {"page", o.page},
                {"sink", o.sink},
                {"window", o.window},
                {"k", o.k},
                {"tau", o.tau},
                {"route", o.route},
                {"dtype", dtype_name(t.element)},
                {"tokens", t.tokens},
                {"prompt_len", t.prompt_len},
                {"query_heads", t.query_heads},
                {"kv_heads", t.kv_heads},
                {"head_dim", t.head_dim},
                {"scale", o.scale == 0 ? 1 / std::sqrt(double(t.head_dim)) : o.scale},
                {"threads", host.threads},
                {"instructions", host::name_of(host.instructions)}};
  if (retrieves && m.summary == "chunk_means") settings["chunk"] = m.chunk;
  if (retrieves && m.summary == "key_subspace")
    settings.update({{"rank", m.rank}, {"bits", m.bits}, {"basis", o.basis}});
  return settings;
}

/// Numbers that have no value, such as a rate over no steps, are null.
json summary_of(const replay_options& o, const trace& t, const pipeline& p, const statistics& s,
                const host_options& host) {
  const auto number = [](double x) { return std::isfinite(x) ? json(x) : json(nullptr); };
  const auto share = [&](double part, double whole) {
    return whole > 0 ? number(part / whole) : json(nullptr);
  };
  const auto heads = static_cast<double>(s.heads), selected = static_cast<double>(s.selected);
  const double rows = static_cast<double>(t.steps()) * t.kv_heads;
  const double seconds = s.seconds.empty() ? NAN : median(s.seconds);
  const double full_seconds = s.seconds.empty() ? NAN : median(s.full_seconds);
  return {{"settings", settings_of(o, t, host)},
          {"steps", t.steps()},
          {"error",
           {{"relative_l2_mean", share(s.error_sum, heads)},
            {"relative_l2_max", s.heads > 0 ? number(s.error_max) : json(nullptr)},
            {"heads_not_finite", s.not_finite}}},
          {"mass_kept", share(s.mass_sum, heads)},
          {"correction_rate", share(static_cast<double>(s.corrected), rows)},
          {"hit_rate", share(selected - static_cast<double>(s.recalled), selected)},
          {"pages_recalled", s.recalled},
          {"pages_promoted", s.promoted},
          {"bytes_recalled", s.recalled * static_cast<long long>(p.slice_bytes())},
          {"summary_bytes_per_page", o.does.plan == "retrieval" ? json(p.summary_bytes()) : json(0)},
          {"seconds_per_step", number(seconds)},
          {"full_attention_seconds_per_step", number(full_seconds)},
          {"time_over_full_attention", share(seconds, full_seconds)}};
}

void write_results(const replay_options& o, const trace& t, const results& r) {
  const auto bytes = [](const auto& v) { return std::as_bytes(std::span(v)); };
  const std::int64_t steps = t.steps(), rows = t.kv_heads;
  write_safetensors(*o.out,
                    {.tensors = {{"out", data_type::f32, {steps, t.query_heads, t.head_dim}, bytes(r.out)},
                                 {"lse", data_type::f32, {steps, t.query_heads}, bytes(r.lse)},
                                 {"selected", data_type::i32, {steps, rows, o.k}, bytes(r.selected)},
                                 {"corrected", data_type::u8, {steps, rows}, bytes(r.corrected)},
                                 {"recalled", data_type::i32, {steps, rows}, bytes(r.recalled)}},
                     .metadata = {{"prompt_len", std::to_string(t.prompt_len)}, {"variant", o.variant}}});
}

void run(int argc, char** argv) {
  const auto parsed = parse_replay_options(argc, argv);
  if (!parsed) return;
  const replay_options& o = *parsed;
  check_output(o);
  const trace t = read_trace(o.trace, wanted_element(o.dtype));
  check_compiled(t.head_dim);
  check_size(o, t);
  // Selection for the next step has nothing to hide behind here, so it does not go to a thread of its own.
  const host_options host{.threads = o.threads, .overlap = false};
  host_backend backend(host);
  chosen_basis basis = basis_for(o, t);
  // The pipeline checks the settings, which is why it comes before the basis is learnt.
  const auto p = make_pipeline({.element = t.element,
                                .head_dim = t.head_dim,
                                .query_heads = t.query_heads,
                                .kv_heads = t.kv_heads,
                                .page = o.page,
                                .budget = {o.sink, o.window, o.k},
                                .max_tokens = std::max(1, t.tokens),
                                .scale = static_cast<float>(o.scale),
                                .in_place = o.route == "in_place",
                                .does = o.does,
                                .basis = basis.layer},
                               backend);
  std::optional<results> r;
  if (o.out) r.emplace(t, o.k);
  statistics s;
  {
    progress_line progress("freekv-replay");
    if (basis.to_learn) basis.all->learn(0, t.prompt_keys());
    append_prompt(*p, t, progress);
    replay_steps(*p, t, progress, r ? &*r : nullptr, s);
  }
  if (r) write_results(o, t, *r);
  std::cout << summary_of(o, t, *p, s, host).dump(2, ' ', false, json::error_handler_t::replace) << std::endl;
  if (!std::cout) refuse("the summary cannot be written to standard output; check where it is redirected");
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  return freekv::examples::exit_code_of("freekv-replay", [&] { freekv::examples::run(argc, argv); });
}
