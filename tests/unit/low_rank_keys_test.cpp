// Keys rebuilt from a factorisation of what they were before rotation.

#include <freekv/policies/low_rank_keys.hpp>

#include "../catch.hpp"
#include "../oracle/low_rank.hpp"
#include "../sanitized.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::dynamic;
using freekv::half;
using freekv::head_slice;
using freekv::low_rank_keys;
using freekv::row_range;
using freekv::slice_place;

template <class E>
constexpr oracle::element_kind kind_of = std::is_same_v<E, float>  ? oracle::element_kind::f32
                                         : std::is_same_v<E, half> ? oracle::element_kind::f16
                                                                   : oracle::element_kind::bf16;

/// A page of all heads of the second of two layers, and its codec.
template <class E, int D>
struct factored_page {
  int heads, tokens, rank, first_token;
  std::vector<float> factors, frequencies;
  low_rank_keys<dynamic> codec;
  std::vector<std::vector<E>> keys, values;  // by head, (tokens, D)

  factored_page(dice& d, int rank_)
      : heads(d.between(1, 3)),
        tokens(d.one_of({8, 16, 40})),
        rank(std::min(rank_, heads * D)),
        first_token(d.below(5000) * tokens) {
    const std::vector<float> first_layer = random_factors(d, heads, rank, D);
    factors = random_factors(d, heads, rank, D);
    factors.insert(factors.begin(), first_layer.begin(), first_layer.end());
    for (int pair = d.one_of({0, D / 4, D / 2}); pair > 0; --pair) frequencies.push_back(d.uniform());
    codec = {{rank},
             {factors.data(), 2, heads, rank, D},
             {frequencies.data(), static_cast<int>(frequencies.size()),
              d.one_of({freekv::rotary_pairs::halves, freekv::rotary_pairs::neighbours})}};
    const float size = d.one_of({1.0f, 0.01f, 30.0f});
    for (int head = 0; head < heads; ++head) {
      keys.push_back(stored_as<E>(normals(d, count(tokens * D), size)));
      values.push_back(stored_as<E>(normals(d, count(tokens * D))));
    }
  }

  oracle::key_factors as_oracle() const {
    oracle::key_factors f;
    const auto of_head = [&](int head) { return codec.basis.mean(1, head); };
    for (int row = -1; row < rank; ++row) {
      std::vector<double> joint;
      for (int head = 0; head < heads; ++head)
        for (int i = 0; i < D; ++i) joint.push_back(of_head(head)[(row + 1) * D + i]);
      if (row < 0)
        f.mean = joint;
      else
        f.rows.push_back(joint);
    }
    const std::size_t pairs = frequencies.size();
    for (std::size_t i = 0; i < pairs; ++i)
      f.pairs.push_back(codec.rotary.of == freekv::rotary_pairs::halves
                            ? oracle::turned_pair{i, i + pairs, static_cast<double>(frequencies[i])}
                            : oracle::turned_pair{2 * i, 2 * i + 1, static_cast<double>(frequencies[i])});
    return f;
  }

  /// Encodes all heads and reads `rows` of each back.
  struct read_back {
    std::vector<std::vector<E>> keys, values;
  };
  read_back decoded(row_range rows) const {
    const freekv::kv_extent page{tokens, D};
    std::vector<E> shared(codec.shared_bytes(page, sizeof(E)) / sizeof(E));
    std::vector<float> floats(count(codec.shared_floats(page)), quiet_nan);
    std::vector<std::vector<float>> stored;
    const auto place = [&](int head) {
      return slice_place{
          1, head, heads, first_token, reinterpret_cast<std::byte*>(shared.data()), floats.data()};
    };
    for (int head = 0; head < heads; ++head) {
      stored.emplace_back(codec.bytes(page, sizeof(E)) / sizeof(float));
      codec.at(place(head))
          .template encode<D>(freekv::scalar_team{},
                              head_slice<const E>{keys[count(head)].data(), values[count(head)].data(), D},
                              tokens, reinterpret_cast<std::byte*>(stored.back().data()));
    }
    read_back back;
    for (int head = 0; head < heads; ++head) {
      back.keys.emplace_back(count(rows.count * D));
      back.values.emplace_back(count(rows.count * D));
      codec.at(place(head))
          .template decode<D>(freekv::scalar_team{},
                              reinterpret_cast<const std::byte*>(stored[count(head)].data()), tokens, rows,
                              head_slice<E>{back.keys.back().data(), back.values.back().data(), D});
    }
    return back;
  }

