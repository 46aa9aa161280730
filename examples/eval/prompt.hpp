// A prompt as llama.cpp's prefill left it: every layer's keys and values, kept on disk so that it is computed
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "basis.hpp"
#include "choices.hpp"
#include "codebooks.hpp"
#include "engine.hpp"
#include "pipeline.hpp"

namespace freekv::examples {

/// Told how far a long piece of work is, from 0 to 1.
using progress_function = std::function<void(const std::string& what, double done)>;

/// Keys and values of a prompt, all layers, in f16 as llama.cpp's cache has them.
class prompt_cache {
 public:
  struct place {
    std::filesystem::path folder;  ///< created if missing; empty: nothing is kept
    std::uint64_t model_key = 0;   ///< distinguishes models, see `key_of_file`
    int threads = 2;
    bool queries = false;  ///< kept too, for methods that observe a prompt
    int probes = 0;  ///< pseudo tokens whose queries are kept too, for methods that they observe a prompt for
    bool state =
        false;  ///< kept too, what `restore_stock` else prefills again: llama.cpp's own, with flash attention
  };

  /// Loads the prompt of `tokens` from `at.folder`, or lets llama.cpp prefill it and stores it there. Of
  /// several files for one model and text, the name has the key of the tokens.
  prompt_cache(const model& model, std::span<const llama_token> tokens, const place& at,
               const progress_function& progress);

  int tokens() const { return tokens_; }
  /// (tokens, kv_heads, head_dim) f16 as bytes.
  std::span<const std::byte> keys(int layer) const { return part(keys_, layer); }
  std::span<const std::byte> values(int layer) const { return part(values_, layer); }
  /// The keys of one layer as float.
  std::vector<float> float_keys(int layer) const;
  /// Queries of a layer's `rows` rows before row `end`, (rows, query_heads, head_dim). `what` is found by
  /// them; throws usage_error if none are kept.
  std::vector<float> queries_before(int layer, int end, int rows, const char* what) const;

  /// Makes `pipeline` hold this prompt and nothing else, and gives it the probe rows that it takes; of one
  /// that cuts blocks in blocks, the same probe rows for each, and rows as the full prefill computed them.
  /// Throws usage_error if it observes prompts, or takes probe rows, and no queries of these are kept.
  void restore(pipeline& pipeline) const;
  /// A new sequence of `pipeline`, which holds this prompt.
  sequence_id open(pipeline& pipeline) const;
  /// A basis of rank `rank` of this prompt's keys. Throws usage_error if rotary pairs are asked for, which
  /// its last rows choose, and no queries are kept.
  key_basis learn_basis(basis_rows rows, int rank) const;
  /// The factorisation of rank `rank`, at most, of this prompt's keys before rotation, which the model's
  /// shape knows.
  key_basis learn_factors(int rank) const;
  /// The codebooks of this prompt's keys, kept beside the prompt.
  codebook_set learn_codebooks(const codebook_sizes& sizes, const progress_function& progress) const;
  /// Temperatures of a method that needs them, (layers, kv_heads). Throws usage_error if no queries are kept.
  std::vector<float> learn_temperatures(const pipeline_options& options) const;
  /// Lists of a method that needs channels, (layers, kv_heads, head_dim / 8), by this prompt's keys and its
  /// last queries. Throws usage_error if none of these are kept.
  std::vector<std::uint8_t> learn_channels(const method_spec& method) const;

 private:
  key_basis choose_pairs(int rank) const;

  void append_to(pipeline& pipeline, sequence_id sequence) const;
  std::vector<float> layer_of(const std::vector<std::uint16_t>& queries, int layer) const;
  std::span<const std::byte> part(const std::vector<std::uint16_t>& of, int layer) const {
    const std::size_t size = of.size() / to_size(shape_.layers);
    return std::as_bytes(std::span(of).subspan(to_size(layer) * size, size));
  }
  model_shape shape_;
  int tokens_ = 0;
  int threads_;
  std::filesystem::path name_;                // of its files, which differ behind it; empty: nothing is kept
  std::vector<std::uint16_t> keys_, values_;  // (layers, tokens, kv_heads, head_dim)
  std::vector<std::uint16_t> queries_;  // (layers, tokens, query_heads, head_dim), f16, where they are kept
  std::vector<std::uint16_t> probes_;   // (layers, probes, query_heads, head_dim), the same
};

/// Makes a sequence of `stock`, whose options have `flash_attention`, hold a prompt in the engine's own
/// cache: loaded from disk, or prefilled and stored.
void restore_stock(engine& stock, std::span<const llama_token> tokens, bool flash_attention,
                   const prompt_cache::place& place, const progress_function& progress, int sequence = 0);

/// The first `count` tokens of a text file. Throws choice_error if it has fewer.
std::vector<llama_token> first_tokens(const model& model, const std::filesystem::path& path, int count);

/// A file's bytes as text. Throws file_error.
std::string read_text(const std::filesystem::path& path);

/// FNV-1a of a file's bytes. Throws file_error.
std::uint64_t key_of_file(const std::filesystem::path& path);

}  // namespace freekv::examples
