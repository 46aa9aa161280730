// The pipeline of methods that forget: no complete store, a fixed number of slots, and what leaves them is
// gone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/backend.hpp>
#include <freekv/pipeline/call_order.hpp>
#include <freekv/pipeline/eviction_backend.hpp>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/memory_bytes.hpp>
#include <freekv/pipeline/policy_pack.hpp>
#include <freekv/pipeline/row_arguments.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/pipeline/step_handle.hpp>
#include <freekv/pipeline/step_report.hpp>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace freekv {

/// KV-cache eviction for all layers of a model: `evicting_pipeline<kv_shape<bfloat16, 128>, h2o>`. Calls are
/// those of retrieval_pipeline, with which it can change places in an engine:
///
///     auto prompt = pipeline.begin_step({{sequence, 1000, step_phase::prefill}});  // chunks of any size
///     prompt.append<float>(layer, {.keys = keys, .values = values, .queries = queries});  // of every layer
///     prompt.end();
///     auto step = pipeline.begin_step({{sequence}});  // one decode row, as before, with attend
///
/// A prompt is exact: its rows attend to all of it up to themselves. It waits in a staging area for as many
/// prompts as `max_prefills` says, which all sequences use in turn, and leaves it in the first decode row's
/// `append`, cut to the budget; raas needs none where it keeps all of it. A policy that observes prompt rows
/// takes their queries with the keys, and computes their attention in `append`, whether or not it is asked
/// for. A sequence brings one decode row to a step, and no prompt rows after it.
///
/// A policy that observes a prompt's last rows may be given others behind them, of tokens that are not in the
/// text (`observe`).
///
/// A policy that cuts prompts block by block (`hook::blocks`) stages none: the prompt rows of a step are a
/// block, of at most as many tokens as the policy says, and what a head holds is cut to the budget before the
/// next. A block's rows attend to what was kept of the blocks before, and to their own up to themselves, so
/// that the first block alone is exact.
///
/// Forgotten tokens cannot come back: there is no truncate, preempt or prefix, and a fork copies what is
/// kept. Everything has happened when a call returns, steps allocate nothing, and calls out of order throw
/// usage_error and change nothing.
template <class Shape, class Eviction, class Backend = host_backend>
class evicting_pipeline {
  static_assert(sizeof(detail::checked_policy<Eviction>) > 0);
  static_assert(query_element<typename Shape::element_type>,
                "an evicting_pipeline keeps keys and values as float, half or bfloat16; fp8_e4m3 is for a "
                "retrieval_pipeline");
  static_assert(evicting_backend<Backend, Shape, eviction_settings<Eviction>>,
                "an evicting pipeline's backend has the stages of freekv/pipeline/eviction_backend.hpp");
  using state = detail::eviction_state<Shape>;

 public:
  using shape_type = Shape;
  using element = typename Shape::element_type;
  using backend_type = Backend;
  using settings = eviction_settings<Eviction>;
  static constexpr int head_dim = Shape::head_dim;

  /// Footprint of a pipeline with some settings: retrieval_pipeline's has the same bytes, and slots.
  class footprint {
   public:
    /// Allocates none of what it counts. Throws settings_error.
    footprint(const settings& given, Backend& backend) : settings_(checked_settings<head_dim>(given)) {
      const memory_plan counted(settings_, backend, nullptr, nullptr);
      bytes_ = counted.bytes;
      slow_bytes_ = counted.slow_bytes;
      fast_bytes_ = counted.fast_bytes;
    }
    const evicting_pipeline::settings& configuration() const { return settings_; }
    const memory_bytes& bytes() const { return bytes_; }
    std::size_t slow_bytes() const { return slow_bytes_; }
    std::size_t fast_bytes() const { return fast_bytes_; }

   private:
    evicting_pipeline::settings settings_;
    memory_bytes bytes_;
    std::size_t slow_bytes_ = 0, fast_bytes_ = 0;
  };

