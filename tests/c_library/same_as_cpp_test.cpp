// Outputs of the C library beside those of the C++ pipelines that it stands for, bit for bit; and its border.
#include <freekv/c_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <freekv/freekv.hpp>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "border.hpp"
#include "sized.hpp"
#include "tests/catch.hpp"

namespace {

constexpr int layers = 3, query_heads = 8, kv_heads = 2, page = 32;

struct destroys {
  void operator()(freekv_backend* b) const { CHECK(freekv_backend_destroy(b) == FREEKV_OK); }
  void operator()(freekv_pipeline* p) const { CHECK(freekv_pipeline_destroy(p) == FREEKV_OK); }
};

/// What sequences bring to a step.
struct brought {
  std::vector<freekv_step_input> inputs;
  int rows() const {
    int all = 0;
    for (const freekv_step_input& input : inputs) all += input.tokens;
    return all;
  }
  bool decodes() const { return inputs.front().phase == FREEKV_DECODE; }
};

/// Steps of two sequences: prompts in chunks, together and alone, then decode rows. Neighbouring queries are
/// alike.
std::vector<brought> steps() {
  std::vector<brought> all;
  all.push_back({{{0, 300, FREEKV_PREFILL}}});
  all.push_back({{{0, 201, FREEKV_PREFILL}, {1, 444, FREEKV_PREFILL}}});
  for (int i = 0; i < 40; ++i) {
    all.push_back({{{0, 1, FREEKV_DECODE}, {1, 1, FREEKV_DECODE}}});
    if (i % 10 == 0) all.push_back({{{1, 1, FREEKV_DECODE}}});
  }
  return all;
}

struct layer_rows {
  std::vector<float> k, v, q;
};

/// What a fused projection leaves: rows of queries, keys and values in bfloat16, as `rows` has them, and some
/// more.
struct fused_rows {
  static constexpr int more = 8;
  int query, kv;
  std::vector<freekv::bfloat16> numbers, out;
  int row() const { return query + 2 * kv + more; }
  int out_row() const { return query + more; }

  fused_rows(const layer_rows& r, int rows, int head_dim)
      : query(query_heads * head_dim), kv(kv_heads * head_dim) {
    const auto put = [&](const std::vector<float>& from, int first, int count) {
      for (int i = first; i < first + count; ++i)
        numbers.push_back(freekv::from_float<freekv::bfloat16>(from[i]));
    };
    for (int i = 0; i < rows; ++i) {
      put(r.q, i * query, query), put(r.k, i * kv, kv), put(r.v, i * kv, kv);
      numbers.resize(numbers.size() + more, freekv::from_float<freekv::bfloat16>(1e30f));
    }
    out.resize(static_cast<std::size_t>(rows * out_row()), freekv::from_float<freekv::bfloat16>(7.0f));
  }
  /// The outputs, one row behind the other; what lies between them is as it was.
  std::vector<float> outputs() const {
    std::vector<float> dense;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const bool between = static_cast<int>(i) % out_row() >= query;
      if (between)
        CHECK(freekv::to_float(out[i]) == 7.0f);
      else
        dense.push_back(freekv::to_float(out[i]));
    }
    return dense;
  }
};

/// Floats that bfloat16 has.
void round_to_bfloat16(std::vector<float>& numbers) {
  for (float& x : numbers) x = freekv::to_float(freekv::from_float<freekv::bfloat16>(x));
}
/// Rows of the trace, the same whenever it is made.
class trace {
 public:
  explicit trace(int head_dim)
      : head_dim_(head_dim), query_(static_cast<std::size_t>(query_heads * head_dim)) {}
  layer_rows next(int rows) {
    const auto drawn = [&](int heads) {
      std::vector<float> x(static_cast<std::size_t>(rows * heads * head_dim_));
      for (float& value : x) value = normal_(engine_);
      return x;
    };
    layer_rows r{drawn(kv_heads), drawn(kv_heads), {}};
    for (int row = 0; row < rows; ++row) {
      for (float& value : query_) value = 0.984f * value + 0.178f * normal_(engine_);
      r.q.insert(r.q.end(), query_.begin(), query_.end());
    }
    return r;
  }

