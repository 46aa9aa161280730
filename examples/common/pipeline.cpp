#include "pipeline.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace freekv::examples {

namespace {

template <class Element, std::size_t... I>
std::unique_ptr<pipeline> of_head_dim(const pipeline_options& options, host_backend& backend,
                                      std::index_sequence<I...>) {
  std::unique_ptr<pipeline> made;
  ((options.head_dim == head_dims[I] &&
    (made = make_pipeline_of<kv_shape<Element, head_dims[I]>>(options, backend), true)) ||
   ...);
  return made;
}

}  // namespace

void check_compiled(int head_dim) {
  if (std::find(std::begin(head_dims), std::end(head_dims), head_dim) != std::end(head_dims)) return;
  std::string compiled;
  for (const int d : head_dims) compiled += (compiled.empty() ? "" : ", ") + std::to_string(d);
  throw choice_error("head_dim " + std::to_string(head_dim) + " is not among those compiled in (" + compiled +
                     "); configure with a longer list in -DFREEKV_HEAD_DIMS");
}

std::unique_ptr<pipeline> make_pipeline(const pipeline_options& options, host_backend& backend) {
  check_compiled(options.head_dim);
  constexpr auto all = std::make_index_sequence<std::size(head_dims)>{};
  std::unique_ptr<pipeline> made;
  switch (options.element) {
    case data_type::f32:
      made = of_head_dim<float>(options, backend, all);
      break;
    case data_type::f16:
      made = of_head_dim<half>(options, backend, all);
      break;
    case data_type::bf16:
      made = of_head_dim<bfloat16>(options, backend, all);
      break;
    default:
      throw choice_error("keys and values cannot be kept as " + std::string(dtype_name(options.element)) +
                         "; choose F32, F16 or BF16");
  }
  return made;
}

}  // namespace freekv::examples
