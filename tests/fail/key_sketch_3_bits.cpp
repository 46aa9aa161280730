// Codes that the sketch does not have.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using choice = freekv::key_sketch<4>;
#else
using choice = freekv::key_sketch<3>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, choice> pipeline({.model = {.layers = 2}}, backend);
}
