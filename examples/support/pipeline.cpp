#include "pipeline.hpp"

#include <algorithm>
#include <utility>

#include "compiled_shapes.hpp"
#include "pipeline_beside_sliding.hpp"

namespace freekv::examples {

namespace {

template <class Element>
constexpr data_type type_of = data_type::f32;
template <>
constexpr data_type type_of<half> = data_type::f16;
template <>
constexpr data_type type_of<bfloat16> = data_type::bf16;

struct compiled_shape {
  data_type element;
  int head_dim;
  std::unique_ptr<pipeline> (*make)(const pipeline_options&, host_backend&);
  void (*calibrate)(const pipeline_options&, int, std::span<const float>, std::span<const float>,
                    std::span<float>);
};

template <class Shape>
constexpr compiled_shape compiled{type_of<typename Shape::element_type>, Shape::head_dim,
                                  &make_pipeline_of<Shape>, &calibrate_of<Shape>};

#define FREEKV_ENTRY(...) compiled<__VA_ARGS__>,
constexpr compiled_shape all_compiled[] = {FREEKV_COMPILED_SHAPES(FREEKV_ENTRY)};
#undef FREEKV_ENTRY

const compiled_shape* find_compiled(data_type element, int head_dim) {
  for (const compiled_shape& shape : all_compiled)
    if (shape.element == element && shape.head_dim == head_dim) return &shape;
  return nullptr;
}

/// The name that FREEKV_ELEMENTS knows it by.
std::string name_of(data_type element) {
  switch (element) {
    case data_type::f32:
      return "float";
    case data_type::f16:
      return "half";
    case data_type::bf16:
      return "bfloat16";
    default:
      throw choice_error("keys and values cannot be kept as " + std::string(dtype_name(element)) +
                         "; choose F32, F16 or BF16");
  }
}

/// `list` with `entry`, which it may have already.
std::string joined(const std::string& list, const std::string& entry) {
  return (";" + list + ";").find(";" + entry + ";") == std::string::npos ? list + ";" + entry : list;
}

}  // namespace

std::string sentence_of_missing(data_type element, int head_dim, const compiled_lists& lists) {
  const std::string name = name_of(element);
  const std::string sentence =
      "head_dim " + std::to_string(head_dim) + " of type " + name + " is not among the shapes compiled in (" +
      lists.head_dims + " in FREEKV_HEAD_DIMS, " + lists.elements + " in FREEKV_ELEMENTS" +
      (lists.other_elements.empty() ? "" : ", " + lists.other_elements + " in FREEKV_OTHER_ELEMENTS") + ")";
  if (head_dim < 8 || head_dim > 256 || head_dim % 8 != 0)
    return sentence + " and cannot be; take a multiple of 8 from 8 to 256";
  const std::string folder = "'" + lists.build_folder + "'";
  return sentence +
         "; add it: cmake '-DFREEKV_HEAD_DIMS=" + joined(lists.head_dims, std::to_string(head_dim)) +
         "' '-DFREEKV_ELEMENTS=" + joined(lists.elements, name) +
         (lists.other_elements.empty() ? "' " : "' '-DFREEKV_OTHER_ELEMENTS=' ") + folder +
         " && cmake --build " + folder;
}

void check_compiled(data_type element, int head_dim) {
  (void)name_of(element);
  if (find_compiled(element, head_dim) == nullptr)
    throw choice_error(sentence_of_missing(
        element, head_dim, {head_dims_list, elements_list, other_elements_list, build_folder}));
}

std::optional<file_store_options> store_file_of(const pipeline_options& o) {
  if (o.store_file.empty()) return {};
  return file_store_options{.path = o.store_file, .direct = o.direct_io};
}

std::unique_ptr<pipeline> make_pipeline(const pipeline_options& options, host_backend& backend) {
  check_compiled(options.element, options.head_dim);
  const auto make = find_compiled(options.element, options.head_dim)->make;
  const auto& slides = options.sliding_layers;
  if (options.method.evicts() && std::find(slides.begin(), slides.end(), true) != slides.end())
    return std::make_unique<pipeline_beside_sliding>(options, backend, make);
  return make(options, backend);
}

void check_thinning(const method_spec& m) {
  if (!m.thins()) return;
  if (!(m.thin > 0.0f && m.thin < 1.0f))
    throw choice_error("prompts cannot be thinned to a share of " + freekv::detail::decimal(m.thin) +
                       "; choose one above 0 and up to 1, which keeps them whole");
  if (m.evicts())
    throw choice_error("eviction " + m.eviction +
                       " chooses by itself what stays of a prompt; thin prompts of what retrieves");
  if (m.codec == low_rank_keys<>::name)
    throw choice_error(
        "codec low_rank_keys rotates keys by the numbers of their rows, and rows of a thinned prompt are not "
        "numbered as its tokens; choose another codec, or keep prompts whole");
  if (m.completes())
    throw choice_error("completion " + m.completion +
                       " attends from rows of the prompt, and a thinned one has others; keep prompts whole");
}

void calibrate(const pipeline_options& options, int layer, std::span<const float> keys,
               std::span<const float> queries, std::span<float> temperatures) {
  check_compiled(options.element, options.head_dim);
  find_compiled(options.element, options.head_dim)->calibrate(options, layer, keys, queries, temperatures);
}

}  // namespace freekv::examples
