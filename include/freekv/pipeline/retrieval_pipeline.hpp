// The pipeline: prompt, append and the decode step of every layer, in the order that overlaps recall with the
// caller's work. (FreeKV sections 3.2 and 3.3)
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <freekv/backend/host/stages.hpp>
#include <freekv/pipeline/pipeline_memory.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/pipeline/settings.hpp>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace freekv {

/// Report of a layer's last step for one sequence.
struct step_report {
  std::span<const std::uint8_t> corrected;  ///< (kv_heads): selected anew before it attended
  std::span<const std::int32_t>
      recalled;  ///< (kv_heads): slices copied from the store, for this step or the next
  std::span<const std::int32_t>
      recalled_before_attention;  ///< (kv_heads): those of them that attention waited for, by correction
  std::span<const std::int32_t> promoted;  ///< (kv_heads): slices copied from the window ring
  std::span<const std::int32_t>
      attended;  ///< (kv_heads, K): units attended as selected, ascending, pages unless they are less; K is
  ///< selected_units, or what all query heads of a group select together at most, where each selects
  ///< its own, and those pinned
  std::span<const std::int32_t> attended_count;  ///< (kv_heads): how many of them
  /// (kv_heads, K, head_mask_words(group)): the mask of the query heads of the group that selected the unit and
  /// attend to it; empty where all of them do
  std::span<const std::uint32_t> attended_by{};
};

/// KV-cache retrieval for all layers of a model. `Shape` is a kv_shape, `Pack` a policy_pack;
/// `retrieval_pipeline` below takes policies in any order.
///
/// A step is `begin_step`, then for each layer `append` and, for rows whose attention is wanted, `attend`,
/// then `end_step`:
///
///     pipeline.begin_step({{sequence}});                                    // one decode row
///     for (int layer = 0; layer < layers; ++layer) {
///       pipeline.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
///       pipeline.attend(layer, out, lse);
///     }
///     pipeline.end_step();
///
/// append and attend have happened when they return, or of a device are queued on its compute stream: then rows
/// and outputs are in memory that the device reads and writes, and stay there until it has. Selection and
/// recall for the next step go on behind them on the backend's recall stream, after the layer's attention and
/// before its next append. One thread calls. Steps allocate nothing. Calls out of order throw usage_error and
/// change nothing. A step that the engine cannot finish is ended by `abandon_step`.
///
/// Calls that change a sequence between steps come behind what is queued: they wait for it, or of a device are queued
/// behind it themselves, and wait only for room in the ring of uploads, and where others have to give up blocks.
template <class Shape, class Pack>
class basic_retrieval_pipeline {
  using state = layer_state<Shape>;
  using stages = typename Pack::backend::template stages<state, pipeline_settings<Pack>>;
  // What stages of a device take a step as; those of the host take its entries.
  struct no_step {
    struct bounds {};
  };
  template <class Stages>
  struct step_of {
    using type = no_step;
    using bounds = typename no_step::bounds;
  };
  template <class Stages>
  requires on_device<Stages>
  struct step_of<Stages> {
    using type = typename Stages::step;
    using bounds = typename Stages::bounds;
  };

 public:
  using shape_type = Shape;
  using pack_type = Pack;
  using element = typename Shape::element_type;
  using backend_type = typename Pack::backend;
  using settings = pipeline_settings<Pack>;
  using step_bounds = typename step_of<stages>::bounds;  ///< of captured steps
  static constexpr int head_dim = Shape::head_dim;

  /// The pipeline with the policy of `Policy`'s kind exchanged for it.
  template <policy Policy>
  using with = basic_retrieval_pipeline<Shape, typename Pack::template with<Policy>>;

  /// Exact bytes that a pipeline with these settings takes. Allocates none of them. Throws settings_error.
  [[gnu::cold]] static memory_bytes bytes_needed(const settings& given, backend_type& backend) {
    return memory_plan(checked_settings<head_dim>(given), backend, nullptr, nullptr, nullptr, {}).bytes;
  }

  /// Slots that a sequence has in a layer at most, and so the room that its `table` needs; 0 where it has none.
  /// Throws settings_error.
  [[gnu::cold]] static int slots_per_sequence(const settings& given, backend_type& backend, int layer) {
    const memory_plan plan(checked_settings<head_dim>(given), backend, nullptr, nullptr, nullptr, {});
    const state& s = plan.layers.at(size(layer));
    return s.keeps_slots ? s.slots.total() : 0;
  }
  /// Slots of all resident sequences in a layer, and so blocks of an engine's own tensor: `slots_per_sequence` times
  /// max_resident, or fewer with `selected_tokens`. Throws settings_error.
  [[gnu::cold]] static std::int64_t slots_needed(const settings& given, backend_type& backend, int layer) {
    const auto checked = checked_settings<head_dim>(given);
    const memory_plan plan(checked, backend, nullptr, nullptr, nullptr, {});
    const state& s = plan.layers.at(size(layer));
    if (!s.keeps_slots) return 0;
    return std::int64_t{checked.max_resident} * s.slots.fixed() + plan.block_pools.at(size(layer)).capacity();
  }

  /// Takes all its memory from `memory` at once, and room for the store's file where there is one. `backend` must
  /// outlive the pipeline. With `blocks`, one for each layer, slots are blocks of an engine's own tensor, and none of
  /// `memory` is taken for them. Throws settings_error, or store_error if the file cannot be had.
  [[gnu::cold]] basic_retrieval_pipeline(const settings& given, backend_type& backend,
                                         const memory_resources& memory = {},
                                         std::span<const engine_blocks<element>> blocks = {})
      : settings_(checked_settings<head_dim>(given)),
        backend_(&backend),
        recalled_(static_cast<std::size_t>(settings_.layers)),
        progress_(static_cast<std::size_t>(settings_.layers)) {
    if (!blocks.empty() && blocks.size() != size(settings_.layers))
      throw settings_error("blocks of " + std::to_string(blocks.size()) + " layers for " +
                           std::to_string(settings_.layers) + "; give those of each layer, or none");
    const memory_plan counted(settings_, backend, nullptr, nullptr, nullptr, blocks);
    if (settings_.store_file) file_ = settings_.store_file->open(*settings_.store_file, counted.bytes.file);
    slow_memory_ = memory_block(*memory.slow, counted.slow_bytes);
    fast_memory_ = memory_block(*memory.fast, counted.fast_bytes);
    parts_.emplace(settings_, backend, slow_memory_.data(), fast_memory_.data(), file_.get(), blocks);
    sequences_.emplace(sequence_limits{.page_tokens = settings_.page.tokens,
                                       .max_tokens = settings_.max_tokens,
                                       .max_sequences = settings_.max_sequences,
                                       .max_resident = settings_.max_resident,
                                       .max_decode_rows = settings_.max_decode_rows,
                                       .store_pages = settings_.store_pages()},
                       parts_->page_tables, parts_->slot_sets);
    entries_.reserve(size(settings_.max_sequences));
    for (const state& layer : parts_->layers) parts_->stages.clear(layer, settings_.max_sequences);
  }
  basic_retrieval_pipeline(const basic_retrieval_pipeline&) = delete;
  basic_retrieval_pipeline& operator=(const basic_retrieval_pipeline&) = delete;
  ~basic_retrieval_pipeline() {
    try {
      synchronize();
    } catch (const error&) {  // of a device that has failed: nothing is under way there
    }
  }

