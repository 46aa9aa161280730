// Prompts out of an engine's own paged cache, and lse in its base.

#include <vector>

#include "../catch.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

/// An engine's cache of one layer: blocks of keys and values, and a block table. Blocks are (token, head,
/// head_dim), or with `heads_first` (head, token, head_dim); `packed`, keys and values are side by side in
/// rows of 2 * head_dim.
struct engine_cache {
  int block_tokens = 16;
  bool heads_first = false, packed = false;
  std::vector<float> data{};
  std::vector<std::int32_t> table{};

  static constexpr int heads = 2;
  int width() const { return packed ? 2 * head_dim : head_dim; }
  std::int64_t token_stride() const { return heads_first ? width() : heads * width(); }
  std::int64_t head_stride() const { return heads_first ? std::int64_t{block_tokens} * width() : width(); }
  std::int64_t block_stride() const { return std::int64_t{2} * block_tokens * heads * head_dim; }
  std::int64_t values() const { return packed ? head_dim : block_stride() / 2; }
  freekv::paged_blocks<const float> view() const {
    return {
        {data.data(), data.data() + values(), block_stride(), token_stride(), head_stride(), block_tokens},
        table};
  }

  /// The first `tokens` tokens of a text in blocks in random order, other numbers in between.
  void fill(const text& source, int layer, int tokens, dice& d) {
    const int blocks = (tokens + block_tokens - 1) / block_tokens;
    std::vector<std::int32_t> order;
    for (int b = 0; b < blocks + 2; ++b) order.push_back(b);
    for (int i = blocks + 1; i > 0; --i) std::swap(order[count(i)], order[count(d.below(i + 1))]);
    table.assign(order.begin(), order.begin() + blocks);
    data.assign(count(blocks + 2) * count(block_stride()), quiet_nan);
    const auto rows = source.at(layer, 0, tokens);
    for (int t = 0; t < tokens; ++t)
      for (int h = 0; h < heads; ++h)
        for (int i = 0; i < head_dim; ++i) {
          const auto to = table[count(t / block_tokens)] * block_stride() +
                          t % block_tokens * token_stride() + h * head_stride() + i;
          const auto from = count((t * heads + h) * head_dim + i);
          data[count(to)] = rows.keys[from];
          data[count(to + values())] = rows.values[from];
        }
  }
};

}  // namespace

TEST_CASE("a prompt out of an engine's blocks is the prompt appended, bit for bit", "[append_from]") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    std::vector<int> chunks;
    for (int i = d.between(1, 3); i > 0; --i) chunks.push_back(d.between(1, 50));
    const text sources[] = {text(s, head_dim, 200, seed), text(s, head_dim, 200, seed + 1000)};
    constexpr int steps = 3;  // behind each chunk

    std::vector<std::vector<sequence_result>> expected;
    for (const int second : {0, 1}) {  // which has one token less in each chunk
      fresh alone(s);
      for (const int n : chunks) {
        if (n > second) prompt_only(alone.pipeline, alone.id, sources[second], n - second);
        expected.push_back(decode(alone.pipeline, alone.id, sources[second], steps));
      }
    }

    std::vector<engine_cache> caches(count(s.model.layers) * 2 *
                                     chunks.size());  // nothing waits for their copying
    auto* cache = caches.data();
    s.capacity.max_sequences = 4;
    freekv::host_backend backend({.overlap = seed % 2 == 0});
    tiny_pipeline pipeline(s, backend);
    const freekv::sequence_id ids[] = {pipeline.open(), pipeline.open()};
    for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) {
      const int n = chunks[chunk];
      auto now =
          pipeline.begin_step({{ids[0], n, step_phase::prefill}, {ids[1], n - 1, step_phase::prefill}});
      for (int layer = 0; layer < s.model.layers; ++layer) {
        std::vector<freekv::paged_blocks<const float>> tables;
        for (const int second : {0, 1}) {
          if (n == second) continue;
          cache->block_tokens = d.one_of({1, 5, 16, 64});
          cache->heads_first = d.below(2) == 0;
          cache->packed = d.below(2) == 0;
          cache->fill(sources[second], layer, pipeline.tokens(ids[second]), d);
          tables.push_back(cache++->view());
        }
        now.append_from<float>(layer, tables);
      }
      now.end();
      INFO("seed " << seed << ", chunk " << chunk << " of " << n << " tokens");
      if (chunk == 0) {  // a branch and a prefix begin at once
        const auto kept = pipeline.keep_prefix(ids[0], n);
        const auto branch = pipeline.fork(ids[0]), start = pipeline.open(kept);
        fresh alone(s);
        if (n >= 8) prompt_only(alone.pipeline, alone.id, sources[0], n / 8 * 8);
        CHECK(decode(pipeline, start, sources[0], steps) ==
              decode(alone.pipeline, alone.id, sources[0], steps));
        CHECK(decode(pipeline, branch, sources[0], steps) == expected[0]);
        pipeline.release(branch);
        pipeline.release(start);
      }
      for (const int second : {0, 1})
        CHECK(decode(pipeline, ids[second], sources[second], steps) ==
              expected[count(second) * chunks.size() + chunk]);
    }
  }
}

