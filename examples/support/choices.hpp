// What programs choose at run time: the policies by name, and the variants built from them. A new policy
// joins the list of its kind; methods are those of freekv/methods.hpp.
#pragma once

#include <algorithm>
#include <freekv/core/size.hpp>
#include <freekv/freekv.hpp>
#include <limits>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cited.hpp"
#include "layer_list.hpp"

namespace freekv::examples {

/// A wish that cannot be met: a name that is no policy, a head_dim that is not compiled.
struct choice_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// As the library has a number: what float32 does not hold becomes its largest or lowest.
inline float nearest_float(double value) {
  constexpr double largest = std::numeric_limits<float>::max();
  return static_cast<float>(std::clamp(value, -largest, largest));
}

/// What the rows of a basis are, which programs learn from keys.
enum class basis_rows { axes, pairs, centroids, hyperplanes };

/// What a pipeline does, by names; the defaults are FreeKV as published.
struct method_spec {
  std::string summary = "min_max";
  std::string format = "standard";  ///< of the summary's numbers
  int chunk = 8;                    ///< of chunk_means, tokens
  int rank = 24;                    ///< of key_subspace
  bool basis_of_pairs = false;      ///< of key_subspace: its basis is rotary pairs, not eigenvectors
  int clusters = 0;                 ///< of key_clusters; 0: one for 80 tokens of the prompt
  int bits = 3;                     ///< of key_subspace and key_sketch, and of key_signatures
  int tables = 150;                 ///< of key_signatures
  int codes = 6;                    ///< of key_codes, bytes a token
  int times = 4;                    ///< of coarse_to_fine: pages kept, in selected pages
  int key_rank = 0;  ///< of low_rank_keys; at most as many as a token's keys have numbers; 0: a share
  float pruned = 0.4f;  ///< of key_channels: share of a key's channels that is not kept
  int unit = 0;      ///< tokens that are selected together; 0: a page's
  std::string pooling = "mean_softmax";
  float selection_scale = 0.0f;  ///< of the scores that units are selected by; 0: attention's
  std::string selection = "top_k";
  float top_p = 0.95f;
  bool calibrated = false;  ///< of top_p: by temperatures that are found from a prompt
  float bonus = sticky_top_k{}.bonus;
  std::string pinning = "no_pins";
  int pinned = 48;                   ///< of pin_outliers, units
  std::string rows = "per_kv_head";  ///< who shares one selection
  std::string correction = "cosine_drift";
  float tau = 0.9f;  ///< of cosine_drift
  std::string drift_pool = "mean";
  float delta = 0.2f;  ///< of mass_deficit and missing_share, and verified_share's probability
  float epsilon = verified_share{}.epsilon;
  int samples = verified_share{}.samples;  ///< of verified_share
  bool partial = false;
  int every = 8;  ///< of every_n_steps
  std::string completion = "no_completion";  ///< of attention, by what is not selected
  std::string residency = "first_unselected";
  int spare = 0;
  std::string codec = "identity";  ///< of complete pages in the store
  std::string plan = "retrieval";  ///< or "complete", "window", "sliding", "by_head", "eviction"
  std::string eviction = "h2o";    ///< of plan "eviction"
  float thin = 1.0f;               ///< share of a prompt that is kept, of methods that retrieve
  /// Numbers of the policy that evicts, by its members' names; others are the policy's own, of raas and
  /// razor_attention_compensated those of the budget, and of epi_cache a block is as large as the budget.
  std::map<std::string, double> eviction_values{};

