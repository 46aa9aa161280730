// A page whose tokens do not fill vector registers.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using page = freekv::page_size<16>;
#else
using page = freekv::page_size<12>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, page> pipeline({.model = {.layers = 2}}, backend);
}
