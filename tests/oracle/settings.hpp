// What one layer of one sequence is asked to do: shapes, budget and policies.
#pragma once

#include <cmath>
#include <cstddef>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace oracle {

enum class summary_kind {
  min_max,
  chunk_means,
  key_subspace,
  mean,
  centroid_box,
  ball,
  key_sketch,
  key_codes,
  key_clusters,
  key_signatures,
  coarse_to_fine
};
enum class correction_kind { cosine_drift, always, never, every_n_steps, mass_deficit };
enum class layer_kind {
  retrieval,
  complete,
  window,  // sink and window pages, nothing selected
  sliding  // the last `sliding_window` tokens; of all heads
};
enum class route_kind { resident, in_place };  // in_place: attention reads the store, nothing is recalled
enum class element_kind { f32, f16, bf16 };
enum class pooling_kind { mean_softmax, max_softmax, mean_score, max_score, mean_query, max_query };
enum class selection_kind { top_k, top_p, sticky_top_k, colliding };
enum class scope_kind { kv_head, query_head, layer };  // who shares one selection
enum class drift_pool_kind { mean, min, max };
enum class residency_kind { first_unselected, least_recently_used };  // who is evicted first

/// How a summary's numbers are kept. `standard` is the policy's own choice: the key's type for min_max,
/// float32 for the others. key_subspace, key_sketch, key_codes, key_clusters and key_signatures have codes of
/// their own and ignore this, and what coarse_to_fine is made of is `standard`.
enum class stored_format { standard, key, float32, int8 };

/// One KV head's subspace of the keys: `mean` is (d), `rows` is (r, d) with orthonormal rows; of key_clusters
/// the rows are centroids, and the mean is unused; of key_signatures the rows are hyperplanes.
struct basis {
  std::vector<double> mean;
  std::vector<double> rows;
};

inline constexpr int codes_per_group = 256;

/// Centroids for vectors of head_dim elements: `groups` times `dims` coefficients of a vector less `offset`,
/// each group of them with centroids of its own.
struct codebook {
  int groups = 1;
  int dims = 1;
  std::vector<double> offset = {};      // (d)
  std::vector<double> rows = {};        // (groups * dims, d), orthonormal
  std::vector<double> centroids = {};   // (groups, dims, 256)
  int used_in_first = codes_per_group;  // only the first so many centroids of group 0 may be chosen
};

/// One KV head's codebooks: of a page's mean key, and of what its keys add to the decoded mean. Whatever
/// `used_in_first` says, code 255 of the mean's group 0 is reserved.
struct codebooks {
  codebook mean;
  codebook token;
};

struct settings {
  int query_heads = 1;     // n_qo
  int kv_heads = 1;        // n_kv
  int head_dim = 1;        // d
  int page = 1;            // p, tokens
  int unit = 0;            // u, tokens that are selected together, divides p; 0: p
  int sink = 0;            // S, tokens, a multiple of p
  int window = 1;          // W, tokens, a multiple of p and at least p
  int selected_units = 1;  // k, units per row
  double scale = 0.0;      // of attention and of page scores; see default_scale
  summary_kind summary = summary_kind::min_max;
  int chunk = 1;  // u of chunk_means, tokens, divides p
  int bits =
      32;  // of key_subspace: 2, 3, 4, 8, or 32 for unquantised; of key_sketch: 1, 2, 4; of key_signatures
  int tables = 2;                 // of key_signatures
  std::vector<basis> bases = {};  // of key_subspace, key_clusters and key_signatures: one per KV head
  correction_kind correction = correction_kind::cosine_drift;
  double tau = 0.9;
  layer_kind kind = layer_kind::retrieval;
  route_kind route = route_kind::resident;
  element_kind element = element_kind::f32;  // the key's type; keys are given as it holds them
  stored_format format = stored_format::standard;
  pooling_kind pooling = pooling_kind::mean_softmax;
  selection_kind selection = selection_kind::top_k;
  double top_p = 0.9;                                  // P, of top_p
  std::vector<double> temperatures{};                  // of top_p, by KV head; empty: 1
  double bonus = 0.0;                                  // of sticky_top_k
  drift_pool_kind drift_pool = drift_pool_kind::mean;  // of cosine_drift
  int every = 1;                                       // n of every_n_steps, decode steps
  double delta = 0.1;                                  // of mass_deficit
  bool partial = false;                                // of mass_deficit
  int spare = 0;                                       // c, slots per KV head beyond k
  residency_kind residency = residency_kind::first_unselected;
  std::vector<layer_kind> head_kinds = {};    // one per KV head; empty: all heads are of `kind`
  std::vector<codebooks> key_codebooks = {};  // of key_codes: one per KV head
  // Of coarse_to_fine: the two summaries, and how many times k candidates the fine one scores.
  summary_kind coarse = summary_kind::min_max, fine = summary_kind::key_sketch;
  int times = 4;
  // What comes back of the keys and values of a complete page, per KV head (p, d), from the store of a layer
  // that does not keep everything; nothing: what was appended.
  std::function<void(int page, std::vector<std::vector<float>>& keys,
                     std::vector<std::vector<float>>& values)>
      read_back = nullptr;
  int max_rows = 1;                      // the most decode rows that one step may append
  // Units of stored keys and values, which are what a decoder is given; one per KV head, empty: 1.
  std::vector<double> key_scales = {}, value_scales = {};
  int sliding_window = 0;                // tokens
  double selection_scale = 0.0;          // of scores that units are selected by; 0: `scale`
  double soft_cap = 0.0;                 // scores become soft_cap * tanh(score / soft_cap); 0: none
  std::vector<double> sink_logits = {};  // one per query head, of a token without a value; empty: none
  scope_kind rows = scope_kind::kv_head;
  int pinned =
      0;  // units of a KV head that are selected whatever their scores: those whose keys are least alike
};

