// Fewer slots than pages.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using choice = freekv::least_recently_used<1>;
#else
using choice = freekv::least_recently_used<-2>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, choice> pipeline({.model = {.layers = 2}}, backend);
}
