#include "replay_layer.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <sstream>
#include <string>

#include "pipeline.hpp"
#include "selected_rows.hpp"

namespace freekv::examples {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

constexpr double most_numbers = 1 << 30;  // of a tensor that is written

/// `selected` has a number for each of --k, however few pages there are.
void check_size(const replay_options& o, const replay_job& job) {
  const trace_form& t = job.form;
  if (o.method.evicts()) return;  // see keep_report
  const int rows = selects_per_query_head(o.method) ? t.query_heads : t.kv_heads;
  const std::int64_t columns = columns_of(o.method, o.k);
  const double numbers = static_cast<double>(t.steps()) * rows * static_cast<double>(columns);
  if (job.out && numbers > most_numbers) {
    std::ostringstream counts;
    counts << columns_text(o.method, o.k) << " selected " << t.steps() << " x " << rows << " x " << columns
           << " numbers, more than " << static_cast<long long>(most_numbers) << "; the trace has "
           << (t.tokens - 1) / std::max(o.method.unit_tokens(o.page), 1) + 1
           << (o.method.unit == 0 ? " pages" : " units") << ", and larger numbers select no more";
    refuse(counts.str());
  }
}

/// Everything that is written out.
struct results {
  std::size_t k = 0;     // columns of `selected`; of a method that evicts as many as its reports have
  std::size_t rows = 0;  // of `selected` in a step: KV heads, or query heads
  std::vector<float> out, lse;
  std::vector<std::int32_t> selected, recalled, before_attention;
  std::vector<std::int32_t> coded;  // as `selected`, of a method that codes tokens; else empty
  std::vector<std::uint8_t> corrected;
  std::vector<std::int32_t> kept;  // (KV heads, tokens), of a prompt that is thinned

