#include "replay_events.hpp"

#include <algorithm>
#include <freekv/core/size.hpp>
#include <string>
#include <vector>

#include "cited.hpp"
#include "events.hpp"
#include "progress.hpp"
#include "selected_rows.hpp"
#include "traces.hpp"

namespace freekv::examples {
namespace {

/// What one sequence gave, over all that had its name.
struct sequence_output {
  std::vector<float> out, lse;  // (rows, query_heads, head_dim), (rows, query_heads)
  std::vector<std::int32_t> selected, recalled;
  std::vector<std::uint8_t> corrected;
  std::int64_t rows = 0, steps = 0;
};

class event_replay {
 public:
  event_replay(const replay_options& o, const event_file& file, host_backend& backend)
      : options_(o),
        file_(file),
        form_(file.forms.front()),
        basis_(basis_file_of(o)),
        setup_(o, form_, basis_),
        traces_(read_traces(o, file)),
        pipeline_(replayed_pipeline(o, settings(backend), backend)),
        store_pages_(pipeline_->free_pages()),
        live_(file.names.size()),
        outputs_(file.names.size()) {
    setup_.learn(traces_.front());
  }

  void run(progress_line& progress) {
    for (std::size_t i = 0; i < file_.events.size(); ++i) {
      progress.show("event", static_cast<long long>(i), static_cast<long long>(file_.events.size()));
      const event& e = file_.events[i];
      try {
        apply(e);
      } catch (const pool_exhausted& full) {
        refuse(e, full);
      }
      most_pages_ = std::max(most_pages_, store_pages_ - pipeline_->free_pages());
    }
  }

  new_file write(const std::string& path) const {
    std::vector<tensor_view> tensors;
    const std::int64_t heads = form_.query_heads, rows = form_.kv_heads,
                       k = columns_of(options_.method, options_.k);
    const bool per_query_head = selects_per_query_head(options_.method);
    for (std::size_t s = 0; s < outputs_.size(); ++s) {
      const sequence_output& o = outputs_[s];
      const auto add = [&](const char* what, data_type type, std::vector<std::int64_t> shape,
                           const auto& data) {
        tensors.push_back(
            {what + ("." + file_.names[s]), type, std::move(shape), std::as_bytes(std::span(data))});
      };
      add("out", data_type::f32, {o.rows, heads, form_.head_dim}, o.out);
      add("lse", data_type::f32, {o.rows, heads}, o.lse);
      add("selected", data_type::i32, {o.steps, per_query_head ? heads : rows, k}, o.selected);
      add("corrected", data_type::u8, {o.steps, rows}, o.corrected);
      add("recalled", data_type::i32, {o.steps, rows}, o.recalled);
    }
    return new_safetensors(path,
                           {.tensors = std::move(tensors),
                            .metadata = {{"rows", per_query_head ? "query_head" : "kv_head"},
                                         {"unit", std::to_string(options_.method.unit_tokens(options_.page))},
                                         {"variant", options_.variant}}});
  }

  nlohmann::ordered_json summary() const {
    nlohmann::ordered_json object{{"variant", options_.variant},
                                  {"events", file_.events.size()},
                                  {"sequences", file_.names.size()},
                                  {"steps", steps_},
                                  {"rows", rows_},
                                  {"store_pages", store_pages_},
                                  {"most_store_pages_in_use", most_pages_},
                                  {"resident_sequences", most_resident_},
                                  {"corrected", corrected_},
                                  {"slices_recalled", recalled_},
                                  {"store_bytes", pipeline_->bytes().store},
                                  {"fast_tier_bytes", pipeline_->bytes().fast_tier()}};
    return object;
  }

 private:
  struct live_sequence {
    sequence_id id{};
    std::size_t trace = 0;
    int place = 0;  // in the trace
  };