inline double default_scale(int head_dim) { return 1.0 / std::sqrt(static_cast<double>(head_dim)); }

/// A layer that has only one of the two summaries of coarse_to_fine.
inline settings with_summary(settings s, summary_kind summary) {
  s.summary = summary;
  s.format = stored_format::standard;
  return s;
}

/// The scale of a KV head's keys, or values.
inline double scale_of(const std::vector<double>& scales, int kv_head) {
  return scales.empty() ? 1.0 : scales[static_cast<std::size_t>(kv_head)];
}

/// Of scores of queries on stored keys.
inline double selection_scale(const settings& s, int kv_head) {
  return (s.selection_scale == 0.0 ? s.scale : s.selection_scale) * scale_of(s.key_scales, kv_head);
}

inline int unit_tokens(const settings& s) { return s.unit == 0 ? s.page : s.unit; }

inline int group_size(const settings& s) { return s.query_heads / s.kv_heads; }

inline layer_kind kind_of(const settings& s, int kv_head) {
  return s.head_kinds.empty() ? s.kind : s.head_kinds[kv_head];
}

inline bool retrieves(const settings& s, int kv_head) { return kind_of(s, kv_head) == layer_kind::retrieval; }

inline void require(bool holds, const std::string& sentence) {
  if (!holds) throw std::invalid_argument("oracle: " + sentence);
}

inline void check_codebook(const codebook& b, int head_dim) {
  require(b.groups >= 1 && b.dims >= 1, "a codebook has at least one group of at least one dimension");
  require(b.dims <= head_dim && b.groups <= head_dim / b.dims,
          "a codebook has no more coefficients than head_dim");
  const auto d = static_cast<std::size_t>(head_dim);
  const std::size_t rank = static_cast<std::size_t>(b.groups) * static_cast<std::size_t>(b.dims);
  require(b.offset.size() == d, "a codebook's offset has head_dim elements");
  require(b.rows.size() == rank * d, "a codebook's rows are (groups * dims, head_dim)");
  require(b.centroids.size() == rank * codes_per_group, "a codebook's centroids are (groups, dims, 256)");
  require(b.used_in_first >= 1 && b.used_in_first <= codes_per_group,
          "1 to 256 centroids of a codebook's first group may be chosen");
}

inline void check_summary(const settings& s) {
  if (s.summary == summary_kind::coarse_to_fine) {
    require(s.times >= 1, "candidates for the fine summary are k or more");
    for (summary_kind stage : {s.coarse, s.fine}) {
      require(stage != summary_kind::coarse_to_fine, "coarse_to_fine has two stages");
      check_summary(with_summary(s, stage));
    }
    return;
  }
  if (s.summary == summary_kind::chunk_means)
    require(s.chunk >= 1 && unit_tokens(s) % s.chunk == 0, "chunk divides the unit");
  if (s.summary == summary_kind::key_sketch)
    require(s.bits == 1 || s.bits == 2 || s.bits == 4, "bits of key_sketch is 1, 2 or 4");
  if (s.summary == summary_kind::key_codes) {
    require(s.key_codebooks.size() == static_cast<std::size_t>(s.kv_heads), "one codebooks per KV head");
    for (const codebooks& books : s.key_codebooks) {
      check_codebook(books.mean, s.head_dim);
      check_codebook(books.token, s.head_dim);
    }
  }
  const bool of_signatures = s.summary == summary_kind::key_signatures;
  if (s.summary != summary_kind::key_subspace && s.summary != summary_kind::key_clusters && !of_signatures)
    return;
  if (of_signatures) require(s.bits >= 1 && s.tables >= 2, "signatures have bits, in two tables or more");
  require(of_signatures || s.summary == summary_kind::key_clusters || s.bits == 2 || s.bits == 3 ||
              s.bits == 4 || s.bits == 8 || s.bits == 32,
          "bits is 2, 3, 4, 8 or 32");
  require(s.bases.size() == static_cast<std::size_t>(s.kv_heads), "one basis per KV head");
  const auto d = static_cast<std::size_t>(s.head_dim);
  for (const basis& b : s.bases) {
    require(b.mean.size() == d, "a basis' mean has head_dim elements");
    require(!b.rows.empty() && b.rows.size() % d == 0, "a basis has whole rows of head_dim elements");
    require(!of_signatures || b.rows.size() / d >= static_cast<std::size_t>(s.bits * s.tables),
            "each bit of a signature has a hyperplane");
  }
}

