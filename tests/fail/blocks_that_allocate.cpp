// An eviction policy whose prompts are cut block by block, and which allocates when a prompt has ended.
#include <freekv/freekv.hpp>

struct allocates_in_blocks : freekv::cake {
#ifndef FREEKV_FIXED
  using hooks = freekv::hook_list<freekv::hook::allocate, freekv::hook::blocks, freekv::hook::observe,
                                  freekv::hook::validate, freekv::hook::values>;
  constexpr int block(const freekv::eviction_limits& most) const { return most.budget; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, allocates_in_blocks> pipeline(
      {.model = {.layers = 2}}, backend);
}
