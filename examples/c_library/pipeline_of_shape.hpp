// Defines `compiled`; included by the generated source of each shape alone.
#pragma once

#include <algorithm>
#include <freekv/core/size.hpp>
#include <numeric>
#include <string>
#include <string_view>
#include <vector>

#include "compiled.hpp"
#include "method_list.hpp"
#include "pipeline.hpp"

namespace freekv::c_library {

template <class Element>
inline constexpr freekv_element element_of = FREEKV_F32;
template <>
inline constexpr freekv_element element_of<half> = FREEKV_F16;
template <>
inline constexpr freekv_element element_of<bfloat16> = FREEKV_BF16;
template <>
inline constexpr freekv_element element_of<fp8_e4m3> = FREEKV_FP8_E4M3;

/// Memory of `rows` rows of `numbers`, as many apart or, where it is not 0, `stride`; or none.
template <class T>
std::span<T> rows_at(T* memory, std::int32_t rows, int numbers, std::int64_t stride = 0) {
  if (memory == nullptr || (rows > 0 && stride > (std::int64_t{1} << 56) / rows)) return {};
  return {memory, stride > numbers && rows > 0 ? to_size(rows - 1) * to_size(stride) + to_size(numbers)
                                               : to_size(rows) * to_size(numbers)};
}

/// Calls `use` with a null pointer to the type. Throws usage_error; `what` has it: "append: query_element".
template <class Use>
void with_type(std::int32_t element, const char* what, const Use& use) {
  switch (element) {
    case 0:
    case FREEKV_F32:
      return use(static_cast<float*>(nullptr));
    case FREEKV_F16:
      return use(static_cast<half*>(nullptr));
    case FREEKV_BF16:
      return use(static_cast<bfloat16*>(nullptr));
    default:
      throw usage_error(std::string(what) + " is " + std::to_string(element) +
                        "; give FREEKV_F32, FREEKV_F16 or FREEKV_BF16");
  }
}

// ---- Steps, which both pipelines have ----

template <class Pipeline>
void append_rows(typename Pipeline::step& step, const Pipeline& pipeline, int layer, const freekv_rows& r) {
  using element = typename Pipeline::element;
  const auto& s = pipeline.configuration();
  const int kv = s.model.kv_heads * Pipeline::head_dim, query = s.model.query_heads * Pipeline::head_dim;
  const auto append = [&]<class In, class Query>(const In*, const Query*) {
    step.append(layer, kv_rows<In, Query>{
                           rows_at(static_cast<const In*>(r.keys), r.rows, kv, r.key_stride),
                           rows_at(static_cast<const In*>(r.values), r.rows, kv, r.value_stride),
                           rows_at(static_cast<const Query*>(r.queries), r.rows, query, r.query_stride),
                           {.keys = r.key_stride, .values = r.value_stride, .queries = r.query_stride}});
  };
  const auto given_as = [&]<class In>(const In* in) {
    with_type(r.query_element, "append: query_element", [&](const auto* type) { append(in, type); });
  };
  if (r.element == element_of<element>) return given_as(static_cast<const element*>(nullptr));
  if (r.element == FREEKV_F32) return given_as(static_cast<const float*>(nullptr));
  std::string given = "FREEKV_F32";
  if constexpr (std::is_same_v<element, fp8_e4m3>) {
    if (r.element == FREEKV_F16) return given_as(static_cast<const half*>(nullptr));
    if (r.element == FREEKV_BF16) return given_as(static_cast<const bfloat16*>(nullptr));
    given += ", FREEKV_F16, FREEKV_BF16";
  }
  throw usage_error("append: element is " + std::to_string(r.element) + "; give " + given +
                    " or the stored one, " + std::to_string(element_of<element>));
}

template <class Pipeline>
void attend_rows(typename Pipeline::step& step, const Pipeline& pipeline, int layer,
                 const freekv_attention& to) {
  const auto& s = pipeline.configuration();
  const int numbers = s.model.query_heads * Pipeline::head_dim;
  const std::span<float> lse = rows_at(to.lse, to.rows, s.model.query_heads);
  with_type(to.out_element, "attend: out_element", [&]<class Out>(Out*) {
    step.template attend<Out>(layer, rows_at(static_cast<Out*>(to.out), to.rows, numbers, to.out_stride), lse,
                              to.out_stride);
  });
}

inline std::int32_t total(std::span<const std::int32_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int32_t{0});
}
inline freekv_step_report counts_of(const step_report& r, std::size_t slice_bytes) {
  return {.size = sizeof(freekv_step_report),
          .corrected_heads = static_cast<std::int32_t>(
              std::count_if(r.corrected.begin(), r.corrected.end(), [](auto c) { return c != 0; })),
          .attended = total(r.attended_count),
          .recalled = total(r.recalled),
          .recalled_before_attention = total(r.recalled_before_attention),
          .promoted = total(r.promoted),
          .slice_bytes = slice_bytes};
}

