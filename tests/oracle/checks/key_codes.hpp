// key_codes, with codebooks small enough to work out by hand.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <utility>

#include "by_hand.hpp"

namespace {

/// One dimension a group. Group g's centroids are those of `groups[g]`, then far away ones.
oracle::codebook book(const doubles& offset, const doubles& rows, const std::vector<doubles>& groups) {
  oracle::codebook b;
  b.groups = static_cast<int>(groups.size());
  b.offset = offset;
  b.rows = rows;
  for (const doubles& group : groups)
    for (std::size_t code = 0; code < 256; ++code)
      b.centroids.push_back(code < group.size() ? group[code] : 1e6);
  return b;
}

/// Pages of 2 tokens, head_dim 1, scale 1/2: means from {0, 10}, residuals from {-1, 1, 4}.
oracle::settings of_codes() {
  oracle::settings s = tiny();
  s.scale = 0.5;
  s.summary = oracle::summary_kind::key_codes;
  s.key_codebooks = {{book({0}, {1}, {{0, 10}}), book({0}, {1}, {{-1, 1, 4}})}};
  return s;
}

oracle::page_summary codes_of(const oracle::settings& s, const floats& keys) {
  return oracle::summarise(s, 0, rows_of(keys, s.head_dim));
}

}  // namespace

TEST_CASE("key_codes codes a page's mean, then what its keys add to the decoded mean") {
  const auto s = of_codes();
  // Mean 8, decoded 10; of the decoded mean the keys are -2.2 and -1.8 away, of the mean itself -0.2 and 0.2.
  const auto page = codes_of(s, {7.8F, 8.2F});
  CHECK(page.values == doubles{1, 0, 0});
  CHECK(page.others.empty());
  CHECK(page.doubt.empty());
  CHECK(oracle::score_unit(s, 0, floats{2}, page) == near(0.5 * 2 * (10 - 1) + std::log(2.0)));
  // Mean 4, decoded 0: residuals 3 and 5.
  CHECK(codes_of(s, {3, 5}).values == doubles{0, 2, 2});
  // Mean 10, residuals -1 and 1.25.
  const auto mixed = codes_of(s, {8.9F, 11.25F});
  CHECK(mixed.values == doubles{1, 0, 1});
  CHECK(oracle::score_unit(s, 0, floats{-2}, mixed) == near(std::log(std::exp(-9.0) + std::exp(-11.0))));
  CHECK(oracle::score_doubt(s, 0, floats{-2}, mixed) == 0.0);
}

TEST_CASE("key_codes projects, and leaves the offsets out of scores") {
  oracle::settings s = of_codes();
  s.head_dim = 3;
  // Of the mean two groups: (second element - 1) and -(first element - 2). Of tokens the direction (3, 4) / 5
  // less 5, in the plane of the last two.
  s.key_codebooks = {{book({2, 1, 0}, {0, 1, 0, -1, 0, 0}, {{5, 3}, {-2, 6, 4}}),
                      book({9, 3, 4}, {0, 0.6, 0.8}, {{-6, -5, 0}})}};
  // Mean (-1, 4, 2): coefficients 3 and 3, nearest to 3 and to 4.
  // Decoded: (2 - 4, 1 + 3, 0) = (-2, 4, 0). Residuals (1, 0, 0) and (1, 0, 4); less (9, 3, 4) their
  // coefficients are -1.8 - 3.2 = -5 and -1.8.
  const auto page = codes_of(s, {-1, 4, 0, -1, 4, 4});
  CHECK(page.values == doubles{1, 2, 1, 2});
  CHECK(page.others.empty());
  // q = (1, 2, 1): mean.rows q = (2, -1), so A = 6 - 4; token.rows q = 2: B = -10 and 0.
  CHECK(oracle::score_unit(s, 0, floats{1, 2, 1}, page) == near(std::log(std::exp(-4.0) + std::exp(1.0))));
  const auto mean = oracle::decoded(s.key_codebooks[0].mean, doubles{1, 2});
  CHECK(mean.values == doubles{-2, 4, 0});
  CHECK(mean.sizes == doubles{6, 4, 0});
}

