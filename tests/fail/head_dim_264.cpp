// One vector register more than the longest key.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using shape = freekv::kv_shape<freekv::half, 256>;
#else
using shape = freekv::kv_shape<freekv::half, 264>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<shape> pipeline({.model = {.layers = 2}}, backend);
}
