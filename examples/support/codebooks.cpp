#include "codebooks.hpp"

#include <algorithm>
#include <cmath>
#include <freekv/backend/host/isa.hpp>
#include <random>
#include <string>
#include <utility>

#include "cited.hpp"
#include "principal_axes.hpp"
#include "safetensors.hpp"

namespace freekv::examples {

namespace {

constexpr int all_centroids = codebook::centroids_per_code;
constexpr int lloyd_rounds = 7;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

/// What Lloyd's algorithm works on; `assign` fills in the last two.
struct clustering {
  std::span<const float> samples;  // (count, dims)
  int dims;
  std::vector<float> centroids = std::vector<float>(size(dims * all_centroids));  // (dims, 256)
  std::vector<float> half_norms = std::vector<float>(all_centroids);              // infinity: unused
  std::vector<int> nearest = std::vector<int>(count());
  std::vector<float> half_distances = std::vector<float>(count());  // squared, halved

  std::size_t count() const { return samples.size() / size(dims); }
};

/// The nearest centroid of every sample: the least |c|^2 / 2 - <x, c>. `Dims` 0: any.
template <int Dims, team T>
void assign(T team, clustering& to) {
  using pack = typename T::pack;
  constexpr int chains = 2;  // of comparisons that do not wait for each other
  const int dims = Dims > 0 ? Dims : to.dims;
  const float *centroids = to.centroids.data(), *half_norms = to.half_norms.data();
  float lanes[chains * T::width];
  for (int i = 0; i < chains * T::width; ++i) lanes[i] = static_cast<float>(i);
  for (std::size_t n = 0; n < to.count(); ++n) {
    const float* x = to.samples.data() + n * size(dims);
    pack least[chains], place[chains], index[chains];
    for (int k = 0; k < chains; ++k) {
      least[k] = place[k] = pack(infinity);
      index[k] = team.load(lanes + k * T::width);
    }
    for (int c = 0; c < all_centroids; c += chains * T::width)
      for (int k = 0; k < chains; ++k) {
        const int at = c + k * T::width;
        pack distance = team.load(half_norms + at);
        for (int d = 0; d < dims; ++d)
          distance = distance - pack(x[d]) * team.load(centroids + d * all_centroids + at);
        place[k] = team.select_greater(least[k], distance, index[k], place[k]);
        least[k] = team.select_greater(least[k], distance, distance, least[k]);
        index[k] = index[k] + pack(static_cast<float>(chains * T::width));
      }
    float distances[chains * T::width], places[chains * T::width];
    for (int k = 0; k < chains; ++k) {
      team.store(distances + k * T::width, least[k]);
      team.store(places + k * T::width, place[k]);
    }
    int best = 0;
    for (int i = 1; i < chains * T::width; ++i)
      if (distances[i] < distances[best] || (distances[i] == distances[best] && places[i] < places[best]))
        best = i;
    float half_norm = 0;
    for (int d = 0; d < dims; ++d) half_norm += 0.5f * x[d] * x[d];
    to.nearest[n] = places[best] < all_centroids ? static_cast<int>(places[best]) : 0;  // overflows have none
    to.half_distances[n] = half_norm + distances[best];
  }
}

void assign(clustering& to) {
  host::with_team(host::best_isa(), [&](auto team) {
    switch (to.dims) {
      case 4:
        return assign<4>(team, to);
      case 5:
        return assign<5>(team, to);
      case 8:
        return assign<8>(team, to);
      default:
        return assign<0>(team, to);
    }
  });
}

/// Chooses centroids among the samples, each with a probability proportional to its squared distance from those that
/// are chosen already (k-means++).
class seeding {
 public:
  seeding(clustering& of, std::uint64_t seed) : of_(of), random_(seed) {
    const std::size_t padded = (of.count() + block - 1) / block * block;
    by_dim_.resize(size(of.dims) * padded);
    for (std::size_t n = 0; n < of.count(); ++n)
      for (std::size_t d = 0; d < size(of.dims); ++d)
        by_dim_[d * padded + n] = of.samples[n * size(of.dims) + d];
    distances_.resize(padded);  // 0 behind the last sample
    std::fill_n(distances_.begin(), of.count(), infinity);
    sums_.resize(padded / block);
  }

