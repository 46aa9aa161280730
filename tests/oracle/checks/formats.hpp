// Types, int8 groups and what lies at an edge of them.
#pragma once

#include "by_hand.hpp"

TEST_CASE("rounding to a type goes to the nearest number, ties to the even one") {
  using oracle::element_kind;
  const auto f16 = [](double x) { return oracle::rounded_to(x, element_kind::f16); };
  const auto bf16 = [](double x) { return oracle::rounded_to(x, element_kind::bf16); };
  CHECK(f16(0.1) == 0.0999755859375);
  CHECK(bf16(0.1) == 0.10009765625);
  CHECK(f16(2049.0) == 2048.0);  // between 2048 and 2050
  CHECK(f16(2051.0) == 2052.0);
  CHECK(f16(-2051.0) == -2052.0);
  CHECK(bf16(1.0 + 0x1p-8) == 1.0);
  CHECK(bf16(1.0 + 3 * 0x1p-8) == 1.0 + 0x1p-6);
  CHECK(oracle::rounded_to(16777217.0, element_kind::f32) == 16777216.0);
  CHECK(oracle::rounded_to(0.1, element_kind::f32) == static_cast<double>(0.1F));

  CHECK(f16(65504.0) == 65504.0);
  CHECK(f16(65519.99) == 65504.0);
  CHECK(f16(65520.0) == oracle::infinity);
  CHECK(f16(-65520.0) == -oracle::infinity);
  CHECK(bf16(65520.0) == 65536.0);
  CHECK(bf16(0x1.FEp127) == 0x1.FEp127);
  CHECK(bf16(0x1.FFp127) == oracle::infinity);
  CHECK(f16(0x1p-14 + 0x1p-24) == 0x1p-14 + 0x1p-24);
  CHECK(f16(0x1p-24) == 0x1p-24);  // the smallest subnormal number
  CHECK(f16(0x1p-25) == 0.0);
  CHECK(f16(0x1.8p-25) == 0x1p-24);
  CHECK(f16(0x1.8p-24) == 0x1p-23);
  CHECK(bf16(0x1p-133) == 0x1p-133);
  CHECK(bf16(0x1p-134) == 0.0);
  CHECK(std::isnan(f16(oracle::not_a_number)));
  CHECK(f16(oracle::infinity) == oracle::infinity);
}

TEST_CASE("a number near the middle of two of its type may be either") {
  using oracle::element_kind;
  CHECK(oracle::rounding_doubt(2049.0, 1e-3, element_kind::f16) == 2.0);
  CHECK(oracle::rounding_doubt(2049.2, 0.1, element_kind::f16) == 0.0);
  CHECK(oracle::rounding_doubt(2049.2, 0.3, element_kind::f16) == 2.0);
  CHECK(oracle::rounding_doubt(65519.9, 1.0, element_kind::f16) == oracle::infinity);
  CHECK(oracle::rounding_doubt(1e6, 1.0, element_kind::f16) == 0.0);
  CHECK(oracle::rounding_doubt(oracle::not_a_number, 1.0, element_kind::f16) == 0.0);
}

TEST_CASE("int8 has one scale for head_dim numbers") {
  const double nan = oracle::not_a_number, inf = oracle::infinity;
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.summary = oracle::summary_kind::ball;
  s.format = oracle::stored_format::int8;
  const auto kept = [&](const doubles& values) {
    return oracle::stored(s, {values, doubles(values.size(), 0.0)}).values;
  };
  const doubles ball = kept({127.0, -63.6, 0.3});  // steps 1 and 0.3 / 127
  CHECK(ball[0] == 127.0);
  CHECK(ball[1] == -64.0);
  CHECK(ball[2] == near(0.3));
  CHECK(kept({-254.0, 3.0}) == doubles{-254.0, 4.0});  // step 2: 1.5 goes to 2, the even one
  CHECK(kept({-254.0, 5.0}) == doubles{-254.0, 4.0});  // and 2.5 too
  CHECK(kept({0.0, 0.0, 5.0}) == doubles{0.0, 0.0, 5.0});
  for (double lost : {nan, inf, -inf}) {
    const doubles group = kept({1.0, lost, 2.0});
    CHECK(std::isnan(group[0]));
    CHECK(std::isnan(group[1]));
    CHECK(group[2] == 2.0);
  }
}

