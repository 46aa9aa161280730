// What holds for every policy of the programs' lists, so that a policy is tested by joining its list.

#include <string>
#include <vector>

#include "../agreement.hpp"
#include "../catch.hpp"
#include "../property/trace.hpp"
#include "every_policy.hpp"
#include "scored_page.hpp"

namespace {

using namespace tests;
using freekv::examples::method_spec;

random_case case_of(const method_spec& m, std::uint64_t seed) {
  dice d(seed);
  random_case c;
  c.seed = seed;
  auto& o = c.options;
  o.element = d.one_of({data_type::f32, data_type::f16, data_type::bf16});
  o.head_dim = 64;
  o.kv_heads = d.between(1, 3);
  o.query_heads = o.kv_heads * d.one_of({1, 2, 3, 5, 8});
  o.page = d.one_of({8, 16});
  o.budget = {o.page * d.between(0, 2), o.page * d.between(1, 2), d.between(1, 4)};
  o.method = m;
  c.prompt = o.page * d.between(4, 20) + d.below(o.page);
  c.steps = 2 * o.page;
  o.max_tokens = c.prompt + c.steps;
  give_basis(c, d, o.kv_heads);
  o.codebooks = {nullptr, 1, o.kv_heads, o.head_dim, 4, 3, m.codes, 5};
  if (m.summary == "key_codes") c.codebook_data = random_codebooks(d, o.codebooks);
  return c;
}

bool same_steps(const trace& a, const trace& b, bool movement) {
  for (std::size_t i = 0; i < a.steps.size(); ++i)
    if (!a.steps[i].same_outputs(b.steps[i]) || (movement && !a.steps[i].same_movement(b.steps[i])))
      return false;
  return a.steps.size() == b.steps.size();
}

}  // namespace

TEST_CASE("threads, overlap, route and slot layout change no bit, whatever the policies", "[every_policy]") {
  for (const method_spec& m : every_policy()) {
    auto c = case_of(m, 11);
    INFO(words(m));
    freekv::host_backend alone({.threads = 1, .overlap = false}),
        many({.threads = 3, .bytes_per_thread = 512}),
        in_turn({.threads = 3, .overlap = false, .bytes_per_thread = 128});
    c.options.in_place = false;
    const trace expected = run_case(c, alone);
    CHECK(same_steps(run_case(c, many), expected, true));
    c.options.layout = "hnd";
    CHECK(same_steps(run_case(c, alone), expected, true));
    c.options.layout = "nhd";
    CHECK(same_steps(run_case(c, in_turn), expected, true));
    c.options.in_place = true;
    CHECK(same_steps(run_case(c, many), expected, false));
  }
}

TEST_CASE("with as many selected pages as candidates the output is full attention's, whatever the policies",
          "[every_policy]") {
  freekv::host_backend backend;
  for (method_spec m : every_policy()) {
    if (m.selection == "top_p" || m.selection == "colliding") continue;
    auto c = case_of(m, 12);
    INFO(words(m));
    c.options.budget.selected_units = 100 * 16;
    // Completion brings pages' values up to date by each page's own sum.
    const bool same_sums = m.unit_tokens(c.options.page) == c.options.page && !m.completes();
    for (const traced_step& step : run_case(c, backend, true).steps) {
      if (same_sums) {
        CHECK(same_bits(step.out, step.full));
        CHECK(same_bits(step.lse, step.full_lse));
      } else {  // other parts of the same sums
        int wrong = 0;
        for (std::size_t i = 0; i < step.out.size(); ++i) wrong += !close(step.out[i], step.full[i], 1e-5);
        for (std::size_t i = 0; i < step.lse.size(); ++i)
          wrong += !close(step.lse[i], step.full_lse[i], 1e-5);
        CHECK(wrong == 0);
      }
    }
  }
}

// (It may recall more: what is not selected is not held.)
TEST_CASE("top_p attends to fewer pages than the k best, fewer the less mass it asks for", "[every_policy]") {
  freekv::host_backend backend;
  const auto attended = [&](const char* selection, float p) {
    std::size_t pages = 0;
    for (std::uint64_t seed = 14; seed < 20; ++seed) {
      auto c = case_of({.selection = selection, .top_p = p, .correction = "always"}, seed);
      c.options.budget.selected_units = 6;
      for (const traced_step& step : run_case(c, backend).steps)
        for (const auto& selected : step.attended) pages += selected.size();
    }
    return pages;
  };
  const std::size_t all = attended("top_k", 1.0f), most = attended("top_p", 0.9f),
                    few = attended("top_p", 0.5f);
  INFO(all << ", " << most << ", " << few << " pages");
  CHECK(few < most);
  CHECK(most < all);
}

