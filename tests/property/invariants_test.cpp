// The invariants of one sequence (docs/contract.md, 13), over random cases.

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "../catch.hpp"
#include "../instruction_sets.hpp"
#include "seeds.hpp"
#include "trace.hpp"

namespace {

using namespace tests;

std::size_t n(int x) { return static_cast<std::size_t>(x); }

/// A case of a retrieval layer, short enough for many of them.
random_case retrieval_case(std::uint64_t seed) {
  random_case c = make_case(seed);
  c.options.method.codec = freekv::identity::name;   // what is lost is another test
  c.options.method.pinning = freekv::no_pins::name;  // what is chosen once is no from-scratch selection
  c.options.method.plan = "retrieval";
  c.steps = std::min(c.steps, 40);
  c.options.max_tokens = c.prompt + c.steps;
  return c;
}

/// The same with more candidates than are selected.
random_case selecting_case(std::uint64_t seed) {
  random_case c = retrieval_case(seed);
  auto& o = c.options;
  o.page = std::min(o.page, 32);
  o.method.chunk = 4;
  o.budget = {.sink = o.page, .window = 2 * o.page, .selected_units = std::min(o.budget.selected_units, 7)};
  if (o.page == 24) o.page = 16, o.budget.sink = 16, o.budget.window = 32;
  c.prompt = o.page * (o.budget.selected_units + 3 + static_cast<int>(seed % 9)) + static_cast<int>(seed % 7);
  o.max_tokens = c.prompt + c.steps;
  return c;
}

std::vector<std::span<const float>> rows_of(const std::vector<float>& data, const random_case& c, int head,
                                            const std::vector<int>& tokens) {
  std::vector<std::span<const float>> rows;
  for (const int token : tokens)
    rows.push_back(oracle::row_of(data, token * c.options.kv_heads + head, c.options.head_dim));
  return rows;
}

bool is_close(double a, double b, double tolerance) {
  return std::fabs(a - b) <= tolerance * std::max({std::fabs(a), std::fabs(b), 1.0});
}

/// How many numbers of a step differ from exact attention to `tokens_of_head(h, g)` of query head g of KV
/// head h.
template <class Tokens>
int wrong_outputs(const random_case& c, const trace& t, const traced_step& step,
                  const Tokens& tokens_of_head) {
  const int d = c.options.head_dim, group = c.options.query_heads / c.options.kv_heads;
  const auto s = oracle_settings(c);
  int wrong = 0;
  for (int head = 0; head < c.options.kv_heads; ++head) {
    for (int g = head * group; g < (head + 1) * group; ++g) {
      const auto tokens = tokens_of_head(head, g - head * group);
      const auto keys = rows_of(t.keys, c, head, tokens), values = rows_of(t.values, c, head, tokens);
      const double logit = s.sink_logits.empty() ? -oracle::infinity : s.sink_logits[n(g)];
      const auto expected =
          oracle::attend(oracle::row_of(step.queries, g, d), keys, values, s.scale, {s.soft_cap, logit});
      wrong += !is_close(step.lse[n(g)], expected.lse[0], 1e-5);
      for (int i = 0; i < d; ++i) wrong += !is_close(step.out[n(g * d + i)], expected.out[n(i)], 2e-5);
    }
  }
  return wrong;
}

/// An oracle that has seen the first `tokens` of a trace.
oracle::decoder oracle_at(const random_case& c, const trace& t, int tokens) {
  oracle::decoder d(oracle_settings(c));
  const std::size_t width = n(tokens * c.options.kv_heads * c.options.head_dim);
  d.prompt(std::span(t.keys).first(width), std::span(t.values).first(width), tokens);
  return d;
}

}  // namespace

TEST_CASE("1: with room for all candidates the output is that of full attention", "[property]") {
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 8192});
  long compared = 0;
  for (std::uint64_t seed = 1; seed <= share_of(80u); ++seed) {
    auto c = retrieval_case(seed);
    c.options.budget.selected_units = 500;  // more than any of these sequences has
    c.options.method.selection = "top_k";
    int wrong = 0;
    for (const auto& step : run_case(c, backend, true).steps) {
      for (std::size_t i = 0; i < step.out.size(); ++i) wrong += !is_close(step.out[i], step.full[i], 2e-6);
      for (std::size_t g = 0; g < step.lse.size(); ++g)
        wrong += !is_close(step.lse[g], step.full_lse[g], 2e-6);
      compared += static_cast<long>(step.lse.size());
    }
    INFO(c);
    CHECK(wrong == 0);
  }
  CHECK(compared > share_of(10000));
}

