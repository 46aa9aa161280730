// An eviction policy whose `originals` does not take the moment, and so would never be called.
#include <freekv/freekv.hpp>

struct knows_no_moment : freekv::mikv {
#ifndef FREEKV_FIXED
  int originals() const { return 8; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, knows_no_moment> pipeline({.model = {.layers = 2}},
                                                                                   backend);
}
