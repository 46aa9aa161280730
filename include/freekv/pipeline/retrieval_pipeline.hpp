// The retrieval pipeline: its memory, its sequences, and the steps that they take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/memory_bytes.hpp>
#include <freekv/pipeline/pipeline_core.hpp>
#include <freekv/pipeline/retrieval_step.hpp>
#include <freekv/pipeline/saved_prefix.hpp>
#include <freekv/pipeline/selection_state.hpp>
#include <freekv/pipeline/step_report.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>

namespace freekv {

/// KV-cache retrieval for all layers of a model. `Shape` is a kv_shape, `Pack` a policy_pack;
/// `retrieval_pipeline` below takes policies in any order.
///
/// Sequences take a step together: `begin_step` lists those that bring rows, and returns the step, a
/// retrieval_step, on which the calls are that are legal in it:
///
///     auto step = pipeline.begin_step({{sequence}});                          // one decode row
///     for (int layer = 0; layer < layers; ++layer) {
///       step.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
///       step.attend(layer, out, lse);
///     }
///     step.end();
///
/// append and attend have happened when they return, or of a device are queued on its compute stream: then
/// rows and outputs are in memory that the device reads and writes, and stay there until it has. Selection
/// and recall for the next step go on behind them on the backend's recall stream, after the layer's attention
/// and before its next append. (FreeKV sections 3.2 and 3.3) One thread calls. Steps allocate nothing. Calls
/// out of order throw usage_error and change nothing. A step that is left without `end` is abandoned.
///
/// Calls that change a sequence between steps come behind what is queued: they wait for it, or of a device
/// are queued behind it themselves, and wait only for room in the ring of uploads, and where others have to
/// give up blocks.
template <class Shape, class Pack>
class basic_retrieval_pipeline {
  using core = detail::pipeline_core<Shape, Pack>;
  using state = typename core::state;
  using stages = typename core::stages_type;

 public:
  using shape_type = Shape;
  using pack_type = Pack;
  using element = typename Shape::element_type;
  using backend_type = typename Pack::backend;
  using settings = pipeline_settings<Pack>;
  using footprint = pipeline_footprint<Shape, Pack>;  ///< what it takes: bytes, and slots by layer
  using reports = layer_report<state, stages::counts_flagged_heads>;  ///< of a layer's last step
  using step = retrieval_step<Shape, Pack>;
  using step_bounds = typename core::step_bounds;  ///< of captured steps
  static constexpr int head_dim = Shape::head_dim;

  /// The pipeline with the policy of `Policy`'s kind exchanged for it.
  template <policy Policy>
  using with = basic_retrieval_pipeline<Shape, typename Pack::template with<Policy>>;

  /// Takes all its memory from `memory` at once, and room for the store's file where there is one. `backend`
  /// must outlive the pipeline, and is the footprint's. With `blocks`, one for each layer, slots are blocks
  /// of an engine's own tensor, and none of `memory` is taken for them. Throws settings_error, or store_error
  /// if the file cannot be had.
  [[gnu::cold]] basic_retrieval_pipeline(const footprint& needs, backend_type& backend,
                                         const memory_resources& memory = {},
                                         std::span<const paged_blocks<element>> blocks = {})
      : core_(needs, backend, memory, blocks) {}
  /// A pipeline from settings whose footprint nobody has asked for. Throws the same.
  [[gnu::cold]] basic_retrieval_pipeline(const settings& given, backend_type& backend,
                                         const memory_resources& memory = {},
                                         std::span<const paged_blocks<element>> blocks = {})
      : basic_retrieval_pipeline(footprint(given, backend), backend, memory, blocks) {}
  basic_retrieval_pipeline(const basic_retrieval_pipeline&) = delete;
  basic_retrieval_pipeline& operator=(const basic_retrieval_pipeline&) = delete;
  ~basic_retrieval_pipeline() {
    try {
      core_.synchronize();
    } catch (const error&) {  // of a device that has failed: nothing is under way there
    }
  }

