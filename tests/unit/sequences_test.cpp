// Several sequences in one pipeline, prompts in chunks, prompts after decoding: each gives what it would
// alone, bit for bit.

#include <algorithm>
#include <memory>
#include <vector>

#include "../catch.hpp"
#include "../sanitized.hpp"
#include "random_settings.hpp"

namespace {

using namespace tests;
using freekv::step_phase;

/// What a sequence does in each step it takes part in.
struct chunk {
  int tokens;
  step_phase phase;
};
using script = std::vector<chunk>;

int length_of(const script& s) {
  int tokens = 0;
  for (const chunk& c : s) tokens += c.tokens;
  return tokens;
}

/// A prompt in chunks, decoding, now and then a prompt again.
script random_script(dice& d, int most_tokens) {
  script s;
  const auto prompt = [&](int tokens) {
    while (tokens > 0) {
      s.push_back({d.between(1, tokens), step_phase::prefill});
      tokens -= s.back().tokens;
    }
  };
  if (d.below(5) != 0) prompt(d.between(1, 80));
  for (int rounds = d.between(1, 2); rounds > 0; --rounds) {
    for (int steps = d.between(1, 30); steps > 0; --steps) s.push_back({1, step_phase::decode});
    if (rounds > 1) prompt(d.between(1, 20));
  }
  while (length_of(s) > most_tokens) s.pop_back();
  return s;
}

std::vector<sequence_result> run_alone(const tiny_pipeline::settings& s, const script& steps,
                                       const text& source) {
  freekv::host_backend backend({.overlap = false});
  tiny_pipeline pipeline(s, backend);
  const auto id = pipeline.open();
  std::vector<sequence_result> results;
  for (const chunk& c : steps) results.push_back(run_step(pipeline, id, source, c.tokens, c.phase));
  return results;
}

}  // namespace

TEST_CASE("sequences mixed in one pipeline each give what they give alone, bit for bit", "[sequences]") {
  for (std::uint64_t seed = 1; seed <= some_of(12u); ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    struct run {
      script steps;
      std::unique_ptr<text> source;
      std::vector<sequence_result> alone;
    };
    std::vector<run> runs(7);
    for (run& r : runs) {
      r.steps = random_script(d, 100);
      r.source =
          std::make_unique<text>(s, head_dim, length_of(r.steps), seed * 1000 + count(&r - runs.data()));
      r.alone = run_alone(s, r.steps, *r.source);
    }

    // Three places for seven sequences: pages and state are used again after a release.
    s.capacity.max_sequences = 3;
    s.capacity.store_tokens = 3 * 104;
    freekv::host_backend backend({.threads = 3, .overlap = seed % 2 == 0, .bytes_per_thread = 512});
    tiny_pipeline pipeline(s, backend);
    const int all_pages = pipeline.free_pages();
    CHECK(all_pages == 3 * 13);
    struct live {
      run* r;
      freekv::sequence_id id;
      std::size_t next;
    };
    std::vector<live> open;
    std::size_t started = 0;
    int wrong = 0, compared = 0, mixed = 0;
    while (started < runs.size() || !open.empty()) {
      if (started < runs.size() && open.size() < 3 && d.below(3) != 0)
        open.push_back({&runs[started++], pipeline.open(), 0});
      std::vector<sequence_part> parts;
      std::vector<live*> taking;
      for (live& l : open) {
        if (d.below(4) == 0) continue;  // it sits this step out
        const chunk& c = l.r->steps[l.next];
        parts.push_back({l.id, l.r->source.get(), c.tokens, c.phase});
        taking.push_back(&l);
      }
      if (taking.size() > 1 && d.below(2) == 0) {
        std::reverse(parts.begin(), parts.end());  // rows come in any order
        std::reverse(taking.begin(), taking.end());
      }
      const auto results = run_step(pipeline, parts);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (!(results[i] == taking[i]->r->alone[taking[i]->next])) ++wrong;
        ++compared;
        mixed += parts[i].phase != parts[0].phase;
        ++taking[i]->next;
      }
      for (std::size_t i = open.size(); i-- > 0;)
        if (open[i].next == open[i].r->steps.size()) {
          CHECK(pipeline.tokens(open[i].id) == length_of(open[i].r->steps));
          pipeline.release(open[i].id);
          open.erase(open.begin() + static_cast<long>(i));
        }
    }
    INFO("seed " << seed << ", steps compared " << compared);
    CHECK(wrong == 0);
    CHECK(compared > 50);
    CHECK(mixed > 0);
    CHECK(pipeline.free_pages() == all_pages);
  }
}

