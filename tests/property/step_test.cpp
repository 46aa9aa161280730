// The whole step, every option that the programs offer, against the float64 oracle: agreement as
// docs/contract.md, 13.8 states it.

#include <map>

#include "../catch.hpp"
#include "../instruction_sets.hpp"
#include "../sanitized.hpp"
#include "compare_case.hpp"
#include "seeds.hpp"

namespace {

using namespace tests;

void compare_with_oracle(const random_case& c, freekv::host_backend& backend, coverage& seen) {
  tests::compare_with_oracle(c, *freekv::examples::make_pipeline(c.with_basis(), backend), seen);
}

/// The shortest variant of a failing case that still fails: fewer steps, a shorter prompt, fewer heads.
random_case shrunk(random_case c, freekv::host_backend& backend) {
  const auto fails = [&](const random_case& candidate) {
    coverage ignored;
    try {
      compare_with_oracle(candidate, backend, ignored);
      return false;
    } catch (const disagreement&) {
      return true;
    }
  };
  for (bool smaller = true; smaller;) {
    smaller = false;
    std::vector<random_case> candidates;
    for (const int steps : {c.steps / 2, c.steps - 1})
      if (steps >= 1 && steps < c.steps) candidates.push_back(c), candidates.back().steps = steps;
    for (const int prompt : {c.prompt / 2, c.prompt - c.options.page, c.prompt - 1})
      if (prompt >= 0 && prompt < c.prompt) candidates.push_back(c), candidates.back().prompt = prompt;
    if (c.options.query_heads > c.options.kv_heads)
      candidates.push_back(c), candidates.back().options.query_heads = c.options.kv_heads;
    for (const auto& candidate : candidates)
      if (fails(candidate)) {
        c = candidate;
        smaller = true;
        break;
      }
  }
  return c;
}

}  // namespace

TEST_CASE("random steps agree with the float64 oracle", "[property]") {
  const std::uint64_t first = number_from("FREEKV_SEED", 1), count = number_from("FREEKV_CASES", 300);
  std::map<int, freekv::host_backend> backends;
  int b = 0;
  for (const auto isa : instruction_sets())
    for (const int threads : {1, 3})
      backends.try_emplace(
          b++,
          freekv::host_options{
              .threads = threads, .overlap = threads == 3, .bytes_per_thread = 4096, .instructions = isa});
  coverage seen;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    random_case c = make_case(seed);
    if (seed % 5 == 0) give_unit(c, 1 << seed / 5 % 5);
    // As few of those drawn select so, a few long ones would decide how many are compared.
    if (seed % 7 == 0 && c.options.method.correction != "mass_deficit")
      c.options.method.rows = "per_query_head";
    auto& backend = backends.at(static_cast<int>(seed % backends.size()));
    try {
      compare_with_oracle(c, backend, seen);
    } catch (const disagreement& d) {
      INFO(c);
      INFO(d.what);
      const random_case small = shrunk(c, backend);
      INFO("smaller: " << small);
      FAIL("the library disagrees with the oracle; FREEKV_SEED=" << seed << " FREEKV_CASES=1 repeats it");
    }
  }
  INFO("steps " << seen.steps << ", firm selections " << seen.firm_selections << " ("
                << seen.firm_own_selections << " of query heads), outputs " << seen.compared_outputs
                << ", corrected " << seen.corrected << ", recalled " << seen.recalled << ", promoted "
                << seen.promoted);
  if (count >= 100) {
    CHECK(seen.firm_selections > 1000);
    CHECK(seen.firm_own_selections > static_cast<long>(count / 8));
    CHECK(seen.compared_outputs > 10000);
    CHECK(seen.corrected > 100);
    CHECK(seen.recalled > static_cast<long>(count / 4));
    CHECK(seen.promoted > 10);
  }
  WARN("compared " << seen.steps << " steps, " << seen.firm_selections << " firm selections, "
                   << seen.compared_outputs << " head outputs; corrected " << seen.corrected << ", recalled "
                   << seen.recalled << ", promoted " << seen.promoted);
}

TEST_CASE("query heads beyond a mask's word, in several parts of attention, agree with the oracle",
          "[property]") {
  freekv::host_backend alone, many({.threads = 3, .bytes_per_thread = 512});
  coverage seen;
  for (const int group : {33, 40, 70})
    for (const bool in_place : {false, true}) {
      random_case c = make_case(5);
      auto& o = c.options;
      o.method = {.rows = "per_query_head"};
      give_heads(c, group == 33 ? 2 : 1, group == 33 ? 66 : group);
      o.page = 8;
      o.budget = {.sink = 0, .window = 8, .selected_units = 3};
      o.store_file.clear();
      o.in_place = in_place;
      c.prompt = 900;
      c.steps = 10;
      c.turn = 0.5f;
      o.max_tokens = c.prompt + c.steps;
      INFO(c);
      try {
        compare_with_oracle(c, in_place ? alone : many, seen);
      } catch (const disagreement& d) {
        FAIL(d.what);
      }
    }
  CHECK(seen.firm_own_selections > 30);
  CHECK(seen.compared_outputs > 2000);
}