template <class Needs>
freekv_footprint bytes_of(const Needs& needs) {
  const memory_bytes& b = needs.bytes();
  return {.size = sizeof(freekv_footprint),
          .slow = needs.slow_bytes(),
          .fast = needs.fast_bytes(),
          .store = b.store,
          .file = b.file,
          .complete = b.complete,
          .slots = b.slots,
          .summaries = b.summaries,
          .codec = b.codec,
          .state = b.state,
          .staging = b.staging};
}

// ---- Settings ----

inline budget budget_of(const freekv_settings& s) {
  if (s.sink == 0 && s.window == 0 && s.selected_units == 0) return {};
  return {.sink = s.sink, .window = s.window, .selected_units = s.selected_units};
}
inline int or_else(int given, int otherwise) { return given == 0 ? otherwise : given; }

/// Members that a method has no use for are 0.
[[gnu::cold]] inline settings_error useless(const char* member, std::string_view method) {
  return settings_error(std::string(member) + " is set, and " + std::string(method) +
                        " has no use for it; leave it 0, or choose another method");
}

/// Values and data of the policies that take any.
template <class Method>
struct given_values {
  const pipeline_request& request;
  bool tau = false, delta = false, top_p = false, codebooks = false, basis = false;

  template <class Policy>
  Policy operator()(Policy policy) {
    [[maybe_unused]] const freekv_settings& s = request.settings;
    if constexpr (std::is_same_v<Policy, cosine_drift>) {
      tau = true;
      if (s.tau != 0.0f) policy.tau = s.tau;
    } else if constexpr (std::is_same_v<Policy, mass_deficit> || std::is_same_v<Policy, missing_share>) {
      delta = true;
      if (s.delta != 0.0f) policy.delta = s.delta;
    } else if constexpr (std::is_same_v<Policy, freekv::top_p>) {
      top_p = true;
      if (s.top_p != 0.0f) policy.p = s.top_p;
    } else if constexpr (requires { policy.books; }) {
      codebooks = true;
      const freekv_key_codebooks& b = request.codebooks;
      policy.books = {.data = b.data,
                      .layers = b.layers,
                      .kv_heads = b.kv_heads,
                      .head_dim = b.head_dim,
                      .mean_codes = b.mean_codes,
                      .mean_dims = b.mean_dims,
                      .codes = b.codes,
                      .dims = b.dims};
    } else if constexpr (requires { policy.basis; }) {
      basis = true;
      const freekv_subspace_basis& b = request.basis;
      policy.basis = {b.data, b.layers, b.kv_heads, b.rank, b.head_dim};
    }
    return policy;
  }
  /// Throws settings_error for what no policy has taken.
  void expect_all_taken() const {
    const freekv_settings& s = request.settings;
    const std::pair<bool, const char*> members[] = {{s.tau != 0.0f && !tau, "tau"},
                                                    {s.delta != 0.0f && !delta, "delta"},
                                                    {s.top_p != 0.0f && !top_p, "top_p"},
                                                    {s.codebooks != nullptr && !codebooks, "codebooks"},
                                                    {s.basis != nullptr && !basis, "basis"}};
    for (const auto& [is_useless, member] : members)
      if (is_useless) throw useless(member, Method::name);
  }
};

