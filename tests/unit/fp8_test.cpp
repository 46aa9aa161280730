// Keys and values that are kept in fp8, and scales, against the float64 oracle, which is given the stored
// numbers; and what rows, saved prefixes and settings have to do with scales.

#include <algorithm>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../mentions.hpp"
#include "../oracle/codec.hpp"
#include "../property/compare_step.hpp"
#include "../property/seeds.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::fp8_e4m3;
using freekv::half;
using freekv::step_phase;

constexpr int width = 64;
using fp8_pipeline =
    freekv::retrieval_pipeline<freekv::kv_shape<fp8_e4m3, width>, freekv::page_size<freekv::dynamic>,
                               freekv::any_of<freekv::min_max, freekv::mean>,
                               freekv::complete_first<freekv::dynamic>,
                               freekv::any_of<freekv::resident, freekv::in_place>>;

/// A random case for `fp8_pipeline`, with scales; keys are given as float, which bfloat16 and half hold too.
random_case fp8_case(std::uint64_t seed) {
  random_case c = make_case(seed);
  dice d(seed + 50);
  auto& o = c.options;
  o.element = freekv::examples::data_type::bf16;  // of the rows
  o.head_dim = width;
  o.method = {.summary = d.one_of<std::string>({"min_max", "mean"})};
  o.method.plan = d.below(4) == 0 ? "complete" : "retrieval";
  o.page = d.one_of({8, 16, 32});
  o.budget = {.sink = o.page * d.between(0, 2), .window = o.page, .selected_units = d.between(1, 4)};
  o.soft_cap = 0.0f;
  o.scale = 0.0f;
  o.sink_logits.clear();
  o.head_kinds.clear();
  c.basis_data.clear();
  c.prompt = d.between(0, 9 * o.page);
  c.steps = d.between(1, 2 * o.page);
  c.turn = 0.5f;
  o.max_tokens = c.prompt + c.steps;
  give_basis(c, d, o.kv_heads);
  give_scales(c);
  return c;
}

fp8_pipeline::settings settings_of(const random_case& c) {
  const auto& o = c.options;
  fp8_pipeline::settings s;
  s.model = {.query_heads = o.query_heads, .kv_heads = o.kv_heads};
  s.budget = o.budget;
  s.page = {{o.page}};
  s.capacity.max_tokens = o.max_tokens;
  s.attention.key_scales = o.key_scales;
  s.attention.value_scales = o.value_scales;
  if (o.method.summary == "mean") s.summary = freekv::mean{};
  s.plan = {o.method.plan == "complete" ? 1 : 0};
  if (o.in_place) s.route = freekv::in_place{};
  return s;
}

/// Numbers (tokens, kv_heads, head_dim) as fp8 stores them by the scales of the heads.
std::vector<float> in_fp8(const std::vector<float>& rows, const std::vector<double>& scales, int heads) {
  std::vector<float> stored;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto scale = static_cast<float>(oracle::scale_of(scales, static_cast<int>(i / width) % heads));
    stored.push_back(static_cast<float>(oracle::rounded_to_fp8(static_cast<double>(rows[i] / scale))));
  }
  return stored;
}

/// A step's rows of one sequence.
struct rows_of_step {
  int tokens;
  step_phase phase;
  const std::vector<float>&keys, &values, &queries;
};

template <class In>
void append_as(fp8_pipeline& p, freekv::sequence_id id, const rows_of_step& rows, std::vector<float>& out,
               std::vector<float>& lse) {
  const auto keys = stored_as<In>(rows.keys), values = stored_as<In>(rows.values);
  auto step = p.begin_step({{id, rows.tokens, rows.phase}});
  step.append<In>(0, {.keys = keys, .values = values, .queries = rows.queries});
  if (rows.phase == step_phase::decode) step.attend(0, out, lse);
  step.end();
}