  void choose(int used) {
    std::size_t sample = random_() % of_.count();
    for (int c = 0; c < used; ++c) {
      for (std::size_t d = 0; d < size(of_.dims); ++d)
        of_.centroids[d * all_centroids + size(c)] = of_.samples[sample * size(of_.dims) + d];
      host::with_team(host::best_isa(), [&](auto team) { measure(team, sample); });
      sample = next();
    }
  }

 private:
  static constexpr std::size_t block = 64;

  template <team T>
  void measure(T team, std::size_t sample) {
    using pack = typename T::pack;
    const float* x = of_.samples.data() + sample * size(of_.dims);
    for (std::size_t b = 0; b < sums_.size(); ++b) {
      pack sum(0.0f);
      for (std::size_t n = b * block; n < (b + 1) * block; n += T::width) {
        pack distance(0.0f);
        for (std::size_t d = 0; d < size(of_.dims); ++d) {
          const pack difference = team.load(by_dim_.data() + d * distances_.size() + n) - pack(x[d]);
          distance = distance + difference * difference;
        }
        const pack before = team.load(distances_.data() + n);
        distance = team.select_greater(before, distance, distance, before);
        team.store(distances_.data() + n, distance);
        sum = sum + distance;
      }
      sums_[b] = team.sum(sum);
    }
  }

  std::size_t next() {
    double total = 0;
    for (const float sum : sums_) total += static_cast<double>(sum);
    if (!(total > 0) || !std::isfinite(total)) return random_() % of_.count();
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
    std::size_t b = 0;
    while (b + 1 < sums_.size() && left >= static_cast<double>(sums_[b]))
      left -= static_cast<double>(sums_[b++]);
    std::size_t n = b * block, last = n;
    for (; n < std::min((b + 1) * block, of_.count()); ++n) {
      if (distances_[n] > 0) last = n;
      left -= static_cast<double>(distances_[n]);
      if (left < 0) break;
    }
    return last;
  }

