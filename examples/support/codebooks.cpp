#include "codebooks.hpp"

#include <algorithm>
#include <cmath>
#include <freekv/backend/host/isa.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/unroll.hpp>
#include <random>
#include <string>
#include <type_traits>
#include <utility>

#include "cited.hpp"
#include "principal_axes.hpp"
#include "safetensors.hpp"

namespace freekv::examples {

namespace {

constexpr int all_centroids = codebook::centroids_per_code;
constexpr int lloyd_rounds = 4;
constexpr double beyond = 0.8;      // of its step a centroid goes on behind the mean, but in the last round
constexpr std::size_t strips = 16;  // every 16th sample; a multiple of any team's lanes
constexpr std::size_t block = 64;   // neighbouring samples, of all strips

std::size_t whole_blocks(std::size_t count) { return (count + block - 1) / block * block; }

#if defined(__x86_64__)
/// Lanes of AVX-512, to compare as well.
struct avx512_lanes : host::avx512_rows {
  [[gnu::always_inline]] pack select_greater(const pack& a, const pack& b, const pack& x,
                                             const pack& y) const {
    return pack(a.v > b.v ? x.v : y.v);
  }
};
#endif

/// Calls `body(team)` with a team of the most lanes that load, store, add, multiply and compare.
template <class Body>
void with_lanes(const Body& body) {
  host::with_wide_team(host::best_isa(), [&](auto team) {
#if defined(__x86_64__)
    if constexpr (requires { typename decltype(team)::wide; }) return body(avx512_lanes{});
#endif
    body(team);
  });
}

/// Packs of samples whose coordinates stay in registers, by how many of these a team has.
template <class T>
inline constexpr int packs_at_once = T::width == 16                                          ? 4
                                     : std::is_base_of_v<host::simd_team<host::portable>, T> ? 1
                                                                                             : 2;

/// Calls `body(d)` for all dimensions, unrolled where their number `Dims` is known; 0: it is `dims`.
template <int Dims, class Body>
void for_dims(int dims, const Body& body) {
  if constexpr (Dims > 0)
    unroll<Dims>(body);
  else
    for (int d = 0; d < dims; ++d) body(d);
}

/// Calls `body(number)` with the compile-time number of dimensions of the usual codes, or 0.
template <class Body>
void with_dims(int dims, const Body& body) {
  switch (dims) {
    case 4:
      return body(std::integral_constant<int, 4>{});
    case 5:
      return body(std::integral_constant<int, 5>{});
    case 8:
      return body(std::integral_constant<int, 8>{});
    default:
      return body(std::integral_constant<int, 0>{});
  }
}

/// What Lloyd's algorithm works on; `assign` fills in the last two.
struct clustering {
  clustering(int dimensions, std::size_t samples_in_all)
      : dims(dimensions),
        count(samples_in_all),
        row(whole_blocks(count)),
        samples(to_size(dims) * row),
        centroids(to_size(dims * all_centroids)),
        nearest(row),
        half_distances(row) {}
  const float* at(int dim, std::size_t sample) const { return samples.data() + to_size(dim) * row + sample; }
  float* at(int dim, std::size_t sample) { return samples.data() + to_size(dim) * row + sample; }
  float& centroid(int dim, int nth) { return centroids[to_size(dim * all_centroids + nth)]; }