/// One case, whose rows come as floats, as half, as bfloat16 or as they are stored, in turns.
void compare_with_oracle(const random_case& c, freekv::host_backend& backend, coverage& seen) {
  fp8_pipeline p(settings_of(c), backend);
  const auto id = p.open();
  const int heads = c.options.kv_heads;
  auto s = oracle_settings(c);
  s.read_back = nullptr;
  s.element = oracle::element_kind::f32;  // which holds all of fp8
  s.key_scales = scales_of_layer(c.options.key_scales, 0, heads);
  s.value_scales = scales_of_layer(c.options.value_scales, 0, heads);
  oracle::decoder expected(s);
  step_comparison comparison(heads);
  token_source source(c);
  std::vector<float> out(count(c.options.query_heads * width)), lse(count(c.options.query_heads));
  int turn = static_cast<int>(c.seed);
  const auto append = [&](int tokens, step_phase phase, const std::vector<float>& keys,
                          const std::vector<float>& values) {
    const rows_of_step rows{tokens, phase, keys, values, source.queries};
    const auto stored_keys = in_fp8(keys, s.key_scales, heads),
               stored_values = in_fp8(values, s.value_scales, heads);
    switch (turn++ % 4) {
      case 0:
        append_as<float>(p, id, rows, out, lse);
        break;
      case 1:
        append_as<half>(p, id, rows, out, lse);
        break;
      case 2:
        append_as<bfloat16>(p, id, rows, out, lse);
        break;
      default:
        append_as<fp8_e4m3>(p, id, {tokens, phase, stored_keys, stored_values, source.queries}, out, lse);
    }
    return std::pair(stored_keys, stored_values);
  };
  for (int left = c.prompt, chunk; left > 0; left -= chunk) {
    chunk = 1 + source.random().below(left);
    std::vector<float> keys, values;
    for (int token = 0; token < chunk; ++token) {
      source.next();
      keys.insert(keys.end(), source.keys.begin(), source.keys.end());
      values.insert(values.end(), source.values.begin(), source.values.end());
    }
    source.queries.clear();
    const auto [k, v] = append(chunk, step_phase::prefill, keys, values);
    expected.prompt(k, v, chunk);
  }
  for (int step = 0; step < c.steps; ++step) {
    source.next();
    const auto [k, v] = append(1, step_phase::decode, source.keys, source.values);
    const auto want = expected.step(source.queries, k, v);
    comparison.compare(sentence("step ", step), c, want, p.report(0)[id], out, lse, seen);
    comparison.follow(want);
  }
}

/// One KV head, whose tokens are all attended to.
fp8_pipeline::settings small_settings() {
  fp8_pipeline::settings s;
  s.model = {.query_heads = 2, .kv_heads = 1};
  s.page = {{8}};
  s.budget = {.sink = 8, .window = 8, .selected_units = 2};
  s.capacity.max_tokens = 64;
  return s;
}

/// The outputs of a decode row whose key and value are these numbers, alike, in a new sequence.
template <class In>
std::vector<float> attended(fp8_pipeline& p, In key, In value) {
  const std::vector<In> keys(count(width), key), values(count(width), value);
  const std::vector<float> queries(count(2 * width), 0.25f);
  std::vector<float> out(queries.size()), lse(2);
  const auto id = p.open();
  auto step = p.begin_step({{id}});
  step.append<In>(0, {.keys = keys, .values = values, .queries = queries});
  step.attend(0, out, lse);
  step.end();
  p.release(id);
  CHECK(lse[0] == lse[1]);
  out.push_back(lse[0]);
  return out;
}

std::string refusal(const freekv::attention_settings& attention) {
  freekv::host_backend backend;
  auto s = small_settings();
  s.model = {.layers = 3, .query_heads = 4, .kv_heads = 2};
  s.attention = attention;
  try {
    fp8_pipeline p(s, backend);
  } catch (const freekv::settings_error& e) {
    return e.what();
  }
  return "nothing is refused";
}

}  // namespace

TEST_CASE("a cache in fp8 with scales agrees with the oracle on the stored numbers", "[fp8]") {
  const std::uint64_t first = number_from("FREEKV_SEED", 1), cases = number_from("FREEKV_CASES", 60);
  coverage seen;
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    const random_case c = fp8_case(seed);
    freekv::host_backend backend({.threads = seed % 3 == 0 ? 3 : 1,
                                  .overlap = seed % 2 == 0,
                                  .bytes_per_thread = 512,
                                  .instructions = instruction_sets()[seed % instruction_sets().size()]});
    try {
      compare_with_oracle(c, backend, seen);
    } catch (const disagreement& d) {
      INFO(c);
      FAIL(d.what);
    }
  }
  INFO(seen.firm_selections << " firm selections, " << seen.compared_outputs << " outputs, " << seen.corrected
                            << " corrected, " << seen.recalled << " recalled");
  if (cases < 60) return;
  CHECK(seen.firm_selections > 300);
  CHECK(seen.compared_outputs > 3000);
  CHECK(seen.corrected > 100);
  CHECK(seen.recalled > 100);
}

