// Rows of linear summaries times a group's queries, as a block scores them on the device, against products in double
// precision.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <cmath>
#include <freekv/backend/cuda/score_rows.cuh>
#include <limits>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;

std::string text(int n) { return std::to_string(n); }
constexpr int threads = 128, most_units = 128, warps = threads / 32;

template <class Scoring>
__global__ void score_block(const std::byte* rows, const std::int32_t* row_of, int first, int last,
                            prepared_queries queries, float* scores, std::int64_t stride,
                            std::int32_t* not_finite) {
  alignas(16) __shared__ float shared[Scoring::floats];
  const bool bad = device::score_summary_rows<Scoring, 32>(
      rows, [&](int j) { return row_of[j]; }, first, last, queries, scores, stride, shared);
  if (bad) atomicOr(not_finite, 1 << threadIdx.x / 32);
}

/// Units `first` .. `last` of so many rows, in random order; in one some numbers are infinite, or NaN, or overflow.
template <class Scoring>
void scored(report& checks, random_numbers& random, int group, int first, int last) {
  using element = typename Scoring::element;
  constexpr int width = Scoring::width, rows = 300;
  const int stride = last + random.between(0, 5);
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  pinned<element> numbers = random.normals<element>(size(rows * width));
  const pinned<float> queries = random.normals<float>(size(group * width));
  pinned<std::int32_t> row_of;
  for (int j = 0; j < last; ++j) row_of.push_back(random.below(rows));
  const int spoiled = random.below(2) == 0 ? -1 : random.between(first, last - 1);
  if (spoiled >= 0) {
    const float infinite = std::numeric_limits<float>::infinity(),
                nan = std::numeric_limits<float>::quiet_NaN();
    const float by = random.below(2) == 0 ? infinite : nan;
    numbers[size(row_of[size(spoiled)] * width + random.below(width))] = from_float<element>(by);
  }
  const float scale = 0.125f;
  results<float> scores(size(group * stride), -9.0f);
  results<std::int32_t> not_finite(1, 0);
  for (int g = 0; g < group; ++g)
    for (int j = first; j < last; ++j) {
      double sum = 0.0;
      for (int i = 0; i < width; ++i)
        sum += double{queries[size(g * width + i)]} * to_float(numbers[size(row_of[size(j)] * width + i)]);
      scores.host[size(g * stride + j)] = static_cast<float>(scale * sum);
      if (!std::isfinite(sum)) not_finite.host[0] |= 1 << (j - first) / 32;
    }
  score_block<Scoring><<<1, threads>>>(reinterpret_cast<const std::byte*>(numbers.data()), row_of.data(),
                                       first, last, {queries.data(), width, group, scale},
                                       scores.device.data(), stride, not_finite.device.data());
  require(cudaGetLastError(), "kernel launch");
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const std::string what = std::string(element_name<element>) + ", rows of " + text(width) + ", group " +
                           text(group) + ", units " + text(first) + " to " + text(last);
  checks.close(what, scores, 8);
  checks.equal(what + ": warps with a score that is not finite", not_finite);
}

template <class Scoring>
void scored_in_all_ways(report& checks, random_numbers& random) {
  static_assert(Scoring::there);
  for (const int group : {1, 3, 4, 7, 16}) {
    const int first = random.between(0, 200);
    scored<Scoring>(checks, random, group, first, first + random.between(1, most_units));
  }
  scored<Scoring>(checks, random, 4, 0, most_units);
  scored<Scoring>(checks, random, 5, 64, 65);
}

}  // namespace

int main() {
  skip_without_device();
  static_assert(warps * 32 == most_units);
  report checks;
  random_numbers random(1);
  scored_in_all_ways<device::row_scoring<256, bfloat16>>(checks, random);
  scored_in_all_ways<device::row_scoring<128, half>>(checks, random);
  scored_in_all_ways<device::row_scoring<64, half>>(checks, random);
  scored_in_all_ways<device::row_scoring<512, bfloat16>>(checks, random);
  scored_in_all_ways<device::row_scoring<128, float>>(checks, random);
  scored_in_all_ways<device::row_scoring<192, float>>(checks, random);
  scored_in_all_ways<device::row_scoring<512, float>>(checks, random);
  return checks.finish();
}
