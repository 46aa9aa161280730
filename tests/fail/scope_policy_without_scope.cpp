// Rows that do not say who shares one selection.
#include <freekv/freekv.hpp>

struct alone {
  using policy_kind = freekv::scope_kind;
  static constexpr std::string_view name = "alone";
#ifdef FREEKV_FIXED
  static constexpr freekv::selection_scope scope = freekv::selection_scope::query_head;
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, alone> pipeline({.model = {.layers = 2}}, backend);
}
