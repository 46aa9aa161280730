// Traces and settings for freekv-replay, and what the float64 oracle says the program must answer.
#pragma once

#include <optional>
#include <sstream>
#include <utility>

#include "../agreement.hpp"
#include "../property/random_case.hpp"
#include "basis.hpp"
#include "run_program.hpp"
#include "tensor_file.hpp"

namespace tests {

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

/// What a variant's name stands for, by the contract.
struct variant_policies {
  std::string plan, summary, correction;
};
inline const std::map<std::string, variant_policies>& variants_of_contract() {
  static const std::map<std::string, variant_policies> all{
      {"full", {"complete", "min_max", "cosine_drift"}},
      {"streaming_llm", {"window", "min_max", "cosine_drift"}},
      {"quest", {"retrieval", "min_max", "always"}},
      {"freekv", {"retrieval", "min_max", "cosine_drift"}},
      {"freekv_chunk_means", {"retrieval", "chunk_means", "cosine_drift"}},
      {"freekv_key_subspace", {"retrieval", "key_subspace", "cosine_drift"}}};
  return all;
}

/// A trace and how it is replayed.
struct replay_case {
  random_case layer;  // shape, budget, prompt and steps, as the oracle wants them; policies by resolve()
  std::string variant = "freekv";
  std::optional<std::string> summary, correction;  // flags, where given
  std::string query_dtype = "F32", dtype = "F32";  // in the file, of q, and of k and v
  std::string dtype_flag = "stored";
  std::string tau = "0.9", scale;  // as text; no scale: the default
  int threads = 1;
  int basis_layers = 0, basis_layer = 0;  // 0 layers: the basis is learnt from the prompt
  int spare_rank = 0;                     // rows in the basis file beyond --rank
  bool trace_names_layer = false;
  std::vector<float> q, k, v;  // as the file holds them, exactly

