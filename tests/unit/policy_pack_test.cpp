// Policies in packs: any order, one of each kind, defaults, and choices made at run time.

#include <freekv/freekv.hpp>
#include <string>
#include <type_traits>

#include "../catch.hpp"

namespace {

using namespace freekv;
using shape = kv_shape<half, 64>;

/// A kind of our own is none that a pipeline knows, but packs of types do not mind.
struct colour_kind {};
struct red {
  using policy_kind = colour_kind;
};
struct nothing {};
template <class Layout>
struct named : Layout {
  static constexpr std::string_view name = "named";
};

template <class Pack, class Page, class Layouts, class Summary, class Pooling, class Selection,
          class Correction, class Plan, class Route, class Backend, class Codec = identity>
inline constexpr bool consists_of = std::is_same_v<typename Pack::page, Page>&& std::is_same_v<
    typename Pack::layouts, Layouts>&& std::is_same_v<typename Pack::summary, Summary>&&
    std::is_same_v<typename Pack::pooling, Pooling>&& std::is_same_v<typename Pack::selection, Selection>&&
        std::is_same_v<typename Pack::correction, Correction>&& std::is_same_v<typename Pack::plan, Plan>&&
            std::is_same_v<typename Pack::route, Route>&& std::is_same_v<typename Pack::backend, Backend>&&
                std::is_same_v<typename Pack::codec, Codec>;

}  // namespace

TEST_CASE("an empty pack is FreeKV as published", "[policy_pack]") {
  STATIC_REQUIRE(consists_of<policy_pack_of<>, page_size<32>, layout_pair<nhd, hnd>, min_max, mean_softmax,
                             top_k, cosine_drift, complete_first<1>, resident, host_backend>);
  STATIC_REQUIRE(std::is_same_v<retrieval_pipeline<shape>::pack_type, policy_pack_of<>>);
  STATIC_REQUIRE(
      std::is_same_v<retrieval_pipeline<shape>, basic_retrieval_pipeline<shape, policy_pack_of<>>>);
}

TEST_CASE("each policy replaces its kind's default and no other", "[policy_pack]") {
  using hnds = layout_pair<hnd, hnd>;
  using all_window = every_layer<layer_kind::window>;
  STATIC_REQUIRE(consists_of<policy_pack_of<page_size<16>>, page_size<16>, layout_pair<>, min_max,
                             mean_softmax, top_k, cosine_drift, complete_first<1>, resident, host_backend>);
  STATIC_REQUIRE(std::is_same_v<policy_pack_of<unit<8>>::unit, unit<8>>);
  STATIC_REQUIRE(std::is_same_v<policy_pack_of<page_size<16>>::unit, unit<>>);
  STATIC_REQUIRE(consists_of<policy_pack_of<hnds>, page_size<32>, hnds, min_max, mean_softmax, top_k,
                             cosine_drift, complete_first<1>, resident, host_backend>);
  STATIC_REQUIRE(consists_of<policy_pack_of<chunk_means<4>>, page_size<32>, layout_pair<>, chunk_means<4>,
                             mean_softmax, top_k, cosine_drift, complete_first<1>, resident, host_backend>);
  STATIC_REQUIRE(consists_of<policy_pack_of<always>, page_size<32>, layout_pair<>, min_max, mean_softmax,
                             top_k, always, complete_first<1>, resident, host_backend>);
  STATIC_REQUIRE(consists_of<policy_pack_of<all_window>, page_size<32>, layout_pair<>, min_max, mean_softmax,
                             top_k, cosine_drift, all_window, resident, host_backend>);
  STATIC_REQUIRE(consists_of<policy_pack_of<in_place>, page_size<32>, layout_pair<>, min_max, mean_softmax,
                             top_k, cosine_drift, complete_first<1>, in_place, host_backend>);
}

