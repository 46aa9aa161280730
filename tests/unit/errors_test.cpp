// What is refused: with which type, which numbers, and that nothing has changed.

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../catch.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using Catch::Contains;
using freekv::sequence_id;
using freekv::settings_error;
using freekv::step_phase;
using freekv::usage_error;

constexpr int head_dim = tiny_pipeline::head_dim;

tiny_pipeline::settings two_sequences() {
  auto s = tiny_settings();
  s.capacity.max_sequences = 2;
  s.capacity.store_tokens = 250;  // 32 pages
  return s;
}

/// Where in the scenario below a call is made.
enum class moment {
  before_steps,
  begun,                 // nothing appended
  first_layer_appended,  // not attended
  first_layer_attended,
  last_layer_appended,
  all_attended,
  between_steps,
};

/// Two sequences, a prompt and decode steps in both; `disturb(moment, pipeline, step, ids)` is called at each
/// moment of the third decode step. Everything that comes out is returned.
struct scenario {
  using disturbance =
      std::function<void(moment, tiny_pipeline&, tiny_pipeline::step&, sequence_id, sequence_id)>;

  static std::vector<sequence_result> run(const disturbance& disturb) {
    const auto s = two_sequences();
    static const text first(s, head_dim, 120, 1), second(s, head_dim, 120, 2);
    freekv::host_backend backend({.threads = 2, .bytes_per_thread = 1024});
    tiny_pipeline pipeline(s, backend);
    const auto a = pipeline.open(), b = pipeline.open();
    prompt_only(pipeline, a, first, 90);
    prompt_only(pipeline, b, second, 61);
    std::vector<sequence_result> results;
    for (int nth = 0; nth < 12; ++nth) {
      if (nth != 2) {
        for (auto& r : run_step(pipeline, {{a, &first}, {b, &second}})) results.push_back(std::move(r));
        continue;
      }
      tiny_pipeline::step step;
      disturb(moment::before_steps, pipeline, step, a, b);
      const int at_a = pipeline.tokens(a), at_b = pipeline.tokens(b);
      step = pipeline.begin_step({{a}, {b}});
      disturb(moment::begun, pipeline, step, a, b);
      sequence_result both;
      for (int layer = 0; layer < 3; ++layer) {
        const auto rows_a = first.at(layer, at_a, 1), rows_b = second.at(layer, at_b, 1);
        const auto joined = [](std::span<const float> x, std::span<const float> y) {
          std::vector<float> all(x.begin(), x.end());
          all.insert(all.end(), y.begin(), y.end());
          return all;
        };
        const auto queries = joined(rows_a.queries, rows_b.queries), keys = joined(rows_a.keys, rows_b.keys),
                   values = joined(rows_a.values, rows_b.values);
        step.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
        if (layer == 0) disturb(moment::first_layer_appended, pipeline, step, a, b);
        if (layer == 2) disturb(moment::last_layer_appended, pipeline, step, a, b);
        std::vector<float> out(queries.size()), lse(12);
        step.attend(layer, out, lse);
        both.out.insert(both.out.end(), out.begin(), out.end());
        both.lse.insert(both.lse.end(), lse.begin(), lse.end());
        if (layer == 0) disturb(moment::first_layer_attended, pipeline, step, a, b);
      }
      disturb(moment::all_attended, pipeline, step, a, b);
      step.end();
      disturb(moment::between_steps, pipeline, step, a, b);
      for (int layer = 0; layer < 3; ++layer) {
        add_report(pipeline, layer, a, both);
        add_report(pipeline, layer, b, both);
      }
      both.report.push_back(pipeline.free_pages());
      results.push_back(both);
    }
    return results;
  }

  static const std::vector<sequence_result>& undisturbed() {
    static const auto results = run([](auto&&...) {});
    return results;
  }
};

/// A call of the step, or of none, that must throw `Error`, with these words in its message.
template <class Error>
void refuses_of_step(moment when, const std::vector<std::string>& words, const scenario::disturbance& call) {
  int calls = 0;
  const auto results = scenario::run([&](moment now, auto& pipeline, auto& step, auto a, auto b) {
    if (now != when) return;
    ++calls;
    const int tokens_a = pipeline.tokens(a), tokens_b = pipeline.tokens(b), free = pipeline.free_pages();
    try {
      call(now, pipeline, step, a, b);
      FAIL_CHECK("nothing was thrown");
    } catch (const Error& e) {
      for (const auto& word : words) CHECK_THAT(e.what(), Contains(word));
    }
    CHECK(pipeline.tokens(a) == tokens_a);
    CHECK(pipeline.tokens(b) == tokens_b);
    CHECK(pipeline.free_pages() == free);
  });
  CHECK(calls == 1);
  CHECK(results == scenario::undisturbed());
}
/// The same for a call of the pipeline.
template <class Error>
void refuses_at(moment when, const std::vector<std::string>& words,
                const std::function<void(tiny_pipeline&, sequence_id, sequence_id)>& call) {
  refuses_of_step<Error>(when, words,
                         [&](moment, auto& pipeline, auto&, auto a, auto b) { call(pipeline, a, b); });
}