  int dims;
  std::size_t count, row;
  std::vector<float> samples;         // (dims, row), zeros behind the last
  std::vector<float> centroids;       // (dims, 256)
  std::vector<int> nearest;           // (row)
  std::vector<float> half_distances;  // (row), squared, halved
};

/// The nearest centroid of every sample: the least |c|^2 / 2 - <x, c>, of equal ones the first. Of each
/// centroid `given` has the coordinates, negative, and half the squared norm.
template <int Dims, class T>
void assign(T team, clustering& to, std::span<const float> given) {
  using pack = typename T::pack;
  constexpr int packs = packs_at_once<T>;
  const float* const end = given.data() + given.size();
  for (std::size_t first = 0; first < to.row; first += packs * T::width) {
    pack held[packs][Dims > 0 ? Dims : 1], least[packs], place[packs];
    const auto sample = [&](int p, int d) {
      if constexpr (Dims > 0)
        return held[p][d];
      else
        return team.load(to.at(d, first + to_size(p * T::width)));
    };
    unroll<packs>([&](auto p) {
      least[p] = pack(infinity);
      place[p] = pack(0.0f);  // of overflows
      if constexpr (Dims > 0)
        unroll<Dims>([&](auto d) { held[p][d] = team.load(to.at(d, first + to_size(p * T::width))); });
    });
    pack index(0.0f);
    for (const float* c = given.data(); c != end; c += to.dims + 1, index = index + pack(1.0f)) {
      pack distance[packs];
      unroll<packs>([&](auto p) { distance[p] = pack(c[to.dims]); });
      for_dims<Dims>(to.dims, [&](auto d) {
        const pack of_centroid(c[d]);
        unroll<packs>([&](auto p) { distance[p] = distance[p] + sample(p, d) * of_centroid; });
      });
      unroll<packs>([&](auto p) {
        place[p] = team.select_greater(least[p], distance[p], index, place[p]);
        least[p] = team.select_greater(least[p], distance[p], distance[p], least[p]);
      });
    }
    unroll<packs>([&](auto p) {
      const std::size_t n = first + to_size(p * T::width);
      pack half_norm(0.0f);
      for_dims<Dims>(to.dims, [&](auto d) {
        const pack x = sample(p, d);
        half_norm = half_norm + pack(0.5f) * x * x;
      });
      float places[T::width];
      team.store(places, place[p]);
      for (int i = 0; i < T::width; ++i) to.nearest[n + to_size(i)] = static_cast<int>(places[i]);
      team.store(to.half_distances.data() + n, half_norm + least[p]);
    });
  }
}

void assign(clustering& to, int used) {
  std::vector<float> given(to_size(used * (to.dims + 1)));
  for (int c = 0; c < used; ++c) {
    float* const of_centroid = given.data() + c * (to.dims + 1);
    for (int d = 0; d < to.dims; ++d) {
      const float x = to.centroid(d, c);
      of_centroid[d] = -x;
      of_centroid[to.dims] += 0.5f * x * x;
    }
  }
  with_dims(to.dims, [&](auto dims) {
    with_lanes([&](auto team) { assign<decltype(dims)::value>(team, to, given); });
  });
}

/// Chooses centroids among the samples, each with a probability proportional to its squared distance from
/// those that are chosen already (k-means++).
class seeding {
 public:
  seeding(clustering& of, std::uint64_t seed)
      : of_(of), random_(seed), distances_(of.row), sums_(of.row / block * strips) {
    std::fill_n(distances_.begin(), of.count, infinity);
  }

  void choose(int used) {
    std::vector<float> chosen(to_size(of_.dims));
    std::size_t sample = random_() % of_.count;
    for (int c = 0; c < used; ++c) {
      for (int d = 0; d < of_.dims; ++d) {
        of_.centroid(d, c) = *of_.at(d, sample);
        chosen[to_size(d)] = -*of_.at(d, sample);
      }
      with_dims(of_.dims, [&](auto dims) {
        with_lanes([&](auto team) { measure<decltype(dims)::value>(team, chosen.data()); });
      });
      sample = next();
    }
  }

 private:
  /// Distances from the one that was chosen last, given negative; their sums are the same with any number of
  /// lanes.
  template <int Dims, class T>
  void measure(T team, const float* chosen) {
    using pack = typename T::pack;
    constexpr int packs = static_cast<int>(strips) / T::width;
    // Copies, since a store may be to any member.
    const std::size_t row = of_.row;
    const int of_dims = of_.dims;
    const float* const samples = of_.at(0, 0);
    float *const distances = distances_.data(), *const block_sums = sums_.data();
    pack totals[packs];
    unroll<packs>([&](auto p) { totals[p] = pack(0.0f); });
    for (std::size_t first = 0; first < row; first += block) {
      pack sums[packs];
      unroll<packs>([&](auto p) { sums[p] = pack(0.0f); });
      unroll<static_cast<int>(block / strips)>([&](auto nth) {
        unroll<packs>([&](auto p) {
          const std::size_t at = first + nth * strips + to_size(p * T::width);
          pack distance(0.0f);
          for_dims<Dims>(of_dims, [&](auto d) {
            const pack difference = team.load(samples + to_size(d) * row + at) + pack(chosen[d]);
            distance = distance + difference * difference;
          });
          const pack before = team.load(distances + at);
          distance = team.select_greater(before, distance, distance, before);
          team.store(distances + at, distance);
          sums[p] = sums[p] + distance;
        });
      });
      unroll<packs>([&](auto p) {
        team.store(block_sums + first / block * strips + p * T::width, sums[p]);
        totals[p] = totals[p] + sums[p];
      });
    }
    unroll<packs>([&](auto p) { team.store(totals_ + p * T::width, totals[p]); });
  }