TEST_CASE("packs in any order are one type", "[policy_pack]") {
  using a = policy_pack_of<page_size<16>, key_subspace<24, 3>, never, in_place>;
  STATIC_REQUIRE(std::is_same_v<a, policy_pack_of<in_place, never, key_subspace<24, 3>, page_size<16>>>);
  STATIC_REQUIRE(std::is_same_v<a, policy_pack_of<never, page_size<16>, in_place, key_subspace<24, 3>>>);
  STATIC_REQUIRE(std::is_same_v<a, policy_pack_of<key_subspace<24, 3>, in_place, page_size<16>, never>>);
  // And naming a default is naming nothing.
  STATIC_REQUIRE(std::is_same_v<policy_pack_of<min_max, page_size<32>>, policy_pack_of<top_k, resident>>);
  STATIC_REQUIRE_FALSE(
      std::is_same_v<a, policy_pack_of<in_place, never, key_subspace<24, 4>, page_size<16>>>);
  STATIC_REQUIRE(
      std::is_same_v<retrieval_pipeline<shape, always, min_max>, retrieval_pipeline<shape, min_max, always>>);
}

TEST_CASE("with exchanges one policy", "[policy_pack]") {
  using pack = policy_pack_of<page_size<16>, always>;
  STATIC_REQUIRE(std::is_same_v<pack::with<never>, policy_pack_of<page_size<16>, never>>);
  STATIC_REQUIRE(std::is_same_v<pack::with<page_size<64>>, policy_pack_of<page_size<64>, always>>);
  STATIC_REQUIRE(std::is_same_v<pack::with<layout_pair<hnd, nhd>>,
                                policy_pack_of<page_size<16>, always, layout_pair<hnd, nhd>>>);
  STATIC_REQUIRE(std::is_same_v<pack::with<chunk_means<2>>::with<in_place>,
                                policy_pack_of<in_place, chunk_means<2>, always, page_size<16>>>);
  STATIC_REQUIRE(
      std::is_same_v<pack::with<cast<bfloat16>>, policy_pack_of<cast<bfloat16>, page_size<16>, always>>);
  STATIC_REQUIRE(std::is_same_v<pack::with<int4_token>::with<identity>, pack>);
  STATIC_REQUIRE(std::is_same_v<pack::with<always>, pack>);
  STATIC_REQUIRE(
      std::is_same_v<pack::with<mean_softmax>::with<top_k>::with<complete_first<1>>::with<host_backend>,
                     pack>);
  STATIC_REQUIRE(std::is_same_v<retrieval_pipeline<shape, always>::with<in_place>,
                                retrieval_pipeline<shape, in_place, always>>);
}

TEST_CASE("policies of a kind are counted and found", "[policy_pack]") {
  STATIC_REQUIRE(count_of_kind<summary_kind> == 0);
  STATIC_REQUIRE(count_of_kind<summary_kind, always, in_place> == 0);
  STATIC_REQUIRE(count_of_kind<summary_kind, always, min_max, in_place> == 1);
  STATIC_REQUIRE(count_of_kind<summary_kind, min_max, chunk_means<8>, always, min_max> == 3);
  STATIC_REQUIRE(count_of_kind<colour_kind, red, min_max> == 1);
  STATIC_REQUIRE(
      std::is_same_v<policy_of_kind<summary_kind, min_max, always, chunk_means<8>>, chunk_means<8>>);
  STATIC_REQUIRE(std::is_same_v<policy_of_kind<summary_kind, min_max, always>, min_max>);
  STATIC_REQUIRE(std::is_same_v<policy_of_kind<summary_kind, void>, void>);
  // The default need not be of the kind, nor a policy.
  STATIC_REQUIRE(std::is_same_v<policy_of_kind<colour_kind, nothing, always>, nothing>);
}

