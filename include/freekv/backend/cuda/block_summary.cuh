// Summaries that are much work, by a block for each unit, and their queries' preparation: what the policies'
// own bodies do by one team, dealt out to all of a block's, bit for bit the same.
#pragma once

#include <cstdint>
#include <freekv/backend/cuda/lane_team.cuh>
#include <freekv/backend/cuda/thread.cuh>
#include <freekv/core/rounded_sum.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/key_codes.hpp>
#include <freekv/policies/key_subspace.hpp>

namespace freekv::device {

/// All threads of a block as a team, for work that falls apart number by number.
struct block_team : lane_team<1, 1> {
  __device__ int lane() const { return thread_x(); }
  __device__ int lanes() const { return threads_x(); }
  __device__ void sync() const { __syncthreads(); }
};

/// The teams of a block that the bodies of a summary's policy run on: which this is of how many.
struct team_of_block {
  lane_team<8, 1> team;
  int nth = thread_x() / 8, count = threads_x() / 8;
};

/// A vector of `Count` numbers in a team's registers, for its products with rows.
template <int Count>
struct vector_of_team {
  static_assert(Count % 8 == 0);
  lane_team<8, 1> team;
  float x[Count / 8];

  template <class Number>
  __device__ explicit vector_of_team(const Number& number) {
    unroll<Count / 8>([&](auto i) { x[i] = number(8 * i + team.lane()); });
  }
  /// Product with a row, added as a team of 8 adds.
  __device__ float product(const float* row) const {
    float loaded[Count / 8];
    unroll<Count / 8>([&](auto i) { loaded[i] = row[8 * i + team.lane()]; });
    lane_pack<1> product(0.0f);
    unroll<Count / 8>([&](auto i) { product = product + lane_pack<1>(loaded[i]) * lane_pack<1>(x[i]); });
    return team.sum(product);
  }
};

/// Share of a team in a unit's tokens: every `step`-th token from `first` on, and of the work on each its
/// part `part` of `parts`.
struct dealt_tokens {
  int first, step, part, parts;
  __device__ dealt_tokens(const team_of_block& mine, int tokens)
      : first(mine.nth % min(tokens, mine.count)),
        step(min(tokens, mine.count)),
        part(mine.nth / step),
        parts(mine.count / step) {}
};

/// Finds the codes of `count` vectors of coefficients, `stride` apart: `use(vector, nth, code)` on one lane.
/// The first code is one of the first `of_first` centroids. A warp keeps a code's centroids in registers, and
/// has as many vectors as others leave it. As `nearest` does.
template <class Book, class Use>
__device__ void for_nearest(const Book& book, const float* coefficients, int stride, int count, int of_first,
                            const Use& use) {
  constexpr int of_lane = Book::centroids_per_code / 32, most = 8;  // dimensions in registers
  constexpr unsigned all = 0xffffffffu;
  const int warp = thread_x() / 32, lane = thread_x() % 32;
  const int warps = threads_x() / 32, at_once = min(book.codes, warps);
  const int groups = warps / at_once, group = warp / at_once;
  for (int nth = warp % at_once; group < groups && nth < book.codes; nth += at_once) {
    const int used = nth == 0 ? of_first : Book::centroids_per_code;
    const float* const column = book.centroids + nth * book.dims * Book::centroids_per_code + lane;
    float centroids[most][of_lane];
    if (book.dims <= most)
      unroll<most * of_lane>([&](auto i) {
        constexpr int d = i / of_lane, j = i % of_lane;
        centroids[d][j] = d < book.dims ? column[d * Book::centroids_per_code + 32 * j] : 0.0f;
      });
    for (int v = group; v < count; v += groups) {
      const float* const x = coefficients + v * stride + nth * book.dims;
      float distance[of_lane];
      unroll<of_lane>([&](auto j) { distance[j] = 0.0f; });
      const auto add = [&](auto j, float centroid, float of) {
        const float difference = rounded_sum(centroid, -of);
        distance[j] = rounded_sum(distance[j], difference * difference);
      };
      if (book.dims <= most) {
        unroll<most>([&](auto d) {
          if (d >= book.dims) return;
          const float of = x[d];
          unroll<of_lane>([&](auto j) { add(j, centroids[d][j], of); });
        });
      } else {
        for (int d = 0; d < book.dims; ++d)
          unroll<of_lane>([&](auto j) { add(j, column[d * Book::centroids_per_code + 32 * j], x[d]); });
      }
      float least = infinity;
      int where = 0;
      unroll<of_lane>([&](auto j) {
        if (32 * j + lane >= used || !(least > distance[j])) return;
        least = distance[j];
        where = 32 * j + lane;
      });
      for (int other = 16; other > 0; other /= 2) {
        const float theirs = __shfl_xor_sync(all, least, other);
        const int there = __shfl_xor_sync(all, where, other);
        if (theirs < least || (theirs == least && there < where)) {
          least = theirs;
          where = there;
        }
      }
      if (lane == 0) use(v, nth, where);
    }
  }
}

/// Summarises a unit by a block: to `numbers`, as `policy.summarise` does. `coefficients`: a float for each
/// of the unit's.
template <int HeadDim, class Policy>
requires requires(const Policy& subspace) { subspace.policy.rank; }
__device__ void summarise_by_block(const Policy& subspace, const unit_keys& keys, float* numbers, float*) {
  const team_of_block mine{};
  const int tokens = keys.unit.tokens, rank = subspace.policy.rank;
  const dealt_tokens dealt(mine, tokens);
  for (int t = dealt.first; dealt.part < dealt.parts && t < tokens; t += dealt.step) {
    const float* const key = keys.row(t);
    const vector_of_team<HeadDim> from_mean([&](int i) { return rounded_sum(key[i], -subspace.mean[i]); });
    for (int r = dealt.part; r < rank; r += dealt.parts) {
      const float number = from_mean.product(subspace.rows + r * HeadDim);
      if (mine.team.lane() == 0) numbers[r * tokens + t] = number;
    }
  }
  for (int t = thread_x(); t < tokens; t += threads_x()) numbers[rank * tokens + t] = 1.0f;
}
template <int HeadDim, class Policy>
requires requires(const Policy& books) { books.policy.mean_codes; }
__device__ void summarise_by_block(const Policy& books, const unit_keys& keys, float* numbers,
                                   float* coefficients) {
  constexpr int d = HeadDim, centroids = codebook::centroids_per_code;
  const team_of_block mine{};
  const codebook &mean = books.mean, &token = books.token;
  const int tokens = keys.unit.tokens;
  const int thread = thread_x(), threads = threads_x();
  float* const of_token = numbers + mean.codes;  // (codes, tokens)
  float* const decoded = of_token + token.codes * tokens;
  bool finite = true;
#pragma unroll 4
  for (int i = thread; i < tokens * d; i += threads) finite = finite && keys.data[i] * 0.0f == 0.0f;
  if (!__syncthreads_and(finite)) {
    for (int i = thread; i < mean.codes + token.codes * tokens; i += threads) numbers[i] = books.not_finite;
    return;
  }
  const float share = 1.0f / static_cast<float>(tokens);
  for (int i = thread; i < d; i += threads) {
    float sum = keys.data[i];
#pragma unroll 8
    for (int t = 1; t < tokens; ++t) sum = rounded_sum(sum, keys.row(t)[i]);
    decoded[i] = sum * share;
  }
  __syncthreads();
  const vector_of_team<d> of_mean([&](int i) { return rounded_sum(decoded[i], -mean.offset[i]); });
  for (int r = mine.nth; r < mean.codes * mean.dims; r += mine.count) {
    const float number = of_mean.product(mean.rows + r * d);
    if (mine.team.lane() == 0) coefficients[r] = number;
  }
  __syncthreads();
  for_nearest(mean, coefficients, 0, 1, centroids - 1,
              [&](int, int nth, int code) { numbers[nth] = static_cast<float>(code); });
  __syncthreads();
  for (int i = thread; i < d; i += threads) {
    float sum = mean.offset[i];
#pragma unroll 8
    for (int r = 0; r < mean.codes * mean.dims; ++r) {
      const int code = static_cast<int>(numbers[r / mean.dims]);
      sum = rounded_sum(sum, mean.rows[r * d + i] * mean.centroids[r * centroids + code]);
    }
    decoded[i] = sum;
  }
  __syncthreads();
  const dealt_tokens dealt(mine, tokens);
  for (int t = dealt.first; dealt.part < dealt.parts && t < tokens; t += dealt.step) {
    const float* const key = keys.row(t);
    const vector_of_team<d> from_mean(
        [&](int i) { return rounded_sum(rounded_sum(key[i], -decoded[i]), -token.offset[i]); });
    for (int r = dealt.part; r < token.codes * token.dims; r += dealt.parts) {
      const float number = from_mean.product(token.rows + r * d);
      if (mine.team.lane() == 0) coefficients[t * d + r] = number;
    }
  }
  __syncthreads();
  for_nearest(token, coefficients, d, tokens, centroids,
              [&](int t, int nth, int code) { of_token[nth * tokens + t] = static_cast<float>(code); });
}

/// Tabulates, for each code of a book, the products of a query's coefficients with all its centroids, by a
/// block. `coefficients`: shared memory for as many as the book's rows.
template <int HeadDim>
__device__ void tabulate_by_block(const codebook& book, const float* query, float* coefficients,
                                  float* table) {
  const team_of_block mine{};
  constexpr int centroids = codebook::centroids_per_code, at_once = 8;
  const vector_of_team<HeadDim> of_query([&](int i) { return query[i]; });
  for (int r = mine.nth; r < book.codes * book.dims; r += mine.count) {
    const float number = of_query.product(book.rows + r * HeadDim);
    if (mine.team.lane() == 0) coefficients[r] = number;
  }
  __syncthreads();
  for (int i = thread_x(); i < book.codes * centroids; i += threads_x()) {
    const int first = i / centroids * book.dims;
    const float* const column = book.centroids + first * centroids + i % centroids;
    float sum = 0.0f;
    for (int begin = 0; begin < book.dims; begin += at_once) {
      float loaded[at_once];
      unroll<at_once>([&](auto n) { loaded[n] = column[min(begin + n, book.dims - 1) * centroids]; });
      unroll<at_once>([&](auto n) {
        const float product = coefficients[first + min(begin + n, book.dims - 1)] * loaded[n];
        if (begin + n < book.dims) sum = begin + n == 0 ? product : rounded_sum(sum, product);
      });
    }
    table[i] = sum;
  }
  __syncthreads();
}

/// A summary that a block summarises and prepares queries for.
template <class Summary>
struct block_summary {
  static constexpr bool there = false, prepares = false;
};
template <int Rank, int Bits>
struct block_summary<key_subspace<Rank, Bits>> {
  static constexpr bool there = true, prepares = false;
};
template <int Codes, int MeanCodes>
struct block_summary<key_codes<Codes, MeanCodes>> {
  using policy = typename key_codes<Codes, MeanCodes>::head_policy;
  static constexpr bool there = true, prepares = true;
  /// Prepares one query by a block. `coefficients`: head_dim floats of shared memory.
  template <int HeadDim>
  __device__ static void prepare(const policy& books, const float* query, float* coefficients,
                                 float* prepared) {
    tabulate_by_block<HeadDim>(books.mean, query, coefficients, prepared);
    tabulate_by_block<HeadDim>(books.token, query, coefficients,
                               prepared + books.mean.codes * codebook::centroids_per_code);
    if (threadIdx.x == 0) prepared[static_cast<int>(policy::not_finite)] = NAN;
  }
};

}  // namespace freekv::device