const sequence_id unknown{7};

}  // namespace

TEST_CASE("a step is begun with known sequences, each once, outside a step", "[errors]") {
  refuses_at<usage_error>(moment::before_steps, {"sequence 7 is not open"},
                          [](auto& p, auto, auto) { return p.begin_step({{unknown}}); });
  refuses_at<usage_error>(moment::before_steps, {"sequence -1 is not open"},
                          [](auto& p, auto, auto) { return p.begin_step({{sequence_id{-1}}}); });
  refuses_at<usage_error>(moment::between_steps, {"sequence 7 is not open"}, [](auto& p, auto a, auto) {
    return p.begin_step({{a}, {unknown}});
  });
  refuses_at<usage_error>(moment::before_steps, {"sequence 1 is listed twice"}, [](auto& p, auto a, auto b) {
    return p.begin_step({{b}, {a}, {b}});
  });
  refuses_at<usage_error>(moment::before_steps,
                          {"sequence 0 brings 2 decode rows", "max_decode_rows", "is 1"},
                          [](auto& p, auto a, auto) {
                            return p.begin_step({{a, 2}});
                          });
  refuses_at<usage_error>(moment::before_steps, {"sequence 0 brings -1 decode rows"},
                          [](auto& p, auto a, auto) {
                            return p.begin_step({{a, -1}});
                          });
  refuses_at<usage_error>(moment::before_steps, {"sequence 1 brings -5 prompt rows"},
                          [](auto& p, auto a, auto b) {
                            return p.begin_step({{a}, {b, -5, step_phase::prefill}});
                          });
  for (const moment when : {moment::begun, moment::first_layer_appended, moment::all_attended})
    refuses_at<usage_error>(when, {"begin_step: the step in progress has not ended; end or abandon it first"},
                            [](auto& p, auto a, auto) { return p.begin_step({{a}}); });
}

TEST_CASE("a step that does not fit reserves nothing", "[errors]") {
  // 92 and 63 tokens are there; 12 and 8 pages of 32 are in use.
  refuses_at<freekv::pool_exhausted>(moment::before_steps,
                                     {"tokens of sequence 0 exhausted", "92 of 200 in use", "needs 109 more"},
                                     [](auto& p, auto a, auto b) {
                                       return p.begin_step({{b}, {a, 109, step_phase::prefill}});
                                     });
  refuses_at<freekv::pool_exhausted>(moment::before_steps,
                                     {"page pool exhausted", "20 of 32 in use",
                                      "the step, from sequence 0 on, needs 13 more", "release a sequence"},
                                     [](auto& p, auto a, auto) {
                                       return p.begin_step({{a, 12 * 8 - 92 + 13 * 8, step_phase::prefill}});
                                     });
  refuses_at<freekv::pool_exhausted>(
      moment::before_steps, {"page pool exhausted", "20 of 32", "needs 14 more"},
      [](auto& p, auto a, auto b) {
        return p.begin_step({{a, 60, step_phase::prefill}, {b, 50, step_phase::prefill}});
      });
  refuses_at<freekv::pool_exhausted>(
      moment::before_steps, {"tokens of sequence 1"}, [](auto& p, auto, auto b) {
        return p.begin_step({{b, std::numeric_limits<int>::max(), step_phase::prefill}});
      });
}

TEST_CASE("exactly what fits is taken", "[errors]") {
  auto s = two_sequences();
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto a = pipeline.open(), b = pipeline.open();
  const auto step = pipeline.begin_step({{a, 200, step_phase::prefill}, {b, 56, step_phase::prefill}});
  CHECK(pipeline.free_pages() == 0);
  CHECK(pipeline.tokens(a) == 200);
}

TEST_CASE("exhausted pools say their numbers to programs too", "[errors]") {
  const freekv::pool_exhausted e("page pool", 4096, 4095, "sequence 3", 2);
  CHECK(e.capacity == 4096);
  CHECK(e.used == 4095);
  CHECK(e.needed == 2);
  CHECK(std::string(e.what()) ==
        "page pool exhausted: 4095 of 4096 in use, sequence 3 needs 2 more; release a sequence or raise the "
        "capacity "
        "in the settings");
  // All are freekv::error, and that is a runtime_error.
  CHECK_THROWS_AS(throw e, freekv::error);
  CHECK_THROWS_AS(throw settings_error("x"), freekv::error);
  CHECK_THROWS_AS(throw usage_error("x"), std::runtime_error);
}

TEST_CASE("no more sequences are opened than there is room for", "[errors]") {
  for (const moment when : {moment::before_steps, moment::first_layer_appended, moment::between_steps})
    refuses_at<freekv::pool_exhausted>(when, {"sequences exhausted", "2 of 2 in use", "needs 1 more"},
                                       [](auto& p, auto, auto) { p.open(); });
}