  const settings& configuration() const { return settings_; }
  /// The method in words: "key_subspace(24, 3), mean_softmax, top_k, cosine_drift(0.9), first_unselected(0),
  /// complete_first(1), resident, page 32, nhd/hnd, bf16"; a codec after the route, unless it is `identity`,
  /// rows, unless `per_kv_head`, and a unit, unless it is a page.
  [[gnu::cold]] std::string name() const {
    const settings& s = settings_;
    using detail::printed;
    std::string text;
    for (const std::string& policy :
         {printed(s.summary), printed(s.pooling), printed(s.selection), printed(s.correction),
          printed(s.residency), printed(s.plan), printed(s.route)})
      text += policy + ", ";
    if (s.pinned_units() > 0) text += printed(s.pinning) + ", ";
    if (const std::string codec = printed(s.codec); codec != identity::name) text += codec + ", ";
    if (const std::string scope = printed(s.scope); scope != per_kv_head::name) text += scope + ", ";
    const auto layouts = resolve(s.layouts, []<class Layouts>(const Layouts&) {
      return std::string(Layouts::fast::name) + "/" + std::string(Layouts::slow::name);
    });
    if (s.units_per_page() > 1) text += "unit " + std::to_string(s.unit_tokens()) + ", ";
    return text + "page " + std::to_string(int{s.page.tokens}) + ", " + layouts + ", " +
           std::string(element_name<element>);
  }
  const memory_bytes& bytes() const { return parts_->bytes; }
  /// Bytes of one recalled slice: one KV head's keys and values of a unit, as they are stored; from a file, of
  /// the page that is read for it.
  std::size_t slice_bytes() const {
    const int tokens = settings_.store_file ? int{settings_.page.tokens} : settings_.unit_tokens();
    return resolve(settings_.codec, [&](const auto& codec) {
      return codec.bytes(page_geometry{tokens, head_dim}, sizeof(element));
    });
  }
  /// Bytes of one unit's summary for one KV head, scales included.
  std::size_t summary_bytes() const { return parts_->layers.front().summary_bytes; }

  /// A new, empty sequence. Throws pool_exhausted.
  sequence_id open() { return sequences_->open(); }

  /// A new sequence that begins with the tokens of `start`, as if they had been its prompt; their pages are shared.
  /// Comes behind what is queued. Throws pool_exhausted, or usage_error in a step or for another pipeline's prefix.
  [[gnu::cold]] sequence_id open(const prefix& start) {
    outside_step("open");
    before_change("open");
    const sequence_id id = sequences_->open(start);
    in_all_layers([&](const auto&... layer) {
      parts_->stages.restore(layer..., static_cast<int>(id), sequences_->known(id).tokens);
    });
    return id;
  }

  /// A new sequence that goes on as `parent` would, bit for bit. All pages are shared, until one of the two
  /// writes to the open one; both are resident. Comes behind what is queued. Throws pool_exhausted, or usage_error
  /// in a step or for a sequence that is preempted.
  [[gnu::cold]] sequence_id fork(sequence_id parent) {
    outside_step("fork");
    sequences_->check_fork(parent);
    before_change("fork");
    const auto of_parent = [&](std::size_t layer) {
      return on_device<stages> ? parts_->block_pools[layer].held(sequences_->slot_set_of(parent))
                               : blocks_in_use(layer, parent);
    };
    make_room("a fork", of_parent, [](sequence_id) { return false; });
    const sequence_id id = sequences_->fork(parent);
    hold_blocks(id, of_parent);
    if constexpr (on_device<stages>)
      parts_->stages.fork(static_cast<int>(parent), static_cast<int>(id), tokens(id));
    else
      for (const state& layer : parts_->layers)
        parts_->stages.fork(layer, static_cast<int>(parent), static_cast<int>(id));
    return id;
  }

  /// The complete pages among the first `tokens` tokens of a sequence, for other sequences to start with, even
  /// when this one has ended. They stay in use until the prefix goes, which is before the pipeline does. Throws
  /// usage_error.
  prefix keep_prefix(sequence_id id, int tokens) {
    outside_step("keep_prefix");
    return sequences_->keep(id, tokens);
  }

  /// The sequence keeps its first `tokens` tokens. Inside the rows of its last decode step the selection stays
  /// and the last kept row's query becomes the previous one, unless a page that any head of any layer has
  /// selected is no longer complete; else the selection is dropped, and all heads select anew in the next step.
  /// Comes behind what is queued. Throws usage_error.
  [[gnu::cold]] void truncate(sequence_id id, int tokens) {
    outside_step("truncate");
    sequences_->check_truncation(id, tokens);
    const int before = sequences_->known(id).tokens, sequence = static_cast<int>(id);
    if (tokens == before) return;
    before_change("truncate");
    const bool has_rows = sequences_->has_rows(id, tokens);
    bool keeps = sequences_->inside_last_append(id, tokens);
    if (keeps && !candidates_within(id, tokens)) {
      settle("truncate");
      for (const state& layer : parts_->layers)
        keeps = keeps && parts_->stages.selects_within(layer, sequence, tokens / settings_.page.tokens);
    }
    sequences_->truncate(id, tokens, keeps);
    in_all_layers([&](const auto&... layer) {
      parts_->stages.truncate(layer..., sequence, {before, tokens, keeps, has_rows});
    });
  }

