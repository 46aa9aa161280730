// Every team of this machine against one lane, and its arithmetic against float64.

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../catch.hpp"
#include "../oracle/codec.hpp"
#include "rows.hpp"

namespace {

using namespace tests;
using freekv::bfloat16;
using freekv::half;

const std::vector<float> specials{0.0f, -0.0f, 1.0f,     -1.0f,     1e-45f,     -1e-45f, 1.17549435e-38f,
                                  2.5f, inf,   -inf,     quiet_nan, -quiet_nan, largest, -largest,
                                  3.0f, -3.0f, 0.33333f, 1e30f,     -1e30f};

/// Both NaN, or the same bits.
bool same_number(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

/// `result[i] = operation(team, pack of a[i..], pack of b[i..])` on any team.
template <class Operation>
std::vector<float> elementwise(executor on, const std::vector<float>& a, const std::vector<float>& b,
                               const Operation& operation) {
  std::vector<float> result(a.size());
  run_on(on, [&](auto team) {
    for (std::size_t i = 0; i < a.size(); i += decltype(team)::width)
      team.store(&result[i], operation(team, team.load(&a[i]), team.load(&b[i])));
  });
  return result;
}

/// All pairs of specials, each pair in every one of eight lanes.
void special_pairs(std::vector<float>& a, std::vector<float>& b) {
  dice d(7);
  for (const float x : specials)
    for (const float y : specials)
      for (int lane = 0; lane < 8; ++lane)
        for (int i = 0; i < 8; ++i) {
          a.push_back(i == lane ? x : d.normal());
          b.push_back(i == lane ? y : d.normal());
        }
}

/// How many steps of float32 `result` is from `exact`, measured where `exact` lies.
double ulps(float result, double exact) {
  const double magnitude = std::fabs(exact);
  int exponent = 0;
  std::frexp(std::max(magnitude, static_cast<double>(std::numeric_limits<float>::min())), &exponent);
  return std::fabs(static_cast<double>(result) - exact) / std::ldexp(1.0, exponent - 24);
}

}  // namespace

TEST_CASE("maximum and minimum are one lane's, NaN and infinities in every lane included", "[team]") {
  std::vector<float> a, b;
  special_pairs(a, b);
  const auto maximum = [](auto team, const auto& x, const auto& y) { return team.maximum(x, y); };
  const auto minimum = [](auto team, const auto& x, const auto& y) { return team.minimum(x, y); };
  for (const executor on : executors()) {
    const auto high = elementwise(on, a, b, maximum), low = elementwise(on, a, b, minimum);
    int wrong = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (std::isnan(a[i]) || std::isnan(b[i])) {
        if (!std::isnan(high[i]) || !std::isnan(low[i])) ++wrong;
      } else if (high[i] != std::max(a[i], b[i]) || low[i] != std::min(a[i], b[i])) {
        ++wrong;
      }
    }
    INFO(on);
    CHECK(wrong == 0);
    CHECK(same_bits(high, elementwise(one_lane, a, b, maximum)));
    CHECK(same_bits(low, elementwise(one_lane, a, b, minimum)));
  }
}

TEST_CASE("select_greater takes the second choice where either side is NaN", "[team]") {
  std::vector<float> a, b;
  special_pairs(a, b);
  for (const executor on : executors()) {
    const auto chosen = elementwise(on, a, b, [](auto team, const auto& x, const auto& y) {
      using pack = typename decltype(team)::pack;
      return team.select_greater(x, y, pack(1.0f), pack(2.0f));
    });
    int wrong = 0;
    for (std::size_t i = 0; i < a.size(); ++i) wrong += chosen[i] != (a[i] > b[i] ? 1.0f : 2.0f);
    INFO(on);
    CHECK(wrong == 0);
  }
}

TEST_CASE("packs add, subtract, multiply and fill elementwise", "[team]") {
  std::vector<float> a, b;
  special_pairs(a, b);
  for (const executor on : executors()) {
    const auto sums = elementwise(on, a, b, [](auto, const auto& x, const auto& y) { return x + y; });
    const auto rests = elementwise(on, a, b, [](auto, const auto& x, const auto& y) { return x - y; });
    const auto products = elementwise(on, a, b, [](auto, const auto& x, const auto& y) { return x * y; });
    const auto filled = elementwise(
        on, a, b, [](auto team, const auto&, const auto&) { return typename decltype(team)::pack(0.1f); });
    int wrong = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      wrong += !same_number(sums[i], a[i] + b[i]);
      wrong += !same_number(rests[i], a[i] - b[i]);
      wrong += !same_number(products[i], a[i] * b[i]);
      wrong += filled[i] != 0.1f;
    }
    INFO(on);
    CHECK(wrong == 0);
  }
}