 private:
  int head_dim_;
  std::mt19937 engine_{1};
  std::normal_distribution<float> normal_;
  std::vector<float> query_;
};

struct results {
  std::vector<float> out, lse;
  std::vector<int> counts;  // of reports
};

results by_c(const freekv_settings& settings, bool fused = false) {
  const auto options = sized<freekv_host_options>();
  freekv_backend* made_backend = nullptr;
  freekv_pipeline* made = nullptr;
  REQUIRE(freekv_backend_create_host(&options, &made_backend) == FREEKV_OK);
  const std::unique_ptr<freekv_backend, destroys> backend(made_backend);
  const freekv_status status = freekv_pipeline_create(backend.get(), &settings, &made);
  INFO(freekv_last_message());
  REQUIRE(status == FREEKV_OK);
  const std::unique_ptr<freekv_pipeline, destroys> p(made);
  freekv_sequence sequence = 0;
  for (int i = 0; i < 2; ++i) REQUIRE(freekv_open(p.get(), &sequence) == FREEKV_OK);

  results all;
  trace t(settings.head_dim);
  int failed = 0;
  for (const brought& b : steps()) {
    const int rows = b.rows();
    freekv_step* step = nullptr;
    failed += freekv_begin_step(p.get(), b.inputs.data(), b.inputs.size(), &step) != FREEKV_OK;
    for (int layer = 0; layer < layers; ++layer) {
      const layer_rows r = t.next(rows);
      std::vector<float> out(r.q.size()), lse(static_cast<std::size_t>(rows * query_heads));
      auto given = sized<freekv_rows>();
      given.element = FREEKV_F32;
      given.rows = rows;
      given.keys = r.k.data();
      given.values = r.v.data();
      given.queries = r.q.data();
      auto to = sized<freekv_attention>();
      to.rows = rows;
      to.out = out.data();
      to.lse = lse.data();
      fused_rows projection(r, fused ? rows : 0, settings.head_dim);
      if (fused) {
        given.element = FREEKV_BF16;
        given.query_element = FREEKV_BF16;
        given.queries = projection.numbers.data();
        given.keys = projection.numbers.data() + projection.query;
        given.values = projection.numbers.data() + projection.query + projection.kv;
        given.key_stride = given.value_stride = given.query_stride = projection.row();
        to.out = projection.out.data();
        to.out_element = FREEKV_BF16;
        to.out_stride = projection.out_row();
      }
      failed += freekv_append(step, layer, &given) != FREEKV_OK;
      if (!b.decodes()) continue;
      failed += freekv_attend(step, layer, &to) != FREEKV_OK;
      if (fused) out = projection.outputs();
      all.out.insert(all.out.end(), out.begin(), out.end());
      all.lse.insert(all.lse.end(), lse.begin(), lse.end());
      auto report = sized<freekv_step_report>();
      failed += freekv_report(p.get(), layer, 1, &report) != FREEKV_OK;
      all.counts.insert(all.counts.end(), {report.corrected_heads, report.attended, report.recalled,
                                           report.recalled_before_attention, report.promoted,
                                           static_cast<int>(report.slice_bytes)});
    }
    failed += freekv_end_step(step) != FREEKV_OK;
  }
  CHECK(failed == 0);
  return all;
}

