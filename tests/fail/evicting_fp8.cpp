// An evicting pipeline that keeps keys and values in fp8.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using element = freekv::bfloat16;
#else
using element = freekv::fp8_e4m3;
#endif
using pipeline = freekv::evicting_pipeline<freekv::kv_shape<element, 64>, freekv::tova>;
static_assert(sizeof(pipeline) > 0);
