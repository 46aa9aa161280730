// Pipelines of the published policies, of each compiled shape.
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "device_pipeline.hpp"
#include "device_pipeline_of_shape.cuh"

namespace freekv::examples {

namespace {

template <data_type Type>
using element_of = std::conditional_t<Type == data_type::f32, float,
                                      std::conditional_t<Type == data_type::f16, half, bfloat16>>;

template <class Shape>
std::unique_ptr<pipeline> make(const pipeline_options& o) {
  using implementation = device_pipeline_type<Shape>;
  auto s = device_settings<typename implementation::settings>(o);
  s.correction = policy_maker<cosine_drift>::from(o.method, {});
  return std::make_unique<device_pipeline_of_shape<implementation>>(s, o);
}

template <std::size_t... I>
std::unique_ptr<pipeline> of_shape(const pipeline_options& o, std::index_sequence<I...>) {
  std::unique_ptr<pipeline> made;
  ((device_shapes[I].element == o.element && device_shapes[I].head_dim == o.head_dim &&
    (made = make<kv_shape<element_of<device_shapes[I].element>, device_shapes[I].head_dim>>(o), true)) ||
   ...);
  return made;
}

}  // namespace

bool device_is_there(std::string& why) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  why = cudaGetErrorString(status);
  return status == cudaSuccess && devices > 0;
}

std::unique_ptr<pipeline> make_device_shapes(const pipeline_options& o) {
  return of_shape(o, std::make_index_sequence<std::size(device_shapes)>{});
}

}  // namespace freekv::examples