  results(const trace_form& t, std::int64_t columns, bool per_query_head)
      : k(to_size(columns)), rows(to_size(per_query_head ? t.query_heads : t.kv_heads)) {
    const std::size_t kv_heads = to_size(t.steps()) * to_size(t.kv_heads),
                      heads = to_size(t.steps()) * to_size(t.query_heads);
    out.resize(heads * to_size(t.head_dim));
    lse.resize(heads);
    selected.assign(to_size(t.steps()) * rows * k, -1);
    corrected.resize(kv_heads);
    recalled.resize(kv_heads);
    before_attention.resize(kv_heads);
  }
};

template <class Body>
double seconds_of(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Adds one step's heads: how far the output is from full attention's, and how much was attended to of the
/// mass of full attention to the same keys, `all_lse`. Heads where either is NaN or infinite are counted
/// apart.
void compare(std::span<const float> out, std::span<const float> lse, std::span<const float> full,
             std::span<const float> all_lse, head_errors& s) {
  const std::size_t d = out.size() / lse.size();
  for (std::size_t head = 0; head < lse.size(); ++head) {
    double difference = 0, length = 0;
    for (std::size_t i = head * d; i < (head + 1) * d; ++i) {
      difference += std::pow(double{out[i]} - double{full[i]}, 2);
      length += std::pow(double{full[i]}, 2);
    }
    const double error = length > 0 ? std::sqrt(difference / length) : std::sqrt(difference);
    const double mass = std::exp(double{lse[head]} - double{all_lse[head]});
    if (!std::isfinite(error) || !std::isfinite(mass)) {
      ++s.not_finite;
      continue;
    }
    ++s.heads;
    s.sum += error;
    s.most = std::max(s.most, error);
    s.mass += mass;
  }
}

/// The same probe rows observe every block of a prompt that is cut behind each, or the whole prompt. One that
/// is thinned comes as a whole.
void append_prompt(pipeline& p, const trace& t, const method_spec& method, progress_line& progress) {
  const int chunk = method.thins() ? std::max(1, t.prompt_len) : std::min(4096, p.most_prompt_rows());
  const bool takes_worths = method.takes_worths();
  for (int done = 0; done < t.prompt_len; done += chunk) {
    progress.show("prompt token", done, t.prompt_len);
    const int tokens = std::min(chunk, t.prompt_len - done);
    p.begin_step(tokens, step_phase::prefill);
    if (takes_worths) p.give_worths(t.worths_of(done, tokens));
    p.append_stored(0, t.rows_of(t.keys, done, tokens), t.rows_of(t.values, done, tokens),
                    p.observes_prompts() ? t.queries_of(done, tokens) : std::span<const float>{});
    p.end_step();
    if (p.takes_probes() && (p.cuts_blocks() || done + tokens == t.prompt_len))
      p.observe(p.only(), 0, t.probes);
  }
}

/// What a step reports, into the row of each KV head.
void keep_report(const step_report& report, std::size_t step, results* r, layer_result& s) {
  const std::size_t rows = report.corrected.size(), stride = report.attended.size() / rows;
  s.keeps_coded_tokens = !report.coded_count.empty();
  for (std::size_t row = 0; row < rows; ++row) {
    s.selected += report.attended_count[row];
    s.corrected += report.corrected[row];
    s.recalled += report.recalled[row];
    s.before_attention += report.recalled_before_attention[row];
    s.promoted += report.promoted[row];
    if (r == nullptr) continue;
    const std::size_t at = step * rows + row;
    r->corrected[at] = report.corrected[row];
    r->recalled[at] = report.recalled[row];
    r->before_attention[at] = report.recalled_before_attention[row];
  }
  if (r == nullptr) return;
  if (r->k == 0) {  // of a method that evicts, which keeps as many as its budget says
    r->k = stride;
    if (const double numbers = static_cast<double>(r->corrected.size()) * static_cast<double>(stride);
        numbers > most_numbers)
      refuse("selected and coded would have " + std::to_string(r->corrected.size()) + " x " +
             std::to_string(stride) + " numbers, more than " + std::to_string(1 << 30) +
             "; replay fewer steps, or without --out");
    r->selected.assign(r->corrected.size() * stride, -1);
  }
  copy_selected(report, r->rows, r->k, r->selected.data() + step * r->rows * r->k);
  if (report.coded.empty()) return;
  if (r->coded.empty()) r->coded.assign(r->selected.size(), -1);
  for (std::size_t row = 0; row < rows; ++row)
    std::copy_n(report.coded.begin() + static_cast<std::ptrdiff_t>(row * stride), report.coded_count[row],
                r->coded.begin() + static_cast<std::ptrdiff_t>((step * rows + row) * r->k));
}

/// `exact` keeps everything as it was recorded, which `p` does too unless its codec loses something. `r` may
/// be null.
void replay_steps(pipeline& p, pipeline& exact, const trace& t, bool takes_worths, progress_line& progress,
                  results* r, layer_result& s) {
  const std::size_t heads = to_size(t.query_heads), out_row = heads * to_size(t.head_dim);
  std::vector<float> out(out_row), lse(heads), full(out_row), full_lse(heads), coded(out_row),
      coded_lse(heads);
  for (int step = 0; step < t.steps(); ++step) {
    progress.show("step", step, t.steps());
    const int token = t.prompt_len + step;
    const auto append = [&](pipeline& to) {
      to.begin_step(1, step_phase::decode);
      if (takes_worths) to.give_worths(t.worths_of(token, 1));
      to.append_stored(0, t.rows_of(t.keys, token, 1), t.rows_of(t.values, token, 1), t.queries_of(token, 1));
    };
    if (&exact != &p) append(exact);
    double seconds = seconds_of([&] { append(p); });
    // In turns, each twice behind itself and twice behind the other: caches are equally warm for both.
    const auto attend_full = [&] {
      s.full_seconds.push_back(seconds_of([&] { exact.attend_full(0, full, full_lse); }));
    };
    const bool full_first = step % 2 != 0;
    if (full_first) attend_full();
    seconds += seconds_of([&] {
      p.attend(0, out, lse);
      p.synchronize();
    });
    if (!full_first) attend_full();
    s.seconds.push_back(seconds);
    const bool is_coded = &exact != &p;
    if (is_coded) {
      p.attend_full(0, coded, coded_lse);
      compare(coded, coded_lse, full, full_lse, *s.codec_errors);
    }
    compare(out, lse, full, is_coded ? coded_lse : full_lse, s.errors);
    if (is_coded) {
      exact.attend(0, full, full_lse);
      exact.end_step();
    }
    p.end_step();
    keep_report(p.report(0), to_size(step), r, s);
    if (r == nullptr) continue;
    std::copy(out.begin(), out.end(), r->out.begin() + static_cast<std::ptrdiff_t>(to_size(step) * out_row));
    std::copy(lse.begin(), lse.end(), r->lse.begin() + static_cast<std::ptrdiff_t>(to_size(step) * heads));
  }
}

new_file write_results(const std::filesystem::path& path, const replay_options& o, const trace_form& t,
                       const results& r) {
  const auto bytes = [](const auto& v) { return std::as_bytes(std::span(v)); };
  const std::int64_t steps = t.steps(), rows = t.kv_heads;
  std::map<std::string, std::string, std::less<>> metadata{{"prompt_len", std::to_string(t.prompt_len)},
                                                           {"variant", o.variant}};
  if (o.method.unit != 0) metadata["unit"] = std::to_string(o.method.unit);
  const std::vector<std::int64_t> units{steps, static_cast<std::int64_t>(r.rows),
                                        static_cast<std::int64_t>(r.k)};
  safetensors_content content{
      .tensors = {{"out", data_type::f32, {steps, t.query_heads, t.head_dim}, bytes(r.out)},
                  {"lse", data_type::f32, {steps, t.query_heads}, bytes(r.lse)},
                  {"selected", data_type::i32, units, bytes(r.selected)},
                  {"corrected", data_type::u8, {steps, rows}, bytes(r.corrected)},
                  {"recalled", data_type::i32, {steps, rows}, bytes(r.recalled)},
                  {"recalled_before_attention", data_type::i32, {steps, rows}, bytes(r.before_attention)}},
      .metadata = std::move(metadata)};
  if (!r.coded.empty()) content.tensors.push_back({"coded", data_type::i32, units, bytes(r.coded)});
  if (o.method.thins())
    content.tensors.push_back({"kept", data_type::i32, {rows, std::ssize(r.kept) / rows}, bytes(r.kept)});
  return new_safetensors(path, content);
}

}  // namespace

void check_layer(const replay_options& o, const replay_job& job, const basis_file& file) {
  check_compiled(job.form.element, job.form.head_dim);
  check_size(o, job);
  (void)layer_setup(o, job.form, file);
}

layer_result replay_layer(const replay_options& o, const replay_job& job, const replay_tools& tools) {
  const trace t = read_trace(job.trace, wanted_element(o.dtype));
  layer_setup setup(o, t, tools.file);
  setup.take_rotation(t);
  // The pipeline checks the settings, which is why it comes before the basis is learnt.
  pipeline_options options = setup.options();
  options.max_tokens = std::max(1, t.tokens);
  options.max_prompt = t.prompt_len;
  const auto p = replayed_pipeline(o, options, tools.backend);
  std::optional<results> r;
  if (job.out)
    r.emplace(t, o.method.evicts() ? 0 : columns_of(o.method, o.k), selects_per_query_head(o.method));
  layer_result s;
  s.form = t;
  s.slice_bytes = p->slice_bytes();
  s.summary_bytes = p->summary_bytes();
  s.fast_tier_bytes = p->bytes().fast_tier();
  s.store_bytes = p->bytes().store + p->bytes().file;
  s.staging_bytes = p->bytes().staging;
  setup.learn(t);
  std::unique_ptr<pipeline> exact;
  if (o.method.codec != method_spec{}.codec && !o.method.thins()) {  // which keeps all of it besides
    s.codec_errors.emplace();
    options.method = {.plan = o.sliding_window ? "sliding" : "complete"};
    options.store_file.clear();
    exact = replayed_pipeline(o, options, tools.backend);
    append_prompt(*exact, t, options.method, tools.progress);
  }
  const bool takes_worths = o.method.takes_worths();
  append_prompt(*p, t, o.method, tools.progress);
  const auto kept = p->kept_tokens(0);
  for (std::size_t head = 0; r && head < to_size(t.kv_heads); ++head)
    for (std::size_t i = head; i < kept.size(); i += to_size(t.kv_heads)) r->kept.push_back(kept[i]);
  replay_steps(*p, exact ? *exact : *p, t, takes_worths, tools.progress, r ? &*r : nullptr, s);
  if (r) s.written = write_results(*job.out, o, t, *r);
  return s;
}

}  // namespace freekv::examples
