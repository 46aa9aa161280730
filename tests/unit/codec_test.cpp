// Codecs against the float64 oracle: what comes back, in how many bytes, and what a NaN spoils.

#include <cuda_fp8.h>

#include <bit>
#include <type_traits>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "codec_case.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::fp8_e4m3;
using freekv::half;
using freekv::kv_extent;
using oracle::codec_kind;
using oracle::plane_kind;

constexpr std::array planes{plane_kind::keys, plane_kind::values};

template <class E>
constexpr oracle::element_kind kind_of = std::is_same_v<E, half>       ? oracle::element_kind::f16
                                         : std::is_same_v<E, bfloat16> ? oracle::element_kind::bf16
                                                                       : oracle::element_kind::f32;

bool uses_codes(codec_kind codec) { return codec >= codec_kind::int8_token; }
bool by_channel(codec_kind codec, plane_kind plane) {
  return plane == plane_kind::keys &&
         (codec == codec_kind::int8_channel || codec == codec_kind::int4_channel);
}
bool is_asymmetric(codec_kind codec) { return codec == codec_kind::int4_channel; }
int bits_of(codec_kind codec) {
  return codec == codec_kind::int8_token || codec == codec_kind::int8_channel ? 8 : 4;
}

/// Lowest and highest number of a group.
struct group_range {
  double low = oracle::infinity, high = -oracle::infinity;
  double size() const { return std::fmax(std::fabs(low), std::fabs(high)); }
  double step(codec_kind codec) const {
    return is_asymmetric(codec) ? (high - low) / 15.0 : size() / (bits_of(codec) == 8 ? 127.0 : 7.0);
  }
};
/// Of all rows, or of all columns.
std::vector<group_range> ranges_of(const std::vector<double>& numbers, int d, bool columns) {
  std::vector<group_range> ranges(columns ? count(d) : numbers.size() / count(d));
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    group_range& range = ranges[columns ? i % count(d) : i / count(d)];
    range.low = std::fmin(range.low, numbers[i]);
    range.high = std::fmax(range.high, numbers[i]);
  }
  return ranges;
}

/// Fixed numbers in all rows, which a test then changes.
template <class E>
coded_page<E> filled(int d, int tokens, float x) {
  coded_page<E> c(d, tokens);
  for (E& element : c.elements) element = freekv::from_float<E>(x);
  return c;
}

/// Unequal where one is NaN and the other is not, or the numbers differ.
bool same(double a, double b) { return std::isnan(a) ? std::isnan(b) : a == b; }

}  // namespace

TEST_CASE("all 256 codes of fp8_e4m3 stand for OCP's numbers and come back from them", "[codec]") {
  int nan = 0;
  for (int code = 0; code < 256; ++code) {
    const fp8_e4m3 stored{static_cast<std::uint8_t>(code)};
    const double expected = oracle::fp8_number(code);
    const float x = freekv::to_float(stored);
    INFO("code " << code);
    CHECK(same(static_cast<double>(x), expected));
    if (std::isnan(expected)) {
      ++nan;
      CHECK((freekv::from_float<fp8_e4m3>(x).bits & 0x7f) == 0x7f);
    } else {
      CHECK(std::signbit(x) == (code >= 128));
      CHECK(freekv::from_float<fp8_e4m3>(x).bits == code);
    }
  }
  CHECK(nan == 2);
}

TEST_CASE("numbers become the nearest fp8_e4m3, ties the even one; 448 is the largest", "[codec]") {
  dice d(1);
  std::vector<float> numbers{0.0f,    -0.0f, 448.0f, 463.9f,   464.0f,         480.0f,
                             largest, inf,   1e-45f, 0x1p-10f, 0x1.000002p-10f};
  for (int code = 0; code < 126; ++code) {
    const auto middle = static_cast<float>((oracle::fp8_number(code) + oracle::fp8_number(code + 1)) / 2.0);
    for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, inf)})
      numbers.push_back(x);
  }
  for (int i = 0; i < 20000; ++i) numbers.push_back(d.normal() * std::ldexp(1.0f, d.between(-14, 10)));
  int wrong = 0;
  for (const float x : numbers)
    for (const float signed_x : {x, -x}) {
      const float got = freekv::to_float(freekv::from_float<fp8_e4m3>(signed_x));
      const double expected = oracle::rounded_to_fp8(static_cast<double>(signed_x));
      if (static_cast<double>(got) != expected || std::signbit(got) != std::signbit(signed_x)) ++wrong;
    }
  CHECK(wrong == 0);
  CHECK(std::isnan(freekv::to_float(freekv::from_float<fp8_e4m3>(quiet_nan))));
  CHECK(std::isnan(freekv::to_float(freekv::from_float<fp8_e4m3>(-quiet_nan))));
}