TEST_CASE("a sequence is released between steps, if it is open", "[errors]") {
  for (const moment when : {moment::begun, moment::first_layer_appended, moment::all_attended})
    refuses_at<usage_error>(when, {"release: the step in progress has not ended"},
                            [](auto& p, auto a, auto) { p.release(a); });
  refuses_at<usage_error>(moment::before_steps, {"sequence 7 is not open"},
                          [](auto& p, auto, auto) { p.release(unknown); });
  freekv::host_backend backend;
  tiny_pipeline pipeline(two_sequences(), backend);
  const auto a = pipeline.open();
  pipeline.release(a);
  CHECK_THROWS_AS(pipeline.release(a), usage_error);
  CHECK_THROWS_AS(pipeline.tokens(a), usage_error);
  CHECK_THROWS_AS(pipeline.begin_step({{a}}), usage_error);
}

TEST_CASE("questions about what does not exist are refused", "[errors]") {
  refuses_at<usage_error>(moment::between_steps, {"sequence 7 is not open"},
                          [](auto& p, auto, auto) { p.tokens(unknown); });
  refuses_at<usage_error>(moment::between_steps, {"sequence 7 is not open"},
                          [](auto& p, auto, auto) { p.report(0)[unknown]; });
  for (const int layer : {-1, 3})
    refuses_at<usage_error>(moment::between_steps,
                            {"report: layer " + std::to_string(layer) + " is not one of 3"},
                            [=](auto& p, auto a, auto) { p.report(layer)[a]; });
}

TEST_CASE("append comes once a layer, in a step, with as many numbers as there are rows", "[errors]") {
  const std::vector<float> keys(2 * 2 * 24, 9.0f), queries(2 * 6 * 24, 9.0f);
  const auto append = [=](int layer, std::size_t k, std::size_t v, std::size_t q) {
    return [=](moment, auto&, auto& step, auto, auto) {
      step.template append<float>(layer, {.keys = std::span(keys).first(k),
                                          .values = std::span(keys).first(v),
                                          .queries = std::span(queries).first(q)});
    };
  };
  const std::size_t all = keys.size(), all_queries = queries.size();
  for (const moment when : {moment::before_steps, moment::between_steps})
    refuses_of_step<usage_error>(when, {"append: no step is in progress here"},
                                 append(0, all, all, all_queries));
  for (const int layer : {-1, 3})
    refuses_of_step<usage_error>(moment::begun,
                                 {"append: layer " + std::to_string(layer) + " is not one of 3"},
                                 append(layer, all, all, all_queries));
  refuses_of_step<usage_error>(moment::first_layer_appended, {"append: layer 0 is appended to already"},
                               append(0, all, all, all_queries));
  refuses_of_step<usage_error>(moment::first_layer_attended, {"append: layer 0 is attended already"},
                               append(0, all, all, all_queries));
  refuses_of_step<usage_error>(moment::begun, {"append: keys: 95 numbers for 2 rows of 48"},
                               append(0, all - 1, all, all_queries));
  refuses_of_step<usage_error>(moment::begun, {"append: values: 48 numbers for 2 rows of 48"},
                               append(0, all, all / 2, all_queries));
  refuses_of_step<usage_error>(moment::begun, {"append: queries: 287 numbers for 2 rows of 144"},
                               append(0, all, all, all_queries - 1));
  refuses_of_step<usage_error>(moment::begun, {"append: queries: 0 numbers for 2 rows of 144"},
                               append(0, all, all, 0));
}

TEST_CASE("attend comes once behind append, with room for its output", "[errors]") {
  std::vector<float> out(2 * 6 * 24), lse(12);
  const auto attend = [&](int layer, std::size_t o, std::size_t l) {
    return [&, layer, o, l](moment, auto&, auto& step, auto, auto) {
      step.attend(layer, std::span(out).first(o), std::span(lse).first(l));
    };
  };
  for (const moment when : {moment::before_steps, moment::between_steps})
    refuses_of_step<usage_error>(when, {"attend: no step is in progress here"}, attend(0, out.size(), 12));
  for (const int layer : {-1, 3})
    refuses_of_step<usage_error>(moment::last_layer_appended,
                                 {"attend: layer " + std::to_string(layer) + " is not one of 3"},
                                 attend(layer, out.size(), 12));
  refuses_of_step<usage_error>(moment::begun, {"attend: layer 0 is not appended to yet"},
                               attend(0, out.size(), 12));
  refuses_of_step<usage_error>(moment::first_layer_attended, {"attend: layer 0 is attended already"},
                               attend(0, out.size(), 12));
  refuses_of_step<usage_error>(moment::first_layer_attended, {"attend: layer 1 is not appended to yet"},
                               attend(1, out.size(), 12));
  for (const moment when : {moment::first_layer_appended, moment::last_layer_appended}) {
    const int layer = when == moment::first_layer_appended ? 0 : 2;
    refuses_of_step<usage_error>(when, {"attention output: 287 numbers for 2 rows of 144"},
                                 attend(layer, out.size() - 1, 12));
    refuses_of_step<usage_error>(when, {"log-sum-exp: 11 numbers for 2 rows of 6"},
                                 attend(layer, out.size(), 11));
  }
}