TEST_CASE("sum and max see every lane once", "[team]") {
  for (const executor on : executors()) {
    INFO(on);
    run_on(on, [&](auto team) {
      constexpr int width = decltype(team)::width;
      std::array<float, width> lanes;
      for (int i = 0; i < width; ++i) lanes[count(i)] = static_cast<float>(1 << i);
      CHECK(team.sum(team.load(lanes.data())) == static_cast<float>((1 << width) - 1));
      CHECK(team.max(team.load(lanes.data())) == static_cast<float>(1 << (width - 1)));
      for (int lane = 0; lane < width; ++lane)
        for (const float x : specials) {
          lanes.fill(-2.0f);
          lanes[count(lane)] = x;
          const float sum = team.sum(team.load(lanes.data()));
          const float max = team.max(team.load(lanes.data()));
          CHECK(is_near(sum, x - 2.0f * (width - 1), 1e-6 * std::fabs(static_cast<double>(x))));
          CHECK(same_number(max, width == 1 || std::isnan(x) || x > -2.0f ? x : -2.0f));
          lanes.fill(x);
          CHECK(same_number(team.max(team.load(lanes.data())), x));
        }
      // A NaN in one lane hides no other one and is hidden by none.
      for (int lane = 0; lane < width; ++lane)
        for (int other = 0; other < width; ++other) {
          lanes.fill(-inf);
          lanes[count(other)] = inf;
          lanes[count(lane)] = quiet_nan;
          CHECK(std::isnan(team.max(team.load(lanes.data()))));
          CHECK(std::isnan(team.sum(team.load(lanes.data()))));
        }
    });
  }
}

TEST_CASE("instruction sets add the lanes of a pack in one order", "[team]") {
  dice d(1);
  const auto numbers = normals(d, 8000);
  std::vector<std::vector<float>> sums;
  for (const executor on : executors()) {
    if (on == one_lane) continue;
    sums.emplace_back();
    run_on(on, [&](auto team) {
      for (std::size_t i = 0; i < numbers.size(); i += 8) {
        if constexpr (decltype(team)::width == 8) sums.back().push_back(team.sum(team.load(&numbers[i])));
      }
    });
  }
  for (const auto& other : sums) CHECK(same_bits(other, sums.front()));
}

TEST_CASE("sum_each sums each pack into its own lane", "[team]") {
  dice d(2);
  for (const executor on : executors()) {
    INFO(on);
    run_on(on, [&](auto team) {
      constexpr int width = decltype(team)::width;
      using pack = typename decltype(team)::pack;
      std::array<float, width * width> numbers;
      std::array<float, width> result;
      pack packs[width];
      const auto sum_each = [&] {
        for (int i = 0; i < width; ++i) packs[i] = team.load(&numbers[count(i * width)]);
        team.store(result.data(), team.sum_each(packs));
      };
      // Small integers add exactly in any order: lane i must be pack i's sum and hold every one of its lanes.
      for (int i = 0; i < width * width; ++i)
        numbers[count(i)] = static_cast<float>((i / width + 1) * 1000 + (1 << i % width));
      sum_each();
      for (int i = 0; i < width; ++i)
        CHECK(result[count(i)] == static_cast<float>((i + 1) * 1000 * width + (1 << width) - 1));
      for (float& x : numbers) x = d.normal();
      sum_each();
      for (int i = 0; i < width; ++i)
        CHECK(is_near(result[count(i)], team.sum(team.load(&numbers[count(i * width)])), 1e-5));
      // What is not finite stays in its lane.
      for (int at = 0; at < width * width; ++at) {
        const float kept = numbers[count(at)];
        numbers[count(at)] = at % 2 == 0 ? quiet_nan : inf;
        sum_each();
        for (int i = 0; i < width; ++i) CHECK(std::isfinite(result[count(i)]) == (i != at / width));
        numbers[count(at)] = kept;
      }
    });
  }
}

