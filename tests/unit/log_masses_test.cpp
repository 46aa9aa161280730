// What units have of a row's attention, against double precision, and that asking for it changes nothing.

#include <freekv/policies/scope.hpp>

#include "../catch.hpp"
#include "../mentions.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
constexpr int masses_dim = tiny_pipeline::head_dim, masses_prompt = 75, masses_end = 130;

/// A list's entry as tokens, `first` up to `end`.
struct token_range {
  int first = 0, end = 0;
};

/// What KV head `head` attends to with the row of token `n`: as docs/contract.md, 2.5 and 2.6 define it, but
/// for the units selected, which the report says.
std::vector<token_range> list_of(const tiny_pipeline::settings& s, bool everything, int n,
                                 const freekv::step_report& report, int head) {
  std::vector<token_range> all;
  const int page_tokens = s.page.tokens;
  const auto add_page = [&](int i) {
    all.push_back({i * page_tokens, std::min((i + 1) * page_tokens, n + 1)});
  };
  const int pages = n / page_tokens + 1, sink = s.budget.sink / page_tokens;
  const int window = std::max((n + 1 - s.budget.window) / page_tokens, sink);
  for (int i = 0; i < (everything ? pages : sink); ++i) add_page(i);
  if (everything) return all;
  const int unit = s.unit_tokens(), stride = static_cast<int>(report.attended.size()) / s.model.kv_heads;
  for (int i = 0; i < report.attended_count[count(head)]; ++i) {
    const int selected = report.attended[count(head * stride + i)];
    all.push_back({selected * unit, (selected + 1) * unit});
  }
  for (int i = window; i < pages; ++i) add_page(i);
  return all;
}
bool attends(const tiny_pipeline::settings& s, const freekv::step_report& report, int query_head, int i) {
  const int group = s.model.query_heads / s.model.kv_heads, head = query_head / group;
  const int stride = static_cast<int>(report.attended.size()) / s.model.kv_heads;
  const int nth = i - s.budget.sink / s.page.tokens;
  if (report.attended_by.empty() || nth < 0 || nth >= report.attended_count[count(head)]) return true;
  return (report.attended_by[count(head * stride + nth)] >> query_head % group & 1u) != 0;
}

struct asked {
  std::vector<float> masses, lse;
  int entries = 0;
};

/// A step of one sequence that asks for masses too, each layer's compared when the step has ended.
sequence_result step_with_masses(tiny_pipeline& pipeline, freekv::sequence_id id, const text& source,
                                 int tokens, freekv::step_phase kind) {
  const auto& s = pipeline.configuration();
  const int before = pipeline.tokens(id);
  auto step = pipeline.begin_step({{id, tokens, kind}});
  sequence_result result;
  std::vector<asked> of_layer(count(s.model.layers));
  for (int layer = 0; layer < s.model.layers; ++layer) {
    const auto rows = source.at(layer, before, tokens);
    step.append<float>(layer, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
    asked& now = of_layer[count(layer)];
    now.entries = step.most_attended(layer);
    now.masses.assign(count(tokens * s.model.query_heads * now.entries), quiet_nan);
    step.log_masses(layer, now.masses);
    std::vector<float> out(rows.queries.size());
    now.lse.resize(count(tokens * s.model.query_heads));
    step.attend(layer, out, now.lse);
    result.out.insert(result.out.end(), out.begin(), out.end());
    result.lse.insert(result.lse.end(), now.lse.begin(), now.lse.end());
  }
  step.end();
  const int group = s.model.query_heads / s.model.kv_heads;
  for (int layer = 0; layer < s.model.layers; ++layer) {
    const asked& now = of_layer[count(layer)];
    const auto report = pipeline.report(layer)[id];
    const bool everything = layer == 0 || kind == freekv::step_phase::prefill;
    for (int row = 0; row < tokens; ++row)
      for (int head = 0; head < s.model.query_heads; ++head) {
        const auto list = list_of(s, everything, before + row, report, head / group);
        REQUIRE(static_cast<int>(list.size()) <= now.entries);
        const double cap = double{s.attention.soft_cap}, unit = double{nat_in(s.attention.lse_base)};
        double sum = 0.0;
        for (int i = 0; i < now.entries; ++i) {
          const float mass = now.masses[count((row * s.model.query_heads + head) * now.entries + i)];
          sum += std::exp(double{mass} / unit);
          double expected = 0.0;
          const float* const query = source.at(layer, before + row, 1).queries.data() + head * masses_dim;
          if (count(i) < list.size() && (everything || attends(s, report, head, i)))
            for (int t = list[count(i)].first; t < list[count(i)].end; ++t) {
              const float* const key = source.at(layer, t, 1).keys.data() + head / group * masses_dim;
              double score = 0.0;
              for (int x = 0; x < masses_dim; ++x) score += double{query[x]} * double{key[x]};
              score *= double{s.attention.scale};
              expected += std::exp(s.attention.soft_cap > 0.0f ? cap * std::tanh(score / cap) : score);
            }
          INFO("layer " << layer << ", token " << before + row << ", query head " << head << ", entry " << i);
          REQUIRE(is_near(mass, std::log(expected) * unit, 2e-5));
        }
        REQUIRE(is_near(std::log(sum) * unit, now.lse[count(row * s.model.query_heads + head)], 2e-5));
      }
    if (kind == freekv::step_phase::decode) add_report(pipeline, layer, id, result);
  }
  return result;
}

}  // namespace