  /// Takes all its memory from `memory` at once: from `slow` complete layers alone. `backend` must outlive
  /// the pipeline, and is the footprint's.
  evicting_pipeline(const footprint& needs, Backend& backend, const memory_resources& memory = {})
      : settings_(needs.configuration()),
        records_(to_size(settings_.capacity.max_sequences)),
        block_(block_of(settings_)),
        order_(settings_.model.layers),
        slow_memory_(*memory.slow, needs.slow_bytes()),
        fast_memory_(*memory.fast, needs.fast_bytes()) {
    memory_.emplace(settings_, backend, slow_memory_.data(), fast_memory_.data());
    std::fill_n(memory_->no_flags, settings_.model.kv_heads, std::uint8_t{0});
    std::fill_n(memory_->no_counts, settings_.model.kv_heads, 0);
    entries_.reserve(to_size(settings_.capacity.max_sequences));
    for (int staging = settings_.capacity.max_prefills; staging-- > 0;) free_stagings_.push_back(staging);
  }
  /// A pipeline from settings whose footprint nobody has asked for. Throws settings_error.
  evicting_pipeline(const settings& given, Backend& backend, const memory_resources& memory = {})
      : evicting_pipeline(footprint(given, backend), backend, memory) {}
  evicting_pipeline(const evicting_pipeline&) = delete;
  evicting_pipeline& operator=(const evicting_pipeline&) = delete;

  const settings& configuration() const { return settings_; }
  /// "h2o(0.5), budget 512, complete_first(1), f16".
  std::string name() const {
    return detail::printed(settings_.eviction) + ", budget " + std::to_string(settings_.budget) + ", " +
           detail::printed(settings_.plan) + ", " + std::string(element_name<element>);
  }
  const memory_bytes& bytes() const { return memory_->bytes; }
  /// Bytes of the unit that leaves: one KV head's keys and values of a token, or of a page.
  std::size_t slice_bytes() const {
    return std::size_t{2} * head_dim * sizeof(element) * to_size(memory_->layers.back().unit_tokens);
  }

  /// A new, empty sequence. Throws pool_exhausted, or usage_error in a step.
  sequence_id open() {
    order_.expect_outside_step("open");
    const int sequence = detail::free_record(records_, "a new sequence");
    records_[to_size(sequence)] = {.open = true};
    for (const state& layer : memory_->layers) memory_->stages.forget(layer, sequence);
    return sequence_id{sequence};
  }
  /// A new sequence that has all that `parent` has: what it keeps and knows of it, and of a prompt that has
  /// not been cut yet all of it. Copies that, so that neither has a part in what becomes of the other; before
  /// the first decode row a staged prompt takes a staging of its own, and behind it a fork copies the budget
  /// alone. Throws pool_exhausted, or usage_error.
  sequence_id fork(sequence_id parent) {
    order_.expect_outside_step("fork");
    known(parent);
    const sequence_id made{detail::free_record(records_, "a fork")};
    const record& of_parent = records_[to_size(parent)];
    if (of_parent.staging >= 0 && free_stagings_.empty()) throw no_staging("a fork", 1);
    record& of_made = records_[to_size(made)];
    of_made = of_parent;
    if (of_parent.staging >= 0) of_made.staging = taken_staging();
    for (const state& layer : memory_->layers)
      memory_->stages.fork(layer, entry_behind(parent, 0), entry_behind(made, 0));
    return made;
  }
  /// Ends a sequence. Throws usage_error.
  void release(sequence_id id) {
    order_.expect_outside_step("release");
    known(id);
    record& r = records_[to_size(id)];
    if (r.staging >= 0) free_stagings_.push_back(r.staging);
    r = {};
  }
  /// Bytes of keys and values that a sequence has in layers that forget, coded tokens by their own size; 0
  /// before a staged prompt has ended, and all of a prompt's last block until it is cut. Throws usage_error.
  std::size_t kept_bytes(sequence_id id) const {
    known(id);
    const auto sequence = static_cast<int>(id);
    std::size_t bytes = 0;
    for (const state& s : memory_->layers)
      for (int head = 0; !s.complete && head < s.heads.kv; ++head) {
        const int coded = s.coded_of(sequence, head);
        bytes += to_size(s.tokens[s.head_index(sequence, head)] - coded) * 2 * head_dim * sizeof(element) +
                 to_size(coded) * s.code_bytes;
      }
    return bytes;
  }
  /// Most prompt rows that a sequence brings to a step: of a policy that cuts prompts block by block the
  /// smallest block of its layers, else max_prompt.
  int most_prompt_rows() const {
    return block_ > 0 ? std::min(block_, settings_.capacity.max_prompt) : settings_.capacity.max_prompt;
  }
  /// Length of a sequence, the rows of a step in progress included, whatever is kept of it.
  int tokens(sequence_id id) const { return known(id).tokens; }