  static std::vector<trace> read_traces(const replay_options& o, const event_file& file) {
    std::vector<trace> traces;
    for (const auto& path : file.traces) traces.push_back(read_trace(path, wanted_element(o.dtype)));
    return traces;
  }
  pipeline_options settings(host_backend& backend) {
    setup_.take_rotation(traces_.front());
    pipeline_options o = setup_.options();
    o.max_tokens = std::max(1, file_.longest);
    o.max_sequences = most_resident_ = file_.most_sequences;
    o.max_decode_rows = file_.most_decode_rows;
    if (options_.store_pages && *options_.store_pages < 1)
      throw choice_error("--store-pages " + std::to_string(*options_.store_pages) + " is below 1");
    o.store_tokens = std::int64_t{options_.store_pages.value_or(0)} * o.page;
    if (options_.fast_pages) o.max_resident = most_resident_ = resident_in(*options_.fast_pages, o, backend);
    return o;
  }
  /// Sequences whose slots fit into so many pages of the fast tier.
  int resident_in(int fast_pages, pipeline_options o, host_backend& backend) const {
    const int sequences = o.max_sequences;
    o.max_resident = 1;
    const auto alone = replayed_pipeline(options_, o, backend);
    const std::size_t page_bits =
        to_size(2 * o.page * o.head_dim * o.kv_heads) * to_size(bits_per_element(o.element));
    const auto slots = static_cast<int>(alone->bytes().slots * 8 / page_bits);
    if (slots == 0)
      throw choice_error("--fast-pages counts slots, and this route and variant have none; leave it out");
    if (fast_pages < slots)
      throw choice_error("--fast-pages " + std::to_string(fast_pages) + " are fewer than the " +
                         std::to_string(slots) + " slots of one sequence; give as many, or more");
    return std::min(fast_pages / slots, sequences);
  }

  [[noreturn]] void refuse(const event& e, const pool_exhausted& full) const {
    const bool store = e.what == event::kind::step || e.what == event::kind::prompt;
    throw choice_error(cited_path(*options_.events) + ", line " + std::to_string(e.line) + ": " +
                       std::to_string(full.needed) + " more " +
                       (store ? "pages of the store" : "resident sequences") + " are needed, and " +
                       std::to_string(full.used) + " of " + std::to_string(full.capacity) + " are in use; " +
                       (store ? "raise --store-pages, or release or truncate a sequence before"
                              : "raise --fast-pages, or preempt or release a sequence before"));
  }

  void apply(const event& e) {
    live_sequence& l = live_[e.sequence];
    switch (e.what) {
      case event::kind::open:
        l = {pipeline_->open(), e.other, 0};
        break;
      case event::kind::prompt:
        append_prompt(e.rows.front());
        break;
      case event::kind::step:
        step(e.rows);
        break;
      case event::kind::truncate:
        pipeline_->truncate(l.id, e.length);
        break;
      case event::kind::fork:
        live_[e.other] = {pipeline_->fork(l.id), l.trace, l.place};
        break;
      case event::kind::preempt:
        pipeline_->preempt(l.id);
        break;
      case event::kind::restore:
        pipeline_->restore(l.id);
        break;
      case event::kind::release:
        pipeline_->release(l.id);
        break;
    }
  }

  void append_prompt(const event_rows& rows) {
    live_sequence& l = live_[rows.sequence];
    const trace& t = traces_[l.trace];
    const step_input listed{l.id, rows.tokens, rows.phase};
    pipeline_->begin_step({&listed, 1});
    pipeline_->append_stored(0, t.rows_of(t.keys, l.place, rows.tokens),
                             t.rows_of(t.values, l.place, rows.tokens), {});
    pipeline_->end_step();
    l.place += rows.tokens;
  }