/// Throws std::invalid_argument for a configuration that docs/contract.md does not define.
inline void check(const settings& s) {
  require(s.head_dim >= 1 && s.kv_heads >= 1 && s.query_heads >= 1, "shapes are at least 1");
  require(s.query_heads % s.kv_heads == 0, "kv_heads divides query_heads");
  require(s.page >= 1, "a page holds at least one token");
  require(s.unit >= 0 && s.page % unit_tokens(s) == 0, "unit divides the page");
  require(s.sink >= 0 && s.sink % s.page == 0, "sink is a multiple of the page");
  require(s.window >= s.page && s.window % s.page == 0,
          "window is a multiple of the page, at least one page");
  require(s.selected_units >= 1, "at least one page is selected");
  require(s.max_rows >= 1, "a step may append at least one row");
  require(s.scale > 0.0, "scale is positive; default_scale gives the usual one");
  require(s.selection_scale >= 0.0, "selection_scale is positive, or 0 for `scale`");
  require(s.head_kinds.empty() || s.head_kinds.size() == static_cast<std::size_t>(s.kv_heads),
          "head_kinds is empty or has one kind per KV head");
  require(s.kind != layer_kind::sliding || s.sliding_window >= 1, "a sliding window has at least one token");
  require(s.soft_cap >= 0.0, "a soft cap is not negative");
  for (const std::vector<double>* scales : {&s.key_scales, &s.value_scales})
    require(scales->empty() || scales->size() == static_cast<std::size_t>(s.kv_heads),
            "scales are none or one for each KV head");
  require(s.sink_logits.empty() || s.sink_logits.size() == static_cast<std::size_t>(s.query_heads),
          "sink_logits is empty or has one number per query head");
  bool any = false;
  for (int kv_head = 0; kv_head < s.kv_heads; ++kv_head) any = any || retrieves(s, kv_head);
  if (!any) return;
  require(s.spare >= 0, "spare slots are not negative");
  if (s.selection == selection_kind::top_p)
    require(s.top_p >= 0.0 && s.top_p <= 1.0, "top_p is a share of the mass, from 0 to 1");
  require(s.temperatures.empty() || s.temperatures.size() == static_cast<std::size_t>(s.kv_heads),
          "temperatures are none or one for each KV head");
  for (double temperature : s.temperatures) require(temperature > 0.0, "temperatures are above 0");
  require(s.temperatures.empty() || s.rows != scope_kind::layer,
          "KV heads that select together have no temperature each");
  require(s.bonus >= 0.0, "a bonus is not negative");
  if (s.correction == correction_kind::every_n_steps) require(s.every >= 1, "every is at least one step");
  require(s.pinned >= 0, "pinned units are not negative");
  require(s.pinned == 0 || s.rows != scope_kind::layer, "KV heads pin each their own units");
  require(s.rows != scope_kind::query_head || s.correction != correction_kind::mass_deficit,
          "mass_deficit judges what a KV head's query heads select together");
  if (s.correction == correction_kind::mass_deficit)
    require(s.delta >= 0.0 && s.delta <= 1.0, "delta is a share of the best mass, from 0 to 1");
  if (s.selection == selection_kind::colliding) {
    require(s.summary == summary_kind::key_signatures && unit_tokens(s) == 1 &&
                s.rows == scope_kind::query_head && s.correction == correction_kind::always &&
                s.max_rows == 1 && s.pinned == 0,
            "each query head samples single tokens by their signatures, in every step");
    require(s.pooling != pooling_kind::mean_softmax && s.pooling != pooling_kind::max_softmax,
            "collisions are counted, and not their shares");
  }
  check_summary(s);
}

/// The temperature of a KV head's scores.
inline double temperature_of(const settings& s, int kv_head) {
  return s.temperatures.empty() ? 1.0 : s.temperatures[static_cast<std::size_t>(kv_head)];
}

}  // namespace oracle