/// The policies of a method that retrieves.
template <class Method, class Settings>
void choose(Settings& s, const pipeline_request& request) {
  using pack = typename Method::pack;
  static_assert(
      !std::is_same_v<typename pack::plan, by_head>,
      "the C library has no methods whose heads differ in kind: freekv_settings has no list of these");
  static_assert(
      std::is_same_v<typename pack::codec, identity>,
      "the C library has no methods with a codec that takes data: freekv_settings has no member for it");
  static_assert(
      !requires { Method::prompt_share; }, "the C library has no methods that thin prompts: no call does it");
  static_assert(!requires { Method::calibrated; },
                "the C library has no methods that are calibrated: freekv_settings has no temperatures");
  given_values<Method> with{request};
  s.unit = {{int{typename pack::unit{}.tokens}}};
  s.summary = with(typename pack::summary{});
  s.pooling = typename pack::pooling{};
  s.pinning = typename pack::pinning{};
  s.scope = typename pack::scope{};
  s.completion = typename pack::completion{};
  s.residency = typename pack::residency{};
  s.codec = typename pack::codec{};
  if constexpr (requires { Method::selection; })
    s.selection = with(Method::selection);
  else
    s.selection = with(typename pack::selection{});
  if constexpr (requires { Method::correction; })
    s.correction = with(Method::correction);
  else
    s.correction = with(typename pack::correction{});
  if (request.settings.layer_kinds == nullptr) s.plan = typename pack::plan{};
  with.expect_all_taken();
}

inline by_layer plan_of(std::span<const std::int32_t> kinds) {
  by_layer plan;
  for (const std::int32_t kind : kinds) {
    if (kind < FREEKV_LAYER_RETRIEVAL || kind > FREEKV_LAYER_SLIDING)
      throw settings_error("layer_kinds has " + std::to_string(kind) + "; kinds are 0 to 3");
    constexpr layer_kind known[] = {layer_kind::retrieval, layer_kind::complete, layer_kind::window,
                                    layer_kind::sliding};
    plan.kinds.push_back(known[kind]);
  }
  return plan;
}

/// `count` numbers from `data` on, none where that is null.
inline std::vector<float> floats(const float* data, std::size_t count) {
  return data == nullptr ? std::vector<float>{} : std::vector<float>(data, data + count);
}

// ---- Methods that retrieve ----

template <class Shape, class Methods, class Backend>
class retrieving : public pipeline {
 protected:
  using implementation = pipeline_of_methods<Shape, Methods, Backend>;
  using settings = typename implementation::settings;
  using element = typename implementation::element;

 public:
  retrieving(const pipeline_request& request, Backend& backend, const memory_resources& memory)
      : pipeline_(settings_of(request), backend, memory, blocks_of(request.settings)) {}

  static pipeline_needs measure(const pipeline_request& request, Backend& backend) {
    const auto blocks = blocks_of(request.settings);
    const typename implementation::footprint needs(settings_of(request), backend, blocks);
    pipeline_needs all;
    all.footprint = bytes_of(needs);
    for (int layer = 0; layer < needs.configuration().model.layers; ++layer) {
      all.slots.push_back(needs.slots(layer));
      all.slots_per_sequence.push_back(needs.slots_per_sequence(layer));
    }
    return all;
  }

  std::string name() const override { return pipeline_.name(); }
  void synchronize() override { pipeline_.synchronize(); }
  sequence_id open() override { return pipeline_.open(); }
  void release(sequence_id id) override { pipeline_.release(id); }
  int tokens(sequence_id id) const override { return pipeline_.tokens(id); }
  std::int32_t free_pages() const override { return pipeline_.free_pages(); }
  sequence_id fork(sequence_id parent) override { return pipeline_.fork(parent); }
  void truncate(sequence_id id, int tokens) override { pipeline_.truncate(id, tokens); }
  void preempt(sequence_id id) override { pipeline_.preempt(id); }
  void restore(sequence_id id) override { pipeline_.restore(id); }
  prefix keep_prefix(sequence_id id, int tokens) override { return pipeline_.keep_prefix(id, tokens); }
  sequence_id open(const prefix& start) override { return pipeline_.open(start); }

