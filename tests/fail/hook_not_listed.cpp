// A selection by mass that does not say that it is one.
#include <freekv/freekv.hpp>

struct half_of_mass : freekv::top_k {
#ifdef FREEKV_FIXED
  using hooks = freekv::hook_list<freekv::hook::enough>;
#endif
  constexpr bool enough(float mass) const { return mass >= 0.5f; }
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, freekv::any_of<freekv::top_k, half_of_mass>>
      pipeline({.model = {.layers = 2}}, backend);
}
