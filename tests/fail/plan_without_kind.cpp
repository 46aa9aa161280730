// A layer plan that says of no layer what it keeps.
#include <freekv/freekv.hpp>

struct last_layer_complete {
  using policy_kind = freekv::plan_kind;
  static constexpr std::string_view name = "last_layer_complete";
  int layers = 2;
#ifdef FREEKV_FIXED
  constexpr freekv::layer_kind kind(int layer) const {
    return layer + 1 == layers ? freekv::layer_kind::complete : freekv::layer_kind::retrieval;
  }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, last_layer_complete> pipeline(
      {.model = {.layers = 2}}, backend);
}
