// Whole steps through all four pairs of layouts: equal bit for bit, on both routes.

#include "../catch.hpp"
#include "../unit/steps.hpp"

namespace {

using namespace tests;

template <class Fast, class Slow>
using pipeline_of = freekv::retrieval_pipeline<
    freekv::kv_shape<freekv::half, 40>, freekv::page_size<16>, freekv::layout_pair<Fast, Slow>,
    freekv::any_of<freekv::complete_first<freekv::dynamic>,
                   freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>>,
    freekv::any_of<freekv::resident, freekv::in_place>>;

struct choice {
  bool in_place, window;
  int kv_heads, sink_pages;
};

/// Two sequences, prompts in chunks, then steps in both.
template <class Fast, class Slow>
std::vector<sequence_result> run(const choice& c) {
  using pipeline_type = pipeline_of<Fast, Slow>;
  typename pipeline_type::settings s;
  s.model.layers = 2;
  s.model.kv_heads = c.kv_heads;
  s.model.query_heads = 2 * c.kv_heads;
  s.budget = {.sink = 16 * c.sink_pages, .window = 32, .selected_units = 3};
  s.capacity.max_tokens = 220;
  s.capacity.max_sequences = 2;
  s.correction = {.tau = 0.8f};
  if (c.window)
    s.plan = freekv::complete_first<freekv::dynamic, freekv::layer_kind::window>{1};
  else
    s.plan = freekv::complete_first<freekv::dynamic>{1};
  if (c.in_place) s.route = freekv::in_place{};
  freekv::host_backend backend({.threads = 2, .bytes_per_thread = 2048});
  pipeline_type pipeline(s, backend);
  const auto a = pipeline.open(), b = pipeline.open();
  const text first(s, 40, 220, 1), second(s, 40, 220, 2);
  prompt_only(pipeline, a, first, 70);
  prompt_only(pipeline, b, second, 150);
  std::vector<sequence_result> results{run_step(pipeline, a, first, 81, freekv::step_phase::prefill)};
  for (int step = 0; step < 50; ++step)
    for (auto& r : run_step(pipeline, {{a, &first}, {b, &second}})) results.push_back(std::move(r));
  return results;
}

}  // namespace

TEST_CASE("all four layout pairs give the same bits, reports included", "[property][layout]") {
  using freekv::hnd;
  using freekv::nhd;
  for (const choice& c : {choice{false, false, 2, 1},
                          {true, false, 2, 1},
                          {false, true, 2, 1},
                          {false, false, 1, 0},
                          {false, false, 3, 2}}) {
    INFO((c.in_place ? "in place, " : "resident, ") << c.kv_heads << " KV heads");
    const auto published = run<nhd, hnd>(c);
    CHECK(run<hnd, hnd>(c) == published);
    CHECK(run<nhd, nhd>(c) == published);
    CHECK(run<hnd, nhd>(c) == published);
  }
}
