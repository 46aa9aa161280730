// Random settings and sequences for one layer, reproducible from a seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "../oracle/oracle.hpp"
#include "compiled_shapes.hpp"
#include "pipeline.hpp"
#include "read_back.hpp"

namespace tests {

using freekv::examples::data_type;

/// Rounds as the library stores it.
inline float rounded(float x, data_type element) {
  using namespace freekv::examples;
  if (element == data_type::f16) return half_to_float(float_to_half(x));
  if (element == data_type::bf16) return bfloat16_to_float(float_to_bfloat16(x));
  return x;
}

/// A small shape, its policies and how long it runs.
struct random_case {
  std::uint64_t seed = 0;
  freekv::examples::pipeline_options options;
  int prompt = 0, steps = 0;
  std::vector<float> basis_data;                // options.basis points here
  std::vector<float> codebook_data;             // and options.codebooks here
  std::vector<float> factor_data, frequencies;  // and options.factors and options.rotary here
  std::vector<float> temperature_data;          // of top_p, where it has any
  std::vector<std::uint8_t> channel_data;       // and options.channels here
  float turn = 0.3f;                            // how far a query turns in a step
  float outliers = 0.0f;                        // share of keys that are large

  freekv::examples::pipeline_options with_basis() const {
    auto o = options;
    o.basis.data = basis_data.data();
    o.codebooks.data = codebook_data.data();
    o.factors.data = factor_data.data();
    o.rotary.frequencies = frequencies.data();
    o.channels.data = channel_data.data();
    if (temperature_data.size() == static_cast<std::size_t>(o.layers * o.kv_heads) &&
        o.method.rows != "per_layer")
      o.temperatures = {temperature_data.data(), o.layers, o.kv_heads};
    return o;
  }
};

inline std::ostream& operator<<(std::ostream& out, const random_case& c) {
  const auto& o = c.options;
  return out << "seed " << c.seed << ": " << freekv::examples::dtype_name(o.element) << " d " << o.head_dim
             << ", " << o.query_heads << "/" << o.kv_heads << " heads, page " << o.page << ", sink "
             << o.budget.sink << ", window " << o.budget.window << ", k " << o.budget.selected_units << ", "
             << o.method.summary << " " << o.method.format << " (chunk " << o.method.chunk << ", rank "
             << o.method.rank << ", bits " << o.method.bits << ", tables " << o.method.tables << ", times "
             << o.method.times << "), " << o.method.pooling << ", " << o.method.selection << " "
             << o.method.top_p << (c.temperature_data.empty() ? "" : " by temperatures") << " bonus "
             << o.method.bonus << ", " << o.method.correction << " tau " << o.method.tau << " "
             << o.method.drift_pool << " delta " << o.method.delta << (o.method.partial ? " partial" : "")
             << " every " << o.method.every << ", " << o.method.residency << " spare " << o.method.spare
             << ", " << o.method.rows << ", unit " << o.method.unit << ", plan " << o.method.plan << ", "
             << o.layout << (o.in_place ? ", in place" : ", resident") << ", sliding " << o.sliding_window
             << ", cap " << o.soft_cap << ", selection scale " << o.method.selection_scale
             << (o.sink_logits.empty() ? "" : ", sink logits")
             << (o.key_scales.empty() && o.value_scales.empty() ? "" : ", scales") << ", pins "
             << (o.method.pinning == "no_pins" ? 0 : o.method.pinned) << ", store " << o.method.codec
             << (o.store_file.empty() ? ""
                 : o.direct_io        ? " direct file"
                                      : " file")
             << ", prompt " << c.prompt << ", steps " << c.steps;
}

/// The oracle's word for a policy of the programs' lists. What it does not know is not drawn.
template <class Value>
struct oracle_word {
  std::string_view name;
  Value value;
};
inline constexpr oracle_word<oracle::summary_kind> oracle_summaries[] = {
    {"min_max", oracle::summary_kind::min_max},
    {"mean", oracle::summary_kind::mean},
    {"centroid_box", oracle::summary_kind::centroid_box},
    {"ball", oracle::summary_kind::ball},
    {"chunk_means", oracle::summary_kind::chunk_means},
    {"key_sketch", oracle::summary_kind::key_sketch},
    {"key_subspace", oracle::summary_kind::key_subspace},
    {"key_codes", oracle::summary_kind::key_codes},
    {"key_clusters", oracle::summary_kind::key_clusters},
    {"key_signatures", oracle::summary_kind::key_signatures},
    {"coarse_to_fine", oracle::summary_kind::coarse_to_fine}};
inline constexpr oracle_word<oracle::stored_format> oracle_formats[] = {
    {"standard", oracle::stored_format::standard},
    {"key", oracle::stored_format::key},
    {"float32", oracle::stored_format::float32},
    {"int8", oracle::stored_format::int8}};
inline constexpr oracle_word<oracle::pooling_kind> oracle_poolings[] = {
    {"mean_softmax", oracle::pooling_kind::mean_softmax}, {"max_softmax", oracle::pooling_kind::max_softmax},
    {"mean_score", oracle::pooling_kind::mean_score},     {"max_score", oracle::pooling_kind::max_score},
    {"mean_query", oracle::pooling_kind::mean_query},     {"max_query", oracle::pooling_kind::max_query}};
inline constexpr oracle_word<oracle::selection_kind> oracle_selections[] = {
    {"top_k", oracle::selection_kind::top_k},
    {"top_p", oracle::selection_kind::top_p},
    {"sticky_top_k", oracle::selection_kind::sticky_top_k},
    {"colliding", oracle::selection_kind::colliding}};  // with others alone: `sample_tokens`
inline constexpr auto drawn_selections = std::span(oracle_selections).first<3>();
inline constexpr oracle_word<oracle::scope_kind> oracle_scopes[] = {
    {"per_kv_head", oracle::scope_kind::kv_head},
    {"per_query_head", oracle::scope_kind::query_head},
    {"per_layer", oracle::scope_kind::layer}};
inline constexpr oracle_word<oracle::correction_kind> oracle_corrections[] = {
    {"cosine_drift", oracle::correction_kind::cosine_drift},
    {"mass_deficit", oracle::correction_kind::mass_deficit},
    {"always", oracle::correction_kind::always},
    {"never", oracle::correction_kind::never},
    {"every_n_steps", oracle::correction_kind::every_n_steps}};
inline constexpr oracle_word<oracle::drift_pool_kind> oracle_drift_pools[] = {
    {"mean", oracle::drift_pool_kind::mean},
    {"min", oracle::drift_pool_kind::min},
    {"max", oracle::drift_pool_kind::max}};
inline constexpr oracle_word<oracle::residency_kind> oracle_residencies[] = {
    {"first_unselected", oracle::residency_kind::first_unselected},
    {"least_recently_used", oracle::residency_kind::least_recently_used}};

class dice {
 public:
  explicit dice(std::uint64_t seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<std::uint64_t>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int>(choices.size()))];
  }
  template <class Choices>
  std::string name_of(const Choices& choices) {
    return std::string(std::begin(choices)[below(static_cast<int>(std::size(choices)))].name);
  }
  float normal() { return normal_(engine_); }
  float uniform() { return static_cast<float>(engine_() >> 40) * 0x1p-24f; }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