template <class Pipeline>
results by_cpp(const typename Pipeline::settings& settings, bool rounded = false) {
  freekv::host_backend backend;
  Pipeline p(settings, backend);
  for (int i = 0; i < 2; ++i) p.open();
  results all;
  trace t(Pipeline::head_dim);
  const auto total = [](auto counts) {
    int sum = 0;
    for (const auto count : counts) sum += static_cast<int>(count);
    return sum;
  };
  for (const brought& b : steps()) {
    std::vector<freekv::step_input> inputs;
    for (const freekv_step_input& i : b.inputs)
      inputs.push_back({freekv::sequence_id{i.sequence}, i.tokens,
                        i.phase == FREEKV_DECODE ? freekv::step_phase::decode : freekv::step_phase::prefill});
    auto step = p.begin_step(inputs);
    for (int layer = 0; layer < layers; ++layer) {
      layer_rows r = t.next(b.rows());
      if (rounded)
        for (auto* of : {&r.k, &r.v, &r.q}) round_to_bfloat16(*of);
      std::vector<float> out(r.q.size()), lse(static_cast<std::size_t>(b.rows() * query_heads));
      step.template append<float>(layer, {.keys = r.k, .values = r.v, .queries = r.q});
      if (!b.decodes()) continue;
      step.attend(layer, out, lse);
      if (rounded) round_to_bfloat16(out);
      all.out.insert(all.out.end(), out.begin(), out.end());
      all.lse.insert(all.lse.end(), lse.begin(), lse.end());
      const auto reports = p.report(layer);
      const freekv::step_report report = reports[freekv::sequence_id{1}];
      all.counts.insert(all.counts.end(), {total(report.corrected), total(report.attended_count),
                                           total(report.recalled), total(report.recalled_before_attention),
                                           total(report.promoted), static_cast<int>(p.slice_bytes())});
    }
    step.end();
  }
  return all;
}

freekv_settings settings_of(const char* method, freekv_element element, int head_dim) {
  auto s = sized<freekv_settings>();
  s.method = method;
  s.element = element;
  s.head_dim = head_dim;
  s.layers = layers;
  s.query_heads = query_heads;
  s.kv_heads = kv_heads;
  s.sink = page;
  s.window = 2 * page;
  s.selected_units = 4;
  s.max_tokens = 600;
  s.max_sequences = 2;
  return s;
}

/// First difference of two lists; NaN differs from everything. Catch would print all of a quarter of a
/// million numbers, for minutes.
template <class T>
std::string difference(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return std::to_string(a.size()) + " numbers and " + std::to_string(b.size());
  std::size_t i = 0;
  while (i < a.size() && a[i] == b[i]) ++i;
  if (i == a.size()) return "";
  return "number " + std::to_string(i) + ": " + std::to_string(a[i]) + " and " + std::to_string(b[i]);
}

void check_same(const results& c, const results& cpp) {
  CHECK(c.lse.size() == 84 * layers * query_heads);
  CHECK(difference(c.out, cpp.out) == "");
  CHECK(difference(c.lse, cpp.lse) == "");
  CHECK(difference(c.counts, cpp.counts) == "");
}

template <class Pipeline>
typename Pipeline::settings retrieving() {
  return {.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads},
          .budget = {.sink = page, .window = 2 * page, .selected_units = 4},
          .capacity = {.max_tokens = 600, .max_sequences = 2}};
}

template <class Pipeline>
typename Pipeline::settings forgetting() {
  return {.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads},
          .budget = 7 * page,
          .capacity = {.max_prompt = 550, .max_generated = 50, .max_sequences = 2, .max_prefills = 2}};
}

}  // namespace

TEST_CASE("freekv of the C library is the C++ pipeline's, bit for bit", "[c_library]") {
  using pipeline = freekv::methods::freekv_paper::pipeline<freekv::kv_shape<freekv::bfloat16, 128>>;
  const results c = by_c(settings_of("freekv", FREEKV_BF16, 128));
  const results cpp = by_cpp<pipeline>(retrieving<pipeline>());
  check_same(c, cpp);
  int corrected = 0;
  for (std::size_t i = 0; i < c.counts.size(); i += 6) corrected += c.counts[i];
  CHECK(corrected > 10);
  CHECK(corrected < 150);  // of 44 rows, 2 layers and 2 heads: some, not all
  CHECK(difference(by_c(settings_of("quest", FREEKV_BF16, 128)).out, c.out) != "");
  CHECK(difference(by_c(settings_of("streaming_llm", FREEKV_BF16, 128)).out, c.out) != "");
}

TEST_CASE("rows of a fused projection in bfloat16 give what the same floats give, rounded", "[c_library]") {
  using pipeline = freekv::methods::freekv_paper::pipeline<freekv::kv_shape<freekv::bfloat16, 128>>;
  check_same(by_c(settings_of("freekv", FREEKV_BF16, 128), true),
             by_cpp<pipeline>(retrieving<pipeline>(), true));
}

