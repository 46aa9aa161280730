// A summary whose `score_four` is misspelt, so that its heads would be scored one by one.
#include <freekv/freekv.hpp>

struct by_four : freekv::mean {
  using hooks = freekv::hooks_of<freekv::mean>::with<freekv::hook::four_heads>;
  template <freekv::team_of_halves T>
  void prepare_four(T, const freekv::group_query&, float*) const {}
  template <freekv::team_of_halves T>
#ifdef FREEKV_FIXED
  void score_four(T, const freekv::unit_query&, const freekv::stored_summaries&, float*) const {}
#else
  void score_for(T, const freekv::unit_query&, const freekv::stored_summaries&, float*) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, by_four> pipeline({.model = {.layers = 2}},
                                                                            backend);
}