  clustering& of_;
  std::mt19937_64 random_;
  std::vector<float> by_dim_;     // (dims, padded count)
  std::vector<float> distances_;  // (padded count), squared
  std::vector<float> sums_;       // of blocks of these
};

/// Moves the used centroids to the means of their samples.
void move_centroids(clustering& of, int used) {
  const std::size_t dims = size(of.dims);
  std::vector<double> sums(size(used) * dims);
  std::vector<double> counts(size(used));
  for (std::size_t n = 0; n < of.count(); ++n) {
    const std::size_t c = size(of.nearest[n]);
    ++counts[c];
    for (std::size_t d = 0; d < dims; ++d)
      sums[c * dims + d] += static_cast<double>(of.samples[n * dims + d]);
  }
  for (std::size_t c = 0; c < size(used); ++c) {
    if (counts[c] == 0) {  // it takes the sample that is represented worst
      const auto worst = std::max_element(of.half_distances.begin(), of.half_distances.end());
      *worst = -infinity;
      const auto n = static_cast<std::size_t>(worst - of.half_distances.begin());
      for (std::size_t d = 0; d < dims; ++d) of.centroids[d * all_centroids + c] = of.samples[n * dims + d];
      continue;
    }
    for (std::size_t d = 0; d < dims; ++d)
      of.centroids[d * all_centroids + c] = static_cast<float>(sums[c * dims + d] / counts[c]);
  }
}

/// The codebook of vectors (count, head_dim), all finite; the first code has `used` centroids.
void learn_codebook(std::span<const float> vectors, int codes, int dims, int head_dim, int used,
                    std::uint64_t seed, float* to) {
  const principal_axes axes = principal_axes_of(vectors, 0, head_dim, head_dim, codes * dims);
  float* rows = std::copy(axes.mean.begin(), axes.mean.end(), to);
  float* centroids = rows + codes * dims * head_dim;
  for (const int axis : balanced_groups(axes.variances, codes))
    rows = std::copy_n(axes.rows.data() + axis * head_dim, head_dim, rows);

  const codebook book = codebook::at(to, codes, dims, head_dim);
  const std::size_t count = vectors.size() / size(head_dim);
  std::vector<float> coefficients(count * size(codes * dims));
  host::with_team(host::best_isa(), [&](auto team) {
    for (std::size_t n = 0; n < count; ++n)
      book.project(team, vectors.data() + n * size(head_dim), coefficients.data() + n * size(codes * dims));
  });
  std::vector<float> samples(count * size(dims));
  for (int nth = 0; nth < codes; ++nth) {
    for (std::size_t n = 0; n < count; ++n)
      std::copy_n(coefficients.data() + n * size(codes * dims) + nth * dims, dims,
                  samples.data() + n * size(dims));
    const auto of_code = k_means(samples, dims, nth == 0 ? used : all_centroids, seed + size(nth));
    centroids = std::copy(of_code.begin(), of_code.end(), centroids);
  }
}

/// One head's keys, those that are not finite marked.
class head_keys {
 public:
  head_keys(std::span<const float> keys, int head, int kv_heads, int head_dim) : d_(size(head_dim)) {
    const std::size_t row = size(kv_heads) * d_;
    for (std::size_t at = size(head) * d_; at < keys.size(); at += row) {
      const auto key = keys.subspan(at, d_);
      finite_.push_back(std::all_of(key.begin(), key.end(), [](float x) { return std::isfinite(x); }));
      keys_.insert(keys_.end(), key.begin(), key.end());
    }
  }
  std::size_t count() const { return finite_.size(); }
  bool is_finite(std::size_t token) const { return finite_[token] != 0; }
  std::span<const float> operator[](std::size_t token) const {
    return std::span(keys_).subspan(token * d_, d_);
  }

  /// Appends the mean of the finite ones among `tokens` keys from `first`; nothing if there are none.
  bool append_mean(std::size_t first, std::size_t tokens, std::vector<float>& to) const {
    std::vector<double> sum(d_);
    double count = 0;
    for (std::size_t t = first; t < std::min(first + tokens, this->count()); ++t) {
      if (!is_finite(t)) continue;
      ++count;
      for (std::size_t i = 0; i < d_; ++i) sum[i] += static_cast<double>(keys_[t * d_ + i]);
    }
    if (count == 0) return false;
    for (const double s : sum) to.push_back(static_cast<float>(s / count));
    return true;
  }

