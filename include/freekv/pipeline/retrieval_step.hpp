// A step of a retrieval pipeline: the calls that are legal in one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/block_tables.hpp>
#include <freekv/pipeline/pipeline_core.hpp>
#include <freekv/pipeline/row_arguments.hpp>
#include <freekv/pipeline/step_handle.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <span>
#include <type_traits>

namespace freekv {

/// A step in progress of a retrieval pipeline, from `begin_step` or `begin_captured_step`; for each layer
/// come `append` and, for rows whose attention is wanted, `attend`, then `end`:
///
///     auto step = pipeline.begin_step({{sequence}});  // one decode row
///     for (int layer = 0; layer < layers; ++layer) {
///       step.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
///       step.attend(layer, out, lse);
///     }
///     step.end();
///
/// Rows and outputs may have room for more rows than the step has, as those of a padded batch: what lies
/// behind is neither read nor written. Calls out of order throw usage_error and change nothing. A step that
/// is left without `end`, by an exception too, is abandoned.
template <class Shape, class Pack>
class retrieval_step : public step_handle<detail::pipeline_core<Shape, Pack>> {
  using core_type = detail::pipeline_core<Shape, Pack>;
  using state = typename core_type::state;
  using element = typename Shape::element_type;
  static constexpr int head_dim = Shape::head_dim;

 public:
  /// A handle without a step.
  retrieval_step() = default;
  explicit retrieval_step(core_type& core) : step_handle<core_type>(core) {}

  /// Appends the step's rows to a layer, summarises pages they complete, and finds the heads that have
  /// drifted. Waits for the layer's recall of the step before. Keys and values are of the stored element
  /// type, or float to be rounded: `append<float>(layer, {.keys = k, .values = v, .queries = q})`; of a shape
  /// of fp8_e4m3 half and bfloat16 too. Scales divide all rows but those of fp8_e4m3. Queries
  /// are float, half or bfloat16, `append<half, half>`, and stay as they are until the layer has attended;
  /// rows may be parts of others, by `strides`. Throws usage_error, or store_error where the file fails this
  /// or an earlier recall; then the call may be repeated.
  template <class In = element, class Query = float>
  void append(int layer, const kv_rows<In, Query>& rows) {
    static_assert(detail::row_of<In, element>,
                  "append takes keys and values of the stored element type, or float; of fp8_e4m3 any");
    core_type& core = this->of("append");
    const state& s =
        layer_in(core, layer, "append", detail::layer_progress::waiting, detail::layer_progress::waiting);
    const auto given = detail::checked_rows(rows, shape_of(core, s), core.any_decode());
    if (!rows.worths.empty()) detail::refuse_worths("a pipeline that retrieves", rows.worths.size());
    if constexpr (detail::may_complete<typename core_type::settings_type> ||
                  detail::may_sample<typename core_type::settings_type> ||
                  detail::may_verify<typename core_type::settings_type>)
      if (!rows.selecting.empty() &&
          (core.settings.completes() || detail::samples(core.settings) || detail::verifies(core.settings)))
        detail::refuse_selecting("a pipeline that completes, samples or verifies",
                                 "weighs what is attended to by the queries that select");

    // A captured step has joined its recalls when the next is replayed; those of a step before it `plan` has
    // joined.
    if (!core.in_capture) core.backend.compute().wait(core.recalled[to_size(layer)]);
    core.stages().append(s, core.step, given);
    core.queries = given.queries;
    core.order.reached(detail::layer_progress::appended, layer);
  }

  /// Appends the step's rows, all of them of prompts, from an engine's own paged cache, whose prefill needs
  /// no attention from here: `rows` has a table for each sequence of the step that brings rows, in their
  /// order; of a device, cache and tables are in its memory. Copying is queued on the backend's recall
  /// stream, of a device behind what the compute stream has been given; until `synchronize`, or the layer's
  /// next append, of a device as its compute stream has it, the engine's blocks and the tables stay as they
  /// are. On the host at most as many pages are in flight as the stream queues; more wait. Keys and values
  /// are of the types that `append` takes: `append_from<float>(layer, tables)`. With a codec or a file it
  /// waits for the layer's recall of the step before, and with a file it copies at once; of a device it is
  /// the compute stream that waits, and copies where there is a codec. Throws usage_error, or store_error, as
  /// `append`.
  template <class In = element>
  void append_from(int layer, std::span<const paged_blocks<const In>> rows) {
    static_assert(detail::row_of<In, element>,
                  "append_from takes keys and values of the stored element type, or float; of fp8_e4m3 any");
    core_type& core = this->of("append_from");
    const state& s = layer_in(core, layer, "append_from", detail::layer_progress::waiting,
                              detail::layer_progress::waiting);
    if (core.in_capture)
      throw usage_error("append_from: a captured step has no tables of the sequences to come; begin a step");
    detail::expect_prompt_tables(rows, core.entries);
    auto& recalled = core.recalled[to_size(layer)];
    core.stages().append_from(s, core.step, rows, recalled);
    recalled = core.backend.recall().record();
    core.queries = {};
    core.order.reached(detail::layer_progress::appended, layer);
  }

