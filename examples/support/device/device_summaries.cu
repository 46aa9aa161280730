// Pipelines of one shape with any summary that the CUDA backend has.
#include "device_pipeline.hpp"
#include "device_pipeline_with_data.cuh"

namespace freekv::examples {

namespace {

using implementation = device_pipeline_type<kv_shape<half, policy_shape.head_dim>, for_devices::summary>;

implementation::settings settings_of(const pipeline_options& o, const method_data& data) {
  auto s = device_settings<implementation::settings>(o);
  s.summary = find_by_name("summary of devices", device_summaries, o.method.summary).make(o.method, data);
  s.correction = policy_maker<cosine_drift>::from(o.method, data);
  return s;
}

}  // namespace

std::unique_ptr<pipeline> make_device_summaries(const pipeline_options& o) {
  return std::make_unique<device_pipeline_with_data<implementation>>(o, settings_of);
}

}  // namespace freekv::examples
