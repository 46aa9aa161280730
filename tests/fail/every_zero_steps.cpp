// A correction in every zeroth step.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using choice = freekv::every_n_steps<1>;
#else
using choice = freekv::every_n_steps<0>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, choice> pipeline({.model = {.layers = 2}}, backend);
}