/// Orthonormal rows and a mean, by Gram-Schmidt on random vectors.
inline std::vector<float> random_basis(dice& d, int kv_heads, int rank, int head_dim) {
  std::vector<float> data;
  for (int head = 0; head < kv_heads; ++head) {
    for (int i = 0; i < head_dim; ++i) data.push_back(0.2f * d.normal());
    std::vector<std::vector<double>> rows;
    while (static_cast<int>(rows.size()) < rank) {
      std::vector<double> row;
      for (int i = 0; i < head_dim; ++i) row.push_back(d.normal());
      for (const auto& other : rows) {
        const double along = oracle::dot(row, other);
        for (int i = 0; i < head_dim; ++i) row[i] -= along * other[i];
      }
      const double norm = std::sqrt(oracle::dot(row, row));
      for (double& x : row) x /= norm;
      for (const double x : row) data.push_back(static_cast<float>(x));
      rows.push_back(row);
    }
  }
  return data;
}

/// A basis for a method: orthonormal rows, and behind them normal ones where key_signatures has more bits.
inline void give_basis(random_case& c, dice& d, int kv_heads) {
  auto& o = c.options;
  const auto& m = o.method;
  const int rank = m.summary == "key_signatures" ? std::max(m.rank, m.bits * m.tables) : m.rank;
  const std::vector<float> orthonormal = random_basis(d, kv_heads, m.rank, o.head_dim);
  const auto of_head = static_cast<std::ptrdiff_t>((1 + m.rank) * o.head_dim);
  c.basis_data.clear();
  for (int head = 0; head < kv_heads; ++head) {
    const auto first = orthonormal.begin() + head * of_head;
    c.basis_data.insert(c.basis_data.end(), first, first + of_head);
    for (int i = 0; i < (rank - m.rank) * o.head_dim; ++i) c.basis_data.push_back(d.normal());
  }
  o.basis = {nullptr, 1, kv_heads, rank, o.head_dim};
}

