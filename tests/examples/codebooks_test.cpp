// The codebooks of key_codes: k-means, the grouping of dimensions, what the learnt codes lose, and their
// files.
#include "codebooks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <freekv/backend/host/isa.hpp>
#include <future>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "../catch.hpp"
#include "../files.hpp"
#include "../mentions.hpp"
#include "safetensors.hpp"
#include "tensor_file.hpp"

using namespace freekv;
using namespace freekv::examples;
using namespace tests;

namespace {

constexpr int d = 16;

/// Keys (tokens, kv_heads, d) that wander slowly, in few directions: pages have means of their own.
std::vector<float> structured_keys(int tokens, int kv_heads, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> keys;
  std::vector<float> topic(to_size(kv_heads * d));
  for (int t = 0; t < tokens; ++t)
    for (std::size_t i = 0; i < topic.size(); ++i) {
      topic[i] = 0.95f * topic[i] + 0.6f * normal(random);
      keys.push_back(5.0f + (topic[i] + normal(random)) / static_cast<float>(1 + i % d));
    }
  return keys;
}

/// The mean squared distance of a head's keys from what their codes stand for, by definition; or, with no
/// books, from their mean.
double squared_error(const std::vector<float>& keys, int head, int kv_heads, int page,
                     const key_codebooks* books) {
  const auto key = [&](int t, int i) { return static_cast<double>(keys[(t * kv_heads + head) * d + i]); };
  const auto coded = [](const codebook& book, const std::vector<double>& vector, int used) {
    std::vector<double> result(book.offset, book.offset + d);
    for (int nth = 0; nth < book.codes; ++nth) {
      std::vector<double> x;
      for (int r = nth * book.dims; r < (nth + 1) * book.dims; ++r) {
        double product = 0;
        for (int i = 0; i < d; ++i)
          product +=
              static_cast<double>(book.rows[r * d + i]) * (vector[i] - static_cast<double>(book.offset[i]));
        x.push_back(product);
      }
      const float* centroids = book.centroids + nth * book.dims * 256;
      int best = 0;
      double least = std::numeric_limits<double>::infinity();
      for (int c = 0; c < (nth == 0 ? used : 256); ++c) {
        double distance = 0;
        for (int k = 0; k < book.dims; ++k)
          distance += std::pow(static_cast<double>(centroids[k * 256 + c]) - x[k], 2);
        if (distance < least) least = distance, best = c;
      }
      for (int k = 0; k < book.dims; ++k)
        for (int i = 0; i < d; ++i)
          result[i] += static_cast<double>(book.rows[(nth * book.dims + k) * d + i]) *
                       static_cast<double>(centroids[k * 256 + best]);
    }
    return result;
  };
  const int tokens = static_cast<int>(keys.size()) / (kv_heads * d);
  const int span = books == nullptr ? tokens : page;
  double error = 0;
  for (int first = 0; first < tokens; first += span) {
    const int last = std::min(first + span, tokens);
    std::vector<double> mean(d);
    for (int t = first; t < last; ++t)
      for (int i = 0; i < d; ++i) mean[i] += key(t, i) / (last - first);
    if (books != nullptr) mean = coded(books->mean(0, head), mean, 255);
    for (int t = first; t < last; ++t) {
      std::vector<double> difference(d), decoded(d);
      for (int i = 0; i < d; ++i) difference[i] = key(t, i) - mean[i];
      if (books != nullptr) decoded = coded(books->token(0, head), difference, 256);
      for (std::size_t i = 0; i < d; ++i) error += std::pow(difference[i] - decoded[i], 2) / tokens;
    }
  }
  return error;
}

codebook_set learnt(const std::vector<float>& keys, int kv_heads, const codebook_sizes& sizes) {
  codebook_set set(1, kv_heads, d, sizes);
  set.learn(0, keys);
  return set;
}

std::vector<float> floats_of(const key_codebooks& books) {
  return {books.data, books.data + to_size(books.layers * books.kv_heads) * books.floats_per_head()};
}

/// The mean squared distance of samples from the nearest of centroids (dims, 256), of which `used` count.
template <class Number>
double distortion(const std::vector<float>& samples, int dims, const std::vector<Number>& centroids,
                  int used) {
  const std::size_t count = samples.size() / to_size(dims);
  double sum = 0;
  for (std::size_t n = 0; n < count; ++n) {
    double least = std::numeric_limits<double>::infinity();
    for (int c = 0; c < used; ++c) {
      double distance = 0;
      for (int k = 0; k < dims; ++k)
        distance += std::pow(static_cast<double>(centroids[k * 256 + c]) -
                                 static_cast<double>(samples[n * to_size(dims) + to_size(k)]),
                             2);
      least = std::min(least, distance);
    }
    sum += least;
  }
  return sum / static_cast<double>(count);
}

/// k-means in float64 by its definition: a k-means++ start, then 6 rounds of Lloyd's algorithm. (dims, 256).
std::vector<double> reference_k_means(const std::vector<float>& samples, int dims, int used,
                                      std::uint64_t seed) {
  const auto at = [](int n) { return to_size(n); };
  const int count = static_cast<int>(samples.size()) / dims;
  std::mt19937_64 random(seed);
  std::vector<std::vector<double>> centroids;
  const auto sample = [&](int n) {
    return std::vector<double>(samples.begin() + n * dims, samples.begin() + (n + 1) * dims);
  };
  const auto distance = [&](int n, const std::vector<double>& from) {
    double sum = 0;
    for (int k = 0; k < dims; ++k)
      sum += std::pow(static_cast<double>(samples[at(n * dims + k)]) - from[at(k)], 2);
    return sum;
  };
  const auto nearest = [&](int n) {
    std::size_t best = 0;
    for (std::size_t c = 1; c < centroids.size(); ++c)
      if (distance(n, centroids[c]) < distance(n, centroids[best])) best = c;
    return best;
  };
  centroids.push_back(sample(std::uniform_int_distribution<int>(0, count - 1)(random)));
  std::vector<double> distances(at(count), std::numeric_limits<double>::infinity());
  while (static_cast<int>(centroids.size()) < used) {
    for (int n = 0; n < count; ++n)
      distances[at(n)] = std::min(distances[at(n)], distance(n, centroids.back()));
    centroids.push_back(sample(std::discrete_distribution<int>(distances.begin(), distances.end())(random)));
  }
  for (int round = 0; round < 6; ++round) {
    std::vector<double> counts(centroids.size());
    std::vector<std::vector<double>> sums(centroids.size(), std::vector<double>(at(dims)));
    for (int n = 0; n < count; ++n) {
      const std::size_t c = nearest(n);
      ++counts[c];
      for (int k = 0; k < dims; ++k) sums[c][at(k)] += static_cast<double>(samples[at(n * dims + k)]);
    }
    for (std::size_t c = 0; c < centroids.size(); ++c)
      for (int k = 0; k < dims && counts[c] > 0; ++k) centroids[c][at(k)] = sums[c][at(k)] / counts[c];
  }
  std::vector<double> result(at(dims * 256));
  for (int c = 0; c < used; ++c)
    for (int k = 0; k < dims; ++k) result[at(k * 256 + c)] = centroids[at(c)][at(k)];
  return result;
}

/// Samples about a few wandering centres, some of them far away.
std::vector<float> uneven_samples(int count, int dims, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> samples, centre(to_size(dims));
  for (int n = 0; n < count; ++n) {
    const float spread = n % 50 == 0 ? 3.0f : 1.0f;
    for (float& x : centre) {
      x = 0.9f * x + 0.5f * normal(random);
      samples.push_back(x + spread * normal(random));
    }
  }
  return samples;
}

/// Independent samples, all from one normal distribution.
std::vector<float> even_samples(int count, int dims, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> samples(to_size(count * dims));
  std::generate(samples.begin(), samples.end(), [&] { return normal(random); });
  return samples;
}

}  // namespace

