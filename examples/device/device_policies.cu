// Pipelines of one shape with any pooling, selection, pinning, rows, correction or residency that the CUDA backend has.
#include "device_pipeline.hpp"
#include "device_pipeline_of_shape.cuh"

namespace freekv::examples {

std::unique_ptr<pipeline> make_device_policies(const pipeline_options& o) {
  using implementation =
      device_pipeline_type<kv_shape<half, policy_shape.head_dim>, for_devices::pooling,
                           for_devices::selection, for_devices::pinning, for_devices::correction,
                           for_devices::residency, for_devices::rows>;
  auto s = device_settings<implementation::settings>(o);
  s.pooling = chosen("pooling", poolings, o.does.pooling).make(o.does, {});
  s.selection = chosen("selection", selections, o.does.selection).make(o.does, {});
  s.pinning = chosen("pinning", pinnings, o.does.pinning).make(o.does, {});
  s.correction = chosen("correction", corrections, o.does.correction).make(o.does, {});
  s.residency = chosen("residency", residencies, o.does.residency).make(o.does, {});
  s.rows = chosen("rows", selection_rows, o.does.rows).make(o.does, {});
  return std::make_unique<device_pipeline_of_shape<implementation>>(s, o);
}

}  // namespace freekv::examples
