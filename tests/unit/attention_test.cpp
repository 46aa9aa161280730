// Attention slice by slice and the merge of parts, against the float64 oracle: every team, ragged pages, any
// split.

#include <algorithm>
#include <freekv/algorithms/attend_slice.hpp>
#include <numeric>
#include <tuple>
#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::half;

template <int D, class E>
struct shape {
  static constexpr int d = D;
  using element = E;
};
using some_shapes = std::tuple<shape<8, float>, shape<80, float>, shape<128, half>, shape<24, bfloat16>>;
using all_shapes =
    std::tuple<shape<8, float>, shape<64, float>, shape<80, float>, shape<96, float>, shape<128, float>,
               shape<192, float>, shape<256, float>, shape<72, half>, shape<128, half>, shape<24, bfloat16>>;
using shapes = std::conditional_t<sanitized, some_shapes, all_shapes>;

/// Slices of one KV head: the first tokens of each page of a pool in NHD or HND.
template <class Shape>
struct attention_case {
  static constexpr int d = Shape::d;
  using element = typename Shape::element;
  int group = 1, page = 8;
  std::vector<int> tokens;          // of each slice
  std::vector<float> query;         // (group, d), scaled
  std::vector<float> keys, values;  // (all tokens, d), as stored
  int heads = 1;
  bool by_head = false;  // HND, else NHD
  float soft_cap = 0.0f;
  std::vector<float> sink_logits;  // (group), or none
  std::vector<float> log_weights;  // (all tokens), or none

  int total() const { return std::accumulate(tokens.begin(), tokens.end(), 0); }
};

template <class Shape>
attention_case<Shape> make_attention(dice& d) {
  attention_case<Shape> c;
  c.group = d.one_of({1, 2, 3, 4, 5, 7, 8, 16});
  c.page = d.one_of({8, 16, 24, 32, 64});
  c.heads = d.between(1, 3);
  c.by_head = d.below(2) == 0;
  for (int pages = d.between(1, 6); pages > 0; --pages)
    c.tokens.push_back(d.one_of({c.page, c.page, d.between(1, c.page)}));
  const float size = d.one_of({0.1f, 1.0f, 3.0f}) / std::sqrt(static_cast<float>(Shape::d));
  c.query = normals(d, count(c.group * Shape::d), size);
  const std::size_t numbers = count(c.total() * Shape::d);
  c.keys = values_of(stored_as<typename Shape::element>(normals(d, numbers)));
  c.values = values_of(stored_as<typename Shape::element>(normals(d, numbers)));
  return c;
}

struct attended {
  std::vector<float> out, lse;
};

