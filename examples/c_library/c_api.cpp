// The C interface: handles, and what turns calls into those of a pipeline.
#include <freekv/c_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <freekv/core/size.hpp>
#include <iterator>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "border.hpp"
#include "compiled.hpp"
#include "pipeline.hpp"

namespace freekv::c_library {

namespace {

// What is behind a struct's last member a newer version's member may take: there is nothing.
#define FREEKV_ENDS_WITH(type, member) \
  static_assert(offsetof(type, member) + sizeof(std::declval<type>().member) == sizeof(type))
FREEKV_ENDS_WITH(freekv_host_options, no_overlap);
FREEKV_ENDS_WITH(freekv_cuda_options, reserved);
FREEKV_ENDS_WITH(freekv_memory, deallocate);
FREEKV_ENDS_WITH(freekv_key_codebooks, data);
FREEKV_ENDS_WITH(freekv_subspace_basis, data);
FREEKV_ENDS_WITH(freekv_settings, reserved);
FREEKV_ENDS_WITH(freekv_footprint, staging);
FREEKV_ENDS_WITH(freekv_rows, query_stride);
FREEKV_ENDS_WITH(freekv_attention, out_stride);
FREEKV_ENDS_WITH(freekv_resident_table, tokens);
FREEKV_ENDS_WITH(freekv_step_report, slice_bytes);
FREEKV_ENDS_WITH(freekv_step_bounds, reserved);
FREEKV_ENDS_WITH(freekv_block_tables, last_page_len);
#undef FREEKV_ENDS_WITH

#define FREEKV_COMPILED(element, head_dim) compiled<kv_shape<element, head_dim>>(),
/// Made when it is first asked for, which may be in the constructor of a program's global.
std::span<const compiled_shape<host_backend>> shapes() {
  static const compiled_shape<host_backend> all[] = {FREEKV_C_SHAPES(FREEKV_COMPILED)};
  return all;
}
#undef FREEKV_COMPILED

struct method_entry {
  const char* name;
  const char* about;
};
template <class... Methods>
constexpr auto entries_of(methods::method_list<Methods...>) {
  return std::array{method_entry{Methods::name.data(), Methods::about.data()}...};
}
constexpr auto method_entries = entries_of(compiled_methods{});

void expect_method(std::string_view name) {
  std::string text;
  for (const method_entry& method : method_entries) {
    if (name == method.name) return;
    text += (text.empty() ? "" : ", ") + std::string(method.name);
  }
  throw settings_error("method \"" + std::string(name) + "\" is not among those compiled in (" + text +
                       "); build the library with it in FREEKV_C_METHODS");
}

void expect_one_of(const char* member, std::int32_t given, std::int32_t last) {
  if (given < 0 || given > last)
    throw settings_error(std::string(member) + " is " + std::to_string(given) + "; choose from 0 to " +
                         std::to_string(last));
}

/// The settings of a call, checked as far as a pipeline cannot. Throws usage_error or settings_error.
pipeline_request request_of(const freekv_settings* given) {
  pipeline_request request{
      .settings = taken(given, "settings"), .codebooks = {}, .basis = {}, .store_file = {}};
  freekv_settings& s = request.settings;
  if (s.method == nullptr) s.method = "freekv";
  expect_method(s.method);
  expect_one_of("route", s.route, FREEKV_IN_PLACE);
  expect_one_of("log_base", s.log_base, FREEKV_LOG_2);
  if (s.layers < 1)
    throw settings_error("layers is " + std::to_string(s.layers) + "; a pipeline has at least 1");
  if (s.query_heads < 1)
    throw settings_error("query_heads is " + std::to_string(s.query_heads) + "; a layer has at least 1");
  if (s.kv_heads < 1)
    throw settings_error("kv_heads is " + std::to_string(s.kv_heads) + "; a layer has at least 1");
  if (s.codebooks != nullptr) request.codebooks = taken(s.codebooks, "codebooks");
  if (s.basis != nullptr) request.basis = taken(s.basis, "basis");
  if (s.store_file != nullptr)
    request.store_file = file_store_options{.path = s.store_file, .direct = s.store_direct != 0};
  return request;
}

/// Threads of the host.
class threads final : public backend_of_shapes<host_backend> {
 public:
  explicit threads(const freekv_host_options& options)
      : backend_of_shapes(shapes(), host_options{.threads = options.threads == 0 ? 1 : options.threads,
                                                 .overlap = options.no_overlap == 0}) {}
  memory_resources memory() override { return {}; }
};

/// Memory of the caller's.
class given_memory final : public std::pmr::memory_resource {
 public:
  given_memory(const freekv_memory* given, const char* what) : of_(taken(given, what)) {
    if (of_.allocate == nullptr || of_.deallocate == nullptr)
      throw usage_error(std::string(what) + ": allocate or deallocate is NULL");
  }

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* const memory = of_.allocate(of_.context, bytes, alignment);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  void do_deallocate(void* memory, std::size_t bytes, std::size_t alignment) override {
    of_.deallocate(of_.context, memory, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  freekv_memory of_;
};

}  // namespace
}  // namespace freekv::c_library

namespace c = freekv::c_library;

// ---- Handles ----

struct freekv_backend {
  std::unique_ptr<c::backend> of;
  bool has_pipeline = false;
};

struct freekv_step {
  freekv_pipeline& of;
};

struct freekv_pipeline {
  freekv_pipeline(freekv_backend& of, const freekv_settings* given) : backend(of), step{*this} {
    const c::pipeline_request request = c::request_of(given);
    if (backend.has_pipeline)
      throw freekv::usage_error(
          "pipeline_create: the backend has a pipeline; destroy that, or make another backend");
    freekv::memory_resources memory = backend.of->memory();
    if (request.settings.slow_memory != nullptr)
      memory.slow = &slow.emplace(request.settings.slow_memory, "slow_memory");
    if (request.settings.fast_memory != nullptr)
      memory.fast = &fast.emplace(request.settings.fast_memory, "fast_memory");
    pipeline = backend.of->create(request, memory);
    name = pipeline->name();
    rows.reserve(freekv::to_size(std::max(1, request.settings.max_sequences)));
    backend.has_pipeline = true;
  }
  freekv_pipeline(const freekv_pipeline&) = delete;
  freekv_pipeline& operator=(const freekv_pipeline&) = delete;
  ~freekv_pipeline() { backend.has_pipeline = false; }

