// Forks and prefixes: sequences that share pages each give what they would give alone, bit for bit.

#include <optional>
#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

constexpr int longest = 160;

tiny_pipeline::settings settings_for(dice& d, int sequences) {
  auto s = random_settings(d);
  s.capacity.max_sequences = sequences;
  s.capacity.max_decode_rows = d.one_of({1, 3, 11});
  return s;
}

/// A prompt and a few steps, of several rows where the settings allow it.
void begin(tiny_pipeline& pipeline, freekv::sequence_id id, const text& source, int prompt, int steps,
           dice& d) {
  prompt_only(pipeline, id, source, prompt);
  for (int i = 0; i < steps; ++i)
    run_step(pipeline, id, source, d.between(1, pipeline.configuration().capacity.max_decode_rows),
             step_phase::decode);
}

}  // namespace

TEST_CASE("a fork goes on as its parent would, bit for bit, whatever the others do", "[fork]") {
  for (std::uint64_t seed = 1; seed <= some_of(30u); ++seed) {
    dice d(seed);
    const auto s = settings_for(d, 4);
    const int prompt = d.between(1, 90), steps = d.between(0, 5);
    const text parents(s, head_dim, longest, seed);
    freekv::host_backend backend({.threads = 2, .overlap = seed % 2 == 0, .bytes_per_thread = 512});
    tiny_pipeline pipeline(s, backend);
    const int all_pages = pipeline.free_pages();
    const auto parent = pipeline.open();
    const dice same = d;
    begin(pipeline, parent, parents, prompt, steps, d);
    const int forked_at = pipeline.tokens(parent);

    std::vector<freekv::sequence_id> ids{parent};
    std::vector<text> sources{parents};
    const int free = pipeline.free_pages();
    for (int child = 0; child < 3; ++child) {
      ids.push_back(pipeline.fork(ids[count(d.below(static_cast<int>(ids.size())))]));
      sources.push_back(child == 0 ? parents  // goes on with the same tokens
                                   : text::spliced(parents, forked_at,
                                                   text(s, head_dim, longest, seed * 100 + count(child))));
    }
    CHECK(pipeline.free_pages() == free);

    // Alone: each from nothing.
    std::vector<std::vector<sequence_result>> expected;
    for (const text& source : sources) {
      fresh alone(s);
      dice again = same;
      begin(alone.pipeline, alone.id, source, prompt, steps, again);
      expected.push_back(decode(alone.pipeline, alone.id, source, 20));
    }
    int wrong = 0;
    std::vector<std::size_t> done(4);
    for (int step = 0; step < 20;) {
      std::vector<sequence_part> parts;
      std::vector<std::size_t> taking;
      for (std::size_t i = 0; i < 4; ++i)
        if (done[i] < 20 && d.below(3) != 0) {
          parts.push_back({ids[i], &sources[i]});
          taking.push_back(i);
        }
      const auto results = run_step(pipeline, parts);
      for (std::size_t i = 0; i < parts.size(); ++i)
        wrong += !(results[i] == expected[taking[i]][done[taking[i]]++]);
      step = static_cast<int>(*std::min_element(done.begin(), done.end()));
    }
    INFO("seed " << seed << ", forked at " << forked_at);
    CHECK(wrong == 0);
    for (const auto id : ids) pipeline.release(id);
    CHECK(pipeline.free_pages() == all_pages);
  }
}

TEST_CASE("a shared prompt is in the store once", "[fork]") {
  constexpr int shared = sanitized ? 10'000 : 100'000;
  auto s = tiny_settings();
  s.model.layers = 1;
  s.plan = freekv::complete_first<freekv::dynamic>{0};
  s.capacity.max_tokens = shared + 100;
  s.capacity.max_sequences = 65;
  s.capacity.store_tokens = shared + 65 * 16;  // the prompt, and two pages of its own for each
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const text source(s, head_dim, shared + 100, 1);
  std::vector<freekv::sequence_id> ids{pipeline.open()};
  prompt_only(pipeline, ids[0], source, shared - 3);
  for (int child = 0; child < 64; ++child) ids.push_back(pipeline.fork(ids[0]));
  CHECK(pipeline.free_pages() == 65 * 2);
  std::vector<sequence_part> parts;
  for (const auto id : ids) parts.push_back({id, &source});
  for (int step = 0; step < 5; ++step) {
    const auto results = run_step(pipeline, parts);
    CHECK(std::all_of(results.begin(), results.end(), [&](const auto& r) { return r == results[0]; }));
  }
  // All but one have copied the open page, and each has begun another.
  CHECK(pipeline.free_pages() == 1);
  // Keys and values in float16, of 2 heads.
  CHECK(pipeline.bytes().store == count(s.capacity.store_tokens) * 2 * 2 * head_dim * 2);
}