TEST_CASE("key_codes takes the nearest centroid in all dimensions of a group") {
  oracle::settings s = of_codes();
  s.head_dim = 2;
  oracle::codebook plane = book({0, 0}, {1, 0, 0, 1}, {{0, 3, 0}, {0, 4, 5}});
  plane.groups = 1;
  plane.dims = 2;  // centroids (0, 0), (3, 4), (0, 5)
  s.key_codebooks = {{plane, plane}};
  // Mean (1, 5). Squared distances 26, 5, 1. Residuals of (0, 5): (3, -3), squared distances 18, 49, 73; and
  // (-1, 3), 10, 17, 5.
  const auto page = codes_of(s, {3, 2, -1, 8});
  CHECK(page.values == doubles{2, 0, 2});
  // A = 10, B = 0 and 10.
  CHECK(oracle::score_unit(s, 0, floats{7, 2}, page) == near(std::log(std::exp(5.0) + std::exp(10.0))));
}

TEST_CASE("key_codes gives a tie to the smaller code, and reports it") {
  const auto s = of_codes();
  // Mean 0.125, decoded 0: the residuals 0 and 2.5 lie in the middle of -1 and 1, and of 1 and 4.
  const auto tied = codes_of(s, {0, 2.5F});
  CHECK(tied.values == doubles{0, 0, 1});
  CHECK(tied.others == std::vector<oracle::other_code>{{1, 0, 1}, {2, 0, 2}});
  // Exponents scale * q * (-1, 1) = -1 and 1, which may move by 2 and 3.
  CHECK(oracle::score_unit(s, 0, floats{2}, tied) == near(std::log(std::exp(-1.0) + std::exp(1.0))));
  const double most = std::log(std::exp(1.0) + std::exp(4.0)),
               least = std::log(std::exp(-3.0) + std::exp(-2.0));
  const double score = std::log(std::exp(-1.0) + std::exp(1.0));
  CHECK(oracle::score_doubt(s, 0, floats{2}, tied) == near(std::max(most - score, score - least)));
  CHECK(oracle::score_doubt(s, 0, floats{0}, tied) == 0.0);
  CHECK(oracle::score_doubt(s, 0, floats{float_nan}, tied) == 0.0);

  // The mean 5 in the middle of 0 and 10.
  const auto page = codes_of(s, {4, 6});
  CHECK(page.values[0] == 0.0);
  CHECK(page.others[0] == oracle::other_code{0, 0, 1});
  CHECK(oracle::score_doubt(s, 0, floats{0}, page) == oracle::infinity);
  // Equal centroids decode to the same whichever is taken.
  oracle::settings twice = s;
  twice.key_codebooks = {{book({0}, {1}, {{10, 0, 0}}), book({0}, {1}, {{1, -1, -1, 1}})}};
  const auto equal = codes_of(twice, {-1.5F, 1.5F});
  CHECK(equal.values == doubles{1, 1, 0});
  CHECK(equal.others.empty());
}

TEST_CASE("key_codes reports codes that float32 sums may not tell apart") {
  const auto others = [](float key, double offset) {
    oracle::settings s = of_codes();
    s.key_codebooks[0].token = book({offset}, {1}, {{-1 - offset, 1 - offset, 40 - offset}});
    return codes_of(s, {key, key}).others.size();
  };
  CHECK(others(1e-7F, 0) == 2);  // squared distances differ by 4e-7 of 1
  CHECK(others(1e-4F, 0) == 0);
  CHECK(others(1e-4F, 1000) == 2);   // coefficients of 1000, squares of 1e6
  CHECK(others(0.125F, 1000) == 2);  // 0.5 of 1e6
  CHECK(others(0.125F, 10) == 0);

  // 0.6 * 400 - 0.8 * 299.9999 is 8e-5, from products of 240: more than 1e-6 of these from the middle or not.
  oracle::settings wide = of_codes();
  wide.head_dim = 2;
  wide.key_codebooks = {{book({0, 0}, {1, 0}, {{0}}), book({0, 0}, {0.6, 0.8}, {{-1, 1}})}};
  CHECK(codes_of(wide, {400, -299.9999F, 400, -299.9999F}).others.size() == 2);
  CHECK(codes_of(wide, {4, -2.9999F, 4, -2.9999F}).others.empty());

  // Two centroids 2 apart but far away: 1e-5 of the distance, whose square is near 1e12.
  oracle::settings s = of_codes();
  s.key_codebooks[0].token = book({0}, {1}, {{1e6 - 2, 1e6 - 4}});
  CHECK(codes_of(s, {0.5F, 0.5F}).values == doubles{0, 1, 1});
  CHECK(codes_of(s, {0.5F, 0.5F}).others.size() == 2 * 255);
  // Squares that float32 does not hold.
  s.key_codebooks[0].token = book({0}, {1}, {{-1e-20, 1e-20}});
  CHECK(codes_of(s, {1e-20F, 1e-20F}).values == doubles{0, 1, 1});
  CHECK(codes_of(s, {1e-20F, 1e-20F}).others.size() == 2);
}