  const settings& configuration() const { return core_.settings; }
  /// The method in words: "key_subspace(24, 3), mean_softmax, top_k, cosine_drift(0.9), first_unselected(0),
  /// complete_first(1), resident, page 32, nhd/hnd, bf16"; a codec after the route, unless it is `identity`,
  /// a scope, unless `per_kv_head`, a completion, unless `no_completion`, and a unit, unless it is a page.
  [[gnu::cold]] std::string name() const {
    const settings& s = core_.settings;
    using detail::printed;
    std::string text;
    for (const std::string& policy :
         {printed(s.summary), printed(s.pooling), printed(s.selection), printed(s.correction),
          printed(s.residency), printed(s.plan), printed(s.route)})
      text += policy + ", ";
    if (s.pinned_units() > 0) text += printed(s.pinning) + ", ";
    if (const std::string codec = printed(s.codec); codec != identity::name) text += codec + ", ";
    if (const std::string scope = printed(s.scope); scope != per_kv_head::name) text += scope + ", ";
    if constexpr (detail::may_complete<settings>)
      if (s.completes()) text += printed(s.completion) + ", ";
    const auto layouts = resolve(s.layouts, []<class Layouts>(const Layouts&) {
      return std::string(Layouts::fast::name) + "/" + std::string(Layouts::slow::name);
    });
    if (s.units_per_page() > 1) text += "unit " + std::to_string(s.unit_tokens()) + ", ";
    return text + "page " + std::to_string(int{s.page.tokens}) + ", " + layouts + ", " +
           std::string(element_name<element>);
  }
  const memory_bytes& bytes() const { return core_.memory->bytes; }
  /// Bytes of one recalled slice: one KV head's keys and values of a unit, as they are stored; from a file,
  /// of the page that is read for it.
  std::size_t slice_bytes() const {
    const int tokens =
        core_.settings.capacity.store_file ? int{core_.settings.page.tokens} : core_.settings.unit_tokens();
    return resolve(core_.settings.codec, [&](const auto& codec) {
      return codec.bytes(kv_extent{tokens, head_dim}, sizeof(element));
    });
  }
  /// Bytes of one unit's summary for one KV head, scales included.
  std::size_t summary_bytes() const { return core_.memory->layers.front().summary_bytes; }

  /// A new, empty sequence. Throws pool_exhausted.
  sequence_id open() { return core_.sequences->open(); }

  /// A new sequence that begins with the tokens of `start`, as if they had been its prompt; their pages are
  /// shared. Comes behind what is queued. Throws pool_exhausted, or usage_error in a step or for another
  /// pipeline's prefix.
  [[gnu::cold]] sequence_id open(const prefix& start) {
    core_.order.expect_outside_step("open");
    core_.before_change("open");
    const sequence_id id = core_.sequences->open(start);
    core_.stages().restore(static_cast<int>(id), tokens(id));
    return id;
  }

  /// A new sequence that goes on as `parent` would, bit for bit. All pages are shared, until one of the two
  /// writes to the open one; both are resident. Comes behind what is queued. Throws pool_exhausted, or
  /// usage_error in a step or for a sequence that is preempted.
  [[gnu::cold]] sequence_id fork(sequence_id parent) {
    core_.order.expect_outside_step("fork");
    core_.sequences->check_fork(parent);
    core_.before_change("fork");
    const detail::slot_budget slots(core_);
    const auto of_parent = [&](std::size_t layer) {
      return stages::selections_at_hand ? slots.in_use(layer, parent) : slots.held(layer, parent);
    };
    slots.make_room("a fork", of_parent, [](sequence_id) { return false; });
    const sequence_id id = core_.sequences->fork(parent);
    slots.hold(id, of_parent);
    core_.stages().fork(static_cast<int>(parent), static_cast<int>(id), tokens(id));
    return id;
  }

  /// The complete pages among the first `tokens` tokens of a sequence, for other sequences to start with,
  /// even when this one has ended. They stay in use until the prefix goes, which is before the pipeline does.
  /// Throws usage_error.
  prefix keep_prefix(sequence_id id, int tokens) {
    core_.order.expect_outside_step("keep_prefix");
    return core_.sequences->keep(id, tokens);
  }

  /// Writes a prefix to a file, or by a function of `std::span<const std::byte>` to anything else, for this
  /// pipeline or one of another process to load: its pages as the store keeps them, and their summaries. The
  /// file is readable by its owner alone, and takes its name's place when it is whole; a crash of the machine
  /// may leave it damaged. `model`: a number of the engine's own for what pages depend on and the pipeline
  /// does not see: weights, tokenizer, the tokens themselves. Waits for everything queued; allocates a
  /// buffer. Throws usage_error, store_error, or what the function throws.
  template <class To>
  [[gnu::cold]] void save_prefix(const prefix& kept, const To& to, std::uint64_t model) {
    core_.order.expect_outside_step("save_prefix");
    core_.wait_for_steps("save_prefix");
    detail::save_prefix(core_, kept, to, model);
  }

