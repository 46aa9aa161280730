// What one layer of one sequence is asked to do: shapes, budget and policies.
#pragma once

#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace oracle {

enum class summary_kind { min_max, chunk_means, key_subspace };
enum class correction_kind { cosine_drift, always, never };
enum class layer_kind { retrieval, complete, window };  // window: sink and window pages, nothing selected
enum class route_kind { resident, in_place };  // in_place: attention reads the store, nothing is recalled

/// One KV head's subspace of the keys: `mean` is (d), `rows` is (r, d) with orthonormal rows.
struct basis {
  std::vector<double> mean;
  std::vector<double> rows;
};

struct settings {
  int query_heads = 1;     // n_qo
  int kv_heads = 1;        // n_kv
  int head_dim = 1;        // d
  int page = 1;            // p, tokens
  int sink = 0;            // S, tokens, a multiple of p
  int window = 1;          // W, tokens, a multiple of p and at least p
  int selected_pages = 1;  // k, pages per KV head
  double scale = 0.0;      // of attention and of page scores; see default_scale
  summary_kind summary = summary_kind::min_max;
  int chunk = 1;                  // u of chunk_means, tokens, divides p
  int bits = 32;                  // of key_subspace: 2, 3, 4, 8, or 32 for unquantised
  std::vector<basis> bases = {};  // of key_subspace: one per KV head
  correction_kind correction = correction_kind::cosine_drift;
  double tau = 0.9;
  layer_kind kind = layer_kind::retrieval;
  route_kind route = route_kind::resident;
};

inline double default_scale(int head_dim) { return 1.0 / std::sqrt(static_cast<double>(head_dim)); }

inline int group_size(const settings& s) { return s.query_heads / s.kv_heads; }

inline void require(bool holds, const std::string& sentence) {
  if (!holds) throw std::invalid_argument("oracle: " + sentence);
}

/// Throws std::invalid_argument for a configuration the specification does not define.
inline void check(const settings& s) {
  require(s.head_dim >= 1 && s.kv_heads >= 1 && s.query_heads >= 1, "shapes are at least 1");
  require(s.query_heads % s.kv_heads == 0, "kv_heads divides query_heads");
  require(s.page >= 1, "a page holds at least one token");
  require(s.sink >= 0 && s.sink % s.page == 0, "sink is a multiple of the page");
  require(s.window >= s.page && s.window % s.page == 0,
          "window is a multiple of the page, at least one page");
  require(s.selected_pages >= 1, "at least one page is selected");
  require(s.scale > 0.0, "scale is positive; default_scale gives the usual one");
  if (s.kind != layer_kind::retrieval) return;
  if (s.summary == summary_kind::chunk_means)
    require(s.chunk >= 1 && s.page % s.chunk == 0, "chunk divides the page");
  if (s.summary == summary_kind::key_subspace) {
    require(s.bits == 2 || s.bits == 3 || s.bits == 4 || s.bits == 8 || s.bits == 32,
            "bits is 2, 3, 4, 8 or 32");
    require(s.bases.size() == static_cast<std::size_t>(s.kv_heads), "one basis per KV head");
    const auto d = static_cast<std::size_t>(s.head_dim);
    for (const basis& b : s.bases) {
      require(b.mean.size() == d, "a basis' mean has head_dim elements");
      require(!b.rows.empty() && b.rows.size() % d == 0, "a basis has whole rows of head_dim elements");
    }
  }
}

}  // namespace oracle
