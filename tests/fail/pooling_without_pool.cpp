// A pooling that names itself and does nothing.
#include <freekv/freekv.hpp>

struct first_head {
  using policy_kind = freekv::pooling_kind;
  static constexpr std::string_view name = "first_head";
  static constexpr bool uses_log_sums = false;
#ifdef FREEKV_FIXED
  template <freekv::team T>
  typename T::pack pool(T team, const freekv::row_scores& row, int j) const {
    return team.load(row.scores + j);
  }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, first_head> pipeline({.model = {.layers = 2}},
                                                                               backend);
}
