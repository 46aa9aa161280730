// A correction that flags no head and does not say so.
#include <freekv/freekv.hpp>

struct every_other_layer {
  using policy_kind = freekv::correction_kind;
  static constexpr std::string_view name = "every_other_layer";
  struct layer_policy {
    bool odd;
#ifdef FREEKV_FIXED
    template <freekv::team T>
    bool flags(T, const freekv::query_change&) const {
      return odd;
    }
#endif
  };
  layer_policy at(int layer) const { return {layer % 2 == 1}; }
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, every_other_layer> pipeline(
      {.model = {.layers = 2}}, backend);
}