  /// Probe rows of a layer: queries (rows, query_heads, head_dim) of float, half or bfloat16, that observe a
  /// sequence's prompt and leave no keys and values, as those of pseudo tokens that the engine has run behind
  /// it. They count as the rows behind the prompt's last, and attend to all of the prompt: when it is cut, a
  /// policy's last `observed_rows()` rows are these and, where there are fewer, the prompt's before. What
  /// the policy protects of the prompt stays protected. Then they are forgotten: a policy that observes
  /// decode rows too sees these, and of the prompt's rows those whose places the probes have not taken. To be
  /// called once for each layer, when the prompt has been appended and before the first decode row, outside
  /// of a step; a layer that is given none goes by the prompt's rows, and one that keeps everything takes no
  /// notice. Where a policy cuts prompts block by block, each block may have probe rows of its own, behind
  /// it. Throws usage_error, also where the policy observes no prompt row, or all of them as they are
  /// appended.
  template <class Query = float>
  void observe(sequence_id id, int layer, std::type_identity_t<std::span<const Query>> queries) {
    static_assert(query_element<Query>, "observe takes queries of float, half or bfloat16");
    order_.expect_outside_step("observe");
    order_.expect_layer(layer, "observe");
    known(id);
    const state& s = memory_->layers[to_size(layer)];
    const int observed = checked_observer(), rows = checked_rows_behind("observe", id, layer, queries.size());
    if (!s.complete && s.probes[static_cast<int>(id)] > 0)
      throw usage_error("observe: " + detail::name_of(id) + " has probe rows in layer " +
                        std::to_string(layer) + " already; give all of them at once");
    record& sequence = records_[to_size(static_cast<int>(id))];
    sequence.probed = block_ == 0;
    if (s.complete) return;
    const int last = std::min(rows, observed);
    detail::eviction_entry entry = entry_behind(id, last);
    entry.first_row = rows - last;
    memory_->stages.probe(s, entry, {queries.data(), s.heads.query * head_dim, type_of_element<Query>});
  }
  /// Attention of rows behind a sequence's prompt, or its last block, to what each KV head has of it: for an
  /// engine that runs probe rows, whose keys and values are nowhere here, and which adds what they attend to
  /// among themselves by the log-sum-exps. `queries` and `out` are (rows, query_heads, head_dim), `lse`
  /// (rows, query_heads), in the settings' base, or empty. Changes nothing. Outside of a step, and before the
  /// first decode row; of any policy. Throws usage_error.
  template <class Out = float, class Query = float>
  void attend_behind(sequence_id id, int layer, std::type_identity_t<std::span<const Query>> queries,
                     std::type_identity_t<std::span<Out>> out, std::span<float> lse = {}) {
    static_assert(query_element<Query>, "attend_behind takes queries of float, half or bfloat16");
    order_.expect_outside_step("attend_behind");
    order_.expect_layer(layer, "attend_behind");
    known(id);
    const state& s = memory_->layers[to_size(layer)];
    const int rows = checked_rows_behind("attend_behind", id, layer, queries.size());
    const auto to =
        detail::checked_output(out, 0, lse, nat_in(settings_.attention.lse_base), {rows, s.heads, head_dim});
    memory_->stages.attend(s, entry_behind(id, rows),
                           {queries.data(), s.heads.query * head_dim, type_of_element<Query>}, to);
  }

