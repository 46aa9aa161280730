// The C interface from C++17: blocks of an engine's own tensor, rows of the stored type, a store in a file,
// and threads.
#include <freekv/c_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "c_test.h"
#include "sized.hpp"

static_assert(__cplusplus == 201703L);

// Every allocation of this program is counted, its libraries' too. Not inlined: GCC would take free for a
// mismatch of new.
static thread_local long allocations = 0;
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

/// In a global's constructor, before main, nothing of the library need have been used.
static const bool has_shapes_before_main = [] {
  std::int32_t element = -1, head_dim = 0;
  return freekv_shape_count() > 0 && freekv_shape_at(0, &element, &head_dim) == FREEKV_OK && head_dim > 0;
}();

namespace {

struct destroys {
  void operator()(freekv_backend* b) const { OK(freekv_backend_destroy(b)); }
  void operator()(freekv_pipeline* p) const { OK(freekv_pipeline_destroy(p)); }
};
using backend_handle = std::unique_ptr<freekv_backend, destroys>;
using pipeline_handle = std::unique_ptr<freekv_pipeline, destroys>;

backend_handle backend_of(int threads) {
  auto options = sized<freekv_host_options>();
  options.threads = threads;
  freekv_backend* made = nullptr;
  OK(freekv_backend_create_host(&options, &made));
  return backend_handle(made);
}
pipeline_handle pipeline_of(const backend_handle& backend, const freekv_settings& settings) {
  freekv_pipeline* made = nullptr;
  OK(freekv_pipeline_create(backend.get(), &settings, &made));
  return pipeline_handle(made);
}

constexpr int layers = 2, query_heads = 4, kv_heads = 2, page = 16, prompt = 400, decoded = 30;

/// Selects 4 of up to 25 pages.
freekv_settings selecting(freekv_element element, int head_dim) {
  auto s = sized<freekv_settings>();
  s.element = element;
  s.head_dim = head_dim;
  s.layers = layers;
  s.query_heads = query_heads;
  s.kv_heads = kv_heads;
  s.page_tokens = page;
  s.sink = page;
  s.window = 2 * page;
  s.selected_units = 4;
  s.max_tokens = prompt + decoded;
  return s;
}

/// Numbers that bf16 holds exactly.
std::vector<float> numbers(std::uint32_t& state, int n) {
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& value : x) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(static_cast<int>(state >> 24) - 128) / 64.0f;
  }
  return x;
}
std::vector<std::uint16_t> as_bf16(const std::vector<float>& x) {
  std::vector<std::uint16_t> all;
  for (const float value : x) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    all.push_back(static_cast<std::uint16_t>(bits >> 16));
  }
  return all;
}

/// Rows of a step, the same for each pipeline that takes it.
struct step_rows {
  std::vector<float> k, v, q;
  freekv_rows view(int rows) const {
    auto r = sized<freekv_rows>();
    r.element = FREEKV_F32;
    r.rows = rows;
    r.keys = k.data();
    r.values = v.data();
    r.queries = q.data();
    return r;
  }
};
step_rows rows_of(std::uint32_t& state, int rows, int head_dim) {
  step_rows r;
  r.k = numbers(state, rows * kv_heads * head_dim);
  r.v = numbers(state, rows * kv_heads * head_dim);
  r.q = numbers(state, rows * query_heads * head_dim);
  return r;
}

/// A prompt, then decode steps. `layer_of(step, layer, rows, view)` appends, attends and leaves the outputs
/// in `out`.
template <class Layer>
std::vector<float> run(freekv_pipeline* p, int head_dim, const Layer& layer_of) {
  std::vector<float> all;
  std::uint32_t state = 7;
  freekv_sequence sequence = 0;
  OK(freekv_open(p, &sequence));
  for (int token = -1; token < decoded; ++token) {
    const int rows = token < 0 ? prompt : 1;
    freekv_step_input input{sequence, rows, token < 0 ? FREEKV_PREFILL : FREEKV_DECODE};
    freekv_step* step = nullptr;
    OK(freekv_begin_step(p, &input, 1, &step));
    for (int layer = 0; layer < layers; ++layer) {
      const step_rows given = rows_of(state, rows, head_dim);
      std::vector<float> out(given.q.size());
      layer_of(step, layer, given, rows, out);
      if (token >= 0) all.insert(all.end(), out.begin(), out.end());
    }
    OK(freekv_end_step(step));
  }
  return all;
}

