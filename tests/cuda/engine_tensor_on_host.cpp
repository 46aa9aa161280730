#include "engine_tensor.hpp"

namespace engine_tensor {

run_results run_on_host(kept what, const text& first, const text& second, const pinned<float>& basis) {
  using on_host = engine<host_backend>;
  host_backend backend;
  const on_host::footprint needs(settings<on_host::pipeline_type::settings>(what, basis), backend);
  return on_host(backend, needs, {}, {.what = what, .prompts_from = layout::packed_hnd}, {})
      .live(first, second);
}

}  // namespace engine_tensor
