// An eviction policy that observes rows and asks for worths, which nothing would tell it of.
#include <freekv/freekv.hpp>

struct told : freekv::r_kv {
#ifndef FREEKV_FIXED
  using hooks = freekv::hook_list<freekv::hook::observe, freekv::hook::sees_keys, freekv::hook::validate,
                                  freekv::hook::values, freekv::hook::worths>;
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, told> pipeline({.model = {.layers = 2}}, backend);
}