/// Codebooks of one layer: random subspaces, centroids of the size that keys have.
inline std::vector<float> random_codebooks(dice& d, const freekv::key_codebooks& form) {
  std::vector<float> data;
  for (int head = 0; head < form.kv_heads; ++head)
    for (const int rows : {form.mean_codes * form.mean_dims, form.codes * form.dims}) {
      const auto subspace = random_basis(d, 1, rows, form.head_dim);
      data.insert(data.end(), subspace.begin(), subspace.end());
      for (int i = 0; i < rows * 256; ++i) data.push_back(0.8f * d.normal());
    }
  return data;
}

/// Orthonormal rows of all KV heads side by side, and a mean, as low_rank_keys takes them.
inline std::vector<float> random_factors(dice& d, int kv_heads, int rank, int head_dim) {
  const std::vector<float> joint = random_basis(d, 1, rank, kv_heads * head_dim);
  std::vector<float> by_head;
  for (int head = 0; head < kv_heads; ++head)
    for (int row = 0; row < 1 + rank; ++row) {
      const auto first = joint.begin() + (row * kv_heads + head) * head_dim;
      by_head.insert(by_head.end(), first, first + head_dim);
    }
  return by_head;
}

/// What no pipeline takes: query heads that select each for itself, and a correction that judges what they
/// select together.
inline bool judged_by_mass(const freekv::examples::method_spec& m) {
  return m.rows == "per_query_head" && m.correction == "mass_deficit";
}

/// For low_rank_keys, as many coefficients in each layer.
inline void give_factors(random_case& c, int rank) {
  auto& o = c.options;
  dice d(c.seed + 3);
  c.factor_data.clear();
  for (int layer = 0; layer < o.layers; ++layer) {
    const std::vector<float> of_layer = random_factors(d, o.kv_heads, rank, o.head_dim);
    c.factor_data.insert(c.factor_data.end(), of_layer.begin(), of_layer.end());
  }
  o.factors = {nullptr, o.layers, o.kv_heads, rank, o.head_dim};
  c.frequencies.clear();
  for (int pair = d.between(0, o.head_dim / 2); pair > 0; --pair) c.frequencies.push_back(d.uniform());
  o.rotary = {nullptr, static_cast<int>(c.frequencies.size()),
              d.one_of({freekv::rotary_pairs::halves, freekv::rotary_pairs::neighbours})};
}

/// For key_channels, as many channels of each head as a share of them says, drawn at random.
inline void give_channels(random_case& c) {
  auto& o = c.options;
  dice d(c.seed + 12);
  o.method.pruned = d.one_of({0.0f, 0.2f, 0.4f, 0.4f, 0.6f, 0.9f});
  const int kept = freekv::key_channels{o.method.pruned}.kept(o.head_dim);
  c.channel_data.assign(static_cast<std::size_t>(o.layers * o.kv_heads * o.head_dim / 8), 0);
  for (int head = 0; head < o.layers * o.kv_heads; ++head)
    for (int left = kept; left > 0;) {
      const int at = d.below(o.head_dim), bit = 1 << at % 8;
      auto& byte = c.channel_data[static_cast<std::size_t>((head * o.head_dim + at) / 8)];
      if ((byte & bit) == 0) --left;
      byte = static_cast<std::uint8_t>(byte | bit);
    }
  o.channels = {nullptr, o.layers, o.kv_heads, o.head_dim};
}