TEST_CASE("a prompt in chunks of any size is one prompt, bit for bit", "[sequences]") {
  for (std::uint64_t seed = 1; seed <= some_of(10u); ++seed) {
    dice d(seed);
    const auto s = random_settings(d);
    const int prompt = d.between(1, 120);
    const text source(s, head_dim, prompt + 20, seed);
    fresh whole(s);
    prompt_only(whole.pipeline, whole.id, source, prompt);
    const auto expected = decode(whole.pipeline, whole.id, source, 20);
    for (const int most : {1, 7, 8, 9, 50}) {
      fresh chunked(s);
      for (int left = prompt; left > 0;) {
        const int tokens = most == 1 ? 1 : d.between(1, std::min(most, left));
        // Whether its rows attend makes no difference for what comes later.
        if (d.below(2) == 0)
          prompt_only(chunked.pipeline, chunked.id, source, tokens);
        else
          run_step(chunked.pipeline, chunked.id, source, tokens, step_phase::prefill);
        left -= tokens;
      }
      INFO("seed " << seed << ", prompt of " << prompt << " in chunks of up to " << most);
      CHECK(decode(chunked.pipeline, chunked.id, source, 20) == expected);
    }
  }
}

TEST_CASE("prompt rows attend exactly and causally, whatever the layer and the chunk", "[sequences]") {
  dice d(5);
  for (const int threads : {1, 3}) {
    auto s = tiny_settings();
    s.capacity.max_tokens = 700;  // more than one part of attention
    s.model.layers = 2;
    s.plan = threads == 1
                 ? decltype(s.plan)(freekv::complete_first<freekv::dynamic>{1})
                 : decltype(s.plan)(freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>{1});
    const text source(s, head_dim, 700, 5);
    freekv::host_backend backend({.threads = threads, .bytes_per_thread = 4096});
    tiny_pipeline pipeline(s, backend);
    const auto id = pipeline.open();
    int wrong = 0, rows = 0;
    for (int first = 0; first < 700;) {
      const int tokens = std::min(d.one_of({1, 5, 8, 100, 250}), 700 - first);
      const auto result = run_step(pipeline, id, source, tokens, step_phase::prefill);
      for (int row = 0; row < tokens; ++row) {
        if (row % 17 != 0 && row != tokens - 1) continue;
        ++rows;
        for (int layer = 0; layer < 2; ++layer)
          for (int head = 0; head < 6; ++head) {
            const auto all = source.at(layer, 0, first + row + 1);
            std::vector<std::span<const float>> keys, values;
            for (int t = 0; t <= first + row; ++t) {
              keys.push_back(oracle::row_of(all.keys, t * 2 + head / 3, head_dim));
              values.push_back(oracle::row_of(all.values, t * 2 + head / 3, head_dim));
            }
            const auto expected =
                oracle::attend(oracle::row_of(all.queries, (first + row) * 6 + head, head_dim), keys, values,
                               oracle::default_scale(head_dim));
            const auto at = count((layer * tokens + row) * 6 + head);
            wrong +=
                !is_near(result.lse[at], expected.lse[0], 1e-5 * std::max(1.0, std::fabs(expected.lse[0])));
            for (int i = 0; i < head_dim; ++i)
              wrong += !is_near(result.out[at * head_dim + count(i)], expected.out[count(i)], 2e-5);
          }
      }
      first += tokens;
    }
    CHECK(wrong == 0);
    CHECK(rows > 40);
  }
}

TEST_CASE("a prompt after decoding drops the selection and the previous query", "[sequences]") {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.plan = freekv::complete_first<freekv::dynamic>{0};
    s.correction = freekv::never{};  // then nothing but the drop flags a head
    const int before = d.between(60, 90), again = d.between(1, 30);
    const text source(s, head_dim, before + 10 + again + 10, seed);
    fresh resumed(s);
    prompt_only(resumed.pipeline, resumed.id, source, before);
    decode(resumed.pipeline, resumed.id, source, 10);
    prompt_only(resumed.pipeline, resumed.id, source, again);
    const auto after = decode(resumed.pipeline, resumed.id, source, 10);

    // It is as if everything before had been one prompt: flags, recall and all.
    fresh from_scratch(s);
    prompt_only(from_scratch.pipeline, from_scratch.id, source, before + 10 + again);
    CHECK(decode(from_scratch.pipeline, from_scratch.id, source, 10) == after);
    // The report starts with the flags of the 2 KV heads.
    CHECK(after[0].report[0] == 1);
    CHECK(after[0].report[1] == 1);
    CHECK(after[1].report[0] == 0);
    CHECK(after[1].report[1] == 0);
  }
}