  /// A sample by its strip, its block and its place in both.
  std::size_t next() {
    double total = 0;
    for (const float of_strip : totals_) total += static_cast<double>(of_strip);
    if (!(total > 0) || !std::isfinite(total)) return random_() % of_.count;
    double left = static_cast<double>(random_() >> 11) * 0x1p-53 * total;
    const std::size_t strip = pick(left, strips, [&](std::size_t s) { return totals_[s]; });
    const std::size_t first =
        block * pick(left, of_.row / block, [&](std::size_t b) { return sums_[b * strips + strip]; }) + strip;
    return first +
           strips * pick(left, block / strips, [&](std::size_t n) { return distances_[first + n * strips]; });
  }
  /// The one of `count` weights with which their sum passes `left`, which loses those before it; or the last
  /// above 0.
  template <class Weight>
  static std::size_t pick(double& left, std::size_t count, const Weight& weight_of) {
    std::size_t picked = 0;
    double of_picked = left;
    for (std::size_t n = 0; n < count; ++n) {
      const auto weight = static_cast<double>(weight_of(n));
      if (!(weight > 0)) continue;
      picked = n;
      of_picked = left;
      if (left < weight) break;
      left -= weight;
    }
    left = of_picked;
    return picked;
  }

  clustering& of_;
  std::mt19937_64 random_;
  std::vector<float> distances_;  // (row), squared; 0 behind the last sample
  std::vector<float> sums_;       // of these: (blocks, strips)
  float totals_[strips] = {};
};

/// Moves the used centroids to the means of their samples, and on by `further` of the step.
void move_centroids(clustering& of, int used, double further) {
  std::vector<double> counts(to_size(used)), sums(to_size(used));
  for (std::size_t n = 0; n < of.count; ++n) ++counts[to_size(of.nearest[n])];
  for (int d = 0; d < of.dims; ++d) {
    std::fill(sums.begin(), sums.end(), 0.0);
    for (std::size_t n = 0; n < of.count; ++n)
      sums[to_size(of.nearest[n])] += static_cast<double>(*of.at(d, n));
    for (int c = 0; c < used; ++c) {
      if (!(counts[to_size(c)] > 0)) continue;
      const double mean = sums[to_size(c)] / counts[to_size(c)];
      float& centroid = of.centroid(d, c);
      centroid = static_cast<float>(mean + further * (mean - static_cast<double>(centroid)));
    }
  }
  for (int c = 0; c < used; ++c) {
    if (counts[to_size(c)] > 0) continue;  // it takes the sample that is represented worst
    const auto end = of.half_distances.begin() + static_cast<std::ptrdiff_t>(of.count);
    const auto worst = std::max_element(of.half_distances.begin(), end);
    *worst = -infinity;
    const auto n = to_size(worst - of.half_distances.begin());
    for (int d = 0; d < of.dims; ++d) of.centroid(d, c) = *of.at(d, n);
  }
}

void find_centroids(clustering& of, int used, std::uint64_t seed) {
  if (of.count == 0) return;
  seeding(of, seed).choose(used);
  for (int round = 1; round <= lloyd_rounds; ++round) {
    assign(of, used);
    move_centroids(of, used, round < lloyd_rounds ? beyond : 0.0);
  }
}

/// Adds `weight` times each row (d) of `rows` to `sum` (d).
template <team T>
void add_rows(T team, std::span<const float> rows, float weight, std::span<float> sum) {
  for (std::size_t i = 0; i < sum.size(); i += T::width) {
    auto total = team.load(sum.data() + i);
    for (std::size_t at = i; at < rows.size(); at += sum.size())
      total = total + typename T::pack(weight) * team.load(rows.data() + at);
    team.store(sum.data() + i, total);
  }
}

/// Adds `rows`^T `rows` to `products` (d, d), on and right of the diagonal.
template <team T>
void add_products(T team, std::span<const float> rows, std::size_t d, std::vector<double>& products) {
  using pack = typename T::pack;
  for (std::size_t i = 0; i < d; i += T::width)
    for (std::size_t j = i; j < d; j += T::width) {
      pack sums[T::width];
      unroll<T::width>([&](auto k) { sums[k] = pack(0.0f); });
      for (const float* row = rows.data(); row != rows.data() + rows.size(); row += d) {
        const pack right = team.load(row + j);
        unroll<T::width>([&](auto k) { sums[k] = sums[k] + pack(row[i + k]) * right; });
      }
      for (std::size_t k = 0; k < T::width; ++k) {
        float lanes[T::width];
        team.store(lanes, sums[k]);
        for (std::size_t l = 0; l < T::width; ++l)
          products[(i + k) * d + j + l] += static_cast<double>(lanes[l]);
      }
    }
}

/// Vectors (count, d) about their mean, divided by the power of two that makes the largest number 1 to 2, so
/// that no square overflows; zeros behind the last.
struct centred {
  std::vector<float> vectors;
  std::size_t d, count;
  std::vector<float> mean;       // (d)
  std::vector<double> products;  // (d, d), on and right of the diagonal: the covariance
  float unit = 1;