TEST_CASE("2: exactly sink, selected and window pages are attended, each token once", "[property]") {
  freekv::host_backend backend;
  long selections = 0;
  for (std::uint64_t seed = 1; seed <= share_of(80u); ++seed) {
    auto c = retrieval_case(seed);
    // Weights alike, so that one token more or less shows in every output.
    c.options.scale = 0.01f;
    c.outliers = 0.0f;
    const auto t = run_case(c, backend);
    const auto s = oracle_settings(c);
    int wrong = 0;
    for (const auto& step : t.steps) {
      const auto candidates = oracle::candidate_pages(s, step.length);
      auto rows = step.attended;
      for (const auto& of_heads : step.attended_by_head)
        if (!of_heads.empty()) {
          if (&of_heads == &step.attended_by_head.front()) rows.clear();
          rows.insert(rows.end(), of_heads.begin(), of_heads.end());
        }
      for (const auto& pages : rows) {
        const auto most = std::min(candidates.size(), n(s.selected_units));
        wrong += s.selection == oracle::selection_kind::top_k
                     ? pages.size() != most
                     : pages.size() > most || (pages.empty() && most > 0);
        wrong += !std::is_sorted(pages.begin(), pages.end());
        wrong += std::adjacent_find(pages.begin(), pages.end()) != pages.end();
        wrong += !std::includes(candidates.begin(), candidates.end(), pages.begin(), pages.end());
        selections += !pages.empty();
      }
      wrong += wrong_outputs(c, t, step, [&](int head, int g) {
        const auto& own = step.attended_by_head[n(head)];
        const auto& selected = own.empty() ? step.attended[n(head)] : own[n(g)];
        return oracle::tokens_of(s, step.length, oracle::attended_pages(s, step.length, selected));
      });
    }
    INFO(c);
    CHECK(wrong == 0);
  }
  CHECK(selections > share_of(400));
}

TEST_CASE("2: window layers attend to sink and window, complete layers to everything", "[property]") {
  freekv::host_backend backend;
  for (std::uint64_t seed = 1; seed <= share_of(40u); ++seed) {
    auto c = retrieval_case(seed);
    c.options.method.plan = seed % 2 == 0 ? "window" : "complete";
    c.steps = std::min(c.steps, 15);
    c.options.scale = 0.01f;
    const auto t = run_case(c, backend);
    const auto s = oracle_settings(c);
    int wrong = 0;
    for (const auto& step : t.steps) {
      for (const auto& pages : step.attended) wrong += !pages.empty();
      wrong += wrong_outputs(c, t, step, [&](int, int) {
        return oracle::tokens_of(s, step.length, oracle::attended_pages(s, step.length, {}));
      });
    }
    INFO(c);
    CHECK(wrong == 0);
  }
}

TEST_CASE("3: `always` selects with the current query, `never` with the one before", "[property]") {
  freekv::host_backend backend;
  long firm = 0, turned = 0;
  for (std::uint64_t seed = 1; seed <= share_of(30u); ++seed) {
    auto c = selecting_case(seed);
    c.steps = std::min(c.steps, 12);
    c.turn = 1.0f;  // the two differ
    for (const std::string correction : {"always", "never"}) {
      c.options.method.correction = correction;
      // What the next step attends to it selects by the step before too.
      if (correction == "never" && c.options.method.selection == "sticky_top_k") continue;
      const auto t = run_case(c, backend);
      auto reference = oracle_at(c, t, c.prompt);
      int wrong = 0;
      for (std::size_t i = 0; i < t.steps.size(); ++i) {
        const auto& step = t.steps[i];
        const auto width = n(c.options.kv_heads * c.options.head_dim);
        reference.prompt(std::span(t.keys).subspan(n(step.length - 1) * width, width),
                         std::span(t.values).subspan(n(step.length - 1) * width, width), 1);
        const auto& query = correction == "always" || i == 0 ? step.queries : t.steps[i - 1].queries;
        for (int head = 0; head < c.options.kv_heads; ++head) {
          wrong += step.corrected[n(head)] != (correction == "always" || i == 0);
          const auto chosen = reference.choose(query, head, step.length);
          if (!oracle::is_firm(chosen)) continue;
          ++firm;
          wrong += step.attended[n(head)] != chosen.pages;
          const auto& other = correction == "always" && i > 0 ? t.steps[i - 1].queries : step.queries;
          turned += reference.select(other, head, step.length) != chosen.pages;
        }
      }
      INFO(c);
      CHECK(wrong == 0);
    }
  }
  CHECK(firm > share_of(400));
  CHECK(turned > share_of(100));
}

