// Where nvcc was not there, or was not to compile them.
#include "device_pipeline.hpp"

namespace freekv::examples {

std::unique_ptr<pipeline> make_device_pipeline(const pipeline_options&) {
  throw choice_error(
      "this program was built without what nvcc compiles, so devices cannot be used; configure with "
      "-DFREEKV_CUDA=ON -DFREEKV_DEVICE_PIPELINES=ON, or choose the host backend");
}

}  // namespace freekv::examples
