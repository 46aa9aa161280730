// A format for a summary that has one of its own.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using choice = freekv::stored_as<freekv::mean, freekv::number_format::int8>;
#else
using choice = freekv::stored_as<freekv::key_sketch<2>, freekv::number_format::int8>;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, choice> pipeline({.model = {.layers = 2}}, backend);
}
