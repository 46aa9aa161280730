// Rotary pairs as the basis of key_subspace, against their definition: whole numbers, so that scores are
// exact.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "../catch.hpp"
#include "../property/random_case.hpp"
#include "basis.hpp"

namespace {

using freekv::rotary_pairs;
using freekv::examples::key_basis;
using tests::dice;

constexpr int head_dim = 16, pairs = head_dim / 2, kv_heads = 2, group = 3;

/// A number of pair `pair` in a row of head_dim.
int number_of(rotary_pairs of, int pair, int nth) {
  return of == rotary_pairs::halves ? pair + nth * pairs : 2 * pair + nth;
}

std::vector<float> whole_numbers(dice& d, int count, int most) {
  std::vector<float> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(static_cast<float>(d.between(-most, most)));
  return numbers;
}

/// Pairs of a KV head by falling agreement, from the definition.
std::vector<int> ordered_pairs(const std::vector<float>& keys, const std::vector<float>& queries, int rows,
                               int head, rotary_pairs of) {
  const int tokens = static_cast<int>(keys.size()) / (kv_heads * head_dim);
  std::vector<double> agreement(pairs);
  for (int row = 0; row < rows; ++row)
    for (int g = 0; g < group; ++g) {
      const float* query = &queries[((row * kv_heads + head) * group + g) * head_dim];
      const int seen = tokens - rows + row + 1;
      const auto best_by = [&](const std::vector<int>& numbers) {
        std::vector<double> scores;
        for (int t = 0; t < seen; ++t) {
          double score = 0.0;
          for (const int i : numbers)
            score += double{query[i]} * double{keys[(t * kv_heads + head) * head_dim + i]};
          scores.push_back(score);
        }
        std::vector<int> order(seen);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return scores[a] > scores[b]; });
        order.resize((seen + 15) / 16);
        std::sort(order.begin(), order.end());
        return order;
      };
      std::vector<int> all(head_dim);
      std::iota(all.begin(), all.end(), 0);
      const std::vector<int> whole = best_by(all);
      for (int pair = 0; pair < pairs; ++pair) {
        const std::vector<int> alone = best_by({number_of(of, pair, 0), number_of(of, pair, 1)});
        std::vector<int> both;
        std::set_intersection(alone.begin(), alone.end(), whole.begin(), whole.end(),
                              std::back_inserter(both));
        agreement[pair] += static_cast<double>(both.size()) / static_cast<double>(whole.size());
      }
    }
  std::vector<int> order(pairs);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return agreement[a] > agreement[b]; });
  return order;
}

void check_rows(const key_basis& basis, int head, const std::vector<int>& order, rotary_pairs of) {
  const auto view = basis.view();
  for (int i = 0; i < head_dim; ++i) CHECK(view.mean(0, head)[i] == 0.0f);
  for (int r = 0; r < view.rank; ++r)
    for (int i = 0; i < head_dim; ++i) {
      const bool whole_pair = r < view.rank / 2 * 2;
      CHECK(view.rows(0, head)[r * head_dim + i] ==
            (whole_pair && i == number_of(of, order[r / 2], r % 2) ? 1.0f : 0.0f));
    }
}

}  // namespace

TEST_CASE("rotary pairs of a basis are those that agree best with whole scores", "[basis]") {
  for (const rotary_pairs of : {rotary_pairs::halves, rotary_pairs::neighbours})
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
      dice d(seed);
      const int tokens = d.between(1, 200), rows = d.between(1, std::min(tokens, 5));
      const auto keys = whole_numbers(d, tokens * kv_heads * head_dim, d.one_of({1, 4, 60}));
      const auto queries = whole_numbers(d, rows * kv_heads * group * head_dim, 5);
      key_basis basis(1, kv_heads, d.between(1, head_dim), head_dim);
      basis.choose_pairs(0, keys, queries, rows, of);
      INFO("seed " << seed << ", " << tokens << " tokens, " << rows << " rows");
      for (int head = 0; head < kv_heads; ++head)
        check_rows(basis, head, ordered_pairs(keys, queries, rows, head, of), of);
    }
}

TEST_CASE("a pair that makes the scores is chosen first", "[basis]") {
  for (const rotary_pairs of : {rotary_pairs::halves, rotary_pairs::neighbours}) {
    dice d(7);
    constexpr int tokens = 300, rows = 4;
    auto keys = whole_numbers(d, tokens * kv_heads * head_dim, 2);
    const auto queries = whole_numbers(d, rows * kv_heads * group * head_dim, 5);
    for (int t = 0; t < tokens; ++t)
      for (int head = 0; head < kv_heads; ++head)
        for (const int nth : {0, 1})
          keys[(t * kv_heads + head) * head_dim + number_of(of, 3 + head, nth)] *= 100.0f;
    key_basis basis(1, kv_heads, 2, head_dim);
    basis.choose_pairs(0, keys, queries, rows, of);
    for (int head = 0; head < kv_heads; ++head) check_rows(basis, head, {3 + head}, of);
  }
}

TEST_CASE("keys that are no numbers, and a prompt without rows, leave a basis of pairs", "[basis]") {
  dice d(9);
  auto keys = whole_numbers(d, 40 * kv_heads * head_dim, 4);
  const auto queries = whole_numbers(d, 2 * kv_heads * group * head_dim, 5);
  for (int i = 0; i < head_dim; ++i) keys[5 * kv_heads * head_dim + i] = NAN;
  keys[6 * kv_heads * head_dim] = std::numeric_limits<float>::infinity();
  for (const int rows : {2, 0}) {
    key_basis basis(1, kv_heads, head_dim, head_dim);
    basis.choose_pairs(0, keys, rows == 0 ? std::span<const float>() : queries, rows, rotary_pairs::halves);
    for (int head = 0; head < kv_heads; ++head) {
      const float* const chosen = basis.view().rows(0, head);
      for (int i = 0; i < head_dim; ++i) {  // each number once
        float sum = 0.0f;
        for (int r = 0; r < head_dim; ++r) sum += chosen[r * head_dim + i];
        CHECK(sum == 1.0f);
      }
    }
  }
}
