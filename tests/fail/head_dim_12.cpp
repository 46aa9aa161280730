// Half a vector register too much.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using shape = freekv::kv_shape<float, 16>;
#else
using shape = freekv::kv_shape<float, 12>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<shape> pipeline({.model = {.layers = 2}}, backend);
}
