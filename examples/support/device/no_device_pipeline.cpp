// Where no CUDA compiler was there.
#include "device_pipeline.hpp"

namespace freekv::examples {

std::unique_ptr<pipeline> make_device_pipeline(const pipeline_options&) {
  throw choice_error(
      "this program was built without nvcc, so devices cannot be used; configure with -DFREEKV_CUDA=ON, or "
      "choose the host backend");
}

}  // namespace freekv::examples
