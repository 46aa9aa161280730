// An eviction policy whose `merge` does not take the head's memory, and so would never be called.
#include <freekv/freekv.hpp>

struct remembers_nothing : freekv::exact_merge {
#ifndef FREEKV_FIXED
  void merge(const freekv::merging_tokens&, const freekv::eviction_moment&, freekv::merge_fate*) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::evicting_pipeline<freekv::kv_shape<float, 64>, remembers_nothing> pipeline({.model = {.layers = 2}},
                                                                                     backend);
}