TEST_CASE("full attention is measured in a step, behind append", "[errors]") {
  std::vector<float> out(2 * 6 * 24);
  const auto measure = [&](moment, auto&, auto& step, auto, auto) { step.attend_full(0, out); };
  refuses_of_step<usage_error>(moment::between_steps, {"attend_full: no step is in progress here"}, measure);
  refuses_of_step<usage_error>(moment::begun, {"attend_full: layer 0 is not appended to yet"}, measure);
  refuses_of_step<usage_error>(moment::first_layer_appended,
                               {"attention output: 0 numbers for 2 rows of 144"},
                               [](moment, auto&, auto& step, auto, auto) { step.attend_full(0, {}); });
}

TEST_CASE("a step ends when every layer has what it was begun for", "[errors]") {
  const auto end = [](moment, auto&, auto& step, auto, auto) { step.end(); };
  for (const moment when : {moment::before_steps, moment::between_steps})
    refuses_of_step<usage_error>(when, {"end: no step is in progress here"}, end);
  refuses_of_step<usage_error>(moment::begun, {"end: layer 0 of 3 was not appended to"}, end);
  refuses_of_step<usage_error>(moment::first_layer_appended,
                               {"end: layer 0 of 3 has not attended its decode rows"}, end);
  refuses_of_step<usage_error>(moment::first_layer_attended, {"end: layer 1 of 3 was not appended to"}, end);
  refuses_of_step<usage_error>(moment::last_layer_appended,
                               {"end: layer 2 of 3 has not attended its decode rows"}, end);
}

TEST_CASE("abandoning does nothing where there is no step", "[errors]") {
  for (const moment where : {moment::before_steps, moment::between_steps}) {
    const auto results = scenario::run([=](moment now, auto&, auto& step, auto, auto) {
      if (now == where) CHECK_FALSE(step.abandon());
    });
    CHECK(results == scenario::undisturbed());
  }
}

namespace {

/// How a step is left.
enum class leaving { abandon, scope, exception };

/// A step of the sequences that goes as far as `stop` in layer 0, and is left there.
void leave_at(moment stop, leaving by, tiny_pipeline& pipeline, const std::vector<sequence_part>& parts) {
  std::vector<freekv::step_input> listed;
  std::vector<float> keys, values, queries;
  for (const auto& part : parts) {
    listed.push_back({part.id, part.tokens, part.phase});
    const auto rows = part.source->at(0, pipeline.tokens(part.id), part.tokens);
    keys.insert(keys.end(), rows.keys.begin(), rows.keys.end());
    values.insert(values.end(), rows.values.begin(), rows.values.end());
    queries.insert(queries.end(), rows.queries.begin(), rows.queries.end());
  }
  const auto going = [&](auto step) {
    if (stop != moment::begun)
      step.template append<float>(0, {.keys = keys, .values = values, .queries = queries});
    std::vector<float> out(queries.size());
    if (stop == moment::first_layer_attended) step.attend(0, out);
    if (by == leaving::abandon) CHECK(step.abandon());
    if (by == leaving::exception) throw std::runtime_error("the engine fails");
  };
  if (by == leaving::exception)
    CHECK_THROWS_WITH(going(pipeline.begin_step(listed)), "the engine fails");
  else
    going(pipeline.begin_step(listed));
}

}  // namespace

TEST_CASE("a step abandoned anywhere ends its own sequences, and no other notices", "[errors]") {
  auto s = two_sequences();
  s.plan = freekv::complete_first<freekv::dynamic>{0};  // so that layer 0 has queued its recall when it stops
  s.correction = freekv::never{};                       // so that a selection that was not forgotten is used
  const text first(s, head_dim, 120, 1), second(s, head_dim, 120, 2);
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 1024});
  const auto prompted_and_decoded = [&](tiny_pipeline& pipeline) {
    const auto id = pipeline.open();
    prompt_only(pipeline, id, first, 60);
    return decode(pipeline, id, first, 60);
  };
  const auto decoded = [&](tiny_pipeline& pipeline, sequence_id id) {
    return decode(pipeline, id, second, 60);
  };
  tiny_pipeline untouched(s, backend);
  const auto of_first = prompted_and_decoded(untouched), of_second = decoded(untouched, untouched.open());

  for (const step_phase kind : {step_phase::decode, step_phase::prefill})
    for (const auto& [stop, by] : {std::pair{moment::begun, leaving::abandon},
                                   {moment::begun, leaving::exception},
                                   {moment::first_layer_appended, leaving::scope},
                                   {moment::first_layer_appended, leaving::abandon},
                                   {moment::first_layer_attended, leaving::exception},
                                   {moment::first_layer_attended, leaving::scope}}) {
      tiny_pipeline pipeline(s, backend);
      const auto a = pipeline.open(), b = pipeline.open();
      prompt_only(pipeline, a, first, 60);
      auto of_a = decode(pipeline, a, first, 5);
      const int free = pipeline.free_pages();
      prompt_only(pipeline, b, second, 61);
      decode(pipeline, b, second, 3);

      leave_at(stop, by, pipeline, {{b, &second, kind == step_phase::decode ? 1 : 20, kind}});
      CHECK(pipeline.free_pages() == free);
      CHECK(pipeline.tokens(a) == 65);
      CHECK_THROWS_WITH(pipeline.tokens(b), Contains("sequence 1 is not open"));

      REQUIRE(pipeline.open() == b);
      CHECK(pipeline.tokens(b) == 0);
      CHECK(decoded(pipeline, b) == of_second);  // from its first token on, with no prompt to clear the way
      for (auto& result : decode(pipeline, a, first, 55)) of_a.push_back(std::move(result));
      CHECK(of_a == of_first);
    }
}

