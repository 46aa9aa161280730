// A page size that does not say how many tokens.
#include <freekv/freekv.hpp>

struct pages_of_16 {
  using policy_kind = freekv::page_size_kind;
#ifdef FREEKV_FIXED
  freekv::count_of<16> tokens{};
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, pages_of_16> pipeline({.model = {.layers = 2}},
                                                                                backend);
}