  /// Step of this pipeline: retrieval_step has the same calls.
  class step : public step_handle<evicting_pipeline> {
   public:
    step() = default;

    /// Appends the step's rows to a layer: keys and values (rows, kv_heads, head_dim) of the stored element
    /// type, or float to be rounded; queries (rows, query_heads, head_dim) of float, half or bfloat16, which
    /// may be missing where all rows are prompt, none attends and the policy observes none. Rows may be parts
    /// of others, by `strides`, and there may be room for more of them. A layer that forgets needs `worths`,
    /// where the policy takes them. Throws usage_error.
    template <class In = element, class Query = float>
    void append(int layer, const kv_rows<In, Query>& rows) {
      static_assert(std::is_same_v<In, element> || std::is_same_v<In, float>,
                    "append takes keys and values of the stored element type, or float");
      evicting_pipeline& p = this->of("append");
      p.order_.expect(layer, "append", detail::layer_progress::waiting, detail::layer_progress::waiting);
      const state& s = p.memory_->layers[to_size(layer)];
      const auto given = detail::checked_rows(rows, {p.rows_, s.heads, head_dim}, p.any_decode());
      if (!rows.selecting.empty()) detail::refuse_selecting("an evicting_pipeline", "selects nothing");
      const policy_needs needs = p.needs();
      if (rows.queries.empty() && p.rows_ > 0 && !s.complete && needs.prompt_queries && !p.any_decode())
        throw usage_error("append: " + detail::printed(p.settings_.eviction) +
                          " observes prompt rows; give their queries with the keys");
      const float* const worths = p.checked_worths(s, rows.worths, needs.worths);
      for (const detail::eviction_entry& entry : p.entries_)
        p.memory_->stages.append(s, entry, given, worths);
      p.queries_ = given.queries;
      p.order_.reached(detail::layer_progress::appended, layer);
    }
    /// Attention of the step's rows: `out` (rows, query_heads, head_dim), of float, or by `attend<half>` of
    /// half, or bfloat16; rows are `out_stride` elements apart, or with 0 one behind the other. `lse`: (rows,
    /// query_heads), in the settings' base, or empty. A decode row attends to what its heads have kept and to
    /// itself; then the policy counts what each unit had and units leave. Throws usage_error.
    template <class Out = float>
    void attend(int layer, std::type_identity_t<std::span<Out>> out, std::span<float> lse = {},
                std::int64_t out_stride = 0) {
      evicting_pipeline& p = this->of("attend");
      p.order_.expect(layer, "attend", detail::layer_progress::appended, detail::layer_progress::appended);
      const state& s = p.memory_->layers[to_size(layer)];
      p.order_.expect_latest(layer, "attend", !p.queries_.empty() || p.rows_ == 0);
      const auto to = detail::checked_output(out, out_stride, lse, nat_in(p.settings_.attention.lse_base),
                                             {p.rows_, s.heads, head_dim});
      for (const detail::eviction_entry& entry : p.entries_)
        p.memory_->stages.attend(s, entry, p.queries_, to);
      p.order_.reached(detail::layer_progress::attended, layer);
    }
    /// Ends the step. Every layer must have been appended to, and have attended its decode rows. Throws
    /// usage_error.
    void end() {
      evicting_pipeline& p = this->of("end");
      if (p.rows_ > 0) p.order_.expect_all("end", p.any_decode());
      p.order_.leave_step();
      for (const detail::eviction_entry& entry : p.entries_)
        if (entry.ends_prompt && entry.staging >= 0)
          p.free_stagings_.push_back(std::exchange(p.records_[to_size(entry.sequence)].staging, -1));
      this->owner_ = nullptr;
    }

