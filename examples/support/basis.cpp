#include "basis.hpp"

#include <algorithm>
#include <cmath>
#include <freekv/backend/host/isa.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/key_clusters.hpp>
#include <freekv/policies/key_signatures.hpp>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "cited.hpp"
#include "principal_axes.hpp"
#include "safetensors.hpp"

namespace freekv::examples {

namespace {

/// The best of some scores: those above the least of them, and the first that equal it.
class best_scores {
 public:
  best_scores(std::span<const float> scores, int count, std::vector<float>& scratch) {
    scratch.assign(scores.begin(), scores.end());
    const auto last = scratch.begin() + count - 1;
    std::nth_element(scratch.begin(), last, scratch.end(), std::greater<>());
    least_ = *last;
    equal_ =
        count - static_cast<int>(std::count_if(scratch.begin(), last, [&](float x) { return x > least_; }));
  }
  /// Asked of every score in turn.
  bool has(float score) { return score > least_ || (score == least_ && equal_-- > 0); }

 private:
  float least_;
  int equal_;
};

}  // namespace

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

void key_basis::choose_pairs(int layer, std::span<const float> keys, std::span<const float> queries, int rows,
                             rotary_pairs of) {
  const int d = head_dim_, pairs = d / 2, key_row = kv_heads_ * d,
            tokens = static_cast<int>(keys.size()) / key_row;
  const int query_row = rows == 0 ? 0 : static_cast<int>(queries.size()) / rows, group = query_row / key_row;
  const rotary_embedding by{.pairs = pairs, .of = of};
  std::vector<float> scores(to_size((pairs + 1) * tokens)), scratch;  // of each pair, and of all
  for (int head = 0; head < kv_heads_; ++head) {
    std::vector<double> agreement(to_size(pairs));
    for (int row = 0; row < rows; ++row)
      for (int g = 0; g < group; ++g) {
        const float* const query = queries.data() + std::ptrdiff_t{row} * query_row + (head * group + g) * d;
        const int seen = tokens - rows + row + 1, best = (seen + 15) / 16;
        const auto scores_of = [&](int pair) {
          return std::span(scores).subspan(to_size(pair) * to_size(tokens), to_size(seen));
        };
        const std::span<float> whole = scores_of(pairs);
        std::fill(whole.begin(), whole.end(), 0.0f);
        for (int pair = 0; pair < pairs; ++pair) {
          const int a = by.by_pairs(2 * pair), b = by.by_pairs(2 * pair + 1);
          const std::span<float> alone = scores_of(pair);
          for (int t = 0; t < seen; ++t) {
            const float* const key = keys.data() + std::ptrdiff_t{t} * key_row + head * d;
            alone[to_size(t)] = query[a] * key[a] + query[b] * key[b];
            whole[to_size(t)] += alone[to_size(t)];
          }
        }
        for (float& score : scores)
          if (std::isnan(score)) score = -std::numeric_limits<float>::infinity();
        const best_scores of_whole(whole, best, scratch);
        for (int pair = 0; pair < pairs; ++pair) {
          const std::span<const float> alone = scores_of(pair);
          best_scores by_pair(alone, best, scratch), by_all = of_whole;
          int both = 0;
          for (std::size_t t = 0; t < to_size(seen); ++t)
            both += static_cast<int>(by_pair.has(alone[t])) & static_cast<int>(by_all.has(whole[t]));
          agreement[to_size(pair)] += static_cast<double>(both) / best;
        }
      }
    std::vector<int> order(to_size(pairs));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return agreement[to_size(a)] > agreement[to_size(b)]; });
    float* const to = data_.data() + to_size(layer * kv_heads_ + head) * view().floats_per_head();
    std::fill_n(to, view().floats_per_head(), 0.0f);
    for (int r = 0; r < rank_ / 2 * 2; ++r)
      to[(r + 1) * d + by.by_pairs(2 * order[to_size(r / 2)] + r % 2)] = 1.0f;
  }
}