  void begin_step(std::span<const step_input> rows) override { step_ = pipeline_.begin_step(rows); }
  void append(int layer, const freekv_rows& rows) override { append_rows(step_, pipeline_, layer, rows); }
  void attend(int layer, const freekv_attention& to) override { attend_rows(step_, pipeline_, layer, to); }
  void correct(int layer) override { step_.correct(layer); }
  resident_table table(int layer, sequence_id id, int head, std::span<std::int32_t> blocks) override {
    return head == -1 ? step_.table(layer, id, blocks) : step_.table(layer, id, head, blocks);
  }
  void finish_layer(int layer) override { step_.finish_layer(layer); }
  void end_step() override { step_.end(); }
  void abandon_step() noexcept override { step_.abandon(); }
  void abandon(sequence_id id) override { step_.abandon(id); }

  freekv_step_report report(int layer, sequence_id id) const override {
    return counts_of(pipeline_.report(layer)[id], pipeline_.slice_bytes());
  }
  void reserve(std::span<const step_input> rows) override { pipeline_.reserve(rows); }

 private:
  static settings settings_of(const pipeline_request& request) {
    const freekv_settings& given = request.settings;
    if (given.max_prompt != 0) throw useless("max_prompt", given.method);
    if (given.store_file == nullptr && given.store_direct != 0)
      throw settings_error("store_direct is set without a store_file; name one, or leave it 0");
    settings s;
    s.model = {.layers = given.layers, .query_heads = given.query_heads, .kv_heads = given.kv_heads};
    s.budget = budget_of(given);
    s.capacity.max_tokens = given.max_tokens;
    s.capacity.max_sequences = or_else(given.max_sequences, 1);
    s.capacity.max_resident = given.max_resident;
    s.capacity.max_decode_rows = or_else(given.max_decode_rows, 1);
    s.capacity.store_tokens = given.store_tokens;
    s.capacity.selected_tokens = given.selected_tokens;
    s.capacity.store_file = request.store_file;
    s.attention.scale = given.scale;
    s.attention.sliding_window = given.sliding_window;
    s.attention.soft_cap = given.soft_cap;
    s.attention.sink_logits = floats(given.sink_logits, to_size(given.layers) * to_size(given.query_heads));
    if (given.scale_count < 0 || given.scale_count > std::int64_t{given.layers} * given.kv_heads ||
        (given.scale_count == 0) != (given.key_scales == nullptr && given.value_scales == nullptr))
      throw settings_error("scale_count is " + std::to_string(given.scale_count) +
                           "; give how many numbers key_scales and value_scales have each: 1, layers or "
                           "layers * kv_heads, or 0 and neither");
    s.attention.key_scales = floats(given.key_scales, to_size(given.scale_count));
    s.attention.value_scales = floats(given.value_scales, to_size(given.scale_count));
    s.attention.lse_base = given.log_base == FREEKV_LOG_2 ? log_base::two : log_base::e;
    s.page = {{or_else(given.page_tokens, 32)}};
    if (given.route == FREEKV_IN_PLACE) s.route = in_place{};
    if (given.layer_kinds != nullptr) s.plan = plan_of({given.layer_kinds, to_size(given.layers)});
    choose_by_name(Methods{}, s, request);
    return s;
  }
  template <class... Method>
  static void choose_by_name(methods::method_list<Method...>, settings& s, const pipeline_request& request) {
    const auto try_one = [&]<class One>(std::type_identity<One>) {
      if constexpr (!forgets<One>)
        if (request.settings.method == One::name) choose<One>(s, request);
    };
    (try_one(std::type_identity<Method>{}), ...);
  }
  static std::vector<paged_blocks<element>> blocks_of(const freekv_settings& given) {
    std::vector<paged_blocks<element>> blocks;
    for (std::int32_t layer = 0; given.blocks != nullptr && layer < given.layers; ++layer) {
      const freekv_engine_blocks& b = given.blocks[layer];
      blocks.push_back({{static_cast<element*>(b.keys), static_cast<element*>(b.values), b.block_stride,
                         b.token_stride, b.head_stride, or_else(given.page_tokens, 32)},
                        std::span(b.ids, b.count)});
    }
    return blocks;
  }

