// Rows of linear summaries times a group's queries, as a block scores them on the device, against products in
// double precision.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <freekv/algorithms/score_unit.hpp>
#include <freekv/backend/cuda/score_rows.cuh>
#include <freekv/backend/cuda/score_tokens.cuh>
#include <limits>

#include "both_sides.cuh"

namespace {

using namespace both_sides;
using namespace freekv;
using namespace freekv::detail;

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

/// Units `first` .. `last` of so many rows, in random order; in one some numbers are infinite, or NaN, or
/// overflow.
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

/// Units scored token by token: by the shared body on one team, and by a block.
template <class Summary>
__global__ void score_units_by_body(Summary summary, kv_extent unit, const std::byte* rows, int bytes,
                                    const std::int32_t* row_of, int first, int last, prepared_queries queries,
                                    float* scores, std::int64_t stride, float* numbers) {
  const auto of_head = summary_at(summary, 0, 0);
  for (int j = first; j < last; ++j) {
    score_unit<half>(device::lane_team<8, 1>{}, of_head, unit, rows + row_of[j] * bytes, queries, numbers,
                     {scores + j, stride});
    __syncwarp(0xffu);
  }
}
template <class Summary>
__global__ void score_units_by_block(Summary summary, kv_extent unit, const std::byte* rows, int bytes,
                                     const std::int32_t* row_of, int first, int last,
                                     prepared_queries queries, float* scores, std::int64_t stride,
                                     std::int32_t* not_finite) {
  extern __shared__ __align__(16) float shared[];
  const bool bad = device::score_units_by_tokens<32>(
      summary, unit, rows, bytes, [&](int j) { return row_of[j]; }, first, last, queries, scores, stride,
      shared);
  if (bad) atomicOr(not_finite, 1);
}
/// Units `first` .. `last` of random bytes, but for scales: of codes in which each stands for something.
template <class Summary, class Scales>
void scored_by_tokens(report& checks, random_numbers& random, const std::string& name, const Summary& summary,
                      kv_extent unit, const Scales& scales_of) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const int rows = 40, bytes = static_cast<int>(summary_bytes<half>(summary, unit));
  const int width = summary.query_width(unit.head_dim);
  for (const int group : {1, 2, 3, 4, 7, 16}) {
    const int first = random.between(0, 50), last = first + random.between(1, most_units), stride = last;
    pinned<std::byte> stored(size(rows * bytes));
    for (std::byte& byte : stored) byte = static_cast<std::byte>(random.below(255));
    for (int row = 0; row < rows; ++row) scales_of(stored.data() + row * bytes);
    pinned<std::int32_t> row_of(size(last), 0);
    for (std::int32_t& row : row_of) row = random.below(rows);
    const pinned<float> queries = random.normals<float>(size(group * width));
    pinned<float> numbers(size(summary.width(unit)));
    results<float> scores(size(group * stride), -9.0f);
    results<std::int32_t> not_finite(1, 0);
    const prepared_queries prepared{queries.data(), width, group, 0.25f};
    score_units_by_body<<<1, 8>>>(summary, unit, stored.data(), bytes, row_of.data(), first, last, prepared,
                                  scores.host.data(), stride, numbers.data());
    const int shared = 4 * device::floats_by_tokens(summary, unit, size(bytes), threads);
    score_units_by_block<<<1, threads, shared>>>(summary, unit, stored.data(), bytes, row_of.data(), first,
                                                 last, prepared, scores.device.data(), stride,
                                                 not_finite.device.data());
    require(cudaGetLastError(), "kernel launch");
    require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    const std::string what = name + ", group " + text(group) + ", units " + text(first) + " to " + text(last);
    checks.close(what, scores, 16);
    checks.equal(what + ": no score that is not finite", not_finite);
  }
  // A token that is not finite is told.
  pinned<std::byte> stored(size(bytes), std::byte{255});
  pinned<std::int32_t> row_of(1, 0);
  pinned<float> queries(size(width), 1.0f);
  queries[size(std::min(width - 1, 255))] = std::numeric_limits<float>::quiet_NaN();
  results<std::int32_t> not_finite(1, 0);
  pinned<float> scores(1);
  not_finite.host[0] = 1;
  score_units_by_block<<<1, threads, 4 * device::floats_by_tokens(summary, unit, size(bytes), threads)>>>(
      summary, unit, stored.data(), bytes, row_of.data(), 0, 1, {queries.data(), width, 1, 0.25f},
      scores.data(), 1, not_finite.device.data());
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  checks.equal(name + ": a score that is not finite", not_finite);
}
template <int Bits>
void scored_by_coefficients(report& checks, random_numbers& random, int rank, int tokens) {
  const key_subspace<dynamic, Bits> summary{.rank = {rank}};
  const int codes = rank * (tokens / 8) * Bits;
  scored_by_tokens(
      checks, random,
      "key_subspace of " + text(rank) + " in " + text(Bits) + " bits, " + text(tokens) + " tokens", summary,
      {tokens, 64}, [&](std::byte* unit) {
        for (int t = 0; t < tokens; ++t) {
          const float scale = std::fabs(random.normal()) / 4;
          std::memcpy(unit + (codes + 3) / 4 * 4 + 4 * t, &scale, sizeof scale);
        }
      });
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
  scored_by_coefficients<3>(checks, random, 24, 32);
  scored_by_coefficients<2>(checks, random, 17, 24);
  scored_by_coefficients<4>(checks, random, 8, 8);
  scored_by_coefficients<8>(checks, random, 9, 16);
  const pinned<float> books(1);
  const auto as_they_are = [](std::byte*) {};
  scored_by_tokens(checks, random, "key_codes<6, 8>, 32 tokens",
                   key_codes<6, 8>{.books = {books.data(), 1, 1, 16, 8, 1, 6, 1}}, {32, 16}, as_they_are);
  scored_by_tokens(checks, random, "key_codes<5, 16>, 8 tokens",
                   key_codes<5, 16>{.books = {books.data(), 1, 1, 16, 16, 1, 5, 1}}, {8, 16}, as_they_are);
  scored_by_tokens(checks, random, "key_codes<6, 8>, 4 tokens",
                   key_codes<6, 8>{.books = {books.data(), 1, 1, 16, 8, 1, 6, 1}}, {4, 16}, as_they_are);
  return checks.finish();
}
