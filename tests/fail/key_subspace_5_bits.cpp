// Codes that do not come in blocks of 8.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using summary = freekv::key_subspace<24, 4>;
#else
using summary = freekv::key_subspace<24, 5>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, summary> pipeline({.model = {.layers = 2}},
                                                                            backend);
}
