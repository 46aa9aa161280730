// Summaries and page scores against the float64 oracle: summarise, encode, decode, prepare and score, on
// every team, for every element type.

#include <algorithm>
#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "scored_page.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::half;
using any_chunk = freekv::chunk_means<freekv::dynamic>;
oracle::settings oracle_for(const page_case& c, oracle::summary_kind kind, int chunk, int bits) {
  oracle::settings s;
  s.query_heads = c.group;
  s.head_dim = c.d;
  s.page = s.window = c.p;
  s.scale = static_cast<double>(c.scale);
  s.summary = kind;
  s.chunk = chunk;
  s.bits = bits;
  s.bases = {{{c.basis.begin(), c.basis.begin() + c.d}, {c.basis.begin() + c.d, c.basis.end()}}};
  return s;
}

/// Scores of the one page as they count: NaN for one head is -infinity for all, +infinity the largest float.
std::vector<double> expected_scores(const page_case& c, const oracle::settings& s,
                                    const oracle::page_summary& summary) {
  std::vector<std::vector<double>> raw;
  for (const auto query : rows_of(c.queries, c.d)) raw.push_back({oracle::score_unit(s, 0, query, summary)});
  std::vector<double> scores;
  for (const auto& head : oracle::settled(raw)) scores.push_back(head[0]);
  return scores;
}

/// What float32 sums of a score's terms may be off by.
double score_tolerance(const page_case& c, std::span<const float> query) {
  double terms = 0.0;
  for (int i = 0; i < c.d; ++i) {
    double most = 0.0;
    for (int t = 0; t < c.p; ++t)
      most = std::max(most, std::fabs(static_cast<double>(c.keys[count(t * c.d + i)])) +
                                std::fabs(static_cast<double>(c.basis[count(i)])));
    terms += std::fabs(static_cast<double>(query[count(i)])) * most;
  }
  return 2e-6 * terms * static_cast<double>(c.scale) + 1e-5;
}

/// Compares a policy's scores with the oracle's; calls `check_numbers(decoded, oracle's summary)` too.
template <class E, class Policy, class Check>
void compare(const Policy& policy, const page_case& c, const oracle::settings& s, int stride,
             const Check& check_numbers) {
  const auto summary = oracle::summarise(s, 0, rows_of(c.keys, c.d));
  const auto expected = expected_scores(c, s, summary);
  for (const executor on : executors()) {
    const scored got = score_by<E>(on, policy, c, stride);
    INFO(c << " on " << on);
    check_numbers(got.numbers, summary);
    for (int g = 0; g < c.group; ++g) {
      const auto query = oracle::row_of(c.queries, g, c.d);
      const double tolerance = score_tolerance(c, query) + oracle::score_doubt(s, 0, query, summary);
      CHECK(is_near(got.scores[count(g)], expected[count(g)], tolerance));
    }
  }
}

const auto no_check = [](const auto&, const auto&) {};

/// Of keys in a page of 1, 2 or 5 heads by NHD, or of 1 by HND.
int random_stride(dice& d, const page_case& c) { return c.d * d.one_of({1, 2, 5}); }

}  // namespace

TEMPLATE_TEST_CASE("min_max keeps the exact minimum and maximum, and scores as the oracle", "[summary]",
                   float, half, bfloat16) {
  dice d(1);
  for (int trial = 0; trial < some_of(60); ++trial) {
    const auto c = make_page<TestType>(d);
    const auto s = oracle_for(c, oracle::summary_kind::min_max, 1, 32);
    CHECK(freekv::summary_bytes<TestType>(freekv::min_max{}, c.page()) == 2 * count(c.d) * sizeof(TestType));
    compare<TestType>(
        freekv::min_max{}, c, s, random_stride(d, c),
        [&](const std::vector<float>& numbers, const oracle::page_summary& summary) {
          CHECK(std::equal(numbers.begin(), numbers.end(), summary.values.begin(), summary.values.end(),
                           [](float a, double b) { return static_cast<double>(a) == b; }));
        });
  }
}

TEST_CASE("a min_max score is an upper bound of every key's score", "[summary]") {
  dice d(2);
  for (int trial = 0; trial < some_of(100); ++trial) {
    const auto c = make_page<float>(d);
    for (const executor on : executors()) {
      const auto got = score_by<float>(on, freekv::min_max{}, c, c.d);
      for (int g = 0; g < c.group; ++g) {
        const auto query = oracle::row_of(c.queries, g, c.d);
        double best = -oracle::infinity;
        for (const auto key : rows_of(c.keys, c.d))
          best = std::max(best, static_cast<double>(c.scale) * oracle::dot(query, key));
        CHECK(got.scores[count(g)] >= best - score_tolerance(c, query));
      }
    }
  }
}