TEST_CASE("abandoning waits for queued work", "[errors]") {
  freekv::host_backend backend;
  tiny_pipeline pipeline(tiny_settings(), backend);
  auto step = pipeline.begin_step({{pipeline.open()}});
  std::atomic<bool> done = false;
  backend.recall().enqueue([&done] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    done = true;
  });
  step.abandon();
  CHECK(done);
}

TEST_CASE("a step of all sequences is abandoned whole; the pages and the ids are there again", "[errors]") {
  const auto s = two_sequences();
  const text first(s, head_dim, 120, 1), second(s, head_dim, 120, 2);
  for (const moment stop : {moment::begun, moment::first_layer_appended, moment::first_layer_attended}) {
    freekv::host_backend backend;
    tiny_pipeline pipeline(s, backend);
    const auto a = pipeline.open(), b = pipeline.open();
    prompt_only(pipeline, a, first, 90);
    leave_at(stop, leaving::scope, pipeline, {{b, &second, 61, step_phase::prefill}, {a, &first}});
    CHECK(pipeline.free_pages() == 32);
    CHECK(pipeline.open() == a);
    CHECK(pipeline.open() == b);
    CHECK_THROWS_AS(pipeline.open(), freekv::pool_exhausted);
  }
}

TEST_CASE("a sequence that was listed with no rows is not in the step that is abandoned", "[errors]") {
  const auto s = two_sequences();
  const text source(s, head_dim, 120, 1);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto a = pipeline.open(), b = pipeline.open();
  prompt_only(pipeline, a, source, 30);
  pipeline.begin_step({{a, 0}, {b}}).abandon();
  CHECK(pipeline.tokens(a) == 30);
  CHECK_THROWS_AS(pipeline.tokens(b), usage_error);
}

TEST_CASE("prompt rows without queries cannot attend", "[errors]") {
  const auto s = tiny_settings();
  const text source(s, head_dim, 50, 3);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto id = pipeline.open();
  const auto rows = source.at(0, 0, 20);
  auto step = pipeline.begin_step({{id, 20, step_phase::prefill}});
  CHECK_THROWS_WITH(
      step.append<float>(0, {.keys = rows.keys, .values = rows.values, .queries = rows.queries.first(5)}),
      Contains("queries: 5 numbers for 20 rows of 144"));
  step.append<float>(0, {.keys = rows.keys, .values = rows.values});
  std::vector<float> out(20 * 6 * 24);
  CHECK_THROWS_AS(step.attend(0, out), usage_error);
  CHECK_THROWS_WITH(step.attend(0, out), Contains("attend: append was given no queries"));
  CHECK_THROWS_WITH(step.attend_full(0, out), Contains("attend_full: append was given no queries"));
}

TEST_CASE("a layer that attends after another was appended to uses its own queries, or is refused",
          "[errors]") {
  // Layer by layer is the order; two appends before an attend must not exchange the layers' queries silently.
  const auto s = tiny_settings();
  const text source(s, head_dim, 81, 4);
  std::vector<std::vector<float>> outs;
  for (const bool in_order : {true, false}) {
    freekv::host_backend backend;
    tiny_pipeline pipeline(s, backend);
    const auto id = pipeline.open();
    prompt_only(pipeline, id, source, 80);
    auto step = pipeline.begin_step({{id}});
    std::vector<float> out(6 * 24);
    const auto append = [&](int layer) {
      const auto rows = source.at(layer, 80, 1);
      step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
    };
    append(0);
    if (in_order) {
      step.attend(0, out);
    } else {
      append(1);
      try {
        step.attend(0, out);
      } catch (const usage_error&) {
        return;
      }
    }
    outs.push_back(out);
  }
  CHECK(same_bits(outs[0], outs[1]));
}