TEST_CASE("a sequence that is released leaves no trace in the next one", "[sequences]") {
  dice d(3);
  auto s = tiny_settings();
  s.plan = freekv::complete_first<freekv::dynamic>{0};
  const text first(s, head_dim, 150, 1), second(s, head_dim, 150, 2);
  fresh used(s);
  prompt_only(used.pipeline, used.id, first, 100);
  decode(used.pipeline, used.id, first, 30);
  used.pipeline.release(used.id);
  CHECK(used.pipeline.free_pages() == 25);
  used.id = used.pipeline.open();
  CHECK(used.pipeline.tokens(used.id) == 0);
  fresh clean(s);
  for (fresh* f : {&used, &clean}) prompt_only(f->pipeline, f->id, second, 90);
  CHECK(decode(used.pipeline, used.id, second, 30) == decode(clean.pipeline, clean.id, second, 30));
}

TEST_CASE("keys and values come as stored elements or as floats to be rounded", "[sequences]") {
  const auto s = tiny_settings();
  const text source(s, head_dim, 100, 4);
  fresh a(s), b(s);
  prompt_only(a.pipeline, a.id, source, 80);
  const auto expected = decode(a.pipeline, a.id, source, 20);
  auto step = b.pipeline.begin_step({{b.id, 80, step_phase::prefill}});
  for (int layer = 0; layer < 3; ++layer) {
    const auto rows = source.at(layer, 0, 80);
    const auto keys = stored_as<freekv::half>(rows.keys);
    const auto values = stored_as<freekv::half>(rows.values);
    step.append(layer, {.keys = keys, .values = values});
  }
  step.end();
  CHECK(decode(b.pipeline, b.id, source, 20) == expected);
}

TEST_CASE("full attention may be asked for before and after attend, and changes nothing", "[sequences]") {
  const auto s = tiny_settings();
  const text source(s, head_dim, 100, 6);
  fresh plain(s), measured(s);
  for (fresh* f : {&plain, &measured}) prompt_only(f->pipeline, f->id, source, 80);
  int wrong = 0, lossy = 0;
  for (int t = 80; t < 100; ++t) {
    const auto expected = run_step(plain.pipeline, plain.id, source, 1, step_phase::decode);
    auto& p = measured.pipeline;
    auto step = p.begin_step({{measured.id}});
    sequence_result got;
    for (int layer = 0; layer < 3; ++layer) {
      const auto rows = source.at(layer, t, 1);
      step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
      std::vector<float> out(6 * head_dim), lse(6), full(6 * head_dim), full_lse(6), again(6 * head_dim);
      step.attend_full(layer, full, full_lse);
      step.attend(layer, out, lse);
      step.attend_full(layer, again);
      CHECK(same_bits(full, again));
      got.out.insert(got.out.end(), out.begin(), out.end());
      got.lse.insert(got.lse.end(), lse.begin(), lse.end());
      lossy += layer > 0 && !same_bits(full, out);
      if (layer == 0) CHECK(same_bits(full, out));  // a complete layer loses nothing
      for (int head = 0; head < 6; ++head) {
        const auto all = source.at(layer, 0, t + 1);
        std::vector<std::span<const float>> keys, values;
        for (int token = 0; token <= t; ++token) {
          keys.push_back(oracle::row_of(all.keys, token * 2 + head / 3, head_dim));
          values.push_back(oracle::row_of(all.values, token * 2 + head / 3, head_dim));
        }
        const auto exact = oracle::attend(oracle::row_of(rows.queries, head, head_dim), keys, values,
                                          oracle::default_scale(head_dim));
        wrong += !is_near(full_lse[count(head)], exact.lse[0], 1e-5 * std::max(1.0, std::fabs(exact.lse[0])));
        for (int i = 0; i < head_dim; ++i)
          wrong += !is_near(full[count(head * head_dim + i)], exact.out[count(i)], 2e-5);
      }
    }
    step.end();
    for (int layer = 0; layer < 3; ++layer) add_report(p, layer, measured.id, got);
    CHECK(got == expected);
  }
  CHECK(wrong == 0);
  CHECK(lossy > 20);
}