TEMPLATE_TEST_CASE("chunk_means keeps the mean key of every chunk, and scores as the oracle", "[summary]",
                   float, half, bfloat16) {
  dice d(3);
  for (int trial = 0; trial < some_of(60); ++trial) {
    const auto c = make_page<TestType>(d);
    const int chunk = d.one_of({1, 2, 4, 8, c.p});
    const any_chunk policy{{chunk}};
    CHECK(freekv::summary_bytes<TestType>(policy, c.page()) == count(c.p / chunk * c.d) * sizeof(float));
    compare<TestType>(
        policy, c, oracle_for(c, oracle::summary_kind::chunk_means, chunk, 32), random_stride(d, c),
        [&](const std::vector<float>& numbers, const oracle::page_summary& summary) {
          CHECK(std::equal(numbers.begin(), numbers.end(), summary.values.begin(), summary.values.end(),
                           [](float a, double b) { return is_near(a, b, 2e-6 * 8.0); }));
        });
  }
}

TEMPLATE_TEST_CASE("key_subspace keeps each token's coefficients in its bits, and scores as the oracle",
                   "[summary]", float, half, bfloat16) {
  dice d(4);
  for (int trial = 0; trial < some_of(90); ++trial) {
    const auto c = make_page<TestType>(d);
    const int bits = d.one_of({2, 3, 4, 8, 32});
    const auto policy = c.subspace(bits);
    const int largest_code = (1 << (bits == 32 ? 0 : bits - 1)) - 1;
    const std::size_t bytes =
        bits == 32 ? count(c.rank * c.p * 4) : (count(c.rank * c.p * bits / 8) + 3) / 4 * 4 + count(4 * c.p);
    CHECK(freekv::summary_bytes<TestType>(policy, c.page()) == bytes);
    compare<TestType>(
        policy, c, oracle_for(c, oracle::summary_kind::key_subspace, 1, bits), random_stride(d, c),
        [&](const std::vector<float>& numbers, const oracle::page_summary& summary) {
          int wrong = 0;
          for (int t = 0; t < c.p; ++t)
            for (int r = 0; r < c.rank; ++r) {
              const float code = numbers[count(r * c.p + t)], scale = numbers[count(c.rank * c.p + t)];
              if (bits != 32 && std::fabs(code) > static_cast<float>(largest_code)) ++wrong;
              const double value = static_cast<double>(code) * static_cast<double>(bits == 32 ? 1.0f : scale);
              const auto at = count(t * c.rank + r);
              if (!is_near(value, summary.values[at], summary.doubt[at] + 3e-5)) ++wrong;
            }
          CHECK(wrong == 0);
        });
  }
}

TEST_CASE("NaN in any key makes the page -infinity for the whole group, whatever the summary", "[summary]") {
  dice d(5);
  for (int trial = 0; trial < some_of(200); ++trial) {
    auto c = make_page<float>(d);
    c.keys[count(d.below(c.p * c.d))] = quiet_nan;
    const executor on = executors()[count(trial) % executors().size()];
    for (const auto& got :
         {score_by<float>(on, freekv::min_max{}, c, c.d), score_by<float>(on, any_chunk{{4}}, c, c.d),
          score_by<float>(on, c.subspace(d.one_of({2, 3, 4, 8})), c, c.d),
          score_by<float>(on, c.subspace(32), c, c.d)})
      CHECK(std::all_of(got.scores.begin(), got.scores.end(), [](float x) { return x == -inf; }));
  }
}

TEST_CASE("NaN in one head's query makes the page -infinity for the whole group", "[summary]") {
  dice d(6);
  for (int trial = 0; trial < some_of(100); ++trial) {
    auto c = make_page<half>(d);
    c.queries[count(d.below(c.group * c.d))] = quiet_nan;
    const executor on = executors()[count(trial) % executors().size()];
    for (const auto& got :
         {score_by<half>(on, freekv::min_max{}, c, c.d), score_by<half>(on, any_chunk{{8}}, c, c.d),
          score_by<half>(on, c.subspace(3), c, c.d)})
      CHECK(std::all_of(got.scores.begin(), got.scores.end(), [](float x) { return x == -inf; }));
  }
}

