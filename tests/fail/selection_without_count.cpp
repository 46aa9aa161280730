// A selection that does not say how many pages it selects.
#include <freekv/freekv.hpp>

struct half_of_them {
  using policy_kind = freekv::selection_kind;
  static constexpr std::string_view name = "half_of_them";
#ifdef FREEKV_FIXED
  constexpr int count(int candidates, int k) const { return candidates / 2 < k ? candidates / 2 : k; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, half_of_them> pipeline({.model = {.layers = 2}},
                                                                                 backend);
}