TEST_CASE("fp8_e4m3 has the bits of NVIDIA's conversion", "[codec]") {
  dice d(2);
  int wrong = 0;
  for (int i = 0; i < 100000; ++i) {
    const auto pattern =
        static_cast<std::uint32_t>(d.below(1 << 16)) << 16 | static_cast<std::uint32_t>(d.below(1 << 16));
    const float x = i % 2 ? std::bit_cast<float>(pattern) : d.normal() * std::ldexp(1.0f, d.between(-12, 9));
    if (freekv::from_float<fp8_e4m3>(x).bits != __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)) ++wrong;
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("all 65536 patterns of 16 bits widen in rows, and rows of floats narrow as single ones do",
                   "[codec]", half, bfloat16) {
  constexpr int row = 64;
  int wrong = 0;
  std::vector<float> middles;
  for (std::uint32_t first = 0; first < 65536; first += row) {
    std::array<TestType, row> elements;
    std::array<float, row> wide;
    for (std::uint32_t i = 0; i < row; ++i)
      elements[i] = std::bit_cast<TestType>(static_cast<std::uint16_t>(first + i));
    freekv::widen_row<row>(elements.data(), wide.data());
    for (std::uint32_t i = 0; i < row; ++i) {
      const float expected = freekv::to_float(elements[i]);
      if (std::isnan(expected)
              ? !std::isnan(wide[i])
              : std::bit_cast<std::uint32_t>(wide[i]) != std::bit_cast<std::uint32_t>(expected))
        ++wrong;
      const auto next = freekv::to_float(std::bit_cast<TestType>(static_cast<std::uint16_t>(first + i + 1)));
      const float middle = expected / 2.0f + next / 2.0f;
      for (const float x : {expected, std::nextafter(middle, -inf), middle, std::nextafter(middle, inf)})
        middles.push_back(x);
    }
  }
  dice d(3);
  for (int i = 0; i < 65536; ++i) middles.push_back(d.normal() * std::ldexp(1.0f, d.between(-40, 40)));
  for (std::size_t first = 0; first < middles.size(); first += row) {
    std::array<TestType, row> elements;
    freekv::narrow_row<row>(middles.data() + first, elements.data());
    for (std::size_t i = 0; i < row; ++i) {
      const auto bits = std::bit_cast<std::uint16_t>(elements[i]);
      if (bits != std::bit_cast<std::uint16_t>(freekv::from_float<TestType>(middles[first + i]))) ++wrong;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a codec says how many bytes a page's head takes, a multiple of 4", "[codec]") {
  for (const int d : {8, 64, 80, 128, 256})
    for (const int p : {8, 24, 32, 256})
      for (const std::size_t e : {2u, 4u}) {
        const kv_extent page{p, d};
        const auto n = count(p * d), tokens = count(p), width = count(d);
        INFO("page (" << p << ", " << d << "), elements of " << e);
        CHECK(freekv::identity{}.bytes(page, e) == 2 * n * e);
        CHECK(freekv::cast<bfloat16>{}.bytes(page, e) == 4 * n);
        CHECK(freekv::cast<half>{}.bytes(page, e) == 4 * n);
        CHECK(freekv::cast<fp8_e4m3>{}.bytes(page, e) == 2 * n);
        CHECK(freekv::int8_token{}.bytes(page, e) == 2 * tokens * (width + 4));
        CHECK(freekv::int4_token{}.bytes(page, e) == 2 * tokens * (width / 2 + 4));
        CHECK(freekv::int8_channel{}.bytes(page, e) == tokens * (2 * width + 4) + 4 * width);
        CHECK(freekv::int4_channel{}.bytes(page, e) == tokens * (width + 2 * e) + 2 * width * e);
        each_codec([&](auto codec, codec_kind) { CHECK(codec.bytes(page, e) % 4 == 0); });
      }
}

TEMPLATE_TEST_CASE("keys and values come back as the oracle says, at any stride", "[codec]", float, half,
                   bfloat16) {
  dice d(4);
  for (int trial = 0; trial < some_of(60); ++trial) {
    const auto c = make_coded_page<TestType>(d, coded_head_dims[count(trial) % coded_head_dims.size()]);
    each_codec([&](auto codec, codec_kind kind) {
      const auto back = round_trip(codec, c);
      INFO(codec.name << " of " << c);
      int wrong = 0;
      for (const plane_kind plane : planes) {
        const auto expected = oracle::decoded(kind, plane, c.numbers(plane), c.d);
        const auto got = back.numbers(plane);
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double low = oracle::rounded_to(expected.values[i] - expected.doubt[i], kind_of<TestType>);
          const double high = oracle::rounded_to(expected.values[i] + expected.doubt[i], kind_of<TestType>);
          if (!(low <= got[i] && got[i] <= high)) ++wrong;
        }
      }
      CHECK(wrong == 0);
      CHECK(back.others_untouched());
      if (kind == codec_kind::identity) CHECK(same_bits(back.numbers(), c.numbers()));
    });
  }
}

TEMPLATE_TEST_CASE("a number comes back within half a step of its group and its element's rounding",
                   "[codec]", float, half, bfloat16) {
  dice d(5);
  const double rounding = std::is_same_v<TestType, float>  ? 0x1p-22
                          : std::is_same_v<TestType, half> ? 0x1p-11
                                                           : 0x1p-8;
  for (int trial = 0; trial < some_of(24); ++trial) {
    auto c = make_coded_page<TestType>(d, coded_head_dims[count(trial) % coded_head_dims.size()]);
    each_codec([&](auto codec, codec_kind kind) {
      if (!uses_codes(kind)) return;
      const auto back = round_trip(codec, c);
      for (const plane_kind plane : planes) {
        const auto before = c.numbers(plane), after = back.numbers(plane);
        const bool columns = by_channel(kind, plane);
        const auto ranges = ranges_of(before, c.d, columns);
        int wrong = 0, ends = 0;
        for (std::size_t i = 0; i < before.size(); ++i) {
          const group_range& range = ranges[columns ? i % count(c.d) : i / count(c.d)];
          const double bound = 0.5 * range.step(kind) * (1.0 + 1e-5) + rounding * range.size() +
                               (std::is_same_v<TestType, half> ? 0x1p-25 : 0.0);
          if (!(std::fabs(before[i] - after[i]) <= bound)) ++wrong;
          // Both ends of an asymmetric group are exact.
          if (is_asymmetric(kind) && (before[i] == range.low || before[i] == range.high)) {
            ++ends;
            if (before[i] != after[i]) ++wrong;
          }
        }
        INFO(codec.name << " of " << c);
        CHECK(wrong == 0);
        if (is_asymmetric(kind)) CHECK(ends > 0);
      }
    });
  }
}

TEMPLATE_TEST_CASE("what came back once comes back the same again", "[codec]", float, half, bfloat16) {
  dice d(6);
  for (int trial = 0; trial < some_of(30); ++trial) {
    const auto c = make_coded_page<TestType>(d, coded_head_dims[count(trial) % coded_head_dims.size()]);
    each_codec([&](auto codec, codec_kind kind) {
      const auto once = round_trip(codec, c), twice = round_trip(codec, once);
      INFO(codec.name << " of " << c);
      // 127 * (x / 127) may be x's neighbour among floats, and a scale its own; never among 16 bits.
      const double tolerance = std::is_same_v<TestType, float> && uses_codes(kind) ? 3e-7 : 0.0;
      const auto a = once.numbers(), b = twice.numbers();
      int wrong = 0;
      for (std::size_t i = 0; i < a.size(); ++i)
        if (!(std::fabs(a[i] - b[i]) <= tolerance * std::fabs(a[i]))) ++wrong;
      CHECK(wrong == 0);
    });
  }
}

TEMPLATE_TEST_CASE("stored bytes and what comes back depend on neither stride, and on no other head",
                   "[codec]", float, half, bfloat16) {
  dice d(7);
  for (int trial = 0; trial < some_of(12); ++trial) {
    const auto c = make_coded_page<TestType>(d, coded_head_dims[count(trial) % coded_head_dims.size()]);
    coded_page<TestType> moved(c.d, c.tokens, 4, 2, !c.by_head);
    freekv::head_slice<TestType> to = moved.slice();
    const auto from = c.slice();
    for (int t = 0; t < c.tokens; ++t) {
      std::copy_n(from.key + t * from.stride, c.d, to.key + t * to.stride);
      std::copy_n(from.value + t * from.stride, c.d, to.value + t * to.stride);
    }
    each_codec([&](auto codec, codec_kind) {
      const auto stored = encoded(codec, c);
      INFO(codec.name << " of " << c);
      CHECK(same_bits(stored, encoded(codec, moved)));
      CHECK(same_bits(decoded(codec, c, stored).numbers(), decoded(codec, moved, stored).numbers()));
    });
  }
}

TEMPLATE_TEST_CASE("a NaN or infinity spoils its own group and nothing else", "[codec]", float, half,
                   bfloat16) {
  dice d(8);
  for (int trial = 0; trial < some_of(60); ++trial) {
    auto c = make_coded_page<TestType>(d, coded_head_dims[count(trial) % coded_head_dims.size()]);
    auto odd = c;
    const plane_kind plane = d.one_of({plane_kind::keys, plane_kind::values});
    const int token = d.below(c.tokens), dim = d.below(c.d);
    const float x = d.one_of({quiet_nan, -quiet_nan, inf, -inf});
    odd.at(plane, token, dim) = freekv::from_float<TestType>(x);
    each_codec([&](auto codec, codec_kind kind) {
      const auto before = round_trip(codec, c), after = round_trip(codec, odd);
      INFO(codec.name << " of " << c << ", " << x << " in token " << token << ", dim " << dim);
      int wrong = 0;
      for (const plane_kind p : planes) {
        const auto a = before.numbers(p), b = after.numbers(p);
        for (std::size_t i = 0; i < a.size(); ++i) {
          const bool token_of = i / count(c.d) == count(token), dim_of = i % count(c.d) == count(dim);
          const bool in_group = p == plane && (!uses_codes(kind)     ? token_of && dim_of
                                               : by_channel(kind, p) ? dim_of
                                                                     : token_of);
          if (!in_group) {
            if (a[i] != b[i]) ++wrong;
          } else if (uses_codes(kind) || std::isnan(x)) {
            if (!std::isnan(b[i])) ++wrong;
          } else {
            const double expected = kind == codec_kind::fp8 ? 448.0 : oracle::infinity;
            if (b[i] != std::copysign(expected, static_cast<double>(x))) ++wrong;
          }
        }
      }
      CHECK(wrong == 0);
    });
  }
}

TEMPLATE_TEST_CASE("zeros of both signs, constants and single numbers come back", "[codec]", float, half,
                   bfloat16) {
  each_codec([&](auto codec, codec_kind kind) {
    INFO(codec.name << " of " << freekv::element_name<TestType>);
    for (const float zero : {0.0f, -0.0f})
      for (const double x : round_trip(codec, filled<TestType>(64, 8, zero)).numbers()) {
        CHECK(x == 0.0);
        CHECK(std::signbit(x) == (std::signbit(zero) && !uses_codes(kind)));
      }
    for (const float constant : {1.0f, -0.5f, 3.0f, 96.0f, -224.0f})
      for (const double x : round_trip(codec, filled<TestType>(64, 8, constant)).numbers())
        CHECK(x == static_cast<double>(constant));
    auto c = filled<TestType>(64, 8, 0.0f);
    c.at(plane_kind::keys, 3, 5) = freekv::from_float<TestType>(-2.5f);
    c.at(plane_kind::values, 7, 63) = freekv::from_float<TestType>(1.5f);
    const auto back = round_trip(codec, c);
    CHECK(back.numbers() == c.numbers());
  });
}

TEMPLATE_TEST_CASE("the largest and the smallest numbers come back finite and near", "[codec]", float, half,
                   bfloat16) {
  const bool is_half = std::is_same_v<TestType, half>;
  const float most = is_half ? 65504.0f : std::is_same_v<TestType, bfloat16> ? 0x1.fep127f : largest;
  const double least = is_half ? 0x1p-24 : std::is_same_v<TestType, bfloat16> ? 0x1p-133 : 0x1p-149;
  dice d(9);
  each_codec([&](auto codec, codec_kind kind) {
    if (!uses_codes(kind)) return;
    auto large = filled<TestType>(64, 8, 0.0f), small = large;
    for (const plane_kind plane : planes)
      for (int t = 0; t < 8; ++t)
        for (int i = 0; i < 64; ++i) {
          large.at(plane, t, i) = freekv::from_float<TestType>(most * (2.0f * d.uniform() - 1.0f));
          small.at(plane, t, i) =
              freekv::from_float<TestType>(static_cast<float>(least * d.between(-300, 300)));
        }
    // Each end is in every group.
    for (const plane_kind plane : planes)
      for (int i = 0; i < 64; ++i) {
        large.at(plane, i % 8, i) = freekv::from_float<TestType>(i / 8 % 2 ? -most : most);
        large.at(plane, (i + 1) % 8, i) = freekv::from_float<TestType>(i / 8 % 2 ? most : -most);
      }
    INFO(codec.name << " of " << freekv::element_name<TestType>);
    const double m = static_cast<double>(most);
    const double step = is_asymmetric(kind) ? 2.0 * m / 15.0 : m / (bits_of(kind) == 8 ? 127.0 : 7.0);
    // Half the distance of the largest elements, in steps, at most: 2^-9 * 127 of bf16, 2^-12 * 127 of f16.
    const double rounding = is_half ? 0.04 : std::is_same_v<TestType, bfloat16> ? 0.26 : 1e-4;
    const auto a = large.numbers(), b = round_trip(codec, large).numbers();
    int wrong = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!(std::fabs(a[i] - b[i]) <= (0.5 + rounding) * step)) ++wrong;
    CHECK(wrong == 0);
    // A scale of the smallest floats is a multiple of 2^-149 itself, so off by up to half of one for each
    // code.
    const double coarse = std::is_same_v<TestType, float> ? 64.0 : 1.0;
    const auto u = small.numbers(), v = round_trip(codec, small).numbers();
    const double small_step = is_asymmetric(kind) ? 600.0 / 15.0 : 300.0 / (bits_of(kind) == 8 ? 127.0 : 7.0);
    for (std::size_t i = 0; i < u.size(); ++i)
      if (!(std::fabs(u[i] - v[i]) <= (0.5 * small_step + coarse) * least)) ++wrong;
    CHECK(wrong == 0);
  });
}

TEST_CASE("int8_token stores codes with 127 added, then a scale a token; keys before values", "[codec]") {
  auto c = filled<float>(64, 8, 0.0f);
  for (int i = 0; i < 64; ++i) c.at(plane_kind::keys, 2, i) = static_cast<float>(2 * i - 1);
  c.at(plane_kind::keys, 2, 0) = 127.0f;
  c.at(plane_kind::values, 0, 1) = -63.5f;
  const auto stored = encoded(freekv::int8_token{}, c);
  const auto code = [&](std::size_t at) { return std::to_integer<int>(stored[at]); };
  const auto scale = [&](std::size_t at) {
    float x;
    std::memcpy(&x, stored.data() + at, sizeof x);
    return x;
  };
  CHECK(code(0) == 127);
  CHECK(code(2 * 64) == 254);
  CHECK(code(2 * 64 + 1) == 128);
  CHECK(code(2 * 64 + 63) == 252);
  CHECK(scale(8 * 64) == 0.0f);
  CHECK(scale(8 * 64 + 2 * 4) == 1.0f);
  const std::size_t values = 8 * 64 + 8 * 4;
  CHECK(code(values + 1) == 0);
  CHECK(code(values + 2) == 127);
  CHECK(scale(values + 8 * 64) == 0.5f);
}

TEST_CASE("codes of 4 bits lie two a byte, the first in the lower bits", "[codec]") {
  auto c = filled<bfloat16>(64, 8, 0.0f);
  const float keys[] = {7.0f, -7.0f, 1.0f, -1.0f};
  for (int i = 0; i < 4; ++i) c.at(plane_kind::keys, 1, i) = freekv::from_float<bfloat16>(keys[i]);
  const auto stored = encoded(freekv::int4_token{}, c);
  CHECK(std::to_integer<int>(stored[0]) == 0x77);
  CHECK(std::to_integer<int>(stored[32]) == 14);
  CHECK(std::to_integer<int>(stored[33]) == (8 | 6 << 4));
  // A channel from 0 to 15, and one from -3 to 2: low ends of all channels, then high ends, as elements.
  c = filled<bfloat16>(64, 8, 0.0f);
  for (int t = 0; t < 8; ++t)
    c.at(plane_kind::keys, t, 0) = freekv::from_float<bfloat16>(t < 7 ? 2.0f * static_cast<float>(t) : 15.0f);
  c.at(plane_kind::keys, 0, 1) = freekv::from_float<bfloat16>(-3.0f);
  c.at(plane_kind::keys, 1, 1) = freekv::from_float<bfloat16>(2.0f);
  const auto channels = encoded(freekv::int4_channel{}, c);
  const auto element = [&](std::size_t at) {
    bfloat16 x;
    std::memcpy(&x, channels.data() + at, sizeof x);
    return freekv::to_float(x);
  };
  CHECK(std::to_integer<int>(channels[0]) == 0x00);
  CHECK(std::to_integer<int>(channels[32]) == (2 | 15 << 4));
  CHECK(std::to_integer<int>(channels[2 * 32]) == (4 | 9 << 4));  // 0 of -3 .. 2
  CHECK(std::to_integer<int>(channels[7 * 32]) == (15 | 9 << 4));
  CHECK(element(8 * 32) == 0.0f);
  CHECK(element(8 * 32 + 2) == -3.0f);
  CHECK(element(8 * 32 + 128) == 15.0f);
  CHECK(element(8 * 32 + 128 + 2) == 2.0f);
}

TEMPLATE_TEST_CASE("fewer tokens than a page are stored as those alone", "[codec]", float, half, bfloat16) {
  dice d(10);
  for (int trial = 0; trial < some_of(20); ++trial) {
    const auto whole = make_coded_page<TestType>(d, 64);
    coded_page<TestType> part(64, d.between(1, whole.tokens));
    for (const plane_kind plane : planes)
      for (int t = 0; t < part.tokens; ++t)
        for (int i = 0; i < 64; ++i) part.at(plane, t, i) = coded_page<TestType>(whole).at(plane, t, i);
    each_codec([&](auto codec, codec_kind) {
      std::vector<std::byte> stored(codec.bytes({whole.tokens, 64}, sizeof(TestType)), std::byte{0});
      codec.template encode<64>(freekv::scalar_team{}, whole.slice(), part.tokens, stored.data());
      const auto alone = encoded(codec, part);
      REQUIRE(alone.size() <= stored.size());
      INFO(codec.name << " of " << part.tokens << " tokens of " << whole);
      CHECK(std::equal(alone.begin(), alone.end(), stored.begin()));
      CHECK(std::all_of(stored.begin() + static_cast<long>(alone.size()), stored.end(),
                        [](std::byte b) { return b == std::byte{0}; }));
    });
  }
}

TEMPLATE_TEST_CASE("instruction sets store and read alike", "[codec]", float, half, bfloat16) {
  dice d(11);
  for (int trial = 0; trial < 5; ++trial) {
    const auto c = make_coded_page<TestType>(d, 128);
    each_codec([&](auto codec, codec_kind) {
      const auto expected = encoded(codec, c);
      const auto expected_numbers = decoded(codec, c, expected).numbers();
      for (const executor on : executors()) {
        auto stored = expected;
        auto back = c;
        run_on(on, [&](auto) {
          codec.template encode<128>(freekv::scalar_team{}, c.slice(), c.tokens, stored.data());
          codec.template decode<128>(freekv::scalar_team{}, stored.data(), c.tokens, {0, c.tokens},
                                     back.slice());
        });
        INFO(codec.name << " of " << c << " on " << on);
        CHECK(same_bits(stored, expected));
        // Of a sum of products avx2 may round once where others round twice.
        const auto numbers = back.numbers();
        int wrong = 0;
        for (std::size_t i = 0; i < numbers.size(); ++i)
          if (!is_near(numbers[i], expected_numbers[i],
                       (std::is_same_v<TestType, bfloat16> ? 0x1p-7
                        : std::is_same_v<TestType, half>   ? 0x1p-10
                                                           : 1e-6) *
                               std::fabs(numbers[i]) +
                           1e-5))
            ++wrong;
        CHECK(wrong == 0);
      }
    });
  }
}

TEST_CASE("a codec that stores elements as they are says so", "[codec]") {
  using freekv::stores_elements;
  STATIC_REQUIRE(stores_elements<freekv::identity, float>);
  STATIC_REQUIRE(stores_elements<freekv::identity, bfloat16>);
  STATIC_REQUIRE(stores_elements<freekv::cast<bfloat16>, bfloat16>);
  STATIC_REQUIRE_FALSE(stores_elements<freekv::cast<bfloat16>, half>);
  STATIC_REQUIRE_FALSE(stores_elements<freekv::cast<fp8_e4m3>, half>);
  STATIC_REQUIRE_FALSE(stores_elements<freekv::int8_token, float>);
  // NaN with a payload is not converted.
  auto c = filled<half>(64, 8, 1.0f);
  c.at(plane_kind::keys, 0, 0) = std::bit_cast<half>(std::uint16_t{0x7d23});
  CHECK(same_bits(round_trip(freekv::cast<half>{}, c).elements, c.elements));
  CHECK(same_bits(round_trip(freekv::identity{}, c).elements, c.elements));
  CHECK(same_bits(encoded(freekv::identity{}, c), encoded(freekv::cast<half>{}, c)));
}
