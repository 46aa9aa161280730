// Tensor parallel: ranks that have a part of the KV heads each, with the query heads of these, and nothing of
// each other, give what one pipeline of all heads gives, bit for bit; and which policies do not allow that.

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "steps.hpp"

namespace {

using namespace tests;
using freekv::layer_kind;
using freekv::step_phase;

constexpr int d = 24, page = 8, rank_of_keys = 9;

using pipeline = freekv::retrieval_pipeline<
    freekv::kv_shape<freekv::half, d>, freekv::page_size<page>, freekv::unit<freekv::dynamic>,
    freekv::any_of<freekv::min_max, freekv::chunk_means<4>, freekv::key_subspace<8, 3>>,
    freekv::any_of<freekv::per_kv_head, freekv::per_query_head, freekv::per_layer>,
    freekv::any_of<freekv::cosine_drift, freekv::mass_deficit>, freekv::any_of<freekv::top_k, freekv::top_p>,
    freekv::any_of<freekv::complete_first<freekv::dynamic>, freekv::by_head>,
    freekv::any_of<freekv::identity, freekv::low_rank_keys<freekv::dynamic>>,
    freekv::any_of<freekv::resident, freekv::in_place>>;

/// Heads of a layer, `width` numbers each, in rows of `all` heads.
struct heads_of_rows {
  int first, count, all;

  template <class T>
  std::vector<T> of(const std::vector<T>& rows, int width) const {
    std::vector<T> part;
    const auto row = static_cast<std::ptrdiff_t>(all) * width;
    for (auto at = rows.begin(); at != rows.end(); at += row)
      part.insert(part.end(), at + first * width, at + (first + count) * width);
    return part;
  }
  /// As many query heads of each of these.
  heads_of_rows queries(int group) const { return {first * group, count * group, all * group}; }
};

/// A model, its method and its data, of all heads, drawn at random.
struct whole_model {
  pipeline::settings settings;
  std::vector<float> basis, factors;  // of key_subspace and of low_rank_keys
  std::uint64_t seed;

  explicit whole_model(std::uint64_t of) : seed(of) {
    dice random(seed);
    auto& s = settings;
    const int kv_heads = random.between(2, 5);
    s.model = {.layers = 3, .query_heads = kv_heads * random.one_of({1, 2, 3, 5, 8}), .kv_heads = kv_heads};
    s.budget = {.sink = page * random.below(2),
                .window = page * random.between(1, 2),
                .selected_units = random.between(1, 4)};
    s.capacity.max_tokens = 200;
    s.capacity.max_decode_rows = 2;
    s.attention.soft_cap = random.one_of({0.0f, 3.0f});
    for (int layer = 0; layer < s.model.layers; ++layer) {
      const auto of_layer = random_basis(random, kv_heads, 8, d);
      basis.insert(basis.end(), of_layer.begin(), of_layer.end());
      const auto of_keys = random_factors(random, kv_heads, rank_of_keys, d);
      factors.insert(factors.end(), of_keys.begin(), of_keys.end());
    }
    if (random.below(2) == 0)
      s.attention.sink_logits = normals(random, count(s.model.layers * s.model.query_heads));
    const int summary = random.below(3);
    if (summary == 1) s.summary = freekv::chunk_means<4>{};
    if (summary == 2) s.summary = freekv::key_subspace<8, 3>{};
    if (summary != 2 && random.below(3) == 0) s.unit = {{4}};
    s.scope = freekv::per_kv_head{};
    if (random.below(4) == 0) s.scope = freekv::per_query_head{};
    s.correction = freekv::cosine_drift{.tau = 0.8f};
    if (s.selects_by() == freekv::selection_scope::kv_head && random.below(3) == 0)
      s.correction = freekv::mass_deficit{.delta = 0.2f, .partial = random.below(2) == 0};
    if (random.below(3) == 0) s.selection = freekv::top_p{0.7f};
    s.plan = freekv::complete_first<freekv::dynamic>{1};
    if (random.below(3) == 0) {
      freekv::by_head plan{.kv_heads = kv_heads};
      for (int head = 0; head < s.model.layers * kv_heads; ++head)
        plan.kinds.push_back(random.one_of(
            {layer_kind::retrieval, layer_kind::retrieval, layer_kind::complete, layer_kind::window}));
      s.plan = plan;
    }
    if (random.below(2) == 0) s.route = freekv::in_place{};
  }
  heads_of_rows all_heads() const { return {0, settings.model.kv_heads, settings.model.kv_heads}; }
};

/// What a layer's step gave: rows, and by KV head what its reports say.
struct layer_result {
  std::vector<float> out, lse;
  std::vector<std::vector<std::int32_t>> reports;
};

/// A pipeline of some of a model's heads, which has these heads' part of the settings and of the data.
class rank {
 public:
  rank(const whole_model& of, heads_of_rows heads)
      : heads_(heads),
        queries_(heads.queries(of.settings.model.group())),
        basis_(heads.of(of.basis, (1 + 8) * d)),
        factors_(heads.of(of.factors, (1 + rank_of_keys) * d)),
        pipeline_(settings(of), backend_),
        id_(pipeline_.open()) {}

