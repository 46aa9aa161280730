// How far queries have turned, and which heads that flags.

#include <freekv/policies/correction.hpp>
#include <freekv/policies/detail/query_drift.hpp>
#include <vector>

#include "../catch.hpp"
#include "rows.hpp"

namespace {

using namespace tests;

struct query_pair {
  int group = 1, d = 8;
  std::vector<float> now{}, before{};
};

freekv::detail::query_drift drift_on(executor on, const query_pair& q) {
  freekv::detail::query_drift drift;
  run_on(on, [&](auto team) {
    drift = freekv::detail::drift_of(team, {q.now.data(), q.group, q.d}, {q.before.data(), q.group, q.d});
  });
  return drift;
}

bool flags_on(executor on, float tau, const query_pair& q) {
  bool flagged = false;
  const auto policy = freekv::cosine_drift{.tau = tau}.at(0);
  run_on(on, [&](auto team) {
    flagged = policy.flags(team, {{q.now.data(), q.group, q.d}, {q.before.data(), q.group, q.d}});
  });
  return flagged;
}

/// One query head of dimension 8 with the given number in every place.
query_pair constant(float now, float before) {
  return {.now = std::vector<float>(8, now), .before = std::vector<float>(8, before)};
}

}  // namespace

TEST_CASE("drift is the oracle's mean cosine for every group size and head_dim", "[drift]") {
  dice d(1);
  int flagged = 0, kept = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    query_pair q{d.one_of({1, 2, 3, 4, 5, 7, 8, 16}), d.one_of({8, 24, 64, 72, 80, 96, 128, 192, 256})};
    q.now = normals(d, count(q.group * q.d), d.one_of({1e-9f, 1.0f, 1e12f}));
    q.before = q.now;
    const float turn = d.one_of({0.0f, 0.1f, 0.5f, 3.0f});
    for (float& x : q.before) x += turn * std::fabs(x) * d.normal();
    const float tau = d.one_of({0.5f, 0.8f, 0.9f, 0.99f});
    const auto expected = oracle::drift(q.now, q.before, q.group, static_cast<double>(tau));
    for (const executor on : executors()) {
      const auto drift = drift_on(on, q);
      CHECK(drift.defined);
      CHECK(is_near(drift.cosine, expected.pooled, 1e-5));
      if (std::fabs(expected.pooled - static_cast<double>(tau)) > 1e-5) {
        CHECK(flags_on(on, tau, q) == expected.flagged);
        ++(expected.flagged ? flagged : kept);
      }
    }
  }
  CHECK(flagged > 500);
  CHECK(kept > 500);
}

TEST_CASE("a zero, overflowing, underflowing or NaN query of any head leaves the drift undefined",
          "[drift]") {
  dice d(2);
  for (const float bad : {0.0f, 1e30f, 1e-30f, inf, -inf, quiet_nan})
    for (const int group : {1, 2, 5})
      for (int head = 0; head < group; ++head)
        for (const bool is_now : {true, false})
          for (const executor on : executors()) {
            query_pair q{group, 24};
            q.now = q.before = normals(d, count(group * 24));
            auto& turned = is_now ? q.now : q.before;
            std::fill_n(turned.begin() + head * 24, 24, bad);
            INFO(bad << " in head " << head << " of " << group << (is_now ? " now" : " before"));
            CHECK_FALSE(drift_on(on, q).defined);
            // Even if every cosine passes.
            CHECK(flags_on(on, -2.0f, q));
            CHECK(oracle::drift(q.now, q.before, group, -2.0).flagged);
          }
}

TEST_CASE("one element that is not finite is enough", "[drift]") {
  dice d(3);
  for (const float bad : {inf, -inf, quiet_nan})
    for (int at = 0; at < 16; ++at)
      for (const executor on : executors()) {
        query_pair q{1, 16};
        q.now = q.before = normals(d, 16);
        q.now[count(at)] = bad;
        CHECK_FALSE(drift_on(on, q).defined);
      }
}

TEST_CASE("norms near the ends of the range are defined as long as float32 holds them", "[drift]") {
  for (const executor on : executors()) {
    CHECK(drift_on(on, constant(6e18f, 1e-15f)).defined);
    CHECK(drift_on(on, constant(6e18f, 6e18f)).defined);        // norm 1.7e19, product 2.9e38
    CHECK_FALSE(drift_on(on, constant(7e18f, 1.0f)).defined);   // 8 * 4.9e37 overflows
    CHECK_FALSE(drift_on(on, constant(1.0f, 1e-24f)).defined);  // its square is 0
    CHECK(drift_on(on, constant(-2.0f, 3.0f)).cosine == Approx(-1.0));
  }
}

