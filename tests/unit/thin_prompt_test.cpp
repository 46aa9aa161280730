// Thinned prompts: which tokens stay, by the definition and by hand, and what a pipeline makes of them.

#include <algorithm>
#include <cmath>
#include <freekv/freekv.hpp>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../mentions.hpp"
#include "../oracle/attention.hpp"
#include "../oracle/thinning.hpp"
#include "rows.hpp"

namespace {

using namespace tests;

/// A layer's prompt, and what is kept of it.
template <class Element, int HeadDim>
struct thinned_case {
  using shape = freekv::kv_shape<Element, HeadDim>;
  freekv::prompt_thinning by;
  int tokens, rows;
  std::vector<Element> keys, values;
  std::vector<float> queries;
  std::vector<Element> kept_keys, kept_values;
  std::vector<std::int32_t> kept;

  thinned_case(const freekv::prompt_thinning& thinning, int prompt, int voting)
      : by(thinning), tokens(prompt), rows(voting) {}
  int key_row() const { return by.model.kv_heads * HeadDim; }

  void fill(dice& d, float spread) {
    keys = stored_as<Element>(normals(d, count(tokens * key_row())));
    values = stored_as<Element>(normals(d, count(tokens * key_row())));
    queries = normals(d, count(rows * by.model.query_heads * HeadDim), spread);
  }
  void thin(freekv::host::isa set = freekv::host::best_isa()) {
    kept_keys.assign(count(by.kept * key_row()), Element{});
    kept_values = kept_keys;
    kept.assign(count(by.kept * by.model.kv_heads), -1);
    freekv::thin_prompt<shape, Element>(by, {keys, values, queries}, {kept_keys, kept_values, kept}, set);
  }
  std::vector<int> kept_of(int head) const {
    std::vector<int> tokens_of;
    for (int row = 0; row < by.kept; ++row) tokens_of.push_back(kept[count(row * by.model.kv_heads + head)]);
    return tokens_of;
  }
  oracle::thinning_settings definition() const {
    return {.query_heads = by.model.query_heads,
            .kv_heads = by.model.kv_heads,
            .head_dim = HeadDim,
            .kept = by.kept,
            .sink = by.sink,
            .window = by.window,
            .kernel = by.kernel,
            .scale = by.scale != 0 ? static_cast<double>(by.scale) : 1 / std::sqrt(double{HeadDim}),
            .soft_cap = static_cast<double>(by.soft_cap)};
  }
  /// Rows are those of the tokens that they are said to be of, bit for bit.
  bool has_rows_of_tokens() const {
    for (int row = 0; row < by.kept; ++row)
      for (int head = 0; head < by.model.kv_heads; ++head) {
        const int token = kept[count(row * by.model.kv_heads + head)];
        const std::size_t at = count(row * key_row() + head * HeadDim),
                          from = count(token * key_row() + head * HeadDim);
        if (std::memcmp(&kept_keys[at], &keys[from], HeadDim * sizeof(Element)) != 0) return false;
        if (std::memcmp(&kept_values[at], &values[from], HeadDim * sizeof(Element)) != 0) return false;
      }
    return true;
  }
};

template <class Element, int HeadDim>
void check_random(dice& d, int& exact) {
  const int kv_heads = d.between(1, 3), group = d.between(1, 5), tokens = d.between(1, 300),
            sink = d.between(0, std::min(tokens, 20)), window = d.between(0, std::min(tokens - sink, 40));
  thinned_case<Element, HeadDim> c({.model = {1, kv_heads * group, kv_heads},
                                    .kept = d.between(sink + window, tokens),
                                    .sink = sink,
                                    .window = window,
                                    .kernel = d.one_of({1, 1, 3, 7}),
                                    .scale = d.one_of({0.0f, 0.3f}),
                                    .soft_cap = d.one_of({0.0f, 0.0f, 2.0f})},
                                   tokens, d.between(1, std::min(tokens, 24)));
  c.fill(d, d.one_of({0.3f, 1.0f, 3.0f}));
  if (d.below(4) == 0) {  // numbers that are none
    c.keys[count(d.below(static_cast<int>(c.keys.size())))] = freekv::from_float<Element>(quiet_nan);
    c.queries[count(d.below(static_cast<int>(c.queries.size())))] = inf;
  }
  const auto keys = values_of(c.keys);
  for (const freekv::host::isa set : instruction_sets()) {
    c.thin(set);
    INFO("tokens " << tokens << ", kept " << c.by.kept << ", sink " << sink << ", window " << window
                   << ", kernel " << c.by.kernel << ", rows " << c.rows << ", heads " << kv_heads << " of "
                   << group << ", " << freekv::host::name_of(set));
    CHECK(c.has_rows_of_tokens());
    for (int head = 0; head < kv_heads; ++head) {
      const oracle::thinning_votes votes = oracle::votes_of(c.definition(), c.queries, keys, head);
      CHECK(oracle::may_keep(c.definition(), votes, c.kept_of(head)));
      exact += c.kept_of(head) == oracle::kept_tokens(c.definition(), votes.votes);
    }
  }
}

/// `body` throws an error that says `part`.
template <class Error, class Body>
void check_refusal(const Body& body, const std::string& part) {
  std::string said = "nothing";
  try {
    body();
  } catch (const Error& e) {
    said = e.what();
  }
  check_mentions(said, {part});
}

}  // namespace