  /// Corrects the flagged heads, attends, and queues selection and recall for the next step behind the
  /// attention.
  ///
  /// Decode rows attend to sink, selected and window pages, prompt rows to everything up to themselves.
  /// `out`: (rows, query_heads, head_dim), of float, or by `attend<half>` of half, or bfloat16; rows are
  /// `out_stride` elements apart, or with 0 one behind the other. `lse`: (rows, query_heads), in the
  /// settings' base, or empty. Throws usage_error, or store_error where the file fails a correction or what
  /// is attended to; then the call may be repeated.
  template <class Out = float>
  void attend(int layer, std::type_identity_t<std::span<Out>> out, std::span<float> lse = {},
              std::int64_t out_stride = 0) {
    core_type& core = this->of("attend");
    const state& s =
        layer_in(core, layer, "attend", detail::layer_progress::appended, detail::layer_progress::corrected);
    const auto to = output(core, "attend", s, out, lse, out_stride);
    correct(layer);
    core.stages().attend(s, core.step, core.queries, to);
    finish_layer(layer);
  }

  /// Units, or pages, that a query head attends to at most with a row of this step: what `log_masses` needs
  /// room for. Throws usage_error.
  int most_attended(int layer) const {
    const core_type& core = this->of("most_attended");
    const state& s = core.layer_of(layer, "most_attended");
    const int tokens = s.kind == layer_kind::sliding       ? 0
                       : core.settings.any_complete(layer) ? core.longest
                                                           : core.longest_prompt;
    return std::max(core.settings.entries_within(layer), core.settings.pages_for(tokens));
  }

  /// Log-masses of the units that the step's rows attend to: the log-sum-exp of each unit's scores, in the
  /// settings' base; a unit's share of the attention is that base to the power of log-mass - lse. To be
  /// called before `attend`, whose results do not depend on it. Corrects the flagged heads, as `correct`
  /// does, and reads the keys, or what a codec has made of the rows, once more.
  ///
  /// `masses`: (rows, query_heads, most_attended(layer)), in the order of a head's list: the sink's pages,
  /// the selected units, ascending (`step_report::attended`), the window's pages; or all pages. Places behind
  /// the list, and units that only other query heads have selected, are -infinity. Throws usage_error, or
  /// store_error, as `attend`.
  void log_masses(int layer, std::span<float> masses) {
    core_type& core = this->of("log_masses");
    const state& s = layer_in(core, layer, "log_masses", detail::layer_progress::appended,
                              detail::layer_progress::corrected);
    core.order.expect_latest(layer, "log_masses", !core.queries.empty() || core.rows == 0);
    const int entries = most_attended(layer);
    detail::expect_numbers("log-masses", masses.size(), core.rows, std::int64_t{s.heads.query} * entries);
    correct(layer);
    const detail::log_mass_output to{masses.data(), entries, nat_in(core.settings.attention.lse_base)};
    core.stages().log_masses(s, core.step, core.queries, to);
  }

  /// Corrects the flagged heads, as `attend` does first; for an engine that attends with a kernel of its own.
  /// Then come `table` and the kernel for each sequence with decode rows, then `finish_layer`. Throws
  /// usage_error, or store_error: then flagged heads have selected anew, and the same call, or `attend`,
  /// recalls what they still miss.
  void correct(int layer) {
    core_type& core = this->of("correct");
    const state& s =
        layer_in(core, layer, "correct", detail::layer_progress::appended, detail::layer_progress::corrected);
    if (core.order.of(layer) == detail::layer_progress::appended && s.kind == layer_kind::retrieval)
      core.stages().correct(s, core.step);
    core.order.reached(detail::layer_progress::corrected, layer);
    core.stages().retry_correction_reads(s, core.step);
  }

  /// The pages that KV head `head` of a sequence attends to with the last of its decode rows, to `blocks`
  /// (`slots_per_sequence` of the footprint): sink, selected, window, the open page last; earlier rows see
  /// all but the tokens behind themselves. Between `correct` and `finish_layer`, of a layer that keeps slots.
  /// Throws usage_error.
  resident_table table(int layer, sequence_id id, int head, std::span<std::int32_t> blocks) const {
    core_type& core = this->of("table");
    const state& of_layer =
        layer_in(core, layer, "table", detail::layer_progress::corrected, detail::layer_progress::corrected);
    const detail::step_entry& entry = detail::entry_for_table(of_layer, core.entries, id, blocks.size());
    const state& s = core.stages().read_back(of_layer);
    if (head < 0 || head >= s.heads.kv)
      throw usage_error("table: KV head " + std::to_string(head) + " is not one of " +
                        std::to_string(s.heads.kv));
    return detail::write_table(s, entry, head, blocks);
  }

