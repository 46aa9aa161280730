// The stages of a step on a device: which launches they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/attend.cuh>
#include <freekv/backend/cuda/block_tables.cuh>
#include <freekv/backend/cuda/copy_shared_rows.cuh>
#include <freekv/backend/cuda/cuda_backend.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/page_staging.cuh>
#include <freekv/backend/cuda/prefill.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/select_stage.cuh>
#include <freekv/backend/cuda/sequence_slots.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/summarise.cuh>
#include <freekv/backend/cuda/table_uploads.cuh>
#include <freekv/backend/cuda/trace_range.cuh>
#include <freekv/backend/cuda/unit_log_masses.cuh>
#include <freekv/core/error.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/pipeline/tables.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace freekv::device {

/// The stages of one pipeline, each for all entries of a step at once. `State` is its layer_state, `Settings`
/// its settings, which hold the policies. What is called in a step is queued and neither allocates nor waits,
/// but for selections that copy engines recall for, which wait; so is what changes a sequence between steps,
/// which waits for room in the ring alone; beginning, compacting and reading back wait. The policies' data (a
/// basis) is in memory that the device reads.
template <class State, class Settings, multiplies Attention = multiplies::by_element,
          class Recall = recall_default, class Copies = copies_default>
class stages : public table_uploads<State, Settings, basic_cuda_backend<Attention, Recall, Copies>> {
  using uploads = table_uploads<State, Settings, basic_cuda_backend<Attention, Recall, Copies>>;

 public:
  using element = typename State::element;
  using event = device::event;
  using step = step_view;
  using bounds = step_bounds;
  using backend = basic_cuda_backend<Attention, Recall, Copies>;
  using selection_stage_type = selection_stage<State, Settings, backend, Recall, Copies>;
  static constexpr bool selections_at_hand = false;
  static constexpr bool counts_flagged_heads = true;
  static constexpr int d = State::head_dim;
  static constexpr int most_in_grid = 65535;  // blocks of its second and third dimension
  static constexpr int most_entries =
      most_in_grid / 2;  // of a step: where scoring has two stages, two for each
  static_assert(std::is_trivially_copyable_v<State>, "kernels take a layer_state by value");
  static_assert(d * sizeof(element) % 16 == 0,
                "the CUDA backend copies rows 16 bytes at a time; of fp8_e4m3 head_dim is a multiple of 16");
  static_assert(
      Attention != multiplies::tensor_cores || tensor_cores_multiply<d, element>,
      "tensor cores attend to F16, BF16 and fp8 of a head_dim that is a multiple of 16; take cuda_backend");

  /// Takes scratch and room for the host's copies and uploads. Throws settings_error for what this backend
  /// does not have.
  stages(backend& of, const Settings& settings, carver& page_locked, carver& fast)
      : uploads(of, checked(settings), page_locked, fast),
        backend_(&of),
        settings_(&settings),
        selection_(of, settings, page_locked, fast) {
    if (settings.encodes() && of.transfers() != nullptr)
      throw settings_error("copy engines recall pages as they are; take recall_by::kernel for a codec");
    int staged = 0;
    std::int64_t parts = 0;
    for (int layer = 0; layer < settings.model.layers; ++layer) {
      const auto rows = std::int64_t{settings.capacity.max_resident} * settings.capacity.max_decode_rows;
      parts = std::max({parts, rows * parts_within(settings, layer),
                        std::min<std::int64_t>(rows, attend_default.rows_of_all) * parts_of_all(settings)});
      if (settings.plan.kind(layer) == layer_kind::complete) continue;
      parts = std::max(parts, 2 * std::min<std::int64_t>(std::int64_t{settings.capacity.max_resident} *
                                                             settings.capacity.max_tokens,
                                                         prefill_default.rows));
      staged = staged_pages(settings.page.tokens, settings.max_pages(), settings.capacity.max_resident);
    }
    layers_.device = fast.take<State>(to_size(settings.model.layers));
    State one;
    one.heads = {1, 1};
    std::size_t arrays = 0;
    for_each_sequence_array(one, [&](const sequence_array&) { ++arrays; });
    arrays_ = {fast.take<sequence_array>(arrays * to_size(settings.model.layers)),
               arrays * to_size(settings.model.layers)};
    const std::size_t before = fast.used();
    staging_ = page_staging<element>::carve(fast, staged, settings.model.kv_heads, settings.page.tokens, d);
    staging_bytes_ = fast.used() - before;
    resolve(settings.summary, [&](const auto& summary) {
      scoring_memory::of<d, element>(summary, {settings.unit_tokens(), d}, 0, false, 0);  // throws if it must
      const int width = summary.width({settings.unit_tokens(), d});
      const auto scratch_of = [&](int teams) {
        append_scratch scratch{nullptr, std::int64_t{settings.unit_tokens()} * d,
                               ((settings.pinned_units() > 0 ? std::max(width, d) : width) + 3) / 4 * 4,
                               teams};
        scratch.data = fast.take<float>(to_size(teams * scratch.each()));
        return scratch;
      };
      append_.of_teams = scratch_of(append_default.most_teams);
      append_behind_.of_teams = scratch_of(append_default.teams_behind);
    });
    if (settings.encodes())
      append_.encoding =
          encoding_scratch<element>::carve(fast, staging_,
                                           {.kv_heads = settings.model.kv_heads,
                                            .slice_bytes = stored_slice_bytes<element, d>(settings),
                                            .shared_floats = resolve(settings.codec, [&](const auto& codec) {
                                              return shared_floats(codec, {settings.page.tokens, d});
                                            })});
    attention_ = attention_scratch_memory::carve(fast, parts * settings.model.query_heads, d);
  }

