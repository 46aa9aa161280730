// The pipeline of methods that forget: what it keeps, what it takes, what it refuses.

#include <string>
#include <tuple>
#include <vector>

#include "../agreement.hpp"
#include "../catch.hpp"
#include "../counting_resource.hpp"
#include "../property/seeds.hpp"
#include "fused_rows.hpp"
#include "given_pages.hpp"
#include "reports.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using Catch::Contains;
using freekv::layer_kind;
using freekv::pool_exhausted;
using freekv::settings_error;
using freekv::step_phase;
using freekv::usage_error;

using any_eviction =
    freekv::any_of<freekv::h2o, freekv::tova, freekv::snapkv, freekv::dapq, freekv::pyramid_kv, freekv::raas,
                   freekv::lazy_eviction, freekv::hard_kv, freekv::defensive_kv, freekv::layer_defensive_kv,
                   freekv::compress_kv, freekv::cake, freekv::r_kv, freekv::arkv_origin, freekv::arkv,
                   freekv::arkv_split, freekv::mikv, freekv::q_hitter, freekv::d2o, freekv::exact_merge,
                   freekv::hard_kv_merge, freekv::hard_kv_pairs, freekv::kv_merger,
                   freekv::razor_attention_compensated, freekv::trim_kv, freekv::given_worths, given_pages>;
using forgetful = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, any_eviction>;
constexpr std::size_t row_bytes = 2 * 24 * sizeof(freekv::half);  // a KV head's keys and values of a token

/// Three layers, the first of them complete; 6 query heads on 2 KV heads.
forgetful::settings settings_of(any_eviction eviction) {
  forgetful::settings s;
  s.model = {.layers = 3, .query_heads = 6, .kv_heads = 2};
  s.budget = 40;
  s.capacity.max_prompt = 150;
  s.capacity.max_generated = 80;
  s.capacity.max_sequences = s.capacity.max_prefills = 2;
  s.eviction = eviction;
  return s;
}
const freekv::raas small_raas{.page = 8, .room = 16, .keeps_prompt = true};
const freekv::raas cut_raas{.page = 8, .sink = 8, .window = 8};
constexpr std::array kinds_of_heads{layer_kind::complete, layer_kind::complete, layer_kind::window,
                                    layer_kind::complete, layer_kind::window,   layer_kind::window};
const freekv::razor_attention_compensated razor_by_head{.kinds = kinds_of_heads, .kv_heads = 2};
constexpr std::array<std::uint8_t, 18> voters_of_three_layers{1, 0, 0, 0, 0, 0,  // mostly complete
                                                              0, 1, 0, 0, 0, 1,  //
                                                              0, 0, 0, 0, 1, 0};
const freekv::compress_kv listed_voters{.heads = voters_of_three_layers, .query_heads = 6};
freekv::hard_kv_merge hard_kv_merge_of_16() {
  freekv::hard_kv_merge policy;
  policy.interval = 16;
  return policy;
}
template <class Arkv>
Arkv arkv_of_8() {
  Arkv policy;
  policy.window = 8;
  return policy;
}
std::vector<any_eviction> all_evictions() {
  return {freekv::h2o{},
          freekv::tova{},
          freekv::snapkv{},
          freekv::dapq{},
          freekv::pyramid_kv{},
          freekv::lazy_eviction{.window = 16},
          freekv::hard_kv{.interval = 16},
          freekv::defensive_kv{},
          freekv::layer_defensive_kv{},
          freekv::compress_kv{},
          listed_voters,
          freekv::cake{},
          freekv::r_kv{.interval = 16},
          freekv::arkv_origin{.window = 8},
          arkv_of_8<freekv::arkv>(),
          arkv_of_8<freekv::arkv_split>(),
          freekv::mikv{},
          freekv::q_hitter{},
          freekv::d2o{},
          freekv::exact_merge{},
          hard_kv_merge_of_16(),
          freekv::hard_kv_pairs{{.interval = 16}},
          freekv::kv_merger{},
          freekv::razor_attention_compensated{},
          razor_by_head,
          freekv::trim_kv{},
          freekv::given_worths{.sink = 3},
          given_pages{},
          given_pages{.keeps_prompt = true},
          small_raas,
          cut_raas};
}
std::string name_of(const any_eviction& eviction) {
  return resolve(eviction, [](const auto& e) { return std::string(e.name); });
}
int unit_of(const any_eviction& eviction) {
  return resolve(eviction, [](const auto& e) { return e.unit_tokens(); });
}

std::vector<sequence_result> prompt_and_decode(forgetful& p, const text& source,
                                               const std::vector<int>& chunks, int steps) {
  const auto id = p.open();
  std::vector<sequence_result> by_layer(3);
  for (const int tokens : chunks) {
    const auto part = run_step(p, id, source, tokens, step_phase::prefill);
    for (std::size_t layer = 0; layer < 3; ++layer) {
      const auto add = [&](std::vector<float>& to, const std::vector<float>& from) {
        const auto first = from.begin() + static_cast<std::ptrdiff_t>(layer * from.size() / 3);
        to.insert(to.end(), first, first + static_cast<std::ptrdiff_t>(from.size() / 3));
      };
      add(by_layer[layer].out, part.out);
      add(by_layer[layer].lse, part.lse);
    }
  }
  auto results = decode(p, id, source, steps);
  results.insert(results.end(), by_layer.begin(), by_layer.end());
  p.release(id);
  return results;
}

/// What all layers of a sequence of 101 tokens are given: keys and values (101, 2, 24), queries (101, 6, 24).
struct rows_of_101 {
  std::vector<float> keys = std::vector<float>(101 * 2 * 24), values = std::vector<float>(101 * 2 * 24, 1.0f),
                     queries = std::vector<float>(101 * 6 * 24);
};
/// The rows from `first` on, so many, are appended in a step, and attend if they are decoded.
void append_some(forgetful& p, freekv::sequence_id id, const rows_of_101& all, int first, int tokens,
                 step_phase phase) {
  const auto part = [&](const std::vector<float>& of) {
    return std::span(of).subspan(count(first) * of.size() / 101, count(tokens) * of.size() / 101);
  };
  std::vector<float> out(6 * 24);
  auto begun = p.begin_step({{id, tokens, phase}});
  for (int layer = 0; layer < p.configuration().model.layers; ++layer) {
    begun.append<float>(layer,
                        {.keys = part(all.keys), .values = part(all.values), .queries = part(all.queries)});
    if (phase == step_phase::decode) begun.attend(layer, out);
  }
  begun.end();
}

}  // namespace

TEST_CASE("results depend neither on a prompt's chunks, nor on threads, nor on other sequences",
          "[eviction]") {
  for (const auto& eviction : in_turns(all_evictions())) {
    INFO(name_of(eviction));
    const auto s = settings_of(eviction);
    const text source(s, 24, 230, 1), other(s, 24, 230, 2);
    freekv::host_backend one;
    forgetful alone(s, one);
    const auto expected = prompt_and_decode(alone, source, {150}, 70);
    CHECK(prompt_and_decode(alone, source, {150}, 70) == expected);  // nothing is left of the first
    CHECK(prompt_and_decode(alone, source, {1, 31, 7, 64, 47}, 70) == expected);
    freekv::host_backend three({.threads = 3, .bytes_per_thread = 64});
    forgetful threaded(s, three);
    CHECK(prompt_and_decode(threaded, source, {100, 50}, 70) == expected);

    const auto a = threaded.open(), b = threaded.open();
    run_step(threaded, {{b, &other, 90, step_phase::prefill}, {a, &source, 20, step_phase::prefill}});
    run_step(threaded, {{a, &source, 130, step_phase::prefill}, {b, &other, 1}});
    for (int step = 0; step < 70; ++step)
      CHECK(run_step(threaded, {{b, &other}, {a, &source}})[1] == expected[count(step)]);
  }
}

TEST_CASE("a fork goes on as its parent would, bit for bit, whatever either does", "[eviction][fork]") {
  constexpr int prompt = 60, all = 110;
  const auto feed = [&](forgetful& p, freekv::sequence_id id, const text& of, int to) {
    std::vector<std::vector<sequence_result>> results;
    while (p.tokens(id) < to) {
      const bool prompts = p.tokens(id) < prompt;
      const int tokens = prompts ? std::min(prompt, to) - p.tokens(id) : 1;
      results.push_back(run_step(p, {{id, &of, tokens, prompts ? step_phase::prefill : step_phase::decode}}));
    }
    return results;
  };
  std::uint64_t seed = 0;
  for (const auto& eviction : in_turns(all_evictions())) {
    dice d(++seed);
    auto s = settings_of(eviction);
    s.capacity.max_sequences = s.capacity.max_prefills = 3;
    const text source(s, 24, all, seed), other(s, 24, all, seed + 100);
    freekv::host_backend backend;
    forgetful alone(s, backend);
    const int in_prompt = d.one_of({0, d.between(1, prompt - 1), prompt, prompt}),
              decoding = prompt + d.one_of({1, d.between(2, 20)});
    for (const int length : {in_prompt, decoding}) {
      INFO(name_of(eviction) << ", seed " << seed << ", forked at " << length);
      const text turned = text::spliced(source, length, other);
      forgetful p(s, backend);
      const auto parent = p.open();
      feed(p, parent, source, length);
      const auto child = p.fork(parent), grandchild = p.fork(child);
      CHECK(p.tokens(child) == length);
      CHECK(p.kept_bytes(child) == p.kept_bytes(parent));
      const auto coded = [&](freekv::sequence_id id, int layer, int head) {
        const auto report = p.report(layer)[id];
        return report.coded_count.empty() ? std::vector<int>{}
                                          : of_head(report.coded, report.coded_count, head);
      };
      for (int layer = 0; layer < 3; ++layer)
        for (int head = 0; head < 2; ++head) {
          CHECK(attended(p, layer, child, head) == attended(p, layer, parent, head));
          CHECK(coded(child, layer, head) == coded(parent, layer, head));
        }
      const auto from_fork = [&](const text& of) {
        const auto id = alone.open();
        feed(alone, id, source, length);
        auto results = feed(alone, id, of, all);
        alone.release(id);
        return results;
      };
      const auto as_parent = from_fork(source);
      CHECK(feed(p, child, turned, all) == from_fork(turned));
      CHECK(feed(p, parent, source, all) == as_parent);
      p.release(parent);
      p.release(child);
      CHECK(feed(p, grandchild, source, all) == as_parent);
    }
  }
}