  /// One table for all KV heads of a sequence, whose pages differ and whose slots do not: as with top_k, no
  /// spare slots, and heads that all retrieve. Throws usage_error where the heads' slots differ.
  resident_table table(int layer, sequence_id id, std::span<std::int32_t> blocks) const {
    core_type& core = this->of("table");
    const state& s =
        layer_in(core, layer, "table", detail::layer_progress::corrected, detail::layer_progress::corrected);
    const detail::step_entry& entry = detail::entry_for_table(s, core.entries, id, blocks.size());
    return detail::write_table(core.stages().read_back(s), entry, blocks);
  }

  /// Queues on the compute stream that tables of what the step's decode rows attend to in a layer are written
  /// to memory of the device: a `device::block_tables`, for an engine's own kernel to attend by to the
  /// pipeline's `paged_kv(layer)`. Between `correct` and `finish_layer`; a captured step may have it. Tables
  /// of the slots of a layer, or where it keeps none of the store, as layers that keep everything do;
  /// `all_heads` is of the store alone. Throws usage_error.
  template <class Tables>
  requires device_stages<typename core_type::stages_type>
  void queue_tables(int layer, const Tables& to) {
    core_type& core = this->of("queue_tables");
    const state& s = layer_in(core, layer, "queue_tables", detail::layer_progress::corrected,
                              detail::layer_progress::corrected);
    const detail::table_ids ids = detail::expect_tables(
        s, core.settings, core.in_capture ? core.step.bounds.entries : static_cast<int>(core.entries.size()),
        to);
    core.stages().write_tables(s, core.step, to, ids);
  }

  /// Queues selection and recall for the next step, once an engine's own kernel has attended.
  void finish_layer(int layer) {
    core_type& core = this->of("finish_layer");
    const state& s = layer_in(core, layer, "finish_layer", detail::layer_progress::corrected,
                              detail::layer_progress::corrected);
    core.order.reached(detail::layer_progress::attended, layer);
    if (s.kind != layer_kind::retrieval) return;
    core.backend.recall().wait(core.backend.compute().record());
    core.stages().speculate(s, core.step);
    if (core.in_capture)
      core.recalls_in_capture = true;
    else
      core.recalled[to_size(layer)] = core.backend.recall().record();
  }

  /// Full attention of the step's rows, to measure what retrieval loses. Between `append` and the end of the
  /// step; changes nothing. Throws usage_error, or store_error where the file cannot be read.
  template <class Out = float>
  void attend_full(int layer, std::type_identity_t<std::span<Out>> out, std::span<float> lse = {},
                   std::int64_t out_stride = 0) {
    core_type& core = this->of("attend_full");
    const state& s = layer_in(core, layer, "attend_full", detail::layer_progress::appended,
                              detail::layer_progress::attended);
    const auto to = output(core, "attend_full", s, out, lse, out_stride);
    core.stages().attend_full(s, core.step, core.queries, to);
  }

  /// Ends the step. Every layer must have been appended to, and have attended its decode rows. In a capture
  /// the compute stream waits here for all recall: what the engine captures before overlaps the last layers'.
  /// Throws usage_error, and the step goes on.
  void end() {
    core_type& core = this->of("end");
    if (core.rows > 0) core.order.expect_all("end", core.any_decode());
    if constexpr (device_stages<typename core_type::stages_type>)
      if (core.in_capture) {
        if (core.recalls_in_capture) core.backend.compute().wait(core.backend.recall().record());
        core.stages().end_capture(core.step.bounds);
      }
    core.order.leave_step();
    core.in_capture = false;
    this->owner_ = nullptr;
  }

  using step_handle<core_type>::abandon;
  /// Takes one sequence out of the step and releases it, as when its part of the store's file cannot be read;
  /// the step goes on for the others. All rows stay where they are; outputs of those that are gone are not
  /// written. Waits for what is queued. Throws usage_error.
  void abandon(sequence_id id) {
    core_type& core = this->of("abandon");
    auto entry = core.entries.begin();
    while (entry != core.entries.end() && sequence_id{entry->sequence} != id) ++entry;
    if (entry == core.entries.end())
      throw usage_error("abandon: " + detail::name_of(id) + " has no rows in this step");
    core.wait_for_steps("abandon");
    core.entries.erase(entry);
    core.release(id);
    core.step = core.stages().begin_step(core.entries, true);
  }

 private:
  static const state& layer_in(core_type& core, int layer, const char* call, detail::layer_progress first,
                               detail::layer_progress last) {
    core.order.expect(layer, call, first, last);
    return core.memory->layers[to_size(layer)];
  }
  static detail::row_shape shape_of(const core_type& core, const state& s) {
    return {core.rows, s.heads, head_dim};
  }
  template <class Out>
  static detail::attention_output output(const core_type& core, const char* call, const state& s,
                                         std::span<Out> out, std::span<float> lse, std::int64_t stride) {
    core.order.expect_latest(s.layer, call, !core.queries.empty() || core.rows == 0);
    return detail::checked_output(out, stride, lse, nat_in(core.settings.attention.lse_base),
                                  shape_of(core, s));
  }
};

}  // namespace freekv