TEST_CASE("keys and values that are stored in units of scales agree with the oracle", "[property]") {
  freekv::host_backend alone({.overlap = false}), many({.threads = 3, .bytes_per_thread = 512});
  coverage seen;
  for (std::uint64_t seed = 1000; seed < 1000 + some_of(120u); ++seed) {
    random_case c = make_case(seed);
    if (seed % 6 == 0) sample_tokens(c, 3, 12);
    give_scales(c);
    try {
      compare_with_oracle(c, seed % 2 == 0 ? alone : many, seen);
    } catch (const disagreement& d) {
      INFO(c);
      FAIL(d.what);
    }
  }
  CHECK(seen.firm_selections > some_of(500));
  CHECK(seen.compared_outputs > some_of(5000));
  CHECK(seen.corrected > some_of(50));
}

TEST_CASE("tokens that query heads sample by hash collisions agree with the oracle", "[property]") {
  freekv::host_backend alone({.overlap = false}), many({.threads = 3, .bytes_per_thread = 512});
  coverage seen;
  for (std::uint64_t seed = 1; seed <= some_of(80u); ++seed) {
    random_case c = make_case(seed);
    auto& o = c.options;
    give_heads(c, 1 + static_cast<int>(seed % 2), static_cast<int>((1 + seed % 2) * (1 + seed / 2 % 4)));
    o.page = 8;
    o.budget = {.sink = 8, .window = 16, .selected_units = seed % 4 == 0 ? 1 : 20};
    if (seed % 5 == 0) {
      o.method.plan = "by_head";
      o.head_kinds = {freekv::layer_kind::retrieval, freekv::layer_kind::complete};
      o.head_kinds.resize(static_cast<std::size_t>(o.kv_heads));
    }
    sample_tokens(c, dice(seed).between(2, 6), dice(seed + 1).one_of({2, 3, 12, 40}));
    o.in_place = seed % 3 == 0;
    c.prompt = 150;
    c.steps = 10;
    c.turn = 0.5f;
    o.max_tokens = c.prompt + c.steps;
    INFO(c);
    try {
      compare_with_oracle(c, seed % 2 == 0 ? alone : many, seen);
    } catch (const disagreement& d) {
      FAIL(d.what);
    }
  }
  INFO(seen.firm_selections << " firm selections, " << seen.firm_own_selections << " of query heads, "
                            << seen.compared_outputs << " outputs");
  CHECK(seen.firm_selections > some_of(800));
  CHECK(seen.firm_own_selections > some_of(400));
  CHECK(seen.compared_outputs > some_of(1500));
}

TEST_CASE("KV heads that select together agree with the oracle", "[property]") {
  freekv::host_backend alone({.overlap = false}), many({.threads = 3, .bytes_per_thread = 512});
  coverage seen;
  for (std::uint64_t seed = 1; seed <= some_of(60u); ++seed) {
    random_case c = make_case(seed);
    auto& o = c.options;
    give_heads(c, 3, seed % 2 == 0 ? 3 : 6);
    o.page = 8;
    o.budget = {.sink = 8, .window = 16, .selected_units = 2};
    o.method.summary = "mean";
    o.method.rows = "per_layer";
    o.method.pinning = "no_pins";
    if (seed % 3 != 0) o.method.correction = "cosine_drift";
    o.store_file.clear();
    c.prompt = 100;
    c.steps = 12;
    c.turn = 0.5f;  // some heads turn too far, and others do not
    o.max_tokens = c.prompt + c.steps;
    INFO(c);
    try {
      compare_with_oracle(c, seed % 2 == 0 ? alone : many, seen);
    } catch (const disagreement& d) {
      FAIL(d.what);
    }
  }
  CHECK(seen.firm_selections > some_of(500));
  CHECK(seen.corrected > some_of(100));
}

TEST_CASE("pinned units have no part in what else is selected", "[property]") {
  freekv::host_backend backend({.overlap = false});
  coverage seen;
  for (std::uint64_t seed = 1; seed <= some_of(60u); ++seed) {
    random_case c = make_case(seed);
    auto& o = c.options;
    o.page = 8;
    o.budget = {.sink = 8, .window = 16, .selected_units = 2};
    o.method = {.summary = seed % 2 == 0 ? "coarse_to_fine" : "min_max", .correction = "always"};
    give_heads(c, 2, 6);
    o.method.times = 2;
    o.method.pinning = "pin_outliers";
    o.method.pinned = 5;
    o.store_file.clear();
    o.in_place = seed % 3 == 0;
    c.outliers = 0.1f;
    c.prompt = 240;
    c.steps = 20;
    c.turn = 0.5f;
    o.max_tokens = c.prompt + c.steps;
    INFO(c);
    try {
      compare_with_oracle(c, backend, seen);
    } catch (const disagreement& d) {
      FAIL(d.what);
    }
  }
  CHECK(seen.firm_selections > some_of(1000));
}