  std::vector<std::vector<double>> keys_of(int token) const {
    std::vector<std::vector<double>> rows;
    for (int head = 0; head < heads; ++head) {
      rows.emplace_back();
      for (int i = 0; i < D; ++i)
        rows.back().push_back(static_cast<double>(freekv::to_float(keys[count(head)][count(token * D + i)])));
    }
    return rows;
  }
  /// How many numbers of the page's keys are not what the oracle allows.
  int wrong() const {
    const auto back = decoded({0, tokens});
    const oracle::key_factors f = as_oracle();
    int found = 0;
    for (int t = 0; t < tokens; ++t) {
      const auto expected = oracle::rebuilt(f, keys_of(t), first_token + t, kind_of<E>);
      for (int head = 0; head < heads; ++head)
        for (int i = 0; i < D; ++i) {
          const double got = static_cast<double>(freekv::to_float(back.keys[count(head)][count(t * D + i)]));
          const double key = expected.keys[count(head)][count(i)],
                       off = expected.doubt[count(head)][count(i)];
          const bool right = std::isnan(key) ? std::isnan(got)
                                             : oracle::rounded_to(key - off, kind_of<E>) <= got &&
                                                   got <= oracle::rounded_to(key + off, kind_of<E>);
          found += !right;
        }
    }
    return found;
  }
};

}  // namespace

TEMPLATE_TEST_CASE("keys are rebuilt as the oracle says, and values are what they were", "[codec]", float,
                   half, bfloat16) {
  dice d(1);
  for (int trial = 0; trial < some_of(30); ++trial) {
    const factored_page<TestType, 64> page(d, d.one_of({1, 7, 40, 160}));
    INFO(trial << ": " << page.heads << " heads, " << page.tokens << " tokens, rank " << page.rank << ", "
               << page.frequencies.size() << " pairs, from " << page.first_token);
    CHECK(page.wrong() == 0);
    const auto back = page.decoded({0, page.tokens});
    for (int head = 0; head < page.heads; ++head)
      CHECK(same_bits(back.values[count(head)], page.values[count(head)]));
  }
  const factored_page<TestType, 128> wide(d, 100);
  CHECK(wide.wrong() == 0);
}

TEST_CASE("coefficients in as many directions as a token's keys have numbers lose nothing but rounding",
          "[codec]") {
  dice d(2);
  for (int trial = 0; trial < 5; ++trial) {
    const factored_page<float, 64> page(d, 3 * 64);
    const auto back = page.decoded({0, page.tokens});
    for (int head = 0; head < page.heads; ++head)
      for (std::size_t i = 0; i < back.keys[count(head)].size(); ++i)
        REQUIRE(is_near(static_cast<double>(back.keys[count(head)][i]),
                        static_cast<double>(page.keys[count(head)][i]), 2e-3));
  }
}

TEST_CASE("a key with a NaN or infinity comes back as NaN, and other heads' and tokens' without it",
          "[codec]") {
  dice d(3);
  for (const float odd : {quiet_nan, inf, -inf}) {
    factored_page<half, 64> page(d, 40);
    page.keys.back()[70] = freekv::from_float<half>(odd);
    CHECK(page.wrong() == 0);
    const auto back = page.decoded({0, page.tokens});
    for (int t = 0; t < page.tokens; ++t)
      for (int i = 0; i < 64; ++i)
        REQUIRE(std::isnan(freekv::to_float(back.keys.back()[count(t * 64 + i)])) == (t == 1));
    for (int head = 0; head + 1 < page.heads; ++head)
      for (const half x : back.keys[count(head)]) REQUIRE(std::isfinite(freekv::to_float(x)));
  }
}

