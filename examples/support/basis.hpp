// The bases of key_subspace, key_clusters, key_signatures and low_rank_keys: computed from keys, and but for
// the last kept as a safetensors file.
#pragma once

#include <filesystem>
#include <freekv/core/rotary.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <span>
#include <vector>

namespace freekv::examples {

/// Rows of a prompt, its last, whose queries choose the pairs of a basis.
inline constexpr int rows_that_choose = 16;

/// Mean keys and leading eigenvectors or hyperplanes, rotary pairs, or clusters' mean keys, for all layers
/// and KV heads of a model.
class key_basis {
 public:
  /// Room for `layers` of `kv_heads` subspaces of rank `rank`.
  key_basis(int layers, int kv_heads, int rank, int head_dim);

  /// Sets one layer from its keys (tokens, kv_heads, head_dim): per KV head the mean key and the `rank`
  /// leading eigenvectors of the keys' covariance. Keys with a NaN or an infinity are left out; with no key
  /// at all the mean is 0 and the rows are unit vectors.
  void learn(int layer, std::span<const float> keys);

  /// Sets one layer from its keys (tokens, kv_heads, head_dim) and the queries (rows, query_heads, head_dim)
  /// of its last `rows` tokens: per KV head unit vectors of the rotary pairs whose scores alone agree best
  /// with whole scores on which sixteenth of the tokens is the best, the best pair first; means are 0, and so
  /// is the last row of an odd rank. A score that is NaN is the least. (FASA)
  void choose_pairs(int layer, std::span<const float> keys, std::span<const float> queries, int rows,
                    rotary_pairs of);

  /// Sets one layer from its keys (tokens, kv_heads, head_dim): per KV head `rank` clusters' mean keys, by
  /// k-means of at most 20 rounds from keys at equal distances in the text, a key's cluster being the one of
  /// largest cosine; means are 0. The first 16 tokens, if there are more, and keys with a NaN or an infinity
  /// are left out; a cluster without keys is as it was. (ClusterKV)
  void cluster(int layer, std::span<const float> keys);

  /// Sets one layer from its keys (tokens, kv_heads, head_dim): per KV head the mean key, and `rank` random
  /// hyperplanes that do not depend on keys; those of a head begin with those of a smaller rank. Keys with a
  /// NaN or an infinity are left out; with no key at all the mean is 0. (MagicPIG)
  void draw(int layer, std::span<const float> keys);

  /// Sets one layer from its keys (tokens, kv_heads, head_dim) before rotation: the `rank` leading right
  /// singular vectors of the keys of all heads side by side; means are 0. Tokens with a NaN or an infinity
  /// are left out.
  void factorise(int layer, std::span<const float> keys);

  /// What key_subspace, key_clusters, key_signatures and low_rank_keys take; valid while this object lives.
  subspace_basis view() const { return {data_.data(), layers_, kv_heads_, rank_, head_dim_}; }
  /// One layer alone, as the only one.
  subspace_basis layer(int layer) const;

  /// Tensors `mean` (layers, kv_heads, head_dim) and `rows` (layers, kv_heads, rank, head_dim), float32. Both
  /// throw file_error.
  void save(const std::filesystem::path& path) const;
  static key_basis load(const std::filesystem::path& path);

 private:
  int layers_, kv_heads_, rank_, head_dim_;
  std::vector<float> data_;  // as subspace_basis has it
};

}  // namespace freekv::examples