  /// Bytes of the memory in which pages of prompts wait.
  std::size_t staging_bytes() const { return staging_bytes_; }

  /// Initialises the layers' arrays and tables on the device, before there is any sequence.
  void begin(const device_tables<State>& tables, std::span<State> layers) {
    uploads::begin(tables, layers);
    layers_.host = layers;
    this->copy(layers_.device, layers.data(), layers.size());
    std::vector<sequence_array> arrays;
    const auto clear = [&](void* data, std::size_t bytes) {
      if (bytes > 0) device::check(cudaMemsetAsync(data, 0, bytes, compute()), "cudaMemsetAsync");
    };
    for (State& s : layers) {
      const auto& read_back = tables.arrays[to_size(s.layer)];  // with what lies between them
      clear(read_back.device, read_back.size);
      clear(s.kept_queries,
            to_size(settings_->capacity.max_sequences) * s.kept_query_numbers() * sizeof *s.kept_queries);
      if (s.encoded)  // forks copy these rows, whether there are any or not
        clear(s.open.data_handle(), to_size(s.open.mapping().required_span_size()) * sizeof(element));
      for_each_sequence_array(s, [&](const sequence_array& array) { arrays.push_back(array); });
    }
    this->copy(arrays_.data(), arrays.data(), arrays.size());
    for (int sequence = 0; sequence < settings_->capacity.max_sequences; ++sequence)
      launch_forget(layers_, sequence, true, compute());
    selection_.begin(tables.layers);
    attention_.clear(compute());
    backend_->compute().synchronize();
  }

  // Between steps, with nothing queued:

  /// Moves what a sequence's selected slots hold to the lowest ones, unless there are spare ones.
  void compact_slots(const State& s, int sequence) {
    if (s.has_spare_slots()) return;
    this->upload_sequences({sequence});
    launch_compact_slots(s, sequence, compute());
    backend_->compute().synchronize();
  }

  // Between steps, in all layers, queued on the compute stream, which has waited for recall; each waits where
  // the ring is full:

  void forget(int sequence) {
    const trace_range range("freekv forget", sequence);
    this->upload_sequences({});
    launch_forget(layers_, sequence, true, compute());
  }
  /// Drops a sequence's last tokens: the ring's pages that they have overwritten come back. The device knows
  /// its tables from the step that has appended them, or from the fork.
  void truncate(int sequence, const truncation& to) {
    const trace_range range("freekv truncate", sequence);
    const filled_slots fill{sequence, to.tokens, to.tokens / settings_->page.tokens, false, to};
    const bool reopens = layers_.any([&](const State& s) { return to.reopens_page(s); });
    if (to.keeps_selection && !reopens && !fill.fills_any(layers_)) return;
    this->upload_sequences({});
    if (!to.keeps_selection) launch_forget(layers_, sequence, false, compute());
    resolve(settings_->codec, [&]<class Codec>(const Codec& codec) {
      if constexpr (encodes_pages<Codec>)
        if (reopens) launch_reopen(layers_, codec, sequence, to, compute());
      launch_fill(layers_, codec, fill, compute());
    });
  }
  /// Makes sequence `to` what `from` is.
  void fork(int from, int to, int tokens) {
    const trace_range range("freekv fork", from);
    this->upload_sequences({from, to}, settings_->pages_for(tokens));
    launch_fork(layers_, std::span<const sequence_array>(arrays_), from, to, tokens, compute());
  }
  /// Fills the slots of a sequence from the store.
  void restore(int sequence, int tokens) {
    const trace_range range("freekv restore", sequence);
    this->upload_sequences({sequence}, settings_->pages_for(tokens));
    resolve(settings_->codec, [&](const auto& codec) {
      launch_fill(layers_, codec, {sequence, tokens, 0, true}, compute());
    });
  }