  void step(const std::vector<event_rows>& rows) {
    std::vector<step_input> listed;
    std::vector<float> queries;
    std::vector<std::byte> keys, values;
    for (const event_rows& r : rows) listed.push_back({live_[r.sequence].id, r.tokens, r.phase});
    pipeline_->begin_step(listed);
    for (const event_rows& r : rows) {
      live_sequence& l = live_[r.sequence];
      const trace& t = traces_[l.trace];
      const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
      append(queries, t.queries_of(l.place, r.tokens));
      append(keys, t.rows_of(t.keys, l.place, r.tokens));
      append(values, t.rows_of(t.values, l.place, r.tokens));
      l.place += r.tokens;
    }
    const std::size_t heads = to_size(form_.query_heads), row = heads * to_size(form_.head_dim);
    std::vector<float> out(queries.size()), lse(queries.size() / row * heads);
    pipeline_->append_stored(0, keys, values, queries);
    pipeline_->attend(0, out, lse);
    pipeline_->end_step();
    ++steps_;
    std::ptrdiff_t first = 0;
    for (const event_rows& r : rows) {
      if (r.tokens == 0) continue;
      const std::ptrdiff_t last = first + r.tokens;
      sequence_output& o = outputs_[r.sequence];
      const auto take = [&](const std::vector<float>& from, std::vector<float>& to, std::size_t width) {
        if (!options_.out) return;
        const auto w = static_cast<std::ptrdiff_t>(width);
        to.insert(to.end(), from.begin() + first * w, from.begin() + last * w);
      };
      take(out, o.out, row);
      take(lse, o.lse, heads);
      keep_report(r, o);
      first = last;
    }
    rows_ += first;
  }

  /// Prompt rows select nothing.
  void keep_report(const event_rows& r, sequence_output& o) {
    const std::size_t heads = to_size(form_.kv_heads);
    const bool decodes = r.phase == step_phase::decode;
    const step_report report = pipeline_->report(0, live_[r.sequence].id);
    for (std::size_t h = 0; decodes && h < heads; ++h) {
      corrected_ += report.corrected[h];
      recalled_ += report.recalled[h];
    }
    if (!options_.out) return;
    const std::size_t k = to_size(columns_of(options_.method, options_.k)), at = o.selected.size();
    const std::size_t rows = selects_per_query_head(options_.method) ? to_size(form_.query_heads) : heads;
    o.rows += r.tokens;
    ++o.steps;
    o.selected.resize(at + rows * k, -1);
    if (decodes) copy_selected(report, rows, k, o.selected.data() + at);
    for (std::size_t h = 0; h < heads; ++h) {
      o.corrected.push_back(decodes ? report.corrected[h] : std::uint8_t{0});
      o.recalled.push_back(decodes ? report.recalled[h] : 0);
    }
  }

  const replay_options& options_;
  const event_file& file_;
  trace_form form_;
  basis_file basis_;
  layer_setup setup_;
  std::vector<trace> traces_;
  int most_resident_ = 0;
  std::unique_ptr<pipeline> pipeline_;
  int store_pages_;
  std::vector<live_sequence> live_;       // by name
  std::vector<sequence_output> outputs_;  // by name
  int most_pages_ = 0;
  long long steps_ = 0, rows_ = 0, corrected_ = 0, recalled_ = 0;
};

}  // namespace

replayed_events replay_events(const replay_options& o, host_backend& backend) {
  const event_file file = read_events(*o.events, wanted_element(o.dtype), o.scale != 0);
  if (o.out) {
    std::vector<std::filesystem::path> read = file.traces;
    read.push_back(*o.events);
    check_output(o, *o.out, read);
  }
  check_compiled(file.forms.front().element, file.forms.front().head_dim);
  std::size_t numbers = 0;  // of selected
  const trace_form& form = file.forms.front();
  const std::size_t rows = to_size(selects_per_query_head(o.method) ? form.query_heads : form.kv_heads);
  for (const event& e : file.events)
    if (e.what == event::kind::step) numbers += e.rows.size() * rows * to_size(columns_of(o.method, o.k));
  if (constexpr std::size_t most = std::size_t{1} << 30; o.out && numbers > most)
    throw choice_error(columns_text(o.method, o.k) + " selected " + std::to_string(numbers) +
                       " numbers, more than " + std::to_string(most) + "; choose fewer pages");
  event_replay replay(o, file, backend);
  {
    progress_line progress("freekv-replay");
    replay.run(progress);
  }
  std::optional<new_file> written;
  if (o.out) written = replay.write(*o.out);
  return {replay.summary(), std::move(written)};
}

}  // namespace freekv::examples
