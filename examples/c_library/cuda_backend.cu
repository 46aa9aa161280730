// The backend of a device: which shapes its pipelines have.
#include <memory>
#include <string>

#include "compiled.hpp"
#include "compiled_for_cuda.cuh"

namespace freekv::c_library {

namespace {

#define FREEKV_COMPILED(element, head_dim) compiled_for_cuda<kv_shape<element, head_dim>>(),
std::span<const compiled_shape<cuda_backend>> shapes() {
  static const compiled_shape<cuda_backend> all[] = {FREEKV_C_SHAPES(FREEKV_COMPILED)};
  return all;
}
#undef FREEKV_COMPILED

/// A stream of the engine's own. Throws usage_error for the legacy default stream, which a step cannot have.
cudaStream_t stream_of(void* given, const char* member) {
  const auto stream = static_cast<cudaStream_t>(given);
  if (stream == nullptr || stream == cudaStreamLegacy)
    throw usage_error(std::string("backend_create_cuda: ")
                          .append(member)
                          .append(" is the legacy default stream; give one of cudaStreamCreateWithFlags"));
  return stream;
}

class streams final : public backend_of_shapes<cuda_backend> {
 public:
  explicit streams(const freekv_cuda_options& options)
      : backend_of_shapes{shapes(), stream_of(options.compute, "compute"),
                          stream_of(options.recall, "recall"),
                          options.copy_engines != 0 ? recall_by::copy_engines : recall_by::kernel} {}
  memory_resources memory() override { return {.slow = &slow_, .fast = &fast_}; }

 private:
  device::pinned_memory slow_;
  device::device_memory fast_;
};

}  // namespace

bool has_cuda() noexcept { return true; }

std::unique_ptr<backend> make_cuda_backend(const freekv_cuda_options& options) {
  return std::make_unique<streams>(options);
}

}  // namespace freekv::c_library