  /// A layer as the host sees it, with what the device has of its selection and report: waits for it. Valid
  /// until the next call for the layer.
  const State& read_back(const State& s) const {
    const trace_range range("freekv read back", s.layer);
    backend_->recall().synchronize();
    copy_reports(s, compute());
    backend_->compute().synchronize();
    return as_read(s);
  }
  /// A layer's report, read on stream `side`, between what is queued for the layer and what will be.
  void queue_read_back(const State& s, device::stream& side) {
    device::stream &compute = backend_->compute(), &recall = backend_->recall();
    // A capture has nothing of recall's before the first layer that recalls.
    const bool recalls = recall.is_capturing() || !compute.is_capturing();
    side.wait(compute.record());
    if (recalls) side.wait(recall.record());
    copy_reports(s, side.get());
    const event read = side.record();
    compute.wait(read);
    if (recalls) recall.wait(read);
  }
  /// A layer as the host has last read it.
  const State& as_read(const State& s) const { return this->on_host().layers[to_size(s.layer)]; }

  /// Begins a step: uploads it, and copies what its entries share with others and write to.
  step_view begin_step(std::span<const step_entry> entries, bool has_begun = false) {
    const step_view step = uploads::begin_step(entries, has_begun);
    if (!step.bounds.copies || has_begun) return step;
    backend_->compute().wait(backend_->recall().record());  // it may still read what pages had before
    launch_copy_shared_rows(layers_, step, compute());
    return step;
  }
  step_view capture_step(const step_bounds& most) {
    const step_view step = uploads::capture_step(most);
    launch_copy_shared_rows(layers_, step, compute());
    return step;
  }

  // In a step:

  /// Does nothing: there is no file whose reads could fail.
  void retry_correction_reads(const State&, const step_view&) {}

  /// Appends rows, summarises the pages they complete, unless that comes with `speculate`, encodes them if
  /// the layer keeps them so and, in retrieval layers, finds the heads that have drifted.
  template <class In>
  void append(const State& s, const step_view& step, const step_rows<In>& rows) {
    const trace_range range("freekv append", s.layer);
    append_pages(s, step, device_rows<In>::of(rows, d), {0, step.bounds.entries * step.bounds.pages}, append_,
                 compute());
  }
  /// Appends prompts whose rows are in an engine's paged tensor, sequence by sequence: on the recall stream,
  /// or where pages are encoded, which takes the compute stream's memory, there.
  template <class In>
  void append_from(const State& s, const step_view& step, std::span<const paged_blocks<const In>> rows,
                   const event& recalled) {
    const trace_range range("freekv append from", s.layer);
    // So the compute stream is at most a step ahead of what reads that step.
    backend_->compute().wait(recalled);
    backend_->recall().wait(backend_->compute().record());
    const auto& memory = s.encoded ? append_ : append_behind_;
    const cudaStream_t on = s.encoded ? compute() : backend_->recall().get();
    for (std::size_t i = 0; i < rows.size(); ++i)
      append_pages(s, step, device_rows<In>::of(rows[i]),
                   {static_cast<int>(i) * step.bounds.pages, step.bounds.pages}, memory, on);
  }

  void correct(const State& s, const step_view& step) {
    if (!step.bounds.decodes) return;
    const trace_range range("freekv correct", s.layer);
    selection_.correct(s, step);
  }
  void speculate(const State& s, const step_view& step) {
    if (!step.bounds.decodes) return;
    const trace_range range("freekv speculate", s.layer);
    if (summarises_behind(s, step))
      summarise(s, step, {0, step.bounds.entries * step.bounds.pages}, append_behind_,
                backend_->recall().get());
    selection_.speculate(s, step);
  }

