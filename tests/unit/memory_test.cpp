// Memory: what is announced is what is taken, once, and steps allocate nothing.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <new>
#include <set>
#include <vector>

#include "../catch.hpp"
#include "../counting_resource.hpp"
#include "every_policy.hpp"
#include "steps.hpp"

namespace {

std::atomic<long> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
  ++allocations;
  void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Every allocation of this program, library and threads included, is counted. Not inlined: GCC would take
// free for a mismatch of new.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return counted(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace {

using namespace tests;
using freekv::step_phase;

std::vector<tiny_pipeline::settings> settings_of_all_kinds() {
  std::vector<tiny_pipeline::settings> all;
  for (int kind = 0; kind < 5; ++kind) {
    auto s = tiny_settings();
    s.capacity.max_sequences = 1 + kind;
    if (kind == 1) s.route = freekv::in_place{};
    if (kind == 2) s.summary = freekv::chunk_means<4>{};
    if (kind == 3) s.plan = freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>{2};
    if (kind == 4) s.capacity.store_tokens = 123;
    all.push_back(s);
  }
  return all;
}

}  // namespace

TEST_CASE("a footprint is exactly what is taken, in one block of each resource", "[memory]") {
  for (const auto& s : settings_of_all_kinds())
    for (const int threads : {1, 4}) {
      freekv::host_backend backend({.threads = threads});
      const tiny_pipeline::footprint needs(s, backend);
      const auto& needed = needs.bytes();
      counting_resource slow, fast;
      {
        const tiny_pipeline pipeline = threads == 1 ? tiny_pipeline(s, backend, {&slow, &fast})
                                                    : tiny_pipeline(needs, backend, {&slow, &fast});
        CHECK(slow.sum() == needs.slow_bytes());
        CHECK(fast.sum() == needs.fast_bytes());
        CHECK(slow.taken.size() == 1);
        CHECK(fast.taken.size() == 1);
        CHECK(slow.sum() == needed.store);
        CHECK(fast.sum() == needed.slots + needed.summaries + needed.state);
        CHECK(slow.sum() + fast.sum() == needed.total());
        CHECK(slow.alignment == 128);
        CHECK(fast.alignment == 128);
        const auto& bytes = pipeline.bytes();
        CHECK(bytes.store == needed.store);
        CHECK(bytes.complete == needed.complete);
        CHECK(bytes.slots == needed.slots);
        CHECK(bytes.summaries == needed.summaries);
        CHECK(bytes.state == needed.state);
        CHECK(slow.returned == 0);
      }
      CHECK(slow.returned == slow.sum());
      CHECK(fast.returned == fast.sum());
    }
}