  /// The sequence's slots go to others; it takes no steps until it is restored, and then goes on as if nothing
  /// had been. Both come behind what is queued. Throw usage_error; `restore` pool_exhausted.
  [[gnu::cold]] void preempt(sequence_id id) {
    outside_step("preempt");
    sequences_->check_preemption(id);
    before_change("preempt", false);
    hold_blocks(id, [](std::size_t) { return 0; });
    sequences_->preempt(id);
  }
  [[gnu::cold]] void restore(sequence_id id) {
    outside_step("restore");
    sequences_->check_restoration(id);
    before_change("restore");
    // All that it may hold, where there is so much; else what it has selected, which a device is asked for.
    const auto& pools = parts_->block_pools;
    const bool counts = !on_device<stages> || std::any_of(pools.begin(), pools.end(), [](const auto& p) {
      return p.available() < p.most();
    });
    if (counts) settle("restore");
    const auto of_selection = [&](std::size_t layer) {
      return counts ? blocks_in_use(layer, id) : pools[layer].most();
    };
    make_room("a restored sequence", of_selection, [](sequence_id) { return false; });
    sequences_->restore(id);
    hold_blocks(id, of_selection);
    in_all_layers([&](const auto&... layer) {
      parts_->stages.restore(layer..., static_cast<int>(id), sequences_->known(id).tokens);
    });
  }
  bool is_preempted(sequence_id id) const { return sequences_->known(id), !sequences_->is_resident(id); }

  /// Ends a sequence; its pages go back to the pool behind the last recall that can touch them. Throws usage_error.
  void release(sequence_id id) {
    outside_step("release");
    end(id);
  }

  /// Length of a sequence, the rows of a step in progress included.
  int tokens(sequence_id id) const { return sequences_->known(id).tokens; }
  std::int32_t free_pages() const { return sequences_->free_pages(); }

  /// Starts a step to which the listed sequences bring rows: prompt rows in chunks of any size, or at most
  /// max_decode_rows decode rows, which attend causally among themselves and select as one group. Reserves
  /// every page and block that the step needs, or throws pool_exhausted, and no sequence has changed;
  /// usage_error for sequences that are unknown, preempted or listed twice. Where others have to give up blocks
  /// that hold nothing, it waits for what is queued; of a device also while that is `device::step_ring::depth`
  /// steps behind.
  void begin_step(std::span<const step_input> rows) {
    outside_step("begin_step");
    if constexpr (on_device<stages>) {
      check_order("begin_step");
      if (backend_->compute().is_capturing())
        throw usage_error("begin_step: the compute stream is captured; call begin_captured_step");
    }
    sequences_->check_step(rows);
    reserve_blocks(rows, true);
    sequences_->begin_step(rows, entries_);
    rows_ = entries_.empty() ? 0 : entries_.back().first_row + entries_.back().tokens;
    longest_ = longest_prompt_ = 0;
    for (const step_entry& entry : entries_) {
      longest_ = std::max(longest_, entry.after());
      if (entry.phase == step_phase::prefill) longest_prompt_ = std::max(longest_prompt_, entry.after());
    }
    upload_step(false);
    std::fill(progress_.begin(), progress_.end(), layer_progress::waiting);
    in_step_ = true;
  }
  void begin_step(std::initializer_list<step_input> rows) {
    begin_step(std::span(rows.begin(), rows.size()));
  }

  /// Begins the capture of a step in a graph that is launched for steps to come, whatever sequences these have: those
  /// that `plan` has listed. The compute stream of the backend is captured, all layers follow as in any step, then what
  /// the engine does with the last one's output, and `end_step`, which joins the recall stream:
  ///
  ///     cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal);
  ///     pipeline.begin_captured_step({.entries = 64});
  ///     for (int layer = 0; layer < layers; ++layer) { /* append and attend, as above */ }
  ///     pipeline.end_step();
  ///     cudaStreamEndCapture(compute, &graph);
  ///
  /// `most`: sequences, `entries`, and rows of all; 0 rows: max_decode_rows of each. Prompts are taken where it says
  /// so. Rows, queries and outputs have room for so many rows; a replay reads and writes those of its step alone.
  /// Nothing happens to any sequence. Throws usage_error.
  void begin_captured_step(const step_bounds& most) requires on_device<backend_type> {
    outside_step("begin_captured_step");
    if (!backend_->compute().is_capturing())
      throw usage_error("begin_captured_step: the compute stream is not captured");
    entries_.clear();
    const auto bounds = parts_->stages.captured_bounds(most);
    rows_ = bounds.rows;
    longest_ = longest_prompt_ = settings_.max_tokens;
    step_ = parts_->stages.capture_step(bounds);
    std::fill(progress_.begin(), progress_.end(), layer_progress::waiting);
    in_step_ = in_capture_ = true;
    recalls_in_capture_ = false;
  }

  /// Plans the step of the next replay: does for the sequences what `begin_step` and `end_step` do, and fills a packet
  /// that the replay takes. Then the engine launches a captured step that is large enough, on the backend's compute
  /// stream, once, before it begins another step or calls anything that changes a sequence; several may be planned and
  /// launched one behind the other. False, and nothing has happened, while as many are under way as the ring takes:
  /// `wait` waits for one. Waits for nothing. Throws as `begin_step`; pool_exhausted too where others would have to
  /// give up blocks that hold nothing, which `reserve` sees to; usage_error for rows that no captured step takes.
  [[nodiscard]] bool plan(std::span<const step_input> rows) requires on_device<backend_type> {
    outside_step("plan");
    check_order("plan");
    sequences_->check_step(rows, "plan");
    step_bounds brings;
    for (int first = 0; const step_input& r : rows) {
      if (r.tokens > 0)
        brings = brings.with(
            {.before = tokens(r.sequence), .tokens = r.tokens, .first_row = first, .phase = r.phase},
            settings_.page.tokens);
      first += r.tokens;
    }
    if (!parts_->stages.is_captured(brings))
      throw usage_error("plan: no captured step takes " + std::to_string(brings.rows) + " rows of " +
                        std::to_string(brings.entries) +
                        " sequences; capture a larger one, or begin a step that is not captured");
    if (!parts_->stages.can_plan()) return false;
    reserve_blocks(rows, false);
    join_recall();
    sequences_->begin_step(rows, entries_);
    parts_->stages.plan_step(entries_);
    entries_.clear();
    return true;
  }
  [[nodiscard]] bool plan(std::initializer_list<step_input> rows) requires on_device<backend_type> {
    return plan(std::span(rows.begin(), rows.size()));
  }
  /// Waits until a step can be planned. Throws usage_error where no replay is queued that would make room.
  void wait() requires on_device<backend_type> { parts_->stages.wait_to_plan(); }
  /// Sees to it that decode rows of these sequences find blocks for what they select, as `begin_step` does; if others
  /// have to give up some, it waits for what is queued. Throws pool_exhausted, or usage_error.
  void reserve(std::span<const step_input> rows) {
    outside_step("reserve");
    sequences_->check_step(rows, "reserve");
    reserve_blocks(rows, true);
  }