/// One of those that are compiled.
inline void give_shape(random_case& c, dice& d) {
  using namespace freekv::examples;
  c.options.head_dim = head_dims[d.below(static_cast<int>(std::size(head_dims)))];
  std::vector<data_type> elements;
  for (const auto& shape : compiled_shapes)
    if (shape.head_dim == c.options.head_dim) elements.push_back(shape.element);
  c.options.element = elements[static_cast<std::size_t>(d.below(static_cast<int>(elements.size())))];
}

inline random_case make_case(std::uint64_t seed) {
  dice d(seed);
  random_case c;
  c.seed = seed;
  auto& o = c.options;
  give_shape(c, d);
  o.kv_heads = d.between(1, 3);
  o.query_heads = o.kv_heads * d.one_of({1, 2, 3, 4, 5, 7, 8, 16});
  o.page = d.one_of({8, 8, 16, 24, 32, 64, 128});
  o.budget.sink = o.page * d.between(0, 2);
  o.budget.window = o.page * d.between(1, 3);
  o.budget.selected_units = d.one_of({1, 2, 3, 4, 7, 40});
  using namespace freekv::examples;
  o.layout = d.name_of(layouts);
  o.method.summary = d.name_of(oracle_summaries);
  o.method.format = d.name_of(oracle_formats);
  o.method.chunk = d.one_of({1, 2, 4, 8});
  o.method.rank = d.between(8, 32);
  o.method.bits = o.method.summary == "key_sketch" ? d.one_of({1, 2, 4}) : d.one_of({2, 3, 4, 8, 32});
  if (o.method.summary == "key_signatures") o.method.bits = dice(seed + 9).between(1, 4);
  o.method.tables = dice(seed + 10).between(2, 20);
  o.method.times = d.one_of({1, 1, 2, 3});
  // The default, half of the time.
  if (d.below(2) == 0) o.method.pooling = d.name_of(oracle_poolings);
  if (d.below(4) == 0) o.method.selection = d.name_of(drawn_selections);
  o.method.top_p = d.one_of({0.3f, 0.6f, 0.9f, 1.0f});
  o.method.bonus = dice(seed + 5).one_of({0.0f, 0.1f, 0.7f, 3.0f});
  if (d.below(3) != 0) o.method.correction = d.name_of(oracle_corrections);
  o.method.tau = d.one_of({0.5f, 0.8f, 0.9f, 0.95f});
  o.method.drift_pool = d.name_of(oracle_drift_pools);
  o.method.delta = d.one_of({0.0f, 0.05f, 0.2f, 0.5f});
  o.method.partial = d.below(2) == 0;
  o.method.every = d.between(1, 6);
  o.method.residency = d.name_of(oracle_residencies);
  o.method.spare = d.one_of({0, 0, 1, 3, 9});
  o.method.plan = d.one_of<std::string>({"retrieval", "retrieval", "retrieval", "retrieval", "retrieval",
                                         "complete", "window", "sliding", "by_head"});
  using enum freekv::layer_kind;
  for (int head = 0; head < o.kv_heads; ++head)
    o.head_kinds.push_back(d.one_of({retrieval, complete, window}));
  o.in_place = d.below(2) == 0;
  o.scale = d.one_of({0.0f, 0.0f, 0.05f, 0.3f});
  c.prompt =
      d.one_of({0, 1, o.page - 1, o.page, d.between(0, 8 * o.page), d.between(4 * o.page, 14 * o.page)});
  c.steps = d.between(1, o.page <= 16 ? 3 * o.page : o.page + o.page / 2);
  c.turn = d.one_of({0.05f, 0.3f, 1.0f});
  c.outliers = d.one_of({0.0f, 0.02f});
  o.max_tokens = c.prompt + c.steps;
  give_basis(c, d, o.kv_heads);
  o.method.codes = d.between(1, 8);
  o.codebooks = {nullptr,        1, o.kv_heads, o.head_dim, d.between(1, 8), d.between(1, 4), o.method.codes,
                 d.between(1, 5)};
  if (o.method.summary == "key_codes") c.codebook_data = random_codebooks(d, o.codebooks);
  if (d.below(4) == 0) {
    o.store_file = "/tmp";
    o.direct_io = d.below(2) == 0;
  }
  if (d.below(4) == 0) o.method.codec = d.name_of(codecs);
  o.sliding_window = d.one_of({1, o.page, d.between(1, 6 * o.page), 100 * o.page});
  if (d.below(5) == 0) o.soft_cap = d.one_of({0.5f, 3.0f, 30.0f});
  o.method.selection_scale = dice(seed + 6).one_of({0.0f, 0.0f, 0.02f, 1.0f, 3.0f});
  if (d.below(5) == 0)
    for (int head = 0; head < o.query_heads; ++head) o.sink_logits.push_back(3.0f * d.normal());
  if (d.below(3) == 0) o.method.rows = d.name_of(oracle_scopes);
  if (judged_by_mass(o.method)) o.method.rows = "per_layer";
  if (d.below(4) == 0 && o.method.rows != "per_layer") o.method.pinning = "pin_outliers";
  o.method.pinned = d.one_of({0, 1, 2, 5, 48});
  give_factors(c, d.between(1, 24));
  give_channels(c);
  dice more(seed + 9);
  for (int head = more.below(2) * o.kv_heads; head > 0; --head)
    c.temperature_data.push_back(more.one_of({0.25f, 0.7f, 1.0f, 1.6f, 5.0f}));
  return c;
}

