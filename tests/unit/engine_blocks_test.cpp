// Slots inside an engine's own paged tensor give the same bits as the pipeline's own, and an engine's own
// attention over the exported tables what the pipeline's attention gives.

#include <algorithm>
#include <numeric>
#include <random>

#include "../catch.hpp"
#include "../counting_resource.hpp"
#include "../mentions.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
constexpr int d = 24, page = 8, layers = 3, kv_heads = 2, query_heads = 6, max_tokens = 150;
using pipeline_type =
    freekv::retrieval_pipeline<freekv::kv_shape<bfloat16, d>, freekv::page_size<page>,
                               freekv::unit<freekv::dynamic>, freekv::first_unselected<freekv::dynamic>,
                               freekv::any_of<freekv::by_layer, freekv::by_head>>;
using settings = pipeline_type::settings;

settings common_settings() {
  settings s;
  s.model = {.layers = layers, .query_heads = query_heads, .kv_heads = kv_heads};
  s.budget = {.sink = 8, .window = 16, .selected_units = 3};
  s.capacity.max_tokens = max_tokens;
  s.capacity.max_sequences = 3;
  s.capacity.max_resident = 2;
  s.capacity.max_decode_rows = 3;
  using enum freekv::layer_kind;
  s.plan = freekv::by_layer{{complete, retrieval, retrieval}};
  return s;
}

/// Layout of an engine's tensor for all layers: (layers, 2, blocks, page, kv_heads, d), (layers, blocks, 2,
/// kv_heads, page, d), or with keys and values side by side (layers, blocks, page, kv_heads, 2 * d) and
/// (layers, blocks, kv_heads, page, 2 * d), as vLLM has had it.
enum class layout { nhd, hnd, packed_nhd, packed_hnd };

/// An engine's tensor for all layers; what it holds before is NaN.
struct engine_tensor {
  static constexpr int blocks = 40, numbers = page * kv_heads * d;
  std::vector<bfloat16> data =
      std::vector<bfloat16>(count(layers * 2 * blocks * numbers), freekv::from_float<bfloat16>(quiet_nan));
  std::vector<std::vector<std::int32_t>> lists;  // of each layer
  std::vector<freekv::paged_blocks<bfloat16>> blocks_of_layer;

  engine_tensor(const settings& s, freekv::host_backend& backend, layout of, unsigned seed) {
    std::mt19937 random(seed);
    const pipeline_type::footprint needs(s, backend);
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<std::int32_t> ids(blocks);
      std::iota(ids.begin(), ids.end(), 0);
      std::shuffle(ids.begin(), ids.end(), random);
      ids.resize(count(needs.slots(layer)));
      lists.push_back(ids);
    }
    for (int layer = 0; layer < layers; ++layer) {
      bfloat16* const first = data.data() + layer * 2 * blocks * numbers;
      const auto& ids = lists[count(layer)];
      if (of == layout::nhd)
        blocks_of_layer.push_back({{first, first + blocks * numbers, numbers, kv_heads * d, d, page}, ids});
      else if (of == layout::hnd)
        blocks_of_layer.push_back({{first, first + numbers, 2 * numbers, d, page * d, page}, ids});
      else if (of == layout::packed_nhd)
        blocks_of_layer.push_back({{first, first + d, 2 * numbers, 2 * kv_heads * d, 2 * d, page}, ids});
      else
        blocks_of_layer.push_back({{first, first + d, 2 * numbers, 2 * d, 2 * page * d, page}, ids});
    }
  }
  /// Row t of a head in a block.
  std::vector<float> row(int layer, int block, int t, int head, bool value) const {
    const auto& f = blocks_of_layer[count(layer)].tensor;
    const bfloat16* from =
        (value ? f.values : f.keys) + block * f.block_stride + t * f.token_stride + head * f.head_stride;
    std::vector<float> numbers_of_row;
    for (int i = 0; i < d; ++i) numbers_of_row.push_back(freekv::to_float(from[i]));
    return numbers_of_row;
  }
  /// Blocks that are not listed hold what they held.
  bool others_are_untouched() const {
    for (int layer = 0; layer < layers; ++layer)
      for (int block = 0; block < blocks; ++block) {
        if (std::find(lists[count(layer)].begin(), lists[count(layer)].end(), block) !=
            lists[count(layer)].end())
          continue;
        for (int t = 0; t < page; ++t)
          for (int head = 0; head < kv_heads; ++head)
            for (const bool value : {false, true})
              for (const float x : row(layer, block, t, head, value))
                if (!std::isnan(x)) return false;
      }
    return true;
  }
};