TEST_CASE("4: recalled slices are bit for bit what was appended", "[property]") {
  // In place attention reads the store itself: equal bits mean equal slices.
  freekv::host_backend backend;
  long recalled = 0, promoted = 0;
  for (std::uint64_t seed = 1; seed <= share_of(60u); ++seed) {
    auto c = selecting_case(seed);
    c.options.in_place = false;
    const auto resident = run_case(c, backend);
    c.options.in_place = true;
    const auto in_place = run_case(c, backend);
    int wrong = 0;
    for (std::size_t i = 0; i < resident.steps.size(); ++i) {
      wrong += !resident.steps[i].same_outputs(in_place.steps[i]);
      for (int head = 0; head < c.options.kv_heads; ++head) {
        recalled += resident.steps[i].recalled[n(head)];
        promoted += resident.steps[i].promoted[n(head)];
        wrong += in_place.steps[i].recalled[n(head)] + in_place.steps[i].promoted[n(head)] != 0;
      }
    }
    INFO(c);
    CHECK(wrong == 0);
  }
  CHECK(recalled > share_of(1000));
  CHECK(promoted > share_of(50));
}

TEST_CASE("5: only missing slices move, out of the ring where it still has them", "[property]") {
  // With `never` each step's speculation is the next step's attended set, so both sides of a move are known.
  freekv::host_backend backend;
  long recalled = 0, promoted = 0;
  for (std::uint64_t seed = 1; seed <= share_of(80u); ++seed) {
    auto c = selecting_case(seed);
    c.options.in_place = false;
    c.options.method.correction = "never";
    c.options.method.spare = 0;
    const auto s = oracle_settings(c);
    const auto t = run_case(c, backend);
    int wrong = 0;
    for (std::size_t i = 0; i + 1 < t.steps.size(); ++i)
      for (int head = 0; head < c.options.kv_heads; ++head) {
        const auto& step = t.steps[i];
        const auto& now = step.attended[n(head)];
        int expected_recalled = 0, expected_promoted = 0;
        const auto move = [&](int page) {
          ++(oracle::is_in_ring(s, page, step.length) ? expected_promoted : expected_recalled);
        };
        if (i == 0) std::for_each(now.begin(), now.end(), move);  // nothing was held
        for (const int page : t.steps[i + 1].attended[n(head)])
          if (!std::binary_search(now.begin(), now.end(), page)) move(page);
        wrong += step.recalled[n(head)] != expected_recalled;
        wrong += step.promoted[n(head)] != expected_promoted;
        recalled += expected_recalled;
        promoted += expected_promoted;
      }
    INFO(c);
    CHECK(wrong == 0);
  }
  CHECK(recalled > share_of(1000));
  CHECK(promoted > share_of(30));
}

TEST_CASE("5: with room for all candidates every page is promoted once and never recalled", "[property]") {
  freekv::host_backend backend;
  for (const std::string correction : {"cosine_drift", "always", "never"})
    for (const int prompt : {0, 5, 40, 43, 47, 48}) {
      auto c = retrieval_case(3);
      auto& o = c.options;
      o.page = 8;
      o.budget = {.sink = 8, .window = 16, .selected_units = 100};
      o.method.correction = correction;
      o.method.summary = "min_max";
      o.method.selection = "top_k";
      o.in_place = false;
      c.prompt = prompt;
      c.steps = 60;
      o.max_tokens = prompt + 60;
      const auto s = oracle_settings(c);
      const auto t = run_case(c, backend);
      const int last = prompt + 60;
      for (int head = 0; head < o.kv_heads; ++head) {
        int recalled = 0, promoted = 0;
        for (const auto& step : t.steps) {
          recalled += step.recalled[n(head)];
          promoted += step.promoted[n(head)];
        }
        // What had left the ring before the first step was recalled by it.
        int gone = 0;
        for (const int page : oracle::candidate_pages(s, prompt + 1))
          gone += !oracle::is_in_ring(s, page, prompt + 1);
        INFO(correction << ", prompt " << prompt);
        CHECK(recalled == gone);
        CHECK(promoted == static_cast<int>(oracle::candidate_pages(s, last + 1).size()) - gone);
      }
    }
}

TEST_CASE("7: a retrieval layer's slots do not grow with the sequence", "[property]") {
  freekv::host_backend backend;
  for (std::uint64_t seed = 1; seed <= share_of(20u); ++seed) {
    auto c = retrieval_case(seed);
    c.options.in_place = false;
    // Fewer than 4000 tokens in all, so that neither length has too few.
    c.options.budget.selected_units =
        std::min(c.options.budget.selected_units, c.options.method.rows == "per_query_head" ? 1 : 7);
    c.options.max_tokens = 4000;
    const auto small = freekv::examples::make_pipeline(c.with_basis(), backend)->bytes();
    c.options.max_tokens = 12000;
    const auto large = freekv::examples::make_pipeline(c.with_basis(), backend)->bytes();
    INFO(c);
    CHECK(small.slots == large.slots);
    const auto& b = c.options.budget;
    const int rows =  // that select, of a KV head
        c.options.method.rows == "per_query_head" ? c.options.query_heads / c.options.kv_heads : 1;
    const int slots = b.sink / c.options.page + b.window / c.options.page + 1 + rows * b.selected_units +
                      c.options.method.spare;
    const std::size_t element = c.options.element == data_type::f32 ? 4 : 2;
    CHECK(small.slots == n(slots * c.options.page * 2 * c.options.kv_heads * c.options.head_dim) * element);
  }
}