TEST_CASE("a footprint takes nothing from any resource", "[memory]") {
  counting_resource standard;
  auto* before = std::pmr::set_default_resource(&standard);
  auto s = tiny_settings();
  s.capacity.max_tokens = 100'000'000;  // far more than this machine has
  s.capacity.store_tokens = 10'000'000'000;
  freekv::host_backend backend;
  const auto needed = tiny_pipeline::footprint(s, backend).bytes();
  std::pmr::set_default_resource(before);
  CHECK(standard.taken.empty());
  // Three layers of keys and values, 2 heads, 24 elements of 2 bytes.
  CHECK(needed.store == 10'000'000'000u * 3 * 2 * 2 * 24 * 2);
}

TEST_CASE("the longest sequence that an int can count is counted right, or refused", "[memory]") {
  auto s = tiny_settings();
  s.capacity.max_tokens = std::numeric_limits<int>::max();
  freekv::host_backend backend;
  try {
    const auto needed = tiny_pipeline::footprint(s, backend).bytes();
    CHECK(needed.store == (std::size_t{1} << 31) * 3 * 2 * 2 * 24 * 2);
    CHECK(needed.slots == tiny_pipeline::footprint(tiny_settings(), backend).bytes().slots);
  } catch (const freekv::settings_error& e) {
    CHECK_THAT(e.what(), Catch::Contains("2147483647"));
  }
}

TEST_CASE("more memory than addresses can say is refused", "[memory]") {
  auto s = tiny_settings();
  s.model = {.layers = 4096, .query_heads = 4096, .kv_heads = 4096};
  s.capacity.store_tokens = std::int64_t{8} << 30;
  freekv::host_backend backend;
  CHECK_THROWS_AS(tiny_pipeline::footprint(s, backend), freekv::settings_error);
  CHECK_THROWS_WITH(tiny_pipeline::footprint(s, backend), Catch::Contains("2^62 bytes"));
}

TEST_CASE("each part of the memory has the size that its shape says", "[memory]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 3;
  freekv::host_backend backend;
  const std::size_t page = 2 * 8 * 2 * 24 * sizeof(freekv::half);  // K and V, 8 tokens, 2 heads
  auto bytes = tiny_pipeline::footprint(s, backend).bytes();
  CHECK(bytes.store == 3 * 75 * page);  // 3 layers, 3 sequences of 25 pages
  CHECK(bytes.complete == 75 * page);
  CHECK(bytes.slots == 2 * 3 * (1 + 3 + 2) * page);  // 2 layers, 3 sequences; sink, ring and selected
  const std::size_t line = freekv::detail::carver::alignment,
                    summaries = 75 * 2 * 2 * 24 * sizeof(freekv::half);
  CHECK(bytes.summaries == 2 * ((summaries + line - 1) / line * line));  // a layer's begin at a line
  CHECK(bytes.fast_tier() == bytes.slots + bytes.summaries + bytes.complete);
  CHECK(bytes.total() == bytes.store + bytes.slots + bytes.summaries + bytes.state);
  s.route = freekv::in_place{};
  CHECK(tiny_pipeline::footprint(s, backend).bytes().slots == 0);
  s.route = freekv::resident{};
  s.plan = freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>{1};
  bytes = tiny_pipeline::footprint(s, backend).bytes();
  CHECK(bytes.slots == 2 * 3 * (1 + 3) * page);  // nothing is selected
  CHECK(bytes.summaries == 0);
  s = tiny_settings();
  s.capacity.store_tokens = 9;  // two pages
  CHECK(tiny_pipeline::footprint(s, backend).bytes().store == 3 * 2 * page);
  const tiny_pipeline pipeline(s, backend);
  CHECK(pipeline.slice_bytes() == 2 * 8 * 24 * sizeof(freekv::half));
  CHECK(pipeline.summary_bytes() == 2 * 24 * sizeof(freekv::half));
  CHECK(pipeline.free_pages() == 2);
}

TEST_CASE("heads of their own kinds, codecs in fast memory and units have the bytes of their shape",
          "[memory]") {
  freekv::host_backend backend;
  {
    using by_heads =
        freekv::retrieval_pipeline<freekv::kv_shape<float, 8>, freekv::page_size<8>, freekv::by_head>;
    const by_heads::footprint needs(
        {.model = {.layers = 1, .query_heads = 4, .kv_heads = 4},
         .capacity = {.max_tokens = 800},
         .plan = {.kinds = {freekv::layer_kind::complete, freekv::layer_kind::retrieval,
                            freekv::layer_kind::window, freekv::layer_kind::retrieval},
                  .kv_heads = 4}},
        backend);
    CHECK(needs.bytes().complete == 800 * 2 * 8 * sizeof(float));
    CHECK(needs.bytes().store == 4 * needs.bytes().complete);
  }
  {
    using low =
        freekv::retrieval_pipeline<freekv::kv_shape<float, 8>, freekv::page_size<8>, freekv::low_rank_keys<4>,
                                   freekv::every_layer<freekv::layer_kind::retrieval>>;
    const std::vector<float> basis(5 * 8);
    low::settings s{.model = {.layers = 1, .query_heads = 1, .kv_heads = 1}, .capacity = {.max_tokens = 800}};
    s.codec.basis = {basis.data(), 1, 1, 4, 8};
    const auto bytes = low::footprint(s, backend).bytes();
    CHECK(bytes.codec >= 800 * 4 * sizeof(float));
    CHECK(bytes.fast_tier() == bytes.slots + bytes.summaries + bytes.codec + bytes.complete);
  }
  {
    using units =
        freekv::retrieval_pipeline<freekv::kv_shape<float, 8>, freekv::page_size<8>, freekv::unit<4>>;
    units::settings s{.model = {.layers = 2, .query_heads = 1, .kv_heads = 1},
                      .capacity = {.max_tokens = 800}};
    CHECK(units(s, backend).slice_bytes() == 2 * 4 * 8 * sizeof(float));
    s.capacity.store_file = {.path = "/tmp"};
    CHECK(units(s, backend).slice_bytes() == 2 * 8 * 8 * sizeof(float));
  }
}

TEST_CASE("where query heads select each for itself, a KV head has slots for all their pages", "[memory]") {
  using freekv::retrieval_pipeline, freekv::page_size;
  using shape = freekv::kv_shape<freekv::half, 24>;
  freekv::host_backend backend;
  const auto slots_of = [&](auto pipeline_type, int max_tokens) {
    using pipeline = typename decltype(pipeline_type)::type;
    return typename pipeline::footprint({.model = {.layers = 3, .query_heads = 8, .kv_heads = 2},
                                         .budget = {.sink = 8, .window = 16, .selected_units = 2},
                                         .capacity = {.max_tokens = max_tokens}},
                                        backend)
        .bytes()
        .slots;
  };
  const std::size_t page = 2 * 8 * 2 * 24 * sizeof(freekv::half);  // K and V, 8 tokens, 2 heads
  using shared = std::type_identity<retrieval_pipeline<shape, page_size<8>>>;
  using by_layer = std::type_identity<retrieval_pipeline<shape, page_size<8>, freekv::per_layer>>;
  using own = std::type_identity<retrieval_pipeline<shape, page_size<8>, freekv::per_query_head>>;
  CHECK(slots_of(shared{}, 200) == 2 * (1 + 3 + 2) * page);
  CHECK(slots_of(by_layer{}, 200) == 2 * (1 + 3 + 2) * page);
  CHECK(slots_of(own{}, 200) == 2 * (1 + 3 + 4 * 2) * page);
  CHECK(slots_of(own{}, 48) == 2 * (1 + 3 + 6) * page);  // no more than the sequence has pages
}

TEST_CASE("slots do not depend on the length of a sequence", "[memory]") {
  freekv::host_backend backend;
  auto s = tiny_settings();
  const auto bytes_at = [&](int tokens) {
    s.capacity.max_tokens = tokens;
    return tiny_pipeline::footprint(s, backend).bytes();
  };
  const auto small = bytes_at(1000), large = bytes_at(1'000'000);
  CHECK(small.slots == large.slots);
  CHECK(small.slots > 0);
  CHECK(large.store > 900 * small.store);
  // A budget beyond the sequence needs no more than the sequence.
  s.budget = {.sink = 8000, .window = 8000, .selected_units = 1000};
  CHECK(bytes_at(80).slots == 2 * (10 + 11 + 10) * (2 * 8 * 2 * 24 * sizeof(freekv::half)));
}

TEST_CASE("a resource that runs out gets back what the other gave", "[memory]") {
  freekv::host_backend backend;
  for (const bool slow_fails : {true, false}) {
    counting_resource slow, fast;
    (slow_fails ? slow : fast).is_empty = true;
    CHECK_THROWS_AS(tiny_pipeline(tiny_settings(), backend, {&slow, &fast}), std::bad_alloc);
    CHECK(slow.returned == slow.sum());
    CHECK(fast.returned == fast.sum());
  }
}

TEST_CASE("blocks know their resource and move", "[memory]") {
  counting_resource resource;
  {
    freekv::detail::memory_block a(resource, 100), empty(resource, 0);
    CHECK(a.size() == 100);
    CHECK(empty.data() == nullptr);
    std::byte* data = a.data();
    freekv::detail::memory_block b(std::move(a));
    CHECK(b.data() == data);
    CHECK(a.data() == nullptr);
    freekv::detail::memory_block c;
    c = std::move(b);
    CHECK(c.data() == data);
    CHECK(c.size() == 100);
    CHECK(resource.returned == 0);
  }
  CHECK(resource.taken == std::vector<std::size_t>{100});
  CHECK(resource.returned == 100);
}

TEST_CASE("a carver counts without memory what it hands out with it", "[memory]") {
  alignas(128) std::byte block[1024];
  freekv::detail::carver counting, handing(block);
  const auto carve = [](freekv::detail::carver& c) {
    std::vector<void*> arrays{c.take<float>(3), c.take<std::uint8_t>(0), c.take<double>(16),
                              c.take<std::byte>(129)};
    return arrays;
  };
  const auto none = carve(counting), some = carve(handing);
  CHECK(std::all_of(none.begin(), none.end(), [](void* p) { return p == nullptr; }));
  CHECK(counting.used() == handing.used());
  CHECK(handing.used() == 128 + 0 + 128 + 256);
  CHECK(some[0] == block);
  CHECK(some[2] == block + 128);
  CHECK(some[3] == block + 256);
}

TEST_CASE("a pool hands out each page once until it comes back", "[memory]") {
  freekv::detail::page_pool pool(50);
  std::set<freekv::store_page_id> out;
  dice d(1);
  for (int i = 0; i < 2000; ++i) {
    if (pool.available() > 0 && (out.empty() || d.below(2) == 0)) {
      const freekv::store_page_id page = pool.take();
      CHECK((number_of(page) >= 0 && number_of(page) < 50));
      CHECK(out.insert(page).second);
    } else {
      const freekv::store_page_id page = *std::next(out.begin(), d.below(static_cast<int>(out.size())));
      out.erase(page);
      pool.give_back(page);
    }
    CHECK(pool.available() == 50 - static_cast<int>(out.size()));
  }
  CHECK(pool.capacity() == 50);
}

TEST_CASE("steps allocate nothing, whatever the policies", "[memory]") {
  int cases = 0;
  for (const method_spec& m : every_policy()) {
    for (const bool in_place : {false, true})
      for (const int threads : {1, 2}) {
        random_case c = make_case(1);
        auto& o = c.options;
        o.element = cases % 2 == 0 ? data_type::f16 : data_type::f32;
        o.head_dim = 64;
        o.layers = 2;
        o.complete_layers = 1;
        o.kv_heads = 2;
        o.query_heads = 8;
        o.sink_logits.assign(cases % 2 == 0 ? 2 * 8 : 0, 1.0f);
        o.store_file.clear();
        o.page = 8;
        o.budget = {.sink = 8, .window = 16, .selected_units = 4};
        o.method = m;
        o.in_place = in_place;
        o.max_tokens = 300;
        dice d(3);
        give_basis(c, d, o.kv_heads * o.layers);  // all heads of both layers
        o.basis.layers = o.basis.kv_heads = 2;
        o.codebooks = {nullptr, 1, 4, 64, 2, 4, m.codes, 4};
        if (m.summary == "key_codes") c.codebook_data = random_codebooks(d, o.codebooks);
        o.codebooks.layers = o.codebooks.kv_heads = 2;
        freekv::host_backend backend({.threads = threads, .overlap = threads == 2, .bytes_per_thread = 1024});
        const auto p = freekv::examples::make_pipeline(c.with_basis(), backend);
        const auto keys = normals(d, 100 * 2 * 64), values = normals(d, 100 * 2 * 64);
        auto queries = normals(d, 100 * 8 * 64);
        std::vector<float> out(100 * 8 * 64), lse(100 * 8);

        const long before = allocations;
        // Prompts whose rows attend and prompts whose rows do not, then decoding across many pages.
        for (const int tokens : {100, 3, 30}) {
          p->begin_step(tokens, step_phase::prefill);
          for (int layer = 0; layer < 2; ++layer) {
            const auto rows = [&](const std::vector<float>& v, int heads) {
              return std::span(v).first(count(tokens * heads * 64));
            };
            p->append(layer, rows(keys, 2), rows(values, 2),
                      tokens == 3 ? std::span<const float>{} : rows(queries, 8));
            if (tokens != 3)
              p->attend(layer, std::span(out).first(count(tokens * 8 * 64)),
                        std::span(lse).first(count(tokens * 8)));
          }
          p->end_step();
        }
        for (int step = 0; step < 100; ++step) {
          p->begin_step(1, step_phase::decode);
          for (int layer = 0; layer < 2; ++layer) {
            const auto row = [&](const std::vector<float>& v, int heads) {
              return std::span(v).subspan(count(step * heads * 64), count(heads * 64));
            };
            p->append(layer, row(keys, 2), row(values, 2), row(queries, 8));
            p->attend(layer, std::span(out).first(8 * 64), std::span(lse).first(8));
          }
          p->end_step();
        }
        p->synchronize();
        const long after = allocations;
        INFO(words(m) << (in_place ? ", in place" : ", resident") << ", " << threads << " threads");
        CHECK(after - before == 0);
        ++cases;
      }
  }
  CHECK(cases > 150);
  // The counter does count.
  const long before = allocations;
  ::operator delete(::operator new(3));
  CHECK(allocations > before);
}

TEST_CASE("what happens to sequences between steps allocates nothing either", "[memory]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 3;
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const text source(s, 24, 100, 1);
  const auto rows = source.at(0, 0, 2);
  std::vector<float> out(2 * 6 * 24);
  const long before = allocations;
  for (int round = 0; round < 3; ++round) {
    const auto a = pipeline.open(), b = pipeline.open();
    for (int step = 0; step < 40; ++step) {
      auto now = pipeline.begin_step({{a}, {b}});
      for (int layer = 0; layer < 3; ++layer) {
        now.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
        now.attend(layer, out);
        pipeline.report(layer)[a];
      }
      now.end();
      if (step % 10 != 9) continue;
      const auto c = pipeline.fork(a);
      pipeline.truncate(a, pipeline.tokens(a) - 3);
      pipeline.preempt(b);
      pipeline.restore(b);
      pipeline.release(c);
    }
    pipeline.release(b);
    pipeline.release(a);
  }
  const long after = allocations;
  CHECK(after == before);
}

TEST_CASE("steps of a pipeline that forgets allocate nothing either", "[memory][eviction]") {
  using forgetful = freekv::evicting_pipeline<
      freekv::kv_shape<freekv::half, 24>,
      freekv::any_of<freekv::h2o, freekv::tova, freekv::snapkv, freekv::raas, freekv::hard_kv, freekv::cake,
                     freekv::r_kv, freekv::d2o, freekv::exact_merge, freekv::hard_kv_merge,
                     freekv::hard_kv_pairs, freekv::razor_attention_compensated, freekv::trim_kv,
                     freekv::given_worths, freekv::mikv, freekv::arkv_split, freekv::kv_merger,
                     freekv::q_hitter, freekv::epi_cache, freekv::layer_defensive_kv, freekv::compress_kv>>;
  forgetful::settings s{.model = {.layers = 2, .query_heads = 6, .kv_heads = 2},
                        .budget = 40,
                        .capacity = {.max_prompt = 60, .max_generated = 60}};
  const text source(s, 24, 60, 1);
  const auto rows = source.at(0, 0, 30), one = source.at(0, 0, 1);
  std::vector<float> out(30 * 6 * 24);
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
  constexpr std::array kinds{freekv::layer_kind::complete, freekv::layer_kind::window,
                             freekv::layer_kind::window, freekv::layer_kind::complete};
  for (int method = 0; method < 21; ++method) {
    if (method == 1) s.eviction = freekv::tova{};
    if (method == 2) s.eviction = freekv::snapkv{};
    if (method == 3) s.eviction = freekv::raas{.page = 8, .sink = 8, .window = 8};
    if (method == 4) s.eviction = freekv::hard_kv{.interval = 16};
    if (method == 5) s.eviction = freekv::cake{};
    if (method == 6) s.eviction = freekv::r_kv{.interval = 16};
    if (method == 7) s.eviction = freekv::d2o{};
    if (method == 8) s.eviction = freekv::exact_merge{};
    if (method == 9) s.eviction = freekv::hard_kv_merge{};
    if (method == 10) s.eviction = freekv::hard_kv_pairs{{.interval = 16}};
    if (method == 11) s.eviction = freekv::razor_attention_compensated{.kinds = kinds, .kv_heads = 2};
    if (method == 12) s.eviction = freekv::trim_kv{};
    if (method == 13) s.eviction = freekv::given_worths{};
    if (method == 14) s.eviction = freekv::mikv{};
    if (method == 15) s.eviction = freekv::arkv_split{};
    if (method == 16) s.eviction = freekv::kv_merger{};
    if (method == 17) s.eviction = freekv::q_hitter{};
    if (method == 18) s.eviction = freekv::layer_defensive_kv{};
    if (method == 19) s.eviction = freekv::compress_kv{};
    if (method == 20) s.budget = 20, s.eviction = freekv::epi_cache{.window = 8, .block_tokens = 30};
    forgetful pipeline(s, backend);
    const long before = allocations;
    for (int round = 0; round < 2; ++round) {
      const auto id = pipeline.open();
      for (int step = 0; step < 62; ++step) {
        const bool prompt = step < 2;
        const auto& now = prompt ? rows : one;
        auto begun =
            pipeline.begin_step({{id, prompt ? 30 : 1, prompt ? step_phase::prefill : step_phase::decode}});
        for (int layer = 0; layer < 2; ++layer) {
          begun.append<float>(
              layer, {.keys = now.keys,
                      .values = now.values,
                      .queries = now.queries,
                      .worths = method == 12 || method == 13 ? now.worths : std::span<const float>{}});
          begun.attend(layer, std::span(out).first(now.queries.size()));
          pipeline.report(layer)[id];
        }
        begun.end();
        const bool observes = (method == 2 && step == 1) || (method == 20 && prompt);
        for (int layer = 0; observes && layer < 2; ++layer) pipeline.observe(id, layer, rows.queries);
      }
      pipeline.release(id);
    }
    CHECK(allocations == before);
  }
}