TEMPLATE_TEST_CASE("infinities, NaN and zeros of both signs count as section 5.1 of the contract says",
                   "[summary]", float, half, bfloat16) {
  dice d(7);
  int finite = 0, lowest = 0, highest = 0;
  for (int trial = 0; trial < some_of(400); ++trial) {
    auto c = make_page<TestType>(d);
    // Few of them, and in few places, so that sums of opposite infinities do not drown the rest.
    const int kind = d.below(4);
    for (int n = d.between(0, 2); n > 0; --n)
      c.keys[count(d.below(c.p) * c.d + d.below(2))] = d.one_of({inf, -inf, 0.0f, -0.0f});
    if (kind != 3)
      for (int n = d.between(0, 2); n > 0; --n)
        c.queries[count(d.below(c.group) * c.d + d.below(2))] = d.one_of({inf, -inf, 0.0f, -0.0f, quiet_nan});
    const auto s = kind == 0   ? oracle_for(c, oracle::summary_kind::min_max, 1, 32)
                   : kind == 1 ? oracle_for(c, oracle::summary_kind::chunk_means, 4, 32)
                   : kind == 2 ? oracle_for(c, oracle::summary_kind::key_subspace, 1, 32)
                               : oracle_for(c, oracle::summary_kind::key_subspace, 1, 4);
    const auto summary = oracle::summarise(s, 0, rows_of(c.keys, c.d));
    const auto expected = expected_scores(c, s, summary);
    for (const executor on : executors()) {
      const auto got = kind == 0   ? score_by<TestType>(on, freekv::min_max{}, c, c.d)
                       : kind == 1 ? score_by<TestType>(on, any_chunk{{4}}, c, c.d)
                                   : score_by<TestType>(on, c.subspace(s.bits), c, c.d);
      INFO(c << " on " << on << ", summary " << kind);
      for (int g = 0; g < c.group; ++g) {
        const double score = expected[count(g)];
        // With finite terms this is the tests above; here it matters which kind of number comes out.
        const double doubt = oracle::score_doubt(s, 0, oracle::row_of(c.queries, g, c.d), summary);
        const bool same = score == -oracle::infinity ? got.scores[count(g)] == -inf
                          : score == oracle::largest_float
                              ? got.scores[count(g)] == largest
                              : is_near(got.scores[count(g)], score, 1e-3 + doubt);
        CHECK(same);
        (score == -oracle::infinity ? lowest : score == oracle::largest_float ? highest : finite) += 1;
      }
    }
  }
  CHECK(finite > 300);
  CHECK(lowest > 300);
  CHECK(highest > 30);
}

TEST_CASE("an infinite query scores key_subspace's pages by its sign, as the formula says", "[summary]") {
  // One coefficient: the token's estimate is scale * (E q) * c, infinite with the sign of c. The page's score
  // is the largest float where any token has a positive c, else -infinity; never NaN, which would take the
  // other heads of the group with it.
  page_case c{.d = 8, .p = 8, .group = 2};
  c.rank = 1;
  c.basis.assign(16, 0.0f);
  c.basis[8] = 1.0f;  // E = e_0, mean 0
  c.keys.assign(64, 0.0f);
  for (int t = 0; t < 8; ++t) c.keys[count(8 * t)] = t == 3 ? 2.0f : -1.0f;
  c.queries.assign(16, 0.0f);
  c.queries[0] = inf;
  c.queries[8] = 1.0f;
  for (const int bits : {2, 3, 4, 8, 32}) {
    const auto got = score_by<float>(one_lane, c.subspace(bits), c, c.d);
    INFO(bits << " bits");
    CHECK(got.scores[0] == largest);
    CHECK(got.scores[1] > -10.0f);
  }
}