  /// Attends decode rows within the budget, prompt rows, and all rows of complete layers, to everything up to
  /// themselves.
  void attend(const State& s, const step_view& step, const step_queries& queries,
              const attention_output& to) {
    const trace_range range("freekv attend", s.layer);
    attend(s, step, queries, false, to);
  }
  void attend_full(const State& s, const step_view& step, const step_queries& queries,
                   const attention_output& to) {
    const trace_range range("freekv attend full", s.layer);
    attend(s, step, queries, true, to);
  }
  /// The log-mass of each unit that each row attends to.
  void log_masses(const State& s, const step_view& step, const step_queries& queries,
                  const log_mass_output& to) {
    const trace_range range("freekv log-masses", s.layer);
    with_codec(s, [&](const auto& codec) { launch_unit_log_masses(s, codec, step, queries, to, compute()); });
  }
  /// Tables of what decode rows attend to.
  void write_tables(const State& s, const step_view& step, const block_tables& to, const table_ids& ids) {
    const trace_range range("freekv write tables", s.layer);
    constexpr std::size_t beside = 16;  // what a block counts
    if (to.rows == table_rows::all_heads && marked_bytes(s) + beside > to_size(most_shared_bytes()))
      throw freekv::detail::no_table(s, "queue_tables",
                                     " has up to " + std::to_string(s.max_pages) +
                                         " pages a sequence, more than a table of all heads marks in a "
                                         "block's memory; take one by head");
    launch_tables(s, step, to, ids, compute());
  }

