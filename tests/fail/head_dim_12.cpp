// Half a vector register too much.
#include <freekv/pipeline/retrieval_pipeline.hpp>

#ifdef FREEKV_FIXED
using shape = freekv::kv_shape<float, 16>;
#else
using shape = freekv::kv_shape<float, 12>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<shape> pipeline({.layers = 2}, backend);
}
