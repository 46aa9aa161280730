// The stages of a step on a device: which launches they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/attend.cuh>
#include <freekv/backend/cuda/block_tables.cuh>
#include <freekv/backend/cuda/cuda_backend.cuh>
#include <freekv/backend/cuda/encoded_pages.cuh>
#include <freekv/backend/cuda/keep_best.cuh>
#include <freekv/backend/cuda/page_staging.cuh>
#include <freekv/backend/cuda/pin_units.cuh>
#include <freekv/backend/cuda/prefill.cuh>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/backend/cuda/recall_by_copies.cuh>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/select.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/sequence_slots.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/backend/cuda/summarise.cuh>
#include <freekv/backend/cuda/table_uploads.cuh>
#include <freekv/backend/cuda/trace_range.cuh>
#include <freekv/backend/cuda/unit_masses.cuh>
#include <freekv/core/error.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/pipeline/tables.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/policies/scope.hpp>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace freekv::device {

/// Whether a policy is chosen at run time.
template <class Policy>
inline constexpr bool is_chosen = false;
template <class... Policies>
inline constexpr bool is_chosen<any_of<Policies...>> = true;

/// The stages of one pipeline, each for all entries of a step at once. `State` is its layer_state, `Settings` its settings,
/// which hold the policies. What is called in a step is queued and neither allocates nor waits; so is what changes a
/// sequence between steps, which waits for room in the ring alone; beginning, compacting and reading back wait. The
/// policies' data (a basis) is in memory that the device reads.
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
  static constexpr bool selections_at_hand = false;
  static constexpr bool counts_flagged_heads = true;
  static constexpr int d = State::head_dim;
  static_assert(
      Attention != multiplies::tensor_cores || tensor_cores_multiply<d, element>,
      "tensor cores attend to F16 and BF16 of a head_dim that is a multiple of 16; take cuda_backend");

  /// Takes scratch and room for the host's copies and uploads. Throws settings_error for what this backend does not have.
  stages(backend& of, const Settings& s, carver& pinned, carver& fast)
      : uploads(of, s, pinned, fast), backend_(&of), settings_(&s) {
    check(s);
    if (s.encodes() && of.transfers() != nullptr)
      throw settings_error("copy engines recall pages as they are; take recall_by::kernel for a codec");
    const int group = s.query_heads / s.kv_heads;
    int row_units = 0, max_selected = 0, staged = 0;
    std::int64_t parts = 0;
    for (int layer = 0; layer < s.layers; ++layer) {
      row_units = std::max(row_units, s.budget_at(layer).selected_units + s.pinned_units());
      max_selected = std::max(max_selected, s.max_selected(layer));
      const auto rows = std::int64_t{s.max_resident} * s.max_decode_rows;
      parts = std::max({parts, rows * parts_within(s, layer),
                        std::min<std::int64_t>(rows, attend_default.rows_of_all) * parts_of_all(s)});
      if (s.plan.kind(layer) == layer_kind::complete) continue;
      parts = std::max(parts, 2 * std::min<std::int64_t>(std::int64_t{s.max_resident} * s.max_tokens,
                                                         prefill_default.rows));
      staged = staged_pages(s.page.tokens, s.max_pages(), s.max_resident);
    }
    layers_.device = fast.take<State>(size(s.layers));
    State one;
    one.heads = {1, 1};
    std::size_t arrays = 0;
    for_each_sequence_array(one, [&](const sequence_array&) { ++arrays; });
    arrays_ = {fast.take<sequence_array>(arrays * size(s.layers)), arrays * size(s.layers)};
    const std::size_t before = fast.used();
    staging_ = page_staging<element>::carve(fast, staged, s.kv_heads, s.page.tokens, d);
    staging_bytes_ = fast.used() - before;
    resolve(s.summary, [&](const auto& summary) {
      scoring_memory::of<d, element>(summary, {s.unit_tokens(), d}, 0, false);  // throws if it must
      const int width = summary.width({s.unit_tokens(), d});
      const auto scratch_of = [&](int teams) {
        append_scratch scratch{nullptr,
                               std::int64_t{std::max(s.unit_tokens(), s.query_heads / s.kv_heads)} * d,
                               ((s.pinned_units() > 0 ? std::max(width, d) : width) + 3) / 4 * 4, teams};
        scratch.data = fast.take<float>(size(teams * scratch.each()));
        return scratch;
      };
      append_.of_teams = scratch_of(append_default.most_teams);
      append_behind_.of_teams = scratch_of(append_default.teams_behind);
    });
    if (s.encodes())
      append_.encoding =
          encoding_scratch<element>::carve(fast, staging_,
                                           {.kv_heads = s.kv_heads,
                                            .slice_bytes = stored_slice_bytes<element, d>(s),
                                            .shared_floats = resolve(s.codec, [&](const auto& codec) {
                                              return shared_floats(codec, {s.page.tokens, d});
                                            })});
    const bool by_query_head = s.selects_by() == selection_scope::query_head;
    const selection_sizes sizes{
        .entries = s.max_resident,
        .kv_heads = s.kv_heads,
        .by_query_head = by_query_head,
        .selecting = by_query_head ? group : 1,
        .queries = (by_query_head ? 1 : group) * s.max_decode_rows,
        .max_units = s.max_units(),
        .row_units = row_units,
        .max_selected = max_selected,
        .head_dim = d,
        .query_width =
            resolve(s.summary, [](const auto& summary) { return summary_query_width(summary, d); }),
        .one_selection_per_layer = s.selects_by() == selection_scope::layer,
        .two_stages = resolve(s.summary, []<class S>(const S&) { return two_stage_summary<S>; })};
    for (selection_scratch* scratch : {&correct_, &speculate_})
      *scratch = selection_scratch::carve(fast, sizes);
    attention_ = attention_scratch_memory::carve(fast, parts * s.query_heads, d);
    if (of.transfers() != nullptr && s.route.keeps_slots())
      copies_ = copied_recall<State, Copies>(std::int64_t{s.max_resident} * s.kv_heads * max_selected,
                                             s.unit_tokens(), pinned, fast);
  }

  /// Bytes of the memory in which pages of prompts wait.
  std::size_t staging_bytes() const { return staging_bytes_; }

  /// The layers before any sequence, and their tables.
  void begin(const device_tables<State>& tables, std::span<State> layers) {
    uploads::begin(tables, layers);
    layers_.host = layers;
    this->copy(layers_.device, layers.data(), layers.size());
    std::vector<sequence_array> arrays;
    for (State& s : layers) {
      const auto clear = [&]<class T>(T* array, std::size_t count) {
        if (count > 0)
          device::check(cudaMemsetAsync(array, 0, count * sizeof(T), compute()), "cudaMemsetAsync");
      };
      clear(s.flagged_count, 1);
      for_each_array(s, [&](auto* array, std::size_t of_sequence) {
        clear(array, size(settings_->max_sequences) * of_sequence);
      });
      for_each_sequence_array(s, [&](const sequence_array& array) { arrays.push_back(array); });
    }
    this->copy(arrays_.data(), arrays.data(), arrays.size());
    for (int sequence = 0; sequence < settings_->max_sequences; ++sequence)
      launch_forget(layers_, sequence, true, compute());
    for (const selection_scratch& scratch : {correct_, speculate_}) scratch.clear(compute());
    attention_.clear(compute());
    backend_->compute().synchronize();
  }

  // Between steps, with nothing queued:

  /// With spare slots their order is the residency's, and what they hold stays.
  void compact_slots(const State& s, int sequence) {
    if (s.slots.selected > s.max_selected) return;
    this->upload_sequences({sequence});
    launch_compact_slots(s, sequence, compute());
    backend_->compute().synchronize();
  }

  // Between steps, in all layers, queued on the compute stream, which has waited for recall; each waits where the ring
  // is full:

  void forget(int sequence) {
    const trace_range range("freekv forget", sequence);
    this->upload_sequences({});
    launch_forget(layers_, sequence, true, compute());
  }
  /// A sequence loses its last tokens: the ring's pages that they have overwritten come back. The device knows its tables
  /// from the step that has appended them, or from the fork.
  void truncate(int sequence, const truncation& to) {
    const trace_range range("freekv truncate", sequence);
    const int open = to.tokens / settings_->page.tokens;
    const bool opens = to.opens_page(settings_->page.tokens);
    const filled_slots fill{sequence, to.tokens, open, false, to};
    if (to.keeps_selection && !opens && !fill.fills_any(layers_)) return;
    this->upload_sequences({});
    if (!to.keeps_selection) launch_forget(layers_, sequence, false, compute());
    resolve(settings_->codec, [&]<class Codec>(const Codec& codec) {
      if constexpr (encodes_pages<Codec>)
        if (opens && !to.has_rows) launch_reopen(layers_, codec, sequence, open, compute());
      launch_fill(layers_, codec, fill, compute());
    });
  }
  /// `to` becomes what `from` is.
  void fork(int from, int to, int tokens) {
    const trace_range range("freekv fork", from);
    this->upload_sequences({from, to}, settings_->pages_for(tokens));
    launch_fork(layers_, std::span<const sequence_array>(arrays_), from, to, compute());
  }
  /// Fills the slots of a sequence from the store.
  void restore(int sequence, int tokens) {
    const trace_range range("freekv restore", sequence);
    this->upload_sequences({sequence}, settings_->pages_for(tokens));
    resolve(settings_->codec, [&](const auto& codec) {
      launch_fill(layers_, codec, {sequence, tokens, 0, true}, compute());
    });
  }

  /// A layer as the host sees it, with what the device has of its selection and report: waits for it. Valid until the next
  /// call for the layer.
  const State& read_back(const State& s) const {
    const trace_range range("freekv read back", s.layer);
    backend_->recall().synchronize();
    copy_reports(s, compute());
    backend_->compute().synchronize();
    return as_read(s);
  }
  /// The same on stream `side`, between what is queued for the layer and what will be.
  void queue_read_back(const State& s, device::stream& side) {
    for (device::stream* on : {&backend_->compute(), &backend_->recall()}) side.wait(on->record());
    copy_reports(s, side.get());
    const event read = side.record();
    for (device::stream* on : {&backend_->compute(), &backend_->recall()}) on->wait(read);
  }
  /// A layer as the host has last read it.
  const State& as_read(const State& s) const { return this->on_host().layers[size(s.layer)]; }

  // In a step:

  /// There is no file whose reads could fail.
  void retry_correction_reads(const State&, const step_view&) {}

  /// Appends rows, summarises the pages they complete, encodes them if the layer keeps them so and, in retrieval layers,
  /// finds the heads that have drifted.
  template <class In>
  void append(const State& s, const step_view& step, const step_rows<In>& rows) {
    const trace_range range("freekv append", s.layer);
    if (step.bounds.copies && !s.encoded) launch_copy_shared_rows(s, step, compute());
    append_pages(s, step, device_rows<In>::of(rows, d), {0, step.bounds.entries * step.bounds.pages}, append_,
                 compute());
  }
  /// Appends prompts whose rows are in an engine's paged tensor, sequence by sequence: on the recall stream, or where
  /// pages are encoded, which takes the compute stream's memory, there.
  template <class In>
  void append_from(const State& s, const step_view& step, std::span<const paged_rows<In>> rows,
                   const event& recalled) {
    const trace_range range("freekv append from", s.layer);
    // So the compute stream is at most a step ahead of what reads that step.
    backend_->compute().wait(recalled);
    backend_->recall().wait(backend_->compute().record());
    const auto& memory = s.encoded ? append_ : append_behind_;
    const cudaStream_t on = s.encoded ? compute() : backend_->recall().get();
    if (step.bounds.copies && !s.encoded) launch_copy_shared_rows(s, step, on);
    for (std::size_t i = 0; i < rows.size(); ++i)
      append_pages(s, step, device_rows<In>::of(rows[i]),
                   {static_cast<int>(i) * step.bounds.pages, step.bounds.pages}, memory, on);
  }

  /// The flagged heads select with the current query and recall what they miss; then every head's selection is what this
  /// step attends to. On a step without a flagged head each launch ends at once.
  void correct(const State& s, const step_view& step) {
    if (!step.bounds.decodes) return;
    const trace_range range("freekv correct", s.layer);
    resolve(settings_->correction, [&]<class Correction>(const Correction& correction) {
      if constexpr (correction_by_mass<Correction>)
        select(s, step, correct_, {selection_time::correct, true, 0}, correction.at(s.layer),
               backend_->compute());
      else
        select(s, step, correct_, {selection_time::correct}, already_flagged{}, backend_->compute());
    });
  }
  /// Every head selects with the current query for the next step and recalls what it misses, on the recall stream.
  void speculate(const State& s, const step_view& step) {
    if (!step.bounds.decodes) return;
    const trace_range range("freekv speculate", s.layer);
    select(s, step, speculate_, {selection_time::speculate}, already_flagged{}, backend_->recall());
  }

  /// Attends decode rows within the budget, prompt rows, and all rows of complete layers, to everything up to themselves.
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
  void masses(const State& s, const step_view& step, const step_queries& queries, const mass_output& to) {
    const trace_range range("freekv log-masses", s.layer);
    with_codec(s, [&](const auto& codec) { launch_unit_masses(s, codec, step, queries, to, compute()); });
  }
  /// Tables of what decode rows attend to.
  void write_tables(const State& s, const step_view& step, const block_tables& to) {
    const trace_range range("freekv write tables", s.layer);
    launch_tables(s, step, to, compute());
  }

  /// Queues a copy on the compute stream between memory of the device and any other.
  void queue_copy(std::byte* to, const std::byte* from, std::size_t bytes) const {
    device::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, compute()), "cudaMemcpyAsync");
  }

 private:
  using summary_type = decltype(Settings::summary);
  using residency_type = decltype(Settings::residency);
  using codec_type = decltype(Settings::codec);
  static constexpr bool selects_in_one_launch =
      !is_chosen<summary_type> && !is_chosen<residency_type> && !is_chosen<codec_type> &&
      !is_chosen<decltype(Settings::pooling)> && !is_chosen<decltype(Settings::selection)> &&
      !is_chosen<decltype(Settings::correction)> && !two_stage_summary<summary_type> &&
      std::is_same_v<decltype(Settings::scope), per_kv_head>;

  static constexpr std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
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
        if constexpr (block_summary<Summary>::there)
          if (s.kind == layer_kind::retrieval &&
              (step.bounds.completes || backend_->compute().is_capturing()))
            launch_summarise(s, summary, step, run, memory, on);
      });
      if (s.encoded)
        resolve(settings_->codec, [&]<class Codec>(const Codec& codec) {
          if constexpr (encodes_pages<Codec>) launch_encode(s, codec, step, run, memory.encoding, on);
        });
    }
  }

  void copy_reports(const State& s, cudaStream_t on) const {
    const auto& array = this->on_host().arrays[size(s.layer)];
    if (array.size > 0)
      device::check(cudaMemcpyAsync(array.host, array.device, array.size, cudaMemcpyDeviceToHost, on),
                    "cudaMemcpyAsync");
  }
  static void check(const Settings& s) {
    const auto lacks = [](const std::string& what) {
      throw settings_error("the CUDA backend does not have " + what + " yet; take the host backend for it");
    };
    if (s.store_file) lacks("store files");
    constexpr int most_heads = (48 << 10) / static_cast<int>(sizeof(float));  // of a block's memory
    if (const int heads = s.query_heads / s.kv_heads * s.max_decode_rows; heads > most_heads)
      throw settings_error("query heads of a group times max_decode_rows are " + std::to_string(heads) +
                           "; a device pools at most " + std::to_string(most_heads));
    resolve(s.selection, [&]<class Selection>(const Selection&) {
      constexpr bool by_mass = selection_by_mass<Selection>;
      constexpr int most = by_mass ? block_selection_default.most_by_mass : most_favoured;
      for (int layer = 0; (by_mass || favours_held<Selection>)&&layer < s.layers; ++layer)
        if (const int k = s.budget_at(layer).selected_units; k > most)
          throw settings_error("selected_units is " + std::to_string(k) + "; a selection " +
                               (by_mass ? "by mass" : "that favours held units") +
                               " on a device chooses at most " + std::to_string(most));
    });
  }
  /// Removes `no_pins` from a run-time choice: kernels skip pinning where `State::pins` is 0, so it needs none of
  /// its own.
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
  static int parts_within(const Settings& s, int layer) {
    return blocks_for(s.entries_within(layer), entries_of_part(false, s.page.tokens, s.unit_tokens()));
  }
  static int parts_of_all(const Settings& s) {
    return blocks_for(s.max_pages(), entries_of_part(true, s.page.tokens, s.unit_tokens()));
  }
  int parts(int layer, bool everything) const {
    const int within = parts_within(*settings_, layer);
    return everything || settings_->any_complete(layer) ? std::max(within, parts_of_all(*settings_)) : within;
  }

  /// Of a complete layer all rows read the device's own memory; else prompts stage what they attend to.
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

  template <class Correction>
  void select(const State& s, const step_view& step, const selection_scratch& scratch, selection_job job,
              const Correction& correction, device::stream& on) {
    if (s.kind != layer_kind::retrieval || !step.bounds.decodes) return;
    device::stream* const transfers = s.keeps_slots ? backend_->transfers() : nullptr;
    if (transfers != nullptr) expect_no_capture(on);
    const cudaStream_t stream = on.get();
    resolve(settings_->pinning, [&]<class Pinning>(const Pinning&) {
      if constexpr (!std::is_same_v<Pinning, no_pins>)
        if (s.pins > 0 && job.time == selection_time::correct) launch_pin_units(s, step, job, stream);
    });
    if constexpr (selects_in_one_launch)
      return select_at_once(s, step, scratch, job, correction, on, transfers);
    resolve(settings_->selection, [&](const auto& selection) {
      // Masses are of scores, whatever is selected.
      if (!job.every_head) job.select_all_up_to = all_selected_up_to(selection, s.budget.selected_units);
      resolve(settings_->scope, [&]<class Scope>(const Scope&) {
        constexpr bool together = Scope::scope == selection_scope::layer;
        job.one_selection_per_layer = together;
        if constexpr (together)
          if (job.time == selection_time::correct) launch_flag_layer(s, step, stream);
        resolve(settings_->summary, [&](const auto& summary) {
          resolve(settings_->pooling, [&]<class Pooling>(const Pooling& pooling) {
            score(s, summary, pooling, step, scratch, job, stream);
            if constexpr (together) launch_pool_heads<Pooling>(s, step, scratch, job, stream);
          });
        });
      });
      const auto select_units = [&](const auto& from) {
        resolve(settings_->residency, [&](const auto& residency) {
          launch_select(s, from, residency, correction, step, scratch, job, stream);
        });
      };
      resolve(settings_->scope, [&]<class Scope>(const Scope&) {
        if constexpr (Scope::scope == selection_scope::query_head) {
          if constexpr (std::is_same_v<Correction, already_flagged>) {  // as settings have it
            launch_select_by_query_head(s, selection, step, scratch, job, stream);
            select_units(union_of_query_heads{});
          }
        } else {
          select_units(selection);
        }
      });
    });
    recall(s, step, scratch, on, transfers);
  }
  /// Recalls what has been listed, by copy engines where these transfer.
  void recall(const State& s, const step_view& step, const selection_scratch& scratch, device::stream& on,
              device::stream* transfers) {
    if (!s.keeps_slots) return;
    if (transfers != nullptr)
      copies_.recall(s, this->on_host().layers[size(s.layer)], scratch, on, *transfers);
    else
      resolve(settings_->codec,
              [&](const auto& codec) { launch_recall<Recall>(s, codec, step, scratch, on.get()); });
  }
  /// Where nothing is chosen at run time, the block that pools a head's scores selects, and to correct recalls what it misses.
  template <class Correction>
  void select_at_once(const State& s, const step_view& step, const selection_scratch& scratch,
                      selection_job job, const Correction& correction, device::stream& on,
                      device::stream* transfers) {
    const auto& selection = settings_->selection;
    if (!job.every_head) job.select_all_up_to = all_selected_up_to(selection, s.budget.selected_units);
    const auto launch = [&]<class By>(const By& recall) {
      using then =
          select_and_recall<std::remove_cvref_t<decltype(selection)>, residency_type, Correction, By>;
      launch_score<scoring::alone>(s, settings_->summary, settings_->pooling, step, scratch, job, on.get(),
                                   then{selection, settings_->residency, correction, recall});
    };
    if (job.time == selection_time::correct && transfers == nullptr &&
        Recall::tuning.read == recall_read::loads)
      return launch(recall_now<codec_type>{settings_->codec});
    launch(recall_later{});
    recall(s, step, scratch, on, transfers);
  }

  /// In one stage; or in two, of which the second scores what the first has kept.
  template <class Summary, class Pooling>
  static void score(const State& s, const Summary& summary, const Pooling& pooling, const step_view& step,
                    const selection_scratch& scratch, const selection_job& job, cudaStream_t stream) {
    if constexpr (two_stage_summary<Summary>) {
      selection_job coarse = job, fine = job;
      coarse.select_all_up_to = std::max(
          job.select_all_up_to, summary.kept(s.max_pages * s.units_per_page, s.budget.selected_units));
      fine.separate_next_scores = true;
      launch_score<scoring::coarse>(s, summary, pooling, step, scratch, coarse, stream);
      launch_keep(s, summary, step, scratch, coarse, stream);
      launch_score<scoring::fine>(s, summary, pooling, step, scratch, fine, stream);
    } else {
      launch_score<scoring::alone>(s, summary, pooling, step, scratch, job, stream);
    }
  }

  backend* backend_;
  const Settings* settings_;
  append_memory<element> append_;         // of the compute stream
  append_memory<element> append_behind_;  // of the recall stream, which encodes nothing
  page_staging<element> staging_;         // of the compute stream
  std::size_t staging_bytes_ = 0;
  selection_scratch correct_, speculate_;  // of the compute and of the recall stream
  attention_scratch_memory attention_;     // of the compute stream
  all_layers<State> layers_;
  std::span<sequence_array> arrays_;     // of all layers, on the device
  copied_recall<State, Copies> copies_;  // where copy engines recall
};

}  // namespace freekv::device
