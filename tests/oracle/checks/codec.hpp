// What is stored in fewer bits, and how it reads back.
#pragma once

#include "../codec.hpp"
#include "by_hand.hpp"

TEST_CASE("8 bits of E4M3 stand for these numbers, and the nearest is found") {
  CHECK(oracle::fp8_number(0x00) == 0.0);
  CHECK(oracle::fp8_number(0x01) == 0x1p-9);
  CHECK(oracle::fp8_number(0x07) == 7 * 0x1p-9);
  CHECK(oracle::fp8_number(0x08) == 0x1p-6);
  CHECK(oracle::fp8_number(0x38) == 1.0);
  CHECK(oracle::fp8_number(0x3c) == 1.5);
  CHECK(oracle::fp8_number(0x7e) == 448.0);
  CHECK(std::isnan(oracle::fp8_number(0x7f)));
  CHECK(oracle::fp8_number(0xb8) == -1.0);
  CHECK(oracle::rounded_to_fp8(1.0625) == 1.0);  // between 1 and 1.125
  CHECK(oracle::rounded_to_fp8(1.1875) == 1.25);
  CHECK(oracle::rounded_to_fp8(-1.19) == -1.25);
  CHECK(oracle::rounded_to_fp8(0x1p-10) == 0.0);
  CHECK(oracle::rounded_to_fp8(0x1.8p-9) == 0x1p-8);
  CHECK(oracle::rounded_to_fp8(464.0) == 448.0);
  CHECK(oracle::rounded_to_fp8(-oracle::infinity) == -448.0);
  CHECK(std::isnan(oracle::rounded_to_fp8(oracle::not_a_number)));
}

TEST_CASE("integer codecs share a step by token or by channel") {
  using enum oracle::codec_kind;
  using enum oracle::plane_kind;
  // Two tokens of two: their largest are 254 and 14, their channels' 254 and 14.
  const doubles numbers = {254.0, 3.2, -1.1, 14.0};
  const auto back = [&](auto codec, auto plane) { return oracle::decoded(codec, plane, numbers, 2).values; };
  CHECK(back(int8_token, keys) == doubles{254.0, 4.0, -10.0 * (14.0 / 127.0), 14.0});
  CHECK(back(int4_token, keys) == doubles{254.0, 0.0, -2.0, 14.0});
  CHECK(back(int8_channel, keys) == doubles{254.0, 29.0 * (14.0 / 127.0), -2.0, 14.0});
  CHECK(back(int8_channel, values) == back(int8_token, values));
  CHECK(oracle::decoded(int4_channel, keys, {254.0, 0.0, -1.0, 15.0, 15.9, 2.6}, 2).values ==
        doubles{254.0, 0.0, -1.0, 15.0, 16.0, 3.0});  // steps of 17 from -1, of 1 from 0
  CHECK(oracle::spread({0.0, 0.4, 14.6, 15.0}, 4) == doubles{0.0, 0.0, 15.0, 15.0});
  CHECK(oracle::spread({3.0, 3.0}, 4) == doubles{3.0, 3.0});
  CHECK(oracle::spread_doubt({0.0, 0.4, 6.5, 15.0}, 4) == doubles{0.0, 0.0, 1.0, 0.0});
  CHECK(std::isnan(oracle::spread({0.0, oracle::infinity}, 4)[0]));
  CHECK(std::isnan(oracle::decoded(int8_token, keys, {1.0, oracle::not_a_number, 1.0, 1.0}, 2).values[0]));
  CHECK(oracle::decoded(int8_token, keys, {1.0, oracle::not_a_number, 1.0, 1.0}, 2).values[2] == 1.0);
}
