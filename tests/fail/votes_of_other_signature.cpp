// An eviction policy whose `votes` is not told the layer, and so would never be called.
#include <freekv/freekv.hpp>

struct votes_alike : freekv::compress_kv {
#ifndef FREEKV_FIXED
  bool votes(int query_head) const { return query_head == 0; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, votes_alike> pipeline({.model = {.layers = 2}},
                                                                               backend);
}