TEST_CASE("a cosine equal to tau is not drift, one below it is", "[drift]") {
  // 3-4-5 triangles: norms and cosines exact in float32.
  const query_pair same{.now = {3, 4, 0, 0, 0, 0, 0, 0}, .before = {3, 4, 0, 0, 0, 0, 0, 0}};
  const query_pair half_way{.group = 2,
                            .now = {3, 4, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0},
                            .before = {3, 4, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0}};
  for (const executor on : executors()) {
    CHECK_FALSE(flags_on(on, 1.0f, same));
    CHECK(flags_on(on, std::nextafter(1.0f, 2.0f), same));
    CHECK(drift_on(on, half_way).cosine == 0.5f);  // the mean of 1 and 0
    CHECK_FALSE(flags_on(on, 0.5f, half_way));
    CHECK(flags_on(on, 0.50001f, half_way));
  }
}

TEST_CASE("tau may differ by layer", "[drift]") {
  const freekv::cosine_drift policy{.tau = 0.1f, .tau_of_layer = {0.2f, 0.3f}};
  CHECK(policy.at(0).tau == 0.2f);
  CHECK(policy.at(1).tau == 0.3f);
  CHECK(freekv::cosine_drift{.tau = 0.1f}.at(7).tau == 0.1f);
}

TEST_CASE("always and never do as they are called", "[drift]") {
  CHECK(freekv::always{}.at(3).flags(freekv::scalar_team{}, {}));
  CHECK_FALSE(freekv::never{}.at(3).flags(freekv::scalar_team{}, {}));
}

TEST_CASE("every_n_steps flags the first decode step after a prompt and every nth from it", "[drift]") {
  const auto flagged = [](const auto& policy) {
    std::string steps;
    for (int step = 0; step < 7; ++step)
      steps += policy.at(0).flags(freekv::scalar_team{}, {{}, {}, step}) ? 'x' : '.';
    return steps;
  };
  CHECK(flagged(freekv::every_n_steps<3>{}) == "x..x..x");
  CHECK(flagged(freekv::every_n_steps<freekv::dynamic>{{1}}) == "xxxxxxx");
}

TEST_CASE("mass_deficit flags what has less than its share of the best pages' mass", "[drift]") {
  const freekv::mass_deficit policy{.delta = 0.25f};
  CHECK_FALSE(policy.at(0).flags({.selected = 0.375f, .best = 0.5f}));  // exactly the share
  CHECK(policy.at(0).flags({.selected = 0.374f, .best = 0.5f}));
  CHECK_FALSE(policy.at(0).flags({.selected = 0.0f, .best = 0.0f}));
  CHECK(freekv::mass_deficit{.delta = 0.0f}.at(0).flags({.selected = 0.4999f, .best = 0.5f}));
}

TEST_CASE("delta may differ by layer", "[drift]") {
  const freekv::mass_deficit policy{.delta = 0.1f, .partial = true, .delta_of_layer = {0.2f, 0.6f}};
  const freekv::selection_masses masses{.selected = 0.25f, .best = 0.5f};
  CHECK(policy.at(0).flags(masses));
  CHECK_FALSE(policy.at(1).flags(masses));
  CHECK(policy.at(1).exchanges_units());
  CHECK(freekv::mass_deficit{.delta = 0.1f}.at(7).delta == 0.1f);
}

TEST_CASE("delta is a share, of each layer where it differs", "[drift]") {
  const auto sentence = [](const freekv::mass_deficit& policy) {
    try {
      policy.validate(3);
    } catch (const freekv::settings_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(sentence({.delta_of_layer = {0.0f, 0.2f, 1.0f}}).empty());
  CHECK(sentence({.delta_of_layer = {0.1f, 0.2f}}) ==
        "mass_deficit has delta for 2 layers of 3; give one for each, or none");
  CHECK(sentence({.delta_of_layer = {0.1f, 1.5f, 0.2f}}) ==
        "mass_deficit: delta of 1.5 is not a share from 0 to 1; choose one such as 0.2");
  CHECK(sentence({.delta = std::nanf("")}) != "");
}

TEST_CASE("missing_share flags what lacks more than a share of all attention", "[drift]") {
  const freekv::missing_share policy{.delta = 0.125f};
  CHECK_FALSE(policy.at(0).flags({.selected = 0.375f, .best = 0.5f}));  // exactly the share
  CHECK(policy.at(0).flags({.selected = 0.374f, .best = 0.5f}));
  CHECK_FALSE(policy.at(0).flags({.selected = 0.0f, .best = 0.1f}));  // all of little
  CHECK(policy.at(0).flags({.selected = quiet_nan, .best = 0.5f}));
}
