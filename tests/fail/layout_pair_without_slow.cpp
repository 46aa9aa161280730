// A layout pair that does not say how the store is laid out.
#include <freekv/freekv.hpp>

struct heads_together {
  using policy_kind = freekv::layout_kind;
  using fast = freekv::hnd;
#ifdef FREEKV_FIXED
  using slow = freekv::hnd;
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, heads_together> pipeline({.model = {.layers = 2}},
                                                                                   backend);
}