TEST_CASE("exp is within 2 ulp over the whole range", "[team]") {
  std::vector<float> x;
  // Every 2999th float of both signs up to 120: all exponents, and all of the range that matters densely.
  const auto last = std::bit_cast<std::uint32_t>(120.0f);
  for (std::uint32_t bits = 0; bits < last; bits += 2999)
    for (const float sign : {1.0f, -1.0f}) x.push_back(sign * std::bit_cast<float>(bits));
  for (int i = -1000; i <= 1000; ++i) x.push_back(static_cast<float>(i) * 0.0866434f);  // near k/8 * ln 2
  while (x.size() % 8 != 0) x.push_back(0.0f);
  for (const executor on : executors()) {
    INFO(on);
    const auto result =
        elementwise(on, x, x, [](auto team, const auto& p, const auto&) { return team.exp(p); });
    double worst = 0.0;
    int wrong = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp(static_cast<double>(x[i]));
      if (x[i] > 88.722839f)
        wrong += result[i] != inf;
      else if (x[i] < -87.336544f)  // results that are subnormal, or 0
        wrong += !(result[i] >= 0.0f && result[i] <= std::numeric_limits<float>::min());
      else
        worst = std::max(worst, ulps(result[i], exact));
    }
    CHECK(wrong == 0);
    CHECK(worst <= 2.0);
  }
}

TEST_CASE("bounded_exp has the bits of exp up to 88, and NaN", "[team]") {
  std::vector<float> x{quiet_nan, -inf, -0.0f, 0.0f, -largest, 88.0f, -87.336544f, -87.33655f};
  const auto last = std::bit_cast<std::uint32_t>(120.0f);
  for (std::uint32_t bits = 0; bits < last; bits += 2999)
    for (const float sign : {1.0f, -1.0f})
      if (const float number = sign * std::bit_cast<float>(bits); number <= 88.0f) x.push_back(number);
  while (x.size() % 8 != 0) x.push_back(0.0f);
  for (const executor on : executors()) {
    INFO(on);
    const auto exact =
        elementwise(on, x, x, [](auto team, const auto& p, const auto&) { return team.exp(p); });
    const auto got =
        elementwise(on, x, x, [](auto team, const auto& p, const auto&) { return team.bounded_exp(p); });
    int wrong = 0;
    for (std::size_t i = 0; i < x.size(); ++i) wrong += !same_number(got[i], exact[i]);
    CHECK(wrong == 0);
  }
}

TEST_CASE("halves of four lanes are loaded, exchanged, and stored side by side", "[team]") {
  std::array<float, 32> numbers;
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i);
  int teams = 0;
  for (const executor on : executors()) {
    INFO(on);
    run_on(on, [&](auto team) {
      if constexpr (freekv::team_of_halves<decltype(team)>) {
        std::array<float, 8> got;
        team.store(got.data(), team.load_halves(&numbers[3], &numbers[20]));
        CHECK(got == std::array{3.0f, 4.0f, 5.0f, 6.0f, 20.0f, 21.0f, 22.0f, 23.0f});
        const typename decltype(team)::pack four[4] = {team.load(&numbers[0]), team.load(&numbers[8]),
                                                       team.load(&numbers[16]), team.load(&numbers[24])};
        std::array<float, 32> by_four, want;
        team.store_by_four(by_four.data(), four);
        for (std::size_t i = 0; i < 8; ++i)
          for (std::size_t g = 0; g < 4; ++g) want[4 * i + g] = numbers[8 * g + i];
        CHECK(by_four == want);
        typename decltype(team)::pack again[4];
        team.load_by_four(by_four.data(), again);
        for (std::size_t g = 0; g < 4; ++g) {
          team.store(got.data(), again[g]);
          CHECK(std::equal(got.begin(), got.end(), &numbers[8 * g]));
        }
        ++teams;
      }
    });
  }
  CHECK(teams == static_cast<int>(executors().size()) - 1);
}