TEST_CASE("an int8 code at an edge is reported, the more easily the larger the sums it came from") {
  oracle::settings s = tiny();
  s.head_dim = 2;
  s.summary = oracle::summary_kind::mean;
  s.format = oracle::stored_format::int8;
  CHECK(oracle::stored(s, {{127.0, 2.5}, {0.0, 0.0}}).doubt == doubles{0.0, 1.0});
  CHECK(oracle::stored(s, {{127.0, -3.5}, {0.0, 0.0}}).doubt == doubles{0.0, 1.0});
  CHECK(oracle::stored(s, {{127.0, 2.4}, {0.0, 0.0}}).doubt == doubles{0.0, 0.0});
  CHECK(oracle::stored(s, {{127.0, 2.4}, {0.0, 2e5}}).doubt == doubles{0.0, 1.0});
  CHECK(oracle::stored(s, {{127.0, 2.4}, {0.0, 2e6}}).doubt[1] == 2.0);  // 2.4 +- 2: 0 to 4
  // The step is off by 1 % where the largest number is: 60.4 may be 61.0.
  CHECK(oracle::stored(s, {{127.0, 60.4}, {1.27e6, 0.0}}).doubt[1] == 1.0);
}

TEST_CASE("standard keeps min_max in the key's type and means in float32") {
  oracle::settings s = tiny();
  s.element = oracle::element_kind::bf16;
  const auto summary = [&](oracle::summary_kind kind, oracle::stored_format format) {
    s.summary = kind;
    s.format = format;
    const floats keys{1.0F, 1.0F + 0x1p-7F};
    return oracle::summarise(s, 0, rows_of(keys, 1));
  };
  using kinds = oracle::summary_kind;
  using formats = oracle::stored_format;
  const double middle = 1.0 + 0x1p-8;
  CHECK(summary(kinds::mean, formats::standard).values == doubles{middle});
  CHECK(summary(kinds::mean, formats::standard).doubt.empty());
  CHECK(summary(kinds::mean, formats::float32).values == doubles{middle});
  CHECK(summary(kinds::mean, formats::key).values == doubles{1.0});
  CHECK(summary(kinds::mean, formats::key).doubt == doubles{0x1p-7});
  CHECK(summary(kinds::chunk_means, formats::key).values == doubles{1.0, 1.0 + 0x1p-7});
  CHECK(summary(kinds::min_max, formats::standard).values == doubles{1.0, 1.0 + 0x1p-7});
  CHECK(summary(kinds::ball, formats::standard).values == doubles{middle, 0x1p-8});
  CHECK(summary(kinds::ball, formats::key).values == doubles{1.0, 0x1p-8});
  CHECK(summary(kinds::centroid_box, formats::key).values == doubles{1.0, 1.0 + 0x1p-7});
  CHECK(summary(kinds::mean, formats::int8).values[0] == near(middle));
  s.element = oracle::element_kind::f16;
  CHECK(summary(kinds::mean, formats::key).values == doubles{middle});
  CHECK(summary(kinds::mean, formats::key).doubt == doubles{0.0});
  // Keys that the type does not hold show what standard does to min_max.
  s.format = formats::standard;
  s.summary = kinds::min_max;
  CHECK(oracle::summarise(s, 0, rows_of({2049.0F, 2051.0F}, 1)).values == doubles{2048.0, 2052.0});
}

TEST_CASE("a selection that hangs on how a mean is kept is not firm") {
  oracle::settings s = tiny();
  s.summary = oracle::summary_kind::mean;
  const auto chosen = [&](const floats& keys, const floats& q) {
    oracle::decoder decoder(s);
    decoder.prompt(keys, floats(keys.size()), static_cast<int>(keys.size() / q.size()));
    decoder.prompt(floats(2 * q.size()), floats(2 * q.size()), 2);
    return decoder.choose(q, 0, decoder.length());
  };
  s.element = oracle::element_kind::f16;
  s.format = oracle::stored_format::key;
  const auto middle = chosen({2048, 2050, 2047, 2047}, {1});  // 2048 or 2050, and 2047
  CHECK(middle.pages == ints{0});
  CHECK(middle.margin > 0.5);
  CHECK_FALSE(oracle::is_firm(middle));
  CHECK(oracle::is_firm(chosen({2048, 2048, 2047, 2047}, {1})));
  // Page 0 is 65504 or infinite, which decides whether page 1 is far behind or all there is.
  CHECK(chosen({65519.96F, 65519.96F, 1, 1}, {-1}).slack == oracle::infinity);
  CHECK(chosen({65504, 65504, 1, 1}, {-1}).slack == 0.0);

  s.head_dim = 2;
  s.format = oracle::stored_format::int8;
  CHECK_FALSE(oracle::is_firm(chosen({127, 2.5F, 127, 2.5F, 127, 1, 127, 1}, {1, 1})));
  CHECK(oracle::is_firm(chosen({127, 2.4F, 127, 2.4F, 127, 1, 127, 1}, {1, 1})));
}