  centred(std::vector<float> given, int head_dim)
      : vectors(std::move(given)), d(to_size(head_dim)), count(vectors.size() / d), mean(d), products(d * d) {
    vectors.resize(whole_blocks(count) * d);
    host::with_team(host::best_isa(), [&](auto team) {
      subtract_mean(team);
      for_blocks([&](std::span<float> rows) { add_products(team, rows, d, products); });
    });
    for (double& product : products) product /= std::max(static_cast<double>(count), 1.0);
  }

 private:
  template <class Body>
  void for_blocks(const Body& body) {
    for (std::size_t n = 0; n < count; n += block)
      body(std::span(vectors).subspan(n * d, std::min(block, count - n) * d));
  }
  template <team T>
  void subtract_mean(T team) {
    using pack = typename T::pack;
    std::vector<double> sums(d);
    std::vector<float> of_block(d);
    for_blocks([&](std::span<float> rows) {
      std::fill(of_block.begin(), of_block.end(), 0.0f);
      add_rows(team, rows, 1.0f / static_cast<float>(count), of_block);
      for (std::size_t i = 0; i < d; ++i) sums[i] += static_cast<double>(of_block[i]);
    });
    for (std::size_t i = 0; i < d; ++i) mean[i] = static_cast<float>(sums[i]);
    pack largest(0.0f);
    for_blocks([&](std::span<float> rows) {
      for (std::size_t at = 0; at < rows.size(); at += d)
        for (std::size_t i = 0; i < d; i += T::width) {
          const pack x = team.load(rows.data() + at + i) - team.load(mean.data() + i);
          team.store(rows.data() + at + i, x);
          largest = team.maximum(largest, team.maximum(x, pack(0.0f) - x));
        }
    });
    const float most = team.max(largest);
    if (!(most > 0)) return;
    const int exponent = std::clamp(std::ilogb(most), -100, 100);
    unit = std::ldexp(1.0f, exponent);
    const pack scale(std::ldexp(1.0f, -exponent));
    for (std::size_t at = 0; at < count * d; at += T::width)
      team.store(vectors.data() + at, team.load(vectors.data() + at) * scale);
  }
};

/// The products of all vectors with `rows` (codes * dims, d), as samples of each code.
std::vector<clustering> projected(const centred& from, const float* rows, int codes, int dims) {
  std::vector<clustering> of_codes(to_size(codes), clustering(dims, from.count));
  host::with_team(host::best_isa(), [&](auto team) {
    using pack = typename decltype(team)::pack;
    constexpr int width = decltype(team)::width;
    for (std::size_t n = 0; n < whole_blocks(from.count); n += width)
      for (int r = 0; r < codes * dims; ++r) {
        pack sums[width];
        unroll<width>([&](auto k) { sums[k] = pack(0.0f); });
        for (std::size_t i = 0; i < from.d; i += width) {
          const pack row = team.load(rows + to_size(r) * from.d + i);
          const float* const vectors = from.vectors.data() + n * from.d + i;
          unroll<width>([&](auto k) { sums[k] = sums[k] + row * team.load(vectors + to_size(k) * from.d); });
        }
        team.store(of_codes[to_size(r / dims)].at(r % dims, n), team.sum_each(sums));
      }
  });
  return of_codes;
}

/// The codebook of vectors (count, head_dim), all finite; the first code has `used` centroids.
void learn_codebook(std::vector<float> vectors, int codes, int dims, int head_dim, int used,
                    std::uint64_t seed, float* to) {
  const centred of(std::move(vectors), head_dim);
  const principal_axes axes = axes_of_covariance(of.products, head_dim, codes * dims);
  float* const rows = std::copy(of.mean.begin(), of.mean.end(), to);
  float* next = rows;
  for (const int axis : balanced_groups(axes.variances, codes))
    next = std::copy_n(axes.rows.data() + axis * head_dim, head_dim, next);

  for (int nth = 0; auto& samples : projected(of, rows, codes, dims)) {
    find_centroids(samples, nth == 0 ? used : all_centroids, seed + to_size(nth));
    for (const float x : samples.centroids) *next++ = x * of.unit;
    ++nth;
  }
}

/// One head's keys, zeros in place of those that are not finite.
class head_keys {
 public:
  head_keys(std::span<const float> keys, int head, int kv_heads, int head_dim)
      : d_(to_size(head_dim)), keys_(keys.size() / to_size(kv_heads)), finite_(keys_.size() / d_) {
    host::with_team(host::best_isa(), [&](auto team) {
      using pack = typename decltype(team)::pack;
      for (std::size_t t = 0; t < count(); ++t) {
        const float* const key = keys.data() + (t * to_size(kv_heads) + to_size(head)) * d_;
        float* const copy = keys_.data() + t * d_;
        pack zero(0.0f);
        for (std::size_t i = 0; i < d_; i += decltype(team)::width) {
          const pack x = team.load(key + i);
          team.store(copy + i, x);
          zero = zero + x * pack(0.0f);
        }
        finite_[t] = team.sum(zero) == 0.0f;
        if (!is_finite(t)) std::fill_n(copy, d_, 0.0f);
      }
    });
  }
  std::size_t count() const { return finite_.size(); }
  bool is_finite(std::size_t token) const { return finite_[token] != 0; }