TEST_CASE("forks of an evicting pipeline are refused in sentences, and change nothing",
          "[eviction][errors]") {
  auto s = settings_of(freekv::h2o{});
  s.capacity.max_sequences = 3;
  const text source(s, 24, 230, 1);
  freekv::host_backend backend;
  forgetful p(s, backend);
  CHECK_THROWS_WITH(p.fork(freekv::sequence_id{1}), "sequence 1 is not open");
  const auto a = p.open();
  run_step(p, a, source, 20, step_phase::prefill);
  const auto b = p.fork(a);
  CHECK_THROWS_WITH(p.fork(b), Contains("prompt stagings exhausted: 2 of 2 in use, a fork needs 1") &&
                                   Contains("raise max_prefills"));
  run_step(p, b, source, 1, step_phase::decode);  // which gives its staging back
  const auto c = p.fork(b);
  CHECK_THROWS_WITH(p.fork(c), Contains("sequences exhausted: 3 of 3 in use, a fork needs 1"));
  CHECK(p.tokens(a) == 20);
  CHECK(p.tokens(c) == 21);
  auto begun = p.begin_step({{c, 1}});
  CHECK_THROWS_WITH(p.fork(a), Contains("fork") && Contains("step"));
  begun.abandon();
}

TEST_CASE(
    "rows of 16 bits in a fused tensor give what the same numbers give as floats, in what is forgotten too",
    "[eviction]") {
  std::uint64_t seed = 0;
  for (const auto& eviction : in_turns(all_evictions())) {
    dice d(++seed);
    INFO(name_of(eviction));
    const auto s = settings_of(eviction);
    const text a(s, 24, 230, seed), b(s, 24, 230, seed + 100);
    freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
    forgetful plain(s, backend), fused(s, backend);
    const freekv::sequence_id ids[] = {plain.open(), plain.open()};
    REQUIRE((fused.open() == ids[0] && fused.open() == ids[1]));
    const auto both = [&]<class Number, class Out>(Number, Out, int tokens, step_phase phase) {
      compare_step<Number, Out>(plain, fused, {{ids[0], tokens, phase}, {ids[1], tokens, phase}}, {&a, &b},
                                d);
    };
    both(freekv::half{}, freekv::half{}, 60, step_phase::prefill);
    both(0.0f, freekv::bfloat16{}, 30, step_phase::prefill);
    for (int step = 0; step < 12; ++step) {
      both(freekv::half{}, 0.0f, 1, step_phase::decode);
      both(0.0f, freekv::half{}, 1, step_phase::decode);
    }
  }
}

TEST_CASE("a budget that holds everything is full attention", "[eviction]") {
  using everything = freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, 24>,
                                                freekv::every_layer<freekv::layer_kind::complete>>;
  for (const auto& eviction : in_turns(all_evictions())) {
    INFO(name_of(eviction));
    auto s = settings_of(eviction);
    s.budget = 230;
    const text source(s, 24, 230, 3);
    freekv::host_backend backend;
    forgetful p(s, backend);
    everything full(
        {.model = {.layers = 3, .query_heads = 6, .kv_heads = 2}, .capacity = {.max_tokens = 230}}, backend);
    const auto id = p.open(), same = full.open();
    for (const int tokens : {150, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}) {
      const auto kind = tokens == 1 ? step_phase::decode : step_phase::prefill;
      const auto got = run_step(p, id, source, tokens, kind),
                 want = run_step(full, same, source, tokens, kind);
      double worst = 0;
      for (std::size_t i = 0; i < got.out.size(); ++i)
        worst =
            std::max(worst, std::fabs(static_cast<double>(got.out[i]) - static_cast<double>(want.out[i])));
      if (name_of(eviction) != "q_hitter") CHECK(worst < 2e-6);  // it has all tokens in 4 bits
    }
    CHECK(attended(p, 1, id, 0) == from_to(0, 160 / unit_of(eviction) - 1));
  }
}

TEST_CASE("of RazorAttention's heads some keep everything, the others a token for all that left",
          "[eviction]") {
  using everything = freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, 24>,
                                                freekv::every_layer<freekv::layer_kind::complete>>;
  const auto s = settings_of(razor_by_head);
  text source(s, 24, 230, 5);
  // Queries of zero attend to the mean of what has left as to each of it.
  for (const bool zero : {false, true}) {
    if (zero) source.zero_queries();
    freekv::host_backend backend({.threads = 2, .bytes_per_thread = 64});
    forgetful p(s, backend);
    everything full({.model = s.model, .capacity = {.max_tokens = 230}}, backend);
    const auto other = p.open(), id = p.open(), same = full.open();
    CHECK(other != id);
    for (int tokens = 150; tokens <= 210; ++tokens) {
      const int now = tokens == 150 ? tokens : 1;
      const auto kind = now == 1 ? step_phase::decode : step_phase::prefill;
      const auto got = run_step(p, id, source, now, kind), want = run_step(full, same, source, now, kind);
      const int first_row = kind == step_phase::decode ? 0 : 149;
      for (int layer = 0; layer < 3; ++layer)
        for (int head = 0; head < 6; ++head) {
          const bool keeps = layer == 0 || (layer == 1 && head >= 3);
          const std::size_t row = count((layer * now + first_row) * 6 + head);
          double apart = std::fabs(static_cast<double>(got.lse[row]) - static_cast<double>(want.lse[row]));
          for (std::size_t x = row * 24; x < (row + 1) * 24; ++x)
            apart = std::max(apart,
                             std::fabs(static_cast<double>(got.out[x]) - static_cast<double>(want.out[x])));
          INFO("layer " << layer << ", query head " << head << ", " << tokens << " tokens");
          if (keeps) CHECK(apart < 2e-6);
          if (!keeps && zero) CHECK(apart < 2e-3);  // the mean is rounded to half in every step
          if (!keeps && !zero && now == 1) CHECK(apart > 1e-4);
        }
    }
    CHECK(attended(p, 1, id, 1) == from_to(0, 209));
    auto held = from_to(0, 4);  // the sink, and the token that the others are in
    for (const int token : from_to(174, 209)) held.push_back(token);  // the row itself besides
    CHECK(attended(p, 1, id, 0) == held);
  }
}