TEST_CASE("spare slots never recall more, and residency never changes an output", "[every_policy]") {
  freekv::host_backend backend;
  for (const auto& residency : freekv::examples::residencies) {
    auto c = case_of({.correction = "always", .residency = std::string(residency.name)}, 13);
    c.turn = 1.0f;
    const auto recalled = [](const trace& t) {
      int sum = 0;
      for (const auto& step : t.steps)
        for (const int slices : step.recalled) sum += slices;
      return sum;
    };
    const trace none = run_case(c, backend);
    c.options.method.spare = 6;
    const trace some = run_case(c, backend);
    CHECK(same_steps(some, none, false));
    CHECK(recalled(some) < recalled(none));
  }
}

TEMPLATE_TEST_CASE("every summary scores alike on every team, a unit with one NaN as -infinity",
                   "[every_policy]", float, freekv::half, freekv::bfloat16) {
  using namespace freekv::examples;
  dice d(14);
  for (const method_spec& m : every_policy())
    for (int trial = 0; trial < 6; ++trial) {
      auto c = make_page<TestType>(d);
      INFO(words(m) << ", " << c);
      const bool signatures = m.summary == "key_signatures";
      c.rank = signatures ? m.bits * m.tables : std::min(m.rank, c.d);
      c.basis = signatures ? normals(d, count((1 + c.rank) * c.d)) : random_basis(d, 1, c.rank, c.d);
      freekv::key_codebooks books{nullptr, 1, 1, c.d, 2, 2, m.codes, 1};
      const auto book_data = random_codebooks(d, books);
      books.data = book_data.data();
      method_spec fitting = m;
      fitting.rank = c.rank;
      const method_data data{.basis = {c.basis.data(), 1, 1, c.rank, c.d}, .codebooks = books};
      const auto summary = find_by_name("summary", summaries, m.summary).make(fitting, data);
      resolve(summary, [&](const auto& policy) {
        const auto expected = score_by<TestType>(one_lane, policy, c, c.d);
        for (const executor on : executors()) {
          const auto got = score_by<TestType>(on, policy, c, c.d);
          for (int g = 0; g < c.group; ++g)
            CHECK(is_near(got.scores[count(g)], expected.scores[count(g)],
                          1e-5 * (1.0 + std::fabs(static_cast<double>(expected.scores[count(g)])))));
        }
        c.keys[count(d.below(c.p * c.d))] = quiet_nan;
        const auto spoiled = score_by<TestType>(best(), policy, c, c.d);
        CHECK(std::all_of(spoiled.scores.begin(), spoiled.scores.end(), [](float x) { return x == -inf; }));
      });
    }
}

TEST_CASE("sticky_top_k recalls the less the larger its bonus, and without one is top_k", "[every_policy]") {
  freekv::host_backend backend;
  for (const char* rows : {"per_kv_head", "per_query_head", "per_layer"}) {
    const auto run = [&](const char* selection, float bonus, std::uint64_t seed) {
      auto c = case_of({.selection = selection, .bonus = bonus, .rows = rows, .correction = "never"}, seed);
      c.options.budget.selected_units = 4;
      return run_case(c, backend);
    };
    const auto recalled = [&](float bonus) {
      std::int64_t units = 0;
      for (std::uint64_t seed = 20; seed < 26; ++seed)
        for (const traced_step& step : run("sticky_top_k", bonus, seed).steps)
          for (const auto count : step.recalled) units += count;
      return units;
    };
    CHECK(same_steps(run("sticky_top_k", 0.0f, 19), run("top_k", 0.0f, 19), true));
    const std::int64_t all = recalled(0.0f), fewer = recalled(0.7f), few = recalled(3.0f);
    INFO(rows << ": " << all << ", " << fewer << ", " << few << " units");
    CHECK(fewer < all);
    CHECK(few < fewer);
  }
}