/// Attention of decode row `row` of `rows` by an engine's kernel: over the pages of a table, without the
/// tokens behind the row.
oracle::attention attend_table(const engine_tensor& tensor, int layer, int head,
                               std::span<const std::int32_t> table, const freekv::resident_table& size,
                               std::span<const float> query, int row, int rows) {
  std::vector<std::vector<float>> data;
  for (const bool value : {false, true})
    for (int token = 0; token < size.tokens - (rows - 1 - row); ++token)
      data.push_back(tensor.row(layer, table[count(token / page)], token % page, head, value));
  const std::size_t tokens = data.size() / 2;
  const std::vector<std::span<const float>> keys(data.begin(), data.begin() + static_cast<long>(tokens)),
      values(data.begin() + static_cast<long>(tokens), data.end());
  return oracle::attend(query, keys, values, oracle::default_scale(d));
}

/// A decode step whose attention is the engine's, where a layer has slots: compared with `expected`, the same
/// step's of another pipeline. Returns how often no table served all heads.
int step_by_tables(pipeline_type& pipeline, const engine_tensor& tensor,
                   const std::vector<sequence_part>& parts, const std::vector<sequence_result>& expected) {
  std::vector<freekv::step_input> listed;
  std::vector<int> first;
  for (const auto& part : parts) {
    listed.push_back({part.id, part.tokens, part.phase});
    first.push_back(pipeline.tokens(part.id));
  }
  auto step = pipeline.begin_step(listed);
  int differing = 0;
  double largest_error = 0.0;
  std::vector<std::size_t> at(parts.size());  // in expected[i].out, rows of d
  for (int layer = 0; layer < layers; ++layer) {
    std::vector<float> queries, keys, values;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto rows = parts[i].source->at(layer, first[i], parts[i].tokens);
      queries.insert(queries.end(), rows.queries.begin(), rows.queries.end());
      keys.insert(keys.end(), rows.keys.begin(), rows.keys.end());
      values.insert(values.end(), rows.values.begin(), rows.values.end());
    }
    step.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
    if (layer == 0) {  // everything is kept, in the store
      std::vector<float> out(queries.size());
      step.attend(layer, out);
      for (std::size_t i = 0; i < parts.size(); ++i) at[i] = count(parts[i].tokens * query_heads);
      continue;
    }
    step.correct(layer);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      std::vector<std::int32_t> table(64);
      freekv::resident_table for_all;
      try {
        for_all = step.table(layer, parts[i].id, table);
      } catch (const freekv::usage_error& e) {
        check_mentions(e.what(), {"different slots", "each head"});
        ++differing;
      }
      const auto rows = parts[i].source->at(layer, first[i], parts[i].tokens);
      for (int row = 0; row < parts[i].tokens; ++row)
        for (int head = 0; head < kv_heads; ++head) {
          freekv::resident_table used = for_all;
          std::vector<std::int32_t> blocks = table;
          if (for_all.pages == 0) used = step.table(layer, parts[i].id, head, blocks);
          for (int g = 0; g < query_heads / kv_heads; ++g, ++at[i]) {
            const auto query =
                oracle::row_of(rows.queries, row * query_heads + head * (query_heads / kv_heads) + g, d);
            const auto got = attend_table(tensor, layer, head, blocks, used, query, row, parts[i].tokens);
            for (std::size_t n = 0; n < d; ++n)
              largest_error = std::max(
                  largest_error, std::fabs(got.out[n] - static_cast<double>(expected[i].out[at[i] * d + n])));
          }
        }
    }
    step.finish_layer(layer);
  }
  step.end();
  CHECK(largest_error < 2e-5);
  return differing;
}

