// Pipelines of one shape with any pooling, selection, pinning, rows, correction or residency that the CUDA
// backend has.
#include "device_pipeline.hpp"
#include "device_pipeline_with_data.cuh"

namespace freekv::examples {

namespace {

using implementation =
    device_pipeline_type<kv_shape<half, policy_shape.head_dim>, for_devices::pooling, for_devices::selection,
                         for_devices::pinning, for_devices::correction, for_devices::residency,
                         for_devices::rows>;

implementation::settings settings_of(const pipeline_options& o, const method_data& data) {
  auto s = device_settings<implementation::settings>(o);
  s.pooling = find_by_name("pooling", poolings, o.method.pooling).make(o.method, {});
  s.selection =
      find_by_name("selection of devices", device_selections, o.method.selection).make(o.method, data);
  s.pinning = find_by_name("pinning", pinnings, o.method.pinning).make(o.method, {});
  s.correction =
      find_by_name("correction of devices", device_corrections, o.method.correction).make(o.method, {});
  s.residency = find_by_name("residency", residencies, o.method.residency).make(o.method, {});
  s.scope = find_by_name("rows", selection_scopes, o.method.rows).make(o.method, {});
  return s;
}

}  // namespace

std::unique_ptr<pipeline> make_device_policies(const pipeline_options& o) {
  return std::make_unique<device_pipeline_with_data<implementation>>(o, settings_of);
}

}  // namespace freekv::examples
