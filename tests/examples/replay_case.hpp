// Traces and settings for freekv-replay, and what the float64 oracle says the program must answer.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <optional>
#include <sstream>
#include <utility>

#include "../agreement.hpp"
#include "../property/random_case.hpp"
#include "basis.hpp"
#include "codebooks.hpp"
#include "rotation.hpp"
#include "run_program.hpp"
#include "tensor_file.hpp"

namespace tests {

using freekv::to_size;

/// What a variant's name stands for, by the contract.
struct variant_policies {
  std::string plan, summary, correction, pooling = "mean_softmax", selection = "top_k";
  bool partial = false;
  std::string rows = "per_kv_head";
  int unit = 0;
  std::string pinning = "no_pins", codec = "identity";
  bool calibrated = false;
  std::string thin = "1";  // as text
};
inline const std::map<std::string, variant_policies>& variants_of_contract() {
  static const std::map<std::string, variant_policies> all{
      {"full", {"complete", "min_max", "cosine_drift"}},
      {"streaming_llm", {"window", "min_max", "cosine_drift"}},
      {"quest", {"retrieval", "min_max", "always", "max_score"}},
      {"quest_mean_softmax", {"retrieval", "min_max", "always"}},
      {"quest_per_query_head",
       {"retrieval", "min_max", "always", "mean_softmax", "top_k", false, "per_query_head"}},
      {"freekv_per_layer",
       {"retrieval", "min_max", "cosine_drift", "mean_softmax", "top_k", false, "per_layer"}},
      {"arkvale", {"retrieval", "centroid_box", "always", "mean_score"}},
      {"twilight", {"retrieval", "coarse_to_fine", "always", "mean_softmax", "top_p"}},
      {"infinigen",
       {"retrieval", "key_subspace", "always", "mean_softmax", "top_k", false, "per_kv_head", 1}},
      {"clusterkv", {"retrieval", "key_clusters", "always", "max_score", "top_k", false, "per_kv_head", 1}},
      {"magicpig",
       {"retrieval", "key_signatures", "always", "max_score", "colliding", false, "per_query_head", 1}},
      {"mpcache",
       {.plan = "retrieval",
        .summary = "min_max",
        .correction = "always",
        .pooling = "max_score",
        .unit = 16,
        .thin = "0.3"}},
      {"fasa", {"retrieval", "key_subspace", "always", "mean_softmax", "top_k", false, "per_kv_head", 1}},
      {"shadowkv",
       {"retrieval", "mean", "always", "max_softmax", "top_k", false, "per_kv_head", 8, "pin_outliers",
        "low_rank_keys"}},
      {"think",
       {.plan = "retrieval", .summary = "min_max", .correction = "cosine_drift", .codec = "key_channels"}},
      {"razor_attention", {"by_head", "min_max", "cosine_drift"}},
      {"duo_attention", {"by_head", "min_max", "cosine_drift"}},
      {"freekv", {"retrieval", "min_max", "cosine_drift"}},
      {"freekv_long_inputs", {"retrieval", "min_max", "cosine_drift"}},
      {"freekv_never", {"retrieval", "min_max", "never"}},
      {"freekv_top_p", {"retrieval", "min_max", "cosine_drift", "mean_softmax", "top_p"}},
      {"freekv_calibrated_top_p",
       {.plan = "retrieval",
        .summary = "min_max",
        .correction = "cosine_drift",
        .selection = "top_p",
        .calibrated = true}},
      {"freekv_chunk_means", {"retrieval", "chunk_means", "cosine_drift"}},
      {"freekv_chunk_means_never", {"retrieval", "chunk_means", "never"}},
      {"freekv_key_subspace", {"retrieval", "key_subspace", "cosine_drift"}},
      {"freekv_key_subspace_never", {"retrieval", "key_subspace", "never"}},
      {"freekv_key_subspace_deficit",
       {"retrieval", "key_subspace", "mass_deficit", "mean_softmax", "top_k", true}},
      {"freekv_key_codes", {"retrieval", "key_codes", "cosine_drift"}},
      {"freekv_key_codes_never", {"retrieval", "key_codes", "never"}},
      {"freekv_key_codes_deficit", {"retrieval", "key_codes", "mass_deficit", "mean_softmax", "top_k", true}},
      {"freekv_key_codes_sticky",
       {"retrieval", "key_codes", "mass_deficit", "mean_softmax", "sticky_top_k", true}},
      {"freekv_key_codes_units",
       {"retrieval", "key_codes", "mass_deficit", "mean_softmax", "sticky_top_k", true, "per_kv_head", 4}}};
  return all;
}

/// A trace and how it is replayed.
struct replay_case {
  random_case layer;  // shape, budget, prompt and steps, as the oracle wants them; policies by resolve()
  std::string variant = "freekv";
  std::optional<std::string> summary, pooling, selection, rows, correction;  // flags, where given
  std::optional<int> unit;                                                   // the same
  std::optional<std::string> pinning, codec, thin;                           // the same
  std::string query_dtype = "F32", dtype = "F32";  // in the file, of q, and of k and v
  std::string dtype_flag = "stored";
  std::string tau = "0.9", top_p = "0.95", bonus = "0.7", delta = "0.2", pruned = "0.4";  // as text
  std::string scale, selection_scale;                                     // none: the default
  int threads = 1;
  int basis_layers = 0, basis_layer = 0;  // 0 layers: the basis is learnt from the prompt
  int spare_rank = 0;                     // rows in the basis file beyond --rank
  std::vector<freekv::layer_kind> heads;  // of each KV head, as the head list says; empty: no list is given
  bool trace_names_layer = false;
  bool trace_says_scale = false;  // and no flag does
  bool slides = false;         // a sliding window, whatever the variant
  bool calibrated = false;     // the flag
  std::string soft_cap = "0";  // as text
  std::vector<float> q, k, v;  // as the file holds them, exactly
  std::vector<float> k_pre{};  // the keys before rotation, where the file has them

