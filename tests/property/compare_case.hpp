// A random case of one sequence through a pipeline and the oracle, step by step.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "compare_step.hpp"

namespace tests {

/// Runs a case through a pipeline and the oracle, which keeps each layer apart; layers differ in what they
/// are given, and are alike in their settings. `after_layer(layer, report)` is called behind each decode step
/// of each. Throws `disagreement`.
template <class AfterLayer>
void compare_with_oracle(const random_case& c, freekv::examples::pipeline& p, coverage& seen,
                         const AfterLayer& after_layer) {
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const int heads = c.options.kv_heads;
  struct one_layer {
    oracle::decoder expected;
    token_source source;
    step_comparison comparison;
    std::vector<float> keys{}, values{};  // of the prompt
  };
  std::vector<one_layer> layers;
  for (int layer = 0; layer < c.options.layers; ++layer) {
    auto settings = oracle_settings(c);
    settings.key_scales = scales_of_layer(c.options.key_scales, layer, heads);
    settings.value_scales = scales_of_layer(c.options.value_scales, layer, heads);
    layers.push_back({oracle::decoder(settings), token_source(c), step_comparison(heads)});
    one_layer& l = layers.back();
    if (layer > 0) l.source.diverge(layer);
    for (int token = 0; token < c.prompt; ++token) {
      l.source.next();
      l.keys.insert(l.keys.end(), l.source.keys.begin(), l.source.keys.end());
      l.values.insert(l.values.end(), l.source.values.begin(), l.source.values.end());
    }
  }
  // The prompt in up to three chunks.
  const auto width = n(heads * c.options.head_dim);
  for (int done = 0; done < c.prompt;) {
    const int chunk = std::min(c.prompt - done, 1 + layers[0].source.random().below(c.prompt));
    const auto part = [&](const std::vector<float>& v) {
      return std::span(v).subspan(n(done) * width, n(chunk) * width);
    };
    p.begin_step(chunk, freekv::step_phase::prefill);
    for (std::size_t layer = 0; layer < layers.size(); ++layer)
      p.append(static_cast<int>(layer), part(layers[layer].keys), part(layers[layer].values), {});
    p.end_step();
    done += chunk;
  }
  const auto stored_keys = [&c](const one_layer& l, const std::vector<float>& rows) {
    return stored_rows(c, rows, l.expected.config().key_scales);
  };
  const auto stored_values = [&c](const one_layer& l, const std::vector<float>& rows) {
    return stored_rows(c, rows, l.expected.config().value_scales);
  };
  for (one_layer& l : layers) l.expected.prompt(stored_keys(l, l.keys), stored_values(l, l.values), c.prompt);

  struct output {
    std::vector<float> out, lse;
  };
  std::vector<output> outputs(layers.size(),
                              {std::vector<float>(n(c.options.query_heads * c.options.head_dim)),
                               std::vector<float>(n(c.options.query_heads))});
  for (int step = 0; step < c.steps; ++step) {
    p.begin_step(1, freekv::step_phase::decode);
    for (std::size_t layer = 0; layer < layers.size(); ++layer) {
      token_source& source = layers[layer].source;
      source.next();
      p.append(static_cast<int>(layer), source.keys, source.values, source.queries);
      p.attend(static_cast<int>(layer), outputs[layer].out, outputs[layer].lse);
    }
    p.end_step();
    for (std::size_t i = 0; i < layers.size(); ++i) {
      one_layer& l = layers[i];
      const int layer = static_cast<int>(i);
      const auto want =
          l.expected.step(l.source.queries, stored_keys(l, l.source.keys), stored_values(l, l.source.values));
      const freekv::step_report report = p.report(layer);
      l.comparison.compare(sentence("layer ", layer, ", step ", step), c, want, report, outputs[i].out,
                           outputs[i].lse, seen);
      after_layer(layer, report);
      l.comparison.follow(want);
    }
  }
}
inline void compare_with_oracle(const random_case& c, freekv::examples::pipeline& p, coverage& seen) {
  compare_with_oracle(c, p, seen, [](int, const freekv::step_report&) {});
}

}  // namespace tests
