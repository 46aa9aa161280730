// Three stages.
#include <freekv/freekv.hpp>

using two_stages = freekv::coarse_to_fine<freekv::mean, freekv::key_sketch<4>>;
#ifdef FREEKV_FIXED
using choice = two_stages;
#else
using choice = freekv::coarse_to_fine<freekv::min_max, two_stages>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, choice> pipeline({.model = {.layers = 2}}, backend);
}
