// Scratch of one host thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/algorithms/attend_slice.hpp>
#include <freekv/core/log_sum_exp.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/settings.hpp>
#include <freekv/storage/memory.hpp>
#include <type_traits>

namespace freekv::host {

/// Sizes that scratch depends on.
struct workspace_sizes {
  int kv_heads = 0, group = 0, decode_rows = 1, head_dim = 0, page_tokens = 0, unit_tokens = 0;
  int summary_width = 0, query_width = 0;            // numbers of a decoded summary, of a prepared query
  int attention_floats = 0;                          // scratch of attend_slice
  int max_pages = 0, max_units = 0;                  // of one sequence
  int selected_units = 0;                            // of one KV head
  int entries_within = 0;                            // of a KV head's list of what it keeps
  int pooled_heads = 0;                              // KV heads that select together, if any
  std::size_t gathered_bytes = 0;                    // of keys and values of small units, if any
  std::size_t slice_bytes = 0, slice_alignment = 1;  // of encoded pages, if any
  std::size_t decoded_bytes = 0;                     // of a page and KV head that was encoded
  int shared_floats = 0;                             // of a codec
  bool completes = false;                            // attention, by pages' values
  bool judges_shares = false;                        // of all attention, in a correction
  bool draws = false;                                // candidates, in a correction
  int observed_rows = 0;                             // of a prompt, that weigh pages then

  /// Entries that a KV head attends to at most.
  int most_entries() const { return unit_tokens == page_tokens ? max_pages : max_pages + selected_units; }
  /// Scores of `candidates` candidates, rounded up to whole packs of any team.
  static constexpr std::int64_t padded(int candidates) { return (std::int64_t{candidates} + 15) / 16 * 16; }
};

/// Tokens of small units that are attended to together at most.
template <int HeadDim>
inline constexpr int gathered_tokens = freekv::detail::attention_block<HeadDim>;

/// Sizes for a pipeline of layers like `State` with these settings.
template <class State, class Settings>
workspace_sizes workspace_sizes_of(const Settings& s) {
  constexpr int head_dim = State::head_dim;
  using element = typename State::element;
  workspace_sizes sizes{.kv_heads = s.model.kv_heads,
                        .group = s.model.group(),
                        .decode_rows = s.capacity.max_decode_rows,
                        .head_dim = head_dim,
                        .page_tokens = s.page.tokens,
                        .unit_tokens = s.unit_tokens(),
                        .attention_floats = attention_scratch<head_dim>,
                        .max_pages = s.max_pages(),
                        .max_units = s.max_units()};
  if (s.unit_tokens() < s.page.tokens && 2 * s.unit_tokens() <= gathered_tokens<head_dim>)
    sizes.gathered_bytes = to_size(2 * gathered_tokens<head_dim> * head_dim) * sizeof(element);
  if (s.encodes()) {
    sizes.slice_bytes = stored_slice_bytes<element, head_dim>(s);
    if (s.capacity.store_file) sizes.slice_alignment = s.capacity.store_file->alignment();
    sizes.decoded_bytes = to_size(2 * s.page.tokens * head_dim) * sizeof(element);
    sizes.shared_floats = resolve(s.codec, [&](const auto& codec) {
      return shared_floats(codec, kv_extent{s.page.tokens, head_dim});
    });
  }
  resolve(s.summary, [&](const auto& summary) {
    sizes.summary_width = summary.width({s.unit_tokens(), head_dim});
    sizes.query_width = summary_query_width(summary, head_dim);
  });
  for (int layer = 0; layer < s.model.layers; ++layer) {
    sizes.selected_units = std::max(sizes.selected_units, s.max_selected(layer));
    sizes.entries_within = std::max(sizes.entries_within, s.entries_within(layer));
  }
  if constexpr (freekv::detail::may_complete<Settings>)
    resolve(s.completion, [&]<class Completion>(const Completion& completion) {
      if constexpr (Completion::completes) {
        sizes.completes = true;
        sizes.observed_rows = completion.prompt_rows;
      }
    });
  if constexpr (freekv::detail::may_judge_shares<std::remove_cvref_t<decltype(s.correction)>>)
    sizes.judges_shares = resolve(s.correction, []<class Correction>(const Correction&) {
      return hooks_of<Correction>::has(hook::of_attention);
    });
  sizes.draws = freekv::detail::verifies(s);
  if (s.selects_by() == selection_scope::layer) sizes.pooled_heads = s.model.kv_heads;
  return sizes;
}

/// Slices that are read at a time.
inline constexpr int most_staged = 16;

/// One thread's scratch. Scoring heads are those of a group in all rows of a decode step.
struct workspace {
  float* rows = nullptr;          // attend_slice's scratch, or a page's keys being summarised
  float* numbers = nullptr;       // a decoded summary
  float* query = nullptr;         // (group, head_dim) scaled, or prepared queries of the scoring heads
  float* pooled_query = nullptr;  // (head_dim)
  log_sum_exp* part_log_sum = nullptr;  // (2, group): two attention parts
  float* weighted = nullptr;      // (2, group, head_dim)
  float* scores = nullptr;        // (scoring heads, padded candidates)
  float* pooled = nullptr;        // (padded candidates)
  float* log_sums = nullptr;      // (scoring heads, or KV heads that select together)
  std::uint64_t* keys = nullptr;  // (candidates)
  std::int32_t* units = nullptr;  // (K)
  std::byte* gathered = nullptr;  // (2, gathered_tokens, head_dim) elements, or null
  std::byte* encoded = nullptr;   // (most_staged or kv heads, slice_bytes)
  std::byte* decoded = nullptr;   // (most_staged, 2, page tokens, head_dim) elements
  float* shared = nullptr;        // (shared_floats)
  // Where attention is completed:
  float* page_value = nullptr;             // (2, head_dim)
  float* unselected = nullptr;             // (group, 1 + max_pages): unselected_masses
  log_sum_exp* entry_log_sum = nullptr;    // (group): attention to one page
  float* entry_weighted = nullptr;         // (group, head_dim)
  float* observed_queries = nullptr;       // (observed rows, group, head_dim) scaled
  log_sum_exp* observed_totals = nullptr;  // (observed rows, group): attention to everything
  // Where a correction judges shares of all attention:
  float* sharing_query = nullptr;        // (group, head_dim) scaled
  log_sum_exp* attention_sum = nullptr;  // (scoring heads): all attention, as far as it is known
  float* draw_weights = nullptr;         // (padded candidates), where a correction draws