 protected:
  implementation pipeline_;
  typename implementation::step step_;
};

// ---- Methods that forget ----

template <class Shape, class Methods>
class evicting final : public pipeline {
  using implementation = evicting_pipeline_of_methods<Shape, Methods>;
  using settings = typename implementation::settings;

 public:
  evicting(const pipeline_request& request, host_backend& backend, const memory_resources& memory)
      : pipeline_(settings_of(request), backend, memory) {}

  static pipeline_needs measure(const pipeline_request& request, host_backend& backend) {
    const typename implementation::footprint needs(settings_of(request), backend);
    const std::size_t layers = to_size(needs.configuration().model.layers);
    return {.footprint = bytes_of(needs),
            .slots = std::vector<std::int64_t>(layers),
            .slots_per_sequence = std::vector<std::int32_t>(layers)};
  }

  std::string name() const override { return pipeline_.name(); }
  void synchronize() override { pipeline_.synchronize(); }
  sequence_id open() override { return pipeline_.open(); }
  sequence_id fork(sequence_id parent) override { return pipeline_.fork(parent); }
  void release(sequence_id id) override { pipeline_.release(id); }
  int tokens(sequence_id id) const override { return pipeline_.tokens(id); }
  void begin_step(std::span<const step_input> rows) override { step_ = pipeline_.begin_step(rows); }
  void append(int layer, const freekv_rows& rows) override { append_rows(step_, pipeline_, layer, rows); }
  void attend(int layer, const freekv_attention& to) override { attend_rows(step_, pipeline_, layer, to); }
  void end_step() override { step_.end(); }
  void abandon_step() noexcept override { step_.abandon(); }
  freekv_step_report report(int layer, sequence_id id) const override {
    return counts_of(pipeline_.report(layer)[id], pipeline_.slice_bytes());
  }

 private:
  static settings settings_of(const pipeline_request& request) {
    const freekv_settings& given = request.settings;
    const std::pair<bool, const char*> members[] = {{given.max_resident != 0, "max_resident"},
                                                    {given.max_decode_rows != 0, "max_decode_rows"},
                                                    {given.store_tokens != 0, "store_tokens"},
                                                    {given.selected_tokens != 0, "selected_tokens"},
                                                    {given.route != FREEKV_RESIDENT, "route"},
                                                    {given.sliding_window != 0, "sliding_window"},
                                                    {given.layer_kinds != nullptr, "layer_kinds"},
                                                    {given.sink_logits != nullptr, "sink_logits"},
                                                    {given.soft_cap != 0.0f, "soft_cap"},
                                                    {given.tau != 0.0f, "tau"},
                                                    {given.delta != 0.0f, "delta"},
                                                    {given.top_p != 0.0f, "top_p"},
                                                    {given.codebooks != nullptr, "codebooks"},
                                                    {given.basis != nullptr, "basis"},
                                                    {given.store_file != nullptr, "store_file"},
                                                    {given.store_direct != 0, "store_direct"},
                                                    {given.blocks != nullptr, "blocks"},
                                                    {given.key_scales != nullptr, "key_scales"},
                                                    {given.value_scales != nullptr, "value_scales"},
                                                    {given.scale_count != 0, "scale_count"}};
    for (const auto& [is_useless, member] : members)
      if (is_useless) throw useless(member, given.method);
    const budget b = budget_of(given);
    const int page = or_else(given.page_tokens, 32);
    if (given.max_tokens < 1 || given.max_prompt < 0 || given.max_prompt > given.max_tokens)
      throw settings_error("max_tokens is " + std::to_string(given.max_tokens) + " and max_prompt " +
                           std::to_string(given.max_prompt) +
                           "; a sequence has at least 1 token, of which 0 or more are of its prompt");
    const std::int64_t kept = std::int64_t{b.sink} + b.window + std::int64_t{b.selected_units} * page;
    settings s;
    s.model = {.layers = given.layers, .query_heads = given.query_heads, .kv_heads = given.kv_heads};
    s.budget = static_cast<int>(std::min(kept, 2 * std::int64_t{given.max_tokens} + 1024));
    s.capacity.max_prompt = or_else(given.max_prompt, given.max_tokens);
    s.capacity.max_generated = given.max_tokens - given.max_prompt;
    s.capacity.max_sequences = s.capacity.max_prefills = or_else(given.max_sequences, 1);
    s.attention.scale = given.scale;
    s.attention.lse_base = given.log_base == FREEKV_LOG_2 ? log_base::two : log_base::e;
    choose_by_name(Methods{}, s, given, b, page);
    return s;
  }
  template <class... Method>
  static void choose_by_name(methods::method_list<Method...>, settings& s, const freekv_settings& given,
                             const budget& b, int page) {
    const auto try_one = [&]<class One>(std::type_identity<One>) {
      if constexpr (forgets<One>)
        if (given.method == One::name) {
          static_assert(
              !std::is_same_v<typename One::eviction, razor_attention_compensated>,
              "the C library has no methods whose heads differ: freekv_settings has no list of these");
          static_assert(!takes_worths<typename One::eviction>,
                        "the C library has no methods that take worths: freekv_rows has no member for them");
          static_assert(
              !std::is_same_v<typename One::eviction, dapq> && !cuts_blocks<typename One::eviction>,
              "the C library has no methods that probe rows observe prompts for: no call takes these");
          typename One::eviction eviction;
          if constexpr (std::is_same_v<typename One::eviction, raas>) {
            eviction.page = page;
            eviction.sink = b.sink;
            eviction.window = b.window;
          }
          s.eviction = eviction;
        }
    };
    (try_one(std::type_identity<Method>{}), ...);
  }