TEST_CASE("a step moves; the handle that it has left, or has ended in, refuses its calls", "[errors]") {
  const auto s = two_sequences();
  const text source(s, head_dim, 120, 1);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto a = pipeline.open(), b = pipeline.open();
  tiny_pipeline::step first = pipeline.begin_step({{a, 20, step_phase::prefill}});
  tiny_pipeline::step moved = std::move(first);
  CHECK_FALSE(first);
  REQUIRE(moved);
  const auto refused = [](auto& step) {
    std::vector<float> out(20 * 6 * 24);
    std::vector<std::int32_t> blocks(64);
    const auto sentence = [](const char* call) {
      return std::string(call) + ": no step is in progress here; it has ended or moved, or never began";
    };
    CHECK_THROWS_WITH(step.template append<float>(0, {}), sentence("append"));
    CHECK_THROWS_WITH(step.template append_from<float>(0, {}), sentence("append_from"));
    CHECK_THROWS_WITH(step.attend(0, out), sentence("attend"));
    CHECK_THROWS_WITH(step.attend_full(0, out), sentence("attend_full"));
    CHECK_THROWS_WITH(step.most_attended(0), sentence("most_attended"));
    CHECK_THROWS_WITH(step.log_masses(0, out), sentence("log_masses"));
    CHECK_THROWS_WITH(step.correct(0), sentence("correct"));
    CHECK_THROWS_WITH(step.table(0, sequence_id{0}, blocks), sentence("table"));
    CHECK_THROWS_WITH(step.table(0, sequence_id{0}, 0, blocks), sentence("table"));
    CHECK_THROWS_WITH(step.finish_layer(0), sentence("finish_layer"));
    CHECK_THROWS_WITH(step.abandon(sequence_id{0}), sentence("abandon"));
    CHECK_THROWS_WITH(step.end(), sentence("end"));
    CHECK_FALSE(step.abandon());
  };
  refused(first);
  for (int layer = 0; layer < 3; ++layer) {
    const auto rows = source.at(layer, 0, 20);
    moved.append<float>(layer, {.keys = rows.keys, .values = rows.values});
  }
  moved.end();
  refused(moved);
  CHECK(pipeline.tokens(a) == 20);

  // What is moved to a handle takes the place of its step, which is abandoned.
  moved = pipeline.begin_step({{b, 20, step_phase::prefill}});
  moved = tiny_pipeline::step();
  CHECK_THROWS_AS(pipeline.tokens(b), usage_error);
  freekv::host_backend other;
  tiny_pipeline alone(s, other);
  const auto same = alone.open();
  prompt_only(alone, same, source, 20);
  CHECK(decode(pipeline, a, source, 30) == decode(alone, same, source, 30));
}

TEST_CASE("rows and outputs of a step may have room for more rows, which it neither reads nor writes",
          "[errors]") {
  const auto s = two_sequences();
  const text source(s, head_dim, 120, 1);
  freekv::host_backend backend, other;
  tiny_pipeline pipeline(s, backend), alone(s, other);
  const auto id = pipeline.open(), same = alone.open();
  const auto padded = [](std::span<const float> rows, int more) {
    std::vector<float> all(rows.begin(), rows.end());
    all.resize(all.size() + count(more), quiet_nan);
    return all;
  };
  for (int nth = 0; nth < 30; ++nth) {
    const int tokens = nth == 0 ? 50 : 1, before = pipeline.tokens(id), more = nth % 3;
    const auto phase = nth == 0 ? step_phase::prefill : step_phase::decode;
    auto step = pipeline.begin_step({{id, tokens, phase}});
    sequence_result got;
    for (int layer = 0; layer < 3; ++layer) {
      const auto rows = source.at(layer, before, tokens);
      const auto keys = padded(rows.keys, more * 48), values = padded(rows.values, more * 48),
                 queries = padded(rows.queries, more * 144);
      std::vector<float> out(queries.size(), quiet_nan), lse(count((tokens + more) * 6), quiet_nan),
          full(out);
      step.append<float>(layer, {.keys = keys, .values = values, .queries = queries});
      if (nth % 5 == 1) {
        std::vector<float> masses(count((tokens + more) * 6 * step.most_attended(layer)), quiet_nan);
        step.log_masses(layer, masses);
        CHECK(std::all_of(masses.end() - more * 6 * step.most_attended(layer), masses.end(),
                          [](float x) { return std::isnan(x); }));
      }
      step.attend(layer, out, lse);
      step.attend_full(layer, full);
      for (const auto& [numbers, row] : {std::pair{&out, 144}, {&full, 144}, {&lse, 6}}) {
        const auto end = numbers->begin() + tokens * row;
        CHECK(std::none_of(numbers->begin(), end, [](float x) { return std::isnan(x); }));
        CHECK(std::all_of(end, numbers->end(), [](float x) { return std::isnan(x); }));
      }
      got.out.insert(got.out.end(), out.begin(), out.begin() + tokens * 144);
      got.lse.insert(got.lse.end(), lse.begin(), lse.begin() + tokens * 6);
    }
    step.end();
    const auto want = run_step(alone, same, source, tokens, phase);
    CHECK(same_bits(got.out, want.out));
    CHECK(same_bits(got.lse, want.lse));
  }
}