TEST_CASE("more lanes repeat, add up and raise e to what eight do", "[team]") {
  std::vector<float> x(32);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) * 3.7f - 100.0f;
  x[5] = quiet_nan;
  x[6] = -inf;
  int teams = 0;
  for (const executor on : executors()) {
    INFO(on);
    run_on(on, [&](auto team) {
      if constexpr (freekv::team_of_halves<decltype(team)>) {
        using wide = typename freekv::detail::wide_team<decltype(team)>::type;
        constexpr int width = wide::width, narrow = decltype(team)::width;
        std::array<float, width> repeated, powers, differences;
        std::array<float, narrow> eight, folded;
        std::array<float, width> want_powers, want_differences;
        const auto first = team.load(x.data() + 8);
        wide{}.store(repeated.data(), wide{}.repeat(first));
        wide{}.store(powers.data(), wide{}.bounded_exp(wide{}.load(x.data())));
        wide{}.store(differences.data(), wide{}.load(x.data()) - wide{}.load(x.data() + 16));
        team.store(folded.data(), wide{}.fold(wide{}.load(x.data() + 16)));
        for (int i = 0; i < width; i += narrow) {
          team.store(want_powers.data() + i, team.bounded_exp(team.load(x.data() + i)));
          team.store(want_differences.data() + i, team.load(x.data() + i) - team.load(x.data() + 16 + i));
        }
        for (int i = 0; i < width; ++i) CHECK(repeated[count(i)] == x[count(8 + i % narrow)]);
        for (int i = 0; i < narrow; ++i) {
          eight[count(i)] = x[count(16 + i)];
          for (int more = narrow; more < width; more += narrow) eight[count(i)] += x[count(16 + more + i)];
        }
        CHECK(same_bits(powers, want_powers));
        CHECK(same_bits(differences, want_differences));
        CHECK(same_bits(folded, eight));
        ++teams;
      }
    });
  }
  CHECK(teams == static_cast<int>(executors().size()) - 1);
}

TEST_CASE("exp of what is not finite, and of zero, in every lane", "[team]") {
  for (const executor on : executors()) {
    INFO(on);
    for (std::size_t lane = 0; lane < 8; ++lane)
      for (const auto& [x, expected] : {std::pair{0.0f, 1.0f},
                                        {-0.0f, 1.0f},
                                        {inf, inf},
                                        {-inf, 0.0f},
                                        {quiet_nan, quiet_nan},
                                        {-quiet_nan, quiet_nan},
                                        {largest, inf},
                                        {-largest, 0.0f},
                                        {1e-45f, 1.0f},
                                        {200.0f, inf},
                                        {-200.0f, 0.0f}}) {
        std::vector<float> pack(8, -1.0f);
        pack[lane] = x;
        const auto result =
            elementwise(on, pack, pack, [](auto team, const auto& p, const auto&) { return team.exp(p); });
        for (std::size_t i = 0; i < 8; ++i)
          CHECK((i == lane ? same_number(result[i], expected) : ulps(result[i], std::exp(-1.0)) <= 2.0));
      }
  }
}

TEST_CASE("tanh is to about 2 ulp over the whole range", "[team]") {
  std::vector<float> x;
  for (std::uint32_t bits = 0; bits < 0x7f800000u; bits += 2999)
    for (const float sign : {1.0f, -1.0f}) x.push_back(sign * std::bit_cast<float>(bits));
  for (int i = -2000; i <= 2000; ++i) {  // densely where one form ends, and where the result becomes 1
    x.push_back(0.625f + static_cast<float>(i) * 0x1p-20f);
    x.push_back(9.0f + static_cast<float>(i) * 1e-3f);
  }
  while (x.size() % 8 != 0) x.push_back(0.0f);
  for (const executor on : executors()) {
    INFO(on);
    const auto result =
        elementwise(on, x, x, [](auto team, const auto& p, const auto&) { return team.tanh(p); });
    double worst = 0.0;
    int beyond = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      worst = std::max(worst, ulps(result[i], std::tanh(static_cast<double>(x[i]))));
      beyond += !(std::fabs(result[i]) <= 1.0f) || std::signbit(result[i]) != std::signbit(x[i]);
    }
    CHECK(worst <= 2.1);  // the C library's, which one lane takes, is 2.03
    CHECK(beyond == 0);
  }
}

