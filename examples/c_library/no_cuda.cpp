// Where nvcc has not compiled the library.
#include "pipeline.hpp"

namespace freekv::c_library {

bool has_cuda() noexcept { return false; }

std::unique_ptr<backend> make_cuda_backend(const freekv_cuda_options&) {
  throw settings_error(
      "backend_create_cuda: the library was built without nvcc, so devices cannot be used; configure with "
      "-DFREEKV_C_CUDA=ON, or take freekv_backend_create_host");
}

}  // namespace freekv::c_library