TEST_CASE("8: threads, overlap, the threshold of waking and the chunks of a prompt change not a bit",
          "[property]") {
  std::vector<std::unique_ptr<freekv::host_backend>> backends;
  for (const auto& options : {freekv::host_options{.threads = 1, .overlap = false},
                              {.threads = 1, .overlap = true},
                              {.threads = 2, .overlap = true, .bytes_per_thread = 1},
                              {.threads = 3, .overlap = false, .bytes_per_thread = 4096},
                              {.threads = 4, .overlap = true, .bytes_per_thread = 32768}})
    backends.push_back(std::make_unique<freekv::host_backend>(options));
  for (std::uint64_t seed = 1; seed <= share_of(30u); ++seed) {
    auto c = seed % 3 == 0 ? retrieval_case(seed) : selecting_case(seed);
    c.steps = std::min(c.steps, 20);
    if (seed % 10 == 0) {  // several parts of attention
      c.options.budget.selected_units = 60;
      c.options.page = 32;
      c.prompt = 1800;
      c.options.max_tokens = c.prompt + c.steps;
      c.options.budget.sink = c.options.budget.window = 32;
    }
    const auto reference = run_case(c, *backends[0]);
    INFO(c);
    for (std::size_t b = 1; b < backends.size(); ++b) {
      const auto other = run_case(c, *backends[b], false, b + 1);
      int wrong = 0;
      for (std::size_t i = 0; i < other.steps.size(); ++i)
        wrong += !other.steps[i].same_outputs(reference.steps[i]) ||
                 !other.steps[i].same_movement(reference.steps[i]);
      CHECK(wrong == 0);
    }
    const auto again = run_case(c, *backends[0]);
    for (std::size_t i = 0; i < again.steps.size(); ++i)
      CHECK(again.steps[i].same_outputs(reference.steps[i]));
  }
}

TEST_CASE("8: instruction sets agree to rounding where margins allow", "[property]") {
  const auto sets = instruction_sets();
  if (sets.size() == 1) return;
  std::map<freekv::host::isa, freekv::host_backend> backends;
  for (const auto set : sets) backends.try_emplace(set, freekv::host_options{.instructions = set});
  long firm = 0, compared = 0;
  for (std::uint64_t seed = 1; seed <= share_of(40u); ++seed) {
    auto c = selecting_case(seed);
    c.options.method.correction = "always";  // each step's selection stands alone
    c.steps = std::min(c.steps, 12);
    // Neighbours in turns: those between them agree too.
    const auto lower = seed % (sets.size() - 1);
    const auto a = run_case(c, backends.at(sets[lower])), b = run_case(c, backends.at(sets[lower + 1]));
    auto reference = oracle_at(c, a, c.prompt);
    int wrong = 0;
    for (std::size_t i = 0; i < a.steps.size(); ++i) {
      const auto width = n(c.options.kv_heads * c.options.head_dim);
      const auto& step = a.steps[i];
      reference.prompt(std::span(a.keys).subspan(n(step.length - 1) * width, width),
                       std::span(a.values).subspan(n(step.length - 1) * width, width), 1);
      for (int head = 0; head < c.options.kv_heads; ++head) {
        const bool same = step.attended[n(head)] == b.steps[i].attended[n(head)];
        const bool is_firm = oracle::is_firm(reference.choose(step.queries, head, step.length));
        wrong += is_firm && !same;
        firm += is_firm;
        if (!same) continue;
        const int group = c.options.query_heads / c.options.kv_heads, d = c.options.head_dim;
        for (int g = head * group; g < (head + 1) * group; ++g, ++compared) {
          wrong += !is_close(step.lse[n(g)], b.steps[i].lse[n(g)], 1e-5);
          for (int e = 0; e < d; ++e)
            wrong += !is_close(step.out[n(g * d + e)], b.steps[i].out[n(g * d + e)], 2e-5);
        }
      }
    }
    INFO(c);
    CHECK(wrong == 0);
  }
  CHECK(firm > share_of(500));
  CHECK(compared > share_of(2000));
}