TEST_CASE("of units that are worth the same the first leaves", "[eviction]") {
  // Queries of zero attend to everything alike.
  const std::vector<float> queries(150 * 6 * 24, 0.0f), rows(150 * 2 * 24, 1.0f), nothing(6 * 24, quiet_nan);
  std::vector<float> out(6 * 24);
  const auto after = [&](const any_eviction& eviction, int prompt, int steps, int head, int nan_step = -1) {
    auto s = settings_of(eviction);
    s.model.layers = 1;
    s.plan = {{0}};
    freekv::host_backend backend;
    forgetful p(s, backend);
    const auto id = p.open();
    const auto part = [&](const std::vector<float>& of, int tokens) {
      return std::span(of).first(count(tokens) * of.size() / 150);
    };
    if (prompt > 0) {
      auto begun = p.begin_step({{id, prompt, step_phase::prefill}});
      begun.append<float>(0, {part(rows, prompt), part(rows, prompt), part(queries, prompt)});
      begun.end();
    }
    for (int step = 0; step < steps; ++step) {
      auto begun = p.begin_step({{id}});
      begun.append<float>(
          0, {part(rows, 1), part(rows, 1), step == nan_step ? std::span(nothing) : part(queries, 1)});
      begun.attend(0, out);
      begun.end();
    }
    return attended(p, 0, id, head);
  };
  const auto both = [](std::vector<int> a, const std::vector<int>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  for (const int head : {0, 1}) {
    // Earlier tokens have been attended to more often.
    CHECK(after(freekv::h2o{}, 100, 1, head) == both(from_to(0, 19), from_to(80, 100)));
    CHECK(after(freekv::h2o{}, 100, 30, head) == both(from_to(0, 19), from_to(109, 129)));
    CHECK(after(freekv::h2o{.recent = 0.0f}, 0, 60, head) == both(from_to(0, 39), {59}));
    CHECK(after(freekv::tova{}, 100, 1, head) == from_to(60, 100));
    CHECK(after(freekv::tova{}, 100, 30, head) == from_to(89, 129));
    // Half of the window's rows see nothing of the window's later half, but that is not voted on.
    CHECK(after(freekv::snapkv{}, 100, 1, head) == from_to(60, 100));
    CHECK(after(freekv::snapkv{}, 100, 30, head) == from_to(60, 129));
    CHECK(after(freekv::snapkv{}, 0, 60, head) == from_to(0, 59));
    // None of the prompt stays by its place: tokens that the whole window sees, and their neighbours, before
    // later ones.
    CHECK(after(freekv::dapq{}, 100, 1, head) == both(from_to(32, 71), {100}));
    // Pages 0 to 12 are the prompt's; two more have room, and the newest attends before one leaves.
    CHECK(after(small_raas, 100, 20, head) == from_to(0, 14));
    CHECK(after(small_raas, 100, 21, head) == from_to(0, 15));
    CHECK(after(small_raas, 100, 22, head) == both(from_to(0, 12), {14, 15}));
    CHECK(after(small_raas, 0, 41, head) == from_to(0, 5));
    CHECK(after(small_raas, 0, 42, head) == from_to(1, 5));
    // A row whose attention is NaN gives nothing to any token.
    CHECK(after(freekv::h2o{}, 100, 30, head, 5) == both(from_to(0, 19), from_to(109, 129)));
    CHECK(after(freekv::tova{}, 100, 30, head, 5) == from_to(89, 129));
    CHECK(after(small_raas, 100, 22, head, 5) == both(from_to(0, 12), {14, 15}));
    // A page that never has its share keeps the stamp of its last token.
    CHECK(after(freekv::raas{.page = 8, .threshold = 2.0f, .room = 16, .keeps_prompt = true}, 0, 60, head) ==
          from_to(3, 7));
    // A prompt that is cut: page 0 and page 12, which is being filled, stay, and of the others, attended to
    // alike, the last three.
    const auto first_and = [&](int first, int last) { return both({0}, from_to(first, last)); };
    CHECK(after(cut_raas, 100, 1, head) == first_and(9, 12));
    CHECK(after(cut_raas, 100, 5, head) == first_and(9, 13));
    CHECK(after(cut_raas, 100, 6, head) == first_and(10, 13));
    CHECK(after(cut_raas, 38, 3, head) == from_to(0, 5));
    CHECK(after(cut_raas, 38, 4, head) == first_and(2, 5));
    const freekv::raas without{.page = 8, .sink = 0, .window = 0};
    CHECK(after(without, 100, 1, head) == from_to(8, 12));
    CHECK(after(without, 100, 6, head) == from_to(9, 13));
    // What no decode row has stamped leaves before what one has appended.
    CHECK(after(freekv::raas{.page = 8, .threshold = 2.0f, .sink = 0, .window = 0}, 100, 30, head) ==
          from_to(12, 16));
  }
}

TEST_CASE("bytes are those of the budget, and there is no store", "[eviction][memory]") {
  freekv::host_backend backend;
  const auto bytes_of = [&](const any_eviction& eviction, const auto& change) {
    auto s = settings_of(eviction);
    change(s);
    return forgetful::footprint(s, backend).bytes();
  };
  const auto as_is = [](auto&) {};
  const std::size_t token = 2 * 2 * 2 * row_bytes;  // 2 layers that forget, 2 sequences, 2 KV heads
  for (const any_eviction& eviction : {any_eviction{freekv::h2o{}}, any_eviction{freekv::tova{}}}) {
    CHECK(bytes_of(eviction, as_is).slots == 41 * token);
    CHECK(bytes_of(eviction, [](auto& s) {
            s.capacity.max_prompt = s.capacity.max_generated = 1'000'000;
          }).slots == 41 * token);
    CHECK(bytes_of(eviction, [](auto& s) {
            s.capacity.max_prompt = 10, s.capacity.max_generated = 5;
          }).slots == 15 * token);
  }
  CHECK(bytes_of(freekv::snapkv{}, as_is).slots == (40 + 80) * token);
  CHECK(bytes_of(freekv::snapkv{}, [](auto& s) { s.capacity.max_prompt = 1'000'000; }).slots ==
        (40 + 80) * token);
  CHECK(bytes_of(small_raas, as_is).slots == (152 + 16 + 8) * token);
  CHECK(bytes_of(small_raas, [](auto& s) { s.capacity.max_prompt = 10; }).slots == (40 + 8) * token);
  CHECK(bytes_of(small_raas, [](auto& s) {
          s.capacity.max_prompt = 10, s.capacity.max_generated = 1'000'000;
        }).slots == (40 + 8) * token);

  // A prompt waits in the staging, for as many sequences as have one; H2O keeps votes beside it, the others
  // queries.
  const auto rounded_up = [](std::size_t bytes) { return (bytes + 127) / 128 * 128; };
  const std::size_t staged = rounded_up(2 * 2 * 150 * row_bytes);
  CHECK(bytes_of(freekv::h2o{}, as_is).staging == 2 * (staged + rounded_up(2 * 2 * 150 * sizeof(float))));
  CHECK(bytes_of(freekv::tova{}, as_is).staging == 2 * (staged + rounded_up(2 * 1 * 6 * 24 * sizeof(float))));
  CHECK(bytes_of(freekv::snapkv{}, as_is).staging ==
        2 * (staged + rounded_up(2 * 32 * 6 * 24 * sizeof(float))));
  CHECK(bytes_of(freekv::tova{}, [](auto& s) { s.capacity.max_sequences = 7; }).staging ==
        bytes_of(freekv::tova{}, as_is).staging);
  CHECK(bytes_of(small_raas, as_is).staging == 0);
  CHECK(bytes_of(cut_raas, as_is).slots == (40 + 8) * token);
  CHECK(bytes_of(cut_raas, [](auto& s) { s.capacity.max_prompt = 1'000'000; }).slots == (40 + 8) * token);
  CHECK(bytes_of(cut_raas, as_is).staging == bytes_of(freekv::tova{}, as_is).staging);

  // Heads that keep everything have room for it, and the others for no more than their budget.
  CHECK(bytes_of(razor_by_head, as_is).slots ==
        rounded_up(2 * (41 + 230) * row_bytes) + rounded_up(2 * (41 + 41) * row_bytes));
  CHECK(bytes_of(freekv::razor_attention_compensated{}, as_is).slots == 41 * token);

  for (const auto& eviction : all_evictions()) {
    const auto needed = bytes_of(eviction, as_is);
    CHECK(needed.store == 2 * 2 * 230 * row_bytes);  // of the complete layer
    CHECK(needed.complete == needed.store);
    CHECK(bytes_of(eviction, [](auto& s) { s.plan = {{0}}; }).store == 0);
    CHECK(needed.summaries == 0);
    CHECK(needed.fast_tier() == needed.slots + needed.complete);
    counting_resource slow, fast;
    const forgetful::footprint needs(settings_of(eviction), backend);
    const forgetful p(needs, backend, {&slow, &fast});
    CHECK(slow.sum() == needs.slow_bytes());
    CHECK(fast.sum() == needs.fast_bytes());
    CHECK(slow.sum() == needed.store);
    CHECK(fast.sum() == needed.slots + needed.state + needed.staging);
    CHECK(p.bytes().total() == needed.total());
    CHECK(p.slice_bytes() == row_bytes * count(unit_of(eviction)));
  }
}

TEST_CASE("prompts take turns in the staging", "[eviction][errors]") {
  for (const auto& eviction : in_turns(all_evictions())) {
    INFO(name_of(eviction));
    auto s = settings_of(eviction);
    s.capacity.max_sequences = 3;
    s.capacity.max_prefills = 1;
    const text first(s, 24, 230, 4), second(s, 24, 230, 5);
    freekv::host_backend backend;
    forgetful p(s, backend);
    const auto expected = prompt_and_decode(p, second, {120}, 50);
    const auto a = p.open(), b = p.open();
    run_step(p, a, first, 60, step_phase::prefill);
    if (resolve(eviction, [](const auto& e) { return e.stages_prompt(); })) {
      try {
        const auto step = p.begin_step({{a, 1, step_phase::prefill}, {b, 120, step_phase::prefill}});
        FAIL_CHECK("nothing was thrown");
      } catch (const pool_exhausted& e) {
        CHECK_THAT(e.what(), Contains("prompt stagings exhausted: 1 of 1 in use, the step needs 1 more"));
        CHECK(e.needed == 1);
      }
      CHECK(p.tokens(a) == 60);
      CHECK(p.tokens(b) == 0);
    }
    run_step(p, {{a, &first}});  // its prompt has ended
    run_step(p, {{b, &second, 120, step_phase::prefill}, {a, &first}});
    for (int step = 0; step < 50; ++step)
      CHECK(run_step(p, {{a, &first}, {b, &second}})[1] == expected[count(step)]);
    // What is released, or abandoned, gives its staging back.
    const auto c = p.open();
    run_step(p, c, first, 10, step_phase::prefill);
    p.release(c);
    const auto d = p.open();
    { const auto left = p.begin_step({{d, 10, step_phase::prefill}}); }
    CHECK_THROWS_AS(p.tokens(d), usage_error);
    p.release(b);
    CHECK(prompt_and_decode(p, second, {120}, 50) == expected);
  }
}

TEST_CASE("calls that an evicting pipeline cannot follow are refused and change nothing",
          "[eviction][errors]") {
  const auto s = settings_of(freekv::tova{});
  const text source(s, 24, 240, 6);
  freekv::host_backend backend;
  forgetful p(s, backend);
  const auto expected = prompt_and_decode(p, source, {100}, 20);
  const auto id = p.open();
  const auto refuses = [&]<class Error>(const Error*, const char* words, const auto& call) {
    const int before = p.tokens(id);
    try {
      call();
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const Error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
    CHECK(p.tokens(id) == before);
  };
  const usage_error* const usage = nullptr;
  const pool_exhausted* const exhausted = nullptr;
  forgetful::step step;
  const auto begin = [&](int tokens, step_phase kind) { step = p.begin_step({{id, tokens, kind}}); };
  refuses(exhausted, "prompt tokens of sequence 0 exhausted: 0 of 150 in use, the step needs 151 more",
          [&] { begin(151, step_phase::prefill); });
  refuses(usage, "sequence 0 brings -1 prompt rows", [&] { begin(-1, step_phase::prefill); });
  refuses(usage, "sequence 0 brings 2 decode rows; where tokens are forgotten a step takes one",
          [&] { begin(2, step_phase::decode); });
  refuses(usage, "sequence 1 is not open", [&] { step = p.begin_step({{id}, {freekv::sequence_id{1}}}); });
  refuses(usage, "sequence -1 is not open", [&] { p.release(freekv::sequence_id{-1}); });
  refuses(usage, "sequence 0 is listed twice", [&] { step = p.begin_step({{id}, {id}}); });
  refuses(usage, "end: no step is in progress here", [&] { step.end(); });
  refuses(usage, "append: no step is in progress here", [&] { step.append<float>(0, {}); });

  begin(100, step_phase::prefill);
  const auto rows = source.at(0, 0, 100);
  const std::span<const float> none;
  std::vector<float> out(100 * 6 * 24);
  refuses(usage, "open: the step in progress has not ended", [&] { p.open(); });
  refuses(usage, "begin_step: the step in progress", [&] { begin(1, step_phase::decode); });
  refuses(usage, "layer 3 is not one of 3", [&] { step.append<float>(3, {}); });
  refuses(usage, "attend: layer 0 is not appended to yet", [&] { step.attend(0, out); });
  refuses(usage, "append: keys: 0 numbers for 100 rows of 48", [&] {
    step.append<float>(0, {none, rows.values, none});
  });
  refuses(usage, "append: values: 0 numbers", [&] { step.append<float>(0, {rows.keys, none, none}); });
  refuses(usage, "append: queries: 1 numbers for 100 rows of 144", [&] {
    step.append<float>(0, {rows.keys, rows.values, rows.queries.first(1)});
  });
  step.append<float>(0, {rows.keys, rows.values, none});  // a complete layer observes nothing
  refuses(usage, "append was given no queries", [&] { step.attend(0, out); });
  refuses(usage, "layer 0 is appended to already", [&] {
    step.append<float>(0, {rows.keys, rows.values, none});
  });
  refuses(usage, "append: tova observes prompt rows; give their queries", [&] {
    step.append<float>(1, {rows.keys, rows.values, none});
  });
  refuses(usage, "end: layer 1 of 3 was not appended to", [&] { step.end(); });
  for (const int layer : {1, 2}) {
    const auto of = source.at(layer, 0, 100);
    step.append<float>(layer, {of.keys, of.values, of.queries});
  }
  refuses(usage, "layer 1 attends before the next is appended to, which was layer 2",
          [&] { step.attend(1, out); });
  refuses(usage, "attention output: 1 numbers", [&] { step.attend(2, std::span(out).first(1)); });
  refuses(usage, "log-sum-exp: 1 numbers", [&] { step.attend(2, out, std::span(out).first(1)); });
  step.end();

  CHECK(run_step(p, {{id, &source}})[0] == expected[0]);
  refuses(usage,
          "sequence 0 has decoded and forgotten tokens, which prompt rows would attend to; open another",
          [&] { begin(1, step_phase::prefill); });
  begin(1, step_phase::decode);
  const auto next = source.at(0, 101, 1);
  for (const int layer : {0, 1, 2}) step.append<float>(layer, {next.keys, next.values, next.queries});
  refuses(usage, "end: layer 0 of 3 has not attended its decode rows", [&] { step.end(); });
  step.abandon();
  CHECK(prompt_and_decode(p, source, {100}, 20) == expected);

  const auto longest = p.open();
  decode(p, longest, source, 80);
  CHECK_THROWS_WITH(
      p.begin_step({{longest}}),
      Contains("decoded tokens of sequence 0 exhausted: 80 of 80 in use, the step needs 1 more"));
  p.open();
  CHECK_THROWS_WITH(p.open(), Contains("sequences exhausted: 2 of 2 in use"));
}

TEST_CASE("rows and outputs of an evicting step may have room for more rows", "[eviction]") {
  const auto s = settings_of(freekv::h2o{});
  const text source(s, 24, 230, 8);
  freekv::host_backend backend;
  forgetful p(s, backend), same(s, backend);
  const auto id = p.open(), other = same.open();
  for (int t = 0; t < 100; t += t == 0 ? 60 : 1) {
    const int tokens = t == 0 ? 60 : 1;
    const auto phase = t == 0 ? step_phase::prefill : step_phase::decode;
    auto step = p.begin_step({{id, tokens, phase}});
    sequence_result got;
    for (int layer = 0; layer < 3; ++layer) {
      const auto rows = source.at(layer, t, tokens + 2);
      std::vector<float> out(rows.queries.size(), quiet_nan), lse(count((tokens + 2) * 6), quiet_nan);
      step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
      step.attend(layer, out, lse);
      for (const auto& [numbers, row, into] : {std::tuple{&out, 144, &got.out}, {&lse, 6, &got.lse}}) {
        const auto end = numbers->begin() + tokens * row;
        CHECK(std::all_of(end, numbers->end(), [](float x) { return std::isnan(x); }));
        into->insert(into->end(), numbers->begin(), end);
      }
    }
    step.end();
    const auto want = run_step(same, other, source, tokens, phase);
    CHECK(same_bits(got.out, want.out));
    CHECK(same_bits(got.lse, want.lse));
  }
}

TEST_CASE("settings that contradict each other are refused", "[eviction][errors]") {
  freekv::host_backend backend;
  const auto refuses = [&](const char* words, const auto& change) {
    auto s = settings_of(freekv::h2o{});
    change(s);
    try {
      forgetful::footprint(s, backend);
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const settings_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  refuses("layers is 0", [](auto& s) { s.model.layers = 0; });
  refuses("kv_heads is 0", [](auto& s) { s.model.kv_heads = 0; });
  refuses("query_heads 5 is not a multiple of kv_heads 2", [](auto& s) { s.model.query_heads = 5; });
  refuses("budget is 0 tokens", [](auto& s) { s.budget = 0; });
  constexpr int no_int_is_more = std::numeric_limits<int>::max();  // and sums of it are none
  refuses("budget is 2147483647 tokens; keep 1 to 536870912", [](auto& s) { s.budget = no_int_is_more; });
  refuses("hard_kv: an interval of 2147483647",
          [](auto& s) { s.eviction = freekv::hard_kv{.window = 8, .interval = no_int_is_more}; });
  refuses("r_kv: an interval of 2147483647",
          [](auto& s) { s.eviction = freekv::r_kv{.interval = no_int_is_more}; });
  refuses("room for 2147483647 decoded tokens; give at least 1, and room for a page, at most 536870912",
          [](auto& s) { s.eviction = freekv::raas{.room = no_int_is_more, .keeps_prompt = true}; });
  refuses("lazy_eviction: a window of 40 rows is not from 1 to below the budget of 40",
          [](auto& s) { s.eviction = freekv::lazy_eviction{.window = 40}; });
  refuses("lazy_eviction: threshold is NaN",
          [](auto& s) { s.eviction = freekv::lazy_eviction{.window = 8, .threshold = quiet_nan}; });
  refuses("pyramid_kv: a beta of 0 is below 1", [](auto& s) {
    freekv::pyramid_kv policy;
    policy.beta = 0;
    s.eviction = policy;
  });
  for (const float p : {0.0f, 1.01f, quiet_nan})
    refuses("hard_kv: p of ", [&](auto& s) { s.eviction = freekv::hard_kv{.p = p, .window = 8}; });
  refuses("q_hitter: heavy of 0.8 beside a recent of 0.25", [](auto& s) {
    freekv::q_hitter policy;
    policy.heavy = 0.8f;
    s.eviction = policy;
  });
  const auto infinite = std::numeric_limits<float>::infinity();
  for (const float gamma : {-1.0f, infinite, quiet_nan}) {
    refuses("cake: a gamma of ", [&](auto& s) { s.eviction = freekv::cake{.window = 8, .gamma = gamma}; });
    refuses("arkv_origin: a gamma of ", [&](auto& s) {
      freekv::arkv_origin policy;
      policy.window = 8, policy.gamma = gamma;
      s.eviction = policy;
    });
  }
  refuses("taus of 0 and 0.6", [](auto& s) { s.eviction = freekv::cake{.window = 8, .tau1 = 0.0f}; });
  refuses("razor_attention_compensated has kinds for 2 heads", [](auto& s) {
    s.eviction =
        freekv::razor_attention_compensated{.kinds = std::span(kinds_of_heads).first(2), .kv_heads = 2};
  });
  refuses("max_prompt is -1", [](auto& s) { s.capacity.max_prompt = -1; });
  refuses("max_prompt is 0 and max_generated 0",
          [](auto& s) { s.capacity.max_prompt = s.capacity.max_generated = 0; });
  refuses("max_generated 2147483647", [](auto& s) { s.capacity.max_generated = 2147483647; });
  refuses("max_sequences is 0", [](auto& s) { s.capacity.max_sequences = 0; });
  refuses("max_prefills is 3; choose from 1 to max_sequences, which is 2",
          [](auto& s) { s.capacity.max_prefills = 3; });
  refuses("scale is not finite", [](auto& s) { s.attention.scale = std::numeric_limits<float>::infinity(); });
  refuses("without a sliding window", [](auto& s) { s.attention.sliding_window = 16; });
  refuses("a soft cap", [](auto& s) { s.attention.soft_cap = 30.0f; });
  refuses("leave out selection_scale", [](auto& s) { s.attention.selection_scale = 1.0f; });
  refuses("take a retrieval_pipeline", [](auto& s) { s.attention.sink_logits.assign(18, 0.0f); });
  refuses("complete_first has -1 layers", [](auto& s) { s.plan = {{-1}}; });
  refuses("h2o: recent of 1 is not a share", [](auto& s) { s.eviction = freekv::h2o{.recent = 1.0f}; });
  refuses("h2o: recent of nan", [](auto& s) { s.eviction = freekv::h2o{.recent = quiet_nan}; });
  refuses("snapkv: a window of 40 rows is not from 1 to below the budget of 40",
          [](auto& s) { s.eviction = freekv::snapkv{.window = 40}; });
  refuses("snapkv: a kernel of 6 tokens is not odd",
          [](auto& s) { s.eviction = freekv::snapkv{.kernel = 6}; });
  refuses("dapq: a window of 32 rows is not from 1 to below the budget of 32", [](auto& s) {
    s.eviction = freekv::dapq{};
    s.budget = 32;
  });
  refuses("raas: pages of 16 tokens and room for 8",
          [](auto& s) { s.eviction = freekv::raas{.room = 8, .keeps_prompt = true}; });
  refuses("raas: a budget of 40 tokens leaves no page of 8 beside a sink of 16 and a window of 24",
          [](auto& s) { s.eviction = freekv::raas{.page = 8, .sink = 16, .window = 24}; });
  refuses("raas: a budget of 40 tokens leaves no page of 48 beside a sink of 0 and a window of 0",
          [](auto& s) { s.eviction = freekv::raas{.page = 48, .sink = 0, .window = 0}; });
  refuses("raas: a budget of 40 tokens leaves no page of 1 beside a sink of 2147483647",
          [](auto& s) { s.eviction = freekv::raas{.page = 1, .sink = no_int_is_more}; });
  refuses("razor_attention_compensated: a sink of 2147483647 tokens of a budget of 40",
          [](auto& s) { s.eviction = freekv::razor_attention_compensated{.sink = no_int_is_more}; });
  refuses("raas: a sink of -1 and a window of 8 tokens",
          [](auto& s) { s.eviction = freekv::raas{.page = 8, .sink = -1, .window = 8}; });
  refuses("given_worths: recent of 1 is not a share from 0 to below 1",
          [](auto& s) { s.eviction = freekv::given_worths{.recent = 1.0f}; });
  refuses("given_worths: recent of nan",
          [](auto& s) { s.eviction = freekv::given_worths{.recent = quiet_nan}; });
  refuses(
      "given_worths: a sink of 30 tokens is not from 0 to below what a budget of 40 has beside the latest 10",
      [](auto& s) { s.eviction = freekv::given_worths{.sink = 30}; });
  refuses("given_worths: a sink of -1", [](auto& s) { s.eviction = freekv::given_worths{.sink = -1}; });
  refuses("raas: threshold is NaN",
          [](auto& s) { s.eviction = freekv::raas{.threshold = quiet_nan, .keeps_prompt = true}; });
  const forgetful p(settings_of(freekv::raas{.keeps_prompt = true}), backend);
  CHECK(p.name() == "raas(page 16, 0.0001, prompt kept), budget 40, complete_first(1), f16");
}

TEST_CASE("a NaN in one KV head's key does not reach another's", "[eviction]") {
  for (const auto& eviction : all_evictions()) {
    INFO(name_of(eviction));
    auto s = settings_of(eviction);
    s.model.layers = 1;
    s.plan = {{0}};
    const text source(s, 24, 130, 7);
    // Heads of a layer may share tokens out among them, or choose for each other, by numbers that are all 0
    // in a row with a NaN.
    const bool decide_together =
        name_of(eviction) == "layer_defensive_kv" || name_of(eviction) == "compress_kv";
    freekv::host_backend backend;
    forgetful clean(s, backend), poisoned(s, backend);
    const auto a = clean.open(), b = poisoned.open();
    std::vector<float> out(100 * 6 * 24), same(out);
    for (int t = 0; t < 130;) {
      const int tokens = t == 0 ? 100 : 1;
      const auto rows = source.at(0, t, tokens);
      std::vector<float> keys(rows.keys.begin(), rows.keys.end());
      if (t == 0) keys[40 * 48 + 24] = quiet_nan;  // of KV head 1
      for (auto* p : {&clean, &poisoned}) {
        auto step = p->begin_step({{a, tokens, t == 0 ? step_phase::prefill : step_phase::decode}});
        step.append<float>(0, {.keys = p == &clean ? rows.keys : std::span<const float>(keys),
                               .values = rows.values,
                               .queries = rows.queries,
                               .worths = gives_worths(*p) ? rows.worths : std::span<const float>{}});
        step.attend(0, std::span(p == &clean ? same : out).first(count(tokens) * 6 * 24));
        step.end();
      }
      const auto of_head_0 = [](const std::vector<float>& of) {
        return std::vector<float>(of.begin(), of.begin() + 3 * 24);
      };
      if (decide_together)
        for (const float x : of_head_0(out)) CHECK(std::isfinite(x));
      else
        CHECK(same_bits(of_head_0(out), of_head_0(same)));
      t += tokens;
    }
    if (!decide_together) CHECK(attended(clean, 0, a, 0) == attended(poisoned, 0, b, 0));
  }
}

TEST_CASE("worths that an engine gives are asked for, and refused where nothing takes them",
          "[eviction][worths][errors]") {
  const auto s = settings_of(freekv::trim_kv{});
  const text source(s, 24, 230, 9);
  freekv::host_backend backend;
  forgetful p(s, backend), same(s, backend);
  const auto id = p.open(), other = same.open();
  const auto refuses = [](const char* words, const auto& call) {
    try {
      call();
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const usage_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  for (int t = 0; t < 80; t += t == 0 ? 60 : 1) {
    const int tokens = t == 0 ? 60 : 1;
    const auto phase = t == 0 ? step_phase::prefill : step_phase::decode;
    auto step = p.begin_step({{id, tokens, phase}});
    sequence_result got;
    for (int layer = 0; layer < 3; ++layer) {
      const auto rows = source.at(layer, t, tokens);
      std::vector<float> out(rows.queries.size());
      const auto append = [&](std::span<const float> worths) {
        step.append<float>(
            layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries, .worths = worths});
      };
      if (layer > 0 && tokens == 60) {
        refuses(
            "append: worths: 0 numbers for 60 rows of 2; trim_kv takes one for each row and KV head, so "
            "give 120",
            [&] { append({}); });
        refuses("append: worths: 119 numbers for 60 rows of 2", [&] { append(rows.worths.first(119)); });
      }
      if (layer > 0 && tokens == 1) refuses("worths: 1 numbers", [&] { append(rows.worths.first(1)); });
      if (layer == 0 && tokens == 1)  // a complete layer needs none, and takes as many as others
        refuses("worths: 1 numbers", [&] { append(rows.worths.first(1)); });
      append(layer == 0 && t % 2 == 0 ? std::span<const float>{} : rows.worths);
      step.attend(layer, out);
      got.out.insert(got.out.end(), out.begin(), out.end());
    }
    step.end();
    CHECK(same_bits(got.out, run_step(same, other, source, tokens, phase).out));
  }
  auto none = same.begin_step({{other, 0}});
  for (int layer = 0; layer < 3; ++layer) none.append<float>(layer, {});
  none.end();

  const auto takes_none = [&](auto& pipeline, const char* who) {
    const auto sequence = pipeline.open();
    auto step = pipeline.begin_step({{sequence, 4, step_phase::prefill}});
    const auto rows = source.at(0, 0, 4);
    refuses(
        (std::string("append: ") + who + " takes no worths, and 8 are given; leave them out").c_str(), [&] {
          step.template append<float>(
              0, {.keys = rows.keys, .values = rows.values, .queries = rows.queries, .worths = rows.worths});
        });
    step.template append<float>(0, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
  };
  forgetful by_attention(settings_of(freekv::h2o{}), backend),
      by_window(settings_of(freekv::cake{}), backend);
  takes_none(by_attention, "h2o(0.5)");
  takes_none(by_window, "cake(32, 5, gamma 200, tau 1.6 0.6)");
  tiny_pipeline retrieves(tiny_settings(), backend);
  takes_none(retrieves, "a pipeline that retrieves");
}

TEST_CASE("what is worth least by the engine's word leaves, and of what is worth the same the first",
          "[eviction][worths]") {
  const auto after = [&](const any_eviction& eviction, int prompt, int steps, const auto& worth) {
    auto s = settings_of(eviction);
    s.model.layers = 1;
    s.plan = {{0}};
    const text source(s, 24, 230, 10);
    freekv::host_backend backend;
    forgetful p(s, backend);
    const auto id = p.open();
    std::vector<float> out(150 * 6 * 24);
    const auto step = [&](int first, int tokens, step_phase phase) {
      const auto rows = source.at(0, first, tokens);
      std::vector<float> worths;
      for (int t = first; t < first + tokens; ++t)
        for (const int head : {0, 1}) worths.push_back(static_cast<float>(head == 0 ? worth(t) : worth(-t)));
      auto begun = p.begin_step({{id, tokens, phase}});
      begun.append<float>(
          0, {.keys = rows.keys, .values = rows.values, .queries = rows.queries, .worths = worths});
      begun.attend(0, std::span(out).first(rows.queries.size()));
      begun.end();
    };
    if (prompt > 0) step(0, prompt, step_phase::prefill);
    for (int t = prompt; t < prompt + steps; ++t) step(t, 1, step_phase::decode);
    return attended(p, 0, id, 0);
  };
  const auto both = [](std::vector<int> a, const std::vector<int>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  const double infinite = HUGE_VAL;
  for (const auto& [prompt, steps] : {std::pair{100, 1}, {100, 30}, {0, 60}, {38, 4}}) {
    INFO("prompt " << prompt << ", steps " << steps);
    const int last = prompt + steps - 1;
    // All betas 1, or NaN, or alike: a window, as of those alike the first leaves, or what is oldest.
    for (const double beta : {1.0, 0.999, 0.5, 1e-40, 0.0, -1.0, double{quiet_nan}, 3.0, infinite})
      CHECK(after(freekv::trim_kv{}, prompt, steps, [&](int) { return beta; }) ==
            from_to(std::max(0, last - 40), last));
    for (const double score : {0.0, -3.0, 1e30, double{quiet_nan}, infinite, -infinite})
      CHECK(after(freekv::given_worths{}, prompt, steps, [&](int) { return score; }) ==
            from_to(std::max(0, last - 40), last));
  }
  // What is retained wholly stays, and what has nothing retained leaves in its own row.
  const auto sink = [](int t) { return std::abs(t) < 4 ? 1.0 : 0.9; };
  CHECK(after(freekv::trim_kv{}, 100, 30, sink) == both(from_to(0, 3), from_to(93, 129)));
  const auto never = [](int t) { return std::abs(t) >= 110 ? 0.0 : 0.9; };
  CHECK(after(freekv::trim_kv{}, 100, 30, never) == both(from_to(70, 109), {129}));
  // Retentions pass each other: 0.5 a row ago is less than 0.99 fifty rows ago, and 0.9 more.
  const auto passing = [](int t) { return t % 3 == 0 ? 0.5 : t % 3 == 1 || t % 3 == -2 ? 0.99 : 0.9; };
  std::vector<int> left;
  for (int t = 0; t < 100; ++t) left.push_back(t);
  std::stable_sort(left.begin(), left.end(), [&](int a, int b) {
    return (99 - a) * std::log(passing(a)) > (99 - b) * std::log(passing(b));
  });
  left.resize(40);
  std::sort(left.begin(), left.end());
  CHECK(after(freekv::trim_kv{}, 100, 1, passing) == both(left, {100}));
  // Sink and latest are there whatever they are worth, and NaN is below all numbers.
  const auto by_number = [](int t) { return t % 2 == 0 ? -1e30 : t < 50 ? double{quiet_nan} : 5.0; };
  CHECK(after(freekv::given_worths{.sink = 2, .recent = 0.25f}, 100, 1, by_number) == [&] {
    std::vector<int> stay{0, 1};
    // 10 latest; of the other 28 those odd ones from 51 to 89 are 20, and 8 of the even ones, the last.
    for (int t = 2; t < 90; ++t)
      if ((t % 2 != 0 && t >= 50) || (t % 2 == 0 && t >= 74)) stay.push_back(t);
    return both(stay, from_to(90, 100));
  }());
  // Each KV head by its own.
  const auto rising = [](int t) { return double(t); };
  CHECK(after(freekv::given_worths{.recent = 0.0f}, 100, 1, rising) == from_to(60, 100));
  const auto falling = [](int t) { return double(-t); };
  CHECK(after(freekv::given_worths{.recent = 0.0f}, 100, 1, falling) == both(from_to(0, 39), {100}));
}

TEST_CASE("worths of prompts take memory only where a policy takes them", "[eviction][worths][memory]") {
  freekv::host_backend backend;
  const auto bytes_of = [&](const any_eviction& eviction) {
    return forgetful::footprint(settings_of(eviction), backend).bytes();
  };
  const auto rounded_up = [](std::size_t bytes) { return (bytes + 127) / 128 * 128; };
  const std::size_t rows = rounded_up(2 * 2 * 150 * row_bytes),  // of 2 stagings and 2 KV heads
      worths = rounded_up(2 * 2 * 150 * sizeof(float));
  for (const any_eviction& eviction : {any_eviction{freekv::trim_kv{}}, any_eviction{freekv::given_worths{}}})
    CHECK(bytes_of(eviction).staging == 2 * (rows + worths));
  CHECK(bytes_of(given_pages{}).staging == 2 * (rows + worths));
  CHECK(bytes_of(given_pages{.keeps_prompt = true}).staging == 2 * worths);
  CHECK(bytes_of(freekv::razor_attention_compensated{}).staging == 2 * rows);
}

TEST_CASE("worths of prompts that wait side by side are kept apart", "[eviction][worths]") {
  for (const any_eviction& eviction :
       {any_eviction{freekv::trim_kv{}}, any_eviction{freekv::given_worths{}}, any_eviction{given_pages{}},
        any_eviction{given_pages{.keeps_prompt = true}}}) {
    INFO(name_of(eviction));
    const auto s = settings_of(eviction);
    const text first(s, 24, 230, 11), second(s, 24, 230, 12);
    freekv::host_backend backend;
    forgetful p(s, backend);
    const auto want_a = prompt_and_decode(p, first, {120}, 40),
               want_b = prompt_and_decode(p, second, {90}, 40);
    const auto a = p.open(), b = p.open();
    run_step(p, {{a, &first, 70, step_phase::prefill}, {b, &second, 90, step_phase::prefill}});
    run_step(p, {{a, &first, 50, step_phase::prefill}});
    for (int step = 0; step < 40; ++step) {
      const auto got = run_step(p, {{b, &second}, {a, &first}});
      CHECK(got[0] == want_b[count(step)]);
      CHECK(got[1] == want_a[count(step)]);
    }
  }
}

namespace {

/// Evictions that decide by the last rows of a prompt, so that probes may be among them.
std::vector<any_eviction> probed_evictions() {
  std::vector<any_eviction> probed;
  for (const any_eviction& eviction : all_evictions()) {
    const int rows = resolve(eviction, [](const auto& e) { return e.observed_rows(); });
    if (rows > 0 && rows != freekv::every_prompt_row) probed.push_back(eviction);
  }
  return probed;
}

/// Rows of a text observe a sequence's prompt in all layers.
void probe(forgetful& p, freekv::sequence_id id, const text& of, int first, int rows) {
  for (int layer = 0; layer < p.configuration().model.layers; ++layer)
    p.observe(id, layer, of.at(layer, first, rows).queries);
}

}  // namespace

TEST_CASE("probe rows vote for the prompt's tokens in the place of its last rows", "[eviction][probes]") {
  // Token 10 has the only key that probes look for, token 50 that of the prompt's rows; others get nothing.
  rows_of_101 given;
  auto& [keys, values, rows] = given;
  std::vector<float> probes(40 * 6 * 24);
  for (const int head : {0, 1})
    keys[count((10 * 2 + head) * 24)] = keys[count((50 * 2 + head) * 24 + 1)] = 30;
  for (std::size_t at = 0; at < rows.size(); at += 24) rows[at + 1] = 30;
  for (std::size_t at = 0; at < probes.size(); at += 24) probes[at] = 30;
  const auto kept_by = [&](const any_eviction& eviction, int first_probe, int probe_count) {
    auto s = settings_of(eviction);
    s.model.layers = 1;
    s.plan = {{0}};
    freekv::host_backend backend;
    forgetful p(s, backend);
    const auto id = p.open();
    append_some(p, id, given, 0, 100, step_phase::prefill);
    if (probe_count > 0)
      p.observe(id, 0, std::span(probes).subspan(count(first_probe) * 6 * 24, count(probe_count) * 6 * 24));
    append_some(p, id, given, 100, 1, step_phase::decode);
    CHECK(attended(p, 0, id, 0) == attended(p, 0, id, 1));
    return attended(p, 0, id, 0);
  };
  const auto all_of = [](std::initializer_list<std::pair<int, int>> parts) {
    std::vector<int> all;
    for (const auto& [first, last] : parts)
      for (const int token : from_to(first, last)) all.push_back(token);
    return all;
  };
  // The neighbours, 7 of them, and of those without votes the last.
  CHECK(kept_by(freekv::dapq{}, 0, 0) == all_of({{47, 53}, {67, 100}}));
  CHECK(kept_by(freekv::dapq{}, 0, 32) == all_of({{7, 13}, {67, 100}}));
  CHECK(kept_by(freekv::dapq{}, 0, 31) == all_of({{7, 13}, {47, 53}, {74, 100}}));
  CHECK(kept_by(freekv::dapq{}, 0, 1) == all_of({{7, 13}, {47, 53}, {74, 100}}));
  CHECK(kept_by(freekv::snapkv{}, 0, 32) == all_of({{7, 13}, {67, 100}}));
  CHECK(kept_by(freekv::defensive_kv{}, 0, 32) == all_of({{8, 12}, {65, 100}}));
  CHECK(kept_by(freekv::tova{}, 0, 1) == all_of({{10, 10}, {61, 100}}));
  CHECK(kept_by(freekv::tova{}, 0, 0) == all_of({{50, 50}, {61, 100}}));
  // Of many rows the last ones count.
  std::fill_n(probes.begin(), 8 * 6 * 24, quiet_nan);
  CHECK(kept_by(freekv::dapq{}, 0, 40) == all_of({{7, 13}, {67, 100}}));
  // What votes is not of the prompt, whose last tokens may leave; what snapkv protects stays protected.
  for (const int token : {3, 17, 24, 31})
    for (const int head : {0, 1}) keys[count((token * 2 + head) * 24)] = 30;
  CHECK(kept_by(freekv::dapq{}, 8, 32) == all_of({{0, 34}, {95, 100}}));
  CHECK(kept_by(freekv::snapkv{}, 8, 32) == all_of({{27, 34}, {68, 100}}));
}

TEST_CASE("probe rows depend neither on threads, nor on their type, nor on other sequences",
          "[eviction][probes]") {
  for (const auto& eviction : in_turns(probed_evictions())) {
    INFO(name_of(eviction));
    const auto s = settings_of(eviction);
    const text source(s, 24, 230, 21), other(s, 24, 230, 22), behind(s, 24, 80, 23), elsewhere(s, 24, 80, 24);
    const auto run = [&](forgetful& p, const std::vector<int>& chunks, const auto& give) {
      const auto id = p.open();
      for (const int tokens : chunks) run_step(p, id, source, tokens, step_phase::prefill);
      give(id);
      auto results = decode(p, id, source, 70);
      p.release(id);
      return results;
    };
    freekv::host_backend one;
    forgetful alone(s, one);
    const auto expected = run(alone, {150}, [&](auto id) { probe(alone, id, behind, 0, 40); });
    // They matter, and only the last ones that are observed do; a sequence that is released forgets them.
    const auto without = run(alone, {150}, [](auto) {});
    if (name_of(eviction) != "lazy_eviction")  // to which all tokens are active here, whatever attends
      CHECK(without != expected);
    CHECK(run(alone, {150}, [&](auto id) { probe(alone, id, behind, 8, 32); }) == expected);
    CHECK(run(alone, {1, 31, 7, 64, 47}, [&](auto id) { probe(alone, id, behind, 0, 40); }) == expected);
    {
      const auto id = alone.open();
      run_step(alone, id, other, 50, step_phase::prefill);
      probe(alone, id, behind, 0, 40);
      const auto left = alone.begin_step({{id}});
    }
    CHECK(run(alone, {150}, [](auto) {}) == without);

    freekv::host_backend three({.threads = 3, .bytes_per_thread = 64});
    forgetful threaded(s, three);
    const auto a = threaded.open(), b = threaded.open();
    run_step(threaded, {{b, &other, 90, step_phase::prefill}, {a, &source, 20, step_phase::prefill}});
    probe(threaded, b, elsewhere, 0, 40);
    run_step(threaded, {{a, &source, 130, step_phase::prefill}, {b, &other, 1}});
    probe(threaded, a, behind, 0, 40);
    for (int step = 0; step < 70; ++step)
      CHECK(run_step(threaded, {{b, &other}, {a, &source}})[1] == expected[count(step)]);

    const auto as = [&]<class Number>(Number) {
      forgetful typed(s, one), floats(s, one);
      std::vector<std::vector<Number>> rounded(3);
      std::vector<std::vector<float>> same(3);
      for (int layer = 0; layer < 3; ++layer)
        for (const float x : behind.at(layer, 0, 40).queries) {
          rounded[count(layer)].push_back(freekv::from_float<Number>(x));
          same[count(layer)].push_back(freekv::to_float(rounded[count(layer)].back()));
        }
      CHECK(run(typed, {150}, [&](auto id) {
              for (int layer = 0; layer < 3; ++layer) typed.observe<Number>(id, layer, rounded[count(layer)]);
            }) == run(floats, {150}, [&](auto id) {
              for (int layer = 0; layer < 3; ++layer) floats.observe(id, layer, same[count(layer)]);
            }));
    };
    as(freekv::half{});
    as(freekv::bfloat16{});
  }
}

TEST_CASE("probe rows are forgotten when their prompt has been cut", "[eviction][probes]") {
  for (const auto& eviction : probed_evictions()) {
    INFO(name_of(eviction));
    // What layers are rated by stays.
    if (resolve(eviction, []<class E>(const E&) { return freekv::rates<E>; })) continue;
    const auto s = settings_of(eviction);
    const text source(s, 24, 230, 25), behind(s, 24, 80, 26);
    text nothing = behind;
    nothing.zero_queries();
    freekv::host_backend backend;
    forgetful p(s, backend);
    // Of a prompt within the budget nothing leaves when it ends, so that what they are can never matter.
    const auto run = [&](const text* probes) {
      const auto id = p.open();
      run_step(p, id, source, 30, step_phase::prefill);
      if (probes != nullptr) probe(p, id, *probes, 0, 32);
      auto results = decode(p, id, source, 80);
      p.release(id);
      return results;
    };
    CHECK(run(&behind) == run(&nothing));
    // Nor does it that there were any, where decode rows alone have been observed before any leaves.
    const bool by_its_own = resolve(eviction, []<class E>(const E& e) {
      if constexpr (freekv::observes<E>)
        return !e.observes_decoding() || 10 >= e.observed_rows();
      else
        return true;
    });
    if (by_its_own) CHECK(run(&behind) == run(nullptr));
  }
}

TEST_CASE("probe rows that cannot observe are refused and change nothing", "[eviction][probes][errors]") {
  const auto s = settings_of(freekv::dapq{});
  const text source(s, 24, 230, 27), behind(s, 24, 80, 28);
  freekv::host_backend backend;
  forgetful p(s, backend);
  const auto refuses = [](const char* words, const auto& call) {
    try {
      call();
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const usage_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  const auto rows = behind.at(1, 0, 32).queries;
  refuses("sequence 0 is not open", [&] { p.observe(freekv::sequence_id{0}, 1, rows); });
  const auto id = p.open();
  refuses("observe: sequence 0 has no prompt yet", [&] { p.observe(id, 1, rows); });
  run_step(p, id, source, 100, step_phase::prefill);
  refuses("observe: layer 3 is not one of 3", [&] { p.observe(id, 3, rows); });
  refuses("observe: layer -1 is not one of 3", [&] { p.observe(id, -1, rows); });
  for (const int layer : {0, 1}) {
    refuses("observe: sequence 0 is given 0 numbers of queries for layer",
            [&] { p.observe(id, layer, rows.first(0)); });
    refuses("give one or more rows of 144", [&] { p.observe(id, layer, rows.first(145)); });
  }
  {
    auto step = p.begin_step({{id, 20, step_phase::prefill}});
    refuses("observe: the step in progress has not ended", [&] { p.observe(id, 1, rows); });
    for (int layer = 0; layer < 3; ++layer) {
      const auto of = source.at(layer, 100, 20);
      step.append<float>(layer, {.keys = of.keys, .values = of.values, .queries = of.queries});
    }
    step.end();
  }
  probe(p, id, behind, 0, 32);
  refuses("observe: sequence 0 has probe rows in layer 1 already; give all of them at once",
          [&] { p.observe(id, 1, rows); });
  refuses("sequence 0 has been given probe rows, which are behind its prompt", [&] {
    const auto step = p.begin_step({{id, 1, step_phase::prefill}});
  });
  forgetful same(s, backend);
  const auto other = same.open();
  run_step(same, other, source, 120, step_phase::prefill);
  probe(same, other, behind, 0, 32);
  CHECK(decode(p, id, source, 30) == decode(same, other, source, 30));
  refuses("observe: sequence 0 has decoded, and its prompt is cut", [&] { p.observe(id, 1, rows); });

  const auto takes_none = [&](const any_eviction& eviction, const char* words) {
    forgetful q(settings_of(eviction), backend);
    const auto sequence = q.open();
    run_step(q, sequence, source, 60, step_phase::prefill);
    refuses(words, [&] { q.observe(sequence, 1, rows); });
  };
  takes_none(freekv::h2o{}, "observe: h2o(0.5) observes all rows of a prompt as they are appended; take");
  takes_none(freekv::trim_kv{}, "observe: trim_kv observes no rows of a prompt; take");
  takes_none(small_raas, "prompt kept) observes no rows of a prompt");
}

TEST_CASE("a layer without probe rows goes by its prompt's rows", "[eviction][probes]") {
  const auto s = settings_of(freekv::dapq{});
  const text source(s, 24, 230, 29), behind(s, 24, 80, 30);
  freekv::host_backend backend;
  const auto run = [&](std::initializer_list<int> layers) {
    forgetful p(s, backend);
    const auto id = p.open();
    run_step(p, id, source, 120, step_phase::prefill);
    for (const int layer : layers) p.observe(id, layer, behind.at(layer, 0, 32).queries);
    decode(p, id, source, 1);
    return std::pair{attended(p, 1, id, 0), attended(p, 2, id, 0)};
  };
  const auto both = run({0, 1, 2}), first = run({1}), none = run({});
  CHECK(first == std::pair{both.first, none.second});
  CHECK(both.first != none.first);
  CHECK(both.second != none.second);
  CHECK(run({0}) == none);  // all of it is kept
}

TEST_CASE("heads' budgets are those of the best tokens of all heads", "[eviction]") {
  using policy = freekv::layer_defensive_kv;
  const policy of;
  const freekv::eviction_heads over{.layers = 2, .kv_heads = 2, .budget = 40, .prompt = 132};
  std::vector<policy::statistic> heads(4);
  const auto add = [&](int head, float worth, int tokens) {
    heads[count(head)].tokens[count(policy::bin_of(worth))] += tokens;
  };
  const auto budgets = [&] {
    std::vector<int> given(4, 40);
    of.allocate(heads.data(), over, given.data());
    return given;
  };
  // 8 for each head beside its window of 32. Equal worths are equal budgets.
  for (int head = 0; head < 4; ++head) add(head, 0.01f, 100);
  CHECK(budgets() == std::vector{40, 40, 40, 40});
  // 20 of the third are better, 2 of the first, and 10 are left for 80, 98, 100 and 100 alike.
  heads[2] = heads[0] = {};
  add(2, 0.5f, 20), add(2, 0.01f, 80);
  add(0, 0.02f, 2), add(0, 0.01f, 98);
  CHECK(budgets() == std::vector{36, 35, 54, 35});  // of 378: 2.6, then to 5.2, 7.4 and 10
  // Worths that are further apart than a bin are told apart, others not.
  CHECK(policy::bin_of(0.01f) == policy::bin_of(0.0101f));
  for (const float worth : {1.0f, 0.3f, 1e-3f, 1e-11f}) {
    CHECK(policy::bin_of(worth * 16.0f / 17.1f) < policy::bin_of(worth));
    CHECK(policy::bin_of(worth * 0.5f) == policy::bin_of(worth) - 16);
  }
  for (const float none : {0.0f, -1.0f, 1e-38f, quiet_nan}) CHECK(policy::bin_of(none) == 0);
  CHECK(policy::bin_of(1.01f) == policy::bins - 1);
}

TEST_CASE("a head whose rows attend to many tokens has of those that attend to few", "[eviction]") {
  // Keys are alike in KV head 0, so that rows attend to everything alike; in head 1 they attend to 20 tokens.
  rows_of_101 given;
  auto& [keys, values, rows] = given;
  for (const int token : from_to(10, 29)) keys[count((token * 2 + 1) * 24)] = 60;
  for (std::size_t at = 0; at < rows.size(); at += 24) rows[at] = 30;
  auto s = settings_of(freekv::layer_defensive_kv{{.window = 8}});
  freekv::host_backend backend;
  forgetful p(s, backend);
  const auto id = p.open();
  append_some(p, id, given, 0, 100, step_phase::prefill);
  append_some(p, id, given, 100, 1, step_phase::decode);
  // Of a fifth of each neighbour's share tokens 9 to 30 have 0.02 or more. The others of head 1 have the
  // mean, 1/92, and those of head 0 as much to a bin: of 4 * 32 beside the windows 84 are left for 324 of
  // them.
  std::vector<int> kept;
  for (const int layer : {1, 2})
    for (const int head : {0, 1})
      kept.push_back(static_cast<int>(attended(p, layer, id, head).size()) - 9);  // window, and the row
  CHECK(kept == std::vector{23, 22 + 19, 23, 22 + 19});
  const auto stay = attended(p, 1, id, 1);
  for (const int token : from_to(9, 30)) CHECK(std::count(stay.begin(), stay.end(), token) == 1);
}

TEST_CASE("query heads that vote choose for all KV heads of their layer", "[eviction][votes]") {
  // Query heads 0 to 2 look for token 50, which is KV head 0's, the others for token 10, KV head 1's.
  rows_of_101 given;
  auto& [keys, values, rows] = given;
  keys[count(50 * 2 * 24)] = keys[count((10 * 2 + 1) * 24)] = 30;
  for (std::size_t at = 0; at < rows.size(); at += 24) rows[at] = 30;
  const auto kept_by = [&](const any_eviction& eviction, int layer, int head, int threads) {
    const auto s = settings_of(eviction);
    freekv::host_backend backend({.threads = threads, .bytes_per_thread = 64});
    forgetful p(s, backend);
    const auto id = p.open();
    append_some(p, id, given, 0, 100, step_phase::prefill);
    append_some(p, id, given, 100, 1, step_phase::decode);
    return attended(p, layer, id, head);
  };
  const auto all_of = [](std::initializer_list<std::pair<int, int>> parts) {
    std::vector<int> all;
    for (const auto& [first, last] : parts)
      for (const int token : from_to(first, last)) all.push_back(token);
    return all;
  };
  // Five neighbours, and of those without votes the last.
  const auto of_50 = all_of({{48, 52}, {65, 100}}), of_10 = all_of({{8, 12}, {65, 100}}),
             of_both = all_of({{8, 12}, {48, 52}, {70, 100}});
  for (const int head : {0, 1})
    for (const int threads : {1, 3}) {
      CHECK(kept_by(freekv::compress_kv{}, 1, head, threads) == of_both);
      CHECK(kept_by(listed_voters, 1, head, threads) == of_both);  // 1 and 5
      CHECK(kept_by(listed_voters, 2, head, threads) == of_10);    // 4
      // The group's own, without votes.
      CHECK(kept_by(freekv::defensive_kv{.window = 8}, 1, head, threads) == (head == 0 ? of_50 : of_10));
    }
  // More heads weigh more: of two that want 50 and one that wants 10, and room for one.
  constexpr std::array<std::uint8_t, 12> two_to_one{0, 1, 1, 0, 0, 0,  //
                                                    1, 0, 0, 1, 1, 0};
  constexpr std::array<std::int32_t, 2> budgets{13, 67};
  freekv::compress_kv unequal{.heads = two_to_one, .query_heads = 6, .budgets = budgets};
  for (const int head : {0, 1}) {
    CHECK(kept_by(unequal, 1, head, 1) == all_of({{48, 52}, {92, 100}}));
    CHECK(kept_by(unequal, 2, head, 1) == all_of({{8, 12}, {38, 100}}));
  }
}

TEST_CASE("layers' budgets of compress_kv take their own memory", "[eviction][votes][memory]") {
  constexpr std::array<std::int32_t, 3> budgets{0, 60, 20};  // the first layer keeps everything
  freekv::host_backend backend;
  const auto bytes =
      forgetful::footprint(settings_of(freekv::compress_kv{.budgets = budgets}), backend).bytes();
  const std::size_t token = 2 * 2 * row_bytes;  // 2 sequences, 2 KV heads
  CHECK(bytes.slots == (60 + 80 + 20 + 80) * token);
}

TEST_CASE("lists of query heads that vote, and layers' budgets, are checked", "[eviction][votes][errors]") {
  freekv::host_backend backend;
  const auto refuses = [&](const char* words, const freekv::compress_kv& eviction) {
    try {
      forgetful::footprint(settings_of(eviction), backend);
      FAIL_CHECK("nothing was thrown: " << words);
    } catch (const settings_error& e) {
      CHECK_THAT(e.what(), Contains(words));
    }
  };
  using heads = std::vector<std::uint8_t>;
  using tokens = std::vector<std::int32_t>;
  const heads none(18), six(6, 1), of_other_model(18, 1);
  refuses("compress_kv: none of the 6 query heads of layer 1 votes; list one or more",
          {.heads = none, .query_heads = 6});
  refuses(
      "compress_kv lists 6 query heads, 6 a layer; needed are those of all layers of the model, of which 2 "
      "forget",
      {.heads = six, .query_heads = 6});
  refuses("compress_kv lists 18 query heads, 9 a layer", {.heads = of_other_model, .query_heads = 9});
  refuses("compress_kv: a window of 40 rows is not from 1 to below the budget of 40", {.window = 40});
  refuses("compress_kv: a kernel of 4 tokens is not odd", {.kernel = 4});
  const tokens one{40}, small{70, 8}, much{41, 40};
  refuses("compress_kv has budgets of 1 layers", {.budgets = one});
  refuses("compress_kv gives a layer a budget of 8 tokens; give each more than the window of 8",
          {.budgets = small});
  refuses("compress_kv gives layers 81 tokens together, and a budget of 40 is 80 for 2", {.budgets = much});
  const tokens all{2147483647, 40};
  refuses("compress_kv gives a layer a budget of 2147483647 tokens, more than 536870912", {.budgets = all});

  struct of_decoding : freekv::compress_kv {
    bool observes_decoding() const { return true; }
  };
  using pipeline = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, of_decoding>;
  CHECK_THROWS_WITH(
      pipeline::footprint({.model = {2, 1, 1}, .capacity = {10, 10}}, backend),
      Contains("compress_kv lets query heads choose for their layer, from prompts that are staged"));
}

TEST_CASE("rows of prompts are observed where they are staged", "[eviction][errors]") {
  struct in_place : freekv::tova {
    constexpr bool stages_prompt() const { return false; }
  };
  struct all_in_place : freekv::h2o {
    constexpr bool stages_prompt() const { return false; }
  };
  freekv::host_backend backend;
  const auto refused = [&]<class Eviction>(const Eviction&) {
    using pipeline = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, Eviction>;
    using footprint = typename pipeline::footprint;
    CHECK_THROWS_WITH(footprint({.model = {2, 1, 1}, .budget = 6, .capacity = {10, 10}}, backend),
                      Contains(" observes rows of prompts and does not stage them"));
  };
  refused(in_place{});
  refused(all_in_place{});
}

TEST_CASE("log-sum-exps over what is kept are to base 2 where the settings say so", "[eviction]") {
  for (const any_eviction& eviction : {any_eviction(freekv::h2o{}), any_eviction(freekv::mikv{})}) {
    auto s = settings_of(eviction);
    const text source(s, 24, 60, 1);
    freekv::host_backend backend;
    forgetful natural(s, backend);
    s.attention.lse_base = freekv::log_base::two;
    forgetful binary(s, backend);
    const auto a = natural.open(), b = binary.open();
    for (const auto& [tokens, phase] :
         {std::pair(50, step_phase::prefill), std::pair(1, step_phase::decode)}) {
      const auto of_e = run_step(natural, a, source, tokens, phase),
                 of_two = run_step(binary, b, source, tokens, phase);
      CHECK(same_bits(of_two.out, of_e.out));
      for (std::size_t i = 0; i < of_e.lse.size(); ++i)
        CHECK(is_near(double{of_two.lse[i]}, double{of_e.lse[i]} / std::log(2.0), 1e-5));
    }
  }
}

namespace {

/// Gives the first head all that heads have together.
struct all_to_the_first : freekv::layer_defensive_kv {
  void allocate(const statistic*, const freekv::eviction_heads& over, int* budgets) const {
    std::fill_n(budgets, over.layers * over.kv_heads, 0);
    budgets[0] = over.layers * over.kv_heads * over.budget;
  }
};
/// Beside the first token all are worth the most that there is.
struct worth_most : freekv::tova {
  bool protects(int token, const freekv::eviction_moment&) const { return token < 1; }
  std::uint32_t worth(const unit_state&) const { return ~std::uint32_t{0}; }
};

}  // namespace

TEST_CASE("heads share out what they have when a prompt is longer than the budget alone", "[eviction]") {
  using pipeline = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, all_to_the_first>;
  pipeline::settings s;
  s.model = {.layers = 1, .query_heads = 2, .kv_heads = 2};
  s.budget = 40;
  s.capacity = {.max_prompt = 60, .max_generated = 10, .max_sequences = 3};
  s.plan = {{0}};
  const text source(s, 24, 70, 1);
  freekv::host_backend backend;
  pipeline p(s, backend);
  for (const int prompt : {39, 40, 41}) {
    const auto id = p.open();
    run_step(p, id, source, prompt, step_phase::prefill);
    run_step(p, id, source, 1, step_phase::decode);
    CHECK(attended(p, 0, id, 1).size() == (prompt > 40 ? 1u : count(prompt) + 1));
  }
}

TEST_CASE("what is protected stays whatever the others are worth", "[eviction]") {
  using pipeline = freekv::evicting_pipeline<freekv::kv_shape<freekv::half, 24>, worth_most>;
  pipeline::settings s;
  s.model = {.layers = 1, .query_heads = 1, .kv_heads = 1};
  s.budget = 4;
  s.capacity = {.max_prompt = 8, .max_generated = 4};
  s.plan = {{0}};
  const text source(s, 24, 12, 1);
  freekv::host_backend backend;
  pipeline p(s, backend);
  const auto id = p.open();
  run_step(p, id, source, 8, step_phase::prefill);
  run_step(p, id, source, 1, step_phase::decode);
  CHECK(attended(p, 0, id, 0) == std::vector{0, 5, 6, 7, 8});
  run_step(p, id, source, 1, step_phase::decode);
  CHECK(attended(p, 0, id, 0) == std::vector{0, 6, 7, 8, 9});
}

TEST_CASE("lazy_eviction keeps what attention has come back to before what it never has", "[eviction]") {
  const freekv::lazy_eviction lazy{.window = 4, .threshold = 0.1f};
  freekv::lazy_eviction::unit_state inactive{}, without{};
  lazy.on_append(inactive, 2), lazy.on_append(without, 3);
  for (int row = 3; row <= 9; ++row) {
    lazy.on_attended(inactive, row == 4 ? 0.5f : 0.0f, row);
    if (row > 3) lazy.on_attended(without, 0.0f, row);
  }
  freekv::lazy_eviction::unit_state fresh{};
  lazy.on_append(fresh, 9);
  CHECK(lazy.worth(without) < lazy.worth(inactive));
  CHECK(lazy.worth(inactive) < lazy.worth(fresh));  // it has no two such rows, and has one now
}

TEST_CASE("raas protects the pages that lie in the sink as a whole", "[eviction]") {
  const freekv::raas policy{.page = 8, .sink = 12, .window = 8};
  const freekv::eviction_moment at{.budget = 40, .prompt = 80, .tokens = 80};
  CHECK(policy.protects(0, at));
  CHECK_FALSE(policy.protects(8, at));
}

TEST_CASE("a sequence that forgets knows nothing of the one whose place it takes", "[eviction]") {
  for (const any_eviction& eviction :
       {any_eviction(freekv::h2o{}), any_eviction(freekv::mikv{}), any_eviction(freekv::q_hitter{})}) {
    INFO(name_of(eviction));
    const auto s = settings_of(eviction);
    const text source(s, 24, 130, 1);
    freekv::host_backend backend;
    forgetful p(s, backend);
    const auto first = p.open();
    const auto expected = decode(p, first, source, 60);  // without a prompt
    p.release(first);
    const auto before = p.open();
    run_step(p, before, source, 60, step_phase::prefill);
    decode(p, before, source, 2);
    p.release(before);
    const auto id = p.open();
    REQUIRE(id == before);
    CHECK(p.kept_bytes(id) == 0);
    for (int layer = 1; layer < 3; ++layer) {
      const auto report = p.report(layer)[id];
      for (std::size_t head = 0; head < 2; ++head) {
        CHECK(report.attended_count[head] == 0);
        CHECK((report.coded_count.empty() || report.coded_count[head] == 0));
      }
    }
    CHECK(decode(p, id, source, 60) == expected);
  }
}

TEST_CASE("kept bytes are those of layers that forget", "[eviction]") {
  const auto s = settings_of(freekv::h2o{});
  const text source(s, 24, 130, 1);
  freekv::host_backend backend;
  forgetful p(s, backend);
  const auto id = p.open();
  run_step(p, id, source, 60, step_phase::prefill);
  CHECK(p.kept_bytes(id) == 0);
  decode(p, id, source, 1);
  CHECK(p.kept_bytes(id) == 2 * 2 * 40 * row_bytes);  // of the first of three layers none
}
