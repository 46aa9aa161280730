// An eviction policy whose `observe` gives worths alone, and so would never say how many units stay.
#include <freekv/freekv.hpp>

struct best_noticed : freekv::hard_kv {
#ifndef FREEKV_FIXED
  void observe(const freekv::observed_units&, const freekv::eviction_moment&, float*) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, best_noticed> pipeline({.model = {.layers = 2}},
                                                                                backend);
}
