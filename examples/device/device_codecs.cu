// Pipelines of one shape with any codec that the CUDA backend has.
#include "device_pipeline.hpp"
#include "device_pipeline_of_shape.cuh"

namespace freekv::examples {

constexpr auto& codec_choices = device_codec_list::choices;

std::unique_ptr<pipeline> make_device_codecs(const pipeline_options& o) {
  using implementation = device_pipeline_type<kv_shape<half, policy_shape.head_dim>, device_codec_list::any>;
  auto s = device_settings<implementation::settings>(o);
  s.correction = made<cosine_drift>::from(o.does, {});
  s.codec = chosen("codec", codec_choices, o.does.codec).make(o.does, {});
  return std::make_unique<device_pipeline_of_shape<implementation>>(s, o);
}

}  // namespace freekv::examples
