// A summary that pages cannot be scored with.
#include <freekv/freekv.hpp>

struct first_key {
  using policy_kind = freekv::summary_kind;
  static constexpr std::string_view name = "first_key";
  constexpr int width(freekv::kv_extent unit) const { return unit.head_dim; }
  template <freekv::team T>
  void summarise(T team, const freekv::unit_keys& keys, float* numbers) const {
    for (int i = 0; i < keys.unit.head_dim; i += T::width)
      team.store(numbers + i, team.load(keys.row(0) + i));
  }
#ifdef FREEKV_FIXED
  template <freekv::team T>
  float score(T team, const freekv::unit_query& query, const float* numbers) const {
    typename T::pack product(0.0f);
    for (int i = 0; i < query.unit.head_dim; i += T::width)
      product = product + team.load(query.data + i) * team.load(numbers + i);
    return query.scale * team.sum(product);
  }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, first_key> pipeline({.model = {.layers = 2}},
                                                                              backend);
}
