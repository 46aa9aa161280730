// A method that evicts, in a model whose other layers slide, is that method of its own layers, and the window
// of the others, to the bit.
#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "../catch.hpp"
#include "compiled_shapes.hpp"
#include "pipeline.hpp"

using namespace freekv::examples;
using freekv::step_phase;

namespace {

constexpr int head_dim = head_dims[0];
constexpr int query_heads = 4, kv_heads = 2, prompt = 90, decoded = 30;

/// What one step appends to a layer.
struct layer_input {
  std::vector<float> keys, values, queries;
};

layer_input random_input(std::mt19937& random, int rows) {
  std::normal_distribution<float> normal;
  layer_input in;
  for (auto [to, heads] : {std::pair(&in.keys, kv_heads), {&in.values, kv_heads}, {&in.queries, query_heads}})
    for (int i = 0; i < rows * heads * head_dim; ++i) to->push_back(normal(random));
  return in;
}

pipeline_options options_of(const std::string& eviction, std::vector<bool> slides) {
  pipeline_options o;
  o.element = freekv::examples::data_type::f32;
  o.head_dim = head_dim;
  o.layers = static_cast<int>(slides.size());
  o.query_heads = query_heads, o.kv_heads = kv_heads;
  o.page = 8;
  o.budget = {8, 8, 4};
  o.max_prompt = prompt, o.max_tokens = prompt + decoded;
  o.sliding_layers = std::move(slides);
  o.sliding_window = 20;
  o.complete_layers = 2;
  o.method = {.plan = "eviction", .eviction = eviction};
  return o;
}

/// Outputs and log-sums of a layer of `p` in every decode step, and those of full attention.
std::vector<float> run(pipeline& p, const std::vector<std::vector<layer_input>>& steps,
                       const std::vector<int>& layers) {
  std::vector<float> all, out(query_heads * head_dim), lse(query_heads);
  const auto keep = [&] {
    all.insert(all.end(), out.begin(), out.end());
    all.insert(all.end(), lse.begin(), lse.end());
  };
  for (std::size_t step = 0; step < steps.size(); ++step) {
    p.begin_step(step == 0 ? prompt : 1, step == 0 ? step_phase::prefill : step_phase::decode);
    for (int layer = 0; layer < std::ssize(layers); ++layer) {
      const layer_input& in = steps[step][static_cast<std::size_t>(layers[static_cast<std::size_t>(layer)])];
      p.append(layer, in.keys, in.values, in.queries);
      if (step == 0) continue;
      p.attend(layer, out, lse);
      keep();
      p.attend_full(layer, out, lse);
      keep();
    }
    p.end_step();
    for (int layer = 0; step == 0 && p.takes_probes() && layer < std::ssize(layers); ++layer) {
      const layer_input& in = steps[0][static_cast<std::size_t>(layers[static_cast<std::size_t>(layer)])];
      p.observe(p.only(), layer, std::span(in.queries).first(40 * query_heads * head_dim));
    }
  }
  return all;
}

}  // namespace

TEST_CASE("a method that evicts has the layers that do not slide", "[eviction][sliding]") {
  const std::uint32_t seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  std::vector<std::vector<layer_input>> steps;
  for (int step = 0; step <= decoded; ++step) {
    steps.emplace_back();
    for (int layer = 0; layer < 5; ++layer)
      steps.back().push_back(random_input(random, step == 0 ? prompt : 1));
  }
  freekv::host_backend backend;
  for (const char* eviction : {"h2o", "pyramid_kv", "raas", "dapq"}) {
    CAPTURE(eviction);
    const auto together = make_pipeline(options_of(eviction, {true, false, true, false, false}), backend);
    auto whole = options_of(eviction, {});
    whole.layers = 3, whole.complete_layers = 1, whole.sliding_window = 0;  // layer 1 is one of the first two
    auto slides = options_of(eviction, {true, true});
    slides.method = {.plan = "complete"}, slides.budget = {0, 8, 1}, slides.complete_layers = 0;
    const auto evicts = make_pipeline(whole, backend), window = make_pipeline(slides, backend);

    const auto seen = run(*together, steps, {0, 1, 2, 3, 4});
    const auto of_evicting = run(*evicts, steps, {1, 3, 4}), of_window = run(*window, steps, {0, 2});
    const std::size_t a_layer = of_window.size() / decoded / 2;
    REQUIRE(seen.size() == of_evicting.size() + of_window.size());
    for (std::size_t step = 0; step < decoded; ++step)
      for (std::size_t layer = 0, of = 0, slid = 0; layer < 5; ++layer) {
        const bool is_sliding = layer == 0 || layer == 2;
        const auto& from = is_sliding ? of_window : of_evicting;
        const std::size_t at = is_sliding ? step * 2 + slid++ : step * 3 + of++;
        CAPTURE(step, layer);
        CHECK(std::equal(from.begin() + static_cast<std::ptrdiff_t>(at * a_layer),
                         from.begin() + static_cast<std::ptrdiff_t>((at + 1) * a_layer),
                         seen.begin() + static_cast<std::ptrdiff_t>((step * 5 + layer) * a_layer)));
      }
    CHECK(together->bytes().total() == evicts->bytes().total() + window->bytes().total());
    CHECK(together->bytes().fast_tier() == evicts->bytes().fast_tier() + window->bytes().fast_tier());
    CHECK(together->observes_prompts() == evicts->observes_prompts());
    CHECK(together->takes_probes() == evicts->takes_probes());

    together->restart();
    CHECK(run(*together, steps, {0, 1, 2, 3, 4}) == seen);
  }
}