TEST_CASE("a prompt copied into a file leaves alone what is selected behind another sequence's step",
          "[append_from]") {
  constexpr int layers = 6, tokens = 3000, steps = 12, more = 96;
  auto s = tiny_settings();
  s.model.layers = layers;
  s.budget = {.sink = 8, .window = 16, .selected_units = 24};
  s.capacity.max_tokens = 4096;
  s.capacity.max_sequences = 2;
  s.capacity.store_file = {.path = "/tmp"};
  s.correction = freekv::never{};
  const text source(s, head_dim, tokens + steps, 1), other(s, head_dim, more * steps, 2);
  dice d(3);
  std::vector<engine_cache> caches(layers);  // outlive the pipelines, whose copying they serve
  for (int layer = 0; layer < layers; ++layer) caches[count(layer)].fill(other, layer, more * steps, d);
  const auto outputs = [&](bool overlap, bool copies) {
    freekv::host_backend backend({.overlap = overlap});
    tiny_pipeline pipeline(s, backend);
    const auto a = pipeline.open(), b = pipeline.open();
    prompt_only(pipeline, a, source, tokens);
    std::vector<float> results, out(6 * head_dim);
    for (int step = 0; step < steps; ++step) {
      auto now = pipeline.begin_step({{a}});
      for (int layer = 0; layer < layers; ++layer) {
        const auto rows = source.at(layer, tokens + step, 1);
        now.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
        now.attend(layer, out);
        results.insert(results.end(), out.begin(), out.end());
      }
      now.end();  // and nobody waits for what is selected behind it
      if (!copies) continue;
      auto copied = pipeline.begin_step({{b, more, step_phase::prefill}});
      for (int layer = 0; layer < layers; ++layer) {
        copied.append_from<float>(layer, std::vector{caches[count(layer)].view()});
      }
      copied.end();
    }
    return results;
  };
  const auto expected = outputs(false, false);
  for (int trial = 0; trial < 3; ++trial) CHECK(same_bits(outputs(true, true), expected));
}

TEST_CASE("what an engine's blocks do not hold is refused in sentences", "[append_from]") {
  auto s = tiny_settings();
  const text source(s, head_dim, 100, 1);
  dice d(1);
  engine_cache cache;  // outlives the pipeline, whose copying it serves
  fresh f(s);
  cache.fill(source, 0, 40, d);
  tiny_pipeline::step step;
  const auto refused = [&](freekv::paged_blocks<const float> rows, const char* sentence) {
    CHECK_THROWS_WITH(step.append_from<float>(0, std::vector{rows}), sentence);
  };
  step = f.pipeline.begin_step({{f.id, 49, step_phase::prefill}});
  refused(cache.view(), "append_from: sequence 0 has blocks for 48 tokens of 49");
  auto none = cache.view();
  none.tensor.block_tokens = 0;
  refused(none, "append_from: sequence 0 has blocks of 0 tokens");
  CHECK_THROWS_WITH(step.append_from<float>(0, std::vector<freekv::paged_blocks<const float>>{}),
                    "append_from: 0 block tables for 1 sequences with rows");
  step.abandon();
  f.id = f.pipeline.open();
  prompt_only(f.pipeline, f.id, source, 20);
  step = f.pipeline.begin_step({{f.id}});
  refused(cache.view(), "append_from: sequence 0 brings decode rows; append them with their queries");
  step.abandon();
  f.id = f.pipeline.open();
  step = f.pipeline.begin_step({{f.id, 40, step_phase::prefill}});
  step.append_from<float>(0, std::vector{cache.view()});
  std::vector<float> out(40 * 6 * head_dim);
  CHECK_THROWS_WITH(step.attend(0, out), Catch::Contains("append was given no queries"));
}

TEST_CASE("lse comes in the base that is asked for", "[append_from]") {
  auto s = tiny_settings();
  const text source(s, head_dim, 100, 1);
  fresh natural(s);
  s.attention.lse_base = freekv::log_base::two;
  fresh binary(s);
  for (fresh* f : {&natural, &binary}) prompt_only(f->pipeline, f->id, source, 80);
  for (int step = 0; step < 5; ++step) {
    const auto e = run_step(natural.pipeline, natural.id, source, 1, step_phase::decode);
    const auto two = run_step(binary.pipeline, binary.id, source, 1, step_phase::decode);
    CHECK(same_bits(e.out, two.out));
    for (std::size_t i = 0; i < e.lse.size(); ++i)
      CHECK(is_near(two.lse[i], static_cast<double>(e.lse[i]) / std::log(2.0),
                    1e-5 * std::fabs(two.lse[i]) + 1e-6));
  }
}
