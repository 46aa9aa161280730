// Two ways of storing a page.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using other = freekv::page_size<16>;
#else
using other = freekv::int8_token;
#endif

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, freekv::int8_channel, other> pipeline(
      {.model = {.layers = 2}}, backend);
}
