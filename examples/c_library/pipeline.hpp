// A pipeline of any compiled shape and method, as the C interface calls it.
#pragma once

#include <freekv/c_api.h>

#include <cstdint>
#include <freekv/freekv.hpp>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
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
  virtual sequence_id fork(sequence_id parent) = 0;
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

  virtual void reserve(std::span<const step_input>) { throw refused("reserve"); }
  virtual void begin_captured_step(const freekv_step_bounds&) { throw of_a_device("begin_captured_step"); }
  virtual bool plan(std::span<const step_input>) { throw of_a_device("plan"); }
  virtual void wait() { throw of_a_device("wait"); }
  virtual void queue_tables(int, const freekv_block_tables&) { throw of_a_device("queue_tables"); }
  virtual int most_blocks(int, std::int32_t, int) const { throw of_a_device("most_blocks"); }
  virtual freekv_engine_blocks paged_kv(int) const { throw of_a_device("paged_kv"); }

 private:
  static usage_error of_a_device(const std::string& call) {
    return usage_error(
        call + ": the backend is the host's, which captures nothing; take freekv_backend_create_cuda's");
  }
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

/// A shape that is compiled in for a backend.
template <class Backend>
struct compiled_shape {
  freekv_element element;
  int head_dim;
  pipeline_needs (*measure)(const pipeline_request&, Backend&);
  std::unique_ptr<pipeline> (*create)(const pipeline_request&, Backend&, const memory_resources&);
};

/// Explicitly instantiated, one translation unit each.
template <class Shape>
compiled_shape<host_backend> compiled();

/// What pipelines run on: threads of the host, or a device's streams.
class backend {
 public:
  virtual ~backend() = default;
  virtual memory_resources memory() = 0;  // for who brings none
  virtual pipeline_needs measure(const pipeline_request& request) = 0;
  virtual std::unique_ptr<pipeline> create(const pipeline_request& request,
                                           const memory_resources& memory) = 0;
};

/// Whether nvcc has compiled the library too.
bool has_cuda() noexcept;
/// Streams of a device. Throws settings_error where it has not.
std::unique_ptr<backend> make_cuda_backend(const freekv_cuda_options& options);

inline const char* text_of(std::int32_t element) {
  switch (element) {
    case FREEKV_F32:
      return element_name<float>.data();
    case FREEKV_F16:
      return element_name<half>.data();
    case FREEKV_BF16:
      return element_name<bfloat16>.data();
    case FREEKV_FP8_E4M3:
      return element_name<fp8_e4m3>.data();
    default:
      return nullptr;
  }
}

/// The shape of a request. Throws settings_error, which names those that there are.
template <class Shapes>
const auto& shape_of(const Shapes& shapes, const freekv_settings& s) {
  std::string text;
  for (const auto& shape : shapes) {
    if (shape.element == s.element && shape.head_dim == s.head_dim) return shape;
    text += (text.empty() ? "" : ", ") + std::string(text_of(shape.element)) + " " +
            std::to_string(shape.head_dim);
  }
  if (text_of(s.element) == nullptr)
    throw settings_error("element is " + std::to_string(s.element) +
                         "; choose FREEKV_F32, FREEKV_F16, FREEKV_BF16 or FREEKV_FP8_E4M3");
  throw settings_error(std::string(text_of(s.element)) + " with head_dim " + std::to_string(s.head_dim) +
                       " is not among the shapes compiled in (" + text +
                       "); build the library with it in FREEKV_C_SHAPES");
}

/// A backend `Of` of FreeKV's, with the shapes that are compiled in for it.
template <class Of>
class backend_of_shapes : public backend {
 public:
  template <class... Arguments>
  explicit backend_of_shapes(std::span<const compiled_shape<Of>> shapes, Arguments&&... arguments)
      : shapes_(shapes), of_(std::forward<Arguments>(arguments)...) {}
  pipeline_needs measure(const pipeline_request& request) override {
    return shape_of(shapes_, request.settings).measure(request, of_);
  }
  std::unique_ptr<pipeline> create(const pipeline_request& request, const memory_resources& memory) override {
    return shape_of(shapes_, request.settings).create(request, of_, memory);
  }

 private:
  std::span<const compiled_shape<Of>> shapes_;
  Of of_;
};

}  // namespace freekv::c_library
