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

/// Cuts a sequence to `kept` tokens, after which another text follows: it goes on as one whose prompt these
/// were.
void compare_with_prompt(fresh& used, const tiny_pipeline::settings& s, const text& source, int kept,
                         std::uint64_t seed) {
  used.pipeline.truncate(used.id, kept);
  CHECK(used.pipeline.free_pages() == 25 - (kept + 7) / 8);
  const text other = text::spliced(source, kept, text(s, head_dim, text_tokens, seed + 1000));
  fresh clean(s);
  if (kept > 0) prompt_only(clean.pipeline, clean.id, other, kept);
  CHECK(decode(used.pipeline, used.id, other, 30) == decode(clean.pipeline, clean.id, other, 30));
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
    INFO("seed " << seed << ", " << kept << " of " << last + s.capacity.max_decode_rows << " tokens kept");
    compare_with_prompt(used, s, source, kept, seed);
  }
}

TEST_CASE("a selection is dropped where a page of it is no longer complete", "[truncate]") {
  auto s = tiny_settings();
  s.plan = freekv::complete_first<freekv::dynamic>{0};
  s.budget = {.sink = 8, .window = 8, .selected_units = 24};  // all candidates
  s.correction = freekv::never{};
  s.capacity.max_decode_rows = 17;
  int dropped = 0, stayed = 0;
  for (const bool in_place : {false, true}) {
    if (in_place) s.route = freekv::in_place{};
    for (int before = 40; before < 48; ++before)
      for (int kept = 1; kept < 17; ++kept) {
        const text source(s, head_dim, text_tokens, 1),
            other = text::spliced(source, before + kept, text(s, head_dim, text_tokens, 2));
        fresh f(s);
        prompt_only(f.pipeline, f.id, source, before - 1);
        decode_rows(f, source, 1);
        decode_rows(f, source, 17);
        f.pipeline.truncate(f.id, before + kept);
        INFO(before << " tokens, " << kept << " rows kept");
        auto step = f.pipeline.begin_step({{f.id}});
        for (int layer = 0; layer < 3; ++layer) {
          const auto row = other.at(layer, before + kept, 1);
          std::vector<float> out(row.queries.size()), full(out);
          step.append<float>(layer, {.keys = row.keys, .values = row.values, .queries = row.queries});
          step.attend(layer, out);
          step.attend_full(layer, full);
          for (std::size_t i = 0; i < out.size(); ++i)
            if (!is_near(out[i], full[i], 1e-4)) FAIL("not full attention");
        }
        step.end();
        const bool incomplete = (before + 17 + 1 - 8) / 8 > (before + kept) / 8;
        CHECK((f.pipeline.report(0)[f.id].corrected[0] != 0) == incomplete);
        (incomplete ? dropped : stayed) += 1;
      }
  }
  CHECK(dropped > 20);
  CHECK(stayed > 20);
}

TEST_CASE("with exactly the last append the selection is taken back", "[truncate]") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_decode_rows = d.one_of({1, 4, 9});
    const int prompt = d.between(20, 100);
    const text source(s, head_dim, text_tokens, seed);
    fresh used(s);
    prompt_only(used.pipeline, used.id, source, prompt);
    for (int i = d.between(1, 6); i > 0; --i)
      decode_rows(used, source, d.between(1, s.capacity.max_decode_rows));
    const int kept = used.pipeline.tokens(used.id);
    decode_rows(used, source, s.capacity.max_decode_rows);
    INFO("seed " << seed << ", " << kept << " tokens kept");
    compare_with_prompt(used, s, source, kept, seed);
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

TEST_CASE("a sink page that is open again is in its slot as it was appended", "[truncate]") {
  using pipeline =
      freekv::retrieval_pipeline<freekv::kv_shape<float, 8>, freekv::page_size<8>, freekv::int4_token,
                                 freekv::every_layer<freekv::layer_kind::retrieval>>;
  freekv::host_backend backend;
  pipeline p({.model = {.layers = 1, .query_heads = 1, .kv_heads = 1},
              .budget = {.sink = 16, .window = 8, .selected_units = 1},
              .capacity = {.max_tokens = 100, .max_sequences = 2, .max_decode_rows = 4}},
             backend);
  dice d(1);
  const auto rows = normals(d, 20 * 8);
  const auto run = [&](freekv::sequence_id id, int n, freekv::step_phase phase) {
    const auto part = std::span(rows).subspan(count(p.tokens(id) * 8), count(n * 8));
    std::vector<float> out(count(n * 8));
    auto step = p.begin_step({{id, n, phase}});
    step.append<float>(0, {.keys = part, .values = part, .queries = part});
    step.attend(0, out);
    step.end();
    return out;
  };
  const auto a = p.open(), b = p.open();
  run(a, 5, freekv::step_phase::prefill), run(b, 5, freekv::step_phase::prefill);
  run(a, 4, freekv::step_phase::decode), run(b, 1, freekv::step_phase::decode);
  p.truncate(a, 6);
  CHECK(run(a, 1, freekv::step_phase::decode) == run(b, 1, freekv::step_phase::decode));
}

namespace {

using every_third =
    freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, 24>, freekv::page_size<8>, freekv::min_max,
                               freekv::every_n_steps<3>, freekv::every_layer<freekv::layer_kind::retrieval>>;
every_third::settings settings_of_third() {
  every_third::settings s;
  s.model = {.layers = 1, .query_heads = 2, .kv_heads = 2};
  s.budget = {.sink = 8, .window = 16, .selected_units = 2};
  s.capacity.max_tokens = 200;
  s.capacity.max_sequences = 3;
  s.capacity.max_decode_rows = 2;
  return s;
}
/// Whether the first head is corrected, step by step.
std::vector<int> flags_of(every_third& p, freekv::sequence_id id, const text& source, int steps) {
  std::vector<int> flags;
  for (int i = 0; i < steps; ++i) flags.push_back(run_step(p, id, source, 1, step_phase::decode).report[0]);
  return flags;
}

}  // namespace

TEST_CASE("every_n_steps counts on after a truncation and in a fork, and anew after a prompt", "[truncate]") {
  const auto s = settings_of_third();
  const text source(s, 24, 200, 1);
  freekv::host_backend backend;
  every_third p(s, backend);
  const auto id = p.open();
  prompt_only(p, id, source, 80);
  CHECK(flags_of(p, id, source, 4) == std::vector{1, 0, 0, 1});  // steps 0 to 3
  const auto child = p.fork(id);
  CHECK(flags_of(p, child, source, 3) == std::vector{0, 0, 1});
  p.truncate(id, 80);  // which drops the selection: the next step, the 4th, is flagged for that
  CHECK(flags_of(p, id, source, 4) == std::vector{1, 0, 1, 0});
  prompt_only(p, id, source, 5);
  CHECK(flags_of(p, id, source, 4) == std::vector{1, 0, 0, 1});
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