TEST_CASE("scales of each layer, as checkpoints have them, and rows of bfloat16", "[fp8]") {
  namespace fk = freekv;
  freekv::host_backend backend;
  auto settings = small_settings();
  settings.model.layers = 2;
  const std::vector<float> k_scale{0.5f, 2.0f}, v_scale{0.25f, 4.0f};
  settings.attention.key_scales = k_scale;  // a float of each layer, as the checkpoint has them
  settings.attention.value_scales = v_scale;
  fp8_pipeline p(settings, backend);
  const std::vector<bfloat16> k(count(width), bfloat16(1.5f)), v(count(width), bfloat16(3.0f)),
      q(count(2 * width), bfloat16(0.25f));
  std::vector<bfloat16> out(q.size());
  auto step = p.begin_step({{p.open()}});
  for (int layer = 0; layer < 2; ++layer) {
    // ... rows of the model's layer, which are divided and rounded
    step.append<fk::bfloat16, fk::bfloat16>(layer, {.keys = k, .values = v, .queries = q});
    step.attend<fk::bfloat16>(layer, out);
    CHECK(std::all_of(out.begin(), out.end(), [](bfloat16 x) { return freekv::to_float(x) == 3.0f; }));
  }
  step.end();
}

TEST_CASE("what lies beyond 448 scales is 448 of them, and NaN stays NaN", "[fp8]") {
  freekv::host_backend backend;
  auto s = small_settings();
  s.attention.key_scales = {0.125f};
  s.attention.value_scales = {0.5f};
  fp8_pipeline p(s, backend);
  // <q, k> is 64 * 0.25 * 56, and 1 / 8 of it the score.
  const auto most = attended(p, 1e6f, -inf);
  CHECK(most[0] == -224.0f);
  CHECK(most.back() == 112.0f);
  CHECK(attended(p, half(60000.0f), half(224.0f))[0] == 224.0f);
  CHECK(attended(p, half(60000.0f), half(225.0f))[0] == 224.0f);
  CHECK(attended(p, bfloat16(1.0f), bfloat16(0.5f * 17.0f / 16.0f))[0] == 0.5f);  // ties to even
  CHECK(std::isnan(attended(p, 1.0f, quiet_nan)[0]));
  CHECK(attended(p, 1.0f, 1.0f).back() == 2.0f);
}

TEST_CASE("rows of fp8 are stored as they are, and slots hold their bits", "[fp8]") {
  freekv::host_backend backend;
  auto s = small_settings();
  s.attention.key_scales = {3.0f};
  s.attention.value_scales = {0.01f};
  const fp8_pipeline::footprint needs(s, backend);
  CHECK(needs.bytes().slots % width == 0);
  std::vector<std::int32_t> ids(count(needs.slots(0)));
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(ids.size() - 1 - i);
  std::vector<fp8_e4m3> tensor(ids.size() * 2 * 8 * width);
  const freekv::paged_blocks<fp8_e4m3> blocks{.tensor = {.keys = tensor.data(),
                                                         .values = tensor.data() + 8 * width,
                                                         .block_stride = 2 * 8 * width,
                                                         .token_stride = width,
                                                         .head_stride = width,
                                                         .block_tokens = 8},
                                              .ids = ids};
  fp8_pipeline p(needs, backend, {}, {&blocks, 1});
  std::vector<fp8_e4m3> keys(count(8 * width)), values(keys.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = {static_cast<std::uint8_t>(i % 127)};
    values[i] = {static_cast<std::uint8_t>(128 + i % 127)};
  }
  auto step = p.begin_step({{p.open(), 8, step_phase::prefill}});
  step.append<fp8_e4m3, float>(0, {.keys = keys, .values = values});
  step.end();
  const auto in_sink = [&](const std::vector<fp8_e4m3>& rows, int from) {
    const fp8_e4m3* const first = tensor.data() + ids[0] * 2 * 8 * width + from;
    return std::equal(rows.begin(), rows.end(), first,
                      [](fp8_e4m3 a, fp8_e4m3 b) { return a.bits == b.bits; });
  };
  CHECK(in_sink(keys, 0));
  CHECK(in_sink(values, 8 * width));
}