TEST_CASE("a policy is a type that names its kind", "[policy_pack]") {
  STATIC_REQUIRE(policy<min_max>);
  STATIC_REQUIRE(policy<red>);
  STATIC_REQUIRE(policy<any_of<always, never>>);
  STATIC_REQUIRE_FALSE(policy<nothing>);
  STATIC_REQUIRE_FALSE(policy<int>);
  STATIC_REQUIRE(summary_policy<key_subspace<dynamic, dynamic>>);
  STATIC_REQUIRE_FALSE(summary_policy<always>);
  STATIC_REQUIRE_FALSE(summary_policy<red>);
  STATIC_REQUIRE_FALSE(correction_policy<min_max>);
  STATIC_REQUIRE_FALSE(pooling_policy<top_k>);
  STATIC_REQUIRE_FALSE(selection_policy<mean_softmax>);
  STATIC_REQUIRE_FALSE(plan_policy<resident>);
  STATIC_REQUIRE(page_size_policy<page_size<8>>);
  STATIC_REQUIRE_FALSE(page_size_policy<layout_pair<>>);
  STATIC_REQUIRE_FALSE(page_size_policy<any_of<page_size<16>, page_size<32>>>);  // that is page_size<dynamic>
  STATIC_REQUIRE(unit_policy<unit<1>>);
  STATIC_REQUIRE_FALSE(unit_policy<page_size<8>>);
  STATIC_REQUIRE(scope_policy<per_query_head>);
  STATIC_REQUIRE_FALSE(scope_policy<top_k>);
  STATIC_REQUIRE(route_policy<in_place>);
  STATIC_REQUIRE_FALSE(route_policy<every_layer<layer_kind::window>>);
  STATIC_REQUIRE(layout_policy<layout_pair<hnd, hnd>>);
  STATIC_REQUIRE_FALSE(layout_policy<layout_pair<hnd, min_max>>);
  STATIC_REQUIRE_FALSE(layout_policy<resident>);
  STATIC_REQUIRE(codec_policy<identity>);
  STATIC_REQUIRE(codec_policy<int4_channel>);
  STATIC_REQUIRE_FALSE(codec_policy<in_place>);
  STATIC_REQUIRE(element<float>);
  STATIC_REQUIRE(element<half>);
  STATIC_REQUIRE(element<bfloat16>);
  STATIC_REQUIRE_FALSE(element<double>);
  STATIC_REQUIRE(element<fp8_e4m3>);
  STATIC_REQUIRE_FALSE(query_element<fp8_e4m3>);  // stored, but not computed with
  STATIC_REQUIRE(storage_element<fp8_e4m3>);
}

TEST_CASE("a page layout has a name, no gaps, and the elements of a row next to each other",
          "[policy_pack]") {
  STATIC_REQUIRE(page_layout<nhd>);
  STATIC_REQUIRE(page_layout<hnd>);
  STATIC_REQUIRE(page_layout<named<cuda::std::layout_right>>);
  STATIC_REQUIRE_FALSE(page_layout<cuda::std::layout_right>);
  STATIC_REQUIRE_FALSE(page_layout<named<cuda::std::layout_left>>);
  STATIC_REQUIRE_FALSE(page_layout<named<cuda::std::layout_stride>>);
  using enum page_axis;
  STATIC_REQUIRE(page_layout<named<ordered_layout<token, page, head, plane, dim>>>);
  STATIC_REQUIRE_FALSE(page_layout<named<ordered_layout<page, plane, token, dim, head>>>);
  STATIC_REQUIRE_FALSE(page_layout<page_size<8>>);
}

TEST_CASE("any_of is a policy of its alternatives' kind, and resolves to the one chosen", "[policy_pack]") {
  using choice = any_of<cosine_drift, always, never>;
  STATIC_REQUIRE(std::is_same_v<choice::policy_kind, correction_kind>);
  STATIC_REQUIRE(std::is_same_v<policy_pack_of<choice>::correction, choice>);
  STATIC_REQUIRE(std::is_constructible_v<choice, never>);
  STATIC_REQUIRE_FALSE(std::is_constructible_v<choice, min_max>);

  const auto name = [](const auto& chosen) { return std::string(chosen.name); };
  CHECK(resolve(choice{}, name) == "cosine_drift");  // the first
  CHECK(resolve(choice{always{}}, name) == "always");
  choice chosen = never{};
  CHECK(resolve(chosen, name) == "never");
  chosen = cosine_drift{.tau = 0.25f};
  CHECK(resolve(chosen, [](const auto& policy) {
          if constexpr (std::is_same_v<std::remove_cvref_t<decltype(policy)>, cosine_drift>)
            return policy.tau;
          else
            return 0.0f;
        }) == 0.25f);
  // What is no choice resolves to itself.
  const cosine_drift fixed{.tau = 0.5f};
  CHECK(resolve(fixed, [&](const cosine_drift& policy) { return &policy == &fixed; }));
}

