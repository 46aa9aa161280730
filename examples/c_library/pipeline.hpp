// A pipeline of any compiled shape and method, as the C interface calls it.
#pragma once

#include <freekv/c_api.h>

#include <cstdint>
#include <freekv/freekv.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace freekv::c_library {

/// What a pipeline is made from. All structs are of this version's size.
struct pipeline_request {
  freekv_settings settings;
  freekv_key_codebooks codebooks;
  freekv_subspace_basis basis;
  std::optional<file_store_options> store_file;  // made once, so that not every shape compiles the file store
};

/// A pipeline and its step. Calls are retrieval_pipeline's and its step's; methods that forget refuse some.
class pipeline {
 public:
  virtual ~pipeline() = default;

  virtual std::string name() const = 0;
  virtual void synchronize() = 0;
  virtual sequence_id open() = 0;
  virtual void release(sequence_id id) = 0;
  virtual int tokens(sequence_id id) const = 0;
  virtual std::int32_t free_pages() const { return 0; }
  virtual sequence_id fork(sequence_id) { throw refused("fork"); }
  virtual void truncate(sequence_id, int) { throw refused("truncate"); }
  virtual void preempt(sequence_id) { throw refused("preempt"); }
  virtual void restore(sequence_id) { throw refused("restore"); }
  virtual prefix keep_prefix(sequence_id, int) { throw refused("keep_prefix"); }
  virtual sequence_id open(const prefix&) { throw refused("open_with"); }

  virtual void begin_step(std::span<const step_input> rows) = 0;
  virtual void append(int layer, const freekv_rows& rows) = 0;
  virtual void attend(int layer, const freekv_attention& to) = 0;
  virtual void correct(int) { throw refused("correct"); }
  virtual resident_table table(int, sequence_id, int, std::span<std::int32_t>) { throw refused("table"); }
  virtual void finish_layer(int) { throw refused("finish_layer"); }
  virtual void end_step() = 0;
  virtual void abandon_step() noexcept = 0;
  virtual void abandon(sequence_id) { throw refused("abandon_sequence"); }

  virtual freekv_step_report report(int layer, sequence_id id) const = 0;

 private:
  usage_error refused(const std::string& call) const {
    return usage_error(call + ": " + name() +
                       " keeps no complete store to do this from; choose a method that retrieves");
  }
};

/// What a pipeline takes.
struct pipeline_needs {
  freekv_footprint footprint{};
  std::vector<std::int64_t> slots;  // by layer
  std::vector<std::int32_t> slots_per_sequence;
};

/// A shape that is compiled in.
struct compiled_shape {
  freekv_element element;
  int head_dim;
  pipeline_needs (*measure)(const pipeline_request&, host_backend&);
  std::unique_ptr<pipeline> (*create)(const pipeline_request&, host_backend&, const memory_resources&);
};

/// Explicitly instantiated, one translation unit each.
template <class Shape>
compiled_shape compiled();

}  // namespace freekv::c_library