TEST_CASE("lse need not be asked for", "[sequences]") {
  const auto s = tiny_settings();
  const text source(s, head_dim, 90, 7);
  fresh f(s);
  prompt_only(f.pipeline, f.id, source, 80);
  auto step = f.pipeline.begin_step({{f.id}});
  for (int layer = 0; layer < 3; ++layer) {
    const auto rows = source.at(layer, 80, 1);
    step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
    std::vector<float> out(6 * head_dim, quiet_nan);
    step.attend(layer, out);
    CHECK(std::none_of(out.begin(), out.end(), [](float x) { return std::isnan(x); }));
  }
  step.end();
}

TEST_CASE("sequences that bring no rows, and steps without any, are no matter", "[sequences]") {
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  const text source(s, head_dim, 100, 8);
  fresh plain(s), idle(s);
  const auto other = idle.pipeline.open();
  for (fresh* f : {&plain, &idle}) prompt_only(f->pipeline, f->id, source, 80);
  for (int t = 80; t < 100; ++t) {
    const auto expected = run_step(plain.pipeline, plain.id, source, 1, step_phase::decode);
    run_step(idle.pipeline, {});
    auto step = idle.pipeline.begin_step({{idle.id, 0, step_phase::decode}});
    step.end();  // no rows: no layer need be appended to
    const auto got = run_step(idle.pipeline, {{other, &source, 0, step_phase::prefill}, {idle.id, &source}});
    CHECK(got[1] == expected);
    CHECK(got[0].out.empty());
  }
  CHECK(idle.pipeline.tokens(other) == 0);
}

TEST_CASE("each layer may have a budget of its own", "[sequences]") {
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    dice d(seed);
    auto s = random_settings(d);
    s.capacity.max_decode_rows = 3;
    const std::vector<freekv::budget> budgets{{0, 8, 1}, {16, 24, 4}, {8, 40, 2}};
    s.budget_of_layer = budgets;
    const text source(s, head_dim, 150, seed);
    const auto outputs = [&](const auto& settings) {
      fresh f(settings);
      prompt_only(f.pipeline, f.id, source, 90);
      std::vector<sequence_result> results;
      for (const int rows : {1, 3, 1, 2, 1, 1, 3, 1, 1, 2})
        results.push_back(run_step(f.pipeline, f.id, source, rows, step_phase::decode));
      return results;
    };
    const auto mixed = outputs(s);
    for (int layer = 0; layer < 3; ++layer) {
      auto alike = s;
      alike.budget_of_layer.clear();
      alike.budget = budgets[count(layer)];
      const auto expected = outputs(alike);
      for (std::size_t step = 0; step < mixed.size(); ++step) {
        const auto of_layer = [&](const std::vector<float>& all) {
          return std::span(all).subspan(all.size() / 3 * count(layer), all.size() / 3);
        };
        CHECK(same_bits(of_layer(mixed[step].out), of_layer(expected[step].out)));
      }
    }
  }
  auto s = tiny_settings();
  s.budget_of_layer = {{0, 8, 1}, {0, 8, 1}};
  CHECK_THROWS_WITH(fresh(s), "budget_of_layer has 2 budgets for 3 layers; give one for each, or none");
  s.budget_of_layer = {{0, 8, 1}, {4, 8, 1}, {0, 8, 1}};
  CHECK_THROWS_WITH(fresh(s), "sink of 4 tokens is not a multiple of the page size 8");
}

TEST_CASE("a new sequence has attended to nothing, whoever had its place before", "[sequences]") {
  auto s = tiny_settings();
  const text source(s, head_dim, 120, 1);
  fresh f(s);
  prompt_only(f.pipeline, f.id, source, 100);
  run_step(f.pipeline, f.id, source, 1, step_phase::decode);
  CHECK(f.pipeline.report(1)[f.id].attended_count[0] == 2);
  f.pipeline.release(f.id);
  const auto next = f.pipeline.open();
  REQUIRE(next == f.id);
  for (int layer = 0; layer < 3; ++layer) {
    const auto report = f.pipeline.report(layer)[next];
    for (int head = 0; head < 2; ++head) {
      CHECK(report.attended_count[count(head)] == 0);
      CHECK(report.corrected[count(head)] == 0);
      CHECK(report.recalled[count(head)] + report.recalled_before_attention[count(head)] +
                report.promoted[count(head)] ==
            0);
    }
  }
}
