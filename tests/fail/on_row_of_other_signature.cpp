// An eviction policy whose `on_row` takes no value, and so would never be called.
#include <freekv/freekv.hpp>

struct keys_alone : freekv::q_hitter {
#ifndef FREEKV_FIXED
  void on_row(unit_state&, const float*, int) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, keys_alone> pipeline({.model = {.layers = 2}},
                                                                              backend);
}
