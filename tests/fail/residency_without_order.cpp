// A residency that does not say which slot is freed first.
#include <freekv/freekv.hpp>

struct last_slots {
  using policy_kind = freekv::residency_kind;
  static constexpr std::string_view name = "last_slots";
  int spare = 2;
#ifdef FREEKV_FIXED
  constexpr bool frees_before(freekv::unselected_slot a, freekv::unselected_slot b) const {
    return a.slot > b.slot;
  }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, last_slots> pipeline({.model = {.layers = 2}},
                                                                               backend);
}
