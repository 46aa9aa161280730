// A retrieval pipeline whose element type, head_dim and policies are chosen at run time: what the programs
// use. Engines name their pipeline's type instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "choices.hpp"
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
  int max_tokens = 0;
  float scale = 0.0f;
  int complete_layers = 0;  ///< leading layers that keep everything, whatever the plan
  bool in_place = false;
  std::string layout = "nhd";  ///< of the slots, where the route keeps any
  method does{};
  subspace_basis basis{};                ///< of key_subspace; the caller keeps its memory
  key_codebooks codebooks{};             ///< of key_codes; the caller keeps their memory
  std::vector<layer_kind> head_kinds{};  ///< of plan "by_head": (layers, kv_heads)
};

/// One sequence in a pipeline of any shape. The calls are retrieval_pipeline's.
class pipeline {
 public:
  virtual ~pipeline() = default;

  virtual void begin_step(int tokens, row_kind kind) = 0;
  virtual void append(int layer, std::span<const float> keys, std::span<const float> values,
                      std::span<const float> queries) = 0;
  /// Keys and values as the bytes of the element type.
  virtual void append_stored(int layer, std::span<const std::byte> keys, std::span<const std::byte> values,
                             std::span<const float> queries) = 0;
  virtual void attend(int layer, std::span<float> out, std::span<float> lse) = 0;
  virtual void attend_full(int layer, std::span<float> out, std::span<float> lse) = 0;
  virtual void end_step() = 0;
  virtual void synchronize() = 0;
  /// Forgets the sequence, in the middle of a step too, and starts an empty one.
  virtual void restart() = 0;

  virtual step_report report(int layer) const = 0;
  virtual const memory_bytes& bytes() const = 0;
  virtual std::size_t slice_bytes() const = 0;
  virtual std::size_t summary_bytes() const = 0;
};

/// Throws choice_error, which names those compiled in, for a head_dim that is not among them.
void check_compiled(int head_dim);

/// Throws choice_error or freekv::error. `backend` outlives the pipeline.
std::unique_ptr<pipeline> make_pipeline(const pipeline_options& options, host_backend& backend);

/// The pipeline of one compiled shape; explicitly instantiated, one translation unit each.
template <class Shape>
std::unique_ptr<pipeline> make_pipeline_of(const pipeline_options& options, host_backend& backend);

}  // namespace freekv::examples