   private:
    friend evicting_pipeline;
    explicit step(evicting_pipeline& pipeline) : step_handle<evicting_pipeline>(pipeline) {}
  };

  /// Starts a step to which the listed sequences bring rows: prompt rows in chunks of any size, of a policy
  /// that cuts blocks at most `most_prompt_rows()`, or one decode row each. Throws pool_exhausted where a
  /// sequence would be longer than the settings say, or no staging is free for its prompt; usage_error for
  /// sequences that are unknown or listed twice, more than one decode row, a longer block, and prompt rows
  /// after decode rows.
  [[nodiscard("a step that is not kept is abandoned at once")]] step begin_step(
      std::span<const step_input> rows) {
    order_.expect_outside_step("begin_step");
    long stagings = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      check_rows(rows, i);
      stagings += needs_staging(rows[i]);
    }
    if (stagings > static_cast<long>(free_stagings_.size())) throw no_staging("the step", stagings);
    entries_.clear();
    rows_ = 0;
    for (const step_input& r : rows)
      if (r.tokens > 0) entries_.push_back(entry_of(r));
    for (const detail::eviction_entry& entry : entries_)
      if (entry.ends_prompt) memory_->stages.allocate(memory_->layers, entry);
    order_.begin_step();
    return step(*this);
  }
  [[nodiscard("a step that is not kept is abandoned at once")]] step begin_step(
      std::initializer_list<step_input> rows) {
    return begin_step(std::span(rows.begin(), rows.size()));
  }

  /// Nothing is ever queued.
  void synchronize() {}

  /// Reports of a layer's last decode row, by sequence, or of the last row of a block, where a policy cuts
  /// prompts block by block.
  class reports {
   public:
    reports(const evicting_pipeline& of, const state& layer) : of_(&of), layer_(&layer) {}
    /// Report of what a sequence's row attended to: `attended` (kv_heads, units of a head) has in each head's
    /// first `attended_count` places the numbers of tokens, or of pages of unit_tokens() tokens, ascending;
    /// of a complete layer nothing. What there is besides in other reports is 0. Sorts on every call. Valid
    /// until the layer's next attend, or the sequence's release. Throws usage_error.
    step_report operator[](sequence_id id) const {
      of_->known(id);
      const state& s = *layer_;
      const auto sequence = static_cast<int>(id);
      const std::size_t heads = to_size(s.heads.kv), first = s.head_index(sequence, 0);
      for (int head = 0; !s.complete && head < s.heads.kv; ++head) {
        std::int32_t* const units = s.attended + s.unit_index(sequence, head);
        std::sort(units, units + s.attended_count[first + to_size(head)]);
        if (s.coded == nullptr) continue;
        std::int32_t* const coded = s.attended_coded + s.unit_index(sequence, head);
        std::sort(coded, coded + s.attended_coded_count[first + to_size(head)]);
      }
      const bool codes = s.coded != nullptr;
      const std::span<const std::int32_t> none(of_->memory_->no_counts, heads);
      return {.corrected = {of_->memory_->no_flags, heads},
              .recalled = none,
              .recalled_before_attention = none,
              .promoted = none,
              .attended = {s.complete ? nullptr : s.attended + s.unit_index(sequence, 0),
                           s.complete ? 0 : to_size(s.units) * heads},
              .attended_count = {s.attended_count + first, heads},
              .coded = {codes ? s.attended_coded + s.unit_index(sequence, 0) : nullptr,
                        codes ? to_size(s.units) * heads : 0},
              .coded_count = {codes ? s.attended_coded_count + first : nullptr, codes ? heads : 0}};
    }

   private:
    const evicting_pipeline* of_;
    const state* layer_;
  };
  /// Reports of a layer's last step: `report(layer)[sequence]`. Throws usage_error.
  reports report(int layer) const {
    order_.expect_layer(layer, "report");
    return {*this, memory_->layers[to_size(layer)]};
  }

 private:
  using stages = typename Backend::template eviction_stages<Shape, settings>;
  using memory_plan = detail::eviction_memory<Shape, Eviction, stages>;
  friend class step_handle<evicting_pipeline>;
  struct record {
    bool open = false;
    bool decodes = false;
    int tokens = 0;
    int prompt = 0;
    int block = 0;  // first token of its last block
    int staging = -1;
    bool probed = false;  // by rows behind its prompt
  };

  const record& known(sequence_id id) const { return detail::open_record(records_, id); }
  pool_exhausted no_staging(const char* wanted_for, long stagings) const {
    return pool_exhausted(
        "prompt stagings", settings_.capacity.max_prefills,
        settings_.capacity.max_prefills - static_cast<long>(free_stagings_.size()), wanted_for, stagings,
        "let a prompted sequence decode, release one or raise max_prefills in the settings");
  }
  /// One of the free ones.
  int taken_staging() {
    const int staging = free_stagings_.back();
    free_stagings_.pop_back();
    return staging;
  }
  bool any_decode() const {
    return std::any_of(entries_.begin(), entries_.end(), [](const auto& e) { return e.decodes; });
  }
  /// Needs of the policy.
  struct policy_needs {
    bool staging, prompt_queries, worths;
  };
  policy_needs needs() const {
    return resolve(settings_.eviction, []<class E>(const E& e) -> policy_needs {
      return {e.stages_prompt(), e.observed_rows() > 0, takes_worths<E>};
    });
  }
  /// Most prompt rows of a block; 0 where the policy cuts none.
  static int block_of(const settings& s) {
    return resolve(s.eviction, [&]<class E>([[maybe_unused]] const E& eviction) {
      int block = 0;
      if constexpr (cuts_blocks<E>) {
        block = every_token;
        for (int layer = s.complete_layers(); layer < s.model.layers; ++layer)
          block = std::min(block, eviction.block(s.limits(layer)));
      }
      return block;
    });
  }
  /// Rows of queries, of so many numbers, that are behind a sequence's prompt. Throws usage_error.
  int checked_rows_behind(const char* call, sequence_id id, int layer, std::size_t numbers) const {
    const record& sequence = known(id);
    const std::size_t row = to_size(settings_.model.query_heads * head_dim);
    const auto refuse = [&](const std::string& what) {
      throw usage_error(std::string(call) + ": " + detail::name_of(id) + what);
    };
    if (numbers == 0 || numbers % row != 0)
      refuse(" is given " + std::to_string(numbers) + " numbers of queries for layer " +
             std::to_string(layer) + "; give one or more rows of " + std::to_string(row));
    if (sequence.decodes) refuse(" has decoded, and its prompt is cut; give probe rows before");
    if (sequence.prompt == 0) refuse(" has no prompt yet; give it before its probe rows");
    return static_cast<int>(numbers / row);
  }
  detail::eviction_entry entry_behind(sequence_id id, int rows) const {
    const record& sequence = known(id);
    return {.sequence = static_cast<int>(id),
            .staging = sequence.staging,
            .before = sequence.prompt,
            .tokens = rows,
            .prompt = sequence.prompt,
            .behind = true};
  }
  /// Rows that the policy observes when a prompt is cut, where these can be others than the prompt's. Throws
  /// usage_error.
  int checked_observer() const {
    const int rows = resolve(settings_.eviction, [](const auto& e) { return e.observed_rows(); });
    if (rows > 0 && rows != every_prompt_row) return rows;
    throw usage_error("observe: " + detail::printed(settings_.eviction) +
                      (rows == 0 ? " observes no rows of a prompt"
                                 : " observes all rows of a prompt as they are appended") +
                      "; take a policy that observes the last ones when it is cut, as dapq");
  }
  /// Worths of the step's rows as stages take them; null where the policy takes none, or the layer forgets
  /// nothing and there are none. Throws usage_error.
  const float* checked_worths(const state& s, std::span<const float> given, bool takes) const {
    if (given.empty() && (!takes || s.complete)) return nullptr;
    if (!takes) detail::refuse_worths(detail::printed(settings_.eviction), given.size());
    const std::size_t needed = to_size(rows_) * to_size(s.heads.kv);
    if (given.size() < needed)
      throw usage_error("append: worths: " + std::to_string(given.size()) + " numbers for " +
                        std::to_string(rows_) + " rows of " + std::to_string(s.heads.kv) + "; " +
                        detail::printed(settings_.eviction) +
                        " takes one for each row and KV head, so give " + std::to_string(needed));
    return given.data();
  }
  bool needs_staging(const step_input& r) const {
    const record& sequence = known(r.sequence);
    return r.phase == step_phase::prefill && r.tokens > 0 && sequence.staging < 0 && needs().staging;
  }
  void check_rows(std::span<const step_input> rows, std::size_t i) const {
    const step_input& r = rows[i];
    const record& sequence = known(r.sequence);
    detail::expect_listed_once(rows, i);
    const bool decodes = r.phase == step_phase::decode;
    if (r.tokens < 0 || (decodes && r.tokens > 1))
      throw usage_error(
          detail::name_of(r.sequence) + " brings " + std::to_string(r.tokens) +
          (decodes ? " decode rows; where tokens are forgotten a step takes one" : " prompt rows"));
    if (!decodes && r.tokens > 0 && sequence.decodes)
      throw usage_error(
          detail::name_of(r.sequence) +
          " has decoded and forgotten tokens, which prompt rows would attend to; open another sequence");
    if (!decodes && r.tokens > 0 && sequence.probed)
      throw usage_error(detail::name_of(r.sequence) +
                        " has been given probe rows, which are behind its prompt; give all of the prompt "
                        "before, or open another sequence");
    if (!decodes && block_ > 0 && r.tokens > block_)
      throw usage_error(detail::name_of(r.sequence) + " brings " + std::to_string(r.tokens) +
                        " prompt rows, and " + detail::printed(settings_.eviction) + " cuts blocks of " +
                        std::to_string(block_) + "; append the prompt in steps of at most so many");
    const int has = decodes ? sequence.tokens - sequence.prompt : sequence.prompt;
    const int most = decodes ? settings_.capacity.max_generated : settings_.capacity.max_prompt;
    if (r.tokens > most - has)
      throw pool_exhausted(
          (decodes ? "decoded tokens of " : "prompt tokens of ") + detail::name_of(r.sequence), most, has,
          "the step", r.tokens,
          decodes ? "raise capacity.max_generated in the settings"
                  : "raise capacity.max_prompt in the settings");
  }
  detail::eviction_entry entry_of(const step_input& r) {
    record& sequence = records_[to_size(static_cast<int>(r.sequence))];
    if (needs_staging(r)) sequence.staging = taken_staging();
    detail::eviction_entry entry{.sequence = static_cast<int>(r.sequence),
                                 .staging = sequence.staging,
                                 .before = sequence.tokens,
                                 .tokens = r.tokens,
                                 .first_row = rows_,
                                 .decodes = r.phase == step_phase::decode};
    if (block_ > 0) entry.block = sequence.block;
    if (!entry.decodes) sequence.prompt += r.tokens, sequence.block = sequence.tokens;
    entry.prompt = sequence.prompt;
    entry.ends_prompt = entry.decodes && !sequence.decodes;
    sequence.decodes = entry.decodes;
    sequence.tokens += r.tokens;
    rows_ += r.tokens;
    return entry;
  }

  void abandon_step() noexcept {
    order_.leave_step();
    for (const detail::eviction_entry& entry : entries_) release(sequence_id{entry.sequence});
  }

  settings settings_;
  std::vector<record> records_;
  std::vector<int> free_stagings_;
  int block_;
  detail::call_order order_;
  detail::memory_block slow_memory_, fast_memory_;
  std::optional<memory_plan> memory_;
  std::vector<detail::eviction_entry> entries_;
  detail::step_queries queries_;  // of the layer appended to last
  int rows_ = 0;
};

}  // namespace freekv