/// `parts`: how many slices each part has, merged in order.
template <class Shape>
attended attend_by(executor on, const attention_case<Shape>& c, const std::vector<int>& parts,
                   bool wants_lse = true) {
  constexpr int d = Shape::d;
  using element = typename Shape::element;
  // Slices in a pool whose other rows are NaN: they must not be read as tokens.
  std::vector<element> data(c.tokens.size() * 2 * count(c.page * c.heads * d),
                            freekv::from_float<element>(quiet_nan));
  std::vector<freekv::head_slice<const element>> slices;
  const auto fill = [&](auto span) {
    int first = 0;
    for (std::size_t s = 0; s < c.tokens.size(); ++s) {
      for (int t = 0; t < c.tokens[s]; ++t)
        for (int i = 0; i < d; ++i) {
          const auto at = count((first + t) * d + i);
          span(static_cast<int>(s), 0, t, c.heads - 1, i) = freekv::from_float<element>(c.keys[at]);
          span(static_cast<int>(s), 1, t, c.heads - 1, i) = freekv::from_float<element>(c.values[at]);
        }
      first += c.tokens[s];
      slices.push_back(freekv::detail::as_const(
          freekv::detail::slice_of(span, static_cast<std::int64_t>(s), c.heads - 1)));
    }
  };
  const auto pages = static_cast<std::int64_t>(c.tokens.size());
  if (c.by_head)
    fill(freekv::make_page_span<freekv::hnd, d>(data.data(), pages, {c.page, c.heads}));
  else
    fill(freekv::make_page_span<freekv::nhd, d>(data.data(), pages, {c.page, c.heads}));

  const auto group = count(c.group);
  attended result{std::vector<float>(group * d, -9.0f), std::vector<float>(group, -9.0f)};
  // Scratch holds what was there before.
  std::vector<float> scratch(freekv::detail::attention_scratch<d>, quiet_nan),
      weighted(2 * group * d, quiet_nan);
  std::vector<freekv::log_sum_exp> log_sums(2 * group, {quiet_nan, quiet_nan});
  const freekv::detail::attention_part all{log_sums.data(), weighted.data()},
      part{log_sums.data() + group, weighted.data() + group * d};
  run_on(on, [&](auto team) {
    all.clear(team, c.group, d);
    std::size_t slice = 0;
    const float* log_weights = c.log_weights.empty() ? nullptr : c.log_weights.data();
    for (std::size_t nth = 0; nth < parts.size(); ++nth) {
      part.clear(team, c.group, d);
      for (int i = 0; i < parts[nth]; ++i, ++slice) {
        freekv::detail::attend_slice<d, decltype(team), element>(
            team, {c.query.data(), c.group, d}, slices[slice], c.tokens[slice], part, scratch.data(),
            c.soft_cap, nullptr, log_weights);
        if (log_weights != nullptr) log_weights += c.tokens[slice];
      }
      freekv::detail::merge_parts<d>(team, part, all, c.group);
    }
    if (!c.sink_logits.empty()) freekv::detail::add_logits<d>(team, c.sink_logits.data(), c.group, all);
    freekv::detail::finish_attention<d>(team, all, c.group, result.out.data(),
                                        wants_lse ? result.lse.data() : nullptr);
  });
  return result;
}

template <class Shape>
attended attend_whole(executor on, const attention_case<Shape>& c) {
  return attend_by(on, c, {static_cast<int>(c.tokens.size())});
}

template <class Shape>
void check(const attended& got, const attention_case<Shape>& c) {
  const auto keys = rows_of(c.keys, Shape::d), values = rows_of(c.values, Shape::d);
  int wrong = 0;
  for (int g = 0; g < c.group; ++g) {
    const double logit = c.sink_logits.empty() ? -inf : c.sink_logits[count(g)];
    const auto expected = oracle::attend(oracle::row_of(c.query, g, Shape::d), keys, values, 1.0,
                                         {c.soft_cap, logit, c.log_weights});
    if (!is_near(got.lse[count(g)], expected.lse[0], 1e-5 * std::max(1.0, std::fabs(expected.lse[0]))))
      ++wrong;
    for (int i = 0; i < Shape::d; ++i)
      if (!is_near(got.out[count(g * Shape::d + i)], expected.out[count(i)], 2e-5)) ++wrong;
  }
  CHECK(wrong == 0);
}