  /// Appends the step's rows to a layer, summarises pages they complete, and finds the heads that have drifted.
  /// Waits for the layer's recall of the step before. Keys and values are of the stored element type, or float
  /// to be rounded: `append<float>(layer, {.keys = k, .values = v, .queries = q})`. Throws usage_error, or
  /// store_error where the file fails this or an earlier recall; then the call may be repeated.
  template <class In = element>
  void append(int layer, const kv_rows<In>& rows) {
    static_assert(std::is_same_v<In, element> || std::is_same_v<In, float>,
                  "append takes keys and values of the stored element type, or float");
    const state& s = layer_in(layer, "append", layer_progress::waiting);
    expect_numbers("append: keys", rows.keys.size(), s.heads.kv * head_dim);
    expect_numbers("append: values", rows.values.size(), s.heads.kv * head_dim);
    if (any_decode() || !rows.queries.empty())
      expect_numbers("append: queries", rows.queries.size(), s.heads.query * head_dim);

    // A captured step has joined its recalls when the next is replayed; those of a step before it `plan` has joined.
    if (!in_capture_) backend_->compute().wait(recalled_[static_cast<std::size_t>(layer)]);
    each_part([&](const auto& part) { parts_->stages.retry_reads(s, part); });
    each_part([&](const auto& part) { parts_->stages.append(s, part, rows); });
    each_part([&](const auto& part) { parts_->stages.detect(s, part, rows); });
    queries_ = rows.queries;
    appended_layer_ = layer;
    progress_[static_cast<std::size_t>(layer)] = layer_progress::appended;
  }

  /// Appends the step's rows, all of them of prompts, from an engine's own paged cache, whose prefill needs no
  /// attention from here: `rows` has a table for each sequence of the step that brings rows, in their order.
  /// Copying is queued on the backend's recall stream; until `synchronize`, or the layer's next append, the
  /// engine's blocks and the tables stay as they are. At most as many pages are in flight as the stream queues;
  /// more wait. Keys and values are of the stored element type, or float: `append_from<float>(layer, tables)`.
  /// With a codec or a file it waits for the layer's recall of the step before, and with a file it copies at
  /// once. Throws usage_error, or store_error, as `append`.
  template <class In = element>
  void append_from(int layer, std::span<const paged_rows<In>> rows) {
    static_assert(std::is_same_v<In, element> || std::is_same_v<In, float>,
                  "append_from takes keys and values of the stored element type, or float");
    static_assert(!on_device<stages>,
                  "append_from is the host backend's; the CUDA backend does not have it yet");
    const state& s = layer_in(layer, "append_from", layer_progress::waiting);
    check_tables(rows);
    if (s.encoded) {
      recalled_[static_cast<std::size_t>(layer)].wait();
      for (const step_entry& entry : entries_) parts_->stages.retry_reads(s, entry);
    }
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (int page = entries_[i].before / s.page.tokens; page < s.pages_of(entries_[i].after()); ++page) {
        const auto append_one = [stages = &parts_->stages, layer_state = &s, entry = entries_[i],
                                 table = rows[i], page](bool behind) {
          stages->append_from(*layer_state, entry, table, page, behind);
        };
        if (s.slices.file != nullptr)
          append_one(false);
        else
          backend_->recall().enqueue([append_one] { append_one(true); });
      }
    recalled_[static_cast<std::size_t>(layer)] = backend_->recall().record();
    queries_ = {};
    appended_layer_ = layer;
    progress_[static_cast<std::size_t>(layer)] = layer_progress::appended;
  }

  /// Corrects the flagged heads, attends, and queues selection and recall for the next step behind the
  /// attention.
  ///
  /// Decode rows attend to sink, selected and window pages, prompt rows to everything up to themselves. `out`:
  /// (rows, query_heads, head_dim). `lse`: (rows, query_heads), in the settings' base, or empty. Throws
  /// usage_error, or store_error where the file fails a correction or what is attended to; then the call may be
  /// repeated.
  void attend(int layer, std::span<float> out, std::span<float> lse = {}) {
    const state& s = layer_in(layer, "attend", layer_progress::appended, layer_progress::corrected);
    const auto to = output("attend", s, out, lse);
    correct(layer);
    each_part([&](const auto& part) { parts_->stages.attend(s, part, queries_.data(), to); });
    finish_layer(layer);
  }

  /// Units, or pages, that a query head attends to at most with a row of this step: what `log_masses` needs room for.
  /// Throws usage_error.
  int most_attended(int layer) const {
    const state& s = layer_of(layer, "most_attended");
    if (!in_step_) throw usage_error("most_attended: no step was begun");
    const int tokens = s.kind == layer_kind::sliding   ? 0
                       : settings_.any_complete(layer) ? longest_
                                                       : longest_prompt_;
    return std::max(settings_.entries_within(layer), settings_.pages_for(tokens));
  }

  /// Log-masses of the units that the step's rows attend to: the log-sum-exp of each unit's scores, in the
  /// settings' base; a unit's share of the attention is that base to the power of log-mass - lse. To be called
  /// before `attend`, whose results do not depend on it. Corrects the flagged heads, as `correct` does, and reads
  /// the keys, or what a codec has made of the rows, once more.
  ///
  /// `masses`: (rows, query_heads, most_attended(layer)), in the order of a head's list: the sink's pages, the
  /// selected units, ascending (`step_report::attended`), the window's pages; or all pages. Places behind the
  /// list, and units that only other query heads have selected, are -infinity. Throws usage_error, or
  /// store_error, as `attend`.
  void log_masses(int layer, std::span<float> masses) {
    const state& s = layer_in(layer, "log_masses", layer_progress::appended, layer_progress::corrected);
    check_queries("log_masses", s);
    const int entries = most_attended(layer);
    expect_numbers("log-masses", masses.size(), std::int64_t{s.heads.query} * entries);
    correct(layer);
    const mass_output to{masses.data(), entries, nat_in(settings_.lse_base)};
    each_part([&](const auto& part) { parts_->stages.masses(s, part, queries_.data(), to); });
  }

