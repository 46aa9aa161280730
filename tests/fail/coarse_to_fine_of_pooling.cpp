// Two stages of which one is no summary.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using choice = freekv::coarse_to_fine<freekv::min_max, freekv::mean>;
#else
using choice = freekv::coarse_to_fine<freekv::min_max, freekv::mean_score>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, choice> pipeline({.model = {.layers = 2}}, backend);
}
