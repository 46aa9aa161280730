// Layers of different kinds beside each other: each is what it is alone.

#include "../catch.hpp"
#include "../mentions.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using enum freekv::layer_kind;
using pipeline_type = freekv::retrieval_pipeline<freekv::kv_shape<freekv::bfloat16, 24>, freekv::page_size<8>,
                                                 freekv::by_layer>;
using settings = pipeline_type::settings;

const std::vector<freekv::layer_kind> kinds{sliding, retrieval, complete, window, sliding};
constexpr int window_tokens = 21, max_tokens = 150, query_heads = 4;

settings settings_of(const std::vector<freekv::layer_kind>& layers) {
  settings s;
  s.model = {.layers = static_cast<int>(layers.size()), .query_heads = query_heads, .kv_heads = 2};
  s.budget = {.sink = 8, .window = 16, .selected_units = 3};
  s.capacity.max_tokens = max_tokens;
  s.attention.sliding_window = window_tokens;
  s.attention.soft_cap = 2.0f;
  s.plan.kinds = layers;
  return s;
}

/// A prompt and decode steps; layer i of the pipeline is given layer `first + i` of the text. The result is
/// by layer.
std::vector<sequence_result> run(const settings& s, const text& source, int first) {
  freekv::host_backend backend;
  pipeline_type pipeline(s, backend);
  const auto id = pipeline.open();
  std::vector<sequence_result> results(count(s.model.layers));
  for (int tokens = 90; pipeline.tokens(id) < max_tokens; tokens = 1) {
    const auto kind = tokens > 1 ? freekv::step_phase::prefill : freekv::step_phase::decode;
    const int before = pipeline.tokens(id);
    auto step = pipeline.begin_step({{id, tokens, kind}});
    for (int layer = 0; layer < s.model.layers; ++layer) {
      const auto rows = source.at(first + layer, before, tokens);
      std::vector<float> out(rows.queries.size()), lse(count(tokens * query_heads));
      step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
      const auto expected = added_masses(step, s, layer, count(tokens));
      step.attend(layer, out, lse);
      for (std::size_t i = 0; i < lse.size(); ++i) REQUIRE(is_near(expected[i], lse[i], 1e-4));
      sequence_result& result = results[count(layer)];
      result.out.insert(result.out.end(), out.begin(), out.end());
      result.lse.insert(result.lse.end(), lse.begin(), lse.end());
    }
    step.end();
    for (int layer = 0; layer < s.model.layers; ++layer)
      add_report(pipeline, layer, id, results[count(layer)]);
  }
  return results;
}

}  // namespace

TEST_CASE("layers of every kind in one pipeline are as each is alone", "[plan]") {
  settings all = settings_of(kinds);
  for (std::size_t i = 0; i < kinds.size() * query_heads; ++i)
    all.attention.sink_logits.push_back(0.25f * static_cast<float>(i));
  const text source(all, 24, max_tokens, 3);
  const auto together = run(all, source, 0);
  for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
    settings alone = settings_of({kinds[layer]});
    const auto first = all.attention.sink_logits.begin() + static_cast<long>(layer * query_heads);
    alone.attention.sink_logits.assign(first, first + query_heads);
    INFO("layer " << layer);
    CHECK(run(alone, source, static_cast<int>(layer))[0] == together[layer]);
    alone.attention.sink_logits.clear();
    CHECK_FALSE(run(alone, source, static_cast<int>(layer))[0] == together[layer]);
  }
}

TEST_CASE("a sliding layer has the slots of its window and no others", "[plan]") {
  freekv::host_backend backend;
  const auto slots = [&](int layers) {
    settings s = settings_of(std::vector(count(layers), sliding));
    s.capacity.max_tokens = 100000;
    return pipeline_type::footprint(s, backend).bytes().slots;
  };
  // Three pages hold 21 tokens, and one more is being filled: keys and values of 2 heads.
  CHECK(slots(2) - slots(1) == 4 * 8 * 2 * 2 * 24 * sizeof(freekv::bfloat16));
}

TEST_CASE("plans and extras of attention that cannot be are refused", "[plan]") {
  freekv::host_backend backend;
  const auto refused = [&](const auto& change, const std::vector<std::string>& words) {
    settings s = settings_of(kinds);
    change(s);
    try {
      pipeline_type::footprint(s, backend);
      FAIL("not refused");
    } catch (const freekv::settings_error& e) {
      check_mentions(e.what(), words);
    }
  };
  refused([](settings& s) { s.plan.kinds.pop_back(); }, {"4 layers of 5"});
  refused([](settings& s) { s.attention.sliding_window = 0; }, {"layer 0", "sliding_window is 0"});
  refused([](settings& s) { s.attention.soft_cap = -1.0f; }, {"soft_cap is -1"});
  refused([](settings& s) { s.attention.soft_cap = quiet_nan; }, {"soft_cap"});
  refused([](settings& s) { s.attention.sink_logits = {1.0f, 2.0f}; }, {"2 numbers", "20"});
  refused([](settings& s) { s.attention.sink_logits.assign(20, quiet_nan); }, {"sink logit", "NaN"});
  refused([](settings& s) { s.attention.sink_logits.assign(20, inf); }, {"sink logit", "infinity"});
  const freekv::by_head heads{{sliding, window}, 2};
  CHECK_THROWS_AS(heads.validate(1, 2), freekv::settings_error);
}