  /// Corrects the flagged heads, as `attend` does first; for an engine that attends with a kernel of its own.
  /// Then come `table` and the kernel for each sequence with decode rows, then `finish_layer`.
  /// Throws usage_error, or store_error: then flagged heads have selected anew, and the same call, or `attend`,
  /// recalls what they still miss.
  void correct(int layer) {
    const state& s = layer_in(layer, "correct", layer_progress::appended, layer_progress::corrected);
    layer_progress& progress = progress_[static_cast<std::size_t>(layer)];
    each_part([&](const auto& part) {
      if (progress == layer_progress::appended && decodes(part) && s.kind == layer_kind::retrieval)
        parts_->stages.correct(s, part);
    });
    progress = layer_progress::corrected;
    each_part([&](const auto& part) { parts_->stages.retry_correction_reads(s, part); });
  }

  /// The pages that KV head `head` of a sequence attends to with the last of its decode rows, to `blocks`
  /// (slots_per_sequence): sink, selected, window, the open page last; earlier rows see all but the tokens behind
  /// themselves. Between `correct` and `finish_layer`, of a layer that keeps slots. Throws usage_error.
  resident_table table(int layer, sequence_id id, int head, std::span<std::int32_t> blocks) const {
    const step_entry& entry = entry_for_table(layer, id, blocks.size());
    const state& s = readable(layer_of(layer, "table"));
    if (head < 0 || head >= s.heads.kv)
      throw usage_error("table: KV head " + std::to_string(head) + " is not one of " +
                        std::to_string(s.heads.kv));
    return write_table(s, entry, head, blocks);
  }

  /// One table for all KV heads of a sequence, whose pages differ and whose slots do not: as with top_k, no spare
  /// slots, and heads that all retrieve. Throws usage_error where the heads' slots differ.
  resident_table table(int layer, sequence_id id, std::span<std::int32_t> blocks) const {
    const step_entry& entry = entry_for_table(layer, id, blocks.size());
    const state& s = readable(layer_of(layer, "table"));
    const int sequence = entry.sequence;
    const auto slots = [&](int head) {
      return std::span(s.slot_of + s.selection(sequence, head),
                       size(s.selected_count[s.head_index(sequence, head)]));
    };
    for (int head = 1; head < s.heads.kv; ++head)
      if (s.kind_of(head) != s.kind_of(0) ||
          !std::is_permutation(slots(0).begin(), slots(0).end(), slots(head).begin(), slots(head).end()))
        throw usage_error("table: KV heads 0 and " + std::to_string(head) + " of layer " +
                          std::to_string(layer) + " attend to different slots; take a table for each head");
    return write_table(s, entry, 0, blocks);
  }

  /// Queues on the compute stream that tables of what the step's decode rows attend to in a layer are written to memory of
  /// the device: a `device::block_tables`, for an engine's own kernel to attend to `paged_kv(layer)` by. Between `correct`
  /// and `finish_layer`; a captured step may have it. Tables of the slots of a layer, or where it keeps none of the store,
  /// as layers that keep everything do; `all_heads` is of the store alone. Throws usage_error.
  template <class Tables>
  requires on_device<backend_type>
  void queue_tables(int layer, const Tables& to) {
    const state& s = layer_in(layer, "queue_tables", layer_progress::corrected);
    const std::string where = "queue_tables: layer " + std::to_string(layer);
    expect_whole_pages(s, where);
    if (!s.keeps_slots && s.encoded)
      throw usage_error(where + " keeps its pages encoded; attend here, or keep slots");
    if (s.keeps_slots && settings_.any_complete(layer))
      throw usage_error(where + " has heads that keep everything, in the store, beside slots; attend here");
    if (const auto kv = paged_kv(layer);
        to.rows == decltype(to.rows)::folded && kv.block_stride != s.heads.kv * kv.head_stride)
      throw usage_error(where +
                        " has blocks whose heads are not pages of their own; take layout hnd for them");
    if (to.rows == decltype(to.rows)::all_heads && (to.indptr != nullptr || to.indices != nullptr))
      throw usage_error(where + ": a table of all heads has rows of max_blocks, and no ragged form");
    const int sequences = in_capture_ ? step_.bounds.entries : static_cast<int>(entries_.size());
    if (to.sequences < sequences)
      throw usage_error(where + ": tables are for " + std::to_string(to.sequences) +
                        " sequences, and there are " + std::to_string(sequences));
    if (const int most = most_blocks(layer, to.rows); to.max_blocks < most)
      throw usage_error(where + ": a row has " + std::to_string(most) +
                        " blocks at most, and there is room for " + std::to_string(to.max_blocks));
    parts_->stages.write_tables(s, step_, to);
  }
  /// Blocks of a row of such a table at most. Throws usage_error for rows that the layer has no table of.
  template <class Rows>
  requires on_device<backend_type>
  int most_blocks(int layer, Rows rows) const {
    const state& s = layer_of(layer, "most_blocks");
    if (rows == Rows::all_heads && s.keeps_slots)
      throw usage_error(
          "most_blocks: layer " + std::to_string(layer) +
          " has a slot for pages that differ by head, and no table is for all of them; take one by head");
    if (settings_.any_complete(layer)) return s.max_pages;
    const int most = settings_.entries_within(layer);
    return rows == Rows::all_heads ? std::min(s.max_pages, most + (s.heads.kv - 1) * s.max_selected) : most;
  }
  /// Where tables' blocks are: keys, values and strides in elements. The engine does not write there.
  slot_blocks<element> paged_kv(int layer) const requires on_device<backend_type> {
    const state& s = layer_of(layer, "paged_kv");
    return s.keeps_slots ? s.blocks : blocks_of<element>(s.store);
  }

  /// After an engine's own kernel has attended: queues selection and recall for the next step.
  void finish_layer(int layer) {
    const state& s = layer_in(layer, "finish_layer", layer_progress::corrected);
    progress_[static_cast<std::size_t>(layer)] = layer_progress::attended;
    if (s.kind != layer_kind::retrieval) return;
    backend_->recall().wait(backend_->compute().record());
    each_part([&](const auto& part) {
      if (decodes(part))
        backend_->recall().enqueue(
            [stages = &parts_->stages, layer_state = &s, part] { stages->speculate(*layer_state, part); });
    });
    if (in_capture_)
      recalls_in_capture_ = true;
    else
      recalled_[static_cast<std::size_t>(layer)] = backend_->recall().record();
  }