  int tokens() const { return layer.prompt + layer.steps; }
  /// Whether any head is to select. `by_head` needs a list, which fill_trace makes if there is none.
  bool retrieves() const {
    const std::string& plan = variants_of_contract().at(variant).plan;
    return !slides && (plan == "retrieval" || plan == "by_head");
  }
  bool retrieves(int head) const {
    return retrieves() && (heads.empty() || heads[head] == freekv::layer_kind::retrieval);
  }
  /// Rows of `selected` in a step.
  int selecting() const {
    const auto& o = layer.options;
    return retrieves() && o.method.rows == "per_query_head" ? o.query_heads : o.kv_heads;
  }
  /// Units of a KV head that are selected besides k.
  int pinned() const {
    return retrieves() && layer.options.method.pinning == "pin_outliers" ? layer.options.method.pinned : 0;
  }
  bool uses_basis() const {
    const std::string& chosen = layer.options.method.summary;
    return retrieves() &&
           (chosen == "key_subspace" || chosen == "key_clusters" || chosen == "key_signatures");
  }
  /// Whether the variant's own codec gives back other keys than it was given.
  bool codec_loses() const { return variants_of_contract().at(variant).codec != "identity"; }
  /// The share of the prompt that is kept, as text, and the tokens of a KV head.
  std::string share() const { return slides ? "1" : thin.value_or(variants_of_contract().at(variant).thin); }
  bool thins() const { return layer.options.method.thin != 1.0f; }
  int kept() const {
    const auto& o = layer.options;
    const auto wanted = static_cast<int>(std::lround(double{o.method.thin} * layer.prompt));
    return std::min(layer.prompt, std::max(wanted, o.budget.sink + o.budget.window));
  }
  /// The type in which keys and values are kept.
  std::string kept_dtype() const {
    return dtype_flag == "f32" ? "F32" : dtype_flag == "f16" ? "F16" : dtype_flag == "bf16" ? "BF16" : dtype;
  }
};

inline data_type element_of(const std::string& dtype) {
  return dtype == "F16" ? data_type::f16 : dtype == "BF16" ? data_type::bf16 : data_type::f32;
}

inline std::ostream& operator<<(std::ostream& out, const replay_case& c) {
  return out << c.layer << ", variant " << c.variant << ", q " << c.query_dtype << ", kv " << c.dtype
             << ", --dtype " << c.dtype_flag << ", tau " << c.tau << ", scale " << c.scale
             << (c.trace_says_scale ? " by the trace" : "") << ", selection scale " << c.selection_scale
             << ", threads " << c.threads << ", basis layers " << c.basis_layers << ", listed heads "
             << c.heads.size();
}

/// Codebooks from the prompt's keys, where the case uses any: learnt as the program learns them, which
/// codebooks_test checks.
inline void learn_codebooks(replay_case& c) {
  auto& o = c.layer.options;
  if (o.method.summary != "key_codes") return;
  using namespace freekv::examples;
  codebook_set learnt(1, o.kv_heads, o.head_dim,
                      codebook_sizes::of_codes(o.method.codes, o.head_dim, o.method.unit_tokens(o.page)));
  std::vector<float> keys(c.k.begin(), c.k.begin() + c.layer.prompt * o.kv_heads * o.head_dim);
  for (float& x : keys) x = rounded(x, o.element);
  learnt.learn(0, keys);
  o.codebooks = learnt.view();
  c.layer.codebook_data.assign(o.codebooks.data,
                               o.codebooks.data + o.codebooks.floats_per_head() * to_size(o.kv_heads));
}

/// The base of every trace's rotary embedding.
inline constexpr double rope_base = 10000;

/// The factorisation of the prompt's keys, where the case uses one: as the program makes it.
inline void learn_factors(replay_case& c) {
  auto& o = c.layer.options;
  if (!o.method.needs_factors()) return;
  using namespace freekv::examples;
  const rotation turns = rotation_of_base(rope_base, o.head_dim / 2, freekv::rotary_pairs::halves);
  key_basis learnt(1, o.kv_heads, o.method.key_rank_of(o.kv_heads * o.head_dim), o.head_dim);
  std::vector<float> keys(c.k.begin(), c.k.begin() + c.layer.prompt * o.kv_heads * o.head_dim);
  for (float& x : keys) x = rounded(x, o.element);
  learnt.factorise(0, rotated(keys, o.kv_heads, o.head_dim, turns, -1.0f));
  o.factors = learnt.view();
  o.rotary = turns.view();
  c.layer.factor_data.assign(o.factors.data,
                             o.factors.data + o.factors.floats_per_head() * to_size(o.kv_heads));
  c.layer.frequencies = turns.frequencies;
}

/// Fills the tensors with rows of a token_source and settles the policies.
inline void fill_trace(replay_case& c) {
  auto& o = c.layer.options;
  const auto& policies = variants_of_contract().at(c.variant);
  o.method.plan = policies.plan;
  o.method.summary = c.summary.value_or(policies.summary);
  o.method.pooling = c.pooling.value_or(policies.pooling);
  o.method.selection = c.selection.value_or(policies.selection);
  o.method.rows = c.rows.value_or(policies.rows);
  o.method.correction = c.correction.value_or(policies.correction);
  o.method.unit = c.unit.value_or(policies.unit);
  if (o.method.unit != 0 && o.page % o.method.unit != 0) c.unit = o.method.unit = 8;
  o.method.pinning = c.pinning.value_or(policies.pinning);
  o.method.codec = c.codec.value_or(policies.codec);
  if (o.method.codec == "low_rank_keys" && c.share() != "1") c.thin = "1";
  o.method.thin = std::stof(c.share());
  if (o.method.selection == "colliding") {  // goes with these alone
    c.summary = o.method.summary = "key_signatures";
    c.rows = o.method.rows = "per_query_head";
    c.correction = o.method.correction = "always";
    c.pinning = o.method.pinning = "no_pins";
    c.unit = o.method.unit = 1;
    if (o.method.pooling.ends_with("softmax")) c.pooling = o.method.pooling = "max_score";
  }
  if (o.method.summary == "key_signatures") o.method.bits = std::min(o.method.bits, 4);
  if (o.method.rows == "per_layer" && o.method.pinning == "pin_outliers") o.method.pinned = 0;
  if (o.method.unit_tokens(8) % 8 != 0) {  // what keeps 8 tokens at a time cannot be
    if (!takes_unit(o.method.summary, o.method.unit_tokens(8))) c.summary = o.method.summary = "mean";
    if (o.method.summary == "key_subspace") o.method.bits = 32;
    if (o.method.summary == "chunk_means") o.method.chunk = 1;
  }
  o.method.partial = o.method.partial || (policies.partial && !c.correction);
  o.method.calibrated = c.calibrated || policies.calibrated;
  c.layer.temperature_data.clear();  // they are found from the prompt
  o.method.tau = std::stof(c.tau);
  o.method.top_p = std::stof(c.top_p);
  o.method.bonus = std::stof(c.bonus);
  o.method.delta = std::stof(c.delta);
  o.method.pruned = std::stof(c.pruned);
  if (o.method.summary == "key_sketch" && o.method.bits != 1 && o.method.bits != 4) o.method.bits = 2;
  if (o.method.summary == "key_subspace" && o.method.bits == 1) o.method.bits = 3;
  if (c.slides) {
    c.heads.clear();
    o.method.plan = "sliding";
  }
  if (o.method.plan == "by_head" && c.heads.empty())
    for (int head = 0; head < o.kv_heads; ++head)
      c.heads.push_back(head % 3 == 0   ? freekv::layer_kind::retrieval
                        : head % 3 == 1 ? freekv::layer_kind::window
                                        : freekv::layer_kind::complete);
  if (!c.heads.empty()) {
    c.heads.resize(to_size(o.kv_heads), freekv::layer_kind::retrieval);
    c.trace_names_layer = true;
    o.method.plan = "by_head";
    o.head_kinds = c.heads;
  }
  if (o.method.plan == "complete" || o.method.plan == "eviction") {  // nothing is recalled
    o.method.codec = freekv::examples::method_spec{}.codec;
    c.codec.reset();
    o.store_file.clear();
  }
  o.soft_cap = std::stof(c.soft_cap);
  if (!o.sink_logits.empty()) o.sink_logits.resize(to_size(o.query_heads), -1.0f);
  o.scale = c.scale.empty() ? 0.0f : std::stof(c.scale);
  o.method.selection_scale = c.selection_scale.empty() ? 0.0f : std::stof(c.selection_scale);
  o.element = element_of(c.kept_dtype());
  o.max_tokens = c.tokens();

  random_case raw = c.layer;
  raw.options.element = data_type::f32;
  token_source source(raw);
  for (auto* tensor : {&c.q, &c.k, &c.v}) tensor->clear();
  for (int token = 0; token < c.tokens(); ++token) {
    source.next();
    for (const float x : source.queries) c.q.push_back(rounded(x, element_of(c.query_dtype)));
    for (const float x : source.keys) c.k.push_back(rounded(x, element_of(c.dtype)));
    for (const float x : source.values) c.v.push_back(rounded(x, element_of(c.dtype)));
  }
  dice d(c.layer.seed + 17);
  const int rank = o.method.basis_rank(c.layer.prompt);
  if (o.method.summary == "key_signatures") {
    give_basis(c.layer, d, o.kv_heads);
  } else {
    c.layer.basis_data = random_basis(d, o.kv_heads, rank, o.head_dim);
    o.basis = {nullptr, 1, o.kv_heads, rank, o.head_dim};
  }
  learn_codebooks(c);
  learn_factors(c);
  c.layer.channel_data.resize(
      to_size(o.kv_heads * o.head_dim / 8));  // chosen by the prompt, when it is known
  o.channels = {nullptr, 1, o.kv_heads, o.head_dim};
}

inline const std::vector<std::string>& all_dtypes() {
  static const std::vector<std::string> all{"F32", "F16", "BF16"};
  return all;
}

/// A small case: the oracle is naive.
inline replay_case random_replay(std::uint64_t seed) {
  dice d(seed * 7919 + 1);
  replay_case c;
  c.layer = make_case(seed);
  auto& o = c.layer.options;
  auto variant = variants_of_contract().begin();
  std::advance(variant, seed % variants_of_contract().size());
  c.variant = variant->first;
  if (d.below(2) == 0) c.summary = o.method.summary;
  if (d.below(2) == 0) c.pooling = o.method.pooling;
  if (d.below(2) == 0) c.selection = o.method.selection;
  const std::string correction = o.method.correction, rows = o.method.rows;
  if (d.below(2) == 0) c.correction = correction;
  c.top_p = d.one_of<std::string>({"0.3", "0.7", "0.95", "1"});
  c.bonus = d.one_of<std::string>({"0", "0.1", "0.7", "3"});
  c.delta = d.one_of<std::string>({"0", "0.05", "0.2", "0.5"});
  c.calibrated = dice(seed + 10).below(2) == 0;
  c.pruned = dice(seed + 12).one_of<std::string>({"0", "0.3", "0.4", "0.75"});
  o.page = d.one_of({8, 8, 16, 16, 24, 32});
  o.kv_heads = d.one_of({1, 1, 2, 3});
  o.query_heads = o.kv_heads * (o.kv_heads == 1 ? d.between(1, 16) : d.one_of({1, 2, 3, 4}));
  o.budget = {o.page * d.between(0, 2), o.page * d.between(1, 2), d.one_of({1, 1, 2, 3, 40})};
  c.layer.prompt =
      d.one_of({0, 1, o.page - 1, 4 * o.page, d.between(5, 10) * o.page, d.between(5, 10) * o.page + 3});
  c.layer.steps = d.between(o.page / 2, 2 * o.page);
  c.query_dtype = all_dtypes()[to_size(d.below(3))];
  c.dtype = all_dtypes()[to_size(d.below(3))];
  c.dtype_flag = d.one_of<std::string>({"stored", "stored", "stored", "f32", "f16", "bf16"});
  c.tau = d.one_of<std::string>({"0.5", "0.9", "0.95", "-5", "5"});
  c.scale = d.one_of<std::string>({"", "", "0.05", "0.3"});
  c.selection_scale = dice(seed + 7).one_of<std::string>({"", "", "0.02", "1"});
  c.threads = d.between(1, 3);
  if (d.below(2) == 0) c.basis_layers = d.between(1, 3);
  c.basis_layer = c.basis_layers == 0 ? 0 : d.below(c.basis_layers);
  c.spare_rank = d.between(0, 3);
  c.trace_names_layer = d.below(2) == 0;
  c.trace_says_scale = dice(seed + 8).below(2) == 0;
  c.slides = d.below(8) == 0;
  c.soft_cap = d.one_of<std::string>({"0", "0", "0.5", "30"});
  if (c.retrieves() && d.below(4) == 0)
    for (int head = 0; head < o.kv_heads; ++head)
      c.heads.push_back(d.one_of({freekv::layer_kind::retrieval, freekv::layer_kind::retrieval,
                                  freekv::layer_kind::complete, freekv::layer_kind::window}));
  if (d.below(2) == 0) c.rows = rows;
  if (d.below(5) == 0) c.unit = d.one_of({0, 1, 2, 4, 8});
  if (c.rows == "per_layer" && variants_of_contract().at(c.variant).calibrated) c.rows.reset();
  c.calibrated = c.calibrated && c.rows.value_or(variants_of_contract().at(c.variant).rows) != "per_layer";
  if (dice(seed + 9).below(3) == 0 && !c.slides)
    c.thin = dice(seed + 11).one_of<std::string>({"0.2", "0.5", "0.9", "1"});
  if (d.below(3) == 0) c.pinning = o.method.pinning;
  if (o.method.codec != "identity") c.codec = o.method.codec;
  o.method.key_rank = d.between(1, 200);
  const auto& policies = variants_of_contract().at(c.variant);
  if (c.correction.value_or(policies.correction) == "mass_deficit" &&
      c.rows.value_or(policies.rows) == "per_query_head")
    c.rows = "per_layer";
  const auto& shapes = freekv::examples::compiled_shapes;
  if (std::none_of(std::begin(shapes), std::end(shapes), [&](const auto& shape) {
        return shape.element == element_of(c.kept_dtype()) && shape.head_dim == o.head_dim;
      }))
    o.head_dim = shapes[0].head_dim;  // which has every element
  fill_trace(c);
  return c;
}

/// A case to start from: 2 KV heads of 3 query heads, page 8, sink 8, window 16, k 2; 10 pages of prompt.
inline replay_case plain_case(const std::string& variant = "freekv") {
  replay_case c;
  c.layer = make_case(5);
  c.variant = variant;
  auto& o = c.layer.options;
  o.head_dim = 64;
  o.kv_heads = 2;
  o.query_heads = 6;
  o.page = 8;
  o.budget = {8, 16, 2};
  o.method = {.chunk = 4, .rank = 16, .bits = 4, .key_rank = 30, .pinned = 2};
  o.sink_logits.clear();
  o.layout = "nhd";
  o.store_file.clear();
  o.in_place = false;
  c.layer.prompt = 80;
  c.layer.steps = 12;
  c.layer.turn = 0.3f;
  c.layer.outliers = 0.0f;
  fill_trace(c);
  return c;
}

/// A case changed and filled anew.
inline replay_case with(replay_case c, const std::function<void(replay_case&)>& change) {
  change(c);
  fill_trace(c);
  return c;
}

/// The file of the trace.
inline file_parts trace_of(const replay_case& c) {
  const auto& o = c.layer.options;
  metadata_map metadata{{"prompt_len", std::to_string(c.layer.prompt)}};
  if (c.trace_names_layer) metadata["layer"] = std::to_string(c.basis_layer);
  if (c.trace_says_scale && !c.scale.empty()) metadata["scale"] = c.scale;
  tensor_map tensors{
      {"q", {c.query_dtype, {c.tokens(), o.query_heads, o.head_dim}, bytes_of(c.q, c.query_dtype)}},
      {"k", {c.dtype, {c.tokens(), o.kv_heads, o.head_dim}, bytes_of(c.k, c.dtype)}},
      {"v", {c.dtype, {c.tokens(), o.kv_heads, o.head_dim}, bytes_of(c.v, c.dtype)}}};
  if (!c.k_pre.empty())
    tensors["k_pre"] = {"F32", {c.tokens(), o.kv_heads, o.head_dim}, bytes_of(c.k_pre, "F32")};
  if (!o.sink_logits.empty())
    tensors["sink_logits"] = {"F32", {o.query_heads}, bytes_of(o.sink_logits, "F32")};
  return parts_of(tensors, metadata);
}

/// A basis file: the case's basis as one of several layers. All else in it is not to be used.
inline std::string basis_file_of(const replay_case& c) {
  const auto& o = c.layer.options;
  const auto view = c.layer.with_basis().basis;
  const bool uses_all = o.method.summary == "key_clusters";  // the first so many, where it does not
  const int spare = uses_all ? 0 : c.spare_rank, rank = view.rank + spare;
  std::vector<float> mean, rows;
  for (int layer = 0; layer < c.basis_layers; ++layer)
    for (int head = 0; head < o.kv_heads; ++head) {
      const float used = layer == c.basis_layer ? 1.0f : 0.0f;
      for (int i = 0; i < o.head_dim; ++i) mean.push_back(used * view.mean(0, head)[i]);
      for (int i = 0; i < view.rank * o.head_dim; ++i) rows.push_back(used * view.rows(0, head)[i]);
      rows.insert(rows.end(), to_size(spare * o.head_dim), 1.0f);
    }
  return parts_of({{"mean", {"F32", {c.basis_layers, o.kv_heads, o.head_dim}, bytes_of(mean, "F32")}},
                   {"rows", {"F32", {c.basis_layers, o.kv_heads, rank, o.head_dim}, bytes_of(rows, "F32")}}},
                  {})
      .whole();
}

/// The head list: heads that see sink and window alone need no line. Other layers' lines are not to be used.
inline std::string head_list_of(const replay_case& c) {
  std::string text = "# layer head kind\n";
  const auto line = [&](int layer, std::size_t head, const char* kind) {
    text += std::to_string(layer) + " " + std::to_string(head) + "\t" + kind + "  # a head\n";
  };
  for (std::size_t head = 0; head < c.heads.size(); ++head) {
    if (c.heads[head] != freekv::layer_kind::window)
      line(c.basis_layer, head, c.heads[head] == freekv::layer_kind::complete ? "complete" : "retrieval");
    line(c.basis_layer + 1, head, head % 2 == 0 ? "complete" : "retrieval");
  }
  return text;
}

/// The command line; `out` may be empty.
inline std::vector<std::string> command_of(const replay_case& c, const std::string& trace,
                                           const std::string& basis, const std::string& out,
                                           const std::string& heads = "") {
  const auto& o = c.layer.options;
  std::vector<std::string> command{FREEKV_REPLAY, trace};
  const auto flag = [&](const std::string& name, const auto& value) {
    command.push_back("--" + name);
    command.push_back(sentence(value));
  };
  flag("variant", c.variant);
  flag("page", o.page);
  flag("sink", o.budget.sink);
  flag("window", o.budget.window);
  flag("k", o.budget.selected_units);
  flag("tau", c.tau);
  flag("threads", c.threads);
  if (c.summary) flag("summary", *c.summary);
  if (c.pooling) flag("pooling", *c.pooling);
  if (c.selection) flag("selection", *c.selection);
  if (c.rows) flag("rows", *c.rows);
  if (c.unit) flag("unit", *c.unit);
  if (c.correction) flag("correction", *c.correction);
  const freekv::examples::method_spec usual;
  if (o.method.format != usual.format) flag("summary-dtype", o.method.format);
  if (o.method.selection == "top_p") flag("top-p", c.top_p);
  if (c.calibrated) command.push_back("--calibrated");
  if (o.method.selection == "sticky_top_k") flag("bonus", c.bonus);
  if (o.method.drift_pool != usual.drift_pool) flag("drift-pool", o.method.drift_pool);
  if (o.method.correction == "mass_deficit") {
    flag("delta", c.delta);
    if (o.method.partial) command.push_back("--partial");
  }
  if (o.method.correction == "every_n_steps") flag("every", o.method.every);
  if (o.method.residency != usual.residency) flag("residency", o.method.residency);
  if (o.method.spare != usual.spare) flag("spare", o.method.spare);
  if (c.codec) flag("codec", *c.codec);
  if (c.pinning) flag("pinning", *c.pinning);
  if (c.thin) flag("thin", *c.thin);
  if (o.method.pinned != usual.pinned) flag("pinned", o.method.pinned);
  if (o.method.needs_channels()) flag("pruned", c.pruned);
  if (o.method.needs_factors()) {
    if (c.k_pre.empty()) flag("rope-base", rope_base);
    flag("key-rank", o.method.key_rank);
  }
  if (!o.store_file.empty()) flag("store-file", o.store_file);
  if (o.layout != "nhd") flag("layout", o.layout);
  if (!c.heads.empty()) flag("heads", heads);
  if (o.method.summary == "key_sketch") flag("bits", o.method.bits);
  if (o.method.summary == "chunk_means") flag("chunk", o.method.chunk);
  if (o.method.summary == "key_codes") flag("codes", o.method.codes);
  if (o.method.summary == "coarse_to_fine") flag("times", o.method.times);
  if (o.method.summary == "key_clusters") flag("clusters", o.method.clusters);
  if (o.method.summary == "key_signatures") {
    flag("bits", o.method.bits);
    flag("tables", o.method.tables);
  }
  if (o.method.summary == "key_subspace") {
    flag("rank", o.method.rank);
    flag("bits", o.method.bits);
  }
  if (c.uses_basis()) {
    if (c.basis_layers > 0) flag("basis", basis);
    if (c.basis_layers > 1 && !c.trace_names_layer) flag("basis-layer", c.basis_layer);
  }
  if (o.in_place) flag("route", "in_place");
  if (c.dtype_flag != "stored") flag("dtype", c.dtype_flag);
  if (!c.scale.empty() && !c.trace_says_scale) flag("scale", c.scale);
  if (!c.selection_scale.empty()) flag("selection-scale", c.selection_scale);
  if (c.slides) flag("sliding-window", o.sliding_window);
  if (o.soft_cap != 0.0f) flag("soft-cap", c.soft_cap);
  if (!out.empty()) flag("out", out);
  return command;
}

/// What the program wrote.
struct replay_output {
  tensor_map tensors;
  nlohmann::json summary;
  std::vector<float> out, lse;
  std::vector<std::int32_t> selected, recalled, before_attention;
  std::vector<std::uint8_t> corrected;
  std::vector<std::int32_t> kept;
};

/// Writes the case's files into `folder`, runs the program and reads what it wrote. Throws disagreement where
/// the program fails or its output has not the contract's form.
inline replay_output run_replay(const replay_case& c, const scratch_folder& folder) {
  const auto& o = c.layer.options;
  store(folder / "trace", trace_of(c).whole());
  if (c.basis_layers > 0) store(folder / "basis", basis_file_of(c));
  if (!c.heads.empty()) store(folder / "heads", head_list_of(c));
  const program_end end =
      run_program(command_of(c, folder / "trace", folder / "basis", folder / "out", folder / "heads"));
  const auto require = [&](bool holds, const std::string& what) {
    if (!holds) throw disagreement{sentence(what, "\n", end)};
  };
  require(end.exit_code == 0, "the replay failed");
  require(end.err.empty(), "a replay that succeeds has nothing to say on stderr");

  replay_output r;
  try {
    r.summary = nlohmann::json::parse(end.out);
  } catch (const std::exception& e) {
    require(false, sentence("stdout is not one JSON value: ", e.what()));
  }
  require(r.summary.is_object(), "stdout is no JSON object");
  metadata_map metadata;
  r.tensors = read_tensors(folder / "out", &metadata);
  require(metadata["prompt_len"] == std::to_string(c.layer.prompt), "prompt_len is not handed on");

  const std::int64_t steps = c.layer.steps;
  std::map<std::string, std::pair<std::string, std::vector<std::int64_t>>> form{
      {"out", {"F32", {steps, o.query_heads, o.head_dim}}},
      {"lse", {"F32", {steps, o.query_heads}}},
      {"selected", {"I32", {steps, c.selecting(), o.budget.selected_units + c.pinned()}}},
      {"corrected", {"U8", {steps, o.kv_heads}}},
      {"recalled", {"I32", {steps, o.kv_heads}}},
      {"recalled_before_attention", {"I32", {steps, o.kv_heads}}}};
  if (c.thins()) form["kept"] = {"I32", {o.kv_heads, c.kept()}};
  require(r.tensors.size() == form.size(), sentence("there are ", r.tensors.size(), " tensors"));
  for (const auto& [name, expected] : form) {
    require(r.tensors.count(name) == 1, "there is no tensor " + name);
    require(r.tensors[name].dtype == expected.first, name + " has dtype " + r.tensors[name].dtype);
    require(r.tensors[name].shape == expected.second, name + " has another shape");
  }
  r.out = elements_of<float>(r.tensors["out"]);
  r.lse = elements_of<float>(r.tensors["lse"]);
  r.selected = elements_of<std::int32_t>(r.tensors["selected"]);
  r.recalled = elements_of<std::int32_t>(r.tensors["recalled"]);
  r.before_attention = elements_of<std::int32_t>(r.tensors["recalled_before_attention"]);
  r.corrected = elements_of<std::uint8_t>(r.tensors["corrected"]);
  if (c.thins()) r.kept = elements_of<std::int32_t>(r.tensors["kept"]);
  return r;
}

}  // namespace tests