/// Whether a summary takes units of so many tokens, no multiple of 8: not where codes are kept 8 tokens at a
/// time.
inline bool takes_unit(const std::string& summary, int tokens) {
  return summary != "key_sketch" && summary != "coarse_to_fine" &&
         (summary != "key_codes" || tokens % 2 == 0);
}

/// Selects so many tokens together, or single ones where these do not divide the page, with as many selected
/// tokens as there were, and another summary where that one keeps 8 tokens, or two, at a time.
inline void give_unit(random_case& c, int tokens) {
  auto& m = c.options.method;
  m.unit = c.options.page % tokens == 0 ? tokens : 1;
  c.options.budget.selected_units *= c.options.page / m.unit;
  if (m.summary == "chunk_means") m.chunk = std::min(m.chunk, m.unit);
  if (m.unit % 8 == 0) return;
  if (m.summary == "key_subspace") m.bits = 32;
  if (!takes_unit(m.summary, m.unit)) m.summary = "mean";
}

/// The case with other heads, and with what it gives each of them: a basis, no sink logits, one kind of
/// layer.
inline void give_heads(random_case& c, int kv_heads, int query_heads) {
  auto& o = c.options;
  dice d(c.seed);
  o.kv_heads = kv_heads;
  o.query_heads = query_heads;
  o.sink_logits.clear();
  o.head_kinds.clear();
  o.method.plan = "retrieval";
  give_basis(c, d, kv_heads);
  give_factors(c, o.factors.rank);
  give_channels(c);
}

/// Keys and values are stored in units of scales, of all or of each KV head of each layer; of some cases
/// those of one of the two alone.
inline void give_scales(random_case& c) {
  auto& o = c.options;
  dice d(c.seed + 14);
  const int of_keys = d.between(0, 2), of_values = of_keys == 0 ? d.between(1, 2) : d.between(0, 2);
  const auto draw = [&](int kind, std::vector<float>& scales) {
    scales.clear();
    for (int i = kind == 0 ? 0 : kind == 1 ? 1 : o.layers * o.kv_heads; i > 0; --i)
      scales.push_back(d.one_of({0.02f, 0.3f, 0.5f, 1.0f, 1.7f, 11.0f}));
  };
  draw(of_keys, o.key_scales);
  draw(of_values, o.value_scales);
}

/// Of scales in options, those of a layer's KV heads; none: 1.
inline std::vector<double> scales_of_layer(const std::vector<float>& scales, int layer, int kv_heads) {
  std::vector<double> of_heads;
  for (int head = 0; head < kv_heads && !scales.empty(); ++head)
    of_heads.push_back(static_cast<double>(
        scales[scales.size() == 1 ? 0 : static_cast<std::size_t>(layer * kv_heads + head)]));
  return of_heads;
}

