// An eviction policy that ranks units together, whose units no pipeline would give it: it does not demote.
#include <freekv/freekv.hpp>

struct ranked : freekv::tova {
#ifndef FREEKV_FIXED
  using hooks = freekv::hook_list<freekv::hook::rank>;
  void rank(const freekv::counted_units<unit_state>&, const freekv::eviction_moment&, float*) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, ranked> pipeline({.model = {.layers = 2}}, backend);
}