TEST_CASE("a token whose coefficients are subnormal leaves its neighbours' codes alone", "[summary]") {
  // Its scale is rounded to a multiple of the smallest float, so c / scale can exceed the largest code.
  page_case c{.d = 8, .p = 8};
  c.rank = 1;
  c.basis.assign(16, 0.0f);
  c.basis[8] = 1.0f;
  c.queries.assign(8, 1.0f);
  for (const int bits : {2, 3, 4, 8})
    for (const int units : {1, 2, 4, 5, 10, 17, 100, 189, 200}) {
      c.keys.assign(64, 0.0f);
      for (int t = 1; t < 8; ++t) c.keys[count(8 * t)] = -static_cast<float>(t);
      const auto without = score_by<float>(one_lane, c.subspace(bits), c, c.d);
      c.keys[0] = static_cast<float>(units) * 1.4e-45f;
      const auto with = score_by<float>(one_lane, c.subspace(bits), c, c.d);
      INFO(bits << " bits, coefficient " << units << " times the smallest float");
      CHECK(std::equal(with.numbers.begin() + 1, with.numbers.begin() + 8, without.numbers.begin() + 1));
    }
}

TEMPLATE_TEST_CASE("key_codes scores four query heads at once as it scores each", "[summary]", float,
                   freekv::half) {
  dice d(37);
  int finite = 0, not_numbers = 0, infinite = 0;
  for (int trial = 0; trial < 40; ++trial) {
    auto c = make_page<TestType>(d);
    if (trial % 3 == 0) {
      c.p = d.one_of({2, 4, 6});
      c.keys.resize(count(c.p * c.d));
    }
    freekv::key_codebooks form{nullptr, 1, 1, c.d, 2, 2, 3, 2};
    auto data = random_codebooks(d, form);
    form.data = data.data();
    const freekv::key_codes<3, 2> codes{{}, {}, form};
    if (trial % 4 == 1) c.keys[count(d.below(static_cast<int>(c.keys.size())))] = quiet_nan;
    if (trial % 4 == 2) c.queries[count(d.below(static_cast<int>(c.queries.size())))] = 3e38f;
    const auto want = score_by<TestType>(one_lane, codes, c, c.d);
    for (const executor on : executors()) {
      const auto got = score_by<TestType>(on, codes, c, c.d);
      if (got.stored != want.stored) continue;  // two centroids were as near
      INFO(c << " on " << on);
      for (int g = 0; g < c.group; ++g) {
        const float x = got.scores[count(g)], y = want.scores[count(g)];
        finite += std::fabs(x) < 1e30f;
        not_numbers += x == -inf;
        infinite += x == largest;
        CHECK(is_near(x, static_cast<double>(y), 1e-5 * std::max(1.0, std::fabs(static_cast<double>(y)))));
      }
    }
  }
  CHECK(finite > 50);
  CHECK(not_numbers > 5);
  CHECK(infinite > 0);
}

/// Units of random codes, scored by key_codes together and each alone.
class units_of_codes {
 public:
  units_of_codes(dice& d, int dim, int tokens, int units)
      : unit_{tokens, dim}, units_(units), data_(random_codebooks(d, form_of(nullptr))) {
    codes_ = {{}, {}, form_of(data_.data())};
    bytes_ = freekv::summary_bytes<float>(codes_, unit_);
    stored_.resize(count(units) * bytes_);
    for (std::byte& b : stored_) b = static_cast<std::byte>(d.below(255));
  }
  void make_not_finite(int unit) { stored_[count(unit) * bytes_] = std::byte{255}; }

  /// Calls `seen(together, alone)`, (group, stride), for each executor; what is not scored is 7.
  template <class Seen>
  void score(const std::vector<float>& queries, int group, float scale, int stride, const Seen& seen) const {
    const auto policy = codes_.at(0, 0);
    const int dim = unit_.head_dim;
    std::vector<float> prepared(count(freekv::prepared_queries::floats(group, policy.query_width(dim)))),
        together(count(group * stride), 7.0f), alone = together;
    for (const executor on : executors()) {
      run_on(on, [&](auto team) {
        const auto by =
            freekv::prepare_group(team, policy, {queries.data(), group, dim}, scale, prepared.data());
        freekv::detail::score_units<float>(team, policy, unit_, stored_.data(), bytes_, units_, by, nullptr,
                                           {together.data(), stride});
        for (int j = 0; j < units_; ++j)
          freekv::detail::score_unit<float>(team, policy, unit_, stored_.data() + count(j) * bytes_, by,
                                            nullptr, {alone.data() + j, stride});
      });
      seen(together, alone);
    }
  }

 private:
  freekv::key_codebooks form_of(const float* data) const { return {data, 1, 1, unit_.head_dim, 2, 2, 3, 2}; }

  freekv::kv_extent unit_;
  int units_;
  std::vector<float> data_;
  freekv::key_codes<3, 2> codes_{};
  std::size_t bytes_ = 0;
  std::vector<std::byte> stored_;
};