TEST_CASE("any_of answers for plans and routes", "[policy_pack]") {
  using plan = any_of<complete_first<dynamic>, every_layer<layer_kind::complete>>;
  CHECK(plan(complete_first<dynamic>{2}).kind(1) == layer_kind::complete);
  CHECK(plan(complete_first<dynamic>{2}).kind(2) == layer_kind::retrieval);
  CHECK(plan(every_layer<layer_kind::complete>{}).kind(7) == layer_kind::complete);
  using route = any_of<resident, in_place>;
  CHECK(route(resident{}).keeps_slots());
  CHECK_FALSE(route(in_place{}).keeps_slots());
}

TEST_CASE("layer plans say what each layer keeps", "[policy_pack]") {
  STATIC_REQUIRE(complete_first<>{}.kind(0) == layer_kind::complete);
  STATIC_REQUIRE(complete_first<>{}.kind(1) == layer_kind::retrieval);
  STATIC_REQUIRE(complete_first<0>{}.kind(0) == layer_kind::retrieval);
  STATIC_REQUIRE(complete_first<2, layer_kind::window>{}.kind(1) == layer_kind::complete);
  STATIC_REQUIRE(complete_first<2, layer_kind::window>{}.kind(2) == layer_kind::window);
  STATIC_REQUIRE(complete_first<dynamic>{0}.kind(0) == layer_kind::retrieval);
  STATIC_REQUIRE(every_layer<layer_kind::window>{}.kind(0) == layer_kind::window);
}

TEST_CASE("counts fixed at compile time take no room, and convert like those set at run time",
          "[policy_pack]") {
  STATIC_REQUIRE(sizeof(page_size<32>) == 1);
  STATIC_REQUIRE(sizeof(chunk_means<8>) == 1);
  STATIC_REQUIRE(std::is_empty_v<count_of<3>>);
  STATIC_REQUIRE(int{count_of<3>{}} == 3);
  STATIC_REQUIRE(int{count_of<dynamic>{7}} == 7);
  STATIC_REQUIRE(int{page_size<16>{}.tokens} == 16);
  STATIC_REQUIRE(int{page_size<dynamic>{24}.tokens} == 24);
  STATIC_REQUIRE(head_counts{.query = 14, .kv = 2}.group() == 7);
  STATIC_REQUIRE(kv_shape<bfloat16, 72>::head_dim == 72);
  STATIC_REQUIRE(std::is_same_v<kv_shape<bfloat16, 72>::element_type, bfloat16>);
}

TEST_CASE("variants are pipelines of their policies", "[policy_pack]") {
  STATIC_REQUIRE(std::is_same_v<methods::freekv_paper::pipeline<shape>, retrieval_pipeline<shape>>);
  STATIC_REQUIRE(
      std::is_same_v<methods::quest::pipeline<shape>, retrieval_pipeline<shape, always, max_score, min_max>>);
  STATIC_REQUIRE(std::is_same_v<methods::quest_mean_softmax::pipeline<shape>,
                                retrieval_pipeline<shape, always, min_max>>);
  STATIC_REQUIRE(
      std::is_same_v<methods::twilight::pipeline<shape>,
                     retrieval_pipeline<shape, coarse_to_fine<min_max, key_sketch<4>, 4>, always, top_p>>);
  STATIC_REQUIRE(std::is_same_v<methods::full::pipeline<shape>,
                                retrieval_pipeline<shape, every_layer<layer_kind::complete>>>);
  STATIC_REQUIRE(std::is_same_v<methods::streaming_llm::pipeline<shape>,
                                retrieval_pipeline<shape, every_layer<layer_kind::window>>>);
  STATIC_REQUIRE(std::is_same_v<methods::freekv_chunk_means::pipeline<shape, page_size<16>, in_place>,
                                retrieval_pipeline<shape, in_place, chunk_means<8>, page_size<16>>>);
  STATIC_REQUIRE(std::is_same_v<methods::freekv_key_subspace::pipeline<shape>,
                                retrieval_pipeline<shape, key_subspace<24, 3>>>);
  STATIC_REQUIRE(std::is_same_v<methods::quest_per_query_head::pipeline<shape>,
                                retrieval_pipeline<shape, per_query_head, always>>);
  STATIC_REQUIRE(std::is_same_v<methods::shadowkv::pipeline<shape>,
                                retrieval_pipeline<shape, low_rank_keys<160>, pin_outliers<48>, unit<8>, mean,
                                                   max_softmax, always>>);
  CHECK(methods::quest::name == "quest");
}