  static workspace carve(carver& memory, const workspace_sizes& s) {
    const int scoring_heads = s.group * s.decode_rows;
    workspace w;
    w.rows = memory.take<float>(to_size(std::max(s.attention_floats, s.page_tokens * s.head_dim)));
    w.numbers = memory.take<float>(to_size(s.summary_width));
    w.query = memory.take<float>(
        to_size(std::max(s.group * s.head_dim, prepared_queries::floats(scoring_heads, s.query_width))));
    w.pooled_query = memory.take<float>(to_size(s.head_dim));
    w.part_log_sum = memory.take<log_sum_exp>(to_size(2 * s.group));
    w.weighted = memory.take<float>(to_size(2 * s.group * s.head_dim));
    w.scores = memory.take<float>(to_size(scoring_heads * s.padded(s.max_units)));
    w.pooled = memory.take<float>(to_size(s.padded(s.max_units)));
    w.log_sums = memory.take<float>(to_size(std::max(scoring_heads, s.pooled_heads)));
    w.keys = memory.take<std::uint64_t>(to_size(s.max_units));
    w.units = memory.take<std::int32_t>(to_size(s.selected_units));
    if (s.gathered_bytes > 0) w.gathered = memory.take<std::byte>(s.gathered_bytes);
    w.encoded =
        memory.take_aligned(s.slice_bytes * to_size(std::max(most_staged, s.kv_heads)), s.slice_alignment);
    w.decoded = memory.take<std::byte>(s.decoded_bytes * to_size(most_staged));
    w.shared = memory.take<float>(to_size(s.shared_floats));
    const int completed = s.completes ? s.group : 0, observed = completed * s.observed_rows;
    w.page_value = memory.take<float>(to_size(s.completes ? 2 * s.head_dim : 0));
    w.unselected = memory.take<float>(to_size(completed) * to_size(1 + s.max_pages));
    w.entry_log_sum = memory.take<log_sum_exp>(to_size(completed));
    w.entry_weighted = memory.take<float>(to_size(completed * s.head_dim));
    w.observed_queries = memory.take<float>(to_size(observed * s.head_dim));
    w.observed_totals = memory.take<log_sum_exp>(to_size(observed));
    w.sharing_query = memory.take<float>(to_size(s.judges_shares ? s.group * s.head_dim : 0));
    w.attention_sum = memory.take<log_sum_exp>(to_size(s.judges_shares ? scoring_heads : 0));
    w.draw_weights = memory.take<float>(to_size(s.draws ? s.padded(s.max_units) : 0));
    return w;
  }
};

}  // namespace freekv::host