/// Rows (tokens, kv_heads, head_dim) as a pipeline stores them by the scales of a layer's KV heads.
inline std::vector<float> stored_rows(const random_case& c, std::vector<float> rows,
                                      const std::vector<double>& scales) {
  const auto heads = static_cast<std::size_t>(c.options.kv_heads),
             d = static_cast<std::size_t>(c.options.head_dim);
  for (std::size_t i = 0; i < rows.size() && !scales.empty(); ++i)
    rows[i] = rounded(rows[i] / static_cast<float>(scales[i / d % heads]), c.options.element);
  return rows;
}

/// Each query head samples tokens by `bits` in each of `tables`, as `colliding` has it, of all else as it was
/// what goes with that.
inline void sample_tokens(random_case& c, int bits, int tables) {
  auto& m = c.options.method;
  dice d(c.seed + 11);
  m.summary = "key_signatures";
  m.bits = bits;
  m.tables = tables;
  m.selection = "colliding";
  m.rows = "per_query_head";
  m.correction = "always";
  m.pooling = d.one_of<std::string>({"max_score", "mean_score", "mean_query", "max_query"});
  m.pinning = "no_pins";
  give_unit(c, 1);
  give_basis(c, d, c.options.kv_heads);
}

/// Where query heads select each for itself, what each of a KV head's group attended to; else nothing.
inline std::vector<std::vector<int>> selected_by_head(const freekv::step_report& report, int kv_head,
                                                      int group) {
  if (report.attended_by.empty()) return {};
  const auto n = [](int x) { return static_cast<std::size_t>(x); };
  const std::size_t most = report.attended.size() / report.corrected.size();
  const std::size_t words = report.attended_by.size() / report.attended.size();
  std::vector<std::vector<int>> own(n(group));
  for (int g = 0; g < group; ++g)
    for (int i = 0; i < report.attended_count[n(kv_head)]; ++i) {
      const std::size_t at = n(kv_head) * most + n(i);
      if ((report.attended_by[at * words + n(g / 32)] >> g % 32 & 1u) != 0)
        own[n(g)].push_back(report.attended[at]);
    }
  return own;
}

/// Rows of one token: queries that turn slowly, keys near slowly moving centres, as text has them.
class token_source {
 public:
  /// `c` outlives it.
  explicit token_source(const random_case& c) : c_(&c), dice_(c.seed ^ 0x9e3779b97f4a7c15ull) {
    fill(query_, c.options.query_heads, 1.0f);
    fill(centre_, c.options.kv_heads, 1.0f);
  }
  void next() {
    for (float& x : query_) x = (x + c_->turn * dice_.normal()) / std::sqrt(1.0f + c_->turn * c_->turn);
    for (float& x : centre_) x = 0.9f * x + 0.4f * dice_.normal();
    const float size = dice_.uniform() < c_->outliers ? 6.0f : 1.0f;
    keys.clear();
    for (const float x : centre_)
      keys.push_back(rounded(size * (x + 0.5f * dice_.normal()), c_->options.element));
    values.clear();
    for (std::size_t i = 0; i < keys.size(); ++i)
      values.push_back(rounded(dice_.normal(), c_->options.element));
    queries = query_;
  }
  /// What follows differs from what followed otherwise.
  void diverge(int nth) { dice_ = dice(c_->seed + static_cast<std::uint64_t>(nth) * 0x1234567ull); }
  std::vector<float> queries, keys, values;
  dice& random() { return dice_; }

 private:
  void fill(std::vector<float>& rows, int heads, float size) {
    for (int i = 0; i < heads * c_->options.head_dim; ++i) rows.push_back(size * dice_.normal());
  }
  const random_case* c_;
  dice dice_;
  std::vector<float> query_, centre_;
};

