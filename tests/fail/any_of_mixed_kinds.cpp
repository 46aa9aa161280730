// A choice between a summary and a correction.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using summary = freekv::any_of<freekv::min_max, freekv::chunk_means<8>>;
#else
using summary = freekv::any_of<freekv::min_max, freekv::always>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, summary> pipeline({.model = {.layers = 2}},
                                                                            backend);
}