TEST_CASE("key_codes reserves a code for pages with a NaN or infinite key") {
  oracle::settings s = of_codes();
  for (float bad : {float_nan, float_inf, -float_inf})
    for (const floats& keys : {floats{bad, 1}, floats{1, bad}}) {
      const auto lost = codes_of(s, keys);
      CHECK(lost.values == doubles{255, 0, 0});
      CHECK(std::isnan(oracle::score_unit(s, 0, floats{0}, lost)));
      CHECK(oracle::score_doubt(s, 0, floats{1}, lost) == 0.0);
    }
  // Only in the mean's first group, where no mean is given code 255, nor one from used_in_first on.
  const auto last = [](double near_it, double at_it) {
    doubles group(254, 1e6);
    group.push_back(near_it);
    group.push_back(at_it);
    return group;
  };
  s.head_dim = 2;
  const oracle::codebook b = book({0, 0}, {1, 0, 0, 1}, {last(7, 8), last(7, 8)});
  s.key_codebooks = {{b, book({0, 0}, {1, 0, 0, 1}, {last(0, 1), last(0, 1)})}};
  CHECK(codes_of(s, {8, 8, 8, 8}).values == doubles{254, 255, 255, 254, 255, 254});
  CHECK(codes_of(s, {8, 8, 8, 8}).others.empty());
  CHECK(oracle::score_unit(s, 0, floats{1, 1}, codes_of(s, {8, 8, 8, 8})) == near(8.0 + std::log(2.0)));

  s.key_codebooks[0].mean.used_in_first = 254;
  s.key_codebooks[0].token.used_in_first = 255;
  const auto limited = codes_of(s, {8, 8, 8, 8});
  CHECK(limited.values[0] == 0.0);  // any of the far ones
  CHECK(limited.others.empty());    // they are all the same
  CHECK(limited.values[1] == 255.0);
  CHECK(codes_of(s, {1e6F + 1, 8, 1e6F + 1, 8}).values == doubles{0, 255, 254, 254, 254, 254});
}

TEST_CASE("a selection that hangs on a key's code is not firm") {
  oracle::settings s = of_codes();
  s.query_heads = 2;
  s.kv_heads = 2;
  // Head 1 decodes tokens to twice what head 0 does.
  s.key_codebooks.push_back({book({0}, {1}, {{0, 10}}), book({0}, {1}, {{-2, 2, 8}})});
  const auto chosen = [&](float key, int kv_head) {
    oracle::decoder decoder(s);
    decoder.prompt(floats{key, key, key, key, 2, 2, 2, 2}, floats(8), 4);
    decoder.prompt(floats(4), floats(4), 2);
    return decoder.choose(floats{2, 2}, kv_head, 6);
  };
  // Page 1's keys read back as 1 for head 0 and 2 for head 1.
  CHECK(chosen(3, 0).pages == ints{0});  // 4
  CHECK(oracle::is_firm(chosen(3, 0)));
  CHECK(chosen(-0.5F, 0).pages == ints{1});  // -1
  CHECK(oracle::is_firm(chosen(-0.5F, 0)));
  CHECK_FALSE(oracle::is_firm(chosen(0, 0)));  // -1 or 1: the same as page 1
  // Page 0 is given 2 to both sides, -3 to 1, and with it the mass that shares are parts of.
  const double lost = 2.0 + std::log(2.0) - std::log1p(std::exp(-4.0));
  CHECK(chosen(0, 0).slack == near(lost / (2.0 + std::log1p(std::exp(-2.0)))));
  CHECK(chosen(5, 0).slack == oracle::infinity);  // the mean's code
  CHECK_FALSE(oracle::is_firm(chosen(5, 1)));
  CHECK(oracle::is_firm(chosen(5.5F, 1)));
  CHECK(chosen(5.5F, 1).pages == ints{0});  // 10 - 2
  const auto second = chosen(-1.5F, 1);
  CHECK(second.pages == ints{1});
  CHECK(second.pooled[1] - second.pooled[0] == near(4.0));
  // A page with a NaN is left out, and says nothing of the codes.
  CHECK(chosen(float_nan, 0).pages == ints{1});
  CHECK(oracle::is_firm(chosen(float_nan, 0)));
}

