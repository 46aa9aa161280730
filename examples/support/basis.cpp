#include "basis.hpp"

#include <algorithm>
#include <freekv/core/size.hpp>
#include <string>

#include "cited.hpp"
#include "principal_axes.hpp"
#include "safetensors.hpp"

namespace freekv::examples {

key_basis::key_basis(int layers, int kv_heads, int rank, int head_dim)
    : layers_(layers), kv_heads_(kv_heads), rank_(rank), head_dim_(head_dim) {
  data_.resize(to_size(layers * kv_heads) * view().floats_per_head());
}

subspace_basis key_basis::layer(int layer) const {
  return {view().mean(layer, 0), 1, kv_heads_, rank_, head_dim_};
}

void key_basis::learn(int layer, std::span<const float> keys) {
  for (int head = 0; head < kv_heads_; ++head) {
    const principal_axes axes =
        principal_axes_of(keys, head * head_dim_, kv_heads_ * head_dim_, head_dim_, rank_);
    float* to = data_.data() + to_size(layer * kv_heads_ + head) * view().floats_per_head();
    to = std::copy(axes.mean.begin(), axes.mean.end(), to);
    std::copy(axes.rows.begin(), axes.rows.end(), to);
  }
}

void key_basis::factorise(int layer, std::span<const float> keys) {
  const principal_axes axes = singular_axes_of(keys, kv_heads_ * head_dim_, rank_);
  const auto d = static_cast<std::ptrdiff_t>(head_dim_);
  for (int head = 0; head < kv_heads_; ++head) {
    float* to = data_.data() + to_size(layer * kv_heads_ + head) * view().floats_per_head();
    to = std::fill_n(to, d, 0.0f);
    for (int r = 0; r < rank_; ++r)
      to = std::copy_n(axes.rows.begin() + (std::ptrdiff_t{r} * kv_heads_ + head) * d, d, to);
  }
}

void key_basis::save(const std::filesystem::path& path) const {
  std::vector<float> means, rows;
  for (int layer = 0; layer < layers_; ++layer)
    for (int head = 0; head < kv_heads_; ++head) {
      means.insert(means.end(), view().mean(layer, head), view().rows(layer, head));
      rows.insert(rows.end(), view().rows(layer, head), view().mean(layer, head) + view().floats_per_head());
    }
  write_safetensors(path, {.tensors = {{.name = "mean",
                                        .shape = {layers_, kv_heads_, head_dim_},
                                        .bytes = std::as_bytes(std::span(means))},
                                       {.name = "rows",
                                        .shape = {layers_, kv_heads_, rank_, head_dim_},
                                        .bytes = std::as_bytes(std::span(rows))}},
                           .metadata = {{"content", "FreeKV key_subspace basis"}}});
}

key_basis key_basis::load(const std::filesystem::path& path) {
  const safetensors_file file(path);
  const auto& mean = file.at("mean").shape;
  const auto& rows = file.at("rows").shape;
  const auto fits = [](std::int64_t n) { return n >= 1 && n <= 1 << 20; };
  if (mean.size() != 3 || rows.size() != 4 || mean[0] != rows[0] || mean[1] != rows[1] ||
      mean[2] != rows[3] || !std::all_of(rows.begin(), rows.end(), fits))
    throw file_error(cited_path(path) +
                     " is no key_subspace basis: mean must be (layers, kv_heads, head_dim) and rows (layers, "
                     "kv_heads, rank, head_dim); make one with freekv-basis");
  const std::vector<float> means = file.copy_as_float("mean"), all_rows = file.copy_as_float("rows");
  key_basis basis(static_cast<int>(rows[0]), static_cast<int>(rows[1]), static_cast<int>(rows[2]),
                  static_cast<int>(rows[3]));
  const auto d = to_size(basis.head_dim_), r = d * to_size(basis.rank_);
  auto* to = basis.data_.data();
  for (std::size_t head = 0; head * d < means.size(); ++head) {
    to = std::copy_n(means.data() + head * d, d, to);
    to = std::copy_n(all_rows.data() + head * r, r, to);
  }
  return basis;
}

}  // namespace freekv::examples