  /// Full attention of the step's rows, to measure what retrieval loses. Between `append` and the end of the
  /// step; changes nothing. Throws usage_error, or store_error where the file cannot be read.
  void attend_full(int layer, std::span<float> out, std::span<float> lse = {}) {
    const state& s = layer_in(layer, "attend_full", layer_progress::appended, layer_progress::corrected,
                              layer_progress::attended);
    const auto to = output("attend_full", s, out, lse);
    each_part([&](const auto& part) { parts_->stages.attend_full(s, part, queries_.data(), to); });
  }

  /// Ends the step. Every layer must have been appended to. In a capture the compute stream waits here for all recall:
  /// what the engine captures before overlaps the last layers'.
  void end_step() {
    if (!in_step_) throw usage_error("end_step: no step was begun");
    const bool decodes = any_decode();
    const auto missed = std::find_if(progress_.begin(), progress_.end(), [&](layer_progress p) {
      return p == layer_progress::waiting || (decodes && p != layer_progress::attended);
    });
    if (missed != progress_.end() && rows_ > 0)
      throw usage_error("end_step: layer " + std::to_string(missed - progress_.begin()) + " of " +
                        std::to_string(settings_.layers) +
                        (*missed == layer_progress::waiting ? " was not appended to"
                                                            : " has not attended its decode rows"));
    if constexpr (on_device<stages>)
      if (in_capture_ && recalls_in_capture_) backend_->compute().wait(backend_->recall().record());
    in_step_ = in_capture_ = false;
  }

  /// Ends a step that the engine cannot finish, wherever it stands: waits for queued work, then releases the
  /// sequences that brought rows to it, since some layers have those rows and others do not. All other sequences
  /// stay as they are. A captured step has none; its capture is then of no use. False, and nothing happens, if no step
  /// was begun.
  bool abandon_step() noexcept {
    if (!in_step_) return false;
    in_step_ = in_capture_ = false;
    try {
      if (!entries_.empty()) settle("abandon_step");
      for (const step_entry& entry : entries_) end(sequence_id{entry.sequence});
    } catch (const error&) {  // of a device, for which every later call fails too
    }
    return true;
  }