 private:
  std::size_t d_;
  std::vector<float> keys_;
  std::vector<char> finite_;
};

/// Replaces a vector by what the codes of its nearest centroids stand for.
void through_codes(const codebook& book, int used, std::span<float> vector) {
  std::vector<float> coefficients(size(book.codes * book.dims));
  host::with_team(host::best_isa(), [&](auto team) {
    book.project(team, vector.data(), coefficients.data());
    std::copy_n(book.offset, vector.size(), vector.begin());
    for (int nth = 0; nth < book.codes; ++nth) {
      const int c =
          book.nearest(team, nth, coefficients.data() + nth * book.dims, nth == 0 ? used : all_centroids);
      for (int r = nth * book.dims; r < (nth + 1) * book.dims; ++r)
        for (std::size_t i = 0; i < vector.size(); ++i)
          vector[i] += book.rows[size(r) * vector.size() + i] * book.centroids[r * all_centroids + c];
    }
  });
}

}  // namespace

std::vector<float> k_means(std::span<const float> samples, int dims, int used, std::uint64_t seed) {
  clustering of{samples, dims};
  if (samples.empty()) return of.centroids;
  seeding(of, seed).choose(used);
  for (int round = 0; round < lloyd_rounds; ++round) {
    for (int c = 0; c < all_centroids; ++c) {
      float& half_norm = of.half_norms[size(c)] = c < used ? 0.0f : infinity;
      for (int d = 0; d < dims && c < used; ++d) {
        const float x = of.centroids[size(d * all_centroids + c)];
        half_norm += 0.5f * x * x;
      }
    }
    assign(of);
    move_centroids(of, used);
  }
  return of.centroids;
}

std::vector<int> balanced_groups(std::span<const double> variances, int groups) {
  const std::size_t room = variances.size() / size(groups);
  std::vector<std::vector<int>> members(size(groups));
  std::vector<double> sums(size(groups));
  for (std::size_t dim = 0; dim < room * size(groups); ++dim) {
    std::size_t to = 0;
    while (members[to].size() == room) ++to;
    for (std::size_t g = to + 1; g < size(groups); ++g)
      if (members[g].size() < room && sums[g] < sums[to]) to = g;
    members[to].push_back(static_cast<int>(dim));
    sums[to] += std::log(std::max(variances[dim], 1e-12));
  }
  std::vector<int> all;
  for (const auto& group : members) all.insert(all.end(), group.begin(), group.end());
  return all;
}

codebook_set::codebook_set(int layers, int kv_heads, int head_dim, const codebook_sizes& sizes)
    : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), sizes_(sizes) {
  sizes_.dims = std::min(sizes.dims, head_dim / sizes.codes);
  sizes_.mean_dims = std::min(sizes.mean_dims, head_dim / sizes.mean_codes);
  data_.resize(size(layers * kv_heads) * view().floats_per_head());
}

key_codebooks codebook_set::view() const {
  return {data_.data(),      layers_,          kv_heads_,    head_dim_,
          sizes_.mean_codes, sizes_.mean_dims, sizes_.codes, sizes_.dims};
}

key_codebooks codebook_set::layer(int layer) const {
  key_codebooks one = view();
  one.data = one.mean(layer, 0).offset;
  one.layers = 1;
  return one;
}

void codebook_set::learn(int layer, std::span<const float> keys) {
  constexpr int used = all_centroids - 1;  // of a mean's first code
  const std::size_t d = size(head_dim_), page = size(sizes_.page);
  for (int head = 0; head < kv_heads_; ++head) {
    float* to = data_.data() + size(layer * kv_heads_ + head) * view().floats_per_head();
    const auto seed = size(layer * kv_heads_ + head) * size(sizes_.mean_codes + sizes_.codes);
    const head_keys of_head(keys, head, kv_heads_, head_dim_);

    std::vector<float> means;
    for (std::size_t first = 0; first == 0 || first + page <= of_head.count(); first += 2)
      of_head.append_mean(first, page, means);
    learn_codebook(means, sizes_.mean_codes, sizes_.mean_dims, head_dim_, used, seed, to);

    std::vector<float> differences;
    for (std::size_t first = 0; first < of_head.count(); first += page) {
      std::vector<float> mean;
      if (!of_head.append_mean(first, page, mean)) continue;
      through_codes(view().mean(layer, head), used, mean);
      for (std::size_t t = first; t < std::min(first + page, of_head.count()); ++t)
        for (std::size_t i = 0; i < d && of_head.is_finite(t); ++i)
          differences.push_back(of_head[t][i] - mean[i]);
    }
    learn_codebook(differences, sizes_.codes, sizes_.dims, head_dim_, all_centroids,
                   seed + size(sizes_.mean_codes),
                   to + codebook::floats(sizes_.mean_codes, sizes_.mean_dims, head_dim_));
  }
}