TEST_CASE("a fork without a page for its copy is told so, and goes on when there is one", "[fork]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  s.capacity.store_tokens = 32;
  const text source(s, head_dim, 60, 1);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto parent = pipeline.open();
  prompt_only(pipeline, parent, source, 28);
  const auto child = pipeline.fork(parent);
  CHECK(pipeline.free_pages() == 0);
  CHECK_THROWS_WITH(
      pipeline.begin_step({{child}}),
      "page pool exhausted: 4 of 4 in use, the step, from sequence 1 on, needs 1 more; release a "
      "sequence or raise the capacity in the settings");
  CHECK(pipeline.tokens(child) == 28);
  pipeline.release(parent);
  fresh alone(s);
  prompt_only(alone.pipeline, alone.id, source, 28);
  CHECK(decode(pipeline, child, source, 4) == decode(alone.pipeline, alone.id, source, 4));
  CHECK_THROWS_AS(pipeline.begin_step({{child}}), freekv::pool_exhausted);
}

TEST_CASE("of those that share an open page the last one writes to it", "[fork]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  s.capacity.store_tokens = 24;  // 3 pages
  const text source(s, head_dim, 60, 1);
  fresh f(s);
  prompt_only(f.pipeline, f.id, source, 12);
  const auto child = f.pipeline.fork(f.id);
  CHECK(f.pipeline.free_pages() == 1);
  run_step(f.pipeline, {{f.id, &source}, {child, &source}});
  CHECK(f.pipeline.free_pages() == 0);
}

TEST_CASE("a prefix outlives its sequence; others begin with it as with a prompt", "[fork]") {
  for (std::uint64_t seed = 1; seed <= some_of(15u); ++seed) {
    dice d(seed);
    auto s = settings_for(d, 3);
    const int prompt = d.between(1, 100);
    const text source(s, head_dim, longest, seed), other(s, head_dim, longest, seed + 100);
    freekv::host_backend backend;
    tiny_pipeline pipeline(s, backend);
    const int all_pages = pipeline.free_pages();
    const auto first = pipeline.open();
    prompt_only(pipeline, first, source, prompt);
    decode(pipeline, first, source, 5);
    std::optional<freekv::prefix> kept(pipeline.keep_prefix(first, prompt));
    const int tokens = prompt / 8 * 8;
    CHECK(kept->pages() == tokens / 8);
    pipeline.release(first);
    CHECK(pipeline.free_pages() == all_pages - kept->pages());

    const auto a = pipeline.open(*kept), b = pipeline.open(*kept);
    CHECK(pipeline.free_pages() == all_pages - tokens / 8);
    kept.reset();  // evicted; those who have its pages keep them
    for (const auto& [id, end] : {std::pair(a, &source), std::pair(b, &other)}) {
      const text spliced = text::spliced(source, tokens, *end);
      fresh alone(s);
      if (tokens > 0) prompt_only(alone.pipeline, alone.id, spliced, tokens);
      CHECK(pipeline.tokens(id) == tokens);
      CHECK(decode(pipeline, id, spliced, 20) == decode(alone.pipeline, alone.id, spliced, 20));
    }
    pipeline.release(a);
    pipeline.release(b);
    CHECK(pipeline.free_pages() == all_pages);
  }
}

TEST_CASE("what begins with a prefix can be cut inside a page of it", "[fork]") {
  for (const bool in_file : {false, true}) {
    auto s = tiny_settings();
    if (in_file) s.capacity.store_file = {.path = "/tmp"};
    s.capacity.max_sequences = 3;
    const text source(s, head_dim, 120, 1);
    freekv::host_backend backend;
    tiny_pipeline p(s, backend);
    const auto first = p.open();
    prompt_only(p, first, source, 100);
    const auto prefix = p.keep_prefix(first, 96);
    const auto cut = p.open(prefix), whole = p.open();
    p.truncate(cut, 85);
    prompt_only(p, whole, source, 85);
    CHECK(decode(p, cut, source, 10) == decode(p, whole, source, 10));
  }
}

TEST_CASE("forks and prefixes are refused in sentences", "[fork]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  s.capacity.max_tokens = 100;
  freekv::host_backend backend, other_backend;
  tiny_pipeline pipeline(s, backend);
  const text source(s, head_dim, 100, 1);
  const auto a = pipeline.open();
  prompt_only(pipeline, a, source, 90);
  CHECK_THROWS_WITH(pipeline.keep_prefix(a, 91), "prefix: 91 tokens of sequence 0, which has 90");
  CHECK_THROWS_WITH(pipeline.fork(freekv::sequence_id{1}), "sequence 1 is not open");
  const auto b = pipeline.fork(a);
  CHECK_THROWS_WITH(pipeline.fork(b), Catch::Contains("sequences exhausted: 2 of 2 in use, a fork needs 1"));
  const auto kept = pipeline.keep_prefix(a, 90);
  CHECK_THROWS_WITH(pipeline.open(kept), Catch::Contains("sequences exhausted"));
  auto step = pipeline.begin_step({{a}});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { pipeline.fork(a); }, [&] { pipeline.open(kept); }, [&] { pipeline.keep_prefix(a, 8); }})
    CHECK_THROWS_WITH(call(), Catch::Contains("the step in progress has not ended"));
  step.abandon();

  s.capacity.max_tokens = 80;
  tiny_pipeline shorter(s, other_backend);
  CHECK_THROWS_WITH(shorter.open(kept), "open: the prefix is of another pipeline");
}
