// A backend whose stages of an evicting pipeline have none of its calls.
#include <freekv/freekv.hpp>

struct no_stages {};

struct retrieves {
#ifdef FREEKV_FIXED
  template <class Shape, class Settings>
  using eviction_stages = freekv::host_backend::eviction_stages<Shape, Settings>;
#else
  template <class Shape, class Settings>
  using eviction_stages = no_stages;
#endif
  operator freekv::host_backend&() { return host; }
  freekv::host_backend host;
};

using pipeline = freekv::evicting_pipeline<freekv::kv_shape<float, 64>, freekv::tova, retrieves>;
pipeline::settings given{.model = {.layers = 2}};
static_assert(sizeof(pipeline) > 0);
