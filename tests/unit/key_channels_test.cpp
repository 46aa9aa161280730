// Keys of which some channels are kept, and which.

#include <freekv/policies/key_channels.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "../oracle/channels.hpp"
#include "codec_case.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::channel_lists;
using freekv::half;
using freekv::key_channels;
using freekv::row_range;
using oracle::plane_kind;

using bits = std::vector<bool>;

/// Lists of one layer.
std::vector<std::uint8_t> bytes_of(const std::vector<bits>& by_head) {
  std::vector<std::uint8_t> bytes;
  for (const bits& list : by_head)
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (i % 8 == 0) bytes.push_back(0);
      if (list[i]) bytes.back() = static_cast<std::uint8_t>(bytes.back() | 1 << i % 8);
    }
  return bytes;
}
bits random_list(dice& d, int head_dim, int kept) {
  bits list(count(head_dim), false);
  for (int left = kept; left > 0;)
    if (const std::size_t at = count(d.below(head_dim)); !list[at]) {
      list[at] = true;
      --left;
    }
  return list;
}

/// A codec with lists of heads that are drawn at random, of the second of two layers.
struct listed {
  std::vector<bits> of_heads;
  std::vector<std::uint8_t> data;
  key_channels codec;

  listed(dice& d, int heads, int head_dim, float pruned) : codec{.pruned = pruned} {
    const int kept = codec.kept(head_dim);
    std::vector<bits> both;
    for (int i = 0; i < 2 * heads; ++i) both.push_back(random_list(d, head_dim, kept));
    of_heads.assign(both.begin() + heads, both.end());
    data = bytes_of(both);
    codec.lists = {data.data(), 2, heads, head_dim};
    codec.check();
  }
  auto at(int head) const { return codec.at({.layer = 1, .head = head, .kv_heads = codec.lists.kv_heads}); }
};

/// `at(head)`, and its bytes, as codec_case.hpp takes a codec.
struct of_head : key_channels::slice_codec {
  static constexpr std::string_view name = key_channels::name;
  std::size_t bytes(freekv::kv_extent page, std::size_t element_bytes) const {
    return policy.bytes(page, element_bytes);
  }
};

/// One of several lanes, each of which does its part of a row.
template <int Lanes>
struct nth_lane {
  static constexpr int lane_count = Lanes;
  int nth = 0;
  int lane() const { return nth; }
  int lanes() const { return Lanes; }
};