TEST_CASE("units scored together by four query heads score what each scores alone", "[summary]") {
  dice d(38);
  int different = 0, finite = 0, not_numbers = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const int dim = d.one_of({8, 24, 64, 128}), tokens = d.one_of({2, 4, 6, 8, 10, 12, 32, 64, 256}),
              units = d.between(1, 70), group = d.one_of({2, 3, 4, 5, 7, 8}), stride = units + d.below(3);
    units_of_codes of(d, dim, tokens, units);
    for (int j = 0; j < units; ++j)
      if (d.below(20) == 0 || j == 31) of.make_not_finite(j);
    const auto queries = normals(d, count(group * dim), d.one_of({0.01f, 1.0f, 100.0f}));
    std::vector<float> scores;
    of.score(queries, group, 0.125f, stride, [&](const auto& together, const auto& alone) {
      different += !same_bits(together, alone);
      scores = together;
    });
    for (const float score : scores) {
      finite += std::fabs(score) < 1e30f && score != 7.0f;
      not_numbers += score == -inf;
    }
  }
  CHECK(different == 0);
  CHECK(finite > 5000);
  CHECK(not_numbers > 100);
}

TEST_CASE("units scored together by queries near the largest float score what each scores alone",
          "[summary]") {
  dice d(38);
  int different = 0, highest = 0;
  for (int trial = 0; trial < 30; ++trial) {
    const int dim = 64, units = d.between(16, 70), group = d.one_of({2, 4, 5});
    const units_of_codes of(d, dim, 8, units);
    auto queries = normals(d, count(group * dim), 1e38f);
    for (float& x : queries) x = std::clamp(x, -largest, largest);
    of.score(queries, group, 1.0f, units, [&](const auto& together, const auto& alone) {
      different += !same_bits(together, alone);
      for (const float x : together) highest += x == largest;
    });
  }
  CHECK(different == 0);
  CHECK(highest > 10);
}

/// Pages of one KV head scored together and one by one.
template <class E, class Policy>
void compare_together(const Policy& policy, dice& d) {
  const auto shape = make_page<E>(d);
  const auto page = shape.page();
  const int pages = d.between(1, 70), width = policy.width(page),
            query_width = freekv::summary_query_width(policy, shape.d);
  const std::size_t bytes = freekv::summary_bytes<E>(policy, page);
  std::vector<std::byte> stored(count(pages) * bytes);
  std::vector<float> keys(shape.keys.size()), numbers(count(width)),
      prepared(count(shape.group * query_width));
  const int stride = pages + d.below(3);
  std::vector<float> together(count(shape.group * stride), 7.0f), alone = together;
  for (const executor on : executors()) {
    run_on(on, [&](auto team) {
      for (int j = 0; j < pages; ++j) {
        auto rows = stored_as<E>(normals(d, count(page.tokens * page.head_dim)));
        const float odd = d.one_of({0.0f, 0.0f, 0.0f, 0.0f, quiet_nan, inf, -inf});
        if (odd != 0.0f) rows[count(d.below(page.tokens * page.head_dim))] = freekv::from_float<E>(odd);
        freekv::detail::summarise_unit<E>(
            team, policy, freekv::head_slice<const E>{rows.data(), nullptr, page.head_dim}, page,
            {keys.data(), numbers.data()}, stored.data() + count(j) * bytes);
      }
      auto queries = shape.queries;
      if (d.below(3) == 0)
        queries[count(d.below(static_cast<int>(queries.size())))] = d.one_of({0.0f, -0.0f, inf, quiet_nan});
      for (int g = 0; g < shape.group; ++g)
        freekv::prepare_query(team, policy, freekv::group_query{queries.data() + g * shape.d, 1, shape.d},
                              prepared.data() + g * query_width);
      const freekv::prepared_queries by{prepared.data(), query_width, shape.group, shape.scale};
      freekv::detail::score_units<E>(team, policy, page, stored.data(), bytes, pages, by, numbers.data(),
                                     {together.data(), stride});
      for (int j = 0; j < pages; ++j)
        freekv::detail::score_unit<E>(team, policy, page, stored.data() + count(j) * bytes, by,
                                      numbers.data(), {alone.data() + j, stride});
    });
    INFO(shape << ", " << pages << " pages on " << on);
    double terms = 1.0;  // what rounding is relative to
    for (const float q : shape.queries) terms = std::max(terms, std::fabs(static_cast<double>(q)));
    const double tolerance = 1e-6 * terms * static_cast<double>(shape.scale) * shape.d * 4.0;
    int wrong = 0;
    for (std::size_t i = 0; i < alone.size(); ++i)
      wrong += together[i] != alone[i] && !is_near(together[i], static_cast<double>(alone[i]), tolerance);
    CHECK(wrong == 0);
  }
}

