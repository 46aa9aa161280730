// A step that nobody keeps.
#include <freekv/freekv.hpp>

using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<freekv::bfloat16, 64>>;

void use(pipeline& p) {
#ifdef FREEKV_FIXED
  const auto step =
#endif
      p.begin_step({{freekv::sequence_id{0}}});
}
