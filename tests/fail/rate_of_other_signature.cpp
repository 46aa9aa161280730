// An eviction policy whose `rate` gives one ratio for all layers, and so would never be called.
#include <freekv/freekv.hpp>

struct rates_all : freekv::arkv {
#ifndef FREEKV_FIXED
  float rate(const double*, int) const { return 0.5f; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, rates_all> pipeline({.model = {.layers = 2}},
                                                                             backend);
}
