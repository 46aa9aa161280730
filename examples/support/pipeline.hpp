// A retrieval pipeline whose element type, head_dim and policies are chosen at run time: what the programs
// use. Engines name their pipeline's type instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "choices.hpp"
#include "layer_list.hpp"
#include "safetensors.hpp"

namespace freekv::examples {

struct pipeline_options {
  data_type element = data_type::f16;  ///< f32, f16 or bf16
  int head_dim = 0;
  int layers = 1;
  int query_heads = 0;
  int kv_heads = 0;
  int page = 32;
  freekv::budget budget{};
  std::vector<layer_values> by_layer{};  ///< (layers), of a method that retrieves; none: all alike
  int max_tokens = 0;  ///< of one sequence
  int max_prompt = 0;  ///< of a method that evicts or thins prompts; 0: max_tokens
  int max_sequences = 1;
  int max_resident = 0;              ///< 0: all sequences
  std::int64_t store_tokens = 0;     ///< of all sequences together; 0: max_tokens for each
  std::int64_t selected_tokens = 0;  ///< of all resident sequences together; 0: what all may select
  int max_decode_rows = 1;
  float scale = 0.0f;
  int sliding_window = 0;  ///< tokens, of plan "sliding" and of `sliding_layers`
  std::vector<bool>
      sliding_layers{};   ///< (layers): the model itself restricts these, whatever the plan; empty: none
  float soft_cap = 0.0f;  ///< of attention's scores; 0: none
  std::vector<float> sink_logits{};  ///< (layers, query_heads); empty: none
  std::vector<float> key_scales{}, value_scales{};  ///< of all, (layers) or (layers, kv_heads); empty: 1
  int complete_layers = 0;           ///< leading layers that keep everything, whatever the plan
  bool in_place = false;
  bool copy_engines = false;   ///< recall on a device, else by a kernel
  std::string store_file{};    ///< a file, or a folder for one without a name; empty: the store is in memory
  bool direct_io = false;      ///< past the page cache
  std::string layout = "nhd";  ///< of the slots, where the route keeps any
  method_spec method{};
  subspace_basis basis{};                ///< of key_subspace; the caller keeps its memory
  key_codebooks codebooks{};             ///< of key_codes; the caller keeps their memory
  subspace_basis factors{};              ///< of low_rank_keys; the caller keeps its memory
  rotary_embedding rotary{};             ///< of low_rank_keys; the caller keeps its memory
  head_temperatures temperatures{};      ///< of top_p; the caller keeps their memory
  channel_lists channels{};              ///< of key_channels; the caller keeps their memory
  std::vector<layer_kind> head_kinds{};  ///< of a method that needs_head_list(): (layers, kv_heads)
  std::vector<std::uint8_t> voters{};    ///< of a method that takes_voters(): (layers, query_heads), or none
};

/// A pipeline of any shape, with its step. The calls are retrieval_pipeline's, and those of its step.
class pipeline {
 public:
  virtual ~pipeline() = default;

  virtual sequence_id open() = 0;
  virtual sequence_id fork(sequence_id parent) = 0;
  virtual void truncate(sequence_id id, int tokens) = 0;
  virtual void preempt(sequence_id id) = 0;
  virtual void restore(sequence_id id) = 0;
  virtual void release(sequence_id id) = 0;
  virtual int tokens(sequence_id id) const = 0;
  virtual std::int32_t free_pages() const = 0;
  /// Whether prompt rows need their queries, though they do not attend.
  virtual bool observes_prompts() const { return false; }
  /// Whether the method is one of those whose prompts probe rows observe.
  virtual bool takes_probes() const { return false; }
  /// Whether a step's prompt rows are a block of a prompt that is cut behind each, and probe rows observe
  /// each.
  virtual bool cuts_blocks() const { return false; }
  /// Most prompt rows that a sequence brings to a step.
  virtual int most_prompt_rows() const { return std::numeric_limits<int>::max(); }
  /// Tokens that each KV head of a layer has kept of the last prompt, (kept, kv_heads), of a method that
  /// thins prompts; such a prompt comes in one step.
  virtual std::span<const std::int32_t> kept_tokens(int) const { return {}; }