template <class Shape>
std::vector<int> random_parts(dice& d, const attention_case<Shape>& c) {
  std::vector<int> parts;
  for (int left = static_cast<int>(c.tokens.size()); left > 0;) {
    parts.push_back(d.between(0, left));  // a part may be empty
    left -= parts.back();
  }
  return parts;
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("attention over ragged pages of any layout is the oracle's", "[attention]", shapes) {
  dice d(1);
  for (int trial = 0; trial < some_of(25); ++trial) {
    const auto c = make_attention<TestType>(d);
    for (const executor on : executors()) check(attend_whole(on, c), c);
  }
}

TEMPLATE_LIST_TEST_CASE("any split into parts gives the unsplit attention to rounding", "[attention]",
                        shapes) {
  dice d(2);
  for (int trial = 0; trial < some_of(15); ++trial) {
    const auto c = make_attention<TestType>(d);
    for (const executor on : executors()) {
      check(attend_by(on, c, random_parts(d, c)), c);
      check(attend_by(on, c, std::vector<int>(c.tokens.size(), 1)), c);
      // Empty parts before, between and behind change not a bit.
      const auto whole = attend_whole(on, c);
      const auto padded = attend_by(on, c, {0, static_cast<int>(c.tokens.size()), 0, 0});
      CHECK(same_bits(padded.lse, whole.lse));
      CHECK(padded.out == whole.out);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("an empty set attends to nothing: output 0, lse -infinity", "[attention]", shapes) {
  dice d(3);
  auto c = make_attention<TestType>(d);
  for (const executor on : executors())
    for (const bool has_pages : {false, true}) {
      std::fill(c.tokens.begin(), c.tokens.end(), 0);
      const auto got = attend_by(on, c, {has_pages ? static_cast<int>(c.tokens.size()) : 0, 0});
      CHECK(std::all_of(got.out.begin(), got.out.end(), [](float x) { return x == 0.0f; }));
      CHECK(std::all_of(got.lse.begin(), got.lse.end(), [](float x) { return x == -inf; }));
    }
}

TEMPLATE_LIST_TEST_CASE("a score of -infinity has no weight, and alone counts as nothing", "[attention]",
                        shapes) {
  constexpr int d_ = TestType::d;
  dice d(4);
  for (int trial = 0; trial < some_of(10); ++trial) {
    auto c = make_attention<TestType>(d);
    for (int g = 0; g < c.group; ++g) c.query[count(g * d_)] = 1.0f;
    // Whole blocks of them at the front, so that the first finite score comes late.
    const int front = d.between(0, c.total());
    for (int t = 0; t < c.total(); ++t)
      if (t < front || d.below(3) == 0) c.keys[count(t * d_)] = -inf;
    for (const executor on : executors()) {
      check(attend_whole(on, c), c);
      check(attend_by(on, c, std::vector<int>(c.tokens.size(), 1)), c);
    }
    for (int t = 0; t < c.total(); ++t) c.keys[count(t * d_)] = -inf;
    for (const executor on : executors()) {
      const auto got = attend_by(on, c, random_parts(d, c));
      CHECK(std::all_of(got.out.begin(), got.out.end(), [](float x) { return x == 0.0f; }));
      CHECK(std::all_of(got.lse.begin(), got.lse.end(), [](float x) { return x == -inf; }));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a NaN or +infinite score makes the head NaN, wherever the token is", "[attention]",
                        shapes) {
  constexpr int d_ = TestType::d;
  dice d(5);
  for (int trial = 0; trial < some_of(12); ++trial) {
    auto c = make_attention<TestType>(d);
    for (int g = 0; g < c.group; ++g) c.query[count(g * d_)] = 1.0f;
    c.keys[count(d.below(c.total()) * d_)] = trial % 2 == 0 ? quiet_nan : inf;
    if (trial % 3 == 0) c.keys[count(d.below(c.total()) * d_)] = -inf;
    const executor on = executors()[count(trial) % executors().size()];
    for (const auto& got : {attend_whole(on, c), attend_by(on, c, std::vector<int>(c.tokens.size(), 1))}) {
      check(got, c);
      if (trial % 3 == 0) continue;  // the -infinity may have replaced it
      CHECK(std::all_of(got.out.begin(), got.out.end(), [](float x) { return std::isnan(x); }));
      CHECK(std::all_of(got.lse.begin(), got.lse.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("what is not finite in one head's query or one value's element stays there",
                        "[attention]", shapes) {
  constexpr int d_ = TestType::d;
  dice d(6);
  for (int trial = 0; trial < 8; ++trial) {
    auto c = make_attention<TestType>(d);
    const executor on = executors()[count(trial) % executors().size()];
    const int head = d.below(c.group), element = d.below(d_);
    auto query = c;
    query.query[count(head * d_ + element)] = quiet_nan;
    const auto by_query = attend_by(on, query, random_parts(d, c));
    check(by_query, query);
    for (int g = 0; g < c.group; ++g) CHECK(std::isnan(by_query.lse[count(g)]) == (g == head));

    auto value = c;
    value.values[count(d.below(c.total()) * d_ + element)] = trial % 2 == 0 ? quiet_nan : inf;
    const auto by_value = attend_by(on, value, random_parts(d, c));
    check(by_value, value);
    for (int i = 0; i < d_; ++i) CHECK(std::isfinite(by_value.out[count(i)]) == (i != element));
    CHECK(std::isfinite(by_value.lse[0]));
  }
}

TEMPLATE_LIST_TEST_CASE("outputs are finite while values times tokens are", "[attention]", shapes) {
  using element = typename TestType::element;
  dice d(11);
  for (int trial = 0; trial < some_of(12); ++trial) {
    auto c = make_attention<TestType>(d);
    if (trial % 2 == 0) std::fill(c.query.begin(), c.query.end(), 0.0f);  // all tokens weigh the same
    const float most = std::is_same_v<element, half> ? 65504.0f : 3.3e38f / static_cast<float>(c.total());
    for (float& value : c.values) value = trial % 3 == 0 ? most : std::copysign(most, value);
    c.values = values_of(stored_as<element>(c.values));
    const executor on = executors()[count(trial) % executors().size()];
    for (const auto& got : {attend_whole(on, c), attend_by(on, c, random_parts(d, c))}) {
      CHECK(std::all_of(got.out.begin(), got.out.end(), [](float x) { return std::isfinite(x); }));
      for (const float x : got.out) CHECK(std::fabs(x) <= 1.01f * most);  // as stored
      if (trial % 3 == 0)
        for (const float x : got.out) CHECK(x >= 0.99f * most);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("scores far apart leave the best token's value alone", "[attention]", shapes) {
  constexpr int d_ = TestType::d;
  dice d(7);
  auto c = make_attention<TestType>(d);
  const int best = d.below(c.total());
  std::fill(c.query.begin(), c.query.end(), 0.0f);
  for (int g = 0; g < c.group; ++g) c.query[count(g * d_)] = 1e30f;
  for (int t = 0; t < c.total(); ++t) c.keys[count(t * d_)] = t == best ? 2.0f : -2.0f;
  for (const executor on : executors()) {
    const auto got = attend_by(on, c, random_parts(d, c));
    for (int g = 0; g < c.group; ++g) {
      CHECK(got.lse[count(g)] == 2e30f);
      CHECK(
          std::equal(got.out.begin() + g * d_, got.out.begin() + (g + 1) * d_, c.values.begin() + best * d_));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("scores are capped softly, and a logit without a value takes its share",
                        "[attention]", shapes) {
  constexpr int d_ = TestType::d;
  dice d(9);
  for (int trial = 0; trial < some_of(20); ++trial) {
    auto c = make_attention<TestType>(d);
    if (trial % 3 != 0) c.soft_cap = d.one_of({0.2f, 2.0f, 50.0f});
    if (trial % 3 != 1)
      for (int g = 0; g < c.group; ++g) c.sink_logits.push_back(d.one_of({-inf, -40.0f, 0.0f, 1.5f, 40.0f}));
    if (trial >= 15) {  // a capped score is finite
      for (int g = 0; g < c.group; ++g) c.query[count(g * d_)] = 1.0f;
      c.keys[count(d.below(c.total()) * d_)] = trial == 15 ? quiet_nan : d.below(2) == 0 ? -inf : inf;
    }
    for (const executor on : executors()) {
      check(attend_whole(on, c), c);
      check(attend_by(on, c, random_parts(d, c)), c);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a log-weight is added to its token's score behind the cap", "[attention]", shapes) {
  dice d(11);
  for (int trial = 0; trial < some_of(20); ++trial) {
    auto c = make_attention<TestType>(d);
    if (trial % 3 == 0) c.soft_cap = d.one_of({0.2f, 2.0f});
    for (int t = 0; t < c.total(); ++t)
      c.log_weights.push_back(d.one_of({0.0f, d.normal(), 3.0f * d.normal(), d.below(4) == 0 ? -inf : 0.0f}));
    for (const executor on : executors()) {
      check(attend_whole(on, c), c);
      check(attend_by(on, c, random_parts(d, c)), c);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("log-weights of zero change not a bit", "[attention]", shapes) {
  dice d(12);
  for (int trial = 0; trial < some_of(10); ++trial) {
    auto c = make_attention<TestType>(d);
    auto weighed = c;
    weighed.log_weights.assign(count(c.total()), 0.0f);
    for (const executor on : executors()) {
      const auto with = attend_whole(on, weighed), without = attend_whole(on, c);
      CHECK(same_bits(with.out, without.out));
      CHECK(same_bits(with.lse, without.lse));
    }
  }
}

TEMPLATE_LIST_TEST_CASE("a token of log-weight ln n weighs as n that are alike", "[attention]", shapes) {
  dice d(13);
  for (int trial = 0; trial < some_of(15); ++trial) {
    const auto c = make_attention<TestType>(d);
    auto weighed = c, repeated = c;
    repeated.tokens.clear(), repeated.keys.clear(), repeated.values.clear();
    std::vector<int> times;
    for (int t = 0; t < c.total(); ++t) {
      times.push_back(d.between(1, 7));
      weighed.log_weights.push_back(std::log(static_cast<float>(times.back())));
      for (int n = 0; n < times.back(); ++n) {
        const auto add = [&](std::vector<float>& to, const std::vector<float>& from) {
          to.insert(to.end(), from.begin() + t * TestType::d, from.begin() + (t + 1) * TestType::d);
        };
        add(repeated.keys, c.keys), add(repeated.values, c.values);
      }
    }
    for (int left = std::accumulate(times.begin(), times.end(), 0); left > 0; left -= c.page)
      repeated.tokens.push_back(std::min(left, c.page));
    for (const executor on : executors()) {
      check(attend_whole(on, repeated), repeated);
      const auto got = attend_whole(on, weighed), want = attend_whole(on, repeated);
      int wrong = 0;
      for (std::size_t i = 0; i < got.out.size(); ++i) wrong += !is_near(got.out[i], want.out[i], 2e-5);
      for (std::size_t g = 0; g < got.lse.size(); ++g) wrong += !is_near(got.lse[g], want.lse[g], 2e-5);
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("beside a logit nothing is left of scores of -infinity", "[attention]") {
  dice d(10);
  auto c = make_attention<shape<64, float>>(d);
  c.sink_logits.assign(count(c.group), 2.0f);
  std::fill(c.tokens.begin(), c.tokens.end(), 0);
  for (const executor on : executors()) {
    const auto got = attend_whole(on, c);
    CHECK(std::all_of(got.out.begin(), got.out.end(), [](float x) { return x == 0.0f; }));
    CHECK(std::all_of(got.lse.begin(), got.lse.end(), [](float x) { return x == 2.0f; }));
  }
}

TEST_CASE("lse is written only where it is wanted", "[attention]") {
  dice d(8);
  const auto c = make_attention<shape<64, float>>(d);
  for (const executor on : executors()) {
    const auto with = attend_by(on, c, {static_cast<int>(c.tokens.size())}, true);
    const auto without = attend_by(on, c, {static_cast<int>(c.tokens.size())}, false);
    CHECK(same_bits(with.out, without.out));
    CHECK(without.lse[0] == -9.0f);
  }
}

TEST_CASE("scratch of a block is what attend_slice is promised", "[attention]") {
  STATIC_REQUIRE(freekv::detail::attention_block<128> == 32);
  STATIC_REQUIRE(freekv::detail::attention_block<192> == 16);
  STATIC_REQUIRE(freekv::detail::attention_scratch<128> == 4 * 32 + 64);
}