  /// A prefix that was saved, by its path or by a function of `std::span<std::byte>` that fills the span:
  /// then as of keep_prefix. Element, head_dim, scales, page, unit, heads, layers and their kinds, codec,
  /// summary, pinning and `model` are those that it was saved with; budgets, route, layout and the store's
  /// place need not be. Waits for everything queued; allocates a buffer. Throws prefix_error for one that
  /// does not fit or is damaged, pool_exhausted, usage_error, store_error, or what the function throws, and
  /// nothing has changed.
  template <class From>
  [[gnu::cold]] [[nodiscard]] prefix load_prefix(const From& from, std::uint64_t model) {
    core_.order.expect_outside_step("load_prefix");
    core_.wait_for_steps("load_prefix");
    return detail::load_prefix(core_, from, model);
  }

  /// The sequence keeps its first `tokens` tokens. Inside the rows of its last decode step the selection
  /// stays and the last kept row's query becomes the previous one, unless a page that any head of any layer
  /// has selected is no longer complete; else the selection is dropped, and all heads select anew in the next
  /// step. Comes behind what is queued. Throws usage_error.
  [[gnu::cold]] void truncate(sequence_id id, int tokens) {
    core_.order.expect_outside_step("truncate");
    core_.sequences->check_truncation(id, tokens);
    const int before = core_.sequences->known(id).tokens, sequence = static_cast<int>(id);
    if (tokens == before) return;
    core_.before_change("truncate");
    const bool has_rows = core_.sequences->has_rows(id, tokens);
    bool keeps = core_.sequences->inside_last_append(id, tokens);
    if (keeps && !candidates_within(id, tokens)) {
      core_.wait_for_steps("truncate");
      for (const state& layer : core_.memory->layers)
        keeps = keeps && selects_within(core_.stages().read_back(layer), sequence,
                                        tokens / core_.settings.page.tokens);
    }
    core_.sequences->truncate(id, tokens, keeps);
    core_.stages().truncate(sequence, {before, tokens, keeps, has_rows});
  }

  /// The sequence's slots go to others; it takes no steps until it is restored, and then goes on as if
  /// nothing had been. Both come behind what is queued. Throw usage_error; `restore` pool_exhausted.
  [[gnu::cold]] void preempt(sequence_id id) {
    core_.order.expect_outside_step("preempt");
    core_.sequences->check_preemption(id);
    core_.before_change("preempt", false);
    detail::slot_budget(core_).give_back(id);
    core_.sequences->preempt(id);
  }
  [[gnu::cold]] void restore(sequence_id id) {
    core_.order.expect_outside_step("restore");
    core_.sequences->check_restoration(id);
    core_.before_change("restore");
    // All that it may hold, where there is so much; else what it has selected, which a device is asked for.
    const detail::slot_budget slots(core_);
    const bool counts = stages::selections_at_hand || slots.is_short();
    if (counts) core_.wait_for_steps("restore");
    const auto of_selection = [&](std::size_t layer) {
      return counts ? slots.in_use(layer, id) : slots.most(layer);
    };
    slots.make_room("a restored sequence", of_selection, [](sequence_id) { return false; });
    core_.sequences->restore(id);
    slots.hold(id, of_selection);
    core_.stages().restore(static_cast<int>(id), tokens(id));
  }
  bool is_preempted(sequence_id id) const {
    core_.sequences->known(id);
    return !core_.sequences->is_resident(id);
  }

  /// Ends a sequence; its pages go back to the pool behind the last recall that can touch them. Throws
  /// usage_error.
  void release(sequence_id id) {
    core_.order.expect_outside_step("release");
    core_.release(id);
  }

  /// Length of a sequence, the rows of a step in progress included.
  int tokens(sequence_id id) const { return core_.sequences->known(id).tokens; }
  std::int32_t free_pages() const { return core_.sequences->free_pages(); }

