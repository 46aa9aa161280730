// A unit that does not say how many tokens.
#include <freekv/freekv.hpp>

struct tokens_alone {
  using policy_kind = freekv::unit_kind;
#ifdef FREEKV_FIXED
  freekv::count_of<1> tokens{};
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, tokens_alone> pipeline({.model = {.layers = 2}},
                                                                                 backend);
}