  /// Queues a copy on the compute stream between memory of the device and any other.
  void queue_copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    device::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, compute()), "cudaMemcpyAsync");
  }

 private:
  cudaStream_t compute() const { return backend_->compute().get(); }

  /// Appends to the pages of `all`, as many at a time as there is room to encode.
  template <class In>
  void append_pages(const State& s, const step_view& step, const device_rows<In>& rows, const page_run& all,
                    const append_memory<element>& memory, cudaStream_t on) {
    const int end = all.first + all.count;
    const int at_once = s.encoded && step.bounds.prompts ? memory.encoding.staged.pages : all.count;
    for (page_run run{all.first, 0}; run.first < end; run.first += run.count) {
      run.count = std::min(at_once, end - run.first);
      resolve(settings_->summary, [&]<class Summary>(const Summary& summary) {
        resolve(that_pins(settings_->pinning), [&](const auto& pinning) {
          resolve(settings_->correction, [&](const auto& correction) {
            launch_append(s, summary, pinning, correction.at(s.layer), step, rows, run, memory, on);
          });
        });
      });
      if (!summarises_behind(s, step)) summarise(s, step, run, memory, on);
      if (s.encoded)
        resolve(settings_->codec, [&]<class Codec>(const Codec& codec) {
          if constexpr (encodes_pages<Codec>) launch_encode(s, codec, step, run, memory.encoding, on);
        });
    }
  }

  /// True where what a step completes is summarised behind its attention, on the recall stream, in time for
  /// the next step's candidates: where that page is none of them yet, nor of its own. Pages that are encoded
  /// have lost their rows by then.
  static bool summarises_behind(const State& s, const step_view& step) {
    return !s.encoded && !step.bounds.prompts && s.budget.window > s.decode_rows;
  }
  /// Summarises the pages of a run that a step completes, where that is blocks' work.
  void summarise(const State& s, const step_view& step, const page_run& run,
                 const append_memory<element>& memory, cudaStream_t on) {
    if (s.kind != layer_kind::retrieval || (!step.bounds.completes && !backend_->compute().is_capturing()))
      return;
    resolve(settings_->summary, [&]<class Summary>(const Summary& summary) {
      if constexpr (block_summary<Summary>::there) launch_summarise(s, summary, step, run, memory, on);
    });
  }

  void copy_reports(const State& s, cudaStream_t on) const {
    const auto& array = this->on_host().arrays[to_size(s.layer)];
    if (array.size > 0)
      device::check(cudaMemcpyAsync(array.host, array.device, array.size, cudaMemcpyDeviceToHost, on),
                    "cudaMemcpyAsync");
  }
  static const Settings& checked(const Settings& settings) {
    if (settings.capacity.store_file)
      throw settings_error("the CUDA backend does not have store files yet; take the host backend for it");
    if (std::int64_t{settings.capacity.max_resident} * settings.max_pages() >
        std::numeric_limits<std::int32_t>::max())
      throw settings_error(std::to_string(settings.capacity.max_resident) + " resident sequences of " +
                           std::to_string(settings.max_pages()) +
                           " pages each are more than the 2^31 - 1 pages of a step of the CUDA backend; take "
                           "fewer max_resident, fewer max_tokens or larger pages");
    const auto expect_at_most = [](const char* what, int number, int most) {
      if (number > most)
        throw settings_error(std::string(what) + " is " + std::to_string(number) +
                             "; a launch of the CUDA backend has room for at most " + std::to_string(most));
    };
    expect_at_most("max_resident", settings.capacity.max_resident, most_entries);
    expect_at_most("query_heads", settings.model.query_heads, most_in_grid);
    expect_at_most("layers", settings.model.layers, most_in_grid);
    if (settings.completes())
      throw settings_error(
          "the CUDA backend does not complete attention yet; take no_completion, or the host backend");
    if (resolve(settings.summary,
                []<class Summary>(const Summary&) { return hooks_of<Summary>::has(hook::weighs); }) ||
        freekv::detail::samples(settings))
      throw settings_error(
          "the CUDA backend does not sample yet; take another summary and selection, or the host backend");
    resolve(settings.correction, []<class Correction>(const Correction&) {
      if constexpr (hooks_of<Correction>::has(hook::of_attention))
        throw settings_error(std::string(Correction::name) +
                             " judges shares of all attention, which the CUDA backend does not know when it "
                             "corrects; take mass_deficit, or the host backend");
    });
    selection_stage_type::check(settings);
    return settings;
  }
  /// Removes `no_pins` from a run-time choice: kernels skip pinning where `State::pins` is 0, so it needs
  /// none of its own.
  template <class Pinning>
  static const Pinning& that_pins(const Pinning& pinning) {
    return pinning;
  }
  template <class Pinning>
  static Pinning that_pins(const any_of<no_pins, Pinning>& chosen) {
    const auto* const pinning = std::get_if<Pinning>(&chosen.chosen);
    return pinning != nullptr ? *pinning : Pinning{};
  }
  /// Parts of attention that a row has at most: of what heads keep, and of everything.
  static int parts_within(const Settings& settings, int layer) {
    return blocks_for(settings.entries_within(layer),
                      entries_of_part(false, settings.page.tokens, settings.unit_tokens()));
  }
  static int parts_of_all(const Settings& settings) {
    return blocks_for(settings.max_pages(),
                      entries_of_part(true, settings.page.tokens, settings.unit_tokens()));
  }
  int parts(int layer, bool everything) const {
    const int within = parts_within(*settings_, layer);
    return everything || settings_->any_complete(layer) ? std::max(within, parts_of_all(*settings_)) : within;
  }

  /// Attends. In a complete layer all rows read the device's own memory; in others prompts stage what they
  /// attend to.
  void attend(const State& s, const step_view& step, const step_queries& queries, bool everything,
              const attention_output& to) {
    const bool stages_prompts = s.kind != layer_kind::complete;
    with_codec(s, [&](const auto& codec) {
      if (!stages_prompts || step.bounds.decodes)
        launch_attend<Attention>(s, codec, step, queries,
                                 stages_prompts ? rows_attending::decodes : rows_attending::all, everything,
                                 parts(s.layer, everything), to, attention_, compute());
      if (stages_prompts && step.bounds.prompts)
        launch_prefill<Attention>(s, codec, step, queries, to, staging_, attention_, compute());
    });
  }
  /// Calls with what a layer's complete pages are kept by.
  template <class Call>
  void with_codec(const State& s, const Call& call) const {
    if (s.encoded)
      resolve(settings_->codec, call);
    else
      call(identity{});
  }

  backend* backend_;
  const Settings* settings_;
  append_memory<element> append_;         // of the compute stream
  append_memory<element> append_behind_;  // of the recall stream, which encodes nothing
  page_staging<element> staging_;         // of the compute stream
  std::size_t staging_bytes_ = 0;
  attention_scratch_memory attention_;  // of the compute stream
  all_layers<State> layers_;
  std::span<sequence_array> arrays_;  // of all layers, on the device
  selection_stage_type selection_;
};

}  // namespace freekv::device
