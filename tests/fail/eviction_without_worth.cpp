// An eviction policy that ranks by a number of another type.
#include <freekv/freekv.hpp>

struct coldest : freekv::tova {
#ifndef FREEKV_FIXED
  float worth(const unit_state& unit) const { return unit.share; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, coldest> pipeline({.model = {.layers = 2}}, backend);
}