TEST_CASE("key_codes bounds its scores by its centroids") {
  oracle::settings s = of_codes();
  s.key_codebooks = {{book({0}, {1}, {doubles(256, 10)}), book({0}, {1}, {doubles(256, -4)})}};
  const auto chosen = [&](float key, float q) {
    oracle::decoder decoder(s);
    decoder.prompt(floats{key, key, 1, 1, 1, 1}, floats(6), 6);
    return decoder.choose(floats{q}, 0, 6);
  };
  CHECK(chosen(1, -3).score_size == near(0.5 * 3 * 14));
  CHECK_FALSE(chosen(1e18F, 1).may_overflow);
  CHECK(chosen(1e20F, 1).may_overflow);
  CHECK(chosen(1, 1e38F).may_overflow);
  CHECK_FALSE(chosen(1, 1e36F).may_overflow);
  CHECK_FALSE(chosen(float_inf, 1).may_overflow);
  // No coefficient has the second element, but means and residuals do. Then products with rows overflow.
  oracle::settings wide = of_codes();
  wide.head_dim = 2;
  const auto overflows = [&](const doubles& row, float key, float q) {
    wide.key_codebooks = {{book({0, 0}, row, {doubles(256, 1e-9)}), book({0, 0}, row, {doubles(256, 1e-9)})}};
    oracle::decoder decoder(wide);
    decoder.prompt(floats{1, key, 1, key, 1, 1, 1, 1, 1, 1, 1, 1}, floats(12), 6);
    return decoder.choose(floats{q, q}, 0, 6).may_overflow;
  };
  CHECK(overflows({1, 0}, 1e38F, 1));
  CHECK_FALSE(overflows({1, 0}, 3e37F, 1));
  CHECK(overflows({0.6, 0.8}, 1, 3e38F));
  CHECK_FALSE(overflows({0.6, 0.8}, 1, 2e38F));

  // Centroids that may not be chosen do not count.
  s.key_codebooks[0].mean.centroids[255] = 1e30;
  CHECK(chosen(1, -3).score_size == near(0.5 * 3 * 14));
  s.key_codebooks[0].token.centroids[7] = 20;
  CHECK(chosen(1, -3).score_size == near(0.5 * 3 * 30));
  s.key_codebooks[0].token.used_in_first = 7;
  CHECK(chosen(1, -3).score_size == near(0.5 * 3 * 14));
}

TEST_CASE("codebooks of wrong shapes are refused") {
  const auto refused = [](const std::function<void(oracle::settings&)>& change) {
    oracle::settings s = of_codes();
    oracle::decoder accepted(s);
    change(s);
    CHECK_THROWS_AS(oracle::decoder(s), std::invalid_argument);
  };
  refused([](oracle::settings& s) { s.key_codebooks.clear(); });
  refused([](oracle::settings& s) { s.key_codebooks.push_back(s.key_codebooks[0]); });
  using part = oracle::codebook oracle::codebooks::*;
  for (part which : {part(&oracle::codebooks::mean), part(&oracle::codebooks::token)}) {
    const auto refused_part = [&](const std::function<void(oracle::codebook&)>& change) {
      refused([&](oracle::settings& s) { change(s.key_codebooks[0].*which); });
    };
    refused_part([](oracle::codebook& b) { b.groups = 0; });
    refused_part([](oracle::codebook& b) { b.dims = -1; });
    refused_part([](oracle::codebook& b) { b.offset.push_back(0); });
    refused_part([](oracle::codebook& b) { b.rows.clear(); });
    refused_part([](oracle::codebook& b) { b.centroids.pop_back(); });
    for (int used : {0, 257}) refused_part([&](oracle::codebook& b) { b.used_in_first = used; });
    refused_part([](oracle::codebook& b) {  // two coefficients of one element
      b.groups = 2;
      b.rows.push_back(0);
      b.centroids.resize(512);
    });
  }
}
