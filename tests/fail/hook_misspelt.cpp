// A summary whose `query_width` is misspelt, so that its prepared queries would have too little room.
#include <freekv/freekv.hpp>

struct doubled : freekv::mean {
  using hooks = freekv::hooks_of<freekv::mean>::with<freekv::hook::prepare, freekv::hook::query_width>;
#ifdef FREEKV_FIXED
  constexpr int query_width(int head_dim) const { return 2 * head_dim; }
#else
  constexpr int query_widht(int head_dim) const { return 2 * head_dim; }
#endif
  template <freekv::team T>
  void prepare(T team, const freekv::group_query& query, float* prepared) const {
    for (int i = 0; i < query.head_dim; i += T::width)
      for (float* half : {prepared, prepared + query.head_dim})
        team.store(half + i, team.load(query.data + i));
  }
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, doubled> pipeline({.model = {.layers = 2}},
                                                                            backend);
}