TEST_CASE("a thinned prompt keeps the tokens that the definition keeps", "[thin]") {
  dice d(61);
  int exact = 0;
  for (int repeat = 0; repeat < 60; ++repeat) {
    check_random<float, 64>(d, exact);
    check_random<freekv::half, 64>(d, exact);
    check_random<freekv::bfloat16, 128>(d, exact);
  }
  CHECK(exact > 300);  // of more; the others are within float32's rounding
}

TEST_CASE("what the last rows attend to stays, what nobody attends to leaves, and heads keep their own",
          "[thin]") {
  // Two KV heads of two query heads, 40 tokens; keys are one direction each.
  thinned_case<float, 64> c({.model = {1, 4, 2}, .kept = 6, .sink = 1, .window = 2}, 40, 2);
  c.keys.assign(count(40 * 2 * 64), 0.0f);
  c.values = c.keys;
  c.queries.assign(count(2 * 4 * 64), 0.0f);
  const auto key = [&](int token, int head, int direction) {
    c.keys[count((token * 2 + head) * 64 + direction)] = 10.0f;
  };
  const auto query = [&](int row, int head, int direction) {
    c.queries[count((row * 4 + head) * 64 + direction)] = 10.0f;
  };
  key(7, 0, 1), key(20, 0, 2), key(30, 0, 3);  // of KV head 0
  key(12, 1, 1), key(13, 1, 9);                // of KV head 1
  query(0, 0, 1), query(0, 1, 2), query(1, 0, 3), query(1, 1, 3);
  query(0, 2, 1), query(0, 3, 1), query(1, 2, 1), query(1, 3, 1);
  for (int i = 0; i < 40 * 2 * 64; ++i) c.values[count(i)] = static_cast<float>(i);
  c.thin();
  CHECK(c.kept_of(0) == std::vector{0, 7, 20, 30, 38, 39});
  CHECK(c.kept_of(1) ==
        std::vector{0, 1, 2, 12, 38, 39});  // nobody looks where 13 is; of equal ones the first
  CHECK(c.has_rows_of_tokens());

  c.by.kernel = 3;  // neighbours of what is looked at stay with it
  c.thin();
  CHECK(c.kept_of(1) == std::vector{0, 11, 12, 13, 38, 39});

  c.by.kernel = 1, c.by.kept = 40;
  c.queries.clear(), c.rows = 0;
  c.thin();
  CHECK(c.kept_keys == c.keys);
  CHECK(c.kept_values == c.values);
  c.by.kept = 3, c.by.sink = 1, c.by.window = 2;
  c.queries.assign(count(4 * 64), 1.0f);
  c.thin();
  CHECK(c.kept_of(0) == std::vector{0, 38, 39});
}

TEST_CASE("a row votes for no token behind it", "[thin]") {
  // The row before the last would give all to the last token, which is not there for it.
  thinned_case<float, 64> c({.model = {1, 1, 1}, .kept = 1}, 4, 2);
  c.keys.assign(count(4 * 64), 0.0f);
  c.values = c.keys;
  c.queries.assign(count(2 * 64), 0.0f);
  c.keys[count(3 * 64)] = 10.0f, c.queries[0] = 10.0f;
  c.keys[count(1 * 64 + 5)] = 4.0f, c.queries[count(64 + 5)] = 8.0f;
  c.thin();
  CHECK(c.kept_of(0) == std::vector{1});
}

