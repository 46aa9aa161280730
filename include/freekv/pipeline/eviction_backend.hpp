// The backend of an evicting pipeline, as a concept: the stages of a step.
#pragma once

#include <concepts>
#include <freekv/pipeline/eviction_state.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/storage/memory.hpp>
#include <vector>

namespace freekv {

/// The stages of an evicting pipeline on one entry of a step. Each has happened when it returns.
template <class T, class State>
concept evicting_stages = requires(T& stages, const std::vector<State>& layers, const State& s,
                                   const detail::eviction_entry& entry, const detail::step_rows<float>& rows,
                                   const float* worths, const detail::step_queries& queries,
                                   const detail::attention_output& out) {
  stages.allocate(layers, entry);         // when a prompt ends, before any layer is cut: budgets of its heads
  // Cuts a prompt that has ended, or a block of it, to its heads' budgets; worths are the step's, (rows,
  // kv_heads), or null.
  stages.append(s, entry, rows, worths);
  stages.probe(s, entry, queries);        // rows behind a prompt, which observe it when it is cut
  stages.attend(s, entry, queries, out);  // and what a decode row makes leave goes
  stages.forget(s, 0);                    // a sequence is empty
  stages.fork(s, entry, entry);           // the second entry's sequence becomes what the first's is
};

/// A backend that evicts: its `eviction_stages` take scratch from fast memory.
template <class Backend, class Shape, class Settings>
concept evicting_backend = requires {
  typename Backend::template eviction_stages<Shape, Settings>;
  requires std::constructible_from<typename Backend::template eviction_stages<Shape, Settings>, Backend&,
                                   const Settings&, detail::carver&>;
  requires evicting_stages<typename Backend::template eviction_stages<Shape, Settings>,
                           detail::eviction_state<Shape>>;
};

}  // namespace freekv
