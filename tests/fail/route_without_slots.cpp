// A route that does not say whether it keeps slots.
#include <freekv/freekv.hpp>

struct straight {
  using policy_kind = freekv::route_kind;
  static constexpr std::string_view name = "straight";
#ifdef FREEKV_FIXED
  constexpr bool keeps_slots() const { return false; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, straight> pipeline({.model = {.layers = 2}},
                                                                             backend);
}
