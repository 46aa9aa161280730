// An eviction policy that merges tokens and codes others, into which none can merge.
#include <freekv/freekv.hpp>

struct merges_and_codes : freekv::d2o {
#ifndef FREEKV_FIXED
  using hooks = freekv::hook_list<freekv::hook::demote, freekv::hook::merge, freekv::hook::validate,
                                  freekv::hook::values>;
  constexpr freekv::int4_token codec() const { return {}; }
  constexpr int originals(const freekv::eviction_moment& at) const { return at.budget / 2; }
  constexpr int most_originals(const freekv::eviction_limits& most) const { return most.budget; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, merges_and_codes> pipeline({.model = {.layers = 2}},
                                                                                    backend);
}