TEST_CASE("a pipeline that selects all of a thinned prompt attends to what was kept, and nothing else",
          "[thin]") {
  namespace fk = freekv;
  using shape = fk::kv_shape<fk::half, 64>;
  using pipeline = fk::retrieval_pipeline<shape, fk::page_size<8>, fk::always, fk::complete_first<0>>;
  constexpr int layers = 2, kv_heads = 2, query_heads = 6, d = 64, tokens = 301, rows = 16, kept = 100;
  dice dealt(62);
  std::vector<std::vector<fk::half>> keys, values;
  std::vector<std::vector<float>> last_queries;
  for (int layer = 0; layer < layers; ++layer) {
    keys.push_back(stored_as<fk::half>(normals(dealt, count(tokens * kv_heads * d))));
    values.push_back(stored_as<fk::half>(normals(dealt, count(tokens * kv_heads * d))));
    last_queries.push_back(normals(dealt, count(rows * query_heads * d)));
  }
  fk::host_backend backend;
  pipeline::settings settings{.model = {layers, query_heads, kv_heads},
                              .budget = {.sink = 8, .window = 16, .selected_units = 20},
                              .capacity = {.max_tokens = kept + 1}};
  pipeline retrieval(settings, backend);
  const fk::sequence_id sequence = retrieval.open();
  std::vector<std::int32_t> numbers(kept * kv_heads);
  std::vector<std::vector<std::int32_t>> kept_tokens;

  // The engine's prefill has left `tokens` rows of each layer, and the queries of the last of them.
  std::vector<fk::half> k(kept * kv_heads * d), v(k.size());
  const fk::prompt_thinning by{.model = settings.model, .kept = kept, .sink = 8, .window = 16};
  auto prompt = retrieval.begin_step({{sequence, kept, fk::step_phase::prefill}});
  for (int layer = 0; layer < layers; ++layer) {
    fk::thin_prompt<shape, fk::half>(by, {keys[layer], values[layer], last_queries[layer]}, {k, v, numbers});
    prompt.append(layer, {.keys = k, .values = v});
    kept_tokens.push_back(numbers);
  }
  prompt.end();
  CHECK(retrieval.tokens(sequence) == kept);

  auto step = retrieval.begin_step({{sequence}});
  for (int layer = 0; layer < layers; ++layer) {
    const auto key = stored_as<fk::half>(normals(dealt, kv_heads * d)),
               value = stored_as<fk::half>(normals(dealt, kv_heads * d));
    const auto query = normals(dealt, query_heads * d);
    std::vector<float> out(query.size()), lse(query_heads);
    step.append(layer, {.keys = key, .values = value, .queries = query});
    step.attend(layer, out, lse);
    const auto all_keys = values_of(keys[layer]), all_values = values_of(values[layer]),
               new_key = values_of(key), new_value = values_of(value);
    for (int head = 0; head < query_heads; ++head) {
      const int of = head / (query_heads / kv_heads);
      std::vector<std::span<const float>> k_rows, v_rows;
      for (int row = 0; row < kept; ++row) {
        const auto at = count((kept_tokens[layer][count(row * kv_heads + of)] * kv_heads + of) * d);
        k_rows.push_back(std::span(all_keys).subspan(at, d));
        v_rows.push_back(std::span(all_values).subspan(at, d));
      }
      k_rows.push_back(std::span(new_key).subspan(count(of * d), d));
      v_rows.push_back(std::span(new_value).subspan(count(of * d), d));
      const auto want = oracle::attend(std::span(query).subspan(count(head * d), d), k_rows, v_rows, 1 / 8.0);
      CHECK(lse[count(head)] == Approx(want.lse[0]).margin(1e-5));
      for (int i = 0; i < d; ++i) CHECK(out[count(head * d + i)] == Approx(want.out[count(i)]).margin(1e-5));
    }
  }
  step.end();
}

TEST_CASE("thin_prompt says what cannot be kept, and what it is lacking", "[thin]") {
  dice d(63);
  thinned_case<float, 64> c({.model = {1, 4, 2}, .kept = 10, .sink = 2, .window = 4}, 50, 8);
  c.fill(d, 1.0f);
  const auto refuses = [&](const freekv::prompt_thinning& by, const std::string& part) {
    thinned_case<float, 64> other = c;
    other.by = by;
    check_refusal<freekv::settings_error>([&] { other.thin(); }, part);
  };
  const auto with = [&](auto change) {
    freekv::prompt_thinning by = c.by;
    change(by);
    return by;
  };
  refuses(with([](auto& by) { by.kept = 51; }), "51 tokens cannot be kept of a prompt of 50");
  refuses(with([](auto& by) { by.kept = 5; }),
          "5 kept tokens have no room for a sink of 2 and a window of 4");
  refuses(with([](auto& by) { by.sink = -1; }), "a sink of -1");
  refuses(with([](auto& by) { by.kernel = 2; }), "a kernel of 2 tokens is not odd");
  refuses(with([](auto& by) { by.kernel = -1; }), "a kernel of -1 tokens");
  refuses(with([](auto& by) { by.scale = inf; }), "scale is not finite");
  refuses(with([](auto& by) { by.soft_cap = -1; }), "soft_cap is -1");
  refuses(with([](auto& by) { by.model.kv_heads = 3; }), "query_heads 4 is not a multiple of kv_heads 3");

  std::vector<float> keys(count(10 * 2 * 64)), values(keys);
  std::vector<std::int32_t> numbers(20);
  const auto lacks = [&](const freekv::prompt_rows<float>& prompt, const freekv::thinned_rows<float>& to,
                         const std::string& part) {
    check_refusal<freekv::usage_error>(
        [&] { freekv::thin_prompt<freekv::kv_shape<float, 64>, float>(c.by, prompt, to); }, part);
  };
  const std::span<const float> all_keys = c.keys, all_values = c.values, queries = c.queries;
  lacks({all_keys.first(100), all_values.first(100), queries}, {keys, values, numbers},
        "100 numbers of keys");
  lacks({all_keys, all_values.first(128), queries}, {keys, values, numbers}, "128 of values");
  lacks({all_keys, all_values, queries.first(100)}, {keys, values, numbers}, "100 of queries");
  lacks({all_keys, all_values, {}}, {keys, values, numbers}, "no rows vote");
  lacks({all_keys, all_values, queries}, {std::span(keys).first(128), values, numbers}, "room for 128");
  lacks({all_keys, all_values, queries}, {keys, values, std::span(numbers).first(19)}, "19 tokens' numbers");
  lacks({all_keys.first(128), all_values.first(128), queries}, {keys, values, numbers},
        "at most as many tokens");
}
