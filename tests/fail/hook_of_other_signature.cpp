// A selection whose `validate` takes what a correction's does, and so would never be called.
#include <freekv/freekv.hpp>

struct half_of_k : freekv::top_k {
  using hooks = freekv::hook_list<freekv::hook::validate>;
#ifdef FREEKV_FIXED
  void validate() const {}
#else
  void validate(int) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, half_of_k> pipeline({.model = {.layers = 2}},
                                                                              backend);
}
