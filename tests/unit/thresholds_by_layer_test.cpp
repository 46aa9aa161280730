// Thresholds of corrections that differ by layer: each layer gives what it gives where all layers have its
// threshold, bit for bit.

#include <algorithm>
#include <vector>

#include "../catch.hpp"
#include "steps.hpp"

namespace {

using namespace tests;

constexpr int d = 24, layers = 3;

/// A prompt and single steps: outputs, (steps, layers, query_heads, d), and heads corrected by layer.
struct decoded {
  std::vector<std::vector<float>> steps;
  std::vector<int> corrected = std::vector<int>(layers);
};

template <class Correction>
decoded decode(const Correction& correction, std::uint64_t seed) {
  using pipeline =
      freekv::retrieval_pipeline<freekv::kv_shape<freekv::half, d>, freekv::page_size<8>, freekv::in_place,
                                 freekv::every_layer<freekv::layer_kind::retrieval>, Correction>;
  typename pipeline::settings s{.model = {.layers = layers, .query_heads = 6, .kv_heads = 2}};
  s.budget = {.sink = 8, .window = 8, .selected_units = 3};
  s.capacity.max_tokens = 200;
  s.correction = correction;
  freekv::host_backend backend({.overlap = false});
  pipeline decoding(s, backend);
  const auto id = decoding.open();
  const text source(s, d, 150, seed);
  run_step(decoding, id, source, 110, freekv::step_phase::prefill);
  decoded all;
  for (int step = 0; step < 40; ++step) {
    all.steps.push_back(run_step(decoding, id, source, 1, freekv::step_phase::decode).out);
    for (int layer = 0; layer < layers; ++layer) {
      const auto report = decoding.report(layer)[id];
      all.corrected[count(layer)] +=
          static_cast<int>(std::count(report.corrected.begin(), report.corrected.end(), 1));
    }
  }
  return all;
}

template <class Correction>
void check_layers(const Correction& by_layer, const std::vector<Correction>& alike) {
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    const decoded mixed = decode(by_layer, seed);
    for (int layer = 0; layer < layers; ++layer) {
      const decoded expected = decode(alike[count(layer)], seed);
      CHECK(mixed.corrected[count(layer)] == expected.corrected[count(layer)]);
      for (std::size_t step = 0; step < mixed.steps.size(); ++step) {
        const auto of_layer = [&](const std::vector<float>& all) {
          return std::span(all).subspan(all.size() / layers * count(layer), all.size() / layers);
        };
        CHECK(same_bits(of_layer(mixed.steps[step]), of_layer(expected.steps[step])));
      }
    }
    CHECK(mixed.corrected[0] > mixed.corrected[1]);  // else nothing is told apart
    CHECK(mixed.corrected[2] < mixed.corrected[1]);
  }
}

}  // namespace

TEST_CASE("each layer may have a tau of its own", "[by_layer]") {
  using freekv::cosine_drift;
  check_layers<cosine_drift>({.tau = 1.0f, .tau_of_layer = {1.0f, 0.9f, -1.0f}},
                             {{.tau = 1.0f}, {.tau = 0.9f}, {.tau = -1.0f}});
}

TEST_CASE("each layer may have a delta of its own", "[by_layer]") {
  using freekv::mass_deficit;
  check_layers<mass_deficit>({.delta = 0.3f, .delta_of_layer = {0.0f, 0.1f, 1.0f}},
                             {{.delta = 0.0f}, {.delta = 0.1f}, {.delta = 1.0f}});
}
