// freekv-replay: a recorded layer through any variant; selections and outputs as tensors, a summary as JSON.

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "basis.hpp"
#include "choices.hpp"
#include "pipeline.hpp"
#include "trace.hpp"

namespace freekv::examples {
namespace {

using json = nlohmann::ordered_json;

struct arguments {
  std::string trace, variant = "freekv", out;
  std::optional<std::string> summary, correction;
  std::string basis = "prompt", route = "resident", dtype = "stored";
  int page = 32, sink = 64, window = 64, k = 8, chunk = 8, rank = 24, bits = 3, threads = 1;
  std::optional<int> basis_layer;
  double tau = 0.9, scale = 0.0;
};

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

/// `name` among `choices`, or a sentence.
template <class Choices>
void one_of(const std::string& option, const std::string& name, const Choices& choices) {
  std::string names;
  for (const auto& choice : choices) {
    if (name == choice) return;
    names += (names.empty() ? "" : ", ") + std::string(choice);
  }
  refuse(option + " " + name + " is unknown; choose one of " + names);
}

arguments parse(int argc, char** argv) {
  arguments a;
  CLI::App app("Replays a recorded layer through a retrieval method. Prints one JSON object.",
               "freekv-replay");
  app.set_help_flag("-h,--help", "Show this help and exit");
  app.option_defaults()->always_capture_default();
  app.add_option(
         "trace", a.trace,
         "safetensors file: q (T, n_qo, d), k and v (T, n_kv, d) in F32, F16 or BF16; metadata prompt_len")
      ->required();
  app.add_option("--variant", a.variant, "Method: " + variant_names());
  app.add_option("--page", a.page, "Tokens in a page, a multiple of 8 from 8 to 256");
  app.add_option("--sink", a.sink, "Sink tokens, a multiple of the page");
  app.add_option("--window", a.window, "Window tokens, a positive multiple of the page");
  app.add_option("--k", a.k, "Selected pages of each KV head");
  app.add_option("--tau", a.tau, "Correct a KV head whose queries' mean cosine is below this");
  app.add_option("--summary", a.summary,
                 "Page summary instead of the variant's: min_max, chunk_means, key_subspace");
  app.add_option("--chunk", a.chunk, "chunk_means: tokens in a chunk, a divisor of the page");
  app.add_option("--rank", a.rank, "key_subspace: dimensions, at most head_dim");
  app.add_option("--bits", a.bits, "key_subspace: bits of a coefficient: 2, 3, 4, 8, or 32 for unquantised");
  app.add_option("--basis", a.basis,
                 "key_subspace: prompt, to learn from the prompt's keys, or a file of freekv-basis");
  app.add_option("--basis-layer", a.basis_layer,
                 "key_subspace: layer of the file (default: the trace's layer, or the only one)");
  app.add_option("--correction", a.correction,
                 "Correction instead of the variant's: cosine_drift, always, never");
  app.add_option("--route", a.route, "resident (recall into slots) or in_place (attend from the store)");
  app.add_option("--dtype", a.dtype, "Round q, k and v to f32, f16 or bf16; stored: as in the trace");
  app.add_option("--scale", a.scale, "Of scores and attention; 0: 1 / sqrt(head_dim)");
  app.add_option("--threads", a.threads, "Threads that attend");
  app.add_option("--out", a.out, "safetensors file to write: out, lse, selected, corrected, recalled");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    std::exit(0);
  } catch (const CLI::ParseError& e) {
    refuse(std::string(e.what()) + "; --help lists the options");
  }
  one_of("--route", a.route, std::array{"resident", "in_place"});
  one_of("--dtype", a.dtype, std::array{"stored", "f32", "f16", "bf16"});
  if (a.summary) one_of("--summary", *a.summary, summary_names);
  if (a.correction) one_of("--correction", *a.correction, correction_names);
  const auto finite = [](const char* option, double x) {
    if (!std::isfinite(x) || !std::isfinite(static_cast<float>(x)))
      refuse(std::string(option) + " is not a finite number; give one such as 0.9");
  };
  finite("--tau", a.tau);
  finite("--scale", a.scale);
  if (a.scale < 0)
    refuse("--scale " + std::to_string(a.scale) +
           " is negative; scores grow with the product of query and key");
  if (a.k < 1) refuse("--k " + std::to_string(a.k) + " is below 1; select at least one page");
  if (a.k > 1 << 20) refuse("--k " + std::to_string(a.k) + " is above 1048576 pages");
  return a;
}

method chosen_method(const arguments& a) {
  const auto& all = variants();
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& v) { return v.name == a.variant; });
  if (found == all.end()) refuse("--variant " + a.variant + " is unknown; choose one of " + variant_names());
  method m = found->does;
  if (a.summary) m.summary = *a.summary;
  if (a.correction) m.correction = *a.correction;
  m.chunk = a.chunk;
  m.rank = a.rank;
  m.bits = a.bits;
  m.tau = static_cast<float>(a.tau);
  return m;
}