TEST_CASE("tanh of what is not finite, and of zero, in every lane", "[team]") {
  for (const executor on : executors()) {
    INFO(on);
    for (std::size_t lane = 0; lane < 8; ++lane)
      for (const auto& [x, expected] : {std::pair{0.0f, 0.0f},
                                        {-0.0f, -0.0f},
                                        {inf, 1.0f},
                                        {-inf, -1.0f},
                                        {quiet_nan, quiet_nan},
                                        {-quiet_nan, quiet_nan},
                                        {largest, 1.0f},
                                        {-largest, -1.0f},
                                        {1e-45f, 1e-45f}}) {
        std::vector<float> pack(8, -1.0f);
        pack[lane] = x;
        const auto result =
            elementwise(on, pack, pack, [](auto team, const auto& p, const auto&) { return team.tanh(p); });
        for (std::size_t i = 0; i < 8; ++i)
          CHECK((i == lane ? same_number(result[i], expected) : ulps(result[i], std::tanh(-1.0)) <= 2.0));
      }
  }
}

TEST_CASE("log is within 2 ulp over the whole range", "[team]") {
  std::vector<float> x;
  for (std::uint32_t bits = 1; bits < 0x7f800000u; bits += 2999) x.push_back(std::bit_cast<float>(bits));
  // Around 1 the result passes through 0, around sqrt(1/2) and sqrt(2) the exponent changes.
  for (const float centre : {1.0f, 0.70710678f, 1.41421356f, 1.17549435e-38f})
    for (int i = -2000; i <= 2000; ++i)
      x.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(centre) + static_cast<std::uint32_t>(i)));
  while (x.size() % 8 != 0) x.push_back(1.0f);
  for (const executor on : executors()) {
    INFO(on);
    const auto result =
        elementwise(on, x, x, [](auto team, const auto& p, const auto&) { return team.log(p); });
    double worst = 0.0;
    for (std::size_t i = 0; i < x.size(); ++i)
      worst = std::max(worst, ulps(result[i], std::log(static_cast<double>(x[i]))));
    CHECK(worst <= 2.0);
  }
}

TEST_CASE("log of zero, one, infinity and NaN in every lane", "[team]") {
  for (const executor on : executors()) {
    INFO(on);
    for (std::size_t lane = 0; lane < 8; ++lane)
      for (const auto& [x, expected] :
           {std::pair{0.0f, -inf}, {-0.0f, -inf}, {1.0f, 0.0f}, {inf, inf}, {quiet_nan, quiet_nan}}) {
        std::vector<float> pack(8, 3.0f);
        pack[lane] = x;
        const auto result =
            elementwise(on, pack, pack, [](auto team, const auto& p, const auto&) { return team.log(p); });
        for (std::size_t i = 0; i < 8; ++i)
          CHECK((i == lane ? same_number(result[i], expected) : ulps(result[i], std::log(3.0)) <= 2.0));
      }
  }
}

