// Pinning that does not say what a unit is worth.
#include <freekv/freekv.hpp>

struct some_pins {
  using policy_kind = freekv::pinning_kind;
  static constexpr std::string_view name = "some_pins";
  static constexpr int units = 2;
#ifdef FREEKV_FIXED
  template <freekv::team T>
  float worth(T, const freekv::unit_keys&, float*) const {
    return 0.0f;
  }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, some_pins> pipeline({.model = {.layers = 2}},
                                                                              backend);
}