  std::vector<layer_result> step(const text& source, int tokens, step_phase phase) {
    const int first = pipeline_.tokens(id_), layers = pipeline_.configuration().model.layers;
    auto step = pipeline_.begin_step({{id_, tokens, phase}});
    std::vector<layer_result> results;
    const auto mine = [](const heads_of_rows& heads, std::span<const float> rows) {
      return heads.of(std::vector<float>(rows.begin(), rows.end()), d);
    };
    for (int layer = 0; layer < layers; ++layer) {
      const text::rows rows = source.at(layer, first, tokens);
      const std::vector<float> q = mine(queries_, rows.queries), k = mine(heads_, rows.keys),
                               v = mine(heads_, rows.values);
      layer_result& r = results.emplace_back();
      r.out.resize(q.size());
      r.lse.resize(q.size() / d);
      step.append<float>(layer, {.keys = k, .values = v, .queries = q});
      step.attend(layer, r.out, r.lse);
    }
    step.end();
    for (int layer = 0; layer < layers && phase == step_phase::decode; ++layer) {
      const auto report = pipeline_.report(layer)[id_];
      for (std::size_t head = 0; head < count(heads_.count); ++head) {
        auto& of_head = results[count(layer)].reports.emplace_back();
        if (report.corrected.empty()) continue;  // a layer without selections
        of_head = {report.corrected[head], report.recalled[head], report.promoted[head]};
        const auto attended = report.attended.subspan(report.attended.size() / count(heads_.count) * head,
                                                      count(report.attended_count[head]));
        of_head.insert(of_head.end(), attended.begin(), attended.end());
      }
    }
    return results;
  }
  const heads_of_rows& heads() const { return heads_; }
  const heads_of_rows& queries() const { return queries_; }

 private:
  pipeline::settings settings(const whole_model& of) const {
    pipeline::settings s = of.settings;
    s.model.kv_heads = heads_.count;
    s.model.query_heads = queries_.count;
    s.attention.sink_logits = queries_.of(of.settings.attention.sink_logits, 1);
    freekv::resolve(s.summary, [&]<class Summary>(const Summary&) {
      if constexpr (std::is_same_v<Summary, freekv::key_subspace<8, 3>>)
        s.summary = Summary{.basis = {basis_.data(), s.model.layers, heads_.count, 8, d}};
    });
    freekv::resolve(s.codec, [&]<class Codec>(const Codec&) {
      if constexpr (std::is_same_v<Codec, freekv::low_rank_keys<freekv::dynamic>>)
        s.codec = Codec{.rank = {rank_of_keys},
                        .basis = {factors_.data(), s.model.layers, heads_.count, rank_of_keys, d}};
    });
    freekv::resolve(of.settings.plan, [&]<class Plan>(const Plan& plan) {
      if constexpr (std::is_same_v<Plan, freekv::by_head>)
        s.plan = Plan{.kinds = heads_.of(plan.kinds, 1), .kv_heads = heads_.count};
    });
    return s;
  }

  heads_of_rows heads_, queries_;
  std::vector<float> basis_, factors_;
  freekv::host_backend backend_;
  pipeline pipeline_;
  freekv::sequence_id id_;
};

/// What differs first between two ranks and a pipeline of all heads, in words; nothing: all is equal.
std::string first_difference(const whole_model& model) {
  dice random(model.seed + 1);
  const int all = model.settings.model.kv_heads,
            first = random.below(2) == 0 ? random.between(1, all - 1) : all / 2;
  rank whole(model, model.all_heads()), left(model, {0, first, all}), right(model, {first, all - first, all});
  const text source(model.settings, d, 160, model.seed);
  int tokens = 0;
  const auto step = [&](int rows, step_phase phase) -> std::string {
    const auto of_all = whole.step(source, rows, phase);
    for (rank* part : {&left, &right}) {
      const auto of_part = part->step(source, rows, phase);
      const auto where = [&](const char* what, std::size_t layer) {
        return std::string(what) + " of layer " + std::to_string(layer) + " behind " +
               std::to_string(tokens) + " tokens, heads from " + std::to_string(part->heads().first) +
               " on of " + std::to_string(all);
      };
      for (std::size_t layer = 0; layer < of_all.size(); ++layer) {
        const layer_result& a = of_all[layer];
        const layer_result& b = of_part[layer];
        if (!same_bits(part->queries().of(a.out, d), b.out)) return where("outputs", layer);
        if (!same_bits(part->queries().of(a.lse, 1), b.lse)) return where("log-sum-exp", layer);
        if (!a.reports.empty() && part->heads().of(a.reports, 1) != b.reports)
          return where("selections", layer);
      }
    }
    tokens += rows;
    return "";
  };
  std::string found = step(random.between(40, 100), step_phase::prefill);
  for (int i = 0; i < 25 && found.empty(); ++i) found = step(random.between(1, 2), step_phase::decode);
  return found;
}

/// How many of some models' ranks differ from the whole once `change` has been made to them.
int differing_with(const std::function<void(pipeline::settings&)>& change) {
  int differing = 0;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    whole_model model(seed);
    model.settings.plan = freekv::complete_first<freekv::dynamic>{1};
    model.settings.scope = freekv::per_kv_head{};
    change(model.settings);
    differing += !first_difference(model).empty();
  }
  return differing;
}

}  // namespace

TEST_CASE("ranks that have a part of the KV heads each give what one pipeline of all heads gives",
          "[tensor_parallel]") {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    INFO("seed " << seed);
    CHECK(first_difference(whole_model(seed)) == "");
  }
}

TEST_CASE("what looks across KV heads is not a rank's own", "[tensor_parallel]") {
  CHECK(differing_with([](auto&) {}) == 0);
  CHECK(differing_with([](auto& s) { s.scope = freekv::per_layer{}; }) > 4);
  CHECK(differing_with([](auto& s) { s.codec = freekv::low_rank_keys<freekv::dynamic>{}; }) > 4);
}