TEMPLATE_TEST_CASE("pages scored together score what each scores alone", "[summary]", float, half, bfloat16) {
  dice d(12);
  using freekv::number_format;
  for (int trial = 0; trial < some_of(25); ++trial) {
    compare_together<TestType>(freekv::min_max{}, d);
    compare_together<TestType>(freekv::centroid_box{}, d);
    compare_together<TestType>(freekv::mean{}, d);
    compare_together<TestType>(freekv::ball{}, d);
    compare_together<TestType>(
        freekv::stored_as<freekv::mean, number_format::any>{
            {}, d.one_of({number_format::standard, number_format::key, number_format::int8})},
        d);
  }
}

TEST_CASE("clamped scores: +infinity is the largest float, all else stays", "[summary]") {
  CHECK(freekv::detail::clamp_score(inf) == largest);
  CHECK(freekv::detail::clamp_score(largest) == largest);
  CHECK(freekv::detail::clamp_score(-inf) == -inf);
  CHECK(freekv::detail::clamp_score(-largest) == -largest);
  CHECK(freekv::detail::clamp_score(0.5f) == 0.5f);
  CHECK(std::isnan(freekv::detail::clamp_score(quiet_nan)));
}

TEMPLATE_TEST_CASE("sizes fixed at compile time and set at run time give the same bits", "[summary]", float,
                   bfloat16) {
  dice d(8);
  const auto same = [](const scored& a, const scored& b) {
    return same_bits(a.stored, b.stored) && same_bits(a.scores, b.scores) && same_bits(a.numbers, b.numbers);
  };
  for (int trial = 0; trial < some_of(30); ++trial) {
    auto c = make_page<TestType>(d);
    c.d = std::max(c.d, 24);
    c.keys = values_of(stored_as<TestType>(normals(d, count(c.p * c.d))));
    c.queries = normals(d, count(c.group * c.d));
    c.rank = 24;
    c.basis = random_basis(d, 1, 24, c.d);
    const freekv::subspace_basis basis{c.basis.data(), 1, 1, 24, c.d};
    for (const executor on : executors()) {
      const auto by = [&](const auto& policy) { return score_by<TestType>(on, policy, c, c.d); };
      INFO(c << " on " << on);
      CHECK(same(by(freekv::key_subspace<24, 3>{.basis = basis}), by(c.subspace(3))));
      CHECK(same(by(freekv::key_subspace<24, 32>{.basis = basis}), by(c.subspace(32))));
      CHECK(same(by(freekv::key_subspace<24, freekv::dynamic>{.bits = {8}, .basis = basis}),
                 by(c.subspace(8))));
      CHECK(same(by(freekv::key_subspace<freekv::dynamic, 2>{.rank = {24}, .basis = basis}),
                 by(c.subspace(2))));
      CHECK(same(by(freekv::chunk_means<4>{}), by(any_chunk{{4}})));
    }
  }
}

TEST_CASE("a layer's and head's subspace lies where the basis says", "[summary]") {
  std::vector<float> data(3 * 2 * (4 + 1) * 8);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i);
  const freekv::subspace_basis basis{data.data(), 3, 2, 4, 8};
  CHECK(basis.floats_per_head() == 40);
  CHECK(*basis.mean(0, 0) == 0.0f);
  CHECK(*basis.rows(0, 0) == 8.0f);
  CHECK(*basis.mean(0, 1) == 40.0f);
  CHECK(*basis.mean(2, 1) == 200.0f);
  CHECK(*basis.rows(2, 1) == 208.0f);
  const any_subspace policy{{4}, {3}, basis};
  CHECK(policy.at(2, 1).mean == basis.mean(2, 1));
  CHECK(policy.at(2, 1).rows == basis.rows(2, 1));
  // A basis may have more rows than are used: the leading ones are.
  const any_subspace fewer{{2}, {3}, basis};
  CHECK(fewer.at(1, 1).mean == basis.mean(1, 1));
}