  implementation pipeline_;
  typename implementation::step step_;
};

// ---- The shape ----

template <class... Methods>
bool forgets_by_name(methods::method_list<Methods...>, std::string_view name) {
  return ((name == Methods::name && forgets<Methods>) || ...);
}

/// Calls `use` with the class of the request's method.
template <class Shape, class Methods, class Use>
auto with_class_of(const pipeline_request& request, const Use& use) {
  using kinds = kinds_of_methods<Methods>;
  constexpr bool fp8 = std::is_same_v<typename Shape::element_type, fp8_e4m3>;
  static_assert(kinds::any_retrieves || !fp8,
                "methods that forget keep keys and values as float, half or bfloat16");
  if constexpr (fp8) {
    if (forgets_by_name(Methods{}, request.settings.method))
      throw settings_error(std::string(request.settings.method) +
                           " forgets, and keeps keys and values as f32, f16 or bf16; choose one of these, or "
                           "a method that retrieves");
    return use(std::type_identity<retrieving<Shape, Methods, host_backend>>{});
  } else if constexpr (!kinds::any_retrieves)
    return use(std::type_identity<evicting<Shape, Methods>>{});
  else if constexpr (!kinds::any_forgets)
    return use(std::type_identity<retrieving<Shape, Methods, host_backend>>{});
  else
    return forgets_by_name(Methods{}, request.settings.method)
               ? use(std::type_identity<evicting<Shape, Methods>>{})
               : use(std::type_identity<retrieving<Shape, Methods, host_backend>>{});
}

template <class Shape>
compiled_shape<host_backend> compiled() {
  return {.element = element_of<typename Shape::element_type>,
          .head_dim = Shape::head_dim,
          .measure =
              [](const pipeline_request& request, host_backend& backend) {
                return with_class_of<Shape, compiled_methods>(
                    request,
                    [&]<class Class>(std::type_identity<Class>) { return Class::measure(request, backend); });
              },
          .create =
              [](const pipeline_request& request, host_backend& backend, const memory_resources& memory) {
                return with_class_of<Shape, compiled_methods>(
                    request, [&]<class Class>(std::type_identity<Class>) -> std::unique_ptr<pipeline> {
                      return std::make_unique<Class>(request, backend, memory);
                    });
              }};
}

}  // namespace freekv::c_library