TEST_CASE("log_masses gives each unit's log-sum-exp and changes nothing", "[masses]") {
  const bool in_place = GENERATE(false, true), by_query_head = GENERATE(false, true);
  auto s = tiny_settings();
  s.unit = {GENERATE(0, 2)};
  freekv::host_backend backend({.threads = s.unit.tokens == 0 ? 3 : 1, .bytes_per_thread = 1}), other;
  if (in_place) s.attention.lse_base = freekv::log_base::two;
  if (in_place != by_query_head) s.attention.soft_cap = 1.5f;
  if (in_place) s.route = freekv::in_place{};
  if (by_query_head) s.scope = freekv::per_query_head{};
  const text source(s, masses_dim, masses_end, 7);
  tiny_pipeline with(s, backend), without(s, other);
  const auto a = with.open(), b = without.open();
  for (int tokens = 40; with.tokens(a) < masses_end;
       tokens = with.tokens(a) < masses_prompt ? masses_prompt - with.tokens(a) : 1) {
    const auto kind = tokens > 1 ? freekv::step_phase::prefill : freekv::step_phase::decode;
    REQUIRE(step_with_masses(with, a, source, tokens, kind) == run_step(without, b, source, tokens, kind));
  }
}

TEST_CASE("log_masses says in sentences what it is not given", "[masses]") {
  const auto s = tiny_settings();
  const text source(s, masses_dim, 40, 3);
  freekv::host_backend backend;
  tiny_pipeline pipeline(s, backend);
  const auto id = pipeline.open();
  prompt_only(pipeline, id, source, 30);
  auto step = pipeline.begin_step({{id}});
  std::vector<float> masses(count(s.model.query_heads * step.most_attended(1))),
      out(count(s.model.query_heads * masses_dim));
  const auto refuses = [&](std::span<float> to, const char* word) {
    try {
      step.log_masses(1, to);
      FAIL("nothing was thrown where " << word << " was expected");
    } catch (const freekv::usage_error& e) {
      check_mentions(e.what(), {word});
    }
  };
  refuses(masses, "not appended to");
  const auto rows = source.at(1, 30, 1);
  step.append<float>(1, {.keys = rows.keys, .values = rows.values, .queries = rows.queries});
  refuses(std::span(masses).first(5), "log-masses: 5 numbers");
  step.log_masses(1, masses);
  step.attend(1, out);
  refuses(masses, "attended already");
  step.abandon();
}