TEMPLATE_TEST_CASE("all 65536 patterns of 16 bits widen to the number they stand for", "[team]", half,
                   bfloat16) {
  std::vector<TestType> all(65536);
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    all[bits] = std::bit_cast<TestType>(pattern);
  }
  for (const executor on : executors()) {
    INFO(on);
    std::vector<float> wide(all.size());
    run_on(on, [&](auto team) { team.widen(all.data(), wide.data(), 65536); });
    int wrong = 0;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const bool negative = (bits & 0x8000u) != 0;
      float expected = 0.0f;
      if constexpr (std::is_same_v<TestType, half>) {
        const int exponent = static_cast<int>(bits >> 10 & 31u);
        const auto mantissa = static_cast<float>(bits & 1023u);
        expected = exponent == 31  ? (mantissa == 0.0f ? inf : quiet_nan)
                   : exponent == 0 ? std::ldexp(mantissa, -24)
                                   : std::ldexp(1024.0f + mantissa, exponent - 25);
        if (negative) expected = -expected;
      } else {
        expected = std::bit_cast<float>(bits << 16);
      }
      if (!same_number(wide[bits], expected)) ++wrong;
      if (!std::isnan(expected) && std::signbit(wide[bits]) != negative) ++wrong;
      if (!same_number(wide[bits], freekv::to_float(all[bits]))) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("all 256 patterns of fp8 widen to the number they stand for, in every lane", "[team]") {
  std::vector<freekv::fp8_e4m3> all;
  for (int i = 0; i < 256 * 17; ++i) all.push_back({static_cast<std::uint8_t>(i / 17)});
  for (const executor on : executors()) {
    INFO(on);
    std::vector<float> wide(all.size()), loaded(all.size());
    run_on(on, [&](auto team) {
      team.widen(all.data(), wide.data(), 256 * 17);
      using wide_type = typename freekv::detail::wide_team<decltype(team)>::type;
      for (std::size_t i = 0; i < all.size(); i += wide_type::width)
        wide_type{}.store(&loaded[i], wide_type{}.load(&all[i]));
    });
    int wrong = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const auto expected = static_cast<float>(oracle::fp8_number(all[i].bits));
      for (const float got : {wide[i], loaded[i]})
        if (!same_number(got, expected) || (!std::isnan(expected) && std::signbit(got) != all[i].bits / 128))
          ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEMPLATE_TEST_CASE("widen writes n numbers and no more, at any alignment of its input", "[team]", float, half,
                   bfloat16, freekv::fp8_e4m3) {
  dice d(3);
  const auto elements = stored_as<TestType>(normals(d, 300));
  const auto expected = values_of(elements);
  for (const executor on : executors())
    for (const int n : {8, 16, 24, 72, 80, 256})
      for (const std::size_t first : {0u, 1u, 3u, 8u}) {
        std::vector<float> wide(count(n) + 16, -7.0f);
        run_on(on, [&](auto team) { team.widen(elements.data() + first, wide.data(), n); });
        INFO(on << ", " << n << " from element " << first);
        CHECK(std::equal(wide.begin(), wide.begin() + n, expected.begin() + static_cast<long>(first)));
        CHECK(std::all_of(wide.begin() + n, wide.end(), [](float x) { return x == -7.0f; }));
      }
}

TEST_CASE("codes of 2, 3, 4 and 8 bits read back, the first in the lowest bits", "[team]") {
  dice d(4);
  freekv::unroll<4>([&](auto which) {
    constexpr int bits = std::array{2, 3, 4, 8}[which];
    constexpr int codes = 8 * 64;
    std::vector<float> expected;
    // Exactly 2 bytes behind the codes, as the team may read that far and a sanitizer sees further.
    std::vector<std::uint8_t> stream(codes / 8 * bits + 2, 0xff);
    std::fill(stream.begin(), stream.end() - 2, std::uint8_t{0});
    for (int i = 0; i < codes; ++i) {
      const int code = i < 8 ? (1 << bits) - 1 : d.below(1 << bits);
      expected.push_back(static_cast<float>(code));
      for (int bit = 0; bit < bits; ++bit) {
        const int at = i * bits + bit;
        stream[count(at / 8)] |= static_cast<std::uint8_t>((code >> bit & 1) << at % 8);
      }
    }
    for (const executor on : executors()) {
      std::vector<float> read(expected.size());
      run_on(on, [&](auto team) {
        for (int i = 0; i < codes; i += decltype(team)::width)
          team.store(&read[count(i)], team.template load_codes<bits>(stream.data(), i));
      });
      INFO(on << ", " << bits << " bits");
      CHECK(read == expected);
    }
  });
}

TEST_CASE("a pack is as aligned as the register it is loaded to, so that it may be kept in any array",
          "[team]") {
  run_on(best(), [](auto team) {
    using pack = typename decltype(team)::pack;
    CHECK(alignof(pack) == sizeof(pack));
  });
}

TEST_CASE("a team of the host is one thread", "[team]") {
  for (const executor on : executors())
    run_on(on, [](auto team) {
      CHECK(team.lane() == 0);
      CHECK(team.lanes() == 1);
      team.sync();
    });
}

TEST_CASE("instruction sets have names, and the best one is one that this machine runs", "[team]") {
  CHECK(freekv::host::name_of(freekv::host::isa::baseline) == "baseline");
  CHECK(freekv::host::name_of(freekv::host::isa::avx2) == "avx2+fma+f16c");
  CHECK(freekv::host::name_of(freekv::host::isa::avx512) == "avx512f+vl+bw+dq");
  int calls = 0;
  freekv::host::with_team(freekv::host::best_isa(), [&](auto team) {
    std::array<float, 8> ones;
    ones.fill(1.0f);
    calls += static_cast<int>(team.sum(team.load(ones.data())));
  });
  CHECK(calls == 8);
}