/// Two sequences and a third that takes turns with the second: prompts, steps of 1 to 3 rows, drafts taken
/// back. `step(parts)` runs one step on a pipeline.
template <class Step>
void live(pipeline_type& pipeline, const text& first, const text& second, const Step& step) {
  const auto a = pipeline.open(), b = pipeline.open();
  prompt_only(pipeline, a, first, 100);
  prompt_only(pipeline, b, second, 37);
  for (int i = 0; i < 24; ++i) {
    const int rows = 1 + i % 3;
    step(std::vector<sequence_part>{{a, &first, rows}, {b, &second, 1}});
    if (rows == 3) pipeline.truncate(a, pipeline.tokens(a) - 2);
    if (i == 10) {
      pipeline.preempt(b);
      const auto c = pipeline.open();
      prompt_only(pipeline, c, first, 60);
      step(std::vector<sequence_part>{{c, &first, 1}});
      pipeline.release(c);
      pipeline.restore(b);
    }
  }
}

}  // namespace

TEST_CASE(
    "slots in an engine's tensor are as good as the pipeline's own, and its blocks are attended by tables",
    "[blocks]") {
  for (const auto& [spare, unit] : {std::pair{0, 0}, {2, 0}, {0, 2}, {3, 4}})
    for (const layout of : {layout::nhd, layout::hnd, layout::packed_nhd, layout::packed_hnd}) {
      settings s = common_settings();
      s.residency.spare = {spare};
      s.unit = {{unit}};
      if (unit != 0) s.budget.selected_units = 5;
      INFO(spare << " spare slots, unit " << unit << ", layout " << static_cast<int>(of));
      const text first(s, d, max_tokens, 1), second(s, d, max_tokens, 2);
      freekv::host_backend backend({.threads = 2});
      std::vector<std::vector<sequence_result>> expected;
      pipeline_type own(s, backend);
      live(own, first, second, [&](const auto& parts) { expected.push_back(run_step(own, parts)); });

      const engine_tensor tensor(s, backend, of, 7);
      const pipeline_type::footprint needs(s, backend, tensor.blocks_of_layer);
      counting_resource slow, fast;
      pipeline_type theirs(s, backend, {&slow, &fast}, tensor.blocks_of_layer);
      CHECK(slow.sum() == needs.slow_bytes());
      CHECK(fast.sum() == needs.fast_bytes());
      const pipeline_type::footprint of_own(s, backend);
      CHECK(needs.fast_bytes() < of_own.fast_bytes());
      {  // whose slots are its own, whatever was counted
        counting_resource own_fast;
        const pipeline_type without(needs, backend, {&slow, &own_fast});
        CHECK(own_fast.sum() == of_own.fast_bytes());
      }
      CHECK(theirs.bytes().slots == 0);
      CHECK(own.bytes().slots > 0);
      std::size_t nth = 0;
      live(theirs, first, second,
           [&](const auto& parts) { CHECK(run_step(theirs, parts) == expected[nth++]); });
      CHECK(tensor.others_are_untouched());
      if (unit != 0) continue;  // which no table can express

      const engine_tensor attended(s, backend, of, 8);
      pipeline_type kernel(s, backend, {}, attended.blocks_of_layer);
      nth = 0;
      int differing = 0;
      live(kernel, first, second,
           [&](const auto& parts) { differing += step_by_tables(kernel, attended, parts, expected[nth++]); });
      CHECK((differing > 0) == (spare > 0));
    }
}