TEST_CASE("policies have names for tables and messages", "[policy_pack]") {
  CHECK(detail::printed(min_max{}) == "min_max");
  CHECK(detail::printed(stored_as<mean, number_format::int8>{}) == "mean(int8)");
  CHECK(detail::printed(stored_as<chunk_means<dynamic>, number_format::any>({{4}}, number_format::key)) ==
        "chunk_means(4, key)");
  CHECK(detail::printed(cosine_drift{.tau = 0.8f, .pool = drift_pool::min}) == "cosine_drift(0.8, min)");
  CHECK(detail::printed(mass_deficit{0.1f, true}) == "mass_deficit(0.1, partial)");
  CHECK(detail::printed(mass_deficit{.delta_of_layer = {0.1f, 0.2f}}) == "mass_deficit(by layer)");
  CHECK(detail::printed(missing_share{}) == "missing_share(0.05)");
  CHECK(detail::printed(least_recently_used<4>{}) == "least_recently_used(4)");
  CHECK(detail::printed(top_p{0.9f}) == "top_p(0.9)");
  CHECK(detail::printed(any_of<min_max, chunk_means<dynamic>>(chunk_means<dynamic>{4})) == "chunk_means(4)");
  CHECK(key_subspace<>::name == "key_subspace");
  CHECK(mean_softmax::name == "mean_softmax");
  CHECK(top_k::name == "top_k");
  CHECK(per_kv_head::name == "per_kv_head");
  CHECK(resident::name == "resident");
  CHECK(detail::printed(identity{}) == "identity");
  CHECK(detail::printed(cast<bfloat16>{}) == "bf16");
  CHECK(detail::printed(cast<half>{}) == "f16");
  CHECK(detail::printed(cast<fp8_e4m3>{}) == "fp8");
  CHECK(detail::printed(any_of<identity, int8_token>(int8_token{})) == "int8_token");
  CHECK(detail::printed(int4_token{}) == "int4_token");
  CHECK(detail::printed(int8_channel{}) == "int8_channel");
  CHECK(detail::printed(int4_channel{}) == "int4_channel");
  CHECK(in_place::name == "in_place");
  CHECK(complete_first<>::name == "complete_first");
  CHECK(complete_first<1, layer_kind::window>::name == "complete_first_then_window");
  CHECK(every_layer<layer_kind::retrieval>::name == "all_retrieval");
  CHECK(element_name<float> == "f32");
  CHECK(element_name<half> == "f16");
  CHECK(element_name<bfloat16> == "bf16");
}

TEST_CASE("a pipeline's name says what codec and rows it has, unless they are the usual ones",
          "[policy_pack]") {
  host_backend backend({.threads = 1});
  const auto name = [&](auto pipeline_type) {
    using pipeline = typename decltype(pipeline_type)::type;
    return pipeline({.model = {.query_heads = 2, .kv_heads = 1}, .capacity = {.max_tokens = 64}}, backend)
        .name();
  };
  const std::string as_published = name(std::type_identity<retrieval_pipeline<shape>>{});
  CHECK(as_published.find("identity") == std::string::npos);
  CHECK(name(std::type_identity<retrieval_pipeline<shape, int8_channel>>{})
            .find(", resident, int8_channel, page 32") != std::string::npos);
  CHECK(as_published.find("per_") == std::string::npos);
  CHECK(name(std::type_identity<retrieval_pipeline<shape, per_layer>>{})
            .find(", resident, per_layer, page 32") != std::string::npos);
  using choice = any_of<identity, cast<fp8_e4m3>>;
  using chosen = retrieval_pipeline<shape, choice>;
  CHECK(name(std::type_identity<chosen>{}) == as_published);
  CHECK(chosen({.model = {.query_heads = 2, .kv_heads = 1},
                .capacity = {.max_tokens = 64},
                .codec = cast<fp8_e4m3>{}},
               backend)
            .name()
            .find(", fp8, ") != std::string::npos);
}