void append_and_attend(freekv_step* step, int layer, const freekv_rows& rows, std::vector<float>& out) {
  auto to = sized<freekv_attention>();
  to.rows = rows.rows;
  to.out = out.data();
  OK(freekv_append(step, layer, &rows));
  if (rows.rows == 1) OK(freekv_attend(step, layer, &to));
}
std::vector<float> outputs_of(const freekv_settings& settings, int threads = 1) {
  const auto backend = backend_of(threads);
  const auto p = pipeline_of(backend, settings);
  return run(p.get(), settings.head_dim,
             [](freekv_step* step, int layer, const step_rows& r, int rows, auto& out) {
               append_and_attend(step, layer, r.view(rows), out);
             });
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// ---- Stored rows ----

void takes_stored_rows() {
  const freekv_settings settings = selecting(FREEKV_BF16, 128);
  const auto backend = backend_of(1);
  const auto p = pipeline_of(backend, settings);
  const auto stored =
      run(p.get(), 128, [](freekv_step* step, int layer, const step_rows& r, int rows, auto& out) {
        const auto k = as_bf16(r.k), v = as_bf16(r.v);
        freekv_rows view = r.view(rows);
        view.element = FREEKV_BF16;
        view.keys = k.data();
        view.values = v.data();
        append_and_attend(step, layer, view, out);
      });
  CHECK(same_bits(stored, outputs_of(settings)));
}

// ---- Reports, routes and files ----

void says_what_steps_did() {
  freekv_settings settings = selecting(FREEKV_F32, 64);
  settings.tau = 2.0f;  // which every head has drifted below
  const auto backend = backend_of(1);
  const auto p = pipeline_of(backend, settings);
  CHECK(std::string(freekv_pipeline_name(p.get())).find("cosine_drift(2)") != std::string::npos);
  int corrected = 0, recalled = 0;
  const auto resident =
      run(p.get(), 64, [&](freekv_step* step, int layer, const step_rows& r, int rows, auto& out) {
        append_and_attend(step, layer, r.view(rows), out);
        auto report = sized<freekv_step_report>();
        OK(freekv_report(p.get(), layer, 0, &report));
        CHECK(report.slice_bytes == 2 * page * 64 * sizeof(float));
        CHECK(report.recalled >= report.recalled_before_attention);
        if (layer == 0 || rows > 1) {  // keeps everything
          CHECK(report.recalled == 0 && report.attended == 0);
        } else {
          CHECK(report.attended == 4 * kv_heads);
          corrected += report.corrected_heads;
          recalled += report.recalled;
        }
      });
  CHECK(corrected == decoded * kv_heads);
  CHECK(recalled > 100);

  settings.route = FREEKV_IN_PLACE;
  CHECK(same_bits(resident, outputs_of(settings)));
  settings.route = FREEKV_RESIDENT;
  settings.store_file = "c_library_test.store";
  CHECK(same_bits(resident, outputs_of(settings)));
  settings.tau = -2.0f;  // which none has
  CHECK(!same_bits(resident, outputs_of(settings)));
}

// ---- Blocks of the engine's own tensor ----

/// The engine's own attention, to the pages that a table lists.
void attend_paged(const std::vector<float>& tensor, std::size_t plane, const std::vector<std::int32_t>& table,
                  int pages, int tokens, const std::vector<float>& q, std::vector<float>& out) {
  constexpr int d = 64;
  CHECK((pages - 1) * page < tokens && tokens <= pages * page);
  for (int head = 0; head < query_heads; ++head) {
    const int of = head / (query_heads / kv_heads);
    double sum = 0, weighted[d] = {};
    for (int t = 0; t < tokens; ++t) {
      const std::size_t block = static_cast<std::size_t>(table[t / page]);
      const float* const k = tensor.data() + block * 2 * plane + (t % page * kv_heads + of) * d;
      double score = 0;
      for (int i = 0; i < d; ++i) score += double{q[head * d + i]} * double{k[i]};
      sum += std::exp(score / 8);
      for (int i = 0; i < d; ++i)
        weighted[i] += std::exp(score / 8) * double{k[plane + static_cast<std::size_t>(i)]};
    }
    for (int i = 0; i < d; ++i) out[head * d + i] = static_cast<float>(weighted[i] / sum);
  }
}

void attends_by_tables() {
  constexpr std::size_t plane = page * kv_heads * 64, blocks = 40;
  freekv_settings settings = selecting(FREEKV_F32, 64);
  const auto backend = backend_of(1);
  std::int64_t slots[layers];
  std::int32_t per_sequence[layers];
  OK(freekv_slots(backend.get(), &settings, slots, per_sequence));
  CHECK(slots[0] == 0 && per_sequence[0] == 0 && slots[1] == per_sequence[1] && slots[1] >= 7);
  auto footprint = sized<freekv_footprint>();
  OK(freekv_measure(backend.get(), &settings, &footprint));

  std::vector<float> tensor(blocks * 2 * plane);
  std::vector<std::int32_t> ids;
  for (int i = 0; i < slots[1]; ++i) ids.push_back(static_cast<int>(blocks) - 1 - 2 * i);
  const freekv_engine_blocks lent[layers] = {
      {}, {tensor.data(), tensor.data() + plane, 2 * plane, kv_heads * 64, 64, ids.data(), ids.size()}};
  settings.blocks = lent;
  const auto p = pipeline_of(backend, settings);
  const auto own =
      run(p.get(), 64, [&](freekv_step* step, int layer, const step_rows& r, int rows, auto& out) {
        if (layer == 0 || rows > 1) return append_and_attend(step, layer, r.view(rows), out);
        std::vector<std::int32_t> table(static_cast<std::size_t>(per_sequence[1])), of_head(table);
        auto size = sized<freekv_resident_table>(), size_of_head = size;
        const freekv_rows view = r.view(rows);
        OK(freekv_append(step, layer, &view));
        OK(freekv_correct(step, layer));
        OK(freekv_table(step, layer, 0, -1, table.data(), table.size(), &size));
        OK(freekv_table(step, layer, 0, 1, of_head.data(), of_head.size(), &size_of_head));
        CHECK(size.pages == size_of_head.pages && size.tokens == size_of_head.tokens);
        CHECK(std::is_permutation(table.begin(), table.end(), of_head.begin()));
        attend_paged(tensor, plane, table, size.pages, size.tokens, r.q, out);
        OK(freekv_finish_layer(step, layer));
      });

  settings.blocks = nullptr;
  const auto attended = outputs_of(settings);
  int far = 0;
  for (std::size_t i = 0; i < own.size(); ++i) far += !(std::fabs(own[i] - attended[i]) < 1e-5f);
  CHECK(own.size() == attended.size() && far == 0);
}

// ---- Threads ----

void threads_are_independent() {
  const freekv_settings settings = selecting(FREEKV_F32, 64);
  const auto expected = outputs_of(settings);
  CHECK(same_bits(expected, outputs_of(settings, 3)));
  CHECK(freekv_open(nullptr, nullptr) == FREEKV_USAGE_ERROR);
  const std::string before = freekv_last_message();
  std::vector<float> out[2];
  bool said[2] = {};
  {
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i)
      threads.emplace_back([&, i] {
        // No checks here, whose counts are not shared; outputs tell whether calls failed.
        auto options = sized<freekv_host_options>();
        freekv_backend* backend = nullptr;
        freekv_pipeline* p = nullptr;
        said[i] = std::strcmp(freekv_last_message(), "") == 0 &&
                  freekv_release(nullptr, i) == FREEKV_USAGE_ERROR &&
                  freekv_backend_create_host(&options, &backend) == FREEKV_OK &&
                  freekv_pipeline_create(backend, &settings, &p) == FREEKV_OK;
        std::uint32_t state = 7;
        freekv_sequence sequence = 0;
        freekv_open(p, &sequence);
        for (int token = -1; token < decoded; ++token) {
          const int rows = token < 0 ? prompt : 1;
          freekv_step_input input{sequence, rows, token < 0 ? FREEKV_PREFILL : FREEKV_DECODE};
          freekv_step* step = nullptr;
          freekv_begin_step(p, &input, 1, &step);
          for (int layer = 0; layer < layers; ++layer) {
            const step_rows given = rows_of(state, rows, 64);
            const freekv_rows view = given.view(rows);
            std::vector<float> o(given.q.size());
            auto to = sized<freekv_attention>();
            to.rows = rows;
            to.out = o.data();
            freekv_append(step, layer, &view);
            if (token < 0) continue;
            freekv_attend(step, layer, &to);
            out[i].insert(out[i].end(), o.begin(), o.end());
          }
          freekv_end_step(step);
        }
        said[i] = said[i] && freekv_pipeline_destroy(p) == FREEKV_OK &&
                  freekv_backend_destroy(backend) == FREEKV_OK &&
                  std::strcmp(freekv_last_message(), "release: pipeline is NULL") == 0;
      });
    for (std::thread& thread : threads) thread.join();
  }
  for (int i = 0; i < 2; ++i) CHECK(said[i] && same_bits(expected, out[i]));
  CHECK(before == freekv_last_message());

  // A pipeline goes from one thread to another.
  const auto backend = backend_of(1);
  const auto p = pipeline_of(backend, settings);
  std::vector<float> elsewhere;
  std::thread([&] {
    elsewhere = run(p.get(), 64, [](freekv_step* step, int layer, const step_rows& r, int rows, auto& o) {
      append_and_attend(step, layer, r.view(rows), o);
    });
  }).join();
  CHECK(same_bits(expected, elsewhere));
}

}  // namespace

void steps_allocate_nothing() {
  const int head_dim = 128;
  const auto backend = backend_of(1);
  const auto p = pipeline_of(backend, selecting(FREEKV_BF16, head_dim));
  std::uint32_t state = 9;
  freekv_sequence sequence = 0;
  OK(freekv_open(p.get(), &sequence));
  for (int token = -1; token < decoded; ++token) {
    const int rows = token < 0 ? prompt : 1;
    const step_rows given = rows_of(state, rows, head_dim);
    std::vector<float> out(given.q.size());
    const long before = allocations;
    const freekv_step_input input{sequence, rows, token < 0 ? FREEKV_PREFILL : FREEKV_DECODE};
    freekv_step* step = nullptr;
    OK(freekv_begin_step(p.get(), &input, 1, &step));
    for (int layer = 0; layer < layers; ++layer) append_and_attend(step, layer, given.view(rows), out);
    OK(freekv_end_step(step));
    if (token > 0) CHECK(allocations == before);
  }
}

int main() {
  CHECK(has_shapes_before_main);
  takes_stored_rows();
  steps_allocate_nothing();
  says_what_steps_did();
  attends_by_tables();
  threads_are_independent();
  return finished();
}