namespace {

/// The tensors of a file in the order of key_codebooks' data, and their shapes without layers and KV heads.
struct named_part {
  const char* name;
  std::vector<std::int64_t> shape;
  std::size_t floats() const {
    std::size_t product = 1;
    for (const std::int64_t n : shape) product *= static_cast<std::size_t>(n);
    return product;
  }
};
std::vector<named_part> parts_of(const key_codebooks& books) {
  const std::int64_t d = books.head_dim, mean_codes = books.mean_codes, mean_dims = books.mean_dims;
  const std::int64_t codes = books.codes, dims = books.dims;
  return {{"mean_offset", {d}},
          {"mean_rows", {mean_codes * mean_dims, d}},
          {"mean_centroids", {mean_codes, mean_dims, all_centroids}},
          {"offset", {d}},
          {"rows", {codes * dims, d}},
          {"centroids", {codes, dims, all_centroids}}};
}

}  // namespace

void codebook_set::save(const std::filesystem::path& path) const {
  const auto parts = parts_of(view());
  std::vector<std::vector<float>> floats(parts.size());
  for (auto from = data_.begin(); from != data_.end();)
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const auto end = from + static_cast<std::ptrdiff_t>(parts[p].floats());
      floats[p].insert(floats[p].end(), from, end);
      from = end;
    }
  safetensors_content content{.metadata = {{"content", "FreeKV key_codes codebooks"}}};
  for (std::size_t p = 0; p < parts.size(); ++p) {
    std::vector<std::int64_t> shape{layers_, kv_heads_};
    shape.insert(shape.end(), parts[p].shape.begin(), parts[p].shape.end());
    content.tensors.push_back(
        {.name = parts[p].name, .shape = shape, .bytes = std::as_bytes(std::span(floats[p]))});
  }
  write_safetensors(path, content);
}

codebook_set codebook_set::load(const std::filesystem::path& path) {
  const safetensors_file file(path);
  const auto refuse = [name = cited_path(path)]() -> file_error {
    return file_error(
        name +
        " holds no key_codes codebooks: mean_centroids and centroids must be (layers, kv_heads, "
        "codes, dims, 256), their rows (layers, kv_heads, codes * dims, head_dim) and offsets "
        "(layers, kv_heads, head_dim); make them with freekv-basis");
  };
  const auto& of_means = file.at("mean_centroids").shape;
  const auto& of_tokens = file.at("centroids").shape;
  const auto& offset = file.at("offset").shape;
  const auto fits = [](std::int64_t n) { return n >= 1 && n <= 1 << 16; };
  if (of_means.size() != 5 || of_tokens.size() != 5 || offset.size() != 3 ||
      !std::all_of(of_means.begin(), of_means.end(), fits) ||
      !std::all_of(of_tokens.begin(), of_tokens.end(), fits) ||
      !std::all_of(offset.begin(), offset.end(), fits) || of_means[2] * of_means[3] > offset[2] ||
      of_tokens[2] * of_tokens[3] > offset[2])
    throw refuse();
  const auto number = [](std::int64_t n) { return static_cast<int>(n); };
  const key_codebooks wanted{nullptr,
                             number(offset[0]),
                             number(offset[1]),
                             number(offset[2]),
                             number(of_means[2]),
                             number(of_means[3]),
                             number(of_tokens[2]),
                             number(of_tokens[3])};
  const auto parts = parts_of(wanted);
  for (const named_part& part : parts) {
    std::vector<std::int64_t> shape{offset[0], offset[1]};
    shape.insert(shape.end(), part.shape.begin(), part.shape.end());
    if (file.at(part.name).shape != shape) throw refuse();
  }
  codebook_set set(wanted.layers, wanted.kv_heads, wanted.head_dim,
                   {.codes = wanted.codes,
                    .dims = wanted.dims,
                    .mean_codes = wanted.mean_codes,
                    .mean_dims = wanted.mean_dims});
  std::size_t first = 0;
  for (const named_part& part : parts) {
    const std::vector<float> floats = file.copy_as_float(part.name);
    for (std::size_t head = 0; head < size(wanted.layers * wanted.kv_heads); ++head)
      std::copy_n(floats.data() + head * part.floats(), part.floats(),
                  set.data_.data() + head * wanted.floats_per_head() + first);
    first += part.floats();
  }
  return set;
}

}  // namespace freekv::examples