  bool retrieves() const { return plan == "retrieval" || plan == "by_head"; }
  bool evicts() const { return plan == "eviction"; }
  /// Whether some of a prompt is evicted before the pipeline has it.
  bool thins() const { return thin != 1.0f; }
  bool completes() const { return completion != no_completion::name; }
  /// The correction's own delta; of one that has none mass_deficit's.
  float usual_delta() const {
    return correction == missing_share::name    ? missing_share{}.delta
           : correction == verified_share::name ? verified_share{}.delta
                                                : mass_deficit{}.delta;
  }
  /// Whether an engine says what tokens are worth: models without trained gates cannot.
  bool takes_worths() const;
  /// Whether an engine runs pseudo tokens behind a prompt, whose queries decide what stays of it.
  bool takes_probes() const { return evicts() && (eviction == dapq::name || cuts_blocks()); }
  /// Whether prompts are cut block by block as they are read.
  bool cuts_blocks() const { return evicts() && eviction == epi_cache::name; }
  /// Whether each KV head keeps what a list says.
  bool needs_head_list() const {
    return plan == "by_head" || (evicts() && eviction == razor_attention_compensated::name);
  }
  /// Whether a list may say which query heads choose for their layer; all do without one.
  bool takes_voters() const { return evicts() && eviction == compress_kv::name; }
  bool needs_basis() const {
    return retrieves() &&
           (summary == "key_subspace" || summary == "key_clusters" || summary == "key_signatures");
  }
  basis_rows rows_of_basis() const {
    return summary == "key_clusters"     ? basis_rows::centroids
           : summary == "key_signatures" ? basis_rows::hyperplanes
           : basis_of_pairs              ? basis_rows::pairs
                                         : basis_rows::axes;
  }
  /// Rows of a basis that is learnt from a prompt of so many tokens.
  int basis_rank(int prompt_tokens) const {
    if (rows_of_basis() == basis_rows::hyperplanes) return bits * tables;
    if (rows_of_basis() != basis_rows::centroids) return rank;
    return clusters == 0 ? std::max(1, prompt_tokens / 80) : clusters;
  }
  bool needs_temperatures() const { return retrieves() && selection == top_p::name && calibrated; }
  bool needs_codebooks() const { return retrieves() && summary == "key_codes"; }
  bool needs_factors() const { return plan != "complete" && !evicts() && codec == "low_rank_keys"; }
  bool needs_channels() const { return plan != "complete" && !evicts() && codec == key_channels::name; }
  int unit_tokens(int page) const { return unit == 0 ? page : unit; }
  /// Coefficients that a token's keys, of so many numbers, are rebuilt from: without a number of them
  /// ShadowKV's share, 160 of 1024.
  int key_rank_of(int numbers) const {
    return std::min(key_rank == 0 ? std::max(1, (160 * numbers + 512) / 1024) : key_rank, numbers);
  }
};

/// What a method's policies take besides it.
struct method_data {
  /// Of key_subspace, key_clusters and key_signatures; the caller keeps its memory.
  subspace_basis basis{};
  key_codebooks codebooks{};             ///< of key_codes; the caller keeps their memory
  subspace_basis factors{};              ///< of low_rank_keys; the caller keeps its memory
  rotary_embedding rotary{};             ///< of low_rank_keys; the caller keeps its memory
  head_temperatures temperatures{};      ///< of top_p; the caller keeps their memory
  channel_lists channels{};              ///< of key_channels; the caller keeps their memory
  /// Of a method that needs_head_list(): (layers, kv_heads); the caller keeps their memory.
  std::span<const layer_kind> head_kinds{};
  int kv_heads = 1;
  /// Of a method that takes_voters(): (layers, query_heads), or none; the caller keeps their memory.
  std::span<const std::uint8_t> voters{};
  int query_heads = 1;
  int page = 32, sink = 64, window = 128;  ///< tokens; of raas, and the sink of razor_attention_compensated
  int budget = 512;                        ///< tokens; of epi_cache, whose blocks are as large
  std::vector<bool> sliding_layers{};      ///< (layers), or none
  std::span<const layer_values> by_layer{};  ///< (layers), or none; the caller keeps their memory