TEST_CASE("blocks and tables that cannot be are refused", "[blocks]") {
  freekv::host_backend backend;
  const settings s = common_settings();
  const auto refused = [&](const auto& change, const std::vector<std::string>& words) {
    engine_tensor tensor(s, backend, layout::nhd, 1);
    change(tensor);
    try {
      const pipeline_type pipeline(s, backend, {}, tensor.blocks_of_layer);
      FAIL("not refused");
    } catch (const freekv::settings_error& e) {
      check_mentions(e.what(), words);
    }
  };
  refused([](engine_tensor& t) { t.blocks_of_layer.pop_back(); }, {"2 layers for 3"});
  refused([](engine_tensor& t) { t.blocks_of_layer[1].ids = t.blocks_of_layer[1].ids.first(5); },
          {"layer 1", "5 blocks", "footprint::slots"});
  refused([](engine_tensor& t) { t.blocks_of_layer[2].tensor.values = nullptr; }, {"layer 2", "null"});
  refused(
      [](engine_tensor& t) {
        auto& ids = t.blocks_of_layer[2].ids;
        ids = {static_cast<const std::int32_t*>(nullptr), ids.size()};
      },
      {"layer 2", "ids are null"});
  refused([](engine_tensor& t) { t.blocks_of_layer[1].tensor.block_tokens = 2 * page; },
          {"layer 1", std::to_string(2 * page) + " tokens", "a page of " + std::to_string(page)});
  refused([](engine_tensor& t) { t.lists[1][3] = -4; }, {"layer 1", "block -4"});
  refused([](engine_tensor& t) { t.lists[2][3] = t.lists[2][0]; }, {"layer 2", "twice"});

  settings of_units = s;
  of_units.unit = {{4}};
  of_units.budget.selected_units = 5;
  // A sink slot, 2 + 1 of the window and 1 for two drafts taken back; 5 units of half a page.
  CHECK(pipeline_type::footprint(of_units, backend).slots_per_sequence(1) == 1 + 4 + 3);

  settings mixed = s;
  using enum freekv::layer_kind;
  mixed.plan = freekv::by_head{{retrieval, retrieval, complete, retrieval, retrieval, window}, kv_heads};
  pipeline_type pipeline(mixed, backend);
  const text source(mixed, d, max_tokens, 1);
  const auto id = pipeline.open();
  prompt_only(pipeline, id, source, 60);
  const auto rows = source.at(0, 60, 1);
  std::vector<std::int32_t> table(64);
  const auto misused = [&](const auto& call, const std::vector<std::string>& words) {
    try {
      call();
      FAIL("not refused");
    } catch (const freekv::usage_error& e) {
      check_mentions(e.what(), words);
    }
  };
  auto step = pipeline.begin_step({{id, 1}});
  for (int layer = 0; layer < layers; ++layer) {
    step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
    misused([&] { step.table(layer, id, table); }, {"table", "not corrected yet"});
    misused([&] { step.finish_layer(layer); }, {"finish_layer"});
    step.correct(layer);
    if (layer == 0) {
      CHECK(step.table(0, id, table).pages > 0);
      misused([&] { step.table(0, id, 2, table); }, {"KV head 2"});
      misused([&] { step.table(0, id, std::span(table).first(3)); }, {"room for 3"});
      misused([&] { step.table(0, freekv::sequence_id{1}, table); }, {"sequence 1"});
    } else {
      misused([&] { step.table(layer, id, table); }, {"each head"});
      if (layer == 1) misused([&] { step.table(1, id, 0, table); }, {"keeps everything"});
      CHECK(step.table(layer, id, 1, table).pages > 0);
    }
    step.finish_layer(layer);
  }
  step.end();

  pipeline_type units(of_units, backend);
  const auto other = units.open();
  prompt_only(units, other, source, 60);
  auto in_units = units.begin_step({{other, 1}});
  in_units.append<float>(0, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
  in_units.correct(0);
  misused([&] { in_units.table(0, other, table); }, {"keeps no slots"});
  in_units.finish_layer(0);
  in_units.append<float>(1, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
  in_units.correct(1);
  misused([&] { in_units.table(1, other, table); }, {"units of 4 tokens", "attend here"});
  in_units.abandon();
}
