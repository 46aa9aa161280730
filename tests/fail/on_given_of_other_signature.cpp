// An eviction policy whose `on_given` does not take its unit, and so would never be called.
#include <freekv/freekv.hpp>

struct forgets_unit : freekv::trim_kv {
#ifndef FREEKV_FIXED
  void on_given(float) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, forgets_unit> pipeline({.model = {.layers = 2}},
                                                                                backend);
}
