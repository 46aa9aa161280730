// The codebooks of key_codes: learnt from keys by k-means, kept as a safetensors file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <freekv/policies/key_codes.hpp>
#include <span>
#include <vector>

namespace freekv::examples {

/// Shapes of codebooks, and the page whose means they are for.
struct codebook_sizes {
  int codes = 6;       ///< of a token; 1 to head_dim
  int dims = 5;        ///< of a code; fewer where codes * dims would be more than head_dim
  int mean_codes = 8;  ///< of a page's mean; 1 to head_dim
  int mean_dims = 4;
  int page = 32;  ///< tokens

  /// About 32 dimensions in all: 6 codes of 5, 4 of 8, 8 of 4. With a head_dim beyond 64, half of it, in
  /// codes of 5 at most: 12 of 128, 24 of 256.
  static codebook_sizes of_codes(int codes, int head_dim, int page = 32) {
    const int wanted = std::max(32, head_dim / 2) / codes;
    return {.codes = codes, .dims = std::clamp(wanted, 1, std::max(5, 32 / codes)), .page = page};
  }
};

/// Codebooks for all layers and KV heads of a model.
class codebook_set {
 public:
  /// Room for `layers` of `kv_heads`; all zeros.
  codebook_set(int layers, int kv_heads, int head_dim, const codebook_sizes& sizes = {});

  /// Sets one layer from its keys (tokens, kv_heads, head_dim), page by page from the first token. Per KV
  /// head: the codebook of means from the means of `page` consecutive keys at eight offsets a page; that of
  /// tokens from each key's difference from its page's mean as decoded. Each has the leading principal axes,
  /// in groups of equal size and about equal product of variances, and each group its 256 centroids. Keys
  /// with a NaN or an infinity are left out; with no key at all the offsets and centroids are 0 and the rows
  /// are unit vectors. The same keys give the same codebooks, on processors with the same kind of
  /// multiply-add. Different layers may be learnt on different threads at once.
  void learn(int layer, std::span<const float> keys);

  /// What key_codes takes; valid while this object lives.
  key_codebooks view() const;
  /// One layer alone, as the only one.
  key_codebooks layer(int layer) const;

  /// Tensors, float32, each (layers, kv_heads, ...): `mean_offset` (head_dim), `mean_rows` (mean_codes *
  /// mean_dims, head_dim), `mean_centroids` (mean_codes, mean_dims, 256), and of tokens `offset` (head_dim),
  /// `rows` (codes * dims, head_dim), `centroids` (codes, dims, 256). Both throw file_error.
  void save(const std::filesystem::path& path) const;
  static codebook_set load(const std::filesystem::path& path);

 private:
  int layers_, kv_heads_, head_dim_;
  codebook_sizes sizes_;
  std::vector<float> data_;  // as key_codebooks has it
};

/// `used` centroids (1 to 256) of `samples` (count, dims), as (dims, 256), zeros behind the used ones: 4
/// rounds of Lloyd's algorithm after a k-means++ start. In all but the last a centroid goes on behind its
/// samples' mean by 0.8 of its step, which has less error than 6 rounds to the mean. Fewer samples than
/// centroids are repeated; without any all is 0.
std::vector<float> k_means(std::span<const float> samples, int dims, int used, std::uint64_t seed);

/// Divides dimensions, given by their variances in falling order, into `groups` of equal size: each goes to
/// the group with room that has the least sum of ln(variance / the least). The dimensions group after group.
std::vector<int> balanced_groups(std::span<const double> variances, int groups);

}  // namespace freekv::examples
