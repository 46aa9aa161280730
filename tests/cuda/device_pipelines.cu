// Pipelines of the published policies, of each compiled shape.
#include "device_pipeline.hpp"
#include "device_pipeline_of_shape.cuh"

namespace tests {

namespace {

using namespace freekv;
using namespace freekv::examples;

template <class Shape>
device_pipeline make(const pipeline_options& o) {
  using implementation = device_pipeline_type<Shape>;
  auto s = device_settings<typename implementation::settings>(o);
  s.correction = made<cosine_drift>::from(o.does, {});
  return std::make_unique<device_pipeline_of_shape<implementation>>(s);
}

struct compiled {
  device_shape shape;
  device_pipeline (*make)(const pipeline_options&);
};
const compiled all[] = {{{data_type::bf16, 128}, make<kv_shape<bfloat16, 128>>},
                        {{data_type::f32, 80}, make<kv_shape<float, 80>>},
                        {{data_type::f16, 256}, make<kv_shape<half, 256>>}};

}  // namespace

bool device_is_there(std::string& why) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  why = cudaGetErrorString(status);
  return status == cudaSuccess && devices > 0;
}

std::vector<device_shape> device_shapes() {
  std::vector<device_shape> shapes;
  for (const compiled& one : all) shapes.push_back(one.shape);
  return shapes;
}

device_pipeline make_device_pipeline(const pipeline_options& o) {
  for (const compiled& one : all)
    if (one.shape.element == o.element && one.shape.head_dim == o.head_dim) return one.make(o);
  throw choice_error("no device pipeline is compiled for that shape");
}

}  // namespace tests
