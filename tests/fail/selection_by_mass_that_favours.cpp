// A selection that ends by mass and favours held units.
#include <freekv/freekv.hpp>

struct most_of_the_mass {
  using policy_kind = freekv::selection_kind;
  static constexpr std::string_view name = "most_of_the_mass";
  constexpr int count(int candidates, int k) const { return candidates < k ? candidates : k; }
  constexpr bool enough(float mass) const { return mass > 0.5f; }
#ifdef FREEKV_FIXED
  using hooks = freekv::hook_list<freekv::hook::enough>;
#else
  using hooks = freekv::hook_list<freekv::hook::enough, freekv::hook::favour>;
  constexpr float favour() const { return 1.0f; }
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, most_of_the_mass> pipeline({.model = {.layers = 2}},
                                                                                     backend);
}