  /// Takes one sequence out of the step in progress and releases it, as when its part of the store's file cannot be
  /// read; the step goes on for the others. All rows stay where they are; outputs of those that are gone are not
  /// written. Waits for what is queued. Throws usage_error.
  void abandon(sequence_id id) {
    const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const auto& e) { return sequence_id{e.sequence} == id; });
    if (!in_step_ || entry == entries_.end())
      throw usage_error("abandon: " + sequence_table::name_of(id) + " has no rows in a step in progress");
    settle("abandon");
    entries_.erase(entry);
    end(id);
    upload_step(true);
  }

  /// Waits until everything queued has happened.
  void synchronize() {
    if constexpr (on_device<stages>) backend_->compute().synchronize();
    backend_->recall().synchronize();
  }

  /// Report of a layer's last decode step for a sequence; waits for the layer's recall. Valid until the layer's
  /// next append, or the sequence's release.
  step_report report(int layer, sequence_id id) const {
    sequences_->known(id);
    const state& of_layer = layer_of(layer, "report");
    check_order("report");
    recalled_[static_cast<std::size_t>(layer)].wait();
    return report_in(readable(of_layer), id);
  }

  /// Queues on `side`, a `device::stream` of the caller's, that the host is given what all of a layer's reports
  /// say: as of what is queued for the layer by now. Nothing waits but the device, where what it queues from
  /// now on lies behind the copy; so a captured step may have it. When `side` has come so far, `queued_report`
  /// reads it.
  template <class Stream>
  requires on_device<backend_type>
  void queue_report(int layer, Stream& side) {
    parts_->stages.queue_read_back(layer_of(layer, "queue_report"), side);
  }
  /// Report for a sequence that the layer's last `queue_report` has brought; waits for nothing. Valid until the
  /// layer's next `report` or `queue_report`, or the next call between steps.
  step_report queued_report(int layer, sequence_id id) const requires on_device<backend_type> {
    sequences_->known(id);
    return report_in(parts_->stages.as_read(layer_of(layer, "queued_report")), id);
  }

  /// Heads of a layer that are flagged for correction in the step begun last, over all its sequences, abandoned ones
  /// included. Waits for what is queued; `queued_flagged_heads` is as the layer's last `queue_report` has brought it.
  int flagged_heads(int layer) const requires on_device<backend_type> {
    check_order("flagged_heads");
    return *parts_->stages.read_back(layer_of(layer, "flagged_heads")).flagged_count;
  }
  int queued_flagged_heads(int layer) const requires on_device<backend_type> {
    return *parts_->stages.as_read(layer_of(layer, "queued_flagged_heads")).flagged_count;
  }

 private:
  using memory_plan = pipeline_memory<state, settings, stages>;
  enum class layer_progress : std::uint8_t { waiting, appended, corrected, attended };

  static constexpr std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

  static step_report report_in(const state& s, sequence_id id) {
    const auto heads = static_cast<std::size_t>(s.heads.kv);
    const std::size_t row = s.head_index(static_cast<int>(id), 0),
                      first = s.selection(static_cast<int>(id), 0);
    return {{s.corrected + row, heads},
            {s.recalled + row, heads},
            {s.recalled_before_attention + row, heads},
            {s.promoted + row, heads},
            {s.attended + first, s.selection(0, 1) * heads},
            {s.attended_count + row, heads},
            {s.attended_by + s.masks(static_cast<int>(id), 0), s.masks(0, 1) * heads}};
  }

  // A stage is asked for its part in a step entry by entry; of a device for all of them at once.
  template <class Call>
  void each_part(const Call& call) const {
    if constexpr (on_device<stages>)
      call(step_);
    else
      for (const step_entry& entry : entries_) call(entry);
  }
  static bool decodes(const auto& part) {
    if constexpr (on_device<stages>)
      return part.bounds.decodes;
    else
      return part.phase == step_phase::decode;
  }
  void upload_step(bool has_begun) {
    if constexpr (on_device<stages>) step_ = parts_->stages.begin_step(entries_, has_begun);
  }
  /// A layer whose selection and report the host can read.
  const state& readable(const state& s) const {
    if constexpr (on_device<stages>)
      return parts_->stages.read_back(s);
    else
      return s;
  }

  [[gnu::cold]] void end(sequence_id id) {
    sequences_->known(id);
    before_change("release");
    if (sequences_->is_resident(id)) hold_blocks(id, [](std::size_t) { return 0; });
    sequences_->release(id);
    in_all_layers([&](const auto&... layer) { parts_->stages.forget(layer..., static_cast<int>(id)); });
  }
  /// Changes a sequence layer by layer, or of a device in all of them at once.
  template <class Call>
  void in_all_layers(const Call& call) {
    if constexpr (on_device<stages>)
      call();
    else
      for (const state& layer : parts_->layers) call(layer);
  }
  /// Before a sequence changes: what is queued has happened, or of a device comes before what the compute stream is
  /// given from now on, so that pages, slots and blocks that are given back can be taken at once; and there is room in
  /// the ring, where the change `uploads`.
  void before_change(const char* call, bool uploads = true) {
    if constexpr (on_device<stages>) {
      check_order(call);
      if (uploads) parts_->stages.wait_to_plan();
      join_recall();
    } else {
      synchronize();
    }
  }
  /// Whether all that a sequence may have selected is complete pages among its first `tokens` tokens, as far as is known
  /// without looking; then no truncation to that length makes it drop its selection.
  bool candidates_within(sequence_id id, int tokens) const {
    if (!on_device<stages> || settings_.pinned_units() > 0) return false;
    const int page = settings_.page.tokens, at = sequences_->known(id).candidates_at;
    return std::all_of(parts_->layers.begin(), parts_->layers.end(), [&](const state& s) {
      const page_roles roles = roles_at(at, s.budget, page);
      return roles.candidates() == 0 || roles.window_begin <= tokens / page;
    });
  }
  /// Blocks of selected slots in which a sequence has anything.
  int blocks_in_use(std::size_t layer, sequence_id id) const {
    const state& s = parts_->layers[layer];
    return s.keeps_slots ? parts_->stages.selected_blocks_in_use(s, static_cast<int>(id)) : 0;
  }
  template <class Blocks>
  void hold_blocks(sequence_id id, const Blocks& of_layer) {
    for (std::size_t layer = 0; layer < parts_->block_pools.size(); ++layer)
      parts_->block_pools[layer].hold(sequences_->slot_set_of(id), of_layer(layer));
  }
  /// Waits until everything queued has happened, and all steps that were planned are among it.
  void settle(const char* call) {
    synchronize();
    check_order(call);
    if constexpr (on_device<stages>)
      if (const auto ahead = parts_->stages.steps_ahead(); ahead > 0)
        throw usage_error(std::string(call) + ": steps are planned whose replay is not queued, " +
                          std::to_string(ahead) + " of them; launch the captured step first");
  }
  /// Nothing can be read while a step is captured, or where replays were in the wrong order.
  void check_order(const char* call) const {
    if (in_capture_)
      throw usage_error(std::string(call) + ": a step is being captured, and the host reads nothing of it");
    if constexpr (on_device<stages>) parts_->stages.steps_ahead();
  }
  /// The compute stream waits for the recall of steps before, once.
  void join_recall() {
    for (auto& recalled : recalled_) {
      backend_->compute().wait(recalled);
      recalled = {};
    }
  }
  /// Sees to it that each layer has `more(layer)` blocks of selected slots for `who`: if it must, and `waits`,
  /// resident sequences that are not `spared` give up those that hold nothing, after what is queued has happened.
  /// Throws pool_exhausted.
  template <class More, class Spared>
  void make_room(const char* who, const More& more, const Spared& spared, bool waits = true) {
    auto& pools = parts_->block_pools;
    const auto lacking = [&] {
      std::size_t layer = 0;
      while (layer < pools.size() && more(layer) <= pools[layer].available()) ++layer;
      return layer;
    };
    if (lacking() == pools.size()) return;
    if (waits) settle(who);
    for (int i = 0; waits && i < settings_.max_sequences; ++i) {
      const sequence_id id{i};
      if (sequences_->slot_set_of(id) < 0 || spared(id)) continue;
      for (const state& s : parts_->layers)
        if (s.keeps_slots) parts_->stages.compact_slots(s, i);
      hold_blocks(id, [&](std::size_t layer) {
        return std::min(blocks_in_use(layer, id), pools[layer].held(sequences_->slot_set_of(id)));
      });
    }
    if (const std::size_t layer = lacking(); layer < pools.size())
      throw pool_exhausted(
          "blocks of selected slots in layer " + std::to_string(layer), pools[layer].capacity(),
          pools[layer].capacity() - pools[layer].available(), who, more(layer),
          std::string(waits ? "" : "call reserve, which has others give up what holds nothing, ") +
              "let fewer sequences step together, preempt or release one, or raise selected_tokens");
  }
  /// Blocks for all that decode rows may select.
  void reserve_blocks(std::span<const step_input> rows, bool waits) {
    const auto decodes = [](const step_input& r) { return r.phase == step_phase::decode && r.tokens > 0; };
    make_room(
        "the step",
        [&](std::size_t layer) {
          const block_pool& pool = parts_->block_pools[layer];
          std::int64_t more = 0;
          for (const step_input& r : rows)
            if (decodes(r)) more += pool.most() - pool.held(sequences_->slot_set_of(r.sequence));
          return more;
        },
        [&](sequence_id id) {
          return std::any_of(rows.begin(), rows.end(),
                             [&](const step_input& r) { return decodes(r) && r.sequence == id; });
        },
        waits);
    for (const step_input& r : rows)
      if (decodes(r))
        hold_blocks(r.sequence, [&](std::size_t layer) { return parts_->block_pools[layer].most(); });
  }
  bool any_decode() const {
    return in_capture_ || std::any_of(entries_.begin(), entries_.end(),
                                      [](const auto& e) { return e.phase == step_phase::decode; });
  }
  void outside_step(const char* call) const {
    if (in_step_)
      throw usage_error(std::string(call) +
                        ": the step in progress has not ended; call end_step, or abandon_step, first");
  }
  const state& layer_of(int layer, const char* call) const {
    if (layer < 0 || layer >= settings_.layers)
      throw usage_error(std::string(call) + ": layer " + std::to_string(layer) + " is not one of " +
                        std::to_string(settings_.layers));
    return parts_->layers[size(layer)];
  }
  template <class... Progress>
  const state& layer_in(int layer, const char* call, Progress... allowed) const {
    const state& s = layer_of(layer, call);
    if (!in_step_) throw usage_error(std::string(call) + ": no step was begun");
    const layer_progress progress = progress_[size(layer)];
    const bool appends = ((allowed == layer_progress::waiting) || ...);
    if (((progress != allowed) && ...))
      throw usage_error(std::string(call) + ": layer " + std::to_string(layer) + " is " +
                        std::array{"not appended to yet",
                                   appends ? "appended to already" : "not corrected yet", "not attended yet",
                                   "attended already"}[size(static_cast<int>(progress))] +
                        " in this step");
    return s;
  }
  /// Whether what a layer's heads attend to are whole pages, each the same for all query heads of a KV head.
  [[gnu::cold]] static void expect_whole_pages(const state& s, const std::string& where) {
    if (s.mask_words > 0)
      throw usage_error(
          where + " selects for each query head, and a table is for all that share a KV head; attend here");
    if (s.sliding_window > 0)
      throw usage_error(where + " has a sliding window, which begins inside a page; attend here");
    if (s.units_per_page > 1)
      throw usage_error(where + " selects units of " + std::to_string(s.unit.tokens) +
                        " tokens, and a table has whole pages; attend here");
  }
  [[gnu::cold]] const step_entry& entry_for_table(int layer, sequence_id id, std::size_t room) const {
    const state& s = layer_in(layer, "table", layer_progress::corrected);
    const std::string where = "table: layer " + std::to_string(layer);
    if (!s.keeps_slots) throw usage_error(where + " keeps no slots; attend from the store");
    expect_whole_pages(s, where);
    if (room < size(s.slots.total()))
      throw usage_error(where + " has " + std::to_string(s.slots.total()) +
                        " slots a sequence, and there is room for " + std::to_string(room));
    for (const step_entry& entry : entries_)
      if (sequence_id{entry.sequence} == id && entry.phase == step_phase::decode && entry.tokens > 0)
        return entry;
    throw usage_error("table: " + sequence_table::name_of(id) + " has no decode rows in this step");
  }
  resident_table write_table(const state& s, const step_entry& entry, int head,
                             std::span<std::int32_t> blocks) const {
    if (s.kind_of(head) == layer_kind::complete)
      throw usage_error("table: KV head " + std::to_string(head) + " of layer " + std::to_string(s.layer) +
                        " keeps everything, in the store; attend here");
    const attention_list pages = s.pages_attended(entry, entry.tokens - 1, head);
    int tokens = 0;
    for (int i = 0; i < pages.size(); ++i) {
      blocks[size(i)] = static_cast<std::int32_t>(s.block_attended(entry.sequence, head, pages, i));
      tokens += pages.part(i).tokens;
    }
    return {pages.size(), tokens};
  }
  template <class In>
  void check_tables(std::span<const paged_rows<In>> rows) const {
    const auto text = [](auto n) { return std::to_string(n); };
    if (rows.size() != entries_.size())
      throw usage_error("append_from: " + text(rows.size()) + " block tables for " + text(entries_.size()) +
                        " sequences with rows");
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const step_entry& entry = entries_[i];
      const std::string who = "append_from: " + sequence_table::name_of(sequence_id{entry.sequence});
      if (entry.phase != step_phase::prefill)
        throw usage_error(who + " brings decode rows; append them with their queries");
      if (rows[i].block_tokens < 1)
        throw usage_error(who + " has blocks of " + text(rows[i].block_tokens) + " tokens");
      const std::int64_t covered =
          static_cast<std::int64_t>(rows[i].block_table.size()) * rows[i].block_tokens;
      if (covered < entry.after())
        throw usage_error(who + " has blocks for " + text(covered) + " tokens of " + text(entry.after()));
    }
  }
  void expect_numbers(const char* what, std::size_t given, std::int64_t row) const {
    const std::size_t needed = size(rows_) * size(row);
    if (in_capture_ ? given < needed : given != needed)
      throw usage_error(std::string(what) + ": " + std::to_string(given) + " numbers for " +
                        std::to_string(rows_) + " rows of " + std::to_string(row));
  }
  void check_queries(const char* call, const state& s) const {
    if (s.layer != appended_layer_)
      throw usage_error(std::string(call) + ": layer " + std::to_string(s.layer) +
                        " attends before the next is appended to, which was layer " +
                        std::to_string(appended_layer_));
    if (queries_.empty() && rows_ > 0) throw usage_error(std::string(call) + ": append was given no queries");
  }
  attention_output output(const char* call, const state& s, std::span<float> out,
                          std::span<float> lse) const {
    check_queries(call, s);
    expect_numbers("attention output", out.size(), s.heads.query * head_dim);
    if (!lse.empty()) expect_numbers("log-sum-exp", lse.size(), s.heads.query);
    return {out.data(), lse.empty() ? nullptr : lse.data(), nat_in(settings_.lse_base)};
  }

  settings settings_;
  backend_type* backend_;
  std::vector<typename backend_type::event> recalled_;  // by layer: recall of its last step
  std::vector<layer_progress> progress_;
  std::unique_ptr<slice_file> file_;
  memory_block slow_memory_, fast_memory_;
  std::optional<memory_plan> parts_;
  std::optional<sequence_table> sequences_;
  std::vector<step_entry> entries_;
  typename step_of<stages>::type step_;  // the same on a device
  std::span<const float> queries_;       // of the layer appended to last
  int appended_layer_ = -1;
  int rows_ = 0;
  int longest_ = 0,
      longest_prompt_ = 0;  // tokens of sequences in the step, or of those that bring prompt rows
  bool in_step_ = false;
  bool in_capture_ = false;          // the step is captured
  bool recalls_in_capture_ = false;  // it has used the recall stream
};

/// A pipeline for `Shape` with the policies named, in any order, and FreeKV's published choice for the
/// others: `retrieval_pipeline<kv_shape<bfloat16, 128>, page_size<16>, key_subspace<24, 3>>`.
template <class Shape, policy... Policies>
using retrieval_pipeline = basic_retrieval_pipeline<Shape, policy_pack_of<Policies...>>;

}  // namespace freekv
