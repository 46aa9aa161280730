// The engine with one method, for one head_dim.
#include "engine.cuh"

namespace freekv::examples {

using compiled = engine<methods::FREEKV_ENGINE_METHOD, FREEKV_ENGINE_HEAD_DIM>;
extern const engine_variant FREEKV_ENGINE_VARIANT;
const engine_variant FREEKV_ENGINE_VARIANT{methods::FREEKV_ENGINE_METHOD::name, FREEKV_ENGINE_HEAD_DIM,
                                           compiled::page_tokens,
                                           [](const engine_options& o) { return compiled(o).run(); }};

}  // namespace freekv::examples