  /// Appends the mean of the finite ones among `tokens` keys from `first`; nothing if there are none.
  bool append_mean(std::size_t first, std::size_t tokens, std::vector<float>& to) const {
    tokens = std::min(tokens, count() - first);
    int finite = 0;
    for (std::size_t t = first; t < first + tokens; ++t) finite += is_finite(t);
    if (finite == 0) return false;
    to.resize(to.size() + d_);
    host::with_team(host::best_isa(), [&](auto team) {
      add_rows(team, std::span(keys_).subspan(first * d_, tokens * d_), 1.0f / static_cast<float>(finite),
               std::span(to).last(d_));
    });
    return true;
  }

  /// Appends the differences of a key from a mean.
  void append_difference(std::size_t token, std::span<const float> mean, std::vector<float>& to) const {
    to.resize(to.size() + d_);
    float* const difference = to.data() + to.size() - d_;
    host::with_team(host::best_isa(), [&](auto team) {
      for (std::size_t i = 0; i < d_; i += decltype(team)::width)
        team.store(difference + i, team.load(keys_.data() + token * d_ + i) - team.load(mean.data() + i));
    });
  }

 private:
  std::size_t d_;
  std::vector<float> keys_;
  std::vector<char> finite_;
};

/// Replaces a vector by what the codes of its nearest centroids stand for.
void through_codes(const codebook& book, int used, std::span<float> vector) {
  std::vector<float> coefficients(to_size(book.codes * book.dims));
  host::with_team(host::best_isa(), [&](auto team) {
    using pack = typename decltype(team)::pack;
    book.project(team, vector.data(), coefficients.data());
    for (int nth = 0; nth < book.codes; ++nth) {
      float* const of_code = coefficients.data() + nth * book.dims;
      const int c = book.nearest(team, nth, of_code, nth == 0 ? used : all_centroids);
      for (int d = 0; d < book.dims; ++d)
        of_code[d] = book.centroids[(nth * book.dims + d) * all_centroids + c];
    }
    for (std::size_t i = 0; i < vector.size(); i += decltype(team)::width) {
      pack sum = team.load(book.offset + i);
      for (std::size_t r = 0; r < coefficients.size(); ++r)
        sum = sum + pack(coefficients[r]) * team.load(book.rows + r * vector.size() + i);
      team.store(vector.data() + i, sum);
    }
  });
}

}  // namespace

std::vector<float> k_means(std::span<const float> samples, int dims, int used, std::uint64_t seed) {
  clustering of(dims, samples.size() / to_size(dims));
  for (std::size_t n = 0; n < of.count; ++n)
    for (int d = 0; d < dims; ++d) *of.at(d, n) = samples[n * to_size(dims) + to_size(d)];
  find_centroids(of, used, seed);
  return of.centroids;
}

std::vector<int> balanced_groups(std::span<const double> variances, int groups) {
  const std::size_t room = variances.size() / to_size(groups);
  std::vector<std::vector<int>> members(to_size(groups));
  std::vector<double> sums(to_size(groups));
  const double least =
      variances.empty() ? 1.0 : std::max({variances.back(), variances.front() * 1e-6, 1e-300});
  for (std::size_t dim = 0; dim < room * to_size(groups); ++dim) {
    std::size_t to = 0;
    while (members[to].size() == room) ++to;
    for (std::size_t g = to + 1; g < to_size(groups); ++g)
      if (members[g].size() < room && sums[g] < sums[to]) to = g;
    members[to].push_back(static_cast<int>(dim));
    sums[to] += std::log(std::max(variances[dim] / least, 1.0));
  }
  std::vector<int> all;
  for (const auto& group : members) all.insert(all.end(), group.begin(), group.end());
  return all;
}

codebook_set::codebook_set(int layers, int kv_heads, int head_dim, const codebook_sizes& sizes)
    : layers_(layers), kv_heads_(kv_heads), head_dim_(head_dim), sizes_(sizes) {
  sizes_.dims = std::min(sizes.dims, head_dim / sizes.codes);
  sizes_.mean_dims = std::min(sizes.mean_dims, head_dim / sizes.mean_codes);
  data_.resize(to_size(layers * kv_heads) * view().floats_per_head());
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
  constexpr std::size_t mean_offsets = 8;  // in a page
  const std::size_t d = to_size(head_dim_), page = to_size(sizes_.page);
  for (int head = 0; head < kv_heads_; ++head) {
    float* to = data_.data() + to_size(layer * kv_heads_ + head) * view().floats_per_head();
    const auto seed = to_size(layer * kv_heads_ + head) * to_size(sizes_.mean_codes + sizes_.codes);
    const head_keys of_head(keys, head, kv_heads_, head_dim_);

    std::vector<float> means;
    const std::size_t step = std::max(page / mean_offsets, std::size_t{1});
    for (std::size_t first = 0; first < of_head.count() && (first == 0 || first + page <= of_head.count());
         first += step)
      of_head.append_mean(first, page, means);
    learn_codebook(std::move(means), sizes_.mean_codes, sizes_.mean_dims, head_dim_, used, seed, to);

    std::vector<float> differences;
    differences.reserve(of_head.count() * d);
    for (std::size_t first = 0; first < of_head.count(); first += page) {
      std::vector<float> mean;
      if (!of_head.append_mean(first, page, mean)) continue;
      through_codes(view().mean(layer, head), used, mean);
      for (std::size_t t = first; t < std::min(first + page, of_head.count()); ++t)
        if (of_head.is_finite(t)) of_head.append_difference(t, mean, differences);
    }
    learn_codebook(std::move(differences), sizes_.codes, sizes_.dims, head_dim_, all_centroids,
                   seed + to_size(sizes_.mean_codes),
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
    for (const std::int64_t n : shape) product *= to_size(n);
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
    for (std::size_t head = 0; head < to_size(wanted.layers * wanted.kv_heads); ++head)
      std::copy_n(floats.data() + head * part.floats(), part.floats(),
                  set.data_.data() + head * wanted.floats_per_head() + first);
    first += part.floats();
  }
  return set;
}

}  // namespace freekv::examples