TEST_CASE("k-means finds separated clusters", "[codebooks]") {
  for (const int dims : {1, 2, 3, 4, 5, 8}) {
    CAPTURE(dims);
    const int clusters = 60;
    std::mt19937_64 random(7);
    std::uniform_real_distribution<float> near(-0.01f, 0.01f);
    std::vector<float> samples;
    for (int n = 0; n < 20 * clusters; ++n)
      for (int k = 0; k < dims; ++k)
        samples.push_back(static_cast<float>((n % clusters) * (k + 1)) + near(random));
    const auto centroids = k_means(samples, dims, clusters, 1);
    REQUIRE(centroids.size() == to_size(dims * 256));
    std::set<int> found;
    for (int c = 0; c < clusters; ++c) {
      const int cluster = static_cast<int>(std::lround(centroids[c]));
      found.insert(cluster);
      for (int k = 0; k < dims; ++k)
        CHECK(std::abs(centroids[k * 256 + c] - static_cast<float>(cluster * (k + 1))) < 0.01f);
    }
    CHECK(found.size() == to_size(clusters));
    for (int k = 0; k < dims; ++k)
      for (int c = clusters; c < 256; ++c) REQUIRE(centroids[k * 256 + c] == 0.0f);
  }
}

TEST_CASE("fewer samples than centroids are repeated", "[codebooks]") {
  const std::vector<float> samples{1, 2, 3, 4, 5, 6};
  const auto centroids = k_means(samples, 2, 256, 3);
  std::set<std::pair<float, float>> found;
  for (std::size_t c = 0; c < 256; ++c) found.insert({centroids[c], centroids[256 + c]});
  CHECK(found == std::set<std::pair<float, float>>{{1, 2}, {3, 4}, {5, 6}});
  CHECK(k_means({}, 2, 256, 3) == std::vector<float>(512));
}