  int tokens() const { return layer.prompt + layer.steps; }
  bool retrieves() const { return variants_of_contract().at(variant).plan == "retrieval"; }
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
             << ", --dtype " << c.dtype_flag << ", tau " << c.tau << ", scale " << c.scale << ", threads "
             << c.threads << ", basis layers " << c.basis_layers;
}

/// Fills the tensors with rows of a token_source and settles the policies.
inline void fill_trace(replay_case& c) {
  auto& o = c.layer.options;
  const auto& policies = variants_of_contract().at(c.variant);
  o.does.plan = policies.plan;
  o.does.summary = c.summary.value_or(policies.summary);
  o.does.correction = c.correction.value_or(policies.correction);
  o.does.tau = std::stof(c.tau);
  o.scale = c.scale.empty() ? 0.0f : std::stof(c.scale);
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
  c.layer.basis_data = random_basis(d, o.kv_heads, o.does.rank, o.head_dim);
  o.basis = {nullptr, 1, o.kv_heads, o.does.rank, o.head_dim};
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
  if (d.below(4) == 0) c.summary = d.one_of<std::string>({"min_max", "chunk_means", "key_subspace"});
  if (d.below(3) == 0) c.correction = d.one_of<std::string>({"cosine_drift", "always", "never"});
  o.page = d.one_of({8, 8, 16, 16, 24, 32});
  o.kv_heads = d.one_of({1, 1, 2, 3});
  o.query_heads = o.kv_heads * (o.kv_heads == 1 ? d.between(1, 16) : d.one_of({1, 2, 3, 4}));
  o.budget = {o.page * d.between(0, 2), o.page * d.between(1, 2), d.one_of({1, 1, 2, 3, 40})};
  c.layer.prompt =
      d.one_of({0, 1, o.page - 1, 4 * o.page, d.between(5, 10) * o.page, d.between(5, 10) * o.page + 3});
  c.layer.steps = d.between(o.page / 2, 2 * o.page);
  c.query_dtype = all_dtypes()[size(d.below(3))];
  c.dtype = all_dtypes()[size(d.below(3))];
  c.dtype_flag = d.one_of<std::string>({"stored", "stored", "stored", "f32", "f16", "bf16"});
  c.tau = d.one_of<std::string>({"0.5", "0.9", "0.95", "-5", "5"});
  c.scale = d.one_of<std::string>({"", "", "0.05", "0.3"});
  c.threads = d.between(1, 3);
  if (d.below(2) == 0) c.basis_layers = d.between(1, 3);
  c.basis_layer = c.basis_layers == 0 ? 0 : d.below(c.basis_layers);
  c.spare_rank = d.between(0, 3);
  c.trace_names_layer = d.below(2) == 0;
  fill_trace(c);
  return c;
}

/// The file of the trace.
inline file_parts trace_of(const replay_case& c) {
  const auto& o = c.layer.options;
  metadata_map metadata{{"prompt_len", std::to_string(c.layer.prompt)}};
  if (c.trace_names_layer) metadata["layer"] = std::to_string(c.basis_layer);
  return parts_of(
      {{"q", {c.query_dtype, {c.tokens(), o.query_heads, o.head_dim}, bytes_of(c.q, c.query_dtype)}},
       {"k", {c.dtype, {c.tokens(), o.kv_heads, o.head_dim}, bytes_of(c.k, c.dtype)}},
       {"v", {c.dtype, {c.tokens(), o.kv_heads, o.head_dim}, bytes_of(c.v, c.dtype)}}},
      metadata);
}

/// A basis file: the case's basis as one of several layers. All else in it is not to be used.
inline std::string basis_file_of(const replay_case& c) {
  const auto& o = c.layer.options;
  const auto view = c.layer.with_basis().basis;
  const int rank = o.does.rank + c.spare_rank;
  std::vector<float> mean, rows;
  for (int layer = 0; layer < c.basis_layers; ++layer)
    for (int head = 0; head < o.kv_heads; ++head) {
      const float used = layer == c.basis_layer ? 1.0f : 0.0f;
      for (int i = 0; i < o.head_dim; ++i) mean.push_back(used * view.mean(0, head)[i]);
      for (int i = 0; i < o.does.rank * o.head_dim; ++i) rows.push_back(used * view.rows(0, head)[i]);
      rows.insert(rows.end(), size(c.spare_rank * o.head_dim), 1.0f);
    }
  return parts_of({{"mean", {"F32", {c.basis_layers, o.kv_heads, o.head_dim}, bytes_of(mean, "F32")}},
                   {"rows", {"F32", {c.basis_layers, o.kv_heads, rank, o.head_dim}, bytes_of(rows, "F32")}}},
                  {})
      .whole();
}

/// The command line; `out` may be empty.
inline std::vector<std::string> command_of(const replay_case& c, const std::string& trace,
                                           const std::string& basis, const std::string& out) {
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
  flag("k", o.budget.selected_pages);
  flag("tau", c.tau);
  flag("threads", c.threads);
  if (c.summary) flag("summary", *c.summary);
  if (c.correction) flag("correction", *c.correction);
  if (o.does.summary == "chunk_means") flag("chunk", o.does.chunk);
  if (o.does.summary == "key_subspace") {
    flag("rank", o.does.rank);
    flag("bits", o.does.bits);
    if (c.basis_layers > 0) flag("basis", basis);
    if (c.basis_layers > 1 && !c.trace_names_layer) flag("basis-layer", c.basis_layer);
  }
  if (o.in_place) flag("route", "in_place");
  if (c.dtype_flag != "stored") flag("dtype", c.dtype_flag);
  if (!c.scale.empty()) flag("scale", c.scale);
  if (!out.empty()) flag("out", out);
  return command;
}

/// What the program wrote.
struct replay_output {
  tensor_map tensors;
  nlohmann::json summary;
  std::vector<float> out, lse;
  std::vector<std::int32_t> selected, recalled;
  std::vector<std::uint8_t> corrected;
};

/// Writes the case's files into `folder`, runs the program and reads what it wrote. Throws disagreement where
/// the program fails or its output has not the contract's form.
inline replay_output run_replay(const replay_case& c, const scratch_folder& folder) {
  const auto& o = c.layer.options;
  store(folder / "trace", trace_of(c).whole());
  if (c.basis_layers > 0) store(folder / "basis", basis_file_of(c));
  const program_end end = run_program(command_of(c, folder / "trace", folder / "basis", folder / "out"));
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
  const std::map<std::string, std::pair<std::string, std::vector<std::int64_t>>> form{
      {"out", {"F32", {steps, o.query_heads, o.head_dim}}},
      {"lse", {"F32", {steps, o.query_heads}}},
      {"selected", {"I32", {steps, o.kv_heads, o.budget.selected_pages}}},
      {"corrected", {"U8", {steps, o.kv_heads}}},
      {"recalled", {"I32", {steps, o.kv_heads}}}};
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
  r.corrected = elements_of<std::uint8_t>(r.tensors["corrected"]);
  return r;
}

}  // namespace tests