std::string refusal(const key_channels& codec, const freekv::codec_setting& s) {
  try {
    codec.validate(s);
  } catch (const freekv::settings_error& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("as many channels are kept as a share says, in eights", "[codec]") {
  CHECK(key_channels{}.kept(64) == 40);    // of 38.4
  CHECK(key_channels{}.kept(80) == 48);    // of 48
  CHECK(key_channels{}.kept(128) == 80);   // of 76.8
  CHECK(key_channels{}.kept(256) == 152);  // of 153.6
  CHECK(key_channels{}.kept(8) == 8);
  CHECK(key_channels{.pruned = 0.0f}.kept(128) == 128);
  CHECK(key_channels{.pruned = 0.5f}.kept(128) == 64);
  CHECK(key_channels{.pruned = 0.999f}.kept(128) == 8);
  CHECK(key_channels{}.bytes({32, 64}, 2) == 32 * (40 + 64) * 2);
}

TEST_CASE("kept channels lie one behind the other, then come the values", "[codec]") {
  std::vector<std::uint8_t> list{0b10000001, 0b00000110, 0b11110000};  // 0, 7, 9, 10, 20 to 23
  const key_channels codec{.pruned = 0.7f, .lists = {list.data(), 1, 1, 24}};
  REQUIRE(codec.kept(24) == 8);
  codec.check();
  std::vector<float> rows(2 * 2 * 24);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(100 + i);
  std::vector<float> stored(codec.bytes({2, 24}, sizeof(float)) / sizeof(float));
  REQUIRE(stored.size() == 2 * 8 + 2 * 24);
  const auto slice = codec.at({});
  slice.encode<24>(freekv::scalar_team{}, freekv::head_slice<const float>{rows.data(), rows.data() + 48, 24},
                   2, reinterpret_cast<std::byte*>(stored.data()));
  const std::vector<float> keys(stored.begin(), stored.begin() + 16);
  CHECK(keys == std::vector<float>{100, 107, 109, 110, 120, 121, 122, 123,  //
                                   124, 131, 133, 134, 144, 145, 146, 147});
  CHECK(std::equal(rows.begin() + 48, rows.end(), stored.begin() + 16));
  std::vector<float> back(2 * 24, -1.0f);
  slice.decode<24>(freekv::scalar_team{}, reinterpret_cast<const std::byte*>(stored.data()), 2,
                   row_range{1, 1}, freekv::head_slice<float>{back.data(), back.data() + 24, 24});
  CHECK(back == std::vector<float>{124, 0,   0,   0,   0,   0,   0,   131, 0,   133, 134, 0,
                                   0,   0,   0,   0,   0,   0,   0,   0,   144, 145, 146, 147,  //
                                   172, 173, 174, 175, 176, 177, 178, 179, 180, 181, 182, 183,
                                   184, 185, 186, 187, 188, 189, 190, 191, 192, 193, 194, 195});
}

TEMPLATE_TEST_CASE("listed channels and values come back bit for bit, other channels as 0", "[codec]", float,
                   half, bfloat16) {
  dice d(21);
  for (int trial = 0; trial < some_of(60); ++trial) {
    auto c = make_coded_page<TestType>(d, coded_head_dims[count(trial) % coded_head_dims.size()]);
    if (trial % 3 == 0)  // in channels that are kept and others
      for (int i = 0; i < 9; ++i)
        c.at(d.one_of({plane_kind::keys, plane_kind::values}), d.below(c.tokens), d.below(c.d)) =
            freekv::from_float<TestType>(d.one_of({quiet_nan, inf, -inf, -0.0f}));
    const listed given(d, c.heads, c.d, d.one_of({0.0f, 0.2f, 0.4f, 0.5f, 0.9f}));
    const of_head codec{given.at(c.head)};
    INFO(c << ", pruned " << given.codec.pruned);
    const auto stored = encoded(codec, c);
    CHECK(stored.size() == count(c.tokens * (given.codec.kept(c.d) + c.d)) * sizeof(TestType));
    const auto back = decoded(codec, c, stored);
    CHECK(back.others_untouched());
    auto expected = c;
    const bits& list = given.of_heads[count(c.head)];
    int wrong = 0;
    const auto thin = oracle::thinned(c.numbers(plane_kind::keys), list),
               got = back.numbers(plane_kind::keys);
    for (std::size_t i = 0; i < thin.size(); ++i) wrong += !is_near(got[i], thin[i], 0.0);
    CHECK(wrong == 0);
    for (int t = 0; t < c.tokens; ++t)
      for (int i = 0; i < c.d; ++i)
        if (!list[count(i)]) expected.at(plane_kind::keys, t, i) = freekv::from_float<TestType>(0.0f);
    auto only = expected;  // the head alone, as `back` has it
    for (auto& element : only.elements) element = freekv::from_float<TestType>(77.0f);
    for (const auto plane : {plane_kind::keys, plane_kind::values})
      for (int t = 0; t < c.tokens; ++t)
        for (int i = 0; i < c.d; ++i) only.at(plane, t, i) = expected.at(plane, t, i);
    CHECK(same_bits(back.elements, only.elements));
    if (given.codec.pruned == 0.0f) CHECK(same_bits(stored, encoded(freekv::identity{}, c)));
    // Stored again, as after a truncation, it is what it was.
    CHECK(same_bits(encoded(codec, back), stored));
  }
}

TEMPLATE_TEST_CASE("lanes that share rows store and read what one does, some rows as all", "[codec]", float,
                   half, bfloat16) {
  dice d(22);
  const auto with_lanes = [&]<int HeadDim, int Lanes>() {
    if (std::ranges::find(coded_head_dims, HeadDim) == coded_head_dims.end()) return;
    for (int trial = 0; trial < 10; ++trial) {
      auto c = make_coded_page<TestType>(d, HeadDim);
      const listed given(d, c.heads, HeadDim, d.one_of({0.0f, 0.4f, 0.9f}));
      const of_head codec{given.at(c.head)};
      const auto expected = encoded(codec, c);
      auto stored = std::vector<std::byte>(expected.size(), std::byte{0x5a});
      for (int lane = Lanes - 1; lane >= 0; --lane)
        codec.template encode<HeadDim>(nth_lane<Lanes>{lane}, std::as_const(c).slice(), c.tokens,
                                       stored.data());
      CHECK(same_bits(stored, expected));
      const auto whole = decoded(codec, c, expected);
      const int first = d.below(c.tokens);
      const row_range some{first, d.between(1, c.tokens - first)};
      coded_page<TestType> part(HeadDim, some.count);
      for (int lane = 0; lane < Lanes; ++lane)
        codec.template decode<HeadDim>(nth_lane<Lanes>{lane}, stored.data(), c.tokens, some, part.slice());
      int wrong = 0;
      for (const auto plane : {plane_kind::keys, plane_kind::values}) {
        const auto all = whole.numbers(plane), few = part.numbers(plane);
        for (std::size_t i = 0; i < few.size(); ++i)
          wrong += !is_near(few[i], all[count(some.first * HeadDim) + i], 0.0);
      }
      CHECK(wrong == 0);
    }
  };
  with_lanes.template operator()<64, 8>();
  with_lanes.template operator()<64, 32>();
  with_lanes.template operator()<80, 8>();
  with_lanes.template operator()<256, 32>();
}

TEST_CASE("of a list with other than the kept channels nothing is written behind them", "[codec]") {
  dice d(23);
  for (const int listed_channels : {0, 3, 41, 64}) {
    const auto data = bytes_of({random_list(d, 64, listed_channels)});
    const key_channels codec{.lists = {data.data(), 1, 1, 64}};
    const auto c = make_coded_page<float>(d, 64);
    const of_head slice{codec.at({})};
    const auto back = round_trip(slice, c).numbers(plane_kind::keys);  // which looks behind the bytes
    const auto keys = c.numbers(plane_kind::keys);
    int places = 0;
    for (std::size_t i = 0; i < 64; ++i) {
      const bool in_list = (data[i / 8] >> i % 8 & 1) != 0;
      const bool there = in_list && places++ < 40;
      CHECK(back[i] == (there ? keys[i] : 0.0));
    }
    if (listed_channels == 41)
      CHECK_THROWS_WITH(codec.check(),
                        Catch::Contains("layer 0, KV head 0 has 41 channels, and 40 of 64 are kept"));
  }
}

TEST_CASE("key_channels says what its data lacks", "[codec]") {
  const std::vector<std::uint8_t> some(1000);
  const auto with = [&](float pruned, const channel_lists& lists) { return key_channels{pruned, lists}; };
  const freekv::codec_setting s{2, 1, 64};
  CHECK(refusal(with(0.4f, {some.data(), 2, 1, 64}), s).empty());
  CHECK(refusal(with(0.0f, {some.data(), 3, 1, 64}), s).empty());
  CHECK_THAT(refusal(with(0.4f, {}), s), Catch::Contains("lists of channels as data"));
  CHECK_THAT(refusal(with(0.4f, {some.data(), 1, 1, 64}), s),
             Catch::Contains("of 1 layers of 1 heads, head_dim 64; needed are 2 layers of 1 heads"));
  CHECK_THAT(refusal(with(0.4f, {some.data(), 2, 2, 64}), s), Catch::Contains("of 2 layers of 2 heads"));
  CHECK_THAT(refusal(with(0.4f, {some.data(), 2, 1, 128}), s), Catch::Contains("head_dim 128; needed"));
  for (const float pruned : {-0.1f, 1.0f, 2.0f, quiet_nan})
    CHECK_THAT(refusal(with(pruned, {some.data(), 2, 1, 64}), s),
               Catch::Contains("is not a share from 0 to below 1"));
  CHECK(freekv::detail::printed(key_channels{}) == "key_channels(0.4)");
}

TEST_CASE("channels are chosen as the oracle says", "[codec]") {
  dice d(24);
  for (int trial = 0; trial < some_of(60); ++trial) {
    const int head_dim = d.one_of({8, 24, 64, 128}), kv = d.between(1, 3), group = d.one_of({1, 2, 3, 5});
    const int tokens = d.one_of({0, 1, 7, 50}), rows = std::min(tokens, d.one_of({1, 4, 32}));
    const int kept = d.one_of({0, 8, key_channels{}.kept(head_dim), head_dim});
    std::vector<float> keys = normals(d, count(tokens * kv * head_dim)),
                       queries = normals(d, count(rows * kv * group * head_dim));
    std::vector<float> sizes = normals(d, count(kv * head_dim));  // channels differ, by head
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] *= sizes[i % sizes.size()];
    if (trial % 2 == 0 && tokens > 1) {
      keys[count(d.below(static_cast<int>(keys.size())))] = d.one_of({quiet_nan, inf, -inf});
      queries[count(d.below(static_cast<int>(queries.size())))] = d.one_of({quiet_nan, inf, -inf});
    }
    std::vector<std::uint8_t> chosen(count(kv * head_dim / 8), 0xff);
    freekv::choose_key_channels({kv * group, kv}, head_dim, kept, keys, queries, chosen);
    std::vector<bits> expected;
    for (int head = 0; head < kv; ++head) {
      const auto rows_of = [&](const std::vector<float>& from, int heads, int first, int of) {
        std::vector<std::vector<double>> all;
        for (int row = 0; row * heads * head_dim < static_cast<int>(from.size()); ++row)
          for (int h = first; h < first + of; ++h) {
            const auto at = from.begin() + (row * heads + h) * head_dim;
            all.emplace_back(at, at + head_dim);
          }
        return all;
      };
      expected.push_back(oracle::kept_channels(rows_of(queries, kv * group, head * group, group),
                                               rows_of(keys, kv, head, 1), head_dim, kept));
    }
    INFO(kept << " of " << head_dim << ", " << kv << " heads of " << group << ", " << tokens << " tokens, "
              << rows << " rows");
    CHECK(chosen == bytes_of(expected));
  }
}

TEST_CASE("the numbers of queries and of keys both count, the largest too", "[codec]") {
  constexpr int d = 16;
  std::vector<float> key(d, 1.0f), query(d, 1.0f);
  key[3] = largest;
  query[12] = -largest;
  key[12] = 0.0f;  // nothing of it is seen
  std::vector<std::uint8_t> list(2);
  freekv::choose_key_channels({1, 1}, d, 1, key, query, list);
  CHECK(list == std::vector<std::uint8_t>{0b00001000, 0});
  freekv::choose_key_channels({1, 1}, d, 15, key, query, list);
  CHECK(list == std::vector<std::uint8_t>{0xff, 0xef});
  query[3] = std::numeric_limits<float>::denorm_min();  // beside 1: less
  key[3] = 1.0f;
  freekv::choose_key_channels({1, 1}, d, 14, key, query, list);
  CHECK(list == std::vector<std::uint8_t>{0xf7, 0xef});
}

TEST_CASE("what is no prompt's rows is refused", "[codec]") {
  std::vector<float> keys(4 * 2 * 16), queries(2 * 4 * 16);
  std::vector<std::uint8_t> lists(4);
  const auto choose = [&](freekv::head_counts heads, int kept, std::size_t of_keys, std::size_t of_queries,
                          std::size_t bytes) {
    freekv::choose_key_channels(heads, 16, kept, std::span(keys).first(of_keys),
                                std::span(queries).first(of_queries), std::span(lists).first(bytes));
  };
  choose({4, 2}, 8, keys.size(), queries.size(), 4);
  using freekv::usage_error;
  CHECK_THROWS_AS(choose({4, 2}, 8, keys.size() - 1, queries.size(), 4), usage_error);
  CHECK_THROWS_AS(choose({4, 2}, 8, keys.size(), queries.size() - 16, 4), usage_error);
  CHECK_THROWS_AS(choose({4, 2}, 8, keys.size(), queries.size(), 3), usage_error);
  CHECK_THROWS_AS(choose({3, 2}, 8, keys.size(), 0, 4), usage_error);
  CHECK_THROWS_AS(choose({0, 0}, 8, 0, 0, 0), usage_error);
  CHECK_THROWS_WITH(choose({4, 2}, 17, keys.size(), queries.size(), 4),
                    Catch::Contains("17 channels are not among the 16 of a key"));
  CHECK_THROWS_AS(choose({4, 2}, -1, keys.size(), queries.size(), 4), usage_error);
}

TEST_CASE("half an eight of kept channels is rounded up", "[codec]") {
  CHECK(freekv::key_channels{.pruned = 0.5f}.kept(24) == 16);  // of 12
}
