// Who is compared: a method, its name in the tables, and the pipeline that it becomes on a prompt.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "prompt.hpp"

namespace freekv::examples {

/// Whose keys the basis of key_subspace or the codebooks of key_codes are learnt from.
enum class basis_source { none, prompt, other_text };

/// Behind the name of a row whose layers differ, which stands beside the row of that name without it.
inline constexpr std::string_view row_by_layer = ", by layer";

/// A row of the tables.
struct contender {
  std::string name;
  method_spec method;
  basis_source basis = basis_source::none;
  int page = 0;                          ///< tokens; 0: the common one
  double budget_share = 1;               ///< of the common budget
  int more_pages = 0;                    ///< beside it
  bool by_layer_before = false;          ///< corrected and selecting by the queries of the layer before
  bool deep = false;                     ///< shown by --full alone, and not swept
  std::vector<layer_kind> head_kinds{};  ///< of a method that needs_head_list()
  std::vector<std::uint8_t> voters{};    ///< of a method that takes_voters(); none: all
  std::vector<layer_values> by_layer{};  ///< (layers), of a row by layer, for a budget of
  int budget_by_layer = 0;               ///< so many tokens

  bool learns() const { return method.needs_basis() || method.needs_codebooks() || method.needs_factors(); }
  /// May layers have budgets of their own, of which the mean is the common one?
  bool may_differ_by_layer() const {
    return method.plan == "retrieval" && method.pinning == "no_pins" && budget_share == 1;
  }
  bool keeps_everything() const { return method.plan == "complete"; }
  /// Is it a true_mass_of()?
  bool selects_by_true_mass() const {
    return method.summary == "chunk_means" && method.chunk == 1 && method.correction == "always";
  }
  /// Has it heads whose pages are chosen?
  bool selects() const {
    return method.plan == "retrieval" ||
           std::find(head_kinds.begin(), head_kinds.end(), layer_kind::retrieval) != head_kinds.end();
  }
};

/// What summaries only estimate: units of `unit` tokens, 0: pages, selected before each attention by the mass
/// of their tokens, each of which is a chunk of its own; `more_pages` than the common budget has.
contender true_mass_of(int unit, int more_pages = 0);

/// What all contenders share.
struct common_settings {
  int page = 32, sink = 64, window = 128;
  int budget = 512;         ///< tokens a head attends to: sink, window and selected pages
  int complete_layers = 1;  ///< leading layers that keep everything
  int threads = 2;
  bool overlap = false;  ///< speculate on a thread of its own
};

/// Does the budget leave the contender a page to select, is it that of its layers' budgets, and is all else
/// in whole pages?
bool fits(const contender& c, const common_settings& s);

/// What was learnt from the keys of one text, as far as contenders need it.
struct learnt_keys {
  std::map<basis_rows, key_basis> bases{};  ///< by what their rows are
  std::optional<key_basis> factors{};
  std::map<std::pair<int, int>, codebook_set>
      codebooks{};  ///< by codes a token, and tokens of a unit, 0: a page
};

/// A prompt and what was learnt from its keys, and from those of another text.
struct prepared_prompt {
  prompt_cache kv;
  learnt_keys own;
  const learnt_keys& other;
  /// Of contenders that need them, by name: (layers, kv_heads).
  std::map<std::string, std::vector<float>> temperatures{};
  /// The same: (layers, kv_heads, head_dim / 8).
  std::map<std::string, std::vector<std::uint8_t>> channels{};
};

/// The contender's basis, factors and codebooks, which `prompt` keeps; empty for one that has none.
subspace_basis basis_of(const contender& c, const prepared_prompt& prompt);
subspace_basis factors_of(const contender& c, const prepared_prompt& prompt);
key_codebooks codebooks_of(const contender& c, const prepared_prompt& prompt);
/// The bytes of all.
std::size_t learnt_bytes_of(const contender& c, const prepared_prompt& prompt);

/// Of a contender's pipeline, with room for `more` tokens after the prompt. At equal budget, a method that
/// selects nothing has all but the sink as its window, and what is pinned is part of what is selected.
pipeline_options options_of(const contender& c, const common_settings& s, const model_shape& shape,
                            const prepared_prompt& prompt, int more, bool in_place);
/// The pipeline with these options.
std::unique_ptr<pipeline> make_contender(const contender& c, const common_settings& s,
                                         const model_shape& shape, const prepared_prompt& prompt, int more,
                                         bool in_place, host_backend& backend);

/// Bytes of a contender's summary for a page and KV head; 0 if it selects nothing.
std::size_t summary_bytes_of(const contender& c, const pipeline& p);

}  // namespace freekv::examples