  virtual void begin_step(std::span<const step_input> rows) = 0;
  virtual void append(int layer, std::span<const float> keys, std::span<const float> values,
                      std::span<const float> queries) = 0;
  /// Keys and values as the bytes of the element type.
  virtual void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                             std::span<const float> queries) = 0;
  /// Worths of the rows that are appended next, (rows, kv_heads), of a method that takes them.
  virtual void give_worths(std::span<const float> worths) {
    detail::refuse_worths("a pipeline that retrieves", worths.size());
  }
  /// Queries by which a layer's heads are corrected and select in its next append, (rows, query_heads,
  /// head_dim), which stay as they are until then.
  virtual void select_by(int, std::span<const float>) {
    detail::refuse_selecting("a method that forgets or thins prompts", "is compared by its own queries");
  }
  /// Probe rows of a layer that observe a sequence's prompt, (rows, query_heads, head_dim), of a method that
  /// observes its last rows.
  virtual void observe(sequence_id, int, std::span<const float>) {
    throw usage_error("observe: a pipeline that retrieves observes no rows of a prompt");
  }
  /// Corrects the flagged heads, as `attend` does first; for who times the two apart. What forgets has none.
  virtual void correct(int) {}
  virtual void attend(int layer, std::span<float> out, std::span<float> lse) = 0;
  virtual void attend_full(int layer, std::span<float> out, std::span<float> lse) = 0;
  virtual void end_step() = 0;
  virtual bool abandon_step() = 0;
  virtual void synchronize() = 0;

  virtual step_report report(int layer, sequence_id id) const = 0;
  virtual const memory_bytes& bytes() const = 0;
  virtual std::size_t slice_bytes() const = 0;
  virtual std::size_t summary_bytes() const = 0;

  // For programs that have one sequence alone:
  void begin_step(int tokens, step_phase kind) {
    if (!only_) only_ = open();
    const step_input rows{*only_, tokens, kind};
    begin_step({&rows, 1});
  }
  /// Forgets the sequence, in the middle of a step too; the next step starts an empty one.
  void restart() {
    if (!abandon_step() && only_) release(*only_);
    only_.reset();
  }
  /// Forgets the sequence likewise, and starts an empty one.
  sequence_id reopen() {
    restart();
    return only_.emplace(open());
  }
  step_report report(int layer) const { return report(layer, only_.value()); }
  sequence_id only() const { return only_.value(); }

 private:
  std::optional<sequence_id> only_;
};

/// Throws choice_error for a shape that is not among those compiled in.
void check_compiled(data_type element, int head_dim);

/// What was compiled: lists as CMake has them, and the build folder.
struct compiled_lists {
  std::string head_dims, elements, other_elements, build_folder;
};
/// The sentence for a shape that is not among those: it names them, and the command that adds it.
std::string sentence_of_missing(data_type element, int head_dim, const compiled_lists& lists);

/// Options of the store's file, if there is to be one: made here, so that not every shape compiles the file
/// store.
std::optional<file_store_options> store_file_of(const pipeline_options& options);

/// Throws choice_error or freekv::error. `backend` outlives the pipeline.
std::unique_ptr<pipeline> make_pipeline(const pipeline_options& options, host_backend& backend);

/// Rows of a prompt, its last, that vote for what is kept of one that is thinned.
inline constexpr int rows_that_thin = 64;

/// Throws choice_error for a method that thins prompts and whose policies cannot have such.
void check_thinning(const method_spec& method);

/// Rows of a prompt, its last, whose queries temperatures are found by, and channels are chosen by.
inline constexpr int rows_that_calibrate = 16, rows_that_choose_channels = 32;

/// Finds the temperatures of a layer's KV heads for a method that needs them, (kv_heads): `calibrate_top_p`,
/// of the keys of a prompt, (tokens, kv_heads, head_dim), and the queries of its last rows, (rows,
/// query_heads, head_dim). Throws choice_error or freekv::error.
void calibrate(const pipeline_options& options, int layer, std::span<const float> keys,
               std::span<const float> queries, std::span<float> temperatures);

/// The pipeline of one compiled shape; explicitly instantiated, one translation unit each.
template <class Shape>
std::unique_ptr<pipeline> make_pipeline_of(const pipeline_options& options, host_backend& backend);
template <class Shape>
void calibrate_of(const pipeline_options& options, int layer, std::span<const float> keys,
                  std::span<const float> queries, std::span<float> temperatures);

}  // namespace freekv::examples
