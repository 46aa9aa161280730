// Two summaries in one pipeline.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using second = freekv::never;
#else
using second = freekv::chunk_means<8>;
#endif
using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, freekv::min_max, second>;
pipeline::settings settings;