  /// Starts a step to which the listed sequences bring rows: prompt rows in chunks of any size, or at most
  /// max_decode_rows decode rows, which attend causally among themselves and select as one group. Reserves
  /// every page and block that the step needs, or throws pool_exhausted, and no sequence has changed;
  /// usage_error for sequences that are unknown, preempted or listed twice, or where as many steps are
  /// planned and not launched as the ring takes. Where others have to give up blocks that hold nothing, it
  /// waits for what is queued; of a device also while that is `device::step_ring::depth` steps behind.
  [[nodiscard("a step that is not kept is abandoned at once")]] step begin_step(
      std::span<const step_input> rows) {
    core_.order.expect_outside_step("begin_step");
    core_.check_order("begin_step");
    if (core_.backend.compute().is_capturing())
      throw usage_error("begin_step: the compute stream is captured; call begin_captured_step");
    core_.sequences->check_step(rows);
    core_.stages().wait_to_plan();  // which may throw, so before anything changes
    detail::slot_budget(core_).reserve(rows);
    core_.sequences->begin_step(rows, core_.entries);
    core_.rows = core_.longest = core_.longest_prompt = 0;
    for (const detail::step_entry& entry : core_.entries) {
      core_.rows = entry.first_row + entry.tokens;
      core_.longest = std::max(core_.longest, entry.after());
      if (entry.phase == step_phase::prefill)
        core_.longest_prompt = std::max(core_.longest_prompt, entry.after());
    }
    core_.step = core_.stages().begin_step(core_.entries);
    core_.order.begin_step();
    return step(core_);
  }
  [[nodiscard("a step that is not kept is abandoned at once")]] step begin_step(
      std::initializer_list<step_input> rows) {
    return begin_step(std::span(rows.begin(), rows.size()));
  }

  /// Begins the capture of a step in a graph that is launched for steps to come, whatever sequences these
  /// have: those that `plan` has listed. The compute stream of the backend is captured, all layers follow as
  /// in any step, then what the engine does with the last one's output, and `end`, which joins the recall
  /// stream:
  ///
  ///     cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal);
  ///     auto step = pipeline.begin_captured_step({.entries = 64});
  ///     for (int layer = 0; layer < layers; ++layer) { /* append and attend, as above */ }
  ///     step.end();
  ///     cudaStreamEndCapture(compute, &graph);
  ///
  /// `most`: sequences, `entries`, and rows of all; 0 rows: max_decode_rows of each. Prompts are taken where
  /// it says so. Rows, queries and outputs have room for so many rows; a replay reads and writes those of its
  /// step alone. Nothing happens to any sequence. Throws usage_error.
  [[nodiscard("a step that is not kept is abandoned at once")]] step begin_captured_step(
      const step_bounds& most) requires device_stages<stages> {
    core_.order.expect_outside_step("begin_captured_step");
    if (!core_.backend.compute().is_capturing())
      throw usage_error("begin_captured_step: the compute stream is not captured");
    if (most.entries < 1)
      throw usage_error("begin_captured_step: entries is " + std::to_string(most.entries) +
                        "; a captured step takes at least one sequence");
    if (most.entries > stages::most_entries)
      throw usage_error("begin_captured_step: entries is " + std::to_string(most.entries) +
                        "; a captured step takes at most " + std::to_string(stages::most_entries) +
                        " sequences");
    const auto bounds = core_.stages().captured_bounds(most);
    if (std::int64_t{bounds.entries} * bounds.pages > std::numeric_limits<std::int32_t>::max())
      throw usage_error("begin_captured_step: " + std::to_string(bounds.entries) + " sequences of " +
                        std::to_string(bounds.pages) +
                        " pages each are more than 2^31 - 1 pages; capture for fewer");
    core_.entries.clear();
    core_.rows = bounds.rows;
    core_.longest = core_.longest_prompt = core_.settings.capacity.max_tokens;
    core_.step = core_.stages().capture_step(bounds);
    core_.order.begin_step();
    core_.in_capture = true;
    core_.recalls_in_capture = false;
    return step(core_);
  }