TEMPLATE_TEST_CASE("a key too large for the coefficients is lost for its own head alone", "[codec]", float,
                   half, bfloat16) {
  dice d(6);
  for (int trial = 0; trial < some_of(20); ++trial) {
    factored_page<TestType, 64> page(d, 40);
    if (page.heads == 1) continue;
    const float size = std::is_same_v<TestType, half> ? 60000.0f : 3e38f;
    const int head = d.below(page.heads);
    for (int i = 0; i < 64; ++i)
      page.keys[count(head)][count(64 + i)] = freekv::from_float<TestType>(d.below(2) == 0 ? size : -size);
    const auto back = page.decoded({0, page.tokens});
    for (int other = 0; other < page.heads; ++other)
      for (int i = 0; other != head && i < 64 * page.tokens; ++i)
        REQUIRE(std::fabs(freekv::to_float(back.keys[count(other)][count(i)])) < 1000.0f);
  }
}

TEST_CASE("what is lost among the first 32 tokens of a page is lost of no token after", "[codec]") {
  dice d(7);
  for (int trial = 0; trial < 20; ++trial) {
    factored_page<half, 64> page(d, 40);
    if (page.tokens <= 32) continue;
    page.keys.back()[70] = freekv::from_float<half>(quiet_nan);
    const auto back = page.decoded({0, page.tokens});
    for (int t = 0; t < page.tokens; ++t)
      CHECK(std::isnan(freekv::to_float(back.keys.back()[count(t * 64)])) == (t == 1));
  }
}

TEST_CASE("some rows of a page are read as all are", "[codec]") {
  dice d(4);
  for (int trial = 0; trial < some_of(10); ++trial) {
    const factored_page<bfloat16, 64> page(d, 20);
    const auto whole = page.decoded({0, page.tokens});
    const row_range rows{d.below(page.tokens), 0};
    const row_range some{rows.first, d.between(1, page.tokens - rows.first)};
    const auto part = page.decoded(some);
    for (int head = 0; head < page.heads; ++head) {
      const auto same = [&](const auto& all, const auto& few) {
        const auto first = all.begin() + some.first * 64;
        return same_bits(std::vector<bfloat16>(first, first + some.count * 64), few);
      };
      CHECK(same(whole.keys[count(head)], part.keys[count(head)]));
      CHECK(same(whole.values[count(head)], part.values[count(head)]));
    }
  }
}

TEST_CASE("low_rank_keys says what its data lacks", "[codec]") {
  std::vector<float> data(1000);
  const freekv::codec_setting setting{2, 1, 64};
  const auto refuses = [&](const low_rank_keys<dynamic>& codec, const std::string& word) {
    try {
      codec.validate(setting);
      FAIL("accepted");
    } catch (const freekv::settings_error& e) {
      CHECK_THAT(std::string(e.what()), Catch::Contains(word));
    }
  };
  const float* const some = data.data();
  low_rank_keys<dynamic>{{4}, {some, 2, 1, 4, 64}, {some, 32}}.validate(setting);
  refuses({{0}, {some, 2, 1, 4, 64}, {}}, "rank 0");
  refuses({{65}, {some, 2, 1, 65, 64}, {}}, "rank 65");
  refuses({{4}, {nullptr, 2, 1, 4, 64}, {}}, "basis as data");
  refuses({{5}, {some, 2, 1, 4, 64}, {}}, "rank 5 or more");
  refuses({{4}, {some, 1, 1, 4, 64}, {}}, "2 layers");
  refuses({{4}, {some, 2, 1, 4, 64}, {some, 33}}, "at most 32");
  refuses({{4}, {some, 2, 1, 4, 64}, {nullptr, 8}}, "a frequency for each");
}
