// The backend of a retrieval pipeline, as a concept: its two streams, and the stages of a step.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/memory.hpp>
#include <freekv/storage/paged_tensor.hpp>
#include <span>

namespace freekv {

class host_backend;  // the one that a pipeline has unless it names another

/// Truncation of a sequence: it loses its last tokens.
struct truncation {
  int before = 0, tokens = 0;  ///< what it had and what it keeps
  bool keeps_selection = false;
  bool has_rows = false;  ///< those of the page that opens again are still there unencoded

  /// True where a page that was complete is open again.
  FREEKV_HD constexpr bool opens_page(int page_tokens) const {
    return tokens % page_tokens != 0 && before >= (tokens / page_tokens + 1) * page_tokens;
  }
  /// True where a layer's open page is to be read as it has been encoded.
  template <class State>
  FREEKV_HD bool reopens_page(const State& s) const {
    return s.encoded && opens_page(s.page.tokens) && !has_rows;
  }
  /// True where a layer's window slots lack pages: those that the lost tokens have overwritten in the ring,
  /// and an encoded one that is open again.
  template <class State>
  FREEKV_HD bool window_lacks_pages(const State& s) const {
    return s.keeps_slots &&
           ((s.encoded && opens_page(s.page.tokens)) ||
            s.slots.ring_begin(before, s.page.tokens) > s.slots.ring_begin(tokens, s.page.tokens));
  }
};

/// A stream of a backend: what is queued on it happens in order, and events order it against another stream.
template <class Stream, class Event>
concept backend_stream = requires(Stream stream, const Event& event) {
  { stream.record() } -> std::convertible_to<Event>;  // the point behind all that is queued
  stream.wait(event);                                 // what is queued from now on comes behind it
  stream.synchronize();                               // the caller waits for all that is queued
  { stream.is_capturing() } -> std::convertible_to<bool>;
  event.wait();  // the caller waits for it
};

/// Tables of a pipeline, as its memory is carved: where the host writes them, and where stages read them.
template <class T, class State>
concept pipeline_tables = requires(T& tables, State& layer, const float* logits, const std::int32_t* ids,
                                   detail::carver& slow, detail::carver& fast) {
  { T::memory_read_each_step(slow, fast) } -> std::same_as<detail::carver&>;  // a device's is fast
  { T::block_alignment } -> std::convertible_to<std::uintptr_t>;              // bytes, of an engine's tensor
  tables.page_tables.host[0] = tables.slot_sets.host[0];
  { T::template take<std::int32_t>(std::size_t{}, slow, fast).device } -> std::convertible_to<std::int32_t*>;
  { tables.take_layer_floats(logits, std::size_t{}, fast) } -> std::convertible_to<const float*>;
  { tables.take_block_ids(ids, std::size_t{}, slow, fast) } -> std::convertible_to<const std::int32_t*>;
  tables.take_arrays(layer, 1, T::template take<std::int32_t>(std::size_t{}, slow, fast),
                     T::template take<layer_kind>(std::size_t{}, slow, fast), slow, fast);
};

/// The stages of a retrieval pipeline, made of a backend, its settings and memory. Those of a step are asked
/// for all of its entries at once: append, correct, masses and attention are on the compute stream, speculate
/// on the recall stream of the backend that they are made of. Those that throw store_error may be called
/// again.
template <class T, class State>
concept retrieval_stages = requires(T& stages, const State& s, std::span<State> layers,
                                    std::span<const detail::step_entry> entries, const typename T::step& step,
                                    const typename T::tables& tables, const detail::step_rows<float>& rows,
                                    std::span<const paged_blocks<const float>> paged,
                                    const detail::step_queries& queries, const detail::attention_output& out,
                                    const detail::log_mass_output& masses, const truncation& to,
                                    const typename T::event& recalled, std::byte* bytes) {
  requires pipeline_tables<typename T::tables, State>;
  typename T::bounds;  // of a captured step
  // The host looks at what a layer has selected without waiting for a device; `report` says how many heads a
  // step has flagged.
  { T::selections_at_hand } -> std::convertible_to<bool>;
  { T::counts_flagged_heads } -> std::convertible_to<bool>;
  stages.begin(tables, layers);  // once, before any sequence

  // Between steps, behind what is queued; in all layers:
  stages.forget(0);                                // a sequence's selection and report
  stages.truncate(0, to);                          // it loses its last tokens
  stages.fork(0, 1, 100);                          // the second becomes what the first is, of so many tokens
  stages.restore(0, 100);                          // its slots are filled from the store
  stages.queue_copy(bytes, bytes, std::size_t{});  // between the store and the caller's memory
  // In a layer:
  stages.compact_slots(s, 0);  // what its selected slots hold moves to the lowest ones
  // The layer as the host can read it, until the next call:
  { stages.read_back(s) } -> std::convertible_to<const State&>;
  // Steps that are planned:
  { stages.steps_ahead() } -> std::convertible_to<std::int64_t>;  // of the device
  stages.wait_to_plan();                                          // until there is room for one more

  // In a step, whose view `begin_step` returns, where there is room; again where it `has_begun` and sequences
  // have left it:
  { stages.begin_step(entries, true) } -> std::same_as<typename T::step>;
  stages.append(s, step, rows);  // summarises pages it completes, and flags heads that have drifted
  stages.append_from(s, step, paged, recalled);  // prompts, from an engine's pages
  stages.correct(s, step);                       // flagged heads select, and recall what they miss
  stages.retry_correction_reads(s, step);        // what of that could not be read
  stages.log_masses(s, step, queries, masses);   // log-masses of what is attended to
  stages.attend(s, step, queries, out);
  stages.attend_full(s, step, queries, out);
  stages.speculate(s, step);  // all heads select for the next step, and recall
  { stages.staging_bytes() } -> std::convertible_to<std::size_t>;
};

/// A backend: streams, events of which one made by default has happened, and the stages of any pipeline,
/// which take their scratch from its slow and its fast memory.
template <class Backend, class State, class Settings>
concept retrieval_backend = requires(Backend& backend) {
  requires std::default_initializable<typename Backend::event>;
  requires std::constructible_from<typename Backend::template stages<State, Settings>, Backend&,
                                   const Settings&, detail::carver&, detail::carver&>;
  { backend.compute() } -> backend_stream<typename Backend::event>;
  { backend.recall() } -> backend_stream<typename Backend::event>;
}
&&retrieval_stages<typename Backend::template stages<State, Settings>, State>;

/// Stages of a device, which steps are captured for in a graph, and which write block tables to its memory.
/// `begin_step` of a captured step is in two halves: `capture_step` on the device, `plan_step` on the host.
template <class T>
concept device_stages = requires(T& stages, const T& seen, const typename T::bounds& most,
                                 std::span<const detail::step_entry> entries) {
  { stages.capture_step(most) } -> std::same_as<typename T::step>;
  stages.end_capture(most);
  { seen.captured_bounds(most) } -> std::same_as<typename T::bounds>;  // with what `most` leaves out
  { seen.is_captured(most) } -> std::convertible_to<bool>;             // a step so large
  { seen.can_plan() } -> std::convertible_to<bool>;
  stages.plan_step(entries);
};

}  // namespace freekv
