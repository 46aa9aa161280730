// Runs a random case through the library and keeps everything that comes out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

#include "random_case.hpp"

namespace tests {

/// One decode step.
struct traced_step {
  int length = 0;  // its own token included
  std::vector<float> queries, out, lse, full, full_lse;
  std::vector<int> corrected, recalled, promoted;  // (kv_heads)
  std::vector<std::vector<int>> attended;          // of each KV head, the selected pages
  // Of each KV head, what its query heads selected each for itself; nothing where they select together.
  std::vector<std::vector<std::vector<int>>> attended_by_head;

  bool same_outputs(const traced_step& other) const {
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    return same(out, other.out) && same(lse, other.lse) && corrected == other.corrected &&
           attended == other.attended && attended_by_head == other.attended_by_head;
  }
  bool same_movement(const traced_step& other) const {
    return recalled == other.recalled && promoted == other.promoted;
  }
};

struct trace {
  std::vector<float> keys, values;  // of all tokens, (tokens, kv_heads, head_dim)
  std::vector<traced_step> steps;
};

/// `chunks` of the prompt are drawn from `chunk_seed`; with `measures_full` full attention is asked for too.
inline trace run_case(const random_case& c, freekv::host_backend& backend, bool measures_full = false,
                      std::uint64_t chunk_seed = 1) {
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const int heads = c.options.kv_heads;
  const auto width = n(heads * c.options.head_dim);
  const auto p = freekv::examples::make_pipeline(c.with_basis(), backend);
  token_source source(c);
  dice chunks(chunk_seed);
  trace t;
  const auto keep = [&] {
    source.next();
    t.keys.insert(t.keys.end(), source.keys.begin(), source.keys.end());
    t.values.insert(t.values.end(), source.values.begin(), source.values.end());
  };
  for (int token = 0; token < c.prompt; ++token) keep();
  for (int done = 0; done < c.prompt;) {
    const int chunk = std::min(c.prompt - done, 1 + chunks.below(c.prompt));
    p->begin_step(chunk, freekv::step_phase::prefill);
    p->append(0, std::span(t.keys).subspan(n(done) * width, n(chunk) * width),
              std::span(t.values).subspan(n(done) * width, n(chunk) * width), {});
    p->end_step();
    done += chunk;
  }
  for (int step = 0; step < c.steps; ++step) {
    keep();
    traced_step s;
    s.length = c.prompt + step + 1;
    s.queries = source.queries;
    s.out.resize(source.queries.size());
    s.lse.resize(n(c.options.query_heads));
    p->begin_step(1, freekv::step_phase::decode);
    p->append(0, source.keys, source.values, source.queries);
    p->attend(0, s.out, s.lse);
    if (measures_full) {
      s.full.resize(s.out.size());
      s.full_lse.resize(s.lse.size());
      p->attend_full(0, s.full, s.full_lse);
    }
    p->end_step();
    const auto report = p->report(0);
    const auto stride = static_cast<std::ptrdiff_t>(report.attended.size() / n(heads));
    for (int h = 0; h < heads; ++h) {
      s.corrected.push_back(report.corrected[n(h)]);
      s.recalled.push_back(report.recalled[n(h)]);
      s.promoted.push_back(report.promoted[n(h)]);
      const auto first = report.attended.begin() + h * stride;
      s.attended.emplace_back(first, first + report.attended_count[n(h)]);
      s.attended_by_head.push_back(selected_by_head(report, h, c.options.query_heads / heads));
    }
    t.steps.push_back(std::move(s));
  }
  return t;
}

}  // namespace tests