TEST_CASE("settings that contradict each other are refused with their numbers, before anything is taken",
          "[errors]") {
  class refusing_resource : public std::pmr::memory_resource {
   public:
    int calls = 0;

   private:
    void* do_allocate(std::size_t, std::size_t) override { throw(++calls, std::bad_alloc()); }
    void do_deallocate(void*, std::size_t, std::size_t) override {}
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
      return this == &other;
    }
  };
  freekv::host_backend backend;
  const auto refuses = [&](const std::vector<std::string>& words, const auto& spoil) {
    auto s = tiny_settings();
    spoil(s);
    refusing_resource memory;
    for (const bool build : {true, false}) {
      try {
        if (build)
          tiny_pipeline(s, backend, {&memory, &memory});
        else
          tiny_pipeline::footprint(s, backend);
        FAIL_CHECK("nothing was thrown for: " << words[0]);
      } catch (const settings_error& e) {
        for (const auto& word : words) CHECK_THAT(e.what(), Contains(word));
      }
    }
    CHECK(memory.calls == 0);
  };
  refuses({"layers is 0", "at least 1"}, [](auto& s) { s.model.layers = 0; });
  refuses({"layers is -2"}, [](auto& s) { s.model.layers = -2; });
  refuses({"kv_heads is 0", "at least 1"}, [](auto& s) { s.model.kv_heads = 0; });
  refuses({"query_heads 7 is not a multiple of kv_heads 2"}, [](auto& s) { s.model.query_heads = 7; });
  refuses({"65537 layers", "at most 65536"}, [](auto& s) { s.model.layers = 65537; });
  refuses({"4098 query heads", "4096"}, [](auto& s) { s.model.query_heads = 4098; });
  refuses({"query_heads 0 is not a multiple of kv_heads 2"}, [](auto& s) { s.model.query_heads = 0; });
  refuses({"query_heads 1 is not a multiple of kv_heads 2"}, [](auto& s) { s.model.query_heads = 1; });
  refuses({"query_heads -4 is not a multiple"}, [](auto& s) { s.model.query_heads = -4; });
  refuses({"a unit of 3 tokens does not divide a page of 8", "1 or 8"}, [](auto& s) { s.unit = {{3}}; });
  refuses({"a unit of 16 tokens does not divide"}, [](auto& s) { s.unit = {{16}}; });
  refuses({"a unit of -1 tokens"}, [](auto& s) { s.unit = {{-1}}; });
  refuses({"sink of 12 tokens is not a multiple of the page size 8"}, [](auto& s) { s.budget.sink = 12; });
  refuses({"sink of -8 tokens"}, [](auto& s) { s.budget.sink = -8; });
  refuses({"window of 0 tokens is not a positive multiple of the page size 8"},
          [](auto& s) { s.budget.window = 0; });
  refuses({"window of 12 tokens"}, [](auto& s) { s.budget.window = 12; });
  refuses({"window of -16 tokens"}, [](auto& s) { s.budget.window = -16; });
  refuses({"selected_units is 0", "at least 1"}, [](auto& s) { s.budget.selected_units = 0; });
  refuses({"max_tokens is 0"}, [](auto& s) { s.capacity.max_tokens = 0; });
  refuses({"max_tokens is -1"}, [](auto& s) { s.capacity.max_tokens = -1; });
  refuses({"max_sequences is 0", "at least 1"}, [](auto& s) { s.capacity.max_sequences = 0; });
  refuses({"store_tokens is -5"}, [](auto& s) { s.capacity.store_tokens = -5; });
  refuses({"store_tokens of 17179869184", "2^31 pages of 8 tokens"},
          [](auto& s) { s.capacity.store_tokens = std::int64_t{1} << 34; });
  refuses({"scale is not finite"}, [](auto& s) { s.attention.scale = inf; });
  refuses({"scale is not finite"}, [](auto& s) { s.attention.scale = quiet_nan; });
  refuses({"selection_scale is not finite"}, [](auto& s) { s.attention.selection_scale = inf; });
  refuses({"complete_first has -3 layers"},
          [](auto& s) { s.plan = freekv::complete_first<freekv::dynamic>{-3}; });
  refuses({"scale is not finite, or below 0"}, [](auto& s) { s.attention.scale = -1.0f; });
  refuses({"selection_scale is not finite, or below 0"},
          [](auto& s) { s.attention.selection_scale = -0.1f; });
  refuses({"tau is NaN"}, [](auto& s) { s.correction = freekv::cosine_drift{.tau = quiet_nan}; });
  refuses({"tau is NaN"}, [](auto& s) {
    s.correction = freekv::cosine_drift{.tau_of_layer = {0.9f, quiet_nan, 0.9f}};
  });
  refuses({"tau for 2 layers of 3", "one for each, or none"}, [](auto& s) {
    s.correction = freekv::cosine_drift{.tau_of_layer = {0.9f, 0.8f}};
  });
  {
    using own = freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, 24>, freekv::per_query_head,
                                           freekv::mass_deficit>;
    CHECK_THROWS_WITH(
        own::footprint({.model = {.query_heads = 4, .kv_heads = 2}, .capacity = {.max_tokens = 64}}, backend),
        Contains("per_query_head") && Contains("for mass_deficit to judge; choose cosine_drift"));
  }
  refuses({"key_subspace needs its basis as data"},
          [](auto& s) { s.summary = freekv::key_subspace<8, 3>{}; });
  const std::vector<float> data(3 * 2 * 9 * 24);
  const auto basis = [&](int layers, int heads, int rank, int d) {
    return [=, &data](auto& s) {
      s.summary = freekv::key_subspace<8, 3>{.basis = {data.data(), layers, heads, rank, d}};
    };
  };
  refuses({"basis has 2 layers of 2 heads, rank 8, head_dim 24", "needed are 3 layers of 2 heads, rank 8"},
          basis(2, 2, 8, 24));
  refuses({"basis has 3 layers of 1 heads"}, basis(3, 1, 8, 24));
  refuses({"basis has 3 layers of 2 heads, rank 7"}, basis(3, 2, 7, 24));
  refuses({"head_dim 16", "head_dim 24"}, basis(3, 2, 8, 16));
  // And what they ask for is enough.
  auto s = tiny_settings();
  basis(3, 2, 8, 24)(s);
  CHECK_NOTHROW(tiny_pipeline::footprint(s, backend));
}