/// The oracle's settings for the same layer, or for each of several, which are alike.
inline oracle::settings oracle_settings(const random_case& c) {
  const auto& o = c.options;
  oracle::settings s;
  s.read_back = read_back(c.with_basis());
  s.pinned = o.method.pinning == "pin_outliers" ? o.method.pinned : 0;
  s.query_heads = o.query_heads;
  s.kv_heads = o.kv_heads;
  s.head_dim = o.head_dim;
  s.page = o.page;
  s.sink = o.budget.sink;
  s.window = o.budget.window;
  s.selected_units = o.budget.selected_units;
  s.scale = o.scale == 0.0f ? oracle::default_scale(o.head_dim) : static_cast<double>(o.scale);
  s.summary = freekv::examples::find_by_name("summaries", oracle_summaries, o.method.summary).value;
  s.element = o.element == data_type::f32   ? oracle::element_kind::f32
              : o.element == data_type::f16 ? oracle::element_kind::f16
                                            : oracle::element_kind::bf16;
  s.format = freekv::examples::find_by_name("formats", oracle_formats, o.method.format).value;
  s.chunk = o.method.chunk;
  s.bits =
      o.method.summary == "coarse_to_fine" ? 4 : o.method.bits;  // of the list's: min_max, then key_sketch<4>
  s.tables = o.method.tables;
  s.times = o.method.times;
  s.pooling = freekv::examples::find_by_name("poolings", oracle_poolings, o.method.pooling).value;
  s.selection = freekv::examples::find_by_name("selections", oracle_selections, o.method.selection).value;
  s.top_p = static_cast<double>(o.method.top_p);
  if (const auto temperatures = c.with_basis().temperatures; temperatures.data != nullptr)
    s.temperatures.assign(temperatures.data, temperatures.data + o.kv_heads);
  s.bonus = static_cast<double>(o.method.bonus);
  s.rows = freekv::examples::find_by_name("selection_scopes", oracle_scopes, o.method.rows).value;
  s.correction = freekv::examples::find_by_name("corrections", oracle_corrections, o.method.correction).value;
  s.tau = static_cast<double>(o.method.tau);
  s.drift_pool = freekv::examples::find_by_name("drift_pools", oracle_drift_pools, o.method.drift_pool).value;
  s.delta = static_cast<double>(o.method.delta);
  s.partial = o.method.partial;
  s.every = o.method.every;
  s.residency = freekv::examples::find_by_name("residencies", oracle_residencies, o.method.residency).value;
  s.spare = o.method.spare;
  s.sliding_window = o.sliding_window;
  s.soft_cap = static_cast<double>(o.soft_cap);
  s.selection_scale = static_cast<double>(o.method.selection_scale);
  const auto sinks =
      std::span(o.sink_logits).first(o.sink_logits.empty() ? 0 : static_cast<std::size_t>(o.query_heads));
  s.sink_logits.assign(sinks.begin(), sinks.end());
  s.max_rows = o.max_decode_rows;
  s.unit = o.method.unit;
  s.kind = o.method.plan == "complete"  ? oracle::layer_kind::complete
           : o.method.plan == "window"  ? oracle::layer_kind::window
           : o.method.plan == "sliding" ? oracle::layer_kind::sliding
                                        : oracle::layer_kind::retrieval;
  if (o.method.plan == "by_head")
    for (const auto kind : std::span(o.head_kinds).first(static_cast<std::size_t>(o.kv_heads)))
      s.head_kinds.push_back(kind == freekv::layer_kind::retrieval  ? oracle::layer_kind::retrieval
                             : kind == freekv::layer_kind::complete ? oracle::layer_kind::complete
                                                                    : oracle::layer_kind::window);
  s.route = o.in_place ? oracle::route_kind::in_place : oracle::route_kind::resident;
  const auto view = c.with_basis().basis;
  for (int head = 0; head < o.kv_heads; ++head)
    s.bases.push_back({{view.mean(0, head), view.mean(0, head) + o.head_dim},
                       {view.rows(0, head), view.rows(0, head) + view.rank * o.head_dim}});
  if (o.method.summary != "key_codes") return s;
  const auto books = c.with_basis().codebooks;
  const auto as_oracle = [](const freekv::codebook& b) {
    const int rows = b.codes * b.dims;
    return oracle::codebook{.groups = b.codes,
                            .dims = b.dims,
                            .offset = {b.offset, b.offset + b.head_dim},
                            .rows = {b.rows, b.rows + rows * b.head_dim},
                            .centroids = {b.centroids, b.centroids + rows * 256}};
  };
  for (int head = 0; head < o.kv_heads; ++head)
    s.key_codebooks.push_back({as_oracle(books.mean(0, head)), as_oracle(books.token(0, head))});
  return s;
}

}  // namespace tests