TEST_CASE("k-means is as good as in float64, for samples it saw and others", "[codebooks]") {
  struct setting {
    std::vector<int> dims;
    int count, used;
    std::vector<float> (*draw)(int, int, std::uint64_t);
  };
  // 32 centroids begin in every second sample, 200 in all of them, 256 in fewer than two samples each.
  const std::vector<setting> settings{{{1, 2, 3, 4, 5, 6, 8, 11}, 600, 32, uneven_samples},
                                      {{2, 5}, 600, 32, even_samples},
                                      {{4, 5}, 390, 200, uneven_samples},
                                      {{4, 5}, 600, 256, uneven_samples}};
  constexpr int seeds = 16;
  for (const auto& [all_dims, count, used, draw] : settings)
    for (const int dims : all_dims) {
      const auto seen = draw(count, dims, 31), others = draw(count, dims, 32);
      for (const auto& samples : {seen, others}) {
        double sum = 0, squares = 0;  // of the ratio to the reference, by seed
        for (std::uint64_t seed = 0; seed < seeds; ++seed) {
          const double ours = distortion(samples, dims, k_means(seen, dims, used, seed), used),
                       reference = distortion(samples, dims, reference_k_means(seen, dims, used, seed), used);
          sum += ours / reference;
          squares += std::pow(ours / reference, 2);
        }
        const double mean = sum / seeds, deviation = std::sqrt((squares / seeds - mean * mean) / seeds);
        CAPTURE(dims, count, used, mean, deviation);
        CHECK(mean < 1.01 + 2 * deviation);
        CHECK(deviation < 0.03);
      }
    }
}

TEST_CASE("samples that are all equal have one centroid, often", "[codebooks]") {
  for (const int dims : {1, 4, 5, 7})
    for (const int count : {1, 100, 1000}) {
      CAPTURE(dims, count);
      const auto centroids = k_means(std::vector<float>(to_size(count * dims), 0.1f), dims, 256, 5);
      CHECK(centroids == std::vector<float>(to_size(dims * 256), 0.1f));
    }
  const std::vector<float> same(to_size(100 * d), 3.0f);
  const auto books = learnt(same, 1, {});
  for (const float x : floats_of(books.view())) REQUIRE(std::isfinite(x));
  const key_codebooks view = books.view();
  CHECK(squared_error(same, 0, 1, 32, &view) < 1e-10);
}

