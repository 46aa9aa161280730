// Clusters of keys, from anywhere in the text: a unit is as good as its cluster's centroid.
#pragma once

#include <cmath>
#include <freekv/core/size.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/policies/mean_summaries.hpp>

namespace freekv {

/// The number of the cluster that a unit is in: of centroids given as `basis.rows` (clusters, head_dim), in
/// any order, with `basis.mean` unused, the one of largest cosine with the unit's mean key, of those alike
/// the first; one of zeros is no unit's, but where all are, which are then in cluster 0. The score is
/// `scale * <q, centroid>`: units of a cluster are selected together, those of a cluster that k divides first
/// in the text. 4 bytes a unit. A unit with a key that is not finite, or whose product with a centroid
/// overflows float32, scores NaN. (ClusterKV, arXiv 2412.03213)
struct key_clusters {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::at, hook::data, hook::prepare, hook::query_width, hook::validate>;
  static constexpr std::string_view name = "key_clusters";
  subspace_basis basis{};

  FREEKV_HD constexpr int width(kv_extent) const { return 1; }
  FREEKV_HD constexpr int query_width(int) const { return basis.rank; }

  template <class Visit>
  void data(const Visit& visit) const {
    visit(basis.data, basis.bytes());
  }
  void validate(const summary_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (basis.data == nullptr)
      throw settings_error(
          "key_clusters needs its centroids as data: find clusters of the prompt's keys or a text's");
    if (basis.rank < 1 || basis.head_dim != s.unit.head_dim || basis.layers < s.layers ||
        basis.kv_heads != s.kv_heads)
      throw settings_error("key_clusters: the centroids are " + text(basis.rank) + " for each of " +
                           text(basis.layers) + " layers of " + text(basis.kv_heads) + " heads, head_dim " +
                           text(basis.head_dim) + "; needed are 1 or more for " + text(s.layers) +
                           " layers of " + text(s.kv_heads) + " heads, head_dim " + text(s.unit.head_dim));
  }

  /// The policy for one head.
  struct head_policy {
    const float* centroids;
    int clusters;

    FREEKV_HD constexpr int width(kv_extent) const { return 1; }
    FREEKV_HD constexpr int query_width(int) const { return clusters; }

    /// The query's products with all centroids.
    template <team T>
    FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
      for (int c = 0; c < clusters; ++c) {
        const float product =
            detail::inner_product(team, centroids + c * query.head_dim, query.data, query.head_dim);
        if (team.lane() == 0) prepared[c] = product;
      }
    }

    template <team T>
    FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
      using pack = typename T::pack;
      const int d = keys.unit.head_dim;
      int nearest = 0;
      float most = -infinity;
      bool finite = true;
      for (int c = 0; c < clusters; ++c) {
        const float* const centroid = centroids + c * d;
        pack products(0.0f), squares(0.0f);
        for (int i = 0; i < d; i += T::width) {
          const pack of_centroid = team.load(centroid + i);
          squares = squares + of_centroid * of_centroid;
          for (int t = 0; t < keys.unit.tokens; ++t)
            products = products + team.load(keys.row(t) + i) * of_centroid;
        }
        const float product = team.sum(products), length = sqrtf(team.sum(squares));
        finite = finite && product - product == 0.0f;
        if (length > 0.0f && product / length > most) most = product / length, nearest = c;
      }
      numbers[0] = finite ? static_cast<float>(nearest) : NAN;
    }

    template <team T>
    FREEKV_HD float score(T, const unit_query& query, const float* numbers) const {
      const float cluster = numbers[0];
      return cluster == cluster ? query.scale * query.data[static_cast<int>(cluster)] : cluster;
    }
  };
  FREEKV_HD constexpr head_policy at(int layer, int head) const {
    return {basis.rows(layer, head), basis.rank};
  }
};

static_assert(summary_policy<key_clusters>);

}  // namespace freekv