void key_basis::cluster(int layer, std::span<const float> keys) {
  constexpr int left_out = 16, most_rounds = 20;
  const std::ptrdiff_t d = head_dim_, row = d * kv_heads_;
  const int tokens = static_cast<int>(std::ssize(keys) / row), first = tokens > left_out ? left_out : 0;
  std::vector<float> own;  // the head's, one behind the other
  std::vector<int> cluster_of;
  for (int head = 0; head < kv_heads_; ++head) {
    own.clear();
    for (int token = first; token < tokens; ++token) {
      const std::span<const float> key = keys.subspan(to_size(token * row + head * d), to_size(d));
      if (std::all_of(key.begin(), key.end(), [](float x) { return std::isfinite(x); }))
        own.insert(own.end(), key.begin(), key.end());
    }
    const std::ptrdiff_t count = std::ssize(own) / d;
    float* const to = data_.data() + to_size(layer * kv_heads_ + head) * view().floats_per_head();
    std::fill_n(to, view().floats_per_head(), 0.0f);
    float* const centroids = to + d;
    if (count == 0) continue;
    for (std::ptrdiff_t c = 0; c < rank_; ++c)
      std::copy_n(own.data() + c * count / rank_ * d, d, centroids + c * d);
    const key_clusters::head_policy clusters{centroids, rank_};
    cluster_of.assign(to_size(count), -1);
    std::vector<double> sums(to_size(rank_ * d));
    std::vector<int> sizes(to_size(rank_));
    for (int round = 0; round < most_rounds; ++round) {
      std::fill(sums.begin(), sums.end(), 0.0);
      std::fill(sizes.begin(), sizes.end(), 0);
      bool changed = false;
      for (std::ptrdiff_t i = 0; i < count; ++i) {
        const float* const key = own.data() + i * d;
        float number = 0.0f;
        host::with_team(host::best_isa(), [&](auto team) {
          clusters.summarise(team, unit_keys{key, {1, head_dim_}}, &number);
        });
        const int nearest = std::isnan(number) ? 0 : static_cast<int>(number);
        changed = std::exchange(cluster_of[to_size(i)], nearest) != nearest || changed;
        ++sizes[to_size(nearest)];
        for (std::ptrdiff_t x = 0; x < d; ++x) sums[to_size(nearest * d + x)] += static_cast<double>(key[x]);
      }
      if (!changed) break;
      for (std::ptrdiff_t c = 0; c < rank_; ++c)
        for (std::ptrdiff_t x = 0; sizes[to_size(c)] > 0 && x < d; ++x)
          centroids[c * d + x] = static_cast<float>(sums[to_size(c * d + x)] / sizes[to_size(c)]);
    }
  }
}

void key_basis::draw(int layer, std::span<const float> keys) {
  const std::ptrdiff_t d = head_dim_, row = d * kv_heads_;
  for (int head = 0; head < kv_heads_; ++head) {
    std::vector<double> sum(to_size(head_dim_));
    int counted = 0;
    for (std::ptrdiff_t first = head * d; first < std::ssize(keys); first += row) {
      const std::span<const float> key = keys.subspan(to_size(first), to_size(head_dim_));
      if (!std::all_of(key.begin(), key.end(), [](float x) { return std::isfinite(x); })) continue;
      ++counted;
      for (std::size_t i = 0; i < key.size(); ++i) sum[i] += static_cast<double>(key[i]);
    }
    const std::span<float> to(data_.data() + to_size(layer * kv_heads_ + head) * view().floats_per_head(),
                              view().floats_per_head());
    for (std::size_t i = 0; i < sum.size(); ++i)
      to[i] = counted == 0 ? 0.0f : static_cast<float>(sum[i] / counted);
    const auto seed = static_cast<std::uint64_t>(layer) << 32 | static_cast<std::uint64_t>(head);
    draw_hyperplanes(seed, to.subspan(to_size(head_dim_)));
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