TEST_CASE("samples of which no distance is a float still have finite centroids", "[codebooks]") {
  auto samples = uneven_samples(400, 4, 33);
  for (float& x : samples) x *= 1e30f;
  for (const float x : k_means(samples, 4, 256, 6)) REQUIRE(std::isfinite(x));
}

TEST_CASE("groups are of equal size and about equal product of variances", "[codebooks]") {
  const std::vector<double> variances{60, 32, 16, 8, 4, 2, 2, 2};
  // Binary logarithms: 5.9 to the first, 5 and 4 to the second, 3 and 2 to the first, 1 and 1 to the second,
  // which is full.
  CHECK(balanced_groups(variances, 2) == std::vector<int>{0, 3, 4, 7, 1, 2, 5, 6});
  CHECK(balanced_groups(variances, 1) == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(balanced_groups(variances, 8) == std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
  auto small = variances;
  for (double& variance : small) variance *= 1e-9;
  CHECK(balanced_groups(small, 2) == balanced_groups(variances, 2));
  const std::vector<double> vanishing{4, 0, 0, -1e-20};
  auto all = balanced_groups(vanishing, 2);
  std::sort(all.begin(), all.end());
  CHECK(all == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("the error of decoded keys falls with more codes, far below the variance", "[codebooks]") {
  const int heads = 2, page = 16;
  const auto keys = structured_keys(1500, heads, 5);
  for (int head = 0; head < heads; ++head) {
    double before = squared_error(keys, head, heads, page, nullptr);
    const double variance = before;
    for (const int codes : {1, 2, 4, 8}) {
      CAPTURE(head, codes);
      const auto set = learnt(keys, heads, {.codes = codes, .dims = 16 / codes, .page = page});
      const auto books = set.view();
      CHECK(books.mean_dims == 2);  // 8 codes in 16 dimensions
      const double error = squared_error(keys, head, heads, page, &books);
      CHECK(error < 0.8 * before);
      before = error;
    }
    CHECK(before < 0.01 * variance);
  }
}

TEST_CASE("rows are orthonormal and the 256th centroid of a mean's first code is kept free", "[codebooks]") {
  const auto keys = structured_keys(700, 2, 6);
  const auto set = learnt(keys, 2, {.codes = 3, .dims = 5, .mean_codes = 4, .mean_dims = 4});
  for (int head = 0; head < 2; ++head)
    for (const codebook& book : {set.view().mean(0, head), set.view().token(0, head)}) {
      for (int a = 0; a < book.codes * book.dims; ++a)
        for (int b = 0; b <= a; ++b) {
          double product = 0;
          for (int i = 0; i < d; ++i)
            product += static_cast<double>(book.rows[a * d + i] * book.rows[b * d + i]);
          CHECK(std::abs(product - (a == b ? 1.0 : 0.0)) < 1e-5);
        }
    }
  for (int head = 0; head < 2; ++head)
    for (int k = 0; k < 4; ++k) CHECK(set.view().mean(0, head).centroids[k * 256 + 255] == 0.0f);
}

TEST_CASE("the same keys give the same codebooks, each layer and head its own", "[codebooks]") {
  const auto keys = structured_keys(400, 2, 8);
  const auto one = learnt(keys, 2, {}), same = learnt(keys, 2, {});
  CHECK(floats_of(one.view()) == floats_of(same.view()));

  codebook_set layers(3, 2, d);
  layers.learn(2, keys);
  const auto untouched = floats_of(layers.layer(1));
  CHECK(std::all_of(untouched.begin(), untouched.end(), [](float x) { return x == 0.0f; }));
  CHECK(layers.layer(2).layers == 1);
  CHECK(layers.layer(2).data == layers.view().mean(2, 0).offset);
  const auto offset = [](const codebook& book) { return std::vector<float>(book.offset, book.offset + d); };
  CHECK(offset(layers.view().mean(2, 1)) == offset(one.view().mean(0, 1)));
  CHECK(offset(one.view().mean(0, 0)) != offset(one.view().mean(0, 1)));
}

TEST_CASE("threads that learn different layers change nothing", "[codebooks]") {
  constexpr int layers = 6, heads = 2;
  const auto learn = [&](int threads) {
    codebook_set set(layers, heads, d, {.codes = 3, .dims = 5});
    std::vector<std::future<void>> all;
    for (int thread = 0; thread < threads; ++thread)
      all.push_back(std::async(std::launch::async, [&, thread] {
        for (int layer = thread; layer < layers; layer += threads)
          set.learn(layer, structured_keys(500, heads, 40 + static_cast<std::uint64_t>(layer)));
      }));
    for (auto& one : all) one.get();
    return floats_of(set.view());
  };
  const auto alone = learn(1);
  CHECK(learn(2) == alone);
  CHECK(learn(5) == alone);
}

TEST_CASE("keys in another unit, a power of two, have the same codebooks in that unit", "[codebooks]") {
  const auto keys = structured_keys(600, 1, 10);
  const codebook_sizes sizes{.codes = 3, .dims = 5, .mean_codes = 4, .mean_dims = 4};
  const auto usual = learnt(keys, 1, sizes);
  for (const float unit : {0x1p-20f, 0x1p+40f}) {
    auto scaled = keys;
    for (float& x : scaled) x *= unit;
    const auto set = learnt(scaled, 1, sizes);
    const auto same = [&](const codebook& a, const codebook& b) {
      const int rows = a.codes * a.dims * d;
      CHECK(std::equal(a.rows, a.rows + rows, b.rows));
      CHECK(std::equal(a.offset, a.offset + d, b.offset, [&](float x, float y) { return x * unit == y; }));
      CHECK(std::equal(a.centroids, a.centroids + a.codes * a.dims * 256, b.centroids,
                       [&](float x, float y) { return x * unit == y; }));
    };
    same(usual.view().mean(0, 0), set.view().mean(0, 0));
    same(usual.view().token(0, 0), set.view().token(0, 0));
  }
}

TEST_CASE("keys that are not finite are left out, and no keys are no fault", "[codebooks]") {
  auto keys = structured_keys(300, 1, 9);
  keys[7 * d + 3] = std::numeric_limits<float>::quiet_NaN();
  for (int i = 0; i < 16 * d; ++i) keys[64 * d + i] = -std::numeric_limits<float>::infinity();
  const auto set = learnt(keys, 1, {.page = 16});
  const auto floats = floats_of(set.view());
  CHECK(std::all_of(floats.begin(), floats.end(), [](float x) { return std::isfinite(x); }));
  for (const float offset :
       std::vector<float>(set.view().mean(0, 0).offset, set.view().mean(0, 0).offset + d))
    CHECK(std::abs(offset - 5.0f) < 2.0f);

  for (const std::size_t tokens : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
    CAPTURE(tokens);
    const std::vector<float> few(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(tokens * d));
    const auto from_few = learnt(few, 1, {});
    const auto book = from_few.view().token(0, 0);
    for (const float x : floats_of(from_few.view())) REQUIRE(std::isfinite(x));
    for (int r = 0; r < book.codes * book.dims; ++r) {
      double norm = 0;
      for (int i = 0; i < d; ++i) norm += std::pow(static_cast<double>(book.rows[r * d + i]), 2);
      CHECK(std::abs(norm - 1) < 1e-5);
    }
    if (tokens == 0) {
      CHECK(std::all_of(book.offset, book.offset + d, [](float x) { return x == 0.0f; }));
      CHECK(std::all_of(book.centroids, book.centroids + book.codes * book.dims * 256,
                        [](float x) { return x == 0.0f; }));
    }
  }
  const std::vector<float> none(to_size(40 * d), std::numeric_limits<float>::infinity());
  for (const float x : floats_of(learnt(none, 1, {}).view())) REQUIRE(std::isfinite(x));
}

TEST_CASE("dimensions shrink where head_dim has too few", "[codebooks]") {
  const key_codebooks small =
      codebook_set(2, 3, 8, {.codes = 6, .dims = 5, .mean_codes = 8, .mean_dims = 4}).view();
  CHECK(small.dims == 1);
  CHECK(small.mean_dims == 1);
  const key_codebooks usual = codebook_set(2, 3, 64).view();
  CHECK(usual.codes * usual.dims == 30);
  CHECK(usual.mean_codes * usual.mean_dims == 32);
  CHECK(codebook_sizes::of_codes(4, 64).dims == 8);
  CHECK(codebook_sizes::of_codes(40, 64).dims == 1);
}

TEST_CASE("codes of longer keys have as many dimensions", "[codebooks]") {
  CHECK(codebook_sizes::of_codes(12, 64).dims == 2);
  CHECK(codebook_sizes::of_codes(12, 128).dims == 5);
  CHECK(codebook_sizes::of_codes(24, 256).dims == 5);
  CHECK(codebook_sizes::of_codes(40, 256).dims == 3);
  CHECK(codebook_sizes::of_codes(6, 256).dims == 5);
  CHECK(codebook_sizes::of_codes(4, 256).dims == 8);
}

TEST_CASE("codebooks come back from their file", "[codebooks]") {
  const scratch_folder folder;
  codebook_set set(2, 2, d, {.codes = 3, .dims = 5, .mean_codes = 2, .mean_dims = 4});
  set.learn(0, structured_keys(300, 2, 1));
  set.learn(1, structured_keys(300, 2, 2));
  set.save(folder / "books.safetensors");
  const auto tensors = read_tensors(folder / "books.safetensors");
  CHECK(tensors.at("mean_offset").shape == std::vector<std::int64_t>{2, 2, d});
  CHECK(tensors.at("mean_rows").shape == std::vector<std::int64_t>{2, 2, 8, d});
  CHECK(tensors.at("mean_centroids").shape == std::vector<std::int64_t>{2, 2, 2, 4, 256});
  CHECK(tensors.at("offset").shape == std::vector<std::int64_t>{2, 2, d});
  CHECK(tensors.at("rows").shape == std::vector<std::int64_t>{2, 2, 15, d});
  CHECK(tensors.at("centroids").shape == std::vector<std::int64_t>{2, 2, 3, 5, 256});
  const auto back = codebook_set::load(folder / "books.safetensors");
  CHECK(back.view().layers == 2);
  CHECK(back.view().kv_heads == 2);
  CHECK(back.view().head_dim == d);
  CHECK(back.view().mean_codes == 2);
  CHECK(back.view().mean_dims == 4);
  CHECK(back.view().codes == 3);
  CHECK(back.view().dims == 5);
  CHECK(floats_of(back.view()) == floats_of(set.view()));
}

TEST_CASE("a file that holds no codebooks is refused", "[codebooks]") {
  const scratch_folder folder;
  codebook_set(2, 2, d, {.codes = 3, .dims = 5, .mean_codes = 2, .mean_dims = 4}).save(folder / "good");
  const auto good = read_tensors(folder / "good");
  const auto refused = [&](const tensor_map& tensors) {
    store(folder / "bad", parts_of(tensors, {}).whole());
    try {
      codebook_set::load(folder / "bad");
    } catch (const file_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(refused(good).empty());
  for (const auto& [name, tensor] : good) {
    CAPTURE(name);
    auto lacking = good;
    lacking.erase(name);
    check_mentions(refused(lacking), {"bad", name});
    auto flat = good;
    flat[name].shape = {static_cast<std::int64_t>(tensor.bytes.size() / 4)};
    check_mentions(refused(flat), {"bad", "key_codes codebooks", "freekv-basis"});
    auto swapped = good;
    std::reverse(swapped[name].shape.begin(), swapped[name].shape.end());
    check_mentions(refused(swapped), {"bad", "key_codes codebooks"});
  }
  auto whole = good;
  whole["offset"] = {"I32", good.at("offset").shape, good.at("offset").bytes};
  check_mentions(refused(whole), {"bad", "offset"});
  auto empty = good;
  for (auto& [name, tensor] : empty) tensor.shape[0] = 0, tensor.bytes.clear();
  check_mentions(refused(empty), {"bad", "key_codes codebooks"});
}