TEST_CASE("a saved prefix is of the stored numbers, and of their scales", "[fp8]") {
  freekv::host_backend backend;
  auto s = small_settings();
  s.attention.key_scales = {0.25f};
  s.attention.value_scales = {8.0f};
  dice d(3);
  auto keys = normals(d, count(40 * width)), values = normals(d, keys.size(), 100.0f);
  const std::vector<float> queries = normals(d, count(2 * width));
  const auto decode = [&](fp8_pipeline& p, freekv::sequence_id id) {
    std::vector<float> out(queries.size());
    auto step = p.begin_step({{id}});
    step.append<float>(
        0,
        {.keys = std::span(keys).first(width), .values = std::span(values).first(width), .queries = queries});
    step.attend(0, out);
    step.end();
    return out;
  };
  const auto prompted = [&](fp8_pipeline& p) {
    const auto id = p.open();
    auto step = p.begin_step({{id, 40, step_phase::prefill}});
    step.append<float>(0, {.keys = keys, .values = values});
    step.end();
    return id;
  };
  fp8_pipeline plain(s, backend);
  const auto id = prompted(plain);
  std::vector<std::byte> saved;
  plain.save_prefix(
      plain.keep_prefix(id, 40),
      [&](std::span<const std::byte> more) { saved.insert(saved.end(), more.begin(), more.end()); }, 7);
  const auto expected = decode(plain, id);

  const auto load = [&](fp8_pipeline& into) {
    std::size_t at = 0;
    return into.load_prefix(
        [&](std::span<std::byte> to) {
          std::copy_n(saved.begin() + static_cast<long>(at), to.size(), to.begin());
          at += to.size();
        },
        7);
  };
  fp8_pipeline again(s, backend);
  CHECK(same_bits(decode(again, again.open(load(again))), expected));
  for (auto* const scales : {&s.attention.key_scales, &s.attention.value_scales}) {
    auto others = s;
    (scales == &s.attention.key_scales ? others.attention.key_scales
                                       : others.attention.value_scales) = {2.0f};
    fp8_pipeline other(others, backend);
    try {
      const freekv::prefix wrong = load(other);
      FAIL("a prefix of other scales is loaded");
    } catch (const freekv::prefix_error& e) {
      check_mentions(e.what(), {scales == &s.attention.key_scales ? "key_scales" : "value_scales"});
    }
  }
}

TEST_CASE("scales are said in sentences to be wrong", "[fp8]") {
  check_mentions(
      refusal({.key_scales = {1.0f, 2.0f}}),
      {"key_scales has 2 numbers", "give 1, 3 (one for each layer)", "6 (one for each KV head", "none"});
  check_mentions(refusal({.value_scales = std::vector<float>(7, 1.0f)}), {"value_scales has 7 numbers"});
  check_mentions(refusal({.key_scales = {0.0f}}), {"key_scales has 0.000000", "above 0", "448"});
  check_mentions(refusal({.value_scales = {1.0f, 1.0f, -1.0f}}), {"value_scales has -1.000000"});
  check_mentions(refusal({.key_scales = {inf}}), {"key_scales has inf"});
  check_mentions(refusal({.key_scales = {quiet_nan}}), {"key_scales has", "nan"});
  CHECK(refusal({.key_scales = {2.0f, 3.0f, 4.0f}}) == "nothing is refused");
  CHECK(refusal({.value_scales = std::vector<float>(6, 2.0f)}) == "nothing is refused");
  freekv::eviction_settings<freekv::h2o> evicting;
  evicting.model = {.query_heads = 2, .kv_heads = 1};
  evicting.attention.key_scales = {2.0f};
  evicting.capacity.max_prompt = 100;
  evicting.capacity.max_generated = 10;
  try {
    freekv::checked_settings<width>(evicting);
    FAIL("an evicting pipeline takes scales");
  } catch (const freekv::settings_error& e) {
    check_mentions(e.what(), {"an evicting pipeline", "key_scales", "retrieval_pipeline"});
  }
}

TEST_CASE("settings hold a scale for each KV head of each layer, or none where all are 1", "[fp8]") {
  freekv::attention_settings of;
  const freekv::model_settings model{.layers = 2, .query_heads = 3, .kv_heads = 3};
  of.key_scales = {2.0f, 4.0f};
  of.value_scales = {1.0f};
  of.fill_in(model, 64);
  CHECK(of.key_scales == std::vector<float>{2, 2, 2, 4, 4, 4});
  CHECK(of.value_scales.empty());
  of.fill_in(model, 64);
  CHECK(of.key_scales == std::vector<float>{2, 2, 2, 4, 4, 4});
}
