// Keys of half precision for a store of bfloat16.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using given = freekv::bfloat16;
#else
using given = freekv::half;
#endif
using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<freekv::bfloat16, 64>>;

void use(pipeline::step& step, std::span<const given> keys, std::span<const given> values) {
  step.append<given>(0, {.keys = keys, .values = values});
}
