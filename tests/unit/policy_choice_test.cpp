// Whole steps do not depend on how a policy was given: at compile time, at run time, as one of several, or as
// one of the user's own that computes the same.

#include <vector>

#include "../catch.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using freekv::dynamic;
using shape = freekv::kv_shape<freekv::bfloat16, 24>;

/// What chunk_means<8> is on pages of 8 tokens: the three functions that a policy needs, and nothing else.
struct page_mean {
  using policy_kind = freekv::summary_kind;
  static constexpr std::string_view name = "page_mean";

  constexpr int width(freekv::kv_extent unit) const { return unit.head_dim; }
  template <freekv::team T>
  void summarise(T team, const freekv::unit_keys& keys, float* numbers) const {
    for (int i = 0; i < keys.unit.head_dim; i += T::width) {
      auto sum = team.load(keys.row(0) + i);
      for (int t = 1; t < keys.unit.tokens; ++t) sum = sum + team.load(keys.row(t) + i);
      team.store(numbers + i, sum * typename T::pack(1.0f / static_cast<float>(keys.unit.tokens)));
    }
  }
  template <freekv::team T>
  float score(T team, const freekv::unit_query& query, const float* numbers) const {
    typename T::pack product(0.0f);
    for (int i = 0; i < query.unit.head_dim; i += T::width)
      product = product + team.load(query.data + i) * team.load(numbers + i);
    return query.scale * team.sum(product);
  }
};
static_assert(freekv::summary_policy<page_mean>);

template <class Pipeline>
typename Pipeline::settings common_settings() {
  typename Pipeline::settings s;
  s.model = {.layers = 2, .query_heads = 4, .kv_heads = 2};
  s.budget = {.sink = 8, .window = 16, .selected_units = 2};
  s.capacity.max_tokens = 130;
  return s;
}

/// A prompt and some steps.
template <class Pipeline>
std::vector<sequence_result> run(const typename Pipeline::settings& s) {
  freekv::host_backend backend;
  Pipeline pipeline(s, backend);
  const auto id = pipeline.open();
  const text source(s, 24, 130, 11);
  prompt_only(pipeline, id, source, 100);
  return decode(pipeline, id, source, 30);
}

}  // namespace

TEST_CASE("key_subspace and page size give the same bits fixed at compile time and set at run time",
          "[policies]") {
  dice d(1);
  std::vector<float> data;
  for (int layer = 0; layer < 2; ++layer) {
    const auto of_layer = random_basis(d, 2, 20, 24);
    data.insert(data.end(), of_layer.begin(), of_layer.end());
  }
  const freekv::subspace_basis basis{data.data(), 2, 2, 20, 24};
  using fixed = freekv::retrieval_pipeline<shape, freekv::page_size<8>, freekv::key_subspace<20, 3>>;
  using open =
      freekv::retrieval_pipeline<shape, freekv::key_subspace<dynamic, dynamic>, freekv::page_size<dynamic>>;
  auto a = common_settings<fixed>();
  a.summary.basis = basis;
  auto b = common_settings<open>();
  b.page = {8};
  b.summary = {{20}, {3}, basis};
  const auto results = run<fixed>(a);
  CHECK(run<open>(b) == results);
  // The comparison sees a change of bits.
  b.summary = {{20}, {4}, basis};
  CHECK_FALSE(run<open>(b) == results);
}

TEST_CASE("chunk_means gives the same bits fixed, set at run time, and as one of several", "[policies]") {
  using fixed = freekv::retrieval_pipeline<shape, freekv::page_size<8>, freekv::chunk_means<8>>;
  using choice = freekv::retrieval_pipeline<shape, freekv::page_size<dynamic>,
                                            freekv::any_of<freekv::min_max, freekv::chunk_means<dynamic>>>;
  const auto results = run<fixed>(common_settings<fixed>());
  auto s = common_settings<choice>();
  s.page = {8};
  s.summary = freekv::chunk_means<dynamic>{8};
  CHECK(run<choice>(s) == results);
  s.summary = freekv::chunk_means<dynamic>{4};
  CHECK_FALSE(run<choice>(s) == results);
}

TEST_CASE("coarse_to_fine that keeps k pages is its coarse summary, and its fine one if it keeps all",
          "[policies]") {
  using freekv::key_sketch;
  using freekv::min_max;
  using choice = freekv::retrieval_pipeline<
      shape, freekv::page_size<8>,
      freekv::any_of<min_max, key_sketch<4>, freekv::coarse_to_fine<min_max, key_sketch<4>, 2>,
                     freekv::coarse_to_fine<min_max, key_sketch<4>, dynamic>>>;
  const auto with = [](const auto& summary) {
    auto s = common_settings<choice>();
    s.summary = summary;
    return run<choice>(s);
  };
  const auto kept = [&](int times) {
    return with(freekv::coarse_to_fine<min_max, key_sketch<4>, dynamic>{{}, {times}});
  };
  const auto coarse = with(min_max{}), fine = with(key_sketch<4>{});
  const auto between = with(freekv::coarse_to_fine<min_max, key_sketch<4>, 2>{});
  CHECK(kept(1) == coarse);
  CHECK(kept(8) == fine);  // 16 pages at 130 tokens
  CHECK(kept(2) == between);
  CHECK_FALSE(coarse == fine);
  CHECK_FALSE(between == coarse);
  CHECK_FALSE(between == fine);
}

TEST_CASE("a summary of the user's own is used like the library's", "[policies]") {
  using theirs = freekv::retrieval_pipeline<shape, freekv::page_size<8>, page_mean>;
  using ours = freekv::retrieval_pipeline<shape, freekv::page_size<8>, freekv::chunk_means<8>>;
  CHECK(freekv::summary_bytes<freekv::bfloat16>(page_mean{}, {8, 24}) == 96);
  CHECK(run<theirs>(common_settings<theirs>()) == run<ours>(common_settings<ours>()));
}

TEST_CASE("variants run as what they are named after", "[policies]") {
  using freekv::methods::full;
  using freekv::methods::streaming_llm;
  using everything = full::pipeline<shape, freekv::page_size<8>>;
  using window = streaming_llm::pipeline<shape, freekv::page_size<8>>;
  const auto all = run<everything>(common_settings<everything>());
  const auto few = run<window>(common_settings<window>());
  REQUIRE(all.size() == few.size());
  // At 101 tokens sink and window hold 8 + 21 of them.
  const text source(common_settings<everything>(), 24, 130, 11);
  for (const bool complete : {true, false}) {
    const auto rows = source.at(0, 0, 101);
    std::vector<std::span<const float>> keys, values;
    for (int t = 0; t < 101; ++t)
      if (complete || t < 8 || t >= 80) {
        keys.push_back(oracle::row_of(rows.keys, t * 2, 24));
        values.push_back(oracle::row_of(rows.values, t * 2, 24));
      }
    const auto expected =
        oracle::attend(oracle::row_of(rows.queries, 100 * 4, 24), keys, values, oracle::default_scale(24));
    const auto& got = complete ? all[0] : few[0];
    CHECK(is_near(got.lse[0], expected.lse[0], 1e-5 * std::max(1.0, std::fabs(expected.lse[0]))));
    for (std::size_t i = 0; i < 24; ++i) CHECK(is_near(got.out[i], expected.out[i], 2e-5));
  }
}