TEST_CASE("methods that learn take their data, and values of their own", "[c_library]") {
  using method = freekv::methods::freekv_key_codes_deficit;
  using pipeline = method::pipeline<freekv::kv_shape<float, 64>>;
  freekv::key_codebooks books{nullptr, layers, kv_heads, 64, 8, 4, 6, 4};
  std::vector<float> data(books.floats_per_head() * layers * kv_heads);
  std::mt19937 engine{2};
  std::normal_distribution<float> normal;
  for (float& value : data) value = normal(engine);
  books.data = data.data();
  auto cpp_settings = retrieving<pipeline>();
  cpp_settings.summary.books = books;
  cpp_settings.correction = method::correction;
  cpp_settings.correction.delta = 0.4f;

  auto c_books = sized<freekv_key_codebooks>();
  c_books.layers = layers;
  c_books.kv_heads = kv_heads;
  c_books.head_dim = 64;
  c_books.mean_codes = 8;
  c_books.mean_dims = 4;
  c_books.codes = 6;
  c_books.dims = 4;
  c_books.data = data.data();
  auto c_settings = settings_of("freekv_key_codes_deficit", FREEKV_F32, 64);
  c_settings.codebooks = &c_books;
  c_settings.delta = 0.4f;
  const results c = by_c(c_settings);
  check_same(c, by_cpp<pipeline>(cpp_settings));
  c_settings.delta = 0.05f;
  CHECK(difference(by_c(c_settings).out, c.out) != "");
}

TEST_CASE("methods that forget keep the budget together", "[c_library]") {
  using pipeline = freekv::methods::h2o::pipeline<freekv::kv_shape<float, 64>>;
  auto c_settings = settings_of("h2o", FREEKV_F32, 64);
  c_settings.max_prompt = 550;
  check_same(by_c(c_settings), by_cpp<pipeline>(forgetting<pipeline>()));
}

TEST_CASE("methods that forget take rows of a fused projection in bfloat16 too", "[c_library]") {
  using pipeline = freekv::methods::h2o::pipeline<freekv::kv_shape<freekv::bfloat16, 128>>;
  auto settings = settings_of("h2o", FREEKV_BF16, 128);
  settings.max_prompt = 550;
  check_same(by_c(settings, true), by_cpp<pipeline>(forgetting<pipeline>(), true));
}

TEST_CASE("no exception passes the border, and each has its status", "[c_library]") {
  using freekv::c_library::guarded;
  const auto thrown = [](const auto& error) { return guarded([&] { throw error; }); };
  // Its own copy of the border's message, which the library does not export.
  const auto said = [] { return std::string(freekv::c_library::last_message()); };
  CHECK(guarded([] {}) == FREEKV_OK);
  CHECK(thrown(freekv::settings_error("a")) == FREEKV_SETTINGS_ERROR);
  CHECK(said() == "a");
  CHECK(thrown(freekv::usage_error("b")) == FREEKV_USAGE_ERROR);
  CHECK(thrown(freekv::pool_exhausted("pages", 4, 4, "it", 1)) == FREEKV_POOL_EXHAUSTED);
  CHECK(said().find("4 of 4 in use") != std::string::npos);
  CHECK(thrown(freekv::store_error(freekv::store_fault())) == FREEKV_STORE_ERROR);
  CHECK(thrown(freekv::thread_error("t", 2, 1, {}, "fewer")) == FREEKV_THREAD_ERROR);
  CHECK(thrown(std::bad_alloc()) == FREEKV_OUT_OF_MEMORY);
  CHECK(thrown(std::length_error("too long")) == FREEKV_UNEXPECTED_ERROR);
  CHECK(said() == "too long");
  CHECK(thrown(7) == FREEKV_UNEXPECTED_ERROR);
  CHECK(said() == "an exception that is no std::exception");
  CHECK(thrown(freekv::usage_error(std::string(5000, 'x'))) == FREEKV_USAGE_ERROR);
  CHECK(said() == std::string(1023, 'x'));
}