  /// (layers), `common` where a layer has none of its own; none where no layer has.
  std::vector<float> of_each_layer(std::optional<float> layer_values::*own, float common) const {
    if (std::none_of(by_layer.begin(), by_layer.end(), [&](const auto& of) { return of.*own; })) return {};
    std::vector<float> all;
    for (const layer_values& of : by_layer) all.push_back((of.*own).value_or(common));
    return all;
  }
};

/// An alternative: a name, and how it is made.
template <class Policy>
struct choice {
  std::string_view name;
  Policy (*make)(const method_spec&, const method_data&);
};

/// The alternative of that name. Throws choice_error, which names them all.
template <class Choices>
const auto& find_by_name(const std::string& kind, const Choices& choices, std::string_view name);

// How a policy that takes values gets them; others are just made.
template <class Policy>
struct policy_maker {
  static Policy from(const method_spec&, const method_data&) { return {}; }
};
template <>
struct policy_maker<chunk_means<dynamic>> {
  static chunk_means<dynamic> from(const method_spec& m, const method_data&) { return {{m.chunk}}; }
};
template <>
struct policy_maker<key_sketch<dynamic>> {
  static key_sketch<dynamic> from(const method_spec& m, const method_data&) { return {{m.bits}}; }
};
template <>
struct policy_maker<key_subspace<dynamic, dynamic>> {
  static key_subspace<dynamic, dynamic> from(const method_spec& m, const method_data& data) {
    return {{m.rank}, {m.bits}, data.basis};
  }
};
template <>
struct policy_maker<key_clusters> {
  static key_clusters from(const method_spec&, const method_data& data) { return {data.basis}; }
};
template <>
struct policy_maker<key_signatures<dynamic, dynamic>> {
  static key_signatures<dynamic, dynamic> from(const method_spec& m, const method_data& data) {
    return {{m.bits}, {m.tables}, data.basis};
  }
};
template <>
struct policy_maker<key_codes<dynamic, dynamic>> {
  static key_codes<dynamic, dynamic> from(const method_spec& m, const method_data& data) {
    return {{m.codes}, {data.codebooks.mean_codes}, data.codebooks};
  }
};
template <>
struct policy_maker<low_rank_keys<dynamic>> {
  static low_rank_keys<dynamic> from(const method_spec&, const method_data& data) {
    return {{data.factors.rank}, data.factors, data.rotary};
  }
};
template <>
struct policy_maker<key_channels> {
  static key_channels from(const method_spec& m, const method_data& data) {
    return {m.pruned, data.channels};
  }
};
template <>
struct policy_maker<pin_outliers<dynamic>> {
  static pin_outliers<dynamic> from(const method_spec& m, const method_data&) { return {{m.pinned}}; }
};
template <class Coarse, class Fine>
struct policy_maker<coarse_to_fine<Coarse, Fine, dynamic>> {
  static coarse_to_fine<Coarse, Fine, dynamic> from(const method_spec& m, const method_data& data) {
    return {{policy_maker<Coarse>::from(m, data), policy_maker<Fine>::from(m, data)}, {m.times}};
  }
};
template <>
struct policy_maker<razor_attention_compensated> {
  static razor_attention_compensated from(const method_spec&, const method_data& data) {
    return {data.head_kinds, data.kv_heads, data.sink};
  }
};
template <>
struct policy_maker<compress_kv> {
  static compress_kv from(const method_spec&, const method_data& data) {
    return {data.voters, data.query_heads};
  }
};
template <>
struct policy_maker<top_p> {
  static top_p from(const method_spec& m, const method_data& data) { return {m.top_p, data.temperatures}; }
};
template <>
struct policy_maker<sticky_top_k> {
  static sticky_top_k from(const method_spec& m, const method_data&) { return {m.bonus}; }
};
template <>
struct policy_maker<cosine_drift> {
  static cosine_drift from(const method_spec& m, const method_data& data);
};
template <>
struct policy_maker<mass_deficit> {
  static mass_deficit from(const method_spec& m, const method_data& data) {
    return {m.delta, m.partial, data.of_each_layer(&layer_values::delta, m.delta)};
  }
};
template <>
struct policy_maker<missing_share> {
  static missing_share from(const method_spec& m, const method_data&) { return {m.delta, m.partial}; }
};
template <>
struct policy_maker<verified_share> {
  static verified_share from(const method_spec& m, const method_data&) {
    return {m.epsilon, m.delta, m.samples};
  }
};
template <>
struct policy_maker<every_n_steps<dynamic>> {
  static every_n_steps<dynamic> from(const method_spec& m, const method_data&) { return {{m.every}}; }
};
template <>
struct policy_maker<raas> {
  static raas from(const method_spec&, const method_data& data) {
    return {.page = data.page, .room = data.window, .sink = data.sink, .window = data.window};
  }
};
template <>
struct policy_maker<epi_cache> {
  static epi_cache from(const method_spec&, const method_data& data) { return {.block_tokens = data.budget}; }
};
template <template <int> class Residency>
struct policy_maker<Residency<dynamic>> {
  static Residency<dynamic> from(const method_spec& m, const method_data&) { return {{{m.spare}}}; }
};
/// A summary in the format that a method names.
template <class Summary>
using in_any_format = stored_as<Summary, number_format::any>;
template <class Summary>
struct policy_maker<in_any_format<Summary>> {
  static in_any_format<Summary> from(const method_spec& m, const method_data& data);
};

/// The policies of one kind that programs offer.
template <class... Policies>
struct policy_list {
  using any = any_of<Policies...>;
  template <class... More>
  using with = policy_list<Policies..., More...>;
  static constexpr choice<any> choices[] = {
      {Policies::name, [](const method_spec& m, const method_data& data) {
         return any(policy_maker<Policies>::from(m, data));
       }}...};
};

// The lists; `device_` ones are those of which devices have all.
using device_summary_list =
    policy_list<in_any_format<min_max>, in_any_format<mean>, in_any_format<centroid_box>, in_any_format<ball>,
                in_any_format<chunk_means<dynamic>>, key_sketch<dynamic>, key_subspace<dynamic, dynamic>,
                key_codes<dynamic, dynamic>, key_clusters, coarse_to_fine<min_max, key_sketch<4>, dynamic>>;
using summary_list = device_summary_list::with<key_signatures<dynamic, dynamic>>;
using pooling_list = policy_list<mean_softmax, max_softmax, mean_score, max_score, mean_query, max_query>;
using device_selection_list = policy_list<top_k, top_p, sticky_top_k>;
using selection_list = device_selection_list::with<colliding>;
using pinning_list = policy_list<no_pins, pin_outliers<dynamic>>;
using scope_list = policy_list<per_kv_head, per_query_head, per_layer>;
using device_correction_list = policy_list<cosine_drift, mass_deficit, always, never, every_n_steps<dynamic>>;
using correction_list = device_correction_list::with<missing_share, verified_share>;
using completion_list = policy_list<no_completion, page_values>;
using residency_list = policy_list<first_unselected<dynamic>, least_recently_used<dynamic>>;
using codec_list = policy_list<identity, cast<bfloat16>, cast<half>, cast<fp8_e4m3>, int8_token, int4_token,
                               int8_channel, int4_channel, low_rank_keys<dynamic>, key_channels>;
using eviction_list =
    policy_list<h2o, mikv, q_hitter, tova, snapkv, dapq, epi_cache, pyramid_kv, raas, lazy_eviction, hard_kv,
                defensive_kv, layer_defensive_kv, compress_kv, cake, r_kv, arkv_origin, arkv, arkv_split, d2o,
                exact_merge, hard_kv_merge, hard_kv_pairs, kv_merger, razor_attention_compensated, trim_kv,
                given_worths>;

inline constexpr auto& summaries = summary_list::choices;
inline constexpr auto& device_summaries = device_summary_list::choices;
inline constexpr auto& poolings = pooling_list::choices;
inline constexpr auto& selections = selection_list::choices;
inline constexpr auto& device_selections = device_selection_list::choices;
inline constexpr auto& pinnings = pinning_list::choices;
inline constexpr auto& selection_scopes = scope_list::choices;
inline constexpr auto& corrections = correction_list::choices;
inline constexpr auto& device_corrections = device_correction_list::choices;
inline constexpr auto& completions = completion_list::choices;
inline constexpr auto& residencies = residency_list::choices;
inline constexpr auto& codecs = codec_list::choices;

/// The policy that evicts, with the numbers that the method gives it. Throws choice_error, which names them
/// all.
eviction_list::any eviction_of(const method_spec& m, const method_data& data);

template <class... Policies>
bool takes_worths_by_name(policy_list<Policies...>, std::string_view name) {
  return ((Policies::name == name && takes_worths<Policies>) || ...);
}
inline bool method_spec::takes_worths() const {
  return evicts() && takes_worths_by_name(eviction_list{}, eviction);
}

using any_layouts = any_of<layout_pair<nhd, hnd>, layout_pair<hnd, hnd>>;
inline constexpr choice<any_layouts> layouts[] = {
    {"nhd", [](const method_spec&, const method_data&) { return any_layouts(layout_pair<nhd, hnd>{}); }},
    {"hnd", [](const method_spec&, const method_data&) { return any_layouts(layout_pair<hnd, hnd>{}); }},
};
using any_plan = any_of<complete_first<dynamic>, complete_first<dynamic, layer_kind::window>,
                        complete_first<dynamic, layer_kind::sliding>, every_layer<layer_kind::complete>,
                        by_layer, by_head>;
using any_route = any_of<resident, in_place>;

template <class Value>
struct named_value {
  std::string_view name;
  Value value;
};
inline constexpr named_value<number_format> formats[] = {{"standard", number_format::standard},
                                                         {"key", number_format::key},
                                                         {"float32", number_format::float32},
                                                         {"int8", number_format::int8}};
inline constexpr named_value<drift_pool> drift_pools[] = {
    {"mean", drift_pool::mean}, {"min", drift_pool::min}, {"max", drift_pool::max}};

template <class Choices>
const auto& find_by_name(const std::string& kind, const Choices& choices, std::string_view name) {
  std::string names;
  for (const auto& one : choices) {
    if (one.name == name) return one;
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  throw choice_error(kind + " " + cited(name) + " is unknown; choose one of " + names);
}

/// The names of a list, for help: "min_max, mean, ...".
template <class Choices>
std::string names_of(const Choices& choices) {
  std::string names;
  for (const auto& one : choices) names += (names.empty() ? "" : ", ") + std::string(one.name);
  return names;
}

inline cosine_drift policy_maker<cosine_drift>::from(const method_spec& m, const method_data& data) {
  return {.tau = m.tau,
          .tau_of_layer = data.of_each_layer(&layer_values::tau, m.tau),
          .pool = find_by_name("drift pooling", drift_pools, m.drift_pool).value};
}
template <class Summary>
in_any_format<Summary> policy_maker<in_any_format<Summary>>::from(const method_spec& m,
                                                                  const method_data& data) {
  return in_any_format<Summary>(policy_maker<Summary>::from(m, data),
                                find_by_name("summary format", formats, m.format).value);
}

/// The plan of a method for a model of which some layers slide.
inline by_layer plan_beside_sliding(const method_spec& m, const method_data& data, int complete_layers) {
  if (m.plan != "retrieval" && m.plan != "window" && m.plan != "complete")
    throw choice_error(
        "plan " + m.plan +
        " is of models whose layers all attend to the whole sequence; choose one of retrieval, "
        "window, complete");
  by_layer plan;
  for (const bool slides : data.sliding_layers)
    plan.kinds.push_back(slides ? layer_kind::sliding
                         : m.plan == "complete" || std::ssize(plan.kinds) < complete_layers
                             ? layer_kind::complete
                         : m.plan == "window" ? layer_kind::window
                                              : layer_kind::retrieval);
  return plan;
}

/// The plan of a method whose first `complete_layers` layers keep everything, but for those that slide.
/// Throws choice_error.
inline any_plan plan_of(const method_spec& m, const method_data& data, int complete_layers) {
  if (!data.sliding_layers.empty()) return plan_beside_sliding(m, data, complete_layers);
  if (m.plan == "retrieval") return complete_first<dynamic>{{complete_layers}};
  if (m.plan == "window") return complete_first<dynamic, layer_kind::window>{{complete_layers}};
  if (m.plan == "sliding") return complete_first<dynamic, layer_kind::sliding>{{complete_layers}};
  if (m.plan == "complete") return every_layer<layer_kind::complete>{};
  if (m.plan != "by_head")
    throw choice_error("plan " + m.plan +
                       " is unknown; choose one of retrieval, window, sliding, complete, by_head");
  by_head plan{{data.head_kinds.begin(), data.head_kinds.end()}, data.kv_heads};
  const auto first = to_size(complete_layers) * to_size(data.kv_heads);
  for (std::size_t i = 0; i < first && i < plan.kinds.size(); ++i) plan.kinds[i] = layer_kind::complete;
  return plan;
}

/// A published method, or one of ours, by its name.
struct named_variant {
  std::string_view name;
  method_spec method{};
  int page = 0;             ///< tokens; 0: whatever page size is asked for
  double budget_share = 1;  ///< of the budget that is asked for
  bool deep = false;        ///< of interest beside its siblings alone
};

/// Methods of freekv/methods.hpp, and some of them with another page size or budget.
const std::vector<named_variant>& variants();

}  // namespace freekv::examples