TEST_CASE("policies refuse sizes at run time that they refuse at compile time", "[errors]") {
  const freekv::summary_setting setting{{16, 24}, 1, 1};
  const auto refuses = [&](const auto& policy, const std::string& words) {
    CHECK_THROWS_AS(policy.validate(setting), settings_error);
    CHECK_THROWS_WITH(policy.validate(setting), Contains(words));
  };
  using any_chunk = freekv::chunk_means<freekv::dynamic>;
  using any_subspace = freekv::key_subspace<freekv::dynamic, freekv::dynamic>;
  refuses(any_chunk{{0}}, "a chunk of 0 tokens does not divide a page of 16");
  refuses(any_chunk{{-4}}, "a chunk of -4 tokens");
  refuses(any_chunk{{3}}, "a chunk of 3 tokens does not divide a page of 16");
  refuses(any_chunk{{32}}, "a chunk of 32 tokens");
  refuses(freekv::chunk_means<24>{}, "a chunk of 24 tokens");
  const std::vector<float> data(25 * 24);
  const freekv::subspace_basis basis{data.data(), 1, 1, 24, 24};
  for (const int bits : {-3, 0, 1, 5, 6, 7, 16, 64})
    refuses(any_subspace{{8}, {bits}, basis},
            "key_subspace: " + std::to_string(bits) + " bits; choose 2, 3, 4 or 8");
  for (const int rank : {-1, 0, 25})
    refuses(any_subspace{{rank}, {3}, basis},
            "rank " + std::to_string(rank) + " is not between 1 and head_dim 24");
  const freekv::summary_setting of_units{{4, 24}, 1, 1};
  for (const int bits : {2, 3, 4, 8}) {
    const any_subspace codes{{8}, {bits}, basis};
    CHECK_THROWS_WITH(codes.validate(of_units), Contains("8 tokens at a time, and a unit has 4"));
  }
  CHECK_NOTHROW(any_subspace{{8}, {32}, basis}.validate(of_units));
  CHECK_THROWS_WITH(freekv::key_sketch<2>{}.validate(of_units), Contains("8 tokens at a time"));
  CHECK_THROWS_WITH((freekv::key_codes<6>{}.validate({{3, 24}, 1, 1})),
                    Contains("two tokens are looked up at a time, and a unit has 3"));
  for (const int dims : {0, -3}) {
    const freekv::key_codebooks flat{basis.data, 1, 1, 24, 2, 1, 2, dims},
        flat_means{basis.data, 1, 1, 24, 2, dims, 2, 1};
    for (const auto& books : {flat, flat_means})
      CHECK_THROWS_WITH((freekv::key_codes<2, 2>{{}, {}, books}.validate({{8, 24}, 1, 1})),
                        Contains(std::to_string(dims)) && Contains("give 1 or more of each"));
  }
  for (const int bits : {2, 3, 4, 8, 32}) CHECK_NOTHROW(any_subspace{{24}, {bits}, basis}.validate(setting));
  for (const int chunk : {1, 2, 4, 8, 16}) CHECK_NOTHROW(any_chunk{{chunk}}.validate(setting));
}

TEST_CASE("page sizes at run time are multiples of 8 from 8 to 256", "[errors]") {
  using pack = freekv::policy_pack_of<freekv::page_size<freekv::dynamic>>;
  freekv::pipeline_settings<pack> s;
  s.model.query_heads = s.model.kv_heads = 1;
  s.capacity.max_tokens = 1000;
  for (const int page : {0, 4, 7, 12, 100, 264, -8}) {
    s.page = {page};
    CHECK_THROWS_AS(freekv::checked_settings<64>(s), settings_error);
    CHECK_THROWS_WITH(freekv::checked_settings<64>(s),
                      "page size " + std::to_string(page) + " is not a multiple of 8 from 8 to 256");
  }
  for (const int page : {8, 16, 24, 128, 256}) {
    s.page = {page};
    s.budget = {.sink = page, .window = page, .selected_units = 1};
    CHECK_NOTHROW(freekv::checked_settings<64>(s));
  }
}

TEST_CASE("settings left out are filled in", "[errors]") {
  using pack = freekv::policy_pack_of<>;
  freekv::pipeline_settings<pack> given;
  given.model.query_heads = given.model.kv_heads = 1;
  given.capacity.max_tokens = 100;
  given.capacity.max_sequences = 3;
  const auto s = freekv::checked_settings<64>(given);
  CHECK(s.attention.scale == 0.125f);
  CHECK(s.capacity.store_tokens == 3 * 128);
  CHECK(s.max_pages() == 4);
  CHECK(s.store_pages() == 12);
  // The standard budget, as far as 100 tokens can use it.
  CHECK(s.budget.sink == 64);
  CHECK(s.budget.window == 128);
  CHECK(s.budget.selected_units == 4);
  given.attention.scale = 0.5f;
  CHECK(freekv::checked_settings<64>(given).attention.scale == 0.5f);
}