  freekv_backend& backend;
  std::optional<c::given_memory> slow, fast;
  std::unique_ptr<c::pipeline> pipeline;
  std::string name;
  std::vector<freekv::step_input> rows;  // of the latest call that lists any
  freekv_step step;
  int prefixes = 0;
};

struct freekv_prefix {
  freekv_pipeline& of;
  freekv::prefix pages;
};

namespace {

using c::guarded;
using c::required;
using freekv::sequence_id;

/// A step's rows, in the pipeline's own list. Throws usage_error; `what` is the call.
std::span<const freekv::step_input> rows_of(freekv_pipeline& pipeline, const freekv_step_input* entries,
                                            std::size_t count, const char* what) {
  if (count > 0 && entries == nullptr) required(entries, (std::string(what) + ": entries").c_str());
  std::vector<freekv::step_input>& rows = pipeline.rows;
  rows.clear();
  for (std::size_t i = 0; i < count; ++i) {
    const freekv_step_input& given = entries[i];
    if (given.phase != FREEKV_DECODE && given.phase != FREEKV_PREFILL)
      throw freekv::usage_error(std::string(what) + ": phase " + std::to_string(given.phase) +
                                " of sequence " + std::to_string(given.sequence) +
                                "; give FREEKV_DECODE or FREEKV_PREFILL");
    rows.push_back({sequence_id{given.sequence}, given.tokens,
                    given.phase == FREEKV_DECODE ? freekv::step_phase::decode : freekv::step_phase::prefill});
  }
  return rows;
}

/// Calls `call` with the pipeline behind a handle.
template <class Call>
freekv_status with_pipeline(freekv_pipeline* handle, const char* what, const Call& call) noexcept {
  return guarded([&] { call(*required(handle, what).pipeline); });
}
template <class Call>
freekv_status with_step(freekv_step* handle, const char* what, const Call& call) noexcept {
  return guarded([&] { call(*required(handle, what).of.pipeline); });
}

}  // namespace

extern "C" {

// ---- What the library is ----

int32_t freekv_abi(void) { return FREEKV_ABI; }
int32_t freekv_version(void) {
  return 1000000 * FREEKV_VERSION_MAJOR + 1000 * FREEKV_VERSION_MINOR + FREEKV_VERSION_PATCH;
}

size_t freekv_shape_count(void) { return c::shapes().size(); }
freekv_status freekv_shape_at(size_t index, int32_t* element, int32_t* head_dim) {
  return guarded([&] {
    const auto shapes = c::shapes();
    if (index >= shapes.size())
      throw freekv::usage_error("shape_at: " + std::to_string(index) + " is not one of " +
                                std::to_string(shapes.size()));
    required(element, "shape_at: element") = shapes[index].element;
    required(head_dim, "shape_at: head_dim") = shapes[index].head_dim;
  });
}

size_t freekv_method_count(void) { return c::method_entries.size(); }
const char* freekv_method_name(size_t index) {
  return index < c::method_entries.size() ? c::method_entries[index].name : nullptr;
}
const char* freekv_method_about(size_t index) {
  return index < c::method_entries.size() ? c::method_entries[index].about : nullptr;
}

const char* freekv_element_name(int32_t element) { return c::text_of(element); }
const char* freekv_status_name(int32_t status) {
  constexpr const char* names[] = {
      "ok",           "settings_error", "usage_error",  "pool_exhausted", "store_error",
      "replay_error", "device_error",   "thread_error", "out_of_memory",  "unexpected_error"};
  return status >= 0 && status < static_cast<int32_t>(std::size(names)) ? names[status] : nullptr;
}

const char* freekv_last_message(void) { return c::last_message(); }

// ---- Backend ----

freekv_status freekv_backend_create_host(const freekv_host_options* options, freekv_backend** backend) {
  return guarded([&] {
    const freekv_host_options given = c::taken(options, "options");
    freekv_backend*& made = required(backend, "backend_create_host: backend");
    made = new freekv_backend{.of = std::make_unique<c::threads>(given)};
  });
}
int32_t freekv_has_cuda(void) { return c::has_cuda() ? 1 : 0; }
freekv_status freekv_backend_create_cuda(const freekv_cuda_options* options, freekv_backend** backend) {
  return guarded([&] {
    const freekv_cuda_options given = c::taken(options, "options");
    freekv_backend*& made = required(backend, "backend_create_cuda: backend");
    made = new freekv_backend{.of = c::make_cuda_backend(given)};
  });
}
freekv_status freekv_backend_destroy(freekv_backend* backend) {
  return guarded([&] {
    if (backend != nullptr && backend->has_pipeline)
      throw freekv::usage_error("backend_destroy: the backend has a pipeline; destroy that first");
    delete backend;
  });
}

// ---- Pipeline ----

freekv_status freekv_measure(freekv_backend* backend, const freekv_settings* settings,
                             freekv_footprint* footprint) {
  return guarded([&] {
    const c::pipeline_request request = c::request_of(settings);
    const std::size_t size = c::size_of(footprint, "footprint");
    freekv_backend& of = required(backend, "measure: backend");
    c::give(of.of->measure(request).footprint, footprint, size);
  });
}
freekv_status freekv_slots(freekv_backend* backend, const freekv_settings* settings, int64_t* slots,
                           int32_t* per_sequence) {
  return guarded([&] {
    c::pipeline_request request = c::request_of(settings);
    request.settings.blocks = nullptr;  // there may be no ids yet
    freekv_backend& of = required(backend, "slots: backend");
    const c::pipeline_needs needs = of.of->measure(request);
    if (slots != nullptr) std::copy(needs.slots.begin(), needs.slots.end(), slots);
    if (per_sequence != nullptr)
      std::copy(needs.slots_per_sequence.begin(), needs.slots_per_sequence.end(), per_sequence);
  });
}

freekv_status freekv_pipeline_create(freekv_backend* backend, const freekv_settings* settings,
                                     freekv_pipeline** pipeline) {
  return guarded([&] {
    freekv_pipeline*& made = required(pipeline, "pipeline_create: pipeline");
    made = new freekv_pipeline(required(backend, "pipeline_create: backend"), settings);
  });
}
freekv_status freekv_pipeline_destroy(freekv_pipeline* pipeline) {
  return guarded([&] {
    if (pipeline != nullptr && pipeline->prefixes > 0)
      throw freekv::usage_error("pipeline_destroy: the pipeline has " + std::to_string(pipeline->prefixes) +
                                " prefixes; destroy these first");
    delete pipeline;
  });
}

const char* freekv_pipeline_name(const freekv_pipeline* pipeline) {
  return pipeline == nullptr ? nullptr : pipeline->name.c_str();
}
freekv_status freekv_synchronize(freekv_pipeline* pipeline) {
  return with_pipeline(pipeline, "synchronize: pipeline", [](c::pipeline& p) { p.synchronize(); });
}

// ---- Sequences ----

freekv_status freekv_open(freekv_pipeline* pipeline, freekv_sequence* sequence) {
  return with_pipeline(pipeline, "open: pipeline", [&](c::pipeline& p) {
    freekv_sequence& made = required(sequence, "open: sequence");
    made = static_cast<freekv_sequence>(p.open());
  });
}
freekv_status freekv_release(freekv_pipeline* pipeline, freekv_sequence sequence) {
  return with_pipeline(pipeline, "release: pipeline",
                       [&](c::pipeline& p) { p.release(sequence_id{sequence}); });
}
freekv_status freekv_tokens(freekv_pipeline* pipeline, freekv_sequence sequence, int32_t* tokens) {
  return with_pipeline(pipeline, "tokens: pipeline", [&](c::pipeline& p) {
    required(tokens, "tokens: tokens") = p.tokens(sequence_id{sequence});
  });
}
freekv_status freekv_free_pages(freekv_pipeline* pipeline, int32_t* pages) {
  return with_pipeline(pipeline, "free_pages: pipeline",
                       [&](c::pipeline& p) { required(pages, "free_pages: pages") = p.free_pages(); });
}
freekv_status freekv_fork(freekv_pipeline* pipeline, freekv_sequence parent, freekv_sequence* sequence) {
  return with_pipeline(pipeline, "fork: pipeline", [&](c::pipeline& p) {
    freekv_sequence& made = required(sequence, "fork: sequence");
    made = static_cast<freekv_sequence>(p.fork(sequence_id{parent}));
  });
}
freekv_status freekv_truncate(freekv_pipeline* pipeline, freekv_sequence sequence, int32_t tokens) {
  return with_pipeline(pipeline, "truncate: pipeline",
                       [&](c::pipeline& p) { p.truncate(sequence_id{sequence}, tokens); });
}
freekv_status freekv_preempt(freekv_pipeline* pipeline, freekv_sequence sequence) {
  return with_pipeline(pipeline, "preempt: pipeline",
                       [&](c::pipeline& p) { p.preempt(sequence_id{sequence}); });
}
freekv_status freekv_restore(freekv_pipeline* pipeline, freekv_sequence sequence) {
  return with_pipeline(pipeline, "restore: pipeline",
                       [&](c::pipeline& p) { p.restore(sequence_id{sequence}); });
}
freekv_status freekv_keep_prefix(freekv_pipeline* pipeline, freekv_sequence sequence, int32_t tokens,
                                 freekv_prefix** prefix) {
  return with_pipeline(pipeline, "keep_prefix: pipeline", [&](c::pipeline& p) {
    freekv_prefix*& made = required(prefix, "keep_prefix: prefix");
    made = new freekv_prefix{*pipeline, p.keep_prefix(sequence_id{sequence}, tokens)};
    ++pipeline->prefixes;
  });
}
freekv_status freekv_open_with(freekv_pipeline* pipeline, const freekv_prefix* prefix,
                               freekv_sequence* sequence) {
  return with_pipeline(pipeline, "open_with: pipeline", [&](c::pipeline& p) {
    freekv_sequence& made = required(sequence, "open_with: sequence");
    made = static_cast<freekv_sequence>(p.open(required(prefix, "open_with: prefix").pages));
  });
}
freekv_status freekv_prefix_destroy(freekv_prefix* prefix) {
  return guarded([&] {
    if (prefix != nullptr) --prefix->of.prefixes;
    delete prefix;
  });
}

// ---- Steps ----

freekv_status freekv_begin_step(freekv_pipeline* pipeline, const freekv_step_input* entries, size_t count,
                                freekv_step** step) {
  return with_pipeline(pipeline, "begin_step: pipeline", [&](c::pipeline& p) {
    freekv_step*& begun = required(step, "begin_step: step");
    p.begin_step(rows_of(*pipeline, entries, count, "begin_step"));
    begun = &pipeline->step;
  });
}
freekv_status freekv_append(freekv_step* step, int32_t layer, const freekv_rows* rows) {
  return with_step(step, "append: step", [&](c::pipeline& p) {
    const freekv_rows given = c::taken(rows, "rows");
    if (given.rows < 0) throw freekv::usage_error("append: " + std::to_string(given.rows) + " rows");
    p.append(layer, given);
  });
}
freekv_status freekv_attend(freekv_step* step, int32_t layer, const freekv_attention* attention) {
  return with_step(step, "attend: step", [&](c::pipeline& p) {
    const freekv_attention given = c::taken(attention, "attention");
    if (given.rows < 0) throw freekv::usage_error("attend: " + std::to_string(given.rows) + " rows");
    p.attend(layer, given);
  });
}
freekv_status freekv_correct(freekv_step* step, int32_t layer) {
  return with_step(step, "correct: step", [&](c::pipeline& p) { p.correct(layer); });
}
freekv_status freekv_table(freekv_step* step, int32_t layer, freekv_sequence sequence, int32_t head,
                           int32_t* blocks, size_t capacity, freekv_resident_table* table) {
  return with_step(step, "table: step", [&](c::pipeline& p) {
    const std::size_t size = c::size_of(table, "table");
    required(blocks, "table: blocks");
    const freekv::resident_table of = p.table(layer, sequence_id{sequence}, head, {blocks, capacity});
    c::give({.size = sizeof(freekv_resident_table), .pages = of.pages, .tokens = of.tokens}, table, size);
  });
}
freekv_status freekv_finish_layer(freekv_step* step, int32_t layer) {
  return with_step(step, "finish_layer: step", [&](c::pipeline& p) { p.finish_layer(layer); });
}
freekv_status freekv_end_step(freekv_step* step) {
  return with_step(step, "end_step: step", [](c::pipeline& p) { p.end_step(); });
}
freekv_status freekv_abandon_step(freekv_step* step) {
  return with_step(step, "abandon_step: step", [](c::pipeline& p) { p.abandon_step(); });
}
freekv_status freekv_abandon_sequence(freekv_step* step, freekv_sequence sequence) {
  return with_step(step, "abandon_sequence: step", [&](c::pipeline& p) { p.abandon(sequence_id{sequence}); });
}

// ---- Captured steps and tables of a device ----

freekv_status freekv_begin_captured_step(freekv_pipeline* pipeline, const freekv_step_bounds* most,
                                         freekv_step** step) {
  return with_pipeline(pipeline, "begin_captured_step: pipeline", [&](c::pipeline& p) {
    freekv_step*& begun = required(step, "begin_captured_step: step");
    p.begin_captured_step(c::taken(most, "bounds"));
    begun = &pipeline->step;
  });
}
freekv_status freekv_plan(freekv_pipeline* pipeline, const freekv_step_input* entries, size_t count,
                          int32_t* planned) {
  return with_pipeline(pipeline, "plan: pipeline", [&](c::pipeline& p) {
    int32_t& done = required(planned, "plan: planned");  // before anything happens
    done = p.plan(rows_of(*pipeline, entries, count, "plan")) ? 1 : 0;
  });
}
freekv_status freekv_wait(freekv_pipeline* pipeline) {
  return with_pipeline(pipeline, "wait: pipeline", [](c::pipeline& p) { p.wait(); });
}
freekv_status freekv_reserve(freekv_pipeline* pipeline, const freekv_step_input* entries, size_t count) {
  return with_pipeline(pipeline, "reserve: pipeline",
                       [&](c::pipeline& p) { p.reserve(rows_of(*pipeline, entries, count, "reserve")); });
}
freekv_status freekv_queue_tables(freekv_step* step, int32_t layer, const freekv_block_tables* tables) {
  return with_step(step, "queue_tables: step",
                   [&](c::pipeline& p) { p.queue_tables(layer, c::taken(tables, "tables")); });
}
freekv_status freekv_most_blocks(freekv_pipeline* pipeline, int32_t layer, int32_t rows, int32_t block_tokens,
                                 int32_t* blocks) {
  return with_pipeline(pipeline, "most_blocks: pipeline", [&](c::pipeline& p) {
    required(blocks, "most_blocks: blocks") = p.most_blocks(layer, rows, block_tokens);
  });
}
freekv_status freekv_paged_kv(freekv_pipeline* pipeline, int32_t layer, freekv_engine_blocks* kv) {
  return with_pipeline(pipeline, "paged_kv: pipeline",
                       [&](c::pipeline& p) { required(kv, "paged_kv: kv") = p.paged_kv(layer); });
}

// ---- Reports ----

freekv_status freekv_report(freekv_pipeline* pipeline, int32_t layer, freekv_sequence sequence,
                            freekv_step_report* report) {
  return with_pipeline(pipeline, "report: pipeline", [&](c::pipeline& p) {
    const std::size_t size = c::size_of(report, "report");
    c::give(p.report(layer, sequence_id{sequence}), report, size);
  });
}

}  // extern "C"
