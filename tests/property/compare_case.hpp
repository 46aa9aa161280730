// A random case of one sequence through a pipeline and the oracle, step by step.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "compare_step.hpp"

namespace tests {

/// Runs a case through a pipeline, of one layer, and the oracle; throws `disagreement`.
inline void compare_with_oracle(const random_case& c, freekv::examples::pipeline& p, coverage& seen) {
  oracle::decoder expected(oracle_settings(c));
  token_source source(c);
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const int heads = c.options.kv_heads;

  std::vector<float> keys, values;
  for (int token = 0; token < c.prompt; ++token) {
    source.next();
    keys.insert(keys.end(), source.keys.begin(), source.keys.end());
    values.insert(values.end(), source.values.begin(), source.values.end());
  }
  // The prompt in up to three chunks.
  const auto width = n(heads * c.options.head_dim);
  for (int done = 0; done < c.prompt;) {
    const int chunk = std::min(c.prompt - done, 1 + source.random().below(c.prompt));
    const auto part = [&](const std::vector<float>& v) {
      return std::span(v).subspan(n(done) * width, n(chunk) * width);
    };
    p.begin_step(chunk, freekv::row_kind::prompt);
    p.append(0, part(keys), part(values), {});
    p.end_step();
    done += chunk;
  }
  expected.prompt(keys, values, c.prompt);

  std::vector<float> out(n(c.options.query_heads * c.options.head_dim)), lse(n(c.options.query_heads));
  step_comparison comparison(heads);
  for (int step = 0; step < c.steps; ++step) {
    source.next();
    p.begin_step(1, freekv::row_kind::decode);
    p.append(0, source.keys, source.values, source.queries);
    p.attend(0, out, lse);
    p.end_step();
    const auto want = expected.step(source.queries, source.keys, source.values);
    comparison.compare(sentence("step ", step), c, want, p.report(0), out, lse, seen);
    comparison.follow(want);
  }
}

}  // namespace tests