std::optional<data_type> wanted_element(const std::string& dtype) {
  if (dtype == "f32") return data_type::f32;
  if (dtype == "f16") return data_type::f16;
  if (dtype == "bf16") return data_type::bf16;
  return std::nullopt;
}

/// The basis for a trace's layer: learnt from its prompt, or one layer of a file.
struct chosen_basis {
  std::optional<key_basis> all;
  subspace_basis layer{};
};

chosen_basis basis_for(const arguments& a, const method& m, const trace& t) {
  chosen_basis b;
  if (m.summary != "key_subspace" || m.plan != "retrieval") return b;
  if (a.basis == "prompt") {
    if (m.rank < 1 || m.rank > t.head_dim)
      refuse("--rank " + std::to_string(m.rank) + " is not between 1 and head_dim " +
             std::to_string(t.head_dim));
    b.all.emplace(1, t.kv_heads, m.rank, t.head_dim);
    b.all->learn(0, t.prompt_keys());
    b.layer = b.all->layer(0);
    return b;
  }
  b.all.emplace(key_basis::load(a.basis));
  const int layers = b.all->view().layers;
  if (!a.basis_layer && !t.layer && layers != 1)
    refuse("\"" + a.basis + "\" has " + std::to_string(layers) +
           " layers and the trace names none; give --basis-layer");
  const int layer = a.basis_layer.value_or(layers == 1 ? 0 : t.layer.value_or(0));
  if (layer < 0 || layer >= layers)
    refuse("\"" + a.basis + "\" has " + std::to_string(layers) + " layers, so none numbered " +
           std::to_string(layer));
  b.layer = b.all->layer(layer);
  return b;
}

/// Everything that is written out.
struct results {
  std::vector<float> out, lse;
  std::vector<std::int32_t> selected, recalled;
  std::vector<std::uint8_t> corrected;
};

struct statistics {
  double error_sum = 0, error_max = 0, mass_sum = 0;
  long long heads = 0, not_finite = 0, selected = 0, recalled = 0, promoted = 0, corrected = 0;
  double seconds = 0, full_seconds = 0;
};

class stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void compare(std::span<const float> out, std::span<const float> lse, std::span<const float> full,
             std::span<const float> full_lse, statistics& s) {
  const std::size_t d = out.size() / lse.size();
  for (std::size_t head = 0; head < lse.size(); ++head) {
    double difference = 0, size = 0;
    for (std::size_t i = head * d; i < (head + 1) * d; ++i) {
      difference += std::pow(double{out[i]} - full[i], 2);
      size += std::pow(double{full[i]}, 2);
    }
    const double error = size > 0 ? std::sqrt(difference / size) : std::sqrt(difference);
    const double mass = std::exp(double{lse[head]} - full_lse[head]);
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

void replay_steps(pipeline& p, const trace& t, int k, results& r, statistics& s) {
  if (t.prompt_len > 0) {
    p.begin_step(t.prompt_len, row_kind::prompt);
    p.append_stored(0, t.rows_of(t.keys, 0, t.prompt_len), t.rows_of(t.values, 0, t.prompt_len), {});
    p.end_step();
  }
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const std::size_t out_row = n(t.query_heads) * n(t.head_dim), rows = n(t.kv_heads), steps = n(t.steps());
  r.out.resize(steps * out_row);
  r.lse.resize(steps * n(t.query_heads));
  r.selected.assign(steps * rows * n(k), -1);
  r.corrected.resize(steps * rows);
  r.recalled.resize(steps * rows);
  std::vector<float> full(out_row), full_lse(n(t.query_heads));
  for (std::size_t step = 0; step < steps; ++step) {
    const int token = t.prompt_len + static_cast<int>(step);
    const auto out = std::span(r.out).subspan(step * out_row, out_row);
    const auto lse = std::span(r.lse).subspan(step * full_lse.size(), full_lse.size());
    p.begin_step(1, row_kind::decode);
    const stopwatch whole;
    p.append_stored(0, t.rows_of(t.keys, token, 1), t.rows_of(t.values, token, 1), t.queries_of(token, 1));
    p.attend(0, out, lse);
    p.synchronize();
    s.seconds += whole.seconds();
    const stopwatch exact;
    p.attend_full(0, full, full_lse);
    s.full_seconds += exact.seconds();
    p.end_step();
    compare(out, lse, full, full_lse, s);

    const step_report report = p.report(0);
    const std::size_t stride = report.attended.size() / rows;
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t at = step * rows + row, count = n(report.attended_count[row]);
      std::copy_n(report.attended.begin() + static_cast<std::ptrdiff_t>(row * stride), count,
                  r.selected.begin() + static_cast<std::ptrdiff_t>(at * n(k)));
      r.corrected[at] = report.corrected[row];
      r.recalled[at] = report.recalled[row];
      s.selected += report.attended_count[row];
      s.corrected += report.corrected[row];
      s.recalled += report.recalled[row];
      s.promoted += report.promoted[row];
    }
  }
}

json summary_of(const arguments& a, const method& m, const trace& t, const pipeline& p, const statistics& s,
                const host_options& host) {
  const auto number = [](double x) { return std::isfinite(x) ? json(x) : json(nullptr); };
  const auto share = [&](double part, double whole) {
    return whole > 0 ? number(part / whole) : json(nullptr);
  };
  const auto heads = static_cast<double>(s.heads);
  const double rows = static_cast<double>(t.steps()) * t.kv_heads;
  const bool retrieves = m.plan == "retrieval";
  json settings{{"trace", a.trace},
                {"variant", a.variant},
                {"summary", retrieves ? json(m.summary) : json(nullptr)},
                {"correction", retrieves ? json(m.correction) : json(nullptr)},
                {"page", a.page},
                {"sink", a.sink},
                {"window", a.window},
                {"k", a.k},
                {"tau", a.tau},
                {"route", a.route},
                {"dtype", dtype_name(t.element)},
                {"tokens", t.tokens},
                {"prompt_len", t.prompt_len},
                {"query_heads", t.query_heads},
                {"kv_heads", t.kv_heads},
                {"head_dim", t.head_dim},
                {"scale", a.scale == 0 ? 1 / std::sqrt(double(t.head_dim)) : a.scale},
                {"threads", host.threads},
                {"instructions", host::name_of(host.instructions)}};
  if (retrieves && m.summary == "chunk_means") settings["chunk"] = m.chunk;
  if (retrieves && m.summary == "key_subspace")
    settings.update({{"rank", m.rank}, {"bits", m.bits}, {"basis", a.basis}});
  return {{"settings", settings},
          {"steps", t.steps()},
          {"error",
           {{"relative_l2_mean", share(s.error_sum, heads)},
            {"relative_l2_max", s.heads > 0 ? number(s.error_max) : json(nullptr)},
            {"heads_not_finite", s.not_finite}}},
          {"mass_kept", share(s.mass_sum, heads)},
          {"correction_rate", share(static_cast<double>(s.corrected), rows)},
          {"hit_rate", s.selected > 0
                           ? json(1 - static_cast<double>(s.recalled) / static_cast<double>(s.selected))
                           : json(nullptr)},
          {"pages_recalled", s.recalled},
          {"pages_promoted", s.promoted},
          {"bytes_recalled", s.recalled * static_cast<long long>(p.slice_bytes())},
          {"summary_bytes_per_page", retrieves ? json(p.summary_bytes()) : json(0)},
          {"seconds_per_step", share(s.seconds, t.steps())},
          {"time_over_full_attention", share(s.seconds, s.full_seconds)}};
}

void write_results(const arguments& a, const trace& t, const results& r) {
  const auto bytes = [](const auto& v) { return std::as_bytes(std::span(v)); };
  const std::int64_t steps = t.steps(), rows = t.kv_heads;
  write_safetensors(a.out,
                    {.tensors = {{"out", data_type::f32, {steps, t.query_heads, t.head_dim}, bytes(r.out)},
                                 {"lse", data_type::f32, {steps, t.query_heads}, bytes(r.lse)},
                                 {"selected", data_type::i32, {steps, rows, a.k}, bytes(r.selected)},
                                 {"corrected", data_type::u8, {steps, rows}, bytes(r.corrected)},
                                 {"recalled", data_type::i32, {steps, rows}, bytes(r.recalled)}},
                     .metadata = {{"prompt_len", std::to_string(t.prompt_len)}, {"variant", a.variant}}});
}

void run(int argc, char** argv) {
  const arguments a = parse(argc, argv);
  const method m = chosen_method(a);
  const trace t = read_trace(a.trace, wanted_element(a.dtype));
  const chosen_basis basis = basis_for(a, m, t);
  const host_options host{.threads = a.threads};
  host_backend backend(host);
  const auto p = make_pipeline({.element = t.element,
                                .head_dim = t.head_dim,
                                .query_heads = t.query_heads,
                                .kv_heads = t.kv_heads,
                                .page = a.page,
                                .budget = {a.sink, a.window, a.k},
                                .max_tokens = std::max(1, t.tokens),
                                .scale = static_cast<float>(a.scale),
                                .in_place = a.route == "in_place",
                                .does = m,
                                .basis = basis.layer},
                               backend);
  results r;
  statistics s;
  replay_steps(*p, t, a.k, r, s);
  if (!a.out.empty()) write_results(a, t, r);
  std::cout << summary_of(a, m, t, *p, s, host).dump(2, ' ', false, json::error_handler_t::replace)
            << std::endl;
}

}  // namespace
}  // namespace freekv::examples

int main(int argc, char** argv) {
  const auto failed = [](std::string sentence) {
    for (char& c : sentence)
      if (c == '\n') c = ' ';
    std::cerr << "freekv-replay: " << sentence << "\n";
    return 2;
  };
  try {
    freekv::examples::run(argc, argv);
    return 0;
  } catch (const std::bad_alloc&) {
    return failed(
        "not enough memory for this trace and these settings; choose fewer tokens or a smaller --k");
  } catch (const std::exception& e) {
    return failed(e.what());
  }
}
