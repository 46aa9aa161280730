// Several decode rows in a step, and taking tokens back.

#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

constexpr int text_tokens = 220;

sequence_result decode_rows(fresh& f, const text& source, int rows) {
  return run_step(f.pipeline, f.id, source, rows, step_phase::decode);
}

/// Outputs alone: what was recalled depends on what was held.
bool same_outputs(const sequence_result& a, const sequence_result& b) {
  return same_bits(a.out, b.out) && same_bits(a.lse, b.lse);
}

}  // namespace

TEST_CASE("rejected drafts leave no trace but the candidates that were fixed with them", "[truncate]") {
  int compared = 0, other_candidates = 0;
  for (std::uint64_t seed = 1; seed <= some_of(60u); ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.correction = freekv::always{};
    s.capacity.max_decode_rows = d.one_of({2, 5, 9, 17});
    const int prompt = d.between(1, 90);
    const text source(s, head_dim, text_tokens, seed);
    fresh drafting(s), clean(s);
    prompt_only(drafting.pipeline, drafting.id, source, prompt);
    prompt_only(clean.pipeline, clean.id, source, prompt);
    for (int round = 0; round < 8; ++round) {
      const int before = clean.pipeline.tokens(clean.id);
      const int rows = d.between(2, s.capacity.max_decode_rows), kept = d.between(1, rows - 1);
      if (before + rows + 1 > s.capacity.max_tokens) break;
      const text drafts =
          text::spliced(source, before + kept, text(s, head_dim, text_tokens, seed * 100 + count(round)));
      decode_rows(drafting, drafts, rows);
      drafting.pipeline.truncate(drafting.id, before + kept);
      CHECK(drafting.pipeline.tokens(drafting.id) == before + kept);
      decode_rows(clean, source, kept);
      CHECK(drafting.pipeline.free_pages() == clean.pipeline.free_pages());

      // (The kept rows' own outputs are another matter: their selection was pooled over the rejected ones
      // too.) The candidates stay those fixed at the length with the drafts; where they are the same pages,
      // all is.
      const auto fixed = [&](int tokens) {
        return std::min(freekv::roles_at(tokens, s.budget, 8).window_begin, (before + kept) / 8);
      };
      const auto next = decode_rows(drafting, source, 1), expected = decode_rows(clean, source, 1);
      if (fixed(before + rows + 1) == fixed(before + kept + 1)) {
        CHECK(same_outputs(next, expected));
        ++compared;
      } else {
        ++other_candidates;
      }
    }
  }
  CHECK(compared > 100);
  CHECK(other_candidates > 10);
}

TEST_CASE("what is taken back further is forgotten: as if the rest had been the prompt", "[truncate]") {
  for (std::uint64_t seed = 1; seed <= some_of(60u); ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_decode_rows = d.one_of({1, 4});
    const int prompt = d.between(0, 100);
    const text source(s, head_dim, text_tokens, seed);
    fresh used(s);
    if (prompt > 0) prompt_only(used.pipeline, used.id, source, prompt);
    for (int i = d.between(0, 40); i > 0; --i)
      decode_rows(used, source, d.between(1, s.capacity.max_decode_rows));
    const int last = used.pipeline.tokens(used.id) - s.capacity.max_decode_rows;
    const int kept = d.below(8) == 0 ? 0 : d.below(std::max(1, last));
    used.pipeline.truncate(used.id, kept);
    CHECK(used.pipeline.free_pages() == 25 - (kept + 7) / 8);

    const text other = text::spliced(source, kept, text(s, head_dim, text_tokens, seed + 1000));
    fresh clean(s);
    if (kept > 0) prompt_only(clean.pipeline, clean.id, other, kept);
    INFO("seed " << seed << ", " << kept << " of " << last + s.capacity.max_decode_rows << " tokens kept");
    CHECK(decode(used.pipeline, used.id, other, 30) == decode(clean.pipeline, clean.id, other, 30));
  }
}

TEST_CASE("a truncation inside the last append keeps the selection", "[truncate]") {
  auto s = tiny_settings();
  s.plan = freekv::complete_first<freekv::dynamic>{0};
  s.correction = freekv::never{};
  s.capacity.max_decode_rows = 6;
  const text source(s, head_dim, text_tokens, 1);
  const auto corrected_after = [&](int rows, const std::vector<int>& lengths) {
    fresh f(s);
    prompt_only(f.pipeline, f.id, source, 100);
    decode_rows(f, source, 3);
    decode_rows(f, source, rows);
    for (const int tokens : lengths) f.pipeline.truncate(f.id, tokens);
    return decode_rows(f, source, 1).report[0];
  };
  CHECK(corrected_after(6, {}) == 0);
  CHECK(corrected_after(6, {104}) == 0);
  CHECK(corrected_after(6, {108, 106, 104}) == 0);
  CHECK(corrected_after(6, {103}) == 1);
  CHECK(corrected_after(6, {108, 103}) == 1);
  CHECK(corrected_after(6, {103, 103}) == 1);
}

TEST_CASE("the last kept row's query is the previous one", "[truncate]") {
  auto s = tiny_settings();
  s.plan = freekv::complete_first<freekv::dynamic>{0};
  s.capacity.max_decode_rows = 4;
  s.correction = freekv::cosine_drift{.tau = 0.999f};
  const text source(s, head_dim, text_tokens, 1);
  // The row after the truncation brings the query of row `kept` again: no drift if that one was kept last.
  for (int kept = 1; kept <= 4; ++kept)
    for (int again = 0; again < 4; ++again) {
      fresh f(s);
      prompt_only(f.pipeline, f.id, source, 60);
      decode_rows(f, source, 4);
      f.pipeline.truncate(f.id, 60 + kept);
      auto step = f.pipeline.begin_step({{f.id}});
      for (int layer = 0; layer < 3; ++layer) {
        const auto row = source.at(layer, 60 + again, 1);
        std::vector<float> out(row.queries.size());
        step.append<float>(layer, {.keys = row.keys, .values = row.values, .queries = row.queries});
        step.attend(layer, out);
      }
      step.end();
      const auto corrected = f.pipeline.report(0)[f.id].corrected;
      INFO("kept " << kept << ", again row " << again);
      CHECK((corrected[0] == 0 && corrected[1] == 0) == (again == kept - 1));
    }
}

TEST_CASE("truncations are refused in sentences", "[truncate]") {
  auto s = tiny_settings();
  s.capacity.max_decode_rows = 3;
  const text source(s, head_dim, text_tokens, 1);
  fresh f(s);
  prompt_only(f.pipeline, f.id, source, 50);
  CHECK_THROWS_WITH(f.pipeline.truncate(f.id, 51), "truncate: sequence 0 has 50 tokens; it cannot keep 51");
  CHECK_THROWS_WITH(f.pipeline.truncate(f.id, -1), Catch::Contains("cannot keep -1"));
  CHECK_THROWS_WITH(f.pipeline.begin_step({{f.id, 4}}),
                    "sequence 0 brings 4 decode rows; max_decode_rows in the settings is 3");
  const auto step = f.pipeline.begin_step({{f.id, 3}});
  CHECK_THROWS_WITH(f.pipeline.truncate(f.id, 50),
                    Catch::Contains("truncate: the step in progress has not ended"));
  s.capacity.max_decode_rows = 0;
  CHECK_THROWS_WITH(fresh(s), "max_decode_rows is 0; choose from 1 to 1024");
}
