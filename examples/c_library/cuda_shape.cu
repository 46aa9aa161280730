// Pipelines of one shape on a device: FREEKV_C_ELEMENT and FREEKV_C_HEAD_DIM.
#include <cstdint>
#include <freekv/freekv.cuh>
#include <string>
#include <string_view>
#include <type_traits>

#include "compiled_for_cuda.cuh"
#include "pipeline_of_shape.hpp"

namespace freekv::c_library {

namespace {

/// Whether a device has a method.
template <class Method>
constexpr bool runs_on_a_device() {
  if constexpr (forgets<Method>)
    return false;
  else
    return std::is_same_v<typename Method::pack::completion, no_completion> &&
           !sampling_selection<typename Method::pack::selection> &&
           !hooks_of<typename Method::pack::correction>::has(hook::of_attention);
}

/// Those of a list that a device has.
template <class Found, class... Methods>
struct methods_of_a_device {
  using type = Found;
};
template <class... Found, class First, class... Rest>
struct methods_of_a_device<methods::method_list<Found...>, First, Rest...>
    : methods_of_a_device<std::conditional_t<runs_on_a_device<First>(), methods::method_list<Found..., First>,
                                             methods::method_list<Found...>>,
                          Rest...> {};
template <class... Methods>
auto of_list(methods::method_list<Methods...>) ->
    typename methods_of_a_device<methods::method_list<>, Methods...>::type;
using device_methods = decltype(of_list(compiled_methods{}));
static_assert(!std::is_same_v<device_methods, methods::method_list<>>,
              "FREEKV_C_METHODS has no method that a device has; add one that retrieves, as freekv_paper");

template <class... Methods>
void expect_on_a_device(methods::method_list<Methods...>, std::string_view name) {
  if (((name == Methods::name) || ...)) return;
  std::string text;
  ((text.append(text.empty() ? "" : ", ").append(Methods::name)), ...);
  throw settings_error(std::string("the CUDA backend does not have method \"")
                           .append(name)
                           .append("\" yet, but ")
                           .append(text)
                           .append("; take one of these, or freekv_backend_create_host"));
}

template <class Shape>
class on_a_device final : public retrieving<Shape, device_methods, cuda_backend> {
  using base = retrieving<Shape, device_methods, cuda_backend>;

 public:
  using base::base;

  void begin_captured_step(const freekv_step_bounds& most) override {
    this->step_ = this->pipeline_.begin_captured_step({.entries = most.entries,
                                                       .rows = most.rows,
                                                       .pages = most.pages,
                                                       .tokens = most.tokens,
                                                       .prompts = most.prompts != 0});
  }
  bool plan(std::span<const step_input> rows) override { return this->pipeline_.plan(rows); }
  void wait() override { this->pipeline_.wait(); }

  void queue_tables(int layer, const freekv_block_tables& to) override {
    this->step_.queue_tables(layer, device::block_tables{.rows = rows_of(to.rows, "queue_tables"),
                                                         .sequences = to.sequences,
                                                         .max_blocks = to.max_blocks,
                                                         .block_tokens = to.block_tokens,
                                                         .blocks = to.blocks,
                                                         .seq_lens = to.seq_lens,
                                                         .block_counts = to.block_counts,
                                                         .indptr = to.indptr,
                                                         .indices = to.indices,
                                                         .last_page_len = to.last_page_len});
  }
  int most_blocks(int layer, std::int32_t rows, int block_tokens) const override {
    return this->pipeline_.most_blocks(layer, rows_of(rows, "most_blocks"), block_tokens);
  }
  freekv_engine_blocks paged_kv(int layer) const override {
    const auto kv = this->pipeline_.paged_kv(layer);
    return {.keys = kv.keys,
            .values = kv.values,
            .block_stride = kv.block_stride,
            .token_stride = kv.token_stride,
            .head_stride = kv.head_stride,
            .ids = nullptr,
            .count = 0};
  }

 private:
  static device::table_rows rows_of(std::int32_t rows, const char* call) {
    constexpr device::table_rows known[] = {device::table_rows::by_head, device::table_rows::folded,
                                            device::table_rows::all_heads};
    if (rows < FREEKV_BY_HEAD || rows > FREEKV_ALL_HEADS)
      throw usage_error(std::string(call)
                            .append(": rows is ")
                            .append(std::to_string(rows))
                            .append("; give FREEKV_BY_HEAD, FREEKV_FOLDED or FREEKV_ALL_HEADS"));
    return known[rows];
  }
};

}  // namespace

template <class Shape>
compiled_shape<cuda_backend> compiled_for_cuda() {
  return {.element = element_of<typename Shape::element_type>,
          .head_dim = Shape::head_dim,
          .measure =
              [](const pipeline_request& request, cuda_backend& backend) {
                expect_on_a_device(device_methods{}, request.settings.method);
                return on_a_device<Shape>::measure(request, backend);
              },
          .create = [](const pipeline_request& request, cuda_backend& backend,
                       const memory_resources& memory) -> std::unique_ptr<pipeline> {
            expect_on_a_device(device_methods{}, request.settings.method);
            return std::make_unique<on_a_device<Shape>>(request, backend, memory);
          }};
}
template compiled_shape<cuda_backend> compiled_for_cuda<kv_shape<FREEKV_C_ELEMENT, FREEKV_C_HEAD_DIM>>();

}  // namespace freekv::c_library