  /// Plans the step of the next replay: does for the sequences what a step does from `begin_step` to `end`,
  /// and fills a packet that the replay takes. Then the engine launches a captured step that is large enough,
  /// on the backend's compute stream, once, before it begins another step or calls anything that changes a
  /// sequence; several may be planned and launched one behind the other. False, and nothing has happened,
  /// while as many are under way as the ring takes: `wait` waits for one. Waits for nothing. Throws as
  /// `begin_step`; pool_exhausted too where others would have to give up blocks that hold nothing, which
  /// `reserve` sees to; usage_error for rows that no captured step takes.
  [[nodiscard]] bool plan(std::span<const step_input> rows) requires device_stages<stages> {
    core_.order.expect_outside_step("plan");
    core_.check_order("plan");
    core_.sequences->check_step(rows, "plan");
    step_bounds brings;
    for (int first = 0; const step_input& r : rows) {
      if (r.tokens > 0)
        brings = brings.with(
            {.before = tokens(r.sequence), .tokens = r.tokens, .first_row = first, .phase = r.phase},
            core_.settings.page.tokens);
      first += r.tokens;
    }
    if (!core_.stages().is_captured(brings))
      throw usage_error("plan: no captured step takes " + std::to_string(brings.rows) + " rows of " +
                        std::to_string(brings.entries) +
                        " sequences; capture a larger one, or begin a step that is not captured");
    if (!core_.stages().can_plan()) return false;
    detail::slot_budget(core_).reserve(rows, false);
    core_.join_recall();
    core_.sequences->begin_step(rows, core_.entries);
    core_.stages().plan_step(core_.entries);
    core_.entries.clear();
    return true;
  }
  [[nodiscard]] bool plan(std::initializer_list<step_input> rows) requires device_stages<stages> {
    return plan(std::span(rows.begin(), rows.size()));
  }
  /// Waits until a step can be planned. Throws usage_error where no replay is queued that would make room.
  void wait() requires device_stages<stages> { core_.stages().wait_to_plan(); }
  /// Sees to it that decode rows of these sequences find blocks for what they select, as `begin_step` does;
  /// if others have to give up some, it waits for what is queued. Throws pool_exhausted, or usage_error.
  void reserve(std::span<const step_input> rows) {
    core_.order.expect_outside_step("reserve");
    core_.sequences->check_step(rows, "reserve");
    detail::slot_budget(core_).reserve(rows);
  }

  /// Blocks of a row of the tables that `queue_tables` writes at most, of `block_tokens` tokens each, or
  /// whole pages where these are 0. Throws usage_error for rows or blocks that the layer has no table of.
  template <class Rows>
  requires device_stages<stages>
  int most_blocks(int layer, Rows rows, int block_tokens = 0) const {
    return detail::most_blocks(core_.layer_of(layer, "most_blocks"), core_.settings, rows, block_tokens,
                               "most_blocks");
  }
  /// Blocks that tables list: keys, values and strides in elements. The engine does not write there.
  paged_tensor<element> paged_kv(int layer) const requires device_stages<stages> {
    return detail::paged_kv(core_.layer_of(layer, "paged_kv"));
  }

  /// Waits until everything queued has happened.
  void synchronize() { core_.synchronize(); }

  /// Reports of a layer's last step: `report(layer)[sequence].recalled`. Waits for the layer's recall, of a
  /// device for both streams, from which it reads back. Valid until the layer's next append, `report` or
  /// `queue_report`, or the sequence's release. Throws usage_error.
  reports report(int layer) const {
    const state& of_layer = core_.layer_of(layer, "report");
    core_.check_order("report");
    core_.expect_no_capture("report");
    core_.recalled[to_size(layer)].wait();
    return {core_.stages().read_back(of_layer), *core_.sequences};
  }

  /// Queues on `side`, a `device::stream` of the caller's, a copy of all reports of a layer to the host, as
  /// they are behind what is queued by now. The caller does not wait, so a captured step may have it; the
  /// device does: what the pipeline queues from now on comes behind the copy. When `side` has come so far,
  /// `queued_report` reads it.
  template <class Stream>
  requires device_stages<stages>
  void queue_report(int layer, Stream& side) {
    core_.stages().queue_read_back(core_.layer_of(layer, "queue_report"), side);
  }
  /// Reports that the layer's last `queue_report` has brought; waits for nothing. Valid until the layer's
  /// next `report` or `queue_report`, or the next call between steps.
  reports queued_report(int layer) const requires device_stages<stages> {
    return {core_.stages().as_read(core_.layer_of(layer, "queued_report")), *core_.sequences};
  }

 private:
  /// True where all that a sequence may have selected is complete pages among its first `tokens` tokens, as
  /// far as is known without looking; then no truncation to that length makes it drop its selection.
  bool candidates_within(sequence_id id, int tokens) const {
    if (core_.settings.pinned_units() > 0) return false;
    const int page = core_.settings.page.tokens, at = core_.sequences->known(id).candidates_at;
    for (const state& s : core_.memory->layers) {
      const page_roles roles = roles_at(at, s.budget, page);
      if (roles.candidates() > 0 && roles.window_begin > tokens / page) return false;
    }
    return true;
  }

  core core_;
};

/// A pipeline for `Shape` with the policies named, in any order, and FreeKV's published choice for the
/// others: `retrieval_pipeline<kv_shape<bfloat16, 128>, page_size<16>, key_subspace<24, 3>>`.
template <class Shape, policy... Policies>
using retrieval_pipeline = basic_retrieval_pipeline<Shape, policy_pack_of<Policies...>>;

}  // namespace freekv
